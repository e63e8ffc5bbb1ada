/* models/sample.c: choosing tokens from logits, and writing text with a language model. Computed on
 * the host in double, so that equal logits give equal text everywhere. */
#include "models/sample.h"
#include "kernels/error_internal.h"

#include "autograd/autograd.h"
#include "data/data.h"
#include "kernels/memory_internal.h"
#include "models/tokens/tokens.h"
#include "nn/layers.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct candidate {
    double weight; /* exp((logit - max) / temperature) */
    int64_t id;
} candidate;

/* Likeliest first, equal ones by id: a unique order. */
static int by_weight(const void *a, const void *b)
{
    const candidate *x = a, *y = b;
    if (x->weight != y->weight)
        return x->weight < y->weight ? 1 : -1;
    return x->id < y->id ? -1 : x->id > y->id;
}

/* A logit of -infinity has no chance. */
static int64_t likeliest(const float *logits, int64_t vocab)
{
    int64_t best = -1;
    for (int64_t i = 0; i < vocab; i++) {
        if (isnan(logits[i]) || logits[i] == INFINITY) {
            kn_fail("sampling: logit %lld of %lld is %g; the weights are damaged or training "
                    "diverged",
                    (long long)i, (long long)vocab, logits[i]);
            return -1;
        }
        if (isfinite(logits[i]) && (best < 0 || logits[i] > logits[best]))
            best = i;
    }
    if (best < 0)
        kn_fail("sampling: none of %lld logits is finite; the weights are damaged or training "
                "diverged",
                (long long)vocab);
    return best;
}

static bool check_options(const kn_sample_options *o)
{
    if (!(o->temperature >= 0 && isfinite(o->temperature)))
        return kn_fail("kn_sample: .temperature is %g; it must be at least 0", o->temperature);
    if (!(o->top_p >= 0 && o->top_p <= 1))
        return kn_fail("kn_sample: .top_p is %g; it must lie between 0 and 1", o->top_p);
    return o->top_k >= 0 ||
           kn_fail("kn_sample: .top_k is %lld; it must be at least 0", (long long)o->top_k);
}

int64_t kn_sample(const float *logits, int64_t vocab, const kn_sample_options *o, int64_t index)
{
    if (!kn_given(logits, "kn_sample", "the array of logits") ||
        !kn_given(o, "kn_sample", "the options' struct"))
        return 0;
    if (!check_options(o))
        return -1;
    int64_t best = likeliest(logits, vocab);
    if (best < 0 || o->temperature <= 0)
        return best;
    candidate *c = kn_host_alloc((size_t)vocab * sizeof *c);
    if (!c)
        return -1;
    for (int64_t i = 0; i < vocab; i++)
        c[i] = (candidate){
            isfinite(logits[i]) ? exp(((double)logits[i] - logits[best]) / o->temperature) : 0, i
        };
    qsort(c, (size_t)vocab, sizeof *c, by_weight);
    int64_t count = o->top_k > 0 && o->top_k < vocab ? o->top_k : vocab;
    double sum = 0, reached = 0;
    for (int64_t i = 0; i < count; i++)
        sum += c[i].weight;
    if (o->top_p > 0 && o->top_p < 1) {
        int64_t kept = 0;
        while (kept < count && reached < o->top_p * sum)
            reached += c[kept++].weight;
        count = kept;
        sum = reached;
    }
    int64_t steps = (int64_t)1 << 53;
    double u = (double)kn_random_below(o->seed, kn_random_stream("sample", index, 0), 0, steps) /
               (double)steps * sum;
    int64_t pick = 0;
    for (double at = c[0].weight; pick + 1 < count && u >= at; at += c[pick].weight)
        pick++;
    int64_t id = c[pick].id;
    kn_host_free(c);
    return id;
}

/* The state of one kn_write_text. */
typedef struct writing {
    void *module;
    kn_logits_fn logits;
    const kn_tokenizer *tokenizer;
    const kn_write_text_options *o;
    kn_device device;        /* of ids */
    int64_t *ids, n, unseen; /* of ids the first so many aren't written */
    kn_cache *cache;         /* NULL: every token is computed anew */
    float *host;             /* [vocab] */
    int64_t vocab;
} writing;

