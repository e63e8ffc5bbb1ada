/* knap.h: everything a user's program includes. */
#ifndef KNAP_H
#define KNAP_H

#include "kernels/base.h"
#include "tensor/tensor.h"
#include "tensor/safetensors.h"
#include "autograd/autograd.h"
#include "nn/nn.h"
#include "optim/optim.h"
#include "fsdp/comm/comm.h"
#include "fsdp/fsdp.h"
#include "models/gpt.h"
#include "models/data.h"

#endif
