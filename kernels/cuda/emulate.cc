/* kernels/cuda/emulate.cc: the fibers behind emulate.h, and the runtime's functions for kernels that run
 * on host memory.
 *
 * A fiber begins with makecontext; afterwards _setjmp and _longjmp switch, which make no system call. It is
 * kept for the next block. Barriers are counted: a fiber may run when its warp and its block have no thread
 * at an earlier barrier. */
#ifndef KN_CUDA_EMULATE
#define KN_CUDA_EMULATE
#endif
#undef _FORTIFY_SOURCE /* its _longjmp takes the jump to another stack for an error */
#include "kernels/cuda/cuda.cuh"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <vector>

#define MAX_THREADS 1024
#define STACK_BYTES (64 << 10)

dim3 threadIdx, blockIdx, blockDim, gridDim;
alignas(64) unsigned char kn_emulated_dynamic[228 << 10];

namespace
{
/* Threads that meet: `round` barriers were passed by all, `behind` of `alive` aren't at the next one. */
struct group {
    long round;
    int alive, behind;

    void step()
    {
        if (--behind == 0) {
            round++;
            behind = alive;
        }
    }
    void leave()
    {
        alive--;
        step();
    }
};

struct fiber {
    ucontext_t context;
    jmp_buf jump;
    char *stack;
    dim3 index;
    bool begun, done;
    long block_barriers, warp_barriers; /* passed or waited at */
};

struct warp {
    group threads;
    unsigned char slot[2][32][16]; /* exchanges, used in turn */
};

std::vector<fiber> fibers(MAX_THREADS);
std::vector<warp> warps(MAX_THREADS / 32);
group block_threads;
jmp_buf scheduler;
const std::function<void()> *body;
char kernel_name[64];
int threads, current = -1;

void yield()
{
    if (_setjmp(fibers[current].jump) == 0)
        _longjmp(scheduler, 1);
    threadIdx = fibers[current].index;
}

/* A fiber's life: one thread of one block after another. */
void entry()
{
    for (;;) {
        (*body)();
        fibers[current].done = true;
        yield();
    }
}

void resume(int i)
{
    current = i;
    threadIdx = fibers[i].index;
    if (_setjmp(scheduler) != 0)
        return;
    if (fibers[i].begun)
        _longjmp(fibers[i].jump, 1);
    fibers[i].begun = true;
    setcontext(&fibers[i].context);
}

[[noreturn]] void stuck(const char *what)
{
    fprintf(stderr, "emulated kernel %s: %s that not every thread reaches\n", kernel_name, what);
    abort();
}

void prepare(int i)
{
    fiber &f = fibers[i];
    f.done = false;
    f.block_barriers = f.warp_barriers = 0;
    f.index = dim3((unsigned)i % blockDim.x, (unsigned)i / blockDim.x % blockDim.y,
                   (unsigned)i / blockDim.x / blockDim.y);
    if (f.stack)
        return;
    f.stack = (char *)malloc(STACK_BYTES);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack;
    f.context.uc_stack.ss_size = STACK_BYTES;
    f.context.uc_link = nullptr;
    makecontext(&f.context, entry, 0);
}

bool run_warp(int first, int end)
{
    warp &w = warps[first / 32];
    bool moved = false;
    for (int i = first; i < end; i++) {
        fiber &f = fibers[i];
        if (f.done || f.block_barriers > block_threads.round || f.warp_barriers > w.threads.round)
            continue;
        moved = true;
        resume(i);
        if (f.done) {
            w.threads.leave();
            block_threads.leave();
        }
    }
    return moved;
}

void run_block()
{
    block_threads = { 0, threads, threads };
    for (int i = 0; i < threads; i++)
        prepare(i);
    for (int first = 0; first < threads; first += 32) {
        int n = threads - first < 32 ? threads - first : 32;
        warps[first / 32].threads = { 0, n, n };
    }
    while (block_threads.alive > 0) {
        bool moved = false;
        for (int first = 0; first < threads; first += 32)
            while (run_warp(first, first + 32 < threads ? first + 32 : threads))
                moved = true;
        if (!moved)
            stuck("a barrier");
    }
    for (int i = 1; i < threads; i++)
        if (fibers[i].block_barriers != fibers[0].block_barriers)
            stuck("a __syncthreads");
    current = -1;
}
} // namespace

void kn_emulated_too_many(int most)
{
    fprintf(stderr, "emulated kernel %s: launched with %d threads a block, its KN_KERNEL says at most %d\n",
            kernel_name, threads, most);
    abort();
}

