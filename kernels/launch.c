/* kernels/launch.c: the way of a call through the providers of its device. */
#include "kernels/trace.h"
#include "kernels/checks.h"
#include "kernels/graph_internal.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const kn_array *kn_unary_grad_input(const kn_unary_grad_args *a)
{
    const int reads = kn_unary_row(a->kind)->reads;
    return reads & KN_READS_X ? &a->x : reads & KN_READS_Y ? &a->y : &a->dy;
}

/* ---- which providers may run ---------------------------------------------------------------- */

static _Atomic unsigned disabled[KN_MAX_DEVICES]; /* bit i: provider i of the device must not run */
static pthread_once_t environment_once = PTHREAD_ONCE_INIT;

static bool listed(const char *list, const char *name)
{
    size_t length = strlen(name);
    for (const char *s = list; *s;) {
        size_t n = strcspn(s, ",");
        if (n == length && memcmp(s, name, n) == 0)
            return true;
        s += n + (s[n] == ',');
    }
    return false;
}

/* A device without a listed provider keeps all; false if that is every device. */
static bool select_providers(const char *names)
{
    bool found = false;
    for (int d = KN_CPU; d < KN_MAX_DEVICES; d++) {
        const kn_device_table *t = kn_device_table_of((kn_device)d);
        const kn_provider *providers[KN_MAX_PROVIDERS];
        int n = t ? t->providers(providers) : 0;
        unsigned off = 0, all = (1u << n) - 1;
        for (int i = 0; i < n && names; i++)
            off |= listed(names, providers[i]->name) ? 0 : 1u << i;
        found |= n > 0 && off != all;
        atomic_store(&disabled[d], off == all ? 0 : off);
    }
    return found;
}

static const char *bad_environment;

static void read_environment(void)
{
    const char *names = getenv("KNAP_PROVIDERS");
    if (names && *names && !select_providers(names))
        bad_environment = names;
}

static bool fail_names(const char *what, const char *names)
{
    const kn_provider *providers[KN_MAX_PROVIDERS];
    char have[128] = "";
    for (int i = 0, n = kn_providers(KN_CPU, providers); i < n; i++) {
        size_t used = strlen(have);
        snprintf(have + used, sizeof have - used, "%s%s", i ? ", " : "", providers[i]->name);
    }
    return kn_fail("%s '%s': no provider of that name; this machine has %s", what, names, have);
}

void kn_providers_only(const char *names)
{
    pthread_once(&environment_once, read_environment);
    kn_changed();
    if (!select_providers(names))
        fail_names("kn_providers_only", names);
}

int kn_providers(kn_device d, const kn_provider *providers[KN_MAX_PROVIDERS])
{
    const kn_device_table *t = kn_device_table_of(d);
    return t ? t->providers(providers) : 0;
}

/* ---- running ----------------------------------------------------------------------------- */

void kn_trace_kernel(const char *provider, kn_stream *s, kn_kernel k, const void *args,
                     kn_cost cost, double begin, double end)
{
    char text[512] = "";
    if (kn_trace_sees(KN_TRACE_CALL)) /* a trace of kernels alone has their names and costs */
        kn_kernel_describe(k, args, text, sizeof text);
    kn_trace_put(s, (kn_trace_event){ .what = kn_kernel_name(k),
                                      .provider = provider,
                                      .detail = text,
                                      .begin = begin,
                                      .end = end,
                                      .flops = cost.flops,
                                      .bytes = cost.bytes });
}

static void trace_run(const kn_provider *provider, kn_stream *s, kn_kernel k, const void *args,
                      double begin)
{
    const double end = kn_now();
    kn_cost cost = kn_kernel_cost(k, args);
    if (s->table->trace_end)
        s->table->trace_end(s, kn_kernel_name(k), provider->name, cost.flops, cost.bytes);
    else
        kn_trace_kernel(provider->name, s, k, args, cost, begin, end);
}

static bool fail_declined(kn_stream *s, kn_kernel k, const void *args)
{
    char text[1024];
    return kn_fail("%s: no kernel provider of %s takes %s", kn_kernel_name(k),
                   kn_device_name(s->device), kn_kernel_describe(k, args, text, sizeof text));
}

