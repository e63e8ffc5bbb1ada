/* tests/models/ids.h: input of small language models, whose vocabulary is 11. */
#ifndef KNAP_TESTS_MODELS_IDS_H
#define KNAP_TESTS_MODELS_IDS_H

#include "tensor/tensor.h"

static inline kn_tensor *ids_of(int64_t batch, int64_t len, int shift)
{
    int64_t ids[64];
    for (int64_t i = 0; i < batch * len; i++)
        ids[i] = (3 * i + shift) % 11;
    return kn_from(KN_I64, KN_CPU, ids, KN_SHAPE(batch, len));
}

#endif
