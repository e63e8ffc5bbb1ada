/* models/programs/knap_tokenize.c: trains tokenizers, and turns texts into token files and back:
 * knap-tokenize train|encode|decode|info. */
#include "data/data.h"
#include "kernels/error_internal.h"
#include "kernels/memory_internal.h"
#include "models/programs/report.h"
#include "models/programs/tool.h"
#include "models/text_internal.h"
#include "models/tokens/tokens.h"
#include "tensor/files.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef struct settings {
    int64_t vocab, least;
    const char *pattern, *special, *out, *tokenizer, *behind, *field, *separator;
    bool by_line, print_ids, overwrite;
} settings;

static settings given;

#define AT(field) offsetof(settings, field)

static const kn_option table[] = {
    { "train|encode|decode|info", KN_OPTION_REST, .help = "and files, as above" },
    { "train", KN_OPTION_HEADING },
    { "vocab", KN_OPTION_INT, AT(vocab), NULL, "ids in all", .min = 256, .max = KN_MOST_IDS,
      .note = "must be given", .commands = "train" },
    { "pattern", KN_OPTION_STRING, AT(pattern), "gpt2",
      "cuts texts into words: gpt2, llama3, qwen, or a regular expression", .commands = "train" },
    { "special", KN_OPTION_STRING, AT(special), "<|endoftext|>",
      "tokens that are found in texts as they are, with blanks between them, or each by an option "
      "of its own",
      .several = true, .commands = "train" },
    { "least", KN_OPTION_INT, AT(least), "1", "merge only pairs that occur so often", .min = 1,
      .max = 1e15, .commands = "train" },
    { "by-line", KN_OPTION_FLAG, AT(by_line), NULL, "no token goes over the end of a line",
      .commands = "train" },
    { "encode, decode, info", KN_OPTION_HEADING },
    { "tokenizer", KN_OPTION_PATH, AT(tokenizer), NULL,
      "tokenizer.json, tokenizer.model, or a folder with one, or with vocab.json and merges.txt",
      .note = "must be given", .commands = "encode|decode|info" },
    { "behind", KN_OPTION_STRING, AT(behind), NULL, "encode: a token behind each file or document",
      .note = "none; of documents <|endoftext|>, <|end_of_text|> or </s>", .commands = "encode" },
    { "field", KN_OPTION_STRING, AT(field), NULL,
      "encode: the files are lines of JSON, with a document in this field of each",
      .clashes = "separator", .commands = "encode" },
    { "separator", KN_OPTION_STRING, AT(separator), NULL,
      "encode: the files are documents with lines like this one between them",
      .commands = "encode" },
    { "print-ids", KN_OPTION_FLAG, AT(print_ids), NULL, "encode: the ids, not a token file",
      .clashes = "out", .commands = "encode" },
    { "output", KN_OPTION_HEADING },
    { "out", KN_OPTION_PATH, AT(out), NULL,
      "train: the folder or file for tokenizer.json; encode: the token file",
      .commands = "train|encode" },
    { "overwrite", KN_OPTION_FLAG, AT(overwrite), NULL,
      "train: in place of the tokenizer that is there", .commands = "train" },
    { 0 },
};

static const char about[] =
    "Trains byte-level BPE tokenizers, and turns texts into token files and back:\n"
    "  knap-tokenize train --vocab N --out FOLDER TEXT...\n"
    "                                  FOLDER/tokenizer.json, which the tokenizers library reads\n"
    "  knap-tokenize encode --tokenizer T --out FILE TEXT...\n"
    "                                  a token file, and FILE.json beside it: train_gpt --data "
    "FILE\n"
    "  knap-tokenize decode --tokenizer T FILE|ID...\n"
    "                                  the text of a token file or of ids, to standard output\n"
    "  knap-tokenize info --tokenizer T\n"
    "Example:\n"
    "  knap-tokenize train --vocab 4096 --out bpe book.txt &&\n"
    "      knap-tokenize encode --tokenizer bpe --out book.tokens book.txt &&\n"
    "      train_gpt --data book.tokens --steps 200";

/* ---- texts ----------------------------------------------------------------------------------- */

typedef struct texts {
    kn_mapped *map;
    const char **text;
    size_t *length;
    int count;
    int64_t bytes;
} texts;

