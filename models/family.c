/* models/family.c: what follows from the table of a family of models: its configurations as fields,
 * as JSON and in a checkpoint, its presets and choices. */
#include "models/family.h"
#include "kernels/error_internal.h"
#include "models/options_internal.h"
#include "tensor/json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- families -------------------------------------------------------------------------------- */

extern const kn_family *const __start_kn_families[] __attribute__((visibility("hidden")));
extern const kn_family *const __stop_kn_families[] __attribute__((visibility("hidden")));

bool kn_family_makes(const kn_family *f, const kn_family *other)
{
    return f && strcmp(f->prefix, other->prefix) == 0;
}

const kn_family *kn_family_at(kn_family_kind kind, int i)
{
    for (const kn_family *const *f = __start_kn_families; f < __stop_kn_families; f++)
        if ((*f)->kind == kind && i-- == 0)
            return *f;
    return NULL;
}

const kn_family *kn_family_typed(kn_family_kind kind, const char *type)
{
    const kn_family *f = NULL;
    for (int i = 0; type && (f = kn_family_at(kind, i)) && strcmp(type, f->type) != 0 &&
                    !kn_is_listed(f->also, type);
         i++)
        ;
    return f;
}

static const kn_preset *find_preset(const kn_family *f, const char *name)
{
    for (const kn_preset *p = f->preset; name && p->name; p++)
        if (strcmp(p->name, name) == 0)
            return p;
    return NULL;
}

const kn_family *kn_family_of_choice(kn_family_kind kind, const char *choice)
{
    const kn_family *f;
    for (int i = 0; (f = kn_family_at(kind, i)); i++)
        if (find_preset(f, choice) || (f->custom && strcmp(f->custom, choice) == 0))
            break;
    return f;
}

/* Puts a word behind those of a list; what has no room is left out. */
static void put_word(char *list, size_t size, const char *between, const char *word)
{
    const size_t n = strlen(list);
    snprintf(list + n, size - n, "%s%s", n ? between : "", word);
}

const char *kn_family_choices(kn_family_kind kind, char buf[KN_CHOICES])
{
    const kn_family *f;
    buf[0] = '\0';
    for (int i = 0; (f = kn_family_at(kind, i)); i++) {
        if (f->custom)
            put_word(buf, KN_CHOICES, "|", f->custom);
        for (const kn_preset *p = f->preset; p->name; p++)
            put_word(buf, KN_CHOICES, "|", p->name);
    }
    return buf;
}

const char *kn_family_types(kn_family_kind kind, kn_types_of of, char buf[KN_CHOICES])
{
    const kn_family *f;
    char word[64];
    buf[0] = '\0';
    for (int i = 0; (f = kn_family_at(kind, i)); i++) {
        const char *also = of == KN_TYPES_OWN ? NULL : f->also;
        if (of == KN_TYPES_GGUF && !f->keys)
            continue;
        put_word(buf, KN_CHOICES, ", ", f->type);
        while (kn_next_word(&also, word))
            put_word(buf, KN_CHOICES, ", ", word);
    }
    return buf;
}

/* ---- fields ---------------------------------------------------------------------------------- */

kn_model_config kn_config_of(const kn_family *f, const void *config)
{
    kn_model_config c = { .family = f };
    memcpy(c.of, config, f->size);
    return c;
}

const kn_config_field *kn_family_field(const kn_family *f, const char *name)
{
    for (const kn_config_field *p = f->field; p->kind; p++)
        if (p->name && strcmp(p->name, name) == 0)
            return p;
    return NULL;
}

/* Element i of a list; else i is 0. */
static double get(const kn_config_field *f, const void *config, int i)
{
    const char *at = (const char *)config + f->offset;
    switch (f->kind) {
    case KN_FIELD_INT:
    case KN_FIELD_LIST:
        return ((const int *)at)[i];
    case KN_FIELD_SIZE:
        return (double)*(const int64_t *)at;
    case KN_FIELD_NUMBER:
        return *(const double *)at;
    default:
        return *(const bool *)at;
    }
}

