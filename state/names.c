/* state/names.c: the names under which a load looks for the tensors of a state, and lists of
 * names. */
#include "kernels/memory_internal.h"
#include "state/load_internal.h"

#include <string.h>

/* ---- lists of names -------------------------------------------------------------------------- */

bool kn_names_add(kn_names *n, const char *name)
{
    char *copy = kn_host_grow(&n->list, &n->room, n->count + 2, sizeof *n->list)
                     ? kn_host_strdup(name)
                     : NULL;
    if (!copy)
        return false;
    n->list[n->count++] = copy;
    n->list[n->count] = NULL;
    return true;
}

static void free_list(char **list)
{
    for (int i = 0; list && list[i]; i++)
        kn_host_free(list[i]);
    kn_host_free(list);
}

void kn_names_free(kn_names *n)
{
    free_list(n->list);
    *n = (kn_names){ 0 };
}

void kn_load_report_free(kn_load_report *r)
{
    if (!r)
        return;
    free_list(r->missing);
    free_list(r->unexpected);
    free_list(r->mismatched);
    *r = (kn_load_report){ 0 };
}

/* ---- other names ----------------------------------------------------------------------------- */

enum { STARS = 16 }; /* in a pattern */

typedef struct stars {
    const char *at[STARS];
    size_t length[STARS];
} stars;

/* The first place of text[length] in name; NULL: none. */
static const char *find(const char *name, const char *text, size_t length)
{
    for (; *name || length == 0; name++)
        if (strncmp(name, text, length) == 0)
            return name;
    return NULL;
}

/* Whether name is like from, each '*' as short as can be, and what they stand for. from has at most
 * STARS of them. */
static bool is_like(const char *name, const char *from, stars *s)
{
    size_t plain = strcspn(from, "*");
    if (strncmp(name, from, plain) != 0)
        return false;
    name += plain, from += plain;
    for (int star = 0; *from; star++) {
        plain = strcspn(++from, "*"); /* between this star and the next */
        const char *next = find(name, from, plain);
        if (!from[plain]) /* the last one ends the name */
            next = strlen(name) >= plain ? name + strlen(name) - plain : NULL;
        if (!next || strncmp(next, from, plain) != 0)
            return false;
        s->at[star] = name;
        s->length[star] = (size_t)(next - name);
        name = next + plain, from += plain;
    }
    return !*name;
}

static int stars_in(const char *pattern)
{
    int n = 0;
    for (; *pattern; pattern++)
        n += *pattern == '*';
    return n;
}

/* to with the texts of its stars; the caller frees it. */
static char *filled(const char *to, const stars *s)
{
    size_t room = strlen(to) + 1, at = 0;
    for (int k = 0, n = stars_in(to); k < n; k++)
        room += s->length[k];
    char *name = kn_host_alloc(room);
    for (int k = 0; name && *to; to++) {
        const char *from = *to == '*' ? s->at[k] : to;
        const size_t n = *to == '*' ? s->length[k++] : 1;
        memcpy(name + at, from, n);
        at += n;
    }
    if (name)
        name[at] = 0;
    return name;
}

bool kn_loading_options(const kn_load_state_dict_options *o, const char *what)
{
    if (o->rename_count < 0 || (o->rename_count > 0 && !o->renames))
        return kn_fail("%s: .rename_count is %d%s", what, o->rename_count,
                       o->renames ? "; it must be at least 0" : ", but .renames is NULL");
    if (o->rename && o->rename_count > 0)
        return kn_fail("%s: .rename and .renames are given; give one of both", what);
    for (int k = 0; k < o->rename_count; k++) {
        const kn_rename *r = &o->renames[k];
        if (!r->from || stars_in(r->from) > STARS || (r->to && stars_in(r->to) > stars_in(r->from)))
            return kn_fail("%s: .renames[%d] is from '%s' to '%s'; give a pattern of at most %d "
                           "'*', and a name with no more of them",
                           what, k, r->from ? r->from : "NULL", r->to ? r->to : "NULL", STARS);
    }
    return true;
}

/* The name as which this one is looked for, in memory of the caller's; *out: it is left out. NULL
 * for that, and with an error. */
static char *renamed(const kn_load_state_dict_options *o, const char *name, bool *out)
{
    stars s;
    const char *to = name;
    if (o->rename)
        to = o->rename(name, o->rename_arg);
    for (int k = 0; k < o->rename_count; k++)
        if (is_like(name, o->renames[k].from, &s)) {
            *out = !o->renames[k].to;
            return *out ? NULL : filled(o->renames[k].to, &s);
        }
    *out = !to;
    return to && kn_ok() ? kn_host_strdup(to) : NULL;
}

/* ---- the names of a source ------------------------------------------------------------------- */

/* The name without that of its optimizer; NULL: another one's. One without a name has all names:
 * those of modules may have a '/', too. */
static const char *of_optim(const char *name, const char *optim)
{
    const size_t n = optim ? strlen(optim) : 0;
    if (n == 0)
        return name;
    return strncmp(name, optim, n) == 0 && name[n] == '/' ? name + n + 1 : NULL;
}

static bool add(kn_loading *l, kn_source *x, const kn_state_item *from, int origin, const char *own)
{
    bool out = false;
    char *name = renamed(l->o, own, &out);
    bool ok = name || out;
    const kn_state_item *there = name ? kn_state_find(x->names, name) : NULL;
    if (there)
        ok = kn_fail("%s: two names become '%s'; '%s' is one of them", l->what, name, own);
    kn_state_item *to = ok && name ? kn_state_add(x->names, NULL, name) : NULL;
    if (to) {
        name = to->name == name ? NULL : name;
        char *kept = to->name;
        *to = *from;
        to->name = kept;
        to->tensor = NULL;
        to->files = NULL;
        to->text = NULL;
        to->origin = origin;
    }
    kn_host_free(name);
    return ok && (out || to) && kn_ok();
}

bool kn_source_names(kn_loading *l, kn_source *x, const kn_state *from, const char *optim)
{
    bool ok = (x->names = kn_state_new()) != NULL;
    x->rest = optim && !*optim;
    for (int i = 0; ok && i < from->count; i++) {
        const char *own = of_optim(from->list[i].name, optim);
        ok = !own || add(l, x, &from->list[i], i, own);
    }
    x->used = ok ? kn_host_calloc((size_t)x->names->count + 1, sizeof *x->used) : NULL;
    return x->used != NULL;
}

char *kn_loading_name(const kn_loading *l, const char *name, const char *after)
{
    return kn_state_join(l->prefix, name + l->all.below, after);
}
