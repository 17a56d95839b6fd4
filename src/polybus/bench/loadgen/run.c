/* `loadgen run`: set up, publish, check, and print what was measured. */
#include "loadgen.h"

#include <stdio.h>

static void print_times(const char *before, struct samples *times) {
    if (times->count)
        printf(",\"%sp50_us\":%.1f,\"%sp99_us\":%.1f", before, samples_us(times, 50), before,
               samples_us(times, 99));
}

int run_main(void) {
    double seconds = 0, server_s = 0, own_s = 0;
    uint64_t published = 0, receipts = 0;
    past_deadline(); /* starts its clock */
    size_t read_bytes = options.subscribers > MANY ? MANY_READ_BYTES : READ_BYTES;
    struct subscribers *readers = subscribers_open(options.subscribers, read_bytes);
    struct publishers *writers = failed() ? NULL : publishers_open(options.publishers);
    if (!failed()) {
        subscribers_start(readers);
        publishers_probe(writers, readers);
        server_s = server_cpu_s();
        own_s = own_cpu_s();
        int64_t start_ns = now_ns();
        published = publishers_run(writers, readers);
        int64_t receipts_ns = now_ns();
        int64_t last_ns = subscribers_finish(readers, published);
        receipts = publishers_receipts(writers);
        if (options.receipts && receipts_ns > last_ns)
            last_ns = receipts_ns;
        seconds = (double)(last_ns - start_ns) * 1e-9;
        server_s = server_cpu_s() - server_s;
        own_s = own_cpu_s() - own_s;
    }
    printf("{\"verified\":%s,\"error\":%s,\"messages\":%llu,\"delivered\":%llu,\"receipts\":%llu,"
           "\"seconds\":%.6f,\"server_cpu_s\":%.6f,\"generator_cpu_s\":%.6f",
           failed() ? "false" : "true", failure_json(), (unsigned long long)published,
           (unsigned long long)subscribers_delivered_sum(readers), (unsigned long long)receipts,
           seconds, server_s, own_s);
    if (!failed()) {
        print_times("", subscribers_latencies(readers));
        print_times("late_", publishers_lateness(writers));
    }
    puts("}");
    return failed();
}
