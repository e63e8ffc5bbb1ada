/* comm/launch/cores.c: shares the cores of this machine among its ranks. */
#include "comm/local/local.h"
#include <sched.h>
#include <unistd.h>

/* The mask this process inherited; on machines with more cores than a cpu_set_t holds, their
 * number only (and then no rank is pinned). */
static int cores_available(cpu_set_t *mask)
{
    CPU_ZERO(mask);
    if (sched_getaffinity(0, sizeof *mask, mask) == 0 && CPU_COUNT(mask) > 0)
        return CPU_COUNT(mask);
    CPU_ZERO(mask);
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (int)n : 1;
}

kn_local_cores kn_local_share_cores(int ranks, int threads)
{
    cpu_set_t mask;
    int cores = cores_available(&mask);
    kn_local_cores r = { .threads = threads };
    if (r.threads <= 0)
        r.threads = cores >= ranks ? cores / ranks : 1;
    r.enough = (int64_t)ranks * r.threads <= cores;
    r.free = r.enough ? cores / ranks - r.threads : 0;
    return r;
}

void kn_local_pin(int rank, int ranks, int threads)
{
    cpu_set_t mask, mine;
    int cores = cores_available(&mask), each = cores / ranks, at = 0;
    if ((int64_t)ranks * threads > cores || CPU_COUNT(&mask) == 0)
        return;
    CPU_ZERO(&mine);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &mask))
            continue;
        if (at / each == rank)
            CPU_SET(cpu, &mine);
        at++;
    }
    sched_setaffinity(0, sizeof mine, &mine); /* a wish: works without */
}
