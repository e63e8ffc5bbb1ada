/* models/programs/settings.c: the table of train_gpt's options, and the values derived from them.
 * The table generates the parser, --help, and a checkpoint's record. Recorded are all options that
 * affect a bit of the result; options that only divide one run's work among ranks are
 * .transient. */
#include "kernels/device.h"
#include "kernels/error.h"
#include "models/programs/report.h"
#include "models/programs/settings.h"

#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define AT(field) offsetof(settings, field)

const kn_option settings_table[] = {
    { "text", KN_OPTION_HEADING },
    { "data", KN_OPTION_PATH, AT(data), "shakespeare", "a data set (shakespeare) or a file",
      .only_read = true },
    { "tokenizer", KN_OPTION_CHOICE, AT(tokenizer), "char", "tokenizer for a text file",
      .choices = "char|byte" },
    { "model", KN_OPTION_HEADING },
    { "model", KN_OPTION_CHOICE, AT(model), "custom",
      "custom: a GPT, llama: a Llama of the sizes below; else a published one",
      .choices = KN_GPT_CHOICES "|" KN_LLAMA_CHOICES },
    { "layers", KN_OPTION_INT, AT(layers), "4", "blocks", .min = 1, .max = 10000 },
    { "heads", KN_OPTION_INT, AT(heads), "4", "attention heads a block", .min = 1, .max = 10000 },
    { "embd", KN_OPTION_INT, AT(embd), "128", "channels", .min = 1, .max = 1 << 20 },
    { "ctx", KN_OPTION_INT, AT(ctx), "64", "tokens in a row of a batch, the model's context",
      .min = 1, .max = 1 << 20 },
    { "bias", KN_OPTION_FLAG, AT(bias), "true", "GPT: biases in linear layers and norms" },
    { "kv-heads", KN_OPTION_INT, AT(kv_heads), NULL, "Llama: heads of keys and values", .min = 1,
      .max = 10000, .note = "heads" },
    { "hidden", KN_OPTION_INT, AT(hidden), NULL, "Llama: channels inside the MLP", .min = 1,
      .max = 1 << 24, .note = "8/3 embd, up to a multiple of 64" },
    { "tied", KN_OPTION_FLAG, AT(tied), "true", "Llama: the token embedding is the head, too" },
    { "rope-base", KN_OPTION_FLOAT, AT(rope_base), "10000", "Llama: base of the rotary embedding",
      .min = 1, .max = 1e12 },
    { "rope-factor", KN_OPTION_FLOAT, AT(rope_factor), NULL,
      "Llama: Llama 3's scaling of it to a context so many times as long", .min = 1, .max = 1e6,
      .note = "no scaling" },
    { "rope-original", KN_OPTION_INT, AT(rope_original), "8192",
      "Llama: the context before --rope-factor", .min = 1, .max = 1 << 30 },
    { "dropout", KN_OPTION_FLOAT, AT(dropout), "0",
      "dropout probability; Llama: of attention's probabilities", .max = 0.999 },
    { "recompute", KN_OPTION_FLAG, AT(recompute), NULL,
      "keep only the blocks' inputs, compute them again in backward" },
    { "precision", KN_OPTION_HEADING },
    { "dtype", KN_OPTION_CHOICE, AT(dtype), "f32",
      "dtype of computation; masters stay f32; f16 scales the loss", .choices = "f32|bf16|f16" },
    { "reduce-dtype", KN_OPTION_CHOICE, AT(reduce_dtype), "f32", "dtype of gradients between ranks",
      .choices = "f32|bf16|f16" },
    { "hook", KN_OPTION_CHOICE, AT(hook), "none", "compression of gradients between ranks",
      .choices = "none|bf16|f16|bf16_stochastic" },
    { "training", KN_OPTION_HEADING },
    { "batch", KN_OPTION_INT, AT(batch), "12", "rows of a micro-batch", .min = 1, .max = 1 << 20 },
    { "accum", KN_OPTION_INT, AT(accum), "1", "micro-batches a step and rank", .min = 1,
      .max = 1 << 20 },
    { "no-sync", KN_OPTION_FLAG, AT(no_sync), NULL,
      "reduce once a step, not at each micro-batch; takes memory" },
    { "steps", KN_OPTION_INT, AT(steps), "2000", "optimizer steps", .min = 1, .max = 1e12 },
    { "optimizer", KN_OPTION_CHOICE, AT(optimizer), "adamw",
      "muon: matrices of blocks; AdamW has embeddings, head and vectors; prints its share",
      .choices = "adamw|muon" },
    { "lr", KN_OPTION_FLOAT, AT(lr), "1e-3", "peak learning rate", .max = 1e30 },
    { "min-lr", KN_OPTION_FLOAT, AT(min_lr), "-1", "learning rate at the end of the cosine",
      .min = -1, .max = 1e30, .note = "lr / 10" },
    { "warmup", KN_OPTION_INT, AT(warmup), "100", "steps until the peak", .max = 1e12 },
    { "weight-decay", KN_OPTION_FLOAT, AT(weight_decay), "0.1", "weight decay of matrices",
      .max = 1e3 },
    { "beta2", KN_OPTION_FLOAT, AT(beta2), "0.99", "AdamW's second beta", .max = 0.99999999 },
    { "ema", KN_OPTION_FLOAT, AT(ema), "0",
      "decay of averages of the weights: evaluated, sampled and saved as the model; 0: none",
      .max = 0.99999999 },
    { "clip", KN_OPTION_FLOAT, AT(clip), "1", "largest norm of the gradient; 0: no clipping" },
    { "clip-norm", KN_OPTION_STRING, AT(clip_order), "2",
      "p of that norm: a number above 0, or inf" },
    { "seed", KN_OPTION_INT, AT(seed), "1337", "seed of weights, batches, dropout", .max = 9e15 },
    { "ranks", KN_OPTION_HEADING },
    { "ranks", KN_OPTION_INT, AT(ranks), "1", "processes that train together", .min = 1,
      .max = 4096, .transient = true },
    { "threads", KN_OPTION_INT, AT(threads), NULL, "threads of each rank", .max = 1024,
      .note = "cores / ranks", .transient = true },
    { "timeout", KN_OPTION_FLOAT, AT(timeout), NULL, "longest wait for another rank, in seconds",
      .min = 0.001, .max = 1e6, .note = "KNAP_TIMEOUT, or 60", .transient = true },
    { "device", KN_OPTION_CHOICE, AT(device), "cpu", "where to compute", .choices = "cpu|cuda" },
    { "tf32", KN_OPTION_FLAG, AT(tf32), NULL,
      "cuda: f32 products in TF32, faster, 10 bits of mantissa" },
    { "deterministic", KN_OPTION_FLAG, AT(deterministic), NULL,
      "cuda: only algorithms that repeat their bits; ranks add in order" },
    { "cuda-graph", KN_OPTION_FLAG, AT(cuda_graph), NULL,
      "cuda: record a step once, then launch it as one graph", .transient = true },
    { "sharding", KN_OPTION_HEADING },
    { "strategy", KN_OPTION_CHOICE, AT(strategy), "full_shard", "tensors that ranks divide",
      .choices = "full_shard|shard_grad_op|no_shard|hybrid_shard|hybrid_shard_grad_op",
      .transient = true },
    { "replicas", KN_OPTION_INT, AT(replicas), NULL, "groups that each hold the whole model",
      .min = 1, .max = 4096, .note = "1, or ranks / shards", .transient = true },
    { "shards", KN_OPTION_INT, AT(shards), NULL, "ranks of such a group", .min = 1, .max = 4096,
      .note = "ranks / replicas; hybrid: a machine's", .transient = true },
    { "layout", KN_OPTION_CHOICE, AT(layout), "flat", "how parameters are cut into shards",
      .choices = "flat|per_param|ragged", .transient = true },
    { "wrap", KN_OPTION_CHOICE, AT(wrap), "block", "modules that are gathered together",
      .choices = "block|size", .transient = true },
    { "wrap-size", KN_OPTION_INT, AT(wrap_size), "100000000",
      "with --wrap size: elements that make a module a unit", .min = 1, .max = 1e15,
      .transient = true },
    { "keep-whole-below", KN_OPTION_INT, AT(keep_whole_below), "0",
      "parameters of fewer elements are not cut", .max = 1e15, .transient = true },
    { "prefetch", KN_OPTION_CHOICE, AT(prefetch), "pre", "when backward gathers the next unit",
      .choices = "pre|post|none", .transient = true },
    { "forward-prefetch", KN_OPTION_FLAG, AT(forward_prefetch), NULL,
      "forward gathers the next unit early, too", .transient = true },
    { "max-gathers", KN_OPTION_INT, AT(max_gathers), "2", "units gathered ahead of their use",
      .min = 1, .max = 1000000, .transient = true },
    { "max-reductions", KN_OPTION_INT, AT(max_reductions), "1",
      "units whose reductions may run beside backward", .min = 1, .max = 1000000,
      .transient = true },
    { "reshard", KN_OPTION_STRING, AT(reshard), NULL,
      "release after forward: always, never, or N: keep 1/N a rank", .note = "by the strategy",
      .transient = true },
    { "keep-gathered", KN_OPTION_FLAG, AT(keep_gathered), NULL,
      "parameters stay gathered over a step's micro-batches", .transient = true },
    { "all-reduce-last", KN_OPTION_FLAG, AT(all_reduce_last), NULL,
      "hybrid: replicas add once a step, not at each micro-batch", .transient = true },
    { "offload", KN_OPTION_PATH, AT(offload), NULL,
      "folder for a file with parameters, gradients, optimizer's state; memory: a GPU's on the "
      "host",
      .transient = true },
    { "progress", KN_OPTION_HEADING },
    { "eval-every", KN_OPTION_INT, AT(eval_every), "250", "steps between evaluations; 0: never",
      .max = 1e12 },
    { "eval-steps", KN_OPTION_INT, AT(eval_steps), "20", "batches of an evaluation", .min = 1,
      .max = 1e9 },
    { "sample-every", KN_OPTION_INT, AT(sample_every), "0", "steps between samples; 0: never",
      .max = 1e12 },
    { "sample-tokens", KN_OPTION_INT, AT(sample_tokens), "200", "tokens of a sample", .min = 1,
      .max = 1 << 20 },
    { "prompt", KN_OPTION_STRING, AT(prompt), "\n", "the samples' beginning",
      .note = "a new line" },
    { "summary", KN_OPTION_FLAG, AT(summary), NULL,
      "print the model's modules with parameters, operations and memory first", .transient = true },
    { "check", KN_OPTION_FLAG, AT(check), NULL,
      "stop at the first operation that makes a NaN or an infinity; slow", .transient = true },
    { "log", KN_OPTION_PATH, AT(log), NULL, "write a JSON object a step into this file",
      .transient = true },
    { "saving", KN_OPTION_HEADING },
    { "out", KN_OPTION_PATH, AT(out), NULL, "save into this folder at evaluations, Ctrl-C, the end",
      .transient = true },
    { "resume", KN_OPTION_PATH, AT(resume), NULL, "continue from this folder, and save there",
      .transient = true },
    { "overwrite", KN_OPTION_FLAG, AT(overwrite), NULL,
      "begin anew in a folder that holds a checkpoint, and replace it", .transient = true },
    { "stop-after", KN_OPTION_INT, AT(stop_after), "0", "stop as on Ctrl-C after this step",
      .max = 1e12, .note = "never", .transient = true },
    { 0 },
};

