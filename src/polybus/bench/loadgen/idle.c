/* `loadgen idle`: many subscribers without messages, and the growth of the server's memory. */
#include "loadgen.h"

#include <stdio.h>
#include <stdlib.h>

enum { IN_BYTES = 2048, SAMPLE_MS = 100, SAMPLES_EQUAL = 6, SAMPLES_MAX = 100, NOISE_KIB = 64 };

/* The server's memory once it has stopped changing (or after ten seconds). */
static long settled_rss_kib(void) {
    long last = server_rss_kib();
    for (int sample = 0, equal = 0; sample < SAMPLES_MAX && equal < SAMPLES_EQUAL; sample++) {
        wait_readable(-1, SAMPLE_MS);
        long now = server_rss_kib();
        equal = labs(now - last) <= NOISE_KIB ? equal + 1 : 0;
        last = now;
    }
    return last;
}

int idle_main(void) {
    past_deadline(); /* starts its clock */
    long before_kib = settled_rss_kib(), after_kib = 0;
    struct subscribers *readers = subscribers_open(options.subscribers, IN_BYTES);
    if (!failed())
        after_kib = settled_rss_kib();
    /* A connection counts only if it is served: one message must reach every subscriber. */
    struct publishers *writers = failed() ? NULL : publishers_open(1);
    if (!failed()) {
        subscribers_start(readers);
        publishers_probe(writers, readers);
        subscribers_finish(readers, 0);
    }
    printf("{\"verified\":%s,\"error\":%s,\"connections\":%d,\"before_kib\":%ld,\"after_kib\":%ld,"
           "\"connection_bytes\":%.0f}\n",
           failed() ? "false" : "true", failure_json(), options.subscribers, before_kib, after_kib,
           (double)(after_kib - before_kib) * 1024 / options.subscribers);
    return failed();
}
