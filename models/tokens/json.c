/* models/tokens/json.c: a tokenizer from its tokenizer.json, whose form is the tokenizers
 * library's (version 1.0). A part of it that this library doesn't read is an error that names it:
 * ids that are nearly right are worse than none. */
#include "kernels/error_internal.h"
#include "kernels/memory.h"
#include "models/tokens/json.h"

#include <stdlib.h>
#include <string.h>

bool kn_json_parts(kn_json_reader *r, const json_t *object, const char *list, kn_json_part_fn each)
{
    size_t i;
    json_t *member;
    if (!object || json_is_null(object))
        return true;
    if (!is(object, "Sequence"))
        return each(r, object);
    json_array_foreach(json_object_get(object, list), i, member)
    {
        if (!kn_json_parts(r, member, list, each))
            return false;
    }
    return true;
}

/* ---- tokens ---------------------------------------------------------------------------------- */

static bool add_name(kn_json_reader *r, const char *text, size_t length, const json_t *id)
{
    const json_int_t value = json_integer_value(id);
    if (!json_is_integer(id) || value < 0 || value >= KN_MOST_IDS)
        return kn_fail("%s: the token \"%.60s\" has no id of 0 to %d", r->where, text,
                       KN_MOST_IDS - 1);
    struct kn_string *name = kn_strings_add(&r->t->names, text, length);
    if (name && name->value >= 0 && name->value != value)
        return kn_fail("%s: the token \"%.60s\" has two ids, %lld and %lld", r->where, text,
                       (long long)name->value, (long long)value);
    if (name)
        name->value = value;
    r->ids = value >= r->ids ? value + 1 : r->ids;
    return name != NULL;
}

static bool read_vocab(kn_json_reader *r, json_t *vocab)
{
    const char *text;
    json_t *id;
    if (!json_is_object(vocab) || json_object_size(vocab) == 0)
        return kn_fail("%s: its model has no \"vocab\", an object of tokens and their ids",
                       r->where);
    json_object_foreach(vocab, text, id)
    {
        if (!add_name(r, text, strlen(text), id))
            return false;
    }
    return true;
}

static bool read_added(kn_json_reader *r, const json_t *list)
{
    kn_tokenizer *t = r->t;
    size_t i;
    json_t *token;
    if (!list || json_array_size(list) == 0)
        return true;
    if (!(t->added = kn_host_calloc(json_array_size(list), sizeof *t->added)))
        return false;
    json_array_foreach(list, i, token)
    {
        const char *text = text_in(token, "content");
        const bool as_is = true_in(token, "user_defined", false);
        const bool special = true_in(token, "special", false);
        if (!*text)
            return kn_fail("%s: added token %zu has no \"content\"", r->where, i);
        if (true_in(token, "single_word", false))
            return kn_fail("%s: the added token \"%.60s\" stands for whole words only "
                           "(\"single_word\"), which this library doesn't read",
                           r->where, text);
        if (!add_name(r, text, strlen(text), json_object_get(token, "id")))
            return false;
        t->added[t->addeds++] =
            (kn_added){ .length = strlen(text),
                        .id = json_integer_value(json_object_get(token, "id")),
                        .special = special,
                        .early = !as_is && !true_in(token, "normalized", !special),
                        .as_is = as_is,
                        .left = true_in(token, "lstrip", false),
                        .right = true_in(token, "rstrip", false) };
    }
    return true;
}

static int by_text(const void *a, const void *b)
{
    return strcmp(((const kn_added *)a)->text, ((const kn_added *)b)->text);
}

/* A late one's text as the normalizer writes it, which knows of no added tokens meanwhile. */
static char *normalized(kn_tokenizer *t, const char *text, size_t *length)
{
    const int64_t addeds = t->addeds;
    t->addeds = 0;
    char *own = kn_change_text(t, 0, t->normal_changes, text, *length, true, length);
    t->addeds = addeds;
    return own;
}

