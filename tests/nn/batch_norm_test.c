/* tests/nn/batch_norm_test.c: batch norm, with what is added to it and relu, has the same bits
 * however it runs: on 1 to 4 threads, recomputed or not, of an input that is a leaf or a result. */
#include "nn/layers.h"
#include "tests/owned.h"

typedef enum kind { NORM, NORM_RELU, NORM_ADD_RELU, NORM_ADD_X_RELU, KINDS } kind;

typedef struct block {
    kn_module base;
    kn_batch_norm bn;
    kind kind;
} block;

static kn_values block_forward(kn_module *self, kn_values in, const void *arg)
{
    block *b = (block *)self;
    (void)arg;
    if (b->kind == NORM)
        return KN_VALUES(kn_call(&b->bn, in.v[0]));
    kn_tensor *const added[KINDS] = { [NORM_ADD_RELU] = in.v[1], [NORM_ADD_X_RELU] = in.v[0] };
    return KN_VALUES(kn_batch_norm_relu(&b->bn, in.v[0], added[b->kind]));
}

/* One call of a block, and how it runs. */
typedef struct call {
    kind kind;
    bool training;
    kn_tensor *x, *added, *weigh; /* weigh: of the results, in the loss */
    int threads;
    bool recompute, leaf; /* leaf: the block's inputs are leaves, else results */
} call;

enum { Y, X_GRAD, ADDED_GRAD, W_GRAD, B_GRAD, MEAN, VAR, RESULTS };

/* An input and the leaf that gets its gradient. */
static kn_tensor *input(const call *c, kn_tensor *value, kn_tensor **leaf)
{
    *leaf = kn_require_grad(kn_detach(value), true);
    return c->leaf ? *leaf : kn_add_scalar(*leaf, 0);
}

/* A number of t's bits in row-major order; 0 of none. t has whole words. */
static uint64_t bits(kn_tensor *t)
{
    uint64_t h = 14695981039346656037u;
    if (!t)
        return 0;
    t = kn_contiguous(t);
    const uint64_t *v = kn_data(t);
    const size_t n = (size_t)kn_numel(t) * kn_dtype_size(kn_dtype_of(t)) / sizeof *v;
    for (size_t i = 0; i < n; i++)
        h = (h ^ v[i]) * 1099511628211u;
    return h;
}

static void run(const call *c, uint64_t out[RESULTS])
{
    IN_SCOPE;
    OWNED_MODULE block b = { .kind = c->kind };
    kn_tensor *leaf[2], *x = input(c, c->x, &leaf[0]), *added = input(c, c->added, &leaf[1]);
    KN_CHECK(kn_module_init_n(&b.base, block_forward) &&
             kn_batch_norm_init(&b.bn, &b.base, "bn", kn_size(x, 1)) &&
             kn_recompute(&b, c->recompute));
    kn_train(&b, c->training);
    kn_set_threads(c->threads);
    kn_tensor *y = kn_call_n(&b, KN_VALUES(x, added), NULL, 0).v[0];
    KN_CHECK(y);
    KN_CHECK(kn_backward(sum_of(kn_mul(y, c->weigh))));
    kn_set_threads(1);
    out[Y] = bits(y);
    out[X_GRAD] = bits(kn_grad(leaf[0]));
    out[ADDED_GRAD] = bits(kn_grad(leaf[1]));
    out[W_GRAD] = bits(kn_grad(kn_module_param(&b, "bn.weight")));
    out[B_GRAD] = bits(kn_grad(kn_module_param(&b, "bn.bias")));
    out[MEAN] = bits(kn_module_buffer(&b, "bn.running_mean"));
    out[VAR] = bits(kn_module_buffer(&b, "bn.running_var"));
}

static kn_tensor *image(int i, uint64_t stream)
{
    const int64_t small[] = { 2, 70, 3, 2 }, large[] = { 4, 20, 23, 18 };
    kn_tensor *t = kn_randn(i & 1 ? KN_BF16 : KN_F32, KN_CPU, 5, stream, 4, i & 2 ? large : small);
    return i & 4 ? kn_channels_last(t) : t;
}

static void same_bits_in_each_way(call c, const char *of)
{
    static const char *const names[RESULTS] = { "y",  "dx",           "dadd",       "dw",
                                                "db", "running_mean", "running_var" };
    static const struct {
        int threads;
        bool recompute, leaf;
    } how[] = { { 2, true, false }, { 3, true, true }, { 4, false, true } };
    uint64_t want[RESULTS], got[RESULTS];
    c.threads = 1;
    run(&c, want);
    KN_CHECK(want[X_GRAD] && (want[ADDED_GRAD] != 0) == (c.kind == NORM_ADD_RELU));
    for (size_t h = 0; h < sizeof how / sizeof *how; h++) {
        c.threads = how[h].threads, c.recompute = how[h].recompute, c.leaf = how[h].leaf;
        run(&c, got);
        for (int r = 0; r < RESULTS; r++)
            KN_CHECK(got[r] == want[r], "%s, kind %d%s: %s on %d threads%s%s", of, c.kind,
                     c.training ? ", training" : "", names[r], c.threads,
                     c.recompute ? ", recomputed" : "", c.leaf ? ", of leaves" : "");
    }
}

/* Blocks of rows and parts of threads end in the midst of the large images. */
KN_TEST(batch_norm, has_the_bits_of_one_thread_however_it_runs)
{
    for (int i = 0; i < 8; i++) {
        IN_SCOPE;
        call c = { .x = image(i, 1), .added = image(i, 2), .weigh = image(i, 3) };
        char of[64];
        kn_describe(c.x, of, sizeof of);
        for (int k = 0; k < 2 * KINDS; k++) {
            c.kind = k / 2, c.training = k % 2;
            same_bits_in_each_way(c, of);
        }
    }
}
