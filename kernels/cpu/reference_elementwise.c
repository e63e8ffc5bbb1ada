/* kernels/cpu/reference_elementwise.c: copy, fill, binary functions, where. */
#include "kernels/cpu/reference.h"
#include "kernels/cpu/reference_words.h"
#include <string.h>

/* ---- copy, fill, where --------------------------------------------------------------------- */

/* Copies elements of one size without looking inside. */
static void move_element(const kn_array *dst, int64_t to, const kn_array *src, int64_t from)
{
    size_t size = kn_dtype_size(dst->dtype);
    memmove((char *)dst->data + to * (int64_t)size, (const char *)src->data + from * (int64_t)size,
            size);
}

kn_status kn_ref_copy(const void *args)
{
    const kn_copy_args *a = args;
    const kn_array *dst = &a->dst, *src = &a->src;
    bool same = dst->dtype == src->dtype;
    bool from_int = kn_dtype_is_int(src->dtype), to_int = kn_dtype_is_int(dst->dtype);
    for (kn_ref_walk w = kn_ref_walk_over(dst, src, NULL); w.more; kn_ref_walk_next(&w)) {
        if (same)
            move_element(dst, w.off[0], src, w.off[1]);
        else if (from_int && to_int)
            kn_ref_set_int(dst, w.off[0], kn_ref_get_int(src, w.off[1]));
        else if (src->dtype == KN_I64 && dst->dtype != KN_F64)
            kn_ref_set(dst, w.off[0], kn_i64_to_f64_sticky(kn_ref_get_int(src, w.off[1])));
        else
            kn_ref_set(dst, w.off[0], kn_ref_get(src, w.off[1]));
    }
    return KN_DONE;
}

/* dst[i] = value + i * step in f64, rounded once. */
kn_status kn_ref_fill(const void *args)
{
    const kn_fill_args *a = args;
    for (kn_ref_walk w = kn_ref_walk_over(&a->dst, NULL); w.more; kn_ref_walk_next(&w))
        kn_ref_set(&a->dst, w.off[0], a->step != 0 ? a->value + (double)w.i * a->step : a->value);
    return KN_DONE;
}

kn_status kn_ref_where(const void *args)
{
    const kn_where_args *a = args;
    kn_ref_walk w = kn_ref_walk_over(&a->dst, &a->cond, &a->a, &a->b, NULL);
    for (; w.more; kn_ref_walk_next(&w)) {
        if (kn_ref_get_int(&a->cond, w.off[1]))
            move_element(&a->dst, w.off[0], &a->a, w.off[2]);
        else
            move_element(&a->dst, w.off[0], &a->b, w.off[3]);
    }
    return KN_DONE;
}

/* ---- binary -------------------------------------------------------------------------------- */

#define FORMULA_CASE(kind, name, function, reads, dtypes, domain, work, formula)                   \
    case KN_##kind:                                                                                \
        return formula;

static double binary(kn_binary kind, double a, double b, double p0)
{
    switch (kind) {
        KN_BINARY_KINDS(FORMULA_CASE)
    default:
        return a;
    }
}

static int64_t binary_int(kn_binary kind, int64_t a, int64_t b)
{
    switch (kind) {
        KN_COMPARISON_KINDS(FORMULA_CASE)
    default:
        return kn_int_arithmetic(kind, a, b);
    }
}

kn_status kn_ref_binary(const void *args)
{
    const kn_binary_args *p = args;
    const kn_array *dst = &p->dst, *a = &p->a, *b = &p->b;
    bool ints = kn_dtype_is_int(a->dtype);
    for (kn_ref_walk w = kn_ref_walk_over(dst, a, b, NULL); w.more; kn_ref_walk_next(&w)) {
        if (ints)
            kn_ref_set_int(
                dst, w.off[0],
                binary_int(p->kind, kn_ref_get_int(a, w.off[1]), kn_ref_get_int(b, w.off[2])));
        else
            kn_ref_set_computed(
                dst, w.off[0],
                binary(p->kind, kn_ref_get(a, w.off[1]), kn_ref_get(b, w.off[2]), p->p0));
    }
    return KN_DONE;
}
