/* tests/state/saving_test.c: the checkpoints of a run: which stay, which is best, what is taken
 * where one is damaged, saves in the background. */
#include "knap.h"
#include "tests/comm/comm_test.h"
#include "tests/models/temp.h"
#include "tests/refused.h"
#include "tests/state/forged.h"

#include <math.h>

typedef struct net {
    kn_module base;
    kn_linear a, b;
} net;

static kn_tensor *net_forward(kn_module *self, kn_tensor *x) /* (B, 5) -> (B, 3) */
{
    net *n = (net *)self;
    return kn_call(&n->b, kn_tanh(kn_call(&n->a, x)));
}

typedef struct run {
    net n;
    kn_optim *optim;
} run;

static bool run_init(run *r, kn_layout_kind layout)
{
    *r = (run){ 0 };
    kn_seed(7);
    return kn_module_init(&r->n.base, net_forward) &&
           kn_module_defaults(&r->n, .device = KN_META) &&
           kn_linear_init(&r->n.a, &r->n.base, "a", 5, 7) &&
           kn_linear_init(&r->n.b, &r->n.base, "b", 7, 3) &&
           kn_fsdp_wrap(&r->n, kn_world(), .wrap_class = "linear", .layout = layout, .seed = 42) &&
           (r->optim = kn_adamw(&r->n, .lr = 0.01)) != NULL;
}

static void run_free(run *r)
{
    kn_optim_free(r->optim);
    kn_module_free(&r->n);
}

/* Steps of four micro-batches, shared by the ranks. */
static bool train(run *r, int64_t from, int64_t to)
{
    const int ranks = kn_comm_size(kn_world());
    for (int64_t step = from; step < to && kn_ok(); step++) {
        kn_scope scope = kn_scope_begin();
        for (int a = 0; a < 4 / ranks; a++) {
            uint64_t micro = (uint64_t)(step * 4 + a * ranks + kn_rank(kn_world()));
            kn_tensor *x = kn_randn(KN_F32, KN_CPU, 4, micro, KN_SHAPE(2, 5));
            kn_tensor *y = kn_call(&r->n, x);
            kn_backward(kn_sum(kn_mul(y, y), 0, NULL, false));
        }
        kn_step(r->optim);
        kn_scope_end(scope);
    }
    return kn_ok();
}

/* All parameters and states, whole, in one buffer. */
enum { WHOLE = 3 * (5 * 7 + 7 + 7 * 3 + 3) };
static bool whole(run *r, float *to)
{
    const kn_param *p;
    int n = kn_params(&r->n, &p);
    bool ok = true;
    for (int i = 0; ok && i < n; i++) {
        ok =
            kn_param_read(&r->n, i, to) &&
            kn_shard_read(&r->n, i, kn_optim_state(r->optim, i, "exp_avg"), to + p[i].numel) &&
            kn_shard_read(&r->n, i, kn_optim_state(r->optim, i, "exp_avg_sq"), to + 2 * p[i].numel);
        to += 3 * p[i].numel;
    }
    return ok;
}

static bool load(run *r, const char *dir)
{
    kn_checkpoint *c = kn_checkpoint_open(dir, NULL);
    bool ok = c && kn_checkpoint_load(c, &r->n, .optim = r->optim);
    kn_checkpoint_free(c);
    return ok;
}

static bool is_there(const char *dir, const char *name)
{
    char path[400];
    struct stat st;
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return lstat(path, &st) == 0;
}

static bool links_to(const char *dir, const char *want)
{
    char path[400], name[64];
    snprintf(path, sizeof path, "%s/best", dir);
    ssize_t n = readlink(path, name, sizeof name - 1);
    name[n > 0 ? n : 0] = 0;
    return strcmp(name, want) == 0;
}

static int64_t newest(const char *dir)
{
    kn_checkpoint *c = kn_checkpoint_open(dir, NULL);
    int64_t step = c ? kn_checkpoint_step(c) : -1;
    kn_checkpoint_free(c);
    return step;
}

/* ---- which stay ------------------------------------------------------------------------------ */

