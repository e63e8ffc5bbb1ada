/* tests/kernels/overlay.c: arenas, random cases, running and comparing; see overlay.h. */
#include "kernels/memory.h"
#include "tests/kernels/overlay.h"
#include "tests/kernels/fences.h"
#include "kernels/convert.h"
#include "kernels/faults.h"
#include "tensor/tensor_internal.h"

#include <stdarg.h>

enum { ARENA = 48 << 20, FILL = 0xff /* NaN in every float dtype */ };

static unsigned char *arena, *before, *truth, *want, *got;
static int ran[KN_MAX_PROVIDERS], declined[KN_MAX_PROVIDERS];

/* ---- choices ------------------------------------------------------------------------------- */

/* SplitMix64 (Steele, Lea, Flood 2014). */
static uint64_t next_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

overlay_case *case_begin(kn_kernel kernel, uint64_t number)
{
    static overlay_case c;
    if (!arena) {
        arena = aligned_alloc(64, ARENA);
        before = malloc(ARENA);
        truth = malloc(ARENA);
        want = malloc(ARENA);
        got = malloc(ARENA);
        KN_CHECK(arena && before && truth && want && got, "out of memory");
        memset(arena, FILL, ARENA);
    }
    memset(arena, FILL, c.used);
    c = (overlay_case){ .kernel = kernel, .bytes = arena };
    const char *seed = getenv("KNAP_TEST_SEED");
    c.random = number * 1000003 + (uint64_t)kernel * 7919 + (seed ? strtoull(seed, NULL, 10) : 0);
    return &c;
}

void case_note(overlay_case *c, const char *fmt, ...)
{
    size_t n = strlen(c->what);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(c->what + n, sizeof c->what - n, fmt, ap);
    va_end(ap);
}

int64_t case_pick(overlay_case *c, int64_t n)
{
    return (int64_t)(next_random(&c->random) % (uint64_t)n);
}

int64_t case_size(overlay_case *c, int64_t max)
{
    static const int64_t sizes[] = { 0, 1, 3, 7, 17, 31, 33, 64, 100, 257, 1000 };
    int64_t n;
    do
        n = sizes[case_pick(c, sizeof sizes / sizeof *sizes)];
    while (n > max || (n == 0 && case_pick(c, 4) > 0)); /* 0 less often */
    return n;
}

void case_shape_below(overlay_case *c, int64_t max)
{
    c->ndim = 1 + (int)case_pick(c, 3);
    for (int d = 0; d < c->ndim; d++) {
        c->shape[d] = case_size(c, max);
        max = c->shape[d] > 0 ? max / c->shape[d] : max;
    }
}

void case_shape(overlay_case *c, int number)
{
    case_shape_below(c, 20000);
    if (number % 40 == 7) {
        c->ndim = 2;
        c->shape[0] = 301;
        c->shape[1] = 1 + case_pick(c, 600);
    }
}

void case_row_shape(overlay_case *c, int number)
{
    int64_t room = 20000;
    c->ndim = 1 + (int)case_pick(c, 3);
    for (int d = c->ndim - 1; d >= 0; d--) {
        c->shape[d] = case_size(c, room);
        room /= c->shape[d] > 0 ? c->shape[d] : 1;
    }
    if (number % 30 == 11) {
        c->ndim = 2;
        c->shape[0] = 130;
        c->shape[1] = 1000;
    }
}

kn_dtype case_float(overlay_case *c)
{
    static const kn_dtype floats[] = { KN_F32, KN_F32, KN_F32, KN_BF16, KN_BF16, KN_F16, KN_F64 };
    return floats[case_pick(c, sizeof floats / sizeof *floats)];
}

layout case_layout(overlay_case *c, layout count)
{
    return case_pick(c, 2) ? DENSE : (layout)case_pick(c, count);
}

/* ---- arrays -------------------------------------------------------------------------------- */

