/* tests/kernels/overlay_test.c: the fast providers against the reference (overlay.h): elementwise,
 * reductions, indexing and random draws. A failure's line names the case. */
#include "tests/kernels/overlay.h"

static const kn_dtype arithmetic[] = { KN_F32, KN_BF16, KN_F16, KN_F64,
                                       KN_I64, KN_I32,  KN_U8,  KN_BOOL };

OVERLAY(overlay, copy, COPY, 0, overlay_cases(8 * 8 * 10))
{
    case_shape(c, i);
    kn_dtype to = arithmetic[i % 8], from = arithmetic[i / 8 % 8];
    values v = case_pick(c, 2) ? SPECIAL : NORMAL;
    kn_array src = case_input(c, from, v);
    kn_array dst = case_output(c, to, UNSET);
    case_close(c, &dst, 0);
    c->rel[0] = 0;
    c->abs[0] = 1e-300; /* exact but for the bits of NaN and the sign of 0 */
    kn_copy_args args = { dst, src };
    case_run(c, &args);
}

OVERLAY(overlay, fill, FILL, 0, overlay_cases(160))
{
    case_shape(c, i);
    kn_array dst = case_output(c, arithmetic[i % 8], UNSET);
    case_exact(c, &dst);
    const double zero = i / 16 % 2 ? -0.0 : 0;
    kn_fill_args args = { dst, i % 3 ? 0.1 * i : zero, i / 8 % 2 ? 0.7 : 0 };
    case_run(c, &args);
}

OVERLAY(overlay, where, WHERE, 0, overlay_cases(200))
{
    case_shape(c, i);
    kn_dtype t = arithmetic[i % 8];
    kn_array cond = case_input(c, KN_BOOL, NORMAL);
    kn_array a = case_input(c, t, SPECIAL);
    kn_array b = case_input(c, t, SPECIAL);
    kn_array dst = case_result(c, &b, t);
    case_exact(c, &dst);
    kn_where_args args = { dst, cond, a, b };
    case_run(c, &args);
}

/* ---- unary --------------------------------------------------------------------------------- */

/* x times a function that is 0 at minus infinity: NaN there, if providers don't avoid it. */
static bool is_gate(kn_unary kind)
{
    return kind == KN_GELU_TANH || kind == KN_GELU || kind == KN_SILU || kind == KN_MISH;
}

/* Inputs on which a kind is defined and providers must agree. */
static values unary_values(kn_unary kind, int number)
{
    if (kn_unary_row(kind)->positive)
        return POSITIVE;
    return number % 3 ? NORMAL : is_gate(kind) || kind == KN_SOFTPLUS ? FINITE : SPECIAL;
}

static kn_unary_args unary_args(kn_array dst, kn_array src, kn_unary kind)
{
    const bool whole = !kn_dtype_is_float(src.dtype);
    if (kind == KN_CLAMP || kind == KN_HARDTANH)
        return (kn_unary_args){ dst, src, kind, -1, 2 };
    return (kn_unary_args){ dst, src, kind, whole ? 3 : 1.75,
                            kind == KN_SOFTPLUS ? 20
                            : whole             ? 7
                                                : 0.3 };
}

OVERLAY(overlay, unary, UNARY, 0, overlay_cases(KN_UNARY_COUNT * 42))
{
    kn_unary kind = (kn_unary)(i % KN_UNARY_COUNT);
    case_note(c, " %s", kn_unary_row(kind)->name);
    case_shape(c, i / KN_UNARY_COUNT);
    const kn_kind_dtypes dtypes = kn_unary_row(kind)->dtypes;
    const bool ints = dtypes == KN_NUMBERS;
    kn_dtype t = dtypes == KN_BOOLS             ? KN_BOOL
                 : ints && case_pick(c, 3) == 0 ? arithmetic[4 + case_pick(c, 3)]
                                                : case_float(c);
    values v = unary_values(kind, i / KN_UNARY_COUNT);
    kn_array src = case_input(c, t, v);
    kn_array dst = case_result(c, &src, t);
    case_close(c, &dst, kind == KN_GELU_TANH || kind == KN_GELU ? 1e-6 : 2e-7);
    kn_unary_args args = unary_args(dst, src, kind);
    case_run(c, &args);
}

