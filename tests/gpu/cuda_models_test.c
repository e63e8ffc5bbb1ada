/* tests/gpu/cuda_models_test.c: the bundled models train on a stand-in for a device, which computes
 * by the CPU's kernels. The first call of each kind that their steps and evaluations make runs also
 * on the CUDA kernels, in the emulator, and on the reference, from the same bytes: so a step has no
 * kernel without a row in the CUDA table, and no case that only a GPU would see. */
#include "kernels/kernels_internal.h"
#include "tests/comm/comm_test.h"
#include "tests/fsdp/stand_in.h"
#include "tests/gpu/emulator/emulated.h"
#include "tests/kernels/overlay.h"
#include "tests/models/real_steps.h"

/* ---- kinds of calls -------------------------------------------------------------------------- */

enum { ARRAYS = 16 }; /* a call has at most */

/* Calls of one kind take the same way through a kernel, as far as a caller can say. */
typedef struct kind {
    int kernel, variant;
    struct {
        unsigned char dtype, dims, order;
    } array[ARRAYS];
} kind;

enum { KINDS = 1000 };
static kind seen[KINDS];
static int kinds, calls_of[KN_K_COUNT];

enum { ABSENT, ROWS, LAST, BROADCAST, OTHER };

/* How a lies in memory: row-major, channels-last, with an element for several places, or else. */
static unsigned char order_of(const kn_array *a)
{
    int64_t rows = 1, last = a->ndim == 4 ? a->shape[1] : 0;
    bool row_major = true, channels_last = a->ndim == 4 && a->stride[1] == 1, once = true;
    for (int d = a->ndim - 1; d >= 0; d--) {
        row_major &= a->shape[d] == 1 || a->stride[d] == rows;
        rows *= a->shape[d];
        once &= a->shape[d] == 1 || a->stride[d] != 0;
    }
    for (int i = 0; i < 3 && channels_last; i++) {
        static const int dims[] = { 3, 2, 0 };
        channels_last &= a->shape[dims[i]] == 1 || a->stride[dims[i]] == last;
        last *= a->shape[dims[i]];
    }
    return row_major ? ROWS : channels_last ? LAST : once ? OTHER : BROADCAST;
}

/* Kinds of an elementwise operation, and what else chooses among ways. */
static int variant_of(kn_kernel k, const void *args)
{
    const kn_attention_args *attention = args;
    const kn_conv_args *conv = args;
    const kn_batch_norm_join_args *join = args;
    const kn_sum_n_args *sum = args;
    const kn_opt_step *opt = args;
    const kn_sgd_args *sgd = args;
    const kn_cross_entropy_args *loss = args;
    switch (k) {
    case KN_K_UNARY:
        return (int)((const kn_unary_args *)args)->kind;
    case KN_K_UNARY_GRAD:
        return (int)((const kn_unary_grad_args *)args)->kind;
    case KN_K_BINARY:
        return (int)((const kn_binary_args *)args)->kind;
    case KN_K_REDUCE:
        return (int)((const kn_reduce_args *)args)->kind;
    case KN_K_RANDOM:
        return (int)((const kn_random_args *)args)->kind;
    case KN_K_POOL:
        return (int)((const kn_pool_args *)args)->kind;
    case KN_K_POOL_GRAD:
        return (int)((const kn_pool_grad_args *)args)->kind;
    case KN_K_SOFTMAX:
        return ((const kn_softmax_args *)args)->log;
    case KN_K_SOFTMAX_GRAD:
        return ((const kn_softmax_grad_args *)args)->log;
    case KN_K_NORM:
        return 2 * (((const kn_norm_args *)args)->add.data != NULL) +
               ((const kn_norm_args *)args)->rms;
    case KN_K_NORM_GRAD:
        return 2 * (((const kn_norm_grad_args *)args)->more.data != NULL) +
               ((const kn_norm_grad_args *)args)->rms;
    case KN_K_BATCH_NORM:
        return 2 * ((const kn_batch_norm_args *)args)->relu +
               ((const kn_batch_norm_args *)args)->training;
    case KN_K_BATCH_NORM_GRAD:
        return 2 * ((const kn_batch_norm_grad_args *)args)->relu +
               ((const kn_batch_norm_grad_args *)args)->training;
    case KN_K_BATCH_NORM_JOIN:
        return 2 * join->moments + join->finish;
    case KN_K_CROSS_ENTROPY:
        return 2 * (loss->dlogits.data != NULL) + (loss->smoothing > 0);
    case KN_K_MATMUL:
        return ((const kn_matmul_args *)args)->add;
    case KN_K_ATTENTION:
        return 2 * (attention->dropout_p > 0) + attention->causal;
    case KN_K_ROPE:
        return ((const kn_rope_args *)args)->inverse;
    case KN_K_CONV: /* of the gradients' structs this place holds other strides */
        return (int)(conv->stride[0] * 100 + conv->w.shape[2]);
    case KN_K_SUM_N:
        return (int)sum->dst_dtype * 100 + (int)sum->src_dtype * 2 + (sum->acc != NULL);
    case KN_K_SGD:
        return (int)opt->piece->grad_dtype * 100 + (int)opt->piece->out_dtype * 4 +
               2 * sgd->nesterov + (sgd->momentum > 0);
    case KN_K_ADAMW:
    case KN_K_LION:
        return (int)opt->piece->grad_dtype * 100 + (int)opt->piece->out_dtype;
    case KN_K_ABSMAX:
        return (int)((const kn_absmax_args *)args)->run->dtype;
    case KN_K_SQSUM:
        return (int)((const kn_sqsum_args *)args)->run->dtype;
    case KN_K_POWSUM:
        return (int)((const kn_powsum_args *)args)->run->dtype;
    case KN_K_CLIP:
        return ((const kn_clip_args *)args)->loss_scale != NULL;
    default:
        return 0;
    }
}

