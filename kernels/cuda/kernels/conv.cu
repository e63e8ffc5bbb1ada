/* kernels/cuda/kernels/conv.cu: convolution and its gradient by x, for cases that cuDNN doesn't
 * take; the gradient by w is in conv_grad_w.cu.
 *
 * The product of a matrix [pixels, taps], which is gathered from the image that is read, and the
 * weights [taps, channels]: a block makes TILE pixels of TILE channels, each thread EACH x EACH of
 * them in registers; slices of DEEP taps pass through shared memory as f32 (f64). Every output is
 * one sum over ascending taps. Groups of few channels would leave most of a tile empty: there a
 * thread makes one output.
 *
 * Floor: 2 * pixels * channels * taps operations of ordinary cores. The gradient by x with stride s
 * visits s^2 times as many taps as meet something. */
#include "kernels/cuda/kernels/conv.cuh"

/* out = the image that is made, in = the one that is read; channels are those of a group. */
template <typename T> struct conv_call {
    T *out;
    const T *in, *w;
    const void *bias; /* T, or f32; NULL: none */
    bool bias_f32;
    int64_t bias_stride;
    conv_dim d[2];
    kn_image so, si;
    int64_t pixels, from, to, taps, groups; /* from: channels that are read; to: that are made */
    int64_t w_from, w_to, w_group, wr, ws;  /* strides of w */
    int64_t tiles;                          /* of channels */
};

template <typename T>
static __device__ inline typename kn_compute<T>::type conv_bias(const conv_call<T> &c, int64_t o)
{
    if (!c.bias)
        return 0;
    return c.bias_f32 ? ((const float *)c.bias)[o * c.bias_stride]
                      : kn_get((const T *)c.bias + o * c.bias_stride);
}

/* ---- tiles ----------------------------------------------------------------------------------- */

/* A pixel that is made, as it meets the image that is read. */
struct conv_row {
    int64_t base;
    int h, w;
};

/* A tap: where it lies in w, and what it adds to a row. */
struct conv_column {
    int64_t w, base;
    int h, s;
};

template <typename T>
static __device__ inline conv_row conv_row_at(const conv_call<T> &c, int64_t i)
{
    conv_pixel p = conv_pixel_at(c.d, i);
    return { p.n * c.si.n, p.h * c.d[0].mul + c.d[0].add, p.w * c.d[1].mul + c.d[1].add };
}

template <typename T>
static __device__ inline conv_column conv_column_at(const conv_call<T> &c, int64_t k)
{
    conv_tap t = conv_tap_at(c.d, c.from, k);
    return { t.c * c.w_from + t.r * c.wr + t.s * c.ws, t.c * c.si.c, t.r * c.d[0].step,
             t.s * c.d[1].step };
}

template <typename T>
KN_KERNEL_RESIDENT((TILE / EACH) * (TILE / EACH), sizeof(T) == 8 ? 1 : 3, conv_tile_kernel,
                   conv_call<T> c)
{
    typedef typename kn_compute<T>::type A;
    KN_SHARED A left[DEEP][TILE + 1], right[DEEP][TILE + 1];
    KN_SHARED conv_row row[TILE];
    KN_SHARED conv_column column[DEEP];
    int id = (int)threadIdx.x, tx = id % (TILE / EACH), ty = id / (TILE / EACH);
    int64_t m0 = blockIdx.x / c.tiles * TILE, n0 = blockIdx.x % c.tiles * TILE;
    int64_t group = blockIdx.y;
    const T *in = c.in + group * c.from * c.si.c, *weights = c.w + group * c.w_group;
    bool along = c.si.c == 1; /* neighbours in memory are read by neighbouring threads */
    int wide = (int)((c.to - n0 + TILE / EACH - 1) / (TILE / EACH)); /* or more */
    A sum[EACH][EACH] = {};
    if (id < TILE)
        row[id] = conv_row_at(c, m0 + id < c.pixels ? m0 + id : c.pixels - 1);
    for (int64_t k0 = 0; k0 < c.taps; k0 += DEEP) {
        if (id < DEEP)
            column[id] = conv_column_at(c, k0 + id < c.taps ? k0 + id : c.taps - 1);
        __syncthreads();
        for (int e = id; e < TILE * DEEP; e += (int)blockDim.x) {
            int k = along ? e % DEEP : e / TILE, i = along ? e / DEEP : e % TILE;
            const conv_row &p = row[i];
            const conv_column &t = column[k];
            bool live = k0 + k < c.taps && m0 + i < c.pixels;
            left[k][i] =
                live ? conv_read(c.d, c.si, in + p.base + t.base, p.h + t.h, p.w + t.s) : (A)0;
        }
        for (int e = id; e < TILE * DEEP; e += (int)blockDim.x) {
            int k = e % DEEP, j = e / DEEP;
            bool live = k0 + k < c.taps && n0 + j < c.to;
            right[k][j] = live ? (A)kn_get(weights + column[k].w + (n0 + j) * c.w_to) : (A)0;
        }
        __syncthreads();
        conv_multiply(left, right, tx, ty, wide, sum);
        __syncthreads();
    }
    for (int i = 0; i < EACH; i++) {
        int64_t m = m0 + ty + i * (TILE / EACH);
        if (m >= c.pixels)
            continue;
        conv_pixel p = conv_pixel_at(c.d, m);
        T *out = c.out + p.n * c.so.n + p.h * c.so.h + p.w * c.so.w;
        for (int j = 0; j < EACH; j++) {
            int64_t n = n0 + tx + j * (TILE / EACH), o = group * c.to + n;
            if (n < c.to)
                kn_put(out + o * c.so.c, sum[i][j] + conv_bias(c, o));
        }
    }
}

