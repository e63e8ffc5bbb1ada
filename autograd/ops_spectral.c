/* autograd/ops_spectral.c: Fourier transforms. A transform of n = n1 n2 elements is one of n1
 * elements, a rotation and one of n2 (Cooley and Tukey), and a short one is a product with a
 * matrix: so all of it is made of matrix products, with gradients, on every device. Complex numbers
 * are a last dim of two, {real, imaginary}. */
#include "autograd/losses.h"
#include <math.h>
#include <string.h>

enum {
    DENSE = 64,
    MOST = 1024
}; /* lengths that are a product anyway, and the longest that may be */

/* The largest divisor of n up to its root, which may be 1. */
static int64_t divisor_of(int64_t n)
{
    int64_t best = 1;
    for (int64_t d = 2; d * d <= n; d++)
        if (n % d == 0)
            best = d;
    return best;
}

static bool length_fits(const char *op, int64_t n)
{
    int64_t rest = n, largest = 1;
    for (int64_t d = 2; d * d <= rest; d++)
        for (; rest % d == 0; rest /= d)
            largest = d;
    largest = rest > 1 ? rest : largest;
    if (n >= 1 && n <= INT32_MAX && largest <= MOST)
        return true;
    return n < 1 || n > INT32_MAX
               ? kn_fail("%s: a transform of %lld elements; 1 to 2^31 - 1 are possible", op,
                         (long long)n)
               : kn_fail(
                     "%s: %lld elements have the prime factor %lld, and at most %d is done; pad "
                     "them (kn_pad) to a length of small factors",
                     op, (long long)n, (long long)largest, MOST);
}

/* e^(2 pi i turn / n), exact where turn is a multiple of n. */
static void rotation(int64_t turn, int64_t n, int sign, double out[2])
{
    const double angle = 2 * M_PI * (double)(turn % n) / (double)n;
    out[0] = cos(angle);
    out[1] = sign * sin(angle);
}

/* kn_of_host in x's dtype, on its device. */
static kn_tensor *constant(const kn_tensor *x, double *v, int ndim, const int64_t *shape)
{
    kn_tensor *t = kn_of_host(KN_F64, kn_device_of(x), v, ndim, shape);
    return t ? kn_cast(t, x->dtype) : NULL;
}

/* x[..., n] of reals, or [..., n, 2], times the matrix of the transform: [..., n, 2]. */
static kn_tensor *by_matrix(kn_tensor *x, int64_t n, bool real, int sign)
{
    const int64_t rows = real ? n : 2 * n;
    double *m = kn_host_calloc((size_t)(rows * 2 * n), sizeof *m);
    for (int64_t j = 0; m && j < n; j++)
        for (int64_t k = 0; k < n; k++) {
            double w[2], *to = m + (real ? j : 2 * j) * 2 * n + 2 * k;
            rotation(j * k, n, sign, w);
            memcpy(to, w, sizeof w);
            if (!real) /* i w */
                to[2 * n] = -w[1], to[2 * n + 1] = w[0];
        }
    kn_tensor *matrix = constant(x, m, KN_SHAPE(rows, 2 * n));
    kn_tensor *y = kn_matmul(real ? x : kn_flatten(x, -2, -1), matrix);
    return kn_unflatten(y, -1, KN_SHAPE(n, 2));
}

/* x[rows, a, b, 2] times e^(2 pi i j k / (a b)) at (j, k). */
static kn_tensor *rotated(kn_tensor *x, int64_t a, int64_t b, int sign)
{
    double *real = kn_host_calloc((size_t)(a * b), 2 * sizeof *real);
    double *imaginary = kn_host_calloc((size_t)(a * b), 2 * sizeof *imaginary);
    for (int64_t i = 0; real && imaginary && i < a * b; i++) {
        double w[2];
        rotation(i / b * (i % b), a * b, sign, w);
        real[2 * i] = real[2 * i + 1] = w[0];
        imaginary[2 * i] = -w[1], imaginary[2 * i + 1] = w[1];
    }
    kn_tensor *c = constant(x, real, KN_SHAPE(a, b, 2));
    kn_tensor *d = constant(x, imaginary, KN_SHAPE(a, b, 2));
    return kn_add(kn_mul(x, c), kn_mul(kn_flip(x, 1, (int64_t[]){ -1 }), d));
}

