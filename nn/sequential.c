/* nn/sequential.c: modules that are called one after another, and functions as modules. */
#include "nn/layers.h"
#include "nn/nn_internal.h"
#include <string.h>

/* ---- activation ------------------------------------------------------------------------------ */

typedef kn_tensor *(*unary)(kn_tensor *x);

static kn_tensor *activation_forward(kn_module *self, kn_tensor *x)
{
    const unary *function = kn_module_data(self);
    return (*function)(x);
}

bool kn_activation_init(kn_activation *a, kn_module *parent, const char *name,
                        kn_tensor *(*function)(kn_tensor *x))
{
    if (!function)
        return kn_fail("kn_activation_init: '%s' has no function (NULL); pass one such as kn_relu",
                       name ? name : "");
    return kn_layer_begin(a, parent, name, activation_forward, "activation", &function,
                          sizeof function);
}

/* ---- sequential ------------------------------------------------------------------------------ */

static kn_tensor *sequential_forward(kn_module *self, kn_tensor *x)
{
    for (int i = 0; x && i < self->impl->children; i++)
        x = kn_call(self->impl->child[i], x);
    return x;
}

bool kn_sequential_init(kn_sequential *s, kn_module *parent, const char *name)
{
    return kn_module_init((kn_module *)s, sequential_forward) &&
           (!parent || kn_module_add(parent, name, &s->base));
}

/* The number of children, or the next one that names none of them: some may have been removed. */
static int free_number(const kn_module_impl *m)
{
    int number = m->children;
    for (int i = 0; i < m->children; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", number);
        if (strcmp(m->child[i]->impl->name, name) == 0)
            number++, i = -1;
    }
    return number;
}

/* After an error kn_module_add frees the child. */
bool kn_sequential_append(kn_sequential *s, void *child)
{
    char name[16];
    kn_module_impl *m = kn_impl(s, "kn_sequential_append");
    if (m && m->forward.f1 != sequential_forward)
        kn_fail("kn_sequential_append: '%s' (%s) isn't a kn_sequential", kn_module_shown(m),
                m->class_name);
    snprintf(name, sizeof name, "%d", m ? free_number(m) : 0);
    return kn_module_add(m ? m->self : NULL, name, child);
}

bool kn_sequential_extend(kn_sequential *s, void *const *children, int n)
{
    bool ok = n >= 0 || kn_fail("kn_sequential_extend: the number of modules is %d", n);
    if (n > 0 && !kn_given(children, "kn_sequential_extend", "the list of modules"))
        return false;
    for (int i = 0; i < n; i++)
        ok = kn_sequential_append(s, children[i]) && ok;
    return ok;
}