static void set(const kn_config_field *f, void *config, int i, double value)
{
    char *at = (char *)config + f->offset;
    switch (f->kind) {
    case KN_FIELD_INT:
    case KN_FIELD_LIST:
        ((int *)at)[i] = (int)value;
        break;
    case KN_FIELD_SIZE:
        *(int64_t *)at = (int64_t)value;
        break;
    case KN_FIELD_NUMBER:
        *(double *)at = value;
        break;
    default:
        *(bool *)at = value != 0;
    }
}

static bool is_flag(const kn_config_field *f)
{
    return f->kind == KN_FIELD_FLAG || f->kind == KN_FIELD_NOT;
}

static bool in_range(const kn_config_field *f, double value)
{
    return (f->none && value == 0) || (value >= f->low && value <= f->high);
}

double kn_config_get(const kn_model_config *c, const char *name, double otherwise)
{
    const kn_config_field *f = kn_family_field(c->family, name);
    return !f ? otherwise : f->opposite ? !get(f, c->of, 0) : get(f, c->of, 0);
}

void kn_config_set(kn_model_config *c, const char *name, double value)
{
    const kn_config_field *f = kn_family_field(c->family, name);
    if (f)
        set(f, c->of, 0, f->opposite ? !value : value);
}

static int length(const kn_config_field *f)
{
    return f->kind == KN_FIELD_LIST ? KN_FIELD_LENGTH : f->kind == KN_FIELD_FIXED ? 0 : 1;
}

/* ---- presets and checks ---------------------------------------------------------------------- */

bool kn_family_preset(const kn_family *f, const char *name, void *config)
{
    char list[512] = "";
    if (!config)
        return kn_fail("kn_%s_preset: the place for the configuration is NULL", f->prefix);
    const kn_preset *p = find_preset(f, name);
    if (p) {
        memcpy(config, p->config, f->size);
        return true;
    }
    for (p = f->preset; p->name; p++)
        put_word(list, sizeof list, ", ", p->name);
    return kn_fail("there is no %s '%.64s'; there are %s", f->noun, name ? name : "", list);
}

/* Among presets of the same sizes, the one with the most other fields in common; then the first. */
const kn_preset *kn_config_preset(const kn_model_config *c)
{
    const kn_preset *best = NULL;
    int most = -1;
    for (const kn_preset *p = c->family->preset; p->name; p++) {
        int same = 0, differ = 0;
        for (const kn_config_field *f = c->family->field; f->kind; f++)
            for (int i = 0; i < length(f); i++) {
                const bool is = get(f, p->config, i) == get(f, c->of, i);
                same += is;
                differ += !is && !f->free;
            }
        if (differ == 0 && same > most) {
            best = p;
            most = same;
        }
    }
    return best;
}

/* A field as C code names it. */
static const char *member(const kn_config_field *f, char buf[32])
{
    snprintf(buf, 32, "%s", f->name);
    for (char *c = buf; *c; c++)
        *c = *c == '-' ? '_' : *c;
    return buf;
}

static bool check_range(const kn_family *family, const kn_config_field *f, const void *config)
{
    char name[32];
    for (int i = 0; i < length(f) && !is_flag(f); i++) {
        const double value = get(f, config, i);
        if (!in_range(f, value))
            return kn_fail("%s: .%s is %.12g, should lie between %.12g and %.12g", family->prefix,
                           member(f, name), value, f->low, f->high);
    }
    return true;
}

bool kn_family_check(const kn_family *f, void *config)
{
    if (!config)
        return kn_fail("kn_%s_config_check: the configuration is NULL", f->prefix);
    for (const kn_config_field *p = f->field; p->kind; p++)
        if (p->zero != 0 && get(p, config, 0) == 0)
            set(p, config, 0, p->zero);
    if (f->fill)
        f->fill(config);
    for (const kn_config_field *p = f->field; p->kind; p++)
        if (!check_range(f, p, config))
            return false;
    return f->check(config);
}

/* ---- to JSON --------------------------------------------------------------------------------- */

/* The first of .text. */
static json_t *fixed_json(const char *word)
{
    json_t *j = json_loads(word, JSON_DECODE_ANY, NULL);
    return j ? j : json_string(word);
}

