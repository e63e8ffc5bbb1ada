/* tests/kernels/fences.c: memory of the CPU with fences around each block, so that a kernel, or a
 * library below it, which writes outside of its scratch is seen at once. A block holds NaN at
 * first: results show where one is read that nothing wrote. */
#include "tests/kernels/fences.h"

#include <pthread.h>
#include <string.h>

enum { FENCE = 1024, MARK = 0x5a, UNWRITTEN = 0xff, BLOCKS = 256 };

static struct {
    pthread_mutex_t lock;
    void *(*take)(kn_memory *self, size_t bytes);
    void (*give)(kn_memory *self, void *p, size_t bytes);
    char *block[BLOCKS]; /* those with fences, which others before them don't have */
    long broken;         /* bytes of fences that were written */
} f = { .lock = PTHREAD_MUTEX_INITIALIZER };

/* The place of p, or a free one of NULL, under the lock. */
static int place_of(const char *p)
{
    int i = 0;
    while (i < BLOCKS && f.block[i] != p)
        i++;
    return i;
}

static void *take(kn_memory *self, size_t bytes)
{
    char *p = f.take(self, bytes + (size_t)2 * FENCE);
    if (!p)
        return NULL;
    pthread_mutex_lock(&f.lock);
    const int i = place_of(NULL);
    if (i < BLOCKS)
        f.block[i] = p + FENCE;
    pthread_mutex_unlock(&f.lock);
    if (i == BLOCKS) {
        f.give(self, p, bytes + (size_t)2 * FENCE);
        return NULL;
    }
    memset(p, MARK, FENCE);
    memset(p + FENCE, UNWRITTEN, bytes);
    memset(p + FENCE + bytes, MARK, FENCE);
    return p + FENCE;
}

static void give(kn_memory *self, void *p, size_t bytes)
{
    pthread_mutex_lock(&f.lock);
    const int i = place_of(p);
    if (i < BLOCKS) {
        const char *before = (const char *)p - FENCE, *behind = (const char *)p + bytes;
        for (int k = 0; k < FENCE; k++)
            f.broken += (before[k] != MARK) + (behind[k] != MARK);
        f.block[i] = NULL;
    }
    pthread_mutex_unlock(&f.lock);
    if (i < BLOCKS)
        f.give(self, (char *)p - FENCE, bytes + (size_t)2 * FENCE);
    else
        f.give(self, p, bytes);
}

void fences_put(void)
{
    kn_memory *cpu = kn_device_memory(KN_CPU);
    if (f.take)
        return;
    f.take = cpu->take;
    f.give = cpu->give;
    cpu->take = take;
    cpu->give = give;
}

long fences_broken(void)
{
    pthread_mutex_lock(&f.lock);
    const long broken = f.broken;
    f.broken = 0;
    pthread_mutex_unlock(&f.lock);
    return broken;
}
