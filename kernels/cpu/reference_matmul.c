/* kernels/cpu/reference_matmul.c: the matrix product, one dot product an element. */
#include "kernels/cpu/reference.h"

/* dst[..., m, n] = sum_k a[..., m, k] b[..., k, n] + bias[n], summed in f64, rounded once; add:
 * plus what dst held. */
kn_status kn_ref_matmul(const void *args)
{
    const kn_matmul_args *p = args;
    const kn_array *dst = &p->dst, *a = &p->a, *b = &p->b, *bias = &p->bias;
    int row = dst->ndim - 2, col = dst->ndim - 1;
    int64_t M = dst->shape[row], N = dst->shape[col], K = a->shape[col];
    const kn_array *arrays[] = { dst, a, b };
    kn_ref_walk w = kn_ref_walk_shape(row, dst->shape, 3, arrays);
    for (; w.more; kn_ref_walk_next(&w)) {
        for (int64_t m = 0; m < M; m++) {
            for (int64_t n = 0; n < N; n++) {
                int64_t ai = w.off[1] + m * a->stride[row], bi = w.off[2] + n * b->stride[col];
                double sum = 0;
                for (int64_t k = 0; k < K; k++)
                    sum += kn_ref_get(a, ai + k * a->stride[col]) *
                           kn_ref_get(b, bi + k * b->stride[row]);
                if (bias->data)
                    sum += kn_ref_get(bias, n * bias->stride[0]);
                const int64_t to = w.off[0] + m * dst->stride[row] + n * dst->stride[col];
                kn_ref_set_computed(dst, to, p->add ? kn_ref_get(dst, to) + sum : sum);
            }
        }
    }
    return KN_DONE;
}
