/* The subscribing side: one thread that reads all subscribers and checks every message.
 *
 * A message is right if its topic is the one of its slot, if it is the next of its publisher on
 * that topic (so none is missing, repeated or overtaken), and if its filler is that slot's.
 */
#include "loadgen.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>

enum { EVENTS_MAX = 256, EXTRA_MS = 20, CONTROL_BYTES_MAX = 160 };

struct next {
    uint32_t slot;
    uint32_t pass;
    char pass_text[8];
};

struct subscriber {
    struct connection connection;
    struct subscribers *all;
    struct next *next; /* per publisher and topic */
    int number;
    bool probed;
    uint64_t timed; /* messages whose latency is known */
    struct confirms *confirms; /* msgstream only */
    _Alignas(64) _Atomic uint64_t delivered; /* alone in its cache line: the publisher reads it */
};

struct subscribers {
    struct subscriber *each;
    int count;
    int epoll;
    pthread_t thread;
    char (*names)[TOPIC_BYTES + 1];
    char *payloads; /* what publisher 0 sends, slot by slot */
    uint16_t *topic_of_slot;
    uint32_t slots;
    size_t filler_at; /* from here on a payload must be as expected */
    struct samples latencies;
    int64_t last_ns;
    atomic_int probed;
    atomic_bool published_known;
    uint64_t published;
};

static void wrong(const struct subscriber *subscriber, const struct received *received,
                  const char *what) {
    size_t shown = received->payload_bytes < 48 ? received->payload_bytes : 48;
    fail("subscriber %d, after %llu messages: %s: topic %.*s, payload %.*s", subscriber->number,
         (unsigned long long)subscriber->delivered, what, (int)received->topic_bytes,
         received->topic, (int)shown, received->payload);
}

static void add_latency(struct subscriber *subscriber, uint64_t sent_ns) {
    samples_add(&subscriber->all->latencies, subscriber->connection.read_ns - (int64_t)sent_ns);
    subscriber->timed++;
}

static void note_latency(struct subscriber *subscriber, const char *payload) {
    uint64_t sent_ns;
    if (!hex_read(payload + TIME_AT, 16, &sent_ns))
        return;
    if (subscriber->confirms)
        confirms_message(subscriber->confirms, sent_ns);
    else
        add_latency(subscriber, sent_ns);
}

/* Events of a WebSocket other than messages. */
static void answer(struct subscriber *subscriber, const struct received *received) {
    struct confirms *confirms = subscriber->confirms;
    struct connection *connection = &subscriber->connection;
    char pong[CONTROL_BYTES_MAX];
    uint64_t sent_ns;
    if (received->kind == PING)
        connection_send(connection, pong,
                        websocket_pong(pong, received->payload, received->payload_bytes));
    if (!confirms)
        return;
    if (received->kind == PACK)
        confirms_pack(confirms, connection, received->id);
    else if (received->kind == PACKS_END)
        confirms_send(confirms, connection);
    else if (received->kind == PONG)
        while (confirms_next(confirms, received->payload, received->payload_bytes, &sent_ns))
            add_latency(subscriber, sent_ns);
}

static void advance(struct next *next, uint32_t slots) {
    next->slot += (uint32_t)options.topics;
    if (next->slot >= slots) {
        next->slot -= slots;
        hex_write(next->pass_text, ++next->pass, 8);
    }
}

static void check(void *context, const struct received *received) {
    struct subscriber *subscriber = context;
    struct subscribers *all = subscriber->all;
    const char *payload = received->payload;
    uint64_t place;
    if (received->kind != MESSAGE) {
        answer(subscriber, received);
        return;
    }
    if (received->payload_bytes != options.payload_bytes) {
        wrong(subscriber, received, "wrong size");
        return;
    }
    if (!memcmp(payload, "PROBE", 5)) {
        if (!subscriber->probed)
            atomic_fetch_add(&all->probed, 1);
        subscriber->probed = true;
        return;
    }
    if (!hex_read(payload + PUBLISHER_AT, 8, &place) || (place & 0xffff) >= all->slots ||
        place >> 16 >= (uint64_t)options.publishers) {
        wrong(subscriber, received, "no such message was published");
        return;
    }
    uint32_t slot = place & 0xffff, publisher = (uint32_t)(place >> 16);
    int topic = all->topic_of_slot[slot];
    struct next *next = &subscriber->next[publisher * (uint32_t)options.topics + (uint32_t)topic];
    if (received->topic_bytes != TOPIC_BYTES ||
        memcmp(received->topic, all->names[topic], TOPIC_BYTES))
        wrong(subscriber, received, "wrong topic");
    else if (slot != next->slot || memcmp(payload + PASS_AT, next->pass_text, 8))
        wrong(subscriber, received, "missing, repeated or out of order");
    else if (memcmp(payload + all->filler_at,
                    all->payloads + slot * options.payload_bytes + all->filler_at,
                    options.payload_bytes - all->filler_at))
        wrong(subscriber, received, "wrong content");
    advance(next, all->slots);
    if (options.timed)
        note_latency(subscriber, payload);
    /* Only this thread writes it: a plain load and store avoid a locked instruction. */
    uint64_t count = atomic_load_explicit(&subscriber->delivered, memory_order_relaxed);
    atomic_store_explicit(&subscriber->delivered, count + 1, memory_order_relaxed);
}

/* A timed run waits for the last confirmations too. */
static bool all_timed(const struct subscribers *all) {
    for (int number = 0; options.timed && number < all->count; number++)
        if (all->each[number].timed < all->published)
            return false;
    return true;
}

