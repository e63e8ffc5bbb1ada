/* models/programs/settings.c: the options that every trainer has, and the values derived from them.
 * Their rows generate the parser, --help, and a checkpoint's record. KN_OF_TRAINING are all options
 * that affect a bit of the result, KN_OF_RUN those that only divide a run's work among ranks. */
#include "fsdp/kinds.h"
#include "kernels/device.h"
#include "kernels/error.h"
#include "models/programs/settings.h"

#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define AT(field) offsetof(settings, field)

const kn_option settings_precision[] = {
    { "precision", KN_OPTION_HEADING },
    { "dtype", KN_OPTION_CHOICE, AT(dtype), "f32",
      "dtype of computation; masters stay f32; f16 scales the loss", .choices = "f32|bf16|f16" },
    { "f32-products", KN_OPTION_CHOICE, AT(f32_products), "exact",
      "f32 products may round their factors, for speed: to tf32 (10 bits) on GPUs, to bf16 (7) on "
      "CPUs with AVX512_BF16",
      .choices = "exact|tf32|bf16" },
    { "reduce-dtype", KN_OPTION_CHOICE, AT(reduce_dtype), "f32", "dtype of gradients between ranks",
      .choices = "f32|bf16|f16" },
    { "hook", KN_OPTION_CHOICE, AT(hook), "none", "compression of gradients between ranks",
      .choices = "none|bf16|f16|bf16_stochastic" },
    { 0 },
};

const kn_option settings_ranks[] = {
    { "ranks", KN_OPTION_HEADING },
    { "ranks", KN_OPTION_INT, AT(ranks), "1", "processes that train together", .min = 1,
      .max = 4096, .of = KN_OF_RUN, .own = true },
    { "threads", KN_OPTION_INT, AT(threads), NULL, "threads of each rank", .max = 1024,
      .note = "cores / ranks", .of = KN_OF_RUN, .own = true },
    { "timeout", KN_OPTION_FLOAT, AT(timeout), NULL, "longest wait for another rank, in seconds",
      .min = 0.001, .max = 1e6, .note = "KNAP_TIMEOUT, or 60", .of = KN_OF_RUN, .own = true },
    { "fault", KN_OPTION_STRING, AT(fault), NULL,
      "a rank fails in a way and at a place, to see what follows: \"rank 1: kill at collective 17 "
      "of "
      "step 3\" (docs/failures.md)",
      .clashes = "fit", .of = KN_OF_ONCE, .own = true },
    { "device", KN_OPTION_CHOICE, AT(device), "cpu", "where to compute", .choices = "cpu|cuda" },
    { "deterministic", KN_OPTION_FLAG, AT(deterministic), NULL,
      "cuda: only algorithms that repeat their bits; ranks add in order" },
    { "cuda-graph", KN_OPTION_FLAG, AT(cuda_graph), NULL,
      "cuda: record a step once, then launch it as one graph", .of = KN_OF_RUN },
    { 0 },
};

const kn_option settings_sharding[] = {
    { "sharding", KN_OPTION_HEADING },
    { "strategy", KN_OPTION_CHOICE, AT(strategy), "full_shard", "tensors that ranks divide",
      .choices = KN_KIND_CHOICES(KN_STRATEGIES), .of = KN_OF_RUN },
    { "replicas", KN_OPTION_INT, AT(replicas), NULL, "groups that each hold the whole model",
      .min = 1, .max = 4096, .note = "1, or ranks / shards", .of = KN_OF_RUN },
    { "shards", KN_OPTION_INT, AT(shards), NULL, "ranks of such a group", .min = 1, .max = 4096,
      .note = "ranks / replicas; hybrid: a machine's", .of = KN_OF_RUN },
    { "layout", KN_OPTION_CHOICE, AT(layout), "flat", "how parameters are cut into shards",
      .choices = KN_KIND_CHOICES(KN_LAYOUTS), .of = KN_OF_RUN },
    { "wrap", KN_OPTION_CHOICE, AT(wrap), "block", "modules that are gathered together",
      .choices = "block|size", .of = KN_OF_RUN },
    { "wrap-size", KN_OPTION_INT, AT(wrap_size), "100000000",
      "with --wrap size: elements that make a module a unit", .min = 1, .max = 1e15,
      .with = "wrap=size", .of = KN_OF_RUN },
    { "keep-whole-below", KN_OPTION_INT, AT(keep_whole_below), "0",
      "parameters of fewer elements are not cut", .max = 1e15, .of = KN_OF_RUN },
    { "prefetch", KN_OPTION_CHOICE, AT(prefetch), "pre", "when backward gathers the next unit",
      .choices = "pre|post|none", .of = KN_OF_RUN },
    { "forward-prefetch", KN_OPTION_FLAG, AT(forward_prefetch), NULL,
      "forward gathers the next unit early, too", .note = "on GPUs with --prefetch pre",
      .of = KN_OF_RUN },
    { "max-gathers", KN_OPTION_INT, AT(max_gathers), "2", "units gathered ahead of their use",
      .min = 1, .max = 1000000, .of = KN_OF_RUN },
    { "max-reductions", KN_OPTION_INT, AT(max_reductions), "1",
      "units whose reductions may run beside backward", .min = 1, .max = 1000000, .of = KN_OF_RUN },
    { "reshard", KN_OPTION_STRING, AT(reshard), NULL,
      "release after forward: always, never, or N: keep 1/N a rank", .note = "by the strategy",
      .of = KN_OF_RUN },
    { "keep-gathered", KN_OPTION_FLAG, AT(keep_gathered), NULL,
      "parameters stay gathered over a step's micro-batches", .of = KN_OF_RUN },
    { "all-reduce-last", KN_OPTION_FLAG, AT(all_reduce_last), NULL,
      "hybrid: replicas add once a step, not at each micro-batch", .of = KN_OF_RUN },
    { "offload", KN_OPTION_PATH, AT(offload), NULL,
      "folder for a file with parameters, gradients, optimizer's state; memory: a GPU's on the "
      "host",
      .of = KN_OF_RUN },
    { 0 },
};

