/* state/share.c: a state's names, shapes and values as JSON: in a file's metadata, and on their way
 * from rank 0 to the others. */
#include "comm/comm_internal.h"
#include "kernels/error_internal.h"
#include "state/dict_internal.h"
#include "tensor/json.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A whole number as such, a text as such, another number as {"number": "0.1"}, which may be inf. */
static json_t *json_of(const kn_state_item *i)
{
    char text[40];
    if (i->type == KN_STATE_INT)
        return json_integer(i->whole_number);
    if (i->type == KN_STATE_TEXT)
        return json_string(i->text);
    snprintf(text, sizeof text, "%.17g", i->number);
    return json_pack("{s:s}", "number", text);
}

static bool value_from(kn_state_item *i, const json_t *j)
{
    const char *number = json_string_value(json_object_get(j, "number"));
    char *end = NULL;
    if (json_is_integer(j)) {
        i->type = KN_STATE_INT;
        i->whole_number = json_integer_value(j);
        return true;
    }
    if (number) {
        i->type = KN_STATE_NUMBER;
        i->number = strtod(number, &end);
        return end > number && !*end;
    }
    i->type = KN_STATE_TEXT;
    i->text = json_is_string(j) ? kn_host_strdup(json_string_value(j)) : NULL;
    return i->text != NULL;
}

static bool no_json(const kn_state_item *i)
{
    return kn_ok() && kn_fail("state: '%s' can't be written as JSON: it isn't UTF-8, or memory is "
                              "out",
                              i->name);
}

json_t *kn_state_values_json(const kn_state *s)
{
    json_t *all = json_object();
    bool ok = all || kn_fail_memory("the state's values");
    for (int i = 0; ok && i < s->count; i++)
        if (s->list[i].type != KN_STATE_TENSOR)
            ok = json_object_set_new(all, s->list[i].name, json_of(&s->list[i])) == 0 ||
                 no_json(&s->list[i]);
    if (ok)
        return all;
    json_decref(all);
    return NULL;
}

char *kn_state_values_text(const kn_state *s)
{
    json_t *all = kn_state_values_json(s);
    return all ? kn_json_copy(all, JSON_COMPACT, "the state's values") : NULL;
}

bool kn_state_values_add(kn_state *s, json_t *object, const char *where)
{
    const char *name;
    json_t *value;
    json_object_foreach(object, name, value)
    {
        if (kn_state_find(s, name))
            return kn_fail("%s: '%s' is a tensor and a value", where, name);
        kn_state_item *i = kn_state_add(s, NULL, name);
        if (!i || !value_from(i, value))
            return kn_ok() && kn_fail("%s: a value in it is no number or text", where);
    }
    return true;
}

bool kn_state_values_parse(kn_state *s, const char *text, size_t size, const char *where)
{
    json_error_t error;
    json_t *all = kn_json_parse(text, size, JSON_REJECT_DUPLICATES, where, &error);
    bool ok = json_is_object(all) || kn_fail("%s: its values are no JSON object (%s)", where,
                                             all ? "another" : error.text);
    ok = ok && kn_state_values_add(s, all, where);
    json_decref(all);
    return ok;
}

/* ---- a rank's names -------------------------------------------------------------------------- */

static json_t *header_of(const kn_state_item *i)
{
    if (i->type != KN_STATE_TENSOR)
        return json_pack("[s,o]", i->name, json_of(i));
    return json_pack("[s,i,o]", i->name, (int)i->dtype, kn_json_sizes(i->shape, i->ndim));
}

static char *header_text(const kn_state *s)
{
    json_t *all = json_array();
    bool ok = all || kn_fail_memory("the state's names");
    for (int i = 0; ok && i < s->count; i++) {
        const kn_state_item *item = &s->list[i];
        ok = json_array_append_new(all, header_of(item)) == 0 || no_json(item);
    }
    char *text = ok ? kn_json_text(all, JSON_COMPACT, "the state's names") : NULL;
    json_decref(all);
    return text;
}

static bool add_header(kn_state *s, const json_t *j)
{
    const char *name = json_string_value(json_array_get(j, 0));
    const json_t *second = json_array_get(j, 1), *sizes = json_array_get(j, 2);
    const int ndim = (int)json_array_size(sizes);
    int64_t shape[KN_MAX_DIMS] = { 0 };
    if (!sizes) {
        kn_state_item *i = name ? kn_state_add(s, NULL, name) : NULL;
        return i && value_from(i, second);
    }
    for (int d = 0; d < ndim && d < KN_MAX_DIMS; d++)
        shape[d] = json_integer_value(json_array_get(sizes, (size_t)d));
    return name && kn_state_add_tensor(s, NULL, name, (kn_dtype)json_integer_value(second), ndim,
                                       shape, NULL);
}

/* text: a rank's own bytes, which it trusts. */
static kn_state *parse_header(const char *text, size_t size)
{
    json_error_t error;
    json_t *all = kn_json_parse(text, size, 0, "a state", &error);
    kn_state *s = kn_state_new();
    bool ok = s && (all || kn_fail_memory("the state's names"));
    for (size_t i = 0; ok && i < json_array_size(all); i++)
        ok = add_header(s, json_array_get(all, i)) ||
             (kn_ok() && kn_fail_memory("the state's names"));
    json_decref(all);
    if (ok)
        return s;
    kn_state_free(s);
    return NULL;
}

kn_state *kn_state_header(const kn_state *s, kn_comm *comm, int root)
{
    char *text = kn_rank(comm) == root ? header_text(s) : NULL;
    size_t size = text ? strlen(text) : 0;
    char *all = kn_ok() ? kn_broadcast_bytes(comm, text, &size, root) : NULL;
    kn_host_free(text);
    kn_state *header = all ? parse_header(all, size) : NULL;
    kn_host_free(all);
    return header;
}