static void texts_free(texts *t)
{
    for (int i = 0; i < t->count; i++)
        kn_file_unmap(&t->map[i]);
    kn_host_free(t->map);
    kn_host_free(t->text);
    kn_host_free(t->length);
}

static bool texts_open(texts *t, char *const *path, int count)
{
    if (count == 0)
        return kn_fail("give at least one file of text");
    t->map = kn_host_calloc((size_t)count, sizeof *t->map);
    t->text = kn_host_calloc((size_t)count, sizeof *t->text);
    t->length = kn_host_calloc((size_t)count, sizeof *t->length);
    if (!t->map || !t->text || !t->length)
        return false;
    for (; t->count < count; t->count++) {
        char *found = kn_data_find(path[t->count]);
        bool ok = found && kn_file_map(found, "text file", &t->map[t->count]);
        kn_host_free(found);
        if (!ok)
            return false;
        if (kn_text_has_header(&t->map[t->count]))
            return kn_fail("%s is a token file already; give the text", path[t->count]);
        t->text[t->count] = (const char *)t->map[t->count].data;
        t->length[t->count] = t->map[t->count].size;
        t->bytes += (int64_t)t->map[t->count].size;
    }
    return true;
}

static void say_size(const char *what, int64_t bytes)
{
    char size[32];
    printf("%s %s", what, report_bytes((double)bytes, size, sizeof size));
}

/* ---- train ----------------------------------------------------------------------------------- */

/* The words of a list with blanks between them, ended by NULL. text is changed. */
static bool split(char *text, const char **word, int most)
{
    int n = 0;
    char *rest = text;
    for (char *w; (w = strtok_r(NULL, " " KN_OPTION_BETWEEN, &rest));) {
        if (n + 1 == most)
            return kn_fail("--special names more than %d tokens", most - 1);
        word[n++] = w;
    }
    word[n] = NULL;
    return true;
}

static bool merging(double done, void *arg)
{
    bar *b = arg;
    bar_move((int64_t)(done * 1000) - b->done, b);
    return false;
}

/* Where the tokenizer goes: in FOLDER/tokenizer.json, or the file. One that is there stays. */
static bool find_place(const char *out, char *path, size_t size)
{
    snprintf(path, size, kn_ends_in(out, ".json") ? "%s" : "%s/tokenizer.json", out);
    return !kn_is_there(path) || given.overwrite ||
           kn_fail("%s is there already; give another folder, or --overwrite", path);
}

static bool train(char *const *path, int count)
{
    enum { MOST = 1024 };
    const char *special[MOST];
    char *list = kn_host_strdup(given.special ? given.special : ""), where[4096];
    texts t = { 0 };
    bar b;
    kn_tokenizer *made = NULL;
    if (given.vocab == 0)
        kn_fail("train: give --vocab N, the number of ids");
    else if (!given.out)
        kn_fail("train: give --out FOLDER, where tokenizer.json goes");
    bool ok = kn_ok() && list && find_place(given.out, where, sizeof where) &&
              split(list, special, MOST) && texts_open(&t, path, count);
    if (ok) {
        bar_begin(&b, "words ", t.bytes);
        kn_words_tell(bar_move, &b);
        bar merges;
        bar_begin(&merges, "merges", 1000);
        made = kn_tokenizer_train(t.text, t.length, t.count, .vocab = given.vocab,
                                  .pattern = given.pattern, .special = special,
                                  .least = given.least, .by_line = given.by_line,
                                  .progress = merging, .progress_arg = &merges);
        kn_words_tell(NULL, NULL);
        bar_end(&b);
        ok = made && (kn_ends_in(given.out, ".json") || kn_folder_make(given.out, "--out ")) &&
             kn_tokenizer_save(made, where);
    }
    if (ok) {
        say_size("trained on", t.bytes);
        printf(": %lld ids, %s\n", (long long)kn_tokenizer_vocab(made), where);
        if (kn_tokenizer_vocab(made) < given.vocab)
            printf(
                "no pair of tokens is left that occurs %lld times or more: fewer ids than --vocab "
                "%lld\n",
                (long long)given.least, (long long)given.vocab);
    }
    texts_free(&t);
    kn_tokenizer_free(made);
    kn_host_free(list);
    return ok;
}

/* ---- encode ---------------------------------------------------------------------------------- */

