/* tests/kernels/overlay_images.h (private): images of overlay cases, and the sizes and errors of
 * convolutions. */
#ifndef KNAP_TESTS_KERNELS_OVERLAY_IMAGES_H
#define KNAP_TESTS_KERNELS_OVERLAY_IMAGES_H

#include "tests/kernels/overlay.h"

static inline kn_array image_last(overlay_case *c, kn_dtype t, values v, const int64_t *shape)
{
    const int64_t last[4] = { shape[0], shape[2], shape[3], shape[1] };
    static const int from[4] = { 0, 3, 1, 2 };
    kn_array a = case_array(c, t, case_pick(c, 4) ? DENSE : PITCHED, v, 4, last), b = a;
    for (int d = 0; d < 4; d++) {
        b.shape[d] = a.shape[from[d]];
        b.stride[d] = a.stride[from[d]];
    }
    case_note(c, " channels last");
    return b;
}

/* [N,C,H,W]: a third of the time channels-last, else any layout. */
static inline kn_array image(overlay_case *c, kn_dtype t, values v, const int64_t *shape)
{
    if (case_pick(c, 3) > 0)
        return case_array(c, t, case_layout(c, OUTPUT_LAYOUTS), v, 4, shape);
    return image_last(c, t, v, shape);
}

static inline int64_t positions(int64_t H, int64_t R, int64_t pad, int64_t stride, int64_t dilation)
{
    const int64_t room = H + 2 * pad - (R - 1) * dilation - 1;
    return room < 0 ? 0 : room / stride + 1;
}

/* Of a sum of so many products of values around 2. */
static inline double sum_error(int64_t terms)
{
    return 1.6e-6 * (double)(terms + 1);
}

#endif
