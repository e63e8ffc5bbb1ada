/* tests/models/real_steps.h: small sizes of the bundled models, and what trainers do with them:
 * steps of every optimizer, clipping, loss scaling, averages of weights, evaluations. For tests of
 * the kernels that these launch. */
#ifndef KNAP_TESTS_REAL_STEPS_H
#define KNAP_TESTS_REAL_STEPS_H

#include "knap.h"

typedef enum real_model {
    REAL_GPT,
    REAL_LLAMA,
    REAL_RESNET, /* bottlenecks behind a 7x7 convolution and pooling */
    REAL_CIFAR,  /* blocks of two 3x3 convolutions, shortcuts without parameters */
    REAL_VIT,
    REAL_MODELS
} real_model;
enum { REAL_ADAMW, REAL_SGD, REAL_MUON, REAL_OPTIMIZERS };

typedef struct real_options {
    real_model model;
    kn_dtype dtype;        /* in which it computes; KN_F16 with a scaler of losses */
    kn_dtype reduce_dtype; /* of its gradients */
    kn_device device;
    int optimizer;
    bool tiny;          /* where kernels are emulated */
    bool channels_last; /* the images */
    bool mixed;         /* labels of images are probabilities */
    bool recompute;
    bool sync;         /* batch norms take the batches of comm as one */
    double clip_order; /* 0: 2 */
    kn_comm *comm;     /* NULL: alone */
} real_options;

typedef struct real_steps real_steps;

const char *real_model_name(real_model m);
/* Whether it takes images. */
bool real_model_sees(real_model m);
/* NULL with an error. */
real_steps *real_steps_begin(real_options o);
/* One step: forward, backward, clipping, optimizer, averages. */
bool real_steps_train(real_steps *s);
/* A forward in evaluation mode, with the averages in the weights' place. */
bool real_steps_evaluate(real_steps *s);
void real_steps_end(real_steps *s); /* may be NULL */

#endif
