/* nn/module.c: the tree of modules: making, naming, walking, freeing, printing. */
#include "kernels/error_internal.h"
#include "nn/edit.h"
#include "nn/walk.h"
#include <pthread.h>
#include <stddef.h>
#include <string.h>

/* Records of modules that live, by address. A struct may hold any bytes before kn_module_init, so
 * the address in it is compared, never followed, until it is known to be one. */
enum { SLOTS = 4096 };
static kn_module_impl *live[SLOTS];
static pthread_mutex_t live_lock = PTHREAD_MUTEX_INITIALIZER;

static kn_module_impl **slot_of(const kn_module_impl *i)
{
    return &live[(uintptr_t)i / _Alignof(max_align_t) % SLOTS];
}

static void begin_life(kn_module_impl *i)
{
    pthread_mutex_lock(&live_lock);
    i->next_live = *slot_of(i);
    *slot_of(i) = i;
    pthread_mutex_unlock(&live_lock);
}

static void end_life(kn_module_impl *i)
{
    pthread_mutex_lock(&live_lock);
    kn_module_impl **at = slot_of(i);
    while (*at != i)
        at = &(*at)->next_live;
    *at = i->next_live;
    pthread_mutex_unlock(&live_lock);
}

static kn_module_impl *record_of(const void *m)
{
    const kn_module_impl *i = m ? ((const kn_module *)m)->impl : NULL;
    pthread_mutex_lock(&live_lock);
    kn_module_impl *at = *slot_of(i);
    while (at && at != i)
        at = at->next_live;
    pthread_mutex_unlock(&live_lock);
    return at;
}

kn_module_impl *kn_impl(const void *m, const char *what)
{
    kn_module_impl *i = record_of(m);
    if (i)
        return i;
    return kn_fail_null(
        "%s: not an initialised module, or one that was freed (call kn_module_init or the "
        "layer's init first; kn_module must be the first member of the struct)",
        what);
}

/* "mlp_forward" -> "mlp"; a leading "&" is skipped. */
static char *class_of(const char *function)
{
    while (*function == '&' || *function == ' ')
        function++;
    char *s = kn_host_strdup(function);
    size_t n = s ? strlen(s) : 0;
    if (n > 8 && strcmp(s + n - 8, "_forward") == 0)
        s[n - 8] = '\0';
    return s;
}

bool kn_module_init_(kn_module *m, kn_forward1 f1, kn_forward_n fn, const char *class_name)
{
    if (!kn_ok())
        return false;
    if (!m)
        return kn_fail("kn_module_init: the module is NULL");
    kn_module_impl *before = record_of(m);
    if (before && before->self == m && before->parent)
        return kn_fail("kn_module_init: the struct holds '%s' (%s) already, which is in a tree; "
                       "take another struct, or kn_module_remove that one before",
                       before->path, before->class_name);
    kn_module_impl *i = kn_host_calloc(1, sizeof *i);
    m->impl = i;
    if (!i)
        return false;
    begin_life(i);
    i->self = m;
    i->forward = (kn_method){ f1, fn };
    i->training = true;
    i->name = kn_host_strdup("");
    i->path = kn_host_strdup("");
    i->class_name = class_of(class_name);
    i->life = kn_life_new(i);
    if (i->life && kn_root_begin(i) && i->name && i->path && i->class_name)
        return true;
    kn_module_free(m);
    return false;
}

bool kn_module_set_paths(kn_module_impl *top)
{
    for (kn_module_impl *m = top; m; m = kn_impl_next(m, top)) {
        const char *p = m->parent->path;
        size_t n = strlen(p) + strlen(m->name) + 2;
        char *path = kn_host_alloc(n);
        if (!path)
            return false;
        snprintf(path, n, "%s%s%s", p, *p ? "." : "", m->name);
        kn_host_free(m->path);
        m->path = path;
    }
    return true;
}

static bool may_be_added(kn_module_impl *p, const char *name, kn_module_impl *c)
{
    if (!name || !*name || strchr(name, '.'))
        return kn_fail("kn_module_add: the name '%s' must not be empty or hold a dot",
                       name ? name : "");
    for (int i = 0; i < p->children; i++)
        if (strcmp(p->child[i]->impl->name, name) == 0)
            return kn_fail("kn_module_add: '%s' has a child named '%s' already", kn_module_shown(p),
                           name);
    kn_module **list = kn_host_realloc(p->child, (size_t)(p->children + 1) * sizeof *list);
    char *copy = kn_host_strdup(name);
    if (list)
        p->child = list;
    if (!list || !copy) {
        kn_host_free(copy);
        return false;
    }
    kn_host_free(c->name);
    c->name = copy;
    c->parent = p;
    c->at = p->children;
    return kn_module_set_paths(c);
}

