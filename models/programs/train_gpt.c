/* models/programs/train_gpt.c: trains a GPT or a Llama on a text, on one rank or on N sharded
 * ranks. This file holds the parts specific to language models and text; trainer.c has the way from
 * the options to the end, training.c the loop. */
#include "data/data.h"
#include "data/images_internal.h"
#include "kernels/error_internal.h"
#include "models/imported_internal.h"
#include "models/programs/gpt_settings.h"
#include "models/programs/training.h"
#include "models/sample.h"
#include "models/text_internal.h"
#include "models/tokens/tokens.h"
#include "state/attempt.h"
#include <string.h>

typedef struct gpt_run {
    training t; /* comes first */
    gpt_settings s;
    kn_model_config config;
    kn_model_config saved; /* of the checkpoint to resume from; family NULL: none */
    kn_imported *init;     /* weights to begin with; NULL: none */
    kn_tokenizer *tokenizer;
    kn_text *text;
    int64_t *x, *y, *begin; /* [batch, ctx] */
} gpt_run;

/* ---- the task -------------------------------------------------------------------------------- */

/* The weight of a micro-batch among the `count` ones of a step or an evaluation, which begin at row
 * `from`: its share of the targets that count, so that the mean of all is that over the targets. */
static float weight_of(const gpt_run *r, kn_text_split split, int64_t from, int64_t count,
                       int64_t first)
{
    const int64_t rows = r->s.run.batch;
    int64_t own = 0, all = 0;
    for (int64_t i = 0; i < count * rows; i++) {
        const int64_t n =
            kn_conversations_counted(r->text, split, (uint64_t)r->s.run.seed, from + i);
        all += n;
        own += from + i >= first && from + i < first + rows ? n : 0;
    }
    return (float)((double)own * (double)count / (double)all);
}

static bool text_batch(training *t, bool validation, int64_t step, int64_t micro, kn_device device,
                       batch *b)
{
    gpt_run *r = (gpt_run *)t;
    const gpt_settings *s = &r->s;
    const int64_t first = (validation ? 0 : training_samples(t, step)) + micro * s->run.batch,
                  rows = s->run.batch;
    const kn_text_split split = validation ? KN_VALIDATION : KN_TRAIN;
    const uint64_t seed = (uint64_t)s->run.seed;
    if (!(s->mask_documents ? kn_text_batch_documents(r->text, split, seed, first, rows, s->ctx,
                                                      r->x, r->y, r->begin)
                            : kn_text_batch(r->text, split, seed, first, rows, s->ctx, r->x, r->y)))
        return false;
    b->x = kn_from(KN_I64, device, r->x, KN_SHAPE(rows, s->ctx));
    b->y = kn_from(KN_I64, device, r->y, KN_SHAPE(rows, s->ctx));
    if (s->mask_documents)
        b->more = kn_from(KN_I64, device, r->begin, KN_SHAPE(rows, s->ctx));
    if (r->text->talk) {
        const int64_t from = validation ? 0 : training_samples(t, step);
        const float weight =
            weight_of(r, split, from, validation ? s->run.eval_steps : t->rows / rows, first);
        b->weight = kn_from(KN_F32, device, &weight, 0, NULL);
    } else if (validation && r->tokenizer) /* of conversations only some targets count */
        b->bytes = (double)kn_tokenizer_bytes(r->tokenizer, r->y, rows * s->ctx);
    return b->x && b->y && kn_ok();
}

static kn_tensor *model_loss(training *t, const batch *b)
{
    kn_tensor *loss = b->more ? kn_language_documents_loss(&t->model, b->x, b->y, b->more)
                              : kn_language_loss(&t->model, b->x, b->y);
    return b->weight && loss ? kn_mul(loss, kn_cast(b->weight, kn_dtype_of(loss))) : loss;
}

static bool write_sample(training *t)
{
    gpt_run *r = (gpt_run *)t;
    kn_sample_options draw = { .temperature = 0.8,
                               .top_k = 200,
                               .seed = (uint64_t)r->s.run.seed,
                               .stop = training_stop_requested,
                               .stop_arg = t };
    return kn_write_text(&t->model, kn_language_next_logits, r->tokenizer, .prompt = r->s.prompt,
                         .tokens = r->s.sample_tokens, .ctx = r->s.ctx, .cached = true,
                         .draw = draw, .out = first_rank(t) ? stdout : NULL);
}

/* ---- setting up ------------------------------------------------------------------------------ */

