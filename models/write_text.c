/* models/write_text.c: writing texts with a language model, one token after another; several at
 * once share the reading of the weights. */
#include "autograd/autograd.h"
#include "kernels/error_internal.h"
#include "kernels/memory_internal.h"
#include "models/sample.h"
#include "models/tokens/tokens.h"
#include "nn/layers.h"

#include <string.h>

/* Texts at once: as many as the CPU's products give each row the bits that it has alone
 * (kernels/cpu/vec/gemm_few.h). A GPU's read weights once for any number. */
enum { AT_ONCE = 4, AT_ONCE_CUDA = 32, MOST = 1 << 20 };

typedef struct text {
    int64_t *ids, n, room;
    int64_t unseen; /* of ids the first so many aren't written */
    int64_t begun;  /* ids of the prompt */
    int64_t inside; /* ids in the cache */
    int64_t shown;  /* ids that are written */
    int64_t slot;   /* its number in the cache; -1: it waits, or it is done */
    bool done;
} text;

/* The state of one kn_write_text. */
typedef struct writing {
    void *module;
    kn_logits_fn logits;
    const kn_tokenizer *tokenizer;
    const kn_write_text_options *o;
    kn_device device; /* of ids */
    text *text;       /* [count], each prompt's samples side by side */
    int64_t count, next, printed;
    int at_once;
    kn_cache *cache; /* NULL: every token is computed anew */
    float *host;     /* [rows, vocab] */
    int64_t vocab, host_room;
} writing;

/* ---- one token more -------------------------------------------------------------------------- */

/* The logits of the last position of y, as [rows, V] on the host. */
static bool take_logits(writing *w, kn_tensor *y, int64_t rows)
{
    char shown[96];
    int dims = y ? kn_ndim(y) : 0;
    int64_t len = dims > 2 ? kn_size(y, 1) : 1, vocab = dims > 0 ? kn_size(y, dims - 1) : 0;
    if (!y)
        return kn_ok() && kn_fail("kn_write_text: the model gave no logits");
    if (dims < 1 || dims > 3 || kn_numel(y) != rows * len * vocab || len < 1 ||
        (dims > 1 && kn_size(y, 0) != rows) ||
        (w->tokenizer && vocab < kn_tokenizer_vocab(w->tokenizer)))
        return kn_fail("kn_write_text: the logits are %s; they must be %s[%lld, V] or [%lld, T, V] "
                       "with a V of at least the tokenizer's, %lld",
                       kn_describe(y, shown, sizeof shown), rows == 1 ? "[V], " : "",
                       (long long)rows, (long long)rows,
                       (long long)(w->tokenizer ? kn_tokenizer_vocab(w->tokenizer) : 0));
    if (dims == 3)
        y = kn_slice(y, 1, len - 1, len);
    w->vocab = vocab;
    y = kn_cast(y, KN_F32);
    return y && kn_host_grow(&w->host, &w->host_room, rows * vocab, sizeof *w->host) &&
           kn_to_host(y, w->host, (size_t)(rows * vocab) * sizeof *w->host);
}

/* Whether nothing of the text in the cache holds: none is there, or positions have moved. */
static bool anew(const writing *w, const text *t)
{
    return !w->cache || t->inside == 0 || (w->o->ctx > 0 && t->n > w->o->ctx);
}

static bool stops(const kn_write_text_options *o, int64_t id)
{
    for (int i = 0; i < o->stop_count; i++)
        if (o->stop_ids[i] == id)
            return true;
    return false;
}

/* Draws the text's next token from logits [V]. */
static bool draw_token(writing *w, text *t, const float *logits)
{
    kn_sample_options o = w->o->draw;
    o.seed += (uint64_t)(t - w->text);
    const int64_t id = kn_sample(logits, w->vocab, &o, t->n - t->begun);
    t->done = id < 0 || stops(w->o, id);
    if (!t->done && kn_host_grow(&t->ids, &t->room, t->n + 1, sizeof *t->ids))
        t->ids[t->n++] = id;
    t->done |= t->n - t->begun >= w->o->tokens;
    return kn_ok();
}

/* The next token of each of n texts, which give the model their last `len` tokens each. */
static bool step_texts(writing *w, text *const *texts, int n, int64_t len)
{
    int64_t slots[KN_CACHE_TEXTS], room = 0, *ids = NULL;
    bool ok = kn_host_grow(&ids, &room, n * len, sizeof *ids);
    for (int i = 0; ok && i < n; i++) {
        memcpy(ids + i * len, texts[i]->ids + texts[i]->n - len, (size_t)len * sizeof *ids);
        slots[i] = texts[i]->slot;
    }
    if (ok && w->cache)
        ok = kn_cache_select(w->cache, slots, n) &&
             (!anew(w, texts[0]) || kn_cache_truncate(w->cache, 0));
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = ok ? kn_from(KN_I64, w->device, ids, KN_SHAPE(n, len)) : NULL;
    ok = ok && take_logits(w, w->logits ? w->logits(w->module, x) : kn_call(w->module, x), n);
    for (int i = 0; ok && i < n; i++) {
        texts[i]->inside = texts[i]->n;
        ok = draw_token(w, texts[i], w->host + i * w->vocab);
    }
    kn_scope_end(scope);
    kn_host_free(ids);
    return ok;
}

