/* fsdp/classes.c: options that name classes of modules: a name that no module has is a slip; and
 * the modules that recompute by their class or by a policy. */
#include "fsdp/build.h"
#include "kernels/error_internal.h"
#include <string.h>

typedef struct search {
    const char *name;
    size_t length;
    bool found;
    char classes[2048]; /* of all modules, with '|' between them, as far as they fit */
    size_t used;
} search;

static bool look_at(kn_module *self, void *arg)
{
    search *s = arg;
    const char *class = self->impl->class_name;
    s->found |= strlen(class) == s->length && strncmp(class, s->name, s->length) == 0;
    int n = snprintf(s->classes + s->used, sizeof s->classes - s->used, "%s%s", s->used ? "|" : "",
                     class);
    if (s->used + (size_t)n < sizeof s->classes)
        s->used += (size_t)n;
    s->classes[s->used] = '\0';
    return true;
}

static bool fail_unknown(const search *s, const char *option, const kn_module_impl *top)
{
    char name[64], near[64];
    snprintf(name, sizeof name, "%.*s", (int)s->length, s->name);
    bool meant = kn_nearest(name, s->classes, near, sizeof near) != NULL;
    return kn_fail("fsdp: .%s names '%s', but no module of '%s' is of that class; %s%s%s"
                   "kn_module_print shows the classes",
                   option, name, top->class_name, meant ? "did you mean '" : "", meant ? near : "",
                   meant ? "'? " : "");
}

static bool known(const char *list, const char *option, kn_module_impl *top)
{
    search s = { .length = 0 };
    while (kn_next_name(&list, &s.name, &s.length)) {
        s.found = s.length == 0;
        s.used = 0;
        kn_apply_modules(top->self, look_at, &s);
        if (!s.found)
            return fail_unknown(&s, option, top);
    }
    return true;
}

bool kn_classes_known(const kn_fsdp_wrap_options *o, kn_module_impl *m)
{
    kn_module_impl *top = kn_impl_root(m);
    return known(o->wrap_class, "wrap_class", top) &&
           known(o->recompute_class, "recompute_class", top) &&
           known(o->full_precision_class, "full_precision_class", top);
}

static bool choose(kn_module *self, void *arg)
{
    const kn_fsdp_wrap_options *o = arg;
    kn_module_impl *m = self->impl;
    m->recompute = m->recompute || kn_listed(o->recompute_class, m->class_name) ||
                   (o->recompute_policy && o->recompute_policy(self, o->recompute_policy_arg));
    return kn_ok();
}

bool kn_choose_recompute(const kn_fsdp_wrap_options *o, kn_module_impl *m)
{
    return (!o->recompute_class && !o->recompute_policy) ||
           kn_apply_modules(m->self, choose, (void *)o);
}
