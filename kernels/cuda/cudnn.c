#include "kernels/cuda/runtime.h"
const kn_layer kn_cuda_cudnn = { .name = "cudnn" };
