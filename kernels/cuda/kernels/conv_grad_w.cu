/* kernels/cuda/kernels/conv_grad_w.cu: the gradient of a convolution by its weights, for cases that
 * cuDNN doesn't take.
 *
 * The product of dy [channels, pixels] and a matrix [pixels, taps] gathered from x, with few rows
 * and columns and very many pixels: these are dealt to parts, whose sums are added in their order,
 * in f64. How many parts depends on the shape alone. A block makes a tile of one part, as in
 * conv.cu; groups of few channels would leave most of it empty: there threads share the pixels of
 * an element.
 *
 * Floor: as of conv.cu. */
#include "kernels/cuda/kernels/conv.cuh"

#define THREADS 256  /* of a block */
#define BLOCKS  1024 /* as many as keep a GPU busy */

template <typename T> struct grad_w_call {
    typedef typename kn_compute<T>::type A;
    const T *dy, *x;
    A *partial; /* [parts][O][taps] */
    conv_dim d[2];
    kn_image sy, sx;
    int64_t pixels, from, to, taps, groups; /* from, to: channels of a group of x and dy */
    int64_t parts, each;                    /* pixels of a part */
    int64_t tiles;                          /* of taps */
    int lanes;                              /* of threads side by side, for elements */
};

/* A pixel of dy, and its partner in x. */
struct grad_w_row {
    int64_t y, x;
    int h, w;
};

struct grad_w_column {
    int64_t c;
    int h, w;
};

template <typename T>
static __device__ inline grad_w_row grad_w_row_at(const grad_w_call<T> &c, int64_t i)
{
    conv_pixel p = conv_pixel_at(c.d, i);
    return { p.n * c.sy.n + p.h * c.sy.h + p.w * c.sy.w, p.n * c.sx.n,
             p.h * c.d[0].mul + c.d[0].add, p.w * c.d[1].mul + c.d[1].add };
}

template <typename T>
static __device__ inline grad_w_column grad_w_column_at(const grad_w_call<T> &c, int64_t k)
{
    conv_tap t = conv_tap_at(c.d, c.from, k);
    return { t.c * c.sx.c, t.r * c.d[0].step, t.s * c.d[1].step };
}

template <typename T>
static __device__ inline typename kn_compute<T>::type
grad_w_read(const grad_w_call<T> &c, const T *x, const grad_w_row &p, const grad_w_column &t)
{
    return conv_read(c.d, c.sx, x + p.x + t.c, p.h + t.h, p.w + t.w);
}

/* ---- tiles ----------------------------------------------------------------------------------- */

template <typename T>
KN_KERNEL_RESIDENT(THREADS, sizeof(T) == 8 ? 1 : 2, grad_w_tile_kernel, grad_w_call<T> c)
{
    typedef typename kn_compute<T>::type A;
    KN_SHARED A left[DEEP][TILE + 1], right[DEEP][TILE + 1];
    KN_SHARED grad_w_row row[DEEP];
    KN_SHARED grad_w_column column[TILE];
    int id = (int)threadIdx.x, tx = id % (TILE / EACH), ty = id / (TILE / EACH);
    int64_t o0 = blockIdx.x / c.tiles * TILE, n0 = blockIdx.x % c.tiles * TILE;
    int64_t group = blockIdx.y, part = blockIdx.z, end = (part + 1) * c.each;
    const T *dy = c.dy + group * c.to * c.sy.c, *x = c.x + group * c.from * c.sx.c;
    bool along_y = c.sy.c != 1, along_x = c.sx.c != 1; /* pixels are neighbours in memory */
    A sum[EACH][EACH] = {};
    end = end < c.pixels ? end : c.pixels;
    if (id < TILE)
        column[id] = grad_w_column_at(c, n0 + id < c.taps ? n0 + id : c.taps - 1);
    for (int64_t k0 = part * c.each; k0 < end; k0 += DEEP) {
        if (id < DEEP)
            row[id] = grad_w_row_at(c, k0 + id < end ? k0 + id : end - 1);
        __syncthreads();
        for (int e = id; e < TILE * DEEP; e += (int)blockDim.x) {
            int k = along_y ? e % DEEP : e / TILE, i = along_y ? e / DEEP : e % TILE;
            bool live = k0 + k < end && o0 + i < c.to;
            left[k][i] = live ? (A)kn_get(dy + row[k].y + (o0 + i) * c.sy.c) : (A)0;
        }
        for (int e = id; e < TILE * DEEP; e += (int)blockDim.x) {
            int k = along_x ? e % DEEP : e / TILE, j = along_x ? e / DEEP : e % TILE;
            bool live = k0 + k < end && n0 + j < c.taps;
            right[k][j] = live ? grad_w_read(c, x, row[k], column[j]) : (A)0;
        }
        __syncthreads();
        conv_multiply(left, right, tx, ty, EACH, sum);
        __syncthreads();
    }
    A *out = c.partial + (part * c.groups + group) * c.to * c.taps;
    for (int i = 0; i < EACH; i++)
        for (int j = 0; j < EACH; j++) {
            int64_t o = o0 + ty + i * (TILE / EACH), n = n0 + tx + j * (TILE / EACH);
            if (o < c.to && n < c.taps)
                out[o * c.taps + n] = sum[i][j];
        }
}

