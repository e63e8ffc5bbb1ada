/* models/text.c: a text's tokens, the split, and the windows that make a batch. */
#include "autograd/operations.h"
#include "data/loader_internal.h"
#include "kernels/error_internal.h"
#include "kernels/memory_internal.h"
#include "models/text_internal.h"
#include "models/tokens/tokens.h"
#include "nn/layers.h"
#include "tensor/checksum.h"

#include <string.h>

/* ---- making -------------------------------------------------------------------------------- */

kn_text *kn_text_new(int64_t vocab)
{
    kn_text *t = kn_host_calloc(1, sizeof *t);
    if (t) {
        t->vocab = vocab;
        t->first = -1;
    }
    return t;
}

void kn_text_part_free(kn_text_part *p)
{
    kn_file_unmap(&p->map);
    kn_host_free(p->path);
    if (p->owned)
        kn_give(kn_device_memory(KN_CPU), p->owned, p->owned_bytes, KN_MEM_DATA);
}

bool kn_text_add(kn_text *t, kn_text_part p)
{
    int64_t all;
    if (__builtin_add_overflow(t->count, p.count, &all))
        kn_fail("a text has more tokens than can be counted");
    else if (kn_host_grow(&t->part, &t->room, t->parts + 1, sizeof *t->part)) {
        p.begin = t->count;
        t->part[t->parts++] = p;
        t->count = all;
        t->train = all / 10 * 9 + all % 10 * 9 / 10; /* floor(0.9 all) */
        return true;
    }
    kn_text_part_free(&p);
    return false;
}

kn_text *kn_text_encode(const kn_tokenizer *tok, const char *text, size_t len)
{
    if (!kn_given(tok, "kn_text_encode", "the tokenizer") ||
        !kn_given(text, "kn_text_encode", "the text"))
        return NULL;
    int64_t count;
    const int64_t vocab = kn_tokenizer_vocab(tok);
    void *list = kn_tokenizer_list(tok, text, len, vocab <= 65536 ? KN_U16 : KN_U32, &count);
    kn_text *t = list ? kn_text_of_ids(list, count, vocab) : NULL;
    kn_host_free(list);
    return t;
}

kn_text *kn_text_of_ids(const void *ids, int64_t count, int64_t vocab)
{
    if (count < 0 || vocab < 1 || vocab > (int64_t)1 << 31 ||
        (count > 0 && !kn_given(ids, "kn_text_of_ids", "the list of ids"))) {
        kn_fail("kn_text_of_ids: %lld ids of a vocabulary of %lld", (long long)count,
                (long long)vocab);
        return NULL;
    }
    kn_text *t = kn_text_new(vocab);
    kn_text_part p = { .width = vocab <= 65536 ? 2 : 4, .count = count };
    p.owned_bytes = (size_t)count * (size_t)p.width;
    p.owned = t ? kn_take(kn_device_memory(KN_CPU), p.owned_bytes, KN_MEM_DATA) : NULL;
    if (p.owned && count > 0)
        memcpy(p.owned, ids, p.owned_bytes);
    if ((p.tokens = p.owned) && kn_text_add(t, p))
        return t;
    kn_text_free(t);
    return NULL;
}

void kn_text_free(kn_text *t)
{
    if (!t)
        return;
    for (int64_t i = 0; i < t->parts; i++)
        kn_text_part_free(&t->part[i]);
    kn_host_free(t->part);
    kn_conversations_free(t->talk);
    kn_host_free(t);
}

bool kn_text_append(kn_text *a, kn_text *b)
{
    bool ok = a && b && kn_conversations_append(a, b);
    for (int64_t i = 0; b && i < b->parts; i++) {
        if (ok)
            ok = kn_text_add(a, b->part[i]); /* which owns it now */
        else
            kn_text_part_free(&b->part[i]);
    }
    if (b)
        b->parts = 0;
    kn_text_free(b);
    return ok;
}

