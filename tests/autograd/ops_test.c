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
