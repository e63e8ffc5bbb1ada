/* kernels/cpu/table.c: the CPU as a device, and its providers: the vector overlay for the best
 * instruction set that this machine has, then oneDNN, then the plain reference. */
#include "kernels/cpu/cpu_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef KN_HAVE_X86
#include <cpuid.h>
#endif
#ifdef KN_HAVE_ONEDNN
#include <oneapi/dnnl/dnnl.h>
#endif

/* ---- instruction set --------------------------------------------------------------------- */

typedef struct isa {
    const char *name;
    const kn_provider *provider;
} isa;

static const isa isas[] = {
    { "base", &kn_cpu_vec_base },
#ifdef KN_HAVE_X86
    { "avx2", &kn_cpu_vec_avx2 },
    { "avx512", &kn_cpu_vec_avx512 },
#endif
};
enum { ISAS = sizeof isas / sizeof *isas };

#ifdef KN_HAVE_X86
/* clang 14's __builtin_cpu_supports lacks f16c. */
static bool has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

/* Index of the last entry of isas that this machine runs. */
static int best_isa(void)
{
#ifdef KN_HAVE_X86
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c())
        return 0;
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return avx512 ? 2 : 1;
#else
    return 0;
#endif
}

static int chosen;
static const char *bad_isa; /* KNAP_ISA, if it names none that runs here */
static pthread_once_t chosen_once = PTHREAD_ONCE_INIT;

static void choose(void)
{
    const char *name = getenv("KNAP_ISA");
    int best = best_isa();
    chosen = best;
    if (!name || !*name)
        return;
    for (int i = 0; i <= best; i++) {
        if (strcmp(name, isas[i].name) == 0) {
            chosen = i;
            return;
        }
    }
    bad_isa = name;
}

const char *kn_cpu_isa(void)
{
    pthread_once(&chosen_once, choose);
    return isas[chosen].name;
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
    const char *isa_name = kn_cpu_isa();
    if (bad_isa)
        return kn_fail("KNAP_ISA=%s: this machine and build run at most %s", bad_isa, isa_name);
    return true;
}

static int cpu_providers(const kn_provider *out[KN_MAX_PROVIDERS])
{
    int n = 0;
    kn_cpu_isa();
    out[n++] = isas[chosen].provider;
#ifdef KN_HAVE_ONEDNN
    out[n++] = &kn_cpu_onednn;
#endif
    out[n++] = &kn_cpu_reference;
    return n;
}

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
};
