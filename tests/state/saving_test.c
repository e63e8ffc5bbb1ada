/* tests/state/saving_test.c: the checkpoints of a run: which stay, which is best, what is taken
 * where one is damaged, saves in the background. */
#include "state/saving.h"
#include "tests/state/linear_run.h"
#include "tests/state/stored.h"

/* ---- which stay ------------------------------------------------------------------------------ */

KN_TEST(saving, the_newest_and_the_best_stay)
{
    static const struct {
        int64_t step;
        double score;
        const char *best, *gone;
    } saves[] = {
        { 10, 3, "step-00000010", "run/step-00000000" },
        { 20, 1, "step-00000020", "run/step-00000000" },
        { 30, 2, "step-00000020", "run/step-00000010" },         /* worse */
        { 40, NAN, "step-00000020", "run/step-00000010" },       /* no number */
        { 50, -INFINITY, "step-00000020", "run/step-00000030" }, /* diverged */
        { 60, 0, "step-00000020", "run/step-00000040" },         /* no evaluation */
        { 25, KN_ZERO, "step-00000025", "run/step-00000020" },   /* resumed from an older one */
        { 60, 0.5, "step-00000025", "run/step-00000050" },       /* replaces */
    };
    double score;
    begin();
    for (size_t i = 0; i < sizeof saves / sizeof *saves; i++) {
        KN_CHECK(kn_checkpoint_save(dir, &l, .step = saves[i].step, .score = saves[i].score,
                                    .keep = 2, .keep_best = true));
        KN_CHECK(links_to(saves[i].best) && !is_there(saves[i].gone) && newest() == saves[i].step,
                 "after save %zu", i);
    }
    KN_CHECK(step_of(kn_checkpoint_open(temp_path("run/best"), NULL)) == 25);
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
    KN_CHECK(links_to("step-00000025") && is_there("run/step-00000025/state.json"));
    kn_run_folder_release(f);
    end();
}

/* ---- damage ---------------------------------------------------------------------------------- */

KN_TEST(saving, the_newest_whole_one_is_taken)
{
    begin();
    for (int64_t step = 1; step < 6; step++)
        KN_CHECK(kn_checkpoint_save(dir, &l, .step = step));
    KN_CHECK(newest() == 5);
    cut("step-00000005");
    KN_CHECK(newest() == 4 && unlink(model_file("step-00000004")) == 0 && newest() == 3);
    write_temp("run/step-00000003/state.json", "{\"version\": 3", 13);
    KN_CHECK(newest() == 2);
    /* bytes of the header change, the size doesn't */
    FILE *f = fopen(model_file("step-00000002"), "r+");
    KN_CHECK(f && fseek(f, 60, SEEK_SET) == 0 && fputc('~', f) != EOF && fclose(f) == 0);
    KN_CHECK(newest() == 1);
    KN_CHECK_OK();
    KN_CHECK(step_of(kn_checkpoint_open(temp_path("run/step-00000001"), NULL)) == 1);
    REFUSED(kn_checkpoint_open(temp_path("run/step-00000005"), NULL), "step-00000005");
    KN_CHECK(unlink(model_file("step-00000001")) == 0);
    REFUSED(kn_checkpoint_open(dir, NULL), "no other checkpoint");
    end();
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
    char state[300];
    begin();
    snprintf(state, sizeof state, "%s/step-00000001/state.json", dir);
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
    end();
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
    net m, again;
    kn_state *then = NULL, *then_o = NULL;
    (void)arg;
    kn_set_threads(1);
    kn_run_folder *f = kn_run_folder_claim(dir);
    EXPECT(f && net_init(&m, KN_META) && net_wrap(&m, world, &ways[0]) &&
           net_other(&again, world, &ways[2]));
    kn_optim *o = kn_adamw(&m, .lr = 0.01), *p = kn_adamw(&again, .lr = 1);
    EXPECT(net_step(&m, o, world, 0) && kn_checkpoint_poll(f) == KN_SAVE_NONE &&
           kn_checkpoint_wait(f));
    int64_t bytes = kn_checkpoint_copy_bytes(&m, .optim = o);
    for (int step = 1; step < 4; step++) { /* the third waits for the second */
        kn_state_free(then), kn_state_free(then_o);
        EXPECT((then = kn_state_dict(&m)) && (then_o = kn_optim_state_dict(o)));
        EXPECT(kn_checkpoint_save(dir, &m, .optim = o, .step = step, .folder = f, .async = true,
                                  .keep = 2));
        EXPECT(copies() == bytes && (bytes > 0 || kn_rank(world) > 0), "%lld bytes, not %lld",
               (long long)copies(), (long long)bytes);
        EXPECT(net_step(&m, o, world, step));
        if (step == 1) { /* ranks tell each other in their own way */
            EXPECT(end_of_part(f) == KN_SAVE_WRITTEN);
            EXPECT(kn_barrier(world, kn_compute_stream(KN_CPU), "told"));
            kn_checkpoint_finish(f, true);
            while (f->saving && atomic_load(&f->saving->result) == KN_SAVE_RUNNING)
                usleep(200);
            EXPECT(kn_checkpoint_poll(f) == KN_SAVE_NONE && !f->saving, "the save isn't over");
        }
    }
    EXPECT(kn_checkpoint_wait(f) && copies() == 0);
    kn_checkpoint *c = kn_checkpoint_open(dir, NULL);
    EXPECT(c && kn_checkpoint_load(c, &again, .optim = p));
    kn_state *now = kn_state_dict(&again), *now_o = kn_optim_state_dict(p);
    EXPECT(now && now_o && same_states(now, then) && same_states(now_o, then_o), "%s", kn_error());
    EXPECT(is_there("run/step-00000002") && !is_there("run/step-00000001"));
    kn_checkpoint_free(c);
    kn_state_free(then), kn_state_free(then_o), kn_state_free(now), kn_state_free(now_o);
    kn_run_folder_release(f);
    EXPECT(has_its_timeout(world));
    kn_optim_free(o), kn_optim_free(p);
    kn_module_free(&m), kn_module_free(&again);
    return 0;
}

