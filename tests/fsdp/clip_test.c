/* tests/fsdp/clip_test.c: norms of any order over ranks. Every rank must get the bits of one plain
 * process: from the same gathered gradients, and, if the reduction adds in that process's order,
 * from the same training. Parameters that several ranks hold count once. Rank functions return a
 * status. */
#include "nn/means.h"
#include "tests/fsdp/two.h"

enum { MICRO = 4, ORDERS = 5, MOST = 2048 };
static const double order[ORDERS] = { 0.5, 1, 2, 3, HUGE_VAL };

/* The norm of whole gradients in host memory, by the kernels, in one run each. */
static float plain_norm(const kn_run *run, int runs, float absmax, double scale, double p)
{
    kn_stream *s = kn_compute_stream(KN_CPU);
    int64_t limbs[KN_SQSUM_LIMBS] = { 0 };
    float norm = -1;
    double coef;
    bool ok =
        isinf(p) ||
        (p == 2 ? KN_LAUNCH(s, KN_K_SQSUM, ((kn_sqsum_args){ run, runs, &absmax, limbs }))
                : KN_LAUNCH(s, KN_K_POWSUM, ((kn_powsum_args){ run, runs, &absmax, p, limbs })));
    kn_clip_args clip = { limbs, &absmax, scale, 0, &norm, &coef, p == 2 ? 0 : p };
    return ok && KN_LAUNCH(s, KN_K_CLIP, clip) ? norm : -1;
}

/* Whole gradients of all trainable parameters as runs (collective), such that one number divides
 * them. room: for the values. */
static int whole_grads(void *m, float *room, kn_run *run)
{
    const kn_param *p;
    kn_means means;
    bool ok = kn_means_begin(&means, kn_impl(m, "test"), "test");
    int n = ok ? kn_params(m, &p) : 0, runs = 0;
    for (int i = 0; i < n && kn_ok(); i++) {
        kn_tensor *g = p[i].trainable ? kn_grad_by_mean(kn_param_grad(&p[i]), &means, i) : NULL;
        if (!g || !kn_shard_read(m, i, g, room))
            continue;
        run[runs++] = (kn_run){ room, p[i].numel, kn_dtype_of(g) };
        room += p[i].numel;
    }
    kn_means_end(&means);
    return runs;
}

/* The same by plain arithmetic, of the gradients' sums by scale. */
static double norm_in_f64(const kn_run *run, int runs, double scale, double p)
{
    double sum = 0;
    for (int i = 0; i < runs; i++)
        for (int64_t k = 0; k < run[i].count; k++) {
            double x = fabs((double)((const float *)run[i].data)[k]) * scale;
            sum = isinf(p) ? fmax(sum, x) : sum + pow(x, p);
        }
    return isinf(p) ? sum : pow(sum, 1 / p);
}

/* Whether a step of sgd by factor times whole gradients has led from one to the other. */
static bool moved_by(double factor, const float *grad, const float *from, const float *to,
                     int64_t count)
{
    for (int64_t k = 0; k < count; k++) {
        double want = (double)from[k] - factor * (double)grad[k];
        if (fabs((double)to[k] - want) > 1e-6 * (1 + fabs(want)))
            return kn_fail("element %lld: %g, not %g", (long long)k, (double)to[k], want);
    }
    return true;
}

/* All trainable parameters (collective), in the order of whole_grads. */
static bool read_all(void *m, float *room)
{
    const kn_param *p;
    int n = kn_params(m, &p);
    for (int i = 0; i < n && kn_ok(); i++)
        if (p[i].trainable && kn_param_read(m, i, room))
            room += p[i].numel;
    return kn_ok();
}

static bool accumulate(net *m, kn_comm *world)
{
    int n = kn_comm_size(world);
    for (int a = 0; a < MICRO / n; a++)
        if (!net_backward(m, a * n + kn_rank(world)))
            return false;
    return true;
}

/* The norm of one plain process that accumulates the same micro-batches. */
static bool reference(float norm[ORDERS], net *m, int ranks)
{
    bool ok = net_reference(m);
    for (int i = 0; i < MICRO / ranks * ranks && ok; i++)
        ok = net_backward(m, i);
    for (int k = 0; k < ORDERS && ok; k++)
        norm[k] = (float)kn_item(kn_clip_grad_norm_p(m, 0.01, order[k]));
    OWNED_OPTIM kn_optim *o = ok ? kn_sgd(m, .lr = 1) : NULL;
    ok = ok && o && kn_item(kn_clip_grad_norm_p(m, 0.01, 3)) > 0.01f && kn_step(o);
    return ok && kn_ok();
}

/* m's norms equal those of its gathered gradients. If its reductions add in the order of one
 * process (linear), norms and a clipped step equal that process's. */
