/* bench/checkpoint.c: the files of checkpoints.
 *
 *   bench_checkpoint [--dir DIR] [--mib N] [--rounds N]
 *       Megabytes a second of writing and reading N MiB of tensors like GPT-2's beside dd with
 *       fsync on the same disk, in turns, of the same bytes. Reading is from the disk: the files'
 *       pages are dropped from memory.
 *   bench_checkpoint --example DIR --layout flat|per_param|ragged --ranks N
 *       The shards of a small model on so many ranks, into DIR; element i of a tensor holds i.
 *       scripts/peers dcp reads them with PyTorch. */
#include "bench/args.h"
#include "bench/times.h"
#include "fsdp/kinds.h"
#include "kernels/error.h"
#include "state/pieces.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- a small model --------------------------------------------------------------------------- */

#define TENSORS 7

static const struct {
    const char *name;
    kn_dtype dtype;
    int ndim, dim; /* dim: that per_param cuts */
    int64_t shape[4];
} example[TENSORS] = {
    { "wte.weight", KN_F32, 2, 0, { 31, 12 } },
    { "h.0.bias", KN_F32, 1, 0, { 37 } },
    { "h.0.attn.weight", KN_F32, 2, 1, { 9, 16 } },
    { "conv.weight", KN_F32, 4, 0, { 5, 3, 3, 2 } },
    { "half.weight", KN_BF16, 2, 0, { 16, 3 } },
    { "scale", KN_F32, 0, 0, { 0 } },
    { "steps", KN_I64, 1, 0, { 5 } },
};

/* The i-th numbers of the whole as the dtype's bytes: small whole numbers are exact in all. */
static void fill(kn_dtype dtype, int64_t n, void *to)
{
    for (int64_t i = 0; i < n; i++) {
        if (dtype == KN_I64) {
            ((int64_t *)to)[i] = i;
            continue;
        }
        float x = (float)i;
        uint32_t bits;
        memcpy(&bits, &x, 4);
        if (dtype == KN_F32)
            ((float *)to)[i] = x;
        else
            ((uint16_t *)to)[i] = (uint16_t)(bits >> 16);
    }
}

static bool write_example(const char *dir, const kn_layout *l, int rank)
{
    kn_piece piece[TENSORS];
    for (int i = 0; i < TENSORS; i++) {
        piece[i] = (kn_piece){
            example[i].name, example[i].dtype, example[i].ndim, { 0 }, kn_layout_part(l, i, rank)
        };
        memcpy(piece[i].shape, example[i].shape, sizeof example[i].shape);
    }
    kn_pieces_writer *w = kn_pieces_create(dir, rank, "e8a3", NULL, piece, TENSORS);
    for (int i = 0; i < TENSORS && w; i++) {
        char whole[4096], part[4096];
        size_t size = kn_dtype_size(example[i].dtype);
        fill(example[i].dtype, l->numel[i], whole);
        kn_interval_cut(piece[i].part, part, whole, size);
        kn_pieces_append(w, part, (size_t)kn_interval_numel(piece[i].part) * size);
    }
    return w && kn_pieces_commit(w);
}

static bool write_examples(const char *dir, const char *layout, int ranks)
{
    kn_layout_param param[TENSORS];
    kn_layout l;
#define NAME(id, name, ...) name,
    static const char *const names[] = { KN_LAYOUTS(NAME) };
    const int kinds = sizeof names / sizeof *names;
    int kind = 0;
    while (kind < kinds && strcmp(layout, names[kind]) != 0)
        kind++;
    if (kind == kinds)
        return kn_fail("--layout %s: must be one of %s", layout, KN_KIND_CHOICES(KN_LAYOUTS));
    for (int i = 0; i < TENSORS; i++)
        param[i] = (kn_layout_param){ example[i].ndim, example[i].shape, example[i].dim };
    if (!kn_layout_make(&l, (kn_layout_kind)(KN_LAYOUT_FLAT + kind), param, TENSORS, ranks))
        return false;
    bool ok = true;
    for (int r = 0; r < ranks && ok; r++)
        ok = write_example(dir, &l, r);
    kn_layout_free(&l);
    return ok;
}

/* ---- speed ----------------------------------------------------------------------------------- */

static double now(void)
{
    struct timeval t;
    gettimeofday(&t, NULL);
    return (double)t.tv_sec + 1e-6 * (double)t.tv_usec;
}

typedef struct load {
    char dir[300];
    kn_piece *piece; /* the tensors of layers like GPT-2's, cut as one of 2 flat ranks has them */
    char **name;
    int pieces;
    int64_t bytes, largest;
    char *data; /* [largest], of no pattern */
} load;

static void add(load *l, const char *what, int64_t rows, int64_t columns)
{
    int i = l->pieces++;
    int64_t n = rows * columns;
    l->name = realloc(l->name, (size_t)l->pieces * sizeof *l->name);
    l->piece = realloc(l->piece, (size_t)l->pieces * sizeof *l->piece);
    l->name[i] = malloc(64);
    snprintf(l->name[i], 64, "h.%d.%s", i, what);
    l->piece[i] = (kn_piece){ l->name[i], KN_F32, 2, { rows, columns }, { 0, n, 1, n, 0 } };
    l->bytes += 4 * n;
    l->largest = 4 * n > l->largest ? 4 * n : l->largest;
}