/* A save that fails is told, and the training goes on: where no folder can be made, and where a
 * value isn't finite. The next claim removes all of one that is given up. */
static int failing_saves(kn_comm *world, void *arg)
{
    net m;
    (void)arg;
    kn_set_threads(1);
    EXPECT(net_init(&m, KN_META) && net_wrap(&m, world, &ways[0]));
    kn_optim *o = kn_adamw(&m, .lr = 0.01);
    EXPECT(net_step(&m, o, world, 0));
    kn_run_folder *f = kn_run_folder_claim(dir);
#define SAVE(number, ...)                                                                          \
    kn_checkpoint_save(dir, &m, .optim = o, .step = (number), .folder = f, __VA_ARGS__)
    EXPECT(SAVE(1, 0));
    if (kn_rank(world) == 0) /* more than a save removes */
        make("run/step-00000002.saving/a/a/a/a/a");
    EXPECT(SAVE(2, .async = true));
    EXPECT(kn_checkpoint_poll(f) == KN_SAVE_NONE && !kn_checkpoint_wait(f) && kn_ok());
    kn_tensor *state = kn_optim_state(o, 0, "exp_avg");
    const bool has = kn_numel(state) > 0;
    EXPECT(!has || kn_fill_(state, NAN));
    EXPECT(SAVE(3, .async = true) && !kn_checkpoint_wait(f) && kn_ok() && copies() == 0);
    EXPECT(newest() == 1 && !is_there("run/step-00000003.saving"));
    EXPECT(!has || kn_fill_(state, 0));
    EXPECT(SAVE(4, .async = true) && kn_checkpoint_wait(f) && newest() == 4);
    EXPECT(SAVE(5, .async = true));
    kn_run_folder_release(f); /* gives it up, on each rank when it likes */
    EXPECT(kn_ok() && copies() == 0);
    EXPECT((f = kn_run_folder_claim(dir)) != NULL);
    EXPECT(newest() == 4 && !is_there("run/step-00000005.saving"));
    kn_run_folder_release(f);
    kn_optim_free(o);
    kn_module_free(&m);
    return 0;
}

KN_TEST(saving, beside_the_training)
{
    for (int ranks = 1; ranks <= 4; ranks *= 2) {
        begin();
        KN_CHECK(kn_spawn_threads(ranks, in_the_background, NULL) == 0);
        end();
    }
}

KN_TEST(saving, a_failed_one_does_not_stop_the_training)
{
    for (int ranks = 1; ranks <= 2; ranks++) {
        begin();
        KN_CHECK(kn_spawn_threads(ranks, failing_saves, NULL) == 0);
        end();
    }
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
    for (int i = 0; i < 4; i++) {
        make(i < 2 ? "run" : "run/step-00000003");
        snprintf(dir, sizeof dir, "%s", temp_path("run"));
        write_temp(i < 2 ? "run/state.json" : "run/step-00000003/state.json", text[i % 2],
                   strlen(text[i % 2]));
        REFUSED(kn_checkpoint_open(dir, NULL), says[i % 2]);
        KN_CHECK(kn_run_folder_has_checkpoint(dir));
        remove_temp();
    }
}
