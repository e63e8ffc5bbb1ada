/* optim/optim_internal.h (private): shared by the files of this folder. */
#ifndef KNAP_OPTIM_INTERNAL_H
#define KNAP_OPTIM_INTERNAL_H

#include "kernels/graph_internal.h"
#include "nn/marks.h"
#include "nn/means.h"
#include "optim/optim.h"

/* All-reduces over the ranks of all units of m's tree: limbs[KN_SQSUM_LIMBS] by addition, *absmax
 * by maximum; either may be NULL. They lie where norms of parameters p do. Does nothing without
 * sharding. */
bool kn_reduce_over_ranks(kn_module_impl *m, const kn_param *p, int64_t *limbs, float *absmax);
/* Measurements of a module's raw gradients, in memory of the gradients' device (meta: of the host),
 * inside kn_clipping.norms. */
typedef struct kn_norms {
    double coef;   /* the next step's factor of gradients */
    double limit;  /* and the magnitude to which it clamps them then, where it does */
    float absmax;  /* the largest magnitude of all ranks; NaN or infinite where one is */
    int64_t first; /* this rank's first parameter with a value that isn't finite, or -1 */
    int64_t limbs[KN_SQSUM_LIMBS];
} kn_norms;
/* Kept with a module whose gradients were measured (clip.c). A step reads the norms that it was
 * clipped by where they lie, so later measurements have a room of their own. */
typedef struct kn_clipping {
    kn_module_extra extra;
    kn_tensor *norms[2]; /* kn_norms where the gradients lie, [1]: it was clipped by them; owned */
    bool clipped_last;
    int64_t at;     /* the newest backward when it was clipped; 0: it isn't */
    kn_means means; /* of that time: the factor goes with its base */
    int params;     /* whose gradients it has divisors for */
    double value;   /* gradients are clamped to it, too; 0: they aren't */
} kn_clipping;
/* Those that it was clipped by, or those that were only measured last; borrowed. */
static inline kn_norms *kn_norms_of(const kn_clipping *c, bool clipped)
{
    return c->norms[clipped] ? kn_array_of(c->norms[clipped]).data : NULL;
}
/* Launches the search for m's absmax, which will lie in *at, and first. Collective. */
bool kn_find_absmax(kn_module_impl *m, const kn_param *p, int n, const float **at);
/* True if the masters of all p[n] lie on one device; else an error whose message begins with
 * what. */
bool kn_one_place(const kn_param *p, int n, const char *what);
/* The device of the norms of parameters p. */
kn_device kn_norms_device(const kn_param *p);
/* The factor that makes most raw gradients means (kn_means.base and .scale), for kernels on d:
 * *scale, divided by **loss_scale where *loss_scale isn't NULL. Waits only where the loss scale
 * lies on another device. */
bool kn_loss_scale_at(const kn_means *means, kn_device d, double *scale, const float **loss_scale);
/* True if the gradients of parameters p[n] are complete; else an error. kn_may_step: and a step of
 * m may use them. */
bool kn_grads_there(const kn_param *p, int n, const char *what);
bool kn_may_step(const kn_module_impl *m, const kn_param *p, int n, const char *what);
/* *by: the clipping of the nearest module from m up whose gradients were clipped; NULL: none. False
 * with an error where gradients came to m since. */
bool kn_clipped(const kn_module_impl *m, const kn_clipping **by);
/* True unless only a part of m was clipped; then an error. */
bool kn_clipped_whole(const kn_module_impl *m, const char *what);
/* Ends a step, taken or skipped: drops the gradients. */
void kn_consume_grads(const kn_param *p, int n);
kn_module_impl *kn_optim_impl(const kn_optim *o); /* the module that o was made for */

/* ---- kinds of optimizers: adamw.c, lion.c, muon.c, own.c and sgd.c each define one ----------- */

#define KN_OPTIM_STATES 3

/* A constant of a method among its options, as state dicts hold it: real, or whole where low and
 * high are (bools are from 0 to 1). */
typedef struct kn_optim_constant {
    const char *name; /* in state dicts */
    size_t at;        /* in the options */
    enum { KN_OF_REALS, KN_OF_INTS, KN_OF_BOOLS } type;
    double low, high;   /* its range */
    bool below;         /* high itself isn't in it */
    const char *option; /* the option's name; NULL: name */
} kn_optim_constant;
#define KN_OPTIM_CONSTANTS 10 /* at most */

