/* kernels/cpu/choose.c: whether oneDNN is asked for a matrix product before the vector overlay.
 *
 * bf16 and f16: where the CPU has instructions for them that the overlay doesn't use; it uses those
 * for pairs of bf16 (AVX512_BF16), not those for matrices (AMX). f32: either may be faster, by a
 * third on one processor and another, so KNAP_TUNE=1 times both where it meets a kind of product
 * for the first time, and keeps the faster one in the file of choices (choices.h). Without its line
 * the overlay is asked first: an element of its f32 products has the same bits wherever in a matrix
 * it lies, which oneDNN doesn't promise. bench/products.c shows both sides' rates. f32 by rounded
 * factors (kn_set_f32_products): the overlay.
 *
 * The two add in different orders. So a choice depends on the processor, on the versions of both
 * and on the kind of a product (how its operands lie, N and K to a power of two), not on threads,
 * nor on rows, but for a few. */
#include "kernels/choices.h"
#include "kernels/cpu/cpu_internal.h"
#include "kernels/cpu/onednn.h"
#include "kernels/device.h"
#include "kernels/trace.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#ifdef KN_HAVE_X86
#include <cpuid.h>
#else
#include <sys/utsname.h>
#endif

enum {
    FEW = 4,    /* rows: the overlay reads the right operand once, at the memory's speed */
    LEAST = 64, /* of N and K: below, a call of oneDNN costs too much */
    TRIES = 5,  /* of each side, in turns */
    LOGS = 32,
};

#define FASTER 0.97 /* of the overlay's time: above, it is noise, and the bits may stay */

/* ---- the processor --------------------------------------------------------------------------- */

static char cpu[160]; /* how keys of choices begin */
static bool amx;      /* whether the CPU multiplies matrices of bf16 */
static pthread_once_t cpu_once = PTHREAD_ONCE_INIT;

/* Elsewhere than on x86 the architecture alone. */
static void describe_cpu(char *text, size_t size)
{
#ifdef KN_HAVE_X86
    unsigned a = 0, b = 0, c = 0, d = 0, most;
    char vendor[13] = "";
    __get_cpuid(0, &most, &b, &c, &d);
    memcpy(vendor, &b, 4), memcpy(vendor + 4, &d, 4), memcpy(vendor + 8, &c, 4);
    __get_cpuid(1, &a, &b, &c, &d);
    unsigned family = a >> 8 & 15, model = a >> 4 & 15;
    if (family == 6 || family == 15)
        model += (a >> 16 & 15) << 4;
    if (family == 15)
        family += a >> 20 & 255;
    snprintf(text, size, "%s family %u model %u", vendor, family, model);
#else
    struct utsname u;
    snprintf(text, size, "%s", uname(&u) == 0 ? u.machine : "unknown");
#endif
}

static void find_cpu(void)
{
    char text[80];
#ifdef KN_HAVE_X86
    unsigned a, b, c, d;
    amx = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & 1u << 22); /* AMX-BF16 */
#endif
    describe_cpu(text, sizeof text);
    snprintf(cpu, sizeof cpu, "CPU %s, %s, %s, ", text, kn_cpu_isa(), kn_cpu_libraries());
}

static const char *cpu_key(void)
{
    pthread_once(&cpu_once, find_cpu);
    return cpu;
}

bool kn_cpu_multiplies_matrices(void)
{
    pthread_once(&cpu_once, find_cpu);
    return amx;
}

/* ---- kinds of f32 products ------------------------------------------------------------------- */

typedef struct kind {
    bool a, b; /* whether rows of the operand are contiguous; else its columns are */
    int n, k;  /* logarithms, rounded down */
} kind;

/* Answers of this process, so that a product costs no search among texts: 0: not asked yet. */
static _Atomic signed char answers[2][2][LOGS][LOGS];
enum { OVERLAY = 1, ONEDNN };

static int log_of(int64_t n)
{
    int log = 0;
    while (n > 1 && log < LOGS - 1)
        n /= 2, log++;
    return log;
}

static double seconds(kn_status (*run)(const void *), const kn_matmul_args *x)
{
    const double begin = kn_now();
    return run(x) == KN_DONE ? kn_now() - begin : 1e30;
}

