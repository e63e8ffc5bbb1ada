/* examples/powersgd.c: PowerSGD as a user's hook: powersgd [--ranks N] [--steps N]
 *
 * Data parallel training (KN_NO_SHARD) sends each layer's gradient M [rows, cols] once a step.
 * PowerSGD (Vogels, Karimireddy, Jaggi: Practical low-rank gradient compression, NeurIPS 2019)
 * sends two thin matrices instead, P [rows, RANK] and Q [cols, RANK], with M about P Q^T:
 *
 *   M += error              the part that earlier steps did not send
 *   P  = sum over ranks of M Q                one step of a power iteration, from the last step's Q
 *   P  = orthonormal columns of P             Gram-Schmidt
 *   Q  = sum over ranks of M^T P
 *   sum of gradients = P Q^T,   error = M - P Q^T / ranks
 *
 * A hook enqueues its work on the reduction's stream and must not wait: kn_stream_host runs plain C
 * there, in order with the collectives. */
#include <knap.h>
#include <math.h>
#include <stdlib.h>

enum { RANK = 2, BATCH = 64, IN = 64, HIDDEN = 128, CLASSES = 8 };

/* The state for one weight matrix, the first parameter of its unit. The rest of the unit (the bias)
 * is sent whole. */
typedef struct lowrank {
    int64_t rows, cols;
    float *error, *p, *q; /* [rows, cols], [rows, RANK], [cols, RANK] */
    float *m;             /* the running reduction's: gradient, result, accumulator */
    float *dst;
    const float *acc;
    int ranks;
} lowrank;

static bool lowrank_init(lowrank *s, int64_t rows, int64_t cols)
{
    *s = (lowrank){ .rows = rows, .cols = cols };
    s->error = calloc((size_t)(rows * cols), sizeof(float));
    s->p = calloc((size_t)(rows * RANK), sizeof(float));
    s->q = calloc((size_t)(cols * RANK), sizeof(float));
    if (!s->error || !s->p || !s->q)
        return false;
    for (int64_t i = 0; i < cols * RANK; i++) /* any values that are the same on all ranks */
        s->q[i] = sinf((float)(i * 7 + 1));
    return true;
}

static void lowrank_free(lowrank *s)
{
    free(s->error), free(s->p), free(s->q);
}

/* M += error, P = M Q */
static void project(void *arg)
{
    lowrank *s = *(lowrank **)arg;
    for (int64_t i = 0; i < s->rows * s->cols; i++)
        s->m[i] += s->error[i];
    for (int64_t i = 0; i < s->rows; i++)
        for (int k = 0; k < RANK; k++) {
            float sum = 0;
            for (int64_t j = 0; j < s->cols; j++)
                sum += s->m[i * s->cols + j] * s->q[j * RANK + k];
            s->p[i * RANK + k] = sum;
        }
}

/* The columns of p [rows, RANK] become orthonormal; a linearly dependent one becomes 0. */
static void orthonormalise(float *p, int64_t rows)
{
    for (int k = 0; k < RANK; k++) {
        for (int e = 0; e <= k; e++) { /* e == k: the length */
            double dot = 0;
            for (int64_t i = 0; i < rows; i++)
                dot += (double)p[i * RANK + k] * (double)p[i * RANK + e];
            float length = (float)sqrt(dot);
            for (int64_t i = 0; i < rows; i++)
                if (e < k)
                    p[i * RANK + k] -= (float)dot * p[i * RANK + e];
                else
                    p[i * RANK + k] = length > 1e-20f ? p[i * RANK + k] / length : 0;
        }
    }
}

/* Q = M^T P */
static void project_back(void *arg)
{
    lowrank *s = *(lowrank **)arg;
    orthonormalise(s->p, s->rows);
    for (int64_t j = 0; j < s->cols; j++)
        for (int k = 0; k < RANK; k++) {
            float sum = 0;
            for (int64_t i = 0; i < s->rows; i++)
                sum += s->m[i * s->cols + j] * s->p[i * RANK + k];
            s->q[j * RANK + k] = sum;
        }
}

/* dst = acc + P Q^T, error = M - P Q^T / ranks */
static void expand(void *arg)
{
    lowrank *s = *(lowrank **)arg;
    for (int64_t i = 0; i < s->rows; i++)
        for (int64_t j = 0; j < s->cols; j++) {
            float sum = 0;
            for (int k = 0; k < RANK; k++)
                sum += s->p[i * RANK + k] * s->q[j * RANK + k];
            int64_t at = i * s->cols + j;
            s->error[at] = s->m[at] - sum / (float)s->ranks;
            s->dst[at] = (s->acc ? s->acc[at] : 0) + sum;
        }
}

