/* models/sample.c: choosing tokens from logits, and writing text with a GPT. All on the host, in
 * double, so that equal logits give the equal text everywhere. */
#include "models/sample.h"
#include "kernels/context.h"

#include "autograd/autograd.h"
#include "models/data.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct candidate {
    double weight; /* exp((logit - max) / temperature) */
    int64_t id;
} candidate;

/* Likeliest first; equal ones by id, so that the order is one. */
static int by_weight(const void *a, const void *b)
{
    const candidate *x = a, *y = b;
    if (x->weight != y->weight)
        return x->weight < y->weight ? 1 : -1;
    return x->id < y->id ? -1 : x->id > y->id;
}

static int64_t likeliest(const float *logits, int64_t vocab)
{
    int64_t best = -1;
    for (int64_t i = 0; i < vocab; i++)
        if (isfinite(logits[i]) && (best < 0 || logits[i] > logits[best]))
            best = i;
    if (best < 0)
        kn_fail("sampling: none of %lld logits is finite; the weights are damaged or training "
                "diverged",
                (long long)vocab);
    return best;
}

int64_t kn_sample(const float *logits, int64_t vocab, const kn_sample_options *o, int64_t index)
{
    if (!kn_given(logits, "kn_sample", "the array of logits") ||
        !kn_given(o, "kn_sample", "the options' struct"))
        return 0;
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

/* The next token after ids[n]; -1 with an error. */
static int64_t next_token(kn_gpt *g, const int64_t *ids, int64_t n, const kn_sample_options *o,
                          int64_t index, float *logits)
{
    const kn_gpt_config *c = kn_gpt_config_of(g);
    int64_t seen = n < c->ctx ? n : c->ctx;
    kn_scope scope = kn_scope_begin();
    const kn_param *p;
    kn_device device = kn_params(g, &p) > 0 ? kn_device_of(p[0].tensor) : KN_CPU;
    kn_tensor *x =
        kn_from(KN_I64, device == KN_CUDA ? KN_CUDA : KN_CPU, ids + n - seen, KN_SHAPE(1, seen));
    kn_tensor *y = kn_cast(kn_gpt_next_logits(g, x), KN_F32);
    int64_t id = -1;
    if (y && kn_to_host(y, logits, (size_t)c->vocab * sizeof *logits))
        id = kn_sample(logits, c->vocab, o, index);
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

bool kn_gpt_write(kn_gpt *g, const kn_tokenizer *t, const char *prompt, int64_t tokens,
                  const kn_sample_options *o, FILE *out)
{
    if (!kn_given(g, "kn_gpt_write", "the model") ||
        !kn_given(t, "kn_gpt_write", "the tokenizer") ||
        !kn_given(prompt, "kn_gpt_write", "the prompt") ||
        !kn_given(o, "kn_gpt_write", "the options' struct"))
        return false;
    const kn_gpt_config *c = kn_gpt_config_of(g);
    size_t length = strlen(prompt);
    if (length == 0)
        return kn_fail("the prompt is empty; give at least one character to go on from");
    int64_t *ids = kn_host_alloc((length + (size_t)tokens) * sizeof *ids);
    float *logits = kn_host_alloc((size_t)c->vocab * sizeof *logits);
    bool training = kn_training(g), mode = kn_set_grad_mode(false), ok = false;
    kn_train(g, false);
    int64_t n = ids && logits ? kn_tokenizer_encode(t, prompt, length, ids, KN_I64) : -1;
    if (n < 1 || !print_tokens(t, ids, n, out))
        goto done;
    for (int64_t i = 0; i < tokens && !(o->stop && o->stop(o->stop_arg)); i++) {
        int64_t id = next_token(g, ids, n, o, i, logits);
        if (id < 0)
            goto done;
        ids[n++] = id;
        /* a model with a larger vocabulary than its tokenizer may draw an id without a text */
        if (id < kn_tokenizer_vocab(t) && !print_tokens(t, &id, 1, out))
            goto done;
        if (out)
            fflush(out);
    }
    ok = kn_ok();
done:
    kn_train(g, training);
    kn_set_grad_mode(mode);
    kn_host_free(ids);
    kn_host_free(logits);
    return ok;
}
