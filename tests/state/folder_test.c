/* tests/state/folder_test.c: saves and claims in a run's folder that holds links, files of others,
 * folders that can't be removed, strangers' numbers; renames that fail; other threads. */
#include "state/folder_internal.h"
#include "tests/owned.h"
#include "tests/state/linear_run.h"
#include "tests/state/operations.h"

#include <errno.h>
#include <math.h>
#include <stdatomic.h>

static atomic_int failing; /* the failing-th rename from now fails; 0: none */

static int fail_rename(const char *operation)
{
    bool counts = strcmp(operation, "rename") == 0 && atomic_load(&failing) > 0;
    return counts && atomic_fetch_sub(&failing, 1) == 1 ? EIO : 0;
}

static int removals; /* that come before all others fail, once a rename has failed */

static int fail_rename_and_removals(const char *operation)
{
    if (strcmp(operation, "unlinkat") == 0 && atomic_load(&failing) == 0)
        return removals-- > 0 ? 0 : EIO;
    return fail_rename(operation);
}

static void claim(void)
{
    kn_run_folder *f = kn_run_folder_claim(dir);
    KN_CHECK(f != NULL);
    kn_run_folder_release(f);
}

static bool save(int64_t step, int keep)
{
    return kn_checkpoint_save(dir, &l, .step = step, .keep = keep);
}

/* A folder that no removal of checkpoints removes: it is too deep. */
#define STUBBORN "/a/b/c/d/e"

/* ---- files of others ------------------------------------------------------------------------- */

KN_TEST(folder, links_are_not_followed)
{
    static const char *const link[] = { "run/step-00000001.saving", "run/step-00000002.old",
                                        "run/step-00000003.removing", "run/step-00000002" };
    begin();
    make("home/mine");
    make("run");
    write_temp("home/letter", "x", 1);
    for (size_t i = 0; i < 4; i++)
        KN_CHECK(symlink(temp_path("home"), temp_path(link[i])) == 0);
    claim();
    for (size_t i = 0; i < 3; i++)
        KN_CHECK(!is_there(link[i]), "%s", link[i]);
    /* a checkpoint that lies elsewhere */
    KN_CHECK(save(4, 0) && save(5, 0));
    KN_CHECK(renameat(AT_FDCWD, temp_path("run/step-00000004"), AT_FDCWD, temp_path("home/4")) ==
             0);
    KN_CHECK(symlink(temp_path("home/4"), temp_path("run/step-00000004")) == 0);
    KN_CHECK(save(6, 1) && !is_there("run/step-00000004") && !is_there("run/step-00000005"));
    KN_CHECK(is_there("home/4/state.json") && is_there("home/letter") && is_there("home/mine"));
    end();
}

/* Files that may lie in the lock's place. */
static const struct {
    const char *text;
    enum { ALONE, LINKED, LINK, FOLDER, PIPE, ANOTHERS } as;
    bool taken;
} lock[] = {
    { "", ALONE, true },
    { "process 77 on a-host", ALONE, true },
    { "notes\n", ALONE, false },
    { "process of law\n", ALONE, false },
    { "process 77 on a-host\nand notes", ALONE, false },
    { "process 77 on a-host", LINKED, false },
    { "process 77 on a-host", LINK, false },
    { "", LINKED, false },
    { NULL, FOLDER, false },
    { NULL, PIPE, false },
    { "process 77 on a-host", ANOTHERS, false },
};

