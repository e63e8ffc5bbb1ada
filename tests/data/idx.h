/* tests/data/idx.h: ten small images with their labels as the idx files of MNIST. */
#ifndef KNAP_TESTS_DATA_IDX_H
#define KNAP_TESTS_DATA_IDX_H

#include "tests/models/temp.h"

enum {
    COUNT = 10,
    SIDE = 3,
    PIXELS = SIDE * SIDE,
    IMAGE_BYTES = 16 + COUNT * PIXELS,
    LABEL_BYTES = 8 + COUNT
};

/* Ten images of 3 x 3; every pixel of image i is 20 i, its label is i. */
static inline void make_idx(unsigned char *images, unsigned char *labels)
{
    memset(images, 0, 16);
    memset(labels, 0, 8);
    images[2] = 8;
    images[3] = 3;
    images[7] = COUNT;
    images[11] = images[15] = SIDE;
    labels[2] = 8;
    labels[3] = 1;
    labels[7] = COUNT;
    for (int i = 0; i < COUNT; i++) {
        memset(images + 16 + i * PIXELS, 20 * i, PIXELS);
        labels[8 + i] = (unsigned char)i;
    }
}

static inline void write_both(const unsigned char *images, size_t n, const unsigned char *labels,
                              size_t m)
{
    write_temp("t10k-images-idx3-ubyte", images, n);
    write_temp("t10k-labels-idx1-ubyte", labels, m);
}

#endif
