/* kernels/cpu/vec/pool.c: pools and their gradients. Channels that lie side by side are the lanes
 * of a vector, and an element's gradient is a sum over the windows that have it. Else elements go
 * one by one, and a gradient is added up in f32 for a plane at a time. Both add in ascending order
 * of the windows. */
#include "kernels/cpu/vec/iter.h"
#include "kernels/windows.h"

enum { LANES = KN_VW, MANY = 49 };

/* Windows [from, to) that may have a row or a column of x. */
typedef struct reach {
    int64_t from, to;
} reach;

typedef struct pools {
    kn_array x, y, index; /* x or dx; y or dy; index.data NULL: none */
    kn_pool kind;
    bool last;                      /* channels side by side in all arrays */
    kn_window_span *rows, *columns; /* of y */
    reach *down, *right;            /* of the rows and columns of x */
    float *room;                    /* of a gradient of planes: one a part */
    int parts;
} pools;

VEC_INLINE char *element(const kn_array *a, int64_t size, int64_t n, int64_t c, int64_t h,
                         int64_t w)
{
    return (char *)a->data +
           (n * a->stride[0] + c * a->stride[1] + h * a->stride[2] + w * a->stride[3]) * size;
}

/* ---- forward: lanes channels from c on, one window ------------------------------------------- */

VEC_INLINE void pool_max(const pools *p, int64_t n, int64_t c, int64_t i, int64_t j,
                         kn_window_span r, kn_window_span s, int64_t lanes, kn_dtype t)
{
    vf best = v_set1(-__builtin_inff());
    vi at = v_set1_i(-1);
    bool first = true;
    for (int64_t h = r.begin; h < r.end; h += r.step)
        for (int64_t w = s.begin; w < s.end; w += s.step) {
            const vf v = v_get_n(t, element(&p->x, v_size(t), n, c, h, w), 0, lanes);
            const vi here = v_set1_i((int32_t)(h * p->x.shape[3] + w));
            const vm more = v_gt(v, best), nan = v_ne(v, v) & v_eq(best, best);
            best = first ? v : v_sel(more | nan, v, best);
            at = first ? here : v_sel_i(more | nan, here, at);
            first = false;
        }
    v_put_n(t, element(&p->y, v_size(t), n, c, i, j), 0, best, lanes);
    if (p->index.data)
        v_put_n(KN_F32, element(&p->index, 4, n, c, i, j), 0, (vf)at, lanes);
}

VEC_INLINE void pool_avg(const pools *p, int64_t n, int64_t c, int64_t i, int64_t j,
                         kn_window_span r, kn_window_span s, int64_t lanes, kn_dtype t)
{
    vf sum = v_zero();
    for (int64_t h = r.begin; h < r.end; h++)
        for (int64_t w = s.begin; w < s.end; w++)
            sum += v_get_n(t, element(&p->x, v_size(t), n, c, h, w), 0, lanes);
    const bool some = r.begin < r.end && s.begin < s.end;
    const vf count = v_set1(some ? (float)(r.divide * s.divide) : 1.0f);
    v_put_n(t, element(&p->y, v_size(t), n, c, i, j), 0, sum / count, lanes);
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
    const char *x = element(&p->x, v_size(t), n, c, 0, 0);
    const int64_t down = p->x.stride[2] * v_size(t), right = p->x.stride[3] * v_size(t);
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
    scalar_put(t, element(&p->y, v_size(t), n, c, i, j), best);
    if (max && p->index.data)
        *(int32_t *)(void *)element(&p->index, 4, n, c, i, j) = at;
}

