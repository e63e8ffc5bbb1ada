/* nn/orthogonal.h (private): orthogonal initial values. */
#ifndef KNAP_NN_ORTHOGONAL_H
#define KNAP_NN_ORTHOGONAL_H

#include "nn/nn_internal.h"

/* init.c. Fills dst with elements from start on of a random stream. */
bool kn_init_draw(kn_tensor *dst, kn_random kind, uint64_t seed, uint64_t stream, int64_t start,
                  double p0, double p1);
/* Fills dst with elements from start on of an orthogonal matrix. */
bool kn_init_orthogonal(const kn_initializer *init, uint64_t seed, uint64_t stream, kn_tensor *dst,
                        int64_t start);

#endif
