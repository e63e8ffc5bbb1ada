/* tests/gpu/cuda_layouts_test.c: over the fake NCCL, what differs between machines: its version,
 * and which GPUs ranks see. */
#include "comm/comm_internal.h"
#include "comm/nccl/nccl.h"
#include "knap.h"
#include "tests/gpu/nccl_ranks.h"

#include <unistd.h>

/* ---- versions -------------------------------------------------------------------------------- */

/* Splits, groups of calls, sends and receives, registered memory; again with some that have been
 * connected before. */
static int version_rank(kn_comm *w)
{
    int rank = kn_rank(w), n = kn_comm_size(w);
    kn_memory *m = kn_comm_memory_on(w, KN_CUDA);
    kn_comm *pair = m ? kn_comm_split(w, rank % 2, rank, "pair") : NULL, *copy = NULL;
    EXPECT(pair && (copy = kn_comm_dup(pair, "copy")));
    kn_stream *s = kn_stream_create(KN_CUDA, "side", KN_STREAM_AUTO);
    for (int k = 0; k < 4; k++) {
        enum { COUNT = 3000 };
        uint16_t *half = gpu(m, NULL, (size_t)(n * COUNT) * 2), one = 0x3f80; /* 1 as bf16 */
        float *sums = gpu(m, NULL, 2 * COUNT * sizeof *sums), *all = gpu(m, NULL, n * 4);
        EXPECT(half && sums && all);
        for (int i = 0; i < n * COUNT; i++)
            half[i] = one;
        kn_comm_piece p[2] = { { sums, NULL, half, COUNT, KN_F32, KN_BF16 },
                               { sums + COUNT, NULL, half, COUNT, KN_F32, KN_BF16 } };
        EXPECT(kn_reduce_scatter_pieces(w, p, 2, s, "sends and receives"));
        all[rank] = (float)rank;
        EXPECT(kn_all_gather(w, all, all + rank, 1, KN_F32, s, "gather") && kn_stream_sync(s));
        for (int i = 0; i < 2 * COUNT; i++)
            EXPECT(sums[i] == (float)n, "%d: %g", i, (double)sums[i]);
        for (int r = 0; r < n; r++)
            EXPECT(all[r] == (float)r);
        EXPECT(sum_of(pair, 1, n / 2) && sum_of(copy, 2, n / 2 * 2) && sum_of(w, 1, n));
    }
    kn_stream_destroy(s);
    return 0;
}

KN_TEST(cuda_layouts, every_version_of_nccl)
{
    static const int versions[] = { 21805, 21903, 22105, 22203, 22304, 22403, 22602, 22902, 23007 };
    for (size_t i = 0; i < sizeof versions / sizeof *versions; i++) {
        library(versions[i] < 21900 ? "libfake_nccl_2_18.so" : "libfake_nccl.so");
        nccl->version = versions[i];
        for (int k = 0; k < 3; k++) { /* each with 0, 3 and 6 polls and with 2, 4 and 8 ranks */
            nccl->polls = 3 * k;
            good(2 << (i + (size_t)k) % 3, version_rank);
        }
    }
}

/* ---- slow ------------------------------------------------------------------------------------ */

static const char *slow[2];

static int slow_rank(kn_comm *w)
{
    EXPECT(!kn_comm_nccl_lacks(NULL, 0) && !kn_comm_nccl_lacks(w, 0) && sum_of(w, 1, 2));
    EXPECT(kn_comm_memory_on(w, KN_CUDA));
    for (int i = 0; i < 2; i++) {
        const char *said = kn_comm_nccl_lacks(w, i);
        EXPECT(said && slow[i] ? strstr(said, slow[i]) != NULL : said == slow[i], "%d: %s", i,
               said);
    }
    EXPECT(!kn_comm_nccl_lacks(w, 2) && !kn_comm_nccl_lacks(w, -1));
    return 0;
}

static void lacks(int version, int driver, const char *first, const char *second)
{
    nccl->version = version;
    fake.driver = driver;
    slow[0] = first;
    slow[1] = second;
    good(2, slow_rank);
}

