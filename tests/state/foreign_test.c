/* tests/state/foreign_test.c: models of other programs in several files with an index, as Hugging
 * Face's libraries write them, opened as a state and as a checkpoint. */
#include "tests/failing.h"
#include "tests/kn_test.h"
#include "tests/state/stored.h"

#include <errno.h>
#include <sys/stat.h>

#define INDEX "model.safetensors.index.json"

/* The folder that temp_path gives: the net's state in two files, and its index. */
static bool write_files(net *m, const char *dir)
{
    char path[2][300], text[4096] = "{\"metadata\": {\"total_size\": 1}, \"weight_map\": {";
    kn_state *all = kn_state_dict(m), *part[2] = { kn_state_new(), kn_state_new() };
    bool ok = all && part[0] && part[1] && (mkdir(dir, 0777) == 0 || errno == EEXIST);
    for (int i = 0; ok && i < kn_state_count(all); i++) {
        const char *name = kn_state_name(all, i);
        const size_t at = strlen(text);
        ok = kn_state_set_tensor(part[i % 2], name, kn_state_tensor(all, name));
        snprintf(text + at, sizeof text - at, "%s\"%s\": \"model-%05d-of-00002.safetensors\"",
                 i ? ", " : "", name, i % 2 + 1);
    }
    strcat(text, "}}");
    for (int k = 0; ok && k < 2; k++) {
        snprintf(path[k], sizeof *path, "%s/model-%05d-of-00002.safetensors", dir, k + 1);
        ok = kn_state_save(part[k], path[k]);
    }
    snprintf(path[0], sizeof *path, "%s/" INDEX, dir);
    FILE *f = ok ? fopen(path[0], "w") : NULL;
    ok = f && fputs(text, f) >= 0 && fclose(f) == 0;
    kn_state_free(all), kn_state_free(part[0]), kn_state_free(part[1]);
    return ok;
}

static char *index_of(const char *dir)
{
    static _Thread_local char path[300];
    snprintf(path, sizeof path, "%s/" INDEX, dir);
    return path;
}

/* ---- opened and loaded ----------------------------------------------------------------------- */

typedef struct job {
    const way *w;
    char dir[256];
} job;

/* As a state and as a checkpoint, by the folder and by its index. */
static int loads(kn_comm *world, void *arg)
{
    const job *j = arg;
    net ref;
    EXPECT(net_reference(&ref), "init");
    for (int how = 0; how < 4; how++) {
        OWNED_MODULE net m;
        stored t = { 0 };
        const char *path = how % 2 ? index_of(j->dir) : j->dir;
        EXPECT(net_other(&m, world, j->w), "init");
        kn_ledger_reset_peaks();
        if (how < 2)
            t.s = kn_state_open(path);
        else
            t.c = kn_checkpoint_open(path, world);
        EXPECT((t.s || t.c) && LOAD(&t, &m, NULL, 0) && all_read_as(&m, &ref), "how %d", how);
        EXPECT(kn_ledger_read().peak[KN_MEM_STATE] == 0, "a rank took a whole tensor");
        EXPECT(!t.c || (kn_checkpoint_step(t.c) == 0 && kn_checkpoint_has(t.c, "ln.bias") &&
                        strcmp(kn_checkpoint_config(t.c), "{}") == 0),
               "what it says");
        stored_free(&t);
        t = (stored){ .s = kn_rank(world) == 0 ? kn_state_open(path) : NULL };
        EXPECT(how > 0 || kn_load_state_dict(&m, t.s, .from_rank0 = true), "dealt out");
        stored_free(&t);
    }
    kn_module_free(&ref);
    return !kn_ok();
}

KN_TEST(foreign, opened_by_a_sharded_module)
{
    net m;
    job j = { 0 };
    snprintf(j.dir, sizeof j.dir, "%s", temp_path("model"));
    KN_CHECK(net_reference(&m) && write_files(&m, j.dir));
    kn_module_free(&m);
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        for (int i = 0; i < WAYS; i++) {
            j.w = &ways[i];
            if (!ways[i].ranks || ways[i].ranks == ranks)
                on_threads(ranks, loads, &j);
        }
}

