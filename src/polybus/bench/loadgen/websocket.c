/* WebSocket: `msgstream` is the bus's (its publishers speak Boson), `broadcast` is a server that
 * forwards every text frame of a publisher to all others. Text frames hold
 *
 *   {"1":[["bench.0000","payload"],…],"2":[…]}     msgstream
 *   ["bench.0000","payload"]                       broadcast
 *
 * A frame may be larger than any buffer here, so it is read in small parts: a header, a bracket, a
 * pack's number, a message. Which one comes next is told by its first byte. */
#include "loadgen.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    TEXT_FRAME = 0x81,
    CLOSE_FRAME = 0x88,
    PING_FRAME = 0x89,
    PONG_FRAME = 0x8a,
    MASKED = 0x80,
    HEAD_BYTES_MAX = 4096,
    KEY_BYTES_MAX = 64,
    NUMBER_BYTES_MAX = 24,
};
/* The example of RFC 6455: nobody here has to be protected from a cache. */
#define UPGRADE                                                                                    \
    " HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"                \
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"

size_t websocket_frame(char *out, int kind, const char *bytes, size_t count) {
    static const char no_mask[4];
    size_t at = 2;
    out[0] = (char)kind;
    out[1] = (char)(MASKED | (count < 126 ? count : 126));
    if (count >= 126) {
        out[at++] = (char)(count >> 8);
        out[at++] = (char)count;
    }
    at = append(out, at, no_mask, sizeof no_mask);
    return append(out, at, bytes, count);
}

size_t websocket_text(char *out, const char *text, size_t count) {
    return websocket_frame(out, TEXT_FRAME, text, count);
}
size_t websocket_ping(char *out, const char *text, size_t count) {
    return websocket_frame(out, PING_FRAME, text, count);
}
size_t websocket_pong(char *out, const char *text, size_t count) {
    return websocket_frame(out, PONG_FRAME, text, count);
}

/* The session key of a subscriber: line `number` of the file that `--keys` names. */
static const char *key_of(int number) {
    static char (*keys)[KEY_BYTES_MAX];
    static int count;
    if (!keys) {
        FILE *file = options.keys ? fopen(options.keys, "r") : NULL;
        keys = checked_alloc(sizeof *keys * (size_t)options.subscribers);
        while (file && count < options.subscribers && fgets(keys[count], KEY_BYTES_MAX, file)) {
            keys[count][strcspn(keys[count], "\n")] = 0;
            count++;
        }
        if (file)
            fclose(file);
    }
    if (number >= count) {
        fail("--keys has no key for subscriber %d", number);
        return "";
    }
    return keys[number];
}

static size_t msgstream_hello(char *out, enum role role, int number) {
    if (role == PUBLISHER)
        return boson.hello(out, role, number);
    return append_text(out, 0, "GET /msgstream?sessionKey=%s" UPGRADE, key_of(number));
}

static size_t broadcast_hello(char *out, enum role role, int number) {
    (void)number;
    return append_text(out, 0, "GET /%s" UPGRADE, role == PUBLISHER ? "publish" : "");
}

static int broadcast_ready_answers(int number) {
    (void)number;
    return 1;
}

static size_t broadcast_publish(char *out, const char *topic, const char *payload, int number,
                                size_t *payload_at, size_t *id_at) {
    (void)number, (void)id_at;
    char *text = checked_alloc(publish_bytes_max());
    size_t at = append_text(text, 0, "[\"%s\",\"", topic);
    size_t end = append_text(text, append(text, at, payload, options.payload_bytes), "\"]");
    size_t bytes = websocket_text(out, text, end);
    *payload_at = bytes - end + at;
    free(text);
    return bytes;
}

static long parse_answer(const char *in, size_t bytes, struct received *received) {
    const char *end = memmem(in, bytes, "\r\n\r\n", 4);
    if (!end)
        return bytes > HEAD_BYTES_MAX ? -1 : 0;
    received->kind = memcmp(in, "HTTP/1.1 101", 12) ? FAILURE : READY;
    received->payload = in;
    received->payload_bytes = (size_t)((const char *)memchr(in, '\r', bytes) - in);
    return end + 4 - in;
}

/* A header and, of a control frame, what is in it. */
static long parse_frame(const char *in, size_t bytes, struct received *received) {
    if (bytes < 2)
        return 0;
    unsigned char size = (unsigned char)in[1];
    long head = size == 127 ? 10 : size == 126 ? 4 : 2;
    if ((unsigned char)in[0] == TEXT_FRAME)
        return bytes < (size_t)head ? 0 : head;
    if (bytes < 2 + (size_t)size)
        return size < 126 ? 0 : -1;
    switch ((unsigned char)in[0]) {
    case PING_FRAME: received->kind = PING; break;
    case PONG_FRAME: received->kind = PONG; break;
    case CLOSE_FRAME: received->kind = FAILURE; break;
    default: return -1;
    }
    received->payload = in + 2;
    received->payload_bytes = size;
    return 2 + (long)size;
}

/* "12":[ */
static long parse_number(const char *in, size_t bytes, struct received *received) {
    size_t at = 1;
    while (at < bytes && at < NUMBER_BYTES_MAX && in[at] >= '0' && in[at] <= '9')
        received->id = received->id * 10 + (uint32_t)(in[at++] - '0');
    if (at + 3 > bytes)
        return bytes > NUMBER_BYTES_MAX ? -1 : 0;
    if (memcmp(in + at, "\":[", 3))
        return -1;
    received->kind = received->id ? PACK : FAILURE; /* pack 0 tells what was lost */
    received->payload = in;
    received->payload_bytes = bytes < 80 ? bytes : 80;
    return (long)at + 3;
}

/* ["topic","payload"] */
static long parse_message(const char *in, size_t bytes, struct received *received) {
    const size_t before = 2 + TOPIC_BYTES + 3;
    if (bytes < before)
        return 0;
    if (in[1] != '"' || memcmp(in + 2 + TOPIC_BYTES, "\",\"", 3))
        return -1;
    const char *end = memchr(in + before, '"', bytes - before);
    if (!end || end + 1 == in + bytes)
        return bytes > before + PAYLOAD_BYTES_MAX ? -1 : 0;
    if (end[1] != ']')
        return -1;
    received->kind = MESSAGE;
    received->topic = in + 2;
    received->topic_bytes = TOPIC_BYTES;
    received->payload = in + before;
    received->payload_bytes = (size_t)(end - received->payload);
    return end + 2 - in;
}

static long parse(const char *in, size_t bytes, struct received *received) {
    switch (in[0]) {
    case '[': return parse_message(in, bytes, received);
    case ',':
    case ']':
    case '{': return 1;
    case '}': received->kind = PACKS_END; return 1;
    case '"': return parse_number(in, bytes, received);
    case 'H': return parse_answer(in, bytes, received);
    default: return parse_frame(in, bytes, received);
    }
}

static int msgstream_ready_answers(int number) { return boson.ready_answers(number); }

static size_t msgstream_publish(char *out, const char *topic, const char *payload, int number,
                                size_t *payload_at, size_t *id_at) {
    return boson.publish(out, topic, payload, number, payload_at, id_at);
}

const struct protocol msgstream = {
    "msgstream", msgstream_hello, msgstream_ready_answers, msgstream_publish, parse, false};
const struct protocol broadcast = {
    "broadcast", broadcast_hello, broadcast_ready_answers, broadcast_publish, parse, false};
