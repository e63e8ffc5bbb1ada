/* tests/fsdp/precision_test.c: the dtypes that the modules of a unit see: inputs, outputs, buffers,
 * classes that compute in full precision. */
#include "kernels/convert.h"
#include "tests/failing.h"
#include "tests/fsdp/pair.h"
#include "tests/fsdp/two.h"

static kn_values call(pair *m, kn_tensor *x)
{
    kn_tensor *mask = kn_zeros(KN_I64, KN_CPU, KN_SHAPE(ROWS));
    return kn_call_n(m, (kn_values){ 2, { x, mask } }, NULL, 0);
}

KN_TEST(precision, inputs_are_cast)
{
    const struct {
        kn_cast_inputs cast;
        kn_dtype root, a;
    } want[] = { { KN_CAST_DEFAULT, KN_BF16, KN_BF16 },
                 { KN_CAST_ALL, KN_BF16, KN_BF16 },
                 { KN_CAST_ROOT, KN_BF16, KN_F32 },
                 { KN_CAST_NONE, KN_F32, KN_F32 } };
    for (size_t i = 0; i < sizeof want / sizeof want[0]; i++) {
        OWNED_PAIR pair m;
        IN_SCOPE;
        KN_CHECK(pair_init(&m, false) &&
                 kn_fsdp_wrap(&m, NULL, .wrap_class = "spy", .param_dtype = KN_BF16,
                              .cast_inputs = want[i].cast));
        kn_values out = call(&m, kn_ones(KN_F32, KN_CPU, KN_SHAPE(ROWS, DIM)));
        KN_CHECK_OK();
        KN_CHECK(m.in == want[i].root, "case %d: the root got %s", (int)i, kn_dtype_name(m.in));
        KN_CHECK(m.a.in == want[i].a, "case %d: a got %s", (int)i, kn_dtype_name(m.a.in));
        KN_CHECK(m.a.weight == KN_BF16 && m.b.in == KN_BF16, "case %d", (int)i);
        KN_CHECK(m.mask == KN_I64 && kn_dtype_of(out.v[1]) == KN_I64, "integers are cast");
        KN_CHECK(kn_dtype_of(out.v[0]) == KN_BF16, "without .output_dtype the outputs stay");
        kn_call(&m.a, kn_ones(KN_F32, KN_CPU, KN_SHAPE(ROWS, DIM)));
        KN_CHECK(m.a.in == want[i].root, "case %d: a, called directly, got %s", (int)i,
                 kn_dtype_name(m.a.in));
    }
}

/* A tree of units whose module calls one of another tree. */
typedef struct stage {
    spy spy;
    struct stage *next;
} stage;

static kn_tensor *stage_forward(kn_module *self, kn_tensor *x)
{
    stage *next = ((stage *)self)->next;
    x = spy_forward(self, x);
    return next ? kn_call(next, kn_cast(x, KN_F32)) : x;
}

KN_TEST(precision, inputs_of_each_tree_s_root_are_cast)
{
    OWNED_MODULE kn_module both = { 0 };
    stage s[2] = { { .next = &s[1] } };
    KN_CHECK(kn_module_init(&both, NULL));
    for (int i = 0; i < 2; i++)
        KN_CHECK(kn_module_init(&s[i].spy.base, stage_forward) &&
                 kn_module_add(&both, i ? "b" : "a", &s[i].spy.base) &&
                 kn_parameter(&s[i], "weight", KN_F32, KN_META, KN_ONES_INIT, KN_SHAPE(DIM)) &&
                 kn_fsdp_wrap(&s[i], NULL, .param_dtype = KN_BF16, .cast_inputs = KN_CAST_ROOT));
    IN_SCOPE;
    KN_CHECK(kn_call(&s[0], kn_ones(KN_F32, KN_CPU, KN_SHAPE(ROWS, DIM))));
    KN_CHECK(s[0].spy.in == KN_BF16 && s[1].spy.in == KN_BF16, "%s", kn_dtype_name(s[1].spy.in));
}

/* Units of one tree with policies of their own: each computes, takes its inputs, gives its outputs
 * and reduces by its own. */