const char *settings_word(const char *name, int choice, char *buf, size_t size)
{
    for (const kn_option *p = settings_table; p->name; p++) {
        if (!p->choices || strcmp(p->name, name) != 0)
            continue;
        const char *list = p->choices;
        while (choice-- > 0)
            list += strcspn(list, "|") + 1;
        snprintf(buf, size, "%.*s", (int)strcspn(list, "|"), list);
        return buf;
    }
    return "";
}

/* ---- checks ---------------------------------------------------------------------------------- */

static const char *model_word(const settings *s)
{
    static char word[32];
    return settings_word("model", s->model, word, sizeof word);
}

const kn_family *settings_family(const settings *s)
{
    return kn_family_of_choice(model_word(s));
}

/* Options of the model's sizes. */
static const struct {
    const char *option;
    const kn_family *only; /* NULL: every family has it */
    bool free;             /* a preset leaves it open */
} size_options[] = {
    { "layers", NULL, false },
    { "heads", NULL, false },
    { "embd", NULL, false },
    { "bias", &kn_gpt_family, true },
    { "kv-heads", &kn_llama_family, false },
    { "hidden", &kn_llama_family, false },
    { "tied", &kn_llama_family, false },
    { "rope-base", &kn_llama_family, false },
    { "rope-factor", &kn_llama_family, false },
    { "rope-original", &kn_llama_family, false },
};