KN_TEST(folder, a_lock_that_is_none_stays)
{
    char text[64];
    const int kinds = (int)(sizeof lock / sizeof *lock);
    for (int i = 0; i < kinds; i++) {
        const char *file = lock[i].as == LINK || lock[i].as == LINKED ? "letter" : "run/.lock";
        struct stat st;
        if (lock[i].as == ANOTHERS && geteuid() != 0)
            continue;
        begin();
        make("run");
        if (lock[i].text) {
            write_temp(file, lock[i].text, strlen(lock[i].text));
            KN_CHECK(chmod(temp_path(file), 0644) == 0);
        }
        if (lock[i].as == LINKED)
            KN_CHECK(link(temp_path(file), temp_path("run/.lock")) == 0);
        else if (lock[i].as == LINK)
            KN_CHECK(symlink(temp_path(file), temp_path("run/.lock")) == 0);
        else if (lock[i].as == FOLDER)
            make("run/.lock");
        else if (lock[i].as == PIPE)
            KN_CHECK(mkfifo(temp_path("run/.lock"), 0600) == 0);
        else if (lock[i].as == ANOTHERS)
            KN_CHECK(chown(temp_path("run/.lock"), 4321, 4321) == 0);
        kn_run_folder *f = kn_run_folder_claim(dir);
        KN_CHECK((f != NULL) == lock[i].taken, "%d", i);
        KN_CHECK(f || strstr(kn_error(), ".lock"), "%d", i);
        if (f)
            KN_CHECK(stat(temp_path("run/.lock"), &st) == 0 && (st.st_mode & 07777) == 0600);
        kn_run_folder_release(f);
        kn_clear_error();
        int fd = lock[i].text ? open(temp_path(file), O_RDONLY | O_CLOEXEC) : -1;
        ssize_t n = fd >= 0 ? read(fd, text, sizeof text) : 0;
        if (fd >= 0)
            close(fd);
        KN_CHECK(lock[i].taken ? n == 0
                               : !lock[i].text || (n == (ssize_t)strlen(lock[i].text) &&
                                                   memcmp(text, lock[i].text, (size_t)n) == 0),
                 "%d", i);
        end();
    }
}

KN_TEST(folder, only_names_of_checkpoints_are_touched)
{
    static const char *const stay[] = {
        "run/step-notes.old",         "run/step-notes",
        "run/step-by-step.saving",    "run/step-of.removing",
        "run/step-7.removing",        "run/step-0000000000007.old",
        "run/step-00000007.old.old",  "run/step-more.old",
        "run/step--0000007.removing", "run/step-99999999999999999999.removing",
    };
    static const char *const go[] = { "run/step-00000007.saving", "run/step-00000008.removing" };
    begin();
    for (size_t i = 0; i < sizeof stay / sizeof *stay; i++)
        make(stay[i]);
    for (size_t i = 0; i < sizeof go / sizeof *go; i++)
        write_temp(go[i], "a file", 6);
    claim();
    for (size_t i = 0; i < sizeof stay / sizeof *stay; i++)
        KN_CHECK(is_there(stay[i]), "%s", stay[i]);
    for (size_t i = 0; i < sizeof go / sizeof *go; i++)
        KN_CHECK(!is_there(go[i]), "%s", go[i]);
    end();
}

KN_TEST(folder, an_empty_file_of_the_program)
{
    const kn_checkpoint_file own[] = { { "notes.txt", "", 0 }, { "none.txt", NULL, 0 } };
    size_t size = 1;
    begin();
    KN_CHECK(kn_checkpoint_save(dir, &l, .step = 1, .files = own, .file_count = 2));
    kn_checkpoint *c = kn_checkpoint_open(dir, NULL);
    KN_CHECK(c != NULL);
    KN_CHECK(kn_checkpoint_file_data(c, "notes.txt", &size) && size == 0);
    KN_CHECK(kn_checkpoint_file_data(c, "none.txt", &size) && size == 0);
    KN_CHECK(!kn_checkpoint_file_data(c, "other.txt", &size));
    kn_checkpoint_free(c);
    end();
}

/* Where the link can't be made, the checkpoint counts, and others go, but not the best. */
KN_TEST(folder, a_folder_best_stays)
{
    begin();
    make("run/best/more");
    for (int step = 1; step < 4; step++)
        KN_CHECK(kn_checkpoint_save(dir, &l, .step = step, .score = step == 2 ? 1 : 9, .keep = 1,
                                    .keep_best = true));
    KN_CHECK(newest() == 3 && is_there("run/step-00000002") && is_there("run/best/more"));
    KN_CHECK(!is_there("run/step-00000001"));
    end();
}

/* ---- folders of others within a run's -------------------------------------------------------- */

