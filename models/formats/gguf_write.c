/* models/formats/gguf_write.c: a header of GGUF (version 3), value by value, and the lists of a
 * tokenizer in it. */
#include "kernels/memory_internal.h"
#include "models/formats/gguf.h"
#include "tensor/json.h"

#include <stdio.h>
#include <string.h>

/* ---- values ---------------------------------------------------------------------------------- */

void kn_gguf_bytes(kn_gguf_out *o, const void *bytes, size_t size)
{
    o->failed = o->failed || !kn_host_grow(&o->bytes, &o->room, o->used + (int64_t)size + 1, 1);
    if (o->failed)
        return;
    memcpy(o->bytes + o->used, bytes, size);
    o->used += (int64_t)size;
}

void kn_gguf_u32(kn_gguf_out *o, uint32_t x)
{
    kn_gguf_bytes(o, &x, sizeof x);
}

void kn_gguf_u64(kn_gguf_out *o, uint64_t x)
{
    kn_gguf_bytes(o, &x, sizeof x);
}

void kn_gguf_string(kn_gguf_out *o, const char *text, size_t length)
{
    kn_gguf_u64(o, length);
    kn_gguf_bytes(o, text, length);
}

void kn_gguf_key(kn_gguf_out *o, const char *key, kn_gguf_type type)
{
    kn_gguf_string(o, key, strlen(key));
    kn_gguf_u32(o, type);
    o->values++;
}

static void put_array(kn_gguf_out *o, const char *key, kn_gguf_type type, int64_t count)
{
    kn_gguf_key(o, key, KN_GGUF_ARRAY);
    kn_gguf_u32(o, type);
    kn_gguf_u64(o, (uint64_t)count);
}

void kn_gguf_put_text(kn_gguf_out *o, const char *key, const char *text)
{
    kn_gguf_key(o, key, KN_GGUF_STRING);
    kn_gguf_string(o, text, strlen(text));
}

void kn_gguf_put_u32(kn_gguf_out *o, const char *key, int64_t x)
{
    kn_gguf_key(o, key, KN_GGUF_U32);
    kn_gguf_u32(o, (uint32_t)x);
}

static void put_bool(kn_gguf_out *o, const char *key, bool x)
{
    kn_gguf_key(o, key, KN_GGUF_BOOL);
    kn_gguf_bytes(o, &x, 1);
}

/* ---- a tokenizer ----------------------------------------------------------------------------- */

static const char *text_in(const json_t *object, const char *key)
{
    const char *text = json_string_value(json_object_get(object, key));
    return text ? text : "";
}

/* llama.cpp's name of the way that words are cut; "custom", which it refuses, where it has none. */
static const char *cut_name(const json_t *root, const kn_tokenizer *t)
{
    static const char *const names[][2] = { { "llama3", "llama-bpe" }, { "qwen", "qwen2" } };
    const json_t *pre = json_object_get(root, "pre_tokenizer"),
                 *list = json_object_get(pre, "pretokenizers"), *split = json_array_get(list, 0);
    const char *form = text_in(json_object_get(root, "normalizer"), "type"),
               *pattern = text_in(json_object_get(split, "pattern"), "Regex");
    if (t->merge.count == 0)
        return "gpt-2"; /* words don't matter */
    if (!*form && t->cuts == 1 && json_is_true(json_object_get(pre, "use_regex")) &&
        t->changes == 0)
        return "gpt-2";
    for (int i = 0; i < 2; i++)
        if (t->cuts == 1 && strcmp(pattern, kn_cut_named(names[i][0])) == 0 &&
            strcmp(text_in(split, "behavior"), "Isolated") == 0 &&
            (!*form || (i == 1 && strcmp(form, "NFC") == 0)))
            return names[i][1];
    return "custom";
}

/* The type of each id, and where its text stands in t->names: types[vocab], at[vocab] (-1:
 * nowhere). */
