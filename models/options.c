/* models/options.c: the parser that a table of options generates. Each value has one text form,
 * kept beside the field with its origin: options_text.c prints it, the parser reads it. */
#include "models/options_internal.h"
#include "kernels/error_internal.h"
#include "kernels/memory.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- finding names ------------------------------------------------------------------------- */

int kn_options_find(const kn_options *o, const char *name, size_t length)
{
    for (int i = 0; i < o->count; i++)
        if (kn_option_is_one(&o->table[i]) && strlen(o->table[i].name) == length &&
            strncmp(o->table[i].name, name, length) == 0)
            return i;
    return -1;
}

bool kn_options_fail_unknown(const kn_options *o, const char *name, size_t length)
{
    char word[WORD_MAX + 1], buf[WORD_MAX + 1], words[4096] = "help|version";
    size_t used = strlen(words);
    snprintf(word, sizeof word, "%.*s", (int)length, name);
    for (int i = 0; i < o->count; i++)
        if (kn_option_is_one(&o->table[i]) && used < sizeof words)
            used += (size_t)snprintf(words + used, sizeof words - used, "|%s", o->table[i].name);
    const char *near = kn_nearest(word, words, buf, sizeof buf);
    if (near)
        return kn_fail("unknown option --%.*s; did you mean --%s?", (int)length, name, near);
    return kn_fail("unknown option --%.*s; --help lists the options", (int)length, name);
}

bool kn_next_word(const char **at, char word[64])
{
    const size_t n = *at ? strcspn(*at, "|") : 0;
    if (n == 0)
        return false;
    snprintf(word, 64, "%.*s", (int)n, *at);
    *at += n + ((*at)[n] == '|');
    return true;
}

bool kn_is_listed(const char *list, const char *word)
{
    char one[64];
    while (kn_next_word(&list, one))
        if (strcmp(one, word) == 0)
            return true;
    return false;
}

/* ---- values -------------------------------------------------------------------------------- */

static bool parse_number(const kn_option *p, const char *text, kn_option_field *field)
{
    const bool integer = p->kind == KN_OPTION_INT, bounded = p->min != 0 || p->max != 0;
    char *end = NULL;
    double value;
    errno = 0;
    if (integer) {
        field->whole = strtoll(text, &end, 10);
        value = (double)field->whole;
    } else {
        value = field->number = strtod(text, &end);
        if (fabs(value) < 1)
            errno = 0; /* underflow isn't an error */
    }
    if (end == text || *end != '\0' || isspace((unsigned char)text[0]) ||
        (!integer && !isfinite(value)))
        return kn_fail("--%s takes %s, not '%s'", p->name, kn_option_kinds[p->kind].takes, text);
    if (bounded && (errno == ERANGE || value < p->min || value > p->max))
        return kn_fail("--%s must lie between %.12g and %.12g, not %s", p->name, p->min, p->max,
                       text);
    if (errno == ERANGE)
        return kn_fail("--%s %s is too large", p->name, text);
    return bounded || p->any || value >= 0 ||
           kn_fail("--%s must be 0 or more, not %s", p->name, text);
}

static bool parse_choice(const kn_option *p, const char *text, kn_option_field *field)
{
    char buf[WORD_MAX + 1], word[64];
    const char *list = p->choices;
    for (field->choice = 0; kn_next_word(&list, word); field->choice++)
        if (strcmp(word, text) == 0)
            return true;
    const char *near = kn_nearest(text, p->choices, buf, sizeof buf);
    return kn_fail("--%s has no choice '%s'%s%s%s (choices: %s)", p->name, text,
                   near ? "; did you mean " : "", near ? near : "", near ? "?" : "", p->choices);
}

static bool parse_flag(const kn_option *p, const char *text, kn_option_field *field)
{
    field->on = strcmp(text, "true") == 0;
    return field->on || strcmp(text, "false") == 0 ||
           kn_fail("--%s is a flag: give --%s or --no-%s (or =true, =false), not '%s'", p->name,
                   p->name, p->name, text);
}

static bool parse_text(const kn_option *p, const char *text, kn_option_field *field)
{
    (void)field;
    return p->kind != KN_OPTION_PATH || *text ||
           kn_fail("--%s takes a path, not an empty text", p->name);
}