KN_TEST(folder, nobody_else_writes_among_its_checkpoints)
{
    static const char *const taken[] = {
        "run/step-00000001",
        "run/step-00000001/",
        "run/step-00000001/model",
        "run/step-00000001/more",
        "run/step-00000009",
        "run/step-00000009/a/b",
        "run/step-00000009.saving",
        "run/step-00000009.old",
        "run/step-00000009.removing",
        "run/step-00000009.damaged",
        "run/step-00000009.damaged-2",
        "run/best",
        "run/best/more",
        "link/more",
    };
    static const char *const free[] = {
        "run/export", "run/step-by-step", "run/a/step-00000009", "step-00000009",
        "best",       "step-00000009/a"
    };
    char named[256];
    begin();
    KN_CHECK(kn_checkpoint_save(dir, &l, .step = 1, .score = 1, .keep_best = true));
    KN_CHECK(symlink(temp_path("run/step-00000001"), temp_path("link")) == 0);
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++) {
        snprintf(named, sizeof named, "%s", temp_path(taken[i]));
        REFUSED(kn_folder_outside(named), "another folder");
        REFUSED(kn_run_folder_claim(named), "another folder");
    }
    KN_CHECK(!is_there("run/step-00000009") && !is_there("run/step-00000001/more"));
    for (size_t i = 0; i < sizeof free / sizeof *free; i++) {
        KN_CHECK(kn_folder_outside(temp_path(free[i])), "%s", free[i]);
        kn_run_folder *f = kn_run_folder_claim(temp_path(free[i]));
        KN_CHECK(f && kn_checkpoint_save(temp_path(free[i]), &l, .folder = f));
        kn_run_folder_release(f);
        KN_CHECK(kn_folder_outside(temp_path(free[i])), "%s", free[i]);
    }
    KN_CHECK(newest() == 1);
    end();
}

/* ---- what can't be removed ------------------------------------------------------------------- */

KN_TEST(folder, an_old_checkpoint_that_stays_is_no_error)
{
    begin();
    KN_CHECK(save(1, 0) && save(2, 0));
    make("run/step-00000001" STUBBORN);
    make("run/step-00000007.saving" STUBBORN);
    make("run/step-00000002.old" STUBBORN);
    for (int step = 3; step < 6; step++)
        KN_CHECK(save(step, 1) && newest() == step);
    KN_CHECK(!is_there("run/step-00000001") && !is_there("run/step-00000004"));
    kn_run_folder *f = kn_run_folder_claim(dir, .overwrite = true);
    make("run/step-00000005" STUBBORN);
    KN_CHECK(f && kn_checkpoint_save(dir, &l, .folder = f, .step = 1));
    KN_CHECK(newest() == 1 && !is_there("run/step-00000005"));
    kn_run_folder_release(f);
    end();
}

/* The files of a save that failed stay; the run goes on. */
KN_TEST(folder, a_failed_save_that_stays_is_no_error)
{
    begin();
    kn_run_folder *f = kn_run_folder_claim(dir);
    KN_CHECK(kn_checkpoint_save(dir, &l, .folder = f, .step = 1, .async = true));
    make("run/step-00000001.saving" STUBBORN);
    KN_CHECK(f && kn_ok());
    kn_run_folder_release(f);
    KN_CHECK_OK();
    end();
}

/* ---- numbers --------------------------------------------------------------------------------- */

static void write_state(const char *name, long long step, long long number)
{
    char text[200], path[100];
    snprintf(text, sizeof text,
             "{\"version\": 3, \"step\": %lld, \"number\": %lld, \"id\": \"x\", "
             "\"buffer_ranks\": 1, \"model\": {}, \"record\": {}}",
             step, number);
    make(name);
    snprintf(path, sizeof path, "%s/state.json", name);
    put_state(temp_path(path), text);
}

KN_TEST(folder, the_last_number)
{
    begin();
    write_state("run/step-00000001", 1, INT64_MAX);
    KN_CHECK(save(2, 0) && newest() == 2);
    write_state("run/step-00000003", 3, (int64_t)1 << 53);
    REFUSED(save(4, 0), "the last number");
    KN_CHECK(newest() == 3);
    end();
}

/* One whose state can't be read has the place of its step. */
KN_TEST(folder, an_older_damaged_one_comes_later)
{
    static const int64_t want[] = { 9, 8, 6, 4, 2 };
    kn_listing list;
    begin();
    for (int step = 4; step < 10; step += 4)
        KN_CHECK(save(step, 0));
    make("run/step-00000002");
    make("run/step-00000006");
    write_temp("run/step-00000006/state.json", "{", 1);
    make("run/step-00000009");
    KN_CHECK(kn_folder_list(&list, dir) && list.count == 5);
    for (int i = 0; i < 5; i++)
        KN_CHECK(list.list[i].step == want[i], "%d: step %lld", i, (long long)list.list[i].step);
    kn_listing_free(&list);
    KN_CHECK(newest() == 8);
    end();
}

