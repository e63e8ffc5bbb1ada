/* models/programs/settings.h: the options that every trainer has, and the values derived from them
 * for the ranks. A program's own options are a struct whose first member is a settings, and rows
 * between these (gpt_settings.c). */
#ifndef KNAP_MODELS_PROGRAMS_SETTINGS_H
#define KNAP_MODELS_PROGRAMS_SETTINGS_H

#include "fsdp/fsdp.h"
#include "models/options.h"
#include "optim/optim.h"

typedef struct settings {
    const char *const *in_steps; /* names of the options that count steps, ended by NULL */
    const kn_option *table;      /* the program's whole, by settings_join */
    const char *log, *tensorboard, *config, *out, *resume, *offload, *reshard, *clip_order,
        *optimizer, *fit, *record, *record_steps, *explain, *fault; /* the last: kn_init takes it */
    int dtype, f32_products, reduce_dtype, strategy, layout, prefetch, wrap, hook, device;
    int64_t batch, accum, steps, warmup, seed, ranks, threads;
    int64_t replicas, shards, max_gathers, max_reductions, keep_whole_below, wrap_size;
    int64_t patience, eval_every, eval_steps, sample_every, save_every, keep, stop_after;
    double lr, min_lr, weight_decay, beta1, beta2, momentum, ema, clip, timeout;
    bool deterministic, cuda_graph;
    bool plot, eval_only, overwrite, other_data, summary, check, keep_best, async_save,
        record_values;
    bool recompute, forward_prefetch, no_sync, keep_gathered, all_reduce_last;
    bool nesterov, ema_buffers;
    /* worked out by settings_check */
    kn_mesh mesh;   /* resolved for the ranks of this run */
    int after;      /* .reshard_after_forward */
    double norm_of; /* p of the gradient's norm; HUGE_VAL: the largest magnitude */
} settings;

/* Rows with their headings; offsets are those of a settings, the program's first member. */
extern const kn_option settings_precision[], settings_ranks[], settings_sharding[], settings_log[],
    settings_saving[];
/* Joins parts, ended by a NULL, to s's table, the program's only one. */
bool settings_join(settings *s, const kn_option *const *parts);

/* Checks --lr, --min-lr and --warmup against each other and --steps. */
bool settings_check_rate(const settings *s, const kn_options *o);
/* Checks options against each other (a mesh that the ranks don't fill) and derives mesh, after and
 * norm_of. */
bool settings_check(settings *s, const kn_options *o, kn_comm *world);
/* The options of kn_fsdp_wrap; with --wrap block modules of block_class are units. They borrow from
 * s. */
kn_fsdp_wrap_options settings_fsdp(const settings *s, const char *block_class);
kn_device settings_device(const settings *s);
/* The optimizer of --optimizer: sgd, or without weight decay for biases and norms adamw and muon;
 * the caller frees it. Its name, as a program prints it. */
kn_optim *settings_optim(const settings *s, void *model);
const char *settings_optim_name(const settings *s);
/* The hook that replaces the reduction of gradients; NULL: none. */
kn_comm_hook settings_hook(const settings *s);
/* Sets an option to the value of --init's model; given, it must be that. */
bool settings_follow(kn_options *o, const char *name, const char *value);
/* True if losses must be scaled. */
bool settings_scaled(const settings *s);

#endif
