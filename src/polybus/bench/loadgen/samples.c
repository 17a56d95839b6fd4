/* Times of one kind, and their percentiles. */
#include "loadgen.h"

#include <stdlib.h>

enum { SAMPLES_MAX = 4 << 20 };

void samples_add(struct samples *samples, int64_t ns) {
    if (!samples->ns)
        samples->ns = checked_alloc(SAMPLES_MAX * sizeof *samples->ns);
    if (samples->count < SAMPLES_MAX) /* over four seconds count as four seconds */
        samples->ns[samples->count++] = ns < 0 ? 0 : ns > UINT32_MAX ? UINT32_MAX : (uint32_t)ns;
}

static int by_size(const void *left, const void *right) {
    uint32_t a = *(const uint32_t *)left, b = *(const uint32_t *)right;
    return (a > b) - (a < b);
}

void samples_sort(struct samples *samples) {
    if (samples->count)
        qsort(samples->ns, samples->count, sizeof *samples->ns, by_size);
}

double samples_us(const struct samples *sorted, int percent) {
    return sorted->count ? sorted->ns[sorted->count * (size_t)percent / 100] / 1e3 : 0;
}
