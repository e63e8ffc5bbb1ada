/* fsdp/check.c: whether ranks hold what they must hold alike: before a wrap, the parameters to
 * claim and their values; later, on request, what several ranks have a copy of. Values are compared
 * by their hashes. */
#include "comm/comm_internal.h"
#include "fsdp/build.h"
#include "fsdp/ema.h"
#include "kernels/choices.h"
#include "kernels/memory_internal.h"
#include "optim/optim_internal.h"
#include "tensor/checksum.h"
#include <stdio.h>
#include <string.h>

enum { CHUNK = 4 << 20 }; /* bytes of a device's values that are in host memory at once */

/* ---- values ---------------------------------------------------------------------------------- */

static bool hash_chunks(const kn_tensor *t, kn_checksum *sum)
{
    size_t size = kn_dtype_size(t->dtype);
    int64_t numel = kn_numel(t), most = kn_is_contiguous(t) ? CHUNK / (int64_t)size : numel;
    most = most < numel ? most : numel;
    char *room = kn_host_alloc((size_t)most * size);
    bool ok = room != NULL;
    for (int64_t at = 0; ok && at < numel; at += most) {
        int64_t n = numel - at < most ? numel - at : most;
        kn_scope scope = kn_scope_begin();
        const kn_tensor *run = most < numel ? kn_tensor_alias(t, at, 1, &n, (int64_t[]){ 1 }) : t;
        ok = run && kn_to_host(run, room, (size_t)n * size);
        kn_scope_end(scope);
        if (ok)
            kn_checksum_add(sum, room, (size_t)n * size);
    }
    kn_host_free(room);
    return ok;
}

/* Of t's values, row-major. */
static bool hash_of(const kn_tensor *t, uint64_t *hash)
{
    kn_checksum sum;
    kn_checksum_begin(&sum);
    if (kn_numel(t) > 0 && kn_device_of(t) == KN_CPU && kn_is_contiguous(t)) {
        kn_array a = kn_array_of(t);
        if (!a.data || !kn_stream_sync(kn_compute_stream(KN_CPU)))
            return false;
        kn_checksum_add(&sum, a.data, (size_t)kn_numel(t) * kn_dtype_size(t->dtype));
    } else if (kn_numel(t) > 0 && !hash_chunks(t, &sum)) {
        return false;
    }
    *hash = kn_checksum_end(&sum);
    return kn_ok();
}

static bool add_hash(kn_alike *a, const kn_tensor *t, const char *before, const char *name)
{
    char line[512];
    uint64_t hash = 0;
    snprintf(line, sizeof line, "the hash of %s'%.400s'", before, name);
    if (!t)
        return kn_alike_add(a, 0, line, "missing");
    return hash_of(t, &hash) && kn_alike_add(a, hash, line, "%016llx", (unsigned long long)hash);
}

/* Name, shape, dtype, a parameter's need of gradients. */
static bool add_tensor(kn_alike *a, const kn_tensor *t, const char *line, const char *name,
                       bool param)
{
    char text[128];
    uint64_t value = kn_hash64(kn_hash_string(name), (uint64_t)t->dtype << 1 | t->requires_grad);
    for (int d = 0; d < t->ndim; d++)
        value = kn_hash64(value, (uint64_t)t->shape[d]);
    return kn_alike_add(a, value, line, "'%s', %s%s", name, kn_describe(t, text, sizeof text),
                        param && !t->requires_grad ? ", frozen" : "");
}

/* ---- before a wrap --------------------------------------------------------------------------- */

enum { OPTIONS, CHOICES, TENSORS, VALUES, LISTS };

/* A parameter that has values, or the rule by which it is going to be filled. */
static bool add_values(kn_alike *a, const kn_param_entry *e, const char *name)
{
    char line[512];
    uint64_t bits[2];
    if (kn_has_values(e->tensor))
        return add_hash(a, e->tensor, "the values of ", name);
    memcpy(bits, (double[]){ e->init.a, e->init.b }, sizeof bits);
    snprintf(line, sizeof line, "the hash of the values of '%.400s'", name);
    return kn_alike_add(a, kn_hash64(kn_hash64((uint64_t)e->init.kind, bits[0]), bits[1]), line,
                        "none (declared, by rule %d with %g and %g)", (int)e->init.kind, e->init.a,
                        e->init.b);
}

static bool add_claims(kn_alike *list, const kn_claims *c, const kn_fsdp_wrap_options *o)
{
    bool ok = true;
    for (int i = 0; ok && i < c->count; i++) {
        const kn_param_entry *e = &c->list[i].module->param[c->list[i].index];
        char line[32], *name = kn_param_path(c->list[i].module, e);
        snprintf(line, sizeof line, "parameter number %d", i);
        ok = name && add_tensor(&list[TENSORS], e->tensor, line, name, true) &&
             (o->sync_from_rank0 || o->device == KN_META || add_values(&list[VALUES], e, name));
        kn_host_free(name);
    }
    return ok;
}

