/* Boson frames: int32 content length, int8 flag, uint16 topic length, topic, content.
 * Big-endian. */
#include "loadgen.h"

#include <stdlib.h>
#include <string.h>

enum { HEADER_BYTES = 7 };

static size_t frame(char *out, const char *topic, size_t topic_bytes, size_t content_bytes) {
    out[0] = (char)(content_bytes >> 24), out[1] = (char)(content_bytes >> 16);
    out[2] = (char)(content_bytes >> 8), out[3] = (char)content_bytes;
    out[4] = 0;
    out[5] = (char)(topic_bytes >> 8), out[6] = (char)topic_bytes;
    return append(out, HEADER_BYTES, topic, topic_bytes);
}

/* A token, if connections log in; not an option, because everybody can see those. */
static const char *login(void) {
    const char *token = getenv("LOADGEN_LOGIN");
    return token && *token ? token : NULL;
}

static size_t hello(char *out, enum role role, int number) {
    (void)number;
    size_t at = 0;
    if (login()) {
        at = frame(out, "$login", 6, strlen(login()));
        at = append(out, at, login(), strlen(login()));
    }
    if (role == PUBLISHER)
        return at;
    size_t content_bytes = (TOPIC_BYTES + 1) * (size_t)options.topics;
    at += frame(out + at, "$subscribe", 10, content_bytes);
    for (int topic = 0; topic < options.topics; topic++) {
        topic_name(out + at, topic);
        at += TOPIC_BYTES;
        out[at++] = '\n';
    }
    return at;
}

static int ready_answers(int number) {
    (void)number;
    return login() ? 1 : 0;
}

static size_t publish(char *out, const char *topic, const char *payload, int number,
                      size_t *payload_at, size_t *id_at) {
    (void)number;
    char name[64];
    size_t name_bytes = append(name, 0, topic, TOPIC_BYTES);
    if (options.receipts) {
        name_bytes = append_text(name, name_bytes, "?receipt=");
        *id_at = HEADER_BYTES + name_bytes;
        name_bytes = append_text(name, name_bytes, "%08x", PROBE_ID);
    }
    *payload_at = frame(out, name, name_bytes, options.payload_bytes);
    return append(out, *payload_at, payload, options.payload_bytes);
}

static long parse(const char *in, size_t bytes, struct received *received) {
    const unsigned char *head = (const unsigned char *)in;
    if (bytes < HEADER_BYTES)
        return 0;
    size_t content_bytes = (size_t)head[0] << 24 | (size_t)head[1] << 16 | (size_t)head[2] << 8 |
                           (size_t)head[3];
    size_t topic_bytes = (size_t)head[5] << 8 | head[6];
    if (head[4] || content_bytes > PAYLOAD_BYTES_MAX)
        return -1;
    if (bytes < HEADER_BYTES + topic_bytes + content_bytes)
        return 0;
    received->kind = MESSAGE;
    received->topic = in + HEADER_BYTES;
    received->topic_bytes = topic_bytes;
    received->payload = received->topic + topic_bytes;
    received->payload_bytes = content_bytes;
    if (topic_bytes && received->topic[0] == '$') {
        uint64_t id;
        bool receipt = topic_bytes == 8 && !memcmp(received->topic, "$receipt", 8) &&
                       content_bytes > ID_BYTES && hex_read(received->payload, ID_BYTES, &id);
        bool is_login = topic_bytes == 6 && !memcmp(received->topic, "$login", 6);
        received->kind = receipt ? RECEIPT : is_login ? READY : FAILURE;
        received->id = receipt ? (uint32_t)id : 0;
    }
    return (long)(HEADER_BYTES + topic_bytes + content_bytes);
}

const struct protocol boson = {"boson", hello, ready_answers, publish, parse, true};
