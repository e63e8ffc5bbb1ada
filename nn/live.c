/* nn/live.c: things that were made for a module and live, so that one that was freed, or whose
 * module was, is an error and no crash. */
#include "nn/nn_internal.h"
#include <pthread.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static kn_live *first;

/* The link to l; that at the end if l isn't there. */
static kn_live **link_to(const kn_live *l)
{
    kn_live **at = &first;
    while (*at && *at != l)
        at = &(*at)->next;
    return at;
}

void kn_live_begin(kn_live *l, kn_module_impl *m)
{
    pthread_mutex_lock(&lock);
    *l = (kn_live){ first, m };
    first = l;
    pthread_mutex_unlock(&lock);
}

bool kn_live_end(const kn_live *l, const char *thing, const char *what)
{
    if (!l)
        return false;
    pthread_mutex_lock(&lock);
    kn_live **at = link_to(l);
    bool found = *at != NULL;
    if (found)
        *at = l->next;
    pthread_mutex_unlock(&lock);
    return found || kn_fail("%s: the %s was freed already", what, thing);
}

bool kn_is_live(const kn_live *l)
{
    pthread_mutex_lock(&lock);
    bool found = l && *link_to(l) != NULL;
    pthread_mutex_unlock(&lock);
    return found;
}

bool kn_lives(const kn_live *l, const char *thing, const char *what)
{
    if (!l)
        return false;
    pthread_mutex_lock(&lock);
    bool found = *link_to(l) != NULL, module = found && l->module;
    pthread_mutex_unlock(&lock);
    return module || kn_fail("%s: the %s%s was freed; make a new %s", what,
                             found ? "module of the " : "", thing, thing);
}

void kn_live_module_dies(const kn_module_impl *m)
{
    pthread_mutex_lock(&lock);
    for (kn_live *l = first; l; l = l->next)
        if (l->module == m) /* nothing is written to those of other threads */
            l->module = NULL;
    pthread_mutex_unlock(&lock);
}
