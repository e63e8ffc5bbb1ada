/* fsdp/options.c: the options of kn_fsdp_wrap that all ranks must give alike. They say how
 * parameters are cut, in which order collectives come, and which numbers come out, so ranks compare
 * them before anything else happens, by their meaning: a default and the value that it stands for
 * are the same, and so are lists of the same names. A .policy is compared by the units that it
 * made. Not compared: places (.device, .offload_dir), waits (.timeout_s), and lists and arguments,
 * which are pointers. */
#include "comm/comm_internal.h"
#include "fsdp/build.h"
#include "kernels/device.h"
#include "kernels/kernels_internal.h"
#include <stddef.h>
#include <stdio.h>
#include <string.h>

typedef enum kind { NUMBER, FACTOR, TEXT, FUNCTION } kind;

static const struct {
    const char *name;
    size_t at, bytes;
    kind kind;
} option[] = {
#define OPTION(field, kind)                                                                        \
    {                                                                                              \
#field, offsetof(kn_fsdp_wrap_options, field), sizeof((kn_fsdp_wrap_options *)0)->field,   \
            kind                                                                                   \
    }
    OPTION(strategy, NUMBER),
    OPTION(mesh.replicas, NUMBER),
    OPTION(mesh.shards, NUMBER),
    OPTION(layout, NUMBER),
    OPTION(placement, FUNCTION),
    OPTION(reshard_after_forward, NUMBER),
    OPTION(keep_whole_below, NUMBER),
    OPTION(backward_prefetch, NUMBER),
    OPTION(forward_prefetch, NUMBER),
    OPTION(max_gathers, NUMBER),
    OPTION(max_reductions, NUMBER),
    OPTION(wrap_class, TEXT),
    OPTION(min_params, NUMBER),
    OPTION(policy, FUNCTION),
    OPTION(recompute_class, TEXT),
    OPTION(recompute_policy, FUNCTION),
    OPTION(ignore, TEXT),
    OPTION(param_dtype, NUMBER),
    OPTION(param_dtype_of, FUNCTION),
    OPTION(reduce_dtype, NUMBER),
    OPTION(output_dtype, NUMBER),
    OPTION(buffer_dtype, NUMBER),
    OPTION(cast_inputs, NUMBER),
    OPTION(keep_low_precision_grads, NUMBER),
    OPTION(full_precision_class, TEXT),
    OPTION(seed, NUMBER),
    OPTION(fill, FUNCTION),
    OPTION(fill_module, FUNCTION),
    OPTION(sync_from_rank0, NUMBER),
    OPTION(reduce_op, NUMBER),
    OPTION(divide_factor, FACTOR),
    OPTION(predivide_factor, FACTOR),
#undef OPTION
};
enum { OPTIONS = sizeof option / sizeof *option };

/* A list of names in any order and with any blanks. */
static int64_t hash_of_names(const char *list)
{
    uint64_t sum = 0;
    const char *all = list, *name;
    size_t n, seen;
    while (kn_next_name(&list, &name, &n)) {
        const char *before = all, *other = NULL;
        uint64_t hash = 1;
        while (kn_next_name(&before, &other, &seen) && other != name)
            if (seen == n && strncmp(other, name, n) == 0)
                break;
        for (size_t i = 0; i < n; i++)
            hash = kn_hash64(hash, (unsigned char)name[i]);
        sum += other == name && n > 0 ? hash : 0; /* each name once */
    }
    return (int64_t)sum;
}

/* A factor is its bits, a text the names in it, a function whether there is one. */
static int64_t value_of(const kn_fsdp_wrap_options *o, int i)
{
    const char *at = (const char *)o + option[i].at;
    int64_t wide = 0;
    int32_t narrow = 0;
    const char *text = NULL;
    void (*function)(void) = NULL;
    switch (option[i].kind) {
    case TEXT:
        memcpy(&text, at, sizeof text);
        return hash_of_names(text);
    case FUNCTION:
        memcpy(&function, at, sizeof function);
        return function != NULL;
    default:
        if (option[i].bytes == 1)
            return *at;
        memcpy(option[i].bytes == 4 ? (void *)&narrow : &wide, at, option[i].bytes);
        return option[i].bytes == 4 ? narrow : wide == KN_ZERO ? 0 : wide;
    }
}

