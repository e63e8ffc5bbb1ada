/* kernels/ledger.c: the count of all bytes, by category. Every allocation of a context passes
 * through here: metadata (kn_host_alloc) and the bytes of tensors (kn_take). Stream workers
 * allocate too, so all counters are atomic. */
#include "kernels/faults.h"
#include "kernels/kernels_internal.h"
#include "kernels/memory_internal.h"
#include "kernels/trace.h"

#include <malloc.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name, *remedy; /* the remedy if this category is too large */
} categories[KN_MEM_COUNT] = {
    [KN_MEM_PARAM] = { "parameters", "shard over more ranks or choose a smaller model" },
    [KN_MEM_GRAD] = { "gradients", "shard over more ranks or choose a smaller model" },
    [KN_MEM_OPTIM] = { "optimizer", "shard over more ranks or choose a smaller model" },
    [KN_MEM_ACTIVATION] = { "activations", "lower the batch or the context, or use recompute" },
    [KN_MEM_GATHERED] = { "gathered", "wrap smaller units or lower the prefetch" },
    [KN_MEM_UNREDUCED] = { "unreduced", "wrap smaller units or lower the prefetch" },
    [KN_MEM_COMM] = { "communication", "wrap smaller units" },
    [KN_MEM_WORKSPACE] = { "workspace", "lower the batch or the number of threads" },
    [KN_MEM_BUFFER] = { "buffers", "choose a smaller model" },
    [KN_MEM_DATA] = { "data", "lower the batch" },
    [KN_MEM_STATE] = { "state dicts", "take them on rank 0 only, or sharded" },
    [KN_MEM_GRAPH] = { "recorded steps", "lower the batch, or don't record the step" },
    [KN_MEM_CHECKPOINT] = { "checkpoint", "save without .async (--async-save)" },
    [KN_MEM_STORE] = { "offloaded", "free space in the folder of the store or choose another" },
    [KN_MEM_HOST] = { "host", "lower the batch" },
};

const char *kn_mem_name(kn_mem_category category)
{
    return (unsigned)category < KN_MEM_COUNT ? categories[category].name : "unknown";
}

/* ---- counting ---------------------------------------------------------------------------- */

static void raise_to(_Atomic int64_t *peak, int64_t value)
{
    int64_t old = atomic_load_explicit(peak, memory_order_relaxed);
    while (old < value && !atomic_compare_exchange_weak(peak, &old, value))
        ;
}

/* Counted in the totals and the limit: bytes of tensors in memory. */
static bool is_memory(kn_mem_category category)
{
    return category != KN_MEM_HOST && category != KN_MEM_STORE;
}

/* Gives the bytes of all categories of memory that live then. */
static int64_t enter(kn_context *c, kn_mem_category category, bool pinned, int64_t bytes)
{
    int64_t total = 0;
    raise_to(&c->peak[category], atomic_fetch_add(&c->live[category], bytes) + bytes);
    if (pinned)
        raise_to(&c->peak_pinned, atomic_fetch_add(&c->live_pinned, bytes) + bytes);
    else if (is_memory(category))
        raise_to(&c->peak_total, total = atomic_fetch_add(&c->live_total, bytes) + bytes);
    atomic_fetch_add_explicit(&c->allocations, 1, memory_order_relaxed);
    return total ? total : atomic_load(&c->live_total);
}

static int64_t leave(kn_context *c, kn_mem_category category, bool pinned, int64_t bytes)
{
    atomic_fetch_sub(&c->live[category], bytes);
    if (pinned)
        atomic_fetch_sub(&c->live_pinned, bytes);
    else if (is_memory(category))
        return atomic_fetch_sub(&c->live_total, bytes) - bytes;
    return atomic_load(&c->live_total);
}

void kn_ledger_move(kn_context *c, kn_mem_category category, int64_t bytes)
{
    if (bytes > 0)
        enter(c, category, false, bytes);
    else
        leave(c, category, false, -bytes);
}