void case_set(const kn_array *a, int64_t i, double x)
{
    switch (a->dtype) {
    case KN_F32:
        ((float *)a->data)[i] = (float)x;
        break;
    case KN_BF16:
        ((uint16_t *)a->data)[i] = kn_f64_to_bf16(x);
        break;
    case KN_F16:
        ((uint16_t *)a->data)[i] = kn_f64_to_f16(x);
        break;
    case KN_F64:
        ((double *)a->data)[i] = x;
        break;
    case KN_I64:
        ((int64_t *)a->data)[i] = (int64_t)x;
        break;
    case KN_I32:
        ((int32_t *)a->data)[i] = (int32_t)x;
        break;
    default:
        ((uint8_t *)a->data)[i] = (uint8_t)x;
        break;
    }
}

double case_get(const kn_array *a, int64_t i)
{
    return kn_element(a->dtype, (const char *)a->data + (size_t)i * kn_dtype_size(a->dtype));
}

void *case_bytes(overlay_case *c, size_t size)
{
    void *p = c->bytes + c->used;
    c->used += (size + 7) / 8 * 8 + 8;
    KN_CHECK(c->used <= ARENA, "%s: the arena is full", c->what);
    return p;
}

static double special(uint64_t r, bool finite)
{
    static const double odd[] = { 0.0, -0.0, 1,    -1,    1e30,  -1e30,    1e-30,     -1e-30,
                                  88,  -88,  3e38, 1e-40, 65504, INFINITY, -INFINITY, NAN };
    int n = sizeof odd / sizeof *odd;
    return odd[r % (uint64_t)(finite ? n - 3 : n)];
}

static double value(overlay_case *c, kn_dtype t, values v)
{
    uint64_t r = next_random(&c->random);
    const uint64_t pairs = (r & 0x00ff00ff00ff00ffu) + (r >> 8 & 0x00ff00ff00ff00ffu);
    /* of eight bytes, less their mean: about normal, standard deviation 209 */
    const double sum = (double)(pairs * 0x0001000100010001u >> 48) - 8 * 127.5;
    if (t == KN_BOOL)
        return (double)(r & 1);
    if (t == KN_U8)
        return (double)(r & 255);
    if (!kn_dtype_is_float(t))
        return (double)((int64_t)(r % 201) - 100);
    if ((v == SPECIAL || v == FINITE) && r % 5 == 0)
        return special(next_random(&c->random), v == FINITE);
    double x = sum / 104.5;
    return v == POSITIVE ? fabs(x) + 0.05 : v == SMALL ? x / 32 : x;
}

/* Strides of a layout; the result is the number of elements spanned. */
static int64_t lay_out(kn_array *a, layout l)
{
    int n = a->ndim, order[KN_MAX_DIMS];
    for (int d = 0; d < n; d++)
        order[d] = d;
    if (l == TRANSPOSED && n >= 2) {
        order[n - 1] = n - 2;
        order[n - 2] = n - 1;
    }
    int64_t stride = l == STRIDED ? 2 : 1;
    for (int k = n - 1; k >= 0; k--) {
        int d = order[k];
        bool once = l == ONE_ELEMENT || (l == ONE_ROW && d == 0) || (l == ONE_COLUMN && d == n - 1);
        a->stride[d] = once ? 0 : stride;
        if (!once)
            stride *= a->shape[d];
        if (l == PITCHED && k == n - 1)
            stride += 5;
    }
    return stride;
}

kn_array case_array(overlay_case *c, kn_dtype dtype, layout l, values v, int ndim,
                    const int64_t *shape)
{
    static const char *const names[] = { "",         "/offset",  "/pitched",    "/transposed",
                                         "/strided", "/one row", "/one column", "/one element" };
    char text[128];
    kn_array a = kn_array_make(NULL, dtype, ndim, shape);
    /* three elements behind it stay NaN, so that results show where one is read */
    int64_t span = lay_out(&a, l) + 3, size = (int64_t)kn_dtype_size(dtype);
    size_t align = (64 - c->used % 64) % 64;
    case_bytes(c, align < 16 ? align + 56 : align - 8); /* to a multiple of 64, with a gap */
    a.data = (char *)case_bytes(c, (size_t)(span * size)) + (l == OFFSET ? size : 0);
    if (v != UNSET)
        for (int64_t i = 0; i < span - 3; i++)
            case_set(&a, i, value(c, dtype, v));
    case_note(c, " %s%s", kn_array_describe(&a, text, sizeof text), names[l]);
    return a;
}

