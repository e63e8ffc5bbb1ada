/* kernels/cpu/vec/elementwise.c: binary operations. The loops are f32; bf16 and f16 pass through
 * blocks that stay in the first-level cache. */
#include "kernels/cpu/vec/iter.h"
#include "kernels/cpu/vec/words.h"

#define BLOCK 512 /* floats of a conversion buffer */

/* expr is a function of a and b; a step of 0 repeats the first value. */
#define BINARY_LOOP(expr)                                                                          \
    do {                                                                                           \
        int64_t i = 0;                                                                             \
        for (; i + KN_VW <= n; i += KN_VW) {                                                       \
            const vf a = sa ? v_load(at_a + i) : a0, b = sb ? v_load(at_b + i) : b0;               \
            v_store(dst + i, expr);                                                                \
        }                                                                                          \
        if (i < n) {                                                                               \
            const vf a = sa ? v_load_n(at_a + i, n - i) : a0;                                      \
            const vf b = sb ? v_load_n(at_b + i, n - i) : b0;                                      \
            v_store_n(dst + i, expr, n - i);                                                       \
        }                                                                                          \
    } while (0)

typedef struct binary_ctx {
    kn_binary kind;
    kn_dtype dtype; /* of a and b */
    float p0;
} binary_ctx;

/* A case for each kind but the rare ones. */
#define LOOP_LIGHT(kind, formula)                                                                  \
    case kind:                                                                                     \
        BINARY_LOOP(formula);                                                                      \
        break;
#define LOOP_LONG LOOP_LIGHT
#define LOOP_RARE(kind, formula)
#define BINARY_CASE(kind, name, function, reads, dtypes, domain, work, formula)                    \
    LOOP_##work(KN_##kind, formula)

static void binary_block(const binary_ctx *c, float *dst, const float *at_a, int64_t sa,
                         const float *at_b, int64_t sb, int64_t n)
{
    const vf a0 = v_set1(at_a[0]), b0 = v_set1(at_b[0]), p0 = v_set1(c->p0);
    switch (c->kind) {
        KN_ARITHMETIC_KINDS(BINARY_CASE)
    default:
        break;
    }
}

/* Loops over single numbers of type T, which the compiler makes vectors of. */
#define COMPARE_LOOP(kind, T, formula)                                                             \
    case kind:                                                                                     \
        for (int64_t i = 0; i < n; i++) {                                                          \
            const T a = at_a[i * sa], b = at_b[i * sb];                                            \
            dst[i] = formula;                                                                      \
        }                                                                                          \
        break;

#define COMPARE_NUMBERS(kind, formula) COMPARE_LOOP(kind, float, formula)
#define COMPARE_BOOLS(kind, formula)
#define COMPARE_CASE(kind, name, function, reads, dtypes, domain, work, formula)                   \
    COMPARE_##dtypes(KN_##kind, formula)

static void compare_block(kn_binary kind, uint8_t *dst, const float *at_a, int64_t sa,
                          const float *at_b, int64_t sb, int64_t n)
{
    switch (kind) {
        KN_COMPARISON_KINDS(COMPARE_CASE)
    default:
        break;
    }
}

#define LOGIC_NUMBERS(kind, formula)
#define LOGIC_BOOLS(kind, formula) COMPARE_LOOP(kind, bool, formula)
#define LOGIC_CASE(kind, name, function, reads, dtypes, domain, work, formula)                     \
    LOGIC_##dtypes(KN_##kind, formula)

static void logic_run(const vec_iter *it, char *const p[VEC_OPERANDS], int64_t n, const void *ctx)
{
    const int64_t sa = vec_iter_inner(it, 1), sb = vec_iter_inner(it, 2);
    const char *at_a = p[1], *at_b = p[2];
    char *dst = p[0];
    switch (((const binary_ctx *)ctx)->kind) {
        KN_COMPARISON_KINDS(LOGIC_CASE)
    default:
        break;
    }
}

static void binary_run(const vec_iter *it, char *const p[VEC_OPERANDS], int64_t n, const void *ctx)
{
    const binary_ctx *c = ctx;
    const int64_t step_a = vec_iter_inner(it, 1), step_b = vec_iter_inner(it, 2);
    const int64_t sa = step_a != 0, sb = step_b != 0, size = it->size[1];
    float x[BLOCK], y[BLOCK], strided[2][BLOCK];
    for (int64_t i = 0; i < n; i += BLOCK) {
        const int64_t w = v_min_i64(BLOCK, n - i);
        char *dst = p[0] + i * it->size[0];
        const void *pa = p[1] + step_a * i * size, *pb = p[2] + step_b * i * size;
        if (sa)
            pa = vec_dense_run(pa, step_a, size, w, strided[0]);
        if (sb)
            pb = vec_dense_run(pb, step_b, size, w, strided[1]);
        const float *a = pa, *b = pb;
        if (c->dtype != KN_F32) {
            vec_widen(c->dtype, pa, x, sa ? w : 1);
            vec_widen(c->dtype, pb, y, sb ? w : 1);
            a = x;
            b = y;
        }
        if (c->kind >= KN_EQ) {
            compare_block(c->kind, (uint8_t *)dst, a, sa, b, sb, w);
        } else if (c->dtype == KN_F32) {
            binary_block(c, (float *)dst, a, sa, b, sb, w);
        } else { /* the result may replace a's buffer, but not its broadcast first value */
            float *r = sa ? x : y;
            float scalar[2] = { a[0], b[0] };
            if (!sa && !sb)
                binary_block(c, x, &scalar[0], 0, &scalar[1], 0, w), r = x;
            else
                binary_block(c, r, sa ? x : &scalar[0], sa, sb ? y : &scalar[1], sb, w);
            vec_narrow(c->dtype, dst, r, w);
        }
    }
}

kn_status VEC_FN(vec_binary)(const void *args)
{
    const kn_binary_args *a = args;
    const kn_kind_row *row = kn_binary_row(a->kind);
    const bool logic = row->dtypes == KN_BOOLS;
    if (row->work >= VEC_RARE || !kn_binary_takes(a->kind, a->a.dtype, a->dst.dtype) ||
        !(logic || vec_float(a->a.dtype)) || a->a.dtype != a->b.dtype)
        return KN_DECLINED;
    vec_iter it;
    if (!vec_iter_make(&it, 3, (const kn_array *const[]){ &a->dst, &a->a, &a->b }))
        return KN_DECLINED;
    if (vec_iter_inner(&it, 0) != 1)
        return KN_DECLINED;
    vec_iter_run(&it, it.total * (it.size[0] + 2 * it.size[1]), logic ? logic_run : binary_run,
                 &(binary_ctx){ a->kind, a->a.dtype, (float)a->p0 });
    return KN_DONE;
}