const kn_option_kind_row kn_option_kinds[KN_OPTION_HEADING] = {
    [KN_OPTION_INT] = { sizeof(int64_t), parse_number, " N", "a whole number" },
    [KN_OPTION_FLOAT] = { sizeof(double), parse_number, " X", "a number" },
    [KN_OPTION_STRING] = { sizeof(char *), parse_text, " TEXT", "a text in quotes" },
    [KN_OPTION_PATH] = { sizeof(char *), parse_text, " PATH", "a text in quotes" },
    [KN_OPTION_FLAG] = { sizeof(bool), parse_flag, "", "true or false" },
    [KN_OPTION_CHOICE] = { sizeof(int), parse_choice, " NAME", "a text in quotes" },
    [KN_OPTION_NAME] = { sizeof(char *), parse_choice, " NAME", "a text in quotes" },
};

/* Checks text and stores it in the field of row i. On failure the old value stands. */
static bool store(kn_options *o, int i, const char *text)
{
    const kn_option *p = &o->table[i];
    kn_option_field field = { 0 };
    char *copy = kn_option_kinds[p->kind].parse(p, text, &field) ? kn_host_strdup(text) : NULL;
    if (!copy)
        return false;
    kn_host_free(o->values[i].text);
    o->values[i].text = copy;
    if (p->kind == KN_OPTION_STRING || p->kind == KN_OPTION_PATH || p->kind == KN_OPTION_NAME)
        field.text = copy;
    memcpy(o->fields + p->offset, &field, kn_option_kinds[p->kind].size);
    return true;
}

/* The text of row i's default; NULL: none. */
static const char *default_of(const kn_option *p, char first[WORD_MAX + 1])
{
    if (p->value || (p->kind != KN_OPTION_FLAG && !kn_option_chooses(p)))
        return p->value;
    snprintf(first, WORD_MAX + 1, "%.*s",
             p->kind == KN_OPTION_FLAG ? 5 : (int)strcspn(p->choices, "|"),
             p->kind == KN_OPTION_FLAG ? "false" : p->choices);
    return first;
}

/* A row without a default text starts at 0, false, the first choice, NULL; its range may exclude
 * that 0 ("not given"). */
static bool store_default(kn_options *o, int i)
{
    const kn_option *p = &o->table[i];
    char first[WORD_MAX + 1];
    if (!kn_option_is_one(p))
        return true;
    if (p->kind < KN_OPTION_INT || p->kind > KN_OPTION_HEADING)
        return kn_fail("option table: --%s has no kind", p->name);
    for (int j = 0; j < i; j++)
        if (kn_option_is_one(&o->table[j]) && strcmp(o->table[j].name, p->name) == 0)
            return kn_fail("option table: --%s is in it twice", p->name);
    if (kn_option_chooses(p) && (!p->choices || !*p->choices))
        return kn_fail("option table: --%s has no choices", p->name);
    const char *text = default_of(p, first);
    if (text)
        return store(o, i, text);
    kn_host_free(o->values[i].text);
    o->values[i].text = NULL;
    memset(o->fields + p->offset, 0, kn_option_kinds[p->kind].size);
    return true;
}

/* ---- the object ---------------------------------------------------------------------------- */

kn_options *kn_options_create(const kn_option *table, void *fields)
{
    if (!kn_given(table, "kn_options_create", "the table") ||
        !kn_given(fields, "kn_options_create", "the struct of fields"))
        return NULL;
    kn_options *o = kn_host_calloc(1, sizeof *o);
    if (!o)
        return NULL;
    o->table = table;
    o->fields = fields;
    while (table[o->count].name)
        o->count++;
    o->values = kn_host_calloc((size_t)o->count + 1, sizeof *o->values);
    if (!o->values)
        goto fail;
    for (int i = 0; i < o->count; i++)
        if (!store_default(o, i))
            goto fail;
    return o;
fail:
    kn_options_free(o);
    return NULL;
}

void kn_options_free(kn_options *o)
{
    if (!o)
        return;
    for (int i = 0; o->values && i < o->count; i++)
        kn_host_free(o->values[i].text), kn_host_free(o->values[i].saved);
    kn_host_free(o->values);
    kn_host_free(o->rest);
    kn_host_free(o);
}

/* ---- the command line ---------------------------------------------------------------------- */

/* One more value of an option that has several. */
static bool give_one_more(kn_options *o, int i, const char *text)
{
    kn_option_value *v = &o->values[i];
    const bool first = v->origin != KN_VALUE_GIVEN;
    if (strpbrk(text, KN_OPTION_BETWEEN))
        return kn_fail("--%s has the character U+001E, which it can't have", o->table[i].name);
    const size_t size = (first ? 0 : strlen(v->text) + 1) + strlen(text) + 1;
    char *all = kn_host_alloc(size);
    if (!all)
        return false;
    snprintf(all, size, "%s%s%s", first ? "" : v->text, first ? "" : KN_OPTION_BETWEEN, text);
    const bool ok = store(o, i, all);
    kn_host_free(all);
    if (ok)
        v->origin = KN_VALUE_GIVEN;
    return ok;
}