/* x[rows, n] or [rows, n, 2] -> [rows, n, 2]: y[k] = sum_j x[j] e^(sign 2 pi i j k / n). Element
 * j1 n2 + j2 counts in place k1 + k2 n1 with the angle of j1 k1 / n1 + j2 k1 / n + j2 k2 / n2. */
static kn_tensor *transform(kn_tensor *x, int64_t n, bool real, int sign)
{
    const int64_t rows = x ? x->shape[0] : 0, n1 = divisor_of(n), n2 = n / n1;
    if (!x)
        return NULL;
    if (n <= DENSE || n1 == 1)
        return by_matrix(x, n, real, sign);
    x = real ? kn_transpose(kn_reshape(x, KN_SHAPE(rows, n1, n2)), 1, 2)
             : kn_transpose(kn_reshape(x, KN_SHAPE(rows, n1, n2, 2)), 1, 2);
    x = real ? kn_reshape(x, KN_SHAPE(rows * n2, n1)) : kn_reshape(x, KN_SHAPE(rows * n2, n1, 2));
    x = transform(x, n1, real, sign);
    x = x ? rotated(kn_reshape(x, KN_SHAPE(rows, n2, n1, 2)), n2, n1, sign) : NULL;
    x = kn_reshape(kn_transpose(x, 1, 2), KN_SHAPE(rows * n1, n2, 2));
    x = transform(x, n2, false, sign);
    return kn_reshape(kn_transpose(kn_reshape(x, KN_SHAPE(rows, n1, n2, 2)), 1, 2),
                      KN_SHAPE(rows, n, 2));
}

/* y[rows, ...] with the leading dims of x, all but its last n. */
static kn_tensor *with_lead(kn_tensor *y, const kn_tensor *x, int n)
{
    int64_t shape[KN_MAX_DIMS];
    int ndim = 0;
    for (int d = 0; y && d < x->ndim - n; d++)
        shape[ndim++] = x->shape[d];
    for (int d = 1; y && d < y->ndim; d++)
        shape[ndim++] = y->shape[d];
    return kn_reshape(y, ndim, shape);
}

kn_tensor *kn_rfft(kn_tensor *x)
{
    if (!kn_ok() || !kn_check(x, "rfft"))
        return NULL;
    if (x->ndim < 1 || x->ndim >= KN_MAX_DIMS || !kn_dtype_is_float(x->dtype))
        return kn_fail_null("rfft: needs a float x[..., n] of 1 to %d dims, got %s",
                            KN_MAX_DIMS - 1, KN_SHOWN(x));
    const int64_t n = x->shape[x->ndim - 1];
    if (!length_fits("rfft", n))
        return NULL;
    kn_scope s = kn_scope_begin();
    kn_tensor *y = transform(kn_wide(kn_reshape(x, KN_SHAPE(kn_numel(x) / n, n))), n, true, -1);
    y = with_lead(kn_slice(y, 1, 0, n / 2 + 1), x, 1);
    return kn_scope_result(s, kn_cast(y, x->dtype));
}

/* The real part of the inverse transform of twice the numbers, but for those that are their own
 * mirror images. */
static kn_tensor *inverse(kn_tensor *x, int64_t n)
{
    const int64_t m = n / 2 + 1;
    double *twice = kn_host_calloc((size_t)m, sizeof *twice);
    for (int64_t k = 0; twice && k < m; k++)
        twice[k] = (k == 0 || 2 * k == n ? 1 : 2) / (double)n;
    kn_tensor *f = constant(x, twice, KN_SHAPE(m, 1));
    kn_tensor *y = kn_pad(kn_mul(x, f), KN_PAD_CONSTANT, 0, 4, (int64_t[]){ 0, 0, 0, n - m });
    y = transform(y, n, false, 1);
    return kn_squeeze(kn_slice(y, 2, 0, 1), 1, (int64_t[]){ 2 });
}

