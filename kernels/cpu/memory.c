/* kernels/cpu/memory.c: the CPU's pool. Fresh pages are slow (28 MiB: 20 ms fresh, 1 ms warm), so
 * blocks that come back stay mapped and wait in a free list of their size class.
 *
 * Size classes: 8 a doubling (multiples of 64 bytes at the small end), so a block wastes at most
 * 1/8 of the bytes requested. Blocks up to SMALL are cut from slabs of 1 MiB, one class a slab;
 * larger ones are mapped one by one, with huge pages. Free lists are last in, first out, so the
 * same calls give the same blocks. One mutex guards all of it.
 *
 * Under AddressSanitizer, or with KNAP_POOL=0, every block is a malloc of its own, so that a use
 * after the end is found. */
#include "kernels/cpu/cpu_internal.h"
#include "kernels/environment.h"
#include "kernels/memory_internal.h"

#include <stdlib.h>
#include <sys/mman.h>

#if defined(__SANITIZE_ADDRESS__)
#define PLAIN true
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define PLAIN true
#endif
#endif
#ifndef PLAIN
#define PLAIN false
#endif

#define SMALL     ((size_t)64 << 10)
#define SLAB      ((size_t)1 << 20)
#define HUGE_PAGE ((size_t)2 << 20)
#define PAGE      ((size_t)4096)
#define CLASSES   320 /* 8 a doubling from 512 bytes up to 2^47 */

/* More than any machine has; AddressSanitizer aborts on requests from 2^40 on. */
#define LARGEST       ((size_t)1 << 46)
#define LARGEST_PLAIN ((size_t)1 << 39)

typedef struct block {
    struct block *next;
} block;

/* The first KN_ALIGN bytes of a slab; found from a block by rounding its address down. */
typedef struct slab {
    struct slab *next;
    size_t block_size;
    size_t used;   /* bytes cut so far, this header included */
    int64_t taken; /* blocks that are out */
} slab;

static struct {
    pthread_mutex_t lock;
    block *free[CLASSES];
    slab *slabs;
    slab *open[CLASSES]; /* the slab that still has room for this class */
} pool = { .lock = PTHREAD_MUTEX_INITIALIZER };

static bool plain = PLAIN;
static pthread_once_t plain_once = PTHREAD_ONCE_INIT;

static void read_environment(void)
{
    bool pooled = true;
    kn_env_switch("KNAP_POOL", &pooled);
    plain = plain || !pooled;
}

/* ---- size classes ------------------------------------------------------------------------ */

size_t kn_class_size(int c)
{
    if (c < 8)
        return (size_t)(c + 1) * 64;
    return (size_t)(9 + c % 8) * 64 << (c / 8 - 1);
}

int kn_size_class(size_t bytes)
{
    if (bytes <= 512)
        return (int)((bytes + 63) / 64) - 1;
    int k = 63 - __builtin_clzll(bytes - 1) - 9; /* bytes in (512 * 2^k, 1024 * 2^k] */
    size_t step = (size_t)64 << k;
    return 8 * (k + 1) + (int)((bytes + step - 1) / step) - 9;
}

/* ---- the system's pages ------------------------------------------------------------------ */

/* Maps bytes at an address that is a multiple of align. */
static void *map_aligned(size_t bytes, size_t align)
{
    size_t span = bytes + align - PAGE;
    char *p = mmap(NULL, span, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    char *start = (char *)kn_round_up((uintptr_t)p, align);
    if (start > p)
        munmap(p, (size_t)(start - p));
    if (start + bytes < p + span)
        munmap(start + bytes, (size_t)(p + span - start - bytes));
    return start;
}

static size_t mapped_size(int c)
{
    return kn_round_up(kn_class_size(c), PAGE);
}

static void *map_large(int c)
{
    size_t bytes = mapped_size(c);
    void *p = map_aligned(bytes, bytes >= HUGE_PAGE ? HUGE_PAGE : PAGE);
    if (p && bytes >= HUGE_PAGE)
        madvise(p, bytes, MADV_HUGEPAGE);
    return p;
}

/* ---- slabs ------------------------------------------------------------------------------- */

static slab *slab_of(void *p)
{
    return (slab *)((uintptr_t)p & ~(uintptr_t)(SLAB - 1));
}

static void *cut(int c)
{
    size_t bytes = kn_class_size(c);
    slab *s = pool.open[c];
    if (!s || s->used + bytes > SLAB) {
        s = map_aligned(SLAB, SLAB);
        if (!s)
            return NULL;
        *s = (slab){ .next = pool.slabs, .block_size = bytes, .used = KN_ALIGN };
        pool.slabs = pool.open[c] = s;
    }
    void *p = (char *)s + s->used;
    s->used += bytes;
    return p;
}

/* Unmaps the slabs without a block in use, after taking their blocks off the free lists. */
static void trim_slabs(void)
{
    for (int c = 0; kn_class_size(c) <= SMALL; c++) {
        for (block **at = &pool.free[c]; *at;) {
            if (slab_of(*at)->taken == 0)
                *at = (*at)->next;
            else
                at = &(*at)->next;
        }
        if (pool.open[c] && pool.open[c]->taken == 0)
            pool.open[c] = NULL;
    }
    for (slab **at = &pool.slabs; *at;) {
        slab *s = *at;
        if (s->taken == 0) {
            *at = s->next;
            munmap(s, SLAB);
        } else {
            at = &s->next;
        }
    }
}

static void trim_large(void)
{
    for (int c = kn_size_class(SMALL) + 1; c < CLASSES; c++) {
        while (pool.free[c]) {
            block *b = pool.free[c];
            pool.free[c] = b->next;
            munmap(b, mapped_size(c));
        }
    }
}

void kn_cpu_trim(void)
{
    pthread_mutex_lock(&pool.lock);
    trim_slabs();
    trim_large();
    pthread_mutex_unlock(&pool.lock);
}

/* ---- take and give ----------------------------------------------------------------------- */

static void *pool_take(int c)
{
    bool small = kn_class_size(c) <= SMALL;
    block *b = pool.free[c];
    if (b)
        pool.free[c] = b->next;
    else
        b = small ? cut(c) : map_large(c);
    if (b && small)
        slab_of(b)->taken++;
    return b;
}

static void *take(kn_memory *self, size_t bytes)
{
    (void)self;
    pthread_once(&plain_once, read_environment);
    if (bytes > (plain ? LARGEST_PLAIN : LARGEST))
        return NULL;
    if (plain)
        return aligned_alloc(KN_ALIGN, kn_round_up(bytes, KN_ALIGN));
    int c = kn_size_class(bytes);
    pthread_mutex_lock(&pool.lock);
    void *p = pool_take(c);
    if (!p) { /* idle pages of other classes may suffice */
        trim_slabs();
        trim_large();
        p = pool_take(c);
    }
    pthread_mutex_unlock(&pool.lock);
    return p;
}

static void give(kn_memory *self, void *p, size_t bytes)
{
    (void)self;
    if (plain) {
        free(p);
        return;
    }
    int c = kn_size_class(bytes);
    block *b = p;
    pthread_mutex_lock(&pool.lock);
    b->next = pool.free[c];
    pool.free[c] = b;
    if (kn_class_size(c) <= SMALL)
        slab_of(p)->taken--;
    pthread_mutex_unlock(&pool.lock);
}

static kn_memory memory = { .name = "cpu memory", .device = KN_CPU, .take = take, .give = give };

kn_memory *kn_cpu_memory(void)
{
    return &memory;
}