kn_text *kn_text_join(kn_text *train, kn_text *validation)
{
    const int64_t first = train ? train->count : 0,
                  talks = train && train->talk ? train->talk->count : 0;
    bool ok = kn_ok() && kn_given(train, "kn_text_join", "the text for training") &&
              kn_given(validation, "kn_text_join", "the text for validation") &&
              (train->vocab == validation->vocab ||
               kn_fail("the text for validation has %lld kinds of token, that for training %lld; "
                       "both must be of one tokenizer",
                       (long long)validation->vocab, (long long)train->vocab));
    if (!ok)
        kn_text_free(validation);
    else if ((ok = kn_text_append(train, validation))) {
        train->train = first;
        train->given = true;
        if (train->talk)
            train->talk->train = talks;
        return train;
    }
    kn_text_free(train);
    return NULL;
}

/* ---- batches ------------------------------------------------------------------------------- */

int64_t kn_text_count(const kn_text *t, kn_text_split split)
{
    if (!kn_given(t, "kn_text_count", "the text"))
        return 0;
    return split == KN_TRAIN ? t->train : t->count - t->train;
}

int64_t kn_text_vocab(const kn_text *t)
{
    return kn_given(t, "kn_text_vocab", "the text") ? t->vocab : 0;
}

/* The part with token i. */
static const kn_text_part *part_of(const kn_text *t, int64_t i)
{
    int64_t low = 0, high = t->parts;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (t->part[middle].begin <= i)
            low = middle;
        else
            high = middle;
    }
    return &t->part[low];
}

int64_t kn_text_token(const kn_text *t, int64_t i)
{
    if (!kn_given(t, "kn_text_token", "the text"))
        return -1;
    if (i >= 0 && i < t->count) {
        const kn_text_part *p = part_of(t, i);
        return kn_part_token(p, i - p->begin);
    }
    kn_fail("kn_text_token: there is no token %lld of %lld", (long long)i, (long long)t->count);
    return -1;
}

static bool check_split(const kn_text *t, kn_text_split split, int64_t ctx)
{
    int64_t n = kn_text_count(t, split);
    const char *name = split == KN_TRAIN ? t->given ? "training" : "training (90 %)"
                       : t->given        ? "validation"
                                         : "validation (10 %)";
    if (t->talk)
        return kn_conversations_check(t, split, ctx);
    if (ctx < 1)
        return kn_fail("a context of %lld tokens: it must be at least 1", (long long)ctx);
    if (n > ctx)
        return true;
    if (n < 2)
        return kn_fail("the text has %lld tokens, of which %lld are for %s: too few for any "
                       "context; give a longer text",
                       (long long)t->count, (long long)n, name);
    return kn_fail("a context of %lld tokens does not fit the text: of its %lld tokens, %lld are "
                   "for %s; a context of %lld or less fits, or a longer text",
                   (long long)ctx, (long long)t->count, (long long)n, name, (long long)n - 1);
}

bool kn_text_check(const kn_text *t, int64_t ctx)
{
    if (!kn_given(t, "kn_text_check", "the text"))
        return false;
    /* validation first: it has fewer tokens, so its error gives the smaller context */
    return check_split(t, KN_VALIDATION, ctx) && check_split(t, KN_TRAIN, ctx);
}

/* Window i of the line. */
static bool draw_window(const kn_text *t, kn_text_split split, uint64_t seed, int64_t i,
                        int64_t ctx, int64_t *x, int64_t *y)
{
    int64_t first = split == KN_TRAIN ? 0 : t->train, starts = kn_text_count(t, split) - ctx;
    uint64_t stream = kn_random_stream(split == KN_TRAIN ? "data.train" : "data.validation", 0, 0);
    int64_t at = first + kn_random_below(seed, stream, (uint64_t)i, starts);
    const kn_text_part *p = part_of(t, at);
    for (int64_t k = 0; k <= ctx; k++, at++) {
        while (at - p->begin >= p->count)
            p++;
        int64_t id = kn_part_token(p, at - p->begin);
        if (id >= t->vocab)
            return kn_fail("token %lld of %s is %lld, outside the vocabulary of %lld: the token "
                           "file is damaged, or is of another vocabulary",
                           (long long)(at - p->begin), p->path ? p->path : "the text",
                           (long long)id, (long long)t->vocab);
        if (k < ctx)
            x[k] = id;
        if (k > 0)
            y[k - 1] = id;
    }
    return true;
}