static void compare(kn_comm *world, net *m, bool linear)
{
    static _Thread_local float room[MOST], before[MOST], after[MOST];
    kn_run run[16];
    OWNED_MODULE net plain;
    float want[ORDERS], absmax = 0;
    kn_set_threads(1);
    IN_SCOPE;
    KN_CHECK(reference(want, &plain, kn_comm_size(world)));
    OWNED_OPTIM kn_optim *o = kn_sgd(m, .lr = 1);
    KN_CHECK(o && accumulate(m, world));
    int runs = whole_grads(m, room, run);
    KN_CHECK(runs == 6, "%d gradients", runs);
    KN_LAUNCH(kn_compute_stream(KN_CPU), KN_K_ABSMAX, ((kn_absmax_args){ run, runs, &absmax }));
    for (int k = 0; k < ORDERS; k++) {
        float norm = (float)kn_item(kn_clip_grad_norm_p(m, 0.01, order[k]));
        float put_together = plain_norm(run, runs, absmax, kn_grad_scale(m), order[k]);
        KN_CHECK(norm == put_together, "p %g: %.9g, whole gradients give %.9g", order[k],
                 (double)norm, (double)put_together);
        double far = norm_in_f64(run, runs, kn_grad_scale(m), order[k]);
        KN_CHECK(fabs((double)norm - far) < 1e-4 * far, "p %g: %.9g, not about %.9g", order[k],
                 (double)norm, far);
        KN_CHECK(!linear || norm == want[k], "p %g: %.9g, one process gets %.9g", order[k],
                 (double)norm, (double)want[k]);
        KN_CHECK(order[k] != 2 || norm == kn_item(kn_clip_grad_norm(m, 0.01)));
    }
    int64_t elements = run[runs - 1].count + ((float *)run[runs - 1].data - room);
    double norm = norm_in_f64(run, runs, kn_grad_scale(m), 3), scale = kn_grad_scale(m);
    KN_CHECK(norm > 0.02 && read_all(m, before));
    KN_CHECK(kn_item(kn_clip_grad_norm_p(m, 0.01, 3)) > 0.01f && kn_step(o));
    KN_CHECK(!linear || all_read_as(m, &plain), "after a clipped step");
    KN_CHECK(read_all(m, after) && moved_by(scale * 0.01 / norm, room, before, after, elements),
             "a clipped step");
}

RANK_TEST(clip, same_bits_for_every_order_and_way_of_sharding, IN_ALL_WAYS)
{
    const way *w = arg;
    bool hybrid = w->strategy == KN_HYBRID_SHARD || w->strategy == KN_HYBRID_SHARD_GRAD_OP;
    NET_IN_WAY(m, world, w);
    compare(world, &m, !hybrid);
}

/* A unit on every rank, one in groups of arg ranks, one over all of them below the root. */
static bool several_meshes(kn_module *m, bool recurse, int64_t unclaimed, kn_fsdp_wrap_options *o,
                           void *arg)
{
    const char *path = kn_module_path(m);
    if (strcmp(path, "fc1") == 0) {
        o->strategy = KN_NO_SHARD;
    } else if (strcmp(path, "fc2") == 0) {
        o->strategy = KN_HYBRID_SHARD;
        o->mesh.shards = *(int *)arg;
        o->layout = KN_LAYOUT_PER_PARAM;
    } else if (strcmp(path, "ln") == 0) {
        o->strategy = KN_SHARD_GRAD_OP;
        o->keep_whole_below = 1000;
    }
    return recurse || *path == 'f' || *path == 'l';
}

RANK_TEST(clip, units_of_one_tree_on_several_meshes, .threads = "124")
{
    int shards = kn_comm_size(world) == 4 ? 2 : 1;
    NET_WRAPPED(m, world, .policy = several_meshes, .policy_arg = &shards, .seed = NET_SEED);
    KN_CHECK(kn_fsdp_units(&m, NULL, 0) == 4);
    compare(world, &m, shards == 1);
}

/* ---- not finite ------------------------------------------------------------------------------ */

RANK_TEST(clip, a_gradient_that_is_not_finite_is_found_by_all, IN_ALL_WAYS)
{
    const way *w = arg;
    int last = kn_comm_size(world) - 1;
    NET_IN_WAY(m, world, w);
    KN_CHECK(accumulate(&m, world));
    KN_CHECK(!kn_find_nonfinite_grad(&m) && kn_ok());
    const kn_param *p;
    int n = kn_params(&m, &p), at = -1;
    for (int i = 0; i < n; i++)
        if (strcmp(p[i].name, "fc1.weight") == 0)
            at = i;
    kn_scope scope = kn_scope_begin();
    kn_tensor *g = kn_param_grad(&p[at]);
    if (kn_rank(world) == last && kn_numel(g) > 0)
        ((float *)kn_array_of(g).data)[0] = NAN;
    kn_scope_end(scope);
    const char *name = kn_find_nonfinite_grad(&m);
    bool poked = w->layout == KN_LAYOUT_PER_PARAM || last == 0 || w->strategy == KN_NO_SHARD;
    KN_CHECK(name || !poked, "nothing was found");
    KN_CHECK(!name || strcmp(name, "fc1.weight") == 0, "found '%s'", name);
    KN_CHECK((name == NULL) == (isfinite(kn_item(kn_clip_grad_norm(&m, 1))) != 0));
}