/* ---- an output a thread ---------------------------------------------------------------------- */

template <typename T>
KN_KERNEL_RESIDENT(256, sizeof(T) == 8 ? 1 : 0, conv_each_kernel, conv_call<T> c)
{
    typedef typename kn_compute<T>::type A;
    int64_t channels = c.to * c.groups, count = c.pixels * channels;
    bool last = c.so.c == 1; /* neighbours in memory are made by neighbouring threads */
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += (int64_t)gridDim.x * blockDim.x) {
        int64_t plane = (int64_t)c.d[0].made * c.d[1].made;
        int64_t image = i / (plane * channels), rest = i - image * plane * channels;
        int64_t o = last ? rest % channels : rest / plane;
        int64_t m = image * plane + (last ? rest / channels : rest % plane);
        int64_t group = o / c.to;
        conv_row row = conv_row_at(c, m);
        const T *in = c.in + group * c.from * c.si.c + row.base;
        const T *w = c.w + group * c.w_group + (o - group * c.to) * c.w_to;
        A sum = 0;
        for (int r = 0; r < c.d[0].weights; r++)
            for (int s = 0; s < c.d[1].weights; s++) {
                int y, x;
                if (!conv_meet(c.d[0], row.h + r * c.d[0].step, y) ||
                    !conv_meet(c.d[1], row.w + s * c.d[1].step, x))
                    continue;
                const T *from = in + y * c.si.h + x * c.si.w, *by = w + r * c.wr + s * c.ws;
                for (int64_t k = 0; k < c.from; k++)
                    sum = kn_fma_rn(kn_get(from + k * c.si.c), kn_get(by + k * c.w_from), sum);
            }
        conv_pixel p = conv_pixel_at(c.d, m);
        kn_put(c.out + p.n * c.so.n + o * c.so.c + p.h * c.so.h + p.w * c.so.w,
               sum + conv_bias(c, o));
    }
}

/* ---- on the host ----------------------------------------------------------------------------- */

template <typename T> static kn_status conv_run(conv_call<T> &c, const kn_array *out)
{
    c.out = (T *)out->data;
    c.so = kn_image_of(out);
    c.pixels = out->shape[0] * out->shape[2] * out->shape[3];
    c.taps = (int64_t)c.d[0].weights * c.d[1].weights * c.from;
    if (c.pixels == 0 || c.to == 0)
        return KN_DONE;
    if (c.to < FEW || c.groups > 65535)
        return KN_RUN_FLAT(conv_each_kernel<T>, kn_blocks(c.pixels * c.to * c.groups, 256, 1), 256,
                           c);
    c.tiles = (c.to + TILE - 1) / TILE;
    int64_t blocks = (c.pixels + TILE - 1) / TILE * c.tiles;
    if (blocks > INT32_MAX)
        return KN_DECLINED; /* more than 2^43 outputs */
    return KN_RUN(conv_tile_kernel<T>, dim3((unsigned)blocks, (unsigned)c.groups),
                  (TILE / EACH) * (TILE / EACH), 0, c);
}

/* y from x, or (back) x from y. */
template <typename T>
static kn_status conv_make(const conv_case &v, const kn_array *bias, bool back)
{
    const kn_array *in = back ? v.y : v.x, *w = v.w;
    const int64_t of_y = w->shape[0] / v.groups; /* channels of a group */
    conv_call<T> c = {};
    c.in = (const T *)in->data;
    c.w = (const T *)w->data;
    if (bias && bias->data) {
        c.bias = bias->data;
        c.bias_f32 = bias->dtype == KN_F32;
        c.bias_stride = bias->stride[0];
    }
    for (int d = 0; d < 2; d++)
        c.d[d] = back ? conv_dim_backward(v, d) : conv_dim_forward(v, d);
    c.si = kn_image_of(in);
    c.groups = v.groups;
    c.from = back ? of_y : w->shape[1], c.to = back ? w->shape[1] : of_y;
    c.w_from = w->stride[!back], c.w_to = w->stride[back], c.w_group = of_y * w->stride[0];
    c.wr = w->stride[2], c.ws = w->stride[3];
    return conv_run(c, back ? v.x : v.y);
}

extern "C" kn_status kn_cuda_conv(const void *args)
{
    const kn_conv_args *a = (const kn_conv_args *)args;
    const kn_array *bias = &a->bias;
    conv_case v = { &a->y, &a->x, &a->w, a->stride, a->pad, a->dilation, a->groups };
    kn_dtype t = a->x.dtype;
    if (!conv_small(KN_K_CONV, v))
        return KN_FAILED;
    if (a->y.dtype != t || a->w.dtype != t ||
        (bias->data && (bias->ndim != 1 || bias->shape[0] != a->y.shape[1] ||
                        (bias->dtype != t && bias->dtype != KN_F32))))
        return KN_DECLINED;
    KN_FLOATS(t, conv_make, v, bias, false);
}

extern "C" kn_status kn_cuda_conv_grad_x(const void *args)
{
    const kn_conv_grad_x_args *a = (const kn_conv_grad_x_args *)args;
    conv_case v = { &a->dy, &a->dx, &a->w, a->stride, a->pad, a->dilation, a->groups };
    kn_dtype t = a->dy.dtype;
    if (!conv_small(KN_K_CONV_GRAD_X, v))
        return KN_FAILED;
    if (a->dx.dtype != t || a->w.dtype != t)
        return KN_DECLINED;
    KN_FLOATS(t, conv_make, v, nullptr, true);
}