static bool check_batch(const kn_text *t, kn_text_split split, int64_t first, int64_t batch,
                        int64_t ctx)
{
    int64_t end;
    if (!check_split(t, split, ctx))
        return false;
    if (batch < 1)
        return kn_fail("kn_text_batch: a batch of %lld rows; it must be at least 1",
                       (long long)batch);
    return (first >= 0 && !__builtin_add_overflow(first, batch, &end)) ||
           kn_fail("kn_text_batch: there is no window %lld; they count from 0", (long long)first);
}

bool kn_text_batch(const kn_text *t, kn_text_split split, uint64_t seed, int64_t first,
                   int64_t batch, int64_t ctx, int64_t *x, int64_t *y)
{
    if (!kn_given(t, "kn_text_batch", "the text") ||
        !kn_given(x, "kn_text_batch", "the place for x") ||
        !kn_given(y, "kn_text_batch", "the place for y") ||
        !check_batch(t, split, first, batch, ctx))
        return false;
    for (int64_t r = 0; r < batch; r++)
        if (t->talk)
            kn_conversations_row(t, split, seed, first + r, x + r * ctx, y + r * ctx, NULL);
        else if (!draw_window(t, split, seed, first + r, ctx, x + r * ctx, y + r * ctx))
            return false;
    return true;
}

bool kn_text_batch_documents(const kn_text *t, kn_text_split split, uint64_t seed, int64_t first,
                             int64_t batch, int64_t ctx, int64_t *x, int64_t *y, int64_t *begin)
{
    if (!kn_given(begin, "kn_text_batch_documents", "the place for begin") ||
        !kn_text_batch(t, split, seed, first, batch, ctx, x, y))
        return false;
    if (!t->talk && t->first < 0)
        return kn_fail("kn_text_batch_documents: which token stands between documents of the text "
                       "isn't known; give it (--end)");
    for (int64_t r = 0; r < batch; r++, x += ctx, y += ctx, begin += ctx) {
        if (t->talk)
            kn_conversations_row(t, split, seed, first + r, x, y, begin);
        for (int64_t k = 0, from = 0; !t->talk && k < ctx; k++)
            begin[k] = from = x[k] == t->first ? k : from;
    }
    return true;
}

kn_tensor *kn_document_mask(kn_tensor *begin)
{
    if (!begin || kn_ndim(begin) != 2)
        return begin ? kn_fail_null("kn_document_mask: begin has %d dims; it must be [B,T]",
                                    kn_ndim(begin))
                     : NULL;
    const int64_t rows = kn_size(begin, 0), len = kn_size(begin, 1);
    return kn_eq(kn_reshape(begin, KN_SHAPE(rows, 1, len, 1)),
                 kn_reshape(begin, KN_SHAPE(rows, 1, 1, len)));
}

bool kn_text_inputs(const char *name, const kn_values *in, const void *attention, int64_t ctx)
{
    char a[96], b[96];
    if (!kn_given(name, "kn_text_inputs", "the model's name") ||
        !kn_given(in, "kn_text_inputs", "the list of tensors"))
        return false;
    if (in->n < 1 || in->n > 3 || kn_ndim(in->v[0]) != 2)
        return kn_fail("%s: takes ids [B,T], and targets [B,T] for the loss, and [B,T] where "
                       "documents begin",
                       name);
    const int64_t len = kn_size(in->v[0], 1), before = kn_cached_positions(attention);
    if (len < 1 || before + len > ctx)
        return kn_fail("%s: %lld tokens in a row; the model's context is 1 to %lld", name,
                       (long long)(before + len), (long long)ctx);
    for (int i = 1; i < in->n; i++)
        if (kn_ndim(in->v[i]) != 2 || memcmp(kn_shape(in->v[0]), kn_shape(in->v[i]), 16) != 0)
            return kn_fail("%s: ids are %s but %s %s; both must be [B,T]", name,
                           kn_describe(in->v[0], a, sizeof a),
                           i == 1 ? "targets" : "documents' begins",
                           kn_describe(in->v[i], b, sizeof b));
    return true;
}

