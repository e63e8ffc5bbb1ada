/* tensor/handle.c: references to tensor handles: birth, kn_keep, kn_tensor_free, death,
 * survivors. */
#include "tensor/tensor_internal.h"
#include <stdatomic.h>

void (*kn_tensor_on_free)(kn_tensor *t);

static _Atomic int64_t live_count;

#ifdef KN_DEBUG
static pthread_mutex_t live_lock = PTHREAD_MUTEX_INITIALIZER;
static kn_tensor *live_first;

static void live_insert(kn_tensor *t)
{
    kn_context *c = kn_context_get();
    t->made_file = c->user_file;
    t->made_line = c->user_line;
    pthread_mutex_lock(&live_lock);
    t->live_next = live_first;
    if (live_first)
        live_first->live_prev = t;
    live_first = t;
    pthread_mutex_unlock(&live_lock);
}

static void live_remove(kn_tensor *t)
{
    pthread_mutex_lock(&live_lock);
    if (t->live_prev)
        t->live_prev->live_next = t->live_next;
    else
        live_first = t->live_next;
    if (t->live_next)
        t->live_next->live_prev = t->live_prev;
    pthread_mutex_unlock(&live_lock);
}
#endif

kn_tensor *kn_handle_new(void)
{
    kn_tensor *t = kn_host_calloc(1, sizeof *t);
    if (!t)
        return NULL;
    t->magic = KN_TENSOR_MAGIC;
    t->refs = 1;
    atomic_fetch_add(&live_count, 1);
#ifdef KN_DEBUG
    live_insert(t);
#endif
    return t;
}

/* The order matters: autograd drops node and leaf while the handle is whole, then the bytes go. */
static void handle_die(kn_tensor *t)
{
    if (kn_tensor_on_free)
        kn_tensor_on_free(t);
    t->magic = KN_TENSOR_DEAD;
    atomic_fetch_sub(&live_count, 1);
    kn_storage_unref(t->storage);
    t->storage = NULL;
    for (int i = 0; i < 2 && t->dtypes; i++)
        kn_storage_unref(t->dtypes->storage[i]);
    kn_host_free(t->dtypes);
    t->dtypes = NULL;
    kn_host_free(t->name);
    t->name = NULL;
#ifdef KN_DEBUG
    live_remove(t);
    t = kn_quarantine_swap(t);
#endif
    kn_host_free(t);
}

void kn_handle_unref(kn_tensor *t)
{
    if (--t->refs == 0)
        handle_die(t);
}

bool kn_check(const kn_tensor *t, const char *what)
{
    if (t && t->magic == KN_TENSOR_MAGIC)
        return true;
    if (!t)
        return kn_ok() ? kn_fail("%s: a tensor is NULL", what) : false;
    if (t->magic == KN_TENSOR_DEAD)
        return kn_fail("%s: tensor was freed: its scope ended or kn_tensor_free dropped the last "
                       "reference; kn_keep a tensor that is used longer",
                       what);
    return kn_fail("%s: %p is not a tensor, or one whose memory is gone", what, (const void *)t);
}

kn_tensor *kn_tensor_ref(kn_tensor *t)
{
    t->refs++;
    return t;
}

kn_tensor *kn_keep(kn_tensor *t)
{
    return kn_check(t, "keep") ? kn_tensor_ref(t) : NULL;
}

/* A reference that a scope holds is not the caller's to drop. */
void kn_tensor_free(kn_tensor *t)
{
    if (!t || !kn_check(t, "free"))
        return;
    if (t->refs <= t->scoped) {
        kn_fail("free: %s belongs to its scope and was never kept; let the scope end it, or "
                "kn_keep it first",
                KN_SHOWN(t));
        return;
    }
    kn_handle_unref(t);
}

int64_t kn_live_tensors(void)
{
    return atomic_load(&live_count);
}

void kn_list_live(FILE *out)
{
    if (!kn_given(out, "kn_list_live", "the file"))
        return;
#ifdef KN_DEBUG
    pthread_mutex_lock(&live_lock);
    for (const kn_tensor *t = live_first; t; t = t->live_next) {
        fprintf(out, "%s %s, %d references, made at %s:%d\n", KN_SHOWN(t), t->name ? t->name : "",
                t->refs, t->made_file ? t->made_file : "?", t->made_line);
    }
    pthread_mutex_unlock(&live_lock);
#else
    fprintf(out, "%lld live tensors (a debug build lists them)\n", (long long)kn_live_tensors());
#endif
}