static bool print_list(const void *ids, size_t width, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        printf(i ? " %u" : "%u",
               width == 2 ? ((const uint16_t *)ids)[i] : ((const uint32_t *)ids)[i]);
    return printf("\n") > 0;
}

/* Writes the tokens, and the tokenizer beside them. */
static bool write_tokens(const kn_tokenizer *t, const void *ids, int64_t count, int64_t bytes)
{
    char beside[4096];
    if (snprintf(beside, sizeof beside, "%s.json", given.out) >= (int)sizeof beside)
        return kn_fail("--out: the path is too long");
    kn_text *text = kn_text_of_ids(ids, count, kn_tokenizer_vocab(t));
    bool ok = text && kn_text_save(text, given.out) && kn_tokenizer_save(t, beside);
    kn_text_free(text);
    if (ok) {
        say_size("encoded", bytes);
        printf(": %lld tokens, %.3g bytes a token, %s\n", (long long)count,
               count > 0 ? (double)bytes / (double)count : 0, given.out);
    }
    return ok;
}

/* The file for the tokens is none of the texts, nor any other file than one of tokens. */
static bool may_write(char *const *path, int count)
{
    struct stat out;
    const int there = kn_look(given.out, &out);
    for (int i = 0; there > 0 && i < count; i++)
        if (kn_are_same(path[i], given.out))
            return kn_fail("--out %s is one of the texts; give another file", given.out);
    if (there > 0 && S_ISDIR(out.st_mode))
        return kn_fail("--out %s is a folder; give a file for the tokens", given.out);
    return there == 0 || (there > 0 && (out.st_size == 0 || kn_text_is_tokens(given.out))) ||
           (kn_ok() &&
            kn_fail("--out %s is a file that isn't of tokens; give another one", given.out));
}

/* The ids of file i, or of the documents in it. */
static void *ids_of(const kn_tokenizer *t, const texts *in, int i, const char *path, int64_t end,
                    int64_t *n)
{
    kn_documents d = { 0 };
    const kn_text_read_options o = { .field = given.field, .separator = given.separator };
    const kn_dtype dtype = kn_tokenizer_vocab(t) <= 65536 ? KN_U16 : KN_U32;
    if (!given.field && !given.separator)
        return kn_tokenizer_list(t, in->text[i], in->length[i], dtype, n);
    void *ids =
        kn_documents_read(&d, path, &in->map[i], &o) ? kn_documents_ids(&d, t, end, n) : NULL;
    kn_documents_free(&d);
    return ids;
}

static bool encode(const kn_tokenizer *t, char *const *path, int count)
{
    const bool documents = given.field || given.separator;
    texts in = { 0 };
    bar b;
    char *all = NULL;
    int64_t used = 0, room = 0, behind = -1;
    const kn_dtype dtype = kn_tokenizer_vocab(t) <= 65536 ? KN_U16 : KN_U32;
    const size_t width = kn_dtype_size(dtype);
    if (!given.out && !given.print_ids)
        return kn_fail("encode: give --out FILE, where the tokens go, or --print-ids");
    if (given.out && !may_write(path, count))
        return false;
    if (given.behind && (behind = kn_tokenizer_id(t, given.behind)) < 0)
        return kn_ok() && kn_fail("--behind %.100s: the tokenizer has no such token", given.behind);
    if (documents && !given.behind && (behind = kn_text_end(t, NULL, 0)) < 0)
        return kn_ok() && kn_fail("the tokenizer has no <|endoftext|>; say which of its tokens "
                                  "ends a document (--behind)");
    bool ok = texts_open(&in, path, count);
    bar_begin(&b, "encode", in.bytes);
    kn_words_tell(bar_move, &b);
    for (int i = 0; ok && i < in.count; i++) {
        int64_t n = 0;
        void *ids = ids_of(t, &in, i, path[i], behind, &n);
        ok = ids && kn_host_grow(&all, &room, used + n + 1, width);
        if (ok) {
            memcpy(all + (size_t)used * width, ids, (size_t)n * width);
            used += n;
            if (behind >= 0 && !documents) /* little-endian: the low bytes are the id */
                memcpy(all + (size_t)used++ * width, &behind, width);
        }
        kn_host_free(ids);
    }
    kn_words_tell(NULL, NULL);
    bar_end(&b);
    ok = ok &&
         (given.print_ids ? print_list(all, width, used) : write_tokens(t, all, used, in.bytes));
    kn_host_free(all);
    texts_free(&in);
    return ok;
}