/* The list of names stands now, so that their texts stay where they are. */
static bool sort_added(kn_json_reader *r, const json_t *list)
{
    kn_tokenizer *t = r->t;
    for (int64_t i = 0; i < t->addeds; i++) {
        kn_added *a = &t->added[i];
        const char *text = text_in(json_array_get(list, (size_t)i), "content");
        size_t length = strlen(text);
        if (!a->early && !a->as_is && t->normal_changes > 0)
            a->text = a->own = normalized(t, text, &length);
        else
            a->text = kn_strings_text(&t->names, kn_strings_find(&t->names, text, length));
        if (!a->text || length == 0)
            return kn_ok() && kn_fail("%s: the added token \"%.60s\" is nothing", r->where, text);
        a->length = length;
        t->added_first[(unsigned char)*a->text] = true;
    }
    if (t->addeds > 0)
        qsort(t->added, (size_t)t->addeds, sizeof *t->added, by_text);
    for (int64_t i = 1; i < t->addeds; i++)
        if (strcmp(t->added[i].text, t->added[i - 1].text) == 0)
            return kn_fail("%s: the added token \"%.60s\" is there twice", r->where,
                           t->added[i].text);
    return true;
}

/* ---- what happens to a text ------------------------------------------------------------------ */

/* A step that changes texts, which become up to so many times as long; NULL with an error. */
static kn_change *add_change(kn_json_reader *r, enum kn_change_kind kind, int64_t grows,
                             const char *to)
{
    kn_tokenizer *t = r->t;
    if (t->changes == KN_MOST_STEPS)
        return kn_fail_null("%s: its normalizer has more than %d steps", r->where, KN_MOST_STEPS);
    if (to && strlen(to) > 64)
        return kn_fail_null("%s: its normalizer puts %zu bytes into a text at a time; 64 are read",
                            r->where, strlen(to));
    int64_t all = grows;
    for (int i = 0; i < t->changes; i++)
        all *= t->change[i].grows;
    if (all > 4096)
        return kn_fail_null("%s: its normalizer makes texts up to %lld times as long", r->where,
                            (long long)all);
    kn_change *c = &t->change[t->changes++];
    *c = (kn_change){ .kind = kind, .grows = grows };
    return !to || (c->to = kn_host_strdup(to)) ? c : NULL;
}

/* In front of each stretch between two added tokens. */
static bool add_front(kn_json_reader *r, enum kn_change_kind kind, const char *to)
{
    return add_change(r, kind, (int64_t)strlen(to) + 1, to) != NULL;
}

/* Of a string, or of a pattern's matches. */
static bool add_replace(kn_json_reader *r, const char *string, const char *pattern, const char *to)
{
    kn_change *c = add_change(r, KN_CHANGE_REPLACE, *to && to[1] ? (int64_t)strlen(to) : 1, to);
    if (!c || *string)
        return c && (c->from = kn_host_strdup(string));
    return kn_cut_pattern(&c->cut, pattern, false, r->where) &&
           (!c->cut.may_be_empty ||
            kn_fail("%s: its normalizer replaces matches of \"%.60s\", which may be empty: this "
                    "library doesn't read that",
                    r->where, pattern));
}

static bool add_map(kn_json_reader *r, const json_t *n)
{
    int64_t grows;
    kn_charsmap *map = kn_charsmap_read(text_in(n, "precompiled_charsmap"),
                                        true_in(n, "longest", false), r->where, &grows);
    kn_change *c = map ? add_change(r, KN_CHANGE_MAP, grows, NULL) : NULL;
    if (c)
        c->map = map;
    else
        kn_host_free(map);
    return c != NULL;
}

static bool read_normalizer(kn_json_reader *r, const json_t *n)
{
    const json_t *pattern = json_object_get(n, "pattern");
    const char *string = text_in(pattern, "String"), *regex = text_in(pattern, "Regex");
    const int form = kn_change_form(text_in(n, "type"));
    if (form) { /* NFKD of one character makes 18, of 33 bytes for 3 */
        kn_change *c = add_change(r, KN_CHANGE_FORM, 11, NULL);
        return c && (c->form = form);
    }
    if (is(n, "Prepend"))
        return add_front(r, KN_CHANGE_PREPEND, text_in(n, "prepend"));
    if (is(n, "Precompiled"))
        return add_map(r, n);
    if (is(n, "Strip"))
        return (!true_in(n, "strip_left", false) || add_replace(r, "", "\\A\\s+", "")) &&
               (!true_in(n, "strip_right", false) || add_replace(r, "", "\\s+\\z", ""));
    if (is(n, "Replace") && (*string || *regex))
        return add_replace(r, string, regex, text_in(n, "content"));
    return unread(r, "normalizer", n);
}