KN_TEST(saving, the_newest_and_the_best_stay)
{
    static const struct {
        int64_t step;
        double score;
        const char *best, *gone;
    } saves[] = {
        { 10, 3, "step-00000010", "step-00000000" },
        { 20, 1, "step-00000020", "step-00000000" },
        { 30, 2, "step-00000020", "step-00000010" },         /* worse */
        { 40, NAN, "step-00000020", "step-00000010" },       /* no number */
        { 50, -INFINITY, "step-00000020", "step-00000030" }, /* diverged */
        { 60, 0, "step-00000020", "step-00000040" },         /* no evaluation */
        { 25, KN_ZERO, "step-00000025", "step-00000020" },   /* resumed from an older one */
        { 60, 0.5, "step-00000025", "step-00000050" },       /* replaces */
    };
    kn_linear l = { 0 };
    double score;
    const char *dir = temp_path("run");
    KN_CHECK(kn_linear_init(&l, NULL, NULL, 2, 2) && kn_materialize(&l, KN_CPU, 1));
    for (size_t i = 0; i < sizeof saves / sizeof *saves; i++) {
        KN_CHECK(kn_checkpoint_save(dir, &l, .step = saves[i].step, .score = saves[i].score,
                                    .keep = 2, .keep_best = true),
                 "%s", kn_error());
        KN_CHECK(links_to(dir, saves[i].best), "after save %zu", i);
        KN_CHECK(!is_there(dir, saves[i].gone), "after save %zu", i);
        KN_CHECK(newest(dir) == saves[i].step, "after save %zu", i);
    }
    KN_CHECK(newest(temp_path("run/best")) == 25, "%s", kn_error());
    kn_run_folder *f = kn_run_folder_claim(dir);
    KN_CHECK(kn_run_folder_best(f, &score) == 25 && score == 0);
    REFUSED(kn_checkpoint_save(dir, &l, .folder = f, .keep = -1), ".keep is -1");
    REFUSED(kn_checkpoint_save(dir, &l, .async = true), ".async needs .folder");
    REFUSED(kn_checkpoint_save(dir, &l, .record = "[]"), ".record is no JSON object");
    const kn_checkpoint_file bad = { "../x", "x", 1 };
    REFUSED(kn_checkpoint_save(dir, &l, .files = &bad, .file_count = 1), ".files[0] is ../x");
    /* without .keep_best the link stays, and so does what it names */
    for (int64_t step = 70; step < 74; step++)
        KN_CHECK(kn_checkpoint_save(dir, &l, .folder = f, .step = step, .keep = 1));
    KN_CHECK(links_to(dir, "step-00000025") && is_there(dir, "step-00000025/state.json"));
    kn_run_folder_release(f);
    kn_module_free(&l);
    remove_temp();
}

/* ---- damage ---------------------------------------------------------------------------------- */

static const char *model_file(const char *step)
{
    static char name[128];
    snprintf(name, sizeof name, "run/%s/model/shard-00001-model-00001-of-00001.safetensors", step);
    return name;
}

KN_TEST(saving, the_newest_whole_one_is_taken)
{
    kn_linear l = { 0 };
    char dir[256], named[300];
    snprintf(dir, sizeof dir, "%s", temp_path("run"));
    KN_CHECK(kn_linear_init(&l, NULL, NULL, 2, 2) && kn_materialize(&l, KN_CPU, 1));
    for (int64_t step = 1; step < 6; step++)
        KN_CHECK(kn_checkpoint_save(dir, &l, .step = step));
    KN_CHECK(newest(dir) == 5);
    KN_CHECK(truncate(temp_path(model_file("step-00000005")), 100) == 0 && newest(dir) == 4);
    KN_CHECK(unlink(temp_path(model_file("step-00000004"))) == 0 && newest(dir) == 3);
    write_temp("run/step-00000003/state.json", "{\"version\": 3", 13);
    KN_CHECK(newest(dir) == 2, "%s", kn_error());
    /* bytes of the header change, the size doesn't */
    FILE *f = fopen(temp_path(model_file("step-00000002")), "r+");
    KN_CHECK(f && fseek(f, 60, SEEK_SET) == 0 && fputc('~', f) != EOF && fclose(f) == 0);
    KN_CHECK(newest(dir) == 1, "%s", kn_error());
    KN_CHECK_OK();
    snprintf(named, sizeof named, "%s/step-00000001", dir);
    KN_CHECK(newest(named) == 1, "%s", kn_error());
    snprintf(named, sizeof named, "%s/step-00000005", dir);
    REFUSED(kn_checkpoint_open(named, NULL), "step-00000005");
    KN_CHECK(unlink(temp_path(model_file("step-00000001"))) == 0);
    REFUSED(kn_checkpoint_open(dir, NULL), "no other checkpoint");
    kn_module_free(&l);
    remove_temp();
}