bool kn_options_give(kn_options *o, int i, const char *text)
{
    kn_option_value *v = &o->values[i];
    if (o->table[i].several)
        return give_one_more(o, i, text);
    if (v->origin == KN_VALUE_GIVEN && v->text && strcmp(v->text, text) != 0)
        return kn_fail("--%s is given twice, as %s and as %s; keep one", o->table[i].name, v->text,
                       text);
    if (!store(o, i, text))
        return false;
    v->origin = KN_VALUE_GIVEN;
    return true;
}

/* Reads the option at argv[at]; returns how many arguments it took, 0 on an error. */
static int parse_one(kn_options *o, int argc, char *const *argv, int at)
{
    const char *arg = argv[at], *name = arg + 2, *equals = strchr(arg, '=');
    size_t length = equals ? (size_t)(equals - name) : strlen(name);
    int i = kn_options_find(o, name, length);
    bool no = false;
    if (i < 0 && length > 3 && strncmp(name, "no-", 3) == 0) {
        i = kn_options_find(o, name + 3, length - 3);
        no = i >= 0 && o->table[i].kind == KN_OPTION_FLAG;
        i = no ? i : -1;
    }
    if (i < 0)
        return kn_options_fail_unknown(o, name, length);
    if (no && equals)
        return kn_fail("--%.*s takes no value", (int)length, name);
    if (o->table[i].kind == KN_OPTION_FLAG)
        return kn_options_give(o, i, equals ? equals + 1 : no ? "false" : "true") ? 1 : 0;
    if (equals)
        return kn_options_give(o, i, equals + 1) ? 1 : 0;
    if (at + 1 >= argc || strncmp(argv[at + 1], "--", 2) == 0)
        return kn_fail("--%s needs a value: --%s=VALUE, which may begin with --, or --%s VALUE",
                       o->table[i].name, o->table[i].name, o->table[i].name);
    return kn_options_give(o, i, argv[at + 1]) ? 2 : 0;
}

/* An argument that is no option: one more of the list, if the table has one. */
static bool add_rest(kn_options *o, char *arg)
{
    int i = 0;
    while (i < o->count && o->table[i].kind != KN_OPTION_REST)
        i++;
    if (i == o->count)
        return kn_fail("unexpected argument '%s'; options begin with --, see --help", arg);
    char **more = kn_host_realloc(o->rest, ((size_t)o->rests + 2) * sizeof *more);
    if (!more)
        return false;
    o->rest = more;
    more[o->rests++] = arg;
    more[o->rests] = NULL;
    return true;
}

bool kn_options_parse(kn_options *o, int argc, char *const *argv)
{
    if (!kn_given(o, "kn_options_parse", "the options' struct") ||
        !kn_given(argv, "kn_options_parse", "the list of arguments"))
        return false;
    for (int at = 1; at < argc;) {
        const char *arg = argv[at];
        o->version = strcmp(arg, "--version") == 0;
        o->help = o->version || strcmp(arg, "--help") == 0;
        if (o->help)
            return true;
        if (strncmp(arg, "--", 2) != 0 || !arg[2]) {
            const char *bare = arg + (arg[0] == '-');
            size_t length = strcspn(bare, "=");
            if (bare != arg && kn_options_find(o, bare, length) >= 0)
                return kn_fail("unknown option %s; did you mean -%s?", arg, arg);
            if (!add_rest(o, argv[at++]))
                return false;
            continue;
        }
        int took = parse_one(o, argc, argv, at);
        if (!took)
            return false;
        at += took;
    }
    return kn_options_check_clashes(o);
}

bool kn_options_help_wanted(const kn_options *o)
{
    return kn_given(o, "kn_options_help_wanted", "the options' struct") && o->help;
}

/* Where none of what a function is given is NULL: the row of that name, -1: none. */
static bool named(const kn_options *o, const char *name, const char *function, int *i)
{
    if (!kn_given(o, function, "the options' struct") || !kn_given(name, function, "the name"))
        return false;
    *i = kn_options_find(o, name, strlen(name));
    return true;
}

bool kn_options_set(kn_options *o, const char *name, const char *text)
{
    int i;
    if (!named(o, name, "kn_options_set", &i) || !kn_given(text, "kn_options_set", "the value"))
        return false;
    if (i < 0)
        return kn_options_fail_unknown(o, name, strlen(name));
    if (!store(o, i, text))
        return false;
    o->values[i].origin = KN_VALUE_GIVEN;
    return true;
}

