/* knap.h: everything a user's program includes. */
#ifndef KNAP_H
#define KNAP_H

#include "kernels/types.h"
#include "kernels/error.h"
#include "kernels/memory.h"
#include "kernels/stream.h"
#include "kernels/trace.h"
#include "kernels/device.h"
#include "kernels/graph.h"
#include "tensor/tensor.h"
#include "tensor/safetensors.h"
#include "autograd/autograd.h"
#include "autograd/operations.h"
#include "autograd/functional.h"
#include "autograd/function.h"
#include "autograd/gradcheck.h"
#include "data/loader.h"
#include "data/data.h"
#include "data/mnist.h"
#include "nn/nn.h"
#include "nn/layers.h"
#include "optim/optim.h"
#include "comm/comm.h"
#include "fsdp/fsdp.h"
#include "fsdp/replay.h"
#include "models/gpt.h"
#include "models/llama.h"
#include "models/text.h"
#include "models/tokenizer.h"
#include "models/sample.h"
#include "models/checkpoint.h"
#include "models/run_folder.h"
#include "models/image.h"
#include "models/options.h"
#include "places.h" /* comes last: its macros have the functions' names */

#endif
