/* tests/autograd/function_test.c: operations of one's own: values and gradients, what is saved and
 * when it goes, results without gradients, optional inputs, meta, recompute, streams, traces. */
#undef KN_BUILDING
#include "knap.h"
#include "tests/failing.h"
#include "tests/owned.h"

static kn_tensor *leaf(kn_dtype dtype, uint64_t stream, int ndim, const int64_t *shape)
{
    return kn_require_grad(kn_randn(dtype, KN_CPU, 7, stream, ndim, shape), true);
}

static double at(kn_tensor *t, int64_t i)
{
    double v[64] = { 0 };
    kn_tensor *d = t ? kn_cast(kn_detach(t), KN_F64) : NULL;
    KN_CHECK(d && kn_numel(d) <= 64 && kn_to_host(d, v, (size_t)kn_numel(d) * sizeof *v), "%s",
             kn_error() ? kn_error() : "no tensor");
    return v[i];
}

/* ---- swish: y = x s with s = sigmoid(b x), by operations; b is a scalar --------------------- */

static int forwards, backwards;
static bool backward_records;

static kn_values swish_forward(kn_function_run *run, kn_values in)
{
    forwards++;
    kn_save_for_backward(run, in.v[0], in.v[1]);
    return KN_VALUES(kn_mul(in.v[0], kn_sigmoid(kn_mul(in.v[0], in.v[1]))));
}

/* dx = (s + b x s (1 - s)) dy, db = sum of x^2 s (1 - s) dy */
static kn_values swish_backward(kn_function_run *run, kn_values dout)
{
    backwards++;
    backward_records |= kn_grad_mode();
    kn_tensor *x = run->saved.v[0], *b = run->saved.v[1], *dy = dout.v[0];
    kn_tensor *s = kn_sigmoid(kn_mul(x, b)), *slope = kn_mul(kn_sub(s, kn_mul(s, s)), x);
    kn_tensor *dx = run->needs[0] ? kn_mul(dy, kn_add(s, kn_mul(slope, b))) : NULL;
    return KN_VALUES(dx, run->needs[1] ? sum_of(kn_mul(dy, kn_mul(slope, x))) : NULL);
}

static const kn_function swish = { .name = "swish",
                                   .forward = swish_forward,
                                   .backward = swish_backward };

static kn_tensor *scalar(kn_dtype dtype, double value)
{
    return kn_require_grad(kn_full(dtype, KN_CPU, value, KN_SCALAR), true);
}

static kn_values swish_of(kn_values in, void *arg)
{
    (void)arg;
    return KN_VALUES(kn_function_call(&swish, in.v[0], in.v[1]));
}

KN_TEST(function, gradients_match_differences)
{
    kn_tensor *x = leaf(KN_F64, 1, KN_SHAPE(3, 4)), *b = scalar(KN_F64, 1.5);
    KN_CHECK(kn_gradcheck(swish_of, KN_VALUES(x, b)));
    KN_CHECK(kn_gradcheck(swish_of, KN_VALUES(b, b)));
    kn_tensor *y = kn_function_call(&swish, x, b);
    KN_CHECK(fabs(at(y, 5) - at(x, 5) / (1 + exp(-1.5 * at(x, 5)))) < 1e-12);
    KN_CHECK(kn_requires_grad(y) && kn_backward(sum_of(y)) && kn_grad(x) && kn_grad(b));
}

KN_TEST(function, only_what_needs_a_gradient)
{
    kn_tensor *x = leaf(KN_F32, 1, KN_SHAPE(5)), *b = kn_full(KN_F32, KN_CPU, 2, KN_SCALAR);
    KN_CHECK(kn_backward(sum_of(kn_function_call(&swish, x, b))) && kn_grad(x) && !kn_grad(b));
    backwards = 0;
    kn_tensor *y = kn_function_call(&swish, kn_detach(x), b);
    KN_CHECK(y && !kn_requires_grad(y));
    bool mode = kn_set_grad_mode(false);
    y = kn_function_call(&swish, x, b);
    kn_set_grad_mode(mode);
    KN_CHECK(y && !kn_requires_grad(y) && kn_grad_mode());
    kn_tensor *used = kn_function_call(&swish, x, b);
    kn_function_call(&swish, x, b); /* its result isn't used */
    KN_CHECK(kn_backward(sum_of(kn_mul(used, used))) && backwards == 1, "%d", backwards);
}

