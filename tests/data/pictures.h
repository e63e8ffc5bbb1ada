/* tests/data/pictures.h: small images of a formula. */
#ifndef KNAP_TESTS_DATA_PICTURES_H
#define KNAP_TESTS_DATA_PICTURES_H

#include "autograd/operations.h"
#include "data/images.h"
#include "tensor/tensor_internal.h"
#include "tests/models/temp.h"

static inline uint8_t formula(int64_t y, int64_t x, int64_t c)
{
    return (uint8_t)(y * 37 + x * 11 + c * 101 + y * x * 5);
}

/* u8 [C,H,W] of the formula. */
static inline kn_tensor *picture(int64_t channels, int64_t height, int64_t width)
{
    kn_tensor *t = kn_empty(KN_U8, KN_CPU, KN_SHAPE(channels, height, width));
    uint8_t *p = kn_data(t);
    for (int64_t c = 0; c < channels; c++)
        for (int64_t y = 0; y < height; y++)
            for (int64_t x = 0; x < width; x++)
                *p++ = formula(y, x, c);
    return t;
}

/* Batches of CIFAR in the folder of temporary files: count images, pixel j of image i is (i + j) %
 * 256, its label i % classes; CIFAR-100 has a coarse label, i % 20, in front. */
static inline void write_batch(const char *name, int first, int count, bool hundred)
{
    const size_t record = 3072 + 1 + hundred;
    OWNED_BYTES uint8_t *bytes = malloc(record * (size_t)count);
    for (int i = 0; i < count; i++) {
        uint8_t *p = bytes + (size_t)i * record;
        if (hundred)
            *p++ = (uint8_t)((first + i) % 20);
        *p++ = (uint8_t)((first + i) % (hundred ? 100 : 10));
        for (int j = 0; j < 3072; j++)
            p[j] = (uint8_t)(first + i + j);
    }
    write_temp(name, bytes, record * (size_t)count);
}

/* Five batches of each images, and a test batch of as many. */
static inline const char *write_cifar10(int each)
{
    char name[32];
    for (int b = 0; b < 5; b++) {
        snprintf(name, sizeof name, "data_batch_%d.bin", b + 1);
        write_batch(name, b * each, each, false);
    }
    write_batch("test_batch.bin", 100, each, false);
    return temp_path("");
}

#endif