KN_TEST(precision, of_each_unit)
{
    for (int by_hand = 0; by_hand < 2; by_hand++) {
        OWNED_PAIR pair m;
        IN_SCOPE;
        KN_CHECK(pair_init(&m, false) &&
                 kn_fsdp_wrap(&m.a, NULL, .param_dtype = KN_F16, .reduce_dtype = KN_F32,
                              .output_dtype = KN_BF16, .cast_inputs = KN_CAST_NONE) &&
                 kn_fsdp_wrap(&m.b, NULL, .param_dtype = by_hand ? KN_BF16 : KN_F16) &&
                 kn_fsdp_wrap(&m, NULL, .param_dtype = KN_F64, .output_dtype = KN_F32));
        kn_values out = call(&m, kn_ones(KN_F32, KN_CPU, KN_SHAPE(ROWS, DIM)));
        KN_CHECK_OK();
        const kn_dtype b = by_hand ? KN_BF16 : KN_F16;
        KN_CHECK(m.in == KN_F64 && m.a.in == KN_F32 && m.b.in == b, "inputs: %s, %s, %s",
                 kn_dtype_name(m.in), kn_dtype_name(m.a.in), kn_dtype_name(m.b.in));
        KN_CHECK(m.a.weight == KN_F16 && m.b.weight == b, "weights: %s, %s",
                 kn_dtype_name(m.a.weight), kn_dtype_name(m.b.weight));
        KN_CHECK(m.between == KN_BF16 && kn_dtype_of(out.v[0]) == KN_F32, "outputs: %s, %s",
                 kn_dtype_name(m.between), kn_dtype_name(kn_dtype_of(out.v[0])));
        KN_CHECK(kn_unit_of(m.a.base.impl)->bucket[0]->reduce_dtype == KN_F32 &&
                 kn_unit_of(m.b.base.impl)->bucket[0]->reduce_dtype == b);
    }
}

KN_TEST(precision, without_param_dtype_nothing_is_cast)
{
    OWNED_PAIR pair m;
    IN_SCOPE;
    KN_CHECK(pair_init(&m, false) && kn_fsdp_wrap(&m, NULL, .wrap_class = "spy"));
    call(&m, kn_ones(KN_BF16, KN_CPU, KN_SHAPE(ROWS, DIM)));
    KN_CHECK_OK();
    KN_CHECK(m.in == KN_BF16 && m.a.in == KN_F32 && m.a.weight == KN_F32);
}

KN_TEST(precision, outputs_are_cast)
{
    OWNED_PAIR pair m;
    IN_SCOPE;
    KN_CHECK(pair_init(&m, false) && kn_fsdp_wrap(&m, NULL, .wrap_class = "spy",
                                                  .param_dtype = KN_BF16, .output_dtype = KN_F32));
    kn_values out = call(&m, kn_ones(KN_F32, KN_CPU, KN_SHAPE(ROWS, DIM)));
    KN_CHECK_OK();
    KN_CHECK(m.between == KN_F32, "a gave %s", kn_dtype_name(m.between));
    KN_CHECK(m.b.in == KN_BF16 && kn_dtype_of(out.v[0]) == KN_F32 &&
             kn_dtype_of(out.v[1]) == KN_I64);
}

/* d sum(x a b) / dx = a b in bf16, arriving in x's f32; the weights' gradients in f32 masters. */
KN_TEST(precision, gradients_flow_through_the_casts)
{
    OWNED_PAIR pair m;
    IN_SCOPE;
    KN_CHECK(pair_init(&m, false) &&
             kn_fsdp_wrap(&m, NULL, .wrap_class = "spy", .param_dtype = KN_BF16,
                          .reduce_dtype = KN_F32, .output_dtype = KN_F32));
    kn_tensor *x = kn_require_grad(kn_ones(KN_F32, KN_CPU, KN_SHAPE(ROWS, DIM)), true);
    KN_CHECK(kn_backward(sum_of(call(&m, x).v[0])));
    KN_CHECK(kn_grad(x) && kn_dtype_of(kn_grad(x)) == KN_F32);
    const kn_param *p;
    KN_CHECK(kn_params(&m, &p) == 2);
    const float *g = kn_data(kn_grad(x)), *a = kn_data(p[0].master), *b = kn_data(p[1].master);
    for (int i = 0; i < DIM; i++)
        KN_CHECK(fabsf(g[i] - a[i] * b[i]) < 0.05f, "%g, expected %g", (double)g[i],
                 (double)(a[i] * b[i]));
    kn_tensor *ga = kn_param_grad(&p[0]);
    KN_CHECK(ga && kn_dtype_of(ga) == KN_F32 && kn_dtype_of(p[0].master) == KN_F32);
    for (int i = 0; i < DIM; i++) {
        float have = ((float *)kn_data(ga))[i];
        KN_CHECK(fabsf(have - ROWS * b[i]) < 0.05f, "%g, expected %g", (double)have,
                 (double)(ROWS * b[i]));
    }
}

