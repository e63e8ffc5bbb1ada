/* autograd/seeds.c: seeds of draws in a recorded step. A replay draws the numbers of its own step,
 * so its kernels read the seed from device memory; the host writes it before each launch. A
 * recorded step may do several optimizer steps: the seed of the k-th lies in word k. */
#include "autograd/autograd_internal.h"
#include "kernels/graph_internal.h"

enum { WORDS = 64 };

typedef struct seeds {
    kn_graph *graph;
    uint64_t *word; /* in the graph's memory */
    int used;
} seeds;

/* Seed of the k-th step that graph does in its next launch. */
static uint64_t seed_of(const kn_graph *g, int k)
{
    return kn_hash64(g->context->rng.seed, (uint64_t)(g->step + k));
}

static bool send(void *arg, bool first)
{
    const seeds *s = arg;
    uint64_t value[WORDS];
    (void)first;
    for (int k = 0; k < s->used; k++)
        value[k] = seed_of(s->graph, k);
    return kn_transfer(kn_compute_stream(s->graph->device), s->word, value,
                       (size_t)s->used * sizeof *value, KN_TO_DEVICE, false);
}

static void drop(void *arg)
{
    seeds *s = arg;
    if (s->word)
        kn_give(kn_device_memory(s->graph->device), s->word, WORDS * sizeof *s->word,
                KN_MEM_WORKSPACE);
    kn_host_free(s);
}

/* The running recording's, made by its first draw. */
static seeds *seeds_of(kn_graph *g)
{
    const kn_graph_hook *hook = kn_graph_find_hook(g, NULL, send);
    if (hook)
        return hook->arg;
    seeds *s = kn_host_calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->graph = g;
    s->word = kn_take(kn_device_memory(g->device), WORDS * sizeof *s->word, KN_MEM_WORKSPACE);
    if (s->word && kn_graph_on_launch((kn_graph_hook){ .before = send, .drop = drop, .arg = s }))
        return s;
    drop(s);
    return NULL;
}

const uint64_t *kn_seed_place(kn_device d, uint64_t seed, bool *ok)
{
    kn_graph *g = kn_graph_recording();
    *ok = true;
    if (!g || g->device != d)
        return NULL;
    seeds *s = seeds_of(g);
    for (int k = 0; s && k < WORDS; k++) {
        if (seed_of(g, k) != seed)
            continue;
        s->used = k < s->used ? s->used : k + 1;
        return s->word + k;
    }
    *ok = s &&
          kn_fail("a draw of dropout belongs to another step than the %d from %lld on that can be "
                  "recorded as one; record forward and backward together",
                  WORDS, (long long)g->step);
    return NULL;
}
