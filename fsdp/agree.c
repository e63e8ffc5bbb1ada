/* fsdp/agree.c: what ranks must know of each other, because their data may choose other branches:
 * which parameters got a gradient on any rank, in which backwards, and which calls any rank's
 * backward reaches.
 *
 * The first travels with the gradients: one more piece of a bucket's reduction adds a 1 for each
 * parameter that this rank's backward brought a gradient, so the sum is the number of ranks that
 * have one. That takes no round and no message of its own. A rank that has all gradients itself
 * doesn't look at the sum: only on a GPU does a look wait.
 *
 * A reduction's gradients may be of several backwards: of those without sync or all-reduce before
 * it. Then the sums can't tell which, and the hosts tell each other, in one small message for all
 * units of the tree. So they do where zeros are reduced for what is unused, and while a step is
 * recorded, where nothing computes. */
#include "fsdp/schedule.h"
#include "kernels/graph.h"
#include "kernels/kernels_internal.h"
#include <stdio.h>

/* Four counts of ranks in a word. */
#define FLAGS_A_WORD 4
#define FLAG_BITS    15

bool kn_agree_on_any(kn_schedule_state *s, unsigned char *flag, int n, uint64_t of,
                     const char *what)
{
    char label[64]; /* the contract of collectives compares it */
    int words = (n + FLAGS_A_WORD - 1) / FLAGS_A_WORD;
    int64_t *word = kn_host_calloc((size_t)words, sizeof *word);
    if (!word)
        return false;
    snprintf(label, sizeof label, "%.40s: %d, %08x", what, n, (unsigned)(of ^ of >> 32));
    for (int i = 0; i < n; i++)
        word[i / FLAGS_A_WORD] |= (int64_t)(flag[i] != 0) << i % FLAGS_A_WORD * FLAG_BITS;
    /* between hosts: what the device computes goes on meanwhile */
    kn_device d = s->root->options.device == KN_META ? KN_META : KN_CPU;
    bool ok = kn_all_reduce_i64(s->root->comm, word, words, kn_compute_stream(d), label);
    for (int i = 0; i < n && ok; i++)
        flag[i] =
            (word[i / FLAGS_A_WORD] >> i % FLAGS_A_WORD * FLAG_BITS & ((1 << FLAG_BITS) - 1)) > 0;
    kn_host_free(word);
    return ok;
}

/* ---- which parameters got a gradient --------------------------------------------------------- */

/* flags holds [shards * params] for the ranks of the shard group, [params] sums, [params] those of
 * the shard group. */
int64_t kn_bucket_flag_at(const kn_bucket *b, int i)
{
    return (int64_t)b->shards * b->params + i;
}

static float *sums_of(const kn_bucket *b)
{
    return (float *)b->flags->data + kn_bucket_flag_at(b, 0);
}

bool kn_bucket_has_peers(const kn_bucket *b)
{
    return b->unit->size > 1 && b->device != KN_META; /* there the other ranks don't exist */
}

static bool fill(kn_bucket *b, kn_stream *s, int first, int64_t count, double value)
{
    int64_t shape[2] = { b->shards, count };
    kn_fill_args args = { kn_array_make((float *)b->flags->data + first, KN_F32, 2, shape), value,
                          0 };
    args.dst.stride[0] = b->params;
    return KN_LAUNCH(s, KN_K_FILL, args);
}

bool kn_bucket_send_flags(kn_bucket *b, kn_stream *s, kn_grad_reduction *r)
{
    if (!b->flags)
        b->flags = kn_storage_create(kn_bucket_comm_memory(b),
                                     sizeof(float) * (size_t)(b->shards + 2) * (size_t)b->params,
                                     KN_MEM_COMM, kn_unit_name(b->unit));
    if (!b->flags || !fill(b, s, 0, b->params, 1))
        return false;
    for (int i = 0; i < b->params; i++)
        if (!kn_passes_any(&b->param[i].mine) && !fill(b, s, i, 1, 0))
            return false;
    *r = (kn_grad_reduction){ .unit = kn_unit_name(b->unit),
                              .shards = b->ranks->reduce,
                              .replicas = b->ranks->replicate,
                              .stream = s,
                              .dst = sums_of(b),
                              .src = b->flags->data,
                              .count = b->params,
                              .dst_dtype = KN_F32,
                              .src_dtype = KN_F32,
                              .partial =
                                  b->shards > 1 && b->replicas > 1 ? sums_of(b) + b->params : NULL,
                              ._bucket = b };
    b->flags_came = true;
    return true;
}

/* Another rank may have a gradient for a parameter of b that this one has none for. */
static bool must_look(const kn_bucket *b)
{
    bool lacks = false;
    for (int i = 0; i < b->params; i++)
        lacks |= kn_bucket_param_trains(&b->param[i]) && !kn_passes_any(&b->param[i].mine);
    return b->flags_came && lacks && !kn_bucket_holds(b, KN_HELD_IN_GROUP);
}

/* The running backward joins passes. */
static bool note(kn_passes *passes)
{
    int64_t number = kn_backward_number();
    return kn_passes_add(passes, number, number, kn_backward_scale());
}

bool kn_bucket_note_grad(kn_bucket *b, int i)
{
    return note(&b->param[i].mine);
}