/* True for the first call of its kind. */
static bool is_new(kn_kernel k, const void *args)
{
    kind q;
    memset(&q, 0, sizeof q); /* padding is compared, too */
    q.kernel = k;
    q.variant = variant_of(k, args);
    KN_CHECK(kn_kernel_arrays(k) <= ARRAYS, "%s", kn_kernel_name(k));
    for (int i = 0; i < kn_kernel_arrays(k); i++) {
        const kn_array *a = (const kn_array *)args + i;
        if (!a->data)
            continue;
        q.array[i].dtype = (unsigned char)a->dtype;
        q.array[i].dims = (unsigned char)a->ndim;
        q.array[i].order = order_of(a);
    }
    for (int i = 0; i < kinds; i++)
        if (memcmp(&seen[i], &q, sizeof q) == 0)
            return false;
    if (kinds < KINDS)
        seen[kinds++] = q;
    calls_of[k]++;
    return true;
}

/* ---- one call, twice ------------------------------------------------------------------------- */

enum { RANGES = 300, ROOM = 8 << 20 };
static struct {
    char *at;
    size_t bytes, place; /* in the copies */
} range[RANGES];
static int ranges;
static size_t used;
static char before[ROOM], ours[ROOM], theirs[ROOM];

static void note_range(const void *p, size_t bytes)
{
    emulated_allow(p, bytes);
    if (ranges < RANGES && used + bytes <= ROOM) {
        range[ranges].at = (char *)(uintptr_t)p;
        range[ranges].bytes = bytes;
        range[ranges].place = used;
    }
    ranges++;
    used += (bytes + 7) / 8 * 8;
}

static void copy_out(char *to)
{
    for (int i = 0; i < ranges; i++)
        memcpy(to + range[i].place, range[i].at, range[i].bytes);
}

static void copy_back(void)
{
    for (int i = 0; i < ranges; i++)
        memcpy(range[i].at, before + range[i].place, range[i].bytes);
}

/* p in a copy. */
static void *in_copy(const void *p, char *copy)
{
    for (int i = 0; i < ranges; i++) {
        const ptrdiff_t offset = (const char *)p - range[i].at;
        if (offset >= 0 && offset < (ptrdiff_t)range[i].bytes)
            return copy + range[i].place + offset;
    }
    return (void *)(uintptr_t)p; /* an array without elements */
}

static double rounding(kn_dtype t)
{
    return t == KN_BF16  ? 0x1p-7
           : t == KN_F16 ? 0x1p-10
           : t == KN_F64 ? 1e-12
           : t == KN_F32 ? 1e-5
                         : 0;
}

/* The place of element i of a. */
static int64_t place(const kn_array *a, int64_t i)
{
    int64_t at = 0;
    for (int d = a->ndim - 1; d >= 0; d--) {
        at += i % a->shape[d] * a->stride[d];
        i /= a->shape[d];
    }
    return at;
}

