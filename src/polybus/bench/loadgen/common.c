/* Time, the server's CPU and memory from /proc, and the first failure. */
#include "loadgen.h"

#include <glob.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t failure_lock = PTHREAD_MUTEX_INITIALIZER;
static char failure[512];
static atomic_bool has_failed;

int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

void fail(const char *format, ...) {
    va_list arguments;
    pthread_mutex_lock(&failure_lock);
    if (!failure[0]) {
        va_start(arguments, format);
        vsnprintf(failure, sizeof failure, format, arguments);
        va_end(arguments);
    }
    pthread_mutex_unlock(&failure_lock);
    atomic_store(&has_failed, true);
}

bool failed(void) { return atomic_load_explicit(&has_failed, memory_order_relaxed); }

bool past_deadline(void) {
    static int64_t started;
    if (!started)
        started = now_ns();
    return now_ns() - started > (int64_t)(options.deadline_s * 1e9);
}

const char *failure_text(void) { return failure; }

const char *failure_json(void) {
    static char json[2 * sizeof failure + 3];
    size_t at = 0;
    if (!failed())
        return "null";
    json[at++] = '"';
    for (const char *from = failure; *from; from++) {
        unsigned char byte = (unsigned char)*from;
        if (byte == '"' || byte == '\\')
            json[at++] = '\\';
        json[at++] = byte < 0x20 || byte > 0x7e ? '?' : (char)byte;
    }
    json[at++] = '"';
    json[at] = 0;
    return json;
}

void *checked_alloc(size_t bytes) {
    void *memory = calloc(1, bytes ? bytes : 1);
    if (!memory) {
        fprintf(stderr, "loadgen: out of memory (%zu bytes)\n", bytes);
        exit(2);
    }
    return memory;
}

static double seconds(struct timeval time) { return (double)time.tv_sec + 1e-6 * time.tv_usec; }

double own_cpu_s(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

/* CPU time of a process and of the children it has waited for. Its own is known to a nanosecond,
 * theirs to a tick. */
static double process_cpu_s(int pid) {
    char path[64], line[1024];
    long children_user = 0, children_system = 0;
    clockid_t clock;
    struct timespec own = {0, 0};
    if (!clock_getcpuclockid(pid, &clock))
        clock_gettime(clock, &own);
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file)
        return 0;
    size_t count = fread(line, 1, sizeof line - 1, file);
    fclose(file);
    line[count] = 0;
    /* The name in parentheses may hold anything; the numbers begin after the last one. */
    const char *numbers = strrchr(line, ')');
    if (!numbers ||
        sscanf(numbers + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %ld %ld",
               &children_user, &children_system) != 2)
        return 0;
    return (double)own.tv_sec + 1e-9 * (double)own.tv_nsec +
           (double)(children_user + children_system) / (double)sysconf(_SC_CLK_TCK);
}

/* Of the server and its child processes: background work counts too. */
double server_cpu_s(void) {
    char pattern[64];
    glob_t tasks;
    int child;
    double sum = options.server_pid ? process_cpu_s(options.server_pid) : 0;
    snprintf(pattern, sizeof pattern, "/proc/%d/task/*/children", options.server_pid);
    if (!options.server_pid || glob(pattern, GLOB_NOSORT, NULL, &tasks))
        return sum;
    for (size_t task = 0; task < tasks.gl_pathc; task++) {
        FILE *file = fopen(tasks.gl_pathv[task], "r");
        while (file && fscanf(file, "%d", &child) == 1)
            sum += process_cpu_s(child);
        if (file)
            fclose(file);
    }
    globfree(&tasks);
    return sum;
}

long server_rss_kib(void) {
    char path[64], line[256];
    long kib = 0;
    snprintf(path, sizeof path, "/proc/%d/status", options.server_pid);
    FILE *file = fopen(path, "r");
    if (!file)
        return 0;
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "VmRSS: %ld kB", &kib) == 1)
            break;
    fclose(file);
    return kib;
}