/* ---- decode ---------------------------------------------------------------------------------- */

static bool print_ids(const kn_tokenizer *t, const int64_t *ids, int64_t n)
{
    int64_t length = kn_tokenizer_decode(t, ids, n, NULL, 0);
    char *text = length >= 0 ? kn_host_alloc((size_t)length + 1) : NULL;
    bool ok = text && kn_tokenizer_decode(t, ids, n, text, (size_t)length + 1) >= 0;
    ok = ok && (fwrite(text, 1, (size_t)length, stdout) == (size_t)length ||
                kn_fail_system("cannot write to standard output: %m"));
    kn_host_free(text);
    return ok;
}

/* Ids from the command line, divided by blanks or commas. */
static bool decode_words(const kn_tokenizer *t, char *const *word, int words)
{
    int64_t *ids = NULL, n = 0, room = 0;
    bool ok = true;
    for (int i = 0; ok && i < words; i++)
        for (const char *p = word[i]; ok && *p;) {
            char *end;
            const long long id = strtoll(p, &end, 10);
            if (end == p || (*end && *end != ',' && *end != ' '))
                ok = kn_fail("decode: \"%.40s\" is neither a token file nor an id", word[i]);
            else if ((ok = kn_host_grow(&ids, &room, n + 1, sizeof *ids)))
                ids[n++] = id;
            p = *end ? end + 1 : end;
        }
    ok = ok && print_ids(t, ids, n);
    kn_host_free(ids);
    return ok;
}

static bool decode(const kn_tokenizer *t, char *const *word, int words)
{
    if (words == 0)
        return kn_fail("decode: give a token file, or ids");
    if (words > 1 || !kn_is_there(word[0]))
        return kn_ok() && decode_words(t, word, words);
    kn_text *text = kn_text_map(word[0]);
    if (!text)
        return false;
    const int64_t count = kn_text_count(text, KN_TRAIN) + kn_text_count(text, KN_VALIDATION);
    int64_t *ids = kn_host_alloc((size_t)count * sizeof *ids);
    for (int64_t i = 0; ids && i < count; i++)
        ids[i] = kn_text_token(text, i);
    bool ok = ids && print_ids(t, ids, count);
    kn_host_free(ids);
    kn_text_free(text);
    return ok;
}

/* ---- the program ----------------------------------------------------------------------------- */

static bool info(const kn_tokenizer *t)
{
    printf("kind        %s\nids         %lld\nmerges      %llu\nspecial    ", kn_tokenizer_kind(t),
           (long long)kn_tokenizer_vocab(t), (unsigned long long)t->merge.count);
    for (int64_t i = 0; i < t->addeds; i++) {
        char *name = kn_host_strdup(t->added[i].text);
        if (!name)
            return false;
        kn_defuse(name);
        printf(" %s (%lld)", name, (long long)t->added[i].id);
        kn_host_free(name);
    }
    printf("%s\n", t->addeds ? "" : " none");
    return true;
}

static bool run(char *const *word, int words)
{
    static const char *const commands[] = { "train", "encode", "decode", "info" };
    int which = 0;
    if (words == 0)
        return kn_fail("give a command: train, encode, decode or info; --help explains them");
    while (which < 4 && strcmp(word[0], commands[which]) != 0)
        which++;
    if (which == 4)
        return kn_fail(
            "the command \"%.100s\" is unknown; there are train, encode, decode and info", word[0]);
    if (which == 0)
        return train(word + 1, words - 1);
    if (!given.tokenizer)
        return kn_fail("%s: give --tokenizer FILE or FOLDER", word[0]);
    kn_tokenizer *t = kn_tokenizer_load(given.tokenizer);
    bool ok = t && (which == 1   ? encode(t, word + 1, words - 1)
                    : which == 2 ? decode(t, word + 1, words - 1)
                                 : info(t));
    kn_tokenizer_free(t);
    return ok;
}

int main(int argc, char **argv)
{
    const tool t = { "knap-tokenize", about, table, &given, run };
    return tool_main(&t, argc, argv);
}