KN_TEST(cuda_layouts, what_nccl_does_slowly_is_said)
{
    lacks(22902, 12090, NULL, NULL);
    lacks(22902, 12080,
          "recorded steps run their collectives one after another: the driver is "
          "older than R575",
          NULL);
    lacks(22602, 13000, "one after another: NCCL is older than 2.27", NULL);
    lacks(22403, 12080, "memory isn't registered with it: NCCL before 2.26", NULL);
    setenv("KNAP_REGISTER", "0", 1);
    lacks(22902, 12080, "isn't registered with it: KNAP_REGISTER=0",
          "the driver is older than R575");
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "0", 1);
    lacks(22902, 12080, "isn't registered with it: KNAP_REGISTER=0", NULL);
    unsetenv("NCCL_LAUNCH_ORDER_IMPLICIT");
    unsetenv("KNAP_REGISTER");
    nccl->fail_register = 1;
    lacks(22902, 13000, "ncclCommRegister failed", NULL);
    nccl->fail_register = 0;
}

/* ---- who shares a GPU ------------------------------------------------------------------------ */

/* What four ranks see: the GPUs, those of the host before them, and variables; "%d" is the rank. */
static const struct layout {
    const char *what;
    int gpus, before, a_host;        /* before: times the rank; ranks on one host */
    const char *chosen, *local_rank; /* KNAP_CUDA_DEVICE, LOCAL_RANK; NULL: not set */
    bool shared;
} layouts[] = {
    { "all visible", 8, 0, 4, NULL, "rank", false },
    { "all visible, chosen by a script", 8, 0, 4, "rank", NULL, false },
    { "CUDA_VISIBLE_DEVICES by rank", 1, 1, 4, NULL, "rank", false },
    { "srun --gpus-per-task=1", 1, 1, 4, "0", NULL, false },
    { "two hosts, all visible", 2, 0, 2, NULL, "local", false },
    { "two hosts, one GPU each visible", 1, 1, 2, NULL, "local", false },
    { "fewer GPUs than ranks", 2, 0, 4, NULL, "rank", true },
    { "all choose one", 8, 0, 4, "0", "rank", true },
    { "two hosts, which share", 1, 0, 2, NULL, "local", true },
};
static const struct layout *layout;

static void set(const char *name, const char *how, int rank)
{
    char text[16];
    snprintf(text, sizeof text, "%d",
             strcmp(how ? how : "", "rank") == 0    ? rank
             : strcmp(how ? how : "", "local") == 0 ? rank % layout->a_host
                                                    : 0);
    if (how)
        setenv(name, text, 1);
    else
        unsetenv(name);
}

static int layout_rank(kn_comm *w)
{
    int rank = kn_rank(w);
    char host[16];
    fake.devices = layout->gpus;
    fake.hidden = layout->before * (rank % layout->a_host);
    set("KNAP_CUDA_DEVICE", layout->chosen, rank);
    set("LOCAL_RANK", layout->local_rank, rank);
    snprintf(host, sizeof host, "host%d", rank / layout->a_host);
    setenv("NCCL_HOSTID", host, 1);
    EXPECT(sum_of(w, rank, 6));
    EXPECT(w->nccl->shared == layout->shared && !getenv("NCCL_NET") == !layout->shared, "%s",
           layout->what);
    EXPECT(!getenv("NCCL_SOCKET_IFNAME") == !(layout->shared && layout->a_host == 4));
    kn_comm *pair = kn_comm_split(w, rank / 2, rank, "pair");
    EXPECT(pair && sum_of(pair, rank, rank < 2 ? 1 : 5) && pair->nccl->shared == layout->shared);
    return 0;
}

/* The error output of fn on 4 ranks. */
static void heard(rank_fn fn, char *text, size_t size)
{
    FILE *file = tmpfile();
    int out = dup(STDERR_FILENO);
    KN_CHECK(file && out >= 0);
    fflush(stderr);
    dup2(fileno(file), STDERR_FILENO);
    int failed = on(4, fn);
    fflush(stderr);
    dup2(out, STDERR_FILENO);
    close(out);
    rewind(file);
    text[fread(text, 1, size - 1, file)] = 0;
    fclose(file);
    KN_CHECK(failed == 0, "%s: %s", layout->what, text);
}

KN_TEST(cuda_layouts, ranks_share_a_gpu_where_its_place_is_the_same)
{
    char text[4096];
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        layout = &layouts[i];
        heard(layout_rank, text, sizeof text);
        const char *line = strstr(text, " share a GPU (PCI 0000:10)");
        KN_CHECK(!line == !layout->shared && !(line && strstr(line + 1, " share a GPU")), "%s: %s",
                 layout->what, text);
    }
}