static void list_types(const kn_tokenizer *t, const json_t *root, int32_t *types, int64_t *at)
{
    const json_t *added = json_object_get(root, "added_tokens"), *model, *one;
    size_t i;
    model = json_object_get(root, "model");
    const int64_t unknown = kn_tokenizer_id(t, text_in(model, "unk_token"));
    for (int64_t k = 0; k < t->vocab; k++)
        types[k] = KN_SENTENCE_UNUSED, at[k] = -1;
    for (int64_t k = 0; k < t->names.count; k++) {
        at[t->names.list[k].value] = k;
        types[t->names.list[k].value] = KN_SENTENCE_NORMAL;
    }
    for (int b = 0; b < 256 && !t->by_bytes; b++)
        if (t->byte[b] >= 0)
            types[t->byte[b]] = KN_SENTENCE_BYTE;
    json_array_foreach(added, i, one)
    {
        const int64_t id = json_integer_value(json_object_get(one, "id"));
        types[id] =
            json_is_true(json_object_get(one, "special")) ? KN_SENTENCE_CONTROL : KN_SENTENCE_USER;
    }
    if (unknown >= 0)
        types[unknown] = KN_SENTENCE_UNKNOWN;
}

/* Of pieces that merges make, the first one first. */
static void list_scores(const kn_tokenizer *t, float *score)
{
    for (uint64_t i = 0; i < t->merge.slots; i++) {
        const struct kn_pair *p = &t->merge.slot[i];
        const uint32_t id = (uint32_t)p->value;
        const float rank = -1 - (float)(p->value >> 32);
        if (p->key != UINT64_MAX && (score[id] == 0 || rank > score[id]))
            score[id] = rank;
    }
}

static void put_tokens(kn_gguf_out *o, const kn_tokenizer *t, const int64_t *at)
{
    char unused[32];
    put_array(o, "tokenizer.ggml.tokens", KN_GGUF_STRING, t->vocab);
    for (int64_t i = 0; i < t->vocab; i++) {
        snprintf(unused, sizeof unused, "[PAD%lld]", (long long)i);
        const char *text = at[i] < 0 ? unused : kn_strings_text(&t->names, at[i]);
        const bool space = !t->by_bytes && strcmp(text, " ") == 0; /* as SentencePiece has it */
        text = space ? "\xe2\x96\x81" : text;
        kn_gguf_string(o, text, strlen(text));
    }
}

static void put_merges(kn_gguf_out *o, const json_t *merges)
{
    size_t i;
    const json_t *merge;
    put_array(o, "tokenizer.ggml.merges", KN_GGUF_STRING, (int64_t)json_array_size(merges));
    json_array_foreach(merges, i, merge)
    {
        const char *both = json_string_value(merge),
                   *a = json_string_value(json_array_get(merge, 0)),
                   *b = json_string_value(json_array_get(merge, 1));
        const size_t n = both ? strlen(both) : strlen(a) + 1 + strlen(b);
        kn_gguf_u64(o, n);
        kn_gguf_bytes(o, both ? both : a, both ? n : strlen(a));
        if (both)
            continue;
        kn_gguf_bytes(o, " ", 1);
        kn_gguf_bytes(o, b, strlen(b));
    }
}

bool kn_gguf_put_tokenizer(kn_gguf_out *o, const kn_tokenizer *t)
{
    json_error_t e;
    const size_t vocab = (size_t)t->vocab;
    json_t *root = kn_json_parse(t->json, t->json_size, 0, "the tokenizer", &e);
    int32_t *types = kn_host_calloc(vocab, sizeof *types);
    int64_t *at = kn_host_calloc(vocab, sizeof *at);
    float *score = kn_host_calloc(vocab, sizeof *score);
    bool ok = root && types && at && score;
    if (ok) {
        list_types(t, root, types, at);
        list_scores(t, score);
        kn_gguf_put_text(o, "tokenizer.ggml.model", t->by_bytes ? "gpt2" : "llama");
        kn_gguf_put_text(o, "tokenizer.ggml.pre", t->by_bytes ? cut_name(root, t) : "default");
        put_tokens(o, t, at);
        put_array(o, "tokenizer.ggml.token_type", KN_GGUF_I32, t->vocab);
        kn_gguf_bytes(o, types, vocab * sizeof *types);
        if (t->by_bytes)
            put_merges(o, json_object_get(json_object_get(root, "model"), "merges"));
        else {
            put_array(o, "tokenizer.ggml.scores", KN_GGUF_F32, t->vocab);
            kn_gguf_bytes(o, score, vocab * sizeof *score);
            put_bool(o, "tokenizer.ggml.add_space_prefix", t->drops_space);
        }
        put_bool(o, "tokenizer.ggml.add_bos_token", t->prefixes > 0);
        kn_gguf_key(o, "tokenizer.huggingface.json", KN_GGUF_STRING);
        kn_gguf_string(o, t->json, t->json_size);
    }
    json_decref(root);
    kn_host_free(types);
    kn_host_free(at);
    kn_host_free(score);
    return ok && !o->failed;
}
