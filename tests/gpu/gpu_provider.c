/* tests/gpu/gpu_provider.c: the CUDA device as one provider of the overlay's cases (overlay.h): it
 * copies arrays to the GPU, runs the device's providers there, and copies everything back. For
 * scripts/gpu-check: it needs a GPU.
 *
 * The call's struct gives the ranges of bytes that it points at. Overlapping ranges (in place,
 * views of one buffer) are merged, and addresses stay the same modulo 64 on the GPU. */
#include "kernels/memory.h"
#include "tests/kernels/overlay.h"

#include <string.h>

enum { RANGES = 512, PIECES = 64 };

typedef struct range {
    char *begin, *end; /* on the host */
    char *block, *at;  /* on the GPU: the allocation, and begin's copy in it */
} range;

static range list[RANGES];
static int ranges;

static void note(const void *p, size_t bytes)
{
    if (!p || bytes == 0)
        return;
    KN_CHECK(ranges < RANGES, "too many arrays in a call");
    list[ranges++] = (range){ .begin = (char *)(uintptr_t)p, .end = (char *)(uintptr_t)p + bytes };
}

static void note_array(const kn_array *a)
{
    int64_t last = 0;
    if (!a->data || kn_array_numel(a) == 0)
        return;
    for (int d = 0; d < a->ndim; d++)
        last += (a->shape[d] - 1) * a->stride[d];
    note(a->data, (size_t)(last + 1) * kn_dtype_size(a->dtype));
}

