/* tests/fsdp/net.h: a small model for tests of sharding: odd sizes, a tied weight, a frozen
 * parameter, a buffer. Includes private headers: tests look at handles and units. */
#ifndef KNAP_TESTS_FSDP_NET_H
#define KNAP_TESTS_FSDP_NET_H

#include "tests/fsdp/ranks.h"
#include "fsdp/schedule.h"
#include "knap.h"
#include <sys/mman.h>

enum { NET_VOCAB = 11, NET_DIM = 6, NET_HIDDEN = 13, NET_BATCH = 5, NET_SEED = 99 };

typedef struct net {
    kn_module base;
    kn_embedding wte;
    kn_linear fc1, fc2; /* fc1.bias is frozen */
    kn_layer_norm ln;
    kn_module head; /* "weight" is wte's */
} net;

static inline kn_tensor *head_forward(kn_module *self, kn_tensor *x) /* (B, DIM) -> (B, VOCAB) */
{
    return kn_linear(x, kn_module_param(self, "weight"), NULL, false);
}

static inline kn_tensor *net_forward(kn_module *self, kn_tensor *ids) /* (B) -> (B, VOCAB) */
{
    net *m = (net *)self;
    kn_tensor *x = kn_call(&m->wte, ids);
    x = kn_call(&m->fc2, kn_gelu_tanh(kn_call(&m->fc1, x)));
    return kn_call(&m->head, kn_call(&m->ln, x));
}

static inline bool net_init(net *m, kn_device device)
{
    memset(m, 0, sizeof *m);
    bool ok = kn_module_init(&m->base, net_forward) &&
              kn_embedding_init(&m->wte, &m->base, "wte", NET_VOCAB, NET_DIM, .device = device) &&
              kn_linear_init(&m->fc1, &m->base, "fc1", NET_DIM, NET_HIDDEN, .device = device) &&
              kn_linear_init(&m->fc2, &m->base, "fc2", NET_HIDDEN, NET_DIM, .device = device) &&
              kn_layer_norm_init(&m->ln, &m->base, "ln", NET_DIM, .device = device) &&
              kn_module_init(&m->head, head_forward) && kn_module_add(&m->base, "head", &m->head) &&
              kn_share_parameter(&m->head, "weight", kn_module_param(&m->wte, "weight"));
    IN_SCOPE;
    ok = ok && kn_require_grad(kn_module_param(&m->fc1, "bias"), false) &&
         kn_buffer(&m->base, "scale",
                   kn_from(KN_F32, KN_CPU, (float[]){ 1, 2.5f, 1e-3f }, KN_SHAPE(3)));
    return ok;
}

/* The same model whole on this rank, with the values of a sharded one from the same seed. */
static inline bool net_reference(net *m)
{
    return net_init(m, KN_META) && kn_materialize(m, KN_CPU, NET_SEED);
}

/* The loss of micro-batch micro; scoped. */
static inline kn_tensor *net_loss(net *m, int micro)
{
    int64_t ids[NET_BATCH], targets[NET_BATCH];
    for (int i = 0; i < NET_BATCH; i++) {
        ids[i] = (i * 3 + micro * 5 + 1) % NET_VOCAB;
        targets[i] = (ids[i] * 7 + 2) % NET_VOCAB;
    }
    kn_tensor *x = kn_from(KN_I64, KN_CPU, ids, KN_SHAPE(NET_BATCH));
    kn_tensor *y = kn_from(KN_I64, KN_CPU, targets, KN_SHAPE(NET_BATCH));
    return kn_cross_entropy(kn_call(m, x), y);
}

static inline bool net_backward(net *m, int micro)
{
    IN_SCOPE;
    bool ok = kn_backward(net_loss(m, micro));
    return ok;
}

/* True if the handle of parameter p holds the same bytes as the whole tensor want. */
static inline bool same_bytes(const kn_tensor *p, const kn_tensor *want)
{
    int64_t n = kn_numel(want);
    size_t bytes = (size_t)n * kn_dtype_size(kn_dtype_of(want));
    OWNED_BYTES char *a = malloc(bytes + 1), *b = malloc(bytes + 1);
    bool same = kn_numel(p) == n && kn_dtype_of(p) == kn_dtype_of(want) &&
                kn_to_host(p, a, bytes) && kn_to_host(want, b, bytes) && memcmp(a, b, bytes) == 0;
    return same;
}

