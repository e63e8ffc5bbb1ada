/* nn/means.h (private): what makes means of the raw sums in gradients. */
#ifndef KNAP_NN_MEANS_H
#define KNAP_NN_MEANS_H

#include "nn/nn_internal.h"

/* A gradient of m's tree that some optimizer steps waits for it and carries scale. */
bool kn_scale_waits(kn_module_impl *m, const kn_tensor *scale);
/* Makes means of the raw sums in m's gradients (means.c). */
typedef struct kn_means {
    double base;      /* divides most of them */
    double *by;       /* divides the gradient of kn_params' i-th */
    kn_tensor *scale; /* divides all: their losses' (kn_passes); a reference; NULL: 1 */
} kn_means;
/* False where gradients carry different loss scales or, unless what is NULL, an optimizer's are of
 * different backwards; what begins that message. The caller ends it in either case. */
bool kn_means_begin(kn_means *means, kn_module_impl *m, const char *what);
void kn_means_end(kn_means *means);
/* g, the i-th gradient, such that base divides it: g itself where it does. */
kn_tensor *kn_grad_by_mean(kn_tensor *g, const kn_means *means, int i);

/* Elements of a row of p, a table whose gradient stays rows; 0: it is none. */
int64_t kn_param_row(const kn_param *p);
/* The gradient of such a table, in its leaf: for a kn_param_source. */
kn_tensor *kn_table_grad(const kn_param *p);
kn_tensor *kn_table_row_ids(const kn_param *p);

#endif