/* ---- saved tensors -------------------------------------------------------------------------- */

KN_TEST(function, saved_tensors_are_versioned)
{
    kn_tensor *x = kn_exp(leaf(KN_F32, 1, KN_SHAPE(4))), *b = scalar(KN_F32, 1);
    kn_tensor *y = sum_of(kn_function_call(&swish, x, b));
    bool mode = kn_set_grad_mode(false);
    kn_fill_(x, 1);
    kn_set_grad_mode(mode);
    KN_CHECK(!kn_backward(y) && !kn_grad(b));
    KN_CHECK_ERROR("backward of 'swish': its saved tensor 1 was written in place");
    x = kn_exp(leaf(KN_F32, 1, KN_SHAPE(4)));
    y = sum_of(kn_function_call(&swish, x, b));
    kn_write_data(kn_detach(x), KN_F32);
    REFUSED(kn_backward(y), "'swish': its saved tensor 1 was written in place");
}

/* Saved tensors go with the first backward, or with the result; retained it serves twice. */
KN_TEST(function, saved_tensors_are_freed_with_the_graph)
{
    enum { N = 1000 };
    kn_tensor *x = leaf(KN_F32, 1, KN_SHAPE(N)), *b = scalar(KN_F32, 1);
    for (int turn = 0; turn < 4; turn++) {
        int64_t tensors = kn_live_tensors(), live = kn_ledger_read().live[KN_MEM_ACTIVATION];
        kn_scope outer = kn_scope_begin(), inner = kn_scope_begin();
        kn_tensor *y = kn_keep(kn_function_call(&swish, kn_scale(x, 2), b));
        kn_scope_end(inner);
        KN_CHECK(y && kn_ledger_read().live[KN_MEM_ACTIVATION] - live >= 2 * N * 4, "not saved");
        if (turn > 0)
            KN_CHECK(kn_backward(sum_of(y), .retain_graph = turn > 1));
        const bool held = kn_ledger_read().live[KN_MEM_ACTIVATION] - live >= 2 * N * 4;
        KN_CHECK(held == (turn != 1), "turn %d: held %d", turn, held);
        if (turn == 1) {
            REFUSED(kn_backward(sum_of(y)),
                    "the saved tensors of 'swish' were freed by an earlier backward");
        }
        if (turn == 3) {
            kn_tensor *once = kn_scale(kn_grad(b), 2);
            KN_CHECK(kn_backward(sum_of(y)) && at(kn_grad(b), 0) == at(once, 0));
        }
        kn_tensor_free(y), kn_scope_end(outer);
        kn_clear_grad(x), kn_clear_grad(b);
        KN_CHECK(kn_live_tensors() == tensors, "turn %d: %lld tensors live, %lld before", turn,
                 (long long)kn_live_tensors(), (long long)tensors);
        KN_CHECK(kn_ledger_read().live[KN_MEM_ACTIVATION] == live, "turn %d", turn);
    }
}

/* ---- several results: (a + 2 b, a b, sign of a as integers, a where detached) --------------- */

static kn_values several_forward(kn_function_run *run, kn_values in)
{
    kn_tensor *a = in.v[0], *b = in.v[1] ? in.v[1] : kn_ones(kn_dtype_of(a), KN_CPU, KN_SCALAR);
    kn_save_for_backward(run, a);
    kn_save_for_backward(run, in.v[1]);
    kn_tensor *sign = kn_cast(kn_gt(a, kn_zeros_like(a)), KN_I64);
    return KN_VALUES(kn_add(a, kn_scale(b, 2)), kn_mul(a, b), sign, a);
}

static bool saw_wrong_dout;

static kn_values several_backward(kn_function_run *run, kn_values dout)
{
    kn_tensor *a = run->saved.v[0], *b = run->saved.v[1];
    saw_wrong_dout |= dout.n != 4 || !dout.v[0] || !dout.v[1] || dout.v[2] || dout.v[3];
    saw_wrong_dout |= run->saved.n != 2 || run->inputs != 2;
    if (!b)
        return KN_VALUES(kn_add(dout.v[0], dout.v[1]), NULL);
    return KN_VALUES(kn_add(dout.v[0], kn_mul(dout.v[1], b)),
                     kn_add(kn_scale(dout.v[0], 2), kn_mul(dout.v[1], a)));
}

