/* comm/nccl/nccl_place.c: which ranks share a GPU (nccl.h), by what NCCL itself compares: the host,
 * which is its name and its boot, or NCCL_HOSTID (getHostHash), and the GPU's PCI bus id
 * (initTransportsRank, which refuses a duplicate GPU). How many GPUs a rank sees says nothing: a
 * launcher may show each rank one. */
#include "comm/nccl/nccl.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct place {
    int64_t host, gpu;
} place;

/* ---- where this rank is ---------------------------------------------------------------------- */

/* FNV-1a. */
static int64_t hash(const char *text)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (; *text; text++)
        h = (h ^ (unsigned char)*text) * 0x100000001b3u;
    return (int64_t)(h >> 1);
}

static int64_t host;
static pthread_once_t host_known = PTHREAD_ONCE_INIT;

/* Once, as NCCL does: sharing changes NCCL_HOSTID. */
static void find_host(void)
{
    char text[512] = "";
    const char *given = getenv("NCCL_HOSTID");
    gethostname(text, 255);
    text[255] = 0;
    size_t name = strlen(text);
    FILE *f = given ? NULL : fopen("/proc/sys/kernel/random/boot_id", "r");
    if (f && !fgets(text + name, (int)(sizeof text - name), f))
        text[name] = 0;
    if (f)
        fclose(f);
    host = hash(given ? given : text);
}

static bool find(place *p)
{
    char bus[32] = "";
    unsigned domain = 0, number = 0, device = 0, function = 0;
    pthread_once(&host_known, find_host);
    if (!kn_cuda_check(cudaDeviceGetPCIBusId(bus, sizeof bus, kn_cuda_index()), "nccl"))
        return false;
    sscanf(bus, "%x:%x:%x.%x", &domain, &number, &device, &function);
    *p = (place){ host, (int64_t)domain << 20 | number << 12 | device << 4 | function };
    return true;
}

/* ---- where all are --------------------------------------------------------------------------- */

static bool same(place a, place b)
{
    return a.host == b.host && a.gpu == b.gpu;
}

/* How many ranks of all are on the GPU of rank. */
static int sharers(const place *all, int size, int rank)
{
    int n = 0;
    for (int r = 0; r < size; r++)
        n += same(all[r], all[rank]);
    return n;
}

/* One line, of the first GPU that is shared. */
static void say(const place *all, int size, int first)
{
    static _Atomic bool told;
    char ranks[200];
    size_t at = 0;
    for (int r = first; r < size && at + 32 < sizeof ranks; r++)
        if (same(all[r], all[first]))
            at += (size_t)snprintf(ranks + at, sizeof ranks - at, "%s%d", at ? ", " : "", r);
    kn_cuda_tell(&told,
                 "ranks %s%s share a GPU (PCI %04" PRIx64 ":%02" PRIx64
                 "): NCCL moves bytes between all ranks through sockets, which is slow; for speed "
                 "start one rank a GPU",
                 ranks, at + 32 < sizeof ranks ? "" : ", ...", (uint64_t)all[first].gpu >> 20,
                 (uint64_t)all[first].gpu >> 12 & 0xff);
}

/* NCCL refuses two ranks on one GPU of one host. Where there are such, each rank says that it is a
 * host of its own, so that they talk through sockets: slow, and right, for tests. All ranks do the
 * same: what they would talk through otherwise must be the same on both ends. */
static void let_share(int rank, bool one_host)
{
    static const char *const setting[][2] = {
        { "NCCL_NET", "Socket" },       { "NCCL_IB_DISABLE", "1" }, { "NCCL_MNNVL_ENABLE", "0" },
        { "NCCL_NVLS_ENABLE", "0" },    { "NCCL_GIN_ENABLE", "0" }, { "NCCL_RAS_ENABLE", "0" },
        { "NCCL_MAX_CTAS", "2" },       { "NCCL_ALGO", "Ring" },    { "NCCL_PROTO", "Simple" },
        { "NCCL_SOCKET_IFNAME", "lo" }, /* the last: on one host only */
    };
    size_t settings = sizeof setting / sizeof *setting;
    char id[32];
    snprintf(id, sizeof id, "knap%d", rank);
    setenv("NCCL_HOSTID", id, 1);
    for (size_t i = 0; i < settings - !one_host; i++)
        setenv(setting[i][0], setting[i][1], 0);
}

bool kn_nccl_place(kn_comm *c, bool *shared)
{
    place *all = kn_host_calloc((size_t)c->size, sizeof *all);
    bool one_host = true;
    int first = -1;
    /* gathers and reductions have communicators of their own, issued in the same order on every
     * rank */
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0);
    if (!all || !find(&all[c->rank]) ||
        !kn_nccl_host_sum(c, &all[0].host, 2 * c->size, "the ranks' GPUs")) {
        kn_host_free(all);
        return false;
    }
    for (int r = c->size - 1; r >= 0; r--) {
        one_host &= all[r].host == all[0].host;
        first = sharers(all, c->size, r) > 1 ? r : first;
    }
    *shared = first >= 0;
    if (*shared)
        let_share(kn_context_get()->rank, one_host);
    if (*shared)
        say(all, c->size, first);
    kn_host_free(all);
    return true;
}
