/* kernels/cuda/runtime/pool.c: the caching allocator of pool.h. Bookkeeping lies in host memory:
 * blocks of a segment are a list in address order; free ones are in bins of similar size, sorted,
 * so that the first that fits is the best; blocks that are out are found by their address in a hash
 * table. */
#include "kernels/cuda/runtime/pool.h"
#include "kernels/error_internal.h"
#include "kernels/memory_internal.h"

#include <pthread.h>
#include <stdlib.h>

/* Sizes are multiples of UNIT; also the smallest rest that is split off. */
#define UNIT        ((size_t)512)
#define SMALL       ((size_t)1 << 20)
#define SMALL_BLOCK ((size_t)2 << 20)
#define LARGE_BLOCK ((size_t)20 << 20)
#define OWN_SEGMENT ((size_t)10 << 20)
#define LARGE_REST  ((size_t)1 << 20) /* smallest rest that is split off in large segments */
#define BINS        256               /* 4 a doubling */

typedef struct segment segment;

typedef struct block {
    segment *in;
    size_t offset, size;
    bool out;
    int64_t taken;                /* by which call, where it is out */
    struct block *prev, *next;    /* neighbours in the segment */
    struct block *before, *after; /* in the bin (free) or in the hash chain (out; after only) */
} block;

struct segment {
    char *base;
    size_t size;
    bool small;
    int64_t serial; /* segments are ordered by when they came, not by where they lie */
    block *first;
    segment *prev, *next;
};

struct kn_gpu_pool {
    pthread_mutex_t lock;
    kn_gpu_pool_source source;
    segment *segments;
    int64_t serial, takes;
    block *bin[2][BINS]; /* of small and large segments */
    block **chain;       /* blocks that are out, by address */
    size_t chains;       /* a power of two */
    block *spare;        /* nodes to use again, linked by after */
    kn_gpu_pool_stats stats;
};

/* ---- nodes ----------------------------------------------------------------------------------- */

static block *node_new(kn_gpu_pool *p)
{
    block *b = p->spare;
    if (!b)
        return calloc(1, sizeof *b); /* kn_take says it where there is none */
    p->spare = b->after;
    *b = (block){ 0 };
    return b;
}

static void node_free(kn_gpu_pool *p, block *b)
{
    b->after = p->spare;
    p->spare = b;
}

/* ---- free blocks ----------------------------------------------------------------------------- */

static int bin_of(size_t size)
{
    size_t units = size / UNIT;
    int log = 63 - __builtin_clzll(units);
    int quarter = log >= 2 ? (int)(units >> (log - 2)) & 3 : 0;
    return 4 * log + quarter;
}

/* Smaller ones first, then those of older segments, then lower ones. */
static bool sorts_before(const block *a, const block *b)
{
    if (a->size != b->size)
        return a->size < b->size;
    if (a->in != b->in)
        return a->in->serial < b->in->serial;
    return a->offset < b->offset;
}

static void bin_insert(kn_gpu_pool *p, block *b)
{
    block **at = &p->bin[b->in->small][bin_of(b->size)], *before = NULL;
    while (*at && sorts_before(*at, b)) {
        before = *at;
        at = &(*at)->after;
    }
    b->before = before;
    b->after = *at;
    if (*at)
        (*at)->before = b;
    *at = b;
    b->out = false;
    p->stats.blocks_free++;
}

static void bin_remove(kn_gpu_pool *p, block *b)
{
    if (b->before)
        b->before->after = b->after;
    else
        p->bin[b->in->small][bin_of(b->size)] = b->after;
    if (b->after)
        b->after->before = b->before;
    b->before = b->after = NULL;
    p->stats.blocks_free--;
}

static block *best_fit(kn_gpu_pool *p, size_t size, bool small)
{
    for (int i = bin_of(size); i < BINS; i++)
        for (block *b = p->bin[small][i]; b; b = b->after)
            if (b->size >= size)
                return b;
    return NULL;
}

/* ---- blocks that are out --------------------------------------------------------------------- */

static size_t hash(const kn_gpu_pool *p, const void *address)
{
    uint64_t x = (uint64_t)(uintptr_t)address / UNIT * UINT64_C(0x9e3779b97f4a7c15);
    return (size_t)(x >> 32) & (p->chains - 1);
}

/* Doubles the table once it has as many blocks as chains; where there is no memory for that, chains
 * get longer. */
static void chains_grow(kn_gpu_pool *p)
{
    if ((size_t)p->stats.blocks_out < p->chains)
        return;
    size_t before = p->chains;
    block **old = p->chain, **wide = calloc(2 * before, sizeof *wide);
    if (!wide)
        return;
    p->chain = wide;
    p->chains = 2 * before;
    for (size_t i = 0; i < before; i++) {
        for (block *b = old[i], *next; b; b = next) {
            size_t h = hash(p, b->in->base + b->offset);
            next = b->after;
            b->after = wide[h];
            wide[h] = b;
        }
    }
    free(old);
}