kn_tensor *kn_irfft(kn_tensor *x, int64_t n)
{
    if (!kn_ok() || !kn_check(x, "irfft"))
        return NULL;
    const int64_t m = x->ndim >= 2 ? x->shape[x->ndim - 2] : 0;
    n = n == 0 ? 2 * (m - 1) : n;
    if (x->ndim < 2 || x->shape[x->ndim - 1] != 2 || !kn_dtype_is_float(x->dtype) || n < 1 ||
        m != n / 2 + 1)
        return kn_fail_null(
            "irfft: needs a float x[..., n / 2 + 1, 2] for n = %lld elements (0: an even "
            "number), got %s",
            (long long)n, KN_SHOWN(x));
    if (!length_fits("irfft", n))
        return NULL;
    kn_scope s = kn_scope_begin();
    kn_tensor *flat = kn_wide(kn_reshape(x, KN_SHAPE(kn_numel(x) / (2 * m), m, 2)));
    kn_tensor *y = with_lead(flat ? inverse(flat, n) : NULL, x, 2);
    return kn_scope_result(s, kn_cast(y, x->dtype));
}

/* ---- in frames ------------------------------------------------------------------------------- */

/* Of an optional window. */
#define shown(w) ((w) ? KN_SHOWN(w) : "none")

/* The numbers that both directions have, with defaults. */
static bool frames_fit(const char *op, const kn_tensor *x, kn_stft_options *o)
{
    o->hop = o->hop ? o->hop : o->n_fft / 4;
    const kn_tensor *w = o->window;
    if (o->length < 0 || o->length > INT64_MAX / 2)
        return kn_fail(
            "%s: .length is %lld, should be a number of elements (x is %s, the window %s)", op,
            (long long)o->length, KN_SHOWN(x), shown(w));
    const int64_t size = w && w->ndim == 1 ? w->shape[0] : o->n_fft;
    if (o->n_fft < 2 || o->hop < 1 || size < 1 || size > o->n_fft || o->n_fft > INT32_MAX ||
        o->hop > INT32_MAX || (w && !kn_check(w, op)))
        return kn_fail(
            "%s: .n_fft is %lld, .hop %lld, and the window has %lld elements; they are at least "
            "2, 1, 1, at most 2^31 - 1, and a window isn't longer than .n_fft (x is %s, the window "
            "%s)",
            op, (long long)o->n_fft, (long long)o->hop, (long long)size, KN_SHOWN(x), shown(w));
    return !w || (w->ndim == 1 && w->dtype == x->dtype) ||
           kn_fail("%s: the window is %s; it should be one dim of x's dtype, x is %s", op,
                   KN_SHOWN(w), KN_SHOWN(x));
}

/* The window in the middle of n_fft elements; NULL: there is none. */
static kn_tensor *window_of(const kn_stft_options *o)
{
    const int64_t room = o->window ? o->n_fft - o->window->shape[0] : 0;
    kn_tensor *w = o->window ? kn_wide(o->window) : NULL;
    return w && room ? kn_pad(w, KN_PAD_CONSTANT, 0, 2, (int64_t[]){ room / 2, room - room / 2 })
                     : w;
}

kn_tensor *kn_stft_(kn_tensor *x, kn_stft_options o)
{
    if (!kn_ok() || !kn_check(x, "stft"))
        return NULL;
    if (x->ndim < 1 || x->ndim > 2 || !kn_dtype_is_float(x->dtype))
        return kn_fail_null("stft: needs a float x[L] or x[N,L], got %s (window %s)", KN_SHOWN(x),
                            shown(o.window));
    if (!frames_fit("stft", x, &o))
        return NULL;
    const int64_t L = x->shape[x->ndim - 1], half = o.no_center ? 0 : o.n_fft / 2;
    if (L + 2 * half < o.n_fft || (half && half >= L))
        return kn_fail_null(
            "stft: %lld elements of x %s are too few for frames of %lld (window %s)", (long long)L,
            KN_SHOWN(x), (long long)o.n_fft, shown(o.window));
    kn_scope s = kn_scope_begin();
    kn_tensor *w = window_of(&o), *y = kn_wide(x);
    y = half ? kn_pad(y, KN_PAD_REFLECT, 0, 2, (int64_t[]){ half, half }) : y;
    y = kn_unfold(y, -1, o.n_fft, o.hop);
    y = kn_rfft(w ? kn_mul(y, w) : y);
    y = kn_transpose(y, -2, -3);
    y = y && o.normalized ? kn_scale(y, 1 / sqrt((double)o.n_fft)) : y;
    return kn_scope_result(s, kn_cast(y, x->dtype));
}

