/* Confirmations of a msgstream subscriber: after each frame, the numbers of its packs.
 *
 * In a paced run a ping follows each confirmation. The bus answers in order, so its pong proves
 * that it has read the confirmation. The messages of the frame count as delivered from then on. */
#include "loadgen.h"

#include <stdio.h>
#include <string.h>

enum { UNCONFIRMED_MAX = 1 << 16, ID_TEXT_BYTES_MAX = 12 };

static void flush(struct confirms *confirms, struct connection *connection) {
    char frame[CONFIRM_BYTES + 16];
    if (confirms->ids_bytes) {
        size_t bytes = websocket_text(frame, confirms->ids, confirms->ids_bytes - 1);
        confirms->ids_bytes = 0;
        connection_send(connection, frame, bytes);
    }
}

void confirms_pack(struct confirms *confirms, struct connection *connection, uint32_t id) {
    if (id <= confirms->last_id)
        fail("pack %u came after pack %u", id, confirms->last_id);
    confirms->last_id = id;
    if (confirms->ids_bytes + ID_TEXT_BYTES_MAX > CONFIRM_BYTES)
        flush(confirms, connection);
    confirms->ids_bytes = append_text(confirms->ids, confirms->ids_bytes, "%u,", id);
}

void confirms_message(struct confirms *confirms, uint64_t sent_ns) {
    if (!confirms->sent_ns)
        confirms->sent_ns = checked_alloc(UNCONFIRMED_MAX * sizeof *confirms->sent_ns);
    confirms->sent_ns[confirms->received++ % UNCONFIRMED_MAX] = sent_ns;
    if (confirms->received - confirms->confirmed > UNCONFIRMED_MAX)
        fail("over %d messages wait for their confirmation", UNCONFIRMED_MAX);
}

void confirms_send(struct confirms *confirms, struct connection *connection) {
    char text[9], frame[32];
    flush(confirms, connection);
    if (options.timed) {
        hex_write(text, confirms->received, 8);
        connection_send(connection, frame, websocket_ping(frame, text, 8));
    }
}

bool confirms_next(struct confirms *confirms, const char *text, size_t bytes, uint64_t *sent_ns) {
    uint64_t to;
    if (bytes != 8 || !hex_read(text, 8, &to) || confirms->confirmed >= to)
        return false;
    *sent_ns = confirms->sent_ns[confirms->confirmed++ % UNCONFIRMED_MAX];
    return true;
}