/* Also infinity and numbers near it where the slope is 0 or 1 there. */
static values gradient_values(kn_unary kind, int number)
{
    return is_gate(kind) && number % 3 == 0 ? SPECIAL : unary_values(kind, 1);
}

OVERLAY(overlay, unary_grad, UNARY_GRAD, 0, overlay_cases(KN_NOT * 42))
{
    kn_unary kind = (kn_unary)(i % KN_NOT);
    case_note(c, " %s", kn_unary_row(kind)->name);
    case_shape(c, i / KN_NOT);
    kn_dtype t = case_float(c);
    values v = gradient_values(kind, i / KN_NOT);
    kn_array x = case_input(c, t, v);
    kn_array y = case_output(c, t, UNSET);
    kn_unary_args forward = unary_args(y, x, kind);
    case_prepare(KN_K_UNARY, &forward);
    kn_array dy = case_input(c, t, NORMAL);
    kn_array dx = case_result(c, &dy, t);
    case_close(c, &dx, 2e-6);
    const int reads = kn_unary_row(kind)->reads;
    kn_unary_grad_args args = { dx, dy, { 0 }, { 0 }, kind, forward.p0, forward.p1 };
    if (reads & KN_READS_X)
        args.x = x;
    if (reads & KN_READS_Y)
        args.y = y;
    case_run(c, &args);
}

/* ---- binary -------------------------------------------------------------------------------- */

OVERLAY(overlay, binary, BINARY, 0, overlay_cases(KN_BINARY_COUNT * 50))
{
    kn_binary kind = (kn_binary)(i % KN_BINARY_COUNT);
    const kn_kind_row *row = kn_binary_row(kind);
    case_note(c, " %s", row->name);
    case_shape(c, i / KN_BINARY_COUNT);
    kn_dtype t = row->dtypes == KN_BOOLS    ? KN_BOOL
                 : row->dtypes == KN_FLOATS ? case_float(c)
                 : case_pick(c, 3)          ? case_float(c)
                                            : arithmetic[4 + case_pick(c, 3)];
    values v = row->positive ? POSITIVE : i % 4 ? NORMAL : SPECIAL;
    kn_array a = case_input(c, t, v), b = case_input(c, t, v);
    kn_dtype to = kind >= KN_EQ ? KN_BOOL : t;
    kn_array dst = i % 2 ? case_result(c, &a, to) : case_result(c, &b, to);
    const bool two_steps = kind == KN_ADD_SCALED || kind == KN_LERP;
    if (kn_dtype_is_float(to))
        case_close(c, &dst, two_steps ? 1e-6 : 1e-7);
    else
        case_exact(c, &dst);
    kn_binary_args args = { dst, a, b, kind, i % 3 ? 0.3 : 0.9 };
    case_run(c, &args);
}

/* Rows so short that many are walked at once, one of them repeated; threads begin inside of
 * rows. */
OVERLAY(overlay, binary_of_short_rows, BINARY, 7000, 12)
{
    const int64_t shape[2] = { 3000, (int64_t[]){ 7, 17, 33 }[i % 3] };
    kn_array a = case_array(c, KN_F32, i % 2 ? DENSE : ONE_COLUMN, NORMAL, 2, shape);
    kn_array b = case_array(c, KN_F32, ONE_ROW, NORMAL, 2, shape);
    kn_array dst = case_array(c, KN_F32, DENSE, UNSET, 2, shape);
    case_exact(c, &dst);
    case_run(c, &(kn_binary_args){ dst, a, b, KN_MUL, 0 });
}

