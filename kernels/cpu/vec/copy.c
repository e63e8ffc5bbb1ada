/* kernels/cpu/vec/copy.c: moving elements: copies and casts, fills, where. Runs of dense elements
 * go at the speed of memory, transposes by tiles. */
#include "kernels/cpu/reference.h"
#include "kernels/cpu/vec/iter.h"

/* ---- copies of one element size ------------------------------------------------------------- */

static void copy_run(const vec_iter *it, char *const p[VEC_OPERANDS], int64_t n, const void *ctx)
{
    const int64_t ds = vec_iter_inner(it, 0), ss = vec_iter_inner(it, 1), size = it->size[0];
    (void)ctx;
    if (ds != 1 || ss != 1)
        vec_copy_rows(p[0], 0, ds, p[1], 0, ss, size, n, 0, n);
    else if (p[0] != p[1])
        memcpy(p[0], p[1], (size_t)(n * size));
}

/* Planes of short runs. */
static void copy_plane(const vec_iter *it, char *const plane[VEC_OPERANDS], int64_t at, int64_t n,
                       vec_run_fn fn, const void *ctx)
{
    const int d = it->ndim - 1;
    (void)fn, (void)ctx;
    vec_copy_rows(plane[0], it->stride[0][d - 1], it->stride[0][d], plane[1], it->stride[1][d - 1],
                  it->stride[1][d], it->size[0], it->shape[d], at, n);
}

#define TILE 16

/* dst[r * dr + c] = src[r + c * sc] for r < rows <= TILE, all c < cols; both are floats where they
 * differ. */
#define TRANSPOSE(name, type)                                                                      \
    static void name(char *dst, int64_t dr, kn_dtype to, const char *src, int64_t sc,              \
                     kn_dtype from, int64_t rows, int64_t cols)                                    \
    {                                                                                              \
        const int64_t step = sc * (int64_t)kn_dtype_size(from);                                    \
        type tile[TILE][TILE], *restrict d = (type *)(void *)dst;                                  \
        for (int64_t c = 0; c < cols; c += TILE) {                                                 \
            const int64_t w = v_min_i64(TILE, cols - c);                                           \
            for (int64_t j = 0; j < w; j++) {                                                      \
                if (to == from)                                                                    \
                    memcpy(tile[j], src + (c + j) * step, (size_t)rows * sizeof(type));            \
                else                                                                               \
                    vec_convert(tile[j], to, src + (c + j) * step, from, rows);                    \
            }                                                                                      \
            for (int64_t r = 0; r < rows; r++)                                                     \
                for (int64_t j = 0; j < w; j++)                                                    \
                    d[r * dr + c + j] = tile[j][r];                                                \
        }                                                                                          \
    }
TRANSPOSE(transpose2, uint16_t)
TRANSPOSE(transpose4, uint32_t)

/* The dim along which the source is dense while the innermost one is not, or -1. */
static int transposed_dim(const vec_iter *it)
{
    if (vec_iter_inner(it, 0) != 1 || vec_iter_inner(it, 1) <= 1)
        return -1;
    if (it->size[0] != 4 && it->size[0] != 2)
        return -1;
    for (int i = 0; i < it->ndim - 1; i++)
        if (it->stride[1][i] == 1 && it->shape[i] >= 4)
            return i;
    return -1;
}

typedef struct transposition {
    const vec_iter *it;
    int row;
    kn_dtype to, from;
} transposition;

static int64_t strips_of(const vec_iter *it, int row)
{
    return (it->shape[row] + TILE - 1) / TILE;
}

/* Tasks are strips of TILE rows of one transposed plane, the other dims counted outside. */
static void copy_strips(const void *ctx, int64_t begin, int64_t end)
{
    const transposition *t = ctx;
    const vec_iter *it = t->it;
    const int row = t->row, inner = it->ndim - 1;
    const int64_t rows = it->shape[row], cols = it->shape[inner], strips = strips_of(it, row);
    for (int64_t task = begin; task < end; task++) {
        const int64_t r = task % strips * TILE;
        int64_t rest = task / strips, at = r * it->stride[0][row], from = r;
        for (int i = inner - 1; i >= 0; i--) {
            if (i == row)
                continue;
            at += rest % it->shape[i] * it->stride[0][i];
            from += rest % it->shape[i] * it->stride[1][i];
            rest /= it->shape[i];
        }
        const int64_t h = v_min_i64(TILE, rows - r);
        char *d = it->base[0] + at * it->size[0];
        const char *s = it->base[1] + from * it->size[1];
        (it->size[0] == 4 ? transpose4 : transpose2)(d, it->stride[0][row], t->to, s,
                                                     it->stride[1][inner], t->from, h, cols);
    }
}

static void copy_transposed(const vec_iter *it, int row, kn_dtype to, kn_dtype from)
{
    const int64_t planes = it->total / (it->shape[row] * it->shape[it->ndim - 1]);
    kn_each_range(kn_threads_for(2 * it->total * it->size[0]), planes * strips_of(it, row),
                  copy_strips, &(transposition){ it, row, to, from });
}

/* ---- casts ---------------------------------------------------------------------------------- */

#define CAST_BLOCK 256 /* strided elements, made dense first */

typedef struct cast_ctx {
    kn_dtype to, from;
} cast_ctx;

