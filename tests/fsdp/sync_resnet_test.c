/* tests/fsdp/sync_resnet_test.c: a residual net whose batch norms take the batches of all ranks as
 * one, sharded: as one process with the whole batch, in f64 over steps, in f32 for the first one,
 * beside recompute, strategies, bf16, and ranks whose batch is empty. */
#include "knap.h"
#include "tests/fsdp/ranks.h"
#include "tests/fsdp/apart.h"

enum { STEPS = 10, IN = 2, SIDE = 6, CLASSES = 5, TOTAL = 8, ROOM = 2000 };

typedef struct block {
    kn_module base;
    kn_conv2d conv1, conv2, down;
    kn_batch_norm bn1, bn2, bn_down;
} block;

typedef struct resnet {
    kn_module base;
    kn_conv2d conv;
    kn_batch_norm bn;
    block block[2];
    kn_linear fc;
    kn_dtype seen; /* of what the first batch norm gave */
} resnet;

static kn_tensor *block_forward(kn_module *self, kn_tensor *x)
{
    block *b = (block *)self;
    kn_tensor *y = kn_relu(kn_call(&b->bn1, kn_call(&b->conv1, x)));
    y = kn_call(&b->bn2, kn_call(&b->conv2, y));
    return kn_relu(kn_add(y, kn_call(&b->bn_down, kn_call(&b->down, x))));
}

static kn_tensor *resnet_forward(kn_module *self, kn_tensor *x) /* (B, IN, SIDE, SIDE) */
{
    resnet *n = (resnet *)self;
    x = kn_call(&n->bn, kn_call(&n->conv, x));
    n->seen = x ? kn_dtype_of(x) : KN_DTYPE_DEFAULT;
    x = kn_relu(x);
    for (int i = 0; i < 2; i++)
        x = kn_call(&n->block[i], x);
    return kn_call(&n->fc, kn_mean(x, KN_SHAPE(2, 3), false));
}

static bool block_init(block *b, kn_module *parent, const char *name, int64_t in, int64_t out)
{
    return kn_module_init(&b->base, block_forward) && kn_module_add(parent, name, &b->base) &&
           kn_conv2d_init(&b->conv1, &b->base, "conv1", in, out, 3, .stride = 2, .pad = 1,
                          .no_bias = true) &&
           kn_batch_norm_init(&b->bn1, &b->base, "bn1", out) &&
           kn_conv2d_init(&b->conv2, &b->base, "conv2", out, out, 3, .pad = 1, .no_bias = true) &&
           kn_batch_norm_init(&b->bn2, &b->base, "bn2", out) &&
           kn_conv2d_init(&b->down, &b->base, "down", in, out, 1, .stride = 2, .no_bias = true) &&
           kn_batch_norm_init(&b->bn_down, &b->base, "bn_down", out);
}

static bool resnet_init(resnet *n, kn_dtype dtype)
{
    *n = (resnet){ 0 };
    return kn_module_init(&n->base, resnet_forward) &&
           kn_module_defaults(n, .device = KN_META, .dtype = dtype) &&
           kn_conv2d_init(&n->conv, &n->base, "conv", IN, 3, 3, .pad = 1, .no_bias = true) &&
           kn_batch_norm_init(&n->bn, &n->base, "bn", 3) &&
           block_init(&n->block[0], &n->base, "block0", 3, 4) &&
           block_init(&n->block[1], &n->base, "block1", 4, 6) &&
           kn_linear_init(&n->fc, &n->base, "fc", 6, CLASSES);
}

/* ---- training -------------------------------------------------------------------------------- */

/* The results of a training: losses of the whole batch, then all parameters and statistics. */
typedef struct result {
    double loss[STEPS], value[ROOM];
    int values;
} result;

typedef struct setting {
    int ranks, steps;
    kn_dtype dtype;
    int share[4];     /* samples of each rank; all 0: as many each */
    double tolerance; /* relative */
    bool bf16;        /* bn.seen is checked to be bf16 */
    kn_fsdp_wrap_options o;
    result whole;
} setting;

/* The sum of squares over samples [begin, end) of TOTAL, times ranks: their mean over ranks is the
 * mean over all samples. */
static kn_tensor *loss_of(resnet *n, const setting *s, int step, int64_t begin, int64_t end,
                          int ranks)
{
    kn_tensor *x = kn_randn(s->dtype, KN_CPU, 6, (uint64_t)step, KN_SHAPE(TOTAL, IN, SIDE, SIDE));
    kn_tensor *t = kn_randn(s->dtype, KN_CPU, 7, (uint64_t)step, KN_SHAPE(TOTAL, CLASSES));
    kn_tensor *y = kn_call(n, kn_contiguous(kn_slice(x, 0, begin, end)));
    kn_tensor *d = kn_sub(kn_cast(y, s->dtype), kn_contiguous(kn_slice(t, 0, begin, end)));
    return kn_scale(sum_of(kn_mul(d, d)), (double)ranks / (TOTAL * CLASSES));
}

static bool note(result *r, const void *values, kn_dtype t, int64_t n)
{
    for (int64_t i = 0; i < n && r->values < ROOM; i++)
        r->value[r->values++] =
            t == KN_F64 ? ((const double *)values)[i] : (double)((const float *)values)[i];
    return r->values < ROOM || kn_fail("more values than there is room for");
}

