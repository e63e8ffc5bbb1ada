/* tests/fsdp/offload_masters_test.c: units that compute on a device, with masters in the host's
 * memory: two optimizers step them, no step covers masters in two places, and the next forward sees
 * every write to a master. The device is a stand-in (stand_in.h). Rank functions return a status
 * and never assert. */
#include "fsdp/fsdp.h"
#include "fsdp/unit.h"
#include "knap.h"
#include "tests/comm/comm_test.h"
#include "tests/fsdp/stand_in.h"

#include <sys/mman.h>

/* ---- two optimizers over one bucket ---------------------------------------------------------- */

typedef struct pair {
    kn_module base;
    kn_linear a, b;
} pair;

static kn_tensor *pair_forward(kn_module *self, kn_tensor *x)
{
    pair *m = (pair *)self;
    return kn_call(&m->b, kn_tanh(kn_call(&m->a, x)));
}

typedef struct two {
    kn_device device;
    float *out; /* shared by all ranks */
} two;

/* a is stepped after every backward, b after every second: the gradients that a's step consumed are
 * zeroed on the host, where b's gradient waits. */
static void step_in_turns(kn_comm *world, void *arg)
{
    const two *t = arg;
    OWNED_MODULE pair m = { 0 };
    float x[6] = { 1, -2, 3, -4, 5, -6 };
    KN_CHECK(kn_module_init(&m.base, pair_forward) &&
             kn_linear_init(&m.a, &m.base, "a", 6, 9, .device = KN_META) &&
             kn_linear_init(&m.b, &m.base, "b", 9, 4, .device = KN_META));
    KN_CHECK(kn_fsdp_wrap(&m, world, .device = t->device, .param_dtype = KN_BF16,
                          .offload_dir = t->device == STAND_IN ? "memory" : NULL));
    OWNED_OPTIM kn_optim *a = kn_sgd(&m.a, .lr = 0.1, .momentum = 0.9),
                         *b = kn_adamw(&m.b, .lr = 0.1);
    for (int step = 0; step < 6; step++) {
        IN_SCOPE;
        kn_tensor *y = kn_call(&m, kn_from(KN_F32, t->device, x, KN_SHAPE(1, 6)));
        KN_CHECK(kn_backward(mean_square(y)) && kn_step(a));
        KN_CHECK(step % 2 == 0 || kn_step(b));
    }
    for (int i = 0, at = 0; i < 4; at += i == 0 ? 54 : i == 1 ? 9 : 36, i++)
        KN_CHECK(kn_param_read(&m, i, t->out + at));
}

KN_TEST(offload_masters, two_optimizers_over_one_bucket)
{
    enum { BYTES = (54 + 9 + 36 + 4) * sizeof(float) };
    for (int ranks = 1; ranks <= 2 && !THREADS_ONLY; ranks++) {
        float *out[2];
        for (int away = 0; away < 2; away++) {
            out[away] = shared_bytes(BYTES);
            two t = { away ? STAND_IN : KN_CPU, out[away] };
            KN_CHECK(on_stand_in((stand_in){ .home_us = 1000 }, ranks, step_in_turns, &t) == 0);
        }
        KN_CHECK(memcmp(out[0], out[1], BYTES) == 0, "%d ranks: first weight %.9g and %.9g", ranks,
                 (double)out[0][0], (double)out[1][0]);
        munmap(out[0], BYTES);
        munmap(out[1], BYTES);
    }
}

/* Offloaded parameters are stepped by the host, others by the device: one step can't do both. */
static void step_in_two_places(kn_comm *world, void *arg)
{
    OWNED_MODULE kn_linear net = { 0 };
    KN_CHECK(kn_linear_init(&net, NULL, NULL, 5, 4, .device = KN_META));
    KN_CHECK(kn_materialize(&net, STAND_IN, 1));
    KN_CHECK(
        kn_fsdp_wrap(&net, world, .device = STAND_IN, .offload_dir = "memory", .ignore = "bias"));
    REFUSED(kn_adamw(&net, .lr = 1), "'weight' lies on cpu and 'bias' on stand-in");
    REFUSED(kn_clip_grad_norm(&net, 1), "the gradients' norm: 'weight' lies");
}

