/* models/tokens/texts.c: the bytes that each id of a tokenizer stands for: its token's spelling, of
 * which the file's decoder says how it is meant. */
#include "kernels/memory_internal.h"
#include "models/tokens/json.h"

/* ---- ids to text ----------------------------------------------------------------------------- */

typedef struct decoding {
    const char *from[KN_MOST_STEPS], *to[KN_MOST_STEPS];
    int replaces;
    bool letters, bytes, drops_space;
} decoding;

static bool read_decoder(const kn_json_reader *r, const json_t *d, decoding *out)
{
    size_t i;
    json_t *member;
    const char *from = text_in(json_object_get(d, "pattern"), "String"),
               *to = text_in(d, "content");
    if (!d || json_is_null(d) || is(d, "Fuse"))
        return true;
    if (is(d, "Sequence")) {
        json_array_foreach(json_object_get(d, "decoders"), i, member)
        {
            if (!read_decoder(r, member, out))
                return false;
        }
        return true;
    }
    if (is(d, "ByteLevel"))
        return out->letters = true;
    if (is(d, "ByteFallback"))
        return out->bytes = true;
    if (is(d, "Strip") && strcmp(to, " ") == 0 &&
        json_integer_value(json_object_get(d, "start")) <= 1 &&
        json_integer_value(json_object_get(d, "stop")) == 0) {
        out->drops_space = json_integer_value(json_object_get(d, "start")) == 1;
        return true;
    }
    if (is(d, "Metaspace")) {
        from = text_in(d, "replacement"), to = " ";
        out->drops_space = strcmp(text_in(d, "prepend_scheme"), "never") != 0 &&
                           true_in(d, "add_prefix_space", true);
    } else if (!is(d, "Replace"))
        return unread(r, "decoder", d);
    if (!*from || out->replaces == KN_MOST_STEPS)
        return unread(r, "decoder", d);
    out->from[out->replaces] = from;
    out->to[out->replaces++] = to;
    return true;
}

/* The byte of "<0xAB>"; -1. */
static int byte_token(const char *text, size_t length)
{
    unsigned byte;
    char end;
    return length == 6 && sscanf(text, "<0x%2X%c", &byte, &end) == 2 && end == '>' ? (int)byte : -1;
}

/* The bytes of a token, to `to`, which has room for `room` of them: how many. */
static size_t decode(const decoding *d, const char *text, size_t length, bool added, char *to,
                     size_t room)
{
    size_t n = 0;
    const int byte = d->bytes ? byte_token(text, length) : -1;
    if (byte >= 0) {
        *to = (char)byte;
        return 1;
    }
    for (size_t i = 0, read; d->letters && !added; i += read) { /* GPT-2's letters, or as it is */
        uint32_t code;
        if (i == length)
            return n;
        read = kn_utf8_read(text + i, length - i, &code);
        if (read == 0 || kn_letter_byte(code) < 0)
            break;
        to[n++] = (char)kn_letter_byte(code);
    }
    n = 0;
    for (size_t i = 0; i < length && n < room;) {
        int k = 0;
        while (k < d->replaces && strncmp(text + i, d->from[k], strlen(d->from[k])) != 0)
            k++;
        const char *from = k < d->replaces ? d->to[k] : text + i;
        const size_t step = k < d->replaces ? strlen(from) : 1;
        for (size_t j = 0; j < step && n < room; j++)
            to[n++] = from[j];
        i += k < d->replaces ? strlen(d->from[k]) : 1;
    }
    return n;
}

bool kn_json_read_texts(kn_json_reader *r, const json_t *decoder)
{
    kn_tokenizer *t = r->t;
    decoding d = { 0 };
    size_t grows = 1, used = 0;
    if (!read_decoder(r, decoder, &d))
        return false;
    for (int i = 0; i < d.replaces; i++)
        grows *= strlen(d.to[i]) > 1 ? strlen(d.to[i]) : 1;
    if (grows > 64)
        return kn_fail("%s: its decoder makes texts %zu times as long", r->where, grows);
    if (r->ids > 2 * t->names.count + 1024)
        return kn_fail("%s: %lld tokens have ids up to %lld", r->where, (long long)t->names.count,
                       (long long)r->ids - 1);
    int64_t *name = kn_host_alloc((size_t)r->ids * sizeof *name);
    bool *added = kn_host_calloc((size_t)r->ids, sizeof *added);
    t->at = kn_host_calloc((size_t)r->ids + 1, sizeof *t->at);
    t->bytes = kn_host_alloc((size_t)t->names.bytes_used * grows + 1);
    bool ok = name && added && t->at && t->bytes;
    for (int64_t i = 0; ok && i < t->addeds; i++)
        added[t->added[i].id] = true;
    for (int64_t id = 0; ok && id < r->ids; id++)
        name[id] = -1;
    for (int64_t i = 0; ok && i < t->names.count; i++) {
        int64_t *of = &name[t->names.list[i].value];
        if (*of >= 0)
            ok = kn_fail("%s: the tokens \"%.60s\" and \"%.60s\" have one id, %lld", r->where,
                         kn_strings_text(&t->names, *of), kn_strings_text(&t->names, i),
                         (long long)t->names.list[i].value);
        *of = i;
    }
    for (int64_t id = 0; ok && id < r->ids; id++) {
        if (name[id] >= 0) {
            const struct kn_string *s = &t->names.list[name[id]];
            used += decode(&d, t->names.bytes + s->at, s->length, added[id], t->bytes + used,
                           s->length * grows);
        }
        t->at[id + 1] = used;
    }
    kn_host_free(name);
    kn_host_free(added);
    t->drops_space = d.drops_space;
    return ok;
}