kn_array case_vector(overlay_case *c, kn_dtype dtype, values v, int64_t n)
{
    return case_array(c, dtype, DENSE, v, 1, &n);
}

kn_array case_input(overlay_case *c, kn_dtype dtype, values v)
{
    KN_CHECK(c->ndim > 0, "%s: the case has no shape", kn_kernel_name(c->kernel));
    return case_array(c, dtype, case_layout(c, LAYOUTS), v, c->ndim, c->shape);
}

kn_array case_output(overlay_case *c, kn_dtype dtype, values v)
{
    KN_CHECK(c->ndim > 0, "%s: the case has no shape", kn_kernel_name(c->kernel));
    return case_array(c, dtype, case_layout(c, OUTPUT_LAYOUTS), v, c->ndim, c->shape);
}

kn_array case_result(overlay_case *c, const kn_array *in, kn_dtype dtype)
{
    bool own = in->dtype == dtype && case_pick(c, 4) == 0;
    for (int d = 0; d < in->ndim; d++)
        own = own && in->stride[d] != 0;
    if (!own)
        return case_array(c, dtype, case_layout(c, OUTPUT_LAYOUTS), UNSET, in->ndim, in->shape);
    case_note(c, " in place");
    return *in;
}

/* ---- outputs ------------------------------------------------------------------------------- */

static void add_output(overlay_case *c, const kn_array *a, double rel, double abs)
{
    KN_CHECK(c->outs < CASE_OUTS, "too many outputs");
    c->out[c->outs] = *a;
    c->rel[c->outs] = rel;
    c->abs[c->outs++] = abs;
}

void case_exact(overlay_case *c, const kn_array *a)
{
    add_output(c, a, 0, 0);
}

void case_close(overlay_case *c, const kn_array *a, double abs)
{
    switch (a->dtype) {
    case KN_BF16:
        add_output(c, a, 0x1.02p-7, abs);
        break;
    case KN_F16:
        add_output(c, a, 0x1.02p-10, abs + 0x1p-24);
        break;
    case KN_F64:
        add_output(c, a, 1e-12, abs * 1e-6);
        break;
    default:
        add_output(c, a, kn_dtype_is_float(a->dtype) ? 1e-5 : 0, abs);
    }
}

void case_scratch(overlay_case *c, const kn_array *a)
{
    add_output(c, a, 0, INFINITY);
}

/* An array of the arena seen in a copy of it. */
static kn_array in_copy(const overlay_case *c, const kn_array *a, unsigned char *copy)
{
    kn_array b = *a;
    b.data = copy + ((unsigned char *)a->data - c->bytes);
    return b;
}

static bool agree(double x, double y, double rel, double abs)
{
    if (isnan(y) || isnan(x))
        return (isnan(y) && isnan(x)) || abs == INFINITY;
    return x == y || abs == INFINITY || fabs(x - y) <= rel * fabs(y) + abs;
}

/* Compares one output in got and want, then wipes it in both so that the rest can be compared as
 * bytes. */
