/* The command line; `polybus bench` is its only user, so it is terse. */
#include "loadgen.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

struct options options = {
    .host = "127.0.0.1",
    .publishers = 1,
    .subscribers = 1,
    .topics = 1,
    .replicas = 1,
    .payload_bytes = 100,
    .duration_s = 1.0,
    .deadline_s = 30.0,
    .window_bytes = 16 << 20,
};

static const char USAGE[] =
    "usage: loadgen run|idle --protocol NAME --port N [--host ADDRESS] [--subscribe-port N]\n"
    "         [--publishers N] [--subscribers N] [--topics N] [--payload-bytes N]\n"
    "         [--duration-s S] [--messages N] [--deadline-s S] [--window-bytes N]\n"
    "         [--receipts UNANSWERED_MAX] [--one-per-write] [--rate PER_SECOND] [--server-pid N]\n"
    "         [--ping-pong] [--beside bulk|single] [--first-topic N] [--replicas N]\n"
    "       loadgen relay [--fault flip:AT|drop:AT:BYTES|repeat:AT:BYTES]\n"
    "protocols: boson broadcast goms jetstream mqtt msgstream (with --keys FILE) nats resp\n";

static _Noreturn void usage(const char *problem) {
    fprintf(stderr, "loadgen: %s\n%s", problem, USAGE);
    exit(2);
}

static void apply(int key, const char *text) {
    switch (key) {
    case 'p': options.protocol = protocol_named(text); break;
    case 'P': options.port = atoi(text); break;
    case 'S': options.subscribe_port = atoi(text); break;
    case 'h': options.host = text; break;
    case 'n': options.publishers = atoi(text); break;
    case 's': options.subscribers = atoi(text); break;
    case 't': options.topics = atoi(text); break;
    case 'b': options.payload_bytes = (size_t)atol(text); break;
    case 'd': options.duration_s = atof(text); break;
    case 'm': options.messages_max = strtoull(text, NULL, 10); break;
    case 'D': options.deadline_s = atof(text); break;
    case 'w': options.window_bytes = (size_t)atol(text); break;
    case 'r': options.receipts = (uint32_t)atol(text); break;
    case '1': options.one_per_write = true; break;
    case 'R': options.rate = atof(text); break;
    case 'g': options.ping_pong = true; break;
    case 'B': options.beside = text; break;
    case 'F': options.first_topic = atoi(text); break;
    case 'c': options.replicas = atoi(text); break;
    case 'i': options.server_pid = atoi(text); break;
    case 'f': options.fault = text; break;
    case 'k': options.keys = text; break;
    default: usage("unknown option");
    }
}

static void read_options(int count, char **arguments) {
    static const struct option known[] = {
        {"protocol", 1, 0, 'p'},      {"port", 1, 0, 'P'},        {"subscribe-port", 1, 0, 'S'},
        {"host", 1, 0, 'h'},          {"publishers", 1, 0, 'n'},  {"subscribers", 1, 0, 's'},
        {"topics", 1, 0, 't'},        {"payload-bytes", 1, 0, 'b'}, {"duration-s", 1, 0, 'd'},
        {"messages", 1, 0, 'm'},      {"deadline-s", 1, 0, 'D'},  {"window-bytes", 1, 0, 'w'},
        {"receipts", 1, 0, 'r'},      {"one-per-write", 0, 0, '1'}, {"rate", 1, 0, 'R'},
        {"server-pid", 1, 0, 'i'},    {"fault", 1, 0, 'f'},       {"keys", 1, 0, 'k'},
        {"ping-pong", 0, 0, 'g'},     {"beside", 1, 0, 'B'},      {"first-topic", 1, 0, 'F'},
        {"replicas", 1, 0, 'c'},
        {0, 0, 0, 0},
    };
    int key;
    while ((key = getopt_long(count, arguments, "", known, NULL)) != -1)
        apply(key, optarg);
    if (!options.subscribe_port)
        options.subscribe_port = options.port;
}

static void check_options(void) {
    if (!options.protocol)
        usage("--protocol must be one of those below");
    if (options.port < 1 || options.port > 65535)
        usage("--port must be 1 to 65535");
    if (options.publishers < 1 || options.publishers > PUBLISHERS_MAX || options.subscribers < 1)
        usage("--publishers must be 1 to 1024, --subscribers 1 or more");
    if (options.topics < 1 || options.topics > TOPICS_MAX)
        usage("--topics must be 1 to 10000");
    if (options.first_topic < 0 || options.first_topic + options.topics > TOPICS_MAX)
        usage("--first-topic and --topics must be at most 10000 together");
    if (options.replicas < 1 || options.replicas > 5)
        usage("--replicas must be 1 to 5");
    if (options.payload_bytes < PAYLOAD_BYTES_MIN || options.payload_bytes > PAYLOAD_BYTES_MAX)
        usage("--payload-bytes must be 40 to 65536");
    if (options.receipts && !options.protocol->has_receipts)
        usage("--receipts: this protocol has none");
    if (options.rate > 0 && (options.publishers > 1 || options.rate > 1e6))
        usage("--rate must be at most 1000000, with one publisher");
    if (options.ping_pong && (options.publishers > 1 || options.rate > 0 || options.receipts))
        usage("--ping-pong needs one publisher, without --rate and --receipts");
    if (options.beside && strcmp(options.beside, "bulk") && strcmp(options.beside, "single"))
        usage("--beside must be bulk or single");
    if (options.duration_s <= 0 || options.duration_s > 600 || options.deadline_s <= 0)
        usage("--duration-s must be more than 0 and at most 600, --deadline-s more than 0");
}

static void raise_file_limit(void) {
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
}

int main(int count, char **arguments) {
    const char *mode = count > 1 ? arguments[1] : "";
    if (count > 1)
        read_options(count - 1, arguments + 1);
    if (!strcmp(mode, "relay"))
        return relay_main();
    if (strcmp(mode, "run") && strcmp(mode, "idle"))
        usage("say run, idle or relay");
    check_options();
    if (options.rate > 0 || options.ping_pong)
        options.one_per_write = options.timed = true;
    raise_file_limit();
    return strcmp(mode, "idle") ? run_main() : idle_main();
}
