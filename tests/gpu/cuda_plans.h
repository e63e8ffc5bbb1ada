/* tests/gpu/cuda_plans.h (private): the cases of cuda_plans, a file a family. */
#ifndef KNAP_TESTS_KERNELS_CUDA_PLANS_H
#define KNAP_TESTS_KERNELS_CUDA_PLANS_H

#include "kernels/cuda/cudnn/cudnn.h"
#include "kernels/kernels_internal.h"

/* True if this run makes the next plan: with K/N every N-th; those of f32 together, in the first
 * run. */
bool plan_mine(bool f32);
/* One line of TAP; numbers it and counts failures. */
void plan_line(bool ok, const char *what, bool made, const kn_dnn_found *found);
/* Convolution and batch norm. */
void plan_images(const char *json, int arch);

#endif