static void check_output(const overlay_case *c, int k, const char *provider)
{
    kn_array g = in_copy(c, &c->out[k], got), w = in_copy(c, &c->out[k], want);
    size_t size = kn_dtype_size(g.dtype);
    int64_t n = kn_array_numel(&g), at[KN_MAX_DIMS] = { 0 };
    for (int64_t i = 0; i < n; i++) {
        int64_t offset = 0;
        for (int d = 0; d < g.ndim; d++)
            offset += at[d] * g.stride[d];
        char *pg = (char *)g.data + offset * (int64_t)size;
        char *pw = (char *)w.data + offset * (int64_t)size;
        double x = case_get(&g, offset), y = case_get(&w, offset);
        bool fine = c->rel[k] == 0 && c->abs[k] == 0 ? memcmp(pg, pw, size) == 0
                                                     : agree(x, y, c->rel[k], c->abs[k]);
#ifdef KN_TEST_DEVICE /* a GPU's conversions have one NaN (kernels/convert.h) */
        fine = fine || (isnan(x) && isnan(y));
#endif
        KN_CHECK(fine, "%s %s%s: output %d, element %lld is %.9g, the reference says %.9g",
                 kn_kernel_name(c->kernel), provider, c->what, k, (long long)i, x, y);
        memset(pg, 0, size);
        memset(pw, 0, size);
        for (int d = g.ndim - 1; d >= 0 && ++at[d] == g.shape[d]; d--)
            at[d] = 0;
    }
}

/* ---- running ------------------------------------------------------------------------------- */

#ifdef KN_TEST_CUDA
#include "kernels/cuda/kernels/cuda_internal.h"
#include "tests/gpu/emulator/emulated.h"

enum { RUNS = 1, SHARE = 5 }; /* no threads to compare; every access is checked */

int overlay_providers(const kn_provider *providers[KN_MAX_PROVIDERS])
{
    providers[0] = &kn_cuda_kernels;
    return 1;
}

/* Every access is checked: one outside of the call's arrays ends the program with a message. The
 * second run is on a larger GPU: no bit depends on its size. */
static kn_status run_kernel(const kn_provider *provider, kn_kernel k, const void *args)
{
    static int calls;
    emulated_multiprocessors(calls++ % 2 ? 7 : 2);
    emulated_allow_all();
    call_memory(k, args, emulated_allow);
    kn_status s = provider->run[k](args);
    emulated_allow_all();
    return s;
}
#elif defined KN_TEST_DEVICE
enum { RUNS = 1, SHARE = 1 };

extern const kn_provider kn_gpu_provider; /* gpu_provider.c */

int overlay_providers(const kn_provider *providers[KN_MAX_PROVIDERS])
{
    KN_CHECK(kn_device_memory(KN_CUDA));
    providers[0] = &kn_gpu_provider;
    return 1;
}
#else
enum { RUNS = 2, SHARE = 1 };

int overlay_providers(const kn_provider *providers[KN_MAX_PROVIDERS])
{
    return kn_providers(KN_CPU, providers) - 1;
}
#endif

#ifndef KN_TEST_CUDA
/* Scratch has fences: what a provider, or its library, writes outside of it is seen. */
static kn_status run_kernel(const kn_provider *provider, kn_kernel k, const void *args)
{
    fences_put();
    const kn_status s = provider->run[k](args);
    const long broken = fences_broken();
    KN_CHECK(broken == 0, "%s %s: wrote %ld bytes around its scratch", kn_kernel_name(k),
             provider->name, broken);
    return s;
}
#endif

int overlay_all_layers(const kn_provider *providers[KN_MAX_PROVIDERS])
{
    const kn_provider *cpu[KN_MAX_PROVIDERS];
    int n = overlay_providers(providers);
    providers[n] = cpu[kn_providers(KN_CPU, cpu) - 1];
    return n + 1;
}

int overlay_cases(int n)
{
    const int share = getenv("KN_TEST_WHOLE") ? 1 : SHARE * kn_one_in(4);
    return (n + share - 1) / share;
}

void case_prepare(kn_kernel k, const void *args)
{
    const kn_provider *providers[KN_MAX_PROVIDERS];
    int n = overlay_all_layers(providers);
    KN_CHECK(providers[n - 1]->run[k](args) == KN_DONE, "%s", kn_kernel_name(k));
}

static kn_status run_layer(overlay_case *c, const kn_provider *provider, const void *args,
                           int threads)
{
    memcpy(c->bytes, before, c->used);
    kn_set_threads(threads);
    return provider->run[c->kernel] ? run_kernel(provider, c->kernel, args) : KN_DECLINED;
}

/* Where one of the allocations of the call fails, the kernel does so too, or its bits are those in
 * got, or it declines. */