/* ---- reductions ---------------------------------------------------------------------------- */

OVERLAY(overlay, reduce, REDUCE, 0, overlay_cases(KN_REDUCE_COUNT * 90))
{
    kn_reduce_kind kind = (kn_reduce_kind)(i % KN_REDUCE_COUNT);
    case_note(c, " kind %d", kind);
    int64_t reduced[KN_MAX_DIMS];
    case_shape(c, i / KN_REDUCE_COUNT);
    bool ints = case_pick(c, 4) == 0 && kind != KN_MEAN;
    kn_dtype t = ints ? arithmetic[4 + case_pick(c, kind == KN_SUM ? 4 : 3)] : case_float(c);
    kn_dtype to = kind == KN_ARGMAX || (ints && kind == KN_SUM) ? KN_I64 : t;
    if (kind == KN_SUM && (t == KN_BF16 || t == KN_F16) && case_pick(c, 2))
        to = KN_F32;
    int only = (int)case_pick(c, c->ndim);
    int64_t count = 1;
    for (int d = 0; d < c->ndim; d++) {
        bool reduce = kind == KN_ARGMAX ? d == only : case_pick(c, 2) == 1;
        reduced[d] = reduce ? 1 : c->shape[d];
        count *= reduce ? c->shape[d] : 1;
    }
    if (kind == KN_ARGMAX && count == 0)
        return; /* no first element exists */
    values v = kind >= KN_MAX && i % 3 == 0 ? SPECIAL : NORMAL;
    kn_array src = case_input(c, t, v);
    kn_array dst = case_array(c, to, case_layout(c, OUTPUT_LAYOUTS), UNSET, c->ndim, reduced);
    /* rounding of a pairwise f32 sum grows with its terms, not with the result */
    case_close(c, &dst, kind == KN_SUM ? 4e-7 * (double)count : kind == KN_MEAN ? 1e-6 : 0);
    kn_reduce_args args = { dst, src, kind };
    case_run(c, &args);
}

/* ---- indexing ------------------------------------------------------------------------------ */

/* src or dst with n slices along dim, an index of m of them, the array of m slices. */
static void index_case(overlay_case *c, int number, kn_dtype full_t, kn_dtype picked_t, bool add)
{
    int64_t picked[KN_MAX_DIMS];
    case_shape(c, number);
    const int dim = (int)case_pick(c, c->ndim);
    int64_t m = c->shape[dim] == 0 ? 0 : case_size(c, 100);
    memcpy(picked, c->shape, sizeof picked);
    picked[dim] = m;
    kn_array index =
        case_array(c, number % 2 ? KN_I64 : KN_I32, case_layout(c, OUTPUT_LAYOUTS), NORMAL, 1, &m);
    for (int64_t i = 0; i < m; i++)
        case_set(&index, i * index.stride[0], (double)case_pick(c, c->shape[dim]));
    kn_array full = add ? case_output(c, full_t, NORMAL) : case_input(c, full_t, NORMAL);
    kn_array some = case_array(c, picked_t, case_layout(c, add ? LAYOUTS : OUTPUT_LAYOUTS), NORMAL,
                               c->ndim, picked);
    case_exact(c, add ? &full : &some);
    kn_index_select_args select = { some, full, index, dim };
    kn_index_add_args sum = { full, some, index, dim };
    case_run(c, add ? (const void *)&sum : (const void *)&select);
}

OVERLAY(overlay, index_select, INDEX_SELECT, 0, overlay_cases(240))
{
    index_case(c, i, arithmetic[i % 8], arithmetic[i % 8], false);
}

OVERLAY(overlay, index_add, INDEX_ADD, 0, overlay_cases(240))
{
    kn_dtype t = arithmetic[i % 4];
    bool wider = (t == KN_BF16 || t == KN_F16) && i % 8 >= 4;
    index_case(c, i, wider ? KN_F32 : t, t, true);
}

