/* The load generator of `polybus bench`: one program that drives every broker the same way.
 *
 *   loadgen run    publishers and subscribers; every delivery is checked; one JSON line at the end
 *   loadgen idle   many idle subscribers; the server's memory for each
 *   loadgen relay  a server that forwards bytes without parsing: the upper limit
 *
 * One thread publishes, one subscribes. Publishes are encoded before the clock starts; while it
 * runs only a few digits of each are rewritten, so that no two messages of a run are the same.
 *
 * A payload is text that JSON does not escape:
 *   0..8    pass: how many times the publisher has sent its ring, 8 hex digits, rewritten
 *   8..12   publisher, 12..16 slot in its ring: 4 hex digits each
 *   16..32  when it was sent, nanoseconds, 16 hex digits, rewritten (timed runs; else filler)
 *   32..    filler: random text, different for every slot
 */
#ifndef LOADGEN_H
#define LOADGEN_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    PASS_AT = 0,
    PUBLISHER_AT = 8,
    SLOT_AT = 12,
    TIME_AT = 16,
    FILLER_AT = 32,
    PAYLOAD_BYTES_MIN = 40,
    PAYLOAD_BYTES_MAX = 65536,
    TOPIC_BYTES = 10, /* "bench.0000" */
    TOPICS_MAX = 10000,
    PUBLISHERS_MAX = 1024,
    RING_SLOTS_MAX = 65536,
    ID_BYTES = 8,
    READ_BYTES = 256 << 10,
    MANY_READ_BYTES = 64 << 10, /* each, when there are many subscribers */
    MANY = 64,
    CONFIRM_BYTES = 1024,
    WRITE_BYTES = 64 << 10,
};
#define PROBE_ID UINT32_MAX

struct options {
    const struct protocol *protocol;
    const char *host;
    int port;
    int subscribe_port; /* differs from `port` only for the relay */
    int publishers;
    int subscribers;
    int topics;
    size_t payload_bytes;
    double duration_s;
    uint64_t messages_max;  /* of all publishers together; 0: until `duration_s` */
    double deadline_s;      /* from the start of the program; then it fails with its progress */
    size_t window_bytes;    /* published but not yet delivered, so that no broker has to drop */
    uint32_t receipts;      /* unanswered receipts a publisher may have; 0: no receipts */
    bool one_per_write;
    double rate;            /* messages per second; 0: unlimited */
    bool ping_pong;         /* one message in flight: the next is sent after its delivery */
    bool timed;             /* latencies are measured: a paced run, or one message in flight */
    const char *beside;     /* a flood beside the run: "bulk", or "single" messages a write */
    struct flood *flood;    /* in the process that is the flood */
    int first_topic;        /* the number of the first of `topics` */
    int replicas;           /* how many servers store a message (jetstream) */
    int server_pid;         /* the process whose CPU time and memory are measured; 0: none */
    const char *keys;       /* a file of session keys, one a line (msgstream) */
    const char *fault;      /* relay only: "flip:AT", "drop:AT:BYTES", "repeat:AT:BYTES" */
};
extern struct options options;

/* --- wire protocols (protocol.c and one file each) --- */

enum kind { MESSAGE, RECEIPT, READY, OTHER, FAILURE, PACK, PACKS_END, PING, PONG };

struct received {
    enum kind kind;
    const char *topic, *payload; /* of a MESSAGE; the text of a FAILURE is in `payload` */
    size_t topic_bytes, payload_bytes;
    uint32_t id; /* of a RECEIPT or a PACK */
};

enum role { PUBLISHER, SUBSCRIBER };

