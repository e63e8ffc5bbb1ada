/* optim/live.c: the optimizers that live, so that one that was freed, or whose module was, is an
 * error and no crash. */
#include "optim/optim_internal.h"
#include <pthread.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static kn_optim *first;

/* The link to o; that at the end if o isn't there. */
static kn_optim **link_to(const kn_optim *o)
{
    kn_optim **at = &first;
    while (*at && *at != o)
        at = &(*at)->next;
    return at;
}

void kn_optim_born(kn_optim *o)
{
    pthread_mutex_lock(&lock);
    o->next = first;
    first = o;
    pthread_mutex_unlock(&lock);
}

bool kn_optim_dies(const kn_optim *o)
{
    pthread_mutex_lock(&lock);
    kn_optim **at = link_to(o);
    bool found = *at != NULL;
    if (found)
        *at = o->next;
    pthread_mutex_unlock(&lock);
    return found;
}

bool kn_optim_lives(const kn_optim *o, const char *what)
{
    if (!o)
        return false;
    pthread_mutex_lock(&lock);
    bool found = *link_to(o) != NULL, module = found && o->module;
    pthread_mutex_unlock(&lock);
    return module || kn_fail("%s: the %s was freed; make a new optimizer", what,
                             found ? "module of the optimizer" : "optimizer");
}

static void module_dies(const kn_module_impl *m)
{
    pthread_mutex_lock(&lock);
    for (kn_optim *o = first; o; o = o->next)
        o->module = o->module == m ? NULL : o->module;
    pthread_mutex_unlock(&lock);
}

__attribute__((constructor)) static void watch_modules(void)
{
    kn_module_on_free = module_dies;
}