/* Frames [N,T,n_fft] added up where they lie, [N,L]. */
static kn_tensor *overlapped(kn_tensor *frames, int64_t L, const kn_stft_options *o)
{
    kn_tensor *y = kn_fold2d(kn_transpose(frames, 1, 2), 1, L, .kernels = { 1, o->n_fft },
                             .strides = { 1, o->hop });
    return y ? kn_reshape(y, KN_SHAPE(frames->shape[0], L)) : NULL;
}

/* The sum of the squared windows over each element. */
static kn_tensor *envelope(const kn_tensor *x, kn_tensor *w, int64_t T, int64_t L,
                           const kn_stft_options *o)
{
    kn_tensor *ones = w ? kn_square(kn_detach(w))
                        : kn_ones(kn_wide_dtype(x->dtype), kn_device_of(x), KN_SHAPE(o->n_fft));
    ones = kn_expand(ones, KN_SHAPE(1, T, o->n_fft));
    return overlapped(ones, L, o);
}

kn_tensor *kn_istft_(kn_tensor *x, kn_stft_options o)
{
    if (!kn_ok() || !kn_check(x, "istft") || !frames_fit("istft", x, &o))
        return NULL;
    const int n = x->ndim;
    if (n < 3 || n > 4 || !kn_dtype_is_float(x->dtype) || x->shape[n - 1] != 2 ||
        x->shape[n - 2] < 1 || x->shape[n - 3] != o.n_fft / 2 + 1)
        return kn_fail_null(
            "istft: needs a float x[%lld,T,2] or x[N,%lld,T,2] for .n_fft %lld, got %s",
            (long long)(o.n_fft / 2 + 1), (long long)(o.n_fft / 2 + 1), (long long)o.n_fft,
            KN_SHOWN(x));
    const int64_t T = x->shape[n - 2], L = o.n_fft + o.hop * (T - 1);
    const int64_t from = o.no_center ? 0 : o.n_fft / 2;
    const int64_t to = o.length ? from + o.length : L - from;
    if (to > L || to <= from)
        return kn_fail_null("istft: the frames of x %s span %lld elements, not %lld to %lld",
                            KN_SHOWN(x), (long long)L, (long long)from, (long long)to);
    kn_scope s = kn_scope_begin();
    kn_tensor *w = window_of(&o), *wide = kn_wide(x), *y = NULL;
    wide = wide && n == 3 ? kn_unsqueeze(wide, 0) : wide;
    kn_tensor *frames = kn_irfft(kn_transpose(wide, 1, 2), o.n_fft);
    frames = frames && w ? kn_mul(frames, w) : frames;
    kn_tensor *whole = overlapped(frames, L, &o), *all = envelope(x, w, T, L, &o);
    if (whole && all) {
        all = kn_slice(all, 1, from, to);
        if (kn_device_of(x) == KN_CPU && kn_item(kn_amin(all, KN_SHAPE(1), false)) < 1e-11)
            kn_fail("istft: the windows leave a gap among the elements %lld to %lld; take a "
                    "smaller .hop "
                    "or another window (x is %s)",
                    (long long)from, (long long)to, KN_SHOWN(x));
        y = kn_div(kn_slice(whole, 1, from, to), all);
        y = y && o.normalized ? kn_scale(y, sqrt((double)o.n_fft)) : y;
        y = y && n == 3 ? kn_squeeze(y, 1, (int64_t[]){ 0 }) : y;
        y = kn_cast(y, x->dtype);
    }
    return kn_scope_result(s, y);
}
