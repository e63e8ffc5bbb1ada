/* tests/models/checkpoint_test.c: folders that runs save into, and files written all or nothing. */
#include "knap.h"
#include "tests/owned.h"
#include "tests/comm/comm_test.h"
#include "tests/models/temp.h"
#include "tests/state/forged.h"

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>

static bool is_there(const char *name)
{
    struct stat st;
    return lstat(temp_path(name), &st) == 0;
}

KN_TEST(checkpoint, a_folder_has_one_run)
{
    char dir[256], text[64];
    snprintf(dir, sizeof dir, "%s", temp_path("a/b/run"));
    kn_run_folder *f = kn_run_folder_claim(dir);
    KN_CHECK(f && !kn_run_folder_has_checkpoint(dir));
    KN_CHECK(!kn_run_folder_claim(dir)); /* each descriptor is a holder of its own */
    snprintf(text, sizeof text, "another run saves there: process %d on ", (int)getpid());
    KN_CHECK_ERROR(text);
    kn_run_folder_release(f);
    f = kn_run_folder_claim(dir);
    KN_CHECK(f != NULL);
    pid_t child = fork(); /* a killed holder's lock ends */
    if (child == 0) {
        kn_run_folder_release(f);
        _exit(kn_run_folder_claim(dir) && raise(SIGKILL) ? 0 : 1);
    }
    kn_run_folder_release(f);
    int status;
    KN_CHECK(waitpid(child, &status, 0) == child);
    f = kn_run_folder_claim(dir);
    KN_CHECK(f != NULL);
    kn_run_folder_release(f);
    kn_run_folder_release(NULL);
    write_temp("file", "x", 1);
    REFUSED(kn_run_folder_claim(temp_path("file")), "/file");
}

static void make_temp(const char *name)
{
    KN_CHECK(mkdir(temp_path(name), 0777) == 0, "%s", name);
}

/* A folder that a reader of state.json alone takes for a checkpoint. */
static void make_saved(const char *name, int64_t step, int64_t number)
{
    char path[150], text[256];
    make_temp(name);
    snprintf(path, sizeof path, "%s/state.json", name);
    snprintf(text, sizeof text,
             "{\"version\": 3, \"step\": %lld, \"number\": %lld, \"id\": \"%032llx\"}",
             (long long)step, (long long)number, (unsigned long long)number);
    put_state(temp_path(path), text);
}

static void make_leftover(const char *name)
{
    char path[150];
    make_temp(name);
    snprintf(path, sizeof path, "%s/model", name);
    make_temp(path);
    snprintf(path, sizeof path, "%s/model/shard-00001-model-00001-of-00001.safetensors", name);
    write_temp(path, "half", 4);
}

/* Interrupted saves: a complete one is finished, files of the others are removed; so are replaced
 * and removed checkpoints, and nothing else is. */
KN_TEST(checkpoint, a_claim_tidies_up)
{
    static const char *const left[] = { "step-00000010.saving", "step-00000020.removing",
                                        "step-123456789.saving" };
    static const char *const stay[] = {
        "mine.saving",       "step-7.saving.mine", "step-00000001",
        "step-00000001.bak", "model.safetensors",  "step-00000050"
    };
    char dir[256];
    snprintf(dir, sizeof dir, "%s", temp_path("."));
    KN_CHECK(!kn_run_folder_has_checkpoint(dir));
    for (size_t i = 0; i < sizeof left / sizeof *left; i++)
        make_leftover(left[i]);
    for (size_t i = 0; i < sizeof stay / sizeof *stay; i++)
        make_leftover(stay[i]);
    make_saved("step-00000030", 30, 1); /* replaced by a save that broke off while renaming */
    make_saved("step-00000030.saving", 30, 2);
    make_saved("step-00000040.old", 40, 3); /* its replacement has never come */
    make_saved("step-00000060", 60, 5);
    make_saved("step-00000060.old", 60, 4); /* its replacement is there */
    KN_CHECK(symlink("nowhere", temp_path(".best.new")) == 0);
    KN_CHECK(kn_run_folder_has_checkpoint(dir));
    for (int again = 0; again < 2; again++) {
        kn_run_folder_release(kn_run_folder_claim(dir));
        KN_CHECK_OK();
        for (size_t i = 0; i < sizeof left / sizeof *left; i++)
            KN_CHECK(!is_there(left[i]), "%s stays", left[i]);
        for (size_t i = 0; i < sizeof stay / sizeof *stay; i++)
            KN_CHECK(is_there(stay[i]), "%s is gone", stay[i]);
        KN_CHECK(is_there("step-00000030") && !is_there("step-00000030.saving") &&
                 !is_there("step-00000030.old"));
        KN_CHECK(is_there("step-00000040") && !is_there("step-00000040.old"));
        KN_CHECK(is_there("step-00000060") && !is_there("step-00000060.old"));
        KN_CHECK(!is_there(".best.new"));
    }
    char text[300];
    FILE *f = fopen(temp_path("step-00000030/state.json"), "r");
    KN_CHECK(f && fgets(text, sizeof text, f) && strstr(text, "\"number\": 2"), "the old one");
    fclose(f);
}

