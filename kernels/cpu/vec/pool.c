/* kernels/cpu/vec/pool.c: pools and their gradients. Channels that lie side by side are the lanes
 * of a vector; else elements go one by one. A gradient is added up in f32 for the planes of some
 * channels at a time: in ascending order of the windows, as each element would meet them. */
#include "kernels/cpu/vec/iter.h"
#include "kernels/windows.h"

enum { LANES = KN_VW, TILE = 16 }; /* channels at a time of a gradient */

typedef struct pools {
    kn_array x, y, index; /* x or dx; y or dy; index.data NULL: none */
    kn_window_dim rows;
    kn_pool kind;
    bool last;               /* channels side by side in all arrays */
    kn_window_span *columns; /* of each column of y */
} pools;

VEC_INLINE char *element(const kn_array *a, int64_t size, int64_t n, int64_t c, int64_t h,
                         int64_t w)
{
    return (char *)a->data +
           (n * a->stride[0] + c * a->stride[1] + h * a->stride[2] + w * a->stride[3]) * size;
}

VEC_INLINE int64_t size_of(kn_dtype t)
{
    return t == KN_F32 ? 4 : 2;
}

/* ---- forward: lanes channels from c on, one window ------------------------------------------- */

VEC_INLINE void put_index(int32_t *to, vi v, int64_t lanes)
{
    int32_t t[KN_VW];
    memcpy(t, &v, sizeof t);
    memcpy(to, t, (size_t)lanes * sizeof *t);
}

VEC_INLINE void pool_max(const pools *p, int64_t n, int64_t c, int64_t i, int64_t j,
                         kn_window_span r, kn_window_span s, int64_t lanes, kn_dtype t)
{
    vf best = v_set1(-__builtin_inff());
    vi at = v_set1_i(-1);
    bool first = true;
    for (int64_t h = r.begin; h < r.end; h += r.step)
        for (int64_t w = s.begin; w < s.end; w += s.step) {
            const vf v = v_get_n(t, element(&p->x, size_of(t), n, c, h, w), 0, lanes);
            const vi here = v_set1_i((int32_t)(h * p->x.shape[3] + w));
            const vm more = v_gt(v, best), nan = v_ne(v, v) & v_eq(best, best);
            best = first ? v : v_sel(more | nan, v, best);
            at = first ? here : v_sel_i(more | nan, here, at);
            first = false;
        }
    v_put_n(t, element(&p->y, size_of(t), n, c, i, j), 0, best, lanes);
    if (p->index.data)
        put_index((int32_t *)(void *)element(&p->index, 4, n, c, i, j), at, lanes);
}

VEC_INLINE void pool_avg(const pools *p, int64_t n, int64_t c, int64_t i, int64_t j,
                         kn_window_span r, kn_window_span s, int64_t lanes, kn_dtype t)
{
    vf sum = v_zero();
    for (int64_t h = r.begin; h < r.end; h++)
        for (int64_t w = s.begin; w < s.end; w++)
            sum += v_get_n(t, element(&p->x, size_of(t), n, c, h, w), 0, lanes);
    const bool some = r.begin < r.end && s.begin < s.end;
    const vf count = v_set1(some ? (float)(r.divide * s.divide) : 1.0f);
    v_put_n(t, element(&p->y, size_of(t), n, c, i, j), 0, sum / count, lanes);
}

/* The same for one channel, without unused lanes. */
VEC_INLINE float scalar_get(kn_dtype t, const void *p)
{
    return t == KN_F32    ? *(const float *)p
           : t == KN_BF16 ? kn_bf16_to_f32(*(const uint16_t *)p)
                          : kn_f16_to_f32(*(const uint16_t *)p);
}

VEC_INLINE void scalar_put(kn_dtype t, void *p, float v)
{
    if (t == KN_F32)
        *(float *)p = v;
    else
        *(uint16_t *)p = t == KN_BF16 ? kn_f32_to_bf16(v) : kn_f32_to_f16(v);
}

