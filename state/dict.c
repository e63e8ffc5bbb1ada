/* state/dict.c: a dictionary of tensors, numbers and texts by name. */
#include "kernels/error_internal.h"
#include "kernels/kernels.h"
#include "kernels/memory_internal.h"
#include "state/dict_internal.h"
#include "tensor/tensor_internal.h"

#include <stdio.h>
#include <string.h>

/* ---- names ----------------------------------------------------------------------------------- */

kn_state_item *kn_state_find(const kn_state *s, const char *name)
{
    const int at = kn_name_table_find(&s->table, s->list, sizeof *s->list, name);
    return at >= 0 ? &s->list[at] : NULL;
}

char *kn_state_join(const char *prefix, const char *name, const char *after)
{
    prefix = prefix ? prefix : "";
    size_t n = strlen(prefix) + strlen(name) + (after ? strlen(after) : 0) + 2;
    char *joined = kn_host_alloc(n);
    if (joined)
        snprintf(joined, n, "%s%s%s%s", prefix, name, after ? "." : "", after ? after : "");
    return joined;
}

const char *kn_state_below(const char *name, const char *prefix)
{
    const size_t n = prefix ? strlen(prefix) : 0;
    return n == 0 || strncmp(name, prefix, n) == 0 ? name + n : NULL;
}

/* ---- items ----------------------------------------------------------------------------------- */

/* Its name stays. */
static void empty(kn_state_item *i)
{
    kn_tensor_free(i->tensor);
    kn_pieces_close(i->files);
    kn_host_free(i->text);
    *i = (kn_state_item){ .name = i->name };
}

kn_state_item *kn_state_add(kn_state *s, const char *prefix, const char *name)
{
    char *joined = kn_state_join(prefix, name, NULL);
    kn_state_item *there = joined ? kn_state_find(s, joined) : NULL;
    if (there)
        empty(there);
    if (there || !joined ||
        !kn_name_table_grow(&s->table, s->list, sizeof *s->list, s->count, s->count + 1) ||
        !kn_host_grow(&s->list, &s->room, s->count + 1, sizeof *s->list)) {
        kn_host_free(joined);
        return there;
    }
    s->list[s->count] = (kn_state_item){ .name = joined };
    kn_name_table_add(&s->table, s->list, sizeof *s->list, s->count++);
    return &s->list[s->count - 1];
}

kn_state_item *kn_state_add_tensor(kn_state *s, const char *prefix, const char *name,
                                   kn_dtype dtype, int ndim, const int64_t *shape, kn_tensor *t)
{
    kn_state_item *i = kn_state_add(s, prefix, name);
    if (!i) {
        kn_tensor_free(t);
        return NULL;
    }
    *i = (kn_state_item){
        .name = i->name, .type = KN_STATE_TENSOR, .tensor = t, .dtype = dtype, .ndim = ndim
    };
    memcpy(i->shape, shape, (size_t)ndim * sizeof *shape);
    return i;
}

bool kn_state_add_value(kn_state *s, const char *prefix, const char *name, const char *after,
                        kn_state_value type, int64_t whole, double number)
{
    char *joined = kn_state_join(prefix, name, after);
    bool ok = joined && (type == KN_STATE_INT ? kn_state_set_int(s, joined, whole)
                                              : kn_state_set_number(s, joined, number));
    kn_host_free(joined);
    return ok;
}

kn_state_item *kn_state_find_joined(const kn_state *s, const char *prefix, const char *name,
                                    const char *after)
{
    char *joined = kn_state_join(prefix, name, after);
    kn_state_item *i = joined ? kn_state_find(s, joined) : NULL;
    kn_host_free(joined);
    return i;
}

kn_tensor *kn_state_tensor_new(kn_dtype dtype, int ndim, const int64_t *shape)
{
    return kn_tensor_new(dtype, KN_CPU, NULL, KN_MEM_STATE, ndim, shape, NULL, false);
}

bool kn_state_convert(void *to, kn_dtype to_dtype, const void *from, kn_dtype from_dtype, int64_t n)
{
    kn_stream *s = kn_compute_stream(KN_CPU);
    return kn_copy_run(s, to, to_dtype, from, from_dtype, n) && kn_stream_sync(s);
}

kn_state *kn_state_new(void)
{
    return kn_ok() ? kn_host_calloc(1, sizeof(kn_state)) : NULL;
}

