/* optim/optim.h: optimizers over this rank's part of the parameters, schedules, clipping.
 *
 * Gradients are raw sums over micro-batches; the step divides by their number and applies the clip
 * factor while it reads them, so no gradient is rewritten. Two backwards before a step are
 * therefore averaged, where PyTorch adds them. A backward counts as a micro-batch where it brought
 * a gradient to any parameter of the tree; kn_zero_grad drops gradients with their count. */
#ifndef KNAP_OPTIM_OPTIM_H
#define KNAP_OPTIM_OPTIM_H

#include "nn/nn.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_optim kn_optim;

/* Which of kn_muon's two rules updates the parameters of a group. */
typedef enum kn_muon_use {
    KN_MUON_DEFAULT = 0, /* as kn_muon says */
    KN_MUON_MATRIX,      /* Muon: parameters of at least 2 dims */
    KN_MUON_ADAMW
} kn_muon_use;

/* Options for parameters whose name matches one of pattern (fnmatch: "*.bias, *.scale"); first
 * match wins. */
typedef struct kn_optim_group {
    const char *pattern;
    double lr_mul;       /* 0: 1; KN_ZERO: none */
    double weight_decay; /* 0: the optimizer's; KN_ZERO: none */
    int min_ndim;        /* only parameters with at least so many dims (0: all) */
    int max_ndim;        /* and at most so many (0: all) */
    kn_muon_use muon;    /* beside kn_muon */
    /* The optimizer leaves these as they are and keeps no state of them. Their gradients are
     * computed and counted in norms all the same; kn_freeze saves them. */
    bool frozen;
} kn_optim_group;

/* The group of parameter p as its number in .groups, or -1: none, what the optimizer itself has. p
 * has the name; kn_ndim and kn_shape of p->tensor give the shape; m is the module that declared it,
 * with kn_module_class and kn_module_path. The same on all ranks. Called while the optimizer is
 * made. */
typedef int (*kn_group_fn)(const kn_param *p, kn_module *m, void *arg);

/* Among the options of every optimizer: the groups; and how parameters of bf16 and f16, and their
 * states, are rounded after a step that computes in f32: to nearest, where an update of less than
 * half of a parameter's last digit is lost, or at random, where it comes through with the
 * probability that makes the mean right. The bits are a function of (kn_seed, step, name, element):
 * the same on any number of ranks, with any strategy and layout. */
#define KN_GROUP_OPTIONS                                                                           \
    const kn_optim_group *groups; /* array of group_count; copied */                               \
    int group_count;                                                                               \
    kn_group_fn group_of; /* chooses the groups, which then have no patterns */                    \
    void *group_arg;      /* passed to group_of; only with it */                                   \
    bool stochastic_rounding;                                                                      \
    bool maximize /* steps along the gradient, not against it */

/* AdamW; with .l2 Adam (torch.optim.Adam), .amsgrad as Reddi et al., arXiv:1904.09237. A step with
 * one of these two is made of operations: it waits for the device and can't be recorded, as those
 * of kn_own_optim. */
typedef struct kn_adamw_options {
    KN_BEGIN_OPTIONS;
    double lr;                /* required; KN_ZERO: 0, until kn_set_lr */
    double beta1, beta2, eps; /* 0: 0.9, 0.999, 1e-8; KN_ZERO: 0 */
    double weight_decay;      /* 0: 0.01; KN_ZERO: none */
    bool l2;      /* adds weight_decay p to the gradient, and takes nothing from p; 0: none */
    bool amsgrad; /* divides by the largest average of squares so far, a third state */
    KN_GROUP_OPTIONS;
} kn_adamw_options;
/* Owned by the caller (kn_optim_free). Make it after wrapping with fsdp: kn_step refuses where the
 * module was sharded afterwards. */
KN_API kn_optim *kn_adamw_(void *module, kn_adamw_options o);
#define kn_adamw(module, ...) kn_adamw_(module, KN_OPTIONS(kn_adamw_options, __VA_ARGS__))

/* Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv:2302.06675): steps of
 * equal size along the sign of an average of gradients; one state where AdamW has two. Its authors
 * take AdamW's rate over 3 to 10, and the decay times as much. */
