/* kernels/cpu/table.c: the CPU as a device, and its providers: the vector overlay for the best
 * instruction set that this machine has, then oneDNN, then the plain reference. */
#include "kernels/cpu/cpu_internal.h"
#include "kernels/device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined KN_VEC_AVX2 || defined KN_VEC_AVX512
#include <cpuid.h>
#endif
#ifdef KN_HAVE_ONEDNN
#include <oneapi/dnnl/dnnl.h>
#endif

/* ---- instruction set --------------------------------------------------------------------- */

#ifdef KN_VEC_BASE
static bool runs_base(void)
{
    return true;
}
#endif

/* clang 14's __builtin_cpu_supports lacks f16c. */
#if defined KN_VEC_AVX2 || defined KN_VEC_AVX512
static bool runs_avx2(void)
{
    unsigned a, b, c, d;
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

#ifdef KN_VEC_AVX512
static bool runs_avx512(void)
{
    return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

static bool runs_pairs(void)
{
#ifdef KN_VEC_AVX512
    unsigned a, b, c, d;
    return runs_avx512() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 5);
#else
    return false;
#endif
}

typedef struct isa {
    const char *name;
    const kn_provider *provider;
    bool (*runs)(void);
} isa;

/* Those of this build (-Disas), the best last. */
static const isa isas[] = {
#ifdef KN_VEC_BASE
    { "base", &kn_cpu_vec_base, runs_base },
#endif
#ifdef KN_VEC_AVX2
    { "avx2", &kn_cpu_vec_avx2, runs_avx2 },
#endif
#ifdef KN_VEC_AVX512
    { "avx512", &kn_cpu_vec_avx512, runs_avx512 },
#endif
};
enum { ISAS = sizeof isas / sizeof *isas };

bool kn_cpu_pairs;

static int chosen;
static bool refused;   /* none of isas runs, or not the one that KNAP_ISA names */
static char names[32]; /* of those that run */
static pthread_once_t chosen_once = PTHREAD_ONCE_INIT;

static void choose(void)
{
    const char *wanted = getenv("KNAP_ISA");
    refused = true;
    for (int i = 0; i < ISAS; i++) {
        if (!isas[i].runs())
            continue;
        const size_t n = strlen(names);
        snprintf(names + n, sizeof names - n, "%s%s", n ? ", " : "", isas[i].name);
        const bool fits = !wanted || !*wanted || strcmp(wanted, isas[i].name) == 0;
        if (fits || refused)
            chosen = i;
        if (fits)
            refused = false;
    }
    kn_cpu_pairs = strcmp(isas[chosen].name, "avx512") == 0 && runs_pairs();
}

const char *kn_cpu_isa(void)
{
    pthread_once(&chosen_once, choose);
    return isas[chosen].name;
}

const kn_provider *kn_cpu_overlay(void)
{
    pthread_once(&chosen_once, choose);
    return isas[chosen].provider;
}

bool kn_cpu_multiplies_pairs(void)
{
    pthread_once(&chosen_once, choose);
    return kn_cpu_pairs;
}

static kn_products cpu_f32_products(void)
{
    return kn_cpu_multiplies_pairs() ? KN_PRODUCTS_BF16 : KN_PRODUCTS_EXACT;
}

const char *kn_cpu_libraries(void)
{
#ifdef KN_HAVE_ONEDNN
    static _Thread_local char text[48];
    const dnnl_version_t *v = dnnl_version();
    snprintf(text, sizeof text, "oneDNN %d.%d.%d", v->major, v->minor, v->patch);
    return text;
#else
    return "none";
#endif
}

/* ---- the table --------------------------------------------------------------------------- */

static bool cpu_open(void)
{
    const char *wanted = getenv("KNAP_ISA");
    kn_cpu_isa();
    if (refused && !*names)
        return kn_fail("this build has kernels for %s only, which this CPU doesn't run: configure "
                       "the build on this machine, or with -Disas=all, which suits any CPU",
                       isas[ISAS - 1].name);
    if (refused)
        return kn_fail("KNAP_ISA=%s: this machine and build run %s", wanted ? wanted : "", names);
    return kn_f32_products_known();
}

static int cpu_providers(const kn_provider *out[KN_MAX_PROVIDERS])
{
    int n = 0;
    out[n++] = kn_cpu_overlay();
#ifdef KN_HAVE_ONEDNN
    out[n++] = &kn_cpu_onednn;
#endif
    out[n++] = &kn_cpu_reference;
    return n;
}

#ifdef KN_HAVE_ONEDNN
static int cpu_first(kn_kernel k, const void *args)
{
    return k == KN_K_MATMUL && kn_cpu_onednn_first(args) ? 1 : -1;
}
#else
const char *kn_cpu_choices(void)
{
    return NULL;
}
#endif

const kn_device_table kn_cpu_table = {
    .device = KN_CPU,
    .name = "cpu",
    .open = cpu_open,
    .memory = kn_cpu_memory,
    .trim = kn_cpu_trim,
    .stream_create = kn_cpu_stream_create,
    .stream_destroy = kn_cpu_stream_destroy,
    .stream_is_inline = kn_cpu_stream_is_inline,
    .stream_sync = kn_cpu_stream_sync,
    .stream_host = kn_cpu_stream_host,
    .launch = kn_cpu_launch,
    .event_create = kn_cpu_event_create,
    .event_destroy = kn_cpu_event_destroy,
    .event_record = kn_cpu_event_record,
    .event_wait = kn_cpu_event_wait,
    .event_sync = kn_cpu_event_sync,
    .event_done = kn_cpu_event_done,
    .providers = cpu_providers,
    .f32_products = cpu_f32_products,
#ifdef KN_HAVE_ONEDNN
    .first = cpu_first,
#endif
};