/* state.json from a stranger: a sentence, whatever it holds. */
KN_TEST(saving, a_hostile_state)
{
    static const char *const bad[][2] = {
        { "[]", "no JSON object" },
        { "{\"a\": 3}", "is of version 0" },
        { "{\"version\": 4}", "is of version 4" },
        { "{\"version\": 3}", "\"step\" is missing" },
        { "{\"version\": 3, \"step\": 1}", "\"number\" is missing" },
        { "{\"version\": 3, \"step\": 1, \"number\": 1}", "its id is no id" },
        { "{\"version\": 3, \"step\": 1, \"number\": 1, \"replaces\": [7, \"x\"], \"id\": "
          "\"012345678901234567890123456789012345678\xc3\xa4\"}",
          "its id is no id" },
        { "{\"version\": 3, \"step\": 1, \"number\": 1, \"id\": \"a\", \"buffer_ranks\": 9000000}",
          "\"buffer_ranks\" is missing" },
        { "{\"version\": 3, \"step\": 1, \"number\": 1, \"id\": \"a\", \"buffer_ranks\": 1, "
          "\"model\": 7}",
          "\"model\" is missing" },
    };
    static const char none[] = "\"own_files\": []", list[] = "\n \"files\": [";
    static const char *const changed[][3] = {
        { list, "\"files\": [{\"name\": \"model/../../x\"}, ", "the checkpoint is damaged" },
        { list, "\"files\": [7, {\"name\": []}, ", "the checkpoint is damaged" },
        { list, "\"files\": 7, \"more\": [", "the checkpoint is damaged" },
        { none, "\"own_files\": [{\"name\": \"/etc/passwd\"}]", "other than the name of a file" },
        { none, "\"own_files\": [4, {\"name\": \"..\"}]", "other than the name of a file" },
        { none, "\"own_files\": [{\"name\": \"state.json\"}]", "other than the name of a file" },
        { none, "\"own_files\": [{\"name\": \"model\"}]", "other than the name of a file" },
    };
    kn_linear l = { 0 };
    char dir[256], state[300];
    snprintf(dir, sizeof dir, "%s", temp_path("run"));
    snprintf(state, sizeof state, "%s/step-00000001/state.json", dir);
    KN_CHECK(kn_linear_init(&l, NULL, NULL, 2, 2) && kn_materialize(&l, KN_CPU, 1));
    KN_CHECK(kn_checkpoint_save(dir, &l, .step = 1));
    for (size_t i = 0; i < sizeof changed / sizeof *changed; i++) {
        forge_state(state, changed[i][0], changed[i][1]);
        REFUSED(kn_checkpoint_open(dir, NULL), changed[i][2]);
        forge_state(state, changed[i][1], changed[i][0]);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        put_state(state, bad[i][0]);
        REFUSED(kn_checkpoint_open(dir, NULL), bad[i][1]);
    }
    kn_module_free(&l);
    remove_temp();
}

/* ---- saves in the background ----------------------------------------------------------------- */

static int64_t copies(void)
{
    return kn_ledger_read().live[KN_MEM_CHECKPOINT];
}

/* Until this rank's part is on the disk, or isn't. */
static kn_save_state end_of_part(kn_run_folder *f)
{
    kn_save_state s;
    while ((s = kn_checkpoint_poll(f)) == KN_SAVE_RUNNING)
        usleep(200);
    return s;
}

/* The training goes on while the state of its step is written. */
static int in_the_background(kn_comm *world, void *arg)
{
    const char *dir = arg;
    run r, again;
    float then[WHOLE], saved[WHOLE];
    kn_set_threads(1);
    kn_run_folder *f = kn_run_folder_claim(dir);
    EXPECT(f && run_init(&r, KN_LAYOUT_FLAT) && train(&r, 0, 1));
    EXPECT(kn_checkpoint_poll(f) == KN_SAVE_NONE && kn_checkpoint_wait(f));
    int64_t bytes = kn_checkpoint_copy_bytes(&r.n, .optim = r.optim);
    for (int64_t step = 1; step < 4; step++) { /* the third waits for the second */
        EXPECT(whole(&r, then));
        EXPECT(kn_checkpoint_save(dir, &r.n, .optim = r.optim, .step = step, .folder = f,
                                  .async = true, .keep = 2));
        EXPECT(copies() == bytes && bytes > 0, "%lld bytes, not %lld", (long long)copies(),
               (long long)bytes);
        EXPECT(train(&r, step, step + 1));
        if (step == 1) { /* ranks tell each other in their own way */
            EXPECT(end_of_part(f) == KN_SAVE_WRITTEN);
            EXPECT(kn_barrier(world, kn_compute_stream(KN_CPU), "told"));
            kn_checkpoint_finish(f, true);
            EXPECT(kn_checkpoint_poll(f) == KN_SAVE_NONE);
        }
    }
    EXPECT(kn_checkpoint_wait(f) && copies() == 0);
    EXPECT(run_init(&again, KN_LAYOUT_RAGGED) && load(&again, dir) && whole(&again, saved));
    EXPECT(memcmp(then, saved, sizeof then) == 0);
    EXPECT(is_there(dir, "step-00000002") && !is_there(dir, "step-00000001"));
    kn_run_folder_release(f);
    run_free(&r);
    run_free(&again);
    return 0;
}

