/* Merges that end in the middle: no reader takes what they leave, and the next one replaces it;
 * nothing of others is touched. */
#include "state/merge.h"
#include "tests/state/place.h"
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>

#define TENSORS 5

/* Tensors "0" to "4" of two numbers, in one file. */
static kn_pieces *begin(void)
{
    kn_piece piece[TENSORS];
    static const float values[2 * TENSORS] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 };
    static const char *const name[TENSORS] = { "0", "1", "2", "3", "4" };
    place_begin();
    KN_CHECK(mkdir(temp_path("from"), 0777) == 0 && mkdir(temp_path("out"), 0777) == 0);
    for (int i = 0; i < TENSORS; i++)
        piece[i] = (kn_piece){ name[i], KN_F32, 1, { 2 }, { 0, 2, 1, 2, 0 } };
    kn_pieces_writer *w = kn_pieces_create(temp_path("from"), 0, "c0ffee", NULL, piece, TENSORS);
    KN_CHECK(w && kn_pieces_append(w, values, sizeof values) && kn_pieces_commit(w));
    kn_pieces *p = kn_pieces_open(temp_path("from"));
    KN_CHECK(p);
    return p;
}

static void end(kn_pieces *p)
{
    kn_pieces_close(p);
    remove_temp();
}

static void die(int64_t bytes, void *arg)
{
    int *left = arg;
    if (bytes > 0 && --*left == 0)
        raise(SIGKILL);
}

/* A merge that is killed after so many tensors. */
static void merge_and_die(kn_pieces *p, int64_t most, int tensors)
{
    int status;
    pid_t child = fork();
    if (child == 0) {
        kn_pieces_merge(p, temp_path("out"), most, NULL, die, &tensors);
        _exit(1);
    }
    KN_CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
}

static void is_refused(const char *text)
{
    kn_pieces *got = kn_pieces_open(temp_path("out"));
    KN_CHECK(!got && strstr(kn_error(), text));
    kn_clear_error();
}

static void merges(kn_pieces *p, int64_t most, int files)
{
    float two[2];
    KN_CHECK(kn_pieces_merge(p, temp_path("out"), most, NULL, NULL, NULL));
    kn_pieces *got = kn_pieces_open(temp_path("out"));
    KN_CHECK(got && kn_pieces_count(got) == TENSORS);
    KN_CHECK(kn_pieces_read(got, 3, (kn_interval){ 0, 2, 1, 2, 0 }, two) && two[1] == 7);
    kn_pieces_close(got);
    KN_CHECK(clear_folder("out") == files);
}

KN_TEST(merge, the_next_merge_replaces_what_a_dead_one_left)
{
    kn_pieces *p = begin();
    for (int tensors = 1; tensors <= TENSORS; tensors++) {
        merge_and_die(p, 8, tensors); /* a file a tensor, and the last isn't finished */
        is_refused(tensors < TENSORS ? "is one of 5 files" : "not a safetensors file");
        merge_and_die(p, 16, 1); /* the next one dies as well */
        is_refused("");
        merges(p, tensors % 2 ? 16 : 0, tensors % 2 ? 4 : 1);
        merge_and_die(p, 0, tensors);
        is_refused("");
        merges(p, 8, 6);
    }
    end(p);
}

/* out holds `files` files beside it. */
static void is_left_alone(kn_pieces *p, const char *name, int files, const char *text)
{
    char path[64], got[8] = "";
    snprintf(path, sizeof path, "out/%s", name);
    put_text(path, "mine");
    KN_CHECK(!kn_pieces_merge(p, temp_path("out"), 16, NULL, NULL, NULL));
    KN_CHECK(strstr(kn_error(), text));
    kn_clear_error();
    int fd = open(temp_path(path), O_RDONLY);
    KN_CHECK(fd >= 0 && read(fd, got, 7) == 4 && strcmp(got, "mine") == 0, "%s is lost", name);
    close(fd);
    KN_CHECK(clear_folder("out") == 1 + files);
}

