/* models/text.c: token files, the split, and the windows that make a batch. */
#include "models/text.h"
#include "kernels/error_internal.h"
#include "data/loader_internal.h"
#include "tensor/checksum.h"
#include "tensor/files.h"
#include "models/tokens/tokens.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "token files are mapped as they are");

#define HEADER_BYTES 64
static const char MAGIC[8] = "KNTOKENS";

struct kn_text {
    kn_mapped map;      /* a token file, or zero */
    void *owned;        /* tokens in memory, or NULL */
    size_t owned_bytes; /* bytes allocated */
    const void *tokens; /* [count] of width bytes */
    int width;          /* 2 or 4 */
    int64_t count, vocab;
};

static int64_t token(const kn_text *t, int64_t i)
{
    return t->width == 2 ? ((const uint16_t *)t->tokens)[i] : ((const uint32_t *)t->tokens)[i];
}

/* ---- making -------------------------------------------------------------------------------- */

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
    kn_text *t = kn_host_calloc(1, sizeof *t);
    if (!t)
        return NULL;
    t->vocab = vocab;
    t->width = vocab <= 65536 ? 2 : 4;
    t->count = count;
    t->owned_bytes = (size_t)count * (size_t)t->width;
    t->owned = kn_take(kn_device_memory(KN_CPU), t->owned_bytes, KN_MEM_DATA);
    if (t->owned && count > 0)
        memcpy(t->owned, ids, t->owned_bytes);
    if ((t->tokens = t->owned))
        return t;
    kn_text_free(t);
    return NULL;
}

void kn_text_free(kn_text *t)
{
    if (!t)
        return;
    kn_file_unmap(&t->map);
    if (t->owned)
        kn_give(kn_device_memory(KN_CPU), t->owned, t->owned_bytes, KN_MEM_DATA);
    kn_host_free(t);
}

/* llm.c's: 256 numbers, of which these are the first ones, and the third is the count. */
enum { LLMC_BYTES = 1024 };
static const struct {
    int32_t magic, version;
    int width;
    int64_t vocab;
} llmc[] = { { 20240520, 1, 2, 50257 }, { 20240801, 7, 4, 128256 } };

/* Which of them a file begins as; -1: none. */
static int llmc_of(const kn_mapped *map)
{
    int32_t magic;
    if (map->size < LLMC_BYTES)
        return -1;
    memcpy(&magic, map->data, sizeof magic);
    return magic == llmc[0].magic ? 0 : magic == llmc[1].magic ? 1 : -1;
}

static bool read_llmc(kn_text *t, const char *path, int which)
{
    int32_t h[3];
    memcpy(h, t->map.data, sizeof h);
    t->width = llmc[which].width;
    t->vocab = llmc[which].vocab;
    t->count = h[2];
    t->tokens = t->map.data + LLMC_BYTES;
    if (h[1] != llmc[which].version)
        return kn_fail("%s: llm.c's token file of version %d; this program reads version %d", path,
                       h[1], llmc[which].version);
    return (h[2] > 0 && (uint64_t)h[2] * (uint64_t)t->width == t->map.size - LLMC_BYTES) ||
           kn_fail("%s: its header says %d tokens of %d bytes, but %zu bytes follow; it was cut "
                   "short or is damaged",
                   path, h[2], t->width, t->map.size - LLMC_BYTES);
}

static bool is_tokens(const kn_mapped *map)
{
    return llmc_of(map) >= 0 ||
           (map->size >= sizeof MAGIC && memcmp(map->data, MAGIC, sizeof MAGIC) == 0);
}

bool kn_text_is_tokens(const char *path)
{
    kn_mapped map;
    if (!kn_given_path(path, "kn_text_is_tokens", "the path") ||
        !kn_file_map(path, "token file", &map))
        return false;
    const bool is = is_tokens(&map);
    kn_file_unmap(&map);
    return is;
}

bool kn_text_is_plain(const char *path)
{
    kn_mapped map;
    if (!kn_given_path(path, "kn_text_is_plain", "the path"))
        return false;
    const size_t n = strlen(path);
    if (n < 4 || strcmp(path + n - 4, ".bin") != 0 || !kn_file_map(path, "token file", &map))
        return false;
    const bool plain = !is_tokens(&map);
    kn_file_unmap(&map);
    return plain;
}

kn_text *kn_text_map_plain(const char *path, int64_t vocab)
{
    if (!kn_given_path(path, "kn_text_map_plain", "the path"))
        return NULL;
    if (vocab < 1 || vocab > 65536)
        return kn_fail_null(
            "kn_text_map_plain: a vocabulary of %lld; 1 to 65536 ids have two bytes",
            (long long)vocab);
    kn_text *t = kn_host_calloc(1, sizeof *t);
    if (t && kn_file_map(path, "token file", &t->map)) {
        *t = (kn_text){ .map = t->map,
                        .tokens = t->map.data,
                        .width = 2,
                        .count = (int64_t)t->map.size / 2,
                        .vocab = vocab };
        if (t->map.size % 2 == 0)
            return t;
        kn_fail("%s has %zu bytes, which is no number of tokens of two bytes", path, t->map.size);
    }
    kn_text_free(t);
    return NULL;
}