/* ---- elements -------------------------------------------------------------------------------- */

/* A block takes `lanes` elements, whose neighbours differ in o, and a part of the pixels, THREADS /
 * lanes of them at once. */
template <typename T> KN_KERNEL(THREADS, grad_w_each_kernel, grad_w_call<T> c)
{
    typedef typename kn_compute<T>::type A;
    KN_SHARED A sums[THREADS];
    int id = (int)threadIdx.x, lane = id % c.lanes, step = THREADS / c.lanes;
    int64_t channels = c.to * c.groups, e = (int64_t)blockIdx.x * c.lanes + lane;
    int64_t o = e % channels, k = e / channels, end = (blockIdx.y + 1) * c.each;
    A sum = 0;
    end = end < c.pixels ? end : c.pixels;
    if (k < c.taps) {
        grad_w_column column = grad_w_column_at(c, k);
        const T *dy = c.dy + o * c.sy.c, *x = c.x + o / c.to * c.from * c.sx.c;
        for (int64_t i = blockIdx.y * c.each + id / c.lanes; i < end; i += step) {
            grad_w_row row = grad_w_row_at(c, i);
            sum = kn_fma_rn(kn_get(dy + row.y), grad_w_read(c, x, row, column), sum);
        }
    }
    sums[id] = sum;
    for (int half = step / 2; half > 0; half /= 2) {
        __syncthreads();
        if (id < half * c.lanes)
            sums[id] += sums[id + half * c.lanes];
    }
    if (id < c.lanes && k < c.taps)
        c.partial[(blockIdx.y * channels + o) * c.taps + k] = sums[id];
}

/* ---- the total ------------------------------------------------------------------------------- */

struct grad_w_total {
    void *dw;
    kn_dtype dtype;
    int64_t so, sc, sr, ss;
    int64_t taps, from, count, parts; /* count: elements of dw */
    conv_dim d[2];
};

template <typename A> KN_KERNEL(THREADS, grad_w_total_kernel, grad_w_total t, const A *partial)
{
    for (int64_t e = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; e < t.count;
         e += (int64_t)gridDim.x * blockDim.x) {
        double sum = 0;
        for (int64_t p = 0; p < t.parts; p++)
            sum += (double)partial[p * t.count + e];
        int64_t o = e / t.taps;
        conv_tap k = conv_tap_at(t.d, t.from, e - o * t.taps);
        int64_t at = o * t.so + k.c * t.sc + k.r * t.sr + k.s * t.ss;
        kn_put_as(t.dw, t.dtype, at, sum);
    }
}

/* ---- on the host ----------------------------------------------------------------------------- */

