/* tests/gpu/emulator/emulate.cc: the fibers behind emulate.h, and the runtime's functions for
 * kernels that run on host memory.
 *
 * A fiber begins with makecontext; afterwards _setjmp and _longjmp switch, which make no system
 * call. Fibers are kept for the next block. Barriers are counted: a fiber may run when its warp and
 * its block have no thread at an earlier barrier. emulate_check.cc checks the threads' accesses. */
#ifndef KN_CUDA_EMULATE
#define KN_CUDA_EMULATE
#endif
#undef _FORTIFY_SOURCE /* the fortified _longjmp rejects a jump to another stack */
#include "kernels/error.h"
#include "kernels/cuda/kernels/cuda.cuh"
#include "kernels/cuda/kernels/cuda_internal.h"

#include "tests/gpu/emulator/emulate_check.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <vector>

#define MAX_THREADS 1024
#define STACK_BYTES (64 << 10)
#define USUAL_ROOM  (48 << 10) /* bytes of shared memory that a block has by default */
#define MOST_ROOM   (99 << 10) /* at most, on the smallest GPU (sm_86, sm_120) */

dim3 kn_emulated_index[4];
alignas(64) unsigned char kn_emulated_dynamic[KN_EMULATED_DYNAMIC];

namespace
{
/* ---- who goes first -------------------------------------------------------------------------- */

/* A permutation of n. */
struct order {
    uint64_t n, step, start;

    uint64_t operator[](uint64_t i) const
    {
        return (i * step + start) % n;
    }
};

uint64_t common_divisor(uint64_t a, uint64_t b)
{
    return b ? common_divisor(b, a % b) : a;
}

/* 0 ascending, 1 descending, others some. */
order order_make(uint64_t n, uint64_t number)
{
    if (number < 2)
        return { n, number ? n - 1 : 1, number ? n - 1 : 0 };
    uint64_t random = number * 0x9e3779b97f4a7c15u, step = (random >> 40) % n + 1;
    while (common_divisor(step, n) != 1)
        step++;
    return { n, step, (random >> 20) % n };
}

/* Another order for each launch, unless the environment fixes one. */
uint64_t next_order()
{
    static uint64_t launches;
    const char *held = getenv("KN_EMULATE_ORDER");
    if (!held || !*held)
        return ++launches % 4 < 2 ? launches % 4 : launches;
    return !strcmp(held, "ascending")    ? 0
           : !strcmp(held, "descending") ? 1
                                         : strtoull(held, NULL, 10);
}

/* ---- fibers ---------------------------------------------------------------------------------- */

/* Threads that meet: `round` barriers were passed by all, `behind` of `alive` aren't at the next
 * one. */
struct group {
    long round;
    int alive, behind;
    bool open; /* a thread waits, at `site` */
    uintptr_t site;

