/* kernels/cpu/vec/elementwise.c: the kinds of kernels/kinds.h: binary and unary functions, and the
 * derivatives of these. A kind's row makes its loop over a block of dense elements, f32 or bytes.
 * Inputs that lie otherwise go through blocks that stay in the first-level cache: strided elements
 * are copied there, bf16 and f16 widened. */
#include "kernels/cpu/vec/iter.h"
#include "kernels/cpu/vec/words.h"

enum { BLOCK = 512 /* elements */, INPUTS = 2 /* at most */ };

typedef struct loop loop;
/* n elements of the result from those of the inputs. */
typedef void block_fn(const loop *l, void *out, const void *const in[INPUTS], int64_t n);

struct loop {
    block_fn *block;
    int kind, inputs;
    kn_dtype dtype; /* of the inputs */
    float p0, p1;
    bool repeats,
        once[INPUTS]; /* once: a block has one value, which repeats, if the loop takes it */
};

/* ---- loops of vectors ------------------------------------------------------------------------ */

/* The case of a kind; TAKE names the vectors that its formula reads. */
#define LOOP(kind, TAKE, formula)                                                                  \
    case kind: {                                                                                   \
        int64_t i = 0;                                                                             \
        for (; i + KN_VW <= n; i += KN_VW) {                                                       \
            TAKE(WHOLE)                                                                            \
            v_store(to + i, formula);                                                              \
        }                                                                                          \
        if (i < n) {                                                                               \
            TAKE(REST)                                                                             \
            v_store_n(to + i, formula, n - i);                                                     \
        }                                                                                          \
        break;                                                                                     \
    }
#define WHOLE(p) v_load((p) + i)
#define REST(p)  v_load_n((p) + i, n - i)

/* By the columns work and dtypes of a row. */
#define LOOP_LIGHT LOOP
#define LOOP_HEAVY LOOP
#define LOOP_LONG  LOOP
#ifdef KN_HAVE_MVEC
#define LOOP_LIBM LOOP
enum { HAVE_LIBM = true };
#else
#define LOOP_LIBM(kind, TAKE, formula)
enum { HAVE_LIBM = false };
#endif
#define CASE_FLOATS(LOOP_OF, kind, TAKE, formula) LOOP_OF(kind, TAKE, formula)
#define CASE_NUMBERS                              CASE_FLOATS
#define CASE_BOOLS(LOOP_OF, kind, TAKE, formula)

#define TAKE_AB(get) const vf a = once_a ? a0 : get(first), b = once_b ? b0 : get(second);
#define BINARY_CASE(kind, name, function, reads, dtypes, domain, work, formula)                    \
    CASE_##dtypes(LOOP_##work, KN_##kind, TAKE_AB, formula)

static void binary_block(const loop *l, void *out, const void *const in[INPUTS], int64_t n)
{
    const float *first = in[0], *second = in[1];
    float *to = out;
    const vf a0 = v_set1(*first), b0 = v_set1(*second), p0 = v_set1(l->p0);
    const bool once_a = l->once[0], once_b = l->once[1];
    switch (l->kind) {
        KN_ARITHMETIC_KINDS(BINARY_CASE)
    default:
        break;
    }
}

#ifdef KN_HAVE_MVEC
/* x^p; p holds one number. Roots of -0 and -inf are those of pow. */
KN_FORMULA v_power(vf x, vf p)
{
    const vf one = v_set1(1.0f), inf = v_set1(__builtin_inff());
    const float e = p[0];
    if (e == 0 || e == 1)
        return e == 0 ? one : x;
    if (e == 2 || e == -2)
        return e == 2 ? x * x : one / (x * x);
    if (e == 3 || e == -1)
        return e == 3 ? x * x * x : one / x;
    if (e == 0.5f || e == -0.5f) {
        const vf root = v_sqrt(v_sel(v_eq(x, -inf), inf, x + v_zero()));
        return e == 0.5f ? root : one / root;
    }
    return v_pow(x, p);
}
#define v_pow v_power
#endif

#define TAKE_X(get) const vf x = get(first);
#define UNARY_CASE(kind, name, function, reads, dtypes, domain, work, formula, gradient)           \
    CASE_##dtypes(LOOP_##work, KN_##kind, TAKE_X, formula)

static void unary_block(const loop *l, void *out, const void *const in[INPUTS], int64_t n)
{
    const float *first = in[0];
    float *to = out;
    const vf p0 = v_set1(l->p0), p1 = v_set1(l->p1);
    switch (l->kind) {
        KN_UNARY_KINDS(UNARY_CASE)
    default:
        break;
    }
}

/* d is dy; the second input x or y, whichever the kind reads. */
#define TAKE_DXY(get)                                                                              \
    const vf d = get(first), x = get(second), y = x;                                               \
    (void)y, (void)d;
#define GRAD_CASE(kind, name, function, reads, dtypes, domain, work, formula, gradient)            \
    CASE_##dtypes(LOOP_##work, KN_##kind, TAKE_DXY, gradient)

static void grad_block(const loop *l, void *out, const void *const in[INPUTS], int64_t n)
{
    const float *first = in[0], *second = in[1];
    float *to = out;
    const vf p0 = v_set1(l->p0), p1 = v_set1(l->p1);
    switch (l->kind) {
        KN_UNARY_KINDS(GRAD_CASE)
    default:
        break;
    }
}

/* ---- loops of bytes: the compiler makes vectors of them ------------------------------------- */

#define COMPARE_LOOP(kind, T, formula)                                                             \
    case kind: {                                                                                   \
        const T *first = in[0], *second = in[1];                                                   \
        for (int64_t i = 0; i < n; i++) {                                                          \
            const T a = first[i], b = second[i];                                                   \
            to[i] = formula;                                                                       \
        }                                                                                          \
        break;                                                                                     \
    }