/* Deals the pixels to parts where so many blocks take one part. */
template <typename T> static bool grad_w_parts(grad_w_call<T> &c, int64_t blocks)
{
    typedef typename kn_compute<T>::type A;
    int64_t parts = BLOCKS / blocks, some = (c.pixels + THREADS - 1) / THREADS;
    parts = parts < some ? parts : some;
    parts = parts < 1 ? 1 : parts;
    c.each = (c.pixels + parts - 1) / parts;
    c.parts = c.each > 0 ? (c.pixels + c.each - 1) / c.each : 1;
    c.partial = (A *)kn_cuda_scratch((size_t)(c.parts * c.groups * c.to * c.taps) * sizeof(A));
    return c.partial != nullptr;
}

template <typename T> static kn_status grad_w_partial(grad_w_call<T> &c)
{
    if (c.to < FEW || c.groups > 65535) {
        int64_t elements = c.to * c.groups * c.taps;
        c.lanes = c.sy.c == 1 && c.sx.c == 1 ? 32 : 1;
        while (c.lanes < THREADS && c.pixels * c.lanes < 8 * THREADS)
            c.lanes *= 2; /* a thread with less than eight pixels isn't worth joining */
        int64_t blocks = (elements + c.lanes - 1) / c.lanes;
        if (!grad_w_parts(c, blocks))
            return KN_FAILED;
        return KN_RUN(grad_w_each_kernel<T>, dim3((unsigned)blocks, (unsigned)c.parts), THREADS, 0,
                      c);
    }
    c.tiles = (c.taps + TILE - 1) / TILE;
    int64_t tiles = (c.to + TILE - 1) / TILE * c.tiles;
    if (!grad_w_parts(c, tiles * c.groups))
        return KN_FAILED;
    return KN_RUN(grad_w_tile_kernel<T>,
                  dim3((unsigned)tiles, (unsigned)c.groups, (unsigned)c.parts), THREADS, 0, c);
}

template <typename T> static kn_status grad_w_run(const conv_case &v)
{
    typedef typename kn_compute<T>::type A;
    const kn_array *dw = v.w;
    grad_w_call<T> c = {};
    c.dy = (const T *)v.y->data;
    c.x = (const T *)v.x->data;
    for (int d = 0; d < 2; d++)
        c.d[d] = conv_dim_forward(v, d);
    c.sy = kn_image_of(v.y);
    c.sx = kn_image_of(v.x);
    c.pixels = v.y->shape[0] * v.y->shape[2] * v.y->shape[3];
    c.groups = v.groups;
    c.from = dw->shape[1], c.to = dw->shape[0] / v.groups;
    c.taps = c.from * dw->shape[2] * dw->shape[3];
    int64_t count = c.to * c.groups * c.taps;
    if (count == 0)
        return KN_DONE;
    if (count > INT32_MAX)
        return KN_DECLINED; /* a block each, at worst */
    kn_status s = grad_w_partial(c);
    if (s != KN_DONE)
        return s;
    grad_w_total t = { dw->data,          dw->dtype, dw->stride[0], dw->stride[1], dw->stride[2],
                       dw->stride[3],     c.taps,    c.from,        count,         c.parts,
                       { c.d[0], c.d[1] } };
    return KN_RUN_FLAT(grad_w_total_kernel<A>, kn_blocks(count, THREADS, 1), THREADS, t,
                       (const A *)c.partial);
}

extern "C" kn_status kn_cuda_conv_grad_w(const void *args)
{
    const kn_conv_grad_w_args *a = (const kn_conv_grad_w_args *)args;
    conv_case v = { &a->dy, &a->x, &a->dw, a->stride, a->pad, a->dilation, a->groups };
    kn_dtype t = a->x.dtype;
    if (!conv_small(KN_K_CONV_GRAD_W, v))
        return KN_FAILED;
    if (a->dy.dtype != t || (a->dw.dtype != t && (a->dw.dtype != KN_F32 || t == KN_F64)))
        return KN_DECLINED;
    KN_FLOATS(t, grad_w_run, v);
}