typedef struct kn_optim_method {
    /* Names in checkpoints of the states that the update reads as kn_opt_piece.m, .v, .more; NULL:
     * none. Each has the parameter's dtype and size, and begins as 0. */
    const char *state[KN_OPTIM_STATES];
    /* Updates all pieces, on s, elementwise: a piece is any part of a parameter. */
    bool (*update)(const void *options, const kn_opt_step *step, kn_stream *s);
    /* For parameters that are updated as whole matrices (kn_optim_slot.matrix): the name of their
     * one state (kn_opt_piece.m), and the update of all of them, on the compute stream. NULL: there
     * are none. */
    const char *matrix_state;
    bool (*matrices)(void *options, const kn_opt_step *step, const kn_opt_piece *piece,
                     const kn_param *const *param, int n);
    bool one_a_row; /* a table whose gradient stays rows has states of one element a row */
    const kn_optim_constant *constant; /* ends with one without a name; NULL: there are none */
} kn_optim_method;

/* Options that all optimizers have. */
typedef struct kn_optim_groups {
    double lr, weight_decay; /* as given: KN_ZERO for 0 in lr */
    KN_GROUP_OPTIONS;
} kn_optim_groups;
/* Those among an optimizer's options o, whose .weight_decay is default_decay where it is 0. */
#define KN_OPTIM_GROUPS(o, default_decay)                                                          \
    (kn_optim_groups)                                                                              \
    {                                                                                              \
        (o).lr, kn_value_or((o).weight_decay, default_decay), (o).groups, (o).group_count,         \
            (o).group_of, (o).group_arg, (o).stochastic_rounding, (o).maximize                     \
    }

/* The optimizer's record of one parameter. */
typedef struct kn_optim_slot {
    /* This rank's part; made at the first step with a gradient. */
    kn_tensor *state[KN_OPTIM_STATES];
    kn_optim_group group; /* lr_mul and weight_decay */
    bool matrix;          /* method.matrices updates it */
} kn_optim_slot;

/* Rows of a table in a running step (rows.c), of the parameter and its states: where they lie, and
 * the copies that the step updates. */
typedef struct kn_taken {
    const kn_param *param;
    kn_tensor *ids;
    kn_tensor *home[1 + KN_OPTIM_STATES], *copy[1 + KN_OPTIM_STATES]; /* of the current scope */
} kn_taken;

struct kn_optim {
    kn_live live;
    const kn_optim_method *method;
    void *options; /* the method's; owned */
    kn_optim_slot *slot;
    int slots;
    kn_marks marks;         /* of the parameters that have slots */
    kn_opt_piece *piece;    /* scratch of a step */
    const kn_param **param; /* the parameter of piece[i] */
    kn_taken *taken;        /* of the running step */
    int takes;
    int64_t taken_room;
    kn_means means;     /* of the running step's gradients */
    kn_tensor *scalars; /* kn_step_scalars in device memory */
    bool at_random;     /* .stochastic_rounding */
    bool maximize;
    kn_opt_step update; /* of the running step: where its scalars lie */
    int64_t scaled_in;  /* the iteration of a scaler that it last stepped in (scaler.c) */
    /* numbers.c */
    double lr;
    int64_t steps; /* if scaled: with skipped ones, which only the device counts */
    int64_t seen;  /* kn_step_taken */
    bool scaled;
    const kn_graph *recorded; /* the graph with this optimizer's step */
    double recorded_scale;    /* of the gradients in the recorded step */
    double sent_scale;        /* with sent_step: the values that the device gets */
    int64_t sent_step;
};

/* make.c. o lives, and so does its module; else an error that says which doesn't. NULL: false
 * alone. */
bool kn_optim_lives(const kn_optim *o, const char *what);
/* options: size bytes, copied; passed to method.update. Owned by the caller; NULL with an error. */
kn_optim *kn_optim_new(void *module, const kn_optim_method *method, const void *options,
                       size_t size, kn_optim_groups groups);
/* groups.c. What the group of p, a parameter of m, says of it; false with an error without such
 * a group. */
bool kn_optim_group_of(kn_optim_group *g, const kn_optim_groups *o, const kn_param *p,
                       const kn_module_impl *m);
