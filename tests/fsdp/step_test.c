/* tests/fsdp/step_test.c: steps that are refused, trees with divide factors of their own (acts.h
 * has steps of parts). Rank functions return a status. */
#include "tests/fsdp/two.h"
#include "tests/owned.h"

KN_TEST(step, gradients_of_different_micro_batches_make_no_step)
{
    TWO_WRAPPED(m, NULL, .wrap_class = "linear");
    OWNED_OPTIM kn_optim *a = kn_sgd(&m.a, .lr = 1), *all = kn_sgd(&m, .lr = 1);
    KN_CHECK(two_backward(&m, 0) && kn_step(a) && two_backward(&m, 1));
    KN_CHECK(kn_grad_scale(&m.a) == 1 && kn_grad_scale(&m.b) == 0.5);
    kn_optim_free(a); /* its parameters are those of `all` from here on */
    REFUSED(kn_step(all), "kn_step: gradients of 'a' are of 1 micro-batches a rank, others of 2");
    REFUSED(kn_item(kn_clip_grad_norm(&m, 1)), "kn_clip_grad_norm: gradients of 'a'");
    a = kn_sgd(&m.a, .lr = 1);
    KN_CHECK(kn_step(a) && kn_step(all));
    KN_CHECK(kn_grad_scale(&m) == 1);
    KN_CHECK(two_backward(&m, 0) && kn_item(kn_clip_grad_norm(&m.a, 1e-9)) > 0 && !kn_step(all));
    KN_CHECK_ERROR("kn_step: only the gradients of 'a' were clipped");
    KN_CHECK(kn_item(kn_clip_grad_norm(&m, 1)) > 0 && kn_step(all));
}

/* ---- gradients held back --------------------------------------------------------------------- */

RANK_TEST(step, a_step_refuses_while_gradients_are_held_back, .threads = "124")
{
    bool hybrid = kn_comm_size(world) == 4;
    TWO_WRAPPED(m, world, .seed = NET_SEED, .wrap_class = "linear",
                .strategy = hybrid ? KN_HYBRID_SHARD : KN_FULL_SHARD,
                .mesh = { .shards = hybrid ? 2 : 0 });
    OWNED_OPTIM kn_optim *o = kn_sgd(&m, .lr = 1);
    OWNED_SCALER kn_scaler *s = kn_scaler_new(&m, .init_scale = 1);
    KN_CHECK(o && s && two_backward(&m, 0));
    KN_CHECK(hybrid ? kn_fsdp_set_all_reduce(&m, false, true)
                    : kn_fsdp_set_gradient_sync(&m, false, true));
    KN_CHECK(two_backward(&m, 1) && kn_agree(world, true)); /* the error ends all ranks */
    const char *why = hybrid ? "held back in its shard group; run the last backward"
                             : "held back on its rank; run the last backward";
    REFUSED(kn_step(o), why);
    if (kn_comm_size(world) == 1) { /* else the error has ended the ranks */
        REFUSED(kn_scaler_step(s, o), "kn_scaler_step: the gradient", why);
        KN_CHECK(kn_fsdp_set_gradient_sync(&m, true, true) && two_backward(&m, 2));
        KN_CHECK(kn_grad_scale(&m) * 3 == 1 && kn_step(o));
    }
}

/* ---- factors --------------------------------------------------------------------------------- */

/* Each unit divides by its own factor, in one optimizer's step as in two, and in the norm: sibling
 * trees below a module that isn't a unit, or units of one tree (4), with factors given at wrapping
 * or between two backwards (8), offloaded or not (16). Reference: this process adds the ranks'
 * gradients. */