/* A tensor's bytes are read when it is wanted; the state can be saved and merged. */
KN_TEST(foreign, tensors_are_read_when_wanted)
{
    net m, other;
    const char *dir = temp_path("model"), *file = temp_path("one.safetensors");
    KN_CHECK(net_reference(&m) && net_other(&other, NULL, NULL) && write_files(&m, dir));
    kn_state *s = kn_state_open(dir), *more = kn_state_new();
    KN_CHECK(s && kn_ledger_read().live[KN_MEM_STATE] == 0);
    KN_CHECK(same_bytes(kn_state_tensor(s, "ln.bias"), kn_module_param(&m, "ln.bias")) &&
             kn_ledger_read().live[KN_MEM_STATE] > 0);
    KN_CHECK(kn_state_set_int(more, "epoch", 3) && kn_state_merge(s, more) &&
             kn_state_save(s, file));
    kn_state_free(s);
    s = kn_state_open(file);
    KN_CHECK(s && kn_state_int(s, "epoch") == 3 && kn_load_state_dict(&other, s) &&
             same_modules(&m, &other, NULL, NULL));
    kn_state_free(s);
    s = kn_state_open(dir);
    KN_CHECK(s && write_files(&other, dir)); /* new files under the same names */
    KN_CHECK(kn_load_state_dict(&other, s), "the old ones are open: %s", kn_error());
    kn_state_free(s);
    kn_module_free(&m), kn_module_free(&other);
}

/* ---- what is refused ------------------------------------------------------------------------- */

static const struct {
    const char *index, *text;
} bad[] = {
    { "{", "line 1" },
    { "[]", "no weight_map" },
    { "{\"weight_map\": 7}", "no weight_map" },
    { "{\"weight_map\": {}}", "no weight_map" },
    { "{\"weight_map\": {\"ln.bias\": \"../x.safetensors\"}}", "no name of a file in this folder" },
    { "{\"weight_map\": {\"ln.bias\": \"/etc/passwd\"}}", "no name of a file in this folder" },
    { "{\"weight_map\": {\"ln.bias\": 7}}", "no name of a file in this folder" },
    { "{\"weight_map\": {\"ln.bias\": \"\"}}", "no name of a file in this folder" },
    { "{\"weight_map\": {\"ln.bias\": \"..\"}}", "/.." },
    { "{\"weight_map\": {\"ln.bias\": \"" INDEX "\"}}", INDEX },
    { "{\"weight_map\": {\"ln.bias\": \"gone.safetensors\"}}", "gone.safetensors: cannot open" },
    { "{\"weight_map\": {\"none\": \"model-00001-of-00002.safetensors\"}}", "isn't in the file" },
    { "{\"weight_map\": {\"scale\": \"model-00001-of-00002.safetensors\"}, \"weight_map\": {}}",
      "duplicate" },
};

KN_TEST(foreign, an_index_of_a_stranger)
{
    OWNED_MODULE net m;
    const char *dir = temp_path("model");
    KN_CHECK(net_reference(&m) && write_files(&m, dir));
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        FILE *f = fopen(index_of(dir), "w");
        KN_CHECK(f && fputs(bad[i].index, f) >= 0 && fclose(f) == 0);
        REFUSED(kn_state_open(dir), bad[i].text);
        REFUSED(kn_state_open(index_of(dir)), bad[i].text);
        REFUSED(kn_checkpoint_open(dir, NULL), bad[i].text);
    }
    KN_CHECK(remove(index_of(dir)) == 0);
    REFUSED(kn_checkpoint_open(index_of(dir), NULL), "there is no such folder");
    KN_CHECK(mkfifo(index_of(dir), 0600) == 0);
    REFUSED(kn_state_open(dir), "not a regular file");
    KN_CHECK(remove(index_of(dir)) == 0 && mkdir(temp_path("empty"), 0777) == 0);
    REFUSED(kn_checkpoint_open(temp_path("empty"), NULL), "holds no checkpoint");
    REFUSED(kn_state_open(temp_path("empty")), "no file in this folder ends in .safetensors");
}

typedef struct opening {
    const char *dir;
    bool checkpoint;
    stored t;
} opening;

static bool opens(void *arg)
{
    opening *o = arg;
    if (o->checkpoint)
        o->t.c = kn_checkpoint_open(o->dir, NULL);
    else
        o->t.s = kn_state_open(o->dir);
    return o->t.c || o->t.s;
}

KN_TEST(foreign, memory_runs_out)
{
    OWNED_MODULE net m;
    const char *dir = temp_path("model");
    KN_CHECK(net_reference(&m) && write_files(&m, dir));
    for (int how = 0; how < 2; how++) {
        opening o = { .dir = dir, .checkpoint = how };
        each_allocation_fails(opens, NULL, &o, 20);
        stored_free(&o.t);
    }
}
