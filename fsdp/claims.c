/* fsdp/claims.c: which parameters a unit claims: what its modules hold and no unit below claimed,
 * without what the options ignore and what modules outside share. */
#include "fsdp/build.h"
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

/* Stops (false) at a module that holds the tensor. */
static bool not_held(kn_module *m, void *tensor)
{
    for (int i = 0; i < m->impl->params; i++)
        if (m->impl->param[i].tensor == tensor)
            return false;
    return true;
}

/* Whether a list or a pattern of o names e of m, or a listed module shares it. */
static bool ignores_param(const kn_fsdp_wrap_options *o, const kn_module_impl *m,
                          const kn_param_entry *e)
{
    for (int i = 0; o->ignored_params && o->ignored_params[i]; i++)
        if (o->ignored_params[i] == e->tensor)
            return true;
    for (int i = 0; o->ignored_modules && o->ignored_modules[i]; i++)
        if (!kn_apply_modules(o->ignored_modules[i], not_held, e->tensor))
            return true;
    char *name = o->ignore ? kn_param_path(m, e) : NULL;
    bool yes = name && kn_matched(o->ignore, name);
    kn_host_free(name);
    return yes;
}

typedef struct collecting {
    kn_claims *claims;
    kn_module_impl *const *module;
    int modules;
    const kn_fsdp_wrap_options *o;
    const kn_tensor *tensor; /* looked for by used_outside */
} collecting;

/* Stops (false) at a module outside that shares the tensor. */
static bool not_used_outside(kn_module *self, void *arg)
{
    const collecting *c = arg;
    kn_module_impl *m = self->impl;
    for (int i = 0; i < m->params; i++)
        if (!m->param[i].owner && m->param[i].tensor == c->tensor)
            return kn_module_inside(m, c->module, c->modules);
    return true;
}

static bool append(kn_claim **list, int *count, kn_module_impl *m, int index)
{
    kn_claim *more = kn_host_realloc(*list, (size_t)(*count + 1) * sizeof *more);
    if (!more)
        return false;
    *list = more;
    more[(*count)++] = (kn_claim){ .module = m, .index = index };
    return true;
}

/* e has values, or a rule for them: a module of another tree may have both. */
static bool has_beginning(const collecting *c, const kn_module_impl *m, const kn_param_entry *e)
{
    if (e->declared || e->has_init || c->o->device == KN_META)
        return true;
    return (kn_device_of(e->tensor) != KN_META && kn_storage_settle(e->tensor->storage)) ||
           (kn_ok() && kn_fail("kn_fsdp_wrap: '%s' of '%s' lies on meta, and a module of another "
                               "tree declared it; add that one to this tree before",
                               e->name, kn_module_shown(m)));
}

static bool claim_module(kn_module *self, void *arg)
{
    collecting *c = arg;
    kn_module_impl *m = self->impl;
    for (int i = 0; i < m->params; i++) {
        kn_param_entry *e = &m->param[i];
        if (!e->owner || e->source)
            continue;
        bool ignored = !e->ignored && ignores_param(c->o, m, e);
        if (!kn_ok() || (ignored && !append(&c->claims->ignored, &c->claims->ignores, m, i)))
            return false;
        c->tensor = e->tensor;
        if (ignored || e->ignored || !kn_apply_modules(kn_impl_root(m)->self, not_used_outside, c))
            continue;
        if (!append(&c->claims->list, &c->claims->count, m, i))
            return false;
        c->claims->elements += kn_numel(e->tensor);
        if (!has_beginning(c, m, e))
            return false;
    }
    return true;
}

bool kn_claims_collect(kn_claims *claims, kn_module_impl *const *module, int modules,
                       const kn_fsdp_wrap_options *o)
{
    collecting c = { claims, module, modules, o, NULL };
    for (int i = 0; i < modules; i++)
        if (!kn_apply_modules(module[i]->self, claim_module, &c))
            return false;
    return kn_ok();
}

void kn_claims_free(kn_claims *c)
{
    kn_host_free(c->list);
    kn_host_free(c->ignored);
    c->list = c->ignored = NULL;
}
