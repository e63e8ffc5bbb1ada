/* models/tokens/texts.c: the bytes that each id of a tokenizer stands for: its token's spelling, of
 * which the file's decoder says how it is meant. */
#include "kernels/memory.h"
#include "models/tokens/json.h"

/* ---- ids to text ----------------------------------------------------------------------------- */

typedef struct kn_decoding {
    kn_tokenizer replaces; /* its changes */
    bool letters, bytes, drops_space;
    int behind; /* the part that came last */
} decoding;

/* In the order of a Sequence: each does something else behind a later one. */
enum { REPLACES = 1, BYTES, FUSE, STRIP };

static bool comes_in_order(const kn_json_reader *r, int part, const json_t *d)
{
    decoding *out = r->decoding;
    if (part < out->behind || (part == STRIP && out->behind != FUSE))
        return kn_fail("%s: its decoder has %s in a place where this library doesn't read it: the "
                       "order is Replace or Metaspace, ByteFallback or ByteLevel, Fuse, Strip, and "
                       "Strip follows Fuse",
                       r->where, text_in(d, "type"));
    out->behind = part;
    return true;
}

static bool add_replace(const kn_json_reader *r, const json_t *d, const char *from, const char *to)
{
    kn_tokenizer *t = &r->decoding->replaces;
    if (!*from || strlen(to) > 64 || t->changes == KN_MOST_STEPS)
        return unread(r, "decoder", d);
    kn_change *c = &t->change[t->changes++];
    *c = (kn_change){ .kind = KN_CHANGE_REPLACE };
    return (c->from = kn_host_strdup(from)) && (c->to = kn_host_strdup(to));
}

static bool read_decoder(kn_json_reader *r, const json_t *d)
{
    decoding *out = r->decoding;
    const char *from = text_in(json_object_get(d, "pattern"), "String"),
               *to = text_in(d, "content");
    if (is(d, "Fuse"))
        return comes_in_order(r, FUSE, d);
    if (is(d, "ByteLevel"))
        return out->letters = comes_in_order(r, BYTES, d);
    if (is(d, "ByteFallback"))
        return out->bytes = comes_in_order(r, BYTES, d);
    if (is(d, "Strip") && strcmp(to, " ") == 0 &&
        json_integer_value(json_object_get(d, "start")) <= 1 &&
        json_integer_value(json_object_get(d, "stop")) == 0) {
        out->drops_space = json_integer_value(json_object_get(d, "start")) == 1;
        return comes_in_order(r, STRIP, d);
    }
    if (is(d, "Metaspace")) {
        from = text_in(d, "replacement"), to = " ";
        out->drops_space = strcmp(text_in(d, "prepend_scheme"), "never") != 0 &&
                           true_in(d, "add_prefix_space", true);
    } else if (!is(d, "Replace"))
        return unread(r, "decoder", d);
    return comes_in_order(r, REPLACES, d) && add_replace(r, d, from, to);
}

/* The byte of "<0xAB>"; -1. */
static int byte_token(const char *text, size_t length)
{
    unsigned byte;
    char end;
    return length == 6 && sscanf(text, "<0x%2X%c", &byte, &end) == 2 && end == '>' ? (int)byte : -1;
}

/* Appends the bytes of a token. */
static bool decode(const decoding *d, const char *text, size_t length, bool added, kn_bytes *to)
{
    const int64_t before = to->size;
    char *own = NULL;
    bool ok = true;
    if (d->replaces.changes > 0 &&
        !(text = own =
              kn_change_text(&d->replaces, 0, d->replaces.changes, text, length, true, &length)))
        return false;
    const int byte = d->bytes ? byte_token(text, length) : -1;
    const char one = (char)byte;
    if (byte >= 0)
        text = &one, length = 1;
    size_t i = 0;
    for (uint32_t code; ok && d->letters && !added && i < length;) { /* GPT-2's letters */
        const size_t read = kn_utf8_read(text + i, length - i, &code);
        if (read == 0 || kn_letter_byte(code) < 0)
            break;
        ok = kn_bytes_append(to, (const char[]){ (char)kn_letter_byte(code) }, 1);
        i += read;
    }
    if (i < length) { /* or as it is */
        to->size = before;
        ok = ok && kn_bytes_append(to, text, length);
    }
    kn_host_free(own);
    return ok;
}

/* The names by their ids; -1: none. */
static bool read_names(const kn_json_reader *r, int64_t *name)
{
    const kn_strings *names = &r->t->names;
    for (int64_t id = 0; id < r->ids; id++)
        name[id] = -1;
    for (int64_t i = 0; i < names->count; i++) {
        int64_t *of = &name[names->list[i].value];
        if (*of >= 0)
            return kn_fail("%s: the tokens \"%.60s\" and \"%.60s\" have one id, %lld", r->where,
                           kn_strings_text(names, *of), kn_strings_text(names, i),
                           (long long)names->list[i].value);
        *of = i;
    }
    return true;
}

bool kn_json_read_texts(kn_json_reader *r, const json_t *decoder)
{
    kn_tokenizer *t = r->t;
    decoding d = { 0 };
    kn_bytes all = { 0 };
    if (r->ids > 2 * t->names.count + 1024)
        return kn_fail("%s: %lld tokens have ids up to %lld", r->where, (long long)t->names.count,
                       (long long)r->ids - 1);
    int64_t *name = kn_host_alloc((size_t)r->ids * sizeof *name);
    t->added_id = kn_host_calloc((size_t)r->ids, 1);
    t->at = kn_host_calloc((size_t)r->ids + 1, sizeof *t->at);
    r->decoding = &d;
    bool ok = name && t->added_id && t->at && kn_json_parts(r, decoder, "decoders", read_decoder) &&
              read_names(r, name) && kn_bytes_append(&all, "", 0);
    for (int64_t i = 0; ok && i < t->addeds; i++)
        t->added_id[t->added[i].id] = t->added[i].special ? 2 : 1;
    for (int64_t id = 0; ok && id < r->ids; id++) {
        const struct kn_string *s = name[id] >= 0 ? &t->names.list[name[id]] : NULL;
        ok = !s || decode(&d, t->names.bytes + s->at, s->length, t->added_id[id] > 0, &all);
        if (all.size > 64 * t->names.bytes_used)
            ok = kn_fail("%s: its decoder makes texts more than 64 times as long", r->where);
        t->at[id + 1] = (size_t)all.size;
    }
    for (int i = 0; i < d.replaces.changes; i++) {
        kn_host_free(d.replaces.change[i].from);
        kn_host_free(d.replaces.change[i].to);
    }
    kn_host_free(name);
    t->bytes = all.at;
    t->drops_space = d.drops_space;
    return ok;
}