static bool add_cut(kn_json_reader *r, const char *pattern, bool literal, const char *behaviour,
                    bool invert)
{
    static const char *const name[] = { "isolated", "removed", "mergedwithprevious",
                                        "mergedwithnext" };
    kn_tokenizer *t = r->t;
    if (t->by_bytes)
        return kn_fail(
            "%s: its pre_tokenizer cuts behind ByteLevel, in the letters of bytes, which "
            "this library doesn't do",
            r->where);
    if (t->cuts == KN_MOST_STEPS)
        return kn_fail("%s: its pre_tokenizer has more than %d steps", r->where, KN_MOST_STEPS);
    for (int i = 0; i < 4; i++)
        if (strcasecmp(behaviour, name[i]) == 0 && (!invert || i <= KN_CUT_REMOVED)) {
            t->cut[t->cuts] = (kn_cut){ .kind = (enum kn_cut_kind)i, .invert = invert };
            return kn_cut_pattern(&t->cut[t->cuts], pattern, literal, r->where) && ++t->cuts;
        }
    return kn_fail("%s: its pre_tokenizer splits with the behavior \"%.60s\"%s, which this library "
                   "doesn't read",
                   r->where, behaviour, invert ? ", inverted" : "");
}

/* Spaces become a character; the text begins with one. */
static bool read_metaspace(kn_json_reader *r, const json_t *p)
{
    const char *mark = text_in(p, "replacement"), *scheme = text_in(p, "prepend_scheme");
    if (!*scheme)
        scheme = true_in(p, "add_prefix_space", true) ? "always" : "never";
    if (!*mark || !add_replace(r, " ", "", mark))
        return kn_ok() && kn_fail("%s: its Metaspace has no \"replacement\"", r->where);
    if (strcmp(scheme, "never") != 0 &&
        !add_front(r, strcmp(scheme, "first") == 0 ? KN_CHANGE_BEGIN_FIRST : KN_CHANGE_BEGIN, mark))
        return false;
    return !true_in(p, "split", true) || add_cut(r, mark, true, "MergedWithNext", false);
}

static bool read_pre_tokenizer(kn_json_reader *r, const json_t *p)
{
    kn_tokenizer *t = r->t;
    const json_t *pattern = json_object_get(p, "pattern");
    const char *string = text_in(pattern, "String"), *regex = text_in(pattern, "Regex");
    const bool spaces = is(p, "ByteLevel") && true_in(p, "add_prefix_space", true);
    if ((is(p, "Metaspace") || spaces) && t->cuts > 0)
        return kn_fail("%s: its pre_tokenizer puts spaces in front of words that were cut before, "
                       "which this library doesn't do",
                       r->where);
    if (is(p, "Metaspace"))
        return read_metaspace(r, p);
    if (is(p, "Digits"))
        return add_cut(r, true_in(p, "individual_digits", false) ? "\\p{N}" : "\\p{N}+", false,
                       "Isolated", false);
    if (is(p, "Split") && (*string || *regex))
        return add_cut(r, *string ? string : regex, *string != 0, text_in(p, "behavior"),
                       true_in(p, "invert", false));
    if (!is(p, "ByteLevel"))
        return unread(r, "pre_tokenizer", p);
    const bool ok = (!spaces || add_front(r, KN_CHANGE_BEGIN, " ")) &&
                    (!true_in(p, "use_regex", true) ||
                     add_cut(r, kn_cut_named("gpt2"), false, "Isolated", false));
    t->by_bytes = true;
    return ok;
}

/* ---- the model ------------------------------------------------------------------------------- */

