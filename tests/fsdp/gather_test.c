/* tests/fsdp/gather_test.c: gathers that a program asks for, in lists or by hand, and the most that
 * are ahead of their use; on meta among simulated ranks (chain.h). */
#include "tests/fsdp/chain.h"

enum { DIM = 16 };

/* ---- lists and by hand ----------------------------------------------------------------------- */

KN_TEST(gather, explicit_prefetch_lists)
{
    CHAIN(c, 4, 2, .max_gathers = 3);
    kn_module *l[4];
    for (int i = 0; i < 4; i++)
        l[i] = &c.layer[i].base;
    kn_fsdp_prefetch_forward(l[0], (kn_module *[]){ l[2], l[3] }, 2);
    kn_fsdp_prefetch_backward(l[3], (kn_module *[]){ l[1], l[2], l[0] }, 3);
    chain_check_line("lists", chain_step(&c, true).line,
                     "g0 g2 g3 F0 g1 F1 F2 F3 g3 g1 g2 g0 B3 s3 B2 s2 B1 s1 B0 s0");
    kn_fsdp_prefetch_forward(l[0], NULL, 0);
    kn_fsdp_prefetch_backward(l[3], NULL, 0);
    chain_check_line("none any more", chain_step(&c, true).line,
                     "g0 F0 g1 F1 g2 F2 g3 F3 g3 g2 B3 s3 g1 B2 s2 g0 B1 s1 B0 s0");
}

static void hear_kinds(const kn_fsdp_event *e, void *arg)
{
    char *line = arg;
    size_t n = strlen(line);
    snprintf(line + n, 64 - n, "%s ", kn_fsdp_event_name(e->kind));
}

KN_TEST(gather, manual_unshard)
{
    CHAIN(c, 2, 2);
    chain_step(&c, true);
    char heard[64] = "";
    KN_CHECK(kn_fsdp_on_event(&c.layer[1], hear_kinds, heard));
    kn_unshard_handle h = kn_fsdp_unshard(&c.layer[1]);
    chain_check_line("issued", heard, "gather ");
    int64_t bytes = kn_ledger_read().live[KN_MEM_GATHERED];
    KN_CHECK(bytes == DIM * DIM * 4, "%lld bytes gathered before the wait", (long long)bytes);
    KN_CHECK(h.unit && kn_unshard_wait(h));
    chain_check_line("waited for", heard, "gather gathered ");
    bytes = kn_ledger_read().live[KN_MEM_GATHERED];
    KN_CHECK(bytes == DIM * DIM * 4, "%lld bytes gathered", (long long)bytes);
    chain_check_line("layer 1 is there already", chain_step(&c, true).line,
                     "g0 F0 F1 g1 g0 B1 s1 B0 s0");
    kn_fsdp_unshard(&c.layer[0]);
    KN_CHECK(kn_fsdp_reshard(&c.layer[0]));
    KN_CHECK(kn_ledger_read().live[KN_MEM_GATHERED] == 0);
    chain_check_line("and gone again", chain_step(&c, true).line, "g0 F0 g1 F1 g1 g0 B1 s1 B0 s0");
}

/* When the first gather after an optimizer's step begins, in seconds after that step: between them
 * comes work that reads no parameter and takes *work seconds. */
static double first_gather(chain *c, bool early, double *work)
{
    kn_stream *s = kn_compute_stream(KN_META);
    OWNED_HOST kn_trace_event *events = NULL;
    chain_step(c, true);
    kn_trace_start(100);
    double begin = kn_meta_clock(s);
    KN_CHECK(!early || kn_fsdp_unshard(&c->layer[0]).unit);
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = kn_zeros(KN_F32, KN_META, KN_SHAPE(512, 512));
    KN_CHECK(kn_matmul(x, x));
    *work = kn_meta_clock(s) - begin;
    bool mode = kn_set_grad_mode(false);
    KN_CHECK(kn_call(c, kn_zeros(KN_F32, KN_META, KN_SHAPE(c->batch, c->dim))));
    kn_set_grad_mode(mode);
    kn_scope_end(scope);
    size_t n = kn_trace_stop(&events), i = 0;
    while (i < n && strcmp(events[i].what, "all_gather 0") != 0)
        i++;
    KN_CHECK(i < n, "no gather");
    double at = events[i].begin - begin;
    return at;
}

/* Gathers wait for the compute stream as it is when they are issued: after the optimizer's step,
 * they wait for that alone. */
KN_TEST(gather, a_gather_issued_after_the_step_runs_beside_what_follows)
{
    double work;
    kn_meta_rates(1e12, 1e18, 0);
    CHAIN_OF(c, 2, DIM, 4, 2, 1e9);
    c.optim = kn_sgd(&c, .lr = 0.1);
    double late = first_gather(&c, false, &work), early = first_gather(&c, true, &work);
    KN_CHECK(work > 1e-5 && late >= work && early < 0.1 * work,
             "the work takes %g s; the gather begins after %g s, issued early %g s", work, late,
             early);
}

/* ---- the limiter ----------------------------------------------------------------------------- */

/* Every layer requests the next eight (in backward: the previous eight). */
static int64_t greedy_peak(int layers, int most)
{
    CHAIN(c, layers, 2, .max_gathers = most);
    for (int i = 0; i < layers; i++) {
        kn_module *after[8], *before[8];
        int a = 0, b = 0;
        for (int k = 1; k <= 8; k++) {
            if (i + k < layers)
                after[a++] = &c.layer[i + k].base;
            if (i - k >= 0)
                before[b++] = &c.layer[i - k].base;
        }
        kn_fsdp_prefetch_forward(&c.layer[i], after, a);
        kn_fsdp_prefetch_backward(&c.layer[i], before, b);
    }
    chain_step(&c, true);
    int64_t peak = chain_step(&c, true).gathered;
    return peak / (DIM * DIM * 4);
}

KN_TEST(gather, limiter_holds_memory_flat)
{
    for (int most = 1; most <= 4; most++)
        for (int layers = 8; layers <= 32; layers *= 2) {
            int64_t units = greedy_peak(layers, most);
            KN_CHECK(units == most + 1, "%d layers, %d gathers ahead: %lld units gathered", layers,
                     most, (long long)units);
        }
    KN_CHECK(greedy_peak(16, 0) == 3, "two gathers ahead are the default");
}

/* The limit counts what is ahead of its use at each moment. */
KN_TEST(gather, limiter)
{
    CHAIN(c, 5, 2, .max_gathers = 2);
    kn_module *all[5];
    for (int i = 0; i < 5; i++)
        all[i] = &c.layer[i].base;
    kn_fsdp_prefetch_forward(&c.layer[0], all + 1, 4);
    chain_check_line("two of four", chain_step(&c, false).counted,
                     "g0 g1 g2 F0:3 F1:2 F2:1 g3 F3:1 g4 F4:1");
}