typedef struct kn_lion_options {
    KN_BEGIN_OPTIONS;
    double lr;           /* required; KN_ZERO: 0, until kn_set_lr */
    double beta1, beta2; /* 0: 0.9, 0.99; KN_ZERO: 0 */
    double weight_decay; /* decoupled, as AdamW's */
    KN_GROUP_OPTIONS;
} kn_lion_options;
KN_API kn_optim *kn_lion_(void *module, kn_lion_options o);
#define kn_lion(module, ...) kn_lion_(module, KN_OPTIONS(kn_lion_options, __VA_ARGS__))

typedef struct kn_sgd_options {
    KN_BEGIN_OPTIONS;
    double lr;        /* required; KN_ZERO: 0, until kn_set_lr */
    double momentum;  /* in [0, 1) */
    double dampening; /* in [0, 1]; only with momentum */
    double weight_decay;
    bool nesterov; /* only with momentum and without dampening */
    KN_GROUP_OPTIONS;
} kn_sgd_options;
KN_API kn_optim *kn_sgd_(void *module, kn_sgd_options o);
#define kn_sgd(module, ...) kn_sgd_(module, KN_OPTIONS(kn_sgd_options, __VA_ARGS__))

/* AdaGrad (Duchi et al. 2011), as torch.optim.Adagrad: s += g^2, p -= rate g / (sqrt(s) + eps),
 * where rate is lr / (1 + (step - 1) lr_decay) and decay adds weight_decay p to g. Tables whose
 * gradients stay rows (kn_keep_rows) have one s for each row with .row_wise: s += mean of the row's
 * g^2 (FBGEMM's row-wise AdaGrad), of N numbers where there would be N C. A step waits for the
 * device and can't be recorded, as those of kn_own_optim. */
typedef struct kn_adagrad_options {
    KN_BEGIN_OPTIONS;
    double lr;       /* required; KN_ZERO: 0, until kn_set_lr */
    double lr_decay; /* at least 0 */
    double eps;      /* 0: 1e-10; KN_ZERO: 0 */
    double weight_decay;
    bool row_wise;
    KN_GROUP_OPTIONS;
} kn_adagrad_options;
KN_API kn_optim *kn_adagrad_(void *module, kn_adagrad_options o);
#define kn_adagrad(module, ...) kn_adagrad_(module, KN_OPTIONS(kn_adagrad_options, __VA_ARGS__))

/* Muon (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024), as
 * torch.optim.Muon: the momentum of a matrix, made orthogonal by .ns_steps Newton-Schulz steps, is
 * its step. AdamW updates the other parameters. A matrix is a parameter of 2 dims, or of more (conv
 * weights), which is seen as [its first dim, the rest]: its rows are outputs, but inputs where a
 * layer has .in_out. By default all of these take Muon, except vectors ([n, 1] and [1, n]), weights
 * of kn_embedding (tied to a head, too), and output heads: those whose name has a part "head" or
 * "lm_head" before its last, as "lm_head.weight". A head of another name takes Muon. Groups say
 * otherwise by .muon.
 *
 * Sharded: each rank keeps its part of the momentum, whatever the layout. In a step the parts of a
 * matrix go to one rank, which makes it orthogonal; matrices are dealt so that ranks, those of all
 * replicas, have equal FLOPs to do, .window bytes at a time. Bits are the same for any number of
 * ranks. Where parameters are offloaded, the orthogonal factors are computed where they lie. Its
 * steps can't be recorded (kn_replay_step). */
typedef enum kn_muon_scale {
    KN_MUON_SCALE_DEFAULT = 0, /* KN_MUON_ORIGINAL */
    KN_MUON_ORIGINAL,          /* steps of lr sqrt(max(1, rows / cols)) */
    KN_MUON_MATCH_ADAMW,       /* of lr 0.2 sqrt(max(rows, cols)): AdamW's rates fit (Moonshot) */
    KN_MUON_SPECTRAL           /* of lr sqrt(rows / cols) */
} kn_muon_scale;
typedef struct kn_muon_options {
    KN_BEGIN_OPTIONS;
    double lr;        /* required; KN_ZERO: 0, until kn_set_lr */
    double momentum;  /* in [0, 1); 0: 0.95; KN_ZERO: 0 */
    bool no_nesterov; /* the direction is the momentum itself */
    kn_muon_scale scale;
    double ns[3]; /* coefficients of a step; all 0: 3.4445, -4.7750, 2.0315 */
    int ns_steps; /* 1 to 99; 0: 5 */
    double eps;   /* at least 1e-37; a matrix of a smaller norm isn't brought to norm 1; 0: 1e-7 */
    kn_dtype ns_dtype;   /* of the products: KN_BF16 (0), KN_F32, KN_F64 */
    double weight_decay; /* decoupled, of both rules; 0: 0.1; KN_ZERO: none */
    double adamw_lr_mul; /* AdamW's rate is lr times this; 0: 1; KN_ZERO: 0 */
    double beta1, beta2; /* AdamW's; 0: 0.9, 0.999; KN_ZERO: 0 */
    double adamw_eps;    /* 0: 1e-8; KN_ZERO: 0 */
    int64_t window;      /* bytes of whole matrices on a rank; 0: 256 MiB. A larger one is alone */
    KN_GROUP_OPTIONS;
} kn_muon_options;
KN_API kn_optim *kn_muon_(void *module, kn_muon_options o);
#define kn_muon(module, ...) kn_muon_(module, KN_OPTIONS(kn_muon_options, __VA_ARGS__))
/* Seconds that the matrices of o's last step took on this rank, with its waits for others. On a GPU
 * those that the launches took. 0 for another optimizer than kn_muon. */
