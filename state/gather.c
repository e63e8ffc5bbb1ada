/* state/gather.c: whole tensors from what ranks hold of them in memory: the way of a state to other
 * ranks than those that took it, or to another sharding.
 *
 * All ranks first learn who holds which elements of which tensor, so that a part that nobody has is
 * an error on all of them before anything is sent. Then the parts come, a tensor at a time. */
#include "comm/comm_internal.h"
#include "kernels/error_internal.h"
#include "state/dict_internal.h"

#include <string.h>

/* A rank's part of a tensor; numel -1: it doesn't know it. */
typedef struct kn_holding {
    int64_t start, count, blocks, stride, numel, split;
} kn_holding;
enum { WORDS = sizeof(kn_holding) / sizeof(int64_t) };

static int64_t numel_of(const kn_state_item *i)
{
    return kn_shape_numel(i->ndim, i->shape);
}

static kn_interval part_of(const kn_holding *h)
{
    return (kn_interval){
        .start = h->start, .count = h->count, .blocks = h->blocks, .stride = h->stride
    };
}

/* ---- who holds what -------------------------------------------------------------------------- */

/* This rank's item of a tensor, if it has one that is the same tensor and goes along. */
static const kn_state_item *own_item(const kn_gathering *g, const kn_state_item *i)
{
    const kn_state_item *own = g->s ? kn_state_find(g->s, i->name) : NULL;
    if (!own || (g->only && !g->only[own - g->s->list]))
        return NULL;
    if (own->flat)
        return kn_fail_null(
            "%s: '%s' is a unit's flat part, which only its own sharding can place: take the "
            "state as KN_STATE_SHARDED",
            g->what, i->name);
    if (own->type != KN_STATE_TENSOR || own->dtype != i->dtype || own->ndim != i->ndim ||
        memcmp(own->shape, i->shape, (size_t)i->ndim * sizeof *i->shape) != 0)
        return kn_fail_null(
            "%s: '%s' is another tensor here than on another rank: the parts are of different "
            "states",
            g->what, i->name);
    return own;
}

/* The others know this rank's tensors. */
static bool are_known(const kn_gathering *g)
{
    for (int i = 0; g->s && i < g->s->count; i++) {
        const kn_state_item *own = &g->s->list[i];
        if (own->type == KN_STATE_TENSOR && (!g->only || g->only[i]) &&
            !kn_state_find(g->header, own->name))
            return kn_fail("%s: the first rank with a state has no '%s': what groups of ranks have "
                           "each for themselves goes by a checkpoint",
                           g->what, own->name);
    }
    return true;
}

static kn_holding held_of(const kn_gathering *g, const kn_state_item *i)
{
    const kn_state_item *own = i->type == KN_STATE_TENSOR ? own_item(g, i) : NULL;
    if (!own)
        return (kn_holding){ .numel = -1 };
    const bool whole = own->shards <= 1;
    const kn_interval p = whole ? kn_interval_whole(numel_of(own)) : own->part;
    return (kn_holding){
        p.start, p.count, p.blocks, p.stride, kn_interval_numel(p), whole ? 0 : (int64_t)own->split
    };
}

static bool ask(kn_gathering *g)
{
    const int n = g->header->count;
    const size_t bytes = (size_t)n * sizeof(kn_holding);
    kn_holding *mine = kn_host_calloc((size_t)n + 1, sizeof *mine);
    g->held = kn_host_calloc((size_t)(n * g->ranks) + 1, sizeof *g->held);
    bool ok = mine && g->held && are_known(g);
    for (int i = 0; ok && i < n; i++)
        mine[i] = held_of(g, &g->header->list[i]);
    ok = kn_agree(g->comm, ok && kn_ok());
    if (ok && g->ranks == 1)
        memcpy(g->held, mine, bytes);
    else if (ok && n > 0)
        ok = kn_all_gather(g->comm, g->held, mine, (int64_t)n * WORDS, KN_I64,
                           kn_compute_stream(KN_CPU), g->what);
    kn_host_free(mine);
    return ok;
}

static const kn_holding *of_rank(const kn_gathering *g, int item, int rank)
{
    return &g->held[rank * g->header->count + item];
}

/* Whether rank is the first that holds its part of the item. */
static bool sends(const kn_gathering *g, int item, int rank)
{
    const kn_holding *h = of_rank(g, item, rank);
    int first = 0;
    while (memcmp(of_rank(g, item, first), h, sizeof *h) != 0)
        first++;
    return h->numel > 0 && first == rank;
}

/* The ranks' parts are of one cut, and all are there. Every rank finds the same. */
static bool is_covered(const kn_gathering *g, int item)
{
    const kn_state_item *i = &g->header->list[item];
    const kn_holding *one = NULL;
    int64_t sum = 0;
    for (int r = 0; r < g->ranks; r++) {
        const kn_holding *h = of_rank(g, item, r);
        if (h->numel < 0)
            continue;
        if (one && one->split != h->split)
            return kn_fail("%s: '%s' is cut in one way on some ranks and in another on others: the "
                           "parts are of different states",
                           g->what, i->name);
        one = h;
        sum += sends(g, item, r) ? h->numel : 0;
    }
    return (g->only && !one) || sum == numel_of(i) ||
           kn_fail("%s: the ranks hold %lld of the %lld elements of '%s': every rank that took the "
                   "state, or one of each part's replicas, must take part (.comm)",
                   g->what, (long long)sum, (long long)numel_of(i), i->name);
}

