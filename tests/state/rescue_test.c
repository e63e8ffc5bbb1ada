/* tests/state/rescue_test.c: a step fails on several ranks. Their world is over, but each rank
 * still has its part of the last whole step, and saves it by itself; a new world of any size and
 * way goes on from there with the bits of a run without the failure. */
#include "tests/models/temp.h"
#include "tests/state/moving.h"

enum { MOST_RANKS = 4, BEFORE = 2 }; /* steps before the one that fails */

typedef struct rescue {
    way w;
    kn_fault_kind how;
    int64_t at;                /* which meeting of the step fails on the last rank */
    char want[256], dir[256];  /* files of the last whole step, by the ranks together and apart */
    int64_t steps[MOST_RANKS]; /* that each rank took */
    _Atomic int failed;        /* ranks whose step did */
} rescue;

/* This rank's values, with the place of its draws when the step began. */
static kn_state *take_all(net *m, kn_optim *o, kn_state *place, kn_state_kind kind)
{
    kn_state *s = kn_state_dict(m, .kind = kind), *of_o = kn_optim_state_dict(o, .kind = kind);
    if (s && of_o && place && kn_state_merge(s, of_o) && kn_state_merge(s, place))
        return s;
    kn_state_free(s);
    return NULL;
}

static kn_state *place_now(void)
{
    kn_state *s = kn_state_new();
    return s && kn_state_put(s, .random = true) ? s : NULL;
}

/* The last rank fails in it, or where the others take it. */
static bool failing_step(net *m, kn_optim *o, kn_comm *world, const rescue *r)
{
    const bool last = kn_rank(world) == kn_comm_size(world) - 1;
    if (last && r->at > 0)
        kn_fault_at(KN_AT_MEETING, r->at, r->how);
    if (r->at > 0)
        return net_step(m, o, world, BEFORE);
    return net_backward(m, kn_rank(world)) && (last ? kn_fail("a failure asked for") : kn_step(o));
}

static int lose_a_step(kn_comm *world, void *arg)
{
    rescue *r = arg;
    const int rank = kn_rank(world);
    net m;
    EXPECT(net_init(&m, KN_META) && net_wrap(&m, world, &r->w), "%s", kn_error());
    kn_optim *o = kn_adamw(&m, .lr = 0.05);
    for (int i = 0; i < BEFORE; i++)
        EXPECT(net_step(&m, o, world, i), "%s", kn_error());
    kn_state *want = take_all(&m, o, place_now(), KN_STATE_FULL), *place = place_now();
    EXPECT(want && place && (rank > 0 || kn_state_save(want, r->want)), "%s", kn_error());
    r->failed += !failing_step(&m, o, world, r);
    EXPECT(kn_ok() || strstr(kn_error(), "a failure asked for") || strstr(kn_error(), "memory"),
           "%s", kn_error());
    kn_clear_error();
    kn_fault_at(KN_AT_MEETING, 0, r->how);
    const int64_t calls = calls_of(world);
    kn_state *part = take_all(&m, o, place, KN_STATE_SHARDED);
    EXPECT(part && kn_state_save(part, r->dir) && calls_of(world) == calls, "%s", kn_error());
    r->steps[rank] = kn_optim_steps(o);
    kn_state_free(want), kn_state_free(part);
    kn_optim_free(o);
    kn_module_free(&m);
    kn_clear_error(); /* of letting go what the world held */
    return 0;
}

static int go_on(kn_comm *world, void *arg)
{
    const rescue *r = arg;
    const way next = { .layout = KN_LAYOUT_PER_PARAM };
    net m, ref;
    EXPECT(net_reference(&ref) && net_other(&m, world, &next));
    kn_optim *a = kn_adamw(&m, .lr = 1), *b = kn_adamw(&ref, .lr = 0.05);
    for (int i = 0; i < BEFORE; i++)
        EXPECT(net_step(&ref, b, NULL, i));
    kn_state *s = kn_state_open(r->dir), *want = kn_state_open(r->want);
    EXPECT(s && want && kn_load_state_dict(&m, s, .not_strict = true) &&
               kn_load_optim_state_dict(a, s, .not_strict = true) &&
               kn_state_get(s, .random = true),
           "%s", kn_error());
    kn_state *have = take_all(&m, a, place_now(), KN_STATE_FULL);
    EXPECT(have && same_states(have, want), "%s", kn_error());
    EXPECT(r->w.ranks || all_read_as(&m, &ref), "the last whole step");
    EXPECT(net_step(&m, a, world, BEFORE) && net_step(&ref, b, NULL, BEFORE), "%s", kn_error());
    EXPECT(r->w.ranks || all_read_as(&m, &ref), "the next step");
    kn_state_free(s), kn_state_free(want), kn_state_free(have);
    kn_optim_free(a), kn_optim_free(b);
    kn_module_free(&m), kn_module_free(&ref);
    return 0;
}

/* Whether the parts were of one step, and went on. */
static bool rescued(rescue *r, int ranks)
{
    bool same = true;
    snprintf(r->want, sizeof r->want, "%s", temp_path("want.safetensors"));
    snprintf(r->dir, sizeof r->dir, "%s", temp_path("parts"));
    r->failed = 0;
    on_threads(ranks, lose_a_step, r);
    for (int k = 1; k < ranks; k++)
        same = same && r->steps[k] == r->steps[0];
    if (same && r->steps[0] == BEFORE)
        for (int n = 1; n <= MOST_RANKS; n *= 2)
            on_threads(n, go_on, r);
    kn_state *s = kn_state_open(r->dir);
    if (same)
        KN_CHECK(s);
    else
        KN_CHECK_ERROR("their ranks weren't at the same step");
    kn_state_free(s);
    remove_temp();
    return same && r->steps[0] == BEFORE;
}

static void in_way(int i, int ranks)
{
    rescue r = { .w = ways[i] };
    const bool shards = ways[i].strategy != KN_NO_SHARD;
    int times = 0;
    for (r.at = 1;; r.at += r.at < 4 ? 1 : 5) {
        r.how = r.at % 2 ? KN_FAULT_ERROR : KN_FAULT_MEMORY;
        times += rescued(&r, ranks);
        if (r.failed == 0) /* the step has fewer meetings */
            break;
    }
    KN_CHECK(times > 2 || !shards, "way %d on %d ranks: rescued %d times", i, ranks, times);
}

KN_TEST(rescue, a_new_world_goes_on_from_the_last_whole_step)
{
    static const int some[] = { 0, 1, 2, 3, 6, 7 };
    for (size_t i = 0; i < sizeof some / sizeof *some; i += (size_t)kn_one_in(3))
        in_way(some[i], i % 2 ? 4 : 2);
}

KN_TEST(rescue, of_two_replicas)
{
    for (int i = 8; i < WAYS; i++)
        in_way(i, 4);
}

KN_TEST(rescue, parts_of_different_steps_are_refused)
{
    rescue r = { .w = ways[0] };
    KN_CHECK(!rescued(&r, 2) && r.steps[0] == BEFORE + 1 && r.steps[1] == BEFORE);
}
