/* fsdp/agree.c: what ranks must know of each other, because their data may choose other branches:
 * which parameters got a gradient on any rank, and which calls any rank's backward reaches. */
#include "fsdp/schedule.h"

/* Four counts of ranks in a word. */
#define FLAGS_A_WORD 4
#define FLAG_BITS    15

bool kn_agree_on_any(kn_schedule_state *s, unsigned char *flag, int n, const char *what)
{
    int words = (n + FLAGS_A_WORD - 1) / FLAGS_A_WORD;
    if (s->root->size == 1 || n == 0)
        return true;
    int64_t *word = kn_host_calloc((size_t)words, sizeof *word);
    if (!word)
        return false;
    for (int i = 0; i < n; i++)
        word[i / FLAGS_A_WORD] |= (int64_t)(flag[i] != 0) << i % FLAGS_A_WORD * FLAG_BITS;
    /* between hosts: what the device computes goes on meanwhile */
    kn_device d = s->root->options.device == KN_META ? KN_META : KN_CPU;
    bool ok = kn_all_reduce_i64(s->comm, word, words, kn_compute_stream(d), what);
    for (int i = 0; i < n && ok; i++)
        flag[i] =
            (word[i / FLAGS_A_WORD] >> i % FLAGS_A_WORD * FLAG_BITS & ((1 << FLAG_BITS) - 1)) > 0;
    kn_host_free(word);
    return ok;
}

typedef void (*each_param)(kn_bucket_param *p, bool reduced, unsigned char *flag);

/* Reduced parameters only; the others follow when they are reduced. */
static void set_flags(kn_bucket_param *p, bool reduced, unsigned char *flag)
{
    *flag = reduced && p->pending;
    p->pending = p->pending && !reduced;
}

static void read_flags(kn_bucket_param *p, bool reduced, unsigned char *flag)
{
    p->open = p->open && !reduced;
    p->has_grad |= *flag != 0;
}

static int for_each_param(kn_schedule_state *s, unsigned char *flag, each_param fn)
{
    int n = 0;
    for (int i = 0; i < s->units; i++)
        for (int k = 0; k < s->unit[i]->buckets; k++)
            for (int j = 0; j < s->unit[i]->bucket[k]->params; j++, n++)
                if (fn)
                    fn(&s->unit[i]->bucket[k]->param[j], s->unit[i]->sync, &flag[n]);
    return n;
}

static bool any_syncs(const kn_schedule_state *s)
{
    bool any = false;
    for (int i = 0; i < s->units; i++)
        any |= s->unit[i]->sync;
    return any;
}

/* A parameter that no rank's backward reached has no gradient, as without sharding: its values and
 * its optimizer state stay. Ranks may differ, so they agree. */
bool kn_agree_on_grads(kn_schedule_state *s, bool *came)
{
    if (!any_syncs(s))
        return true;
    if (!s->grad_flags) {
        s->params = for_each_param(s, NULL, NULL);
        s->grad_flags = kn_host_calloc((size_t)s->params + 1, sizeof *s->grad_flags);
    }
    if (!s->grad_flags)
        return false;
    for_each_param(s, s->grad_flags, set_flags);
    if (!kn_agree_on_any(s, s->grad_flags, s->params, "which parameters got a gradient"))
        return false;
    for_each_param(s, s->grad_flags, read_flags);
    for (int i = 0; i < s->params; i++)
        *came |= s->grad_flags[i] != 0;
    return true;
}
