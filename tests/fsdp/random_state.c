/* tests/fsdp/random_state.c: the state of a random program is taken, overwritten and loaded again:
 * what follows has the same bits. */
#include "tests/fsdp/random.h"

static kn_state *take_state(random_net *n, const kn_optim *o, kn_state_kind kind)
{
    return o ? kn_optim_state_dict(o, .kind = kind) : kn_state_dict(&n->m[0], .kind = kind);
}

static bool load_state(random_net *n, kn_optim *o, const kn_state *s)
{
    return o ? kn_load_optim_state_dict(o, s) : kn_load_state_dict(&n->m[0], s);
}

static bool spoil_state(kn_state *s)
{
    const bool mode = kn_set_grad_mode(false);
    bool ok = s != NULL;
    for (int i = 0; ok && i < kn_state_count(s); i++) {
        const char *name = kn_state_name(s, i);
        ok = kn_state_type(s, name) != KN_STATE_TENSOR || kn_fill_(kn_state_tensor(s, name), 2);
    }
    kn_set_grad_mode(mode);
    return ok;
}

static bool move_state(random_net *n, kn_optim *o, kn_state_kind kind)
{
    kn_state *s = take_state(n, o, kind), *other = take_state(n, o, kind);
    bool ok = s && spoil_state(other) && load_state(n, o, other) && load_state(n, o, s);
    kn_state_free(s);
    kn_state_free(other);
    return ok;
}

bool random_move_state(random_net *n, const random_optims *optims, int number)
{
    kn_state_kind kind = KN_STATE_FULL + number % 3;
    for (int i = 0; i < RANDOM_NODES; i++) /* ranks differ in what no unit reduces */
        kind = n->p->node[i].ignored ? KN_STATE_SHARDED : kind;
    return move_state(n, NULL, kind) && (!optims->o[0] || move_state(n, optims->o[0], kind)) &&
           (!optims->o[1] || move_state(n, optims->o[1], kind));
}
