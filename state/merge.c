/* state/merge.c: whole tensors from shards, one after another.
 *
 * UNFINISHED lies in the folder from before the first file until after the last, locked, and tells
 * their number: the next merge there removes the files of one that died. Readers refuse what such
 * a merge leaves: a file without its header, or fewer files than their names tell. */
#include "kernels/error_internal.h"
#include "kernels/memory.h"
#include "data/data.h"
#include "state/merge.h"
#include "state/pieces_internal.h"
#include "tensor/json.h"
#include "tensor/files.h"
#include "tensor/whole_file.h"
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define INDEX      "model.safetensors.index.json"
#define UNFINISHED "merge.unfinished"
#define MOST_FILES 99999 /* as many as their names have digits for */

typedef struct merging {
    kn_pieces *p;
    const char *dir;
    int *file; /* [tensors]: which takes it */
    int files, made;
    int lock;     /* of UNFINISHED; -1: not open */
    char *values; /* of one tensor */
    kn_pieces_progress progress;
    void *arg;
} merging;

static void name_file(int files, int file, char name[64])
{
    if (files == 1)
        snprintf(name, 64, "model.safetensors");
    else
        snprintf(name, 64, "model-%05d-of-%05d.safetensors", file + 1, files);
}

static int64_t bytes_of(const merging *m, int i)
{
    return kn_piece_bytes(kn_pieces_tensor(m->p, i));
}

/* Fills the files in order. */
static bool plan(merging *m, int64_t most)
{
    const int n = kn_pieces_count(m->p);
    int64_t held = 0, largest = 0;
    if (!(m->file = kn_host_calloc((size_t)n + 1, sizeof *m->file)))
        return false;
    for (int i = 0; i < n; i++) {
        const int64_t bytes = bytes_of(m, i);
        largest = bytes > largest ? bytes : largest;
        if (most > 0 && held > 0 && bytes > most - held) {
            m->files++;
            held = 0;
        }
        held += bytes;
        m->file[i] = m->files;
    }
    m->files++;
    if (m->files > MOST_FILES)
        return kn_fail("%s: %d files of at most %lld bytes; give a larger size", m->dir, m->files,
                       (long long)most);
    return (m->values = kn_host_alloc((size_t)largest + 1)) != NULL;
}

static bool write_tensors(merging *m, kn_pieces_writer *w, int file)
{
    for (int i = 0; i < kn_pieces_count(m->p); i++) {
        if (m->file[i] != file)
            continue;
        if (!kn_pieces_read(m->p, i, kn_pieces_tensor(m->p, i)->part, m->values) ||
            !kn_pieces_append(w, m->values, (size_t)bytes_of(m, i)))
            return false;
        if (m->progress)
            m->progress(bytes_of(m, i), m->arg);
    }
    return true;
}

static bool write_file(merging *m, int file)
{
    char name[64];
    int pieces = 0, n = kn_pieces_count(m->p);
    kn_piece *piece = kn_host_calloc((size_t)n + 1, sizeof *piece);
    for (int i = 0; i < n && piece; i++)
        if (m->file[i] == file)
            piece[pieces++] = *kn_pieces_tensor(m->p, i);
    name_file(m->files, file, name);
    kn_pieces_writer *w = piece ? kn_pieces_create_whole(m->dir, name, piece, pieces) : NULL;
    kn_host_free(piece);
    const bool ok = w && write_tensors(m, w, file);
    return kn_pieces_commit(w) && ok;
}

/* {"metadata": {"total_size": bytes}, "weight_map": {name: file, ...}} */
static char *index_text(const merging *m)
{
    char name[64];
    json_t *map = json_object();
    bool ok = map != NULL;
    for (int i = 0; i < kn_pieces_count(m->p) && ok; i++) {
        name_file(m->files, m->file[i], name);
        ok = json_object_set_new(map, kn_pieces_tensor(m->p, i)->name, json_string(name)) == 0;
    }
    json_t *index = ok ? json_pack("{s:{s:I}, s:O}", "metadata", "total_size",
                                   (json_int_t)kn_pieces_bytes(m->p), "weight_map", map)
                       : NULL;
    json_decref(map);
    return kn_json_copy(index, JSON_INDENT(2), INDEX);
}

static bool write_index(const merging *m)
{
    char *text = index_text(m);
    bool ok =
        text && kn_file_write(kn_path_of(m->dir, INDEX, "").text, (const void *const[]){ text },
                              (const size_t[]){ strlen(text) }, 1);
    kn_host_free(text);
    return ok;
}