/* A rank that doesn't clip while the others do is named, and nothing hangs. */
static void one_does_not_clip(kn_comm *world, void *arg)
{
    NET_IN_WAY(m, world, arg);
    KN_CHECK(accumulate(&m, world));
    OWNED_OPTIM kn_optim *o = kn_sgd(&m, .lr = 1);
    KN_CHECK(o != NULL);
    if (kn_rank(world) == 1)
        kn_step(o);
    else
        kn_clip_grad_norm(&m, 1);
    net_backward(&m, kn_rank(world));
    KN_CHECK(!kn_ok() && strstr(kn_error(), "collectives don't match: rank ") &&
                 strstr(kn_error(), "gradient norm"),
             "the message");
    kn_clear_error();
}

KN_TEST(clip, a_rank_that_does_not_clip_is_found)
{
    by_processes("2", one_does_not_clip, (void *)&ways[0]);
    by_both("3", one_does_not_clip, (void *)&ways[4]);
}

/* ---- parameters of no unit ------------------------------------------------------------------- */

/* An ignored parameter's gradient is each rank's own: the first rank's counts, once. */
RANK_TEST(clip, parameters_of_no_unit_count_once, .processes = "13", .threads = "13")
{
    static _Thread_local float room[MOST];
    kn_run run[16];
    float absmax = 0;
    kn_stream *s = kn_compute_stream(KN_CPU);
    NET_WHOLE(m);
    KN_CHECK(kn_fsdp_wrap(&m, world, .ignore = "ln.*", .wrap_class = "linear"));
    KN_CHECK(net_backward(&m, kn_rank(world)));
    int runs = whole_grads(&m, room, run);
    KN_CHECK(runs == 6, "%d gradients", runs);
    KN_LAUNCH(s, KN_K_ABSMAX, ((kn_absmax_args){ run, runs, &absmax }));
    KN_CHECK(kn_all_reduce_max(world, &absmax, 1, s, "test"));
    KN_CHECK(kn_broadcast(world, room, sizeof room, 0, s, "test"));
    for (int k = 0; k < ORDERS; k++) {
        float norm = (float)kn_item(kn_clip_grad_norm_p(&m, 0, order[k]));
        float want = plain_norm(run, runs, absmax, kn_grad_scale(&m.fc1), order[k]);
        KN_CHECK(norm == want, "p %g: %.9g, not %.9g", order[k], (double)norm, (double)want);
    }
    KN_CHECK(kn_grad_scale(&m.fc1) == 1.0 / kn_comm_size(world) && kn_grad_scale(&m.ln) == 1);
}

/* ---- wrapped before it is added -------------------------------------------------------------- */

static kn_tensor *outer_forward(kn_module *self, kn_tensor *x)
{
    return kn_call(kn_module_child(self, 0), x);
}

RANK_TEST(clip, norms_agree_where_a_unit_is_added_after_wrapping, .threads = "2")
{
    two m, plain;
    OWNED_MODULE kn_module outer = { 0 };
    KN_CHECK(two_init(&plain, KN_META, KN_F32) && kn_fsdp_wrap(&plain, world, .seed = NET_SEED));
    KN_CHECK(two_init(&m, KN_META, KN_F32) && kn_fsdp_wrap(&m, world, .seed = NET_SEED));
    KN_CHECK(two_backward(&m, kn_rank(world)) && two_backward(&plain, kn_rank(world)));
    KN_CHECK(kn_module_init(&outer, outer_forward) && kn_module_add(&outer, "inner", &m.base));
    KN_CHECK(kn_grad_scale(&outer) == kn_grad_scale(&plain), "gradients that wait are counted");
    const kn_param *p;
    KN_CHECK(kn_params(&outer, &p) == 4 && strcmp(p[0].name, "inner.a.weight") == 0, "names");
    float norm = (float)kn_item(kn_clip_grad_norm(&outer, 0)),
          want = (float)kn_item(kn_clip_grad_norm(&plain, 0));
    KN_CHECK(norm == want && want > 0, "norm %g, not %g", norm, want);
    kn_module_free(&plain);
}
