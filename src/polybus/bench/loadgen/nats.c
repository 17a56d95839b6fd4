/* NATS, and JetStream on top of it: a publish that names an inbox, where the stream answers.
 *
 * The answer to `PUB bench.0000 _INBOX.0000.0000001f 100` is
 * `MSG _INBOX.0000.0000001f 1 30` and `{"stream":"bench", "seq":32}`.
 */
#include "loadgen.h"

#include <stdlib.h>
#include <string.h>

#define CONNECT "CONNECT {\"verbose\":false,\"pedantic\":false,\"name\":\"polybus-bench\"}\r\n"
static const char STREAM[] =
    "{\"name\":\"bench\",\"subjects\":[\"bench.*\"],\"storage\":\"file\","
    "\"retention\":\"limits\",\"max_consumers\":-1,\"max_msgs\":-1,\"max_bytes\":-1,"
    "\"max_age\":0,\"num_replicas\":%d}";
enum { INBOX_BYTES = 12 /* "_INBOX.0000." */ };

static size_t hello(char *out, enum role role, int number) {
    (void)number;
    char name[TOPIC_BYTES + 1];
    size_t at = append_text(out, 0, CONNECT);
    for (int topic = 0; role == SUBSCRIBER && topic < options.topics; topic++) {
        topic_name(name, topic);
        at = append_text(out, at, "SUB %s %d\r\n", name, topic + 1);
    }
    return append_text(out, at, "PING\r\n");
}

static size_t jetstream_hello(char *out, enum role role, int number) {
    size_t at = hello(out, role, number);
    if (role == PUBLISHER) {
        at = append_text(out, at, "SUB _INBOX.%04d.* 1\r\nSUB _SETUP.%04d 2\r\n", number, number);
        if (number == 0) {
            char stream[sizeof(STREAM) + 16];
            size_t bytes = append_text(stream, 0, STREAM, options.replicas);
            at = append_text(out, at, "PUB $JS.API.STREAM.CREATE.bench _SETUP.0000 %zu\r\n%s\r\n",
                             bytes, stream);
        }
    }
    return at;
}

static int ready_answers(int number) {
    (void)number;
    return 1; /* PONG */
}

static int jetstream_ready_answers(int number) {
    return number ? 1 : 2; /* PONG, and that the stream is there */
}

static size_t publish(char *out, const char *topic, const char *payload, int number,
                      size_t *payload_at, size_t *id_at) {
    size_t at = append_text(out, 0, "PUB %s ", topic);
    if (options.receipts) {
        at = append_text(out, at, "_INBOX.%04d.", number);
        *id_at = at;
        at = append_text(out, at, "%08x ", PROBE_ID);
    }
    *payload_at = append_text(out, at, "%zu\r\n", options.payload_bytes);
    at = append(out, *payload_at, payload, options.payload_bytes);
    return append(out, at, "\r\n", 2);
}

static long parse_message(const char *in, size_t bytes, const char *end,
                          struct received *received) {
    const char *subject = in + 4;
    const char *subject_end = memchr(subject, ' ', (size_t)(end - subject));
    size_t payload_bytes = 0, scale = 1;
    const char *digit = end;
    if (!subject_end)
        return -1;
    /* The size is the last word; the words between are our subscription's number and an inbox. */
    while (digit > subject_end && digit[-1] != ' ') {
        payload_bytes += (size_t)(*--digit - '0') * scale;
        scale *= 10;
    }
    if (payload_bytes > PAYLOAD_BYTES_MAX)
        return -1;
    size_t size = (size_t)(end + 2 - in) + payload_bytes + 2;
    if (bytes < size)
        return 0;
    received->kind = MESSAGE;
    received->topic = subject;
    received->topic_bytes = (size_t)(subject_end - subject);
    received->payload = end + 2;
    received->payload_bytes = payload_bytes;
    return (long)size;
}

static long parse(const char *in, size_t bytes, struct received *received) {
    const char *end = memchr(in, '\r', bytes);
    if (!end || end + 1 == in + bytes)
        return 0;
    if (in[0] == 'M')
        return parse_message(in, bytes, end, received);
    if (!memcmp(in, "PONG", 4)) {
        received->kind = READY;
    } else if (in[0] == '-') {
        received->kind = FAILURE;
        received->payload = in;
        received->payload_bytes = (size_t)(end - in);
    }
    return end + 2 - in; /* INFO, PING and +OK need no answer in a run this short */
}

static long jetstream_parse(const char *in, size_t bytes, struct received *received) {
    long size = parse(in, bytes, received);
    if (size <= 0 || received->kind != MESSAGE || received->topic[0] != '_')
        return size;
    uint64_t id;
    bool setup = received->topic[1] == 'S';
    if (memmem(received->payload, received->payload_bytes, "\"error\"", 7))
        received->kind = FAILURE;
    else if (setup)
        received->kind = READY;
    else if (received->topic_bytes == INBOX_BYTES + ID_BYTES &&
             hex_read(received->topic + INBOX_BYTES, ID_BYTES, &id)) {
        received->kind = RECEIPT;
        received->id = (uint32_t)id;
    } else
        return -1;
    return size;
}

const struct protocol nats = {"nats", hello, ready_answers, publish, parse, false};
const struct protocol jetstream = {"jetstream", jetstream_hello, jetstream_ready_answers,
                                   publish,     jetstream_parse, true};
