/* bench/saves.c: saving and loading GPT-2 124M with AdamW's state, on one rank or several.
 *
 *   bench_saves [--dir DIR] [--ranks R] [--layers N] [--rounds N]
 *
 * Prints, as medians over the rounds and beside each other in turns:
 *   save    kn_checkpoint_save, against dd with fsync of as many bytes on the same disk
 *   load    kn_checkpoint_load of files that aren't in memory, against dd of these files
 *   async   the time that training stops for a save in the background, against memcpy of each
 *           rank's part into memory that was used before
 * The first dd copies bytes of a checkpoint, as disks may tell zeros from others; the second reads
 * the checkpoint's files. --layers: 12 are GPT-2's; fewer for a short run. */
#include "bench/args.h"
#include "bench/times.h"
#include "knap.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define MOST_ROUNDS 64

enum { SAVE, WRITE, LOAD, READ, ASYNC, COPY, TIMES };

typedef struct bench {
    kn_comm *world;
    kn_gpt model;
    kn_optim *opt;
    kn_run_folder *folder;
    char dir[300], run[330]; /* DIR/knap-saves-XXXXXX; its run */
    int64_t bytes;           /* of this rank's part */
    double all;              /* of all ranks' */
    char *used;              /* [bytes], written before */
    double time[TIMES][MOST_ROUNDS];
} bench;

static bool first(const bench *b)
{
    return kn_rank(b->world) == 0;
}

static bool meet(const bench *b)
{
    return kn_barrier(b->world, kn_compute_stream(KN_CPU), "bench");
}

/* ---- files ----------------------------------------------------------------------------------- */

typedef void file_call(const char *path, void *arg);

/* Calls f for every file below path. */
static void each_file(const char *path, file_call *f, void *arg)
{
    char below[700];
    DIR *d = opendir(path);
    if (!d) {
        f(path, arg);
        return;
    }
    for (struct dirent *e; (e = readdir(d));)
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0) {
            snprintf(below, sizeof below, "%s/%s", path, e->d_name);
            each_file(below, f, arg);
        }
    closedir(d);
}

/* Drops a file's pages from memory. */
static void drop(const char *path, void *arg)
{
    (void)arg;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
}

static void find_largest(const char *path, void *arg)
{
    char *largest = arg;
    struct stat is, had = { 0 };
    if (*largest)
        stat(largest, &had);
    if (stat(path, &is) == 0 && is.st_size > had.st_size)
        snprintf(largest, 700, "%s", path);
}

static void run(const char *command)
{
    int status = system(command);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return;
    fprintf(stderr, "failed: %s\n", command);
    exit(1);
}

/* Copies as many bytes as the ranks' parts have, of the checkpoint's largest file again and again:
 * dd's input lies in memory. */
static double write_by_dd(const bench *b)
{
    char command[2300], from[700] = "";
    each_file(b->run, find_largest, from);
    struct stat s = { 0 };
    stat(from, &s);
    const int64_t mib = (int64_t)(b->all / (1 << 20)) + 1, part = (s.st_size >> 20) + 1;
    int n = snprintf(command, sizeof command, "cat");
    for (int64_t at = 0; at < mib && n < 1400; at += part)
        n += snprintf(command + n, sizeof command - (size_t)n, " '%s'", from);
    snprintf(command + n, sizeof command - (size_t)n, " > '%s/in'", b->dir);
    run(command);
    snprintf(command, sizeof command,
             "dd if='%s/in' of='%s/out' bs=1M count=%lld conv=fsync status=none", b->dir, b->dir,
             (long long)mib);
    const double begin = kn_now();
    run(command);
    const double seconds = kn_now() - begin;
    snprintf(command, sizeof command, "rm '%s/in' '%s/out'", b->dir, b->dir);
    run(command);
    return seconds * b->all / (1 << 20) / (double)mib;
}

/* Reads the files that a load reads, from the disk. */
static double read_by_dd(const bench *b)
{
    char command[800];
    snprintf(command, sizeof command,
             "find '%s' -name '*.safetensors' -exec dd if={} of=/dev/null bs=1M status=none ';'",
             b->run);
    each_file(b->run, drop, NULL);
    const double begin = kn_now();
    run(command);
    return kn_now() - begin;
}

/* ---- what is measured ------------------------------------------------------------------------ */

static bool save(bench *b, int64_t step, bool async)
{
    return kn_checkpoint_save(b->run, &b->model, .optim = b->opt, .step = step, .keep = 1,
                              .folder = b->folder, .async = async);
}

static double load(bench *b)
{
    if (first(b))
        each_file(b->run, drop, NULL);
    kn_checkpoint *c = meet(b) ? kn_checkpoint_open(b->run, b->world) : NULL;
    meet(b);
    const double begin = kn_now();
    if (c)
        kn_checkpoint_load(c, &b->model, .optim = b->opt);
    meet(b);
    const double seconds = kn_now() - begin;
    kn_checkpoint_free(c);
    return seconds;
}

/* Each rank copies as many bytes as it has to save: its values, and again from the first where
 * these are fewer. */
static double copy(bench *b)
{
    const kn_param *p;
    const int n = kn_params(&b->model, &p);
    meet(b);
    const double begin = kn_now();
    for (int64_t at = 0, i = 0, last = 0; at < b->bytes; i++) {
        const kn_tensor *t = p[i % n].master;
        const int64_t left = b->bytes - at, all = kn_numel(t) * (int64_t)sizeof(float),
                      bytes = all < left ? all : left;
        if (bytes > 0)
            memcpy(b->used + at, kn_data(t), (size_t)bytes);
        at += bytes;
        if (i % n == n - 1 && at == last) /* this rank holds nothing */
            break;
        last = i % n == 0 ? at : last;
    }
    meet(b);
    return kn_now() - begin;
}

