/* tests/state/replaced_test.c: a run begins anew in the folder of another one, is killed, goes on:
 * the other one's checkpoints are all that there is, or nothing. */
#include "state/folder_internal.h"
#include "tests/state/linear_run.h"
#include "tests/state/operations.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>

static bool save(kn_run_folder *f, const char *run, int64_t step, double score, bool best)
{
    char record[32];
    snprintf(record, sizeof record, "{\"run\": \"%s\"}", run);
    return kn_checkpoint_save(dir, &l, .folder = f, .step = step, .score = score, .record = record,
                              .keep_best = best);
}

/* The step of the checkpoint that a name stands for, and its run; -1 with an error. */
static int64_t open_one(const char *path, char run[8])
{
    kn_checkpoint *c = kn_checkpoint_open(path, NULL);
    int64_t step = c ? kn_checkpoint_step(c) : -1;
    *run = 0;
    if (c)
        KN_CHECK(sscanf(kn_checkpoint_record(c), "{\"run\": \"%7[a-z]\"}", run) == 1);
    kn_checkpoint_free(c);
    return step;
}

/* How many checkpoints of a run the folder holds, by the names that readers take. */
static int count_of(const char *run)
{
    char name[64], its[8];
    int count = 0;
    for (int step = 0; step < 10; step++) {
        snprintf(name, sizeof name, "run/step-%08d", step);
        count += is_there(name) && open_one(temp_path(name), its) == step && !strcmp(its, run);
    }
    return count;
}

static const double scores[] = { 3, 0.1, 2 }; /* of the old run, the second is the best */

static void save_old(void)
{
    for (int step = 1; step < 4; step++)
        KN_CHECK(save(NULL, "old", step, scores[step - 1], true));
    KN_CHECK(links_to("step-00000002") && count_of("old") == 3);
}

/* The old run goes once the first save is whole, and no sooner. */
KN_TEST(replaced, once_a_save_is_whole)
{
    double score;
    begin();
    save_old();
    kn_run_folder *f = kn_run_folder_claim(dir, .overwrite = true);
    KN_CHECK(f && count_of("old") == 3 && links_to("step-00000002"));
    KN_CHECK(kn_run_folder_best(f, &score) == -1 && isnan(score), "no best of its own");
    KN_CHECK(save(f, "new", 2, 0, false));
    KN_CHECK(count_of("old") == 0 && count_of("new") == 1 && !is_there("run/best"));
    KN_CHECK(save(f, "new", 3, 9, true));
    KN_CHECK(links_to("step-00000003") && count_of("new") == 2);
    kn_run_folder_release(f);
    end();
}

/* ---- a run that is killed -------------------------------------------------------------------- */

static atomic_int left; /* operations until the process is killed */

static int kill_at(const char *operation)
{
    static const char *const looks[] = { "lstat", "opendir", "openat" };
    for (size_t i = 0; i < sizeof looks / sizeof *looks; i++)
        if (strcmp(operation, looks[i]) == 0)
            return 0; /* after it all is as before */
    if (atomic_fetch_sub(&left, 1) == 1)
        raise(SIGKILL);
    return 0;
}

/* Begins anew and saves step 2, killed before its at-th operation. False: it had fewer. */
static bool killed_at(int at, bool best)
{
    int status;
    pid_t child = fork();
    if (child == 0) {
        kn_set_threads(1);
        atomic_store(&left, at);
        operation_hook = kill_at;
        kn_run_folder *f = kn_run_folder_claim(dir, .overwrite = true);
        _exit(f && save(f, "new", 2, 0.5, best) ? 0 : 1);
    }
    KN_CHECK(waitpid(child, &status, 0) == child);
    KN_CHECK(WIFSIGNALED(status) || WEXITSTATUS(status) == 0, "operation %d", at);
    return WIFSIGNALED(status);
}

static void check_old(int at)
{
    double score;
    kn_run_folder *f = kn_run_folder_claim(dir);
    KN_CHECK(f && kn_run_folder_best(f, &score) == 2 && score == 0.1, "operation %d", at);
    KN_CHECK(count_of("old") == 3 && count_of("new") == 0, "operation %d", at);
    KN_CHECK(links_to("step-00000002"), "operation %d", at);
    kn_run_folder_release(f);
}

/* The run goes on: the replaced one is gone, and its best. */
static void check_new(int at, bool best)
{
    double score;
    kn_run_folder *f = kn_run_folder_claim(dir);
    KN_CHECK(f && kn_run_folder_best(f, &score) == 2 && score == 0.5, "operation %d: best %g", at,
             score);
    KN_CHECK(count_of("old") == 0 && count_of("new") > 0, "operation %d", at);
    KN_CHECK(save(f, "new", 5, 0.6, best), "operation %d", at);
    KN_CHECK(links_to("step-00000002"), "operation %d", at);
    kn_run_folder_release(f);
}

KN_TEST(replaced, a_kill_leaves_one_run_or_the_other)
{
    for (int best = 0; best < 2; best++) {
        int at = 1, olds = 0, news = 0;
        for (bool killed = true; killed; at++) {
            char run[8];
            begin();
            save_old();
            killed = killed_at(at, best);
            KN_CHECK(open_one(dir, run) > 0, "operation %d", at);
            if (strcmp(run, "old") == 0)
                olds++, check_old(at);
            else
                news++, check_new(at, best);
            end();
        }
        KN_CHECK(olds > 3 && news > 10, "%d and %d moments", olds, news);
    }
}

