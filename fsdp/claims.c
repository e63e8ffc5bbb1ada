/* fsdp/claims.c: which parameters a unit claims: what its modules hold and no unit below claimed,
 * without what the options ignore and what modules outside share. */
#include "fsdp/build.h"
#include "kernels/memory_internal.h"
#include <string.h>

bool kn_listed(const char *list, const char *name)
{
    const char *one;
    size_t n;
    while (kn_next_name(&list, &one, &n))
        if (strlen(name) == n && strncmp(one, name, n) == 0)
            return true;
    return false;
}

bool kn_ignores_module(const kn_fsdp_wrap_options *o, const kn_module_impl *m)
{
    for (; m && o->ignored_modules; m = m->parent)
        for (int i = 0; o->ignored_modules[i]; i++)
            if (o->ignored_modules[i]->impl == m)
                return true;
    return false;
}

/* A module at or below top holds t. */
static bool is_held(const kn_module_impl *top, const kn_tensor *t)
{
    for (const kn_module_impl *m = top; m; m = kn_impl_next(m, top))
        for (int i = 0; i < m->params; i++)
            if (m->param[i].tensor == t)
                return true;
    return false;
}

/* Whether a list or a pattern of o names e of m, or a listed module shares it. */
static bool ignores_param(const kn_fsdp_wrap_options *o, const kn_module_impl *m,
                          const kn_param_entry *e)
{
    for (int i = 0; o->ignored_params && o->ignored_params[i]; i++)
        if (o->ignored_params[i] == e->tensor)
            return true;
    for (int i = 0; o->ignored_modules && o->ignored_modules[i]; i++)
        if (is_held(o->ignored_modules[i]->impl, e->tensor))
            return true;
    char *name = o->ignore ? kn_param_path(m, e) : NULL;
    bool yes = name && kn_matched(o->ignore, name);
    kn_host_free(name);
    return yes;
}

/* The modules, and the options of the unit that they become. */
typedef struct wrapped {
    kn_module_impl *const *module;
    int modules;
    const kn_fsdp_wrap_options *o;
} wrapped;

/* A module of the tree outside of the wrapped ones shares t. */
static bool used_outside(const wrapped *w, const kn_tensor *t)
{
    const kn_module_impl *top = kn_impl_root(w->module[0]);
    for (const kn_module_impl *m = top; m; m = kn_impl_next(m, top))
        for (int i = 0; i < m->params; i++)
            if (!m->param[i].owner && m->param[i].tensor == t &&
                !kn_module_inside(m, w->module, w->modules))
                return true;
    return false;
}

static bool append(kn_claim **list, int64_t *room, int *count, kn_module_impl *m, int index)
{
    if (!kn_host_grow(list, room, *count + 1, sizeof **list))
        return false;
    (*list)[(*count)++] = (kn_claim){ .module = m, .index = index };
    return true;
}

/* e has values, or a rule for them: a module of another tree may have both. */
static bool has_beginning(const wrapped *w, const kn_module_impl *m, const kn_param_entry *e)
{
    if (e->declared || e->has_init || w->o->device == KN_META)
        return true;
    return (kn_device_of(e->tensor) != KN_META && kn_storage_settle(e->tensor->storage)) ||
           (kn_ok() && kn_fail("kn_fsdp_wrap: '%s' of '%s' lies on meta, and a module of another "
                               "tree declared it; add that one to this tree before",
                               e->name, kn_module_shown(m)));
}

static bool claim_module(kn_claims *c, kn_module_impl *m, const wrapped *w)
{
    for (int i = 0; i < m->params; i++) {
        kn_param_entry *e = &m->param[i];
        if (!e->owner || e->source)
            continue;
        bool ignored = !e->ignored && ignores_param(w->o, m, e);
        if (!kn_ok() || (ignored && !append(&c->ignored, &c->ignored_room, &c->ignores, m, i)))
            return false;
        if (ignored || e->ignored || used_outside(w, e->tensor))
            continue;
        if (!append(&c->list, &c->room, &c->count, m, i))
            return false;
        c->elements += kn_numel(e->tensor);
        if (!has_beginning(w, m, e))
            return false;
    }
    return true;
}

bool kn_claims_collect(kn_claims *claims, kn_module_impl *const *module, int modules,
                       const kn_fsdp_wrap_options *o)
{
    const wrapped w = { module, modules, o };
    bool ok = true;
    for (int i = 0; i < modules; i++)
        for (kn_module_impl *m = kn_impl_lowest(module[i]); ok && m;
             m = kn_impl_next_up(m, module[i]))
            ok = claim_module(claims, m, &w);
    return ok && kn_ok();
}

void kn_claims_free(kn_claims *c)
{
    kn_host_free(c->list);
    kn_host_free(c->ignored);
    c->list = c->ignored = NULL;
}
