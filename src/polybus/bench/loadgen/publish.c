/* The publishing side: rings of encoded publishes, sent in large pieces or one at a time. */
#include "loadgen.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>

enum { READ_EVERY = 64 /* writes between two reads of the broker's answers */ };

struct publishers;

struct publisher {
    struct connection connection;
    struct ring ring;
    struct publishers *all;
    int number;
    uint32_t slot, pass;
    size_t from, to;  /* bytes of the ring that are ready to send */
    uint32_t next_id; /* of the next message that asks for a receipt */
    uint32_t receipt_mask;
    char *waiting;    /* by id, whether its receipt is missing */
    int64_t *sent_ns; /* by id, when it was asked for (paced runs) */
    uint64_t published, receipts;
    unsigned writes;
    int ready_answers;
};

struct publishers {
    struct publisher *each;
    struct pollfd *polled;
    int count;
    uint64_t published;
    uint64_t credit; /* messages that may follow before the window is checked again */
    struct samples lateness, receipt_times;
};

static void take(void *context, const struct received *received) {
    struct publisher *publisher = context;
    uint32_t at = received->id & publisher->receipt_mask;
    if (received->kind == READY)
        publisher->ready_answers++;
    if (received->kind != RECEIPT || received->id == PROBE_ID)
        return;
    if (!publisher->waiting[at] || received->id >= publisher->next_id)
        fail("publisher %d got receipt %08x twice, or never asked for it", publisher->number,
             received->id);
    publisher->waiting[at] = 0;
    publisher->receipts++;
    if (options.rate > 0)
        samples_add(&publisher->all->receipt_times,
                    publisher->connection.read_ns - publisher->sent_ns[at]);
}

static void receive(struct publisher *publisher) {
    if (!connection_receive(&publisher->connection, take, publisher))
        fail("the broker closed the connection of publisher %d", publisher->number);
}

/* How many messages may follow now, given unanswered receipts. */
static uint32_t receipts_allowed(const struct publisher *publisher) {
    if (!options.receipts)
        return UINT32_MAX;
    uint32_t open = (uint32_t)(publisher->published - publisher->receipts);
    return open < options.receipts ? options.receipts - open : 0;
}

static uint32_t smaller(uint64_t a, uint64_t b) { return (uint32_t)(a < b ? a : b); }

/* Prepare the next piece of the ring for sending; returns its number of messages. */
static uint32_t prepare(struct publisher *publisher, uint64_t allowed) {
    struct ring *ring = &publisher->ring;
    uint32_t piece = options.one_per_write ? 1 : (uint32_t)(WRITE_BYTES / ring->stride) + 1;
    uint32_t count = smaller(piece, smaller(allowed, ring->slots - publisher->slot));
    count = smaller(count, receipts_allowed(publisher));
    char pass[8];
    hex_write(pass, publisher->pass, 8);
    for (uint32_t slot = publisher->slot; slot < publisher->slot + count; slot++) {
        char *message = ring->bytes + slot * ring->stride;
        memcpy(message + ring->payload_at + PASS_AT, pass, 8);
        if (options.receipts) {
            uint32_t id = publisher->next_id;
            if (publisher->waiting[id & publisher->receipt_mask]) {
                count = slot - publisher->slot; /* wait for a receipt that is overdue */
                break;
            }
            hex_write(message + ring->id_at, id, ID_BYTES);
            publisher->waiting[id & publisher->receipt_mask] = 1;
            publisher->next_id++;
        }
    }
    publisher->from = publisher->slot * ring->stride;
    publisher->to = publisher->from + count * ring->stride;
    publisher->slot += count;
    if (publisher->slot == ring->slots) {
        publisher->slot = 0;
        publisher->pass++;
    }
    publisher->published += count;
    return count;
}

/* Send as much as the socket accepts; returns whether anything was sent. */
static bool push(struct publisher *publisher) {
    ssize_t sent = send(publisher->connection.fd, publisher->ring.bytes + publisher->from,
                        publisher->to - publisher->from, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN)
        fail("publisher %d cannot send: %s", publisher->number, strerror(errno));
    if (sent <= 0)
        return false;
    publisher->from += (size_t)sent;
    if (options.receipts || ++publisher->writes % READ_EVERY == 0)
        receive(publisher);
    return true;
}