/* The first rank that has anything; -1: none. */
static bool find_first(const kn_gathering *g, int *first)
{
    float most = g->s && g->s->count > 0 ? (float)(g->ranks - kn_rank(g->comm)) : 0;
    bool ok = kn_hosts_max(g->comm, &most, 1, g->what);
    *first = most > 0 ? g->ranks - (int)most : -1;
    return ok && (*first >= 0 || kn_fail("%s: no rank has a state with a name in it", g->what));
}

/* A part that is the whole goes where that is wanted; any other through g->sent. */
static size_t room_for_parts(const kn_gathering *g)
{
    size_t most = 0;
    for (int k = 0; k < g->header->count; k++)
        for (int r = 0; r < g->ranks; r++) {
            const kn_state_item *i = &g->header->list[k];
            const int64_t n = of_rank(g, k, r)->numel;
            const size_t bytes = (size_t)(n > 0 ? n : 0) * kn_dtype_size(i->dtype);
            if (bytes > most && (!g->here || n < numel_of(i)))
                most = bytes;
        }
    return most;
}

bool kn_gathering_begin(kn_gathering *g)
{
    int first = 0;
    g->ranks = kn_comm_size(g->comm);
    bool ok = find_first(g, &first) && (g->header = kn_state_header(g->s, g->comm, first)) != NULL;
    ok = kn_agree(g->comm, ok) && ask(g);
    for (int k = 0; ok && k < g->header->count; k++)
        ok = g->header->list[k].type != KN_STATE_TENSOR || is_covered(g, k);
    return ok && (g->sent = kn_host_alloc(room_for_parts(g) + 1)) != NULL;
}

void kn_gathering_end(kn_gathering *g)
{
    kn_state_free(g->header);
    kn_host_free(g->held);
    kn_host_free(g->sent);
}

/* ---- values ---------------------------------------------------------------------------------- */

/* This rank's part of an item; of a file it is read here. */
static bool read_own(const kn_gathering *g, const char *name, char *to, size_t bytes)
{
    const kn_state_item *own = kn_state_find(g->s, name);
    own = g->values ? &g->values->list[own->origin] : own;
    if (!own->tensor)
        return kn_pieces_read(own->files, own->piece, kn_interval_whole(numel_of(own)), to);
    memcpy(to, kn_array_of(own->tensor).data, bytes);
    return true;
}

bool kn_gathering_item(kn_gathering *g, int item, void *whole)
{
    const kn_state_item *i = &g->header->list[item];
    const size_t size = kn_dtype_size(i->dtype);
    bool ok = true;
    for (int r = 0; ok && r < g->ranks; r++) {
        const kn_holding *h = of_rank(g, item, r);
        const size_t bytes = (size_t)(h->numel > 0 ? h->numel : 0) * size;
        if (!sends(g, item, r))
            continue;
        const bool all = whole && h->numel == numel_of(i);
        char *room = all ? whole : g->sent;
        ok = (r != kn_rank(g->comm) || read_own(g, i->name, room, bytes)) &&
             kn_hosts_broadcast(g->comm, room, bytes, r, i->name);
        if (ok && whole && !all)
            kn_interval_paste(part_of(h), whole, room, size);
    }
    return ok;
}

/* ---- the whole state ------------------------------------------------------------------------- */

static bool add_value(kn_state *s, const kn_state_item *i)
{
    if (i->type == KN_STATE_INT)
        return kn_state_set_int(s, i->name, i->whole_number);
    return i->type == KN_STATE_NUMBER ? kn_state_set_number(s, i->name, i->number)
                                      : kn_state_set_text(s, i->name, i->text);
}

/* Room for everything, so that nothing fails half-way for want of it. */
static bool make_whole(const kn_state *header, kn_state *whole)
{
    for (int k = 0; k < header->count; k++) {
        const kn_state_item *i = &header->list[k];
        if (i->type != KN_STATE_TENSOR) {
            if (!add_value(whole, i))
                return false;
            continue;
        }
        kn_tensor *t = kn_state_tensor_new(i->dtype, i->ndim, i->shape);
        if (!t || !kn_state_add_tensor(whole, NULL, i->name, i->dtype, i->ndim, i->shape, t))
            return false;
    }
    return true;
}

kn_state *kn_state_gather_(const kn_state *s, kn_state_gather_options o)
{
    kn_gathering g = { .what = "kn_state_gather", .s = s, .comm = o.comm ? o.comm : kn_world() };
    if (!kn_ok())
        return NULL;
    g.here = !o.rank0_only || kn_rank(g.comm) == 0;
    kn_state *whole = kn_state_new();
    bool ok = kn_agree(g.comm, whole != NULL) && kn_gathering_begin(&g) &&
              (!g.here || make_whole(g.header, whole));
    ok = kn_agree(g.comm, ok);
    for (int k = 0; ok && k < g.header->count; k++) {
        const kn_state_item *i = &g.header->list[k];
        ok = i->type != KN_STATE_TENSOR ||
             kn_gathering_item(&g, k, g.here ? kn_array_of(whole->list[k].tensor).data : NULL);
    }
    kn_gathering_end(&g);
    if (ok)
        return whole;
    kn_state_free(whole);
    return NULL;
}