/* Texts that wait take the places of those that are done. */
static int choose(writing *w, text **active)
{
    int n = 0;
    bool taken[KN_CACHE_TEXTS] = { false };
    for (int64_t i = w->printed; i < w->next; i++)
        if (w->text[i].slot >= 0 && !w->text[i].done)
            taken[w->text[i].slot] = true;
        else
            w->text[i].slot = -1;
    for (int slot = 0; slot < w->at_once && w->next < w->count; slot++)
        if (!taken[slot])
            w->text[w->next++].slot = slot;
    for (int64_t i = w->printed; i < w->next; i++)
        if (w->text[i].slot >= 0)
            active[n++] = &w->text[i];
    return n;
}

/* The next token of each: prompts and texts with moved positions alone, the others at once. */
static bool step_round(writing *w, text *const *active, int n)
{
    text *together[KN_CACHE_TEXTS];
    int count = 0;
    bool ok = true;
    for (int i = 0; ok && i < n; i++) {
        text *t = active[i];
        if (anew(w, t))
            ok = step_texts(w, &t, 1, w->o->ctx > 0 && t->n > w->o->ctx ? w->o->ctx : t->n);
        else
            together[count++] = t;
    }
    return ok && (count == 0 || step_texts(w, together, count, 1));
}

/* ---- output ---------------------------------------------------------------------------------- */

static bool print_text(const kn_tokenizer *t, const int64_t *ids, int64_t n, FILE *out)
{
    const int64_t length = kn_tokenizer_decode(t, ids, n, (char[1]){ 0 }, 1);
    char *buf = length < 0 ? NULL : kn_host_alloc((size_t)length + 1);
    const bool ok = buf && kn_tokenizer_decode(t, ids, n, buf, (size_t)length + 1) >= 0;
    if (ok)
        fwrite(buf, 1, (size_t)length, out);
    kn_host_free(buf);
    return ok;
}

/* Writes what isn't shown yet of a text: the prompt, then one token after another. */
static bool show(const writing *w, text *t)
{
    FILE *out = w->o->out;
    const char *bytes;
    if (!out)
        return true;
    if (t->shown == 0 && !w->o->print_ids) {
        if (!print_text(w->tokenizer, t->ids + t->unseen, t->begun - t->unseen, out))
            return false;
        t->shown = t->begun;
    }
    for (; t->shown < t->n; t->shown++) {
        const int64_t id = t->ids[t->shown];
        if (w->o->print_ids)
            fprintf(out, t->shown ? " %lld" : "%lld", (long long)id);
        /* a model whose vocabulary exceeds the tokenizer's may draw an id without text */
        else if (id < kn_tokenizer_vocab(w->tokenizer)) {
            const size_t n = kn_tokenizer_piece(w->tokenizer, id, &bytes);
            fwrite(bytes, 1, n, out);
        }
    }
    fflush(out);
    return true;
}

/* One text as far as it is there; of several those that are done, in their order. */
static bool show_texts(writing *w)
{
    const kn_write_text_options *o = w->o;
    bool ok = w->count > 1 || show(w, w->text);
    for (; w->count > 1 && ok && w->printed < w->count && w->text[w->printed].done; w->printed++) {
        text *t = &w->text[w->printed];
        if (o->out)
            fprintf(o->out, "--- %lld of %lld: prompt %lld, seed %llu\n", (long long)w->printed + 1,
                    (long long)w->count, (long long)(w->printed / o->samples) + 1,
                    (unsigned long long)(o->draw.seed + (uint64_t)w->printed));
        ok = show(w, t);
        if (o->out)
            fprintf(o->out, "\n");
        kn_host_free(t->ids);
        t->ids = NULL;
    }
    return ok;
}

static bool write_texts(writing *w)
{
    const kn_sample_options *draw = &w->o->draw;
    text *active[KN_CACHE_TEXTS];
    bool ok = show_texts(w);
    while (ok && w->o->tokens > 0 && !(draw->stop && draw->stop(draw->stop_arg))) {
        const int n = choose(w, active);
        if (n == 0)
            break;
        ok = step_round(w, active, n) && show_texts(w);
    }
    return ok && kn_ok();
}

/* ---- prompts --------------------------------------------------------------------------------- */

