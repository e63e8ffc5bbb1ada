/* tests/fsdp/summon_device_test.c: whole parameters in host memory while the unit computes on a
 * device, and back. The device is a stand-in with memory of its own (stand_in.h). Rank functions
 * return a status and never assert. */
#include "tests/fsdp/net.h"
#include "tests/fsdp/stand_in.h"

typedef struct job {
    const way *way;
    bool offload, rank0_only;
} job;

static bool backward(net *m, int micro)
{
    int64_t ids[NET_BATCH];
    for (int i = 0; i < NET_BATCH; i++)
        ids[i] = (i * 3 + micro * 5 + 1) % NET_VOCAB;
    IN_SCOPE;
    kn_tensor *y = kn_call(m, kn_from(KN_I64, KN_CPU, ids, KN_SHAPE(NET_BATCH)));
    return kn_backward(mean_square(y));
}

/* Each whole value becomes 2 x; false where one is elsewhere or differs from the reference's. */
static bool double_all(net *m, net *ref, bool expected)
{
    const kn_param *p, *r;
    int n = kn_params(m, &p);
    bool same = kn_params(ref, &r) == n, mode = kn_set_grad_mode(false);
    for (int i = 0; i < n && same; i++) {
        float *x = kn_data(p[i].tensor), *y = kn_data(r[i].tensor);
        same = x && kn_device_of(p[i].tensor) == KN_CPU &&
               (!expected || memcmp(x, y, (size_t)p[i].numel * sizeof *x) == 0);
        for (int64_t k = 0; k < p[i].numel && same; k++)
            x[k] *= 2;
    }
    kn_set_grad_mode(mode);
    return same;
}

static bool has_grads(net *m, net *ref)
{
    const kn_param *p, *r;
    int n = kn_params(m, &p), grads = 0;
    bool same = kn_params(ref, &r) == n;
    for (int i = 0; i < n && same; i++) {
        kn_tensor *have = kn_grad(p[i].tensor), *want = kn_grad(r[i].tensor);
        grads += want != NULL;
        same =
            !have == !want && (!have || (kn_device_of(have) == KN_CPU && same_bytes(have, want)));
    }
    return same && grads > 3;
}

static void host_and_back(kn_comm *world, void *arg)
{
    const job *j = arg;
    const way *w = j->way;
    bool here = !j->rank0_only || kn_rank(world) == 0;
    NET(m);
    NET_WHOLE(ref);
    KN_CHECK(kn_fsdp_wrap(&m, world, .strategy = w->strategy, .layout = w->layout, .mesh = w->mesh,
                          .keep_whole_below = w->keep_whole_below, .wrap_class = "linear",
                          .device = STAND_IN, .offload_dir = j->offload ? "memory" : NULL,
                          .seed = NET_SEED));
    KN_CHECK(backward(&m, kn_rank(world)));
    for (int r = 0; r < kn_comm_size(world); r++)
        KN_CHECK(backward(&ref, r));
    int64_t peak = stand_in_peak();
    kn_summon_scope s = kn_summon(&m, .offload_to_cpu = true, .rank0_only = j->rank0_only,
                                  .with_grads = w->mesh.shards == 0);
    KN_CHECK(s.s);
    KN_CHECK(!here || w->mesh.shards || has_grads(&m, &ref), "gradients");
    KN_CHECK(!here || double_all(&m, &ref, true), "whole values");
    KN_CHECK(kn_summon_end(s) && double_all(&ref, &ref, false));
    KN_CHECK(stand_in_peak() == peak, "the device held %lld bytes more",
             (long long)(stand_in_peak() - peak));
    KN_CHECK(all_read_as(&m, &ref), "changes did not come back");
    KN_CHECK(kn_device_of(kn_module_param(&m.fc1, "weight")) == STAND_IN, "the handle");
    kn_zero_grad(&m);
    KN_CHECK(backward(&m, 0), "backward after it");
}

/* Whole states of units on a device, on all ranks or on the first, lie in the host's memory. */
static void states_in_host_memory(kn_comm *world, void *arg)
{
    const job *j = arg;
    const way *w = j->way;
    const bool here = !j->rank0_only || kn_rank(world) == 0;
    NET(m);
    NET_WHOLE(ref);
    KN_CHECK(kn_fsdp_wrap(&m, world, .strategy = w->strategy, .layout = w->layout, .mesh = w->mesh,
                          .keep_whole_below = w->keep_whole_below, .wrap_class = "linear",
                          .device = STAND_IN, .seed = NET_SEED));
    OWNED_OPTIM kn_optim *o = kn_adamw(&m, .lr = 0.1);
    KN_CHECK(backward(&m, kn_rank(world)) && kn_step(o));
    kn_state *s[] = { kn_state_dict(&m, .rank0_only = j->rank0_only),
                      kn_optim_state_dict(o, .rank0_only = j->rank0_only) };
    for (int k = 0; k < 2; k++) {
        KN_CHECK(s[k] && (kn_state_count(s[k]) > 5) == here, "state %d", k);
        for (int i = 0; i < kn_state_count(s[k]); i++) {
            const char *name = kn_state_name(s[k], i);
            bool number = k == 1 && !strstr(name, ".exp_avg");
            KN_CHECK(number || kn_device_of(kn_state_tensor(s[k], name)) == KN_CPU, "%s", name);
        }
    }
    KN_CHECK(!here || kn_load_state_dict(&ref, s[0]));
    for (int i = 0; i < 7; i++) {
        const kn_param *r;
        kn_params(&ref, &r);
        float whole[128];
        KN_CHECK(kn_param_read(&m, i, whole));
        KN_CHECK(!here || memcmp(whole, kn_data(r[i].tensor), (size_t)r[i].numel * 4) == 0, "%s",
                 r[i].name);
    }
    kn_state_free(s[0]);
    kn_state_free(s[1]);
}

KN_TEST(summon_device, states_lie_in_host_memory)
{
    for (int i = 0; i < WAYS; i++)
        for (int ranks = 1; ranks <= 4; ranks *= 2) {
            if (THREADS_ONLY)
                KN_SKIP("the stand-in is a process's");
            if (ways[i].offload_dir || (ways[i].ranks && ways[i].ranks != ranks))
                continue;
            job j = { .way = &ways[i], .rank0_only = (i + ranks) % 2 };
            int failed =
                on_stand_in((stand_in){ .inline_streams = true }, ranks, states_in_host_memory, &j);
            KN_CHECK(failed == 0, "way %d, %d of %d ranks failed", i, failed, ranks);
        }
}

static void run(job j, int ranks)
{
    KN_CHECK(on_stand_in((stand_in){ .inline_streams = true }, ranks, host_and_back, &j) == 0,
             "%d ranks, layout %d, strategy %d, offload %d, rank 0 only %d", ranks, j.way->layout,
             j.way->strategy, j.offload, j.rank0_only);
}

KN_TEST(summon_device, whole_in_host_memory_and_back)
{
    if (THREADS_ONLY)
        KN_SKIP("ranks are processes here");
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        for (int i = 0; i < WAYS; i++)
            for (int how = 0; how < 4; how++)
                if (!ways[i].offload_dir && (!ways[i].ranks || ways[i].ranks == ranks) &&
                    (i + how + ranks) % 2 == 0)
                    run((job){ &ways[i], how / 2, how % 2 }, ranks);
}