static bool complete(const struct subscribers *all) {
    return atomic_load(&all->published_known) &&
           subscribers_delivered_min(all) >= all->published && all_timed(all);
}

int subscribers_read(struct subscribers *all, int timeout_ms) {
    struct epoll_event events[EVENTS_MAX];
    int count = epoll_wait(all->epoll, events, EVENTS_MAX, timeout_ms);
    for (int at = 0; at < count && !failed(); at++) {
        struct subscriber *subscriber = events[at].data.ptr;
        if (!connection_receive(&subscriber->connection, check, subscriber))
            fail("the broker closed the connection of subscriber %d after %llu messages",
                 subscriber->number, (unsigned long long)subscriber->delivered);
        all->last_ns = subscriber->connection.read_ns;
    }
    return count;
}

static void *subscribe(void *context) {
    struct subscribers *all = context;
    while (!failed() && !complete(all)) {
        if (subscribers_read(all, 10) == 0 && subscribers_probed(all) && past_deadline())
            fail("no end before the deadline: %llu messages delivered to the slowest subscriber",
                 (unsigned long long)subscribers_delivered_min(all));
    }
    int64_t last_ns = all->last_ns;
    /* No message may follow: a duplicate at the very end is an error too. */
    int64_t until = now_ns() + EXTRA_MS * 1000000LL;
    while (!failed() && now_ns() < until)
        subscribers_read(all, EXTRA_MS / 4);
    all->last_ns = last_ns;
    uint64_t expected = all->published * (uint64_t)all->count;
    if (!failed() && subscribers_delivered_sum(all) != expected)
        fail("%llu messages were delivered, %llu were due",
             (unsigned long long)subscribers_delivered_sum(all), (unsigned long long)expected);
    return NULL;
}

static void prepare(struct subscribers *all) {
    all->slots = ring_slots();
    all->payloads = checked_alloc(options.payload_bytes * all->slots);
    all->topic_of_slot = checked_alloc(sizeof *all->topic_of_slot * all->slots);
    all->names = checked_alloc(sizeof *all->names * (size_t)options.topics);
    all->filler_at = options.timed ? FILLER_AT : TIME_AT;
    for (int topic = 0; topic < options.topics; topic++)
        topic_name(all->names[topic], topic);
    for (uint32_t slot = 0; slot < all->slots; slot++) {
        payload_make(all->payloads + slot * options.payload_bytes, 0, slot);
        all->topic_of_slot[slot] = (uint16_t)(slot % (uint32_t)options.topics);
    }
}

static void open_subscriber(struct subscribers *all, int number, char *hello, size_t in_bytes_max) {
    struct subscriber *subscriber = &all->each[number];
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = subscriber};
    size_t streams = (size_t)options.publishers * (size_t)options.topics;
    subscriber->all = all;
    subscriber->number = number;
    if (options.protocol == &msgstream)
        subscriber->confirms = checked_alloc(sizeof *subscriber->confirms);
    subscriber->next = checked_alloc(sizeof(struct next) * streams);
    for (size_t stream = 0; stream < streams; stream++) {
        subscriber->next[stream].slot = (uint32_t)(stream % (size_t)options.topics);
        hex_write(subscriber->next[stream].pass_text, 0, 8);
    }
    connection_open(&subscriber->connection, options.subscribe_port, in_bytes_max);
    if (failed())
        return;
    size_t bytes = options.protocol->hello(hello, SUBSCRIBER, number);
    connection_send(&subscriber->connection, hello, bytes);
    epoll_ctl(all->epoll, EPOLL_CTL_ADD, subscriber->connection.fd, &event);
    /* A broker with a short backlog loses connections that arrive faster than it accepts. */
    if (number % 32 == 31)
        wait_readable(-1, 4);
}

struct subscribers *subscribers_open(int count, size_t in_bytes_max) {
    struct subscribers *all = checked_alloc(sizeof *all);
    char *hello = checked_alloc(hello_bytes_max());
    size_t bytes = sizeof(struct subscriber) * (size_t)count;
    all->each = aligned_alloc(64, bytes);
    memset(all->each, 0, bytes);
    all->count = count;
    all->epoll = epoll_create1(EPOLL_CLOEXEC);
    prepare(all);
    for (int number = 0; number < count && !failed(); number++)
        open_subscriber(all, number, hello, in_bytes_max);
    free(hello);
    return all;
}

void subscribers_start(struct subscribers *all) {
    pthread_create(&all->thread, NULL, subscribe, all);
}

bool subscribers_probed(const struct subscribers *all) {
    return atomic_load(&all->probed) == all->count;
}

uint64_t subscribers_delivered_min(const struct subscribers *all) {
    uint64_t least = UINT64_MAX;
    for (int number = 0; number < all->count; number++) {
        uint64_t count =
            atomic_load_explicit(&all->each[number].delivered, memory_order_relaxed);
        least = count < least ? count : least;
    }
    return least;
}

uint64_t subscribers_delivered_sum(const struct subscribers *all) {
    uint64_t sum = 0;
    for (int number = 0; number < all->count; number++)
        sum += all->each[number].delivered;
    return sum;
}

int64_t subscribers_finish(struct subscribers *all, uint64_t published) {
    all->published = published;
    atomic_store(&all->published_known, true);
    pthread_join(all->thread, NULL);
    return all->last_ns;
}

struct samples *subscribers_latencies(struct subscribers *all) { return &all->latencies; }
