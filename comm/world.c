/* comm/world.c: the communicators of this process: which of them live, and what each says. */
#include "comm/comm_internal.h"
#include "kernels/kernels_internal.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/resource.h>

/* ---- which communicators live ---------------------------------------------------------------- */

static pthread_mutex_t lives_lock = PTHREAD_MUTEX_INITIALIZER;
static kn_comm *newest; /* of all threads, linked by older */
static int forks;       /* from the first process of this line to this one */

static void count_fork(void)
{
    forks++;
    pthread_mutex_init(&lives_lock, NULL); /* another thread may have held it */
}

__attribute__((constructor)) static void forks_register(void)
{
    pthread_atfork(NULL, NULL, count_fork);
}

bool kn_comm_is_forked(const kn_comm_world *w)
{
    return w->forks != forks;
}

static void comm_dies(kn_comm *c)
{
    kn_comm **at = &newest;
    pthread_mutex_lock(&lives_lock);
    while (*at && *at != c)
        at = &(*at)->older;
    if (*at)
        *at = c->older;
    pthread_mutex_unlock(&lives_lock);
}

/* c; NULL with an error where it has ended: its answers are then those of no communicator. */
static kn_comm *living(const kn_comm *c, const char *what)
{
    pthread_mutex_lock(&lives_lock);
    kn_comm *at = newest;
    while (at && at != c)
        at = at->older;
    pthread_mutex_unlock(&lives_lock);
    if (c && !at)
        kn_fail("%s: the communicator has ended, with kn_finish or the world that it was made from",
                what);
    return at;
}

bool kn_comm_usable(const kn_comm *c, const char *what)
{
    if (!living(c, what))
        return false;
    return !kn_comm_is_forked(c->world) || c->size == 1 ||
           kn_fail("%s: this process was forked from rank %d of communicator %s and is no rank: "
                   "leave collectives to the process that called kn_init",
                   what, c->rank, c->name);
}

/* ---- poison ---------------------------------------------------------------------------------- */

void kn_poison_set(kn_poison *p, int rank, const char *message)
{
    int none = 0;
    if (!atomic_compare_exchange_strong(&p->state, &none, 1))
        return;
    p->rank = rank;
    snprintf(p->text, sizeof p->text, "%s", message);
    atomic_store(&p->state, 2);
}

int kn_poisoned(kn_poison *p, const char **text)
{
    if (atomic_load(&p->state) != 2)
        return -1;
    if (text)
        *text = p->text;
    return p->rank;
}

bool kn_unpoisoned(kn_poison *p)
{
    const char *text;
    const int rank = kn_poisoned(p, &text);
    return rank < 0 || kn_fail_of_rank(rank, text);
}

void kn_comm_poison(kn_comm *c, const char *message)
{
    if (!(c = living(c, "kn_comm_poison")))
        return;
    kn_poison_set(c->world->poison, c->member[c->rank], message ? message : "poisoned");
    if (c->ops->tell)
        c->ops->tell(c);
}

/* ---- common state ---------------------------------------------------------------------------- */

int kn_rank(const kn_comm *c)
{
    c = living(c, "kn_rank");
    return c ? c->rank : 0;
}

int kn_comm_size(const kn_comm *c)
{
    c = living(c, "kn_comm_size");
    return c ? c->size : 1;
}

const char *kn_comm_backend(const kn_comm *c)
{
    c = living(c, "kn_comm_backend");
    return c ? c->ops->backend : "self";
}

bool kn_comm_holds(const kn_comm *c, int world_rank)
{
    for (int i = 0; i < c->size; i++)
        if (c->member[i] == world_rank)
            return true;
    return false;
}

kn_memory *kn_comm_memory(kn_comm *c)
{
    c = living(c, "kn_comm_memory");
    return c ? c->world->memory : kn_device_memory(KN_CPU);
}