#define COMPARE_NUMBERS(kind, formula) COMPARE_LOOP(kind, float, formula)
#define COMPARE_BOOLS(kind, formula)   COMPARE_LOOP(kind, uint8_t, formula)
#define COMPARE_CASE(kind, name, function, reads, dtypes, domain, work, formula)                   \
    COMPARE_##dtypes(KN_##kind, formula)

static void compare_block(const loop *l, void *out, const void *const in[INPUTS], int64_t n)
{
    uint8_t *to = out;
    switch (l->kind) {
        KN_COMPARISON_KINDS(COMPARE_CASE)
    default:
        break;
    }
}

static void not_block(const loop *l, void *out, const void *const in[INPUTS], int64_t n)
{
    const uint8_t *x = in[0];
    uint8_t *to = out;
    (void)l;
    for (int64_t i = 0; i < n; i++)
        to[i] = x[i] == 0;
}

/* ---- arrays ---------------------------------------------------------------------------------- */

static void loop_run(const vec_iter *it, char *const p[VEC_OPERANDS], int64_t n, const void *ctx)
{
    loop l = *(const loop *)ctx;
    const bool wide = l.dtype == KN_BF16 || l.dtype == KN_F16; /* inputs have to be widened */
    const bool rounds = wide && it->size[0] == 2;
    bool dense = !wide;
    float copied[INPUTS][BLOCK], widened[INPUTS][BLOCK], result[BLOCK];
    const void *in[INPUTS] = { NULL };
    for (int k = 0; k < l.inputs; k++) {
        l.once[k] = l.repeats && vec_iter_inner(it, 1 + k) == 0;
        dense = dense && (l.once[k] || vec_iter_inner(it, 1 + k) == 1);
    }
    for (int64_t i = 0, w; i < n; i += w) {
        w = dense ? n : v_min_i64(BLOCK, n - i);
        for (int k = 0; k < l.inputs; k++) {
            const int64_t step = vec_iter_inner(it, 1 + k), size = it->size[1 + k];
            const int64_t count = l.once[k] ? 1 : w;
            in[k] = vec_dense_run(p[1 + k] + i * step * size, step, size, count, copied[k]);
            if (wide)
                vec_convert(widened[k], KN_F32, in[k], l.dtype, count);
            in[k] = wide ? widened[k] : in[k];
        }
        char *to = p[0] + i * it->size[0];
        l.block(&l, rounds ? (void *)result : to, in, w);
        if (rounds)
            vec_convert(to, l.dtype, result, KN_F32, w);
    }
}

/* a: the result, then the inputs. work: of an element, as bytes of memory traffic. */
static kn_status loop_each(const loop *l, const kn_array *const a[], int64_t work)
{
    vec_iter it;
    vec_iter_make(&it, 1 + l->inputs, a);
    if (vec_iter_inner(&it, 0) != 1)
        return KN_DECLINED;
    vec_iter_run(&it, it.total * work, loop_run, l);
    return KN_DONE;
}

static bool has_loop(const kn_kind_row *row, kn_dtype t)
{
    if (row->dtypes == KN_BOOLS)
        return t == KN_BOOL;
    return vec_float(t) && (HAVE_LIBM || row->work != KN_LIBM);
}

/* Bytes of memory traffic that take about as long as one element of this kind computes. */
static int64_t weight_of(const kn_kind_row *row)
{
    return row->work != KN_LIGHT ? 16 : 4;
}

/* The kind whose loop computes a kind. */
static kn_unary loop_of(kn_unary kind, double p0)
{
    return kind == KN_POW && p0 == 2 ? KN_SQUARE : kind;
}

kn_status VEC_FN(vec_binary)(const void *args)
{
    const kn_binary_args *a = args;
    const size_t work = kn_dtype_size(a->dst.dtype) + 2 * kn_dtype_size(a->a.dtype);
    const bool compares = a->kind >= KN_EQ;
    const loop l = { compares ? compare_block : binary_block,
                     (int)a->kind,
                     2,
                     a->a.dtype,
                     .p0 = (float)a->p0,
                     .repeats = !compares };
    if (!has_loop(kn_binary_row(a->kind), a->a.dtype))
        return KN_DECLINED;
    return loop_each(&l, (const kn_array *const[]){ &a->dst, &a->a, &a->b }, (int64_t)work);
}

kn_status VEC_FN(vec_unary)(const void *args)
{
    const kn_unary_args *a = args;
    const kn_unary kind = loop_of(a->kind, a->p0);
    const kn_kind_row *row = kn_unary_row(kind);
    const loop l = { kind == KN_NOT ? not_block : unary_block,
                     (int)kind,
                     1,
                     a->src.dtype,
                     (float)a->p0,
                     (float)a->p1 };
    if (!has_loop(row, a->src.dtype))
        return KN_DECLINED;
    return loop_each(&l, (const kn_array *const[]){ &a->dst, &a->src }, 2 * weight_of(row));
}

kn_status VEC_FN(vec_unary_grad)(const void *args)
{
    const kn_unary_grad_args *a = args;
    const kn_array *in = kn_unary_grad_input(a);
    const kn_unary kind = loop_of(a->kind, a->p0);
    const kn_kind_row *row = kn_unary_row(kind);
    const loop l = { grad_block, (int)kind, 2, a->dx.dtype, (float)a->p0, (float)a->p1 };
    if (!has_loop(row, a->dx.dtype) || a->dy.dtype != a->dx.dtype || in->dtype != a->dx.dtype)
        return KN_DECLINED;
    return loop_each(&l, (const kn_array *const[]){ &a->dx, &a->dy, in }, 3 * weight_of(row));
}
