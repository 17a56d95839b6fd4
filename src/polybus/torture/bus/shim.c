/*
 * A library for LD_PRELOAD that stands between a bus and its disk and clock.
 *
 * It sees every change that the bus and its hand-over process make to regular files and folders
 * below one folder. The file named by TORTURE_CONTROL, mapped by all processes and by the
 * campaign (control.py has the same layout), tells it what to do: fail operations, kill the
 * process or cut the power before operation N, shift the clock.
 *
 * With a `log` it also records each change, so that the campaign can undo what no fsync covers
 * (cuts.py). A write is recorded before it is done, with the bytes it overwrites; a change of a
 * name after it is done. The graveyard has a hard link to every file that was ever changed, named
 * by its inode, so content survives the removal of its name and inodes are not used again.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define PATH_BYTES 1024
#define DESCRIPTORS 65536
#define LOG_DESCRIPTOR 900

enum { OPEN = 1, WRITE = 2, SYNC = 4, NAME = 8, TRUNCATE = 16, READ = 32 };
enum { KILL_SELF = 0, CUT_POWER = -1 };
enum { GO_ON = 0, WRITE_PART = -1, WRITE_PART_AND_DIE = -2 };

struct control {
    char root[PATH_BYTES], log[PATH_BYTES], graveyard[PATH_BYTES], pattern[PATH_BYTES];
    char end_pattern[PATH_BYTES]; /* Only operations on such paths count for the end. */
    _Atomic int64_t clock_ns;
    _Atomic int64_t operations;
    _Atomic int64_t end_at; /* The operation before which the end comes, or 0. */
    _Atomic int64_t end_how; /* The process to kill with this one, KILL_SELF or CUT_POWER. */
    _Atomic int64_t end_torn; /* Do half of the write first. */
    _Atomic int64_t off; /* The power is off: no operation ends. */
    _Atomic int64_t error; /* What operations fail with, or 0. */
    _Atomic int64_t error_mask, error_after, error_count, error_partial, error_matches;
    _Atomic int64_t syncs;
    _Atomic int64_t end_matches;
};

struct record {
    uint32_t size, kind;
    uint64_t a, b;
    int64_t offset, length;
};

static struct control *ctl;
static size_t root_bytes;
static unsigned char ours[DESCRIPTORS];
static int (*real_clock)(clockid_t, struct timespec *);

/* A process that was forked from one without a control gets its own here. */
void torture_attach(const char *path) {
    int fd = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0) : -1;
    if (fd < 0) return;
    void *found = mmap(NULL, sizeof *ctl, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (found == MAP_FAILED) return;
    root_bytes = strlen(((struct control *)found)->root);
    ctl = found;
}

__attribute__((constructor)) static void prepare(void) {
    real_clock = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    torture_attach(getenv("TORTURE_CONTROL"));
}

/* Where a name is. */

enum { ELSEWHERE = 0, BELOW = 1, ROOT = 2 };

static int place_of(const char *path) {
    if (strncmp(path, ctl->root, root_bytes)) return ELSEWHERE;
    if (!path[root_bytes]) return ROOT;
    /* No crash needs to keep the shared memory of SQLite. */
    return path[root_bytes] == '/' && !strstr(path, "-shm") ? BELOW : ELSEWHERE;
}

static int path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t bytes = readlink(link, path, PATH_BYTES - 1);
    path[bytes < 0 ? 0 : bytes] = 0;
    return bytes > 0;
}

/* The whole path of a name, and its place. */
static int resolve(int folder, const char *name, char *path) {
    if (!ctl || !name) return 0;
    if (name[0] != '/') {
        if (folder == AT_FDCWD || !path_of(folder, path)) return 0;
        size_t bytes = strlen(path);
        if (bytes + strlen(name) + 2 > PATH_BYTES) return 0;
        snprintf(path + bytes, PATH_BYTES - bytes, "/%s", name);
    } else if (strlen(name) < PATH_BYTES) {
        strcpy(path, name);
    } else {
        return 0;
    }
    return place_of(path);
}

static uint64_t folder_of(const char *path, const char **name) {
    char parent[PATH_BYTES];
    struct stat status;
    *name = strrchr(path, '/') + 1;
    snprintf(parent, sizeof parent, "%.*s", (int)(*name - 1 - path), path);
    return stat(parent, &status) ? 0 : status.st_ino;
}

/* A descriptor of ours; one that was closed may have become a socket since. */
static int is_ours(int fd, struct stat *status) {
    if (!ctl || fd < 0 || fd >= DESCRIPTORS || !ours[fd]) return 0;
    if (!fstat(fd, status) && (S_ISREG(status->st_mode) || S_ISDIR(status->st_mode))) return 1;
    ours[fd] = 0;
    return 0;
}

