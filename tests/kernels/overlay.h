/* tests/kernels/overlay.h (private): the differential test of kernel providers. A case is one call
 * of a kernel with all its arrays in one arena of bytes. It runs on the reference and then on every
 * other provider, from the same bytes: outputs must agree within a tolerance, every other byte must
 * equal the reference's; a second run and a run on two threads must repeat the first bit for bit; a
 * provider that declines must have written nothing.
 *
 * The vector provider under test is the best that the machine runs. KNAP_ISA=base (or avx2) in the
 * environment tests another; scripts/test runs this program with each that the CPU has.
 * KNAP_TEST_VERBOSE=1 prints the number of cases that each provider ran and declined;
 * KNAP_TEST_SEED=n selects other cases. */
#ifndef KNAP_TESTS_KERNELS_OVERLAY_H
#define KNAP_TESTS_KERNELS_OVERLAY_H

#include "kernels/kernels.h"
#include "tests/kn_test.h"

typedef enum layout {
    DENSE = 0,
    OFFSET,     /* dense, at an odd address */
    PITCHED,    /* a gap after each row */
    TRANSPOSED, /* the last two dims swapped in memory */
    STRIDED,    /* every second element */
    OUTPUT_LAYOUTS,
    ONE_ROW = OUTPUT_LAYOUTS, /* dim 0 broadcast */
    ONE_COLUMN,               /* last dim broadcast */
    ONE_ELEMENT,              /* all dims broadcast */
    LAYOUTS
} layout;

typedef enum values {
    NORMAL = 0, /* about N(0, 2); integers in [-100, 100]; bool */
    POSITIVE,   /* |N(0, 2)| + 0.05 */
    SMALL,      /* N(0, 1) / 16: many products stay near 1 */
    SPECIAL,    /* NORMAL with zeros of both signs, infinities, NaN, huge and tiny ones */
    FINITE,     /* SPECIAL without infinities and NaN */
    UNSET       /* left at the fill pattern: outputs */
} values;

#define CASE_OUTS 12

typedef struct overlay_case {
    kn_kernel kernel;
    unsigned char *bytes; /* the arena */
    size_t used;
    uint64_t random; /* state of this case's choices */
    int ndim;        /* of most of its arrays */
    int64_t shape[KN_MAX_DIMS];
    int outs;
    kn_array out[CASE_OUTS];
    double rel[CASE_OUTS], abs[CASE_OUTS]; /* both 0: bit for bit */
    char what[400];
} overlay_case;

/* Begins a case of kernel; number seeds its random choices. The arena is reused. */
overlay_case *case_begin(kn_kernel kernel, uint64_t number);
/* Adds words to the line that a failure prints. */
void case_note(overlay_case *c, const char *fmt, ...) KN_PRINTF(2, 3);
/* A number in [0, n). */
int64_t case_pick(overlay_case *c, int64_t n);
/* One of 0, 1, 3, 7, 17, 31, 33, 64, 100, 257, 1000, at most max. */
int64_t case_size(overlay_case *c, int64_t max);
/* Gives the case a shape: 1 to 3 dims of the usual sizes, at most max elements. */
void case_shape_below(overlay_case *c, int64_t max);
/* At most 20000; every 40th case is large enough for several threads. */
void case_shape(overlay_case *c, int number);
/* At most 20000, most of them in the last dim; now and then [130, 1000]. */
void case_row_shape(overlay_case *c, int number);
kn_dtype case_float(overlay_case *c);              /* f32 half of the time, else bf16, f16, f64 */
layout case_layout(overlay_case *c, layout count); /* DENSE half of the time */

/* A new array in the arena. */
kn_array case_array(overlay_case *c, kn_dtype dtype, layout l, values v, int ndim,
                    const int64_t *shape);
kn_array case_vector(overlay_case *c, kn_dtype dtype, values v, int64_t n);
/* Of the case's shape and a layout that an input may have, or also an output. */
kn_array case_input(overlay_case *c, kn_dtype dtype, values v);
kn_array case_output(overlay_case *c, kn_dtype dtype, values v);
/* An output of an input's shape: now and then the input itself, if it has this dtype and a place
 * for each element. */
kn_array case_result(overlay_case *c, const kn_array *in, kn_dtype dtype);
/* The backward of f, without its gradients. */
static inline kn_attention_grad_args case_attention_grad(const kn_attention_args *f)
{
    return (kn_attention_grad_args){ .o = f->o,
                                     .lse = f->lse,
                                     .q = f->q,
                                     .k = f->k,
                                     .v = f->v,
                                     .scale = f->scale,
                                     .causal = f->causal,
                                     .dropout_p = f->dropout_p,
                                     .seed = f->seed,
                                     .stream = f->stream,
                                     .mask = f->mask,
                                     .window = f->window };
}
/* Raw bytes of the arena, aligned to 8. */
void *case_bytes(overlay_case *c, size_t size);
void case_set(const kn_array *a, int64_t offset, double x);
double case_get(const kn_array *a, int64_t offset);

/* Declares an output: bit for bit; or within 1e-5 relative (f64: 1e-12; bf16, f16: one unit in the
 * last place) plus abs (scaled to the dtype's precision). */
void case_exact(overlay_case *c, const kn_array *a);
void case_close(overlay_case *c, const kn_array *a, double abs);
/* Declares an array of which any values may be left. */
void case_scratch(overlay_case *c, const kn_array *a);
/* The gradient of a's mask, if it is one that is added: zeros that a writes to. */
static inline void case_dmask(overlay_case *c, kn_attention_grad_args *a, double abs)
{
    if (!a->mask.data || a->mask.dtype == KN_BOOL)
        return;
    a->dmask = case_array(c, a->q.dtype, DENSE, UNSET, 4, a->mask.shape);
    memset(a->dmask.data, 0, (size_t)kn_array_numel(&a->dmask) * kn_dtype_size(a->dmask.dtype));
    case_close(c, &a->dmask, abs);
}
/* Runs the case everywhere; ends the test at the first disagreement. */
void case_run(overlay_case *c, const void *args);
/* The reference alone, as when an input is another kernel's result. */
void case_prepare(kn_kernel k, const void *args);
/* Runs one(c, i) for i < count, with random choices by first + i; under KNAP_TEST_VERBOSE prints
 * how many each provider ran. */
void case_each(kn_kernel kernel, int first, int count, void (*one)(overlay_case *c, int i));
/* A test of count such cases: its body makes and runs case i of them, c. */
#define OVERLAY(suite, name, kernel, first, count)                                                 \
    static void suite##_##name##_case(overlay_case *c, int i);                                     \
    KN_TEST(suite, name)                                                                           \
    {                                                                                              \
        case_each(KN_K_##kernel, first, count, suite##_##name##_case);                             \
    }                                                                                              \
    static void suite##_##name##_case(overlay_case *c, int i)

/* The providers under test, without the reference: the CPU's, or in the program test_cuda_emulated
 * the CUDA kernels as the host runs them (tests/gpu/emulator/emulate.h). */
int overlay_providers(const kn_provider *providers[KN_MAX_PROVIDERS]);
/* The same with the reference at the end. */
int overlay_all_layers(const kn_provider *providers[KN_MAX_PROVIDERS]);
/* The number of cases to run: all n, or fewer where kernels are emulated or a sanitizer looks on;
 * KN_TEST_WHOLE=1 (the slow suite): all. */
int overlay_cases(int n);

/* Calls use for each range of memory that a call of a kernel points at (gpu_provider.c). */
void call_memory(kn_kernel k, const void *args, void (*use)(const void *p, size_t bytes));

#endif