/* ---- replaced ones that are still there ------------------------------------------------------ */

static void copy(const char *from, const char *to)
{
    char command[600];
    snprintf(command, sizeof command, "cp -r %s %s", temp_path(from), temp_path(to));
    KN_CHECK(system(command) == 0, "%s", command);
}

/* A reader takes none of those that a killed run didn't remove, also where all of the new run's are
 * damaged. */
KN_TEST(replaced, readers_take_none)
{
    char run[8];
    begin();
    save_old();
    copy("run/step-00000001", "kept");
    kn_run_folder *f = kn_run_folder_claim(dir, .overwrite = true);
    KN_CHECK(f && save(f, "new", 2, 0.5, true) && save(f, "new", 4, 0.7, true));
    kn_run_folder_release(f);
    KN_CHECK(rename(temp_path("kept"), temp_path("run/step-00000001")) == 0);
    for (int step = 4; step > 0; step -= 2) {
        KN_CHECK(open_one(dir, run) == step && strcmp(run, "new") == 0);
        cut(step == 4 ? "step-00000004" : "step-00000002");
    }
    REFUSED(kn_checkpoint_open(dir, NULL), "no other checkpoint");
    end();
}

static kn_run_folder *begin_anew(void)
{
    begin();
    save_old();
    kn_run_folder *f = kn_run_folder_claim(dir, .overwrite = true);
    KN_CHECK(f && save(f, "new", 2, 0.5, true));
    return f;
}

/* One that can't be read goes as well, where the run isn't killed. */
KN_TEST(replaced, a_damaged_one_goes)
{
    begin();
    save_old();
    KN_CHECK(mkdir(temp_path("run/step-00000007"), 0777) == 0);
    write_temp("run/step-00000007/state.json", "{", 1);
    kn_run_folder *f = kn_run_folder_claim(dir, .overwrite = true);
    KN_CHECK(f && save(f, "new", 2, 0, false));
    kn_run_folder_release(f);
    KN_CHECK(count_of("new") == 1 && count_of("old") == 0 && !is_there("run/best"));
    KN_CHECK(!is_there("run/step-00000007"));
    end();
}

/* A run that replaces none keeps all that came before it. */
KN_TEST(replaced, a_run_that_goes_on_replaces_none)
{
    kn_run_folder *f = begin_anew();
    kn_run_folder_release(f);
    for (int step = 3; step < 6; step++)
        KN_CHECK(save(NULL, "new", step, 1, false));
    KN_CHECK(count_of("new") == 4 && links_to("step-00000002"));
    end();
}

/* A checkpoint of a run that replaced another one is copied into a third one's folder: it replaces
 * nothing there, whatever its number. */
KN_TEST(replaced, a_copy_replaces_none_elsewhere)
{
    kn_run_folder_release(begin_anew());
    KN_CHECK(rename(temp_path("run/step-00000002"), temp_path("copy")) == 0);
    KN_CHECK(rename(dir, temp_path("elsewhere")) == 0);
    save_old();
    KN_CHECK(rename(temp_path("copy"), temp_path("run/step-00000007")) == 0);
    forge_state(temp_path("run/step-00000007/state.json"), "\"step\": 2", "\"step\": 7");
    kn_run_folder_release(kn_run_folder_claim(dir));
    KN_CHECK_OK();
    KN_CHECK(count_of("old") == 3 && count_of("new") == 1);
    end();
}

/* ---- the best one ---------------------------------------------------------------------------- */

/* A save of the same step, of which nobody knows the score, isn't the best one. */
KN_TEST(replaced, the_best_step_is_saved_again)
{
    begin();
    save_old();
    KN_CHECK(save(NULL, "new", 2, 0, false));
    KN_CHECK(links_to("step-00000003"), "which has the least score now");
    end();
}

static atomic_int opens; /* the opens-th from now is refused */

static int refuse_open(const char *operation)
{
    return strcmp(operation, "open") == 0 && atomic_fetch_sub(&opens, 1) == 1 ? EACCES : 0;
}

/* One that can't be read just now is neither left out of the list of what goes, nor taken for a
 * damaged one, the new one least of all. */
KN_TEST(replaced, what_can_not_be_read_just_now)
{
    bool all = false;
    int failed = 0;
    for (int n = 1; !all; n++) {
        begin();
        save_old();
        kn_run_folder *f = kn_run_folder_claim(dir, .overwrite = true);
        atomic_store(&opens, n);
        operation_hook = refuse_open;
        bool ok = save(f, "new", 1, 5, false);
        operation_hook = NULL;
        all = atomic_load(&opens) > 0;
        kn_clear_error();
        kn_run_folder_release(f);
        kn_run_folder_release(kn_run_folder_claim(dir));
        KN_CHECK(count_of("new") == ok && count_of("old") == (ok ? 0 : 3), "open %d: %s", n,
                 ok ? "saved" : "refused");
        failed += !ok;
        end();
    }
    KN_CHECK(failed > 3, "%d", failed);
}