static void run_without_memory(overlay_case *c, const kn_provider *provider, const void *args,
                               int64_t allocations)
{
    for (int64_t n = 1; n <= allocations; n++) {
        kn_fail_alloc(n);
        const kn_status s = run_layer(c, provider, args, RUNS);
        kn_fail_alloc(0);
        KN_CHECK((s == KN_FAILED) == !kn_ok(), "%s %s%s: allocation %d: status %d, error \"%s\"",
                 kn_kernel_name(c->kernel), provider->name, c->what, (int)n, (int)s, kn_error());
        KN_CHECK(s == KN_FAILED || memcmp(c->bytes, s == KN_DONE ? got : before, c->used) == 0,
                 "%s %s%s: other bits where allocation %d fails", kn_kernel_name(c->kernel),
                 provider->name, c->what, (int)n);
        kn_clear_error();
    }
}

/* truth holds the reference's bytes; outputs are wiped in a copy as they are compared. */
static void compare_layer(overlay_case *c, const kn_provider *provider, const void *args, int index)
{
    const char *kernel = kn_kernel_name(c->kernel);
    kn_status s = run_layer(c, provider, args, 1);
    KN_CHECK(s != KN_FAILED && kn_ok(), "%s %s%s", kernel, provider->name, c->what);
    if (s == KN_DECLINED) {
        KN_CHECK(memcmp(c->bytes, before, c->used) == 0, "%s %s%s: declined but wrote", kernel,
                 provider->name, c->what);
#ifdef KN_TEST_CUDA
        KN_CHECK(!provider->run[c->kernel], "%s %s%s: declined, and nobody comes after", kernel,
                 provider->name, c->what);
#endif
        declined[index]++;
        return;
    }
    ran[index]++;
    memcpy(got, c->bytes, c->used);
    int64_t allocations = 0;
    for (int threads = 1; threads <= RUNS; threads++) {
        kn_fail_alloc(INT64_MAX);
        run_layer(c, provider, args, threads);
        allocations = kn_fail_alloc(0);
        KN_CHECK(memcmp(c->bytes, got, c->used) == 0, "%s %s%s: the bits change %s", kernel,
                 provider->name, c->what, threads == 2 ? "with two threads" : "in a second run");
    }
    if (RUNS > 1) /* GPUs keep their scratch */
        run_without_memory(c, provider, args, allocations);
    memcpy(want, truth, c->used);
    for (int k = 0; k < c->outs; k++)
        check_output(c, k, provider->name);
    const bool same = memcmp(got, want, c->used) == 0;
    for (size_t i = 0; !same && i < c->used; i++)
        KN_CHECK(got[i] == want[i], "%s %s%s: wrote byte %zu, which is no output", kernel,
                 provider->name, c->what, i);
}

void case_run(overlay_case *c, const void *args)
{
    const kn_provider *providers[KN_MAX_PROVIDERS];
    int n = overlay_all_layers(providers);
    memcpy(before, c->bytes, c->used);
    KN_CHECK(run_layer(c, providers[n - 1], args, 1) == KN_DONE, "%s reference%s",
             kn_kernel_name(c->kernel), c->what);
    memcpy(truth, c->bytes, c->used);
    for (int i = 0; i < n - 1; i++)
        compare_layer(c, providers[i], args, i);
    memcpy(c->bytes, before, c->used);
}

void case_each(kn_kernel kernel, int first, int count, void (*one)(overlay_case *c, int i))
{
    const kn_provider *providers[KN_MAX_PROVIDERS];
    int n = overlay_providers(providers);
    memset(ran, 0, sizeof ran);
    memset(declined, 0, sizeof declined);
    for (int i = 0; i < count; i++)
        one(case_begin(kernel, (uint64_t)(first + i)), i);
    for (int i = 0; i < n && getenv("KNAP_TEST_VERBOSE"); i++)
        printf("%-20s %-8s ran %5d, declined %5d\n", kn_kernel_name(kernel), providers[i]->name,
               ran[i], declined[i]);
}
