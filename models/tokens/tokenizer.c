/* models/tokens/tokenizer.c: what a tokenizer is asked for, and the two kinds without merges. */
#include "models/tokenizer.h"
#include "data/data.h"
#include "kernels/error_internal.h"
#include "models/tokens/tokens.h"
#include "tensor/json.h"

#include <string.h>

void kn_tokenizer_free(kn_tokenizer *t)
{
    if (!t)
        return;
    for (int i = 0; i < t->changes; i++) {
        kn_host_free(t->change[i].from);
        kn_host_free(t->change[i].to);
        kn_host_free(t->change[i].map);
        kn_cut_free(&t->change[i].cut);
    }
    for (int i = 0; i < t->cuts; i++)
        kn_cut_free(&t->cut[i]);
    for (int64_t i = 0; i < t->addeds; i++)
        kn_host_free(t->added[i].own);
    kn_strings_free(&t->names);
    kn_pairs_free(&t->character);
    kn_pairs_free(&t->merge);
    kn_host_free(t->added);
    kn_host_free(t->bytes);
    kn_host_free(t->at);
    kn_host_free(t->added_id);
    kn_host_free(t->json);
    kn_host_free(t);
}

const char *kn_tokenizer_kind(const kn_tokenizer *t)
{
    return kn_given(t, "kn_tokenizer_kind", "the tokenizer") ? t->kind : "";
}

int64_t kn_tokenizer_vocab(const kn_tokenizer *t)
{
    return kn_given(t, "kn_tokenizer_vocab", "the tokenizer") ? t->vocab : 0;
}

int64_t kn_tokenizer_id(const kn_tokenizer *t, const char *token)
{
    if (!kn_given(t, "kn_tokenizer_id", "the tokenizer") ||
        !kn_given(token, "kn_tokenizer_id", "the token"))
        return -1;
    const int64_t name = kn_strings_find(&t->names, token, strlen(token));
    return name < 0 ? -1 : t->names.list[name].value;
}

bool kn_tokenizer_is_special(const kn_tokenizer *t, int64_t id)
{
    return kn_given(t, "kn_tokenizer_is_special", "the tokenizer") && id >= 0 && id < t->vocab &&
           t->added_id[id] == 2;
}

int64_t kn_tokenizer_prefix(const kn_tokenizer *t, const int64_t **ids)
{
    if (!kn_given(t, "kn_tokenizer_prefix", "the tokenizer") ||
        !kn_given(ids, "kn_tokenizer_prefix", "the place for the ids"))
        return 0;
    *ids = t->prefix;
    return t->prefixes;
}

size_t kn_tokenizer_piece(const kn_tokenizer *t, int64_t id, const char **bytes)
{
    *bytes = t->bytes + t->at[id];
    return t->at[id + 1] - t->at[id];
}

int64_t kn_tokenizer_bytes(const kn_tokenizer *t, const int64_t *ids, int64_t n)
{
    int64_t bytes = 0;
    for (int64_t i = 0; i < n; i++)
        if (ids[i] >= 0 && ids[i] < t->vocab)
            bytes += (int64_t)(t->at[ids[i] + 1] - t->at[ids[i]]);
    return bytes;
}

int64_t kn_tokenizer_decode(const kn_tokenizer *t, const int64_t *ids, int64_t n, char *text,
                            size_t size)
{
    if (!kn_given(t, "kn_tokenizer_decode", "the tokenizer") ||
        (n > 0 && !kn_given(ids, "kn_tokenizer_decode", "the list of ids")) ||
        (size > 0 && !kn_given(text, "kn_tokenizer_decode", "the place for the text")))
        return -1;
    size_t length = 0;
    for (int64_t i = 0; i < n; i++) {
        const char *bytes = NULL;
        if (ids[i] < 0 || ids[i] >= t->vocab) {
            kn_fail("tokenizer: id %lld at position %lld is outside the vocabulary of %lld",
                    (long long)ids[i], (long long)i, (long long)t->vocab);
            return -1;
        }
        size_t count = kn_tokenizer_piece(t, ids[i], &bytes);
        const size_t skip = i == 0 && t->drops_space && count > 0 && *bytes == ' ';
        for (size_t j = skip; j < count; j++, length++)
            if (length + 1 < size)
                text[length] = bytes[j];
    }
    if (size > 0)
        text[length < size ? length : size - 1] = '\0';
    return (int64_t)length;
}

/* ---- files ----------------------------------------------------------------------------------- */

bool kn_tokenizer_save(const kn_tokenizer *t, const char *path)
{
    if (!kn_given(t, "kn_tokenizer_save", "the tokenizer") ||
        !kn_given_path(path, "kn_tokenizer_save", "the path"))
        return false;
    return kn_file_write(path, (const void *const[]){ t->json }, (const size_t[]){ t->json_size },
                         1);
}

kn_tokenizer *kn_tokenizer_parse(const char *json, size_t len, const char *where)
{
    json_error_t error;
    if (!kn_given(json, "kn_tokenizer_parse", "the text"))
        return NULL;
    where = where ? where : "a tokenizer";
    json_t *root = kn_json_parse(json, len, JSON_REJECT_DUPLICATES, where, &error);
    if (!root)
        return kn_fail_null("%s is no tokenizer.json: line %d: %s", where, error.line, error.text);
    kn_tokenizer *t = kn_tokenizer_of_json(root, json, len, where);
    json_decref(root);
    return t;
}

/* ---- made here ------------------------------------------------------------------------------- */