KN_TEST(precision, buffers_are_cast_once)
{
    OWNED_PAIR pair m;
    KN_CHECK(pair_init(&m, false) && kn_fsdp_wrap(&m, NULL, .wrap_class = "spy",
                                                  .param_dtype = KN_BF16, .buffer_dtype = KN_BF16));
    KN_CHECK(kn_dtype_of(m.buffer) == KN_BF16, "the user's handle is %s",
             kn_dtype_name(kn_dtype_of(m.buffer)));
    KN_CHECK(m.b.base.impl->buffer[0].tensor == m.buffer);
    KN_CHECK(kn_dtype_of(m.b.base.impl->buffer[1].tensor) == KN_I64, "an integer buffer was cast");
    IN_SCOPE;
    const float *v = kn_data(kn_cast(m.buffer, KN_F32));
    KN_CHECK(v && v[0] == 1 && v[1] == 1 && v[2] == 300, "%g %g %g", (double)v[0], (double)v[1],
             (double)v[2]);
}

/* Stops where b's buffer isn't shown as it was given. */
static bool is_full(kn_module *self, void *arg)
{
    return self != &((pair *)arg)->b.base || kn_dtype_of(self->impl->buffer[0].tensor) == KN_F32 ||
           kn_fail("it is cast");
}

static void full_buffers(kn_comm *world, void *arg)
{
    OWNED_PAIR pair m;
    KN_CHECK(pair_init(&m, false) && kn_fsdp_wrap(&m, world, .wrap_class = "spy",
                                                  .param_dtype = KN_BF16, .buffer_dtype = KN_BF16));
    KN_CHECK(shows(&m, KN_BF16, 1, 1, 300), "what computes");
    for (int i = 0; i < 2; i++) { /* nothing is lost on the way there and back */
        kn_summon_scope s = kn_summon(&m, .read_only = i == 0, .rank0_only = i == 1);
        KN_CHECK(s.s && shows(&m, KN_F32, 1, 1.0001f, 300.7f));
        KN_CHECK(kn_summon_end(s) && shows(&m, KN_BF16, 1, 1, 300), "end %d", i);
    }
    kn_summon_scope s = kn_summon(&m.b);
    KN_CHECK(s.s && put(m.buffer, 1, 2.0001f, 7) && kn_summon_end(s), "written");
    KN_CHECK(shows(&m, KN_BF16, 1, 2, 7), "what was written computes");
    KN_CHECK(kn_fsdp_apply(&m, is_full, &m) && shows(&m, KN_BF16, 1, 2, 7));
    KN_CHECK(kn_module_full_buffers(&m, true) && shows(&m, KN_F32, 1, 2.0001f, 7), "by hand");
    KN_CHECK(kn_module_full_buffers(&m, false) && put(m.buffer, 3, 4, 5.001f), "as a forward does");
    KN_CHECK(kn_module_full_buffers(&m, true) && shows(&m, KN_F32, 3, 4, 5),
             "what it wrote is newer");
    KN_CHECK(kn_module_full_buffers(&m, true) && kn_module_full_buffers(&m, false) &&
                 shows(&m, KN_F32, 3, 4, 5) && kn_module_full_buffers(&m, false) &&
                 kn_module_full_buffers(&m, false) && shows(&m, KN_BF16, 3, 4, 5),
             "twice");
    for (int i = 0; i < 3; i++) { /* whatever shows them meanwhile */
        const bool summons = i == 1;
        s = (kn_summon_scope){ NULL };
        KN_CHECK(summons ? (s = kn_summon(&m)).s != NULL : kn_module_full_buffers(&m, true));
        kn_state *state = i == 0 ? kn_state_dict(&m) : NULL;
        KN_CHECK(i ? i == 1 ? kn_mean_buffers(&m, world) : kn_summon_end(kn_summon(&m))
                   : state != NULL,
                 "within");
        KN_CHECK(shows(&m, KN_F32, 3, 4, 5), "within %d they stay", i);
        kn_state_free(state);
        KN_CHECK(summons ? kn_summon_end(s) : kn_module_full_buffers(&m, false));
        KN_CHECK(shows(&m, KN_BF16, 3, 4, 5), "after %d", i);
    }
}

