/* models/tokens/files.c: the other files that tokenizers come in, each read into the value of a
 * tokenizer.json: GPT-2's pair of a vocabulary and a list of merges here, SentencePiece's models in
 * sentencepiece.c. */
#include "data/data.h"
#include "kernels/error_internal.h"
#include "models/tokens/tokens.h"
#include "tensor/files.h"
#include "tensor/json.h"

#include <string.h>

/* ---- GPT-2's pair ---------------------------------------------------------------------------- */

/* The lines of merges.txt; NULL with an error. */
static json_t *read_merges(const char *path)
{
    kn_mapped map;
    json_t *merges = json_array();
    if (!merges || !kn_file_map(path, "file of merges", &map)) {
        json_decref(merges);
        return NULL;
    }
    const char *line, *text = (const char *)map.data;
    size_t at = 0, n;
    for (int64_t number = 1; kn_ok() && kn_next_line(text, map.size, &at, &line, &n); number++) {
        const bool version = number == 1 && n >= 8 && memcmp(line, "#version", 8) == 0;
        if (n > 0 && !version && json_array_append_new(merges, json_stringn(line, n)) != 0)
            kn_fail("%s: line %lld isn't two tokens in UTF-8", path, (long long)number);
    }
    kn_file_unmap(&map);
    if (kn_ok())
        return merges;
    json_decref(merges);
    return NULL;
}

static json_t *read_json(const char *path)
{
    kn_mapped map;
    json_error_t error;
    if (!kn_file_map(path, "vocabulary", &map))
        return NULL;
    json_t *j =
        kn_json_parse((const char *)map.data, map.size, JSON_REJECT_DUPLICATES, path, &error);
    if (!j)
        kn_fail("%s is no JSON: line %d: %s", path, error.line, error.text);
    kn_file_unmap(&map);
    return j;
}

/* Tokens like <|endoftext|> are found in texts as they are. */
static json_t *special_of(const json_t *vocab)
{
    json_t *added = json_array(), *id;
    const char *text;
    json_object_foreach((json_t *)vocab, text, id)
    {
        if (strncmp(text, "<|", 2) == 0 && kn_ends_in(text + 2, "|>"))
            json_array_append_new(added, kn_tokenizer_special(json_integer_value(id), text));
    }
    return added;
}

static kn_tokenizer *load_pair(const char *vocab_path, const char *merges_path)
{
    json_t *vocab = read_json(vocab_path), *merges = vocab ? read_merges(merges_path) : NULL;
    if (!merges) {
        json_decref(vocab);
        return NULL;
    }
    return kn_tokenizer_of_made(kn_tokenizer_frame(vocab, merges, special_of(vocab), "", true),
                                vocab_path);
}

/* ---- any of them ----------------------------------------------------------------------------- */

static kn_tokenizer *load_json(const char *path)
{
    kn_mapped map;
    if (!kn_file_map(path, "tokenizer file", &map))
        return NULL;
    kn_tokenizer *t = kn_tokenizer_parse((const char *)map.data, map.size, path);
    kn_file_unmap(&map);
    return t;
}

static kn_tokenizer *load_folder(const char *folder)
{
    static const char *const name[][2] = { { "tokenizer.json" },
                                           { "vocab.json", "merges.txt" },
                                           { "encoder.json", "vocab.bpe" },
                                           { "tokenizer.model" } };
    for (size_t i = 0; i < sizeof name / sizeof *name; i++) {
        kn_path path[2];
        bool there = true;
        for (int k = 0; k < 2 && name[i][k]; k++) {
            path[k] = kn_path_of(folder, name[i][k], "");
            there = there && kn_is_there(path[k].text);
        }
        if (!there)
            continue;
        return name[i][1] ? load_pair(path[0].text, path[1].text)
               : i == 0   ? load_json(path[0].text)
                          : kn_sentences_load(path[0].text);
    }
    return !kn_ok() ? NULL
                    : kn_fail_null("%s holds no tokenizer: neither tokenizer.json, nor vocab.json "
                                   "with merges.txt, nor "
                                   "encoder.json with vocab.bpe, nor tokenizer.model",
                                   folder);
}

kn_tokenizer *kn_tokenizer_load(const char *path)
{
    struct stat st;
    if (!kn_given_path(path, "kn_tokenizer_load", "the path"))
        return NULL;
    const int there = kn_look(path, &st);
    if (there < 0)
        return NULL;
    if (there > 0 && S_ISDIR(st.st_mode))
        return load_folder(path);
    return kn_ends_in(path, ".model") ? kn_sentences_load(path) : load_json(path);
}