/* An index out of range is an error in every provider, or declined. */
KN_TEST(overlay, bad_index)
{
    const kn_provider *providers[KN_MAX_PROVIDERS];
    int n = overlay_all_layers(providers);
    for (int i = 0; i < n; i++) {
        float x[12] = { 0 }, y[6] = { 0 };
        int64_t at[2] = { 1, 4 };
        kn_array full = kn_array_make(x, KN_F32, 2, (int64_t[]){ 4, 3 });
        kn_array some = kn_array_make(y, KN_F32, 2, (int64_t[]){ 2, 3 });
        kn_array index = kn_array_make(at, KN_I64, 1, (int64_t[]){ 2 });
        kn_index_select_args select = { some, full, index, 0 };
        kn_index_add_args add = { full, some, index, 0 };
        for (int k = 0; k < 2; k++) {
            kn_kernel_fn run = providers[i]->run[k ? KN_K_INDEX_ADD : KN_K_INDEX_SELECT];
            kn_status s = run ? run(k ? (void *)&add : (void *)&select) : KN_DECLINED;
            KN_CHECK(s != KN_DONE, "%s took index 4 of 4", providers[i]->name);
            if (s == KN_FAILED)
                KN_CHECK_ERROR("index 4 at position 1");
        }
    }
}

/* ---- random -------------------------------------------------------------------------------- */

OVERLAY(overlay, random, RANDOM, 0, overlay_cases(120))
{
    case_shape(c, i);
    kn_array dst = case_array(c, case_float(c), i % 2 ? DENSE : OFFSET, UNSET, c->ndim, c->shape);
    case_exact(c, &dst);
    int64_t start = i % 3 == 0 ? 0 : i % 3 == 1 ? case_pick(c, 100) : (1LL << 34) - 5;
    kn_random_args args = {
        dst, i % 5 < 2 ? KN_UNIFORM : KN_NORMAL, 7, (uint64_t)i << 30, start, i % 2 ? -0.5 : 0, 1.5
    };
    case_note(c, " kind %d start %lld", args.kind, (long long)start);
    case_run(c, &args);
}

/* Rows of 1 to 70 elements whose words begin anywhere in a block, steps apart that don't divide by
 * 4. */
OVERLAY(overlay, round, ROUND, 0, overlay_cases(60))
{
    int64_t shape[2] = { i % 4 ? 1 + case_pick(c, 9) : 1, i % 7 ? 1 + case_pick(c, 70) : 5000 };
    kn_array src =
        case_array(c, case_float(c), i % 2 ? DENSE : OFFSET, i % 3 ? NORMAL : SPECIAL, 2, shape);
    kn_array dst = case_array(c, i % 5 ? KN_BF16 : KN_F16, i % 3 ? DENSE : OFFSET, UNSET, 2, shape);
    case_exact(c, &dst);
    int64_t start = i % 3 == 0 ? 0 : i % 3 == 1 ? case_pick(c, 100) : (1LL << 34) - 5;
    kn_round_args args = { dst, src, 7, (uint64_t)i << 30, start, shape[1] + case_pick(c, 6) };
    uint64_t seed = (uint64_t)i;
    double step = i;
    if (i % 4 == 3) {
        args.seed_at = &seed;
        args.step_at = &step;
    }
    case_note(c, " start %lld step %lld", (long long)start, (long long)args.step);
    case_run(c, &args);
}

OVERLAY(overlay, dropout, DROPOUT, 0, overlay_cases(160))
{
    case_shape(c, i);
    kn_dtype t = case_float(c);
    kn_array x = case_input(c, t, NORMAL);
    kn_array y = case_result(c, &x, t);
    case_exact(c, &y);
    kn_dropout_args args = { y, x, i % 7 == 0 ? 0 : i % 7 == 1 ? 1 : 0.1 * (i % 7), 3, 99 };
    case_note(c, " p %g", args.p);
    case_run(c, &args);
}
