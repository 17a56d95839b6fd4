/* A flood beside a run: a child process with a publisher and a subscriber of its own, on a topic
 * that the run does not have. It begins before the run's clock starts and ends after it stops. */
#include "loadgen.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WARM_UP_MS = 200 };

static pid_t pid;

static void flood(struct flood *shared) {
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* a parent that is killed cannot stop it */
    options.first_topic = options.topics;
    options.topics = options.publishers = options.subscribers = 1;
    options.one_per_write = !strcmp(options.beside, "single");
    options.rate = 0;
    options.receipts = 0;
    options.timed = false;
    options.beside = NULL;
    options.messages_max = 0;
    options.duration_s = options.deadline_s;
    options.flood = shared;
    run_once(&shared->result);
    snprintf(shared->failure, sizeof shared->failure, "%s", failed() ? failure_text() : "");
    atomic_store(&shared->state, FLOOD_ENDED);
    _exit(0);
}

struct flood *flood_start(void) {
    const int shareable = MAP_SHARED | MAP_ANONYMOUS;
    struct flood *shared =
        mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, shareable, -1, 0);
    pid = shared == MAP_FAILED ? -1 : fork();
    if (pid < 0) {
        fail("cannot start the flood: %s", strerror(errno));
        return NULL;
    }
    if (!pid)
        flood(shared);
    while (atomic_load(&shared->state) == FLOOD_OPENS && !failed()) {
        wait_readable(-1, 1);
        if (past_deadline())
            fail("the flood did not begin before the deadline");
    }
    wait_readable(-1, WARM_UP_MS);
    return shared;
}

void flood_stop(struct flood *shared) {
    if (failed())
        kill(pid, SIGKILL);
    atomic_store(&shared->stop, true);
    waitpid(pid, NULL, 0);
    if (atomic_load(&shared->state) != FLOOD_ENDED)
        fail("the flood was killed");
    else if (shared->failure[0])
        fail("the flood failed: %s", shared->failure);
}
