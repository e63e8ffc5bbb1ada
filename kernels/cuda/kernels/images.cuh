/* kernels/cuda/kernels/images.cuh (private): where the elements of images [N,C,H,W] lie. */
#ifndef KNAP_KERNELS_CUDA_IMAGES_CUH
#define KNAP_KERNELS_CUDA_IMAGES_CUH

#include "kernels/cuda/kernels/elements.cuh"

/* Strides of an image's dims, or an element's place in it. */
struct kn_image {
    int64_t n, c, h, w;
};

static inline kn_image kn_image_of(const kn_array *a)
{
    return { a->stride[0], a->stride[1], a->stride[2], a->stride[3] };
}

static __device__ inline int64_t kn_image_divide(int64_t a, int64_t b, bool small)
{
    return small ? (int64_t)((uint32_t)a / (uint32_t)b) : a / b;
}

/* The place of element i of planes of H x W. last: its channels come before positions; small: all
 * counts fit 32 bits. */
static __device__ inline kn_image kn_image_place(int64_t i, int64_t channels, int64_t H, int64_t W,
                                                 bool last, bool small)
{
    kn_image p;
    int64_t q = i;
    if (last) {
        q = kn_image_divide(i, channels, small);
        p.c = i - q * channels;
    }
    int64_t row = kn_image_divide(q, W, small);
    p.w = q - row * W;
    q = kn_image_divide(row, H, small);
    p.h = row - q * H;
    p.n = q;
    if (!last) {
        p.n = kn_image_divide(q, channels, small);
        p.c = q - p.n * channels;
    }
    return p;
}

#endif
