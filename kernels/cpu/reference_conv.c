/* kernels/cpu/reference_conv.c: convolution and its two gradients, one sum an element. */
#include "kernels/cpu/reference.h"

/* A convolution whichever of its arrays is the result. */
typedef struct conv {
    kn_array y, x, w;
    const int64_t *stride, *pad, *dilation;
    int64_t groups;
} conv;

static bool conv_check(kn_kernel k, const conv *v)
{
    const kn_array *y = &v->y, *x = &v->x, *w = &v->w;
    const int64_t G = v->groups;
    bool fits = y->ndim == 4 && x->ndim == 4 && w->ndim == 4 && G > 0;
    fits = fits && y->shape[0] == x->shape[0] && y->shape[1] == w->shape[0] &&
           w->shape[1] * G == x->shape[1] && w->shape[0] % G == 0;
    for (int d = 0; fits && d < 2; d++)
        fits = v->stride[d] > 0 && v->dilation[d] > 0;
    if (!fits) {
        char one[128], two[128], three[128];
        return kn_fail("%s: x %s, w %s and y %s in %lld groups do not fit: [N,C,H,W], [O,C/G,R,S], "
                       "[N,O,P,Q], G dividing O, stride and dilation at least 1",
                       kn_kernel_name(k), kn_array_describe(x, one, sizeof one),
                       kn_array_describe(w, two, sizeof two),
                       kn_array_describe(y, three, sizeof three), (long long)G);
    }
    return kn_ref_check_float(k, y) && kn_ref_check_float(k, x) && kn_ref_check_float(k, w);
}

/* The address of a[i,j,k,l]. */
static int64_t at(const kn_array *a, int64_t i, int64_t j, int64_t k, int64_t l)
{
    return i * a->stride[0] + j * a->stride[1] + k * a->stride[2] + l * a->stride[3];
}

/* The index of x along spatial dim d for position p and weight r; -1: outside. */
static int64_t input_of(const conv *v, int d, int64_t p, int64_t r)
{
    int64_t h = p * v->stride[d] - v->pad[d] + r * v->dilation[d];
    return h < v->x.shape[2 + d] ? h : -1;
}

/* Which position of y along d meets x at h through weight r; -1: none. */
static int64_t output_of(const conv *v, int d, int64_t h, int64_t r)
{
    int64_t t = h + v->pad[d] - r * v->dilation[d];
    if (t < 0 || t % v->stride[d] != 0)
        return -1;
    return t / v->stride[d] < v->y.shape[2 + d] ? t / v->stride[d] : -1;
}

static double y_element(const conv *v, int64_t n, int64_t o, int64_t p, int64_t q)
{
    const int64_t *ws = v->w.shape, first = o / (ws[0] / v->groups) * ws[1];
    double sum = 0;
    for (int64_t r = 0; r < ws[2]; r++) {
        for (int64_t s = 0; s < ws[3]; s++) {
            int64_t h = input_of(v, 0, p, r), w = input_of(v, 1, q, s);
            for (int64_t c = 0; c < ws[1] && h >= 0 && w >= 0; c++)
                sum += kn_ref_get(&v->w, at(&v->w, o, c, r, s)) *
                       kn_ref_get(&v->x, at(&v->x, n, first + c, h, w));
        }
    }
    return sum;
}

static double dx_element(const conv *v, int64_t n, int64_t c, int64_t h, int64_t w)
{
    const int64_t *ws = v->w.shape, each = ws[0] / v->groups, first = c / ws[1] * each;
    double sum = 0;
    for (int64_t r = 0; r < ws[2]; r++) {
        for (int64_t s = 0; s < ws[3]; s++) {
            int64_t p = output_of(v, 0, h, r), q = output_of(v, 1, w, s);
            for (int64_t o = first; o < first + each && p >= 0 && q >= 0; o++)
                sum += kn_ref_get(&v->w, at(&v->w, o, c % ws[1], r, s)) *
                       kn_ref_get(&v->y, at(&v->y, n, o, p, q));
        }
    }
    return sum;
}

static double dw_element(const conv *v, int64_t o, int64_t c, int64_t r, int64_t s)
{
    const int64_t *ys = v->y.shape, *ws = v->w.shape;
    const int64_t from = o / (ws[0] / v->groups) * ws[1] + c;
    double sum = 0;
    for (int64_t n = 0; n < ys[0]; n++) {
        for (int64_t p = 0; p < ys[2]; p++) {
            int64_t h = input_of(v, 0, p, r);
            for (int64_t q = 0; q < ys[3] && h >= 0; q++) {
                int64_t w = input_of(v, 1, q, s);
                if (w >= 0)
                    sum += kn_ref_get(&v->y, at(&v->y, n, o, p, q)) *
                           kn_ref_get(&v->x, at(&v->x, n, from, h, w));
            }
        }
    }
    return sum;
}

typedef double element_fn(const conv *v, int64_t i, int64_t j, int64_t k, int64_t l);

static void each_element(const kn_array *a, const conv *v, element_fn *element,
                         const kn_array *bias)
{
    for (kn_ref_walk w = kn_ref_walk_over(a, NULL); w.more; kn_ref_walk_next(&w)) {
        double sum = element(v, w.at[0], w.at[1], w.at[2], w.at[3]);
        if (bias)
            sum += kn_ref_get(bias, w.at[1] * bias->stride[0]);
        kn_ref_set_computed(a, w.off[0], sum);
    }
}

kn_status kn_ref_conv(const void *args)
{
    const kn_conv_args *a = args;
    const conv v = { a->y, a->x, a->w, a->stride, a->pad, a->dilation, a->groups };
    const kn_array *bias = a->bias.data ? &a->bias : NULL;
    if (!conv_check(KN_K_CONV, &v))
        return KN_FAILED;
    if (bias && (bias->ndim != 1 || bias->shape[0] != a->y.shape[1])) {
        char text[128];
        kn_fail("conv: bias %s for %lld channels", kn_array_describe(bias, text, sizeof text),
                (long long)a->y.shape[1]);
        return KN_FAILED;
    }
    each_element(&a->y, &v, y_element, bias);
    return KN_DONE;
}

kn_status kn_ref_conv_grad_x(const void *args)
{
    const kn_conv_grad_x_args *a = args;
    const conv v = { a->dy, a->dx, a->w, a->stride, a->pad, a->dilation, a->groups };
    if (!conv_check(KN_K_CONV_GRAD_X, &v))
        return KN_FAILED;
    each_element(&a->dx, &v, dx_element, NULL);
    return KN_DONE;
}

kn_status kn_ref_conv_grad_w(const void *args)
{
    const kn_conv_grad_w_args *a = args;
    const conv v = { a->dy, a->x, a->dw, a->stride, a->pad, a->dilation, a->groups };
    if (!conv_check(KN_K_CONV_GRAD_W, &v))
        return KN_FAILED;
    each_element(&a->dw, &v, dw_element, NULL);
    return KN_DONE;
}
