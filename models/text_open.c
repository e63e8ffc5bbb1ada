/* models/text_open.c: the files that a path stands for, and their tokens as one text. */
#include "kernels/error_internal.h"
#include "kernels/memory_internal.h"
#include "models/text_internal.h"
#include "models/tokens/tokens.h"
#include "tensor/files.h"

#include <fnmatch.h>
#include <string.h>

/* ---- which files ----------------------------------------------------------------------------- */

typedef struct paths {
    char **list;
    int64_t count, room;
    bool several; /* a folder or a pattern */
} paths;

static void paths_free(paths *p)
{
    for (int64_t i = 0; i < p->count; i++)
        kn_host_free(p->list[i]);
    kn_host_free(p->list);
}

/* Takes path over; NULL passes an error on. */
static bool add_path(paths *p, char *path)
{
    if (path && kn_host_grow(&p->list, &p->room, p->count + 1, sizeof *p->list)) {
        p->list[p->count++] = path;
        return true;
    }
    kn_host_free(path);
    return false;
}

/* In a folder lie texts or tokens, beside tokenizers (*.json) and what is hidden. */
static bool is_text_name(const char *name, const char *pattern)
{
    return pattern ? fnmatch(pattern, name, FNM_PERIOD) == 0
                   : name[0] != '.' && !kn_ends_in(name, ".json");
}

/* The files of a folder in order of their names; NULL as pattern: of any name. */
static bool add_folder(paths *p, const char *folder, const char *pattern)
{
    struct stat st;
    kn_folder_names n = { 0 };
    bool ok = kn_folder_names_read(&n, folder, NULL);
    for (int64_t i = 0; ok && i < n.count; i++) {
        if (!is_text_name(n.list[i].name, pattern))
            continue;
        const kn_path path = kn_path_of(folder, n.list[i].name, "");
        const int there = kn_look(path.text, &st);
        ok = there >= 0 && kn_ok();
        if (ok && there > 0 && !S_ISDIR(st.st_mode))
            ok = add_path(p, kn_host_strdup(path.text));
    }
    kn_folder_names_free(&n);
    return ok;
}

bool kn_text_is_pattern(const char *path)
{
    return strpbrk(kn_path_last(path), "*?[") != NULL;
}

/* What path stands for: a file, a folder's files, or those that match the pattern in its last part
 * (fnmatch(3)). */
static bool find_paths(paths *p, const char *path)
{
    struct stat st;
    const int there = kn_look(path, &st);
    if (there < 0)
        return false;
    p->several = there == 0 ? kn_text_is_pattern(path) : S_ISDIR(st.st_mode);
    if (!p->several)
        return add_path(p, kn_host_strdup(path));
    if (there == 0)
        return add_folder(p, kn_path_above(path).text, kn_path_last(path)) &&
               (p->count > 0 || kn_fail("no file matches %s", path));
    return add_folder(p, path, NULL) &&
           (p->count > 0 || kn_fail("the folder %s holds no texts or token files", path));
}

bool kn_text_holds_tokens(const char *path)
{
    paths p = { 0 };
    const bool yes = find_paths(&p, path) &&
                     (kn_text_is_plain(p.list[0]) || (kn_ok() && kn_text_is_tokens(p.list[0])));
    paths_free(&p);
    return yes;
}

/* ---- tokenizers ------------------------------------------------------------------------------ */

/* The tokenizer of a token file lies beside it, as FILE.json, or as tokenizer.json where there are
 * several. NULL without an error where there is none. */