const kn_option settings_log[] = {
    { "patience", KN_OPTION_INT, AT(patience), "0",
      "stop after so many evaluations without a better one; 0: never", .max = 1e9 },
    { "eval-only", KN_OPTION_FLAG, AT(eval_only), NULL,
      "evaluate the model of --resume or --init once, and end; no folder is written",
      .clashes = "pictures|export|patience|log|tensorboard|plot|save-every|keep|keep-best|"
                 "async-save|overwrite|stop-after|record|record-steps|record-values|explain",
      .of = KN_OF_ONCE },
    { "summary", KN_OPTION_FLAG, AT(summary), NULL,
      "print the model's modules with parameters, operations and memory first", .of = KN_OF_ONCE,
      .own = true },
    { "fit", KN_OPTION_STRING, AT(fit), NULL,
      "print what a rank needs with each strategy, layout, recompute and offload that isn't given, "
      "what fits so much memory (24GiB), with a command, and end; no ranks are started",
      .clashes = "resume", .of = KN_OF_ONCE },
    { "explain", KN_OPTION_STRING, AT(explain), NULL,
      "print the schedule of the run's second step (--record-steps) in a line, and then a sentence "
      "for each event of this unit, given by its path; all: of every unit",
      .clashes = "record|cuda-graph", .of = KN_OF_ONCE },
    { "record", KN_OPTION_PATH, AT(record), NULL,
      "write what all ranks do in two steps into this file, for knap-report",
      .clashes = "cuda-graph", .of = KN_OF_ONCE },
    { "record-steps", KN_OPTION_STRING, AT(record_steps), NULL, "which steps: 5, or 5-7",
      .with = "record|explain", .note = "the run's second and third", .of = KN_OF_ONCE },
    { "record-values", KN_OPTION_FLAG, AT(record_values), NULL,
      "also values of results, gradients and parameters; slow", .with = "record",
      .of = KN_OF_ONCE },
    { "check", KN_OPTION_FLAG, AT(check), NULL,
      "stop at the first operation that makes a NaN or an infinity; slow", .clashes = "cuda-graph",
      .of = KN_OF_RUN },
    { "log", KN_OPTION_PATH, AT(log), NULL,
      "write each step's values into this file: a table if it ends in .csv, else JSON objects",
      .of = KN_OF_RUN, .own = true },
    { "plot", KN_OPTION_FLAG, AT(plot), NULL, "draw the losses with characters at each evaluation",
      .of = KN_OF_RUN, .own = true },
    { "tensorboard", KN_OPTION_PATH, AT(tensorboard), NULL,
      "write each step's values into this folder, for TensorBoard", .of = KN_OF_RUN, .own = true },
    { 0 },
};