/* The answers that came with the reduction, which the compute stream is past. */
static bool look(kn_bucket *b)
{
    size_t bytes = sizeof(float) * (size_t)b->params;
    float *sums = sums_of(b), *copy = NULL;
    bool ok = true;
    if (kn_device_is_apart(b->device)) {
        kn_stream *s = kn_bucket_compute_stream(b);
        copy = kn_host_alloc(bytes);
        ok = copy && kn_transfer(s, copy, sums, bytes, KN_TO_HOST, false) && kn_stream_sync(s);
        sums = copy;
    }
    for (int i = 0; ok && i < b->params; i++)
        ok = sums[i] <= 0 || note(&b->param[i].mine);
    kn_host_free(copy);
    return ok;
}

/* ---- which of several backwards brought them ------------------------------------------------- */

bool kn_unit_note_backward(kn_unit *u)
{
    return !kn_unit_holds(u, KN_HELD_ANYWHERE) || note(&u->open);
}

/* The hosts tell each other what u's buckets got. The same on all ranks. */
static bool asks_hosts(const kn_unit *u)
{
    const kn_passes *open = &u->open;
    bool earlier = open->runs > 0 && (open->runs > 1 || open->run[0].first != open->run[0].last ||
                                      open->run[0].first != kn_backward_number());
    return u->set.sync && u->size > 1 && (kn_recording() || u->set.reduce_unused || earlier);
}

/* One flag a parameter and backward, in an order that is the same on all ranks. */
typedef struct flags {
    unsigned char *flag; /* NULL: they are counted */
    int count;
    uint64_t of; /* a hash of what each flag is: of a parameter, or of a backward too */
    bool agreed;
} flags;

static bool each_flag(const kn_unit *u, kn_bucket_param *p, int64_t number, flags *f)
{
    unsigned char *flag = f->flag ? &f->flag[f->count] : NULL;
    f->count++;
    /* not the number: ranks may count other backwards beside */
    f->of = kn_hash64(f->of, number ? 1 : kn_hash_string(p->name));
    if (flag && !f->agreed)
        *flag = number ? kn_passes_have(&p->mine, number) : kn_passes_any(&p->mine);
    if (!flag || !f->agreed || !*flag)
        return true;
    p->mine.zeros |= !number; /* the flags of backwards follow */
    const bool now = number == kn_backward_number();
    p->mine.mixed = p->mine.mixed || (number && !now && u->open.mixed);
    return !number ||
           kn_passes_add(&p->mine, number, number, now ? kn_backward_scale() : u->open.scale);
}

static bool flags_of(const kn_unit *u, kn_bucket_param *p, flags *f)
{
    int64_t now = kn_backward_number();
    bool ok =
        each_flag(u, p, 0, f) && (!now || kn_passes_have(&u->open, now) || each_flag(u, p, now, f));
    for (int r = 0; r < u->open.runs; r++)
        for (int64_t k = u->open.run[r].first; ok && k <= u->open.run[r].last; k++)
            ok = each_flag(u, p, k, f);
    return ok;
}

static bool walk(const kn_schedule_state *s, flags *f)
{
    bool ok = true;
    f->count = 0;
    f->of = 0;
    for (int i = 0; i < s->units; i++) {
        const kn_unit *u = s->unit[i];
        for (int k = 0; ok && asks_hosts(u) && k < u->buckets; k++)
            for (int j = 0; ok && j < u->bucket[k]->params; j++)
                ok = kn_bucket_holds(u->bucket[k], KN_HELD_IN_GROUP) ||
                     flags_of(u, &u->bucket[k]->param[j], f);
    }
    return ok;
}

static bool ask_hosts(kn_schedule_state *s)
{
    flags f = { 0 };
    if (!walk(s, &f) || f.count == 0)
        return kn_ok();
    f.flag = kn_host_calloc((size_t)f.count, 1);
    bool ok = f.flag && walk(s, &f) &&
              kn_agree_on_any(s, f.flag, f.count, f.of, "which backwards brought gradients");
    f.agreed = true;
    ok = ok && walk(s, &f);
    kn_host_free(f.flag);
    return ok;
}

/* ---- the end of an iteration ----------------------------------------------------------------- */

/* The gradients of this and the last reduction are every rank's. */
static bool settle(kn_bucket *b)
{
    bool ok = true, waits = kn_bucket_holds(b, KN_HELD_IN_GROUP);
    for (int i = 0; i < b->params; i++) {
        kn_bucket_param *p = &b->param[i];
        p->held &= ~(unsigned)KN_HELD_OPEN;
        if (waits) /* for a backward with all-reduce */
            continue;
        ok = kn_passes_join(&p->passes, &p->mine) && ok;
        kn_passes_clear(&p->mine);
    }
    b->flags_came = b->flags_came && waits;
    return ok;
}

/* A parameter that no rank's backward reached has no gradient, as without sharding: its values and
 * its optimizer state stay. What waits for a backward with sync or all-reduce waits here, too. */
bool kn_agree_on_grads(kn_schedule_state *s)
{
    if (!ask_hosts(s))
        return false;
    for (int i = 0; i < s->units; i++) {
        kn_unit *u = s->unit[i];
        bool asked = asks_hosts(u);
        for (int k = 0; u->set.sync && k < u->buckets; k++)
            if ((!asked && must_look(u->bucket[k]) && !look(u->bucket[k])) || !settle(u->bucket[k]))
                return false;
        if (u->set.sync && !kn_unit_holds(u, KN_HELD_ON_RANK | KN_HELD_IN_GROUP))
            kn_passes_clear(&u->open);
    }
    return true;
}