    void step()
    {
        if (--behind == 0) {
            round++;
            behind = alive;
            open = false;
        }
    }
    void arrive(uintptr_t at)
    {
        if (open && site != at)
            kn_emulated_stop(
                "threads meet at two different barriers or shuffles (%#zx, %#zx); they must reach "
                "the same one",
                site, at);
        open = true;
        site = at;
        step();
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
    uint32_t syncwarps;                 /* of these, those that order memory */
};

struct warp {
    group threads;
    unsigned char slot[2][32][16]; /* exchanges, used in turn */
    uint32_t taken[2];             /* bits of lanes with filled slots */
};

std::vector<fiber> fibers(MAX_THREADS);
std::vector<warp> warps(MAX_THREADS / 32);
group block_threads;
jmp_buf scheduler;
void (*body)(const void *);
const void *closure;
int threads, current = -1;
order lane_order, warp_order;

/* Attributes the following accesses to this thread (emulate_check.cc). */
void enter(int i)
{
    const fiber &f = fibers[i];
    kn_emulated_now.thread = (uint16_t)i;
    kn_emulated_now.block_round = (uint16_t)f.block_barriers;
    kn_emulated_now.warp_round = f.syncwarps;
    kn_emulated_now.stack[0] = { f.stack, STACK_BYTES };
    kn_emulated_now.looks = kn_emulated_now.watched;
    threadIdx = f.index;
}

void yield()
{
    kn_emulated_now.looks = false;
    if (_setjmp(fibers[current].jump) == 0)
        _longjmp(scheduler, 1);
    enter(current);
}

/* The function of a fiber: runs one thread of one block after another. */
void entry()
{
    for (;;) {
        enter(current);
        body(closure);
        fibers[current].done = true;
        yield();
    }
}

void resume(int i)
{
    current = i;
    if (_setjmp(scheduler) != 0)
        return;
    if (fibers[i].begun)
        _longjmp(fibers[i].jump, 1);
    fibers[i].begun = true;
    setcontext(&fibers[i].context);
}

[[noreturn]] void stuck(const char *what)
{
    kn_emulated_stop("%s that not every thread reaches", what);
}

void prepare(int i)
{
    fiber &f = fibers[i];
    f.done = false;
    f.block_barriers = f.warp_barriers = f.syncwarps = 0;
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

bool run_warp(int first)
{
    warp &w = warps[first / 32];
    bool moved = false;
    for (unsigned k = 0; k < 32; k++) {
        int i = first + (int)lane_order[k];
        if (i >= threads || fibers[i].done || fibers[i].block_barriers > block_threads.round ||
            fibers[i].warp_barriers > w.threads.round)
            continue;
        moved = true;
        resume(i);
        if (fibers[i].done) {
            w.threads.leave();
            block_threads.leave();
        }
    }
    return moved;
}

void run_block()
{
    block_threads = { 0, threads, threads, false, 0 };
    for (int i = 0; i < threads; i++)
        prepare(i);
    for (int first = 0; first < threads; first += 32) {
        int n = threads - first < 32 ? threads - first : 32;
        warps[first / 32].threads = { 0, n, n, false, 0 };
    }
    while (block_threads.alive > 0) {
        bool moved = false;
        for (int k = 0; k < (threads + 31) / 32; k++)
            while (run_warp((int)warp_order[k] * 32))
                moved = true;
        if (!moved)
            stuck("a barrier");
    }
    for (int i = 1; i < threads; i++)
        if (fibers[i].block_barriers != fibers[0].block_barriers)
            stuck("a __syncthreads");
    current = -1;
}

/* Threads of kernels without barriers need no fiber. */
void run_flat(const order &o)
{
    kn_emulated_now.block_round = 0;
    kn_emulated_now.warp_round = 0;
    kn_emulated_now.stack[0] = kn_emulated_now.stack[1];
    for (int k = 0; k < threads; k++) {
        unsigned i = (unsigned)o[(uint64_t)k];
        kn_emulated_now.thread = (uint16_t)i;
        threadIdx = dim3(i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y);
        kn_emulated_now.looks = kn_emulated_now.watched;
        body(closure);
        kn_emulated_now.looks = false;
    }
}

/* ---- launches -------------------------------------------------------------------------------- */

struct room {
    const void *kernel;
    size_t bytes;
};
std::vector<room> rooms; /* kernels with a raised limit of dynamic shared memory */

size_t room_of(const void *kernel)
{
    size_t bytes = 0;
    for (const room &r : rooms)
        bytes = r.kernel == kernel ? r.bytes : bytes;
    return bytes;
}

char kernel_name[64];

/* An error where a GPU refuses the launch. */
bool launches(dim3 grid, dim3 block, size_t dynamic, const void *kernel)
{
    uint64_t n = (uint64_t)block.x * block.y * block.z;
    size_t room = room_of(kernel), most = room > USUAL_ROOM ? room : USUAL_ROOM;
    bool fits = n >= 1 && n <= MAX_THREADS && block.z <= 64 && grid.x >= 1 && grid.y >= 1 &&
                grid.z >= 1 && grid.x <= INT32_MAX && grid.y <= 65535 && grid.z <= 65535 &&
                dynamic <= most && most <= MOST_ROOM;
    return fits ||
           kn_fail(
               "emulated kernel %s: not every GPU launches a grid of %u x %u x %u blocks of %u x "
               "%u x %u threads with %zu bytes of shared memory of %zu",
               kernel_name, grid.x, grid.y, grid.z, block.x, block.y, block.z, dynamic, most);
}

/* The launching thread's stack, which holds the kernel's arguments. To find it the system lists the
 * program's memory. */
void find_stack()
{
    static thread_local void *begin;
    static thread_local size_t bytes;
    if (!begin) {
        pthread_attr_t attr;
        pthread_getattr_np(pthread_self(), &attr);
        pthread_attr_getstack(&attr, &begin, &bytes);
        pthread_attr_destroy(&attr);
    }
    kn_emulated_now.stack[1] = { (const char *)begin, bytes };
}

void run_grid(bool use_fibers, const void *kernel, const order &blocks, const order &flat)
{
    kn_emulated_thread &t = kn_emulated_now;
    t.launch = t.block + 1;
    for (uint64_t k = 0; k < blocks.n; k++) {
        uint64_t b = blocks[k];
        blockIdx = dim3((unsigned)(b % gridDim.x), (unsigned)(b / gridDim.x % gridDim.y),
                        (unsigned)(b / gridDim.x / gridDim.y));
        t.block++;
        t.fixed = 0;
        if (use_fibers)
            run_block();
        else
            run_flat(flat);
        if (t.fixed + t.dynamic > (room_of(kernel) ? MOST_ROOM : USUAL_ROOM))
            kn_emulated_stop(
                "%zu bytes of dynamic and %zu of other shared memory are more than a block has",
                t.dynamic, t.fixed);
    }
}
} // namespace

void kn_emulated_too_many(int most)
{
    kn_emulated_stop("launched with %d threads a block, its KN_KERNEL says at most %d", threads,
                     most);
}

/* Two frames identify a place, so that two calls of one function differ. All code here keeps frame
 * pointers. */
#pragma GCC diagnostic ignored "-Wframe-address"
#define SITE ((uintptr_t)__builtin_return_address(0) * 31 + (uintptr_t)__builtin_return_address(1))

void __syncthreads(void)
{
    if (current < 0)
        stuck("KN_RUN_FLAT for a kernel with a __syncthreads");
    fibers[current].block_barriers++;
    block_threads.arrive(SITE);
    yield();
}

void __syncwarp(unsigned)
{
    if (current < 0)
        stuck("KN_RUN_FLAT for a kernel with a __syncwarp");
    fibers[current].warp_barriers++;
    fibers[current].syncwarps++;
    warps[current / 32].threads.arrive(SITE);
    yield();
}

void kn_emulated_exchange(unsigned mask, const void *mine, void *theirs, size_t bytes, int from)
{
    if (current < 0)
        stuck("KN_RUN_FLAT for a kernel with a shuffle");
    if (mask != KN_FULL_WARP)
        kn_emulated_stop("a shuffle of some lanes (%#x): the emulation knows whole warps", mask);
    fiber &f = fibers[current];
    warp &w = warps[current / 32];
    int lane = current % 32, half = (int)(f.warp_barriers & 1);
    if (!w.threads.open)
        w.taken[half] = 0;
    w.taken[half] |= 1u << lane;
    memcpy(w.slot[half][lane], mine, bytes);
    f.warp_barriers++;
    w.threads.arrive(SITE);
    yield();
    if (from < 0 || from > 31 || !(w.taken[half] >> from & 1))
        kn_emulated_stop("thread %d shuffles from lane %d, which takes no part", current, from);
    memcpy(theirs, w.slot[half][from], bytes);
}

void kn_emulated_room(const void *kernel, size_t bytes)
{
    for (room &r : rooms)
        if (r.kernel == kernel) {
            r.bytes = bytes;
            return;
        }
    rooms.push_back({ kernel, bytes });
}

void kn_emulated_run(dim3 grid, dim3 block, size_t dynamic, bool use_fibers, const char *name,
                     const void *kernel, void (*f)(const void *), const void *with)
{
    kn_cuda_plain(name, kernel_name, sizeof kernel_name);
    if (!launches(grid, block, dynamic, kernel))
        return;
    uint64_t number = next_order();
    gridDim = grid;
    blockDim = block;
    threads = (int)(block.x * block.y * block.z);
    body = f;
    closure = with;
    kn_emulated_now.kernel = kernel_name;
    kn_emulated_now.dynamic = dynamic;
    lane_order = order_make(32, number);
    warp_order = order_make((uint64_t)(threads + 31) / 32, number);
    kn_emulated_begin();
    if (kn_emulated_now.watched)
        find_stack();
    run_grid(use_fibers, kernel, order_make((uint64_t)grid.x * grid.y * grid.z, number),
             order_make((uint64_t)threads, number));
}

/* ---- recorded launches ----------------------------------------------------------------------- */

struct launch {
    dim3 grid, block;
    size_t dynamic;
    bool fibers;
    const char *name;
    const void *kernel;
    std::function<void()> body;
};

static void run_launch(void *arg)
{
    const launch *l = (const launch *)arg;
    kn_emulate(l->grid, l->block, l->dynamic, l->fibers, l->name, l->kernel, l->body);
}

static void drop_launch(void *arg)
{
    delete (launch *)arg;
}

void kn_emulate_later(dim3 grid, dim3 block, size_t dynamic, bool fibers, const char *name,
                      const void *kernel, const std::function<void()> &body)
{
    kn_cuda_record(run_launch, drop_launch,
                   new launch{ grid, block, dynamic, fibers, name, kernel, body });
}

/* ---- a runtime without streams, for kernels that tests call directly ------------------------- */

static kn_cuda_flag flag;

static bool own_record(void (*)(void *), void (*)(void *), void *)
{
    return false;
}

static void *own_stream(void)
{
    return nullptr;
}

/* What a GPU reports at the next synchronisation is reported at once. */
static kn_status own_launched(const char *kernel)
{
    char name[64];
    kn_cuda_plain(kernel, name, sizeof name);
    if (flag.what) {
        const char *text = flag.what == KN_FLAG_TARGET
                               ? "%s: target %lld in row %lld is no class"
                               : "%s: index %lld at position %lld is outside";
        kn_fail(text, name, flag.value, flag.where);
        flag = {};
    }
    return kn_ok() ? KN_DONE : KN_FAILED;
}

static int multiprocessors = 2; /* few, so that grid-stride loops iterate */

void emulated_multiprocessors(int n)
{
    multiprocessors = n;
}

static int own_multiprocessors(void)
{
    return multiprocessors;
}

/* Two buffers in turn: use of the old one after taking the next is detected. */
static void *in_turn(int slot, const void *from, size_t bytes)
{
    static std::vector<unsigned char> room[KN_EMULATED_SLOTS][2];
    static int turn[KN_EMULATED_SLOTS];
    std::vector<unsigned char> &r = room[slot][turn[slot] ^= 1];
    if (r.size() < bytes + 16)
        r.resize(2 * bytes + 16);
    if (from)
        memcpy(r.data(), from, bytes);
    kn_emulated_memory(slot, r.data(), bytes, !from);
    return r.data();
}

static void *own_scratch(size_t bytes)
{
    return in_turn(KN_EMULATED_SCRATCH, nullptr, bytes);
}

static const void *own_table(const void *host, size_t bytes)
{
    return in_turn(KN_EMULATED_TABLE, host, bytes);
}

static kn_cuda_flag *own_flags(void)
{
    kn_emulated_memory(KN_EMULATED_FLAG, &flag, sizeof flag, false);
    return &flag;
}

/* ---- the runtime of kernels ------------------------------------------------------------------ */

static emulated_runtime runtime = { own_stream, own_launched, own_multiprocessors, own_scratch,
                                    own_table,  own_flags,    own_record };

void emulated_use(const emulated_runtime *r)
{
    runtime = *r;
}

extern "C" void *kn_cuda_stream(void)
{
    return runtime.stream();
}

extern "C" kn_status kn_cuda_launched(const char *kernel)
{
    return runtime.launched(kernel);
}

extern "C" int kn_cuda_multiprocessors(void)
{
    return runtime.multiprocessors();
}

extern "C" void *kn_cuda_scratch(size_t bytes)
{
    return runtime.scratch(bytes);
}

extern "C" const void *kn_cuda_table(const void *host, size_t bytes)
{
    return runtime.table(host, bytes);
}

extern "C" kn_cuda_flag *kn_cuda_flags(void)
{
    return runtime.flags();
}

extern "C" bool kn_cuda_record(void (*run)(void *), void (*drop)(void *), void *arg)
{
    return runtime.record(run, drop, arg);
}

extern "C" kn_status emulated_draw_key(uint64_t *to, uint64_t *offset, uint64_t seed,
                                       const uint64_t *seed_at, uint64_t stream)
{
    return kn_cuda_draw_key(to, offset, seed, seed_at, stream);
}