/* "no-" for a flag that is off, as in --no-bias. */
static const char *no_before(const settings *s, const char *option)
{
    const kn_option *p = settings_table;
    while (p->name && strcmp(p->name, option) != 0)
        p++;
    return p->kind == KN_OPTION_FLAG && !*(const bool *)((const char *)s + p->offset) ? "no-" : "";
}

static bool check_model(const settings *s, const kn_options *o)
{
    const char *word = model_word(s);
    const kn_family *f = settings_family(s);
    bool preset = !kn_family_is_own_size(f, word);
    for (size_t i = 0; i < sizeof size_options / sizeof *size_options; i++) {
        const char *option = size_options[i].option;
        const char *no = no_before(s, option);
        const kn_family *only = size_options[i].only;
        if (!kn_options_given(o, option))
            continue;
        if (only && only != f)
            return kn_fail("--%s%s is an option of a %s, and --model %s is a %s; leave one of them "
                           "out",
                           no, option, only->name, word, f->name);
        if (preset && !size_options[i].free)
            return kn_fail(
                "--%s%s doesn't go with --model %s, which fixes it; leave one of them out", no,
                option, word);
    }
    return s->rope_factor > 0 || !kn_options_given(o, "rope-original") ||
           kn_fail("--rope-original is for --rope-factor; give that as well, or leave it out");
}

