/* tests/fsdp/random_wrap.c: the options of a random program, and wrapping by them. */
#include "nn/nn_internal.h"
#include "tests/fsdp/random.h"

/* ---- options --------------------------------------------------------------------------------- */

static int last_dim(const char *name, int ndim, const int64_t *shape, void *shards)
{
    return ndim > 1 && shape[ndim - 1] % *(int *)shards == 0 ? ndim - 1 : 0;
}

static bool fill_part(const char *name, kn_tensor *part, int64_t start, int ndim,
                      const int64_t *shape, void *arg)
{
    float v[RANDOM_ELEMENTS];
    int64_t n = kn_numel(part);
    for (int64_t i = 0; i < n && i < RANDOM_ELEMENTS; i++)
        v[i] = random_fill_value(name, start + i);
    kn_scope scope = kn_scope_begin();
    kn_tensor *values = kn_from(KN_F32, KN_CPU, v, kn_ndim(part), kn_shape(part));
    bool ok = values && kn_copy_(part, values);
    kn_scope_end(scope);
    return ok;
}

static bool fill_module(kn_module *m, void *arg)
{
    for (int i = 0; i < m->impl->params; i++) {
        const kn_param_entry *e = &m->impl->param[i];
        char *name = e->owner ? kn_param_path(m->impl, e) : NULL;
        bool ok = !e->owner || (name && fill_part(name, e->tensor, 0, kn_ndim(e->tensor),
                                                  kn_shape(e->tensor), arg));
        kn_host_free(name);
        if (!ok)
            return false;
    }
    return true;
}

/* Norms' parameters compute in f32. */
static kn_dtype param_dtype_of(const char *name, int ndim, const int64_t *shape, void *arg)
{
    const random_net *n = arg;
    for (int i = 0; i < RANDOM_NODES; i++) {
        const char *path = n->p->node[i].kind ? kn_module_path(&n->m[i]) : "";
        size_t length = strlen(path);
        if (length && strncmp(name, path, length) == 0 && name[length] == '.' &&
            random_norms_in_f32(n->p, i))
            return KN_F32;
    }
    return KN_DTYPE_DEFAULT;
}

static const random_node *node_of(const random_net *n, const kn_module *m)
{
    for (int i = 0; i < RANDOM_NODES; i++)
        if (&n->m[i].base == m)
            return &n->p->node[i];
    return NULL;
}

/* A unit with options of its own. */
static void otherwise(kn_fsdp_wrap_options *o)
{
    o->layout = o->layout == KN_LAYOUT_COUNT - 1 ? KN_LAYOUT_FLAT : o->layout + 1;
    o->strategy = o->strategy == KN_NO_SHARD ? KN_FULL_SHARD : o->strategy + 1;
    o->placement = NULL;
    o->backward_prefetch = KN_PREFETCH_NONE;
    o->reshard_after_forward = KN_RESHARD_DEFAULT;
    o->keep_whole_below = 0;
}

static bool policy(kn_module *m, bool recurse, int64_t unclaimed, kn_fsdp_wrap_options *o,
                   void *arg)
{
    const random_node *node = node_of(arg, m);
    if (recurse)
        return true;
    if (!node || !node->unit || unclaimed == 0)
        return false;
    if (node->other)
        otherwise(o);
    return true;
}

static bool recompute_policy(const kn_module *m, void *arg)
{
    const random_node *node = node_of(arg, m);
    return node && node->recompute;
}

static void what_recomputes(kn_fsdp_wrap_options *o, random_net *n)
{
    static const char *const classes[] = { NULL, "part", "seq", "part,seq", NULL };
    int by = n->p->option[O_RECOMPUTE_BY];
    o->recompute_class = classes[by];
    o->recompute_policy = by == RECOMPUTE_POLICY ? recompute_policy : NULL;
    o->recompute_policy_arg = n;
    for (int i = 0; i < RANDOM_NODES && by; i++)
        if (n->p->node[i].kind)
            kn_recompute(&n->m[i], false); /* wrapping turns it on instead */
}

kn_dtype random_dtype(const random_program *p, int option)
{
    static const kn_dtype dtype[] = { KN_DTYPE_DEFAULT, KN_F32, KN_BF16, KN_F16 };
    return dtype[p->option[option]];
}

static void what_is_sharded(kn_fsdp_wrap_options *o, const random_program *p, int *shards)
{
    int ranks = random_number(p, O_RANKS);
    o->strategy = (kn_strategy)(KN_FULL_SHARD + p->option[O_STRATEGY]);
    *shards = o->strategy == KN_NO_SHARD ? 1 : ranks;
    if (o->strategy >= KN_HYBRID_SHARD) {
        *shards = random_shards(ranks, p->option[O_MESH]);
        o->mesh.shards = *shards;
    }
    o->layout = (kn_layout_kind)(KN_LAYOUT_FLAT + p->option[O_LAYOUT]);
    if (p->option[O_PLACEMENT]) {
        o->placement = last_dim;
        o->placement_arg = shards;
    }
    o->keep_whole_below = random_number(p, O_WHOLE_BELOW);
    o->reshard_after_forward = random_number(p, O_RESHARD);
}

/* The ignored modules, their parameters, and patterns of these. */
typedef struct left_alone {
    char patterns[128];
    kn_module *module[RANDOM_NODES + 1];
    kn_tensor *param[RANDOM_PARAMS + 1];
    int modules, params;
} left_alone;

static bool add_params(kn_module *m, void *arg)
{
    left_alone *l = arg;
    for (int i = 0; i < m->impl->params; i++)
        l->param[l->params++] = m->impl->param[i].tensor;
    return l->params + 8 < RANDOM_PARAMS;
}