KN_TEST(offload_masters, parameters_in_two_places_are_refused)
{
    if (THREADS_ONLY)
        return;
    KN_CHECK(on_stand_in((stand_in){ 0 }, 1, step_in_two_places, NULL) == 0);
}

/* ---- a copy in param_dtype that can't be stale ----------------------------------------------- */

enum { IN = 7, OUT = 5, WAYS = 8 };

typedef struct writing {
    kn_device device;
    int ranks;
    float (*y)[OUT]; /* [WAYS + 1], shared by all ranks */
} writing;

static bool doubled(kn_module *m, void *arg)
{
    kn_tensor *w = kn_module_param(m, "weight");
    IN_SCOPE;
    bool mode = kn_set_grad_mode(false), ok = kn_copy_(w, kn_scale(w, 1.37));
    kn_set_grad_mode(mode);
    return ok;
}

/* This rank's part of the weight changes, by way number `way`. */
static bool change(kn_linear *net, kn_optim *opt, int way)
{
    const kn_param *p;
    float whole[IN * OUT];
    int n = kn_params(net, &p);
    bool ok = n == 2 && kn_param_read(net, 0, whole);
    for (int i = 0; i < IN * OUT; i++)
        whole[i] = whole[i] * 0.7f + 0.01f * (float)i;
    if (way == 0)
        return ok && kn_param_write(net, 0, whole);
    if (way == 1)
        return ok && kn_shard_write(net, 0, p[0].master, whole);
    if (way == 2 || way == 3) {
        kn_summon_scope s = kn_summon(net, .rank0_only = way == 3);
        if (way == 2 || kn_rank(kn_world()) == 0)
            ok = ok && doubled(&net->base, NULL);
        return kn_summon_end(s) && ok;
    }
    if (way == 4)
        return kn_fsdp_apply(net, doubled, NULL);
    IN_SCOPE;
    if (way == 5) { /* by the user, as a tensor */
        ok = ok && kn_copy_(p[0].master, kn_scale(p[0].master, 0.9));
    } else if (way == 6) { /* by the user, through a pointer */
        float *x = kn_numel(p[0].master) ? kn_data(p[0].master) : NULL;
        for (int64_t i = 0; x && i < kn_numel(p[0].master); i++)
            x[i] *= 1.1f;
        kn_bump_version(p[0].master);
    } else { /* only by the previous step */
        kn_set_lr(opt, 0.02);
    }
    return ok && kn_ok();
}

static bool compute(kn_linear *net, const writing *w, float *y, bool backward)
{
    float x[IN] = { 1, -2, 3, -4, 5, -6, 7 };
    IN_SCOPE;
    kn_tensor *out = kn_call(net, kn_from(KN_F32, w->device, x, KN_SHAPE(1, IN)));
    if (backward)
        kn_backward(mean_square(out));
    float got[OUT];
    bool ok = kn_to_host(kn_cast(out, KN_F32), got, sizeof got);
    if (y)
        memcpy(y, got, sizeof got);
    return ok;
}

static void write_masters(kn_comm *world, void *arg)
{
    const writing *w = arg;
    OWNED_MODULE kn_linear net = { 0 };
    bool first = kn_rank(world) == 0;
    kn_set_threads(1);
    KN_CHECK(kn_linear_init(&net, NULL, NULL, IN, OUT, .device = KN_CPU));
    kn_seed((uint64_t)kn_rank(world)); /* all ranks get rank 0's values */
    KN_CHECK(kn_materialize(&net, KN_CPU, 3 + (uint64_t)kn_rank(world)));
    KN_CHECK(kn_fsdp_wrap(&net, world, .device = w->device, .param_dtype = KN_BF16,
                          .sync_from_rank0 = true,
                          .offload_dir = w->device == STAND_IN ? "memory" : NULL));
    OWNED_OPTIM kn_optim *opt = kn_sgd(&net, .lr = 0.01);
    KN_CHECK(opt && compute(&net, w, first ? w->y[WAYS] : NULL, false));
    for (int way = 0; way < WAYS; way++) {
        KN_CHECK(change(&net, opt, way), "way %d", way);
        KN_CHECK(compute(&net, w, first ? w->y[way] : NULL, true), "way %d", way);
        KN_CHECK(kn_step(opt)); /* raises the master's version by itself */
    }
    if (w->device == STAND_IN) { /* the last step made all copies */
        kn_bucket *b = kn_unit_of(net.base.impl)->bucket[0];
        KN_CHECK(b->away.cast_master && b->away.cast_version == b->master->version);
    }
}