static json_t *value_json(const kn_config_field *f, const void *config)
{
    json_t *list;
    char word[64];
    const char *text = f->text;
    switch (f->kind) {
    case KN_FIELD_FIXED:
        return kn_next_word(&text, word) ? fixed_json(word) : NULL;
    case KN_FIELD_FLAG:
    case KN_FIELD_NOT:
        return json_boolean((get(f, config, 0) != 0) == (f->kind == KN_FIELD_FLAG));
    case KN_FIELD_NUMBER:
        return json_real(get(f, config, 0));
    case KN_FIELD_LIST:
        list = json_array();
        for (int i = 0; i < KN_FIELD_LENGTH; i++)
            json_array_append_new(list, json_integer((json_int_t)get(f, config, i)));
        return list;
    default:
        return json_integer((json_int_t)get(f, config, 0));
    }
}

/* Takes value over. */
static bool put_value(json_t *object, const char *key, json_t *value)
{
    char outer[32];
    const char *dot = strchr(key, '.');
    if (!dot)
        return json_object_set_new(object, key, value) == 0;
    snprintf(outer, sizeof outer, "%.*s", (int)(dot - key), key);
    json_t *in = json_object_get(object, outer);
    if (!in && json_object_set_new(object, outer, json_object()) == 0)
        in = json_object_get(object, outer);
    return json_object_set_new(in, dot + 1, value) == 0;
}

json_t *kn_config_json(const kn_model_config *config)
{
    kn_model_config c = *config;
    const kn_family *f = c.family;
    if (!kn_family_check(f, c.of))
        return NULL;
    json_t *j = json_pack("{s:s}", "model_type", f->type);
    bool ok = j != NULL;
    for (const kn_config_field *p = f->field; ok && p->kind; p++)
        ok = !p->key || put_value(j, p->key, value_json(p, c.of));
    if (ok && (!f->write || f->write(j, c.of)))
        return j;
    json_decref(j);
    return kn_fail_null("kn_%s_config_text: no memory, or a configuration that isn't finite",
                        f->prefix);
}

json_t *kn_config_json_theirs(const kn_model_config *c)
{
    const kn_family *f = c->family;
    json_t *j = kn_config_json(c);
    char key[64];
    bool ok = j != NULL;
    for (const kn_config_field *p = f->field; ok && p->kind; p++)
        for (const char *keys = p->optional && p->kind == KN_FIELD_FIXED ? NULL : p->theirs;
             ok && kn_next_word(&keys, key);)
            ok = put_value(j, key, value_json(p, c->of));
    if (ok && (!f->export || f->export(j, c->of)))
        return j;
    json_decref(j);
    if (kn_ok())
        kn_fail_memory("config.json");
    return NULL;
}

char *kn_config_text(const kn_model_config *c)
{
    json_t *j = kn_config_json(c);
    return j ? kn_json_copy(j, 0, "a configuration") : NULL;
}

const char *kn_family_text(const kn_family *f, const void *config, char *buf, size_t size)
{
    if (!config || !buf)
        return kn_fail_null("kn_%s_config_text: the %s is NULL", f->prefix,
                            config ? "buffer" : "configuration");
    const kn_model_config c = kn_config_of(f, config);
    json_t *j = kn_config_json(&c);
    const size_t n = j ? json_dumpb(j, buf, size - 1, 0) : 0;
    json_decref(j);
    if (n == 0 || n >= size) {
        if (kn_ok())
            kn_fail("kn_%s_config_text: no memory", f->prefix);
        return NULL;
    }
    buf[n] = '\0';
    return buf;
}

/* ---- from JSON ------------------------------------------------------------------------------- */

bool kn_json_int(kn_json_source s, const char *key, int64_t low, int64_t high, int64_t *value)
{
    const json_t *v = json_object_get(s.object, key);
    *value = json_integer_value(v);
    return (json_is_integer(v) && *value >= low && *value <= high) ||
           kn_fail("%s: \"%s\" of the model is missing or not a whole number from %lld to %lld; "
                   "the file is damaged",
                   s.file, key, (long long)low, (long long)high);
}

bool kn_json_number(kn_json_source s, const char *key, double low, double *value)
{
    const json_t *v = json_object_get(s.object, key);
    *value = json_number_value(v);
    return (json_is_number(v) && *value >= low) ||
           kn_fail("%s: \"%s\" of the model is missing or not a number of at least %g; the file "
                   "is damaged",
                   s.file, key, low);
}

