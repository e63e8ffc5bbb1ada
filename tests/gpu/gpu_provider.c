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

/* Notes what lies there; p again. */
static void *note(const void *p, size_t bytes)
{
    if (p && bytes > 0) {
        KN_CHECK(ranges < RANGES, "too many arrays in a call");
        list[ranges++] =
            (range){ .begin = (char *)(uintptr_t)p, .end = (char *)(uintptr_t)p + bytes };
    }
    return (void *)(uintptr_t)p;
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
static void *there(const void *p, size_t bytes)
{
    const char *at = p;
    (void)bytes;
    for (int i = 0; i < ranges; i++)
        if (at >= list[i].begin && at < list[i].end)
            return list[i].at + (at - list[i].begin);
    return (void *)(uintptr_t)p; /* NULL, or an array without elements */
}

/* ---- what calls point at --------------------------------------------------------------------- */

#define MEMBER(entry, name, ...) kn_##name##_args name;
typedef union any_args {
    kn_array array[16];
    KN_KERNELS(MEMBER)
    kn_opt_step opt; /* the arguments of optimizers begin with it */
} any_args;

/* The size of a kernel's arguments, and the names of the arrays that they begin with. */
#define SHAPE(entry, name, arrays, ...) [KN_K_##entry] = { sizeof(kn_##name##_args), arrays },
static const struct {
    size_t size;
    const char *arrays;
} shape[KN_K_COUNT] = { KN_KERNELS(SHAPE) };

static size_t bytes_of(const kn_array *a)
{
    int64_t last = 0;
    if (!a->data || kn_array_numel(a) == 0)
        return 0;
    for (int d = 0; d < a->ndim; d++)
        last += (a->shape[d] - 1) * a->stride[d];
    return (size_t)(last + 1) * kn_dtype_size(a->dtype);
}

typedef void *(*place_fn)(const void *p, size_t bytes);
#define PUT(p, bytes) ((p) = place((p), (size_t)(bytes)))

static const kn_opt_piece *put_pieces(const kn_opt_piece *q, int n, place_fn place)
{
    static kn_opt_piece piece[PIECES];
    KN_CHECK(n <= PIECES, "too many pieces");
    for (int i = 0; i < n; i++) {
        piece[i] = q[i];
        const size_t count = (size_t)q[i].count, bytes = count * kn_dtype_size(q[i].param_dtype);
        PUT(piece[i].param, bytes);
        PUT(piece[i].grad, count * kn_dtype_size(q[i].grad_dtype));
        PUT(piece[i].m, bytes);
        PUT(piece[i].v, bytes);
        PUT(piece[i].out, count * kn_dtype_size(q[i].out_dtype));
    }
    return piece;
}

static const kn_run *put_runs(const kn_run *r, int n, place_fn place)
{
    static kn_run run[PIECES];
    KN_CHECK(n <= PIECES, "too many runs");
    for (int i = 0; i < n; i++) {
        run[i] = r[i];
        PUT(run[i].data, (size_t)r[i].count * kn_dtype_size(r[i].dtype));
    }
    return run;
}

enum { LIMBS = KN_SQSUM_LIMBS * sizeof(int64_t) };

/* Puts place(p, bytes) in the place of each pointer p to so many bytes. */
static void put_pointers(kn_kernel k, any_args *a, place_fn place)
{
    int i = 0;
    for (const char *name = shape[k].arrays; *name; name += *name == ' ') {
        PUT(a->array[i].data, bytes_of(&a->array[i]));
        name += strcspn(name, " ");
        i++;
    }
    switch (k) {
    case KN_K_ROUND:
        PUT(a->round.seed_at, sizeof(uint64_t));
        PUT(a->round.step_at, sizeof(double));
        break;
    case KN_K_SUM_N:
        PUT(a->sum_n.dst, (size_t)a->sum_n.count * kn_dtype_size(a->sum_n.dst_dtype));
        PUT(a->sum_n.acc, (size_t)a->sum_n.count * kn_dtype_size(a->sum_n.dst_dtype));
        for (int j = 0; j < a->sum_n.n; j++)
            PUT(a->sum_n.src[j], (size_t)a->sum_n.count * kn_dtype_size(a->sum_n.src_dtype));
        break;
    case KN_K_ADAMW:
    case KN_K_SGD:
    case KN_K_LION:
        a->opt.piece = put_pieces(a->opt.piece, a->opt.pieces, place);
        PUT(a->opt.lr, sizeof(double));
        PUT(a->opt.grad_scale, sizeof(double));
        PUT(a->opt.step, sizeof(double));
        PUT(a->opt.skip, sizeof(double));
        PUT(a->opt.limit, sizeof(double));
        PUT(a->opt.seed, sizeof(uint64_t));
        break;
    case KN_K_ABSMAX:
        a->absmax.run = put_runs(a->absmax.run, a->absmax.runs, place);
        PUT(a->absmax.out, sizeof(float));
        PUT(a->absmax.first, sizeof(int64_t));
        break;
    case KN_K_SQSUM:
        a->sqsum.run = put_runs(a->sqsum.run, a->sqsum.runs, place);
        PUT(a->sqsum.absmax, sizeof(float));
        PUT(a->sqsum.out, LIMBS);
        break;
    case KN_K_POWSUM:
        a->powsum.run = put_runs(a->powsum.run, a->powsum.runs, place);
        PUT(a->powsum.absmax, sizeof(float));
        PUT(a->powsum.out, LIMBS);
        break;
    case KN_K_CLIP:
        PUT(a->clip.limbs, LIMBS);
        PUT(a->clip.absmax, sizeof(float));
        PUT(a->clip.norm, sizeof(float));
        PUT(a->clip.coef, sizeof(double));
        PUT(a->clip.loss_scale, sizeof(float));
        PUT(a->clip.limit, sizeof(double));
        break;
    case KN_K_LOSS_SCALE:
        PUT(a->loss_scale.state, sizeof *a->loss_scale.state);
        PUT(a->loss_scale.step, sizeof *a->loss_scale.step);
        PUT(a->loss_scale.absmax, sizeof(float));
        PUT(a->loss_scale.loss_scale, sizeof(float));
        break;
    default:
        break;
    }
}

/* A copy of the arguments, whose ranges of memory are the list. */
static void note_call(kn_kernel k, const void *args, any_args *a)
{
    ranges = 0;
    memcpy(a, args, shape[k].size);
    put_pointers(k, a, note);
    merge();
}

void call_memory(kn_kernel k, const void *args, void (*use)(const void *p, size_t bytes))
{
    any_args a;
    note_call(k, args, &a);
    for (int i = 0; i < ranges; i++)
        use(list[i].begin, (size_t)(list[i].end - list[i].begin));
    ranges = 0;
}

/* ---- the provider ---------------------------------------------------------------------------- */

/* cuDNN's dropout draws other numbers than the reference: then Knap's kernels are asked. */
static bool draws_otherwise(kn_kernel k, const any_args *a)
{
    return (k == KN_K_ATTENTION && a->attention.dropout_p > 0) ||
           (k == KN_K_ATTENTION_GRAD && a->attention_grad.dropout_p > 0);
}

static kn_status run(kn_kernel k, const void *args)
{
    any_args a;
    note_call(k, args, &a);
    bool ok = move(KN_TO_DEVICE);
    if (ok) {
        const bool own = draws_otherwise(k, &a);
        put_pointers(k, &a, there);
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

#define FUNCTION(entry, name, ...)                                                                 \
    static kn_status run_##name(const void *args)                                                  \
    {                                                                                              \
        return run(KN_K_##entry, args);                                                            \
    }
#define ENTRY(entry, name, ...) [KN_K_##entry] = run_##name,
KN_KERNELS(FUNCTION)

const kn_provider kn_gpu_provider = { .name = "gpu", .run = { KN_KERNELS(ENTRY) } };
