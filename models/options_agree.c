/* models/options_agree.c: options that go together, and ranks that have the same. */
#include "comm/comm_internal.h"
#include "fsdp/alike.h"
#include "kernels/error_internal.h"
#include "models/options_internal.h"

#include <stdlib.h>
#include <string.h>

/* ---- of one rank ---------------------------------------------------------------------------- */

/* Whether it is there, and no flag that is off, nor 0. */
static bool is_on(const kn_options *o, int i)
{
    const char *text = i < 0 ? NULL : o->values[i].text;
    const kn_option_kind kind = text ? o->table[i].kind : KN_OPTION_HEADING;
    return text && (kind == KN_OPTION_FLAG                             ? strcmp(text, "false") != 0
                    : kind == KN_OPTION_INT || kind == KN_OPTION_FLOAT ? strtod(text, NULL) != 0
                                                                       : *text != 0);
}

bool kn_option_asks(const kn_options *o, int i)
{
    return i >= 0 && o->values[i].origin == KN_VALUE_GIVEN &&
           (o->table[i].kind != KN_OPTION_FLAG || is_on(o, i));
}

bool kn_options_check_clashes(const kn_options *o)
{
    char other[64];
    for (int i = 0; i < o->count; i++)
        for (const char *list = kn_option_asks(o, i) ? o->table[i].clashes : NULL;
             kn_next_word(&list, other);)
            if (kn_option_asks(o, kn_options_find(o, other, strlen(other))))
                return kn_fail("--%s and --%s contradict each other; give one of them",
                               o->table[i].name, other);
    return true;
}

/* Whether an option with this .with does something. */
static bool is_of_use(const kn_options *o, const char *with)
{
    char word[64];
    const size_t n = strcspn(with, "=");
    if (with[n]) {
        const int i = kn_options_find(o, with, n);
        return i >= 0 && o->values[i].text && kn_is_listed(with + n + 1, o->values[i].text);
    }
    while (kn_next_word(&with, word))
        if (is_on(o, kn_options_find(o, word, strlen(word))))
            return true;
    return false;
}

bool kn_options_check(const kn_options *o)
{
    if (!kn_given(o, "kn_options_check", "the options' struct"))
        return false;
    for (int i = 0; i < o->count && !o->help; i++) {
        const kn_option *p = &o->table[i];
        char shown[160] = "", word[64];
        const bool asks = o->values[i].origin == KN_VALUE_GIVEN && (p->value || is_on(o, i));
        if (!asks || !p->with || is_of_use(o, p->with))
            continue;
        const bool values = strchr(p->with, '=') != NULL;
        for (const char *list = p->with; kn_next_word(&list, word);) {
            const size_t used = strlen(shown);
            snprintf(shown + used, sizeof shown - used, "%s%s",
                     used == 0 ? ""
                     : values  ? " or "
                               : " or --",
                     word);
        }
        if (values)
            *strchr(shown, '=') = ' ';
        return kn_fail("--%s is for --%s; give that as well, or leave it out", p->name, shown);
    }
    return true;
}

/* ---- of all ranks --------------------------------------------------------------------------- */

/* A number by its value (1e-3 is 0.001), everything else by its text. */
static bool add_option(kn_alike *a, const kn_option_record *r)
{
    const kn_option_kind kind = r->row->kind;
    const char *shown = *r->value ? r->value : "not given";
    char name[64];
    if (kind == KN_OPTION_PATH && strchr(r->value, '/'))
        shown = "a path";
    uint64_t bits = *r->value ? kn_hash_string(shown) : 0;
    if (*r->value && kind == KN_OPTION_INT)
        bits = (uint64_t)strtoll(r->value, NULL, 10);
    if (*r->value && kind == KN_OPTION_FLOAT)
        memcpy(&bits, &(double){ strtod(r->value, NULL) }, sizeof bits);
    snprintf(name, sizeof name, "--%s", r->name);
    return kn_alike_add(a, bits, name, kind == KN_OPTION_STRING && *r->value ? "'%s'" : "%s",
                        shown);
}

bool kn_options_agree(kn_options *o, kn_comm *comm)
{
    kn_alike a = { .advice = "give all ranks the same" };
    kn_option_record r;
    if (!kn_given(o, "kn_options_agree", "the options' struct") ||
        (!comm && !kn_comm_default(&comm, "kn_options_agree")))
        return false;
    bool help = kn_options_help_wanted(o),
         ok = kn_alike_add(&a, help, "--help", help ? "given" : "not given");
    for (int i = 0; ok && kn_options_record(o, i, &r); i++)
        ok = r.row->own || add_option(&a, &r);
    ok = ok && kn_alike_agree(&a, 1, comm, "options");
    kn_alike_free(&a);
    return ok;
}
