/* kernels/thread.c: what a thread of the program has: its context, from beginning to end, and how
 * many threads and cores it may use.
 *
 * The context lives in thread-local storage, so finding it cannot fail. A thread that ends takes
 * its context along; a stream worker borrows its creator's. */
#include "kernels/environment.h"
#include "kernels/graph_internal.h"
#include "kernels/kernels_internal.h"
#include "kernels/team.h"
#include "kernels/trace.h"

#include <string.h>

static _Thread_local kn_context own;
static _Thread_local kn_context *current;
static _Thread_local bool worker;

static pthread_key_t exit_key;
static pthread_once_t exit_key_once = PTHREAD_ONCE_INIT;
static bool exit_key_made;

static const char *no_path(const kn_context *c)
{
    (void)c;
    return "";
}

const char *(*kn_context_path)(const kn_context *c) = no_path;
void (*kn_context_on_end)(kn_context *c);
void (*kn_process_on_begin)(void);

static void end_at_exit(void *unused)
{
    (void)unused;
    kn_context_end();
}

static void make_exit_key(void)
{
    exit_key_made = pthread_key_create(&exit_key, end_at_exit) == 0;
    if (kn_process_on_begin)
        kn_process_on_begin();
}

static kn_context *context_begin(void)
{
    memset(&own, 0, sizeof own);
    pthread_mutex_init(&own.lock, NULL);
    pthread_mutex_init(&own.trace_lock, NULL);
    own.threads = kn_team_default_size();
    own.world = 1;
    own.rng.seed = 1337;
    current = &own;
    pthread_once(&exit_key_once, make_exit_key);
    if (exit_key_made)
        pthread_setspecific(exit_key, &own);
    if (kn_env_switch("KNAP_ABORT", &own.abort_on_error))
        kn_env_size("KNAP_MEMORY_LIMIT", &own.memory_limit);
    return current;
}

kn_context *kn_context_get(void)
{
    return current ? current : context_begin();
}

void kn_context_adopt(kn_context *c)
{
    current = c;
    worker = true;
}

bool kn_context_is_worker(void)
{
    return worker;
}

void kn_context_end(void)
{
    kn_context *c = current;
    if (!c || worker)
        return;
    kn_graphs_end(c);
    for (kn_stream *s = c->streams; s; s = s->next)
        kn_stream_sync(s); /* memory freed by the providers above must not be in use */
    if (kn_context_on_end)
        kn_context_on_end(c);
    while (c->streams)
        kn_stream_destroy(c->streams);
    kn_team_end();
    kn_trace_stop(NULL);
    pthread_mutex_destroy(&c->lock);
    pthread_mutex_destroy(&c->trace_lock);
    memset(c, 0, sizeof *c);
    current = NULL;
    if (exit_key_made)
        pthread_setspecific(exit_key, NULL);
}

/* ---- hashes ------------------------------------------------------------------------------ */

/* A step of splitmix64 over the pair (Steele, Lea, Flood: Fast splittable pseudorandom number
 * generators, 2014). */
uint64_t kn_hash64(uint64_t a, uint64_t b)
{
    uint64_t z = a * 0x9e3779b97f4a7c15u + b + 0x632be59bd9b4e019u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

uint64_t kn_hash_string(const char *s)
{
    uint64_t h = 0xcbf29ce484222325u; /* FNV-1a, then mixed */
    for (; *s; s++)
        h = (h ^ (unsigned char)*s) * 0x100000001b3u;
    return kn_hash64(h, 0);
}

/* ---- threads ----------------------------------------------------------------------------- */

#define MOST_THREADS 4096

void kn_set_threads(int n)
{
    if (worker)
        return;
    if (n < 0 || n > MOST_THREADS) {
        kn_fail("kn_set_threads: %d threads; 1 to %d are supported", n, MOST_THREADS);
        return;
    }
    kn_context *c = kn_context_get();
    n = n < 1 ? 1 : n;
    if (n != c->threads)
        kn_team_end();
    c->threads = n;
}

int kn_threads(void)
{
    return worker ? 1 : kn_context_get()->threads;
}

void kn_set_free_cores(int n)
{
    kn_context *c = kn_context_get();
    pthread_mutex_lock(&c->lock);
    c->free_cores = n < 0 ? 0 : n;
    pthread_mutex_unlock(&c->lock);
}

bool kn_core_take(kn_context *c)
{
    pthread_mutex_lock(&c->lock);
    bool taken = c->free_cores > 0;
    c->free_cores -= taken;
    pthread_mutex_unlock(&c->lock);
    return taken;
}

void kn_core_return(kn_context *c)
{
    pthread_mutex_lock(&c->lock);
    c->free_cores++;
    pthread_mutex_unlock(&c->lock);
}