/* ---- renames --------------------------------------------------------------------------------- */

/* The renames of a save of the same step: state.json, step-N to step-N.old, step-N.saving to
 * step-N. */
KN_TEST(folder, a_replaced_one_comes_back)
{
    struct stat before, after;
    begin();
    KN_CHECK(save(1, 0) && stat(temp_path("run/step-00000001/state.json"), &before) == 0);
    operation_hook = fail_rename;
    for (int i = 1; i < 4; i++) {
        failing = i;
        REFUSED(save(1, 0), "cannot rename");
        KN_CHECK(failing == 0 && newest() == 1, "rename %d", i);
        KN_CHECK(stat(temp_path("run/step-00000001/state.json"), &after) == 0 &&
                     after.st_ino == before.st_ino,
                 "rename %d: another one", i);
        KN_CHECK(!is_there("run/step-00000001.old") && !is_there("run/step-00000001.saving"));
    }
    operation_hook = NULL;
    end();
}

/* A save that failed after it had its state.json is removed in part: what stays of it isn't taken
 * for a checkpoint, and doesn't replace the one of the same step. */
KN_TEST(folder, a_part_of_a_failed_save_is_nothing)
{
    struct stat before, after;
    begin();
    KN_CHECK(save(1, 0) && stat(temp_path("run/step-00000001/state.json"), &before) == 0);
    for (int most = 0; most < 6; most++)
        for (int i = 2; i < 4; i++) {
            operation_hook = fail_rename_and_removals;
            failing = i;
            removals = most;
            REFUSED(save(1, 0), "cannot rename");
            operation_hook = NULL;
            claim();
            KN_CHECK(newest() == 1, "rename %d, removal %d", i, most);
            KN_CHECK(stat(temp_path("run/step-00000001/state.json"), &after) == 0 &&
                         after.st_ino == before.st_ino,
                     "rename %d, removal %d: another one", i, most);
        }
    end();
}

/* A file system without locks: what a killed save left of a step is put right before that step is
 * saved again. */
KN_TEST(folder, without_locks_a_whole_save_stays)
{
    char from[300];
    begin();
    KN_CHECK(save(1, 0));
    kn_run_folder *f = kn_run_folder_claim(dir);
    KN_CHECK(f && close(f->lock) == 0);
    f->lock = -1;
    for (int old = 0; old < 2; old++) { /* killed between the two renames, without and with .old */
        const char *left = old ? ".old" : ".saving";
        snprintf(from, sizeof from, "%s", temp_path("run/step-00000001"));
        KN_CHECK(rename(from, temp_path(old ? "run/step-00000001.old"
                                            : "run/step-00000001.saving")) == 0);
        operation_hook = fail_rename;
        failing = 2; /* the first one puts it back */
        REFUSED(kn_checkpoint_save(dir, &l, .step = 1, .folder = f), "cannot rename");
        operation_hook = NULL;
        KN_CHECK(newest() == 1, "%s", left);
    }
    KN_CHECK(kn_checkpoint_save(dir, &l, .step = 1, .folder = f) && newest() == 1);
    kn_run_folder_release(f);
    end();
}

/* ---- beside other threads and ranks ---------------------------------------------------------- */

typedef struct noted {
    const kn_comm *world;
    double timeout;
} noted;

static void note_timeout(const char *error, void *arg)
{
    noted *n = arg;
    (void)error;
    n->timeout = kn_comm_get_timeout(n->world);
}

/* One rank's work there may take longer than the timeout. */
static int refused_claim(kn_comm *world, void *arg)
{
    noted n = { world, 0 };
    kn_set_error_handler(note_timeout, &n);
    EXPECT(!kn_run_folder_claim(arg) && strstr(kn_error(), "cannot make the folder"));
    kn_set_error_handler(NULL, NULL);
    kn_clear_error();
    EXPECT(isinf(n.timeout) && isfinite(kn_comm_get_timeout(world)), "%g", n.timeout);
    return 0;
}

