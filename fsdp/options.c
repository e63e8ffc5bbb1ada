/* fsdp/options.c: the options of kn_fsdp_wrap that all ranks must give alike. They say how
 * parameters are cut, in which order collectives come, and which numbers come out, so ranks compare
 * them before anything else happens, by their meaning: a default and the value that it stands for
 * are the same, and so are lists of the same names. A .policy is compared by the units that it
 * made. Not compared: places (.device, .offload_dir), waits (.timeout_s), and lists and arguments,
 * which are pointers. */
#include "comm/comm_internal.h"
#include "fsdp/build.h"
#include <stddef.h>
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

static bool differs(int i, int64_t first, int64_t here, int rank)
{
    const char *name = option[i].name;
    double a, b;
    switch (option[i].kind) {
    case NUMBER:
        return kn_fail("kn_fsdp_wrap: .%s is %lld on rank 0 and %lld on rank %d; give all ranks "
                       "the same",
                       name, (long long)first, (long long)here, rank);
    case FACTOR:
        memcpy(&a, &first, sizeof a);
        memcpy(&b, &here, sizeof b);
        return kn_fail("kn_fsdp_wrap: .%s is %g on rank 0 and %g on rank %d; give all ranks the "
                       "same",
                       name, a, b, rank);
    case TEXT:
        return kn_fail("kn_fsdp_wrap: .%s is another text on rank %d than on rank 0; give all "
                       "ranks the same",
                       name, rank);
    default:
        return kn_fail("kn_fsdp_wrap: .%s is given on rank %d and not on rank %d; give all ranks "
                       "the same",
                       name, here ? rank : 0, here ? 0 : rank);
    }
}

bool kn_options_agree(const kn_fsdp_wrap_options *o, kn_comm *comm)
{
    int size = kn_comm_size(comm), rank = kn_rank(comm);
    if (size == 1)
        return true;
    const kn_fsdp_wrap_options means = meaning(*o, comm);
    int64_t(*all)[2][OPTIONS] = kn_ok() ? kn_host_alloc((size_t)size * sizeof *all) : NULL;
    if (!all)
        return false;
    for (int r = 0; r < size; r++) /* where the others are simulated they give the same */
        for (int i = 0; i < OPTIONS; i++) {
            all[r][0][i] = value_of(&means, i);
            all[r][1][i] = value_of(o, i);
        }
    bool ok = kn_all_gather(comm, all, all[rank], 2 * OPTIONS, KN_I64, kn_compute_stream(KN_CPU),
                            "options of kn_fsdp_wrap");
    for (int r = 1; ok && r < size; r++)
        for (int i = 0; ok && i < OPTIONS; i++)
            if (all[r][0][i] != all[0][0][i] && all[r][1][i] != all[0][1][i])
                ok = differs(i, all[0][1][i], all[r][1][i], r);
    kn_host_free(all);
    return ok;
}

/* ---- what came of them ----------------------------------------------------------------------- */

typedef struct made {
    int64_t units;
    uint64_t hash; /* of their names and options, in order */
} made;

static bool add_unit(kn_module *m, void *arg)
{
    made *sum = arg;
    const kn_unit *u = kn_unit_of(m->impl);
    if (!u || u->module[0] != m->impl)
        return true;
    sum->units++;
    sum->hash = kn_hash64(sum->hash, kn_hash_string(m->impl->path));
    for (int i = 0; i < OPTIONS; i++)
        if (option[i].kind != TEXT) /* a unit borrows none */
            sum->hash = kn_hash64(sum->hash, (uint64_t)value_of(&u->options, i));
    return true;
}

bool kn_units_agree(kn_module_impl *const *module, int n, kn_comm *comm)
{
    int size = kn_comm_size(comm), rank = kn_rank(comm);
    made here = { 0 };
    for (int i = 0; i < n; i++)
        kn_apply_modules(module[i]->self, add_unit, &here);
    made *all = size > 1 ? kn_host_alloc((size_t)size * sizeof *all) : NULL;
    for (int r = 0; all && r < size; r++)
        all[r] = here;
    bool ok = size == 1 || (all && kn_all_gather(comm, all, &all[rank], 2, KN_I64,
                                                 kn_compute_stream(KN_CPU), "units of .policy"));
    for (int r = 1; ok && r < size; r++)
        if (all[r].units != all[0].units || all[r].hash != all[0].hash)
            ok =
                kn_fail("kn_fsdp_wrap: .policy made %lld units on rank 0 and %lld on rank %d%s; it "
                        "must answer alike on all ranks",
                        (long long)all[0].units, (long long)all[r].units, r,
                        all[r].units == all[0].units ? ", but others, or with other options" : "");
    kn_host_free(all);
    return ok;
}

bool kn_numbers_agree(double number, kn_comm *comm, const char *what, const char *name)
{
    int size = kn_comm_size(comm), rank = kn_rank(comm);
    double *all = size > 1 ? kn_host_alloc((size_t)size * sizeof *all) : NULL;
    for (int r = 0; all && r < size; r++)
        all[r] = number;
    bool ok = size == 1 || (all && kn_all_gather(comm, all, &all[rank], 1, KN_F64,
                                                 kn_compute_stream(KN_CPU), what));
    for (int r = 1; ok && r < size; r++)
        if (all[r] != all[0])
            ok = kn_fail("%s: %s is %g on rank 0 and %g on rank %d; give all ranks the same", what,
                         name, all[0], all[r], r);
    kn_host_free(all);
    return ok;
}