static void make_load(load *l, const char *dir, int64_t mib)
{
    snprintf(l->dir, sizeof l->dir, "%s/knap-bench-XXXXXX", dir);
    if (!mkdtemp(l->dir)) {
        perror(l->dir);
        exit(1);
    }
    while (l->bytes < mib << 20) {
        add(l, "attn.weight", 768, 2304);
        add(l, "attn.bias", 1, 2304);
        add(l, "proj.weight", 768, 768);
        add(l, "mlp.weight", 768, 3072);
        add(l, "ln.weight", 1, 768);
    }
    l->data = malloc((size_t)l->largest);
    uint64_t x = 1;
    for (int64_t i = 0; i + 8 <= l->largest; i += 8) {
        x = x * 6364136223846793005u + 1442695040888963407u;
        memcpy(l->data + i, &x, 8);
    }
}

/* Removes the files, or only drops their pages from memory. */
static void each_file(const char *dir, bool remove_them)
{
    char path[600];
    DIR *d = opendir(dir);
    for (struct dirent *e; d && (e = readdir(d));) {
        snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
        if (e->d_name[0] == '.')
            continue;
        int fd = open(path, O_RDONLY);
        if (fd >= 0) {
            posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
            close(fd);
        }
        if (remove_them)
            unlink(path);
    }
    if (d)
        closedir(d);
}

static bool write_files(load *l)
{
    kn_pieces_writer *w = kn_pieces_create(l->dir, 0, "b", NULL, l->piece, l->pieces);
    for (int i = 0; i < l->pieces && w; i++)
        kn_pieces_append(w, l->data, (size_t)kn_interval_numel(l->piece[i].part) * sizeof(float));
    return w && kn_pieces_commit(w);
}

static bool read_files(load *l)
{
    kn_pieces *p = kn_pieces_open(l->dir);
    bool ok = p != NULL;
    for (int i = 0; ok && i < kn_pieces_count(p); i++)
        ok = kn_pieces_read(p, i, kn_pieces_tensor(p, i)->part, l->data);
    kn_pieces_close(p);
    return ok;
}

/* dd copies a file that lies in memory, or reads its copy: the same bytes, since
 * disks may tell zeros from others. Seconds. */
static double run_dd(const load *l, bool writes)
{
    char command[1500];
    if (writes)
        snprintf(command, sizeof command,
                 "dd if=%s/shard-00001-model-00001-of-00001.safetensors of=%s/dd bs=1M conv=fsync "
                 "status=none",
                 l->dir, l->dir);
    else
        snprintf(command, sizeof command, "dd if=%s/dd of=/dev/null bs=1M status=none", l->dir);
    double begun = now();
    int status = system(command);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        fprintf(stderr, "dd failed: %s\n", command);
        exit(1);
    }
    return now() - begun;
}

static double seconds(bool (*f)(load *), load *l)
{
    double begun = now();
    if (!f(l)) {
        fprintf(stderr, "%s\n", kn_error());
        exit(1);
    }
    return now() - begun;
}

/* Of this process and its children. */
static double processors(void)
{
    double s = 0;
    for (int who = 0; who < 2; who++) {
        struct rusage u;
        getrusage(who ? RUSAGE_CHILDREN : RUSAGE_SELF, &u);
        s += (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
             1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
    }
    return s;
}

static void measure(load *l, int rounds)
{
    double t[4][64], busy[4] = { 0 };
    for (int r = 0; r < rounds; r++)
        for (int turn = 0; turn < 4; turn++) {
            /* each reads a file just written: hosts of virtual disks have caches */
            static const int order[2][4] = { { 0, 2, 1, 3 }, { 1, 3, 0, 2 } };
            int k = order[r % 2][turn];
            if (k == 1)
                seconds(write_files, l);
            double begun = processors();
            t[k][r] = k == 0   ? seconds(write_files, l)
                      : k == 2 ? seconds(read_files, l)
                               : run_dd(l, k == 1);
            busy[k] += processors() - begun;
            each_file(l->dir, k >= 2);
        }
    static const char *const what[] = { "write", "dd conv=fsync", "read", "dd" };
    double mb = (double)l->bytes / 1e6;
    for (int k = 0; k < 4; k++)
        printf("%-14s %8.1f MB/s (median of %d), %.3f s of processors\n", what[k],
               mb / median_of(t[k], rounds), rounds, busy[k] / rounds);
    for (int k = 0; k < 4; k += 2)
        printf("%s: %.0f %% of dd\n", what[k],
               100 * median_of(t[k + 1], rounds) / median_of(t[k], rounds));
}

int main(int argc, char **argv)
{
    args_begin(argc, argv,
               "The speed of checkpoints' files, or the shards of a small model.\n"
               "  bench_checkpoint [--dir DIR] [--mib N] [--rounds N] | [--example DIR] [--layout "
               "flat|per_param|ragged]"
               "\n    [--ranks N]",
               0);
    load l = { 0 };
    const char *dir = word(argc, argv, "--example", NULL);
    int rounds = (int)number(argc, argv, "--rounds", 5);
    if (dir) {
        bool ok = write_examples(dir, word(argc, argv, "--layout", "flat"),
                                 (int)number(argc, argv, "--ranks", 2));
        if (!ok)
            fprintf(stderr, "%s\n", kn_error());
        return !ok;
    }
    make_load(&l, word(argc, argv, "--dir", "."), number(argc, argv, "--mib", 512));
    printf("%.1f MB in %d tensors\n", (double)l.bytes / 1e6, l.pieces);
    measure(&l, rounds < 1 ? 1 : rounds > 64 ? 64 : rounds);
    rmdir(l.dir);
    for (int i = 0; i < l.pieces; i++)
        free(l.name[i]);
    free(l.name), free(l.piece), free(l.data);
    return 0;
}
