/* autograd/losses.h (private): shared by the files of losses; defined in ops_losses.c. */
#ifndef KNAP_AUTOGRAD_LOSSES_H
#define KNAP_AUTOGRAD_LOSSES_H

#include "autograd/ops.h"

/* Checks, false with an error that names op. BATCHMEAN is kn_kl_div's own. */
bool kn_loss_reduction_is_one(const char *op, kn_loss_reduction r);
bool kn_loss_same_device(const char *op, const kn_tensor *a, const kn_tensor *b);
/* The index that isn't counted, of an option .ignore_index. */
int64_t kn_loss_ignored(int64_t given);
/* x and target: floats of one dtype, shape and device. */
bool kn_loss_pair(const char *op, const kn_tensor *x, const kn_tensor *target);

/* The mean or the sum of loss, or loss itself; an error of op where r is none of these. */
kn_tensor *kn_loss_reduced(const char *op, kn_tensor *loss, kn_loss_reduction r);

/* Whether a number among op's options is finite, and at least so large; else an error. */
bool kn_loss_number(const char *op, const char *name, double value, double least);

#endif