/* What happens instead of an operation. */

static void end(void) {
    int64_t how = ctl->end_how;
    if (how == CUT_POWER) {
        ctl->off = 1;
        for (;;) pause();
    }
    if (how > 0) kill((pid_t)how, SIGKILL);
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

static int fault_of(int operation, int fd, const char *path) {
    char found[PATH_BYTES];
    if (!ctl->error || !(ctl->error_mask & operation)) return GO_ON;
    if (!path) path = path_of(fd, found) ? found : "";
    if (strncmp(path, ctl->root, root_bytes)) return GO_ON;
    if (fnmatch(ctl->pattern, path + root_bytes + 1, 0)) return GO_ON;
    int64_t match = ctl->error_matches++ - ctl->error_after;
    if (match < 0 || match >= ctl->error_count) return GO_ON;
    return match == 0 && ctl->error_partial && operation == WRITE ? WRITE_PART : (int)ctl->error;
}

/* Whether the end comes before this operation: one of all, or of those on matching paths. */
static int is_end(int fd, const char *path) {
    char found[PATH_BYTES];
    int64_t number = ++ctl->operations;
    if (!ctl->end_pattern[0] || !ctl->end_at) return number == ctl->end_at;
    if (!path) path = path_of(fd, found) ? found : "";
    if (strncmp(path, ctl->root, root_bytes)) return 0;
    if (fnmatch(ctl->end_pattern, path + root_bytes + 1, 0)) return 0;
    return ++ctl->end_matches == ctl->end_at;
}

/* Called before every change: GO_ON, an error number, or a part of a write. */
static int before(int operation, int fd, const char *path) {
    if (ctl->off)
        for (;;) pause();
    if (is_end(fd, path)) {
        if (!ctl->end_torn || operation != WRITE) end();
        return WRITE_PART_AND_DIE;
    }
    return fault_of(operation, fd, path);
}

static int failed(int error) {
    errno = error;
    return -1;
}

/* The record of what happened. */

static int log_descriptor(void) {
    static int log = -1;
    if (log < 0) {
        int flags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC;
        int fd = (int)syscall(SYS_openat, AT_FDCWD, ctl->log, flags, 0600);
        log = fcntl(fd, F_DUPFD_CLOEXEC, LOG_DESCRIPTOR);
        syscall(SYS_close, fd);
    }
    return log;
}

static void note(int kind, uint64_t a, uint64_t b, int64_t offset, int64_t length,
                 const void *data, size_t bytes) {
    if (!ctl->log[0]) return;
    int kept = errno;
    struct record head = {(uint32_t)(sizeof head + bytes), (uint32_t)kind, a, b, offset, length};
    struct iovec parts[] = {{&head, sizeof head}, {(void *)data, bytes}};
    syscall(SYS_writev, log_descriptor(), parts, 2);
    errno = kept;
}

static void bury(const char *path, uint64_t inode) {
    char grave[PATH_BYTES + 32];
    int kept = errno;
    if (!ctl->log[0]) return;
    snprintf(grave, sizeof grave, "%s/%llu", ctl->graveyard, (unsigned long long)inode);
    syscall(SYS_linkat, AT_FDCWD, path, AT_FDCWD, grave, 0);
    errno = kept;
}

/* Note a write or truncation, with the bytes that it overwrites or cuts off. */
static void note_bytes(int kind, const struct stat *status, int64_t offset, int64_t length) {
    char grave[PATH_BYTES + 32];
    int64_t stop = kind == 'T' ? status->st_size : offset + length;
    if (stop > status->st_size) stop = status->st_size;
    char *old = NULL;
    ssize_t bytes = 0;
    if (!ctl->log[0]) return;
    if (stop > offset && (old = malloc((size_t)(stop - offset)))) {
        unsigned long long inode = status->st_ino;
        snprintf(grave, sizeof grave, "%s/%llu", ctl->graveyard, inode);
        int fd = (int)syscall(SYS_openat, AT_FDCWD, grave, O_RDONLY | O_CLOEXEC, 0);
        if (fd >= 0) {
            bytes = syscall(SYS_pread64, fd, old, (size_t)(stop - offset), offset);
            syscall(SYS_close, fd);
        }
    }
    note(kind, status->st_ino, (uint64_t)status->st_size, offset, length, old,
         bytes > 0 ? (size_t)bytes : 0);
    free(old);
}

static void note_name(int kind, const char *path, uint64_t inode) {
    const char *name;
    uint64_t folder = folder_of(path, &name);
    note(kind, folder, inode, 0, 0, name, strlen(name));
}

/* Opening. */

static int open_any(int folder, const char *name, int flags, mode_t mode) {
    char path[PATH_BYTES];
    struct stat status;
    int place = resolve(folder, name, path), existed = 1;
    if (place == BELOW && ((flags & O_ACCMODE) != O_RDONLY || flags & O_CREAT)) {
        int error = before(OPEN, -1, path);
        if (error > 0) return failed(error);
        existed = !stat(path, &status);
        if (existed && S_ISREG(status.st_mode)) {
            bury(path, status.st_ino);
            if (flags & O_TRUNC && status.st_size) note_bytes('T', &status, 0, 0);
        }
    }
    int fd = (int)syscall(SYS_openat, folder, name, flags, mode);
    if (fd < 0 || fd >= DESCRIPTORS) return fd;
    ours[fd] = place != ELSEWHERE;
    if (!existed && !fstat(fd, &status)) {
        bury(path, status.st_ino);
        note_name('C', path, status.st_ino);
    }
    return fd;
}

static mode_t mode_of(int flags, va_list more) {
    return flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;
}

#define OPENER(function, parameters, folder)            \
    int function parameters {                           \
        va_list more;                                   \
        va_start(more, flags);                          \
        mode_t mode = mode_of(flags, more);             \
        va_end(more);                                   \
        return open_any(folder, name, flags, mode);     \
    }
OPENER(open, (const char *name, int flags, ...), AT_FDCWD)
OPENER(open64, (const char *name, int flags, ...), AT_FDCWD)
OPENER(openat, (int folder, const char *name, int flags, ...), folder)
OPENER(openat64, (int folder, const char *name, int flags, ...), folder)
int creat(const char *name, mode_t mode) {
    return open_any(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode);
}

/* Writing. A position of -1 is the descriptor's own. */

static ssize_t write_any(int fd, const struct iovec *parts, int count, off_t position) {
    struct stat status;
    struct iovec half;
    int verdict = GO_ON;
    if (is_ours(fd, &status) && S_ISREG(status.st_mode)) {
        verdict = before(WRITE, fd, NULL);
        if (verdict > 0) return failed(verdict);
        if (verdict < 0 && count) {
            half = (struct iovec){parts[0].iov_base, (parts[0].iov_len + 1) / 2};
            parts = &half;
            count = 1;
        }
        int64_t bytes = 0, offset = position;
        for (int i = 0; i < count; i++) bytes += (int64_t)parts[i].iov_len;
        if (fcntl(fd, F_GETFL) & O_APPEND) offset = status.st_size;
        else if (position < 0) offset = lseek(fd, 0, SEEK_CUR);
        note_bytes('W', &status, offset, bytes);
    }
    ssize_t done = position < 0 ? syscall(SYS_writev, fd, parts, count)
                                : syscall(SYS_pwritev, fd, parts, count, position, 0);
    if (verdict == WRITE_PART_AND_DIE) end();
    return done;
}

static int passes(int fd) { return !ctl || fd < 0 || fd >= DESCRIPTORS || !ours[fd]; }

ssize_t write(int fd, const void *data, size_t bytes) {
    if (passes(fd)) return syscall(SYS_write, fd, data, bytes);
    return write_any(fd, &(struct iovec){(void *)data, bytes}, 1, -1);
}
ssize_t pwrite(int fd, const void *data, size_t bytes, off_t position) {
    if (passes(fd)) return syscall(SYS_pwrite64, fd, data, bytes, position);
    return write_any(fd, &(struct iovec){(void *)data, bytes}, 1, position);
}
ssize_t pwrite64(int fd, const void *data, size_t bytes, off_t position) {
    return pwrite(fd, data, bytes, position);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    return write_any(fd, parts, count, -1);
}
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t position) {
    return write_any(fd, parts, count, position);
}
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off_t position) {
    return write_any(fd, parts, count, position);
}