/* Nothing was sent: wait for a writable socket, an answer, or an open window. */
static void wait_for_room(struct publishers *all) {
    for (int number = 0; number < all->count; number++) {
        const struct publisher *publisher = &all->each[number];
        all->polled[number].events = POLLIN;
        if (publisher->from < publisher->to)
            all->polled[number].events |= POLLOUT;
    }
    /* A small window closes after almost every message: waiting a millisecond would dominate. */
    struct timespec wait = {0, options.window_bytes < WRITE_BYTES ? 50000 : 1000000};
    ppoll(all->polled, (nfds_t)all->count, &wait, NULL);
    for (int number = 0; number < all->count; number++)
        if (all->polled[number].revents & (POLLIN | POLLHUP | POLLERR))
            receive(&all->each[number]);
    if (past_deadline())
        fail("publishers stood still until the deadline");
}

/* How many messages the slowest subscriber and the total count permit now. */
static uint64_t allowed_by_window(struct publishers *all, const struct subscribers *readers) {
    if (!all->credit) {
        uint64_t window = options.window_bytes / all->each[0].ring.stride + 1;
        all->credit = subscribers_delivered_min(readers) + window - all->published;
    }
    uint64_t left = options.messages_max ? options.messages_max - all->published : UINT64_MAX;
    return left < all->credit ? left : all->credit;
}

static void publish_fast(struct publishers *all, const struct subscribers *readers) {
    int64_t end_ns = now_ns() + (int64_t)(options.duration_s * 1e9);
    bool unsent = true, open = true;
    struct flood *flood = options.flood;
    if (flood)
        atomic_store(&flood->state, FLOOD_FLOWS);
    while ((open || unsent) && !failed()) {
        bool progress = false;
        unsent = false;
        open = now_ns() < end_ns && !(flood && atomic_load(&flood->stop)) &&
               !(options.messages_max && all->published >= options.messages_max);
        for (int number = 0; number < all->count && !failed(); number++) {
            struct publisher *publisher = &all->each[number];
            if (open && publisher->from == publisher->to) {
                uint32_t count = prepare(publisher, allowed_by_window(all, readers));
                all->published += count;
                all->credit -= count;
            }
            if (publisher->from < publisher->to)
                progress |= push(publisher);
            unsent |= publisher->from < publisher->to;
        }
        if (!progress && (open || unsent))
            wait_for_room(all);
    }
}

/* Stamp and send one message; returns when it was sent. */
static int64_t send_one(struct publisher *publisher) {
    struct ring *ring = &publisher->ring;
    uint32_t count;
    while (!(count = prepare(publisher, 1)) && !failed())
        wait_for_room(publisher->all);
    int64_t sent_ns = now_ns();
    hex_write(ring->bytes + publisher->from + ring->payload_at + TIME_AT, (uint64_t)sent_ns, 16);
    publisher->all->published += count;
    if (options.receipts)
        publisher->sent_ns[(publisher->next_id - 1) & publisher->receipt_mask] = sent_ns;
    while (publisher->from < publisher->to && !failed())
        if (!push(publisher))
            wait_for_room(publisher->all);
    return sent_ns;
}

/* Sleep, but read every receipt when it comes. */
static void wait_until(struct publisher *publisher, int64_t due_ns) {
    struct pollfd readable = {.fd = publisher->connection.fd, .events = POLLIN};
    struct timespec due = {due_ns / 1000000000, due_ns % 1000000000};
    if (!options.receipts && now_ns() < due_ns)
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL);
    for (int64_t now; options.receipts && (now = now_ns()) < due_ns && !failed();) {
        struct timespec wait = {(due_ns - now) / 1000000000, (due_ns - now) % 1000000000};
        if (ppoll(&readable, 1, &wait, NULL) > 0)
            receive(publisher);
    }
}

/* Each message has its due time, whenever the one before was sent. The thread sleeps until then:
 * to spin would take a core from the broker. It sends at once what is overdue. A latency counts
 * from the moment of sending, so that it is the broker's alone. */
static void publish_paced(struct publishers *all) {
    struct publisher *publisher = &all->each[0];
    uint64_t count = (uint64_t)(options.rate * options.duration_s);
    int64_t start_ns = now_ns();
    if (options.messages_max && options.messages_max < count)
        count = options.messages_max;
    prctl(PR_SET_TIMERSLACK, 1);
    for (uint64_t done = 0; done < count && !failed(); done++) {
        int64_t due_ns = start_ns + (int64_t)((double)done * 1e9 / options.rate);
        wait_until(publisher, due_ns);
        samples_add(&all->lateness, send_one(publisher) - due_ns);
    }
}