kn_memory *kn_comm_memory_on(kn_comm *c, kn_device device)
{
    c = living(c, "kn_comm_memory_on");
    if (kn_device_is_apart(device) && c && c->size > 1)
        return kn_comm_device_memory(c, device);
    return device == KN_CPU ? kn_comm_memory(c) : kn_device_memory(device);
}

void kn_comm_enter(kn_comm *c, kn_comm_world *world, const kn_comm_ops *ops, int rank, int size,
                   const char *name)
{
    c->ops = ops;
    c->world = world;
    c->next = world->first;
    c->rank = rank;
    c->size = size;
    if (!c->family)
        c->family = c;
    snprintf(c->name, sizeof c->name, "%s", name ? name : "unnamed");
    pthread_mutex_lock(&lives_lock);
    c->older = newest;
    newest = c;
    pthread_mutex_unlock(&lives_lock);
    __atomic_store_n(&world->first, c, __ATOMIC_RELEASE); /* waiting workers read the list */
}

kn_comm_world *kn_comm_world_make(void)
{
    kn_comm_world *w = kn_host_calloc(1, sizeof *w);
    if (w) {
        w->timeout = kn_comm_default_timeout();
        w->next_id = 1; /* 0 is the world's */
        w->forks = forks;
        w->poison = &w->own;
    }
    return w;
}

void kn_comm_world_free(kn_comm_world *world)
{
    const kn_comm_ops *ops = world->first->ops;
    while (world->first) {
        kn_comm *c = world->first;
        world->first = c->next;
        comm_dies(c);
        kn_comm_device_free(c);
        kn_comm_drop(c);
    }
    kn_comm_device_world_free(world);
    if (ops->close)
        ops->close(world);
    kn_host_free(world);
}

void kn_comm_set_timeout(kn_comm *c, double seconds)
{
    if (!(seconds >= 0))
        kn_fail("kn_comm_set_timeout %g: must be more than 0 seconds (infinity: wait for ever; 0: "
                "the time that was inherited)",
                seconds);
    else if ((c = living(c, "kn_comm_set_timeout")))
        __atomic_store(&c->timeout, &seconds, __ATOMIC_RELAXED); /* workers read it */
}

double kn_comm_get_timeout(const kn_comm *c)
{
    c = living(c, "kn_comm_get_timeout");
    return c ? kn_comm_timeout(c) : HUGE_VAL;
}

void kn_comm_suspend_timeout(kn_comm *c)
{
    if ((c = living(c, "kn_comm_suspend_timeout")))
        atomic_fetch_add(&c->world->suspended, 1);
}

void kn_comm_resume_timeout(kn_comm *c)
{
    if ((c = living(c, "kn_comm_resume_timeout")))
        atomic_fetch_sub(&c->world->suspended, 1);
}

double kn_comm_timeout(const kn_comm *c)
{
    double seconds = 0;
    if (atomic_load(&c->world->suspended) > 0)
        return HUGE_VAL;
    for (const kn_comm *of = c; of && !(seconds > 0); of = of->parent)
        __atomic_load(&of->timeout, &seconds, __ATOMIC_RELAXED);
    return seconds > 0 ? seconds : c->world->timeout;
}

bool kn_comm_allow_files(const char *who, int files)
{
    struct rlimit most;
    const rlim_t need = (rlim_t)files;
    if (getrlimit(RLIMIT_NOFILE, &most) != 0 || most.rlim_cur >= need)
        return true;
    most.rlim_cur = need < most.rlim_max ? need : most.rlim_max;
    return (setrlimit(RLIMIT_NOFILE, &most) == 0 && most.rlim_cur >= need) ||
           kn_fail("%s needs %d open files, and the limit is %d (see ulimit -Hn)", who, files,
                   (int)most.rlim_max);
}

void kn_comm_slow(kn_comm *c, double latency_s, double bytes_per_s)
{
    if (!(c = living(c, "kn_comm_slow")))
        return;
    c->slow_latency = latency_s > 0 ? latency_s : 0;
    c->slow_rate = bytes_per_s > 0 ? bytes_per_s : 0;
}
