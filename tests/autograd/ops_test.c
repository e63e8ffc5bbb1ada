/* tests/autograd/ops_test.c: the gradient of each operation by finite differences in f64, and its
 * results in f32, bf16 and f16 against those in f64 on the CPU, for the rows of every.h; on a GPU
 * too, there also in f64. An operation that no row runs fails the registry test. */
#include "tests/autograd/every.h"
#include "tests/owned.h"
#include <stdlib.h>

#ifdef CHECKED_FAKE /* over fake CUDA */
#include "tests/gpu/fake_cuda/fake.h"

/* No NCCL knows the fake device: collectives go through the host. */
__attribute__((constructor)) static void without_nccl(void)
{
    setenv("KNAP_COMM", "local", 1);
}
#else
#define fake_begin() ((void)0)
#endif

/* ---- every operation has a row --------------------------------------------------------------- */

enum { MOST_OPS = 256 };

/* Marks the operations behind n. */
static void mark(const kn_node *n, bool *seen, int depth)
{
    if (!n || depth == 0)
        return;
    for (int i = 0; kn_op_at(i); i++)
        seen[i] = seen[i] || kn_op_at(i) == n->op;
    for (int i = 0; i < n->nin; i++)
        mark(n->edge[i].node, seen, depth - 1);
}

KN_TEST(ops, registry_is_complete)
{
    int count = 0;
    bool seen[MOST_OPS] = { 0 };
    EACH_CASE(c)
    EACH_SET(c, s)
    {
        kn_tensor *leaf[EVERY_MAX_IN], *x[EVERY_MAX_IN];
        fake_begin();
        IN_SCOPE;
        every_leaves(&s, KN_F32, CHECKED_DEVICE, leaf);
        every_inputs(&s, leaf, x);
        kn_tensor *y = c->differentiable ? c->call(x) : NULL;
        mark(y ? y->node : NULL, seen, 6);
    }
    for (const kn_op *op; (op = kn_op_at(count)); count++) {
        KN_CHECK(count < MOST_OPS);
        KN_CHECK(op->name && op->shape, "operation %d lacks a name or a shape rule", count);
        KN_CHECK(op->forward || op->view, "'%s' computes nothing", op->name);
        KN_CHECK(seen[count] || !op->backward, "'%s' has a backward but no row runs it", op->name);
    }
    KN_CHECK(count >= KN_UNARY_COUNT + KN_BINARY_COUNT + 30, "only %d operations are found", count);
}

static const every_case *row_of(const char *name)
{
    EACH_CASE(c)
    if (strcmp(c->name, name) == 0)
        return c;
    return NULL;
}

/* For y = f(x) backward keeps exactly the arrays that the derivative reads by the kind's row: x is
 * temporary here, the caller holds y. */
KN_TEST(ops, unary_operations_keep_what_their_derivative_reads)
{
    enum { N = 1000 };
    const double bytes = N * sizeof(float);
    for (int k = 0; k < KN_UNARY_COUNT; k++) {
        char name[64];
        const kn_kind_row *row = kn_unary_row((kn_unary)k);
        snprintf(name, sizeof name, "kn_%s", k == KN_AFFINE ? "scale" : row->name);
        const every_case *c = row_of(name);
        if (row->reads & KN_READS_NO_GRAD)
            continue;
        KN_CHECK(c, "%s has no row", name);
        IN_SCOPE;
        kn_tensor *leaf = kn_require_grad(kn_ones(KN_F32, CHECKED_DEVICE, KN_SHAPE(N)), true);
        const int64_t before = kn_ledger_read().live[KN_MEM_ACTIVATION];
        kn_scope inner = kn_scope_begin();
        kn_tensor *x[EVERY_MAX_IN] = { kn_scale(leaf, 0.5) }, *y = kn_keep(c->call(x));
        kn_scope_end(inner);
        const int64_t held = kn_ledger_read().live[KN_MEM_ACTIVATION] - before;
        const int arrays = 1 + (row->reads & KN_READS_X ? 1 : 0);
        KN_CHECK(y && kn_ok(), "%s", kn_error() ? kn_error() : name);
        KN_CHECK((double)held >= bytes * arrays && (double)held < bytes * (arrays + 0.5),
                 "%s holds %lld bytes, not the %g of %d arrays", name, (long long)held,
                 bytes * arrays, arrays);
        kn_tensor_free(y);
    }
}