/* The module that declared p, a parameter of m. NULL with an error. */
const kn_module_impl *kn_param_owner(const kn_param *p, const kn_module_impl *m);
/* Values are in range, and patterns match any of p[n]; else false with an error. */
bool kn_optim_groups_check(const kn_optim_groups *o, const kn_param *p, int n);

/* piece.c. A tensor of one dimension over foreign memory, given to the current scope. NULL for
 * NULL. Steps compute in the wide dtype (kn_wide). */
kn_tensor *kn_piece_tensor(kn_device d, const void *data, kn_dtype dtype, int64_t count);
/* The piece's gradient as the step sees it: the mean, clipped. */
kn_tensor *kn_piece_grad(kn_device d, const kn_opt_step *step, const kn_opt_piece *q);
/* The piece's masters (which 0) or states (1, 2) become values, rounded as the step says. */
bool kn_piece_write(kn_device d, const kn_opt_step *step, const kn_opt_piece *q, int which,
                    kn_tensor *values);

/* own.c. As kn_own_optim, but the groups and rates are those of groups, and a copy of the size
 * bytes at o.arg, at most 64, is passed to o.update; one_a_row: as in kn_optim_method. */
kn_optim *kn_own_optim_with(void *module, kn_own_optim_options o, kn_optim_groups groups,
                            size_t size, bool one_a_row);

/* rows.c. q, of parameter p, becomes copies of the rows ids; they are put back; those of q, or NULL
 * where it is no rows. */
bool kn_rows_take(kn_optim *o, const kn_optim_slot *s, const kn_param *p, kn_tensor *ids,
                  kn_opt_piece *q);
bool kn_rows_put_back(kn_optim *o);
const kn_taken *kn_rows_taken(const kn_optim *o, const kn_opt_piece *q);

/* newton_schulz.c. x[rows, cols], contiguous, becomes nearly its orthogonal factor. */
bool kn_newton_schulz(kn_tensor *x, const double *coefficients, int steps, double eps);
double kn_newton_schulz_flops(int64_t rows, int64_t cols); /* of one of its steps' products */

/* make.c. Name of the k-th state of the slot's parameter, or NULL. */
const char *kn_slot_state_name(const kn_optim *o, const kn_optim_slot *s, int k);
/* Elements of p for each of its states'; 0: one. */
int64_t kn_optim_state_row(const kn_optim *o, const kn_param *p);
/* Makes the states of p, parameter i of o, where missing. */
bool kn_optim_make_state(kn_optim *o, const kn_param *p, int i);
/* Of parameter i: its state of that name; NULL, without an error, where it wasn't made yet. */
kn_tensor *kn_optim_state_there(const kn_optim *o, int i, const char *name);
/* Parameter i has no state again. */
void kn_optim_drop_state(kn_optim *o, int i);
/* o's k-th constant, and a new value within its range; NULL after the last one. */
const kn_optim_constant *kn_optim_constant_at(const kn_optim *o, int k, double *value);
void kn_optim_constant_set(kn_optim *o, int k, double value);
bool kn_optim_in_range(const kn_optim_constant *c, double value);
/* True if all of the options are; else an error that begins with what. */
bool kn_optim_in_ranges(const kn_optim_constant *c, const void *options, const char *what);
/* True if parameters p[n] and this rank's parts of them are as when o was made; else an error whose
 * message begins with what. */
bool kn_optim_unchanged(const kn_optim *o, const kn_param *p, int n, const char *what);
/* numbers.c. Sends the running step's numbers to the device; if the step is being recorded, those
 * of each replay too. scale: the factor of its gradients. */
bool kn_send_numbers(kn_optim *o, double scale);
/* Ends loss scaling: moves the count of skipped steps from the device to o->steps. Waits. */
bool kn_settle_steps(kn_optim *o);
/* NULL for NULL. */
static inline void *kn_data_of(const kn_tensor *t)
{
    return t ? kn_array_of(t).data : NULL;
}

/* kn_step for gradients that carry the loss scale carried, else an error: the device decides
 * whether anything changes. scaling.step is filled in; the rest lies where the masters of o do. */
bool kn_step_scaled(kn_optim *o, kn_loss_scale_args scaling, const kn_tensor *carried);

#endif
