/* models/programs/knap_checkpoint.c: looks into checkpoints, checks their bytes and merges their
 * shards: knap-checkpoint inspect|verify|merge DIR. */
#include "kernels/error_internal.h"
#include "kernels/memory.h"
#include "models/options.h"
#include "models/programs/report.h"
#include "models/programs/tool.h"
#include "state/checkpoint_internal.h"
#include "state/merge.h"
#include "tensor/safetensors_format.h"
#include "tensor/files.h"

#include <jansson.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef struct settings {
    const char *out, *part, *shard_size;
} settings;

static settings given;

#define AT(field) offsetof(settings, field)

static const kn_option table[] = {
    { "inspect|verify|merge", KN_OPTION_REST, .help = "and DIR, as above" },
    { "part", KN_OPTION_STRING, AT(part), NULL, "of a checkpoint: model, optimizer, ...",
      .note = "inspect, verify: all; merge: model" },
    { "out", KN_OPTION_PATH, AT(out), NULL, "merge: the folder for the files; made if it's missing",
      .commands = "merge" },
    { "shard-size", KN_OPTION_STRING, AT(shard_size), NULL,
      "merge: bytes of tensors a file (5GB, 500MB), with an index", .note = "one file",
      .commands = "merge" },
    { 0 },
};

static const char about[] =
    "Looks into a checkpoint, checks its bytes, or merges the shards of its ranks:\n"
    "  knap-checkpoint inspect DIR     names, dtypes, shapes and sizes of its tensors\n"
    "  knap-checkpoint verify DIR      every byte against its checksum; exit status 1 if one "
    "differs\n"
    "  knap-checkpoint merge DIR --out OUT [--shard-size 5GB]\n"
    "                                  whole tensors for other programs: OUT/model.safetensors, "
    "or\n"
    "                                  several files with an index\n"
    "DIR: the folder of a run (its newest checkpoint), of a checkpoint, or any folder, index or\n"
    "file of .safetensors.\n"
    "Example:\n"
    "  train_gpt --steps 200 --out run && knap-checkpoint verify run &&\n"
    "      knap-checkpoint merge run --out merged --shard-size 2GB";

/* ---- what DIR holds -------------------------------------------------------------------------- */

#define MOST_PARTS 16

/* Tensors of DIR itself, or of a folder in a checkpoint. */
typedef struct part {
    char name[4096]; /* of the folder in the checkpoint; else DIR */
    kn_pieces *pieces;
} part;

typedef struct found {
    kn_checkpoint *checkpoint; /* that holds the parts' pieces, or NULL */
    part part[MOST_PARTS];
    int parts;
} found;

static bool add_part(found *f, const char *name, kn_pieces *pieces)
{
    part *p = &f->part[f->parts];
    if (!pieces)
        return false;
    snprintf(p->name, sizeof p->name, "%s", name);
    p->pieces = pieces;
    f->parts++;
    return true;
}

/* The folders in a checkpoint that hold tensors. */
static bool open_folders(found *f, const char *dir, const char *only)
{
    kn_folder_names n;
    bool ok = kn_folder_names_read(&n, dir, NULL);
    for (int64_t i = 0; ok && f->parts < MOST_PARTS && i < n.count; i++) {
        const char *name = n.list[i].name;
        const kn_path path = kn_path_of(dir, name, "");
        if (name[0] != '.' && (!only || strcmp(only, name) == 0) && kn_pieces_are_there(path.text))
            add_part(f, name, kn_pieces_open(path.text));
        ok = kn_ok();
    }
    kn_folder_names_free(&n);
    return ok;
}

static void close_parts(found *f)
{
    for (int i = 0; i < f->parts && !f->checkpoint; i++)
        kn_pieces_close(f->part[i].pieces);
    kn_checkpoint_free(f->checkpoint);
}

/* The checkpoint of a folder, which a run may hold several of: the newest that is whole. */
static bool open_checkpoint(found *f, const char *path, const char *only)
{
    f->checkpoint = kn_checkpoint_open(path, kn_comm_self());
    for (int k = 0; f->checkpoint && k < KN_PARTS; k++)
        if (!only || strcmp(only, kn_part_name[k]) == 0)
            add_part(f, kn_part_name[k], f->checkpoint->part[k]);
    return f->parts > 0 ||
           (kn_ok() && kn_fail("%s has no part \"%.200s\": there are model and optimizer",
                               kn_checkpoint_folder(f->checkpoint), only ? only : "model"));
}