/* ---- gradients and dtypes -------------------------------------------------------------------- */

#ifndef CHECKED_FAKE
typedef struct run {
    const every_case *c;
    const every_set *s;
} run;

static kn_values called(kn_values in, void *arg)
{
    const run *r = arg;
    kn_tensor *x[EVERY_MAX_IN];
    every_inputs(r->s, in.v, x);
    return KN_VALUES(r->c->call(x));
}

KN_TEST(ops, gradients_match_differences)
{
    EACH_CASE(c)
    EACH_SET(c, s)
    {
        fake_begin();
        IN_SCOPE;
        kn_values in = { .n = s.n };
        every_leaves(&s, KN_F64, CHECKED_DEVICE, in.v);
        KN_CHECK(!c->differentiable ||
                     kn_gradcheck(called, in, .arg = &(run){ c, &s }, .one_in = kn_one_in(5)),
                 "%s (line %d) of %d dims, layout %d", c->name, c->line, s.in[0].ndim,
                 (int)s.in[0].how);
    }
}
#endif

typedef struct evaluation {
    double *out, *grad[EVERY_MAX_IN];
    int64_t out_numel, numel[EVERY_MAX_IN];
} evaluation;

static double *doubles_of(kn_tensor *t, int64_t *n)
{
    double *v = calloc((size_t)(*n = kn_numel(t)) + 1, sizeof *v);
    to_doubles(t, v);
    return v;
}

/* Forward and backward of these leaves, as tensors of dtype t. */
static evaluation evaluate(const every_case *c, const every_set *s, kn_tensor *const *leaves,
                           kn_dtype t)
{
    evaluation e = { 0 };
    kn_tensor *leaf[EVERY_MAX_IN], *x[EVERY_MAX_IN];
    kn_set_step(3); /* the same draws each time */
    for (int i = 0; i < s->n; i++)
        leaf[i] = kn_require_grad(kn_cast(kn_detach(leaves[i]), t), true);
    every_inputs(s, leaf, x);
    kn_tensor *y = c->call(x);
    KN_CHECK(kn_ok() && y, "%s: %s", c->name, kn_error() ? kn_error() : "no result");
    e.out = doubles_of(y, &e.out_numel);
    OWNED_BYTES double *w = random_doubles(e.out_numel, -1, 1, 99);
    kn_tensor *narrow = kn_cast(kn_from(KN_F64, kn_device_of(y), w, y->ndim, y->shape), KN_BF16);
    narrow = kn_cast(narrow, y->dtype);
    KN_CHECK(kn_backward(y, .grad = narrow), "%s", c->name);
    for (int i = 0; i < s->n; i++) {
        kn_tensor *g = kn_grad(leaf[i]) ? kn_grad(leaf[i]) : kn_zeros_like(leaf[i]);
        KN_CHECK(g && g->dtype == t, "%s: gradient's dtype", c->name);
        e.grad[i] = doubles_of(g, &e.numel[i]);
    }
    return e;
}

static void evaluation_free(evaluation *e)
{
    free(e->out);
    for (int i = 0; i < EVERY_MAX_IN; i++)
        free(e->grad[i]);
}

/* Outputs and gradients in t against those of the CPU in f64 of the same values, which t has. */
static void dtype_check(const every_case *c, const every_set *s, kn_dtype t, double tol)
{
    fake_begin();
    IN_SCOPE;
    kn_tensor *leaf[EVERY_MAX_IN], *plain[EVERY_MAX_IN];
    every_leaves(s, t, CHECKED_DEVICE, leaf);
    every_leaves(s, t, KN_CPU, plain);
    evaluation want = evaluate(c, s, plain, KN_F64), got = evaluate(c, s, leaf, t);
    compare(c->name, "output", got.out, want.out, want.out_numel, tol);
    for (int i = 0; i < s->n; i++)
        compare(c->name, "gradient", got.grad[i], want.grad[i], want.numel[i], tol);
    evaluation_free(&want);
    evaluation_free(&got);
}

static void check_dtype(kn_dtype t, double tol, int one_in)
{
    int i = 0;
    EACH_CASE(c)
    EACH_SET(c, s)
    if (c->differentiable && i++ % one_in == 0)
        dtype_check(c, &s, t, tol);
}