KN_TEST(offload_masters, the_next_forward_sees_every_write)
{
    size_t bytes = (WAYS + 1) * OUT * sizeof(float);
    for (int ranks = 1; ranks <= 2 && !THREADS_ONLY; ranks++) {
        float(*y[2])[OUT];
        for (int away = 0; away < 2; away++) {
            y[away] = shared_bytes(bytes);
            writing w = { away ? STAND_IN : KN_CPU, ranks, y[away] };
            KN_CHECK(on_stand_in((stand_in){ 0 }, ranks, write_masters, &w) == 0);
        }
        for (int way = 0; way <= WAYS; way++) {
            KN_CHECK(memcmp(y[0][way], y[1][way], sizeof y[0][way]) == 0,
                     "%d ranks, way %d: output 0 is %g, on the cpu %g", ranks, way,
                     (double)y[1][way][0], (double)y[0][way][0]);
            KN_CHECK(way == 0 || memcmp(y[0][way], y[0][way - 1], sizeof y[0][way]) != 0,
                     "%d ranks: way %d changes nothing", ranks, way);
        }
        munmap(y[0], bytes);
        munmap(y[1], bytes);
    }
}

/* ---- the device is behind -------------------------------------------------------------------- */

/* A forward computes with the values of before the writes that follow it. */
static void write_behind_a_forward(kn_comm *world, void *arg)
{
    const writing w = { .device = STAND_IN };
    OWNED_MODULE kn_linear net = { 0 }, other = { 0 };
    const float x[IN] = { 1, -2, 3, -4, 5, -6, 7 };
    float whole[IN * OUT], want[OUT], got[OUT];
    const kn_param *p;
    (void)arg;
    kn_set_threads(1);
    KN_CHECK(kn_linear_init(&net, NULL, NULL, IN, OUT, .device = KN_META) &&
             kn_linear_init(&other, NULL, NULL, IN, OUT) && kn_materialize(&other, KN_CPU, 5));
    KN_CHECK(kn_fsdp_wrap(&net, world, .device = STAND_IN, .offload_dir = "memory",
                          .reshard_after_forward = KN_RESHARD_ALWAYS) &&
             kn_params(&net, &p) == 2);
    kn_state *state = kn_state_dict(&other);
    for (int way = 0; way < 3; way++) {
        KN_CHECK(compute(&net, &w, want, false));
        for (int i = 0; i < IN * OUT; i++)
            whole[i] = (float)(way + i % IN);
        IN_SCOPE;
        kn_tensor *y = kn_call(&net, kn_from(KN_F32, STAND_IN, x, KN_SHAPE(1, IN)));
        KN_CHECK(way == 0   ? kn_load_state_dict(&net, state)
                 : way == 1 ? kn_param_write(&net, 0, whole)
                            : kn_shard_write(&net, 0, p[0].master, whole));
        KN_CHECK(kn_to_host(y, got, sizeof got) && memcmp(got, want, sizeof got) == 0,
                 "way %d: %g, not %g", way, (double)got[0], (double)want[0]);
        KN_CHECK(compute(&net, &w, got, false) && memcmp(got, want, sizeof got) != 0);
    }
    kn_state_free(state);
}

KN_TEST(offload_masters, a_write_waits_for_what_reads)
{
    for (int ranks = 1; ranks <= 2 && !THREADS_ONLY; ranks++)
        KN_CHECK(on_stand_in((stand_in){ .away_us = 10000 }, ranks, write_behind_a_forward, NULL) ==
                 0);
}