/* One thread sends each message and then waits for its delivery. */
static void publish_ping_pong(struct publishers *all, struct subscribers *readers) {
    int64_t end_ns = now_ns() + (int64_t)(options.duration_s * 1e9);
    while (now_ns() < end_ns && !failed() &&
           !(options.messages_max && all->published >= options.messages_max)) {
        send_one(&all->each[0]);
        while (subscribers_delivered_min(readers) < all->published && !failed())
            if (!subscribers_read(readers, 10) && past_deadline())
                fail("message %llu was not delivered before the deadline",
                     (unsigned long long)all->published);
    }
}

uint64_t publishers_receipts(const struct publishers *all) {
    uint64_t receipts = 0;
    for (int number = 0; number < all->count; number++)
        receipts += all->each[number].receipts;
    return receipts;
}

struct samples *publishers_lateness(struct publishers *all) { return &all->lateness; }
struct samples *publishers_receipt_times(struct publishers *all) { return &all->receipt_times; }

uint64_t publishers_run(struct publishers *all, struct subscribers *readers) {
    if (options.ping_pong)
        publish_ping_pong(all, readers);
    else if (options.rate > 0)
        publish_paced(all);
    else
        publish_fast(all, readers);
    while (options.receipts && !failed() && publishers_receipts(all) < all->published)
        wait_for_room(all);
    return all->published;
}

static void await_ready(struct publisher *publisher) {
    int answers = options.protocol->ready_answers(publisher->number);
    while (publisher->ready_answers < answers && !failed()) {
        if (wait_readable(publisher->connection.fd, 50))
            receive(publisher);
        else if (past_deadline())
            fail("publisher %d: the broker never answered its hello", publisher->number);
    }
}

static void open_publisher(struct publisher *publisher, int number, char *hello) {
    uint32_t receipts_kept = 1;
    publisher->number = number;
    ring_make(&publisher->ring, number);
    while (receipts_kept < 4 * options.receipts)
        receipts_kept *= 2;
    publisher->receipt_mask = receipts_kept - 1;
    publisher->waiting = checked_alloc(receipts_kept);
    publisher->sent_ns = checked_alloc(receipts_kept * sizeof *publisher->sent_ns);
    connection_open(&publisher->connection, options.port, WRITE_BYTES);
    if (failed())
        return;
    size_t bytes = options.protocol->hello(hello, PUBLISHER, number);
    connection_send(&publisher->connection, hello, bytes);
    await_ready(publisher);
}

struct publishers *publishers_open(int count) {
    struct publishers *all = checked_alloc(sizeof *all);
    char *hello = checked_alloc(hello_bytes_max());
    all->count = count;
    all->each = checked_alloc(sizeof *all->each * (size_t)count);
    all->polled = checked_alloc(sizeof *all->polled * (size_t)count);
    for (int number = 0; number < count && !failed(); number++) {
        all->each[number].all = all;
        open_publisher(&all->each[number], number, hello);
        all->polled[number].fd = all->each[number].connection.fd;
    }
    free(hello);
    return all;
}

/* A broker may delay a subscription: publish until every subscriber has a message. */
void publishers_probe(struct publishers *all, struct subscribers *readers) {
    char topic[TOPIC_BYTES + 1], payload[PAYLOAD_BYTES_MAX];
    char *probe = checked_alloc(publish_bytes_max());
    size_t payload_at, id_at;
    topic_name(topic, options.topics - 1); /* subscribed last, so the others are subscribed too */
    payload_make(payload, 0, 0);
    memcpy(payload, "PROBE", 5);
    size_t bytes = options.protocol->publish(probe, topic, payload, 0, &payload_at, &id_at);
    for (int wait_ms = 20; !failed() && !subscribers_probed(readers); wait_ms *= 2) {
        connection_send(&all->each[0].connection, probe, bytes);
        int64_t until = now_ns() + wait_ms * 1000000LL;
        while (!failed() && !subscribers_probed(readers) && now_ns() < until)
            if (options.ping_pong)
                subscribers_read(readers, 1);
            else if (wait_readable(all->each[0].connection.fd, 1))
                receive(&all->each[0]);
        if (past_deadline())
            fail("the subscribers did not get a first message before the deadline");
    }
    free(probe);
}
