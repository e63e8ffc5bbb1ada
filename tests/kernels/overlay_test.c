/* tests/kernels/overlay_test.c: the fast providers against the reference (overlay.h): elementwise,
 * reductions, indexing and random draws. A failure's line names the case. */
#include "tests/kernels/overlay.h"

enum { SMALL_MAX = 20000 }; /* elements of a usual case */

/* A shape of 1 to 3 dims of the usual sizes, at most max elements; every 40th case is large enough
 * for several threads. */
static int random_shape(overlay_case *c, int number, int64_t *shape, int64_t max)
{
    int ndim = 1 + (int)case_pick(c, 3);
    if (number % 40 == 7) {
        ndim = 2;
        shape[0] = 301;
        shape[1] = 1 + case_pick(c, 600);
        return ndim;
    }
    for (int d = 0; d < ndim; d++) {
        shape[d] = case_size(c, max);
        max = shape[d] > 0 ? max / shape[d] : max;
    }
    return ndim;
}

static layout input_layout(overlay_case *c)
{
    return case_layout(c, LAYOUTS);
}

static layout output_layout(overlay_case *c)
{
    return case_layout(c, OUTPUT_LAYOUTS);
}

/* dst: a new array, or the input itself now and then. */
static kn_array output_or_in_place(overlay_case *c, const kn_array *in, layout l, kn_dtype t)
{
    if (l < OUTPUT_LAYOUTS && in->dtype == t && case_pick(c, 4) == 0) {
        case_note(c, " in place");
        return *in;
    }
    return case_array(c, t, output_layout(c), UNSET, in->ndim, in->shape);
}

static const kn_dtype arithmetic[] = { KN_F32, KN_BF16, KN_F16, KN_F64,
                                       KN_I64, KN_I32,  KN_U8,  KN_BOOL };

KN_TEST(overlay, copy)
{
    for (int i = 0; i < overlay_cases(8 * 8 * 10); i++) {
        overlay_case *c = case_begin(KN_K_COPY, (uint64_t)i);
        int64_t shape[KN_MAX_DIMS];
        int ndim = random_shape(c, i, shape, SMALL_MAX);
        kn_dtype to = arithmetic[i % 8], from = arithmetic[i / 8 % 8];
        values v = case_pick(c, 2) ? SPECIAL : NORMAL;
        kn_array src = case_array(c, from, input_layout(c), v, ndim, shape);
        kn_array dst = case_array(c, to, output_layout(c), UNSET, ndim, shape);
        case_close(c, &dst, 0);
        c->rel[0] = 0;
        c->abs[0] = 1e-300; /* exact but for the bits of NaN and the sign of 0 */
        kn_copy_args args = { dst, src };
        case_run(c, &args);
    }
    case_report(KN_K_COPY);
}

KN_TEST(overlay, fill)
{
    for (int i = 0; i < overlay_cases(160); i++) {
        overlay_case *c = case_begin(KN_K_FILL, (uint64_t)i);
        int64_t shape[KN_MAX_DIMS];
        int ndim = random_shape(c, i, shape, SMALL_MAX);
        kn_array dst = case_array(c, arithmetic[i % 8], output_layout(c), UNSET, ndim, shape);
        case_exact(c, &dst);
        kn_fill_args args = { dst, i % 3 ? 0.1 * i : 0, i % 2 ? 0.7 : 0 };
        case_run(c, &args);
    }
    case_report(KN_K_FILL);
}