/* Opens the parts of path, or only one. */
static bool open_parts(found *f, const char *path, const char *only)
{
    struct stat st;
    const int there = kn_look(path, &st);
    if (there <= 0)
        return there == 0 && kn_fail("%s: there is no such file or folder; give a trainer's --out, "
                                     "a checkpoint in it, or a .safetensors file",
                                     path);
    if (S_ISDIR(st.st_mode) && kn_run_folder_has_checkpoint(path))
        return open_checkpoint(f, path, only);
    if (kn_ok() && (!S_ISDIR(st.st_mode) || kn_pieces_are_there(path)))
        return only ? kn_fail("%s has no parts: leave out --part", path)
                    : add_part(f, path, kn_pieces_open(path));
    if (!kn_ok() || !open_folders(f, path, only) || f->parts > 0)
        return kn_ok();
    return only ? kn_fail("%s has no part \"%.200s\" with tensors", path, only)
                : kn_fail("%s holds no checkpoint: no .safetensors there or in its folders", path);
}

/* ---- inspect --------------------------------------------------------------------------------- */

/* A name from a file, without what a terminal would obey. */
static void print_name(const char *before, const char *name, int width)
{
    char *copy = kn_host_strdup(name);
    if (!copy)
        return;
    kn_defuse(copy);
    printf("%s%-*s", before, width, copy);
    kn_host_free(copy);
}

static void print_tensor(const kn_piece *t, int width)
{
    char size[32], shape[KN_MAX_DIMS * 22 + 3] = "[";
    int at = 1;
    for (int d = 0; d < t->ndim; d++)
        at += snprintf(shape + at, sizeof shape - (size_t)at, d ? ", %lld" : "%lld",
                       (long long)t->shape[d]);
    snprintf(shape + at, sizeof shape - (size_t)at, "]");
    print_name("  ", t->name, width);
    printf("  %-7s  %-20s  %9s\n", kn_safetensors_dtype_name(t->dtype), shape,
           report_bytes((double)kn_piece_bytes(t), size, sizeof size));
}

static bool inspect(found *f)
{
    if (f->checkpoint) {
        const json_t *ranks = json_object_get(f->checkpoint->state, "ranks");
        print_name("", kn_checkpoint_folder(f->checkpoint), 0);
        printf(": step %lld", (long long)kn_checkpoint_step(f->checkpoint));
        if (json_is_integer(ranks))
            printf(", saved by %lld ranks", (long long)json_integer_value(ranks));
        printf("\n");
    }
    for (int k = 0; k < f->parts; k++) {
        part *p = &f->part[k];
        char size[32];
        int n = kn_pieces_count(p->pieces), width = 4;
        for (int i = 0; i < n; i++) {
            int length = (int)strnlen(kn_pieces_tensor(p->pieces, i)->name, 60);
            width = length > width ? length : width;
        }
        print_name("", p->name, 0);
        printf(": %d tensors, %s in %d %s", n,
               report_bytes((double)kn_pieces_bytes(p->pieces), size, sizeof size),
               kn_pieces_files(p->pieces), kn_pieces_files(p->pieces) == 1 ? "file" : "files");
        if (*kn_pieces_id(p->pieces))
            print_name(", checkpoint ", kn_pieces_id(p->pieces), 0);
        printf("\n");
        for (int i = 0; i < n; i++)
            print_tensor(kn_pieces_tensor(p->pieces, i), width);
    }
    return true;
}

/* ---- verify and merge ------------------------------------------------------------------------ */