/* Reading changes nothing, and may fail. */

static int cannot_read(int fd) {
    struct stat status;
    if (passes(fd) || !(ctl->error_mask & READ) || !is_ours(fd, &status)) return 0;
    int error = S_ISREG(status.st_mode) ? fault_of(READ, fd, NULL) : 0;
    return error ? failed(error) : 0;
}
ssize_t read(int fd, void *data, size_t bytes) {
    return cannot_read(fd) ? -1 : syscall(SYS_read, fd, data, bytes);
}
ssize_t pread(int fd, void *data, size_t bytes, off_t position) {
    return cannot_read(fd) ? -1 : syscall(SYS_pread64, fd, data, bytes, position);
}
ssize_t pread64(int fd, void *data, size_t bytes, off_t position) {
    return pread(fd, data, bytes, position);
}
ssize_t readv(int fd, const struct iovec *parts, int count) {
    return cannot_read(fd) ? -1 : syscall(SYS_readv, fd, parts, count);
}
ssize_t preadv(int fd, const struct iovec *parts, int count, off_t position) {
    return cannot_read(fd) ? -1 : syscall(SYS_preadv, fd, parts, count, position, 0);
}

int ftruncate(int fd, off_t size) {
    struct stat status;
    if (is_ours(fd, &status)) {
        int error = before(TRUNCATE, fd, NULL);
        if (error > 0) return failed(error);
        note_bytes('T', &status, size, 0);
    }
    return (int)syscall(SYS_ftruncate, fd, size);
}
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }

static int sync_any(int fd, long call) {
    struct stat status;
    if (!is_ours(fd, &status)) return (int)syscall(call, fd);
    uint64_t number = (uint64_t)++ctl->syncs;
    int error = before(SYNC, fd, NULL);
    note('s', status.st_ino, number, 0, 0, NULL, 0);
    int done = error > 0 ? failed(error) : (int)syscall(call, fd);
    note(done ? 'F' : 'S', status.st_ino, number, 0, 0, NULL, 0);
    return done;
}
int fsync(int fd) { return sync_any(fd, SYS_fsync); }
int fdatasync(int fd) { return sync_any(fd, SYS_fdatasync); }

/* Names. */

int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
    char source[PATH_BYTES], target[PATH_BYTES], names[2 * PATH_BYTES];
    const char *source_name, *target_name;
    struct stat moved, replaced;
    int is_below = resolve(from, old, source) == BELOW && resolve(to, new, target) == BELOW;
    uint64_t from_folder = 0, to_folder = 0;
    if (is_below) {
        int error = before(NAME, -1, target);
        if (error > 0) return failed(error);
        if (stat(source, &moved)) return -1;
        if (S_ISREG(moved.st_mode)) bury(source, moved.st_ino);
        if (!stat(target, &replaced) && S_ISREG(replaced.st_mode)) bury(target, replaced.st_ino);
        from_folder = folder_of(source, &source_name);
        to_folder = folder_of(target, &target_name);
    }
    int done = (int)syscall(SYS_renameat2, from, old, to, new, flags);
    if (!done && is_below) {
        int bytes = snprintf(names, sizeof names, "%s/%s", source_name, target_name);
        note('R', from_folder, to_folder, (int64_t)moved.st_ino, 0, names, (size_t)bytes);
    }
    return done;
}
int renameat(int from, const char *old, int to, const char *new) {
    return renameat2(from, old, to, new, 0);
}
int rename(const char *old, const char *new) { return renameat(AT_FDCWD, old, AT_FDCWD, new); }

int unlinkat(int folder, const char *name, int flags) {
    char path[PATH_BYTES];
    struct stat status = {0};
    int is_below = resolve(folder, name, path) == BELOW;
    if (is_below) {
        if (lstat(path, &status)) return -1;
        int error = before(NAME, -1, path);
        if (error > 0) return failed(error);
        if (S_ISREG(status.st_mode)) bury(path, status.st_ino);
    }
    int done = (int)syscall(SYS_unlinkat, folder, name, flags);
    if (!done && is_below) note_name('U', path, status.st_ino);
    return done;
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

int mkdirat(int folder, const char *name, mode_t mode) {
    char path[PATH_BYTES];
    struct stat status;
    int is_below = resolve(folder, name, path) == BELOW;
    if (is_below) {
        int error = before(NAME, -1, path);
        if (error > 0) return failed(error);
    }
    int done = (int)syscall(SYS_mkdirat, folder, name, mode);
    if (!done && is_below && !stat(path, &status)) note_name('M', path, status.st_ino);
    return done;
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

int linkat(int from, const char *old, int to, const char *new, int flags) {
    char path[PATH_BYTES];
    struct stat status;
    int is_below = resolve(to, new, path) == BELOW;
    if (is_below) {
        int error = before(NAME, -1, path);
        if (error > 0) return failed(error);
    }
    int done = (int)syscall(SYS_linkat, from, old, to, new, flags);
    if (!done && is_below && !stat(path, &status)) {
        bury(path, status.st_ino);
        note_name('C', path, status.st_ino);
    }
    return done;
}
int link(const char *old, const char *new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }

/* The clock. */

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (!real_clock || real_clock(clock, now)) return (int)syscall(SYS_clock_gettime, clock, now);
    int64_t shift = ctl && clock == CLOCK_REALTIME ? ctl->clock_ns : 0;
    if (shift) {
        int64_t ns = now->tv_nsec + shift % 1000000000;
        now->tv_sec += shift / 1000000000 + (ns < 0 ? -1 : ns / 1000000000);
        now->tv_nsec = ns < 0 ? ns + 1000000000 : ns % 1000000000;
    }
    return 0;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec found;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &found);
    *now = (struct timeval){found.tv_sec, found.tv_nsec / 1000};
    return 0;
}
time_t time(time_t *now) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (now) *now = found.tv_sec;
    return found.tv_sec;
}
