/* tests/autograd/ops_test.c: every operation's gradient by finite differences in f64, and its
 * results in f32 and bf16 against those in f64, for the cases of op_cases.h. An operation without a
 * case fails the registry test. */
#include "tests/autograd/op_cases.h"

KN_TEST(ops, registry_is_complete)
{
    int count = 0;
    for (const kn_op *op; (op = kn_op_at(count)); count++) {
        KN_CHECK(op->name && op->shape, "operation %d lacks a name or a shape rule", count);
        KN_CHECK(op->forward || op->view, "'%s' computes nothing", op->name);
        bool found = !op->backward;
        for (size_t c = 0; c < CASES; c++)
            found = found || strcmp(case_at(c)->op, op->name) == 0;
        KN_CHECK(found, "'%s' has a backward but no gradient check", op->name);
    }
    KN_CHECK(count >= KN_UNARY_COUNT + KN_BINARY_COUNT + 30, "only %d operations are found", count);
}

/* For y = f(x) backward keeps exactly the arrays that the derivative reads by the kind's row: x is
 * temporary here, the caller holds y. */
KN_TEST(ops, unary_operations_keep_what_their_derivative_reads)
{
    enum { N = 1000 };
    const double bytes = N * sizeof(float);
#define KEPT_ROW(kind, name)                   { #name, run_##name, KN_##kind },
#define KEPT(kind, name, function, reads, ...) IF_##reads(KEPT_ROW(kind, name))
    static const struct {
        const char *name;
        kn_tensor *(*run)(kn_tensor *const *x);
        kn_unary kind;
    } all[] = { KN_UNARY_KINDS(KEPT) };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        kn_scope outer = kn_scope_begin();
        kn_tensor *leaf = kn_require_grad(kn_ones(KN_F32, CHECKED_DEVICE, KN_SHAPE(N)), true);
        const int64_t before = kn_ledger_read().live[KN_MEM_ACTIVATION];
        kn_scope inner = kn_scope_begin();
        kn_tensor *x = kn_scale(leaf, 0.5), *y = kn_keep(all[i].run(&x));
        kn_scope_end(inner);
        const int64_t held = kn_ledger_read().live[KN_MEM_ACTIVATION] - before;
        const int arrays = 1 + (kn_unary_row(all[i].kind)->reads & KN_READS_X ? 1 : 0);
        KN_CHECK(y && kn_ok(), "%s", kn_error() ? kn_error() : all[i].name);
        KN_CHECK((double)held >= bytes * arrays && (double)held < bytes * (arrays + 0.5),
                 "%s holds %lld bytes, not the %g of %d arrays", all[i].name, (long long)held,
                 bytes * arrays, arrays);
        kn_tensor_free(y);
        kn_scope_end(outer);
    }
}

KN_TEST(ops, gradients_match_differences)
{
    for (size_t c = 0; c < CASES; c++)
        check_gradient(case_at(c));
}

KN_TEST(ops, f32_matches_f64)
{
    for (size_t c = 0; c < CASES; c++)
        dtype_check(case_at(c), KN_F32, 1e-4);
}

KN_TEST(ops, bf16_matches_f64)
{
    for (size_t c = 0; c < CASES; c++)
        dtype_check(case_at(c), KN_BF16, 2e-2);
}

/* In the first pass a device may allocate memory that it keeps. */
KN_TEST(ops, nothing_leaks)
{
    int64_t before = 0, bytes = 0;
    for (int turn = 0; turn < 2; turn++) {
        for (size_t c = 0; c < CASES; c += 3)
            dtype_check(case_at(c), KN_F32, 1e-4);
        if (turn == 0) {
            before = kn_live_tensors();
            bytes = kn_ledger_read().live_total;
        }
    }
    KN_CHECK(kn_live_tensors() == before, "%lld tensors live, %lld before",
             (long long)kn_live_tensors(), (long long)before);
    KN_CHECK(kn_ledger_read().live_total == bytes, "bytes still live");
}

/* y is value everywhere, and the gradients of leaves have these sums. */
static void check_gradients(const char *what, kn_tensor *y, double value, int n,
                            kn_tensor *const *leaf, const double *sum)
{
    KN_CHECK(y && kn_backward(y, .grad = kn_ones_like(y)), "%s: %s", what, kn_error());
    for (int64_t i = 0; i < kn_numel(y); i++)
        KN_CHECK(((const float *)kn_data(y))[i] == value, "%s", what);
    for (int i = 0; i < n; i++) {
        kn_tensor *g = kn_grad(leaf[i]);
        KN_CHECK(g && kn_item(kn_sum(g, 0, NULL, false)) == sum[i], "%s: leaf %d", what, i);
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
        KN_CHECK(y[i] && y[i]->node->out_spec[2].shape[0] == 6, "%s", kn_error());
        check_gradients("norm", y[i], 0, 2, (kn_tensor *[]){ x, w }, (double[]){ 0, 0 });
    }
    kn_tensor *at = kn_zeros(KN_I64, KN_CPU, KN_SHAPE(2)), *table = leaf_of(0, KN_SHAPE(3, 0));
    check_gradients("embedding", kn_embedding(table, at), 0, 1, &table, (double[]){ 0 });
    KN_CHECK(!kn_cross_entropy(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, 0)), at));
    KN_CHECK_ERROR("cross_entropy: logits f32[2,0] have no classes in their last dim");
}