KN_TEST(precision, buffers_are_shown_in_full)
{
    by_threads("124", full_buffers, NULL);
    pair m;
    bool ok = false;
    KN_CHECK(pair_init(&m, false) && kn_fsdp_wrap(&m, NULL, .buffer_dtype = KN_BF16));
    for (int64_t n = 1; !ok && n < 500; n++) { /* each allocation fails in turn */
        ok = WITH_FAILING(n, put(m.buffer, 2, 3, 4.001f) && kn_module_full_buffers(&m, true) &&
                                 kn_module_full_buffers(&m, false) && kn_summon_end(kn_summon(&m)));
        KN_CHECK(!ok || kn_dtype_of(m.buffer) == KN_BF16, "allocation %d", (int)n);
        KN_CHECK(kn_module_full_buffers(&m, false) && kn_dtype_of(m.buffer) == KN_BF16);
    }
    KN_CHECK(ok && shows(&m, KN_BF16, 2, 3, 4));
    pair_free(&m);
    REFUSED(kn_module_full_buffers(NULL, true),
            "kn_module_full_buffers: not an initialised module");
}

/* exact is listed: a unit of its own, f32 inside; its results get the dtype of the unit around. */
KN_TEST(precision, classes_in_full_precision)
{
    OWNED_PAIR pair m;
    IN_SCOPE;
    KN_CHECK(pair_init(&m, true) &&
             kn_fsdp_wrap(&m, NULL, .wrap_class = "spy", .param_dtype = KN_BF16,
                          .cast_inputs = KN_CAST_ROOT, .full_precision_class = "exact"));
    kn_values out = call(&m, kn_ones(KN_F32, KN_CPU, KN_SHAPE(ROWS, DIM)));
    KN_CHECK_OK();
    KN_CHECK(kn_fsdp_is_unit(&m.a), "a unit of its own");
    KN_CHECK(m.a.in == KN_F32 && m.a.weight == KN_F32, "%s, %s", kn_dtype_name(m.a.in),
             kn_dtype_name(m.a.weight));
    KN_CHECK(m.between == KN_BF16, "it gave %s", kn_dtype_name(m.between));
    KN_CHECK(m.b.weight == KN_BF16 && kn_dtype_of(out.v[0]) == KN_BF16);
}

static kn_tensor *batchnorm_forward(kn_module *self, kn_tensor *x)
{
    return spy_forward(self, x);
}

KN_TEST(precision, batchnorm_is_in_full_precision_by_itself)
{
    for (int mixed = 0; mixed < 2; mixed++) {
        OWNED_MODULE pair m = { 0 };
        IN_SCOPE;
        KN_CHECK(kn_module_init_n(&m.base, pair_forward) &&
                 kn_module_init(&m.a.base, batchnorm_forward) &&
                 kn_module_add(&m.base, "a", &m.a.base) &&
                 kn_parameter(&m.a, "weight", KN_F32, KN_META, KN_ONES_INIT, KN_SHAPE(DIM)) &&
                 spy_init(&m.b, &m.base, "b", false));
        KN_CHECK(kn_fsdp_wrap(&m, NULL, .param_dtype = mixed ? KN_BF16 : KN_DTYPE_DEFAULT,
                              .reduce_dtype = mixed ? KN_BF16 : KN_DTYPE_DEFAULT));
        const kn_unit *of_a = kn_unit_of(mixed ? m.a.base.impl : m.base.impl);
        KN_CHECK(of_a->bucket[0]->reduce_dtype == KN_F32, "gradients are reduced in less");
        call(&m, kn_ones(KN_F32, KN_CPU, KN_SHAPE(ROWS, DIM)));
        KN_CHECK_OK();
        KN_CHECK(m.a.in == KN_F32 && m.a.weight == KN_F32, "mixed %d", mixed);
        KN_CHECK(m.b.weight == (mixed ? KN_BF16 : KN_F32), "mixed %d", mixed);
        KN_CHECK(kn_fsdp_is_unit(&m.a) == (mixed != 0), "mixed %d", mixed);
    }
}