static bool powersgd(const kn_grad_reduction *r, void *arg)
{
    lowrank *s = arg;
    int64_t n = s->rows * s->cols;
    if (r->shards || r->partial || r->src_dtype != KN_F32 || r->dst_dtype != KN_F32 || n > r->count)
        return kn_fail("powersgd: unit '%s' must be wrapped with .strategy = KN_NO_SHARD in f32",
                       r->unit);
    if (!r->replicas) /* one rank: nothing to send */
        return kn_reduce_default(r, NULL);
    s->m = r->src;
    s->dst = r->dst;
    s->acc = r->acc;
    s->ranks = kn_comm_size(r->replicas);
    return kn_stream_host(r->stream, "powersgd M Q", project, &s, sizeof s) &&
           kn_all_reduce(r->replicas, s->p, NULL, s->p, s->rows * RANK, KN_F32, KN_F32, r->stream,
                         r->unit) &&
           kn_stream_host(r->stream, "powersgd M^T P", project_back, &s, sizeof s) &&
           kn_all_reduce(r->replicas, s->q, NULL, s->q, s->cols * RANK, KN_F32, KN_F32, r->stream,
                         r->unit) &&
           kn_stream_host(r->stream, "powersgd P Q^T", expand, &s, sizeof s) &&
           kn_all_reduce(r->replicas, s->dst + n, s->acc ? s->acc + n : NULL, s->m + n,
                         r->count - n, KN_F32, KN_F32, r->stream, r->unit);
}

/* ---- a model and its data -------------------------------------------------------------------- */

typedef struct mlp {
    kn_module base;
    kn_linear fc1, fc2;
} mlp;

static kn_tensor *mlp_forward(kn_module *self, kn_tensor *x) /* (B, IN) -> (B, CLASSES) */
{
    mlp *m = (mlp *)self;
    return kn_call(&m->fc2, kn_gelu_tanh(kn_call(&m->fc1, x)));
}

/* Random points, labelled by a fixed random linear map. */
static kn_tensor *loss_of(mlp *net, uint64_t micro)
{
    kn_tensor *teacher = kn_randn(KN_F32, KN_CPU, 1, 0, KN_SHAPE(CLASSES, IN));
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 2, micro, KN_SHAPE(BATCH, IN));
    kn_tensor *y = kn_argmax(kn_linear(x, teacher, NULL, false), 1);
    return kn_cross_entropy(kn_call(net, x), y);
}

int main(int argc, char **argv)
{
    kn_comm *world = kn_init(&argc, &argv);
    int64_t steps, ranks = kn_comm_size(world);
    const kn_option table[] = { { "steps", KN_OPTION_INT, 0, "200", "to train", .max = 1e9 },
                                { 0 } };
    kn_options *options = kn_options_main(table, &steps, argc, argv, "PowerSGD as a hook.");
    if (!options) /* --help, or an error */
        return kn_finish();
    mlp net = { 0 };
    lowrank s1, s2;
    kn_module_init(&net.base, mlp_forward);
    kn_module_defaults(&net, .device = KN_META); /* no bytes yet */
    kn_linear_init(&net.fc1, &net.base, "fc1", IN, HIDDEN);
    kn_linear_init(&net.fc2, &net.base, "fc2", HIDDEN, CLASSES);
    kn_fsdp_wrap(&net, world, .strategy = KN_NO_SHARD, .wrap_class = "linear", .seed = 42);
    if (!lowrank_init(&s1, HIDDEN, IN) || !lowrank_init(&s2, CLASSES, HIDDEN))
        kn_fail("powersgd: out of memory");
    kn_fsdp_set_comm_hook(&net.fc1, powersgd, &s1, false);
    kn_fsdp_set_comm_hook(&net.fc2, powersgd, &s2, false);
    kn_optim *opt = kn_sgd(&net, .lr = 0.05, .momentum = 0.9);
    if (kn_rank(world) == 0 && kn_ok())
        printf("fc1 sends %d of %d numbers a step\n", (HIDDEN + IN) * RANK, HIDDEN * IN);
    for (int64_t step = 0; step < steps && kn_ok(); step++) {
        kn_scope scope = kn_scope_begin();
        kn_tensor *loss = loss_of(&net, (uint64_t)(step * ranks + kn_rank(world)));
        kn_backward(loss);
        kn_step(opt);
        if (kn_ok() && kn_rank(world) == 0 && (step % 50 == 0 || step == steps - 1))
            printf("step %4d  loss %.4f\n", (int)step, kn_item(loss));
        kn_scope_end(scope);
    }
    kn_optim_free(opt), kn_module_free(&net), kn_options_free(options);
    lowrank_free(&s1), lowrank_free(&s2);
    return kn_finish();
}