static void *hand_out(kn_gpu_pool *p, block *b)
{
    void *address = b->in->base + b->offset;
    size_t h = hash(p, address);
    b->out = true;
    b->taken = p->takes++;
    b->before = NULL;
    b->after = p->chain[h];
    p->chain[h] = b;
    p->stats.blocks_out++;
    p->stats.live += (int64_t)b->size;
    return address;
}

static block *find(const kn_gpu_pool *p, const void *address)
{
    block *b = p->chain[hash(p, address)];
    while (b && b->in->base + b->offset != address)
        b = b->after;
    return b;
}

static block *take_in(kn_gpu_pool *p, const void *address)
{
    for (block **at = &p->chain[hash(p, address)]; *at; at = &(*at)->after) {
        block *b = *at;
        if (b->in->base + b->offset != address)
            continue;
        *at = b->after;
        p->stats.blocks_out--;
        p->stats.live -= (int64_t)b->size;
        return b;
    }
    return NULL;
}

/* ---- segments -------------------------------------------------------------------------------- */

static size_t segment_size(size_t bytes)
{
    if (bytes <= SMALL)
        return SMALL_BLOCK;
    return bytes < OWN_SEGMENT ? LARGE_BLOCK : kn_round_up(bytes, SMALL_BLOCK);
}

static void segment_put(kn_gpu_pool *p, segment *s)
{
    if (s->prev)
        s->prev->next = s->next;
    else
        p->segments = s->next;
    if (s->next)
        s->next->prev = s->prev;
    p->stats.segments--;
    p->stats.reserved -= (int64_t)s->size;
    p->source.put(p->source.arg, s->base, s->size);
    free(s);
}

static void trim(kn_gpu_pool *p)
{
    for (segment *s = p->segments, *next; s; s = next) {
        next = s->next;
        if (s->first->out || s->first->next)
            continue;
        bin_remove(p, s->first);
        node_free(p, s->first);
        segment_put(p, s);
    }
}

/* A new segment as one free block, which isn't in a bin yet. */
static block *segment_get(kn_gpu_pool *p, size_t bytes)
{
    size_t size = segment_size(bytes);
    segment *s = calloc(1, sizeof *s);
    block *b = s ? node_new(p) : NULL;
    if (!b)
        goto fail;
    s->base = p->source.get(p->source.arg, size);
    if (!s->base) { /* idle blocks of other segments may have the bytes that are missing */
        trim(p);
        s->base = p->source.get(p->source.arg, size);
    }
    if (!s->base)
        goto fail;
    s->size = size;
    s->small = bytes <= SMALL;
    s->serial = p->serial++;
    s->first = b;
    s->next = p->segments;
    if (s->next)
        s->next->prev = s;
    p->segments = s;
    *b = (block){ .in = s, .size = size };
    p->stats.segments++;
    p->stats.reserved += (int64_t)size;
    if (p->stats.reserved > p->stats.peak_reserved)
        p->stats.peak_reserved = p->stats.reserved;
    return b;
fail:
    if (b)
        node_free(p, b);
    free(s);
    return NULL;
}

/* Cuts b, which is in no bin, down to size; the rest goes into a bin. Without memory for the rest's
 * node the block stays whole. */
static void split(kn_gpu_pool *p, block *b, size_t size)
{
    size_t rest = b->size - size;
    if (rest < (b->in->small ? UNIT : LARGE_REST))
        return;
    block *r = node_new(p);
    if (!r)
        return;
    *r = (block){
        .in = b->in, .offset = b->offset + size, .size = rest, .prev = b, .next = b->next
    };
    if (r->next)
        r->next->prev = r;
    b->next = r;
    b->size = size;
    bin_insert(p, r);
}

/* Joins b with its right neighbour; neither is in a bin. */
static void join(kn_gpu_pool *p, block *b)
{
    block *r = b->next;
    b->size += r->size;
    b->next = r->next;
    if (b->next)
        b->next->prev = b;
    node_free(p, r);
}

/* ---- what others call ------------------------------------------------------------------------ */

kn_gpu_pool *kn_gpu_pool_create(kn_gpu_pool_source source)
{
    kn_gpu_pool *p = kn_host_calloc(1, sizeof *p);
    if (!p)
        return NULL;
    p->chains = 256;
    p->chain = calloc(p->chains, sizeof *p->chain);
    if (!p->chain) {
        kn_host_free(p);
        return kn_fail_null(
            "out of memory: the host has no bytes for the table of a pool; end other programs");
    }
    p->source = source;
    pthread_mutex_init(&p->lock, NULL);
    return p;
}