KN_TEST(folder, no_timeout_holds_during_a_claim)
{
    write_temp("file", "x", 1);
    KN_CHECK(kn_spawn_threads(1, refused_claim, (void *)temp_path("file/run")) == 0);
}

static atomic_bool given_up; /* by rank 0 */

/* Rank 1 comes once rank 0 has given up, or late. */
static int late(kn_comm *world, void *arg)
{
    const bool saves = arg != NULL;
    OWNED_MODULE kn_linear mine = { 0 };
    kn_checkpoint *c = NULL;
    EXPECT(kn_linear_init(&mine, NULL, NULL, 2, 2) && kn_materialize(&mine, KN_CPU, 1));
    EXPECT(saves || (c = kn_checkpoint_open(dir, world)));
    kn_comm_set_timeout(world, 0.1);
    for (int i = 0; kn_rank(world) == 1 && i < 1000 && !atomic_load(&given_up); i++)
        usleep(1000);
    EXPECT(saves ? !kn_checkpoint_save(dir, &mine, .comm = world, .step = 1)
                 : !kn_checkpoint_load(c, &mine));
    atomic_store(&given_up, true);
    EXPECT(strstr(kn_error(), "waited 0.1 s for rank 1"), "%s", kn_error());
    kn_clear_error();
    kn_checkpoint_free(c);
    return 0;
}

KN_TEST(folder, the_timeout_holds_for_reaching_a_save_and_a_load)
{
    begin();
    KN_CHECK(save(1, 0));
    for (int saves = 0; saves < 2; saves++) {
        atomic_store(&given_up, false);
        KN_CHECK(kn_spawn_threads(2, late, saves ? dir : NULL) == 0);
    }
    end();
}

KN_TEST(folder, more_ranks_hold_the_module)
{
    kn_comm *two = kn_comm_simulated(2, 0, 1e9);
    kn_linear sharded;
    begin();
    KN_CHECK(save(1, 0) && kn_linear_init(&sharded, NULL, NULL, 2, 2, .device = KN_META) &&
             kn_fsdp_wrap(&sharded, two, .device = KN_META));
    kn_checkpoint *c = kn_checkpoint_open(dir, NULL);
    REFUSED(kn_checkpoint_load(c, &sharded), "2 ranks hold the module, and 1 opened");
    kn_checkpoint_free(c);
    kn_run_folder *f = kn_run_folder_claim(dir);
    REFUSED(kn_checkpoint_save(dir, &sharded, .folder = f, .step = 2),
            "2 ranks hold the module, and 1 claimed .folder");
    kn_run_folder_release(f);
    kn_module_free(&sharded);
    kn_comm_simulated_free(two);
    end();
}

/* The commit runs on a thread; it removes what a run with .overwrite replaces. */
static int best_during_a_commit(kn_comm *world, void *arg)
{
    double score;
    OWNED_MODULE kn_linear mine = { 0 };
    EXPECT(kn_linear_init(&mine, NULL, NULL, 2, 2) && kn_materialize(&mine, KN_CPU, 1));
    EXPECT(kn_checkpoint_save(dir, &mine, .step = 1, .score = 1));
    kn_run_folder *f = kn_run_folder_claim(dir, .overwrite = true);
    EXPECT(kn_run_folder_best(f, &score) == -1);
    for (int step = 2; step < 4; step++) {
        EXPECT(kn_checkpoint_save(dir, &mine, .step = step, .folder = f, .score = step,
                                  .async = true));
        kn_save_state s;
        while ((s = kn_checkpoint_poll(f)) == KN_SAVE_RUNNING)
            usleep(200);
        EXPECT(s == KN_SAVE_WRITTEN && kn_barrier(world, kn_compute_stream(KN_CPU), "told"));
        kn_checkpoint_finish(f, true);
        EXPECT(kn_run_folder_best(f, &score) == 2 && score == 2);
    }
    kn_run_folder_release(f);
    return 0;
}

KN_TEST(folder, the_best_one_waits_for_a_commit)
{
    for (int ranks = 1; ranks < 3; ranks++) {
        snprintf(dir, sizeof dir, "%s", temp_path(ranks == 1 ? "run" : "run2"));
        KN_CHECK(kn_spawn_threads(ranks, best_during_a_commit, NULL) == 0);
    }
}