/* The logits of the last position of y, as [V] on the host. */
static bool take_logits(writing *w, kn_tensor *y)
{
    char text[96];
    int dims = y ? kn_ndim(y) : 0;
    int64_t rows = dims > 1 ? kn_size(y, dims - 2) : 1, vocab = dims > 0 ? kn_size(y, dims - 1) : 0;
    if (!y)
        return kn_ok() && kn_fail("kn_write_text: the model gave no logits");
    if (dims < 1 || dims > 3 || kn_numel(y) != rows * vocab || (dims == 2 && rows != 1) ||
        rows < 1 || (w->tokenizer && vocab < kn_tokenizer_vocab(w->tokenizer)))
        return kn_fail("kn_write_text: the logits are %s; they must be [V], [1, V] or [1, T, V] "
                       "with a V of at "
                       "least the tokenizer's, %lld",
                       kn_describe(y, text, sizeof text),
                       (long long)(w->tokenizer ? kn_tokenizer_vocab(w->tokenizer) : 0));
    if (dims == 3)
        y = kn_slice(y, 1, rows - 1, rows);
    if (vocab != w->vocab) {
        kn_host_free(w->host);
        w->vocab = vocab;
        w->host = kn_host_alloc((size_t)vocab * sizeof *w->host);
    }
    y = w->host ? kn_cast(y, KN_F32) : NULL;
    return y && kn_to_host(y, w->host, (size_t)vocab * sizeof *w->host);
}

/* The next token after ids[n]; -1 with an error. */
static int64_t next_token(writing *w, int64_t index)
{
    int64_t seen = w->o->ctx > 0 && w->n > w->o->ctx ? w->o->ctx : w->n, id = -1;
    if (seen < w->n) { /* positions move: what is kept is of other ones */
        kn_cache_free(w->cache);
        w->cache = NULL;
    }
    seen -= w->cache ? kn_cache_length(w->cache) : 0;
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = kn_from(KN_I64, w->device, w->ids + w->n - seen, KN_SHAPE(1, seen));
    if (take_logits(w, w->logits ? w->logits(w->module, x) : kn_call(w->module, x)))
        id = kn_sample(w->host, w->vocab, &w->o->draw, index);
    kn_scope_end(scope);
    return id;
}

static bool print_tokens(const kn_tokenizer *t, const int64_t *ids, int64_t n, FILE *out)
{
    char small[64], *text = small;
    int64_t length = kn_tokenizer_decode(t, ids, n, small, sizeof small);
    if (length < 0)
        return false;
    if (length >= (int64_t)sizeof small) {
        text = kn_host_alloc((size_t)length + 1);
        if (!text || kn_tokenizer_decode(t, ids, n, text, (size_t)length + 1) < 0) {
            kn_host_free(text);
            return false;
        }
    }
    if (out)
        fwrite(text, 1, (size_t)length, out);
    if (text != small)
        kn_host_free(text);
    return true;
}

static void print_token(const kn_tokenizer *t, int64_t id, FILE *out)
{
    const char *bytes;
    size_t n = kn_tokenizer_piece(t, id, &bytes);
    if (out)
        fwrite(bytes, 1, n, out);
}

/* The prompt, or the ids' numbers. */
static bool print_prompt(writing *w)
{
    FILE *out = w->o->out;
    if (!w->o->print_ids)
        return print_tokens(w->tokenizer, w->ids + w->unseen, w->n - w->unseen, out);
    for (int64_t i = 0; out && i < w->n; i++)
        fprintf(out, i ? " %lld" : "%lld", (long long)w->ids[i]);
    return true;
}

static bool stops(const kn_write_text_options *o, int64_t id)
{
    for (int i = 0; i < o->stop_count; i++)
        if (o->stop_ids[i] == id)
            return true;
    return false;
}