void kn_state_free(kn_state *s)
{
    for (int i = 0; s && i < s->count; i++) {
        empty(&s->list[i]);
        kn_host_free(s->list[i].name);
    }
    if (s) {
        kn_host_free(s->list);
        kn_host_free(s->table.slot);
    }
    kn_host_free(s);
}

int kn_state_count(const kn_state *s)
{
    return kn_given(s, "kn_state_count", "the state") ? s->count : 0;
}

const char *kn_state_name(const kn_state *s, int i)
{
    if (!kn_given(s, "kn_state_name", "the state"))
        return NULL;
    if (i >= 0 && i < s->count)
        return s->list[i].name;
    return kn_fail_null("kn_state_name: number %d doesn't exist; the state has %d names", i,
                        s->count);
}

bool kn_state_has(const kn_state *s, const char *name)
{
    return kn_given(s, "kn_state_has", "the state") && kn_given(name, "kn_state_has", "the name") &&
           kn_state_find(s, name);
}

kn_state_value kn_state_type(const kn_state *s, const char *name)
{
    static const char what[] = "kn_state_type";
    const kn_state_item *i = kn_given(s, what, "the state") && kn_given(name, what, "the name")
                                 ? kn_state_find(s, name)
                                 : NULL;
    return i ? i->type : KN_STATE_NOTHING;
}

/* ---- values ---------------------------------------------------------------------------------- */

static const char *const types[] = { "nothing", "a tensor", "a whole number", "a number",
                                     "a text" };

/* The item of a value to set. */
static kn_state_item *to_set(kn_state *s, const char *name, const char *what, kn_state_value type)
{
    if (!kn_ok() || !kn_given(s, what, "the state") || !kn_given_path(name, what, "the name"))
        return NULL;
    kn_state_item *i = kn_state_add(s, NULL, name);
    if (i)
        i->type = type;
    return i;
}

bool kn_state_set_int(kn_state *s, const char *name, int64_t value)
{
    kn_state_item *i = to_set(s, name, "kn_state_set_int", KN_STATE_INT);
    if (i)
        i->whole_number = value;
    return i != NULL;
}

bool kn_state_set_number(kn_state *s, const char *name, double value)
{
    kn_state_item *i = to_set(s, name, "kn_state_set_number", KN_STATE_NUMBER);
    if (i)
        i->number = value;
    return i != NULL;
}

bool kn_state_set_text(kn_state *s, const char *name, const char *value)
{
    char *copy = kn_given(value, "kn_state_set_text", "the text") ? kn_host_strdup(value) : NULL;
    kn_state_item *i = copy ? to_set(s, name, "kn_state_set_text", KN_STATE_TEXT) : NULL;
    if (i)
        i->text = copy;
    else
        kn_host_free(copy);
    return i != NULL;
}

bool kn_state_set_tensor(kn_state *s, const char *name, const kn_tensor *value)
{
    static const char what[] = "kn_state_set_tensor";
    if (!kn_ok() || !kn_given(s, what, "the state") || !kn_given_path(name, what, "the name") ||
        !kn_check(value, what))
        return false;
    const kn_dtype t = kn_dtype_of(value);
    kn_tensor *copy = kn_state_tensor_new(t, kn_ndim(value), kn_shape(value));
    bool ok = copy &&
              kn_to_host(value, kn_array_of(copy).data, (size_t)kn_numel(value) * kn_dtype_size(t));
    if (ok)
        return kn_state_add_tensor(s, NULL, name, t, kn_ndim(copy), kn_shape(copy), copy) != NULL;
    kn_tensor_free(copy);
    return false;
}

/* NULL with an error where there is no such value. */
static const kn_state_item *to_read(const kn_state *s, const char *name, const char *what,
                                    kn_state_value type)
{
    if (!kn_given(s, what, "the state") || !kn_given(name, what, "the name"))
        return NULL;
    const kn_state_item *i = kn_state_find(s, name);
    if (i && (i->type == type || (type == KN_STATE_NUMBER && i->type == KN_STATE_INT)))
        return i;
    if (i)
        kn_fail("%s: '%s' is %s, not %s", what, name, types[i->type], types[type]);
    else
        kn_fail("%s: the state has no '%s'", what, name);
    return NULL;
}

