/* tests/state/entries_test.c: the list of what a state consists of: names, parts, savers, reading
 * and writing, in each way of sharding. */
#include "state/entries.h"
#include "tests/fsdp/net.h"

enum { MOST = 128 }; /* elements of the largest tensor */

static void in_threads(kn_rank_fn fn)
{
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        for (int i = 0; i < WAYS; i++) {
            if (ways[i].ranks && ways[i].ranks != ranks)
                continue;
            int failed = kn_spawn_threads(ranks, fn, (void *)&ways[i]);
            KN_CHECK(failed == 0, "%d ranks, way %d: %d failed", ranks, i, failed);
        }
}

static const char *const names[] = {
    "wte.weight",
    "fc1.weight",
    "fc1.bias",
    "fc2.weight",
    "fc2.bias",
    "ln.weight",
    "ln.bias",
    "scale",
    "wte.weight.exp_avg",
    "wte.weight.exp_avg_sq",
    "fc1.weight.exp_avg",
    "fc1.weight.exp_avg_sq",
    "fc2.weight.exp_avg",
    "fc2.weight.exp_avg_sq",
    "fc2.bias.exp_avg",
    "fc2.bias.exp_avg_sq",
    "ln.weight.exp_avg",
    "ln.weight.exp_avg_sq",
    "ln.bias.exp_avg",
    "ln.bias.exp_avg_sq",
};
enum { NAMES = sizeof names / sizeof *names };

/* How often each element of an entry is written by a saver, over all ranks. */
static bool saved_once(const kn_entry *e, kn_comm *world)
{
    int64_t times[MOST] = { 0 }, n = kn_entry_numel(e);
    const kn_interval part = e->part;
    for (int64_t b = 0; e->saver && b < part.blocks; b++)
        for (int64_t i = 0; i < part.count; i++)
            times[part.start + b * part.stride + i]++;
    bool ok = n <= MOST && kn_all_reduce_i64(world, times, n, kn_compute_stream(KN_CPU), "savers");
    for (int64_t i = 0; ok && i < n; i++)
        ok = times[i] == 1;
    return ok;
}

static int listed(kn_comm *world, void *arg)
{
    net m;
    EXPECT(net_init(&m, KN_META) && net_wrap(&m, world, arg), "init");
    kn_optim *o = kn_adamw(&m, .lr = 0.05);
    EXPECT(net_backward(&m, kn_rank(world)) && kn_step(o), "step");
    kn_entries all;
    EXPECT(kn_entries_begin(&all, &m, NULL) && kn_entries_add_model(&all, NULL) &&
               kn_entries_add_optim(&all, o) && kn_entries_deal(&all),
           "list");
    EXPECT(all.count == NAMES && kn_comm_size(all.comm) == kn_comm_size(world), "%d", all.count);
    for (int i = 0; i < NAMES; i++) {
        const kn_entry *e = &all.list[i];
        char whole[MOST * 4], part[MOST * 4], cut[MOST * 4];
        EXPECT(strcmp(e->name, names[i]) == 0, "%s, not %s", e->name, names[i]);
        EXPECT(saved_once(e, world), "%s: an element has no saver, or two", e->name);
        EXPECT(kn_entry_gather(e, &all, whole) && kn_entry_read(e, part), "read");
        kn_interval_cut(kn_entry_part(e, &all, kn_rank(world)), cut, whole, 4);
        EXPECT(memcmp(cut, part, kn_entry_part_bytes(e)) == 0, "%s", e->name);
        const void *data = kn_entry_data(e);
        EXPECT(!data == !kn_entry_part_bytes(e) &&
                   (!data || memcmp(cut, data, kn_entry_part_bytes(e)) == 0),
               "%s", e->name);
    }
    EXPECT(kn_entries_end(&all), "end");
    kn_optim_free(o);
    kn_module_free(&m);
    return !kn_ok();
}

KN_TEST(entries, every_element_has_one_saver)
{
    in_threads(listed);
}

/* A unit that stays gathered computes with what was written. */
static int written(kn_comm *world, void *arg)
{
    net m, ref;
    EXPECT(net_init(&m, KN_META) && net_wrap(&m, world, arg) && net_reference(&ref), "init");
    EXPECT(kn_unshard_wait(kn_fsdp_unshard(&m)), "gather");
    kn_entries all, from;
    const bool mode = kn_set_grad_mode(false);
    EXPECT(kn_fill_(kn_module_param(&ref, "fc1.weight"), 0.25), "fill");
    kn_set_grad_mode(mode);
    EXPECT(kn_entries_begin(&all, &m, NULL) && kn_entries_add_model(&all, NULL) &&
               kn_entries_begin(&from, &ref, NULL) && kn_entries_add_model(&from, NULL) &&
               kn_entries_may_write(&all, "load"),
           "list");
    for (int i = 0; i < all.count; i++) {
        char whole[MOST * 4], part[MOST * 4];
        EXPECT(kn_entry_gather(&from.list[i], &from, whole), "whole");
        kn_interval_cut(all.list[i].part, part, whole, 4);
        void *data = i % 2 ? kn_entry_data(&all.list[i]) : NULL; /* half of them in their place */
        if (data)
            memcpy(data, part, kn_entry_part_bytes(&all.list[i]));
        EXPECT(kn_entry_write(&all.list[i], data ? data : part), "write");
    }
    EXPECT(kn_entries_end(&all) && kn_entries_end(&from) && all_read_as(&m, &ref), "bits");
    kn_scope scope = kn_scope_begin();
    EXPECT(kn_item(net_loss(&m, 1)) == kn_item(net_loss(&ref, 1)), "loss");
    kn_scope_end(scope);
    kn_module_free(&m), kn_module_free(&ref);
    return !kn_ok();
}

KN_TEST(entries, what_is_written_computes)
{
    in_threads(written);
}
