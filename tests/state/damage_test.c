/* tests/state/damage_test.c: bytes that differ from those saved, a machine in trouble, hostile
 * counts: which checkpoint is opened, and what is said. */
#include "tests/owned.h"
#include "tests/state/linear_run.h"

#include <glob.h>
#include <sys/resource.h>

static bool net_init(kn_linear *m, kn_comm *comm)
{
    *m = (kn_linear){ 0 };
    return kn_linear_init(m, NULL, NULL, 6, 4) &&
           kn_fsdp_wrap(m, comm, .layout = KN_LAYOUT_FLAT, .seed = 3);
}

/* A linear's two steps in arg, on all ranks. */
static bool with_optim = true;
static int two_saves(kn_comm *world, void *arg)
{
    OWNED_MODULE kn_linear m;
    kn_set_threads(1);
    EXPECT(net_init(&m, world));
    OWNED_OPTIM kn_optim *o = with_optim ? kn_adamw(&m, .lr = 0.1) : NULL;
    for (int64_t step = 1; step < 3; step++)
        EXPECT(kn_checkpoint_save(arg, &m, .step = step, .optim = o));
    return 0;
}

static void flip_last_byte(const char *pattern)
{
    char byte;
    glob_t found;
    KN_CHECK(glob(pattern, 0, NULL, &found) == 0, "%s", pattern);
    const char *path = found.gl_pathv[0];
    int fd = open(path, O_RDWR);
    off_t at = lseek(fd, -1, SEEK_END);
    KN_CHECK(fd >= 0 && pread(fd, &byte, 1, at) == 1, "%s", path);
    byte ^= 1;
    KN_CHECK(pwrite(fd, &byte, 1, at) == 1 && close(fd) == 0);
    globfree(&found);
}

/* ---- bytes of tensors ------------------------------------------------------------------------ */

static int opens_the_whole_one(kn_comm *world, void *arg)
{
    OWNED_MODULE kn_linear m;
    kn_set_threads(1);
    EXPECT(net_init(&m, world));
    EXPECT(step_of(kn_checkpoint_open(arg, world)) == 2, "headers alone show no damage");
    kn_checkpoint *c = kn_checkpoint_open_checked(arg, world);
    EXPECT(c && kn_checkpoint_load(c, &m) && step_of(c) == 1, "%s", kn_error());
    return 0;
}

/* Whichever rank wrote the byte, on whatever number of ranks: those read parts of the files. */
KN_TEST(damage, a_flipped_byte_gives_way_to_the_one_before)
{
    static const char *const file[] = {
        "run/step-00000002/model/shard-00001-*",
        "run/step-00000002/optimizer/shard-00002-*",
    };
    char named[300];
    snprintf(dir, sizeof dir, "%s", temp_path("run"));
    snprintf(named, sizeof named, "%s/step-00000002", dir);
    KN_CHECK(kn_spawn_threads(2, two_saves, dir) == 0);
    KN_CHECK(step_of(kn_checkpoint_open_checked(dir, NULL)) == 2);
    for (size_t i = 0; i < sizeof file / sizeof *file; i++) {
        flip_last_byte(temp_path(file[i]));
        for (int ranks = 1; ranks <= 4; ranks *= 2)
            KN_CHECK(kn_spawn_threads(ranks, opens_the_whole_one, dir) == 0, "%d ranks", ranks);
        REFUSED(kn_checkpoint_open_checked(named, NULL), "have the checksum");
        flip_last_byte(temp_path(file[i]));
    }
}

/* ---- the program's own files ----------------------------------------------------------------- */

KN_TEST(damage, own_files_are_under_a_checksum)
{
    static const char text[] = "words of the tokenizer";
    const kn_checkpoint_file own[] = { { "words.txt", text, sizeof text }, { "none", "", 0 } };
    const char *path;
    size_t size = 1;
    begin();
    for (int64_t step = 1; step < 3; step++)
        KN_CHECK(kn_checkpoint_save(dir, &l, .step = step, .files = own, .file_count = 2));
    kn_checkpoint *c = kn_checkpoint_open(dir, NULL);
    KN_CHECK(c && kn_checkpoint_file_data(c, "none", &size) && size == 0);
    KN_CHECK(memcmp(kn_checkpoint_file_data(c, "words.txt", &size), text, sizeof text) == 0 &&
             size == sizeof text);
    KN_CHECK(step_of(c) == 2);
    path = temp_path("run/step-00000002/words.txt");
    flip_last_byte(path);
    KN_CHECK(step_of(kn_checkpoint_open(dir, NULL)) == 1);
    flip_last_byte(path);
    KN_CHECK(truncate(path, 3) == 0 && step_of(kn_checkpoint_open(dir, NULL)) == 1);
    end();
}