static const kn_function several = { .name = "several",
                                     .forward = several_forward,
                                     .backward = several_backward,
                                     .optional = 2,
                                     .no_grad = 8 };

static kn_values several_of(kn_values in, void *arg)
{
    (void)arg;
    return kn_function_call_n(&several, in, NULL, 0);
}

KN_TEST(function, several_results_and_optional_inputs)
{
    kn_tensor *a = leaf(KN_F64, 1, KN_SHAPE(2, 3)), *b = leaf(KN_F64, 2, KN_SHAPE(2, 3));
    KN_CHECK(kn_gradcheck(several_of, KN_VALUES(a, b)));
    KN_CHECK(kn_gradcheck(several_of, KN_VALUES(a, NULL)));
    KN_CHECK(kn_gradcheck(several_of, KN_VALUES(a, a)));
    kn_values y = kn_function_call_n(&several, KN_VALUES(a, b), NULL, 0);
    KN_CHECK(y.n == 4 && kn_requires_grad(y.v[1]) && kn_dtype_of(y.v[2]) == KN_I64);
    KN_CHECK(!kn_requires_grad(y.v[2]) && !kn_requires_grad(y.v[3]) && y.v[3] != a);
    KN_CHECK(kn_backward(sum_of(y.v[1]))); /* y.v[0] is not used */
    KN_CHECK(at(kn_grad(a), 4) == at(b, 4) && at(kn_grad(b), 4) == at(a, 4) && !saw_wrong_dout);
    REFUSED(kn_function_call(&several, a, b), "several: has 4 results; use kn_function_call_n");
    REFUSED(kn_function_call_n(&several, KN_VALUES(NULL, b), NULL, 0).n,
            "several: input 1 is NULL although no error stands");
    KN_CHECK(kn_function_call_n(&several, KN_VALUES(a), NULL, 0).n == 4);
}

/* ---- what flows through as it is ------------------------------------------------------------ */

static kn_values pass_forward(kn_function_run *run, kn_values in)
{
    kn_save_for_backward(run, in.v[1]);
    return KN_VALUES(in.v[0], in.v[0], in.v[1]);
}

/* The gradients are dout itself, and a saved tensor: nobody may add into them. */
static kn_values pass_backward(kn_function_run *run, kn_values dout)
{
    return KN_VALUES(dout.v[0], run->saved.v[0]);
}

static const kn_function pass = { .name = "pass",
                                  .forward = pass_forward,
                                  .backward = pass_backward };

KN_TEST(function, inputs_and_gradients_may_pass_as_they_are)
{
    kn_tensor *x = leaf(KN_F64, 1, KN_SHAPE(3)), *z = leaf(KN_F64, 2, KN_SHAPE(3));
    kn_values y = kn_function_call_n(&pass, KN_VALUES(x, z), NULL, 0);
    KN_CHECK(y.n == 3 && y.v[0] != x && y.v[0] != y.v[1] && at(y.v[0], 2) == at(x, 2));
    kn_tensor *l = sum_of(kn_add(kn_mul(y.v[0], y.v[0]), kn_add(y.v[2], kn_scale(z, 3))));
    const double before = at(z, 1);
    KN_CHECK(kn_backward(l, .retain_graph = true) && kn_backward(l));
    KN_CHECK(at(z, 1) == before && at(kn_grad(z), 1) == 2 * (before + 3), "%g", at(kn_grad(z), 1));
    KN_CHECK(at(kn_grad(x), 1) == 4 * at(x, 1));
}

/* ---- raw data: y = s round(clamp(x / s, -q, q)), straight through --------------------------- */

static kn_values quantize_forward(kn_function_run *run, kn_values in)
{
    const int q = *(const int *)run->arg;
    kn_tensor *y = kn_empty_like(in.v[0]);
    const float *x = kn_read_data(in.v[0], KN_F32);
    float *out = kn_write_data(y, KN_F32);
    for (int64_t i = 0; kn_ok() && i < kn_numel(y); i++)
        out[i] = rintf(fminf(fmaxf(x[i] * 4, (float)-q), (float)q)) / 4;
    kn_save_for_backward(run, in.v[0]);
    return KN_VALUES(y);
}