bool kn_module_add(void *parent, const char *name, void *child)
{
    kn_module_impl *p = kn_impl(parent, "kn_module_add"), *c = kn_impl(child, "kn_module_add");
    if (c && c->parent)
        return kn_fail("kn_module_add: '%s' has a place in the tree already ('%s')",
                       name ? name : c->class_name, kn_module_shown(c));
    for (kn_module_impl *up = p; c && up; up = up->parent)
        if (up == c)
            return kn_fail("kn_module_add: '%s' would become its own ancestor",
                           name ? name : c->class_name);
    if (p && c && kn_ok() && kn_root_may_merge(p, c, "kn_module_add") && may_be_added(p, name, c)) {
        p->child[p->children++] = child;
        kn_root_merge(c);
        kn_params_changed(p);
        return true;
    }
    if (c)
        kn_module_free(child);
    return false;
}

static kn_values list_forward(kn_module *self, kn_values in, const void *arg)
{
    (void)in;
    (void)arg;
    kn_fail("'%s' is a list of modules and cannot be called itself; call its children",
            kn_module_shown(self->impl));
    return (kn_values){ 0 };
}

bool kn_module_list_init(kn_module *m, kn_module *parent, const char *name)
{
    if (!kn_module_init_n(m, list_forward))
        return false;
    m->impl->is_list = true;
    return !parent || kn_module_add(parent, name, m);
}

static void free_entries(kn_module_impl *i)
{
    for (int k = 0; k < i->params; k++) {
        kn_storage *s = i->param[k].tensor->storage;
        if (s->first_arg == i && s->refs + i->param[k].tensor->refs > 2) /* still referenced */
            kn_storage_settle(s);
        if (s->first_arg == i)
            s->first = NULL;
        kn_tensor_free(i->param[k].tensor);
        kn_host_free(i->param[k].name);
    }
    for (int k = 0; k < i->buffers; k++) {
        kn_tensor_free(i->buffer[k].tensor);
        kn_host_free(i->buffer[k].name);
    }
}

void kn_module_free(void *root)
{
    kn_module_impl *i = record_of(root);
    if (!i)
        return;
    kn_live_module_dies(i);
    kn_life_end(i->life);
    i->life = NULL;
    kn_owners_leave(i);
    kn_module_unlist(i);
    kn_params_free(i);
    while (i->children > 0)
        kn_module_free(i->child[0]);
    if (i->unit) {
        i->unit->leave(i->unit->unit, i);
        kn_host_free(i->unit);
    }
    free_entries(i);
    if (i->clipping)
        i->clipping->free(i->clipping);
    kn_root_end(i);
    kn_module_impl *old = i->stands_for;
    kn_module_unreplace(i);
    if (old && !old->parent)
        kn_module_free(old->self);
    end_life(i);
    i->self->impl = NULL;
    kn_host_free(i->child);
    kn_host_free(i->param);
    kn_host_free(i->buffer);
    kn_host_free(i->hook);
    kn_host_free(i->data);
    kn_host_free(i->name);
    kn_host_free(i->path);
    kn_host_free(i->class_name);
    kn_host_free(i);
}

const char *kn_module_shown(const kn_module_impl *m)
{
    return *m->path ? m->path : m->class_name;
}

const char *kn_module_path(const void *m)
{
    kn_module_impl *i = kn_impl(m, "kn_module_path");
    return i ? i->path : "";
}

const char *kn_module_class(const void *m)
{
    kn_module_impl *i = kn_impl(m, "kn_module_class");
    return i ? i->class_name : "";
}

int kn_module_children(const void *m)
{
    kn_module_impl *i = kn_impl(m, "kn_module_children");
    return i ? i->children : 0;
}

kn_module *kn_module_child(const void *m, int k)
{
    kn_module_impl *i = kn_impl(m, "kn_module_child");
    if (i && k >= 0 && k < i->children)
        return i->child[k];
    if (i)
        kn_fail("kn_module_child: '%s' has %d children, there is no number %d", kn_module_shown(i),
                i->children, k);
    return NULL;
}

kn_module_impl *kn_module_at(kn_module_impl *m, const char *path, size_t length)
{
    for (const char *rest = path, *end = path + length; m && rest < end;) {
        const char *dot = memchr(rest, '.', (size_t)(end - rest));
        const size_t n = (size_t)((dot ? dot : end) - rest);
        kn_module_impl *next = NULL;
        for (int i = 0; i < m->children && !next; i++) {
            kn_module_impl *c = m->child[i]->impl;
            if (strlen(c->name) == n && strncmp(c->name, rest, n) == 0)
                next = c;
        }
        if (dot && dot + 1 == end)
            return NULL; /* a dot at the end */
        m = next;
        rest += n + (dot != NULL);
    }
    return m;
}

