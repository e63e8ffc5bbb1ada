/* fsdp/classes.c: options that name classes of modules: a name that no module has is a slip; and
 * the modules that recompute by their class or by a policy. */
#include "fsdp/build.h"
#include <string.h>

static bool fail_unknown(const char *name, const char *option, const kn_module_impl *top)
{
    char near[64], classes[2048] = ""; /* with '|' between them, as far as they fit */
    size_t used = 0;
    for (const kn_module_impl *m = top; m; m = kn_impl_next(m, top)) {
        int n =
            snprintf(classes + used, sizeof classes - used, "%s%s", used ? "|" : "", m->class_name);
        used += used + (size_t)n < sizeof classes ? (size_t)n : 0;
        classes[used] = '\0';
    }
    bool meant = kn_nearest(name, classes, near, sizeof near) != NULL;
    return kn_fail("fsdp: .%s names '%s', but no module of '%s' is of that class; %s%s%s"
                   "kn_module_print shows the classes",
                   option, name, top->class_name, meant ? "did you mean '" : "", meant ? near : "",
                   meant ? "'? " : "");
}

static bool known(const char *list, const char *option, kn_module_impl *top)
{
    const char *one;
    size_t length;
    while (kn_next_name(&list, &one, &length)) {
        char name[64];
        bool found = length == 0;
        snprintf(name, sizeof name, "%.*s", (int)length, one);
        for (const kn_module_impl *m = top; m && !found; m = kn_impl_next(m, top))
            found = strlen(m->class_name) == length && strncmp(m->class_name, one, length) == 0;
        if (!found)
            return fail_unknown(name, option, top);
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

bool kn_choose_recompute(const kn_fsdp_wrap_options *o, kn_module_impl *top)
{
    if (!o->recompute_class && !o->recompute_policy)
        return true;
    for (kn_module_impl *m = kn_impl_lowest(top); m && kn_ok(); m = kn_impl_next_up(m, top))
        m->recompute =
            m->recompute || kn_listed(o->recompute_class, m->class_name) ||
            (o->recompute_policy && o->recompute_policy(m->self, o->recompute_policy_arg));
    return kn_ok();
}