static bool one_round(bench *b, int r)
{
    double begin;
    meet(b);
    begin = kn_now();
    bool ok = save(b, 3 * r + 1, false);
    b->time[SAVE][r] = kn_now() - begin;
    b->time[WRITE][r] = ok && first(b) ? write_by_dd(b) : 0;
    ok = ok && meet(b);
    if (ok && first(b))
        read_by_dd(b); /* hosts of virtual disks have caches: both find them alike */
    for (int turn = 0; ok && turn < 2; turn++) {
        if (turn == r % 2)
            b->time[LOAD][r] = load(b);
        else if (first(b))
            b->time[READ][r] = read_by_dd(b);
        ok = kn_ok() && meet(b);
    }
    b->time[COPY][r] = ok ? copy(b) : 0;
    ok = ok && meet(b);
    begin = kn_now();
    ok = ok && save(b, 3 * r + 2, true) && meet(b);
    b->time[ASYNC][r] = kn_now() - begin;
    return ok && kn_checkpoint_wait(b->folder) && kn_ok();
}

static void print(bench *b, int rounds)
{
    static const char *const what[TIMES] = { "save", "dd conv=fsync", "load",
                                             "dd",   "async",         "memcpy" };
    double m[TIMES];
    for (int k = 0; k < TIMES; k++)
        m[k] = median_of(b->time[k], rounds);
    printf("%d rank%s, %.0f MB, medians of %d:\n", kn_comm_size(b->world),
           kn_comm_size(b->world) == 1 ? "" : "s", b->all / 1e6, rounds);
    for (int k = 0; k < TIMES; k++)
        printf("%-14s %8.1f MB/s, %8.1f ms (%.1f to %.1f)\n", what[k], b->all / 1e6 / m[k],
               1e3 * m[k], 1e3 * b->time[k][0], 1e3 * b->time[k][rounds - 1]);
    printf("save: %.0f %% of dd; load: %.0f %% of dd; async: %.2f times memcpy\n",
           100 * m[WRITE] / m[SAVE], 100 * m[READ] / m[LOAD], m[ASYNC] / m[COPY]);
}

/* ---- the program ----------------------------------------------------------------------------- */

static bool make_folder(bench *b, const char *dir)
{
    snprintf(b->dir, sizeof b->dir, "%s/knap-saves-XXXXXX", dir);
    if (first(b) && !mkdtemp(b->dir)) {
        perror(b->dir);
        exit(1);
    }
    size_t size = sizeof b->dir;
    char *made = kn_broadcast_bytes(b->world, b->dir, &size, 0);
    if (made)
        memcpy(b->dir, made, size);
    kn_host_free(made);
    snprintf(b->run, sizeof b->run, "%s/run", b->dir);
    return made && (b->folder = kn_run_folder_claim(b->run, .comm = b->world)) != NULL;
}

/* The optimizer's states get values of no pattern. */
static bool fill_states(bench *b)
{
    uint32_t x = 1 + (uint32_t)kn_rank(b->world);
    const kn_param *p;
    const char *name;
    const int n = kn_params(&b->model, &p);
    for (int i = 0; i < n; i++)
        for (int k = 0; (name = kn_optim_state_name_of(b->opt, i, k)); k++) {
            kn_tensor *t = kn_optim_state(b->opt, i, name);
            float *at = t && kn_numel(t) > 0 ? kn_data(t) : NULL;
            for (int64_t e = 0; at && e < kn_numel(t); e++) {
                x = x * 1664525u + 1013904223u;
                at[e] = (float)x;
            }
        }
    return kn_ok();
}

static bool begin(bench *b, int argc, char **argv)
{
    kn_gpt_config c;
    if (!kn_gpt_preset("gpt2", &c))
        return false;
    c.layers = (int)number(argc, argv, "--layers", c.layers);
    if (!kn_gpt_init(&b->model, c, KN_F32, KN_META) ||
        !kn_fsdp_wrap(&b->model, b->world, .wrap_class = "gpt_block") ||
        !(b->opt = kn_adamw(&b->model, .lr = 1e-4)))
        return false;
    b->bytes = kn_checkpoint_copy_bytes(&b->model, .optim = b->opt);
    b->all = kn_sum_over_ranks(b->world, (double)b->bytes);
    b->used = b->bytes >= 0 ? malloc((size_t)b->bytes + 1) : NULL;
    if (!kn_ok() || !b->used || !fill_states(b))
        return false;
    memset(b->used, 1, (size_t)b->bytes);
    return make_folder(b, word(argc, argv, "--dir", "."));
}

int main(int argc, char **argv)
{
    args_begin(argc, argv,
               "Saving and loading GPT-2 124M with AdamW's state.\n"
               "  bench_saves [--dir DIR] [--ranks N] [--layers N] [--rounds N] [--threads N]",
               0);
    kn_comm *world = kn_init(&argc, &argv);
    bench b = { .world = world };
    const int64_t n = number(argc, argv, "--rounds", 5);
    const int rounds = n < 1 ? 1 : n > MOST_ROUNDS ? MOST_ROUNDS : (int)n;
    bool ok = world && begin(&b, argc, argv) && save(&b, 0, true) && kn_checkpoint_wait(b.folder);
    for (int r = 0; ok && r < rounds; r++)
        ok = one_round(&b, r);
    if (ok && first(&b))
        print(&b, rounds);
    kn_run_folder_release(b.folder);
    if (b.folder && first(&b)) {
        char command[400];
        snprintf(command, sizeof command, "rm -r '%s'", b.dir);
        run(command);
    }
    kn_optim_free(b.opt);
    kn_module_free(&b.model);
    free(b.used);
    const int status = kn_finish();
    return status ? status : !ok;
}