bool settings_model(const settings *s, int64_t vocab, kn_language_config *c)
{
    const char *word = model_word(s);
    const kn_family *f = settings_family(s);
    *c = (kn_language_config){ .family = f };
    if (!kn_family_is_own_size(f, word)) {
        if (!f->preset(word, c))
            return false;
    } else if (f == &kn_llama_family) {
        c->llama = (kn_llama_config){ .layers = (int)s->layers,
                                      .heads = (int)s->heads,
                                      .kv_heads = (int)s->kv_heads,
                                      .embd = s->embd,
                                      .hidden = s->hidden,
                                      .ctx = s->ctx,
                                      .vocab = vocab,
                                      .rope_base = s->rope_base,
                                      .untied = !s->tied };
        if (s->rope_factor > 0)
            c->llama.rope_scaling =
                (kn_rope_scaling){ .factor = s->rope_factor, .original_ctx = s->rope_original };
    } else {
        c->gpt = (kn_gpt_config){ (int)s->layers, (int)s->heads, s->embd, s->ctx, vocab, 0, false };
    }
    if (f == &kn_llama_family) {
        c->llama.dropout = s->dropout;
        return kn_llama_config_check(&c->llama);
    }
    c->gpt.dropout = s->dropout;
    c->gpt.no_bias = !s->bias;
    return true;
}

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