/* The ids of bytes and characters. */
static bool read_letters(kn_json_reader *r)
{
    kn_tokenizer *t = r->t;
    for (int i = 0; i < 256; i++) {
        char text[8];
        size_t n = t->by_bytes ? kn_utf8_write(kn_byte_letter((unsigned char)i), text)
                               : (size_t)snprintf(text, sizeof text, "<0x%02X>", i);
        int64_t name = kn_strings_find(&t->names, text, n);
        t->byte[i] = name < 0 ? -1 : (int32_t)t->names.list[name].value;
    }
    for (int64_t i = 0; !t->by_bytes && i < t->names.count; i++) {
        const struct kn_string *s = &t->names.list[i];
        uint32_t code;
        if (s->length == 0 || kn_utf8_read(t->names.bytes + s->at, s->length, &code) != s->length)
            continue;
        uint64_t *id = kn_pairs_at(&t->character, code);
        if (!id)
            return false;
        *id = (uint64_t)s->value;
    }
    return true;
}

/* The halves of a merge: ["a", "b"] or "a b". */
static bool halves(const json_t *merge, const char *half[2], size_t length[2])
{
    const char *both = json_string_value(merge), *space = both ? strchr(both, ' ') : NULL;
    half[0] = both ? both : json_string_value(json_array_get(merge, 0));
    half[1] = both ? (space ? space + 1 : NULL) : json_string_value(json_array_get(merge, 1));
    if (!half[0] || !half[1] || (!both && json_array_size(merge) != 2))
        return false;
    length[0] = both ? (size_t)(space - both) : strlen(half[0]);
    length[1] = strlen(half[1]);
    return length[0] > 0 && length[1] > 0 && (!both || !strchr(half[1], ' '));
}

/* Merge i; both: memory for its text. */
static bool read_merge(kn_json_reader *r, size_t i, const json_t *merge, kn_bytes *both)
{
    kn_tokenizer *t = r->t;
    const char *half[2];
    size_t length[2];
    both->size = 0;
    if (!halves(merge, half, length))
        return kn_fail("%s: merge %zu isn't of two tokens", r->where, i);
    if (!kn_bytes_append(both, half[0], length[0]) || !kn_bytes_append(both, half[1], length[1]))
        return false;
    const int64_t a = kn_strings_find(&t->names, half[0], length[0]),
                  b = kn_strings_find(&t->names, half[1], length[1]),
                  c = kn_strings_find(&t->names, both->at, length[0] + length[1]);
    if (a < 0 || b < 0 || c < 0)
        return kn_fail("%s: merge %zu makes \"%s\" of \"%.*s\" and \"%.*s\", and the vocabulary "
                       "lacks one of the three",
                       r->where, i, both->at, (int)length[0], half[0], (int)length[1], half[1]);
    uint64_t *value = kn_pairs_at(&t->merge, (uint64_t)t->names.list[a].value << 32 |
                                                 (uint64_t)t->names.list[b].value);
    if (value)
        *value = (uint64_t)i << 32 | (uint64_t)t->names.list[c].value;
    return value != NULL;
}

static bool read_merges(kn_json_reader *r, const json_t *list)
{
    kn_bytes both = { 0 };
    bool ok = true;
    if (!json_is_array(list) || json_array_size(list) >= KN_MOST_IDS)
        return kn_fail("%s: its model has no \"merges\", a list of at most %d", r->where,
                       KN_MOST_IDS - 1);
    for (size_t i = 0; ok && i < json_array_size(list); i++)
        ok = read_merge(r, i, json_array_get(list, i), &both);
    kn_host_free(both.at);
    return ok;
}

static bool read_model(kn_json_reader *r, const json_t *m)
{
    kn_tokenizer *t = r->t;
    static const char *const must_be_empty[] = { "continuing_subword_prefix",
                                                 "end_of_word_suffix" };
    if (!json_is_object(m))
        return kn_fail("%s is no tokenizer.json: it has no \"model\"", r->where);
    if (*text_in(m, "type") && !is(m, "BPE"))
        return unread(r, "model", m);
    for (int i = 0; i < 2; i++)
        if (*text_in(m, must_be_empty[i]))
            return kn_fail("%s: its model has a \"%s\", which this library doesn't read", r->where,
                           must_be_empty[i]);
    if (json_number_value(json_object_get(m, "dropout")) > 0)
        return kn_fail("%s: its model drops merges at random (\"dropout\"), which this library "
                       "doesn't do",
                       r->where);
    t->whole_first = true_in(m, "ignore_merges", false);
    t->joins_unknown = true_in(m, "fuse_unk", false);
    return read_vocab(r, json_object_get(m, "vocab"));
}