/* Two texts of one value, as the option means them: 0.001 is 1e-3. NULL and "": none. */
static bool same_value(const kn_option *p, const char *a, const char *b)
{
    char *end_a, *end_b;
    a = a ? a : "", b = b ? b : "";
    if (strcmp(a, b) == 0 || (p->kind != KN_OPTION_INT && p->kind != KN_OPTION_FLOAT))
        return strcmp(a, b) == 0;
    const double x = strtod(a, &end_a), y = strtod(b, &end_b);
    return end_a != a && end_b != b && !*end_a && !*end_b && x == y;
}

/* Nobody chose another value than the table's. */
static bool is_open(const kn_options *o, int i)
{
    char first[WORD_MAX + 1];
    return o->values[i].origin == KN_VALUE_DERIVED ||
           same_value(&o->table[i], o->values[i].text, default_of(&o->table[i], first));
}

const char *kn_number_text(double number, char text[32])
{
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, 32, "%.*g", digits, number);
        if (strtod(text, NULL) == number)
            break;
    }
    return text;
}

bool kn_options_derive(kn_options *o, const char *name, double number)
{
    char text[32];
    int i;
    if (!named(o, name, "kn_options_derive", &i))
        return false;
    if (i < 0)
        return kn_options_fail_unknown(o, name, strlen(name));
    if (!is_open(o, i))
        return true;
    if (!store(o, i, kn_number_text(number, text)))
        return false;
    o->values[i].origin = KN_VALUE_DERIVED;
    return true;
}

/* Where row i may not be restored at all: an error. */
static bool may_restore(const kn_options *o, int i, const char *name)
{
    if (i < 0)
        return kn_fail("the checkpoint records an option --%s that this program does not have: "
                       "another one saved it; go on with that",
                       name);
    const kn_option *p = &o->table[i];
    return (p->of == KN_OF_TRAINING && (p->kind != KN_OPTION_PATH || p->only_read)) ||
           kn_fail("the checkpoint names --%s, which belongs to a run and is never taken from a "
                   "file; no program of Knap records it, so trust nothing of this checkpoint",
                   name);
}

bool kn_options_restore(kn_options *o, const char *name, const char *text, kn_option_origin origin)
{
    int i;
    if (!named(o, name, "kn_options_restore", &i) ||
        !kn_given(text, "kn_options_restore", "the value"))
        return false;
    char *saved = may_restore(o, i, name) ? kn_host_strdup(text) : NULL;
    if (!saved)
        return false;
    const kn_option *p = &o->table[i];
    kn_option_value *v = &o->values[i];
    kn_host_free(v->saved);
    v->saved = saved;
    if (v->origin == KN_VALUE_GIVEN)
        return !p->fixed || same_value(p, v->text, text) ||
               kn_fail("--%s %s: the training was begun with %s, which a resumed run can't change; "
                       "leave --%s out",
                       name, v->text, text, name);
    if (origin == KN_VALUE_DERIVED)
        return true;
    if (!*text && (p->kind != KN_OPTION_STRING || !p->value))
        return store_default(o, i); /* recorded without a value */
    if (!store(o, i, text))
        return false;
    v->origin = is_open(o, i) ? KN_VALUE_DEFAULT : KN_VALUE_RESTORED;
    return true;
}

bool kn_options_given(const kn_options *o, const char *name)
{
    int i;
    return named(o, name, "kn_options_given", &i) && i >= 0 &&
           o->values[i].origin == KN_VALUE_GIVEN;
}

char *const *kn_options_rest(const kn_options *o)
{
    static char *none[1];
    return kn_given(o, "kn_options_rest", "the options' struct") && o->rest ? o->rest : none;
}

const char *kn_options_value(const kn_options *o, const char *name)
{
    int i;
    return named(o, name, "kn_options_value", &i) && i >= 0 ? o->values[i].text : NULL;
}

bool kn_options_record(kn_options *o, int i, kn_option_record *record)
{
    if (!kn_given(o, "kn_options_record", "the options' struct") ||
        !kn_given(record, "kn_options_record", "the place for the record"))
        return false;
    int row = 0;
    for (;; row++) {
        if (row >= o->count)
            return false;
        if (kn_option_is_one(&o->table[row]) && i-- == 0)
            break;
    }
    const kn_option *p = &o->table[row];
    const kn_option_value *v = &o->values[row];
    *record = (kn_option_record){ .row = p,
                                  .name = p->name,
                                  .value = v->text ? v->text : "",
                                  .origin = v->origin,
                                  .saved = v->saved,
                                  .changed = v->saved && !same_value(p, v->text, v->saved) };
    return true;
}
