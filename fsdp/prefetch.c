/* fsdp/prefetch.c: gathers ahead of their use. The next unit of a backward is known from the
 * forward just run (order.c), the next one of a forward from the outermost call of the same unit
 * before, where evaluations follow evaluations: a wrong guess there costs memory until the
 * forward's end, never correctness. At most .max_gathers units are gathered ahead of their use. */
#include "fsdp/schedule.h"

void kn_prefetch_begin(kn_unit *u)
{
    const bool trains = u->schedule->recording;
    kn_unit_list recycled = u->last[trains];
    u->last[trains] = u->begun[trains];
    u->begun[trains] = recycled;
    u->begun[trains].count = 0;
}

void kn_prefetch_forget(kn_unit *u)
{
    const bool trains = u->schedule->recording;
    u->begun[trains].count = u->last[trains].count = 0;
}

void kn_prefetch_free(kn_unit *u)
{
    for (int i = 0; i < 2; i++) {
        kn_host_free(u->begun[i].list);
        kn_host_free(u->last[i].list);
        u->begun[i] = u->last[i] = (kn_unit_list){ 0 };
    }
}

static bool is_unsharded(const kn_unit *u)
{
    for (int i = 0; i < u->buckets; i++)
        if (u->bucket[i]->residency != KN_UNSHARDED)
            return false;
    return true;
}

static bool ahead(kn_unit *u, kn_cause why)
{
    kn_schedule_state *s = u->schedule;
    int most = s->root->options.max_gathers;
    if (u->ahead || is_unsharded(u) || s->ahead >= most)
        return true;
    if (!kn_unit_unshard(u, why))
        return false;
    u->ahead = true;
    s->ahead++;
    return true;
}

/* backward: only those that it needs. */
static bool ahead_of_list(const kn_unit *u, const kn_unit_list *l, bool backward, kn_cause why)
{
    for (int i = 0; i < l->count; i++)
        if (l->list[i]->schedule == u->schedule &&
            (!backward || kn_unit_needed_in_backward(l->list[i])) && !ahead(l->list[i], why))
            return false;
    return true;
}

/* The unit that began after u in the call before: looked for from where this one has got to. The
 * first evaluation goes by training. */
static kn_unit *next_in_forward(const kn_unit *u)
{
    const kn_unit *outer = u->schedule->outermost;
    const bool trains = u->schedule->recording;
    const bool first = !trains && outer->last[false].count == 0;
    const kn_unit_list *last = first ? &outer->begun[true] : &outer->last[trains];
    int here = outer->begun[trains].count - 1;
    for (int i = here < 0 ? 0 : here; i + 1 < last->count; i++)
        if (last->list[i] == u && last->list[i + 1] != u)
            return last->list[i + 1];
    return NULL;
}

bool kn_prefetch_forward(kn_unit *u)
{
    if (!kn_units_add(&u->schedule->outermost->begun[u->schedule->recording], u))
        return false;
    if (u->next_forward.count)
        return ahead_of_list(u, &u->next_forward, false, KN_WHY_OF("the list of", u));
    kn_unit *next = u->options.forward_prefetch ? next_in_forward(u) : NULL;
    return !next || ahead(next, KN_WHY_OF(".forward_prefetch of", u));
}

bool kn_prefetch_backward(kn_unit *u, kn_backward_prefetch when)
{
    if (u->next_backward.count)
        return when != KN_PREFETCH_PRE ||
               ahead_of_list(u, &u->next_backward, true, KN_WHY_OF("the list of", u));
    kn_unit *next =
        u->options.backward_prefetch == when ? kn_order_next(&u->schedule->order) : NULL;
    const kn_cause pre = KN_WHY_OF(".backward_prefetch PRE of", u);
    const kn_cause post = KN_WHY_OF(".backward_prefetch POST of", u);
    return !next || ahead(next, when == KN_PREFETCH_PRE ? pre : post);
}