static void ignore(random_net *n, left_alone *l, kn_fsdp_wrap_options *o)
{
    size_t used = 0;
    for (int i = 1; i < RANDOM_NODES; i++) {
        if (!n->p->node[i].kind || !n->p->node[i].ignored)
            continue;
        used += (size_t)snprintf(l->patterns + used, sizeof l->patterns - used, "%s*m%d.*",
                                 used ? "," : "", i);
        l->module[l->modules++] = &n->m[i].base;
        kn_apply_modules(&n->m[i], add_params, l);
    }
    int as = n->p->option[O_IGNORED_AS];
    o->ignore = used && as == IGNORED_AS_NAMES ? l->patterns : NULL;
    o->ignored_modules = as == IGNORED_AS_MODULES ? l->module : NULL;
    o->ignored_params = as == IGNORED_AS_PARAMS ? l->param : NULL;
}

static kn_fsdp_wrap_options options(random_net *n, int *shards, left_alone *alone)
{
    const random_program *p = n->p;
    const char *folder = getenv("TMPDIR");
    kn_fsdp_wrap_options o = { ._size = sizeof o, .seed = 42, .timeout_s = 60 };
    what_is_sharded(&o, p, shards);
    o.backward_prefetch = (kn_backward_prefetch)p->option[O_BACKWARD_PREFETCH];
    o.forward_prefetch = p->option[O_FORWARD_PREFETCH];
    o.max_gathers = random_number(p, O_GATHERS);
    o.max_reductions = random_number(p, O_REDUCTIONS);
    o.param_dtype = random_dtype(p, O_PARAM_DTYPE);
    o.param_dtype_of = p->option[O_PARAM_DTYPE_OF] ? param_dtype_of : NULL;
    o.param_dtype_of_arg = n;
    o.reduce_dtype = random_dtype(p, O_REDUCE_DTYPE);
    o.keep_low_precision_grads = p->option[O_KEEP_LOW];
    o.cast_inputs = (kn_cast_inputs)p->option[O_CAST_INPUTS];
    o.buffer_dtype = random_dtype(p, O_BUFFER_DTYPE);
    o.full_precision_class = p->option[O_FULL_PRECISION] ? "layer_norm" : NULL;
    what_recomputes(&o, n);
    if (p->option[O_OFFLOAD])
        o.offload_dir = folder && *folder ? folder : "/tmp";
    if (p->option[O_INIT] == INIT_FILL)
        o.fill = fill_part;
    if (p->option[O_INIT] == INIT_MODULE)
        o.fill_module = fill_module;
    o.sync_from_rank0 = p->option[O_INIT] == INIT_RANK0;
    o.reduce_op = (kn_grad_average)p->option[O_REDUCE_OP];
    o.divide_factor = random_number(p, O_DIVIDE);
    o.predivide_factor = random_number(p, O_PREDIVIDE);
    ignore(n, alone, &o);
    return o;
}

/* ---- wrapping -------------------------------------------------------------------------------- */

static bool wrap_by_hand(random_net *n, kn_comm *world, const kn_fsdp_wrap_options *base)
{
    for (int i = RANDOM_NODES - 1; i > 0; i--) {
        kn_fsdp_wrap_options o = *base;
        if (!n->p->node[i].kind || !n->p->node[i].unit)
            continue;
        if (n->p->node[i].other)
            otherwise(&o);
        if (!kn_fsdp_wrap_(&n->m[i], world, o))
            return false;
    }
    return true;
}

/* Pairs of marked children of the root become one unit each. */
static bool wrap_groups(random_net *n, kn_comm *world, const kn_fsdp_wrap_options *o)
{
    kn_module *member[2];
    int members = 0;
    for (int i = 1; i < RANDOM_NODES; i++) {
        if (!n->p->node[i].kind || !n->p->node[i].unit)
            continue;
        member[members++] = &n->m[i].base;
        if (members == 2 && !kn_fsdp_wrap_group_(member, members, world, *o))
            return false;
        members %= 2;
    }
    return true;
}

/* A module, or one that holds others; NULL if there is none. */
static kn_module *one_of_class(random_net *n, bool seq)
{
    for (int i = 1; i < RANDOM_NODES; i++) {
        int kind = n->p->node[i].kind;
        if (kind && (kind == KIND_SEQ || kind == KIND_RESIDUAL) == seq)
            return &n->m[i].base;
    }
    return NULL;
}

bool random_wrap(random_net *n, kn_comm *world)
{
    static const char *const classes[] = { NULL, "linear", "part", "seq" };
    int shards, how = n->p->option[O_WRAP];
    left_alone alone = { 0 };
    kn_fsdp_wrap_options o = options(n, &shards, &alone);
    if (n->p->option[O_EMBEDDING] && !kn_fsdp_wrap_(&n->embed, world, o))
        return false;
    if (how == WRAP_HAND && !wrap_by_hand(n, world, &o))
        return false;
    if (how == WRAP_GROUPS && !wrap_groups(n, world, &o))
        return false;
    kn_module *like[] = { n->p->option[O_WRAP_LIKE] ? one_of_class(n, how == WRAP_SEQ) : NULL,
                          NULL };
    o.wrap_like = like[0] ? like : NULL;
    if (how <= WRAP_SEQ && !like[0])
        o.wrap_class = classes[how];
    o.min_params = how == WRAP_SIZE ? 4 : 0;
    o.policy = how == WRAP_POLICY ? policy : NULL;
    o.policy_arg = n;
    o.output_dtype = random_dtype(n->p, O_OUTPUT_DTYPE);
    return kn_fsdp_wrap_(&n->m[0], world, o);
}