KN_TEST(merge, files_of_others_stay)
{
    kn_pieces *p = begin();
    is_left_alone(p, "model.safetensors", 0, "is there already");
    is_left_alone(p, "model.safetensors.index.json", 0, "is there already");
    is_left_alone(p, "model-00002-of-00003.safetensors", 0, "is there already");
    is_left_alone(p, "shard-00001-model-00001-of-00001.safetensors", 0, "is there already");
    put_text("out/merge.unfinished", ""); /* of one that died before it wrote anything */
    is_left_alone(p, "model.safetensors.index.json", 1, "is there already");
    merge_and_die(p, 8, 3); /* its files go, and only they */
    put_text("out/model-00002-of-00003.safetensors", "mine");
    KN_CHECK(!kn_pieces_merge(p, temp_path("out"), 16, NULL, NULL, NULL));
    KN_CHECK(strstr(kn_error(), "is there already"));
    kn_clear_error();
    KN_CHECK(access(temp_path("out/model-00002-of-00003.safetensors"), F_OK) == 0);
    KN_CHECK(clear_folder("out") == 2); /* it, and the mark */
    KN_CHECK(symlink("nowhere", temp_path("out/merge.unfinished")) == 0);
    KN_CHECK(!kn_pieces_merge(p, temp_path("out"), 16, NULL, NULL, NULL));
    kn_clear_error();
    KN_CHECK(clear_folder("out") == 1);
    put_text("from/other", "mine\n");
    KN_CHECK(link(temp_path("from/other"), temp_path("out/merge.unfinished")) == 0);
    KN_CHECK(!kn_pieces_merge(p, temp_path("out"), 16, NULL, NULL, NULL));
    KN_CHECK(strstr(kn_error(), "no mark of a merge"));
    kn_clear_error();
    end(p);
}

static void merge_again(int64_t bytes, void *arg)
{
    if (bytes > 0) {
        KN_CHECK(!kn_pieces_merge(arg, temp_path("out"), 16, NULL, NULL, NULL));
        KN_CHECK(strstr(kn_error(), "another merge writes there"));
        kn_clear_error();
    }
}

KN_TEST(merge, one_at_a_time)
{
    kn_pieces *p = begin();
    KN_CHECK(kn_pieces_merge(p, temp_path("out"), 16, NULL, merge_again, p));
    KN_CHECK(clear_folder("out") == 4);
    end(p);
}

KN_TEST(merge, a_part_of_a_model_is_refused)
{
    static const char *const some[][4] = {
        { "model-00001-of-00002" },
        { "model-00002-of-00002" },
        { "a-00001-of-00001", "model-00001-of-00003", "model-00003-of-00003" },
        { "a-00001-of-00002", "b-00002-of-00002" },
        { "model-00001-of-00002", "model-00002-of-00003", "model-00003-of-00003" },
        { "model-00000-of-00000" },
    };
    static const char *const whole[][4] = {
        { "model-00001-of-00002", "model-00002-of-00002", "model" },
        { "a-00001-of-00001", "b-00001-of-00001" },
        { "shard-00002-model-00001-of-00002" }, /* ranks have different numbers of files */
        { "model-1-of-2", "model-00001-of-2" },
        { "-00001-of-00002" },
    };
    char header[64], name[80];
    kn_pieces *p = begin();
    for (size_t i = 0; i < 11; i++) {
        const char *const *set = i < 6 ? some[i] : whole[i - 6];
        for (int k = 0; k < 4 && set[k]; k++) {
            snprintf(name, sizeof name, "out/%s.safetensors", set[k]);
            snprintf(header, sizeof header,
                     "{\"%d\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", k);
            place_put(name, header, "abcd", 4);
        }
        kn_pieces *got = kn_pieces_open(temp_path("out"));
        KN_CHECK(!got == (i < 6), "set %zu", i);
        KN_CHECK(got || strstr(kn_error(), "a part of a model"));
        kn_clear_error();
        kn_pieces_close(got);
        clear_folder("out");
    }
    end(p);
}