#ifdef CHECKED_ELSEWHERE
KN_TEST(ops, f64_is_that_of_the_cpu)
{
    check_dtype(KN_F64, 1e-10, 1);
}
#endif

KN_TEST(ops, f32_matches_f64)
{
    check_dtype(KN_F32, 1e-4, 1);
}

KN_TEST(ops, bf16_matches_f64)
{
    check_dtype(KN_BF16, 2e-2, 1);
}

KN_TEST(ops, f16_matches_f64)
{
    check_dtype(KN_F16, 1e-2, 2);
}

/* In the first pass a device may allocate memory that it keeps. */
KN_TEST(ops, nothing_leaks)
{
    int64_t before = 0, bytes = 0;
    for (int turn = 0; turn < 2; turn++) {
        check_dtype(KN_F32, 1e-4, 3);
        if (turn == 0) {
            before = kn_live_tensors();
            bytes = kn_ledger_read().live_total;
        }
    }
    KN_CHECK(kn_live_tensors() == before, "%lld tensors live, %lld before",
             (long long)kn_live_tensors(), (long long)before);
    KN_CHECK(kn_ledger_read().live_total == bytes, "bytes still live");
}

/* ---- nothing --------------------------------------------------------------------------------- */

/* y is value everywhere, and the gradients of leaves have these sums. */
static void check_gradients(const char *what, kn_tensor *y, double value, int n,
                            kn_tensor *const *leaf, const double *sum)
{
    KN_CHECK(y && kn_backward(y, .grad = kn_ones_like(y)), "%s", what);
    for (int64_t i = 0; i < kn_numel(y); i++)
        KN_CHECK(((const float *)kn_data(y))[i] == value, "%s", what);
    for (int i = 0; i < n; i++) {
        kn_tensor *g = kn_grad(leaf[i]);
        KN_CHECK(g && kn_item(sum_of(g)) == sum[i], "%s: leaf %d", what, i);
    }
}

static kn_tensor *leaf_of(double value, int ndim, const int64_t *shape)
{
    return kn_require_grad(kn_full(KN_F32, KN_CPU, value, ndim, shape), true);
}

/* Sums of nothing are 0; rows have statistics although they have no columns. */
KN_TEST(ops, rows_without_columns)
{
    for (int in_out = 0; in_out < 2; in_out++) {
        kn_tensor *x = leaf_of(0, KN_SHAPE(2, 3, 0)), *b = leaf_of(5, KN_SHAPE(4));
        kn_tensor *w = in_out ? leaf_of(0, KN_SHAPE(0, 4)) : leaf_of(0, KN_SHAPE(4, 0));
        check_gradients("linear from nothing", kn_linear(x, w, b, in_out), 5, 3,
                        (kn_tensor *[]){ x, w, b }, (double[]){ 0, 0, 24 });
        x = leaf_of(1, KN_SHAPE(3, 2)), b = leaf_of(5, KN_SHAPE(0));
        w = in_out ? leaf_of(0, KN_SHAPE(2, 0)) : leaf_of(0, KN_SHAPE(0, 2));
        check_gradients("linear to nothing", kn_linear(x, w, b, in_out), 0, 3,
                        (kn_tensor *[]){ x, w, b }, (double[]){ 0, 0, 0 });
    }
    kn_tensor *x = leaf_of(0, KN_SHAPE(2, 3, 0)), *w = leaf_of(1, KN_SHAPE(0));
    kn_tensor *y[] = { kn_layer_norm(x, w, w, 0), kn_rms_norm(x, w, 0) };
    for (int i = 0; i < 2; i++) {
        KN_CHECK(y[i] && y[i]->node->out_spec[2].shape[0] == 6);
        check_gradients("norm", y[i], 0, 2, (kn_tensor *[]){ x, w }, (double[]){ 0, 0 });
    }
    kn_tensor *at = kn_zeros(KN_I64, KN_CPU, KN_SHAPE(2)), *table = leaf_of(0, KN_SHAPE(3, 0));
    check_gradients("embedding", kn_embedding(table, at), 0, 1, &table, (double[]){ 0 });
    REFUSED(kn_cross_entropy(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, 0)), at),
            "cross_entropy: logits f32[2,0] have no classes in their last dim");
}
