/* tests/fsdp/summon_errors_test.c: kn_summon and kn_fsdp_apply where they can't work: wrong use,
 * functions and allocations that fail. */
#include "tests/failing.h"
#include "tests/fsdp/net.h"

/* Tells that it was called. */
static bool note(kn_module *m, void *called)
{
    return *(bool *)called = true;
}

KN_TEST(summon_errors, wrong_use_is_a_sentence)
{
    net m;
    KN_CHECK(net_init(&m, KN_META) && net_wrap(&m, NULL, &ways[0]));
    kn_summon_scope s = kn_summon(&m);
    KN_CHECK(s.s != NULL);
    kn_summon_scope t = kn_summon(&m.fc1);
    KN_CHECK(t.s == NULL);
    KN_CHECK_ERROR("unit 'fc1' is summoned already");
    bool called = false;
    KN_CHECK(!kn_fsdp_apply(&m, note, &called) && !called);
    KN_CHECK_ERROR("is summoned already; end that scope first");
    kn_scope scope = kn_scope_begin();
    KN_CHECK(net_loss(&m, 0) == NULL);
    kn_scope_end(scope);
    KN_CHECK_ERROR("summon");
    KN_CHECK(kn_summon_end(s));
    REFUSED(kn_summon_end(s), "ended already");
    KN_CHECK(net_backward(&m, 0));
    kn_module_free(&m);
    KN_CHECK(kn_summon(NULL).s == NULL);
    KN_CHECK_ERROR("kn_summon: not an initialised module");
}

static void summon_inside(kn_module_event *e, void *arg)
{
    *(kn_summon_scope *)arg = kn_summon(e->module);
}

KN_TEST(summon_errors, not_inside_a_forward)
{
    kn_summon_scope s = { NULL };
    NET_IN_WAY(m, NULL, &ways[0]);
    kn_module_hook(&m.fc1, (kn_module_hooks){ .pre_forward = summon_inside, .arg = &s });
    kn_scope scope = kn_scope_begin();
    KN_CHECK(net_loss(&m, 0) == NULL && s.s == NULL);
    kn_scope_end(scope);
    KN_CHECK_ERROR("in the middle of a forward");
}

KN_TEST(summon_errors, step_inside_is_a_sentence)
{
    NET_IN_WAY(m, NULL, &ways[0]);
    OWNED_OPTIM kn_optim *opt = kn_sgd(&m, .lr = 0.1);
    KN_CHECK(net_backward(&m, 0));
    kn_summon_scope s = kn_summon(&m);
    REFUSED(kn_step(opt), "summon");
    KN_CHECK(kn_summon_end(s));
}

/* Whole gradients that wait on a rank are its own; without .with_grads nobody asks for them. */
RANK_TEST(summon_errors, gradients_that_are_held_back, .threads = "12")
{
    NET_WRAPPED(m, world, .wrap_class = "linear");
    KN_CHECK(kn_fsdp_set_gradient_sync(&m, false, true) && net_backward(&m, 0));
    kn_summon_scope s = kn_summon(&m);
    KN_CHECK(s.s && kn_summon_end(s) && kn_agree(world, true));
    KN_CHECK(!kn_summon(&m, .with_grads = true).s && kn_error() &&
             strstr(kn_error(), "held back on its rank; run the last backward"));
    if (kn_comm_size(world) == 1) { /* else the error has ended the ranks */
        kn_clear_error();
        for (int i = 0; i < 2; i++) {
            KN_CHECK(i ? kn_fsdp_set_gradient_sync(&m, true, true) && net_backward(&m, 1)
                       : kn_fsdp_reduce_grads(&m));
            s = kn_summon(&m, .with_grads = true);
            KN_CHECK(s.s && kn_grad(kn_module_param(&m.fc2, "weight")) && kn_summon_end(s));
        }
    }
    kn_clear_error();
}

KN_TEST(summon_errors, units_on_meta_have_nothing_to_show)
{
    NET_WRAPPED(m, NULL, .device = KN_META);
    REFUSED(kn_summon(&m).s, "wrapped with .device = KN_META");
}

static bool fails_on_rank_1(kn_module *m, void *rank)
{
    return *(int *)rank != 1 || m->impl->params == 0;
}

RANK_TEST(summon_errors, an_apply_that_fails_silently_stops_all_ranks, .processes = "2")
{
    int rank = kn_rank(world);
    kn_comm_set_timeout(world, 5);
    NET_WRAPPED(m, world, .wrap_class = "linear");
    bool ok = kn_fsdp_apply(&m, fails_on_rank_1, &rank);
    REFUSED(ok, "without saying why");
}

static bool summons(void *m)
{
    kn_summon_scope s = kn_summon(m, .with_grads = true);
    return kn_summon_end(s) && s.s;
}

static kn_storage *handle;

static void handle_is_unchanged(void *m)
{
    KN_CHECK(kn_module_param(&((net *)m)->wte, "weight")->storage == handle);
}

KN_TEST(summon_errors, every_allocation_failing_is_an_error)
{
    OWNED_MODULE net m = { 0 }, ref = { 0 };
    way per_param = { .layout = KN_LAYOUT_PER_PARAM };
    KN_CHECK(net_init(&m, KN_META) && net_wrap(&m, NULL, &per_param) && net_reference(&ref) &&
             net_backward(&m, 0));
    handle = kn_module_param(&m.wte, "weight")->storage;
    each_allocation_fails(summons, handle_is_unchanged, &m, 20);
    handle_is_unchanged(&m);
    KN_CHECK(all_read_as(&m, &ref));
}