static bool read_rest_of_model(kn_json_reader *r, const json_t *m)
{
    kn_tokenizer *t = r->t;
    const char *unknown = text_in(m, "unk_token");
    if (!read_letters(r) || !read_merges(r, json_object_get(m, "merges")))
        return false;
    for (int i = 0; i < 256 && !t->by_bytes; i++)
        if (!true_in(m, "byte_fallback", false))
            t->byte[i] = -1;
    t->unknown = -1;
    if (*unknown) {
        const int64_t name = kn_strings_find(&t->names, unknown, strlen(unknown));
        if (name < 0)
            return kn_fail("%s: its unknown token \"%.60s\" isn't in the vocabulary", r->where,
                           unknown);
        t->unknown = t->names.list[name].value;
    }
    /* A mark stands at the beginning of a token only: no merge goes over the end of a word. */
    t->cuts_at_spaces = !t->by_bytes;
    for (int64_t i = 0; t->cuts_at_spaces && i < t->names.count; i++) {
        static const char mark[] = "\xe2\x96\x81";
        const char *s = kn_strings_text(&t->names, i);
        while (strncmp(s, mark, 3) == 0)
            s += 3;
        t->cuts_at_spaces = !strstr(s, mark);
    }
    return true;
}

/* The special tokens in front of the one text ("single") of a template. */
static bool read_post_processor(kn_json_reader *r, const json_t *p)
{
    size_t i;
    json_t *item;
    kn_tokenizer *t = r->t;
    if (!is(p, "TemplateProcessing"))
        return true; /* what others do is of pairs of texts, or of offsets */
    json_array_foreach(json_object_get(p, "single"), i, item)
    {
        const char *token = text_in(json_object_get(item, "SpecialToken"), "id");
        const int64_t id = *token ? kn_tokenizer_id(t, token) : -1;
        if (json_object_get(item, "Sequence"))
            break;
        if (id < 0 || t->prefixes == KN_MOST_STEPS)
            return kn_fail("%s: its post_processor puts \"%.60s\" before a text, which is no token",
                           r->where, token);
        t->prefix[t->prefixes++] = id;
    }
    return true;
}

static const char *kind_of(const kn_tokenizer *t)
{
    bool is_byte = t->by_bytes && t->vocab == 256;
    for (int i = 0; i < 256; i++)
        is_byte = is_byte && t->byte[i] == i;
    return t->merge.count > 0 ? "bpe" : is_byte ? "byte" : t->by_bytes ? "bpe" : "char";
}

kn_tokenizer *kn_tokenizer_of_json(json_t *root, const char *text, size_t size, const char *where)
{
    kn_tokenizer *t = kn_host_calloc(1, sizeof *t);
    kn_json_reader r = { t, where };
    const json_t *model = json_object_get(root, "model"),
                 *added = json_object_get(root, "added_tokens"),
                 *pre = json_object_get(root, "pre_tokenizer");
    if (t && read_model(&r, model) && read_added(&r, added) &&
        kn_json_parts(&r, json_object_get(root, "normalizer"), "normalizers", read_normalizer) &&
        (t->normal_changes = t->changes, true) && sort_added(&r, added) &&
        kn_json_parts(&r, pre, "pretokenizers", read_pre_tokenizer) &&
        kn_json_read_texts(&r, json_object_get(root, "decoder")) && read_rest_of_model(&r, model) &&
        kn_json_parts(&r, json_object_get(root, "post_processor"), "processors",
                      read_post_processor) &&
        (t->json = kn_host_alloc(size + 1))) {
        memcpy(t->json, text, size);
        t->json[size] = 0;
        t->json_size = size;
        t->vocab = r.ids;
        t->kind = kind_of(t);
        return t;
    }
    kn_tokenizer_free(t);
    return NULL;
}