KN_API double kn_muon_seconds(const kn_optim *o);

/* ---- an optimizer of one's own --------------------------------------------------------------- */

/* A part of a parameter, as the update of kn_own_optim sees it: tensors of one dimension, f32 (f64
 * for f64 parameters), on their device. Those of bf16 and f16 are rounded to it afterwards. */
typedef struct kn_optim_part {
    const char *name;        /* of the parameter, dotted */
    kn_tensor *param;        /* this rank's values, or some of them: to be written in place */
    kn_tensor *grad;         /* the mean over micro-batches, clipped, without a loss scale */
    kn_tensor *state[3];     /* NULL where .state names none; 0 at first, to be written in place */
    double lr, weight_decay; /* those of the parameter's group */
    int64_t step;            /* from 1 */
    int64_t row; /* of a table whose gradient stays rows: param and grad are whole rows of so many
                  * elements, those that have a gradient; else 0 */
} kn_optim_part;
/* Writes p->param and p->state with kn_copy_ and the like; nothing is recorded on the tape. What a
 * parameter's elements get must depend on themselves alone: parameters may be cut anywhere, over
 * ranks and over calls. False, or an error, ends kn_step. */
typedef bool (*kn_optim_rule)(const kn_optim_part *p, void *arg);

typedef struct kn_own_optim_options {
    KN_BEGIN_OPTIONS;
    kn_optim_rule update; /* required */
    void *arg;            /* passed to update; borrowed */
    const char *name;     /* for messages; copied */
    const char *state[3]; /* names of the states in checkpoints; copied */
    double lr;            /* required; KN_ZERO: 0, until kn_set_lr */
    double weight_decay;
    KN_GROUP_OPTIONS;
} kn_own_optim_options;
/* An optimizer with an update of one's own; sharding, offload, accumulation, clipping, loss scaling
 * and checkpoints treat it as they do AdamW. A step takes memory for the mean gradient of one part
 * and for what update makes. It can't be recorded (kn_replay_step). See examples/optimizer.c. */
KN_API kn_optim *kn_own_optim_(void *module, kn_own_optim_options o);
#define kn_own_optim(module, ...)                                                                  \
    kn_own_optim_(module, KN_OPTIONS(kn_own_optim_options, __VA_ARGS__))

/* ---- steps ----------------------------------------------------------------------------------- */

/* Before or after its module. From then on any call with o is an error, as it is once the module
 * was freed. */
KN_API void kn_optim_free(kn_optim *o);
/* Updates every parameter that has a gradient, drops the gradients (the next backward assigns) and
 * increments the step number (kn_get_step). Errors: an error stands; no parameter has a gradient;
 * fsdp hasn't reduced a gradient yet; gradients sum different numbers of micro-batches. Optimizers
 * over different parts of a tree each divide by the micro-batches of their part. */
KN_API bool kn_step(kn_optim *o);
KN_API void kn_set_lr(kn_optim *o, double lr); /* of the next steps */
KN_API double kn_lr(const kn_optim *o);        /* of the next step */
/* Number of steps taken, without those that a scaler skipped. With a scaler on a GPU it waits for
 * the last step. */
KN_API int64_t kn_optim_steps(const kn_optim *o);

/* Name of the k-th tensor that the optimizer keeps for each parameter, for checkpoints: k = 0, 1,
 * and so on; NULL after the last one. AdamW: "exp_avg", "exp_avg_sq", with .amsgrad
 * "max_exp_avg_sq"; Lion: "exp_avg";
 * SGD with momentum: "momentum"; SGD without: nothing. */
