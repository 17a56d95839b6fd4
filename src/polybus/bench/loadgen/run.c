/* `loadgen run`: set up, publish, check, and print what was measured. */
#include "loadgen.h"

#include <stdio.h>

static void print_times(const char *before, struct samples *times) {
    samples_sort(times);
    if (times->count)
        printf(",\"%sp50_us\":%.1f,\"%sp99_us\":%.1f", before, samples_us(times, 50), before,
               samples_us(times, 99));
}

void run_once(struct result *result) {
    size_t read_bytes = options.subscribers > MANY ? MANY_READ_BYTES : READ_BYTES;
    struct subscribers *readers = subscribers_open(options.subscribers, read_bytes);
    struct publishers *writers = failed() ? NULL : publishers_open(options.publishers);
    if (failed())
        return;
    if (!options.ping_pong)
        subscribers_start(readers);
    publishers_probe(writers, readers);
    double server_s = server_cpu_s(), own_s = own_cpu_s();
    int64_t start_ns = now_ns();
    result->published = publishers_run(writers, readers);
    int64_t receipts_ns = now_ns();
    if (options.ping_pong)
        subscribers_start(readers);
    int64_t last_ns = subscribers_finish(readers, result->published);
    result->receipts = publishers_receipts(writers);
    if (options.receipts && receipts_ns > last_ns)
        last_ns = receipts_ns;
    result->delivered = subscribers_delivered_sum(readers);
    result->seconds = (double)(last_ns - start_ns) * 1e-9;
    result->server_cpu_s = server_cpu_s() - server_s;
    result->own_cpu_s = own_cpu_s() - own_s;
    result->latencies = subscribers_latencies(readers);
    result->receipt_times = publishers_receipt_times(writers);
    result->lateness = publishers_lateness(writers);
}

int run_main(void) {
    struct result result = {0};
    past_deadline(); /* starts its clock */
    struct flood *flood = options.beside ? flood_start() : NULL;
    if (!failed())
        run_once(&result);
    if (flood)
        flood_stop(flood);
    printf("{\"verified\":%s,\"error\":%s,\"messages\":%llu,\"delivered\":%llu,\"receipts\":%llu,"
           "\"seconds\":%.6f,\"server_cpu_s\":%.6f,\"generator_cpu_s\":%.6f",
           failed() ? "false" : "true", failure_json(), (unsigned long long)result.published,
           (unsigned long long)result.delivered, (unsigned long long)result.receipts,
           result.seconds, result.server_cpu_s, result.own_cpu_s);
    if (!failed()) {
        /* Whoever asks for receipts in a paced run waits for them. */
        print_times(result.receipt_times->count ? "delivery_" : "", result.latencies);
        print_times("", result.receipt_times);
        print_times("late_", result.lateness);
    }
    if (flood && !failed())
        printf(",\"flood\":{\"delivered\":%llu,\"seconds\":%.6f,\"server_cpu_s\":%.6f}",
               (unsigned long long)flood->result.delivered, flood->result.seconds,
               flood->result.server_cpu_s);
    puts("}");
    return failed();
}