static bool agree(double ours_is, double is, double tolerance)
{
    return ours_is == is || fabs(ours_is - is) <= tolerance || (isnan(ours_is) && isnan(is));
}

/* Array number i of the call agrees within roundings of its largest value. */
static bool same_array(kn_kernel k, int i, const kn_array *a)
{
    kn_array x = *a, y = *a;
    x.data = in_copy(a->data, ours);
    y.data = in_copy(a->data, theirs);
    const int64_t n = kn_array_numel(a);
    double most = 0;
    for (int64_t e = 0; e < n; e++)
        most = fmax(most, fabs(case_get(&y, place(&y, e))));
    for (int64_t e = 0; e < n; e++) {
        const double p = case_get(&x, place(&x, e)), q = case_get(&y, place(&y, e));
        if (!agree(p, q, rounding(a->dtype) * most))
            return kn_fail("%s: array %d, element %lld of %lld: the CUDA kernel gives %.9g, the "
                           "reference %.9g",
                           kn_kernel_name(k), i, (long long)e, (long long)n, p, q);
    }
    return true;
}

/* Norms are roots and powers; other kernels without arrays have the reference's bits. */
static bool same_numbers(kn_kernel k, const void *args)
{
    const kn_clip_args *clip = args;
    for (int i = 0; k != KN_K_CLIP && i < ranges; i++)
        if (memcmp(ours + range[i].place, theirs + range[i].place, range[i].bytes) != 0)
            return kn_fail("%s: the CUDA kernel's bytes aren't the reference's", kn_kernel_name(k));
    if (k != KN_K_CLIP)
        return true;
    const float x = *(float *)in_copy(clip->norm, ours), y = *(float *)in_copy(clip->norm, theirs);
    const double p = *(double *)in_copy(clip->coef, ours),
                 q = *(double *)in_copy(clip->coef, theirs);
    return (agree((double)x, (double)y, 1e-6 * (double)y) && agree(p, q, 1e-6 * fabs(q))) ||
           kn_fail("%s: the CUDA kernel gives %.9g and %.17g, the reference %.9g and %.17g",
                   kn_kernel_name(k), (double)x, p, (double)y, q);
}

static bool same_results(kn_kernel k, const void *args)
{
    const int arrays = kn_kernel_arrays(k);
    for (int i = 0; i < arrays; i++) {
        const kn_array *a = (const kn_array *)args + i;
        if (a->data && !same_array(k, i, a))
            return false;
    }
    return arrays > 0 || same_numbers(k, args);
}

static bool check_call(kn_kernel k, const void *args)
{
    if (!kn_emulated_kernels.run[k])
        return kn_fail("%s: the CUDA table has no such row", kn_kernel_name(k));
    ranges = 0;
    used = 0;
    emulated_allow_all();
    call_memory(k, args, note_range);
    if (ranges > RANGES || used > ROOM)
        return kn_fail("%s: %d ranges of %zu bytes: no room", kn_kernel_name(k), ranges, used);
    copy_out(before);
    bool ok = kn_emulated_kernels.run[k](args) == KN_DONE;
    emulated_allow_all();
    copy_out(ours);
    copy_back();
    ok = ok && kn_cpu_reference.run[k](args) == KN_DONE;
    copy_out(theirs);
    copy_back();
    if (!ok)
        return kn_fail("%s: refused", kn_kernel_name(k));
    return same_results(k, args);
}

static bool norms_alone; /* looks at batch norms' calls only */

/* Before each launch of the stand-in. */
static bool look(kn_kernel k, const void *args)
{
    const bool norm = k >= KN_K_BATCH_NORM && k <= KN_K_BATCH_NORM_JOIN;
    return (norms_alone && !norm) || !is_new(k, args) || check_call(k, args);
}

/* ---- steps ----------------------------------------------------------------------------------- */

/* With a message that names the steps. */
static bool run_steps(real_options o)
{
    o.device = STAND_IN;
    o.tiny = true;
    real_steps *s = real_steps_begin(o);
    const bool ok = s && real_steps_train(s) && real_steps_train(s) && real_steps_evaluate(s);
    real_steps_end(s);
    return ok;
}

static void check_steps(real_options o)
{
    KN_CHECK(run_steps(o), "%s in %s, optimizer %d%s%s%s: %s", real_model_name(o.model),
             o.dtype ? kn_dtype_name(o.dtype) : "f32", o.optimizer,
             o.channels_last ? ", channels-last" : "", o.mixed ? ", mixed labels" : "",
             o.recompute ? ", recomputing" : "", kn_error() ? kn_error() : "");
}