/* Writers of one path don't share a temporary file: each write succeeds, and the file equals one of
 * theirs. */
KN_TEST(checkpoint, writers_of_one_file)
{
    enum { WRITERS = 4, TIMES = 40, SIZE = 20000 };
    char path[256];
    snprintf(path, sizeof path, "%s", temp_path("file"));
    pid_t child[WRITERS];
    for (int w = 0; w < WRITERS; w++) {
        child[w] = fork();
        if (child[w] != 0)
            continue;
        static char text[SIZE];
        memset(text, 'a' + w, SIZE);
        bool ok = true;
        for (int i = 0; ok && i < TIMES; i++)
            ok = kn_file_write(path, (const void *const[]){ text }, (const size_t[]){ SIZE }, 1);
        _exit(ok ? 0 : 1);
    }
    for (int w = 0; w < WRITERS; w++) {
        int status;
        KN_CHECK(waitpid(child[w], &status, 0) == child[w] && status == 0, "writer %d failed", w);
    }
    kn_mapped map;
    KN_CHECK(kn_file_map(path, "file", &map) && map.size == SIZE);
    for (size_t i = 1; i < SIZE; i++)
        KN_CHECK(map.data[i] == map.data[0]);
    kn_file_unmap(&map);
}

/* Mapped data stays readable when the file is truncated, as by another program that saves in
 * place. */
KN_TEST(checkpoint, a_file_that_is_cut_afterwards)
{
    static char text[100000] = "text";
    kn_mapped map;
    const char *path = write_temp("file", text, sizeof text);
    KN_CHECK(kn_file_map(path, "file", &map));
    KN_CHECK(truncate(path, 0) == 0 && map.data[sizeof text - 1] == 0 && map.data[0] == 't');
    kn_file_unmap(&map);
}

/* ---- buffers of ranks ------------------------------------------------------------------------ */

/* Buffers of ranks that differ in their last bytes alone are those of each rank again. */
static int last_bytes(kn_comm *world, void *arg)
{
    OWNED_MODULE kn_linear l = { 0 };
    float mask[4] = { 1, 2, 3, 4 + (float)kn_rank(world) };
    EXPECT(kn_linear_init(&l, NULL, NULL, 2, 2) && kn_materialize(&l, KN_CPU, 1) &&
           kn_buffer(&l, "mask", kn_from(KN_F32, KN_CPU, mask, KN_SHAPE(4))));
    OWNED_OPTIM kn_optim *o = kn_sgd(&l, .lr = 0.1);
    EXPECT(kn_checkpoint_save(arg, &l, .optim = o, .comm = world), "%s", kn_error());
    EXPECT(kn_fill_(kn_module_buffer(&l, "mask"), 0), "%s", kn_error());
    kn_checkpoint *c = kn_checkpoint_open(arg, world);
    EXPECT(c && kn_checkpoint_load(c, &l, .optim = o) &&
               memcmp(kn_data(kn_module_buffer(&l, "mask")), mask, sizeof mask) == 0,
           "%s", kn_ok() ? "another rank's" : kn_error());
    kn_checkpoint_free(c);
    return 0;
}

KN_TEST(checkpoint, ranks_buffers_are_compared_whole)
{
    char dir[256];
    snprintf(dir, sizeof dir, "%s", temp_path("run"));
    KN_CHECK(kn_spawn_threads(2, last_bytes, dir) == 0);
}