/* All bytes where they take up to blocks of them, else so many blocks, from the first to the last.
 */
static void add_blocks(kn_checksum *sum, const kn_text_part *p, size_t block, size_t blocks)
{
    const size_t bytes = (size_t)p->count * (size_t)p->width;
    const char *tokens = p->tokens;
    if (bytes <= block * blocks)
        kn_checksum_add(sum, tokens, bytes);
    for (size_t i = 0; bytes > block * blocks && i < blocks; i++)
        kn_checksum_add(sum, tokens + (bytes - block) / (blocks - 1) * i, block);
}

uint64_t kn_text_hash(const kn_text *t)
{
    enum { BLOCK = 1 << 20, BLOCKS = 64, FEW = 4, LEAST = 4096 };
    kn_checksum sum;
    if (!kn_given(t, "kn_text_hash", "the text"))
        return 0;
    kn_checksum_begin(&sum);
    kn_checksum_add(&sum, &t->count, sizeof t->count);
    if (t->given)
        kn_checksum_add(&sum, &t->train, sizeof t->train);
    size_t share = (size_t)BLOCK * BLOCKS / FEW / (size_t)(t->parts > 0 ? t->parts : 1);
    share = share < LEAST ? LEAST : share;
    for (int64_t i = 0; i < t->parts; i++)
        add_blocks(&sum, &t->part[i], t->parts == 1 ? BLOCK : share, t->parts == 1 ? BLOCKS : FEW);
    return kn_checksum_end(&sum);
}

/* ---- the loader ---------------------------------------------------------------------------- */

typedef struct windows {
    const kn_text *text;
    kn_text_split split;
    uint64_t seed;
    int64_t ctx;
} windows;

static int fill_window(kn_data_sample *s, void *arg)
{
    const windows *w = arg;
    return draw_window(w->text, w->split, w->seed, s->index, w->ctx, s->field[0], s->field[1]);
}

kn_loader *kn_text_loader_(const kn_text *text, const kn_comm *world, kn_text_options o)
{
    static const int64_t endless = (int64_t)1 << 61;
    int64_t tokens;
    if (text && text->talk)
        return kn_fail_null("kn_text_loader: the text holds conversations, whose rows "
                            "kn_text_batch gives");
    if (!text || !check_split(text, o.split, o.ctx))
        return NULL;
    if (o.batch < 1 || o.batch > kn_text_count(text, o.split)) {
        kn_loader_batch_fails("kn_text_loader", kn_text_count(text, o.split), o.batch);
        return NULL;
    }
    if (o.shuffle || o.tail)
        return kn_fail_null(
            "kn_text_loader: windows are drawn from the whole text; .shuffle and .tail don't "
            "apply");
    windows *w = kn_host_calloc(1, sizeof *w);
    if (!w)
        return NULL;
    *w = (windows){ text, o.split, o.seed, o.ctx };
    kn_field field[KN_MAX_FIELDS] = { { KN_I64, 1, { o.ctx } }, { KN_I64, 1, { o.ctx } } };
    kn_loader *l = kn_loader_make("kn_text_loader", fill_window, w, kn_host_free, world, endless,
                                  field, KN_LOADER_COMMON(o));
    if (!l)
        return NULL;
    tokens = kn_text_count(text, o.split) / (o.batch * o.ctx * l->ranks);
    l->rounds = tokens > 0 ? tokens : 1;
    return l;
}