KN_API const char *kn_optim_state_name(const kn_optim *o, int k);
/* The same of those that it keeps for parameter number param of kn_params(kn_optim_module(o)):
 * parameters differ where rules do. kn_muon: "momentum" of matrices. */
KN_API const char *kn_optim_state_name_of(const kn_optim *o, int param, int k);
/* The tensor of that name for parameter number i of kn_params(kn_optim_module(o)): 1-d, as many
 * elements as its master. Where no step needed it yet, it is made here, filled with 0. Borrowed.
 * NULL for another name, and for a frozen parameter that no step or load gave one. */
KN_API kn_tensor *kn_optim_state(const kn_optim *o, int param, const char *what);
KN_API void kn_optim_set_steps(kn_optim *o, int64_t steps); /* for a program that resumes */
/* The module that o was made for. Borrowed; NULL for NULL. */
KN_API kn_module *kn_optim_module(const kn_optim *o);

/* Clips the gradients of module by their global 2-norm, over all ranks, of the mean over
 * micro-batches. The next steps of optimizers for module or for modules below it read the gradients
 * scaled so that this norm is at most max_norm (<= 0: the norm is only measured, which changes
 * nothing). A step refuses gradients that came after that. Returns the norm before clipping, an f32
 * without dims on the device of the gradients (kn_item reads it); it isn't finite where a gradient
 * isn't. Collective where the module is sharded. On a GPU the host doesn't wait: norm and factor
 * stay in device memory, where the step reads them.
 *
 * With M the largest magnitude, the sum of (|g| / M)^p is taken in integers, each term rounded down
 * to a multiple of 2^-60 (for p = 2 with M's power of two instead of M): the norm is the same bits
 * on every rank and for every partition of the gradients over ranks, and off by less than elements
 * * 2^-60 of the sum, beside the rounding of each term and of the result. */
KN_API kn_tensor *kn_clip_grad_norm(void *module, double max_norm);
/* The same with the p-norm, p in (0, HUGE_VAL]: (sum |g|^p)^(1/p), or max |g| for HUGE_VAL, which
 * is exact. */
KN_API kn_tensor *kn_clip_grad_norm_p(void *module, double max_norm, double p);
/* The next steps of optimizers for module or for modules below it clamp each element of the mean
 * gradients, after micro-batches, ranks and a loss scale are divided out, to +- value, which is
 * above 0 (torch.nn.utils.clip_grad_value_); NaN stays. kn_param_grad shows the raw sums as they
 * are. After kn_clip_grad_norm it clamps what that left; before it, the norm is that of the clamped
 * gradients, of which it then takes a copy in memory. A step refuses gradients that came after it.
 * Nothing is sent. */
KN_API bool kn_clip_grad_value(void *module, double value);
/* The next step of module's gradients, and of those below it, is as without clipping. */
KN_API bool kn_unclip_grads(void *module);
/* The first parameter, as its number in kn_params, whose part on this rank had a gradient that
 * wasn't finite when kn_clip_grad_norm last measured module; -1 if there was none. An i64 without
 * dims, on the device of the norm. Doesn't wait. */
KN_API kn_tensor *kn_first_nonfinite_grad(void *module);
/* Name of the first parameter whose gradient isn't finite on some rank; NULL if all are. Waits for
 * the device. Collective where the module is sharded. Borrowed. */
KN_API const char *kn_find_nonfinite_grad(void *module);

/* ---- loss scaling for f16 -------------------------------------------------------------------- */

/* Small gradients vanish in f16, large ones overflow: the loss is multiplied by a scale, the step
 * divides by it. A step whose gradients overflowed on any rank is skipped on all, and the scale
 * lowered; after .interval iterations without an overflow it is raised (Micikevicius et al. 2018,
 * "Mixed precision training"). Gradients carry the scale of their loss: a scaled loss that runs no
 * backward changes nothing. A step of gradients that are sums over losses of different scales, or
 * of scaled ones and others, is an error.
 *
 *     kn_backward(kn_scale_loss(s, loss));
 *     kn_clip_grad_norm(&net, 1.0);      // sees the gradients without the scale
 *     kn_scaler_step(s, opt);            // instead of kn_step
 *
 * With .several optimizers the scale moves once an iteration, by all of its steps:
 *
 *     kn_scaler_step(s, generator), kn_scaler_step(s, critic);
 *     kn_scaler_update(s); */