static void siblings(kn_comm *world, void *arg)
{
    const int which = *(int *)arg;
    const kn_param *p, *r;
    float g[4][TWO_MOST] = { 0 }, value[TWO_MOST], want[TWO_MOST];
    double squares = 0;
    int n = kn_comm_size(world);
    TWO(m);
    TWO(ref);
    KN_CHECK(kn_materialize(&ref, KN_CPU, 1337));
    double of_a = which & 1 ? 8 : 0, of_b = which & 1 ? 0 : 8;
    bool later = which & 8;
    const char *store = which & 16 ? "/tmp" : NULL;
    KN_CHECK(kn_fsdp_wrap(&m.a, world, .divide_factor = later ? 3 : of_a,
                          .layout = KN_LAYOUT_PER_PARAM, .offload_dir = store) &&
             kn_fsdp_wrap(&m.b, world, .divide_factor = later ? 0 : of_b, .offload_dir = store) &&
             (!(which & 4) || kn_fsdp_wrap(&m, world)));
    OWNED_OPTIM kn_optim *one = kn_sgd(which & 2 ? (void *)&m.a : &m, .lr = 1), *other = NULL;
    KN_CHECK(one && (!(which & 2) || (other = kn_sgd(&m.b, .lr = 1))));
    KN_CHECK(two_backward(&m, 0) && (!later || (kn_fsdp_set_divide_factor(&m.a, of_a, false) &&
                                                kn_fsdp_set_divide_factor(&m.b, of_b, true))));
    KN_CHECK(two_backward(&m, 0) && two_backward(&ref, 0) && two_backward(&ref, 0));
    KN_CHECK(kn_params(&ref, &r) == 4 && kn_params(&m, &p) == 4, "parameters");
    for (int i = 0; i < 4; i++) {
        float divisor = (i < 2) == (which & 1) ? 8 : (float)n;
        kn_scope scope = kn_scope_begin();
        KN_CHECK(kn_to_host(kn_param_grad(&r[i]), g[i], (size_t)r[i].numel * sizeof(float)),
                 "gradient");
        kn_scope_end(scope);
        for (int64_t k = 0; k < r[i].numel; k++) {
            g[i][k] *= (float)n / divisor / 2; /* equal on all ranks; the mean of two backwards */
            squares += (double)g[i][k] * g[i][k];
        }
    }
    kn_scope scope = kn_scope_begin();
    double norm = which & 2 ? sqrt(squares) : kn_item(kn_clip_grad_norm(&m, 1e9));
    kn_scope_end(scope);
    KN_CHECK(fabs(norm - sqrt(squares)) < 1e-6 * norm, "norm %g, not %g", norm, sqrt(squares));
    KN_CHECK(kn_step(one) && (!other || kn_step(other)));
    for (int i = 0; i < 4; i++) {
        KN_CHECK(kn_param_read(&m, i, value) &&
                 kn_to_host(r[i].master, want, sizeof(float) * (size_t)r[i].numel));
        for (int64_t k = 0; k < r[i].numel; k++)
            KN_CHECK(fabsf(value[k] - (want[k] - g[i][k])) < 1e-6f,
                     "%s[%d] of which %d: %g, not %g", p[i].name, (int)k, which, (double)value[k],
                     (double)(want[k] - g[i][k]));
    }
}

KN_TEST(step, units_divide_by_their_own_factors)
{
    for (int which = 0; which < 32; which++) {
        KN_CHECK(spawn_threads(which % 3 ? 2 : 4, siblings, &which) == 0, "which %d", which);
        KN_CHECK(spawn_threads(1, siblings, &which) == 0, "which %d on one rank", which);
    }
    int one_of_three = 5;
    by_both("3", siblings, &one_of_three);
}

/* Gradients of 40000 a rank in f16, whose largest number is 65504: a sum in f16 fits only if it is
 * divided before; one in f32 always fits. */
RANK_TEST(step, a_predivided_sum_stays_in_range, .threads = "124")
{
    enum { N = 7 };
    const float large = 40000;
    int ranks = kn_comm_size(world);
    for (int how = 0; how < 4; how++) {
        OWNED_MODULE kn_linear m;
        const kn_param *p;
        bool kept = how & 1, before = how & 2;
        float v[N] = { 0 };
        KN_CHECK(kn_linear_init(&m, NULL, "m", N, 1, .device = KN_META, .no_bias = true) &&
                 kn_fsdp_wrap(&m, world, .reduce_dtype = KN_F16, .keep_low_precision_grads = kept,
                              .predivide_factor = before ? ranks : 0));
        IN_SCOPE;
        kn_tensor *x = kn_full(KN_F32, KN_CPU, (double)large, KN_SHAPE(1, N));
        KN_CHECK(kn_backward(sum_of(kn_call(&m, x))) && kn_params(&m, &p) == 1, "");
        kn_tensor *g = kn_cast(kn_param_grad(&p[0]), KN_F32);
        KN_CHECK(g && kn_to_host(g, v, (size_t)kn_numel(g) * sizeof *v), "gradient");
        bool overflows = kept && !before && ranks > 1;
        for (int i = 0; i < kn_numel(g); i++)
            KN_CHECK(overflows ? isinf(v[i]) : v[i] * (float)kn_grad_scale(&m) == large,
                     "%d ranks, kept %d, divided before %d: %g * %g", ranks, kept, before,
                     (double)v[i], kn_grad_scale(&m));
    }
}

KN_TEST(step, a_factor_that_divides_nothing)
{
    TWO_WRAPPED(m, NULL);
    const double wrong[] = { -1, NAN, INFINITY };
    for (int i = 0; i < 3; i++)
        REFUSED(kn_fsdp_set_divide_factor(&m, wrong[i], true),
                "kn_fsdp_set_divide_factor: the factor is", "finite and positive");
    OWNED_OPTIM kn_optim *o = kn_sgd(&m, .lr = 1); /* a norm is of gradients that were divided */
    KN_CHECK(two_backward(&m, 0) && kn_item(kn_clip_grad_norm(&m, 1e-3)) > 0);
    double before = kn_item(kn_clip_grad_norm(&m, 0));
    KN_CHECK(kn_fsdp_set_divide_factor(&m, 4, true));
    KN_CHECK(kn_item(kn_clip_grad_norm(&m, 0)) * 4 == before, "%g", before);
    KN_CHECK(kn_fsdp_set_divide_factor(&m, 0, true) && kn_grad_scale(&m) == 1 && kn_step(o));
}
