/* tests/state/set_aside_test.c: a run goes on from an older checkpoint than the newest, which isn't
 * whole: that one is neither counted nor replaced nor removed. */
#include "state/folder_internal.h"
#include "tests/state/linear_run.h"

static bool save(kn_run_folder *f, int64_t step, int keep)
{
    return kn_checkpoint_save(dir, &l, .folder = f, .step = step, .keep = keep,
                              .score = 10 - (double)step, .keep_best = true);
}

static void begin_with(int saves)
{
    begin();
    for (int step = 1; step <= saves; step++)
        KN_CHECK(save(NULL, step, 0));
}

/* Goes on from the step that is the newest whole one. */
static kn_run_folder *go_on(int64_t step)
{
    kn_run_folder *f = kn_run_folder_claim(dir);
    kn_checkpoint *c = kn_checkpoint_open(dir, NULL);
    KN_CHECK(f && c && kn_checkpoint_step(c) == step);
    KN_CHECK(kn_run_folder_set_aside(f, c));
    kn_checkpoint_free(c);
    return f;
}

/* With .keep = 1 the one that the run goes on from stays until the next one counts. */
KN_TEST(set_aside, a_damaged_one_counts_no_more)
{
    begin_with(5);
    write_temp("run/step-00000004/state.json", "{", 1);
    cut("step-00000005");
    kn_run_folder *f = go_on(3);
    KN_CHECK(is_there("run/step-00000004.damaged/model") && !is_there("run/step-00000004"));
    KN_CHECK(is_there("run/step-00000005.damaged/model") && !is_there("run/step-00000005"));
    KN_CHECK(is_there("run/best/model"), "the least score of those that are left");
    for (int64_t step = 4; step < 8; step++)
        KN_CHECK(save(f, step, 2));
    KN_CHECK(is_there("run/step-00000006") && !is_there("run/step-00000005"));
    KN_CHECK(is_there("run/step-00000004.damaged/model") &&
             is_there("run/step-00000005.damaged/model"));
    kn_run_folder_release(f);
    /* another one of the same step; a run that begins anew leaves them, too */
    cut("step-00000007");
    f = go_on(6);
    KN_CHECK(save(f, 7, 0));
    kn_run_folder_release(f);
    cut("step-00000007");
    kn_run_folder_release(go_on(6));
    KN_CHECK(is_there("run/step-00000007.damaged") && is_there("run/step-00000007.damaged-2"));
    KN_CHECK((f = kn_run_folder_claim(dir, .overwrite = true)) && save(f, 1, 1));
    kn_run_folder_release(f);
    KN_CHECK(is_there("run/step-00000005.damaged/model") && !is_there("run/step-00000006") &&
             is_there("run/step-00000007.damaged-2/model"));
    /* by its name it is a checkpoint as it was */
    REFUSED(kn_checkpoint_open(temp_path("run/step-00000007.damaged"), NULL), "truncated");
    end();
}

/* One that another run has put right meanwhile, and those of another folder. */
KN_TEST(set_aside, only_what_was_passed_over)
{
    begin_with(3);
    cut("step-00000003");
    kn_checkpoint *c = kn_checkpoint_open(dir, NULL);
    KN_CHECK(c && kn_checkpoint_step(c) == 2);
    KN_CHECK(save(NULL, 3, 0));
    kn_run_folder *f = kn_run_folder_claim(dir);
    KN_CHECK(kn_run_folder_set_aside(f, c) && is_there("run/step-00000003"));
    kn_run_folder_release(f);
    kn_checkpoint_free(c);
    cut("step-00000003");
    c = kn_checkpoint_open(dir, NULL);
    f = kn_run_folder_claim(temp_path("other"));
    KN_CHECK(c && f && kn_run_folder_set_aside(f, c) && is_there("run/step-00000003"));
    kn_run_folder_release(f);
    kn_checkpoint_free(c);
    end();
}

/* A claim has put a save in its place since. */
KN_TEST(set_aside, by_another_name)
{
    char from[300];
    begin_with(3);
    cut("step-00000003");
    snprintf(from, sizeof from, "%s", temp_path("run/step-00000003"));
    KN_CHECK(rename(from, temp_path("run/step-00000003.saving")) == 0);
    kn_checkpoint *c = kn_checkpoint_open(dir, NULL);
    kn_run_folder *f = kn_run_folder_claim(dir);
    KN_CHECK(c && f && kn_checkpoint_step(c) == 2 && is_there("run/step-00000003"));
    KN_CHECK(kn_run_folder_set_aside(f, c) && is_there("run/step-00000003.damaged"));
    /* a save's own folder is none of its business */
    KN_CHECK(kn_checkpoint_save(dir, &l, .folder = f, .step = 4, .async = true));
    REFUSED(kn_run_folder_set_aside(f, c), "a save runs in the background");
    KN_CHECK(kn_checkpoint_wait(f) && kn_run_folder_set_aside(f, c));
    kn_run_folder_release(f);
    kn_checkpoint_free(c);
    end();
}

static int one_rank(kn_comm *world, void *arg)
{
    (void)arg;
    kn_run_folder *f = kn_run_folder_claim(dir);
    kn_checkpoint *c = kn_checkpoint_open(dir, world);
    EXPECT(c && kn_checkpoint_step(c) == 1 && kn_run_folder_set_aside(f, c), "%s", kn_error());
    EXPECT(kn_rank(world) > 0 ||
           (is_there("run/step-00000002.damaged") && is_there("run/step-00000003.damaged")));
    kn_checkpoint_free(c);
    kn_run_folder_release(f);
    EXPECT(has_its_timeout(world));
    return 0;
}

KN_TEST(set_aside, ranks_agree)
{
    begin_with(3);
    cut("step-00000002");
    cut("step-00000003");
    KN_CHECK(kn_spawn_threads(2, one_rank, NULL) == 0);
    end();
}

KN_TEST(set_aside, names)
{
    static const struct {
        const char *name;
        int64_t step;
    } names[] = {
        { "step-00000012", 12 },
        { "step-00000012.damaged", 12 },
        { "step-00000012.damaged-2", 12 },
        { "step-00000012.damaged-31", 12 },
        { "step-12.damaged", -1 },
        { "step-00000012.damaged-", -1 },
        { "step-00000012.damaged-1", -1 },
        { "step-00000012.damaged-2x", -1 },
        { "step-00000012.damaged.old", -1 },
        { "step-00000012.old", -1 },
        { "step-000000120000000000000000000000000000000000000000000000000.damaged", -1 },
        { ".damaged", -1 },
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        KN_CHECK(kn_folder_checkpoint(names[i].name) == names[i].step, "%s", names[i].name);
}