static kn_values quantize_backward(kn_function_run *run, kn_values dout)
{
    const int q = *(const int *)run->arg;
    kn_tensor *dx = kn_empty(run->dtype[0], KN_CPU, run->ndim[0], run->shape[0]);
    const float *x = kn_read_data(run->saved.v[0], KN_F32), *dy = kn_read_data(dout.v[0], KN_F32);
    float *out = kn_write_data(dx, KN_F32);
    for (int64_t i = 0; kn_ok() && i < kn_numel(dx); i++)
        out[i] = fabsf(x[i] * 4) <= (float)q ? dy[i] : 0;
    return KN_VALUES(dx);
}

static kn_values quantize_shape(kn_function_run *run, kn_values in)
{
    kn_save_for_backward(run, in.v[0]);
    return KN_VALUES(kn_empty_like(in.v[0]));
}

static double quantize_flops(kn_values in)
{
    return 1e9 * (double)kn_numel(in.v[0]);
}

static const kn_function quantize = { .name = "quantize",
                                      .forward = quantize_forward,
                                      .backward = quantize_backward,
                                      .shape = quantize_shape,
                                      .flops = quantize_flops };

static kn_tensor *quantized(kn_tensor *x, int q)
{
    return kn_function_call_n(&quantize, KN_VALUES(x), &q, sizeof q).v[0];
}

KN_TEST(function, raw_data_of_any_strides)
{
    kn_tensor *x = leaf(KN_F32, 1, KN_SHAPE(3, 4));
    kn_tensor *y = quantized(kn_transpose(x, 0, 1), 2);
    KN_CHECK(y && kn_size(y, 0) == 4);
    for (int i = 0; i < 12; i++) {
        double v = rint(fmin(fmax(4 * at(x, i), -2), 2)) / 4;
        KN_CHECK(at(y, i % 4 * 3 + i / 4) == v, "%d: %g", i, at(y, i));
    }
    KN_CHECK(kn_backward(sum_of(y))); /* dy is one number, expanded */
    for (int i = 0; i < 12; i++)
        KN_CHECK(at(kn_grad(x), i) == (fabs(4 * at(x, i)) <= 2));
    REFUSED(quantized(kn_cast(x, KN_BF16), 2),
            "kn_read_data: is for f32, got bf16[3,4]; kn_cast it in forward of 'quantize'");
    REFUSED(kn_write_data(kn_transpose(kn_detach(x), 0, 1), KN_F32), "f32[4,3] is not contiguous");
    KN_CHECK(!kn_write_data(x, KN_F32)); /* a leaf that requires grad */
    KN_CHECK_ERROR("kn_write_data: writing in place");
}

/* ---- meta, traces, streams ------------------------------------------------------------------ */

KN_TEST(function, shapes_memory_and_time_on_meta)
{
    kn_meta_rates(1e12, 1e15, 0);
    kn_tensor *x = kn_require_grad(kn_empty(KN_F32, KN_META, KN_SHAPE(10, 100)), true);
    kn_stream *s = kn_compute_stream(KN_META);
    int64_t live = kn_ledger_read().live[KN_MEM_ACTIVATION];
    kn_scope scope = kn_scope_begin();
    kn_trace_start(100);
    double begin = kn_meta_clock(s);
    kn_tensor *y = quantized(kn_scale(x, 2), 2);
    KN_CHECK(y && kn_size(y, 1) == 100 && kn_device_of(y) == KN_META);
    KN_CHECK(kn_ledger_read().live[KN_MEM_ACTIVATION] - live == 2 * 4032, "%lld",
             (long long)(kn_ledger_read().live[KN_MEM_ACTIVATION] - live));
    double forward = kn_meta_clock(s) - begin;
    KN_CHECK(fabs(forward - 1) < 1e-3, "10^12 operations took %g", forward);
    begin = kn_meta_clock(s);
    KN_CHECK(kn_backward(sum_of(y)) && kn_size(kn_grad(x), 1) == 100);
    KN_CHECK(fabs(kn_meta_clock(s) - begin - 2) < 1e-3, "%g", kn_meta_clock(s) - begin);
    kn_trace_event *events;
    size_t n = kn_trace_stop(&events), found = 0;
    for (size_t i = 0; i < n; i++)
        found += (strcmp(events[i].what, "quantize") == 0 && events[i].flops == 1e12) +
                 (strcmp(events[i].what, "quantize_grad") == 0 && events[i].flops == 2e12);
    KN_CHECK(found == 2, "%zu", found);
    kn_host_free(events);
    kn_scope_end(scope);
    /* without a shape rule: operations run there as they are, raw data has none */
    kn_tensor *b = kn_require_grad(kn_empty(KN_F32, KN_META, KN_SCALAR), true);
    KN_CHECK(kn_backward(sum_of(kn_function_call(&swish, x, b))) && kn_ndim(kn_grad(b)) == 0);
    kn_function raw = quantize;
    raw.shape = NULL;
    REFUSED(kn_function_call_n(&raw, KN_VALUES(x), &(int){ 1 }, sizeof(int)).n,
            "is on meta and has no values; a function that reads them needs a .shape");
}

