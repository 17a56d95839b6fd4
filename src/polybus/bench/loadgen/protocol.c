/* What the protocols share: their table, topic names, and building bytes. */
#include "loadgen.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const struct protocol *protocol_named(const char *name) {
    static const struct protocol *const all[] = {&boson, &broadcast, &goms, &jetstream,
                                                 &mqtt,  &msgstream, &nats, &resp};
    for (size_t at = 0; at < sizeof all / sizeof *all; at++)
        if (!strcmp(all[at]->name, name))
            return all[at];
    return NULL;
}

void topic_name(char *out, int topic) {
    topic += options.first_topic;
    memcpy(out, "bench.", 6);
    for (int at = TOPIC_BYTES - 1; at >= 6; at--, topic /= 10)
        out[at] = (char)('0' + topic % 10);
    out[TOPIC_BYTES] = 0;
}

/* The wordiest protocol needs fewer bytes than these around a topic and around a payload. */
size_t hello_bytes_max(void) { return 1024 + 64 * (size_t)options.topics; }
size_t publish_bytes_max(void) { return 256 + options.payload_bytes; }

size_t append(char *out, size_t at, const void *bytes, size_t count) {
    memcpy(out + at, bytes, count);
    return at + count;
}

size_t append_text(char *out, size_t at, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int count = vsprintf(out + at, format, arguments);
    va_end(arguments);
    return at + (size_t)count;
}