/* Buffers that get rank 0's values. */
static bool add_buffers(kn_alike *list, const kn_module_impl *m, const kn_fsdp_wrap_options *o)
{
    bool ok = true;
    for (int i = 0; ok && i < m->buffers && !kn_ignores_module(o, m); i++) {
        char *name = kn_param_path(m, &(kn_param_entry){ .name = m->buffer[i].name });
        ok = name &&
             (kn_matched(o->ignore, name) ||
              (kn_ok() && add_tensor(list, m->buffer[i].tensor, "the next buffer", name, false)));
        kn_host_free(name);
    }
    return ok;
}

/* Ranks whose products run in other algorithms have other bits: hosts may have other files. */
static bool add_choices(kn_alike *a)
{
    const uint64_t hash = kn_choices_hash();
    return kn_alike_add(a, hash, "the hash of the file of timed algorithms (KNAP_TUNED)", "%llx",
                        (unsigned long long)hash);
}

bool kn_wrap_agrees(kn_module_impl *const *module, int n, const kn_fsdp_wrap_options *o,
                    kn_comm *comm)
{
    kn_alike list[LISTS] = {
        [CHOICES].advice = "copy the file to all hosts, or set KNAP_TUNED=none on all",
        [TENSORS].advice = "declare the same on all ranks, in the same order",
        [VALUES].advice = "pass .sync_from_rank0 = true, or give all ranks the same values (of one "
                          "seed, or one file)",
    };
    kn_claims c = { 0 };
    if (kn_comm_size(comm) == 1)
        return kn_ok();
    bool ok = kn_alike_options(&list[OPTIONS], o, comm) && add_choices(&list[CHOICES]) &&
              kn_claims_collect(&c, module, n, o) && add_claims(list, &c, o);
    for (int i = 0; i < n && o->sync_from_rank0; i++)
        for (kn_module_impl *m = module[i]; ok && m; m = kn_impl_next(m, module[i]))
            ok = kn_unit_around(m) || add_buffers(&list[TENSORS], m, o);
    ok = ok && kn_alike_agree(list, LISTS, comm, "kn_fsdp_wrap");
    kn_claims_free(&c);
    for (int i = 0; i < LISTS; i++)
        kn_alike_free(&list[i]);
    return ok;
}

/* ---- on request ------------------------------------------------------------------------------ */

/* Ranks of comm that are `shards` apart have a copy of these each. */
typedef struct copies {
    kn_comm *comm;
    kn_alike list;
} copies;

typedef struct checking {
    const kn_fsdp_check_options *o;
    kn_comm *comm; /* the ranks of what lies in and around no unit */
    copies *of;
    int count;
    int64_t room;
} checking;

/* Where ranks have copies; NULL with an error. */
static kn_alike *copies_of(checking *c, kn_comm *comm, int shards)
{
    for (int i = 0; i < c->count; i++)
        if (c->of[i].comm == comm && c->of[i].list.shards == shards)
            return &c->of[i].list;
    if (!kn_host_grow(&c->of, &c->room, c->count + 1, sizeof *c->of))
        return NULL;
    c->of[c->count] = (copies){ comm,
                                { .shards = shards,
                                  .advice = "a rank changed it alone, or began with "
                                            "another" } };
    return &c->of[c->count++].list;
}

/* The ranks of the nearest unit at or around m. */
static kn_alike *whole_at(checking *c, const kn_module_impl *m)
{
    const kn_unit *u = kn_unit_around(m);
    return copies_of(c, u ? u->comm : c->comm, 1);
}

static bool left_out(const checking *c, const char *name)
{
    return kn_matched(c->o->ignore, name);
}

/* t, which is cut as p. */
static bool check_part(checking *c, const kn_param *p, const kn_tensor *t, const char *of)
{
    kn_bucket *b = kn_bucket_of(p);
    char before[128];
    if (b && b->replicas == 1) /* nobody else has it */
        return true;
    kn_alike *a = b ? copies_of(c, b->unit->comm, b->shards) : whole_at(c, p->owner);
    snprintf(before, sizeof before, "%.80s%s", of, b && b->shards > 1 ? "the shard of " : "");
    return a && (!b || kn_bucket_sync_transfers(b)) &&
           ((t && kn_device_of(t) == KN_META) || add_hash(a, t, before, p->name));
}

