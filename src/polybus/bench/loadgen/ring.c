/* Payloads, and the rings of publishes that are encoded before the clock starts. */
#include "loadgen.h"

#include <string.h>

static const char DIGITS[] = "0123456789abcdef";
static const char ALPHABET[64] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

void hex_write(char *out, uint64_t value, int digits) {
    for (int at = digits - 1; at >= 0; at--, value >>= 4)
        out[at] = DIGITS[value & 15];
}

bool hex_read(const char *in, int digits, uint64_t *value) {
    uint64_t sum = 0;
    for (int at = 0; at < digits; at++) {
        unsigned char byte = (unsigned char)in[at];
        unsigned digit = byte - '0';
        if (digit > 9) {
            digit = byte - 'a';
            if (digit > 5)
                return false;
            digit += 10;
        }
        sum = sum << 4 | digit;
    }
    *value = sum;
    return true;
}

uint32_t ring_slots(void) {
    /* Large enough that no broker can exploit the pattern, small enough to stay in the cache;
     * smaller for many publishers that write one message at a time. */
    uint32_t topics = (uint32_t)options.topics, wanted = options.one_per_write ? 256 : 4096;
    if (options.payload_bytes > 512)
        wanted /= 8;
    return (wanted + topics - 1) / topics * topics;
}

void payload_make(char *out, int publisher, uint32_t slot) {
    uint64_t random = 0x9e3779b97f4a7c15u * (slot + 1);
    for (size_t at = 0; at < options.payload_bytes; at++) {
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        out[at] = ALPHABET[random >> 58];
    }
    hex_write(out + PASS_AT, 0, 8);
    hex_write(out + PUBLISHER_AT, (uint64_t)publisher, 4);
    hex_write(out + SLOT_AT, slot, 4);
}

void ring_make(struct ring *ring, int publisher) {
    char topic[TOPIC_BYTES + 1], payload[PAYLOAD_BYTES_MAX];
    char *encoded = checked_alloc(publish_bytes_max());
    ring->slots = ring_slots();
    ring->bytes = NULL;
    for (uint32_t slot = 0; slot < ring->slots; slot++) {
        topic_name(topic, (int)(slot % (uint32_t)options.topics));
        payload_make(payload, publisher, slot);
        /* Topic names and payloads all have one size, so every publish has the same stride. */
        ring->stride = options.protocol->publish(encoded, topic, payload, publisher,
                                                 &ring->payload_at, &ring->id_at);
        if (!ring->bytes)
            ring->bytes = checked_alloc(ring->stride * ring->slots);
        memcpy(ring->bytes + slot * ring->stride, encoded, ring->stride);
    }
}
