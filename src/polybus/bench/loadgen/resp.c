/* RESP, the protocol of redis: PUBLISH and SUBSCRIBE, pipelined. */
#include "loadgen.h"

#include <string.h>

struct element {
    const char *bytes;
    size_t count;
};

static size_t hello(char *out, enum role role, int number) {
    (void)number;
    char name[TOPIC_BYTES + 1];
    if (role == PUBLISHER)
        return 0;
    size_t at = append_text(out, 0, "*%d\r\n$9\r\nSUBSCRIBE\r\n", options.topics + 1);
    for (int topic = 0; topic < options.topics; topic++) {
        topic_name(name, topic);
        at = append_text(out, at, "$%d\r\n%s\r\n", TOPIC_BYTES, name);
    }
    return at;
}

static int ready_answers(int number) {
    (void)number;
    return 0;
}

static size_t publish(char *out, const char *topic, const char *payload, int number,
                      size_t *payload_at, size_t *id_at) {
    (void)number, (void)id_at;
    *payload_at = append_text(out, 0, "*3\r\n$7\r\nPUBLISH\r\n$%d\r\n%s\r\n$%zu\r\n", TOPIC_BYTES,
                              topic, options.payload_bytes);
    size_t at = append(out, *payload_at, payload, options.payload_bytes);
    return append(out, at, "\r\n", 2);
}

/* A line `<type>123\r\n` at `*at`; moves past it. 1: read, 0: incomplete, -1: invalid. */
static int number_line(const char *in, size_t bytes, size_t *at, size_t *number) {
    size_t look = *at + 1;
    *number = 0;
    while (look < bytes && in[look] >= '0' && in[look] <= '9')
        *number = *number * 10 + (size_t)(in[look++] - '0');
    if (look + 1 >= bytes)
        return 0;
    *at = look + 2;
    return in[look] == '\r' && *number <= PAYLOAD_BYTES_MAX ? 1 : -1;
}

static int element(const char *in, size_t bytes, size_t *at, struct element *found) {
    size_t number;
    if (*at >= bytes)
        return 0;
    char type = in[*at];
    int outcome = number_line(in, bytes, at, &number);
    if (outcome <= 0 || type == ':')
        return outcome;
    if (type != '$')
        return -1;
    if (bytes < *at + number + 2)
        return 0;
    found->bytes = in + *at;
    found->count = number;
    *at += number + 2;
    return 1;
}

static long parse(const char *in, size_t bytes, struct received *received) {
    struct element elements[3] = {{0}};
    size_t at = 0, count;
    if (in[0] == '-' || in[0] == '+') {
        const char *end = memchr(in, '\n', bytes);
        received->kind = in[0] == '-' ? FAILURE : OTHER;
        received->payload = in;
        received->payload_bytes = end ? (size_t)(end - in) : 0;
        return end ? end + 1 - in : 0;
    }
    int outcome = number_line(in, bytes, &at, &count);
    if (outcome <= 0 || in[0] == ':')
        return outcome <= 0 ? outcome : (long)at;
    if (in[0] != '*' || count != 3)
        return -1;
    for (size_t number = 0; number < 3; number++) {
        outcome = element(in, bytes, &at, &elements[number]);
        if (outcome <= 0)
            return outcome;
    }
    if (elements[0].count == 7 && !memcmp(elements[0].bytes, "message", 7)) {
        received->kind = MESSAGE;
        received->topic = elements[1].bytes;
        received->topic_bytes = elements[1].count;
        received->payload = elements[2].bytes;
        received->payload_bytes = elements[2].count;
    }
    return (long)at;
}

const struct protocol resp = {"resp", hello, ready_answers, publish, parse, false};