/* ---- state.json ------------------------------------------------------------------------------ */

/* Each of its bits, and a byte more or less; the folder is a checkpoint's. */
KN_TEST(damage, every_byte_of_the_state_is_under_a_checksum)
{
    char path[256], text[4096];
    begin();
    KN_CHECK(kn_checkpoint_save(dir, &l, .step = 1, .score = 0.25, .config = "{\"layers\": 4}"));
    snprintf(path, sizeof path, "%s", temp_path("run/step-00000001/state.json"));
    snprintf(dir, sizeof dir, "%s", temp_path("run/step-00000001"));
    KN_CHECK(step_of(kn_checkpoint_open(dir, NULL)) == 1);
    int fd = open(path, O_RDWR);
    ssize_t n = pread(fd, text, sizeof text, 0);
    KN_CHECK(n > 100 && n < (ssize_t)sizeof text);
    for (ssize_t at = 0; at < n; at++)
        for (int bit = 0; bit < 8; bit++) {
            char byte = (char)(text[at] ^ (1 << bit));
            KN_CHECK(pwrite(fd, &byte, 1, at) == 1);
            KN_CHECK(!kn_checkpoint_open(dir, NULL), "bit %d of byte %zd: %.20s", bit, at,
                     text + at);
            KN_CHECK(strlen(kn_error()) > 20);
            kn_clear_error();
            KN_CHECK(pwrite(fd, text + at, 1, at) == 1);
        }
    KN_CHECK(step_of(kn_checkpoint_open(dir, NULL)) == 1);
    KN_CHECK(pwrite(fd, " ", 1, n) == 1);
    REFUSED(kn_checkpoint_open(dir, NULL), "state.json isn't as it was saved");
    KN_CHECK(ftruncate(fd, n - 1) == 0);
    REFUSED(kn_checkpoint_open(dir, NULL), "state.json isn't as it was saved");
    close(fd);
    end();
}

/* Of a size that says nothing of the memory that there is. */
KN_TEST(damage, a_giant_state_gives_way)
{
    begin();
    for (int64_t step = 1; step < 3; step++)
        KN_CHECK(kn_checkpoint_save(dir, &l, .step = step));
    for (int i = 0; i < 2; i++) {
        off_t bytes = i ? (off_t)100 << 20 : (off_t)1 << 40;
        KN_CHECK(truncate(temp_path("run/step-00000002/state.json"), bytes) == 0);
        KN_CHECK(step_of(kn_checkpoint_open(dir, NULL)) == 1);
        REFUSED(kn_checkpoint_open(temp_path("run/step-00000002"), NULL), "state.json has 1");
    }
    end();
}

/* A state.json that no reader takes isn't written. */
KN_TEST(damage, a_giant_record_is_refused)
{
    const size_t size = (size_t)65 << 20;
    static const char head[] = "{\"a\": \"";
    char *text = malloc(size + 1);
    begin();
    KN_CHECK(text != NULL);
    memset(text, 'a', size);
    memcpy(text, head, sizeof head - 1);
    memcpy(text + size - 2, "\"}", 3);
    REFUSED(kn_checkpoint_save(dir, &l, .step = 1, .record = text), "state.json");
    KN_CHECK(!kn_run_folder_has_checkpoint(dir));
    free(text);
    end();
}

/* ---- a machine in trouble -------------------------------------------------------------------- */

/* Descriptors of which few are left say nothing of the newest checkpoint: it is opened, or there is
 * an error. A run that went on from the one before would remove it. */
KN_TEST(damage, no_descriptors_left_is_no_damage)
{
    struct rlimit before, few;
    int opened = 0;
    kn_linear m;
    begin();
    KN_CHECK(net_init(&m, NULL));
    with_optim = false;
    KN_CHECK(kn_spawn_threads(4, two_saves, dir) == 0 && getrlimit(RLIMIT_NOFILE, &before) == 0);
    int free = open("/dev/null",
                    O_RDONLY); /* the least number that is free, and as many as that are not */
    close(free);
    few = before;
    for (int left = 0; left < 6; left++) {
        few.rlim_cur = (rlim_t)(free + left);
        KN_CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
        kn_checkpoint *c = kn_checkpoint_open_checked(dir, NULL);
        bool loaded = c && kn_checkpoint_load(c, &m);
        KN_CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
        KN_CHECK(!c || kn_checkpoint_step(c) == 2, "with %d descriptors left", left);
        if (!loaded)
            KN_CHECK_ERROR("Too many open files");
        opened += loaded;
        kn_checkpoint_free(c);
    }
    KN_CHECK(opened >= 2, "with %d of 5 descriptors", opened);
    kn_module_free(&m);
    end();
}