static bool check_params(checking *c, void *root)
{
    const kn_param *p;
    int n = kn_params(root, &p);
    bool ok = kn_ok();
    for (int i = 0; ok && i < n; i++) {
        const kn_bucket *b = kn_bucket_of(&p[i]);
        if (left_out(c, p[i].name))
            continue;
        if (b && !kn_unit_closed(b->unit, p[i].name, "kn_fsdp_check"))
            return false;
        kn_alike *a = whole_at(c, p[i].owner);
        ok = a && kn_ok() && add_tensor(a, p[i].tensor, "the next parameter", p[i].name, true) &&
             check_part(c, &p[i], p[i].master, "");
    }
    return ok && kn_ok();
}

static bool check_buffers(checking *c, const kn_module_impl *m)
{
    kn_alike *a = whole_at(c, m);
    bool ok = a != NULL;
    for (int i = 0; ok && i < m->buffers && !kn_buffers_are_own(m); i++) {
        const kn_tensor *t = m->buffer[i].tensor;
        char *name = kn_param_path(m, &(kn_param_entry){ .name = m->buffer[i].name });
        ok = name && (left_out(c, name) ||
                      (kn_ok() && add_tensor(a, t, "the next buffer", name, false) &&
                       (kn_device_of(t) == KN_META || add_hash(a, t, "buffer ", name))));
        kn_host_free(name);
    }
    return ok;
}

static bool add_number(kn_alike *a, const char *what, const char *name, double number)
{
    char line[512];
    uint64_t bits;
    memcpy(&bits, &number, sizeof bits);
    snprintf(line, sizeof line, "%s '%.400s'", what, name);
    return kn_alike_add(a, bits, line, "%.17g", number);
}

static bool check_optim(checking *c, const kn_optim *o)
{
    const kn_param *p;
    if (!kn_optim_lives(o, "kn_fsdp_check"))
        return false;
    int n = kn_params(kn_optim_module(o), &p);
    const char *name = kn_module_shown(kn_optim_impl(o));
    kn_alike *a = whole_at(c, kn_optim_impl(o));
    bool ok = a && kn_optim_unchanged(o, p, n, "kn_fsdp_check") &&
              add_number(a, "the number of steps of", name, (double)kn_optim_steps(o)) &&
              add_number(a, "the learning rate of", name, kn_lr(o));
    for (int i = 0; ok && i < n; i++) {
        const kn_optim_slot *s = &o->slot[i];
        const char *state;
        char of[96];
        if (left_out(c, p[i].name))
            continue;
        ok = kn_ok() && (a = whole_at(c, p[i].owner)) != NULL &&
             add_number(a, "the lr_mul of", p[i].name, s->group.lr_mul) &&
             add_number(a, "the weight_decay of", p[i].name, s->group.weight_decay);
        for (int k = 0; ok && (state = kn_slot_state_name(o, s, k)); k++) {
            snprintf(of, sizeof of, "'%.80s' of ", state);
            ok = check_part(c, &p[i], s->state[k], of);
        }
    }
    return ok && kn_ok();
}

static bool check_ema(checking *c, const kn_ema *e)
{
    const kn_param *p;
    kn_module *m = kn_ema_module(e);
    int n = m ? kn_params(m, &p) : 0;
    for (int i = 0; i < n && kn_ok(); i++)
        if (kn_ema_value(e, i) && !left_out(c, p[i].name) &&
            !check_part(c, &p[i], kn_ema_value(e, i), "the average of "))
            return false;
    return kn_ok();
}

/* The ranks of the units at and below top: the most. NULL: there are no units. */
static kn_comm *find_ranks(kn_module_impl *top)
{
    kn_comm *most = NULL;
    for (kn_module_impl *m = kn_impl_lowest(top); m; m = kn_impl_next_up(m, top)) {
        const kn_unit *u = kn_unit_of(m);
        if (u && (!most || u->size > kn_comm_size(most)))
            most = u->comm;
    }
    return most;
}

bool kn_fsdp_check_(void *root, kn_fsdp_check_options o)
{
    static const char what[] = "kn_fsdp_check";
    checking c = { .o = &o };
    kn_module_impl *m = kn_ok() ? kn_impl(root, what) : NULL;
    if (!m)
        return false;
    c.comm = find_ranks(kn_impl_root(m));
    if (!c.comm && !kn_comm_default(&c.comm, what))
        return false;
    bool ok = kn_module_full_buffers(root, true) && check_params(&c, root);
    for (kn_module_impl *at = m; ok && at; at = kn_impl_next(at, m))
        ok = check_buffers(&c, at);
    ok = kn_module_full_buffers(root, false) && ok;
    ok = ok && (!o.optim || check_optim(&c, o.optim)) && (!o.ema || check_ema(&c, o.ema));
    for (int i = 0; ok && i < c.count; i++)
        ok = kn_alike_agree(&c.of[i].list, 1, c.of[i].comm, what);
    for (int i = 0; i < c.count; i++)
        kn_alike_free(&c.of[i].list);
    kn_host_free(c.of);
    return ok && kn_ok();
}