/* Recompute replays a unit's call with the same casts: the same gradients, bit for bit. */
KN_TEST(precision, recompute_casts_again)
{
    float grad[2][DIM];
    for (int again = 0; again < 2; again++) {
        OWNED_PAIR pair m;
        const kn_param *p;
        IN_SCOPE;
        KN_CHECK(pair_init(&m, false) && kn_recompute(&m.a, again) &&
                 kn_fsdp_wrap(&m, NULL, .wrap_class = "spy", .param_dtype = KN_BF16,
                              .reduce_dtype = KN_F32, .seed = 3));
        kn_tensor *x = kn_randn(KN_F32, KN_CPU, 1, 2, KN_SHAPE(ROWS, DIM));
        kn_tensor *y = kn_cast(call(&m, x).v[0], KN_F32);
        KN_CHECK(kn_backward(sum_of(y)) && kn_params(&m, &p) == 2);
        KN_CHECK(kn_to_host(kn_param_grad(&p[0]), grad[again], sizeof grad[again]));
    }
    KN_CHECK(memcmp(grad[0], grad[1], sizeof grad[0]) == 0);
}

/* A unit on meta takes inputs from anywhere; one on the CPU rejects inputs without values. */
KN_TEST(precision, inputs_move_to_the_units_device)
{
    for (int meta = 0; meta < 2; meta++) {
        OWNED_PAIR pair m;
        IN_SCOPE;
        KN_CHECK(pair_init(&m, false) &&
                 kn_fsdp_wrap(&m, NULL, .wrap_class = "spy", .device = meta ? KN_META : KN_CPU));
        kn_device other = meta ? KN_CPU : KN_META;
        kn_values out = call(&m, kn_ones(KN_F32, other, KN_SHAPE(ROWS, DIM)));
        if (meta) {
            KN_CHECK_OK();
            KN_CHECK(kn_device_of(out.v[0]) == KN_META && kn_device_of(out.v[1]) == KN_META);
            KN_CHECK(kn_backward(sum_of(out.v[0])));
        } else {
            KN_CHECK_ERROR("is on meta, where tensors have no values");
        }
    }
}

/* Copies the pending gradients of micro-batches [first, last], one after another; returns their
 * number. */
static int net_grads(bool keep, int first, int last, kn_dtype *dtype, float *out)
{
    OWNED_MODULE net m = { 0 };
    const kn_param *p;
    int count = 0;
    IN_SCOPE;
    bool ok = net_init(&m, KN_META) &&
              kn_fsdp_wrap(&m, NULL, .wrap_class = "linear", .reduce_dtype = KN_BF16,
                           .seed = NET_SEED, .keep_low_precision_grads = keep);
    for (int micro = first; ok && micro <= last; micro++)
        ok = kn_backward(net_loss(&m, micro));
    int n = ok ? kn_params(&m, &p) : 0;
    for (int i = 0; i < n; i++) {
        kn_tensor *g = kn_param_grad(&p[i]);
        if (!g)
            continue; /* frozen */
        *dtype = kn_dtype_of(g);
        kn_to_host(kn_cast(g, KN_F32), out + count, (size_t)kn_numel(g) * sizeof *out);
        count += (int)kn_numel(g);
    }
    KN_CHECK_OK();
    return count;
}

static float round_to_bf16(float x)
{
    return kn_bf16_to_f32(kn_f32_to_bf16(x));
}