/* ---- hostile counts -------------------------------------------------------------------------- */

/* Buffers that differ, times ranks: more than the tensors that are there. */
static int save_buffers(kn_comm *world, void *arg)
{
    OWNED_MODULE kn_batch_norm b = { 0 };
    kn_set_threads(1);
    EXPECT(kn_batch_norm_init(&b, NULL, NULL, 3) && kn_fsdp_wrap(&b, world, .seed = 1));
    EXPECT(kn_fill_(kn_module_buffer(&b, "running_mean"), kn_rank(world)) &&
           kn_fill_(kn_module_buffer(&b, "running_var"), kn_rank(world)));
    OWNED_OPTIM kn_optim *o = kn_sgd(&b, .lr = 0.1, .momentum = 0.9);
    EXPECT(kn_checkpoint_save(arg, &b, .optim = o, .step = 1));
    return 0;
}

KN_TEST(damage, more_ranks_of_buffers_than_tensors)
{
    OWNED_MODULE kn_batch_norm b = { 0 };
    snprintf(dir, sizeof dir, "%s", temp_path("run"));
    KN_CHECK(kn_spawn_threads(2, save_buffers, dir) == 0);
    /* 8 tensors of other ranks; the optimizer has 4 in all */
    forge_state(temp_path("run/step-00000001/state.json"), "\"buffer_ranks\": 2",
                "\"buffer_ranks\": 5");
    KN_CHECK(kn_batch_norm_init(&b, NULL, NULL, 3) && kn_fsdp_wrap(&b, NULL, .seed = 1));
    OWNED_OPTIM kn_optim *o = kn_sgd(&b, .lr = 0.1, .momentum = 0.9);
    kn_checkpoint *c = kn_checkpoint_open(dir, NULL);
    REFUSED(kn_checkpoint_load(c, &b, .optim = o), "aren't there");
    kn_checkpoint_free(c);
}

/* ---- saves in the background ----------------------------------------------------------------- */

/* A commit that fails is told while the training goes on, and the copy goes before it begins. */
static int failed_commit(kn_comm *world, void *arg)
{
    char path[400];
    OWNED_MODULE kn_linear m;
    kn_set_threads(1);
    EXPECT(net_init(&m, world));
    kn_run_folder *f = kn_run_folder_claim(arg);
    EXPECT(kn_checkpoint_save(arg, &m, .step = 1, .folder = f, .async = true));
    while (kn_checkpoint_poll(f) == KN_SAVE_RUNNING)
        usleep(200);
    EXPECT(kn_checkpoint_poll(f) == KN_SAVE_WRITTEN);
    EXPECT(kn_barrier(world, kn_compute_stream(KN_CPU), "written"));
    snprintf(path, sizeof path, "%s/step-00000001.saving", (char *)arg);
    if (kn_rank(world) == 0) { /* a shard goes, so the commit finds elements missing */
        glob_t found;
        char pattern[500];
        snprintf(pattern, sizeof pattern, "%s/model/shard-00001-*", path);
        EXPECT(glob(pattern, 0, NULL, &found) == 0 && unlink(found.gl_pathv[0]) == 0);
        globfree(&found);
    }
    kn_checkpoint_finish(f, true);
    EXPECT(kn_ledger_read().live[KN_MEM_CHECKPOINT] == 0, "the copy is no longer needed");
    while (kn_ok() && access(path, F_OK) == 0) { /* the next steps of the training */
        EXPECT(kn_checkpoint_poll(f) == KN_SAVE_NONE);
        usleep(200);
    }
    EXPECT(!kn_checkpoint_wait(f) && kn_ok());
    kn_run_folder_release(f);
    return 0;
}

KN_TEST(damage, a_commit_that_fails_is_told_at_the_next_step)
{
    for (int ranks = 2; ranks <= 4; ranks += 2) {
        KN_CHECK(kn_spawn_threads(ranks, failed_commit, (void *)temp_path("run")) == 0);
        remove_temp();
    }
}

/* Each rank has a module of its own, of which it writes all. */
static int own_module(kn_comm *world, void *arg)
{
    OWNED_MODULE kn_linear m;
    (void)arg;
    (void)world;
    EXPECT(net_init(&m, kn_comm_self()));
    int64_t bytes = kn_checkpoint_copy_bytes(&m);
    EXPECT(bytes == 128 + 64, "%lld bytes", (long long)bytes);
    return 0;
}

KN_TEST(damage, the_copy_of_a_module_on_few_ranks)
{
    KN_CHECK(kn_spawn_threads(2, own_module, NULL) == 0);
}