static bool read_list(const kn_config_field *f, const char *key, const json_t *v, const char *file,
                      void *config)
{
    bool ok = true;
    for (int i = 0; ok && i < KN_FIELD_LENGTH; i++) {
        const json_t *n = json_array_get(v, (size_t)i);
        ok = json_is_integer(n) && in_range(f, (double)json_integer_value(n));
        if (ok)
            set(f, config, i, (double)json_integer_value(n));
    }
    return ok || kn_fail("%s: \"%s\" of the model doesn't hold %d whole numbers from %.0f to "
                         "%.0f; the file is damaged",
                         file, key, KN_FIELD_LENGTH, f->low, f->high);
}

/* A setting that another program's model may have, and all of this family have alike. */
static bool read_fixed(const kn_family *family, const kn_config_field *f, const char *key,
                       const json_t *v, const char *file)
{
    bool is = !v;
    char word[64], number[32] = "something else";
    for (const char *text = f->text; !is && kn_next_word(&text, word);) {
        json_t *want = fixed_json(word);
        is = json_equal(want, v);
        json_decref(want);
    }
    if (json_is_number(v))
        snprintf(number, sizeof number, "%.12g", json_number_value(v));
    return is || kn_fail("%s: \"%s\" of the model is %.64s; the %s here has only %s", file, key,
                         json_is_string(v)  ? json_string_value(v)
                         : json_is_true(v)  ? "true"
                         : json_is_false(v) ? "false"
                                            : number,
                         family->noun, f->text);
}

static bool read_value(const kn_family *family, const kn_config_field *f, const char *path,
                       const json_t *object, const char *file, void *config)
{
    const char *dot = strchr(path, '.'), *key = dot ? dot + 1 : path;
    char outer[32];
    int64_t whole;
    double number;
    snprintf(outer, sizeof outer, "%.*s", dot ? (int)(dot - path) : 0, path);
    const kn_json_source s = { dot ? json_object_get(object, outer) : object, file };
    const json_t *v = json_object_get(s.object, key);
    v = json_is_null(v) ? NULL : v;
    if (f->kind == KN_FIELD_FIXED)
        return read_fixed(family, f, key, v, file);
    if (f->kind == KN_FIELD_LIST)
        return read_list(f, key, v, file, config);
    if (!v && (f->optional || is_flag(f))) {
        set(f, config, 0, is_flag(f) ? f->kind == KN_FIELD_NOT : f->missing);
        return true;
    }
    if (is_flag(f)) {
        set(f, config, 0, json_is_true(v) == (f->kind == KN_FIELD_FLAG));
        return json_is_boolean(v) ||
               kn_fail("%s: \"%s\" of the model isn't true or false; the file is damaged", file,
                       key);
    }
    if (f->kind == KN_FIELD_NUMBER) {
        bool ok = kn_json_number(s, key, f->low, &number);
        set(f, config, 0, number);
        return ok;
    }
    bool ok = kn_json_int(s, key, (int64_t)f->low, (int64_t)f->high, &whole);
    set(f, config, 0, (double)whole);
    return ok;
}

/* The key of a field, of those that another program has the one that is there; false: none. */
static bool key_of(const kn_config_field *p, bool theirs, const json_t *object, char key[64])
{
    char other[64];
    const char *list = theirs && p->theirs ? p->theirs : p->key;
    if (!kn_next_word(&list, key))
        return false;
    if (!json_object_get(object, key) && kn_next_word(&list, other) &&
        json_object_get(object, other))
        strcpy(key, other);
    return true;
}

static bool read_config(const json_t *object, const char *file, kn_model_config *c, bool theirs)
{
    const kn_family *f = c->family;
    char key[64];
    for (const kn_config_field *p = f->field; p->kind; p++)
        if (key_of(p, theirs, object, key) && !read_value(f, p, key, object, file, c->of))
            return false;
    return (!f->read || f->read(object, file, c->of)) && kn_family_check(f, c->of);
}

bool kn_config_read(const json_t *object, const char *file, kn_model_config *c)
{
    return read_config(object, file, c, false);
}

bool kn_config_read_theirs(const json_t *object, const char *file, kn_model_config *c)
{
    return read_config(object, file, c, true);
}