kn_tokenizer *kn_tokenizer_of_made(json_t *root, const char *where)
{
    char *text = root && kn_ok() ? kn_json_text(root, JSON_INDENT(1), where) : NULL;
    kn_tokenizer *t = text ? kn_tokenizer_of_json(root, text, strlen(text), where) : NULL;
    kn_host_free(text);
    json_decref(root);
    return t;
}

json_t *kn_tokenizer_special(int64_t id, const char *text)
{
    return json_pack("{s:I, s:s, s:b, s:b, s:b, s:b, s:b}", "id", (json_int_t)id, "content", text,
                     "single_word", 0, "lstrip", 0, "rstrip", 0, "normalized", 0, "special", 1);
}

kn_tokenizer *kn_tokenizer_with(const kn_tokenizer *t, const char *const *token, int count)
{
    json_error_t error;
    json_t *root = kn_json_parse(t->json, t->json_size, 0, "a tokenizer", &error);
    json_t *list = json_object_get(root, "added_tokens");
    int64_t id = t->vocab;
    if (root && !json_is_array(list)) {
        list = json_array();
        json_object_set_new(root, "added_tokens", list);
    }
    for (int i = 0; root && kn_ok() && i < count; i++)
        if (kn_tokenizer_id(t, token[i]) < 0 &&
            json_array_append_new(list, kn_tokenizer_special(id++, token[i])) != 0 && kn_ok())
            kn_fail_memory("a tokenizer");
    return kn_tokenizer_of_made(root, "a tokenizer");
}

static json_t *byte_level(bool cuts)
{
    return json_pack("{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space", 0,
                     "trim_offsets", 1, "use_regex", cuts);
}

json_t *kn_tokenizer_frame(json_t *vocab, json_t *merges, json_t *added, const char *pattern,
                           bool by_bytes)
{
    json_t *pre = !by_bytes ? json_null()
                  : !pattern || !*pattern
                      ? byte_level(pattern != NULL)
                      : json_pack("{s:s, s:[{s:s, s:{s:s}, s:s, s:b}, o]}", "type", "Sequence",
                                  "pretokenizers", "type", "Split", "pattern", "Regex", pattern,
                                  "behavior", "Isolated", "invert", 0, byte_level(false));
    json_t *decoder = by_bytes ? byte_level(true) : json_pack("{s:s}", "type", "Fuse");
    json_t *model =
        json_pack("{s:s, s:n, s:n, s:n, s:n, s:b, s:b, s:b, s:o, s:o}", "type", "BPE", "dropout",
                  "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", 0,
                  "byte_fallback", 0, "ignore_merges", 0, "vocab", vocab, "merges", merges);
    return json_pack("{s:s, s:n, s:n, s:o, s:n, s:o, s:n, s:o, s:o}", "version", "1.0",
                     "truncation", "padding", "added_tokens", added ? added : json_array(),
                     "normalizer", "pre_tokenizer", pre, "post_processor", "decoder", decoder,
                     "model", model);
}

static kn_tokenizer *create_byte(void)
{
    json_t *vocab = json_object();
    for (int i = 0; i < 256; i++) {
        char letter[5] = "";
        kn_utf8_write(kn_byte_letter((unsigned char)i), letter);
        if (json_object_set_new(vocab, letter, json_integer(i)) != 0 && kn_ok())
            kn_fail_memory("the byte tokenizer");
    }
    return kn_tokenizer_of_made(kn_tokenizer_frame(vocab, json_array(), NULL, NULL, true),
                                "the byte tokenizer");
}

#define CODE_POINTS 0x110000 /* U+0000 .. U+10FFFF */

static kn_tokenizer *create_char(const char *text, size_t len)
{
    int64_t count = 0;
    unsigned char *seen = kn_host_calloc(CODE_POINTS, 1);
    json_t *vocab = NULL;
    if (!seen)
        return NULL;
    for (size_t i = 0; i < len;) {
        uint32_t code = 0;
        size_t n = kn_utf8_read(text + i, len - i, &code);
        if (n == 0 || code == 0) {
            kn_fail(n ? "the text has the character U+0000 at byte %zu; use --tokenizer byte"
                      : "the text is not valid UTF-8 at byte %zu (0x%02x); use --tokenizer byte",
                    i, (unsigned char)text[i]);
            goto done;
        }
        seen[code] = 1;
        i += n;
    }
    vocab = json_object();
    for (uint32_t code = 1; code < CODE_POINTS; code++) {
        char letter[5] = "";
        if (!seen[code])
            continue;
        kn_utf8_write(code, letter);
        if (json_object_set_new(vocab, letter, json_integer(count++)) != 0 && kn_ok())
            kn_fail_memory("the char tokenizer");
    }
    if (count == 0)
        kn_fail("the text is empty: a char tokenizer has one id for each character of a text");
done:
    kn_host_free(seen);
    if (!kn_ok()) {
        json_decref(vocab);
        return NULL;
    }
    return kn_tokenizer_of_made(kn_tokenizer_frame(vocab, json_array(), NULL, NULL, false),
                                "the char tokenizer");
}

kn_tokenizer *kn_tokenizer_create(const char *kind, const char *text, size_t len)
{
    if (!kn_given(kind, "kn_tokenizer_create", "the kind") ||
        (len && !kn_given(text, "kn_tokenizer_create", "the text")))
        return NULL;
    if (strcmp(kind, "byte") == 0)
        return create_byte();
    if (strcmp(kind, "char") == 0)
        return create_char(text, len);
    return kn_fail_null("no tokenizer of kind '%s'; kinds are char and byte, and files are read by "
                        "kn_tokenizer_load",
                        kind);
}