/* o with one value for each meaning. */
static kn_fsdp_wrap_options meaning(kn_fsdp_wrap_options o, kn_comm *comm)
{
    if (o.divide_factor == 0)
        o.divide_factor = o.reduce_op == KN_REDUCE_SUM ? 1 : kn_comm_size(comm);
    if (o.keep_whole_below == 1)
        o.keep_whole_below = 0;
    kn_fsdp_mesh(&o.mesh, o.strategy, comm); /* stays with an error */
    return o;
}

/* The option as it was given. */
static bool add_option(kn_alike *a, int i, const char *name, int64_t means, int64_t given,
                       const char *text)
{
    double factor;
    switch (option[i].kind) {
    case NUMBER:
        return kn_alike_add(a, (uint64_t)means, name, "%lld", (long long)given);
    case FACTOR:
        memcpy(&factor, &given, sizeof factor);
        return kn_alike_add(a, (uint64_t)means, name, "%g", factor);
    case TEXT:
        return kn_alike_add(a, (uint64_t)means, name, text ? "'%s'" : "not given", text);
    default:
        return kn_alike_add(a, (uint64_t)means, name, given ? "given" : "not given");
    }
}

static bool add_options(kn_alike *a, const kn_fsdp_wrap_options *o,
                        const kn_fsdp_wrap_options *means, const char *of)
{
    bool ok = true;
    for (int i = 0; ok && i < OPTIONS; i++) {
        const char *text = NULL;
        char name[256];
        snprintf(name, sizeof name, ".%s%s%s%s", option[i].name, of ? " of unit '" : "",
                 of ? of : "", of ? "'" : "");
        if (option[i].kind == TEXT)
            memcpy(&text, (const char *)o + option[i].at, sizeof text);
        ok = add_option(a, i, name, value_of(means, i), value_of(o, i), text);
    }
    return ok;
}

bool kn_alike_options(kn_alike *a, const kn_fsdp_wrap_options *o, kn_comm *comm)
{
    const kn_fsdp_wrap_options means = meaning(*o, comm);
    const kn_products products = kn_f32_products_allowed();
    a->advice = "give all ranks the same";
    return kn_ok() && add_options(a, o, &means, NULL) &&
           kn_alike_add(a, products, "kn_set_f32_products", "%s", kn_products_name(products));
}

/* ---- what came of functions ------------------------------------------------------------------ */

static bool add_unit(kn_unit *u, void *arg)
{
    kn_alike *a = arg;
    const char *name = kn_unit_name(u);
    bool ok = kn_alike_add(a, kn_hash_string(name), "the next unit of .policy", "'%s'", name) &&
              add_options(a, &u->options, &u->options, name); /* a unit borrows no texts */
    for (int i = 0; ok && i < u->buckets; i++)
        for (int k = 0; ok && k < u->bucket[i]->params; k++) {
            const kn_bucket *b = u->bucket[i];
            const kn_bucket_param *p = &b->param[k];
            ok = kn_alike_add(a, (uint64_t)b->param_dtype << 8 | (uint64_t)p->dim,
                              "the next parameter", "'%s', in %s, cut along dim %d", p->name,
                              kn_dtype_name(b->param_dtype), p->dim);
        }
    return ok;
}

bool kn_units_agree(kn_module_impl *const *module, int n, kn_comm *comm)
{
    kn_alike a = { .advice = ".policy, .param_dtype_of and .placement must answer alike on all "
                             "ranks" };
    bool ok = true;
    if (kn_comm_size(comm) == 1)
        return true;
    for (int i = 0; ok && i < n; i++)
        ok = kn_apply_units(module[i]->self, add_unit, &a, NULL);
    ok = ok && kn_alike_agree(&a, 1, comm, "kn_fsdp_wrap");
    kn_alike_free(&a);
    return ok;
}

bool kn_numbers_agree(double number, kn_comm *comm, const char *what, const char *name)
{
    kn_alike a = { .advice = "give all ranks the same" };
    uint64_t bits;
    memcpy(&bits, &number, sizeof bits);
    bool ok = kn_alike_add(&a, bits, name, "%.17g", number) && kn_alike_agree(&a, 1, comm, what);
    kn_alike_free(&a);
    return ok;
}
