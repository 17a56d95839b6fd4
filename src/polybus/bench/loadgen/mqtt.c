/* MQTT 3.1.1, QoS 0. */
#include "loadgen.h"

#include <string.h>

enum { CONNACK = 2, PUBLISH = 3 };

static size_t append_length(char *out, size_t at, size_t length) {
    do {
        out[at++] = (char)((length & 127) | (length > 127 ? 128 : 0));
        length >>= 7;
    } while (length);
    return at;
}

static size_t append_string(char *out, size_t at, const char *text, size_t bytes) {
    out[at++] = (char)(bytes >> 8);
    out[at++] = (char)bytes;
    return append(out, at, text, bytes);
}

static size_t hello(char *out, enum role role, int number) {
    char name[TOPIC_BYTES + 1];
    size_t name_bytes = append_text(name, 0, "%c%05d", role == PUBLISHER ? 'p' : 's', number);
    size_t at = 0;
    out[at++] = 0x10;
    at = append_length(out, at, 10 + 2 + name_bytes);
    /* protocol name and level 4, a clean session, no keep-alive */
    at = append(out, at, "\0\4MQTT\4\2\0\0", 10);
    at = append_string(out, at, name, name_bytes);
    if (role == PUBLISHER)
        return at;
    out[at++] = (char)0x82;
    at = append_length(out, at, 2 + (2 + TOPIC_BYTES + 1) * (size_t)options.topics);
    at = append(out, at, "\0\1", 2);
    for (int topic = 0; topic < options.topics; topic++) {
        topic_name(name, topic);
        at = append_string(out, at, name, TOPIC_BYTES);
        out[at++] = 0;
    }
    return at;
}

static int ready_answers(int number) {
    (void)number;
    return 1; /* CONNACK */
}

static size_t publish(char *out, const char *topic, const char *payload, int number,
                      size_t *payload_at, size_t *id_at) {
    (void)number, (void)id_at;
    out[0] = 0x30;
    size_t at = append_length(out, 1, 2 + TOPIC_BYTES + options.payload_bytes);
    *payload_at = append_string(out, at, topic, TOPIC_BYTES);
    return append(out, *payload_at, payload, options.payload_bytes);
}

static long parse(const char *in, size_t bytes, struct received *received) {
    const unsigned char *head = (const unsigned char *)in;
    size_t length = 0, at = 1;
    int shift = 0;
    do {
        if (at >= bytes)
            return 0;
        if (shift > 21)
            return -1;
        length |= (size_t)(head[at] & 127) << shift;
        shift += 7;
    } while (head[at++] & 128);
    if (bytes < at + length)
        return 0;
    if (head[0] >> 4 == PUBLISH) {
        size_t topic_bytes = length < 2 ? 0 : (size_t)head[at] << 8 | head[at + 1];
        if (length < 2 + topic_bytes)
            return -1;
        received->kind = MESSAGE;
        received->topic = in + at + 2;
        received->topic_bytes = topic_bytes;
        received->payload = received->topic + topic_bytes;
        received->payload_bytes = length - 2 - topic_bytes;
    } else if (head[0] >> 4 == CONNACK) {
        bool accepted = length == 2 && head[at + 1] == 0;
        received->kind = accepted ? READY : FAILURE;
        received->payload = accepted ? "" : "connection refused";
        received->payload_bytes = strlen(received->payload);
    }
    return (long)(at + length);
}

const struct protocol mqtt = {"mqtt", hello, ready_answers, publish, parse, false};
