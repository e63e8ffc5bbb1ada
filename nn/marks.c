/* nn/marks.c: whether the parameters of a module are those of an earlier time: what keeps a state
 * or an average for each would give it to another one. Freezing, values and names may change, and
 * so may the handle's storage; the handle itself and its shards may not. */
#include "nn/marks.h"
#include <string.h>

bool kn_marks_begin(kn_marks *marks, const kn_param *p, int n)
{
    *marks = (kn_marks){ .mark = kn_host_calloc((size_t)n + 1, sizeof *marks->mark) };
    for (int i = 0; marks->mark && i < n; i++) {
        kn_mark *m = &marks->mark[marks->count++];
        *m = (kn_mark){ .id = kn_leaf_of(p[i].tensor) ? p[i].tensor->leaf->id : 0,
                        .source = p[i].source,
                        .part = kn_numel(p[i].master),
                        .name = kn_host_strdup(p[i].name) };
        if (!m->id || !m->name)
            return false;
    }
    return marks->mark != NULL;
}

void kn_marks_end(kn_marks *marks)
{
    for (int i = 0; i < marks->count; i++)
        kn_host_free(marks->mark[i].name);
    kn_host_free(marks->mark);
    *marks = (kn_marks){ 0 };
}

static bool is_mark_of(const kn_mark *m, const kn_param *p)
{
    return p->tensor->leaf && p->tensor->leaf->id == m->id;
}

/* One that was and isn't there now; NULL: there is none. */
static const char *name_of_gone(const kn_marks *marks, const kn_param *p, int n)
{
    for (int i = 0; i < marks->count; i++) {
        bool found = false;
        for (int k = 0; k < n && !found; k++)
            found = is_mark_of(&marks->mark[i], &p[k]);
        if (!found)
            return marks->mark[i].name;
    }
    return NULL;
}

static const char *name_of_new(const kn_marks *marks, const kn_param *p, int n)
{
    for (int k = 0; k < n; k++) {
        bool found = false;
        for (int i = 0; i < marks->count && !found; i++)
            found = is_mark_of(&marks->mark[i], &p[k]);
        if (!found)
            return p[k].name;
    }
    return NULL;
}

bool kn_marks_hold(const kn_marks *marks, const kn_param *p, int n, const char *thing,
                   const char *what)
{
    if (n != marks->count) {
        const char *gone = name_of_gone(marks, p, n), *fresh = name_of_new(marks, p, n);
        return kn_fail("%s: the module had %d parameters when the %s was made, it has %d now: '%s' "
                       "%s; make the %s after the module is complete",
                       what, marks->count, thing, n, gone ? gone : fresh,
                       gone ? "is gone" : "is new", thing);
    }
    for (int i = 0; i < n; i++) {
        const kn_mark *m = &marks->mark[i];
        if (!is_mark_of(m, &p[i]))
            return kn_fail("%s: parameter number %d was '%s' when the %s was made, it is %s'%s' "
                           "now; make the %s after the module is complete",
                           what, i, m->name, thing, strcmp(m->name, p[i].name) ? "" : "another ",
                           p[i].name, thing);
        if (p[i].source != m->source || kn_numel(p[i].master) != m->part)
            return kn_fail("%s: '%s' was sharded by kn_fsdp_wrap after the %s was made; make the "
                           "%s after kn_fsdp_wrap",
                           what, p[i].name, thing, thing);
    }
    return true;
}