/* Reads the header of a mapped token file into t; checks every field. */
static bool read_header(kn_text *t, const char *path)
{
    uint32_t version, width;
    uint64_t count, vocab;
    const unsigned char *h = t->map.data;
    const int which = llmc_of(&t->map);
    if (which >= 0)
        return read_llmc(t, path, which);
    if (t->map.size < HEADER_BYTES || memcmp(h, MAGIC, sizeof MAGIC) != 0)
        return kn_fail("%s is no token file: it does not begin with KNTOKENS and a header of %d "
                       "bytes",
                       path, HEADER_BYTES);
    memcpy(&version, h + 8, 4);
    memcpy(&width, h + 12, 4);
    memcpy(&count, h + 16, 8);
    memcpy(&vocab, h + 24, 8);
    if (version != 1)
        return kn_fail("%s: token file version %u; this program reads version 1", path, version);
    if (width != 2 && width != 4)
        return kn_fail("%s: %u bytes a token; 2 and 4 are supported", path, width);
    for (size_t i = 32; i < HEADER_BYTES; i++)
        if (h[i] != 0)
            return kn_fail("%s: byte %zu of its header is not 0", path, i);
    if (vocab == 0 || vocab > (width == 2 ? 1ull << 16 : 1ull << 31))
        return kn_fail("%s: a vocabulary of %llu does not go with %u bytes a token", path,
                       (unsigned long long)vocab, width);
    uint64_t room = t->map.size - HEADER_BYTES;
    if (count > room / width || count * width != room)
        return kn_fail("%s: its header says %llu tokens of %u bytes, but %llu bytes follow; it was "
                       "cut short or is damaged",
                       path, (unsigned long long)count, width, (unsigned long long)room);
    if (count == 0)
        return kn_fail("%s holds no tokens", path);
    t->width = (int)width;
    t->count = (int64_t)count;
    t->vocab = (int64_t)vocab;
    t->tokens = h + HEADER_BYTES;
    return true;
}

kn_text *kn_text_map(const char *path)
{
    if (!kn_given_path(path, "kn_text_map", "the path"))
        return NULL;
    kn_text *t = kn_host_calloc(1, sizeof *t);
    if (!t)
        return NULL;
    if (kn_file_map(path, "token file", &t->map) && read_header(t, path))
        return t;
    kn_text_free(t);
    return NULL;
}

bool kn_text_save(const kn_text *t, const char *path)
{
    if (!kn_given(t, "kn_text_save", "the text") ||
        !kn_given_path(path, "kn_text_save", "the path"))
        return false;
    unsigned char h[HEADER_BYTES] = { 0 };
    uint32_t version = 1, width = (uint32_t)t->width;
    uint64_t count = (uint64_t)t->count, vocab = (uint64_t)t->vocab;
    memcpy(h, MAGIC, sizeof MAGIC);
    memcpy(h + 8, &version, 4);
    memcpy(h + 12, &width, 4);
    memcpy(h + 16, &count, 8);
    memcpy(h + 24, &vocab, 8);
    return kn_file_write(path, (const void *const[]){ h, t->tokens },
                         (const size_t[]){ sizeof h, (size_t)count * width }, 2);
}

/* The tokenizer of a token file lies beside it. NULL without an error where there is none. */
static bool open_sidecar(const char *path, kn_tokenizer **tokenizer)
{
    size_t size = strlen(path) + 6;
    char *json = kn_host_alloc(size);
    if (!json)
        return false;
    snprintf(json, size, "%s.json", path);
    if (kn_is_there(json))
        *tokenizer = kn_tokenizer_load(json);
    kn_host_free(json);
    return kn_ok();
}

/* Checks that text and tokenizer have the same vocabulary. */
static bool check_vocab(const kn_text *t, const kn_tokenizer *tokenizer, const char *path)
{
    if (!tokenizer || kn_tokenizer_vocab(tokenizer) == t->vocab)
        return true;
    return kn_fail("%s was made for a vocabulary of %lld, the %s tokenizer has %lld", path,
                   (long long)t->vocab, kn_tokenizer_kind(tokenizer),
                   (long long)kn_tokenizer_vocab(tokenizer));
}

/* The tokenizer for a file that comes with none: NULL is fine for tokens, or an error. */
static kn_tokenizer *tokenizer_for(const char *path, const char *kind, const kn_mapped *map)
{
    kn_tokenizer *made = NULL;
    if (strcmp(kind, "char") != 0 && strcmp(kind, "byte") != 0) {
        if (kn_is_there(kind))
            return kn_tokenizer_load(kind);
        return kn_ok()
                   ? kn_fail_null("no tokenizer '%.200s': give char, byte, or the file or folder "
                                  "of one",
                                  kind)
                   : NULL;
    }
    if (is_tokens(map))
        return open_sidecar(path, &made) ? made : NULL;
    if (kn_text_is_plain(path))
        return kn_fail_null(
            "%s holds tokens without a header, as nanoGPT writes them; say how many "
            "kinds there are (--vocab 50257 for GPT-2's), or give their tokenizer",
            path);
    return kn_ok() ? kn_tokenizer_create(kind, (const char *)map->data, map->size) : NULL;
}

