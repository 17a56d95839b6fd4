/* Connections: open, send all, and read once into a buffer for the parser. */
#include "loadgen.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

void connection_open(struct connection *connection, int port, size_t in_bytes_max) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int yes = 1;
    inet_pton(AF_INET, options.host, &address.sin_addr);
    connection->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connection->fd < 0) {
        fail("cannot open a socket: %s (see `ulimit -n`)", strerror(errno));
        return;
    }
    if (connect(connection->fd, (struct sockaddr *)&address, sizeof address)) {
        fail("cannot connect to %s:%d: %s", options.host, port, strerror(errno));
        return;
    }
    setsockopt(connection->fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    connection->in = checked_alloc(in_bytes_max);
    connection->in_bytes = 0;
    connection->in_bytes_max = in_bytes_max;
}

bool connection_send(struct connection *connection, const char *bytes, size_t count) {
    while (count && !failed()) {
        ssize_t sent = send(connection->fd, bytes, count, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent > 0) {
            bytes += sent;
            count -= (size_t)sent;
        } else if (errno == EAGAIN) {
            struct pollfd writable = {.fd = connection->fd, .events = POLLOUT};
            poll(&writable, 1, 100);
            if (past_deadline())
                fail("the broker did not read for too long");
        } else {
            fail("cannot send: %s", strerror(errno));
        }
    }
    return !count;
}

bool connection_receive(struct connection *connection, take_fn *take, void *context) {
    ssize_t count = recv(connection->fd, connection->in + connection->in_bytes,
                         connection->in_bytes_max - connection->in_bytes, MSG_DONTWAIT);
    if (count <= 0)
        return count < 0 && errno == EAGAIN;
    /* After the read: it may return what was sent just before it. */
    connection->read_ns = now_ns();
    connection->in_bytes += (size_t)count;
    size_t used = 0;
    while (used < connection->in_bytes && !failed()) {
        struct received received = {.kind = OTHER};
        long size = options.protocol->parse(connection->in + used, connection->in_bytes - used,
                                            &received);
        if (size == 0)
            break;
        if (size < 0) {
            size_t shown = connection->in_bytes - used < 40 ? connection->in_bytes - used : 40;
            fail("not %s: %.*s", options.protocol->name, (int)shown, connection->in + used);
            break;
        }
        if (received.kind == FAILURE)
            fail("the broker answered: %.*s", (int)received.payload_bytes, received.payload);
        take(context, &received);
        used += (size_t)size;
    }
    connection->in_bytes -= used;
    memmove(connection->in, connection->in + used, connection->in_bytes);
    if (connection->in_bytes == connection->in_bytes_max)
        fail("a message of more than %zu bytes came back", connection->in_bytes_max);
    return true;
}

bool wait_readable(int fd, int timeout_ms) {
    struct pollfd readable = {.fd = fd, .events = POLLIN};
    return poll(&readable, 1, timeout_ms) > 0;
}