/* The tokenizer of --init; one that is given beside it must be the same, or have as many ids as
 * that of a GGUF. ids: the data are tokens, which need none. */
static bool init_tokenizer(gpt_run *r, bool ids)
{
    const bool given = kn_options_given(r->t.options, "tokenizer"), needed = !given && !ids;
    kn_attempt attempt;
    char error[KN_ATTEMPT_TEXT];
    if (kn_rank(r->t.world) == 0 && kn_import_note(r->init))
        fprintf(stderr, "train_gpt: %s\n", kn_import_note(r->init));
    if (!needed)
        kn_attempt_begin(&attempt);
    r->tokenizer = kn_import_tokenizer(r->init);
    if (!needed)
        kn_attempt_end(&attempt, error);
    if (!given || !r->tokenizer) /* a model without one takes any */
        return r->tokenizer != NULL || !needed;
    kn_tokenizer *other = strcmp(r->s.tokenizer, "char") == 0 || strcmp(r->s.tokenizer, "byte") == 0
                              ? NULL
                              : kn_tokenizer_load(r->s.tokenizer);
    char *a = kn_tokenizer_text(r->tokenizer), *b = other ? kn_tokenizer_text(other) : NULL;
    /* a GGUF's lists make another text than the model's own file */
    const bool same =
        a && b &&
        (strcmp(a, b) == 0 || (kn_import_is_file(r->init) &&
                               kn_tokenizer_vocab(other) == kn_tokenizer_vocab(r->tokenizer)));
    if (same) {
        kn_tokenizer *own = r->tokenizer;
        r->tokenizer = other;
        other = own;
    }
    kn_tokenizer_free(other);
    kn_host_free(a);
    kn_host_free(b);
    return same ||
           (kn_ok() && kn_fail("--tokenizer %s: the model of --init %s has a tokenizer of its "
                               "own; leave --tokenizer out",
                               r->s.tokenizer, r->s.init));
}

/* The path of a data set, a file, a folder or a pattern, for kn_host_free; NULL with an error. */
static char *data_path(const char *name)
{
    if (kn_names_images(name))
        return kn_fail_null("%s is a set of images; a text is shakespeare, a file or a folder",
                            name);
    return kn_text_is_pattern(name) ? kn_host_strdup(name) : kn_data_find(name);
}

/* The text of data_path(name), to which --vocab and the tokenizer belong. */
static kn_text *read_text(gpt_run *r, const char *name)
{
    const gpt_settings *s = &r->s;
    const bool named = strcmp(s->tokenizer, "char") != 0 && strcmp(s->tokenizer, "byte") != 0;
    char *path = data_path(name);
    int64_t vocab = s->vocab;
    if (path && vocab && !r->tokenizer && named)
        r->tokenizer = kn_tokenizer_load(s->tokenizer);
    if (path && !vocab && !r->tokenizer && r->init && kn_text_is_plain(path))
        vocab = (int64_t)kn_config_get(kn_import_config(r->init), "vocab", 0);
    kn_text *t = path && kn_ok()
                     ? kn_text_read(path, &r->tokenizer, .kind = s->tokenizer, .vocab = vocab,
                                    .field = s->field, .separator = s->separator, .end = s->end,
                                    .chat = strcmp(s->chat, "none") == 0 ? NULL : s->chat)
                     : NULL;
    kn_host_free(path);
    return t;
}

/* --template auto becomes one: of --init its own, or the first that its tokenizer has the tokens
 * of; else chatml. */
static bool find_template(gpt_run *r)
{
    const kn_chat *c = NULL;
    if (strcmp(r->s.chat, "auto") != 0)
        return true;
    if (r->init && !(c = kn_import_chat(r->init)) && kn_ok() && r->tokenizer)
        c = kn_chat_for(r->tokenizer);
    return kn_ok() && kn_options_set(r->t.options, "template", c ? c->name : "chatml");
}

static bool open_text(gpt_run *r)
{
    const gpt_settings *s = &r->s;
    if (r->t.from && !(r->tokenizer = kn_checkpoint_tokenizer(r->t.from)))
        return false;
    char *path = r->init ? data_path(s->data) : NULL;
    const bool ids = path && kn_text_holds_tokens(path); /* which need no tokenizer */
    kn_host_free(path);
    if (!kn_ok() || (r->init && !init_tokenizer(r, ids)) || !find_template(r))
        return false;
    r->text = read_text(r, s->data);
    if (r->text && s->val_data) {
        kn_text *val = read_text(r, s->val_data);
        r->text = kn_text_join(r->text, val);
    }
    if (r->text && r->text->talk && !kn_text_pack(r->text, s->ctx, s->mask_documents))
        return false;
    if (r->text && s->mask_documents && r->text->first < 0 && !r->text->talk)
        return kn_fail("--mask-documents: which token stands between the documents of %s isn't "
                       "known; give it by --end, or say where the documents are (--field, "
                       "--separator)",
                       s->data);
    if (r->text && !r->tokenizer && (s->run.out || s->run.sample_every > 0))
        return kn_fail(
            "--%s needs a tokenizer, and the token file has none beside it; give it with "
            "--tokenizer",
            s->run.out ? "out" : "sample-every");
    return r->text != NULL;
}

