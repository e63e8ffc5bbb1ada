/* tests/fsdp/input_grads_test.c: kn_grad_of through units of fsdp and through calls that recompute:
 * the gradient of the input is kn_backward's, and training goes on as without it. */
#include "tests/fsdp/recovery.h"

enum { STEPS = 4, LEAVES = 4 };

static bool same_tensors(const kn_tensor *a, const kn_tensor *b)
{
    float x[64], y[64];
    const size_t bytes = a && b ? (size_t)kn_numel(a) * sizeof *x : 0;
    return bytes && kn_numel(a) == kn_numel(b) && kn_to_host(a, x, bytes) &&
           kn_to_host(b, y, bytes) && memcmp(x, y, bytes) == 0;
}

static kn_tensor *input(int micro)
{
    float v[BATCH * DIM];
    for (int i = 0; i < BATCH * DIM; i++)
        v[i] = (float)((i * 5 + micro * 3) % 7) - 2.5f;
    return kn_require_grad(kn_from(KN_F32, KN_CPU, v, KN_SHAPE(BATCH, DIM)), true);
}

/* A step: the loss of one forward is trained on; that of another only tells the input's gradient.
 * Where asked, the gradients of chosen tensors come first, of the trained loss too. */
static void one_step(model *m, const setting *s, int micro, bool ask, float *value)
{
    kn_tensor *x = input(micro), *other = input(micro + 50), *g[LEAVES] = { NULL }, *go, *inner;
    kn_tensor *in[LEAVES] = { x, kn_module_param(&m->stem, "weight"),
                              kn_module_param(&m->part[1].in, "weight"),
                              kn_module_param(&m->part[2].out, "bias") };
    kn_tensor *l = kn_call(m, x), *l2 = kn_call(m, other);
    KN_CHECK(l && l2);
    *value = (float)kn_item(l);
    if (ask) {
        KN_CHECK(kn_grad_of(l, in, s->plain ? LEAVES : 1, g, .retain_graph = true));
        if (s->plain) /* of a parameter alone, perhaps inside a call that recomputes */
            KN_CHECK(kn_grad_of(l, &in[2], 1, &inner, .retain_graph = true) &&
                     same_tensors(inner, g[2]));
        KN_CHECK(kn_grad_of(l2, &other, 1, &go) && go && !kn_grad(other) && !kn_grad(x));
    }
    KN_CHECK(kn_backward(l));
    for (int i = 0; ask && i < (s->plain ? LEAVES : 1); i++)
        KN_CHECK(same_tensors(g[i], kn_grad(in[i])));
}

static void input_gradients(kn_comm *world, void *arg)
{
    const setting *s = arg;
    float value[2][STEPS];
    kn_set_threads(1);
    fault.all = false;
    for (int ask = 0; ask < 2; ask++) {
        OWNED_MODULE model m;
        KN_CHECK(make(&m, world, s, false));
        OWNED_OPTIM kn_optim *o = kn_sgd(&m, .lr = 0.1);
        kn_set_step(0);
        for (int k = 0; k < STEPS; k++) {
            IN_SCOPE;
            if (s->unsynced)
                kn_fsdp_set_gradient_sync(&m, k >= 2, true);
            one_step(&m, s, k * 4 + kn_rank(world), ask, &value[ask][k]);
            KN_CHECK((s->unsynced && k < 2) || kn_step(o));
        }
    }
    KN_CHECK(memcmp(value[0], value[1], sizeof value[0]) == 0);
}

KN_TEST(input_grads, are_those_of_backward_and_change_nothing)
{
    for (int i = 0; i < SETTINGS; i++) {
        setting s = settings[i];
        if (s.o.device == STAND_IN)
            continue;
        for (int ranks = 1; ranks <= (s.plain ? 1 : 2); ranks++)
            KN_CHECK(spawn_threads(ranks, input_gradients, &s) == 0, "%s, %d ranks", s.name, ranks);
    }
}

RANK_TEST(input_grads, of_sharded_parameters_are_refused, .threads = "1")
{
    setting s = { "full shard", { .wrap_class = "part,linear" } };
    OWNED_MODULE model m;
    kn_tensor *g;
    KN_CHECK(make(&m, world, &s, false));
    kn_tensor *l = loss(&m, 0, KN_CPU), *w = kn_module_param(&m.stem, "weight");
    REFUSED(kn_grad_of(l, &w, 1, &g), "gradients lie in shards");
    KN_CHECK(kn_backward(l));
}