KN_TEST(function, traces_name_it)
{
    kn_tensor *x = leaf(KN_F32, 1, KN_SHAPE(4));
    kn_trace_start(100);
    KN_CHECK(kn_backward(sum_of(quantized(x, 2))));
    OWNED_HOST kn_trace_event *events;
    size_t n = kn_trace_stop(&events), found = 0;
    for (size_t i = 0; i < n; i++)
        found += strcmp(events[i].provider, "function") == 0 && events[i].end >= events[i].begin &&
                 events[i].flops == (strcmp(events[i].what, "quantize_grad") ? 4e9 : 8e9);
    KN_CHECK(found == 2, "%zu", found);
}

typedef struct doubling {
    const float *x;
    float *y;
    int64_t n;
} doubling;

static void run_doubling(void *arg)
{
    const doubling *d = arg;
    for (int64_t i = 0; i < d->n; i++)
        d->y[i] = 2 * d->x[i];
}

/* The work goes to a stream of the caller's, behind what the compute stream did; the compute
 * stream goes on behind it. */
static kn_values stream_twice(kn_tensor *x, kn_stream *side)
{
    kn_tensor *y = kn_empty_like(x);
    doubling d = { kn_read_data(x, KN_F32), kn_write_data(y, KN_F32), kn_numel(x) };
    kn_event *e = kn_event_create(KN_CPU);
    if (kn_ok() && kn_event_record(e, kn_compute_stream(KN_CPU)) && kn_event_wait(e, side) &&
        kn_stream_host(side, "doubling", run_doubling, &d, sizeof d) && kn_event_record(e, side))
        kn_event_wait(e, kn_compute_stream(KN_CPU));
    kn_event_destroy(e);
    return KN_VALUES(y);
}

static kn_values side_forward(kn_function_run *run, kn_values in)
{
    return stream_twice(in.v[0], *(kn_stream *const *)run->arg);
}

static kn_values side_backward(kn_function_run *run, kn_values dout)
{
    return stream_twice(dout.v[0], *(kn_stream *const *)run->arg);
}

KN_TEST(function, work_on_a_stream_of_its_own)
{
    const kn_function side = { "side", side_forward, side_backward, NULL, NULL, 0, 0 };
    kn_stream *s = kn_stream_create(KN_CPU, "mine", KN_STREAM_WORKER);
    kn_tensor *x = leaf(KN_F32, 1, KN_SHAPE(50)), *y = x;
    for (int i = 0; i < 3; i++)
        y = kn_function_call_n(&side, KN_VALUES(kn_scale(y, 0.5)), &s, sizeof s).v[0];
    KN_CHECK(y && at(y, 49) == at(x, 49) && kn_backward(sum_of(y)));
    KN_CHECK(at(kn_grad(x), 49) == 1);
    kn_stream_destroy(s);
}

/* ---- recompute ------------------------------------------------------------------------------ */

typedef struct block {
    kn_module base;
    kn_linear fc;
    kn_tensor *beta;
} block;

