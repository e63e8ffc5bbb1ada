/* kernels/cpu/reference_unary.c: unary functions and their derivatives. */
#include "kernels/cpu/reference.h"
#include "kernels/cpu/reference_words.h"

double kn_ref_digamma(double x)
{
    return v_digamma(x);
}

double kn_ref_trigamma(double x)
{
    return v_trigamma(x);
}

/* f(x). NaN in gives NaN out for every kind. */
static double unary(kn_unary kind, double x, double p0, double p1)
{
#define FORMULA_CASE(kind, name, function, reads, dtypes, domain, work, formula, gradient)         \
    case KN_##kind:                                                                                \
        return formula;
    switch (kind) {
        KN_UNARY_KINDS(FORMULA_CASE)
    default:
        return x;
    }
}

kn_status kn_ref_unary(const void *args)
{
    const kn_unary_args *a = args;
    const kn_array *dst = &a->dst, *src = &a->src;
    bool ints = kn_dtype_is_int(src->dtype);
    int64_t i0 = ints ? kn_int_param(a->p0) : 0, i1 = ints ? kn_int_param(a->p1) : 0;
    for (kn_ref_walk w = kn_ref_walk_over(dst, src, NULL); w.more; kn_ref_walk_next(&w)) {
        if (ints)
            kn_ref_set_int(dst, w.off[0],
                           kn_int_unary(a->kind, kn_ref_get_int(src, w.off[1]), i0, i1));
        else
            kn_ref_set_computed(dst, w.off[0],
                                unary(a->kind, kn_ref_get(src, w.off[1]), a->p0, a->p1));
    }
    return KN_DONE;
}

/* dx = d f'(x), of the input x or the output y = f(x), whichever the kind's row says. */
static double gradient(kn_unary kind, double d, double x, double p0, double p1)
{
    const double y = x;
#define GRADIENT_CASE(kind, name, function, reads, dtypes, domain, work, formula, gradient)        \
    case KN_##kind:                                                                                \
        return gradient;
    switch (kind) {
        KN_UNARY_KINDS(GRADIENT_CASE)
    default:
        return y;
    }
}

kn_status kn_ref_unary_grad(const void *args)
{
    const kn_unary_grad_args *a = args;
    const kn_array *in = kn_unary_grad_input(a);
    kn_ref_walk w = kn_ref_walk_over(&a->dx, &a->dy, in, NULL);
    for (; w.more; kn_ref_walk_next(&w))
        kn_ref_set_computed(&a->dx, w.off[0],
                            gradient(a->kind, kn_ref_get(&a->dy, w.off[1]),
                                     kn_ref_get(in, w.off[2]), a->p0, a->p1));
    return KN_DONE;
}