VEC_INLINE void pool_one(const pools *p, int64_t n, int64_t c, int64_t i, int64_t j,
                         kn_window_span r, kn_window_span s, kn_dtype t)
{
    const bool max = p->kind == KN_POOL_MAX;
    const char *x = element(&p->x, size_of(t), n, c, 0, 0);
    const int64_t down = p->x.stride[2] * size_of(t), right = p->x.stride[3] * size_of(t);
    float best = max ? -__builtin_inff() : 0.0f;
    int32_t at = -1;
    for (int64_t h = r.begin; h < r.end; h += r.step)
        for (int64_t w = s.begin; w < s.end; w += s.step) {
            const float v = scalar_get(t, x + h * down + w * right);
            const int32_t here = (int32_t)(h * p->x.shape[3] + w);
            const int take = (at < 0) | (v > best) | ((v != v) & (best == best)); /* no branch */
            best = max ? (take ? v : best) : best + v;
            at = take ? here : at;
        }
    if (!max && r.begin < r.end && s.begin < s.end)
        best /= (float)(r.divide * s.divide);
    scalar_put(t, element(&p->y, size_of(t), n, c, i, j), best);
    if (max && p->index.data)
        *(int32_t *)(void *)element(&p->index, 4, n, c, i, j) = at;
}

/* Row i of sample n: all its windows and channels. */
VEC_INLINE void pool_row(const pools *p, int64_t n, int64_t i, kn_dtype t)
{
    const int64_t C = p->x.shape[1], Q = p->y.shape[3];
    const kn_window_span r = kn_window_span_of(&p->rows, i);
    for (int64_t j = 0; p->last && j < Q; j++) {
        const kn_window_span s = p->columns[j];
        for (int64_t c = 0; c < C; c += LANES) {
            const int64_t lanes = v_min_i64(C - c, LANES);
            if (p->kind == KN_POOL_MAX)
                pool_max(p, n, c, i, j, r, s, lanes, t);
            else
                pool_avg(p, n, c, i, j, r, s, lanes, t);
        }
    }
    for (int64_t c = 0; !p->last && c < C; c++)
        for (int64_t j = 0; j < Q; j++)
            pool_one(p, n, c, i, j, r, p->columns[j], t);
}