/* Times both on the product that is asked for, into memory of its own: a product that adds must be
 * added once only. 0: there is no memory for it, or oneDNN declines. */
static int time_both(const kn_matmul_args *x)
{
    kn_matmul_args own = *x;
    own.dst = kn_array_make(NULL, x->dst.dtype, x->dst.ndim, x->dst.shape);
    const size_t bytes = (size_t)kn_array_numel(&own.dst) * kn_dtype_size(own.dst.dtype);
    own.dst.data = kn_take(kn_device_memory(KN_CPU), bytes, KN_MEM_WORKSPACE);
    if (!own.dst.data)
        return 0;
    memset(own.dst.data, 0, bytes);
    double overlay = 1e30, onednn = 1e30;
    for (int i = 0; i < TRIES && (i == 0 || onednn < 1e30); i++) {
        const double a = seconds(kn_cpu_overlay()->run[KN_K_MATMUL], &own);
        const double b = seconds(kn_cpu_onednn.run[KN_K_MATMUL], &own);
        overlay = a < overlay ? a : overlay;
        onednn = b < onednn ? b : onednn;
    }
    kn_give(kn_device_memory(KN_CPU), own.dst.data, bytes, KN_MEM_WORKSPACE);
    if (onednn == 1e30 || overlay == 1e30)
        return 0;
    return onednn < FASTER * overlay ? ONEDNN : OVERLAY;
}

/* 0: it is still to be timed, by another product of this kind. */
static int look_up(const kind *of, const kn_matmul_args *x)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    char key[KN_CHOICE_KEY], value[KN_CHOICE_KEY];
    snprintf(key, sizeof key, "%sf32 product, a by %s, b by %s, n from %lld, k from %lld",
             cpu_key(), of->a ? "rows" : "columns", of->b ? "rows" : "columns", 1LL << of->n,
             1LL << of->k);
    pthread_mutex_lock(&lock);
    int answer = 0;
    if (kn_choice_find(key, value))
        answer = strcmp(value, "oneDNN") == 0 ? ONEDNN : strcmp(value, "own") == 0 ? OVERLAY : 0;
    if (!answer && !kn_tuning())
        answer = OVERLAY;
    else if (!answer && (answer = time_both(x)))
        kn_choice_keep(key, answer == ONEDNN ? "oneDNN" : "own");
    pthread_mutex_unlock(&lock);
    return answer;
}

/* ---- the entry ------------------------------------------------------------------------------- */

/* Leading dims that share b are rows; the others count products. */
static void sizes(const kn_matmul_args *x, int64_t *rows, int64_t *products)
{
    *rows = x->dst.shape[x->dst.ndim - 2];
    *products = 1;
    for (int d = 0; d < x->dst.ndim - 2; d++)
        *(x->b.stride[d] ? products : rows) *= x->dst.shape[d];
}

bool kn_cpu_onednn_first(const kn_matmul_args *x)
{
    const int r = x->dst.ndim - 2, c = r + 1;
    const int64_t N = x->dst.shape[c], K = x->a.shape[c];
    int64_t rows, products;
    sizes(x, &rows, &products);
    if (rows <= FEW || N == 1 || K == 0)
        return false;
    if (x->a.dtype != KN_F32)
        return kn_onednn_fast(x->a.dtype) &&
               (x->a.dtype != KN_BF16 || kn_cpu_multiplies_matrices() ||
                !kn_cpu_multiplies_pairs());
    if (products > 1 || N < LEAST || K < LEAST || kn_f32_products(KN_CPU))
        return false;
    const kind of = { x->a.stride[c] == 1, x->b.stride[c] == 1, log_of(N), log_of(K) };
    _Atomic signed char *answer = &answers[of.a][of.b][of.n][of.k];
    if (!atomic_load_explicit(answer, memory_order_relaxed))
        atomic_store_explicit(answer, (signed char)look_up(&of, x), memory_order_relaxed);
    return atomic_load_explicit(answer, memory_order_relaxed) == ONEDNN;
}

const char *kn_cpu_choices(void)
{
    return kn_choices_said(cpu_key(), NULL);
}