typedef struct kn_scaler kn_scaler;
typedef struct kn_scaler_options {
    KN_BEGIN_OPTIONS;
    double init_scale; /* 0: 65536 */
    double growth;     /* factor, above 1; 0: 2 */
    double backoff;    /* factor, below 1; 0: 0.5 */
    int64_t interval;  /* iterations; 0: 2000 */
    bool several;      /* kn_scaler_update ends an iteration; else each kn_scaler_step does */
} kn_scaler_options;
/* For the gradients of module's tree. Owned by the caller; the module must outlive its use. */
KN_API kn_scaler *kn_scaler_new_(void *module, kn_scaler_options o);
#define kn_scaler_new(module, ...)                                                                 \
    kn_scaler_new_(module, KN_OPTIONS(kn_scaler_options, __VA_ARGS__))
KN_API void kn_scaler_free(kn_scaler *s);
/* loss * scale, in f32 where the loss is f16 or bf16. Every loss of a step must go through it.
 * While gradients with an earlier scale wait for an optimizer's step, losses get that one. */
KN_API kn_tensor *kn_scale_loss(kn_scaler *s, kn_tensor *loss);
/* kn_step where every gradient of every rank is finite; else consumes the gradients, leaves
 * parameters and optimizer as they are and lowers the scale. Gradients that are clipped by a norm
 * were looked at by the clip. Collective where the module is sharded; every rank does the same.
 * Returns true in both cases. Error: gradients overflow at the smallest scale; gradients that carry
 * another scale or none; a second optimizer without .several; with it, one that stepped in this
 * iteration already. */
KN_API bool kn_scaler_step(kn_scaler *s, kn_optim *o);
/* Ends an iteration of a scaler for .several optimizers (GradScaler.update): lowers the scale if a
 * step since the last one was skipped, else counts a good one. An error where none was taken. */
KN_API bool kn_scaler_update(kn_scaler *s);
/* The scaler's state, for checkpoints. kn_scaler_set fails between a backward and its step. */
typedef struct kn_scaler_state {
    double scale;
    int64_t good;    /* iterations since the last overflow or growth */
    int64_t skipped; /* steps ever */
} kn_scaler_state;
KN_API kn_scaler_state kn_scaler_get(const kn_scaler *s);
KN_API bool kn_scaler_set(kn_scaler *s, kn_scaler_state state);

/* ---- schedules ------------------------------------------------------------------------------- */

typedef enum kn_schedule_kind {
    KN_SCHEDULE_DEFAULT = 0,
    KN_CONSTANT,
    KN_LINEAR,
    KN_COSINE,
    KN_POLYNOMIAL, /* min_lr + (lr - min_lr) (1 - r)^power; r goes from 0 at warmup to 1 at steps */
    KN_STEP_DECAY, /* lr * factor^k, k = the whole intervals of every steps since warmup */
    KN_WSD,        /* Hu et al. (arXiv:2404.06395): lr until the last decay steps, then linear */
    KN_ONE_CYCLE,  /* Smith and Topin (arXiv:1708.07120), as torch's OneCycleLR: along cosines from
                      lr / 25 at step 0 to lr at step warmup - 1, and to min_lr at step steps - 1 */
    KN_OWN_SCHEDULE /* rate(step, arg); lr, warmup and the others aren't read */
} kn_schedule_kind;
typedef struct kn_schedule {
    kn_schedule_kind kind; /* default: constant */
    double lr, min_lr;     /* lr is required; min_lr at most lr, 0 where the rate is constant */
    int64_t warmup;        /* steps: lr * (step + 1) / (warmup + 1), also beyond .steps */
    int64_t steps;         /* the decay ends here */
    double power;          /* of KN_POLYNOMIAL, above 0; 0: 1 */
    int64_t every;         /* steps, of KN_STEP_DECAY; required */
    double factor;         /* of KN_STEP_DECAY, in (0, 1]; 0: 0.1 */
    int64_t decay;         /* steps, of KN_WSD, at most steps - warmup; 0: a tenth of steps */
    double (*rate)(int64_t step, void *arg);
    void *arg;
} kn_schedule;
/* Learning rate of step (0-based): warmup, then decay from lr to min_lr at steps, then min_lr,
 * which is also the least rate of KN_STEP_DECAY. 0 with an error where a field is out of range. */
KN_API double kn_schedule_at(const kn_schedule *s, int64_t step);

#ifdef __cplusplus
}
#endif
#endif
