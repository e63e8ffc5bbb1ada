/* fsdp/options.c: the options of kn_fsdp_wrap that all ranks must give alike. They say how
 * parameters are cut, in which order collectives come, and which numbers come out, so ranks compare
 * them before anything else happens. Not compared: places (.device, .offload_dir), waits
 * (.timeout_s), and lists and arguments, which are pointers. */
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

/* A factor is its bits, a text its hash, a function whether there is one. */
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
        return text ? (int64_t)kn_hash_string(text) : 0;
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
    int64_t *all = kn_host_alloc((size_t)size * OPTIONS * sizeof *all);
    if (!all)
        return false;
    for (int r = 0; r < size; r++) /* where the others are simulated they give the same */
        for (int i = 0; i < OPTIONS; i++)
            all[r * OPTIONS + i] = value_of(o, i);
    bool ok = kn_all_gather(comm, all, all + rank * OPTIONS, OPTIONS, KN_I64,
                            kn_compute_stream(KN_CPU), "options of kn_fsdp_wrap");
    for (int r = 1; ok && r < size; r++)
        for (int i = 0; ok && i < OPTIONS; i++)
            if (all[r * OPTIONS + i] != all[i])
                ok = differs(i, all[i], all[r * OPTIONS + i], r);
    kn_host_free(all);
    return ok;
}