static void pool_rows(const void *ctx, int64_t begin, int64_t end)
{
    const pools *p = ctx;
    const int64_t P = p->y.shape[2];
    for (int64_t i = begin; i < end; i++)
        VEC_BY_DTYPE(p->x.dtype, pool_row, p, i / P, i % P);
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Channels [c, c + k) of sample n: each window adds its share to sum[H W][k]. */
VEC_INLINE void grad_tile(const pools *p, int64_t n, int64_t c, int64_t k, float *sum, kn_dtype t)
{
    const int64_t H = p->x.shape[2], W = p->x.shape[3], P = p->y.shape[2], Q = p->y.shape[3];
    memset(sum, 0, (size_t)(H * W * k) * sizeof *sum);
    for (int64_t i = 0; i < P; i++)
        for (int64_t j = 0; j < Q; j++) {
            for (int64_t l = 0; l < k && p->kind == KN_POOL_MAX; l++) {
                const int32_t at = *(int32_t *)(void *)element(&p->index, 4, n, c + l, i, j);
                if (at >= 0 && at < H * W)
                    sum[at * k + l] += scalar_get(t, element(&p->y, size_of(t), n, c + l, i, j));
            }
            if (p->kind == KN_POOL_MAX)
                continue;
            const kn_window_span r = kn_window_span_of(&p->rows, i), s = p->columns[j];
            float each[TILE];
            for (int64_t l = 0; l < k; l++)
                each[l] = scalar_get(t, element(&p->y, size_of(t), n, c + l, i, j)) /
                          (float)(r.divide * s.divide);
            for (int64_t h = r.begin; h < r.end; h++)
                for (int64_t w = s.begin; w < s.end; w++)
                    for (int64_t l = 0; l < k; l++)
                        sum[(h * W + w) * k + l] += each[l];
        }
    for (int64_t h = 0; h < H; h++)
        for (int64_t w = 0; w < W; w++)
            for (int64_t l = 0; l < k; l++)
                scalar_put(t, element(&p->x, size_of(t), n, c + l, h, w), sum[(h * W + w) * k + l]);
}

/* The same of one channel, whose elements lie in rows. */
VEC_INLINE void grad_plane(const pools *p, int64_t n, int64_t c, float *sum, kn_dtype t)
{
    const int64_t H = p->x.shape[2], W = p->x.shape[3], P = p->y.shape[2], Q = p->y.shape[3];
    const bool max = p->kind == KN_POOL_MAX;
    memset(sum, 0, (size_t)(H * W) * sizeof *sum);
    for (int64_t i = 0; i < P; i++) {
        const char *dy = element(&p->y, size_of(t), n, c, i, 0);
        const int32_t *at = (int32_t *)(void *)(max ? element(&p->index, 4, n, c, i, 0) : NULL);
        const kn_window_span r = kn_window_span_of(&p->rows, i);
        for (int64_t j = 0; j < Q; j++) {
            const float g = scalar_get(t, dy + j * p->y.stride[3] * size_of(t));
            const kn_window_span s = p->columns[j];
            if (max) {
                const int32_t to = at[j * p->index.stride[3]];
                if (to >= 0 && to < H * W)
                    sum[to] += g;
                continue;
            }
            const float each = g / (float)(r.divide * s.divide);
            for (int64_t h = r.begin; h < r.end; h++)
                for (int64_t w = s.begin; w < s.end; w++)
                    sum[h * W + w] += each;
        }
    }
    for (int64_t h = 0; h < H; h++)
        vec_cast(element(&p->x, size_of(t), n, c, h, 0), t, sum + h * W, W, KN_F32);
}

typedef struct grad_call {
    const pools *p;
    int64_t tile; /* channels */
    float *room;
    int shares;
} grad_call;

static void grad_share(const void *ctx, int64_t share)
{
    const grad_call *g = ctx;
    const pools *p = g->p;
    const int64_t C = p->x.shape[1], across = (C + g->tile - 1) / g->tile;
    float *room = g->room + share * p->x.shape[2] * p->x.shape[3] * g->tile;
    for (int64_t i = share; i < p->x.shape[0] * across; i += g->shares) {
        const int64_t c = i % across * g->tile;
        if (g->tile == 1 && p->x.stride[3] == 1)
            VEC_BY_DTYPE(p->x.dtype, grad_plane, p, i / across, c, room);
        else
            VEC_BY_DTYPE(p->x.dtype, grad_tile, p, i / across, c, v_min_i64(g->tile, C - c), room);
    }
}

/* ---- the entries ----------------------------------------------------------------------------- */

static bool pools_ok(pools *p, const kn_window *w)
{
    const kn_array *x = &p->x, *y = &p->y, *index = &p->index;
    if (!vec_float(x->dtype) || y->dtype != x->dtype || kn_array_numel(x) == 0 ||
        kn_array_numel(y) == 0)
        return false;
    for (int d = 0; d < 2 && !w->adaptive; d++)
        if (p->kind == KN_POOL_AVG && w->dilation[d] != 1)
            return false;
    p->rows = kn_window_dim_of(w, 0, x, y);
    p->last = x->shape[1] > 1 && x->stride[1] == 1 && y->stride[1] == 1 &&
              (!index->data || index->stride[1] == 1);
    return true;
}

/* Spans of the columns, and bytes of other room after them, which is returned. */
static void *room_take(pools *p, const kn_window *w, size_t *bytes)
{
    const kn_window_dim columns = kn_window_dim_of(w, 1, &p->x, &p->y);
    const int64_t Q = p->y.shape[3];
    *bytes += (size_t)Q * sizeof *p->columns;
    p->columns = vec_scratch(*bytes);
    for (int64_t j = 0; p->columns && j < Q; j++)
        p->columns[j] = kn_window_span_of(&columns, j);
    return p->columns ? p->columns + Q : NULL;
}

kn_status VEC_FN(vec_pool)(const void *args)
{
    const kn_pool_args *a = args;
    pools p = { .x = a->x, .y = a->y, .index = a->index, .kind = a->kind };
    size_t bytes = 0;
    if (!pools_ok(&p, &a->window))
        return KN_DECLINED;
    if (!room_take(&p, &a->window, &bytes))
        return KN_FAILED;
    kn_each_range(kn_threads_for(kn_array_numel(&p.x) * 8), p.y.shape[0] * p.y.shape[2], pool_rows,
                  &p);
    vec_scratch_end(p.columns, bytes);
    return KN_DONE;
}

kn_status VEC_FN(vec_pool_grad)(const void *args)
{
    const kn_pool_grad_args *a = args;
    pools p = { .x = a->dx, .y = a->dy, .index = a->index, .kind = a->kind };
    if (!pools_ok(&p, &a->window) || (p.kind == KN_POOL_MAX && !p.index.data))
        return KN_DECLINED;
    const int64_t tile = p.last ? TILE : 1, C = p.x.shape[1];
    const int64_t tiles = p.x.shape[0] * ((C + tile - 1) / tile);
    const int threads = (int)v_min_i64(kn_threads_for(kn_array_numel(&p.x) * 8), tiles);
    size_t bytes = (size_t)(p.x.shape[2] * p.x.shape[3] * tile * threads) * sizeof(float);
    float *room = room_take(&p, &a->window, &bytes);
    if (!room)
        return KN_FAILED;
    kn_each_part(threads, grad_share, &(grad_call){ &p, tile, room, threads });
    vec_scratch_end(p.columns, bytes);
    return KN_DONE;
}