static bool note_all(resnet *n, result *r)
{
    const kn_param *p;
    const int count = kn_params(n, &p);
    double room[ROOM];
    for (int i = 0; i < count; i++)
        if (p[i].numel > ROOM || !kn_param_read(n, i, room) ||
            !note(r, room, kn_dtype_of(p[i].master), p[i].numel))
            return false;
    static const char *const names[] = { "bn.running_mean", "bn.running_var",
                                         "block1.bn2.running_mean", "block1.bn2.running_var" };
    for (int i = 0; i < 4; i++) {
        const kn_tensor *t = kn_module_buffer(n, names[i]);
        if (!t || !note(r, kn_data(t), kn_dtype_of(t), kn_numel(t)))
            return false;
    }
    return true;
}

static bool train(const setting *s, kn_comm *comm, const kn_fsdp_wrap_options *o, int64_t begin,
                  int64_t end, result *r)
{
    OWNED_MODULE resnet n = { 0 };
    memset(r, 0, sizeof *r);
    if (!resnet_init(&n, s->dtype) || kn_sync_batch_norm(&n, comm) != 7 ||
        !kn_fsdp_wrap_(&n, comm, *o))
        return false;
    OWNED_OPTIM kn_optim *opt = kn_sgd(&n, .lr = 0.05, .momentum = 0.9, .weight_decay = 1e-3);
    for (int step = 0; step < s->steps && kn_ok(); step++) {
        IN_SCOPE;
        kn_tensor *loss = loss_of(&n, s, step, begin, end, kn_comm_size(comm));
        kn_backward(loss);
        r->loss[step] = kn_mean_over_ranks(comm, kn_item(loss));
        kn_step(opt);
    }
    const bool ok =
        note_all(&n, r) && (!s->bf16 || n.seen == KN_BF16 || kn_fail("not bf16 behind batch norm"));
    return ok && kn_ok();
}

static void on_rank(kn_comm *world, void *arg)
{
    const setting *s = arg;
    static _Thread_local result r;
    const int rank = kn_rank(world), ranks = kn_comm_size(world);
    int64_t begin = 0, own = s->share[rank];
    for (int k = 0; k < rank; k++)
        begin += s->share[k];
    if (s->share[0] + s->share[1] == 0)
        own = TOTAL / ranks, begin = rank * own;
    KN_CHECK(train(s, world, &s->o, begin, begin + own, &r));
    const double loss = apart(r.loss, s->whole.loss, s->steps),
                 values = apart(r.value, s->whole.value, r.values);
    KN_CHECK(r.values == s->whole.values && loss <= s->tolerance && values <= s->tolerance,
             "losses %g, values %g apart", loss, values);
    size_t size = sizeof r.value;
    void *first = kn_broadcast_bytes(world, r.value, &size, 0);
    const bool same = first && memcmp(first, r.value, size) == 0;
    kn_host_free(first);
    KN_CHECK(same, "running statistics differ from rank 0's");
}

static void check(setting *s)
{
    kn_fsdp_wrap_options plain = { ._size = sizeof plain, .param_dtype = s->o.param_dtype };
    s->o._size = sizeof s->o;
    KN_CHECK(train(s, kn_comm_self(), &plain, 0, TOTAL, &s->whole));
    KN_CHECK(s->whole.values > 500 && s->whole.loss[0] > 0.1 && s->whole.loss[0] < 20);
    KN_CHECK(spawn_threads(s->ranks, on_rank, s) == 0);
}

KN_TEST(sync_resnet, ten_steps_in_f64)
{
    static setting s[] = {
        { .ranks = 1, .o.wrap_class = "block" },
        { .ranks = 2, .o.wrap_class = "block", .o.recompute_class = "block" },
        { .ranks = 4, .o.wrap_class = "conv2d,batch_norm", .o.strategy = KN_SHARD_GRAD_OP },
        { .ranks = 4, .o.wrap_class = "block", .o.strategy = KN_HYBRID_SHARD, .o.mesh.shards = 2 },
        { .ranks = 2, .o.strategy = KN_NO_SHARD, .share = { 8, 0 } },
        { .ranks = 4, .o.wrap_class = "block", .share = { 3, 0, 1, 4 } },
    };
    for (size_t i = 0; i < sizeof s / sizeof *s; i++) {
        s[i].dtype = KN_F64;
        s[i].steps = STEPS;
        s[i].tolerance = 1e-9;
        check(&s[i]);
    }
}

KN_TEST(sync_resnet, the_first_step_in_f32)
{
    for (int ranks = 2; ranks <= 4; ranks += 2) {
        static setting s;
        s = (setting){
            .ranks = ranks, .steps = 1, .dtype = KN_F32, .tolerance = 1e-6, .o.wrap_class = "block"
        };
        check(&s);
    }
}

/* Convolutions in bf16 between batch norms in f32. */
KN_TEST(sync_resnet, beside_bf16)
{
    static setting s = { .ranks = 2,
                         .steps = 3,
                         .dtype = KN_F32,
                         .tolerance = 0.05,
                         .bf16 = true,
                         .o.wrap_class = "block",
                         .o.param_dtype = KN_BF16 };
    check(&s);
}
