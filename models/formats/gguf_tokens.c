/* models/formats/gguf_tokens.c: the tokenizer in a GGUF: its tokenizer.json where it has one, else
 * llama.cpp's lists, of a byte-level BPE ("gpt2") or of SentencePiece's ("llama"), as a
 * tokenizer.json. */
#include "kernels/error_internal.h"
#include "models/formats/gguf.h"

#include <math.h>
#include <string.h>

typedef struct source {
    const kn_gguf *g;
    const kn_gguf_value *tokens, *types, *scores, *merges;
} source;

/* A list of this type, with as many elements as there are tokens; false with an error. */
static bool find_list(const source *s, const char *key, bool strings, const kn_gguf_value **list)
{
    const kn_gguf_value *v = kn_gguf_find(s->g, key);
    *list = v;
    if (!v || !v->array || (v->type == KN_GGUF_STRING) != strings)
        return kn_fail("%s: its tokenizer has no list '%s'; name another one (--tokenizer)",
                       s->g->path, key);
    return !s->tokens || strings || v->count == s->tokens->count ||
           kn_fail("%s: '%s' has %lld elements, and there are %lld tokens", s->g->path, key,
                   (long long)v->count, (long long)s->tokens->count);
}

static int type_of(const source *s, int64_t id)
{
    const double type = s->types ? kn_gguf_number(s->g, s->types, id) : KN_SENTENCE_NORMAL;
    return type >= KN_SENTENCE_NORMAL && type <= KN_SENTENCE_BYTE ? (int)type : KN_SENTENCE_NORMAL;
}

static bool flag(const kn_gguf *g, const char *key, bool otherwise)
{
    const double x = kn_gguf_number_at(g, key);
    return isnan(x) ? otherwise : x != 0;
}

/* A text of the file as a string of JSON, which the caller drops; NULL with an error. */
static json_t *text_of(const source *s, const char *text, size_t length, const char *what,
                       int64_t number)
{
    json_t *j = length > 0 && !memchr(text, 0, length) ? json_stringn(text, length) : NULL;
    if (!j && kn_ok())
        kn_fail("%s: the %s %lld of its tokenizer is no text in UTF-8", s->g->path, what,
                (long long)number);
    return j;
}

/* ---- what comes before a text ---------------------------------------------------------------- */

static bool put_begin(const source *s, json_t *root, bool otherwise)
{
    const double id = kn_gguf_number_at(s->g, "tokenizer.ggml.bos_token_id");
    int64_t at = 0;
    size_t length = 0;
    const char *text = NULL;
    if (!flag(s->g, "tokenizer.ggml.add_bos_token", otherwise) || !(id >= 0) ||
        id >= (double)s->tokens->count)
        return true;
    for (int64_t i = 0; i <= (int64_t)id; i++)
        text = kn_gguf_next(s->g, s->tokens, &at, &length);
    json_t *begin = text_of(s, text, length, "token", (int64_t)id);
    if (!begin)
        return false;
    const char *name = json_string_value(begin);
    json_t *processor =
        json_pack("{s:s, s:[{s:{s:s, s:i}}, {s:{s:s, s:i}}], s:[{s:{s:s, s:i}}, {s:{s:s, s:i}}], "
                  "s:{s:{s:s, s:[I], s:[s]}}}",
                  "type", "TemplateProcessing", "single", "SpecialToken", "id", name, "type_id", 0,
                  "Sequence", "id", "A", "type_id", 0, "pair", "Sequence", "id", "A", "type_id", 0,
                  "Sequence", "id", "B", "type_id", 1, "special_tokens", name, "id", name, "ids",
                  (json_int_t)id, "tokens", name);
    json_decref(begin);
    return json_object_set_new(root, "post_processor", processor) == 0 ||
           kn_fail_memory("%s", s->g->path);
}

/* ---- BPE of bytes ---------------------------------------------------------------------------- */

/* The pattern that cuts words, by llama.cpp's name; NULL with an error. */
static const char *pattern_of(const kn_gguf *g, const char **kind)
{
    static const char *const names[][2] = {
        { "gpt-2", "gpt2" },      { "llama-bpe", "llama3" }, { "llama3", "llama3" },
        { "llama-v3", "llama3" }, { "qwen2", "qwen" },
    };
    static const char key[] = "tokenizer.ggml.pre";
    size_t length = 0;
    const char *name = kn_gguf_text(g, kn_gguf_find(g, key), &length);
    if (!name && kn_gguf_says(g, "general.architecture", "gpt2")) /* older files */
        return kn_cut_named(*kind = "gpt2");
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (kn_gguf_says(g, key, names[i][0]))
            return kn_cut_named(*kind = names[i][1]);
    return kn_fail_null("%s: its tokenizer cuts texts as '%.*s' (tokenizer.ggml.pre); gpt-2, "
                        "llama-bpe and qwen2 are read: name the model's tokenizer.json "
                        "(--tokenizer)",
                        g->path, name ? (int)(length < 60 ? length : 60) : 4, name ? name : "none");
}