bool settings_check(settings *s, const kn_options *o, kn_comm *world)
{
    if (s->lr == 0)
        return kn_fail("--lr is 0; give a learning rate above 0");
    if (s->min_lr < 0)
        s->min_lr = s->lr / 10;
    if (s->min_lr > s->lr)
        return kn_fail(
            "--min-lr %g is above --lr %g, from which the rate falls; give a smaller one",
            s->min_lr, s->lr);
    if (kn_options_given(o, "warmup") && s->warmup > s->steps)
        return kn_fail(
            "--warmup %lld is more than the --steps %lld: the rate would never reach --lr; "
            "give fewer steps of warmup",
            (long long)s->warmup, (long long)s->steps);
    if (settings_device(s) != KN_CUDA && (s->tf32 || s->deterministic))
        return kn_fail(
            "--%s is for --device cuda; the cpu's products are in f32 and repeat their bits",
            s->tf32 ? "tf32" : "deterministic");
    if (s->tf32 && s->deterministic && s->dtype == 0)
        return kn_fail(
            "--tf32 and --deterministic: products in TF32 repeat their bits, but aren't the "
            "cpu's; leave one of them out");
    if (s->check && s->cuda_graph)
        return kn_fail("--check reads every result, which --cuda-graph can't record; leave one of "
                       "them out");
    if (settings_device(s) == KN_CUDA) {
        kn_cuda_allow_tf32(s->tf32);
        kn_cuda_deterministic(s->deterministic);
        if (!kn_device_memory(
                KN_CUDA)) /* the error names the reason: no driver, no GPU, no CUDA in this build */
            return false;
    }
    if (kn_options_given(o, "wrap-size") && s->wrap == 0)
        return kn_fail("--wrap-size is for --wrap size; give that as well, or leave it out");
    kn_strategy strategy = (kn_strategy)(KN_FULL_SHARD + s->strategy);
    s->mesh = (kn_mesh){ (int)s->replicas, (int)s->shards };
    if (!check_model(s, o) || !kn_fsdp_mesh(&s->mesh, strategy, world) || !read_reshard(s) ||
        !read_norm(s))
        return false;
    return !s->all_reduce_last || s->mesh.shards * s->mesh.replicas == 1 ||
           (s->mesh.shards > 1 && s->mesh.replicas > 1) ||
           kn_fail(
               "--all-reduce-last is for a mesh of several replicas of several shards, not %d of "
               "%d; give --shards, or leave it out",
               s->mesh.replicas, s->mesh.shards);
}

/* ---- derived values -------------------------------------------------------------------------- */

static const kn_dtype dtypes[] = { KN_F32, KN_BF16, KN_F16 }; /* f32|bf16|f16 */

kn_device settings_device(const settings *s)
{
    return s->device == 1 ? KN_CUDA : KN_CPU;
}

kn_fsdp_wrap_options settings_fsdp(const settings *s)
{
    const char *block_class = settings_family(s)->block_class;
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

plan settings_plan(const settings *s)
{
    const char *gpu = settings_device(s) == KN_CUDA ? kn_cuda_describe() : NULL;
    return (plan){
        .steps = s->steps,
        .accum = s->accum,
        .peak_flops = report_peak(gpu, s->dtype != 0, s->tf32),
        .lr = { KN_COSINE, s->lr, s->min_lr, s->warmup, s->steps },
        .clip = s->clip,
        .norm_of = s->norm_of,
        .no_sync = s->no_sync,
        .keep_gathered = s->keep_gathered,
        .all_reduce_last = s->all_reduce_last,
        .replay = s->cuda_graph,
        .eval_every = s->eval_every,
        .eval_steps = s->eval_steps,
        .sample_every = s->sample_every,
        .stop_after = s->stop_after,
        .out = s->out,
        .resume = s->resume,
        .log = s->log,
        .overwrite = s->overwrite,
    };
}

kn_comm_hook settings_hook(const settings *s)
{
    static const kn_comm_hook hooks[] = { NULL, kn_hook_bf16, kn_hook_f16,
                                          kn_hook_bf16_stochastic };
    return hooks[s->hook];
}

/* Muon's steps have the size of AdamW's, so that one rate fits both. */
kn_optim *settings_optim(const settings *s, void *model)
{
    double beta2 = s->beta2 > 0 ? s->beta2 : KN_ZERO;
    double decay = s->weight_decay > 0 ? s->weight_decay : KN_ZERO;
    kn_optim_group flat = { .max_ndim = 1, .weight_decay = KN_ZERO };
    if (s->optimizer == 0)
        return kn_adamw(model, .lr = s->lr, .beta2 = beta2, .weight_decay = decay, .groups = &flat,
                        .group_count = 1);
    return kn_muon(model, .lr = s->lr, .scale = KN_MUON_MATCH_ADAMW, .beta2 = beta2,
                   .weight_decay = decay, .groups = &flat, .group_count = 1);
}

bool settings_scaled(const settings *s)
{
    return dtypes[s->dtype] == KN_F16;
}
