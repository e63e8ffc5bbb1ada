/* examples/course/8_failure.c: exercise 8, a training with three faults
 * (docs/course/8-failure.md). */
#include "course.h"
#include <math.h>

enum { MICROS = 3 }; /* of a step */

/* ==== your part ==== */
static void after_forward(unit *u)
{
    if (u->index < UNITS - 1) /* the last one is needed again at once */
        release(u);
}

static void whole(unit *u)
{
    reduce(u, u->grad);
    release(u);
}

void begin(unit *u, kn_comm *ranks)
{
    cut(u, ranks);
    attach(u, (verbs){ gather, after_forward, gather, whole });
}

/* The factor that makes the largest of u's mean gradients CLIP, if it is more. */
static float clip(const unit *u)
{
    float largest = 0;
    for (int64_t k = 0; k < u->part; k++)
        largest = fmaxf(largest, fabsf(u->grad[k] / MICROS));
    return largest > CLIP ? CLIP / largest : 1;
}

static void validate(net *n, kn_comm *ranks, int step)
{
    bool mode = kn_set_grad_mode(false);
    double loss = kn_item(net_loss(n, 1000));
    kn_set_grad_mode(mode);
    if (kn_ok() && kn_rank(ranks) == 0)
        printf("step %d: the validation loss is %.4f\n", step, loss);
}

/* A step on MICROS micro-batches. */
void train_step(net *n, kn_comm *ranks, int step)
{
    int size = kn_comm_size(ranks), rank = kn_rank(ranks);
    for (int m = rank; m < MICROS; m += size)
        kn_backward(net_loss(n, step * MICROS + m));
    validate(n, ranks, step);
    for (int i = 0; i < UNITS; i++) {
        unit *u = &n->unit[i];
        float factor = clip(u);
        for (int64_t k = 0; k < u->part; k++) {
            u->shard[k] -= LR * (factor * (u->grad[k] / MICROS));
            u->grad[k] = 0;
        }
    }
}
/* ==== end of your part ==== */