struct protocol {
    const char *name;
    /* The first bytes of a connection; a publisher waits for `ready_answers` answers. */
    size_t (*hello)(char *out, enum role role, int number);
    int (*ready_answers)(int number);
    /* One publish to `topic`; returns its size, and where the payload and the receipt id are. */
    size_t (*publish)(char *out, const char *topic, const char *payload, int number,
                      size_t *payload_at, size_t *id_at);
    /* The next thing a broker sent: bytes used, 0 if it is incomplete, -1 if it is invalid. */
    long (*parse)(const char *in, size_t bytes, struct received *received);
    bool has_receipts;
};
extern const struct protocol boson, broadcast, goms, jetstream, mqtt, msgstream, nats, resp;
const struct protocol *protocol_named(const char *name);
void topic_name(char *out, int topic); /* TOPIC_BYTES and a zero */
/* Room enough for any hello and any publish. */
size_t hello_bytes_max(void);
size_t publish_bytes_max(void);
size_t append(char *out, size_t at, const void *bytes, size_t count);
size_t append_text(char *out, size_t at, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* --- payloads and the publishers' rings (ring.c) --- */

struct ring {
    char *bytes;      /* `slots` encoded publishes, each `stride` bytes */
    size_t stride;
    size_t payload_at, id_at;
    uint32_t slots;   /* a multiple of `options.topics`: slot s is for topic s % topics */
};
uint32_t ring_slots(void);
void ring_make(struct ring *ring, int publisher);
void payload_make(char *out, int publisher, uint32_t slot);
void hex_write(char *out, uint64_t value, int digits);
bool hex_read(const char *in, int digits, uint64_t *value);

/* --- connections (net.c) --- */

struct connection {
    int fd;
    char *in; /* what was read and not yet parsed */
    size_t in_bytes, in_bytes_max;
    int64_t read_ns; /* when the last bytes were read */
};
void connection_open(struct connection *connection, int port, size_t in_bytes_max);
bool connection_send(struct connection *connection, const char *bytes, size_t count);
/* Read once, without waiting, and pass the bytes to `take`; false at the end of the stream. */
typedef void take_fn(void *context, const struct received *received);
bool connection_receive(struct connection *connection, take_fn *take, void *context);
bool wait_readable(int fd, int timeout_ms);

/* --- times and their percentiles (samples.c) --- */

struct samples {
    uint32_t *ns;
    size_t count;
};
void samples_add(struct samples *samples, int64_t ns);
void samples_sort(struct samples *samples);
double samples_us(const struct samples *sorted, int percent);

/* --- WebSocket frames of a client (websocket.c), and confirmations (confirm.c) --- */

size_t websocket_text(char *out, const char *text, size_t count);
size_t websocket_ping(char *out, const char *text, size_t count);
size_t websocket_pong(char *out, const char *text, size_t count);

struct confirms {
    char ids[CONFIRM_BYTES];
    size_t ids_bytes;
    uint32_t last_id;
    uint64_t *sent_ns; /* of the messages whose confirmation has no pong yet */
    uint32_t received, confirmed;
};
void confirms_pack(struct confirms *confirms, struct connection *connection, uint32_t id);
void confirms_message(struct confirms *confirms, uint64_t sent_ns);
void confirms_send(struct confirms *confirms, struct connection *connection);
/* When the next message that a pong confirms was sent; false if there is none left. */
bool confirms_next(struct confirms *confirms, const char *text, size_t bytes, uint64_t *sent_ns);

/* --- the run (run.c), its two sides (publish.c, subscribe.c), a flood beside it (flood.c) --- */

struct subscribers;
struct subscribers *subscribers_open(int count, size_t in_bytes_max);
void subscribers_start(struct subscribers *all); /* from here on a thread reads and checks */
/* Before that: read and check what has arrived, or arrives within the time. */
int subscribers_read(struct subscribers *all, int timeout_ms);
bool subscribers_probed(const struct subscribers *all);
uint64_t subscribers_delivered_min(const struct subscribers *all);
uint64_t subscribers_delivered_sum(const struct subscribers *all);
/* Wait until all have received everything; returns the time of the last delivery. */
int64_t subscribers_finish(struct subscribers *all, uint64_t published);
struct samples *subscribers_latencies(struct subscribers *all);

struct publishers;
struct publishers *publishers_open(int count);
void publishers_probe(struct publishers *all, struct subscribers *readers);
/* Publish for the duration and wait for the receipts; returns the number of messages. */
uint64_t publishers_run(struct publishers *all, struct subscribers *readers);
uint64_t publishers_receipts(const struct publishers *all);
/* How long after its due time each message of a paced run was sent. */
struct samples *publishers_lateness(struct publishers *all);
/* From sending a message to reading its receipt, in a paced run. */
struct samples *publishers_receipt_times(struct publishers *all);

struct result {
    uint64_t published, delivered, receipts;
    double seconds, server_cpu_s, own_cpu_s;
    struct samples *latencies, *receipt_times, *lateness;
};
void run_once(struct result *result);

struct flood { /* in memory that both processes share */
    atomic_int state;
    atomic_bool stop;
    struct result result; /* its samples are not shared */
    char failure[512];
};
enum { FLOOD_OPENS, FLOOD_FLOWS, FLOOD_ENDED };
struct flood *flood_start(void);
/* Wait until it has ended; fails if a delivery of the flood was wrong. */
void flood_stop(struct flood *shared);

int run_main(void);
int idle_main(void);
int relay_main(void);

/* --- time, CPU and memory of the server, failures (common.c) --- */

int64_t now_ns(void);
double server_cpu_s(void);
long server_rss_kib(void);
double own_cpu_s(void);
/* Keep the first failure; every loop checks `failed()` and ends. */
void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
bool failed(void);
bool past_deadline(void);
const char *failure_text(void);
const char *failure_json(void); /* a JSON string, or null */
void *checked_alloc(size_t bytes);

#endif