/* Readers take all tensors of a folder for one model: nobody else's may lie there. */
static bool check_free(const merging *m)
{
    kn_folder_names n;
    bool there, ok = kn_folder_names_read(&n, m->dir, &there);
    for (int64_t i = 0; i < n.count && ok; i++) {
        const char *name = n.list[i].name;
        if (strcmp(name, INDEX) == 0 || kn_ends_in(name, ".safetensors"))
            ok =
                kn_fail("%s/%s is there already: remove it or choose another folder", m->dir, name);
    }
    kn_folder_names_free(&n);
    return ok;
}

/* ---- the mark of a merge that has begun ------------------------------------------------------ */

static bool remove_one(const merging *m, const char *name)
{
    const kn_path path = kn_path_of(m->dir, name, "");
    return *path.text && kn_remove_file(path.text);
}

/* Removes the index and the first `made` files of a merge into so many. */
static bool remove_files(const merging *m, int files, int made)
{
    char name[64];
    bool ok = remove_one(m, INDEX);
    for (int file = 0; file < made && ok; file++) {
        name_file(files, file, name);
        ok = remove_one(m, name);
    }
    return ok;
}

/* Writes the number of files that will come. */
static bool sign(const merging *m)
{
    char text[16];
    const int n = snprintf(text, sizeof text, "%d\n", m->files);
    return (KN_AGAIN(pwrite(m->lock, text, (size_t)n, 0) == n ? 0 : -1) == 0 &&
            KN_AGAIN(ftruncate(m->lock, n)) == 0 && KN_AGAIN(fsync(m->lock)) == 0 &&
            kn_sync_folder(m->dir)) ||
           kn_fail_system("cannot write %s/" UNFINISHED ": %m", m->dir);
}

/* The files that the dead merge made. One that died before it signed has made none. */
static bool remove_dead(const merging *m)
{
    char text[16] = "";
    if (kn_read_at(m->lock, text, sizeof text - 1, 0) < 0)
        return kn_fail_system("cannot read %s/" UNFINISHED ": %m", m->dir);
    int files = strchr(text, '\n') ? atoi(text) : 0;
    files = files < MOST_FILES ? files : MOST_FILES;
    return files == 0 || remove_files(m, files, files);
}

/* Makes this process the only one that merges into the folder. */
static bool claim(merging *m)
{
    const kn_path path = kn_path_of(m->dir, UNFINISHED, "");
    const int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
    struct stat st = { 0 };
    bool ok = *path.text, fresh = false;
    m->lock = ok ? kn_open(path.text, flags, 0) : -1;
    if (ok && m->lock < 0 && errno == ENOENT) {
        fresh = true;
        ok = check_free(m); /* before there is a mark: the files there are no dead merge's */
        m->lock = ok ? kn_open(path.text, flags | O_CREAT | O_EXCL, 0666) : -1;
    }
    if (ok && m->lock < 0 && errno != EEXIST)
        ok = kn_fail_system("cannot make %s: %m", path.text);
    if (ok &&
        (m->lock < 0 || (KN_AGAIN(flock(m->lock, LOCK_EX | LOCK_NB)) != 0 && errno == EWOULDBLOCK)))
        ok = kn_fail("%s: another merge writes there; wait for its end, or choose another folder",
                     m->dir);
    if (ok && (KN_AGAIN(fstat(m->lock, &st)) != 0 || !S_ISREG(st.st_mode) || st.st_nlink != 1))
        ok = kn_fail("%s is no mark of a merge: it was removed meanwhile, or is no file of its own",
                     path.text);
    if (!ok && m->lock >= 0) {
        close(m->lock);
        m->lock = -1;
    }
    ok = ok && (fresh || (remove_dead(m) && check_free(m))) && sign(m);
    if (!ok && fresh && m->lock >= 0)
        remove_one(m, UNFINISHED);
    return ok;
}

/* The files are there, or after an error none is; in the end the mark goes. */
static bool finish(const merging *m, bool ok)
{
    ok = ok && remove_one(m, UNFINISHED) && kn_sync_folder(m->dir);
    if (!ok && remove_files(m, m->files, m->made))
        remove_one(m, UNFINISHED);
    return ok;
}

bool kn_pieces_merge(kn_pieces *p, const char *dir, int64_t most, int *files,
                     kn_pieces_progress progress, void *arg)
{
    merging m = { .p = p, .dir = dir, .lock = -1, .progress = progress, .arg = arg };
    const bool claimed = kn_ok() && plan(&m, most) && claim(&m);
    bool ok = claimed;
    while (m.made < m.files && ok) {
        ok = write_file(&m, m.made);
        m.made += ok;
    }
    ok = ok && (m.files == 1 || write_index(&m)) && kn_sync_folder(dir);
    if (claimed)
        ok = finish(&m, ok);
    if (m.lock >= 0)
        close(m.lock);
    if (files)
        *files = m.files;
    kn_host_free(m.file);
    kn_host_free(m.values);
    return ok;
}
