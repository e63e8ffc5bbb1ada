/* fsdp/arrivals.c: which parameters got a gradient. Ranks may differ (experts chosen by data), so they
 * compare notes at the end of a backward. */
#include "fsdp/unit.h"

/* Four counts of ranks in a word. */
#define FLAGS_A_WORD 4
#define FLAG_BITS    15

typedef void (*each_param)(kn_bucket_param *p, bool reduced, int64_t *word, int shift);

/* Only of what was reduced: the rest is told when it is. */
static void tell(kn_bucket_param *p, bool reduced, int64_t *word, int shift)
{
    *word |= (int64_t)(reduced && p->pending) << shift;
    p->pending = p->pending && !reduced;
}

static void hear(kn_bucket_param *p, bool reduced, int64_t *word, int shift)
{
    (void)reduced;
    p->arrived |= (*word >> shift & ((1 << FLAG_BITS) - 1)) > 0;
}

static int for_each_param(kn_schedule_state *s, int64_t *words, each_param fn)
{
    int n = 0;
    for (int i = 0; i < s->units; i++)
        for (int k = 0; k < s->unit[i]->buckets; k++)
            for (int j = 0; j < s->unit[i]->bucket[k]->params; j++, n++)
                if (fn)
                    fn(&s->unit[i]->bucket[k]->param[j], s->unit[i]->sync, &words[n / FLAGS_A_WORD],
                       n % FLAGS_A_WORD * FLAG_BITS);
    return n;
}

/* A parameter that no rank's backward reached has no gradient, as without sharding: its values and its
 * optimizer state stay. Ranks may differ (a branch that depends on data); so they compare notes. */
bool kn_schedule_compare_notes(kn_schedule_state *s, bool *came)
{
    if (!s->arrivals) {
        s->words = (for_each_param(s, NULL, NULL) + FLAGS_A_WORD - 1) / FLAGS_A_WORD;
        s->arrivals = kn_calloc((size_t)s->words + 1, sizeof *s->arrivals);
    }
    if (!s->arrivals)
        return false;
    for (int i = 0; i < s->words; i++)
        s->arrivals[i] = 0;
    for_each_param(s, s->arrivals, tell);
    /* between hosts: what the device computes goes on meanwhile */
    kn_device d = s->root->options.device == KN_META ? KN_META : KN_CPU;
    if (s->root->size > 1 && s->words > 0 &&
        !kn_all_reduce_i64(s->comm, s->arrivals, s->words, kn_compute_stream(d),
                           "which parameters got a gradient"))
        return false;
    for_each_param(s, s->arrivals, hear);
    for (int i = 0; i < s->words; i++)
        *came |= s->arrivals[i] != 0;
    return true;
}

bool kn_unit_owe(kn_unit *u, bool owed)
{
    bool any = false;
    u->owed = owed;
    for (int i = 0; i < u->buckets; i++)
        for (int k = 0; k < u->bucket[i]->params; k++) {
            kn_bucket_param *p = &u->bucket[i]->param[k];
            p->owed = owed && (p->owed || p->tensor->requires_grad);
            any |= p->owed;
        }
    return any;
}