KN_TEST(overlay, where)
{
    for (int i = 0; i < overlay_cases(200); i++) {
        overlay_case *c = case_begin(KN_K_WHERE, (uint64_t)i);
        int64_t shape[KN_MAX_DIMS];
        int ndim = random_shape(c, i, shape, SMALL_MAX);
        kn_dtype t = arithmetic[i % 8];
        kn_array cond = case_array(c, KN_BOOL, input_layout(c), NORMAL, ndim, shape);
        kn_array a = case_array(c, t, input_layout(c), SPECIAL, ndim, shape);
        layout l = input_layout(c);
        kn_array b = case_array(c, t, l, SPECIAL, ndim, shape);
        kn_array dst = output_or_in_place(c, &b, l, t);
        case_exact(c, &dst);
        kn_where_args args = { dst, cond, a, b };
        case_run(c, &args);
    }
    case_report(KN_K_WHERE);
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

KN_TEST(overlay, unary)
{
    for (int i = 0; i < overlay_cases(KN_UNARY_COUNT * 42); i++) {
        overlay_case *c = case_begin(KN_K_UNARY, (uint64_t)i);
        kn_unary kind = (kn_unary)(i % KN_UNARY_COUNT);
        case_note(c, " %s", kn_unary_row(kind)->name);
        int64_t shape[KN_MAX_DIMS];
        int ndim = random_shape(c, i / KN_UNARY_COUNT, shape, SMALL_MAX);
        const kn_kind_dtypes dtypes = kn_unary_row(kind)->dtypes;
        const bool ints = dtypes == KN_NUMBERS;
        kn_dtype t = dtypes == KN_BOOLS             ? KN_BOOL
                     : ints && case_pick(c, 3) == 0 ? arithmetic[4 + case_pick(c, 3)]
                                                    : case_float(c);
        layout l = input_layout(c);
        values v = unary_values(kind, i / KN_UNARY_COUNT);
        kn_array src = case_array(c, t, l, v, ndim, shape);
        kn_array dst = output_or_in_place(c, &src, l, t);
        case_close(c, &dst, kind == KN_GELU_TANH || kind == KN_GELU ? 1e-6 : 2e-7);
        kn_unary_args args = unary_args(dst, src, kind);
        case_run(c, &args);
    }
    case_report(KN_K_UNARY);
}

/* Also infinity and numbers near it where the slope is 0 or 1 there. */
static values gradient_values(kn_unary kind, int number)
{
    return is_gate(kind) && number % 3 == 0 ? SPECIAL : unary_values(kind, 1);
}

KN_TEST(overlay, unary_grad)
{
    for (int i = 0; i < overlay_cases(KN_NOT * 42); i++) {
        overlay_case *c = case_begin(KN_K_UNARY_GRAD, (uint64_t)i);
        kn_unary kind = (kn_unary)(i % KN_NOT);
        case_note(c, " %s", kn_unary_row(kind)->name);
        int64_t shape[KN_MAX_DIMS];
        int ndim = random_shape(c, i / KN_NOT, shape, SMALL_MAX);
        kn_dtype t = case_float(c);
        values v = gradient_values(kind, i / KN_NOT);
        kn_array x = case_array(c, t, input_layout(c), v, ndim, shape);
        kn_array y = case_array(c, t, case_layout(c, OUTPUT_LAYOUTS), UNSET, ndim, shape);
        kn_unary_args forward = unary_args(y, x, kind);
        case_prepare(KN_K_UNARY, &forward);
        layout l = input_layout(c);
        kn_array dy = case_array(c, t, l, NORMAL, ndim, shape);
        kn_array dx = output_or_in_place(c, &dy, l, t);
        case_close(c, &dx, 2e-6);
        const int reads = kn_unary_row(kind)->reads;
        kn_unary_grad_args args = { dx, dy, { 0 }, { 0 }, kind, forward.p0, forward.p1 };
        if (reads & KN_READS_X)
            args.x = x;
        if (reads & KN_READS_Y)
            args.y = y;
        case_run(c, &args);
    }
    case_report(KN_K_UNARY_GRAD);
}

/* ---- binary -------------------------------------------------------------------------------- */

KN_TEST(overlay, binary)
{
    for (int i = 0; i < overlay_cases(KN_BINARY_COUNT * 50); i++) {
        overlay_case *c = case_begin(KN_K_BINARY, (uint64_t)i);
        kn_binary kind = (kn_binary)(i % KN_BINARY_COUNT);
        const kn_kind_row *row = kn_binary_row(kind);
        case_note(c, " %s", row->name);
        int64_t shape[KN_MAX_DIMS];
        int ndim = random_shape(c, i / KN_BINARY_COUNT, shape, SMALL_MAX);
        kn_dtype t = row->dtypes == KN_BOOLS    ? KN_BOOL
                     : row->dtypes == KN_FLOATS ? case_float(c)
                     : case_pick(c, 3)          ? case_float(c)
                                                : arithmetic[4 + case_pick(c, 3)];
        values v = row->positive ? POSITIVE : i % 4 ? NORMAL : SPECIAL;
        layout la = input_layout(c), lb = input_layout(c);
        kn_array a = case_array(c, t, la, v, ndim, shape);
        kn_array b = case_array(c, t, lb, v, ndim, shape);
        kn_dtype to = kind >= KN_EQ ? KN_BOOL : t;
        kn_array dst =
            i % 2 ? output_or_in_place(c, &a, la, to) : output_or_in_place(c, &b, lb, to);
        const bool two_steps = kind == KN_ADD_SCALED || kind == KN_LERP;
        if (kn_dtype_is_float(to))
            case_close(c, &dst, two_steps ? 1e-6 : 1e-7);
        else
            case_exact(c, &dst);
        kn_binary_args args = { dst, a, b, kind, i % 3 ? 0.3 : 0.9 };
        case_run(c, &args);
    }
    case_report(KN_K_BINARY);
}

/* ---- reductions ---------------------------------------------------------------------------- */

KN_TEST(overlay, reduce)
{
    for (int i = 0; i < overlay_cases(KN_REDUCE_COUNT * 90); i++) {
        overlay_case *c = case_begin(KN_K_REDUCE, (uint64_t)i);
        kn_reduce_kind kind = (kn_reduce_kind)(i % KN_REDUCE_COUNT);
        case_note(c, " kind %d", kind);
        int64_t shape[KN_MAX_DIMS], reduced[KN_MAX_DIMS];
        int ndim = random_shape(c, i / KN_REDUCE_COUNT, shape, SMALL_MAX);
        bool ints = case_pick(c, 4) == 0 && kind != KN_MEAN;
        kn_dtype t = ints ? arithmetic[4 + case_pick(c, kind == KN_SUM ? 4 : 3)] : case_float(c);
        kn_dtype to = kind == KN_ARGMAX || (ints && kind == KN_SUM) ? KN_I64 : t;
        if (kind == KN_SUM && (t == KN_BF16 || t == KN_F16) && case_pick(c, 2))
            to = KN_F32;
        int only = (int)case_pick(c, ndim);
        int64_t count = 1;
        for (int d = 0; d < ndim; d++) {
            bool reduce = kind == KN_ARGMAX ? d == only : case_pick(c, 2) == 1;
            reduced[d] = reduce ? 1 : shape[d];
            count *= reduce ? shape[d] : 1;
        }
        if (kind == KN_ARGMAX && count == 0)
            continue; /* no first element exists */
        values v = kind >= KN_MAX && i % 3 == 0 ? SPECIAL : NORMAL;
        kn_array src = case_array(c, t, input_layout(c), v, ndim, shape);
        kn_array dst = case_array(c, to, output_layout(c), UNSET, ndim, reduced);
        /* rounding of a pairwise f32 sum grows with its terms, not with the result */
        case_close(c, &dst, kind == KN_SUM ? 4e-7 * (double)count : kind == KN_MEAN ? 1e-6 : 0);
        kn_reduce_args args = { dst, src, kind };
        case_run(c, &args);
    }
    case_report(KN_K_REDUCE);
}

/* ---- indexing ------------------------------------------------------------------------------ */

/* src or dst with n slices along dim, an index of m of them, the array of m slices. */
static void index_case(overlay_case *c, int number, kn_dtype full_t, kn_dtype picked_t, bool add)
{
    int64_t shape[KN_MAX_DIMS], picked[KN_MAX_DIMS];
    int ndim = random_shape(c, number, shape, SMALL_MAX), dim = (int)case_pick(c, ndim);
    int64_t m = shape[dim] == 0 ? 0 : case_size(c, 100);
    memcpy(picked, shape, sizeof picked);
    picked[dim] = m;
    kn_array index =
        case_array(c, number % 2 ? KN_I64 : KN_I32, case_layout(c, OUTPUT_LAYOUTS), NORMAL, 1, &m);
    for (int64_t i = 0; i < m; i++)
        case_set(&index, i * index.stride[0], (double)case_pick(c, shape[dim]));
    kn_array full =
        case_array(c, full_t, add ? output_layout(c) : input_layout(c), NORMAL, ndim, shape);
    kn_array some =
        case_array(c, picked_t, add ? input_layout(c) : output_layout(c), NORMAL, ndim, picked);
    case_exact(c, add ? &full : &some);
    kn_index_select_args select = { some, full, index, dim };
    kn_index_add_args sum = { full, some, index, dim };
    case_run(c, add ? (const void *)&sum : (const void *)&select);
}

KN_TEST(overlay, index_select)
{
    for (int i = 0; i < overlay_cases(240); i++) {
        kn_dtype t = arithmetic[i % 8];
        index_case(case_begin(KN_K_INDEX_SELECT, (uint64_t)i), i, t, t, false);
    }
    case_report(KN_K_INDEX_SELECT);
}

KN_TEST(overlay, index_add)
{
    for (int i = 0; i < overlay_cases(240); i++) {
        kn_dtype t = arithmetic[i % 4];
        bool wider = (t == KN_BF16 || t == KN_F16) && i % 8 >= 4;
        index_case(case_begin(KN_K_INDEX_ADD, (uint64_t)i), i, wider ? KN_F32 : t, t, true);
    }
    case_report(KN_K_INDEX_ADD);
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

KN_TEST(overlay, random)
{
    for (int i = 0; i < overlay_cases(120); i++) {
        overlay_case *c = case_begin(KN_K_RANDOM, (uint64_t)i);
        int64_t shape[KN_MAX_DIMS];
        int ndim = random_shape(c, i, shape, SMALL_MAX);
        kn_array dst = case_array(c, case_float(c), i % 2 ? DENSE : OFFSET, UNSET, ndim, shape);
        case_exact(c, &dst);
        int64_t start = i % 3 == 0 ? 0 : i % 3 == 1 ? case_pick(c, 100) : (1LL << 34) - 5;
        kn_random_args args = { dst,   i % 5 < 2 ? KN_UNIFORM : KN_NORMAL,
                                7,     (uint64_t)i << 30,
                                start, i % 2 ? -0.5 : 0,
                                1.5 };
        case_note(c, " kind %d start %lld", args.kind, (long long)start);
        case_run(c, &args);
    }
    case_report(KN_K_RANDOM);
}

/* Rows of 1 to 70 elements whose words begin anywhere in a block, steps apart that don't divide by
 * 4. */
KN_TEST(overlay, round)
{
    for (int i = 0; i < overlay_cases(60); i++) {
        overlay_case *c = case_begin(KN_K_ROUND, (uint64_t)i);
        int64_t shape[2] = { i % 4 ? 1 + case_pick(c, 9) : 1, i % 7 ? 1 + case_pick(c, 70) : 5000 };
        kn_array src = case_array(c, case_float(c), i % 2 ? DENSE : OFFSET,
                                  i % 3 ? NORMAL : SPECIAL, 2, shape);
        kn_array dst =
            case_array(c, i % 5 ? KN_BF16 : KN_F16, i % 3 ? DENSE : OFFSET, UNSET, 2, shape);
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
    case_report(KN_K_ROUND);
}

KN_TEST(overlay, dropout)
{
    for (int i = 0; i < overlay_cases(160); i++) {
        overlay_case *c = case_begin(KN_K_DROPOUT, (uint64_t)i);
        int64_t shape[KN_MAX_DIMS];
        int ndim = random_shape(c, i, shape, SMALL_MAX);
        kn_dtype t = case_float(c);
        layout l = input_layout(c);
        kn_array x = case_array(c, t, l, NORMAL, ndim, shape);
        kn_array y = output_or_in_place(c, &x, l, t);
        case_exact(c, &y);
        kn_dropout_args args = { y, x, i % 7 == 0 ? 0 : i % 7 == 1 ? 1 : 0.1 * (i % 7), 3, 99 };
        case_note(c, " p %g", args.p);
        case_run(c, &args);
    }
    case_report(KN_K_DROPOUT);
}
