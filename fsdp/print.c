/* fsdp/print.c: which modules of a tree are units, and the sharded tree as text:
 *
 *   gpt: unit, full_shard over 2 ranks, 4608 elements
 *       flat: 4608 elements + 16 padding, 2312 a shard (this is 1 of 2), f32, sharded
 *         transformer.wte.weight [37,24]: 888 of 888 here
 *     transformer.h.0 gpt_block: unit, ... */
#include "fsdp/kinds.h"
#include "fsdp/unit.h"

bool kn_fsdp_is_unit(const void *module)
{
    kn_module_impl *m = kn_impl(module, "kn_fsdp_is_unit");
    return m && m->unit;
}

/* ---- the list -------------------------------------------------------------------------------- */

static int list_units(kn_module_impl *top, kn_module **list, int max, bool roots)
{
    int count = 0;
    for (kn_module_impl *m = kn_impl_lowest(top); m; m = kn_impl_next_up(m, top)) {
        const kn_unit *u = kn_unit_of(m);
        if (!u || u->module[0] != m || (roots && kn_unit_around(m->parent)))
            continue;
        if (count < max && list)
            list[count] = m->self;
        count++;
    }
    return count;
}

int kn_fsdp_units(void *root, kn_module **list, int max)
{
    return list_units(kn_impl(root, "kn_fsdp_units"), list, max, false);
}

int kn_fsdp_roots(void *module, kn_module **list, int max)
{
    return list_units(kn_impl(module, "kn_fsdp_roots"), list, max, true);
}

kn_device kn_fsdp_device(const void *module)
{
    const kn_module_impl *m = kn_impl(module, "kn_fsdp_device");
    const kn_unit *u = kn_unit_around(m);
    if (m && !u)
        kn_fail("kn_fsdp_device: '%s' (%s) lies in no unit of fsdp; wrap it first",
                kn_module_shown(m), m->class_name);
    return u ? u->options.device : KN_DEVICE_DEFAULT;
}

/* ---- the tree -------------------------------------------------------------------------------- */

static int64_t bucket_elements(const kn_bucket *b)
{
    int64_t n = 0;
    for (int i = 0; i < b->params; i++)
        n += b->layout.numel[i];
    return n;
}

static const char *bucket_state(const kn_bucket *b)
{
    if (b->rows)
        return "rows of a table";
    static const char *const name[] = { [KN_SHARDED] = "sharded",
                                        [KN_GATHERING] = "being gathered",
                                        [KN_UNSHARDED] = "gathered",
                                        [KN_SLICED] = "partly gathered" };
    return b->full == b->master ? "whole" : name[b->residency];
}

static void print_param(FILE *out, const kn_bucket *b, int i, int indent)
{
    const kn_bucket_param *p = &b->param[i];
    fprintf(out, "%*s%s [", indent, "", p->name);
    for (int d = 0; d < p->ndim; d++)
        fprintf(out, "%s%lld", d ? "," : "", (long long)p->shape[d]);
    fprintf(out, "]: %lld of %lld here\n", (long long)kn_interval_numel(p->part),
            (long long)b->layout.numel[i]);
}

static void print_bucket(FILE *out, const kn_bucket *b, int indent)
{
    const bool trains = kn_bucket_trains(b);
    const int64_t elements = bucket_elements(b);
    fprintf(out, "%*s%s: %lld elements + %lld padding, %lld a shard (this is %d of %d), %s", indent,
            "", kn_layout_name(b->layout.kind), (long long)elements,
            (long long)(b->layout.shard * b->shards - elements), (long long)b->layout.shard,
            b->shard + 1, b->shards, kn_dtype_name(b->master_dtype));
    if (b->param_dtype != b->master_dtype)
        fprintf(out, ", computes in %s", kn_dtype_name(b->param_dtype));
    if (trains && b->reduce_dtype != b->master_dtype)
        fprintf(out, ", reduces in %s", kn_dtype_name(b->reduce_dtype));
    fprintf(out, "%s, %s\n", trains ? "" : ", frozen", bucket_state(b));
    for (int i = 0; i < b->params; i++)
        print_param(out, b, i, indent + 2);
}

static void print_unit(FILE *out, const kn_unit *u, const kn_module_impl *m, int indent)
{
    fprintf(out, "%*s%s%s%s: ", indent, "", m->path, *m->path ? " " : "", m->class_name);
    if (u->module[0] != m) { /* the others of a group */
        fprintf(out, "in the unit of %s\n", kn_unit_name(u));
        return;
    }
    const kn_mesh mesh = u->options.mesh;
    int64_t elements = 0;
    for (int i = 0; i < u->buckets; i++)
        elements += bucket_elements(u->bucket[i]);
    fprintf(out, "unit, %s over ", kn_strategies[u->options.strategy].name);
    if (mesh.replicas > 1 && mesh.shards > 1)
        fprintf(out, "%d x %d ranks", mesh.replicas, mesh.shards);
    else
        fprintf(out, "%d rank%s", u->size, u->size == 1 ? "" : "s");
    fprintf(out, ", %lld elements%s\n", (long long)elements, u->summoned ? ", summoned" : "");
    for (int i = 1; i < u->modules; i++)
        fprintf(out, "%*swith %s\n", indent + 4, "", kn_module_shown(u->module[i]));
    for (int i = 0; i < u->buckets; i++)
        print_bucket(out, u->bucket[i], indent + 4);
}

static void print_module(FILE *out, kn_module_impl *m, int depth)
{
    const kn_unit *u = kn_unit_of(m);
    if (u)
        print_unit(out, u, m, 2 * depth);
    for (int i = 0; i < m->children; i++)
        print_module(out, m->child[i]->impl, depth + (u != NULL));
}

bool kn_fsdp_print(FILE *out, void *root)
{
    kn_module_impl *m = kn_impl(root, "kn_fsdp_print");
    if (m && !out)
        return kn_fail("kn_fsdp_print: the file to print to is NULL; pass stdout, for example");
    if (!m)
        return false;
    if (kn_fsdp_units(root, NULL, 0) == 0)
        fprintf(out, "%s%s%s: no unit of fsdp; kn_fsdp_wrap makes them\n", m->path,
                *m->path ? " " : "", m->class_name);
    print_module(out, m, 0);
    return true;
}