/* .keep_low_precision_grads: a sum is rounded to .reduce_dtype each time; else it is f32. */
KN_TEST(precision, low_precision_gradients_are_kept)
{
    enum { ROOM = 512 };
    static float micro[3][ROOM], kept[ROOM], plain[ROOM];
    kn_dtype dtype = KN_DTYPE_DEFAULT;
    int differ = 0, n = 0;
    for (int i = 0; i < 3; i++)
        n = net_grads(true, i, i, &dtype, micro[i]);
    KN_CHECK(n > 100 && net_grads(true, 0, 2, &dtype, kept) == n && dtype == KN_BF16, "%d", n);
    KN_CHECK(net_grads(false, 0, 2, &dtype, plain) == n && dtype == KN_F32);
    for (int i = 0; i < n; i++) {
        float sum = micro[0][i] + micro[1][i];
        KN_CHECK(plain[i] == sum + micro[2][i], "element %d", i);
        KN_CHECK(kept[i] == round_to_bf16(round_to_bf16(sum) + micro[2][i]), "element %d", i);
        differ += kept[i] != plain[i];
    }
    KN_CHECK(differ > 0, "the sums of %d elements were exact", n);
}

/* ---- classes in full precision --------------------------------------------------------------- */

static kn_dtype computes_in(const kn_linear *m)
{
    return kn_dtype_of(kn_module_param((kn_linear *)m, "weight"));
}

KN_TEST(precision, the_wrapped_module_may_be_of_a_full_precision_class)
{
    two m;
    KN_CHECK(two_init(&m, KN_CPU, KN_F32) &&
             kn_fsdp_wrap(&m.a, NULL, .param_dtype = KN_BF16, .full_precision_class = "linear"));
    KN_CHECK(computes_in(&m.a) == KN_F32, "%s", kn_dtype_name(computes_in(&m.a)));
    kn_module_free(&m);
    kn_module *group[] = { &m.a.base, &m.b.base };
    KN_CHECK(two_init(&m, KN_CPU, KN_F32) &&
             kn_fsdp_wrap_group(group, 2, NULL, .param_dtype = KN_BF16,
                                .full_precision_class = "linear"));
    KN_CHECK(computes_in(&m.a) == KN_F32 && computes_in(&m.b) == KN_F32);
    kn_module_free(&m);
    for (int given = 0; given < 2; given++) { /* its outputs */
        kn_scope scope = kn_scope_begin();
        pair n;
        KN_CHECK(pair_init(&n, true) &&
                 kn_fsdp_wrap(&n.a, NULL, .param_dtype = KN_BF16,
                              .output_dtype = given ? KN_F32 : KN_DTYPE_DEFAULT,
                              .full_precision_class = "exact"));
        kn_tensor *y = kn_call(&n.a, kn_ones(KN_F32, KN_CPU, KN_SHAPE(ROWS, DIM)));
        KN_CHECK(y && kn_dtype_of(y) == (given ? KN_F32 : KN_BF16));
        pair_free(&n);
        kn_scope_end(scope);
    }
}

static kn_dtype all_bf16(const char *name, int ndim, const int64_t *shape, void *arg)
{
    return KN_BF16;
}

KN_TEST(precision, full_precision_beside_param_dtype_of_alone_is_an_error)
{
    OWNED_MODULE two m;
    KN_CHECK(two_init(&m, KN_CPU, KN_F32) &&
             !kn_fsdp_wrap(&m, NULL, .param_dtype_of = all_bf16, .full_precision_class = "linear"));
    KN_CHECK_ERROR(".full_precision_class is for .param_dtype");
    KN_CHECK(kn_fsdp_wrap(&m, NULL, .param_dtype = KN_BF16, .param_dtype_of = all_bf16,
                          .full_precision_class = "linear") &&
             computes_in(&m.a) == KN_F32);
}

KN_TEST(precision, full_precision_is_as_declared)
{
    static const kn_dtype declared[] = { KN_F32, KN_BF16, KN_F64 };
    for (int i = 0; i < 3; i++) {
        OWNED_MODULE two m;
        KN_CHECK(two_init(&m, KN_CPU, declared[i]) &&
                     kn_fsdp_wrap(&m, NULL, .param_dtype = KN_BF16, .reduce_dtype = KN_F32,
                                  .full_precision_class = "linear"),
                 "%s", kn_dtype_name(declared[i]));
        KN_CHECK(computes_in(&m.a) == declared[i], "%s computes in %s", kn_dtype_name(declared[i]),
                 kn_dtype_name(computes_in(&m.a)));
        KN_CHECK(two_backward(&m, 0), "%s", kn_dtype_name(declared[i]));
    }
}