static bool open_sidecar(const char *path, bool several, kn_tokenizer **tokenizer)
{
    const kn_path folder = kn_path_above(path);
    kn_path json = kn_path_of(folder.text, kn_path_last(path), ".json");
    bool there = kn_ok() && kn_is_there(json.text);
    if (!there && several && kn_ok()) {
        json = kn_path_of(folder.text, "tokenizer.json", "");
        there = kn_is_there(json.text);
    }
    if (there)
        *tokenizer = kn_tokenizer_load(json.text);
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
static kn_tokenizer *find_tokenizer(const char *path, const kn_text_read_options *o, bool several,
                                    const kn_mapped *map, const kn_documents *d)
{
    kn_tokenizer *made = NULL;
    if (strcmp(o->kind, "char") != 0 && strcmp(o->kind, "byte") != 0) {
        if (kn_is_there(o->kind))
            return kn_tokenizer_load(o->kind);
        return kn_ok()
                   ? kn_fail_null("no tokenizer '%.200s': give char, byte, or the file or folder "
                                  "of one",
                                  o->kind)
                   : NULL;
    }
    const bool header = kn_text_has_header(map), plain = !header && kn_ends_in(path, ".bin");
    if (header || plain) {
        if (!open_sidecar(path, several, &made) || (!made && (!plain || o->vocab)))
            return made;
        if (made && (strcmp(o->kind, "char") == 0 || strcmp(o->kind, kn_tokenizer_kind(made)) == 0))
            return made;
        kn_tokenizer_free(made);
        if (made)
            return kn_fail_null("%s comes with the tokenizer that made its tokens, so the %s one "
                                "doesn't fit; leave --tokenizer out",
                                path, o->kind);
        return kn_fail_null(
            "%s holds tokens without a header, as nanoGPT writes them; say how many "
            "kinds there are (--vocab 50257 for GPT-2's), or give their tokenizer",
            path);
    }
    if (several && strcmp(o->kind, "char") == 0)
        return kn_fail_null("%s is one of several texts, and a char tokenizer is made from one: "
                            "give another (byte, or the file or folder of one)",
                            path);
    if (o->chat && strcmp(o->kind, "char") == 0 && map->size > 0 && *(const char *)map->data == '{')
        return kn_fail_null("%s holds conversations, of which no char tokenizer is made: give "
                            "another (byte, or the file or folder of one)",
                            path);
    if (!kn_ok())
        return NULL;
    if (!d->count)
        return kn_tokenizer_create(o->kind, (const char *)map->data, map->size);
    const char *const end[] = { o->end ? o->end : KN_END_TOKEN };
    kn_tokenizer *bare = kn_tokenizer_create(o->kind, d->text, (size_t)d->used);
    made = bare ? kn_tokenizer_with(bare, end, 1) : NULL;
    kn_tokenizer_free(bare);
    return made;
}

/* t itself, or one with the template's tokens, too; t is kept. */
static kn_tokenizer *with_chat(kn_tokenizer *t, const kn_text_read_options *o)
{
    const kn_chat *chat = o->chat && t ? kn_chat_named(o->chat) : NULL;
    return chat && !kn_chat_fits(t, chat) ? kn_chat_tokenizer(t, chat) : t;
}

static kn_tokenizer *tokenizer_for(const char *path, const kn_text_read_options *o, bool several,
                                   const kn_mapped *map, const kn_documents *d)
{
    kn_tokenizer *bare = find_tokenizer(path, o, several, map, d), *made = with_chat(bare, o);
    if (made != bare)
        kn_tokenizer_free(bare);
    return made;
}

/* ---- reading --------------------------------------------------------------------------------- */

/* The tokens of documents, or of a text that is none. */
static kn_text *encode(const kn_documents *d, const kn_tokenizer *by, const kn_mapped *map,
                       const kn_text_read_options *o)
{
    int64_t count, end;
    if (!d->count)
        return kn_text_encode(by, (const char *)map->data, map->size);
    if ((end = kn_text_end(by, o->end, 0)) < 0)
        return kn_ok() ? kn_fail_null("the tokenizer has no " KN_END_TOKEN
                                      "; say which of its tokens ends a document (--end)")
                       : NULL;
    void *ids = kn_documents_ids(d, by, end, &count);
    kn_text *t = ids ? kn_text_of_ids(ids, count, kn_tokenizer_vocab(by)) : NULL;
    kn_host_free(ids);
    return t;
}

/* Options that don't go with a file of this sort. */
static bool check_sort(const char *path, const kn_text_read_options *o, bool plain, bool tokens)
{
    const char *name = o->field ? "field" : o->chat ? "template" : "separator";
    if (tokens && (o->field || o->separator || o->chat))
        return kn_fail("--%s is for texts, and %s holds tokens; leave it out", name, path);
    if (kn_ends_in(path, ".jsonl") && !o->field && !o->chat)
        return kn_fail("%s holds an object of JSON in each line: name the field that is the text "
                       "(--field text), or the template of conversations (--template auto)",
                       path);
    return !o->vocab || plain ||
           kn_fail("--vocab is for tokens without a header, which %s isn't; leave it out", path);
}

/* One file. *tokenizer, where it is NULL, may become one. */
static kn_text *read_file(const char *path, kn_tokenizer **tokenizer, bool several,
                          const kn_text_read_options *o)
{
    kn_mapped map;
    kn_text *t = NULL;
    kn_documents d = { 0 };
    if (!kn_file_map(path, "text file", &map))
        return NULL;
    const bool header = kn_text_has_header(&map), plain = !header && kn_ends_in(path, ".bin"),
               tokens = header || plain;
    bool ok = check_sort(path, o, plain, tokens);
    if (ok && !tokens && !o->chat && (o->field || o->separator || o->end))
        ok = kn_documents_read(&d, path, &map, o);
    if (ok && !*tokenizer)
        *tokenizer = tokenizer_for(path, o, several, &map, &d);
    kn_tokenizer *by = *tokenizer;
    if (ok && kn_ok())
        t = header    ? kn_text_map(path)
            : plain   ? kn_text_map_plain(path, o->vocab ? o->vocab : kn_tokenizer_vocab(by))
              : o->chat ? kn_conversations_read(path, &map, by, kn_chat_named(o->chat))
                      : encode(&d, by, &map, o);
    kn_file_unmap(&map);
    kn_documents_free(&d);
    if (t && (o->vocab || check_vocab(t, by, path))) {
        const int64_t end = kn_text_end(by, o->end, t->vocab);
        t->first = kn_text_begin(by, end < 0 && !by && header ? kn_text_llmc_begin(t) : end);
        if (kn_ok())
            return t;
    }
    kn_text_free(t);
    return NULL;
}

/* Whether the first of several files and this one are of one sort. */
static bool same_sort(const kn_text *first, const kn_text *t, const paths *p, int64_t i)
{
    const bool tokens = first->part[0].path != NULL;
    if (tokens != (t->part[0].path != NULL))
        return kn_fail("%s is a %s file and %s isn't; give files of one sort (a pattern chooses "
                       "them: 'FOLDER/*.bin')",
                       p->list[0], tokens ? "token" : "text", p->list[i]);
    return first->vocab == t->vocab ||
           kn_fail("%s has %lld kinds of token, %s %lld; all must be of one tokenizer", p->list[0],
                   (long long)first->vocab, p->list[i], (long long)t->vocab);
}

kn_text *kn_text_read_(const char *path, kn_tokenizer **tokenizer, kn_text_read_options o)
{
    paths p = { 0 };
    kn_text *all = NULL;
    if (!kn_given_path(path, "kn_text_read", "the path") ||
        !kn_given(tokenizer, "kn_text_read", "the place for the tokenizer"))
        return NULL;
    if (o.vocab < 0 || o.vocab > 65536)
        return kn_fail_null("kn_text_read: .vocab is %lld; 1 to 65536 ids have two bytes",
                            (long long)o.vocab);
    if (o.field && o.separator)
        return kn_fail_null("kn_text_read: .field and .separator contradict each other");
    if (o.separator && strpbrk(o.separator, "\r\n"))
        return kn_fail_null("kn_text_read: .separator has the end of a line, and is one itself");
    if (o.chat && (o.field || o.separator || o.end))
        return kn_fail_null("kn_text_read: .chat says where conversations end; leave .field, "
                            ".separator and .end out");
    if (o.chat && !kn_chat_named(o.chat))
        return kn_fail_null("kn_text_read: no template '%.100s'; there are " KN_CHATS, o.chat);
    o.kind = o.kind ? o.kind : "char";
    kn_tokenizer *by = with_chat(*tokenizer, &o);
    bool ok = kn_ok() && find_paths(&p, path);
    for (int64_t i = 0; ok && i < p.count; i++) {
        kn_text *t = read_file(p.list[i], &by, p.several, &o);
        if (!(ok = t && (!all || same_sort(all, t, &p, i))))
            kn_text_free(t);
        else if (!all)
            all = t;
        else
            ok = kn_text_append(all, t);
    }
    paths_free(&p);
    if (ok) {
        if (by != *tokenizer)
            kn_tokenizer_free(*tokenizer);
        *tokenizer = by;
        return all;
    }
    if (by != *tokenizer)
        kn_tokenizer_free(by);
    kn_text_free(all);
    return NULL;
}

kn_text *kn_text_open(const char *path, const char *kind, kn_tokenizer **tokenizer)
{
    if (!kn_given_path(path, "kn_text_open", "the path") ||
        !kn_given(kind, "kn_text_open", "the kind of tokenizer") ||
        !kn_given(tokenizer, "kn_text_open", "the place for the tokenizer"))
        return NULL;
    return kn_text_read(path, tokenizer, .kind = kind);
}