static void begin(void)
{
    kn_set_threads(1);
    stand_in_begin((stand_in){ .inline_streams = true, .look = look });
}

static void end(void)
{
    stand_in_end();
    if (getenv("KNAP_TEST_VERBOSE"))
        for (int k = 0; k < KN_K_COUNT; k++)
            printf("%-20s %3d kinds of calls\n", kn_kernel_name((kn_kernel)k), calls_of[k]);
}

/* The look above isn't blind: these are kernels of every such step. */
static void check_seen(const kn_kernel *list, int n)
{
    for (int i = 0; i < n; i++)
        KN_CHECK(calls_of[list[i]] > 0, "no call of %s was seen", kn_kernel_name(list[i]));
    KN_CHECK(kinds > 2 * n && kinds < KINDS, "%d kinds of calls", kinds);
}

static const kn_dtype dtypes[] = { KN_DTYPE_DEFAULT, KN_BF16, KN_F16 };

KN_TEST(cuda_models, steps_call_nothing_that_the_kernels_lack)
{
    static const kn_kernel of_all[] = {
        KN_K_COPY,       KN_K_FILL,      KN_K_UNARY,        KN_K_UNARY_GRAD,
        KN_K_BINARY,     KN_K_REDUCE,    KN_K_MATMUL,       KN_K_CROSS_ENTROPY,
        KN_K_NORM,       KN_K_NORM_GRAD, KN_K_INDEX_SELECT, KN_K_CROSS_ENTROPY_GRAD,
        KN_K_INDEX_ADD,  KN_K_DROPOUT,   KN_K_ATTENTION,    KN_K_ATTENTION_GRAD,
        KN_K_ROPE,       KN_K_RANDOM,    KN_K_ADAMW,        KN_K_SGD,
        KN_K_ABSMAX,     KN_K_SQSUM,     KN_K_POWSUM,       KN_K_CLIP,
        KN_K_LOSS_SCALE, KN_K_CONV,      KN_K_CONV_GRAD_X,  KN_K_CONV_GRAD_W,
        KN_K_BATCH_NORM, KN_K_POOL,      KN_K_POOL_GRAD,    KN_K_BATCH_NORM_GRAD,
        KN_K_SOFTMAX
    };
    begin();
    for (int i = 0; i < 6; i++)
        check_steps((real_options){ .model = i % 2 ? REAL_LLAMA : REAL_GPT,
                                    .dtype = dtypes[i / 2],
                                    .optimizer = i % REAL_OPTIMIZERS,
                                    .reduce_dtype = i > 2 ? dtypes[i / 2] : KN_DTYPE_DEFAULT,
                                    .recompute = i == 3,
                                    .clip_order = i == 4 ? INFINITY : 2 });
    for (int i = 0; i < 18; i++)
        check_steps((real_options){ .model = REAL_RESNET + i / 6,
                                    .dtype = dtypes[i % 3],
                                    .optimizer = (i + i / 3) % REAL_OPTIMIZERS,
                                    .channels_last = i / 3 % 2,
                                    .mixed = i % 4 == 0,
                                    .reduce_dtype = i % 2 ? dtypes[i % 3] : KN_DTYPE_DEFAULT,
                                    .recompute = i % 5 == 4,
                                    .clip_order = i % 7 == 6 ? 3 : 2 });
    end();
    check_seen(of_all, sizeof of_all / sizeof *of_all);
}

static int sync_on_a_rank(kn_comm *world, void *arg)
{
    (void)arg;
    norms_alone = true;
    begin();
    EXPECT(run_steps((real_options){ .model = REAL_RESNET, .sync = true, .comm = world }), "f32");
    EXPECT(run_steps((real_options){ .model = REAL_CIFAR,
                                     .dtype = KN_BF16,
                                     .channels_last = true,
                                     .sync = true,
                                     .comm = world }),
           "bf16");
    EXPECT(calls_of[KN_K_BATCH_NORM_JOIN] > 1, "no call of batch_norm_join");
    end();
    return 0;
}

/* Ranks are processes, with a stand-in each. */
KN_TEST(cuda_models, batch_norms_over_ranks_call_nothing_that_the_kernels_lack)
{
    const int failed = kn_spawn(2, sync_on_a_rank, NULL);
    KN_CHECK(failed == 0, "%d ranks failed", failed);
}