kn_kernel kn_matmul_parts(const kn_matmul_args *whole, kn_matmul_args *product,
                          kn_epilogue_args *after)
{
    *product = *whole;
    product->sum = product->x = (kn_array){ 0 };
    if (whole->x.data) {
        after->through = (kn_unary_grad_args){
            .dx = whole->dst, .dy = whole->dst, .x = whole->x, .kind = whole->grad_of
        };
        return KN_K_UNARY_GRAD;
    }
    kn_reduce_args *r = &after->sum;
    *r = (kn_reduce_args){ .dst = whole->sum, .src = whole->b, .kind = KN_SUM };
    if (!whole->sum_of_b) { /* K comes first, as it does in b */
        const kn_array *a = &whole->a;
        r->src = *a;
        r->src.shape[0] = a->shape[1], r->src.shape[1] = a->shape[0];
        r->src.stride[0] = a->stride[1], r->src.stride[1] = a->stride[0];
    }
    r->dst.ndim = 2;
    r->dst.shape[1] = whole->sum.shape[0], r->dst.stride[1] = whole->sum.stride[0];
    r->dst.shape[0] = 1, r->dst.stride[0] = r->dst.shape[1];
    return KN_K_REDUCE;
}

/* A product and then its epilogue, by two calls of run. */
static bool run_parts(kn_stream *s, const kn_matmul_args *whole,
                      bool (*run)(kn_stream *s, kn_kernel k, const void *args))
{
    kn_matmul_args product;
    kn_epilogue_args after;
    const kn_kernel k = kn_matmul_parts(whole, &product, &after);
    return run(s, KN_K_MATMUL, &product) && run(s, k, &after);
}

bool kn_run_providers(kn_stream *s, kn_kernel k, const void *args)
{
    const kn_provider *providers[KN_MAX_PROVIDERS];
    const bool epilogue = k == KN_K_MATMUL && kn_matmul_has_epilogue(args);
    int n = s->table->providers(providers);
    unsigned off = atomic_load_explicit(&disabled[s->device], memory_order_relaxed);
    bool tracing = kn_tracing();
    double begin = tracing ? kn_now() : 0;
    if (tracing && s->table->trace_begin)
        s->table->trace_begin(s);
    const int first = s->table->first ? s->table->first(k, args) : -1;
    for (int at = first < 0 ? 0 : -1; at < n; at++) {
        const int i = at < 0 ? first : at;
        if (at == first || off >> i & 1 || !providers[i]->run[k] ||
            (epilogue && !providers[i]->epilogues))
            continue;
        kn_status status = providers[i]->run[k](args);
        if (status == KN_DECLINED)
            continue;
        if (status == KN_FAILED)
            return kn_fail("%s: provider %s failed", kn_kernel_name(k), providers[i]->name);
        if (tracing)
            trace_run(providers[i], s, k, args, begin);
        return true;
    }
    return epilogue ? run_parts(s, args, kn_run_providers) : fail_declined(s, k, args);
}

/* Whether some provider of s computes epilogues with their products. Elsewhere the device is given
 * the parts, and knows of no epilogue. */
static bool has_epilogues(const kn_stream *s)
{
    const kn_provider *providers[KN_MAX_PROVIDERS];
    const unsigned off = atomic_load_explicit(&disabled[s->device], memory_order_relaxed);
    for (int i = 0, n = s->table->providers(providers); i < n; i++)
        if (providers[i]->epilogues && !(off >> i & 1))
            return true;
    return false;
}

static bool give_device(kn_stream *s, kn_kernel k, const void *args)
{
    return s->table->launch(s, k, args, kn_kernel_size(k));
}

bool kn_launch(kn_stream *s, kn_kernel k, const void *args, size_t size)
{
    if (!s || (unsigned)k >= KN_K_COUNT)
        return kn_fail("%s: no stream to launch it on, or no such kernel", kn_kernel_name(k));
    if (!kn_ok())
        return false;
    if (size != kn_kernel_size(k))
        return kn_fail("%s: arguments of %zu bytes where its struct has %zu", kn_kernel_name(k),
                       size, kn_kernel_size(k));
    pthread_once(&environment_once, read_environment);
    if (bad_environment)
        return fail_names("KNAP_PROVIDERS", bad_environment);
    if (s->device == KN_CPU &&
        kn_unrecordable(KN_DEVICE_DEFAULT, "%s: a kernel on the cpu", kn_kernel_name(k)))
        return false;
    if (!kn_kernel_fits(k, args) || (s->device != KN_META && !kn_kernel_has_bytes(k, args)))
        return false;
    if (k == KN_K_MATMUL && kn_matmul_has_epilogue(args) && !has_epilogues(s))
        return run_parts(s, args, give_device);
    return give_device(s, k, args);
}