static bool read_vocab(const source *s, json_t *vocab, json_t *added)
{
    int64_t at = 0;
    size_t length;
    for (int64_t i = 0; i < s->tokens->count; i++) {
        const char *text = kn_gguf_next(s->g, s->tokens, &at, &length);
        json_t *token = text_of(s, text, length, "token", i);
        const char *name = json_string_value(token);
        const int type = type_of(s, i);
        if (!token)
            return false;
        if (json_object_get(vocab, name))
            kn_fail("%s: the token \"%.60s\" is there twice", s->g->path, name);
        else if (json_object_set_new(vocab, name, json_integer(i)) != 0)
            kn_fail_memory("%s", s->g->path);
        if (type == KN_SENTENCE_CONTROL || type == KN_SENTENCE_USER) {
            json_t *one = kn_tokenizer_special(i, name);
            json_object_set_new(one, "special", json_boolean(type == KN_SENTENCE_CONTROL));
            json_array_append_new(added, one);
        }
        json_decref(token);
        if (!kn_ok())
            return false;
    }
    return true;
}

static bool read_merges(const source *s, json_t *merges)
{
    int64_t at = 0;
    size_t length;
    for (int64_t i = 0; i < s->merges->count; i++) {
        const char *text = kn_gguf_next(s->g, s->merges, &at, &length);
        json_t *merge = text_of(s, text, length, "merge", i);
        if (!merge)
            return false;
        json_array_append_new(merges, merge);
    }
    return true;
}

static json_t *bpe_of(source *s)
{
    const char *kind = "", *pattern = pattern_of(s->g, &kind);
    if (!pattern || !find_list(s, "tokenizer.ggml.merges", true, &s->merges))
        return NULL;
    json_t *vocab = json_object(), *added = json_array(), *merges = json_array();
    const bool ok = read_vocab(s, vocab, added) && read_merges(s, merges),
               llama = strcmp(kind, "llama3") == 0, gpt = strcmp(kind, "gpt2") == 0;
    json_t *root = kn_tokenizer_frame(vocab, merges, added, gpt ? "" : pattern, true);
    json_object_set_new(json_object_get(root, "model"), "ignore_merges", json_boolean(llama));
    if (strcmp(kind, "qwen") == 0)
        json_object_set_new(root, "normalizer", json_pack("{s:s}", "type", "NFC"));
    if (ok && put_begin(s, root, llama))
        return root;
    json_decref(root);
    return NULL;
}

/* ---- SentencePiece --------------------------------------------------------------------------- */

static json_t *sentences_of(source *s)
{
    kn_sentences m = { .no_begin = !flag(s->g, "tokenizer.ggml.add_space_prefix", true) };
    int64_t at = 0;
    size_t length;
    bool ok = find_list(s, "tokenizer.ggml.scores", false, &s->scores);
    for (int64_t i = 0; ok && i < s->tokens->count; i++) {
        const char *text = kn_gguf_next(s->g, s->tokens, &at, &length);
        ok = kn_sentences_add(&m, text, length, (float)kn_gguf_number(s->g, s->scores, i),
                              type_of(s, i), s->g->path);
    }
    json_t *root = ok ? kn_sentences_json(&m) : NULL;
    kn_sentences_free(&m);
    if (root && put_begin(s, root, true))
        return root;
    json_decref(root);
    return NULL;
}

/* ---- any ------------------------------------------------------------------------------------- */

static kn_tokenizer *of_lists(const kn_gguf *g)
{
    static const char key[] = "tokenizer.ggml.model";
    source s = { .g = g };
    size_t length = 0;
    const char *model = kn_gguf_text(g, kn_gguf_find(g, key), &length);
    const bool bpe = kn_gguf_says(g, key, "gpt2");
    if (!model)
        return kn_fail_null("%s holds no tokenizer; name the model's (--tokenizer)", g->path);
    if (!bpe && !kn_gguf_says(g, key, "llama"))
        return kn_fail_null("%s: its tokenizer is of the kind '%.*s'; gpt2 and llama are read: "
                            "name the model's tokenizer.json (--tokenizer)",
                            g->path, (int)(length < 60 ? length : 60), model);
    if (!find_list(&s, "tokenizer.ggml.tokens", true, &s.tokens))
        return NULL;
    if (s.tokens->count < 1 || s.tokens->count >= KN_MOST_IDS)
        return kn_fail_null("%s: its tokenizer has %lld tokens", g->path,
                            (long long)s.tokens->count);
    if (kn_gguf_find(g, "tokenizer.ggml.token_type") &&
        !find_list(&s, "tokenizer.ggml.token_type", false, &s.types))
        return NULL;
    json_t *root = bpe ? bpe_of(&s) : sentences_of(&s);
    return root ? kn_tokenizer_of_made(root, g->path) : NULL;
}

kn_tokenizer *kn_gguf_tokenizer(const char *path)
{
    kn_gguf g = { 0 };
    kn_tokenizer *t = NULL;
    size_t length;
    if (kn_gguf_open(&g, path)) {
        const char *own = kn_gguf_text(&g, kn_gguf_find(&g, "tokenizer.huggingface.json"), &length);
        t = own ? kn_tokenizer_parse(own, length, path) : of_lists(&g);
    }
    kn_gguf_close(&g);
    return t;
}

char *kn_gguf_jinja(const char *path)
{
    kn_gguf g = { 0 };
    char *copy = NULL;
    size_t length;
    if (kn_gguf_open(&g, path)) {
        const char *text = kn_gguf_text(&g, kn_gguf_find(&g, KN_GGUF_JINJA), &length);
        if (text && (copy = kn_host_alloc(length + 1))) {
            memcpy(copy, text, length);
            copy[length] = 0;
        }
    }
    kn_gguf_close(&g);
    return copy;
}
