/* kernels/cpu/vec/elementwise.c: binary operations. The loops are f32; bf16 and f16 pass through
 * blocks that stay in the first-level cache. */
#include "kernels/cpu/vec/iter.h"

#define BLOCK 512 /* floats of a conversion buffer */

/* ---- binary --------------------------------------------------------------------------------- */

/* expr is a function of x and y; a step of 0 repeats the first value. */
#define BINARY_LOOP(expr)                                                                          \
    do {                                                                                           \
        int64_t i = 0;                                                                             \
        for (; i + KN_VW <= n; i += KN_VW) {                                                       \
            const vf x = sa ? v_load(a + i) : a0, y = sb ? v_load(b + i) : b0;                     \
            v_store(dst + i, expr);                                                                \
        }                                                                                          \
        if (i < n) {                                                                               \
            const vf x = sa ? v_load_n(a + i, n - i) : a0, y = sb ? v_load_n(b + i, n - i) : b0;   \
            v_store_n(dst + i, expr, n - i);                                                       \
        }                                                                                          \
    } while (0)

typedef struct binary_ctx {
    kn_binary kind;
    kn_dtype dtype; /* of a and b */
    float p0;
} binary_ctx;

static void binary_block(const binary_ctx *c, float *dst, const float *a, int64_t sa,
                         const float *b, int64_t sb, int64_t n)
{
    const vf a0 = v_set1(a[0]), b0 = v_set1(b[0]), p0 = v_set1(c->p0), rest = v_set1(1 - c->p0);
    switch (c->kind) {
    case KN_ADD:
        BINARY_LOOP(x + y);
        break;
    case KN_SUB:
        BINARY_LOOP(x - y);
        break;
    case KN_MUL:
        BINARY_LOOP(x * y);
        break;
    case KN_DIV:
        BINARY_LOOP(x / y);
        break;
    case KN_MAXIMUM: /* NaN on either side passes */
        BINARY_LOOP(v_sel(v_ne(x, x), x, v_max(x, y)));
        break;
    case KN_MINIMUM:
        BINARY_LOOP(v_sel(v_ne(x, x), x, v_min(x, y)));
        break;
    case KN_ADD_SCALED:
        BINARY_LOOP(v_fma(p0, y, x));
        break;
    case KN_LERP: /* from the nearer end, so that both ends are exact */
        if (c->p0 < 0.5f)
            BINARY_LOOP(v_fma(p0, y - x, x));
        else
            BINARY_LOOP(v_fnma(rest, y - x, y));
        break;
    default:
        break;
    }
}

#define COMPARE_LOOP(op)                                                                           \
    for (int64_t i = 0; i < n; i++)                                                                \
    dst[i] = a[i * sa] op b[i * sb]

static void compare_block(kn_binary kind, uint8_t *dst, const float *a, int64_t sa, const float *b,
                          int64_t sb, int64_t n)
{
    switch (kind) {
    case KN_EQ:
        COMPARE_LOOP(==);
        break;
    case KN_NE:
        COMPARE_LOOP(!=);
        break;
    case KN_LT:
        COMPARE_LOOP(<);
        break;
    case KN_LE:
        COMPARE_LOOP(<=);
        break;
    case KN_GT:
        COMPARE_LOOP(>);
        break;
    case KN_GE:
        COMPARE_LOOP(>=);
        break;
    default:
        break;
    }
}

#define LOGIC_LOOP(expr)                                                                           \
    for (int64_t i = 0; i < n; i++) {                                                              \
        const bool x = a[i * sa], y = b[i * sb];                                                   \
        dst[i] = expr;                                                                             \
    }

static void logic_run(const vec_iter *it, char *const p[VEC_OPERANDS], int64_t n, const void *ctx)
{
    const int64_t sa = vec_iter_inner(it, 1), sb = vec_iter_inner(it, 2);
    const char *a = p[1], *b = p[2];
    char *dst = p[0];
    switch (((const binary_ctx *)ctx)->kind) {
    case KN_AND:
        LOGIC_LOOP(x & y);
        break;
    case KN_OR:
        LOGIC_LOOP(x | y);
        break;
    default: /* KN_XOR */
        LOGIC_LOOP(x ^ y);
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

/* The kinds of floats. */
static bool binary_known(kn_binary kind)
{
    switch (kind) {
    case KN_ADD:
    case KN_SUB:
    case KN_MUL:
    case KN_DIV:
    case KN_MAXIMUM:
    case KN_MINIMUM:
    case KN_ADD_SCALED:
    case KN_LERP:
    case KN_EQ:
    case KN_NE:
    case KN_LT:
    case KN_LE:
    case KN_GT:
    case KN_GE:
        return true;
    case KN_POWER:
    case KN_AND:
    case KN_OR:
    case KN_XOR:
    case KN_BINARY_COUNT:
        break;
    }
    return false;
}

kn_status vec_binary(const void *args)
{
    const kn_binary_args *a = args;
    const bool logic = a->kind == KN_AND || a->kind == KN_OR || a->kind == KN_XOR;
    const bool known =
        logic ? a->a.dtype == KN_BOOL : binary_known(a->kind) && vec_float(a->a.dtype);
    if (!known || a->a.dtype != a->b.dtype)
        return KN_DECLINED;
    if (a->dst.dtype != (a->kind >= KN_EQ ? KN_BOOL : a->a.dtype))
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
