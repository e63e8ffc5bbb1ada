/* fsdp/recover.c: what a forward or a backward that failed left half done goes, so that the next
 * step begins as if it had not been. */
#include "fsdp/schedule.h"

/* Nothing of a forward that failed stays: the end of the outermost call releases all. */
void kn_schedule_drop_forward(kn_unit *u)
{
    kn_schedule_state *s = u->schedule;
    u->group_calls = 0;
    kn_unit_reshard(u, KN_WHY("its forward failed"));
    if (u != s->outermost)
        return;
    s->outermost = NULL;
    for (int i = 0; i < s->units; i++) {
        s->unit[i]->ran = false;
        s->unit[i]->group_calls = 0;
        kn_unit_reshard(s->unit[i], KN_WHY("the forward failed"));
    }
    if (s->recording)
        kn_order_forget_forward(&s->order);
    kn_prefetch_forget(u);
}

void kn_schedule_recover(kn_schedule_state *s)
{
    if (!s || s->phase != KN_PHASE_FAILED || !kn_ok())
        return;
    s->phase = KN_PHASE_OUTSIDE;
    s->settled = true;
    kn_finish_reductions(s, 0, KN_WHY("the backward failed"));
    kn_unit_end_download(s->downloading);
    /* A reduction that failed half way is none of those that ended here: its kernels and copies may
     * still use the bytes that go now. */
    kn_lanes_sync(s->lanes);
    for (int i = 0; i < s->units; i++) {
        kn_unit *u = s->unit[i];
        u->state = KN_UNIT_IDLE;
        u->ran = false;
        for (int k = 0; k < u->buckets; k++) {
            kn_bucket_finish_reduce(u->bucket[k]);
            kn_bucket_recover(u->bucket[k]);
        }
        kn_unit_reshard(u, KN_WHY("the backward failed"));
    }
}
