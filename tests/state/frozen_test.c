/* tests/state/frozen_test.c: the state of what is frozen at the moment, of what several modules
 * share, and of optimizers with their options. */
#include "tests/kn_test.h"
#include "tests/state/stored.h"

/* Some ways on 1 and 2 threads, as state dicts and as a checkpoint. */
#define SOME .ranks = { 1, 2 }, .ways = 1 << 0 | 1 << 1 | 1 << 4 | 1 << 7, .folders = true

/* ---- frozen parameters ----------------------------------------------------------------------- */

/* Two more steps: one in which fc2 is frozen, one in which it isn't. */
static bool unfreezes(net *m, kn_optim *o, kn_comm *world)
{
    kn_freeze(&m->fc2, true);
    bool ok = net_step(m, o, world, 3);
    kn_freeze(&m->fc2, false);
    return ok && net_step(m, o, world, 4);
}

/* Bit 0: fc2 is frozen when the state is taken; bit 1: when it is loaded. */
static int frozen(trial *t)
{
    net *m = &t->m, *other = &t->other;
    kn_comm *world = t->world;
    kn_optim *o = kn_adamw(m, .lr = 0.05), *p = kn_adamw(other, .lr = 1);
    for (int i = 0; i < 3; i++)
        EXPECT(net_step(m, o, world, i), "step");
    kn_freeze(&m->fc2, t->how & 1);
    EXPECT(STORE(&t->stored, t->dir, world, m, o), "store");
    kn_freeze(&other->fc2, t->how & 2);
    EXPECT(LOAD(&t->stored, other, p), "load");
    EXPECT(unfreezes(m, o, world) && unfreezes(other, p, world) && same_modules(m, other, o, p),
           "how %d", t->how);
    kn_optim_free(o), kn_optim_free(p);
    return 0;
}

KN_TEST(frozen, its_state_is_kept)
{
    TRY(frozen, SOME, .hows = 4);
}

/* A parameter that no step updated has no state, and a load gives it none, or takes it away. */
static int unstepped(trial *t)
{
    net *m = &t->m, *other = &t->other;
    kn_comm *world = t->world;
    kn_optim *o = kn_adamw(m, .lr = 0.05), *p = kn_adamw(other, .lr = 1);
    kn_freeze(&m->fc2, true);
    EXPECT(net_step(m, o, world, 0) && net_step(m, o, world, 1), "step");
    EXPECT(STORE(&t->stored, t->dir, world, m, o), "store");
    EXPECT(!t->stored.so || (!kn_state_has(t->stored.so, "fc2.weight.exp_avg") &&
                             kn_state_int(t->stored.so, "fc2.weight.step") == 0),
           "a state that isn't there");
    if (t->how > 0) /* it has one, which goes */
        EXPECT(net_step(other, p, world, 7), "step");
    kn_freeze(&other->fc2, t->how == 1);
    EXPECT(LOAD(&t->stored, other, p) && kn_optim_steps(p) == 2, "load");
    EXPECT(unfreezes(m, o, world) && unfreezes(other, p, world) && same_modules(m, other, o, p),
           "how %d", t->how);
    kn_optim_free(o), kn_optim_free(p);
    return 0;
}

KN_TEST(frozen, what_was_never_stepped_has_none)
{
    TRY(unstepped, SOME, .hows = 3);
}

/* ---- shared parameters ----------------------------------------------------------------------- */

/* head.weight is wte's, which lies outside of the head. */
static int shared(trial *t)
{
    net *m = &t->m, *other = &t->other;
    kn_comm *world = t->world;
    void *whole = t->how ? &m->base : &m->head;
    EXPECT(STORE(&t->stored, t->dir, world, whole, NULL), "store");
    if (t->how)
        EXPECT(t->stored.s ? kn_state_set_tensor(t->stored.s, "weight",
                                                 kn_state_tensor(t->stored.s, "wte.weight")) &&
                                 kn_load_state_dict(&other->head, t->stored.s, .only = "weight")
                           : kn_checkpoint_load(t->stored.c, &other->head),
               "a part of the whole");
    else
        EXPECT((t->stored.s
                    ? kn_state_count(t->stored.s) == 1 && kn_state_has(t->stored.s, "weight")
                    : kn_checkpoint_has(t->stored.c, "head.weight")) &&
                   LOAD(&t->stored, &other->head, NULL),
               "its own");
    EXPECT(same_modules(&m->wte, &other->wte, NULL, NULL), "values");
    return 0;
}

KN_TEST(frozen, a_part_has_what_it_shares)
{
    TRY(shared, SOME, .hows = 2);
}

/* ---- options --------------------------------------------------------------------------------- */

typedef struct method {
    kn_optim *(*make)(void *m, bool other);
} method;

#define GROUPS(other)                                                                              \
    .groups = &(kn_optim_group){ "*.bias", .lr_mul = (other) ? 0 : 0.5,                            \
                                 .weight_decay = (other) ? 0.75 : KN_ZERO },                       \
    .group_count = 1
