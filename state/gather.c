/* state/gather.c: whole tensors from the parts that ranks hold in memory: the way of a sharded
 * state to other ranks than those that took it.
 *
 * All ranks first learn who holds which elements of which tensor, so that a part that nobody has is
 * an error on all of them before anything is sent. Then the parts come, a tensor at a time. */
#include "comm/comm_internal.h"
#include "kernels/error_internal.h"
#include "kernels/memory_internal.h"
#include "state/dict_internal.h"

#include <string.h>

/* What a rank holds of a tensor; numel -1: it doesn't know it. */
typedef struct held {
    int64_t start, count, blocks, stride, numel, split;
} held;
enum { WORDS = sizeof(held) / sizeof(int64_t) };

typedef struct gathering {
    const kn_state *s;      /* this rank's; NULL: none */
    const kn_state *header; /* names, shapes and values of the first rank that has any */
    kn_comm *comm;
    int ranks;
    held *held; /* [ranks * header's count] */
    kn_state *whole;
    bool here;  /* this rank gets it */
    char *sent; /* room for a part */
} gathering;

static const char what[] = "kn_state_gather";

static int64_t numel_of(const kn_state_item *i)
{
    int64_t n = 1;
    for (int d = 0; d < i->ndim; d++)
        n *= i->shape[d];
    return n;
}

static kn_interval part_of(const held *h)
{
    return (kn_interval){
        .start = h->start, .count = h->count, .blocks = h->blocks, .stride = h->stride
    };
}

/* ---- who holds what -------------------------------------------------------------------------- */

/* This rank's item of a tensor, if it has one that is the same tensor. */
static const kn_state_item *own_item(const gathering *g, const kn_state_item *i)
{
    const kn_state_item *own = g->s ? kn_state_find(g->s, i->name) : NULL;
    if (!own)
        return NULL;
    if (own->flat) {
        kn_fail("%s: '%s' is a unit's flat part, which only its own sharding can place: take the "
                "state as KN_STATE_SHARDED",
                what, i->name);
        return NULL;
    }
    if (own->type != KN_STATE_TENSOR || own->dtype != i->dtype || own->ndim != i->ndim ||
        memcmp(own->shape, i->shape, (size_t)i->ndim * sizeof *i->shape) != 0) {
        kn_fail("%s: '%s' is another tensor here than on another rank: the parts are of different "
                "states",
                what, i->name);
        return NULL;
    }
    return own;
}

/* The others know this rank's tensors. */
static bool are_known(const gathering *g)
{
    for (int i = 0; g->s && i < g->s->count; i++) {
        const kn_state_item *own = &g->s->list[i];
        if (own->type == KN_STATE_TENSOR && !kn_state_find(g->header, own->name))
            return kn_fail("%s: the first rank with a state has no '%s': what groups of ranks have "
                           "each for themselves goes by a checkpoint",
                           what, own->name);
    }
    return true;
}

static held held_of(const gathering *g, const kn_state_item *i)
{
    const kn_state_item *own = i->type == KN_STATE_TENSOR ? own_item(g, i) : NULL;
    if (!own)
        return (held){ .numel = -1 };
    if (own->shards <= 1) {
        const int64_t n = numel_of(own);
        return (held){ .count = n, .blocks = n > 0, .stride = n, .numel = n };
    }
    return (held){ own->part.start,
                   own->part.count,
                   own->part.blocks,
                   own->part.stride,
                   kn_interval_numel(own->part),
                   (int64_t)own->split };
}

static bool ask(gathering *g)
{
    const int n = g->header->count;
    const size_t bytes = (size_t)n * sizeof(held);
    held *mine = kn_host_calloc((size_t)n + 1, sizeof *mine);
    g->held = kn_host_calloc((size_t)(n * g->ranks) + 1, sizeof *g->held);
    bool ok = mine && g->held && are_known(g);
    for (int i = 0; ok && i < n; i++)
        mine[i] = held_of(g, &g->header->list[i]);
    ok = kn_agree(g->comm, ok && kn_ok());
    if (ok && g->ranks == 1)
        memcpy(g->held, mine, bytes);
    else if (ok && n > 0)
        ok = kn_all_gather(g->comm, g->held, mine, (int64_t)n * WORDS, KN_I64,
                           kn_compute_stream(KN_CPU), what);
    kn_host_free(mine);
    return ok;
}

static const held *of_rank(const gathering *g, int item, int rank)
{
    return &g->held[rank * g->header->count + item];
}

/* The first rank that holds rank's part of the item as well. */
static int first_holder(const gathering *g, int item, int rank)
{
    const held *h = of_rank(g, item, rank);
    int first = 0;
    while (memcmp(of_rank(g, item, first), h, sizeof *h) != 0)
        first++;
    return first;
}

static bool sends(const gathering *g, int item, int rank)
{
    return of_rank(g, item, rank)->numel > 0 && first_holder(g, item, rank) == rank;
}

