/* kernels/cpu/reference_conv.c: convolution and its two gradients, one sum an element. */
#include "kernels/cpu/reference.h"

/* A convolution whichever of its arrays is the result. */
typedef struct conv {
    kn_array y, x, w;
    const int64_t *stride, *pad, *dilation;
    int64_t groups;
} conv;

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
                sum += kn_ref_get(&v->w, kn_ref_at(&v->w, o, c, r, s)) *
                       kn_ref_get(&v->x, kn_ref_at(&v->x, n, first + c, h, w));
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
                sum += kn_ref_get(&v->w, kn_ref_at(&v->w, o, c % ws[1], r, s)) *
                       kn_ref_get(&v->y, kn_ref_at(&v->y, n, o, p, q));
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
                    sum += kn_ref_get(&v->y, kn_ref_at(&v->y, n, o, p, q)) *
                           kn_ref_get(&v->x, kn_ref_at(&v->x, n, from, h, w));
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
    each_element(&a->y, &v, y_element, bias);
    return KN_DONE;
}

kn_status kn_ref_conv_grad_x(const void *args)
{
    const kn_conv_grad_x_args *a = args;
    const conv v = { a->dy, a->dx, a->w, a->stride, a->pad, a->dilation, a->groups };
    each_element(&a->dx, &v, dx_element, NULL);
    return KN_DONE;
}

kn_status kn_ref_conv_grad_w(const void *args)
{
    const kn_conv_grad_w_args *a = args;
    const conv v = { a->dy, a->x, a->dw, a->stride, a->pad, a->dilation, a->groups };
    each_element(&a->dw, &v, dw_element, NULL);
    return KN_DONE;
}
