/* nn/matrices.h (private): a step of an optimizer that sees whole matrices, for the source of
 * sharded parameters (kn_param_source.matrices). */
#ifndef KNAP_NN_MATRICES_H
#define KNAP_NN_MATRICES_H

#include "nn/nn_internal.h"

/* Each matrix is whole on one rank. i counts the parameters. The source calls begin, whole and end
 * for all parameters that have the function; collective. */
typedef struct kn_matrix_step {
    const kn_param *const *param; /* the same on all ranks */
    const double *cost;           /* of whole(i), for the choice of its rank */
    int count;
    kn_dtype dtype; /* of the values that go over the ranks */
    int64_t window; /* bytes of whole matrices to have at a time, where more than one is */
    /* Writes this rank's part of a matrix (1-d, as many elements as the master) to part. */
    bool (*begin)(void *arg, int i, kn_tensor *part);
    /* Changes the matrix (1-d, all elements) in place: on one rank. */
    bool (*whole)(void *arg, int i, kn_tensor *matrix);
    /* Takes this rank's part of the changed matrix. */
    bool (*end)(void *arg, int i, kn_tensor *part);
    void *arg;
} kn_matrix_step;

#endif
