/* nn/edit.c: a tree that changes: modules taken out or replaced, parameters frozen by their
 * names. */
#include "nn/edit.h"
#include <fnmatch.h>
#include <string.h>

/* ---- names ----------------------------------------------------------------------------------- */

bool kn_next_name(const char **list, const char **name, size_t *length)
{
    const char *p = *list;
    if (!p || !*p)
        return false;
    size_t n = strcspn(p, ",");
    *list = p + n + (p[n] == ',');
    while (n > 0 && *p == ' ')
        p++, n--;
    while (n > 0 && p[n - 1] == ' ')
        n--;
    *name = p;
    *length = n;
    return true;
}

/* name matches pattern[n]. False with an error where memory is out. */
static bool matches(const char *pattern, size_t n, const char *name)
{
    char *copy = kn_host_alloc(n + 1);
    if (!copy)
        return false;
    memcpy(copy, pattern, n);
    copy[n] = 0;
    bool yes = fnmatch(copy, name, 0) == 0;
    kn_host_free(copy);
    return yes;
}

bool kn_matched(const char *list, const char *name)
{
    const char *one;
    size_t n;
    bool yes = false;
    while (!yes && kn_ok() && kn_next_name(&list, &one, &n))
        yes = matches(one, n, name);
    return yes;
}

/* ---- freezing -------------------------------------------------------------------------------- */

int kn_freeze_matching(void *root, const char *patterns, bool frozen)
{
    const kn_param *p;
    const char *list = patterns, *one;
    size_t length;
    int frozen_now = 0,
        n = kn_ok() && kn_given(patterns, "kn_freeze_matching", "the list of patterns")
                ? kn_params(root, &p)
                : 0;
    while (kn_ok() && kn_next_name(&list, &one, &length)) {
        int found = 0;
        for (int i = 0; i < n; i++)
            found += matches(one, length, p[i].name);
        if (found == 0)
            kn_fail("kn_freeze_matching: the pattern '%.*s' matches no parameter of '%s'",
                    (int)length, one, kn_module_class(root));
    }
    for (int i = 0; i < n && kn_ok(); i++)
        if (kn_matched(patterns, p[i].name))
            frozen_now += kn_require_grad(p[i].tensor, !frozen) != NULL;
    return kn_ok() ? frozen_now : 0;
}

/* ---- changing the tree ----------------------------------------------------------------------- */

static bool is_sharded(const kn_module_impl *top)
{
    bool yes = false;
    for (const kn_module_impl *m = top; m; m = kn_impl_next(m, top)) {
        yes = yes || m->unit;
        for (int i = 0; i < m->params; i++)
            yes = yes || m->param[i].source;
    }
    return yes;
}

/* c lies in the data of its parent, whose forward calls it there: a layer of the library. */
static bool is_part(const kn_module_impl *c)
{
    const uintptr_t at = (uintptr_t)c->self, data = (uintptr_t)c->parent->data;
    return data && at >= data && at < data + c->parent->data_size;
}

/* The module at path below m, if it may leave its place. */
static kn_module_impl *leaving(void *m, const char *path, const char *what)
{
    kn_module *found = kn_ok() ? kn_module_find(m, path) : NULL;
    kn_module_impl *c = found ? found->impl : NULL;
    if (!c)
        return NULL;
    bool sharded = is_sharded(c);
    for (const kn_module_impl *up = c->parent; up; up = up->parent)
        sharded = sharded || up->unit;
    if (!*path || !c->parent)
        kn_fail("%s: '%s' names the module itself; name one below it", what, path);
    else if (sharded)
        kn_fail("%s: '%s' is sharded; change the tree before kn_fsdp_wrap", what,
                kn_module_shown(c));
    else if (kn_context_get()->frame || kn_in_backward())
        kn_fail("%s: '%s' can't leave its place while a module is called or a backward runs", what,
                kn_module_shown(c));
    return kn_ok() ? c : NULL;
}

/* Cuts the first n characters off the paths of a subtree. */
static void shorten_paths(kn_module_impl *top, size_t n)
{
    for (kn_module_impl *m = top; m; m = kn_impl_next(m, top)) {
        const size_t length = strlen(m->path), cut = n < length ? n : length;
        memmove(m->path, m->path + cut, length - cut + 1);
    }
}

void kn_module_unlist(kn_module_impl *c)
{
    kn_module_impl *p = c->parent;
    if (!p || c->at >= p->children || p->child[c->at] != c->self)
        return;
    p->children--;
    for (int i = c->at; i < p->children; i++) {
        p->child[i] = p->child[i + 1];
        p->child[i]->impl->at = i;
    }
    kn_params_changed(p);
    kn_owners_settle(p);
}

/* c becomes the root of a tree with the record root: its gradients carry what they count. */
static void become_root(kn_module_impl *c, kn_root *root)
{
    const kn_root *from = kn_root_of(c);
    root->scalar_reduce = from->scalar_reduce;
    root->first = from->first;
    root->ties = from->ties;
    kn_params_changed(c);
    c->parent = NULL;
    c->root = root;
    c->name[0] = 0;
    shorten_paths(c, strlen(c->path) + 1);
    kn_owners_settle(c);
}