kn_ledger kn_ledger_read(void)
{
    kn_context *c = kn_context_get();
    kn_ledger r = { .live_total = atomic_load(&c->live_total),
                    .peak_total = atomic_load(&c->peak_total),
                    .live_pinned = atomic_load(&c->live_pinned),
                    .peak_pinned = atomic_load(&c->peak_pinned),
                    .allocations = atomic_load(&c->allocations) };
    for (int i = 0; i < KN_MEM_COUNT; i++) {
        r.live[i] = atomic_load(&c->live[i]);
        r.peak[i] = atomic_load(&c->peak[i]);
    }
    return r;
}

void kn_ledger_reset_peaks(void)
{
    kn_context *c = kn_context_get();
    for (int i = 0; i < KN_MEM_COUNT; i++)
        atomic_store(&c->peak[i], atomic_load(&c->live[i]));
    atomic_store(&c->peak_total, atomic_load(&c->live_total));
    atomic_store(&c->peak_pinned, atomic_load(&c->live_pinned));
}

/* An allocation; true: it fails. */
static bool fault_is_due(void)
{
    const kn_fault_kind kind = kn_fault_due(KN_AT_ALLOCATION);
    return kind && (!kn_fault_come(kind, NULL) || kind == KN_FAULT_MEMORY);
}

/* ---- metadata ---------------------------------------------------------------------------- */

/* Enters a fresh block, or reports that there is none. */
static void *entered(kn_context *c, void *p, size_t bytes)
{
    if (!p) {
        kn_fail_memory("the host has no %zu bytes for metadata; lower the batch or end "
                       "other programs",
                       bytes);
        return NULL;
    }
    enter(c, KN_MEM_HOST, false, (int64_t)malloc_usable_size(p));
    return p;
}

/* Metadata is small: anything above is a size gone wrong, not worth asking the system for. */
#define LARGEST ((size_t)1 << 39)

static bool refused(size_t bytes)
{
    return fault_is_due() || bytes > LARGEST;
}

void *kn_host_alloc(size_t bytes)
{
    kn_context *c = kn_context_get();
    return entered(c, refused(bytes) ? NULL : malloc(bytes ? bytes : 1), bytes);
}

void *kn_host_calloc(size_t count, size_t size)
{
    kn_context *c = kn_context_get();
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes))
        bytes = SIZE_MAX;
    return entered(c, refused(bytes) ? NULL : calloc(1, bytes ? bytes : 1), bytes);
}

void *kn_host_realloc(void *p, size_t bytes)
{
    kn_context *c = kn_context_get();
    int64_t before = p ? (int64_t)malloc_usable_size(p) : 0;
    void *q = entered(c, refused(bytes) ? NULL : realloc(p, bytes ? bytes : 1), bytes);
    if (q)
        leave(c, KN_MEM_HOST, false, before);
    return q;
}

bool kn_host_grow(void *list, int64_t *room, int64_t count, size_t size)
{
    if (count <= *room)
        return true;
    int64_t more = 2 * *room > count ? 2 * *room : count;
    more = more > 16 ? more : 16;
    void *p;
    memcpy(&p, list, sizeof p);
    p = kn_host_realloc(p, (size_t)more * size);
    if (!p)
        return false;
    memcpy(list, &p, sizeof p);
    *room = more;
    return true;
}

char *kn_host_strdup(const char *s)
{
    if (!kn_given(s, "kn_host_strdup", "the string"))
        return NULL;
    size_t size = strlen(s) + 1;
    char *copy = kn_host_alloc(size);
    return copy ? memcpy(copy, s, size) : NULL;
}

void kn_host_free(void *p)
{
    if (!p)
        return;
    leave(kn_context_get(), KN_MEM_HOST, false, (int64_t)malloc_usable_size(p));
    free(p);
}

/* ---- bytes of tensors -------------------------------------------------------------------- */

/* Every category that holds something, largest first would need a sort: the table's order. */
static void describe_live(const kn_context *c, char *text, size_t size)
{
    size_t used = 0;
    text[0] = 0;
    for (int i = 0; i < KN_MEM_COUNT && used < size; i++) {
        int64_t live = atomic_load(&c->live[i]);
        if (live == 0 || i == KN_MEM_HOST)
            continue;
        int n = snprintf(text + used, size - used, "%s%s %.1f MiB", used ? ", " : "",
                         categories[i].name, (double)live / (1 << 20));
        used += n > 0 ? (size_t)n : 0;
    }
    if (used == 0)
        snprintf(text, size, "nothing");
}

