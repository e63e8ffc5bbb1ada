/* models/programs/settings.h: the options that every trainer has, and the values derived from them
 * for the ranks. A program's own options are a struct whose first member is a settings, and rows
 * between these (gpt_settings.c). */
#ifndef KNAP_MODELS_PROGRAMS_SETTINGS_H
#define KNAP_MODELS_PROGRAMS_SETTINGS_H

#include "fsdp/fsdp.h"
#include "models/options.h"
#include "models/tokenizer.h"
#include "optim/optim.h"

typedef struct settings {
    const char *const *in_steps; /* names of the options that count steps, ended by NULL */
    const kn_option *table;      /* the program's whole, by settings_join */
    const char *log, *out, *resume, *offload, *reshard, *clip_order;
    int optimizer, dtype, reduce_dtype, strategy, layout, prefetch, wrap, hook, device;
    int64_t batch, accum, steps, warmup, seed, ranks, threads;
    int64_t replicas, shards, max_gathers, max_reductions, keep_whole_below, wrap_size;
    int64_t eval_every, eval_steps, sample_every, save_every, keep, stop_after;
    double lr, min_lr, weight_decay, beta2, ema, clip, timeout;
    bool tf32, deterministic, cuda_graph;
    bool overwrite, other_data, summary, check, keep_best, async_save;
    bool recompute, forward_prefetch, no_sync, keep_gathered, all_reduce_last;
    const char *optimizer_name; /* the program's: "AdamW" */
    /* worked out by settings_check */
    kn_mesh mesh;   /* resolved for the ranks of this run */
    int after;      /* .reshard_after_forward */
    double norm_of; /* p of the gradient's norm; HUGE_VAL: the largest magnitude */
} settings;

/* The parameters of a training loop. The program fills in the fields that options don't give. */
typedef struct plan {
    int64_t steps;     /* optimizer steps */
    int64_t accum;     /* micro-batches a step and rank */
    int64_t items;     /* of a micro-batch */
    const char *item;  /* their name: "tokens" */
    double item_flops; /* of an item's forward and backward; 0: unknown */
    double peak_flops; /* of a rank's GPU, a second; 0: unknown */
    kn_schedule lr;
    double clip, norm_of;                         /* largest norm of the gradient, and its p */
    bool no_sync, keep_gathered, all_reduce_last; /* of the micro-batches before the last one */
    bool replay;                                  /* record a step as a graph */
    int64_t eval_every, eval_steps, sample_every, stop_after; /* 0: never */
    int64_t save_every;                                       /* 0: at evaluations */
    int64_t keep;                                             /* checkpoints, the newest; 0: all */
    const char *out, *log;                                    /* NULL: none */
    bool overwrite, keep_best, async_save;
    const char *config;            /* kn_checkpoint_save's */
    const kn_tokenizer *tokenizer; /* the same; may be NULL */
} plan;

/* Rows with their headings; offsets are those of a settings, the program's first member. */
extern const kn_option settings_precision[], settings_ranks[], settings_sharding[], settings_log[],
    settings_saving[];
/* Joins parts, ended by a NULL, in room[count], which becomes s's table. */
bool settings_join(settings *s, kn_option *room, size_t count, const kn_option *const *parts);

/* The word of a choice, as on the command line; into buf. */
const char *settings_word(const settings *s, const char *name, int choice, char *buf, size_t size);
/* Checks --lr, --min-lr and --warmup against each other and --steps. */
bool settings_check_rate(const settings *s, const kn_options *o);
/* Checks options against each other (a mesh that the ranks don't fill) and derives mesh, after and
 * norm_of. */
bool settings_check(settings *s, const kn_options *o, kn_comm *world);
/* The options of kn_fsdp_wrap; with --wrap block modules of block_class are units. They borrow from
 * s. */
kn_fsdp_wrap_options settings_fsdp(const settings *s, const char *block_class);
kn_device settings_device(const settings *s);
/* The part of the plan that options give. Borrows from s. */
plan settings_plan(const settings *s);
/* The hook that replaces the reduction of gradients; NULL: none. */
kn_comm_hook settings_hook(const settings *s);
/* True if losses must be scaled. */
bool settings_scaled(const settings *s);

#endif