/* Row i of sample n: all its windows and channels. */
VEC_INLINE void pool_row(const pools *p, int64_t n, int64_t i, kn_dtype t)
{
    const int64_t C = p->x.shape[1], Q = p->y.shape[3];
    const kn_window_span r = p->rows[i];
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

/* How many positions a window counts for if it has element h of a dim, else 0. */
VEC_INLINE int64_t share_of(const kn_window_span *s, int64_t h)
{
    return h >= s->begin && h < s->end ? s->divide : 0;
}

/* dx of `lanes` channels from c on at (h, w). */
VEC_INLINE vf grad_lanes(const pools *p, int64_t n, int64_t c, int64_t lanes, int64_t h, int64_t w,
                         kn_dtype t)
{
    const vi here = v_set1_i((int32_t)(h * p->x.shape[3] + w));
    const reach down = p->down[h], right = p->right[w];
    vf sum = v_zero();
    for (int64_t i = down.from; i < down.to; i++) {
        const char *dy = element(&p->y, v_size(t), n, c, i, right.from),
                   *index =
                       p->kind == KN_POOL_MAX ? element(&p->index, 4, n, c, i, right.from) : dy;
        for (int64_t j = right.from; j < right.to; j++) {
            const vf g = v_get_n(t, dy, 0, lanes);
            dy += p->y.stride[3] * v_size(t);
            if (p->kind == KN_POOL_MAX) {
                sum = v_sel(v_eq_i((vi)v_get_n(KN_F32, index, 0, lanes), here), sum + g, sum);
                index += p->index.stride[3] * 4;
                continue;
            }
            const int64_t each = share_of(&p->rows[i], h) * share_of(&p->columns[j], w);
            sum = each ? sum + g / v_set1((float)each) : sum;
        }
    }
    return sum;
}

/* Row h of sample n of dx. */
VEC_INLINE void grad_row(const pools *p, int64_t n, int64_t h, kn_dtype t)
{
    const int64_t C = p->x.shape[1];
    for (int64_t w = 0; w < p->x.shape[3]; w++) {
        char *dx = element(&p->x, v_size(t), n, 0, h, w);
        int64_t c = 0;
        for (; c + LANES <= C; c += LANES)
            v_put(t, dx, c, grad_lanes(p, n, c, LANES, h, w, t));
        if (c < C)
            v_put_n(t, dx, c, grad_lanes(p, n, c, C - c, h, w, t), C - c);
    }
}

static void grad_rows(const void *ctx, int64_t begin, int64_t end)
{
    const pools *p = ctx;
    const int64_t H = p->x.shape[2];
    for (int64_t i = begin; i < end; i++)
        VEC_BY_DTYPE(p->x.dtype, grad_row, p, i / H, i % H);
}

/* Channel c of sample n: each window adds its share to sum[H W]. */
VEC_INLINE void grad_plane(const pools *p, int64_t n, int64_t c, float *sum, kn_dtype t)
{
    const int64_t H = p->x.shape[2], W = p->x.shape[3], P = p->y.shape[2], Q = p->y.shape[3];
    const bool max = p->kind == KN_POOL_MAX;
    memset(sum, 0, (size_t)(H * W) * sizeof *sum);
    for (int64_t i = 0; i < P; i++) {
        const char *dy = element(&p->y, v_size(t), n, c, i, 0);
        const int32_t *at = (int32_t *)(void *)(max ? element(&p->index, 4, n, c, i, 0) : NULL);
        const kn_window_span r = p->rows[i];
        for (int64_t j = 0; j < Q; j++) {
            const float g = scalar_get(t, dy + j * p->y.stride[3] * v_size(t));
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
    for (int64_t h = 0; h < H; h++) {
        if (p->x.stride[3] == 1)
            vec_cast(element(&p->x, v_size(t), n, c, h, 0), t, sum + h * W, W, KN_F32);
        for (int64_t w = 0; w < W && p->x.stride[3] != 1; w++)
            scalar_put(t, element(&p->x, v_size(t), n, c, h, w), sum[h * W + w]);
    }
}

static void grad_planes(const void *ctx, int64_t part)
{
    const pools *p = ctx;
    const int64_t C = p->x.shape[1];
    float *room = p->room + part * p->x.shape[2] * p->x.shape[3];
    for (int64_t i = part; i < p->x.shape[0] * C; i += p->parts)
        VEC_BY_DTYPE(p->x.dtype, grad_plane, p, i / C, i % C, room);
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
    p->last = x->shape[1] > 1 && x->stride[1] == 1 && y->stride[1] == 1 &&
              (!index->data || index->stride[1] == 1);
    return true;
}

static void windows_of(const kn_window *w, const pools *p, int d, kn_window_span *span, reach *to)
{
    const kn_window_dim dim = kn_window_dim_of(w, d, &p->x, &p->y);
    for (int64_t i = 0; i < dim.made; i++)
        span[i] = kn_window_span_of(&dim, i);
    for (int64_t i = 0; i < dim.size; i++)
        kn_windows_of(&dim, i, &to[i].from, &to[i].to);
}

/* Scratch of *bytes, which become more: room, and the windows. */
static bool room_take(pools *p, const kn_window *w, size_t *bytes)
{
    const int64_t H = p->x.shape[2], W = p->x.shape[3], P = p->y.shape[2], Q = p->y.shape[3];
    *bytes += (size_t)(P + Q) * sizeof *p->rows + (size_t)(H + W) * sizeof *p->down;
    p->rows = vec_scratch(*bytes);
    if (!p->rows)
        return false;
    p->columns = p->rows + P;
    p->down = (reach *)(void *)(p->columns + Q);
    p->right = p->down + H;
    p->room = (float *)(void *)(p->right + W);
    windows_of(w, p, 0, p->rows, p->down);
    windows_of(w, p, 1, p->columns, p->right);
    return true;
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
    vec_scratch_end(p.rows, bytes);
    return KN_DONE;
}

/* How many windows have an element. */
static int64_t meets(const kn_window *w)
{
    int64_t n = 1;
    for (int d = 0; d < 2 && !w->adaptive; d++)
        n *= (w->kernel[d] + w->stride[d] - 1) / w->stride[d];
    return n;
}

kn_status VEC_FN(vec_pool_grad)(const void *args)
{
    const kn_pool_grad_args *a = args;
    pools p = { .x = a->dx, .y = a->dy, .index = a->index, .kind = a->kind };
    if (!pools_ok(&p, &a->window) || (p.kind == KN_POOL_MAX && !p.index.data))
        return KN_DECLINED;
    if (p.kind == KN_POOL_MAX && meets(&a->window) > MANY)
        p.last = false; /* each window would be read for each of its elements */
    const int threads = kn_threads_for(kn_array_numel(&p.x) * 8);
    const int64_t H = p.x.shape[2], planes = p.x.shape[0] * p.x.shape[1];
    p.parts = p.last ? 0 : (int)v_min_i64(threads, planes);
    size_t bytes = (size_t)(H * p.x.shape[3] * p.parts) * sizeof(float);
    if (!room_take(&p, &a->window, &bytes))
        return KN_FAILED;
    if (p.last)
        kn_each_range(threads, p.x.shape[0] * H, grad_rows, &p);
    else
        kn_each_part(p.parts, grad_planes, &p);
    vec_scratch_end(p.rows, bytes);
    return KN_DONE;
}