/* Names every tensor with wrong bytes, and goes on; fails if there is one. */
static bool verify(found *f)
{
    bar b;
    int64_t all = 0;
    int bad = 0, unsummed = 0, tensors = 0;
    char size[32];
    for (int k = 0; k < f->parts; k++)
        all += kn_pieces_bytes(f->part[k].pieces);
    bar_begin(&b, "verify", all);
    for (int k = 0; k < f->parts; k++)
        for (int i = 0; i < kn_pieces_count(f->part[k].pieces); i++, tensors++) {
            unsummed += !kn_pieces_has_sums(f->part[k].pieces, i);
            if (kn_pieces_verify(f->part[k].pieces, i, bar_move, &b))
                continue;
            bar_end(&b);
            if (kn_error_number()) /* it can't be read just now: that is no damage */
                return false;
            printf("%s\n", kn_error());
            kn_clear_error();
            bad++;
        }
    bar_end(&b);
    if (bad > 0)
        return kn_fail("%d of %d tensors are damaged", bad, tensors);
    if (unsummed > 0)
        printf("%d of %d tensors have no checksum: their bytes weren't checked\n", unsummed,
               tensors);
    printf("%d tensors, %s: %s\n", tensors, report_bytes((double)all, size, sizeof size),
           unsummed ? "no damage found" : "all bytes are as they were written");
    if (f->checkpoint && f->checkpoint->passed.count > 0)
        return kn_fail("the newest checkpoint isn't whole; those were the bytes of %s",
                       kn_checkpoint_folder(f->checkpoint));
    return true;
}

/* "5GB", "500 MB", "1000": bytes; 0 for no text, -1 with an error. */
static int64_t parse_size(const char *text)
{
    static const char *const unit[] = { "", "B", "KB", "MB", "GB", "TB" };
    static const double times[] = { 1, 1, 1e3, 1e6, 1e9, 1e12 };
    char *end;
    if (!text)
        return 0;
    double n = strtod(text, &end);
    while (*end == ' ')
        end++;
    for (int i = 0; i < 6; i++)
        if (strcasecmp(end, unit[i]) == 0 && end != text && n * times[i] >= 1 &&
            n * times[i] < 9e18)
            return (int64_t)(n * times[i]);
    kn_fail("--shard-size %.100s: give bytes with a unit: 500MB, 5GB", text);
    return -1;
}

static bool merge(found *f, const settings *s)
{
    bar b;
    char size[32];
    int files = 0, k = 0;
    int64_t most = parse_size(s->shard_size);
    if (most < 0)
        return false;
    if (!s->out)
        return kn_fail("merge: give --out FOLDER, where the files go");
    while (k < f->parts - 1 && strcmp(f->part[k].name, "model") != 0)
        k++;
    if (f->parts > 1 && strcmp(f->part[k].name, "model") != 0)
        return kn_fail("merge: no part is called model: give --part NAME");
    if (!kn_folder_outside(s->out))
        return false;
    if (kn_run_folder_has_checkpoint(s->out))
        return kn_fail("%s holds checkpoints of a run; choose another folder", s->out);
    if (!kn_folder_make(s->out, "--out "))
        return false;
    int64_t all = kn_pieces_bytes(f->part[k].pieces);
    bar_begin(&b, "merge", all);
    bool ok = kn_pieces_merge(f->part[k].pieces, s->out, most, &files, bar_move, &b);
    bar_end(&b);
    if (ok)
        printf("%d tensors, %s, in %s%s\n", kn_pieces_count(f->part[k].pieces),
               report_bytes((double)all, size, sizeof size), s->out,
               files == 1 ? "/model.safetensors" : " with an index");
    return ok;
}

/* ---- the program ----------------------------------------------------------------------------- */

static bool run(char *const *word, int words)
{
    static found f;
    const settings *s = &given;
    if (words != 2)
        return kn_fail("give a command and a folder: knap-checkpoint inspect|verify|merge DIR; "
                       "--help explains them");
    bool merges = strcmp(word[0], "merge") == 0;
    if (!merges && strcmp(word[0], "inspect") != 0 && strcmp(word[0], "verify") != 0)
        return kn_fail("the command \"%.100s\" is unknown; there are inspect, verify and merge",
                       word[0]);
    bool ok = open_parts(&f, word[1], s->part);
    ok = ok && (merges ? merge(&f, s) : word[0][0] == 'i' ? inspect(&f) : verify(&f));
    close_parts(&f);
    return ok;
}

int main(int argc, char **argv)
{
    const tool t = { "knap-checkpoint", about, table, &given, run };
    return tool_main(&t, argc, argv);
}