/* Prints the prompt, then one token after another. */
static bool write_tokens(writing *w)
{
    const kn_sample_options *draw = &w->o->draw;
    FILE *out = w->o->out;
    if (!print_prompt(w))
        return false;
    for (int64_t i = 0; i < w->o->tokens && !(draw->stop && draw->stop(draw->stop_arg)); i++) {
        int64_t id = next_token(w, i);
        if (id < 0 || stops(w->o, id))
            break;
        w->ids[w->n++] = id;
        if (w->o->print_ids && out)
            fprintf(out, " %lld", (long long)id);
        /* a model whose vocabulary exceeds the tokenizer's may draw an id without text */
        else if (!w->o->print_ids && id < kn_tokenizer_vocab(w->tokenizer))
            print_token(w->tokenizer, id, out);
        if (out)
            fflush(out);
    }
    return kn_ok();
}

/* The prompt's ids, with room for the text's. */
static bool begin_ids(writing *w)
{
    const kn_write_text_options *o = w->o;
    const char *prompt = o->prompt ? o->prompt : "\n";
    const int64_t *first = o->prompt_ids;
    int64_t *list = NULL, count = o->prompt_count, room = 0;
    if (o->prompt_ids ? count < 1 : !*prompt)
        return kn_fail("the prompt is empty; give at least one %s to go on from",
                       o->prompt_ids ? "id" : "character");
    if (!o->prompt_ids) {
        const int64_t *prefix;
        w->unseen = kn_tokenizer_prefix(w->tokenizer, &prefix);
        list = kn_tokenizer_list(w->tokenizer, prompt, strlen(prompt), KN_I64, &count);
        first = list;
        if (list && count == 0)
            kn_fail("the prompt has no tokens; give at least one character to go on from");
        for (int64_t i = 0; list && kn_ok() && i < w->unseen; i++)
            if (kn_host_grow(&w->ids, &room, ++w->n, sizeof *w->ids))
                w->ids[i] = prefix[i];
    }
    if (first && kn_ok() &&
        kn_host_grow(&w->ids, &room, w->n + count + o->tokens, sizeof *w->ids)) {
        memcpy(w->ids + w->n, first, (size_t)count * sizeof *first);
        w->n += count;
    }
    kn_host_free(list);
    return kn_ok();
}

bool kn_write_text_(void *module, kn_logits_fn logits, const kn_tokenizer *t,
                    kn_write_text_options o)
{
    if (!kn_given(module, "kn_write_text", "the module") ||
        (!(o.prompt_ids && o.print_ids) && !kn_given(t, "kn_write_text", "the tokenizer")) ||
        (o.stop_count > 0 && !kn_given(o.stop_ids, "kn_write_text", "the list of .stop_ids")))
        return false;
    if (o.tokens < 0 || o.ctx < 0 || o.prompt_count < 0 || o.stop_count < 0)
        return kn_fail("kn_write_text: .tokens is %lld, .ctx %lld, .prompt_count %lld and "
                       ".stop_count %d; they must be at least 0",
                       (long long)o.tokens, (long long)o.ctx, (long long)o.prompt_count,
                       o.stop_count);
    const kn_param *p;
    bool cuda = kn_params(module, &p) > 0 && kn_device_of(p[0].tensor) == KN_CUDA;
    writing w = { .module = module,
                  .logits = logits,
                  .tokenizer = t,
                  .o = &o,
                  .device = cuda ? KN_CUDA : KN_CPU };
    bool ok = kn_ok() && begin_ids(&w);
    if (ok) {
        bool training = kn_training(module), mode = kn_set_grad_mode(false);
        kn_train(module, false);
        const int64_t all = w.n + o.tokens, capacity = o.ctx > 0 && o.ctx < all ? o.ctx : all;
        w.cache = o.cached ? kn_cache_new(module, capacity) : NULL;
        ok = kn_ok() && write_tokens(&w);
        kn_cache_free(w.cache);
        kn_train(module, training);
        kn_set_grad_mode(mode);
    }
    kn_host_free(w.ids);
    kn_host_free(w.host);
    return ok;
}
