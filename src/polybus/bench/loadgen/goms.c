/* goMS: one JSON object per line. A publisher must register, or its messages are ignored. */
#include "loadgen.h"

#include <string.h>

#define MESSAGE_HEAD "{\"messagetype\":\"message\",\"topics\":[\""
#define MESSAGE_MIDDLE "\"],\"data\":\""
#define MESSAGE_TAIL "\"}"
#define REG_ACK_HEAD "{\"messagetype\":\"reg-ack\""
#define SIZE(text) (sizeof(text) - 1)

static size_t hello(char *out, enum role role, int number) {
    (void)role, (void)number;
    char name[TOPIC_BYTES + 1];
    size_t at = append_text(out, 0, "{\"messagetype\":\"register\",\"ack\":true,\"topics\":[");
    for (int topic = 0; topic < options.topics; topic++) {
        topic_name(name, topic);
        at = append_text(out, at, "%s\"%s\"", topic ? "," : "", name);
    }
    return append_text(out, at, "]}\n");
}

static int ready_answers(int number) {
    (void)number;
    return 1;
}

static size_t publish(char *out, const char *topic, const char *payload, int number,
                      size_t *payload_at, size_t *id_at) {
    (void)number, (void)id_at;
    *payload_at = append_text(
        out, 0, "{\"messagetype\":\"send\",\"topics\":[\"%s\"],\"data\":\"", topic);
    size_t at = append(out, *payload_at, payload, options.payload_bytes);
    return append_text(out, at, "\"}\n");
}

static bool begins(const char *in, size_t bytes, const char *with, size_t with_bytes) {
    return bytes >= with_bytes && !memcmp(in, with, with_bytes);
}

static long parse(const char *in, size_t bytes, struct received *received) {
    const char *end = memchr(in, '\n', bytes);
    if (!end)
        return 0;
    size_t line_bytes = (size_t)(end - in);
    const size_t around = SIZE(MESSAGE_HEAD) + TOPIC_BYTES + SIZE(MESSAGE_MIDDLE);
    if (begins(in, line_bytes, MESSAGE_HEAD, SIZE(MESSAGE_HEAD))) {
        if (line_bytes < around + SIZE(MESSAGE_TAIL) ||
            memcmp(in + around - SIZE(MESSAGE_MIDDLE), MESSAGE_MIDDLE, SIZE(MESSAGE_MIDDLE)) ||
            memcmp(end - SIZE(MESSAGE_TAIL), MESSAGE_TAIL, SIZE(MESSAGE_TAIL)))
            return -1;
        received->kind = MESSAGE;
        received->topic = in + SIZE(MESSAGE_HEAD);
        received->topic_bytes = TOPIC_BYTES;
        received->payload = in + around;
        received->payload_bytes = line_bytes - around - SIZE(MESSAGE_TAIL);
    } else if (begins(in, line_bytes, REG_ACK_HEAD, SIZE(REG_ACK_HEAD))) {
        received->kind = READY;
    } else {
        received->kind = FAILURE;
        received->payload = in;
        received->payload_bytes = line_bytes;
    }
    return end + 1 - in;
}

const struct protocol goms = {"goms", hello, ready_answers, publish, parse, false};
