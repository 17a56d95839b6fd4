/* `loadgen relay`: forwards bytes from one port to all connections on the other. It parses nothing,
 * so it shows the limit of the machine and the generator. It supports one publisher only, because
 * the bytes of two would mix. A fault (for tests) damages the stream once, at a given byte. */
#include "loadgen.h"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

enum { LISTEN_WRITER, LISTEN_READER, WRITER, POLLED };
enum { READERS_MAX = 64, STRETCH_BYTES_MAX = 64 << 10 };

struct relay {
    struct pollfd polled[POLLED];
    int readers[READERS_MAX];
    int reader_count;
    size_t passed; /* bytes relayed so far */
};

static int listen_on_free_port(int *port) {
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t size = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, size) || listen(fd, 64) ||
        getsockname(fd, (struct sockaddr *)&address, &size)) {
        perror("loadgen relay");
        exit(1);
    }
    *port = ntohs(address.sin_port);
    return fd;
}

static int accept_one(int listener) {
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC), yes = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    return fd;
}

static bool write_all(int fd, const char *bytes, size_t count) {
    while (count) {
        ssize_t sent = send(fd, bytes, count, MSG_NOSIGNAL);
        if (sent <= 0)
            return false;
        bytes += sent;
        count -= (size_t)sent;
    }
    return true;
}

static void forward(struct relay *relay, const char *bytes, size_t count) {
    for (int number = 0; number < relay->reader_count; number++)
        if (!write_all(relay->readers[number], bytes, count)) {
            close(relay->readers[number]);
            relay->readers[number--] = relay->readers[--relay->reader_count];
        }
}

static size_t clipped(size_t at, size_t from, size_t to) {
    return (at < from ? from : at > to ? to : at) - from;
}

/* Forward with a fault: one byte changed, or some bytes left out or sent twice. */
static void forward_faulty(struct relay *relay, char *bytes, size_t count) {
    static char stretch[STRETCH_BYTES_MAX]; /* may lie across two reads */
    char kind[8] = "";
    size_t at = 0, length = 1, end = relay->passed + count;
    sscanf(options.fault, "%7[a-z]:%zu:%zu", kind, &at, &length);
    size_t from = clipped(at, relay->passed, end), to = clipped(at + length, relay->passed, end);
    forward(relay, bytes, from);
    if (!strcmp(kind, "flip") && from < to)
        bytes[from] ^= 1;
    if (strcmp(kind, "drop"))
        forward(relay, bytes + from, to - from);
    if (!strcmp(kind, "repeat") && from < to && length <= STRETCH_BYTES_MAX) {
        memcpy(stretch + (relay->passed + from - at), bytes + from, to - from);
        if (relay->passed + to == at + length)
            forward(relay, stretch, length);
    }
    forward(relay, bytes + to, count - to);
    relay->passed = end;
}

static void relay_read(struct relay *relay) {
    static char bytes[READ_BYTES];
    ssize_t count = recv(relay->polled[WRITER].fd, bytes, sizeof bytes, 0);
    if (count <= 0) {
        close(relay->polled[WRITER].fd);
        relay->polled[WRITER].fd = -1;
    } else if (options.fault) {
        forward_faulty(relay, bytes, (size_t)count);
    } else {
        forward(relay, bytes, (size_t)count);
    }
}

int relay_main(void) {
    struct relay relay = {.polled = {{.events = POLLIN}, {.events = POLLIN}, {.events = POLLIN}}};
    int writer_port, reader_port;
    prctl(PR_SET_PDEATHSIG, SIGTERM); /* ends with its parent */
    relay.polled[LISTEN_WRITER].fd = listen_on_free_port(&writer_port);
    relay.polled[LISTEN_READER].fd = listen_on_free_port(&reader_port);
    relay.polled[WRITER].fd = -1;
    printf("ready %d %d\n", writer_port, reader_port);
    fflush(stdout);
    for (;;) {
        poll(relay.polled, POLLED, -1);
        if (relay.polled[LISTEN_READER].revents && relay.reader_count < READERS_MAX)
            relay.readers[relay.reader_count++] = accept_one(relay.polled[LISTEN_READER].fd);
        else if (relay.polled[LISTEN_WRITER].revents && relay.polled[WRITER].fd < 0)
            relay.polled[WRITER].fd = accept_one(relay.polled[LISTEN_WRITER].fd);
        else if (relay.polled[WRITER].revents)
            relay_read(&relay);
    }
}