static void fail_take(const kn_memory *m, const kn_context *c, size_t bytes,
                      kn_mem_category category)
{
    char live[512], limit[64] = "";
    describe_live(c, live, sizeof live);
    if (c->memory_limit > 0)
        snprintf(limit, sizeof limit, ", limit %.1f MiB", (double)c->memory_limit / (1 << 20));
    kn_fail_memory("no %zu bytes (%.1f MiB) of %s left in %s%s; live: %s; %s", bytes,
                   (double)bytes / (1 << 20), categories[category].name, m->name, limit, live,
                   categories[category].remedy);
}

/* Counts stay below 2^63, also while bytes move from one category to another. */
#define MOST_BYTES ((int64_t)1 << 62)

static bool countable(const kn_context *c, kn_mem_category category, int64_t bytes)
{
    const int64_t live = atomic_load(&c->live[category]), all = atomic_load(&c->live_total);
    return bytes <= MOST_BYTES - (live > all ? live : all) ||
           kn_fail("out of memory: %lld bytes of %s beside the %lld that live are more than 2^62, "
                   "which can't be counted, on meta neither; %s",
                   (long long)bytes, categories[category].name,
                   (long long)(live > all ? live : all), categories[category].remedy);
}

/* The address for 0 bytes: never read, never given back. */
static _Alignas(KN_ALIGN) char nothing[KN_ALIGN];

/* Pinned bytes are in no total, so the trace has them as the host's. */
static void trace_bytes(kn_trace_kind kind, kn_mem_category category, bool pinned, int64_t bytes,
                        int64_t live, const char *owner)
{
    if (kn_trace_sees(kind))
        kn_trace_put(NULL, (kn_trace_event){ .kind = kind,
                                             .what = owner ? owner : "",
                                             .detail = pinned ? "pinned" : kn_mem_name(category),
                                             .bytes = (double)bytes,
                                             .number = (double)live });
}

void *kn_take_for(kn_memory *m, size_t bytes, kn_mem_category category, const char *owner)
{
    kn_context *c = kn_context_get();
    void *p = NULL;
    if (!m || (unsigned)category >= KN_MEM_COUNT)
        return kn_fail_null("kn_take: %zu bytes from no memory or for an unknown category", bytes);
    if (bytes == 0)
        return nothing;
    bool fits = bytes < (size_t)INT64_MAX / 2 && !fault_is_due();
    if (fits && !countable(c, category, (int64_t)KN_ALIGNED(bytes)))
        return NULL;
    if (fits && c->memory_limit > 0 && is_memory(category) && !m->pinned)
        fits = atomic_load(&c->live_total) + (int64_t)KN_ALIGNED(bytes) <= c->memory_limit;
    if (fits)
        p = m->take(m, KN_ALIGNED(bytes));
    if (p) {
        const int64_t live = enter(c, category, m->pinned, (int64_t)KN_ALIGNED(bytes));
        trace_bytes(KN_TRACE_TAKE, category, m->pinned, (int64_t)KN_ALIGNED(bytes), live, owner);
    } else {
        fail_take(m, c, bytes, category);
    }
    return p;
}

void *kn_take(kn_memory *m, size_t bytes, kn_mem_category category)
{
    return kn_take_for(m, bytes, category, NULL);
}

void kn_give(kn_memory *m, void *p, size_t bytes, kn_mem_category category)
{
    kn_give_of(m, p, bytes, category, NULL);
}

void kn_give_of(kn_memory *m, void *p, size_t bytes, kn_mem_category category, const char *owner)
{
    if (!p || bytes == 0)
        return;
    bool on_host = m->pinned; /* m may end with its last bytes */
    m->give(m, p, KN_ALIGNED(bytes));
    const int64_t live = leave(kn_context_get(), category, on_host, (int64_t)KN_ALIGNED(bytes));
    trace_bytes(KN_TRACE_GIVE, category, on_host, (int64_t)KN_ALIGNED(bytes), live, owner);
}
