/* tests/fsdp/failure_test.c: a rank that fails at any meeting of a training step: every other rank
 * ends too, not by a timeout, and nothing is left behind. The step is complete (wrapping, gathers,
 * reductions, hybrid all-reduces, clipping, the optimizer). launch_test.c tests the messages. */
#include "comm/comm_internal.h"
#include "tests/fsdp/net.h"

#include <dirent.h>
#include <sys/wait.h>

typedef struct failing {
    way w;
    kn_fault_kind how;
    int64_t at;               /* the number of the failing meeting, on the last rank */
    _Atomic int *got_through; /* ranks */
} failing;

static void step(kn_comm *world, void *arg)
{
    failing *f = arg;
    net m;
    kn_set_threads(1);
    kn_comm_set_timeout(world, 100000); /* the runner ends what waits so long */
    if (kn_rank(world) == kn_comm_size(world) - 1)
        kn_fault_at(KN_AT_MEETING, f->at, f->how);
    bool ok = net_init(&m, KN_META) && net_wrap(&m, world, &f->w);
    kn_optim *o = ok ? kn_sgd(&m, .lr = 0.1) : NULL;
    ok = o && net_backward(&m, kn_rank(world)) && kn_item(kn_clip_grad_norm(&m, 1)) > 0 &&
         kn_step(o);
    kn_fault_at(KN_AT_MEETING, 0, f->how);
    ok = ok && kn_agree(world, true);
    kn_optim_free(o);
    kn_module_free(&m);
    *f->got_through += ok;
    KN_CHECK(ok);
}

/* The open files and the shared memory of this process, where a leftover of kn_spawn shows: its
 * memory has no name. Other programs of the machine have files in /dev/shm, which come and go. */
static int files_and_shared_memory(void)
{
    char line[512];
    int n = 0;
    DIR *d = opendir("/proc/self/fd");
    FILE *maps = fopen("/proc/self/maps", "r");
    while (d && readdir(d))
        n++;
    while (maps && fgets(line, sizeof line, maps)) {
        const char *rights = strchr(line, ' ');
        n += rights && rights[4] == 's';
    }
    if (maps)
        fclose(maps);
    if (d)
        closedir(d);
    return n;
}

static void at_every_meeting(kn_fault_kind how, way w, int ranks)
{
    int before = files_and_shared_memory();
    int64_t at = 1;
    _Atomic int *through = shared_bytes(sizeof *through);
    for (;; at++) {
        failing f = { w, how, at, through };
        *through = 0;
        int failed = spawn_processes(ranks, step, &f);
        KN_CHECK(failed == ranks - *through, "meeting %lld: %d ranks failed, %d got through",
                 (long long)at, failed, *through);
        if (failed == 0)
            break;
        KN_CHECK(failed == ranks, "meeting %lld: only %d of %d ranks ended", (long long)at, failed,
                 ranks);
        KN_CHECK(at < 500, "the step never ends");
    }
    munmap((void *)through, sizeof *through);
    KN_CHECK(at > 10, "only %lld meetings were tried", (long long)at);
    int more = files_and_shared_memory() - before;
    KN_CHECK(more == 0, "%d open files or shared areas are left", more);
    KN_CHECK(waitpid(-1, NULL, WNOHANG) < 0, "a process is left");
}

KN_TEST(failure, a_rank_exits_anywhere_in_a_step)
{
    at_every_meeting(KN_FAULT_EXIT, ways[0], 3);
}

KN_TEST(failure, a_rank_crashes_anywhere_in_a_step)
{
    at_every_meeting(KN_FAULT_CRASH, ways[1], 2);
}

KN_TEST(failure, a_rank_runs_out_of_memory_anywhere_in_a_step)
{
    at_every_meeting(KN_FAULT_MEMORY, ways[2], 3);
}

KN_TEST(failure, an_error_anywhere_in_a_hybrid_step)
{
    at_every_meeting(KN_FAULT_ERROR, ways[8], 4);
}
