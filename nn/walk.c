/* nn/walk.c: walks over a tree, which need no memory: the parents lead back up. */
#include "nn/walk.h"
#include "kernels/error_internal.h"
#include "nn/nn_internal.h"
#include <string.h>

kn_walk kn_walk_begin(void *m)
{
    kn_walk w = { .name = "" };
    const kn_module_impl *i = kn_ok() ? kn_impl(m, "kn_walk_begin") : NULL;
    w._root = i ? i->self : NULL;
    return w;
}

kn_module_impl *kn_impl_next(const kn_module_impl *m, const kn_module_impl *top)
{
    if (m->children > 0)
        return m->child[0]->impl;
    while (m != top && m->at + 1 == m->parent->children)
        m = m->parent;
    return m != top ? m->parent->child[m->at + 1]->impl : NULL;
}

kn_module_impl *kn_impl_lowest(kn_module_impl *top)
{
    while (top && top->children > 0)
        top = top->child[0]->impl;
    return top;
}

kn_module_impl *kn_impl_next_up(const kn_module_impl *m, const kn_module_impl *top)
{
    if (m == top || m->at + 1 == m->parent->children)
        return m != top ? m->parent : NULL;
    return kn_impl_lowest(m->parent->child[m->at + 1]->impl);
}

/* Names what w has come to: its module, or with last a tensor of it. */
static bool set_name(kn_walk *w, const char *last)
{
    const char *path = w->module->impl->path, *root = w->_root->impl->path;
    const size_t cut = strlen(root);
    path += strlen(path) == cut ? cut : cut + (cut > 0);
    const int n =
        snprintf(w->name, sizeof w->name, "%s%s%s", path, *path && *last ? "." : "", last);
    return (size_t)n < sizeof w->name ||
           kn_fail("kn_walk: the name of '%s' in '%s' has %d characters, more than %zu", last, path,
                   n, sizeof w->name - 1);
}

bool kn_next_module(kn_walk *w)
{
    if (!kn_given(w, "kn_next_module", "the walk") || !w->_root || !kn_ok())
        return false;
    const kn_module_impl *root = w->_root->impl;
    const kn_module_impl *m = w->module ? kn_impl_next(w->module->impl, root) : root;
    if (!m) {
        w->_root = NULL;
        return false;
    }
    w->module = m->self;
    return set_name(w, "");
}

typedef struct entry {
    const char *name;
    kn_tensor *tensor;
} entry;

static entry entry_of(const kn_module_impl *m, int i, bool buffers)
{
    if (buffers)
        return i < m->buffers ? (entry){ m->buffer[i].name, m->buffer[i].tensor } : (entry){ 0 };
    return i < m->params ? (entry){ m->param[i].name, m->param[i].tensor } : (entry){ 0 };
}

/* m's own, m or NULL; NULL without an error if there is none. */
static kn_tensor *entry_named(const kn_module_impl *m, const char *name, bool buffers)
{
    entry e;
    for (int i = 0; m && (e = entry_of(m, i, buffers)).tensor; i++)
        if (strcmp(e.name, name) == 0)
            return e.tensor;
    return NULL;
}

/* The walk had t before entry number end of the module at. */
static bool had(const kn_walk *w, const kn_module_impl *at, int end, const kn_tensor *t,
                bool buffers)
{
    const kn_module_impl *root = w->_root->impl;
    for (const kn_module_impl *m = root; m; m = kn_impl_next(m, root)) {
        for (int i = 0; (m != at || i < end) && entry_of(m, i, buffers).tensor; i++)
            if (entry_of(m, i, buffers).tensor == t)
                return true;
        if (m == at)
            return false;
    }
    return false;
}

static bool next_tensor(kn_walk *w, bool buffers, const char *what)
{
    if (!kn_given(w, what, "the walk") || !w->_root || !kn_ok())
        return false;
    const kn_module_impl *root = w->_root->impl;
    const kn_module_impl *m = w->module ? w->module->impl : root;
    int i = w->_next;
    for (; m; m = kn_impl_next(m, root), i = 0)
        for (entry e; (e = entry_of(m, i, buffers)).tensor; i++) {
            if (had(w, m, i, e.tensor, buffers))
                continue;
            w->module = m->self;
            w->tensor = e.tensor;
            w->_next = i + 1;
            return set_name(w, e.name);
        }
    w->_root = NULL;
    w->tensor = NULL;
    return false;
}

bool kn_next_param(kn_walk *w)
{
    return next_tensor(w, false, "kn_next_param");
}

bool kn_next_buffer(kn_walk *w)
{
    return next_tensor(w, true, "kn_next_buffer");
}

/* ---- by name --------------------------------------------------------------------------------- */

kn_module *kn_look_module(void *m, const char *path)
{
    kn_module_impl *i = kn_impl(m, "kn_look_module");
    if (!i || !kn_given(path, "kn_look_module", "the path"))
        return NULL;
    i = kn_module_at(i, path, strlen(path));
    return i ? i->self : NULL;
}

static kn_tensor *look(const void *module, const char *path, bool buffers, const char *what)
{
    kn_module_impl *m = kn_impl(module, what);
    if (!m || !kn_given(path, what, "the path"))
        return NULL;
    const char *dot = strrchr(path, '.'), *name = dot ? dot + 1 : path;
    if (dot == path)
        return NULL;
    return entry_named(dot ? kn_module_at(m, path, (size_t)(dot - path)) : m, name, buffers);
}

/* The parameter or buffer of that dotted name, or an error. */
static kn_tensor *named(const void *module, const char *name, bool buffers, const char *what)
{
    if (!kn_given(name, what, "the name"))
        return NULL;
    const kn_module_impl *m = kn_module_holding(module, &name, what);
    kn_tensor *t = entry_named(m, name, buffers);
    if (m && !t)
        kn_fail("%s: '%s' (%s) has no %s '%s'", what, kn_module_shown(m), m->class_name,
                buffers ? "buffer" : "parameter", name);
    return t;
}

kn_tensor *kn_module_param(const void *module, const char *name)
{
    return named(module, name, false, "kn_module_param");
}

kn_tensor *kn_module_buffer(const void *module, const char *name)
{
    return named(module, name, true, "kn_module_buffer");
}

kn_tensor *kn_look_param(const void *m, const char *path)
{
    return look(m, path, false, "kn_look_param");
}

kn_tensor *kn_look_buffer(const void *m, const char *path)
{
    return look(m, path, true, "kn_look_buffer");
}