static void cast_run(const vec_iter *it, char *const p[VEC_OPERANDS], int64_t n, const void *ctx)
{
    const cast_ctx *c = ctx;
    const int64_t step = vec_iter_inner(it, 1), size = it->size[1];
    float dense[CAST_BLOCK], wide[CAST_BLOCK];
    if (step == 1 && vec_float(c->from)) {
        vec_convert(p[0], c->to, p[1], c->from, n);
        return;
    }
    for (int64_t i = 0; i < n; i += CAST_BLOCK) {
        const int64_t w = v_min_i64(CAST_BLOCK, n - i);
        const void *src = vec_dense_run(p[1] + i * step * size, step, size, w, dense);
        if (vec_float(c->from)) {
            vec_convert(p[0] + i * it->size[0], c->to, src, c->from, w);
            continue;
        }
        for (int64_t j = 0; j < w; j++)
            wide[j] = ((const uint8_t *)src)[j];
        vec_convert(p[0] + i * it->size[0], c->to, wide, KN_F32, w);
    }
}

kn_status VEC_FN(vec_copy)(const void *args)
{
    const kn_copy_args *a = args;
    const bool cast = a->dst.dtype != a->src.dtype;
    const bool bytes_of_numbers = a->src.dtype == KN_BOOL || a->src.dtype == KN_U8;
    if (cast && !(vec_float(a->dst.dtype) && (vec_float(a->src.dtype) || bytes_of_numbers)))
        return KN_DECLINED;
    vec_iter it;
    vec_iter_make(&it, 2, (const kn_array *const[]){ &a->dst, &a->src });
    if (it.total == 0)
        return KN_DONE;
    const int64_t bytes = it.total * (it.size[0] + it.size[1]);
    const int row = cast && bytes_of_numbers ? -1 : transposed_dim(&it);
    if (cast && vec_iter_inner(&it, 0) != 1)
        return KN_DECLINED;
    if (row >= 0)
        copy_transposed(&it, row, a->dst.dtype, a->src.dtype);
    else if (cast)
        vec_iter_run(&it, bytes, cast_run, &(cast_ctx){ a->dst.dtype, a->src.dtype });
    else {
        it.plane = vec_iter_short(&it) ? copy_plane : NULL;
        vec_iter_run(&it, bytes, copy_run, NULL);
    }
    return KN_DONE;
}

/* ---- fill ----------------------------------------------------------------------------------- */

static void zero_run(const vec_iter *it, char *const p[VEC_OPERANDS], int64_t n, const void *ctx)
{
    (void)ctx;
    memset(p[0], 0, (size_t)(n * it->size[0]));
}

/* A copy of one element, which stands everywhere in the source. */
kn_status VEC_FN(vec_fill)(const void *args)
{
    const kn_fill_args *a = args;
    kn_copy_args copy = { a->dst, a->dst };
    uint64_t element = 0;
    vec_iter it;
    if (a->step != 0)
        return KN_DECLINED;
    copy.src.data = &element;
    memset(copy.src.stride, 0, sizeof copy.src.stride);
    kn_ref_set(&copy.src, 0, a->value);
    vec_iter_make(&it, 1, (const kn_array *const[]){ &a->dst });
    if (element || vec_iter_inner(&it, 0) != 1)
        return VEC_FN(vec_copy)(&copy);
    vec_iter_run(&it, it.total * it.size[0], zero_run, NULL);
    return KN_DONE;
}

/* ---- where ---------------------------------------------------------------------------------- */

#define WHERE_BY(sc, sa, sb)                                                                       \
    for (int64_t i = 0; i < n; i++)                                                                \
    d[i] = c[i * (sc)] ? a[i * (sa)] : b[i * (sb)]

/* Loops apart where all is dense, or one value stands for all: the compiler vectorises them. */
#define WHERE_LOOP(type)                                                                           \
    do {                                                                                           \
        type *d = (type *)p[0];                                                                    \
        const type *a = (const type *)p[2], *b = (const type *)p[3];                               \
        if (sc == 1 && sa == 1 && sb == 1)                                                         \
            WHERE_BY(1, 1, 1);                                                                     \
        else if (sc == 1 && sa == 1 && sb == 0)                                                    \
            WHERE_BY(1, 1, 0);                                                                     \
        else if (sc == 1 && sa == 0 && sb == 1)                                                    \
            WHERE_BY(1, 0, 1);                                                                     \
        else                                                                                       \
            WHERE_BY(sc, sa, sb);                                                                  \
    } while (0)

static void where_run(const vec_iter *it, char *const p[VEC_OPERANDS], int64_t n, const void *ctx)
{
    (void)ctx;
    const uint8_t *c = (const uint8_t *)p[1];
    const int64_t sc = vec_iter_inner(it, 1), sa = vec_iter_inner(it, 2),
                  sb = vec_iter_inner(it, 3);
    switch (it->size[0]) {
    case 1:
        WHERE_LOOP(uint8_t);
        break;
    case 2:
        WHERE_LOOP(uint16_t);
        break;
    case 4:
        WHERE_LOOP(uint32_t);
        break;
    default:
        WHERE_LOOP(uint64_t);
    }
}

kn_status VEC_FN(vec_where)(const void *args)
{
    const kn_where_args *a = args;
    vec_iter it;
    vec_iter_make(&it, 4, (const kn_array *const[]){ &a->dst, &a->cond, &a->a, &a->b });
    if (vec_iter_inner(&it, 0) != 1)
        return KN_DECLINED;
    vec_iter_run(&it, it.total * (3 * it.size[0] + 1), where_run, NULL);
    return KN_DONE;
}