static kn_tensor *block_forward(kn_module *self, kn_tensor *x)
{
    block *m = (block *)self;
    return kn_function_call(&swish, kn_dropout(kn_call(&m->fc, x), 0.5), m->beta);
}

KN_TEST(function, recompute_gives_the_same_gradients)
{
    double grad[2] = { 0 };
    for (int again = 0; again < 2; again++) {
        OWNED_MODULE block m = { 0 };
        kn_seed(3), kn_set_step(1);
        kn_module_init(&m.base, block_forward), kn_linear_init(&m.fc, &m.base, "fc", 4, 5);
        m.beta = kn_parameter(&m, "beta", KN_F32, KN_CPU, KN_ONES_INIT, KN_SCALAR);
        kn_recompute(&m, again);
        kn_tensor *x = kn_randn(KN_F32, KN_CPU, 1, 1, KN_SHAPE(3, 4));
        forwards = 0;
        KN_CHECK(kn_backward(sum_of(kn_call(&m, x))) && forwards == 1 + again);
        grad[again] = at(kn_grad(m.beta), 0);
    }
    KN_CHECK(grad[0] == grad[1] && grad[0] != 0, "%g, recomputed %g", grad[0], grad[1]);
}

/* A gradient has no graph; the sentence says so. */
KN_TEST(function, no_second_derivatives)
{
    kn_tensor *x = leaf(KN_F32, 1, KN_SHAPE(3)), *b = scalar(KN_F32, 1);
    KN_CHECK(kn_backward(sum_of(kn_function_call(&swish, x, b))));
    kn_tensor *g = kn_grad(x);
    REFUSED(kn_backward(sum_of(kn_mul(g, g))), "has no graph");
    kn_function forward_only = swish;
    forward_only.backward = NULL;
    kn_tensor *y = kn_function_call(&forward_only, x, b);
    KN_CHECK(y && !kn_requires_grad(y));
}

/* ---- functions in functions ----------------------------------------------------------------- */

static kn_values around_forward(kn_function_run *run, kn_values in)
{
    kn_tensor *inner = kn_function_call(&swish, in.v[0], in.v[1]);
    kn_save_for_backward(run, in.v[0], in.v[1]); /* the inner run is over */
    return KN_VALUES(kn_exp(inner));
}

/* Differentiates by a graph of its own. */
static kn_values around_backward(kn_function_run *run, kn_values dout)
{
    kn_tensor *x = kn_require_grad(kn_detach(run->saved.v[0]), true);
    kn_tensor *b = kn_require_grad(kn_detach(run->saved.v[1]), true);
    kn_set_grad_mode(true);
    kn_backward(kn_exp(kn_function_call(&swish, x, b)), .grad = kn_contiguous(dout.v[0]));
    return KN_VALUES(kn_grad(x), kn_grad(b));
}

static kn_values around_of(kn_values in, void *arg)
{
    (void)arg;
    const kn_function around = { "around", around_forward, around_backward, NULL, NULL, 0, 0 };
    return kn_function_call_n(&around, in, NULL, 0);
}

KN_TEST(function, functions_in_functions)
{
    kn_tensor *x = leaf(KN_F64, 1, KN_SHAPE(2, 2)), *b = scalar(KN_F64, 0.5);
    KN_CHECK(kn_gradcheck(around_of, KN_VALUES(x, b)));
    kn_tensor *y = around_of(KN_VALUES(kn_function_call(&swish, x, b), b), NULL).v[0];
    KN_CHECK(y && kn_backward(sum_of(y)) && !backward_records);
}

/* ---- out of memory -------------------------------------------------------------------------- */

static bool whole_run(void *arg)
{
    (void)arg;
    IN_SCOPE;
    kn_tensor *x = leaf(KN_F32, 1, KN_SHAPE(3)), *b = scalar(KN_F32, 1);
    kn_values y = kn_function_call_n(&several, KN_VALUES(x, x), NULL, 0);
    kn_tensor *z = y.n == 4 ? quantized(kn_function_call(&swish, y.v[1], b), 2) : NULL;
    return kn_backward(z ? sum_of(z) : NULL);
}

KN_TEST(function, every_allocation_may_fail)
{
    KN_CHECK(whole_run(NULL));
    each_allocation_fails(whole_run, NULL, NULL, 30);
}