/* Reads parameter i of the sharded m (collective). True if it equals the tensor want. */
static inline bool reads_as(void *m, int i, const kn_tensor *want)
{
    size_t bytes = (size_t)kn_numel(want) * kn_dtype_size(kn_dtype_of(want));
    OWNED_BYTES char *a = malloc(bytes + 1), *b = malloc(bytes + 1);
    bool same = kn_param_read(m, i, a) && kn_to_host(want, b, bytes) && memcmp(a, b, bytes) == 0;
    return same;
}

/* True where every parameter of the sharded m (collective) reads as the same one of ref; else an
 * error names the first that doesn't. */
static inline bool all_read_as(void *m, void *ref)
{
    const kn_param *r;
    int n = kn_params(ref, &r);
    for (int i = 0; i < n; i++)
        if (!reads_as(m, i, r[i].tensor))
            return kn_ok() && kn_fail("'%s' differs", r[i].name);
    return n > 0;
}

/* Ways of sharding, for tests of every way of reading parameters. */
typedef struct way {
    kn_strategy strategy;
    kn_layout_kind layout;
    kn_mesh mesh;
    int64_t keep_whole_below;
    const char *offload_dir;
    int ranks; /* only for this number of ranks; 0: any */
} way;

static const way ways[] = {
    { .strategy = KN_FULL_SHARD, .layout = KN_LAYOUT_FLAT },
    { .strategy = KN_FULL_SHARD, .layout = KN_LAYOUT_PER_PARAM },
    { .strategy = KN_FULL_SHARD, .layout = KN_LAYOUT_RAGGED },
    { .strategy = KN_SHARD_GRAD_OP, .layout = KN_LAYOUT_FLAT },
    { .strategy = KN_NO_SHARD, .layout = KN_LAYOUT_FLAT },
    { .strategy = KN_NO_SHARD, .layout = KN_LAYOUT_PER_PARAM },
    { .layout = KN_LAYOUT_FLAT, .keep_whole_below = 20 },
    { .layout = KN_LAYOUT_PER_PARAM, .offload_dir = "/tmp" },
    { .strategy = KN_HYBRID_SHARD, .layout = KN_LAYOUT_FLAT, .mesh = { 2, 2 }, .ranks = 4 },
    { .strategy = KN_HYBRID_SHARD, .layout = KN_LAYOUT_PER_PARAM, .mesh = { 2, 2 }, .ranks = 4 },
    { .strategy = KN_HYBRID_SHARD_GRAD_OP,
      .layout = KN_LAYOUT_RAGGED,
      .mesh = { 2, 2 },
      .ranks = 4 },
};
enum { WAYS = sizeof ways / sizeof ways[0] };

#define WAY_OPTIONS(w)                                                                             \
    .strategy = (w)->strategy, .layout = (w)->layout, .mesh = (w)->mesh,                           \
    .keep_whole_below = (w)->keep_whole_below, .offload_dir = (w)->offload_dir

static inline bool net_wrap(net *m, kn_comm *world, const way *w)
{
    return kn_fsdp_wrap(m, world, WAY_OPTIONS(w), .wrap_class = "linear,layer_norm",
                        .seed = NET_SEED);
}

/* Declare m, which goes with its block: on meta, wrapped, wrapped in a way, whole. */
#define NET(m)                                                                                     \
    OWNED_MODULE net m;                                                                            \
    KN_CHECK(net_init(&m, KN_META))
#define NET_WRAPPED(m, ...)                                                                        \
    NET(m);                                                                                        \
    KN_CHECK(kn_fsdp_wrap(&m, __VA_ARGS__))
#define NET_IN_WAY(m, world, way)                                                                  \
    NET(m);                                                                                        \
    KN_CHECK(net_wrap(&m, world, way))
#define NET_WHOLE(m)                                                                               \
    OWNED_MODULE net m;                                                                            \
    KN_CHECK(net_reference(&m))

/* In each way of sharding, which arg points to, on each number of ranks. AddressSanitizer's suite
 * takes one in five of these, each case others. */
static inline void in_ways(const char *ranks, rank_spawn by, rank_body body)
{
    int number = rank_case;
    for (int i = 0; i < WAYS; i++)
        for (const char *n = ways[i].ranks ? "4" : ranks; *n; n++)
            if (number++ % kn_one_in(5) == 0)
                on_each((char[]){ *n, 0 }, by, body, (void *)&ways[i], i);
}

/* On 1 to 4 processes, or on 1, 2 and 4 threads. */
static inline void in_all_ways(rank_body body)
{
    in_ways(THREADS_ONLY ? "12" : "1234", spawn_processes, body);
}

static inline void in_all_ways_on_threads(rank_body body)
{
    in_ways("124", spawn_threads, body);
}
#define IN_ALL_WAYS .by = in_all_ways

#endif