void kn_gpu_pool_destroy(kn_gpu_pool *p)
{
    if (!p)
        return;
    while (p->segments) {
        for (block *b = p->segments->first, *next; b; b = next) {
            next = b->next;
            free(b);
        }
        segment_put(p, p->segments);
    }
    for (block *b = p->spare, *next; b; b = next) {
        next = b->after;
        free(b);
    }
    pthread_mutex_destroy(&p->lock);
    free(p->chain);
    if (p->source.end)
        p->source.end(p->source.arg);
    kn_host_free(p);
}

void *kn_gpu_pool_take(kn_gpu_pool *p, size_t bytes)
{
    if (bytes == 0 || bytes > (size_t)1 << 46)
        return NULL;
    size_t size = kn_round_up(bytes, UNIT);
    pthread_mutex_lock(&p->lock);
    chains_grow(p);
    block *b = best_fit(p, size, size <= SMALL);
    if (b)
        bin_remove(p, b);
    else
        b = segment_get(p, size);
    void *address = NULL;
    if (b) {
        split(p, b, size);
        address = hand_out(p, b);
    }
    pthread_mutex_unlock(&p->lock);
    return address;
}

void kn_gpu_pool_give(kn_gpu_pool *p, void *address)
{
    pthread_mutex_lock(&p->lock);
    block *b = take_in(p, address);
    if (b) {
        if (b->next && !b->next->out) {
            bin_remove(p, b->next);
            join(p, b);
        }
        if (b->prev && !b->prev->out) {
            b = b->prev;
            bin_remove(p, b);
            join(p, b);
        }
        bin_insert(p, b);
    }
    pthread_mutex_unlock(&p->lock);
    if (!b)
        kn_fail("a block at %p was given back that this memory has not handed out", address);
}

int64_t kn_gpu_pool_taken(kn_gpu_pool *p, const void *address)
{
    pthread_mutex_lock(&p->lock);
    const block *b = find(p, address);
    int64_t taken = b ? b->taken : -1;
    pthread_mutex_unlock(&p->lock);
    return taken;
}

int64_t kn_gpu_pool_takes(kn_gpu_pool *p)
{
    pthread_mutex_lock(&p->lock);
    int64_t takes = p->takes;
    pthread_mutex_unlock(&p->lock);
    return takes;
}

void kn_gpu_pool_trim(kn_gpu_pool *p)
{
    pthread_mutex_lock(&p->lock);
    trim(p);
    pthread_mutex_unlock(&p->lock);
}

kn_gpu_pool_stats kn_gpu_pool_read(kn_gpu_pool *p)
{
    pthread_mutex_lock(&p->lock);
    kn_gpu_pool_stats r = p->stats;
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < BINS; i++)
            for (block *b = p->bin[k][i]; b; b = b->after)
                r.largest_free =
                    (int64_t)b->size > r.largest_free ? (int64_t)b->size : r.largest_free;
    pthread_mutex_unlock(&p->lock);
    return r;
}

/* ---- checking -------------------------------------------------------------------------------- */

static bool in_its_bin(kn_gpu_pool *p, const block *b)
{
    for (block *c = p->bin[b->in->small][bin_of(b->size)]; c; c = c->after) {
        if (c->after && !sorts_before(c, c->after))
            return kn_fail("pool: a bin isn't sorted");
        if (c == b)
            return true;
    }
    return kn_fail("pool: a free block of %zu bytes isn't in its bin", b->size);
}

static bool check_segment(kn_gpu_pool *p, const segment *s, int64_t *out, int64_t *idle,
                          int64_t *live)
{
    size_t end = 0;
    for (const block *b = s->first; b; b = b->next) {
        if (b->in != s || b->offset != end || b->size == 0 || b->size % UNIT)
            return kn_fail("pool: a block at %zu where one at %zu should be", b->offset, end);
        if (b->next && b->next->prev != b)
            return kn_fail("pool: neighbours disagree at %zu", b->offset);
        if (!b->out && b->next && !b->next->out)
            return kn_fail("pool: two free neighbours at %zu", b->offset);
        if (!b->out && !in_its_bin(p, b))
            return false;
        *out += b->out;
        *idle += !b->out;
        *live += b->out ? (int64_t)b->size : 0;
        end += b->size;
    }
    return end == s->size || kn_fail("pool: blocks end at %zu of %zu", end, s->size);
}

bool kn_gpu_pool_check(kn_gpu_pool *p)
{
    int64_t out = 0, idle = 0, live = 0, reserved = 0, segments = 0;
    bool ok = true;
    pthread_mutex_lock(&p->lock);
    for (const segment *s = p->segments; ok && s; s = s->next) {
        ok = check_segment(p, s, &out, &idle, &live);
        reserved += (int64_t)s->size;
        segments++;
    }
    const kn_gpu_pool_stats *t = &p->stats;
    bool counts = out == t->blocks_out && idle == t->blocks_free && live == t->live &&
                  reserved == t->reserved && segments == t->segments;
    pthread_mutex_unlock(&p->lock);
    return ok && (counts || kn_fail("pool: the counts are off"));
}