const kn_option settings_saving[] = {
    { "saving", KN_OPTION_HEADING },
    { "config", KN_OPTION_PATH, AT(config), NULL,
      "read options from this file, \"name = value\" a line; the command line's win",
      .of = KN_OF_ONCE, .own = true },
    { "out", KN_OPTION_PATH, AT(out), NULL,
      "the run's folder: checkpoints, log.jsonl, config.toml for --config", .of = KN_OF_START },
    { "save-every", KN_OPTION_INT, AT(save_every), NULL,
      "steps between saves, beside those on Ctrl-C and at the end", .max = 1e12, .with = "out",
      .note = "at evaluations" },
    { "keep", KN_OPTION_INT, AT(keep), "2", "checkpoints that stay, the newest; 0: all",
      .with = "out", .max = 1e9 },
    { "keep-best", KN_OPTION_FLAG, AT(keep_best), NULL,
      "keep the checkpoint with the best evaluation, too, as best below --out", .with = "out" },
    { "async-save", KN_OPTION_FLAG, AT(async_save), NULL,
      "save beside the training, from a copy in memory", .with = "out" },
    { "resume", KN_OPTION_PATH, AT(resume), NULL,
      "continue from this folder, and save there; latest: from --out; auto: the same if it holds "
      "a checkpoint, else begin",
      .of = KN_OF_ONCE },
    { "overwrite", KN_OPTION_FLAG, AT(overwrite), NULL,
      "begin anew in a folder that holds a checkpoint, and replace it", .of = KN_OF_ONCE,
      .own = true },
    { "other-data", KN_OPTION_FLAG, AT(other_data), NULL,
      "resume with other data than the checkpoint's", .of = KN_OF_ONCE },
    { "stop-after", KN_OPTION_INT, AT(stop_after), "0", "stop as on Ctrl-C after this step",
      .max = 1e12, .note = "never", .of = KN_OF_ONCE },
    { 0 },
};

bool settings_join(settings *s, const kn_option *const *parts)
{
    enum { MOST = 112 };
    static kn_option room[MOST];
    int n = 0;
    for (; *parts; parts++)
        for (const kn_option *p = *parts; p->name; p++) {
            if (n + 1 >= MOST)
                return kn_fail("the program has more than %d options", MOST - 1);
            room[n++] = *p;
        }
    room[n] = (kn_option){ 0 };
    s->table = room;
    return true;
}

/* ---- checks ---------------------------------------------------------------------------------- */

static bool read_reshard(settings *s)
{
    char *end;
    s->after = KN_RESHARD_DEFAULT;
    if (!s->reshard)
        return true;
    if (strcmp(s->reshard, "always") == 0) {
        s->after = KN_RESHARD_ALWAYS;
        return true;
    }
    if (strcmp(s->reshard, "never") == 0) {
        s->after = KN_RESHARD_NEVER;
        return true;
    }
    long n = strtol(s->reshard, &end, 10);
    if (end == s->reshard || *end || n < 2 || n > 4096)
        return kn_fail("--reshard takes always, never, or a number of ranks from 2, not '%s'",
                       s->reshard);
    if (s->mesh.shards % n != 0)
        return kn_fail("--reshard %ld doesn't divide the %d shards", n, s->mesh.shards);
    s->after = (int)n;
    return true;
}

static bool read_norm(settings *s)
{
    char *end;
    bool largest = strcmp(s->clip_order, "inf") == 0;
    s->norm_of = largest ? HUGE_VAL : strtod(s->clip_order, &end);
    if (largest || (end != s->clip_order && !*end && s->norm_of > 0 && isfinite(s->norm_of)))
        return true;
    return kn_fail("--clip-norm takes a number above 0, or inf, not '%s'", s->clip_order);
}

bool settings_check_rate(const settings *s, const kn_options *o)
{
    if (s->lr == 0)
        return kn_fail("--lr is 0; give a learning rate above 0");
    if (s->min_lr > s->lr)
        return kn_fail(
            "--min-lr %g is above --lr %g, from which the rate falls; give a smaller one",
            s->min_lr, s->lr);
    if (s->warmup > s->steps && (kn_options_given(o, "warmup") || kn_options_given(o, "steps")))
        return kn_fail(
            "--warmup %lld is more than the --steps %lld: the rate would never reach --lr; "
            "give fewer steps of warmup",
            (long long)s->warmup, (long long)s->steps);
    return true;
}