void __syncthreads(void)
{
    if (current < 0)
        stuck("KN_RUN_FLAT for a kernel with a __syncthreads");
    fibers[current].block_barriers++;
    block_threads.step();
    yield();
}

void __syncwarp(unsigned)
{
    if (current < 0)
        stuck("KN_RUN_FLAT for a kernel with a __syncwarp");
    fibers[current].warp_barriers++;
    warps[current / 32].threads.step();
    yield();
}

void kn_emulated_exchange(const void *mine, void *theirs, size_t bytes, int from)
{
    if (current < 0)
        stuck("KN_RUN_FLAT for a kernel with a shuffle");
    fiber &f = fibers[current];
    warp &w = warps[current / 32];
    int lane = current % 32, half = (int)(f.warp_barriers & 1);
    memcpy(w.slot[half][lane], mine, bytes);
    f.warp_barriers++;
    w.threads.step();
    yield();
    int first = current / 32 * 32;
    memcpy(theirs, first + from < threads ? w.slot[half][from] : mine, bytes);
}

void kn_emulate(dim3 grid, dim3 block, size_t dynamic, bool use_fibers, const char *name,
                const std::function<void()> &f)
{
    gridDim = grid;
    blockDim = block;
    threads = (int)(block.x * block.y * block.z);
    body = &f;
    kn_cuda_plain(name, kernel_name, sizeof kernel_name);
    if (threads < 1 || threads > MAX_THREADS || dynamic > sizeof kn_emulated_dynamic ||
        grid.x < 1 || grid.y < 1 || grid.z < 1 || grid.y > 65535 || grid.z > 65535) {
        kn_fail("emulated kernel %s: no GPU launches a grid of %u x %u x %u blocks of %d threads with "
                "%zu bytes",
                kernel_name, grid.x, grid.y, grid.z, threads, dynamic);
        return;
    }
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                blockIdx = dim3(x, y, z);
                memset(kn_emulated_dynamic, 0xff, dynamic); /* nobody may count on zeros */
                if (use_fibers) {
                    run_block();
                    continue;
                }
                for (unsigned k = 0; k < block.z; k++)
                    for (unsigned j = 0; j < block.y; j++)
                        for (unsigned i = 0; i < block.x; i++) {
                            threadIdx = dim3(i, j, k);
                            f();
                        }
            }
}

/* ---- recorded launches ---------------------------------------------------------------------------- */

struct launch {
    dim3 grid, block;
    size_t dynamic;
    bool fibers;
    const char *name;
    std::function<void()> body;
};

static void run_launch(void *arg)
{
    const launch *l = (const launch *)arg;
    kn_emulate(l->grid, l->block, l->dynamic, l->fibers, l->name, l->body);
}

static void drop_launch(void *arg)
{
    delete (launch *)arg;
}

void kn_emulate_later(dim3 grid, dim3 block, size_t dynamic, bool fibers, const char *name,
                      const std::function<void()> &body)
{
    kn_cuda_record(run_launch, drop_launch, new launch{ grid, block, dynamic, fibers, name, body });
}

extern "C" __attribute__((weak)) bool kn_cuda_record(void (*)(void *), void (*)(void *), void *)
{
    return false;
}

/* ---- the runtime's part --------------------------------------------------------------------------- */

static kn_cuda_flag flag;

extern "C" void *kn_cuda_stream(void)
{
    return nullptr;
}

/* What a GPU reports at the next synchronisation is reported at once. */
extern "C" kn_status kn_cuda_launched(const char *kernel)
{
    char name[64];
    kn_cuda_plain(kernel, name, sizeof name);
    if (flag.what) {
        const char *text = flag.what == KN_FLAG_TARGET ? "%s: target %lld in row %lld is no class"
                                                       : "%s: index %lld at position %lld is outside";
        kn_fail(text, name, flag.value, flag.where);
        flag = {};
    }
    return kn_ok() ? KN_DONE : KN_FAILED;
}

extern "C" int kn_cuda_multiprocessors(void)
{
    return 2; /* few, so that grid-stride loops go round */
}

extern "C" void *kn_cuda_scratch(size_t bytes)
{
    static std::vector<unsigned char> room;
    room.assign(bytes + 16, 0xff);
    return room.data();
}

extern "C" const void *kn_cuda_table(const void *host, size_t bytes)
{
    static std::vector<unsigned char> room;
    room.assign((const unsigned char *)host, (const unsigned char *)host + bytes);
    return room.data();
}

extern "C" kn_cuda_flag *kn_cuda_flags(void)
{
    return &flag;
}