static kn_optim *adamw(void *m, bool x)
{
    return kn_adamw(m, .lr = x ? 1 : 0.1, .beta1 = x ? 0 : 0.8, .beta2 = x ? 0 : 0.9,
                    .eps = x ? 0 : 1e-3, .weight_decay = x ? 0 : 0.25, GROUPS(x));
}
static kn_optim *lion(void *m, bool x)
{
    return kn_lion(m, .lr = x ? 1 : 0.1, .beta1 = x ? 0 : 0.5, .beta2 = x ? 0 : 0.7, GROUPS(x));
}
static kn_optim *sgd(void *m, bool x)
{
    return kn_sgd(m, .lr = x ? 1 : 0.1, .momentum = x ? 0.5 : 0.9, .dampening = x ? 0.25 : 0,
                  .nesterov = !x, GROUPS(x));
}
static kn_optim *muon(void *m, bool x)
{
    return kn_muon(m, .lr = x ? 1 : 0.1, .momentum = x ? 0 : 0.5, .no_nesterov = !x,
                   .ns_steps = x ? 0 : 3, .scale = x ? 0 : KN_MUON_SPECTRAL, .eps = x ? 0 : 1e-2,
                   .beta1 = x ? 0 : 0.5, .adamw_eps = x ? 0 : 1e-3, GROUPS(x));
}
static const method methods[] = { { adamw }, { lion }, { sgd }, { muon } };

/* A load brings them all; with .keep_options only the steps. */
static int options(trial *t)
{
    net *m = &t->m, *other = &t->other;
    kn_comm *world = t->world;
    OWNED_MODULE net third;
    EXPECT(net_other(&third, world, t->w), "init");
    kn_optim *o = methods[t->how].make(m, false), *p = methods[t->how].make(other, true),
             *q = methods[t->how].make(&third, true);
    EXPECT(net_step(m, o, world, 0) && STORE(&t->stored, t->dir, world, m, o), "store");
    EXPECT(LOAD(&t->stored, other, p) && kn_lr(p) == 0.1 && same_modules(m, other, o, p), "load");
    EXPECT(net_step(m, o, world, 1) && net_step(other, p, world, 1) && same_modules(m, other, o, p),
           "method %d", t->how);
    EXPECT(t->stored.c ? kn_checkpoint_load(t->stored.c, &third, .optim = q, .keep_options = true)
                       : kn_load_optim_state_dict(q, t->stored.so, .keep_options = true),
           "keep");
    kn_state *was = kn_optim_state_dict(q);
    EXPECT(kn_lr(q) == 1 && kn_optim_steps(q) == 1 && was &&
               kn_state_number(was, "fc2.bias.weight_decay") == 0.75,
           "its own");
    kn_state_free(was);
    kn_optim_free(o), kn_optim_free(p), kn_optim_free(q);
    return 0;
}

KN_TEST(frozen, options_come_back)
{
    TRY(options, SOME, .hows = 4);
}

/* The state has more than is asked for: of a frozen group, of names that are left out, of modules
 * that the optimizer isn't for. */
static int some(trial *t)
{
    net *m = &t->m, *other = &t->other;
    kn_comm *world = t->world;
    const kn_optim_group frozen = { "*.bias", .frozen = true };
    kn_optim *o = kn_adamw(m, .lr = 0.1),
             *p = kn_adamw(t->how == 2 ? (void *)&other->fc2 : other, .lr = 1, .groups = &frozen,
                           .group_count = t->how == 0);
    EXPECT(net_step(m, o, world, 0) && STORE(&t->stored, t->dir, world, m, o), "store");
    EXPECT(LOAD(&t->stored, other, p, .except = t->how == 1 ? "ln.*" : NULL), "how %d", t->how);
    kn_state *have = kn_optim_state_dict(p), *want = kn_optim_state_dict(o);
    EXPECT(have && want &&
               same_bytes(kn_state_tensor(have, "fc2.weight.exp_avg"),
                          kn_state_tensor(want, "fc2.weight.exp_avg")),
           "values");
    kn_state_free(have), kn_state_free(want);
    kn_optim_free(o), kn_optim_free(p);
    return 0;
}

KN_TEST(frozen, a_state_of_more_is_taken_in_part)
{
    TRY(some, SOME, .hows = 3);
}

KN_TEST(frozen, an_optimizer_of_another_kind_is_refused)
{
    net m, other;
    kn_state *s;
    KN_CHECK(net_reference(&m) && net_reference(&other));
    kn_optim *o = kn_adamw(&m, .lr = 0.1), *p = kn_adamw(&other, .lr = 0.1);
    KN_CHECK(net_step(&m, o, NULL, 0) && (s = kn_optim_state_dict(o)) != NULL);
    KN_CHECK(kn_state_set_number(s, "fc2.weight.beta1", 1));
    REFUSED(kn_load_optim_state_dict(p, s), "it has one beta1");
    for (int i = kn_state_count(s) - 1; i >= 0; i--)
        if (strstr(kn_state_name(s, i), ".beta1"))
            KN_CHECK(kn_state_set_number(s, kn_state_name(s, i), 1));
    REFUSED(kn_load_optim_state_dict(p, s), ".beta1' is 1; 0 to 1 is its range");
    for (int i = kn_state_count(s) - 1; i >= 0; i--)
        if (strstr(kn_state_name(s, i), ".beta1"))
            KN_CHECK(kn_state_remove(s, kn_state_name(s, i)));
    KN_CHECK(kn_load_optim_state_dict(p, s), "which stay: %s", kn_error());
    KN_CHECK(kn_state_remove(s, "fc2.weight.exp_avg"));
    REFUSED(kn_load_optim_state_dict(p, s), "1 missing (fc2.weight.exp_avg)");
    kn_freeze(&other.fc2, true);
    KN_CHECK(kn_load_optim_state_dict(p, s), "which a frozen one needn't have: %s", kn_error());
    kn_state_free(s);
    kn_optim_free(o), kn_optim_free(p);
    kn_module_free(&m), kn_module_free(&other);
}