kn_module *kn_module_remove(void *module, const char *path)
{
    kn_module_impl *c = leaving(module, path, "kn_module_remove");
    if (c && is_part(c))
        return kn_fail_null(
            "kn_module_remove: '%s' is a part of '%s' (%s), which goes on to call it; replace it",
            kn_module_shown(c), kn_module_shown(c->parent), c->parent->class_name);
    kn_root *root = c ? kn_host_calloc(1, sizeof *root) : NULL;
    if (!root)
        return NULL;
    kn_module_unlist(c);
    become_root(c, root);
    kn_module_unreplace(c);
    return c->self;
}

void kn_module_unreplace(kn_module_impl *m)
{
    if (m->replaced_by)
        m->replaced_by->stands_for = NULL;
    if (m->stands_for)
        m->stands_for->replaced_by = NULL;
    m->replaced_by = m->stands_for = NULL;
    m->place = NULL;
}

static bool runs(const kn_module_impl *m)
{
    for (const kn_frame *f = kn_context_get()->frame; f; f = f->parent)
        if (kn_frame_module(f) == m)
            return true;
    return false;
}

/* The module of m's subtree that came to the place of the freed one in a struct. */
static kn_module_impl *with_place(kn_module_impl *top, const void *place)
{
    kn_module_impl *m = top;
    while (m && m->place != place)
        m = kn_impl_next(m, top);
    return m;
}

static kn_module_impl *after_freed(const kn_module *m)
{
    const kn_frame *f = m && !m->impl ? kn_context_get()->frame : NULL;
    kn_module_impl *runs_now = kn_frame_module(f);
    kn_module_impl *found = runs_now ? with_place(kn_impl_root(runs_now), m) : NULL;
    return found && !runs(found) ? found : NULL;
}

kn_module_impl *kn_module_in_place(void *module, const char *what)
{
    kn_module_impl *m = kn_ok() ? after_freed(module) : NULL;
    if (!m && kn_ok())
        m = kn_impl(module, what);
    while (m && m->replaced_by && !runs(m->replaced_by))
        m = m->replaced_by;
    return m;
}

kn_module_impl *kn_module_in_its_place(void *module, const char *what)
{
    kn_module_impl *m = kn_module_in_place(module, what);
    if (m && m->self != module)
        return kn_fail_null(
            "%s: kn_module_replace put '%s' (%s) in the place of the module that is called; "
            "call kn_call, or a method of what is there now",
            what, kn_module_shown(m), m->class_name);
    return m;
}

/* Names m as c is and makes it a child of c's parent, which doesn't list it yet. */
static bool name_as(kn_module_impl *m, const kn_module_impl *c)
{
    char *name = kn_host_strdup(c->name);
    if (!name)
        return false;
    kn_host_free(m->name);
    m->name = name;
    m->parent = c->parent;
    m->at = c->at;
    if (kn_module_set_paths(m))
        return true;
    m->parent = NULL;
    return false;
}

/* m may come to a place below top. */
static bool may_come(const kn_module_impl *m, const kn_module_impl *top, const char *path)
{
    for (const kn_module_impl *up = top; up; up = up->parent)
        if (up == m)
            return kn_fail("kn_module_replace: the new module, for '%s', would become its own "
                           "ancestor",
                           path ? path : "");
    return !m->parent ||
           kn_fail("kn_module_replace: the new module has a place in a tree already ('%s')",
                   kn_module_shown(m));
}

kn_module *kn_module_replace(void *module, const char *path, void *child)
{
    kn_module_impl *m = kn_impl(child, "kn_module_replace");
    kn_module_impl *top = m ? kn_impl(module, "kn_module_replace") : NULL;
    if (m && !may_come(m, top, path))
        return NULL;
    if (m && top && !kn_root_may_merge(top, m, "kn_module_replace")) {
        kn_module_free(child);
        return NULL;
    }
    kn_module_impl *c = leaving(module, path, "kn_module_replace");
    if (c && c->replaced_by)
        kn_fail(
            "kn_module_replace: '%s' stands inside of its own replacement; replace '%s' instead",
            kn_module_shown(c), kn_module_shown(c->replaced_by));
    kn_root *root = c && m && kn_ok() ? kn_host_calloc(1, sizeof *root) : NULL;
    if (!root || !name_as(m, c)) {
        kn_host_free(root);
        if (m)
            kn_module_free(m->self);
        return NULL;
    }
    c->parent->child[c->at] = m->self;
    become_root(c, root);
    kn_root_merge(m);
    kn_params_changed(m);
    kn_module_unreplace(m);
    m->place = c->place ? c->place : c->self;
    c->place = NULL;
    c->replaced_by = m;
    m->stands_for = c;
    return c->self;
}