bool settings_check(settings *s, const kn_options *o, kn_comm *world)
{
    if (!kn_options_check(o))
        return false;
    if (s->eval_every == 0 && (s->patience > 0 || s->keep_best))
        return kn_fail("--%s counts evaluations; give --eval-every above 0 as well, or leave it "
                       "out",
                       s->patience > 0 ? "patience" : "keep-best");
    if (settings_device(s) != KN_CUDA && s->deterministic)
        return kn_fail("--deterministic is for --device cuda; the cpu's bits repeat");
    if (s->f32_products && s->deterministic && s->dtype == 0)
        return kn_fail(
            "--f32-products and --deterministic: products in TF32 repeat their bits, but aren't "
            "the cpu's; leave one of them out");
    kn_set_f32_products((kn_products)s->f32_products);
    if (settings_device(s) == KN_CUDA) {
        kn_cuda_deterministic(s->deterministic);
        if (!kn_device_memory(
                KN_CUDA)) /* the error names the reason: no driver, no GPU, no CUDA in this build */
            return false;
    }
    kn_strategy strategy = (kn_strategy)(KN_FULL_SHARD + s->strategy);
    s->mesh = (kn_mesh){ (int)s->replicas, (int)s->shards };
    if (!kn_fsdp_mesh(&s->mesh, strategy, world) || !read_reshard(s) || !read_norm(s))
        return false;
    return !s->all_reduce_last || s->mesh.shards * s->mesh.replicas == 1 ||
           (s->mesh.shards > 1 && s->mesh.replicas > 1) ||
           kn_fail(
               "--all-reduce-last is for a mesh of several replicas of several shards, not %d of "
               "%d; give --shards, or leave it out",
               s->mesh.replicas, s->mesh.shards);
}

bool settings_follow(kn_options *o, const char *name, const char *value)
{
    const char *given = kn_options_given(o, name) ? kn_options_value(o, name) : NULL;
    if (!given)
        return kn_options_set(o, name, value);
    return strcmp(given, value) == 0 ||
           kn_fail("--%s %s: the model of --init %s has %s; leave it out", name, given,
                   kn_options_value(o, "init"), value);
}

/* ---- derived values -------------------------------------------------------------------------- */

static const kn_dtype dtypes[] = { KN_F32, KN_BF16, KN_F16 }; /* f32|bf16|f16 */

kn_device settings_device(const settings *s)
{
    return s->device == 1 ? KN_CUDA : KN_CPU;
}

kn_fsdp_wrap_options settings_fsdp(const settings *s, const char *block_class)
{
    bool block = s->wrap == 0;
    return (kn_fsdp_wrap_options){
        ._size = sizeof(kn_fsdp_wrap_options),
        .strategy = (kn_strategy)(KN_FULL_SHARD + s->strategy),
        .mesh = s->mesh,
        .layout = (kn_layout_kind)(KN_LAYOUT_FLAT + s->layout),
        .reshard_after_forward = s->after,
        .keep_whole_below = s->keep_whole_below,
        .backward_prefetch = (kn_backward_prefetch)(KN_PREFETCH_PRE + s->prefetch),
        .forward_prefetch = s->forward_prefetch,
        .max_gathers = (int)s->max_gathers,
        .max_reductions = (int)s->max_reductions,
        .wrap_class = block ? block_class : NULL,
        .min_params = block ? 0 : s->wrap_size,
        .recompute_class = s->recompute ? block_class : NULL,
        .param_dtype = dtypes[s->dtype],
        .reduce_dtype = dtypes[s->reduce_dtype],
        .offload_dir = s->offload,
        .device = settings_device(s),
        .seed = (uint64_t)s->seed,
        .timeout_s = s->timeout,
    };
}

static bool is_optimizer(const settings *s, const char *name)
{
    return strcmp(s->optimizer, name) == 0;
}

const char *settings_optim_name(const settings *s)
{
    return is_optimizer(s, "sgd") ? "SGD" : is_optimizer(s, "muon") ? "Muon" : "AdamW";
}

/* Muon's steps have the size of AdamW's, so that one rate fits both. */
kn_optim *settings_optim(const settings *s, void *model)
{
    const double beta1 = s->beta1 > 0 ? s->beta1 : KN_ZERO;
    const double beta2 = s->beta2 > 0 ? s->beta2 : KN_ZERO;
    const double decay = s->weight_decay > 0 ? s->weight_decay : KN_ZERO;
    const kn_optim_group flat = { .max_ndim = 1, .weight_decay = KN_ZERO };
    if (is_optimizer(s, "sgd"))
        return kn_sgd(model, .lr = s->lr, .momentum = s->momentum,
                      .nesterov = s->nesterov && s->momentum > 0, .weight_decay = s->weight_decay);
    if (is_optimizer(s, "adamw"))
        return kn_adamw(model, .lr = s->lr, .beta1 = beta1, .beta2 = beta2, .weight_decay = decay,
                        .groups = &flat, .group_count = 1);
    return kn_muon(model, .lr = s->lr, .scale = KN_MUON_MATCH_ADAMW, .beta1 = beta1, .beta2 = beta2,
                   .weight_decay = decay, .groups = &flat, .group_count = 1);
}

kn_comm_hook settings_hook(const settings *s)
{
    static const kn_comm_hook hooks[] = { NULL, kn_hook_bf16, kn_hook_f16,
                                          kn_hook_bf16_stochastic };
    return hooks[s->hook];
}

bool settings_scaled(const settings *s)
{
    return dtypes[s->dtype] == KN_F16;
}
