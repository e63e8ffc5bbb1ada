/* tests/state/moving.h: the small net of tests/fsdp/net.h, trained in any way of sharding, whose
 * state moves. */
#ifndef KNAP_TESTS_STATE_MOVING_H
#define KNAP_TESTS_STATE_MOVING_H

#include "comm/comm_internal.h"
#include "state/dict.h"
#include "state/entries.h"
#include "tests/fsdp/net.h"

enum { MICRO = 4, MOST = 128 }; /* micro-batches a step; elements of the largest tensor */

/* A step of MICRO micro-batches, of which this rank takes its own. */
static inline bool net_step(net *m, kn_optim *o, kn_comm *world, int number)
{
    const int ranks = kn_comm_size(world), rank = kn_rank(world);
    bool ok = true;
    for (int micro = 0; ok && micro < MICRO / ranks; micro++)
        ok = net_backward(m, number * MICRO + micro * ranks + rank);
    return ok && kn_step(o);
}

/* The net with other values than NET_SEED gives, in way w; NULL: not wrapped. */
static inline bool net_other(net *m, kn_comm *world, const way *w)
{
    if (!net_init(m, KN_META))
        return false;
    if (!w)
        return kn_materialize(m, KN_CPU, 1);
    return kn_fsdp_wrap(m, world, .strategy = w->strategy, .layout = w->layout, .mesh = w->mesh,
                        .keep_whole_below = w->keep_whole_below, .offload_dir = w->offload_dir,
                        .wrap_class = "linear,layer_norm", .seed = 1);
}

/* Collective calls of this rank so far. */
static inline int64_t calls_of(kn_comm *world)
{
    int64_t calls = 0;
    for (const kn_comm *c = world->world->first; c; c = c->next)
        calls += c->family == c ? (int64_t)c->seq : 0;
    return calls;
}

/* Both have the same names in the same order, and the same values. */
static inline bool same_states(const kn_state *a, const kn_state *b)
{
    if (kn_state_count(a) != kn_state_count(b))
        return kn_fail("%d names, not %d", kn_state_count(a), kn_state_count(b));
    for (int i = 0; i < kn_state_count(a); i++) {
        const char *name = kn_state_name(a, i);
        if (strcmp(name, kn_state_name(b, i)) != 0)
            return kn_fail("%s, not %s", name, kn_state_name(b, i));
        const kn_state_value type = kn_state_type(a, name);
        if (type != kn_state_type(b, name) ||
            (type == KN_STATE_TENSOR
                 ? !same_bytes(kn_state_tensor(a, name), kn_state_tensor(b, name))
                 : kn_state_number(a, name) != kn_state_number(b, name)))
            return kn_ok() && kn_fail("'%s' differs", name);
    }
    return kn_ok();
}

/* Hybrid meshes add gradients in another order than one process: there the reference goes on with
 * what the ranks have. */
static inline bool net_follow(net *ref, kn_optim *b, net *m, kn_optim *a, const way *w)
{
    kn_state *s = w->ranks ? kn_state_dict(m) : NULL, *o = w->ranks ? kn_optim_state_dict(a) : NULL;
    bool ok = !w->ranks || (kn_load_state_dict(ref, s) && kn_load_optim_state_dict(b, o));
    kn_state_free(s);
    kn_state_free(o);
    return ok;
}

static inline void on_threads(int ranks, kn_rank_fn fn, void *arg)
{
    int failed = kn_spawn_threads(ranks, fn, arg);
    KN_CHECK_OK();
    KN_CHECK(failed == 0, "%d of %d ranks failed", failed, ranks);
}

#endif