/* The samples' beginning is a text that the tokenizer knows. */
static bool check_prompt(gpt_run *r)
{
    size_t length = strlen(r->s.prompt);
    if (!r->tokenizer || (r->s.run.sample_every == 0 && !kn_options_given(r->t.options, "prompt")))
        return true;
    if (length == 0)
        return kn_fail("--prompt is empty; give at least one character to go on from");
    int64_t count = 0;
    void *ids = kn_tokenizer_list(r->tokenizer, r->s.prompt, length, KN_I64, &count);
    bool ok = ids && (count > 0 || kn_fail("--prompt has no tokens"));
    kn_host_free(ids);
    return ok;
}

static int64_t size_of(const kn_model_config *c, const char *name, int64_t otherwise)
{
    return (int64_t)kn_config_get(c, name, (double)otherwise);
}

static bool declare(training *t)
{
    return kn_config_init(&t->model, &((gpt_run *)t)->config, KN_F32, KN_META);
}

static bool make_model(gpt_run *r)
{
    const gpt_settings *s = &r->s;
    int64_t vocab = kn_text_vocab(r->text);
    const kn_model_config *from = r->init           ? kn_import_config(r->init)
                                  : r->saved.family ? &r->saved
                                                    : NULL;
    if (!gpt_settings_model(s, vocab, from, &r->config))
        return false;
    const int64_t known = size_of(&r->config, "vocab", 0), ctx = size_of(&r->config, "ctx", 0);
    if (vocab > known)
        return kn_fail("the text has %lld kinds of token, the model's vocabulary %lld: %s",
                       (long long)vocab, (long long)known,
                       r->init && r->text->talk
                           ? "it has no room for the tokens of --template; try --template plain, "
                             "or one whose tokens the tokenizer has"
                       : r->init ? "its tokens are those of another tokenizer than the model's"
                                 : "use --model custom, or --tokenizer byte");
    if (s->ctx > ctx)
        return kn_fail("--ctx %lld is longer than the model's context of %lld", (long long)s->ctx,
                       (long long)ctx);
    const int64_t train = kn_text_count(r->text, KN_TRAIN),
                  rest = kn_text_count(r->text, KN_VALIDATION), most = rest < train ? rest : train;
    if (!r->text->talk && most > 1 && s->ctx >= most)
        return kn_fail("--ctx %lld doesn't fit the text: of its %lld tokens, %lld are for "
                       "validation; use --ctx %lld or less, or a longer text%s",
                       (long long)s->ctx, (long long)(train + rest), (long long)rest,
                       (long long)most - 1, s->val_data ? "" : ", or give --val-data");
    return training_same_model(&r->t, &r->config, &r->saved) && kn_text_check(r->text, s->ctx) &&
           declare(&r->t) && (r->t.config = kn_config_text(&r->config)) != NULL;
}

/* Of all ranks, and of the checkpoint. */
static bool same_text(gpt_run *r)
{
    char text[128];
    snprintf(text, sizeof text, "%lld + %lld tokens of %lld kinds",
             (long long)kn_text_count(r->text, KN_TRAIN),
             (long long)kn_text_count(r->text, KN_VALIDATION), (long long)kn_text_vocab(r->text));
    return training_same_data(&r->t, text, kn_text_hash(r->text));
}

