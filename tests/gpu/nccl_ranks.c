/* tests/gpu/nccl_ranks.c: see nccl_ranks.h. */
#include "tests/gpu/nccl_ranks.h"
#include "kernels/cuda/runtime/runtime.h"
#include "tests/gpu/emulator/emulated.h"

#include <dlfcn.h>
#include <sys/mman.h>

#undef KN_CPU /* on_cuda.h puts CUDA in its place */

/* ---- the machine ----------------------------------------------------------------------------- */

bool on_cpu_kernels;

/* As the fake GPU computes: this GPU's memory is the host's. */
static kn_status compute(int k, const void *args)
{
    const kn_provider *cpu[KN_MAX_PROVIDERS];
    kn_status status = KN_DECLINED;
    if (!on_cpu_kernels)
        return kn_emulated_kernels.run[k](args);
    if (k == KN_K_MATMUL && kn_matmul_has_epilogue(args))
        return KN_DECLINED; /* in parts */
    for (int i = 0, n = kn_providers(KN_CPU, cpu); i < n && status == KN_DECLINED; i++)
        status = cpu[i]->run[k] ? cpu[i]->run[k](args) : KN_DECLINED;
    return status;
}

/* A kernel waits for the work of its stream. */
#define KERNELS(x)                                                                                 \
    x(0) x(1) x(2) x(3) x(4) x(5) x(6) x(7) x(8) x(9) x(10) x(11) x(12) x(13) x(14) x(15) x(16)    \
        x(17) x(18) x(19) x(20) x(21) x(22) x(23) x(24) x(25) x(26) x(27) x(28) x(29) x(30) x(31)  \
            x(32) x(33) x(34) x(35) x(36) x(37) x(38) x(39) x(40) x(41) x(42) x(43) x(44) x(45)    \
                x(46) x(47)
_Static_assert(KN_K_COUNT <= 48, "more kernels: lengthen KERNELS");
#define RUN(k)                                                                                     \
    static kn_status run_##k(const void *args)                                                     \
    {                                                                                              \
        fake_wait(kn_gpu_current()->handle);                                                       \
        return compute(k, args);                                                                   \
    }
KERNELS(RUN)
static kn_provider provider;

fake_nccl *nccl;

static bool recording(void *stream)
{
    return ((cudaStream_t)stream)->capture;
}

static void gpu_at(char *bus_id, int length)
{
    cudaDeviceGetPCIBusId(bus_id, length, fake.device);
}

void library(const char *name)
{
    char path[4200], self[4000] = "";
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    char *slash = n > 0 ? strrchr(self, '/') : NULL;
    if (slash)
        *slash = 0;
    snprintf(path, sizeof path, "%s/%s", self, name);
    setenv("KNAP_NCCL", path, 1);
    void *l = dlopen(path, RTLD_NOW);
    nccl = l ? dlsym(l, "fake_nccl_state") : NULL;
    if (!nccl) {
        fprintf(stderr, "%s\n", dlerror());
        abort();
    }
    nccl->launch = fake_launch;
    nccl->recording = recording;
    nccl->gpu = gpu_at;
}

__attribute__((constructor)) static void machine(void)
{
    fake_begin();
    provider = kn_emulated_kernels;
#define ENTER(k)                                                                                   \
    if (k < KN_K_COUNT && provider.run[k < KN_K_COUNT ? k : 0])                                    \
        provider.run[k < KN_K_COUNT ? k : 0] = run_##k;
    KERNELS(ENTER)
    kn_cuda_own_provider = &provider;
    fake.devices = 8;
    library("libfake_nccl.so");
}

_Thread_local int naps;

int nanosleep(const struct timespec *time, struct timespec *rest)
{
    naps++;
    return clock_nanosleep(CLOCK_REALTIME, 0, time, rest) == 0 ? 0 : -1;
}

/* ---- what is common -------------------------------------------------------------------------- */

board *b;

static int one_rank(kn_comm *w, void *arg)
{
    return (*(rank_fn *)arg)(w);
}

/* Sums the fake library's counts after the world has ended. */
static void count(void)
{
    atomic_fetch_add(&b->aborts, nccl->aborts);
    atomic_fetch_add(&b->ids, nccl->ids);
    atomic_fetch_add(&b->inits, nccl->inits);
    atomic_fetch_add(&b->splits, nccl->splits);
    atomic_fetch_add(&b->left, nccl->enrolled - nccl->dismissed);
}

static void (*end_next)(kn_context *c);

static void context_ends(kn_context *c)
{
    bool rank = c->init_state && c->world > 1;
    end_next(c);
    if (rank && b)
        count();
}

int on(int n, rank_fn fn)
{
    if (!b)
        b = mmap(NULL, sizeof *b, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    memset(b, 0, sizeof *b);
    if (!end_next) {
        end_next = kn_context_on_end;
        kn_context_on_end = context_ends;
    }
    int failed = kn_spawn(n, one_rank, &fn);
    KN_CHECK_OK();
    return failed;
}

void good(int n, rank_fn fn)
{
    int failed = on(n, fn);
    KN_CHECK(failed == 0, "%d of %d ranks failed", failed, n);
    KN_CHECK(b->aborts == 0 && b->left == 0, "aborts %d, left %d", b->aborts, b->left);
}

void *gpu(kn_memory *m, const void *from, size_t bytes)
{
    void *p = kn_take(m, bytes + 1, KN_MEM_DATA);
    if (p && from)
        memcpy(p, from, bytes); /* this GPU's memory is the host's */
    return p;
}

bool sum_of(kn_comm *c, int64_t mine, int64_t want)
{
    kn_stream *s = kn_compute_stream(KN_CUDA);
    int64_t *x = gpu(kn_device_memory(KN_CUDA), &mine, sizeof mine);
    bool ok = kn_all_reduce_i64(c, x, 1, s, "sum") && kn_stream_sync(s);
    return ok &&
           (*x == want || kn_fail("the sum is %lld, not %lld", (long long)*x, (long long)want));
}

static rank_fn of_tcp;
static host_job hosts;

static int tcp_rank(kn_comm *w)
{
    return host_main(w, &hosts);
}

rank_fn over_tcp(rank_fn fn)
{
    of_tcp = fn;
    hosts = hosts_of(one_rank, &of_tcp);
    return tcp_rank;
}