/* A save that fails is told, and the training goes on: where no folder can be made, and where a
 * value isn't finite. The next claim removes all of one that is given up. */
static int failing_saves(kn_comm *world, void *arg)
{
    const char *dir = arg;
    run r;
    kn_set_threads(1);
    EXPECT(run_init(&r, KN_LAYOUT_FLAT) && train(&r, 0, 1));
    kn_run_folder *f = kn_run_folder_claim(dir);
    EXPECT(kn_checkpoint_save(dir, &r.n, .optim = r.optim, .step = 1, .folder = f));
    char path[300];
    int n = snprintf(path, sizeof path, "%s/step-00000002.saving", dir);
    for (int deep = 0; kn_rank(world) == 0 && deep < 6; deep++) { /* more than a save removes */
        mkdir(path, 0777);
        n += snprintf(path + n, sizeof path - (size_t)n, "/a");
    }
    EXPECT(kn_checkpoint_save(dir, &r.n, .optim = r.optim, .step = 2, .folder = f, .async = true));
    EXPECT(kn_checkpoint_poll(f) == KN_SAVE_NONE && !kn_checkpoint_wait(f) && kn_ok());
    kn_tensor *state = kn_optim_state(r.optim, 0, "exp_avg");
    const bool has = kn_numel(state) > 0;
    EXPECT(!has || kn_fill_(state, NAN));
    EXPECT(kn_checkpoint_save(dir, &r.n, .optim = r.optim, .step = 3, .folder = f, .async = true));
    EXPECT(!kn_checkpoint_wait(f) && kn_ok() && copies() == 0);
    EXPECT(newest(dir) == 1 && !is_there(dir, "step-00000003.saving"));
    EXPECT(!has || kn_fill_(state, 0));
    EXPECT(kn_checkpoint_save(dir, &r.n, .optim = r.optim, .step = 4, .folder = f, .async = true));
    EXPECT(kn_checkpoint_wait(f) && newest(dir) == 4);
    EXPECT(kn_checkpoint_save(dir, &r.n, .optim = r.optim, .step = 5, .folder = f, .async = true));
    kn_run_folder_release(f); /* gives it up, on each rank when it likes */
    EXPECT(kn_ok() && copies() == 0);
    EXPECT((f = kn_run_folder_claim(dir)) != NULL);
    EXPECT(newest(dir) == 4 && !is_there(dir, "step-00000005.saving"));
    kn_run_folder_release(f);
    run_free(&r);
    return 0;
}

KN_TEST(saving, beside_the_training)
{
    for (int ranks = 1; ranks <= 4; ranks *= 2) {
        char name[16];
        snprintf(name, sizeof name, "run%d", ranks);
        KN_CHECK(kn_spawn_threads(ranks, in_the_background, (void *)temp_path(name)) == 0);
    }
    remove_temp();
}

KN_TEST(saving, a_failed_one_does_not_stop_the_training)
{
    for (int ranks = 1; ranks <= 2; ranks++) {
        char name[16];
        snprintf(name, sizeof name, "run%d", ranks);
        KN_CHECK(kn_spawn_threads(ranks, failing_saves, (void *)temp_path(name)) == 0);
    }
    remove_temp();
}

/* ---- other versions -------------------------------------------------------------------------- */

/* Files of before the third version get a sentence, in a run's folder as in a checkpoint's. */
KN_TEST(saving, older_versions_get_a_sentence)
{
    static const char *const text[] = {
        "{\"version\": 1, \"save\": \"ab\", \"step\": 3, \"model\": {}, \"options\": {}}",
        "{\"version\": 2, \"step\": 3, \"number\": 1, \"id\": \"ab\"}",
    };
    static const char *const says[] = { "state.json is of version 1, and version 3 is read",
                                        "state.json is of version 2, and version 3 is read" };
    char dir[256];
    for (int i = 0; i < 4; i++) {
        const char *name = i < 2 ? "state.json" : "step-00000003/state.json";
        KN_CHECK(i < 2 || mkdir(temp_path("step-00000003"), 0777) == 0);
        write_temp(name, text[i % 2], strlen(text[i % 2]));
        snprintf(dir, sizeof dir, "%s", temp_path("."));
        REFUSED(kn_checkpoint_open(dir, NULL), says[i % 2]);
        KN_CHECK(kn_run_folder_has_checkpoint(dir));
        remove_temp();
    }
}