kn_module *kn_module_find(void *root, const char *path)
{
    kn_module_impl *m = kn_impl(root, "kn_module_find");
    if (!m || !kn_given(path, "kn_module_find", "the path"))
        return NULL;
    kn_module_impl *found = kn_module_at(m, path, strlen(path));
    if (!found)
        kn_fail("kn_module_find: there is no module '%s' below '%s'", path, kn_module_shown(m));
    return found ? found->self : NULL;
}

bool kn_module_has(const void *module, const char *path)
{
    kn_module_impl *m = kn_impl(module, "kn_module_has");
    if (!m || !kn_given(path, "kn_module_has", "the path"))
        return false;
    return kn_module_at(m, path, strlen(path)) || kn_look_param(module, path) ||
           kn_look_buffer(module, path);
}

bool kn_apply_modules(void *m, bool (*fn)(kn_module *m, void *arg), void *arg)
{
    kn_module_impl *i = kn_impl(m, "kn_apply_modules");
    if (!i || !kn_given(fn, "kn_apply_modules", "the function to apply"))
        return false;
    for (int k = 0; k < i->children; k++)
        if (!kn_apply_modules(i->child[k], fn, arg))
            return false;
    return fn(i->self, arg);
}

void kn_train(void *module, bool on)
{
    kn_module_impl *top = kn_impl(module, "kn_train");
    for (kn_module_impl *m = top; m; m = kn_impl_next(m, top))
        m->training = on;
}

bool kn_training(const void *m)
{
    kn_module_impl *i = kn_impl(m, "kn_training");
    return i && i->training;
}

void kn_freeze(void *module, bool frozen)
{
    kn_module_impl *top = kn_impl(module, "kn_freeze");
    bool ok = true;
    for (kn_module_impl *m = top; m; m = kn_impl_next(m, top))
        for (int i = 0; ok && i < m->params; i++)
            ok = kn_require_grad(m->param[i].tensor, !frozen) != NULL;
}

bool kn_recompute(void *m, bool on)
{
    kn_module_impl *i = kn_impl(m, "kn_recompute");
    if (i)
        i->recompute = on;
    return i != NULL;
}

bool kn_module_set_data(void *m, const void *data, size_t size)
{
    kn_module_impl *i = kn_impl(m, "kn_module_set_data");
    if (!i)
        return false;
    if (i->data)
        return kn_fail(
            "kn_module_set_data: '%s' (%s) has data already; a module takes it once, and layers of "
            "the library keep their settings there",
            kn_module_shown(i), i->class_name);
    if (size == 0)
        return kn_fail("kn_module_set_data: the size of the data of '%s' is 0", kn_module_shown(i));
    i->data = kn_host_calloc(1, size);
    i->data_size = i->data ? size : 0;
    if (i->data && data)
        memcpy(i->data, data, size);
    return i->data != NULL;
}

void *kn_module_data(const void *m)
{
    const kn_module_impl *i = kn_impl(m, "kn_module_data");
    return i ? i->data : NULL;
}

static void print_tree(FILE *out, const kn_module_impl *m, int depth)
{
    fprintf(out, "%*s%s%s%s%s\n", 2 * depth, "", m->name, *m->name ? ": " : "", m->class_name,
            m->unit ? " [unit]" : "");
    for (int i = 0; i < m->params; i++)
        fprintf(out, "%*s%s %s%s%s\n", 2 * depth + 2, "", m->param[i].name,
                KN_SHOWN(m->param[i].tensor), m->param[i].owner ? "" : " (shared)",
                m->param[i].tensor->requires_grad ? "" : " (frozen)");
    for (int i = 0; i < m->buffers; i++)
        fprintf(out, "%*s%s %s (buffer%s)\n", 2 * depth + 2, "", m->buffer[i].name,
                KN_SHOWN(m->buffer[i].tensor), m->buffer[i].not_saved ? ", not saved" : "");
    for (int i = 0; i < m->children; i++)
        print_tree(out, m->child[i]->impl, depth + 1);
}

bool kn_module_print(FILE *out, const void *m)
{
    kn_module_impl *i = kn_impl(m, "kn_module_print");
    if (!i || !kn_given(out, "kn_module_print", "the file to print to"))
        return false;
    print_tree(out, i, 0);
    fprintf(out, "%lld parameters\n", (long long)kn_param_count((void *)m));
    return true;
}