int64_t kn_state_int(const kn_state *s, const char *name)
{
    const kn_state_item *i = to_read(s, name, "kn_state_int", KN_STATE_INT);
    return i ? i->whole_number : 0;
}

double kn_state_number(const kn_state *s, const char *name)
{
    const kn_state_item *i = to_read(s, name, "kn_state_number", KN_STATE_NUMBER);
    return !i ? 0 : i->type == KN_STATE_INT ? (double)i->whole_number : i->number;
}

const char *kn_state_text(const kn_state *s, const char *name)
{
    const kn_state_item *i = to_read(s, name, "kn_state_text", KN_STATE_TEXT);
    return i ? i->text : NULL;
}

kn_tensor *kn_state_tensor(const kn_state *s, const char *name)
{
    const kn_state_item *i = to_read(s, name, "kn_state_tensor", KN_STATE_TENSOR);
    return i ? kn_state_item_tensor((kn_state_item *)i) : NULL;
}

kn_tensor *kn_state_item_tensor(kn_state_item *i)
{
    if (i->tensor || !i->files)
        return i->tensor;
    kn_tensor *t = kn_state_tensor_new(i->dtype, i->ndim, i->shape);
    const kn_interval all = kn_pieces_tensor(i->files, i->piece)->part;
    if (!t || (kn_numel(t) > 0 && !kn_pieces_read(i->files, i->piece, all, kn_array_of(t).data))) {
        kn_tensor_free(t);
        return NULL;
    }
    return i->tensor = t;
}

bool kn_state_add_pieces(kn_state *s, kn_pieces *p)
{
    for (int k = 0; p && k < kn_pieces_count(p); k++) {
        const kn_piece *piece = kn_pieces_tensor(p, k);
        kn_state_item *i = kn_state_add_tensor(s, NULL, piece->name, piece->dtype, piece->ndim,
                                               piece->shape, NULL);
        if (!i)
            return false;
        i->files = kn_pieces_ref(p);
        i->piece = k;
    }
    return true;
}

bool kn_state_remove(kn_state *s, const char *name)
{
    static const char what[] = "kn_state_remove";
    if (!kn_given(s, what, "the state") || !kn_given(name, what, "the name"))
        return false;
    kn_state_item *i = kn_state_find(s, name);
    if (!i)
        return kn_fail("%s: the state has no '%s'", what, name);
    empty(i);
    kn_host_free(i->name);
    memmove(i, i + 1, (size_t)(&s->list[s->count] - (i + 1)) * sizeof *i);
    s->count--;
    kn_name_table_fill(&s->table, s->list, sizeof *s->list, s->count);
    return true;
}

/* ---- merging --------------------------------------------------------------------------------- */

static bool same_value(const kn_state_item *a, const kn_state_item *b)
{
    if (a->type != b->type)
        return false;
    switch (a->type) {
    case KN_STATE_INT:
        return a->whole_number == b->whole_number;
    case KN_STATE_NUMBER:
        return memcmp(&a->number, &b->number, sizeof a->number) == 0;
    case KN_STATE_TEXT:
        return strcmp(a->text, b->text) == 0;
    default:
        return false;
    }
}

bool kn_state_merge(kn_state *s, kn_state *other)
{
    static const char what[] = "kn_state_merge";
    if (!kn_ok() || !kn_given(s, what, "the state") || !kn_given(other, what, "the other state"))
        return false;
    if (s == other)
        return kn_fail("%s: both states are the same", what);
    for (int i = 0; i < other->count; i++) {
        const kn_state_item *there = kn_state_find(s, other->list[i].name);
        if (there && !same_value(there, &other->list[i]))
            return kn_fail("%s: both states have '%s', with other values; take one of them with "
                           "another .prefix",
                           what, there->name);
    }
    const int count = s->count + other->count;
    if (!kn_name_table_grow(&s->table, s->list, sizeof *s->list, s->count, count) ||
        !kn_host_grow(&s->list, &s->room, count, sizeof *s->list))
        return false;
    for (int i = 0; i < other->count; i++) {
        kn_state_item *from = &other->list[i];
        if (kn_state_find(s, from->name))
            continue;
        s->list[s->count] = *from;
        kn_name_table_add(&s->table, s->list, sizeof *s->list, s->count++);
        *from = (kn_state_item){ 0 };
    }
    kn_state_free(other);
    return true;
}