static int by_begin(const void *a, const void *b)
{
    const range *x = a, *y = b;
    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

static void merge(void)
{
    int kept = 0;
    qsort(list, (size_t)ranges, sizeof *list, by_begin);
    for (int i = 0; i < ranges; i++) {
        if (kept > 0 && list[i].begin < list[kept - 1].end) {
            if (list[i].end > list[kept - 1].end)
                list[kept - 1].end = list[i].end;
        } else {
            list[kept++] = list[i];
        }
    }
    ranges = kept;
}

static bool move(kn_way way)
{
    kn_stream *s = kn_compute_stream(KN_CUDA);
    for (int i = 0; i < ranges; i++) {
        range *r = &list[i];
        size_t bytes = (size_t)(r->end - r->begin);
        if (way == KN_TO_DEVICE) {
            r->block = kn_take(kn_device_memory(KN_CUDA), bytes + 128, KN_MEM_DATA);
            if (!r->block)
                return false;
            r->at = r->block + (64 - (uintptr_t)r->block % 64) % 64 + (uintptr_t)r->begin % 64;
        }
        if (!kn_transfer(s, way == KN_TO_DEVICE ? r->at : r->begin,
                         way == KN_TO_DEVICE ? r->begin : r->at, bytes, way, true))
            return false;
    }
    return kn_stream_sync(s);
}

static void give_back(void)
{
    for (int i = 0; i < ranges; i++)
        if (list[i].block)
            kn_give(kn_device_memory(KN_CUDA), list[i].block,
                    (size_t)(list[i].end - list[i].begin) + 128, KN_MEM_DATA);
    ranges = 0;
}

/* The GPU address for p. */
static void *there(const void *p)
{
    const char *at = p;
    for (int i = 0; i < ranges; i++)
        if (at >= list[i].begin && at < list[i].end)
            return list[i].at + (at - list[i].begin);
    return (void *)(uintptr_t)p; /* NULL, or an array without elements */
}

#define THERE(p) ((p) = there(p))

/* ---- what calls point at --------------------------------------------------------------------- */

/* The number of arrays at the beginning of a kernel's struct; 0: it has raw pointers. */
static const struct {
    int arrays;
    size_t size;
} shape[KN_K_COUNT] = {
    [KN_K_COPY] = { 2, sizeof(kn_copy_args) },
    [KN_K_FILL] = { 1, sizeof(kn_fill_args) },
    [KN_K_UNARY] = { 2, sizeof(kn_unary_args) },
    [KN_K_UNARY_GRAD] = { 4, sizeof(kn_unary_grad_args) },
    [KN_K_BINARY] = { 3, sizeof(kn_binary_args) },
    [KN_K_WHERE] = { 4, sizeof(kn_where_args) },
    [KN_K_REDUCE] = { 2, sizeof(kn_reduce_args) },
    [KN_K_MATMUL] = { 6, sizeof(kn_matmul_args) },
    [KN_K_SOFTMAX] = { 2, sizeof(kn_softmax_args) },
    [KN_K_SOFTMAX_GRAD] = { 3, sizeof(kn_softmax_grad_args) },
    [KN_K_CROSS_ENTROPY] = { 6, sizeof(kn_cross_entropy_args) },
    [KN_K_CROSS_ENTROPY_GRAD] = { 6, sizeof(kn_cross_entropy_grad_args) },
    [KN_K_NORM] = { 8, sizeof(kn_norm_args) },
    [KN_K_NORM_GRAD] = { 9, sizeof(kn_norm_grad_args) },
    [KN_K_INDEX_SELECT] = { 3, sizeof(kn_index_select_args) },
    [KN_K_INDEX_ADD] = { 3, sizeof(kn_index_add_args) },
    [KN_K_GATHER] = { 3, sizeof(kn_gather_args) },
    [KN_K_SCATTER] = { 3, sizeof(kn_scatter_args) },
    [KN_K_SORT] = { 3, sizeof(kn_sort_args) },
    [KN_K_CUMSUM] = { 2, sizeof(kn_cumsum_args) },
    [KN_K_DROPOUT] = { 2, sizeof(kn_dropout_args) },
    [KN_K_ATTENTION] = { 6, sizeof(kn_attention_args) },
    [KN_K_ATTENTION_GRAD] = { 11, sizeof(kn_attention_grad_args) },
    [KN_K_ROPE] = { 2, sizeof(kn_rope_args) },
    [KN_K_RANDOM] = { 1, sizeof(kn_random_args) },
    [KN_K_ROUND] = { 2, sizeof(kn_round_args) },
    [KN_K_SUM_N] = { 0, sizeof(kn_sum_n_args) },
    [KN_K_ADAMW] = { 0, sizeof(kn_adamw_args) },
    [KN_K_SGD] = { 0, sizeof(kn_sgd_args) },
    [KN_K_LION] = { 0, sizeof(kn_lion_args) },
    [KN_K_ABSMAX] = { 0, sizeof(kn_absmax_args) },
    [KN_K_SQSUM] = { 0, sizeof(kn_sqsum_args) },
    [KN_K_POWSUM] = { 0, sizeof(kn_powsum_args) },
    [KN_K_CLIP] = { 0, sizeof(kn_clip_args) },
    [KN_K_LOSS_SCALE] = { 0, sizeof(kn_loss_scale_args) },
    [KN_K_CONV] = { 4, sizeof(kn_conv_args) },
    [KN_K_CONV_GRAD_X] = { 3, sizeof(kn_conv_grad_x_args) },
    [KN_K_CONV_GRAD_W] = { 3, sizeof(kn_conv_grad_w_args) },
    [KN_K_BATCH_NORM] = { 9, sizeof(kn_batch_norm_args) },
    [KN_K_BATCH_NORM_GRAD] = { 13, sizeof(kn_batch_norm_grad_args) },
    [KN_K_BATCH_NORM_JOIN] = { 8, sizeof(kn_batch_norm_join_args) },
    [KN_K_POOL] = { 3, sizeof(kn_pool_args) },
    [KN_K_POOL_GRAD] = { 3, sizeof(kn_pool_grad_args) },
    [KN_K_INTERPOLATE] = { 2, sizeof(kn_interpolate_args) },
    [KN_K_INTERPOLATE_GRAD] = { 2, sizeof(kn_interpolate_grad_args) },
};

static void note_pieces(const kn_opt_piece *q, int n)
{
    KN_CHECK(n <= PIECES, "too many pieces");
    for (int i = 0; i < n; i++) {
        size_t bytes = (size_t)q[i].count * kn_dtype_size(q[i].param_dtype);
        note(q[i].param, bytes);
        note(q[i].grad, (size_t)q[i].count * kn_dtype_size(q[i].grad_dtype));
        note(q[i].m, bytes);
        note(q[i].v, bytes);
        note(q[i].out, (size_t)q[i].count * kn_dtype_size(q[i].out_dtype));
    }
}

static const kn_opt_piece *pieces_there(const kn_opt_piece *q, int n)
{
    static kn_opt_piece moved[PIECES];
    for (int i = 0; i < n; i++) {
        moved[i] = q[i];
        THERE(moved[i].param);
        THERE(moved[i].grad);
        THERE(moved[i].m);
        THERE(moved[i].v);
        THERE(moved[i].out);
    }
    return moved;
}

static void note_runs(const kn_run *r, int n)
{
    KN_CHECK(n <= PIECES, "too many runs");
    for (int i = 0; i < n; i++)
        note(r[i].data, (size_t)r[i].count * kn_dtype_size(r[i].dtype));
}

static const kn_run *runs_there(const kn_run *r, int n)
{
    static kn_run moved[PIECES];
    for (int i = 0; i < n; i++) {
        moved[i] = r[i];
        THERE(moved[i].data);
    }
    return moved;
}

enum { LIMBS = KN_SQSUM_LIMBS * sizeof(int64_t) };

static void note_call(kn_kernel k, const void *args)
{
    for (int i = 0; i < shape[k].arrays; i++)
        note_array((const kn_array *)args + i);
    const kn_sum_n_args *sum = args;
    const kn_opt_step *opt = args; /* the arguments of optimizers begin with it */
    const kn_absmax_args *most = args;
    const kn_sqsum_args *squares = args;
    const kn_powsum_args *powers = args;
    const kn_clip_args *clip = args;
    const kn_loss_scale_args *loss = args;
    const kn_round_args *round = args;
    switch (k) {
    case KN_K_ROUND:
        note(round->seed_at, sizeof(uint64_t));
        note(round->step_at, sizeof(double));
        break;
    case KN_K_SUM_N:
        note(sum->dst, (size_t)sum->count * kn_dtype_size(sum->dst_dtype));
        note(sum->acc, (size_t)sum->count * kn_dtype_size(sum->dst_dtype));
        for (int i = 0; i < sum->n; i++)
            note(sum->src[i], (size_t)sum->count * kn_dtype_size(sum->src_dtype));
        break;
    case KN_K_ADAMW:
    case KN_K_SGD:
    case KN_K_LION:
        note_pieces(opt->piece, opt->pieces);
        note(opt->lr, sizeof(double));
        note(opt->grad_scale, sizeof(double));
        note(opt->step, sizeof(double));
        note(opt->skip, sizeof(double));
        note(opt->limit, sizeof(double));
        note(opt->seed, sizeof(uint64_t));
        break;
    case KN_K_ABSMAX:
        note_runs(most->run, most->runs);
        note(most->out, sizeof(float));
        note(most->first, sizeof(int64_t));
        break;
    case KN_K_SQSUM:
        note_runs(squares->run, squares->runs);
        note(squares->absmax, sizeof(float));
        note(squares->out, LIMBS);
        break;
    case KN_K_POWSUM:
        note_runs(powers->run, powers->runs);
        note(powers->absmax, sizeof(float));
        note(powers->out, LIMBS);
        break;
    case KN_K_CLIP:
        note(clip->limbs, LIMBS);
        note(clip->absmax, sizeof(float));
        note(clip->norm, sizeof(float));
        note(clip->coef, sizeof(double));
        note(clip->loss_scale, sizeof(float));
        note(clip->limit, sizeof(double));
        break;
    case KN_K_LOSS_SCALE:
        note(loss->state, sizeof *loss->state);
        note(loss->step, sizeof *loss->step);
        note(loss->absmax, sizeof(float));
        note(loss->loss_scale, sizeof(float));
        break;
    default:
        break;
    }
}

typedef union any_args {
    kn_array array[11];
    kn_attention_grad_args largest;
    kn_attention_args attention;
    kn_norm_grad_args norm_grad;
    kn_batch_norm_args batch_norm;
    kn_batch_norm_grad_args batch_norm_grad;
    kn_batch_norm_join_args batch_norm_join;
    kn_round_args round;
    kn_sum_n_args sum;
    kn_opt_step opt;
    kn_adamw_args adamw;
    kn_sgd_args sgd;
    kn_lion_args lion;
    kn_absmax_args absmax;
    kn_sqsum_args sqsum;
    kn_powsum_args powsum;
    kn_clip_args clip;
    kn_loss_scale_args loss_scale;
} any_args;

static void point_there(kn_kernel k, any_args *a)
{
    for (int i = 0; i < shape[k].arrays; i++)
        THERE(a->array[i].data);
    switch (k) {
    case KN_K_ROUND:
        THERE(a->round.seed_at);
        THERE(a->round.step_at);
        break;
    case KN_K_SUM_N:
        THERE(a->sum.dst);
        THERE(a->sum.acc);
        for (int i = 0; i < a->sum.n; i++)
            THERE(a->sum.src[i]);
        break;
    case KN_K_ADAMW:
    case KN_K_SGD:
    case KN_K_LION:
        a->opt.piece = pieces_there(a->opt.piece, a->opt.pieces);
        THERE(a->opt.lr);
        THERE(a->opt.grad_scale);
        THERE(a->opt.step);
        THERE(a->opt.skip);
        THERE(a->opt.limit);
        THERE(a->opt.seed);
        break;
    case KN_K_ABSMAX:
        a->absmax.run = runs_there(a->absmax.run, a->absmax.runs);
        THERE(a->absmax.out);
        THERE(a->absmax.first);
        break;
    case KN_K_SQSUM:
        a->sqsum.run = runs_there(a->sqsum.run, a->sqsum.runs);
        THERE(a->sqsum.absmax);
        THERE(a->sqsum.out);
        break;
    case KN_K_POWSUM:
        a->powsum.run = runs_there(a->powsum.run, a->powsum.runs);
        THERE(a->powsum.absmax);
        THERE(a->powsum.out);
        break;
    case KN_K_CLIP:
        THERE(a->clip.limbs);
        THERE(a->clip.absmax);
        THERE(a->clip.norm);
        THERE(a->clip.coef);
        THERE(a->clip.loss_scale);
        THERE(a->clip.limit);
        break;
    case KN_K_LOSS_SCALE:
        THERE(a->loss_scale.state);
        THERE(a->loss_scale.step);
        THERE(a->loss_scale.absmax);
        THERE(a->loss_scale.loss_scale);
        break;
    default:
        break;
    }
}

void call_memory(kn_kernel k, const void *args, void (*use)(const void *p, size_t bytes))
{
    ranges = 0;
    note_call(k, args);
    merge();
    for (int i = 0; i < ranges; i++)
        use(list[i].begin, (size_t)(list[i].end - list[i].begin));
    ranges = 0;
}

/* ---- the provider ---------------------------------------------------------------------------- */

/* cuDNN's dropout draws other numbers than the reference: then Knap's kernels are asked. */
static bool draws_otherwise(kn_kernel k, const any_args *a)
{
    return (k == KN_K_ATTENTION && a->attention.dropout_p > 0) ||
           (k == KN_K_ATTENTION_GRAD && a->largest.dropout_p > 0);
}

static kn_status run(kn_kernel k, const void *args)
{
    any_args a;
    ranges = 0;
    memcpy(&a, args, shape[k].size);
    const bool own = draws_otherwise(k, &a);
    note_call(k, args);
    merge();
    bool ok = move(KN_TO_DEVICE);
    if (ok) {
        point_there(k, &a);
        if (own)
            kn_providers_only("cuda");
        ok = kn_launch(kn_compute_stream(KN_CUDA), k, &a, shape[k].size);
        if (own)
            kn_providers_only(NULL);
        ok = ok && move(KN_TO_HOST);
    }
    give_back();
    return ok ? KN_DONE : KN_FAILED;
}

#define KERNELS(X)                                                                                 \
    X(COPY)                                                                                        \
    X(FILL)                                                                                        \
    X(UNARY)                                                                                       \
    X(UNARY_GRAD)                                                                                  \
    X(BINARY)                                                                                      \
    X(WHERE)                                                                                       \
    X(REDUCE)                                                                                      \
    X(MATMUL)                                                                                      \
    X(SOFTMAX)                                                                                     \
    X(SOFTMAX_GRAD)                                                                                \
    X(CROSS_ENTROPY)                                                                               \
    X(CROSS_ENTROPY_GRAD)                                                                          \
    X(NORM)                                                                                        \
    X(NORM_GRAD)                                                                                   \
    X(INDEX_SELECT)                                                                                \
    X(INDEX_ADD)                                                                                   \
    X(DROPOUT)                                                                                     \
    X(ATTENTION)                                                                                   \
    X(ATTENTION_GRAD)                                                                              \
    X(ROPE)                                                                                        \
    X(RANDOM)                                                                                      \
    X(SUM_N)                                                                                       \
    X(ADAMW)                                                                                       \
    X(SGD)                                                                                         \
    X(ABSMAX)                                                                                      \
    X(SQSUM)                                                                                       \
    X(POWSUM)                                                                                      \
    X(CLIP)                                                                                        \
    X(LOSS_SCALE)                                                                                  \
    X(CONV)                                                                                        \
    X(CONV_GRAD_X)                                                                                 \
    X(CONV_GRAD_W)                                                                                 \
    X(BATCH_NORM)                                                                                  \
    X(BATCH_NORM_GRAD)                                                                             \
    X(BATCH_NORM_JOIN)                                                                             \
    X(POOL)                                                                                        \
    X(POOL_GRAD)                                                                                   \
    X(INTERPOLATE)                                                                                 \
    X(INTERPOLATE_GRAD)

#define FUNCTION(K)                                                                                \
    static kn_status run_##K(const void *args)                                                     \
    {                                                                                              \
        return run(KN_K_##K, args);                                                                \
    }
#define ENTRY(K) [KN_K_##K] = run_##K,

KERNELS(FUNCTION)

const kn_provider kn_gpu_provider = { .name = "gpu", .run = { KERNELS(ENTRY) } };
