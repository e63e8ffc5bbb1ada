/* state/merge.c: whole tensors from shards, one after another. */
#include "kernels/error.h"
#include "kernels/memory.h"
#include "state/merge.h"
#include "state/shard_file.h"
#include "tensor/safetensors_format.h"
#include "tensor/whole_file.h"
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define INDEX "model.safetensors.index.json"

typedef struct merging {
    kn_pieces *p;
    const char *dir;
    int64_t *bytes; /* [tensors] */
    int *file;      /* [tensors]: which takes it */
    int files, done;
    char *values; /* of one tensor */
    kn_pieces_progress progress;
    void *arg;
} merging;

static void name_file(const merging *m, int file, char name[64])
{
    if (m->files == 1)
        snprintf(name, 64, "model.safetensors");
    else
        snprintf(name, 64, "model-%05d-of-%05d.safetensors", file + 1, m->files);
}

static char *path_of(const merging *m, const char *name)
{
    size_t room = strlen(m->dir) + strlen(name) + 2;
    char *path = kn_host_alloc(room);
    if (path)
        snprintf(path, room, "%s/%s", m->dir, name);
    return path;
}

/* Fills the files in order. */
static bool plan(merging *m, int64_t most)
{
    int n = kn_pieces_count(m->p);
    int64_t held = 0, largest = 0;
    m->bytes = kn_host_calloc((size_t)n + 1, sizeof *m->bytes);
    m->file = kn_host_calloc((size_t)n + 1, sizeof *m->file);
    if (!m->bytes || !m->file)
        return false;
    for (int i = 0; i < n; i++) {
        const kn_piece *t = kn_pieces_tensor(m->p, i);
        if (!kn_safetensors_bytes(t->dtype, t->ndim, t->shape, &m->bytes[i]))
            return kn_fail("tensor \"%.200s\": too many bytes", t->name);
        largest = m->bytes[i] > largest ? m->bytes[i] : largest;
        if (most > 0 && held > 0 && m->bytes[i] > most - held) {
            m->files++;
            held = 0;
        }
        held += m->bytes[i];
        m->file[i] = m->files;
    }
    m->files++;
    return (m->values = kn_host_alloc((size_t)largest + 1)) != NULL;
}

static bool write_tensors(merging *m, kn_shard_file *f, int file)
{
    for (int i = 0; i < kn_pieces_count(m->p); i++) {
        if (m->file[i] != file)
            continue;
        if (!kn_pieces_read(m->p, i, kn_pieces_tensor(m->p, i)->part, m->values) ||
            !kn_shard_file_append(f, m->values, (size_t)m->bytes[i]))
            return false;
        if (m->progress)
            m->progress(m->bytes[i], m->arg);
    }
    return true;
}

static bool write_file(merging *m, int file)
{
    char name[64];
    kn_piece_file written;
    int items = 0, n = kn_pieces_count(m->p);
    kn_shard_item *item = kn_host_calloc((size_t)n + 1, sizeof *item);
    for (int i = 0; i < n && item; i++) {
        const kn_piece *t = kn_pieces_tensor(m->p, i);
        if (m->file[i] != file)
            continue;
        kn_shard_item *one = &item[items++];
        *one = (kn_shard_item){ t->name, t->dtype, t->ndim, { 0 }, { { 0 }, { 0 } } };
        memcpy(one->shape, t->shape, sizeof t->shape);
        memcpy(one->part.size, t->shape, sizeof t->shape);
    }
    name_file(m, file, name);
    kn_shard_file *f = item ? kn_shard_file_create(m->dir, name, item, items, false, NULL) : NULL;
    bool ok = f && write_tensors(m, f, file) && kn_shard_file_finish(f, &written);
    kn_shard_file_free(f, ok);
    kn_host_free(item);
    m->done += ok;
    return ok;
}

/* {"metadata": {"total_size": bytes}, "weight_map": {name: file, ...}} */
static char *index_text(const merging *m, size_t *size)
{
    int64_t total = 0;
    char name[64], *text = NULL;
    json_t *map = json_object();
    bool ok = map != NULL;
    for (int i = 0; i < kn_pieces_count(m->p) && ok; i++) {
        name_file(m, m->file[i], name);
        total += m->bytes[i];
        ok = json_object_set_new(map, kn_pieces_tensor(m->p, i)->name, json_string(name)) == 0;
    }
    json_t *index = ok ? json_pack("{s:{s:I}, s:O}", "metadata", "total_size", (json_int_t)total,
                                   "weight_map", map)
                       : NULL;
    *size = index ? json_dumpb(index, NULL, 0, JSON_INDENT(2)) : 0;
    if (*size > 0 && (text = kn_host_alloc(*size)))
        json_dumpb(index, text, *size, JSON_INDENT(2));
    json_decref(index);
    json_decref(map);
    if (!text)
        kn_fail("%s/" INDEX ": out of memory", m->dir);
    return text;
}

static bool write_index(const merging *m)
{
    size_t size;
    char *path = path_of(m, INDEX), *text = path ? index_text(m, &size) : NULL;
    kn_whole_file *f = text ? kn_whole_file_create(path) : NULL;
    bool ok = f && kn_whole_file_write(f, text, size);
    if (ok)
        ok = kn_whole_file_commit(f);
    else
        kn_whole_file_abandon(f);
    kn_host_free(text);
    kn_host_free(path);
    return ok;
}

/* Whether none of the names that the files may have is taken: a reader takes all of them for one
 * model. */
static bool check_free(const merging *m)
{
    static const char *const taken[] = { "model.safetensors", INDEX };
    bool ok = true;
    for (int i = 0; i < 2 && ok; i++) {
        char *path = path_of(m, taken[i]);
        ok = path != NULL;
        if (ok && (access(path, F_OK) == 0 || errno != ENOENT))
            ok = kn_fail("%s is there already: remove it or choose another folder", path);
        kn_host_free(path);
    }
    return ok;
}

static void remove_files(const merging *m)
{
    for (int file = 0; file < m->done; file++) {
        char name[64];
        name_file(m, file, name);
        char *path = path_of(m, name);
        if (path)
            (void)KN_AGAIN(unlink(path));
        kn_host_free(path);
    }
}

bool kn_pieces_merge(kn_pieces *p, const char *dir, int64_t most, int *files,
                     kn_pieces_progress progress, void *arg)
{
    merging m = { .p = p, .dir = dir, .progress = progress, .arg = arg };
    bool ok = kn_ok() && plan(&m, most) && check_free(&m);
    for (int file = 0; file < m.files && ok; file++)
        ok = write_file(&m, file);
    ok = ok && (m.files == 1 || write_index(&m)) && kn_sync_folder(dir);
    if (!ok)
        remove_files(&m);
    if (files)
        *files = m.files;
    kn_host_free(m.bytes);
    kn_host_free(m.file);
    kn_host_free(m.values);
    return ok;
}