kn_text *kn_text_open(const char *path, const char *kind, kn_tokenizer **tokenizer)
{
    kn_mapped map;
    kn_text *t = NULL;
    if (!kn_given_path(path, "kn_text_open", "the path") ||
        !kn_given(kind, "kn_text_open", "the kind of tokenizer") ||
        !kn_given(tokenizer, "kn_text_open", "the place for the tokenizer") ||
        !kn_file_map(path, "text file", &map))
        return NULL;
    kn_tokenizer *made = *tokenizer ? NULL : tokenizer_for(path, kind, &map),
                 *by = *tokenizer ? *tokenizer : made;
    if (kn_ok() && is_tokens(&map))
        t = kn_text_map(path);
    else if (kn_ok() && kn_text_is_plain(path))
        t = kn_text_map_plain(path, kn_tokenizer_vocab(by));
    else if (kn_ok())
        t = kn_text_encode(by, (const char *)map.data, map.size);
    kn_file_unmap(&map);
    if (!t || !check_vocab(t, by, path)) {
        kn_tokenizer_free(made);
        kn_text_free(t);
        return NULL;
    }
    *tokenizer = by;
    return t;
}

/* ---- batches ------------------------------------------------------------------------------- */

/* The first token of the validation half: floor(0.9 count). */
static int64_t split_at(const kn_text *t)
{
    return t->count / 10 * 9 + t->count % 10 * 9 / 10;
}

int64_t kn_text_count(const kn_text *t, kn_text_split split)
{
    if (!kn_given(t, "kn_text_count", "the text"))
        return 0;
    return split == KN_TRAIN ? split_at(t) : t->count - split_at(t);
}

int64_t kn_text_vocab(const kn_text *t)
{
    if (!kn_given(t, "kn_text_vocab", "the text"))
        return 0;
    return t->vocab;
}

int64_t kn_text_token(const kn_text *t, int64_t i)
{
    if (!kn_given(t, "kn_text_token", "the text"))
        return -1;
    if (i >= 0 && i < t->count)
        return token(t, i);
    kn_fail("kn_text_token: there is no token %lld of %lld", (long long)i, (long long)t->count);
    return -1;
}

static bool check_split(const kn_text *t, kn_text_split split, int64_t ctx)
{
    int64_t n = kn_text_count(t, split);
    const char *name = split == KN_TRAIN ? "training (90 %)" : "validation (10 %)";
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
    int64_t first = split == KN_TRAIN ? 0 : split_at(t), starts = kn_text_count(t, split) - ctx;
    uint64_t stream = kn_random_stream(split == KN_TRAIN ? "data.train" : "data.validation", 0, 0);
    int64_t at = first + kn_random_below(seed, stream, (uint64_t)i, starts);
    for (int64_t k = 0; k <= ctx; k++) {
        int64_t id = token(t, at + k);
        if (id >= t->vocab)
            return kn_fail("token %lld of the text is %lld, outside the vocabulary of %lld: the "
                           "token file is damaged, or is of another vocabulary",
                           (long long)(at + k), (long long)id, (long long)t->vocab);
        if (k < ctx)
            x[k] = id;
        if (k > 0)
            y[k - 1] = id;
    }
    return true;
}

bool kn_text_batch(const kn_text *t, kn_text_split split, uint64_t seed, int64_t first,
                   int64_t batch, int64_t ctx, int64_t *x, int64_t *y)
{
    int64_t end;
    if (!kn_given(t, "kn_text_batch", "the text") ||
        !kn_given(x, "kn_text_batch", "the place for x") ||
        !kn_given(y, "kn_text_batch", "the place for y"))
        return false;
    if (!check_split(t, split, ctx))
        return false;
    if (batch < 1)
        return kn_fail("kn_text_batch: a batch of %lld rows; it must be at least 1",
                       (long long)batch);
    if (first < 0 || __builtin_add_overflow(first, batch, &end))
        return kn_fail("kn_text_batch: there is no window %lld; they count from 0",
                       (long long)first);
    for (int64_t r = 0; r < batch; r++)
        if (!draw_window(t, split, seed, first + r, ctx, x + r * ctx, y + r * ctx))
            return false;
    return true;
}

uint64_t kn_text_hash(const kn_text *t)
{
    enum { BLOCK = 1 << 20, BLOCKS = 64 };
    kn_checksum sum;
    if (!kn_given(t, "kn_text_hash", "the text"))
        return 0;
    const size_t bytes = (size_t)t->count * (size_t)t->width;
    const char *tokens = t->tokens;
    kn_checksum_begin(&sum);
    kn_checksum_add(&sum, &t->count, sizeof t->count);
    if (bytes <= (size_t)BLOCK * BLOCKS)
        kn_checksum_add(&sum, tokens, bytes);
    for (size_t i = 0; bytes > (size_t)BLOCK * BLOCKS && i < BLOCKS;
         i++) /* the first to the last */
        kn_checksum_add(&sum, tokens + (bytes - BLOCK) / (BLOCKS - 1) * i, BLOCK);
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