/* The ranks' parts are of one cut, and all are there. Every rank finds the same. */
static bool is_covered(const gathering *g, int item)
{
    const kn_state_item *i = &g->header->list[item];
    const held *one = NULL;
    int64_t sum = 0;
    for (int r = 0; r < g->ranks; r++) {
        const held *h = of_rank(g, item, r);
        if (h->numel < 0)
            continue;
        if (one && one->split != h->split)
            return kn_fail("%s: '%s' is cut in one way on some ranks and in another on others: the "
                           "parts are of different states",
                           what, i->name);
        one = h;
        sum += sends(g, item, r) ? h->numel : 0;
    }
    return sum == numel_of(i) ||
           kn_fail("%s: the ranks hold %lld of the %lld elements of '%s': every rank that took the "
                   "state, or one of each part's replicas, must take part (.comm)",
                   what, (long long)sum, (long long)numel_of(i), i->name);
}

/* ---- values ---------------------------------------------------------------------------------- */

static bool add_value(kn_state *s, const kn_state_item *i)
{
    if (i->type == KN_STATE_INT)
        return kn_state_set_int(s, i->name, i->whole_number);
    return i->type == KN_STATE_NUMBER ? kn_state_set_number(s, i->name, i->number)
                                      : kn_state_set_text(s, i->name, i->text);
}

/* Room for everything, so that nothing fails half-way for want of it. */
static bool make_room(gathering *g)
{
    size_t part = 0;
    for (int k = 0; k < g->header->count; k++) {
        const kn_state_item *i = &g->header->list[k];
        const size_t size = kn_dtype_size(i->dtype);
        if (i->type != KN_STATE_TENSOR) {
            if (g->here && !add_value(g->whole, i))
                return false;
            continue;
        }
        for (int r = 0; r < g->ranks; r++)
            if (of_rank(g, k, r)->numel > 0 && (size_t)of_rank(g, k, r)->numel * size > part)
                part = (size_t)of_rank(g, k, r)->numel * size;
        kn_tensor *t = g->here ? kn_state_tensor_new(i->dtype, i->ndim, i->shape) : NULL;
        kn_state_item *to = t ? kn_state_add(g->whole, NULL, i->name) : NULL;
        if (g->here && !to) {
            kn_tensor_free(t);
            return false;
        }
        if (to) {
            to->type = KN_STATE_TENSOR;
            to->tensor = t;
            to->dtype = i->dtype;
            to->ndim = i->ndim;
            memcpy(to->shape, i->shape, sizeof to->shape);
        }
    }
    g->sent = kn_host_alloc(part + 1);
    return g->sent != NULL;
}

static bool gather_item(gathering *g, int item)
{
    const kn_state_item *i = &g->header->list[item];
    const kn_state_item *to = g->here ? kn_state_find(g->whole, i->name) : NULL;
    const size_t size = kn_dtype_size(i->dtype);
    bool ok = true;
    for (int r = 0; ok && r < g->ranks; r++) {
        const held *h = of_rank(g, item, r);
        const size_t bytes = (size_t)(h->numel > 0 ? h->numel : 0) * size;
        if (!sends(g, item, r))
            continue;
        if (r == kn_rank(g->comm)) { /* of a file it is read here */
            const kn_tensor *own = kn_state_item_tensor(kn_state_find(g->s, i->name));
            if (!own)
                return false;
            memcpy(g->sent, kn_array_of(own).data, bytes);
        }
        ok = g->ranks == 1 ||
             kn_broadcast(g->comm, g->sent, (int64_t)bytes, r, kn_compute_stream(KN_CPU), i->name);
        if (ok && to)
            kn_interval_paste(part_of(h), kn_array_of(to->tensor).data, g->sent, size);
    }
    return ok;
}

static bool run(gathering *g)
{
    bool ok = ask(g);
    for (int k = 0; ok && k < g->header->count; k++)
        ok = g->header->list[k].type != KN_STATE_TENSOR || is_covered(g, k);
    ok = kn_agree(g->comm, ok && make_room(g));
    for (int k = 0; ok && k < g->header->count; k++)
        ok = g->header->list[k].type != KN_STATE_TENSOR || gather_item(g, k);
    return ok;
}

/* The first rank that has anything; -1: none. */
static bool find_first(const gathering *g, int *first)
{
    float most = g->s && g->s->count > 0 ? (float)(g->ranks - kn_rank(g->comm)) : 0;
    bool ok =
        g->ranks == 1 || kn_all_reduce_max(g->comm, &most, 1, kn_compute_stream(KN_CPU), what);
    *first = most > 0 ? g->ranks - (int)most : -1;
    return ok && (*first >= 0 || kn_fail("%s: no rank has a state with a name in it", what));
}

kn_state *kn_state_gather_(const kn_state *s, kn_state_gather_options o)
{
    gathering g = { .s = s, .comm = o.comm ? o.comm : kn_world() };
    if (!kn_ok())
        return NULL;
    g.ranks = kn_comm_size(g.comm);
    g.here = !o.rank0_only || kn_rank(g.comm) == 0;
    int first;
    kn_state *header = find_first(&g, &first) ? kn_state_header(s, g.comm, first) : NULL;
    g.header = header;
    g.whole = header ? kn_state_new() : NULL;
    bool ok = kn_agree(g.comm, g.whole != NULL) && run(&g);
    kn_state_free(header);
    kn_host_free(g.held);
    kn_host_free(g.sent);
    if (ok)
        return g.whole;
    kn_state_free(g.whole);
    return NULL;
}