static bool open_all(training *t)
{
    gpt_run *r = (gpt_run *)t;
    const gpt_settings *s = &r->s;
    if ((t->from && !kn_config_saved(t->from, KN_LANGUAGE_MODELS, &r->saved, NULL)) ||
        (s->init && (!(r->init = kn_import_open(s->init, .comm = t->world)) ||
                     !gpt_settings_follow(t->options, kn_import_config(r->init)))) ||
        !training_has_steps(t, "steps") || !gpt_settings_check(&r->s, t->options, t->world) ||
        !open_text(r) || !check_prompt(r) || !make_model(r) || !same_text(r))
        return false;
    const size_t ids = (size_t)(s->run.batch * s->ctx);
    r->x = kn_host_alloc(ids * sizeof *r->x);
    r->y = kn_host_alloc(ids * sizeof *r->y);
    r->begin = kn_host_alloc(ids * sizeof *r->begin);
    t->family = r->config.family;
    t->items = s->run.batch * s->ctx;
    t->item_flops = kn_family_flops(r->config.family, r->config.of, s->ctx);
    t->tokenizer = r->tokenizer;
    return r->x && r->y && r->begin;
}

/* Averages begin with these weights. */
static bool sharded(training *t)
{
    const gpt_run *r = (gpt_run *)t;
    return !r->init || kn_import_load(r->init, &t->model);
}

/* ---- printing -------------------------------------------------------------------------------- */

static void print_model(const training *t)
{
    const gpt_run *r = (const gpt_run *)t;
    const kn_model_config *c = &r->config;
    const int64_t heads = size_of(c, "heads", 0), kv_heads = size_of(c, "kv-heads", heads),
                  embd = size_of(c, "embd", 0), mlp = size_of(c, "hidden", 4 * embd);
    char kv[48] = "", hidden[48] = "";
    if (kv_heads != heads)
        snprintf(kv, sizeof kv, ", %lld of keys and values", (long long)kv_heads);
    if (mlp != 4 * embd)
        snprintf(hidden, sizeof hidden, ", %lld in the MLP", (long long)mlp);
    report_row(
        "model", "%s: %lld layers, %lld heads%s, %lld channels%s, context %lld, vocabulary %lld",
        r->s.model, (long long)size_of(c, "layers", 0), (long long)heads, kv, (long long)embd,
        hidden, (long long)size_of(c, "ctx", 0), (long long)size_of(c, "vocab", 0));
    if (r->init)
        report_row("begins with", "%s", r->s.init);
}

static void print_text(const training *t)
{
    const gpt_run *r = (const gpt_run *)t;
    const gpt_settings *s = &r->s;
    const int ranks = kn_comm_size(t->world);
    report_row("text", "%s: %lld tokens to train, %lld to validate%s%s", s->data,
               (long long)kn_text_count(r->text, KN_TRAIN),
               (long long)kn_text_count(r->text, KN_VALIDATION), s->val_data ? ", of " : "",
               s->val_data ? s->val_data : "");
    if (r->text->talk) {
        const kn_conversations *c = r->text->talk;
        report_row("conversations",
                   "%lld by %s, in %lld rows to train, %lld to validate; %lld longer than a row "
                   "are cut, %lld left out without an answer",
                   (long long)c->count, s->chat, (long long)c->train_rows,
                   (long long)(c->rows - c->train_rows), (long long)c->cut,
                   (long long)(c->left_out + c->lost));
    }
    report_row("step", "%lld rows of %lld x %lld micro-batches x %d ranks = %lld tokens",
               (long long)s->run.batch, (long long)s->ctx, (long long)s->run.accum, ranks,
               (long long)(s->run.batch * s->ctx * s->run.accum * ranks));
}

static kn_values example(training *t)
{
    kn_tensor *ids = kn_empty(KN_I64, KN_META, KN_SHAPE(t->s->batch, ((gpt_run *)t)->s.ctx));
    return ((gpt_run *)t)->s.mask_documents ? KN_VALUES(ids, ids, ids) : KN_VALUES(ids, ids);
}

/* ---- the program ----------------------------------------------------------------------------- */

static void run_free(training *t)
{
    gpt_run *r = (gpt_run *)t;
    kn_text_free(r->text);
    kn_tokenizer_free(r->tokenizer);
    kn_import_free(r->init);
    kn_host_free(r->x);
    kn_host_free(r->y);
    kn_host_free(r->begin);
}

static const trainer of_gpts = {
    .name = "train_gpt",
    .about = "Trains a GPT or a Llama on a text, on one rank or on several sharded ones.",
    .item = "tokens",
    .of_tokens = true,
    .table = gpt_settings_begin,
    .open = open_all,
    .declare = declare,
    .sharded = sharded,
    .free = run_free,
    .example = example,
    .print_model = print_model,
    .print_data = print_text,
    .batch = text_batch,
    .loss = model_loss,
    .sample = write_sample,
};

int main(int argc, char **argv)
{
    gpt_run r = { .t = { .of = &of_gpts, .s = &r.s.run } };
    return training_main(&r.t, argc, argv);
}