/* A text begins with a prompt, the number-th. */
static bool begin_text(const writing *w, text *t, const kn_prompt *p, int64_t number)
{
    const int64_t *first = p->ids;
    int64_t *list = NULL, count = p->count;
    t->slot = -1;
    t->done = w->o->tokens == 0;
    if (p->ids ? count < 1 : !*p->text)
        return kn_fail("the prompt is empty (number %lld); give at least one %s to go on from",
                       (long long)number, p->ids ? "id" : "character");
    if (!p->ids) {
        const int64_t *prefix;
        t->unseen = kn_tokenizer_prefix(w->tokenizer, &prefix);
        list = kn_tokenizer_list(w->tokenizer, p->text, strlen(p->text), KN_I64, &count);
        first = list;
        if (list && count == 0)
            kn_fail("the prompt has no tokens; give at least one character to go on from");
        for (int64_t i = 0; list && kn_ok() && i < t->unseen; i++)
            if (kn_host_grow(&t->ids, &t->room, ++t->n, sizeof *t->ids))
                t->ids[i] = prefix[i];
    }
    if (first && kn_ok() && kn_host_grow(&t->ids, &t->room, t->n + count, sizeof *t->ids)) {
        memcpy(t->ids + t->n, first, (size_t)count * sizeof *first);
        t->begun = t->n += count;
    }
    kn_host_free(list);
    return kn_ok();
}

/* All of them, so that a prompt that can't be read is refused before the first text is written.
 * Returns the most tokens that one of them may come to; 0 with an error. */
static int64_t begin_texts(writing *w)
{
    const kn_write_text_options *o = w->o;
    int64_t most = 0;
    w->text = kn_host_calloc((size_t)w->count, sizeof *w->text);
    for (int64_t i = 0; w->text && i < w->count; i++) {
        text *t = &w->text[i];
        if (!begin_text(w, t, &o->prompts[i / o->samples], i / o->samples + 1))
            return 0;
        most = t->n + o->tokens > most ? t->n + o->tokens : most;
    }
    return most;
}

static bool check(const void *module, const kn_tokenizer *t, const kn_write_text_options *o)
{
    bool texts = !o->print_ids;
    if (o->tokens < 0 || o->ctx < 0 || o->prompt_count < 0 || o->prompts_count < 0 ||
        o->stop_count < 0 || o->samples < 0)
        return kn_fail("kn_write_text: .tokens is %lld, .ctx %lld, .prompt_count %lld, "
                       ".prompts_count %lld, .samples %lld and .stop_count %d; they must be at "
                       "least 0",
                       (long long)o->tokens, (long long)o->ctx, (long long)o->prompt_count,
                       (long long)o->prompts_count, (long long)o->samples, o->stop_count);
    if (o->prompts_count > 0 && !kn_given(o->prompts, "kn_write_text", "the list of .prompts"))
        return false;
    if (o->prompts_count > 0 && (o->prompt || o->prompt_ids))
        return kn_fail("kn_write_text: .prompts stands beside .prompt or .prompt_ids; give one");
    if (o->prompts_count > MOST || o->samples > MOST)
        return kn_fail("kn_write_text: .prompts_count is %lld and .samples %lld; at most %d each",
                       (long long)o->prompts_count, (long long)o->samples, MOST);
    texts |= o->prompts_count == 0 && !o->prompt_ids;
    for (int64_t i = 0; i < o->prompts_count; i++) {
        if (!o->prompts[i].ids && !kn_given(o->prompts[i].text, "kn_write_text", "a prompt"))
            return false;
        texts |= !o->prompts[i].ids;
    }
    return kn_given(module, "kn_write_text", "the module") &&
           (!texts || kn_given(t, "kn_write_text", "the tokenizer")) &&
           (o->stop_count == 0 || kn_given(o->stop_ids, "kn_write_text", "the list of .stop_ids"));
}

bool kn_write_text_(void *module, kn_logits_fn logits, const kn_tokenizer *t,
                    kn_write_text_options o)
{
    if (!check(module, t, &o))
        return false;
    const kn_prompt one = { o.prompt ? o.prompt : "\n", o.prompt_ids, o.prompt_count };
    if (o.prompts_count == 0)
        o.prompts = &one, o.prompts_count = 1;
    o.samples = o.samples ? o.samples : 1;
    const kn_param *p;
    bool cuda = kn_params(module, &p) > 0 && kn_device_of(p[0].tensor) == KN_CUDA;
    writing w = { .module = module,
                  .logits = logits,
                  .tokenizer = t,
                  .o = &o,
                  .device = cuda ? KN_CUDA : KN_CPU,
                  .count = o.prompts_count * o.samples,
                  .at_once = !o.cached ? 1
                             : cuda    ? AT_ONCE_CUDA
                                       : AT_ONCE };
    const int64_t all = kn_ok() ? begin_texts(&w) : 0;
    bool ok = all > 0;
    if (ok) {
        bool training = kn_training(module), mode = kn_set_grad_mode(false);
        kn_train(module, false);
        w.cache = o.cached ? kn_cache_new(module, o.ctx > 0 && o.ctx < all ? o.ctx : all) : NULL;
        ok = kn_ok() && write_texts(&w);
        kn_cache_free(w.cache);
        kn_train(module, training);
        kn_set_grad_mode(mode);
    }
    for (int64_t i = 0; w.text && i < w.count; i++)
        kn_host_free(w.text[i].ids);
    kn_host_free(w.text);
    kn_host_free(w.host);
    return ok;
}
