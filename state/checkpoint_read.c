/* state/checkpoint_read.c: one checkpoint's files, on this rank: are they there, whole, and of one
 * save? A state.json may come from a stranger: nothing in it chooses a path outside of its folder,
 * or an amount of memory beyond that of the files. */
#include "kernels/error_internal.h"
#include "state/checkpoint_internal.h"
#include "state/saving.h"
#include "tensor/checksum.h"
#include "tensor/files.h"
#include "tensor/json.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool kn_checkpoint_file_name(const char *name)
{
    static const char *const taken[] = { KN_STATE_FILE, "model", "optimizer", "values" };
    size_t n = strlen(name);
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++)
        if (strcmp(name, taken[i]) == 0)
            return false;
    return n > 0 && n < 100 && name[0] != '.' &&
           strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.") == n;
}

/* ---- the tensors ----------------------------------------------------------------------------- */

/* A file of state.json's list is the k-th of a part; both are ordered by name. */
static bool same_file(const kn_checkpoint *c, const char *part, const char *name,
                      const json_t *listed, const kn_pieces *p, int k)
{
    char sum[17];
    if (k >= kn_pieces_files(p) || strcmp(kn_pieces_file(p, k)->name, name) != 0)
        return kn_fail("%s/%s: the file %.100s of %s isn't there, or one is there that it doesn't "
                       "list; the checkpoint is damaged",
                       c->dir, part, name, KN_STATE_FILE);
    const kn_piece_file *is = kn_pieces_file(p, k);
    const char *text = json_string_value(json_object_get(listed, "checksum"));
    snprintf(sum, sizeof sum, "%016llx", (unsigned long long)is->checksum);
    return (json_integer_value(json_object_get(listed, "bytes")) == is->bytes && text &&
            strcmp(text, sum) == 0) ||
           kn_fail("%s/%s/%s isn't as it was saved: its size or header differs; the checkpoint is "
                   "damaged",
                   c->dir, part, is->name);
}

/* The name of the i-th listed file in its part; NULL: of another part. */
static const char *listed_name(const json_t *file, const char *part)
{
    const char *name = json_string_value(json_object_get(file, "name"));
    size_t n = strlen(part);
    return name && strncmp(name, part, n) == 0 && name[n] == '/' ? name + n + 1 : NULL;
}

/* The files of a part are those that state.json lists, unchanged. */
static bool check_listed(const kn_checkpoint *c, const char *part, const kn_pieces *p)
{
    size_t i;
    int k = 0;
    json_t *f;
    json_array_foreach(json_object_get(c->state, "files"), i, f)
    {
        const char *name = listed_name(f, part);
        if (name && !same_file(c, part, name, f, p, k++))
            return false;
    }
    return k == kn_pieces_files(p) ||
           kn_fail("%s/%s holds %d files, but %s lists %d; the checkpoint is damaged", c->dir, part,
                   kn_pieces_files(p), KN_STATE_FILE, k);
}

/* Does state.json list files of a part? */
static bool has_part(const kn_checkpoint *c, const char *part)
{
    size_t i;
    json_t *f;
    json_array_foreach(json_object_get(c->state, "files"), i, f)
    {
        if (listed_name(f, part))
            return true;
    }
    return false;
}

/* Each file that state.json lists lies in a part: it is opened and compared there. */
static bool check_names(const kn_checkpoint *c)
{
    size_t i;
    json_t *f;
    json_array_foreach(json_object_get(c->state, "files"), i, f)
    {
        const char *name = listed_name(f, kn_part_name[KN_PART_MODEL]);
        name = name ? name : listed_name(f, kn_part_name[KN_PART_OPTIMIZER]);
        if (!name || !*name || strchr(name, '/'))
            return kn_fail("%s/%s: file %zu of its list is in no part of the checkpoint; it is "
                           "damaged",
                           c->dir, KN_STATE_FILE, i);
    }
    return true;
}

/* The list leaves a part out: no files lie there. */
static bool check_absent(const char *path)
{
    kn_folder_names n;
    bool there, ok = kn_folder_names_read(&n, path, &there);
    for (int64_t i = 0; ok && i < n.count; i++) {
        const char *end = strrchr(n.list[i].name, '.');
        if (end && strcmp(end, ".safetensors") == 0)
            ok = kn_fail("%s holds tensors, but %s lists none of them; the checkpoint is damaged",
                         path, KN_STATE_FILE);
    }
    kn_folder_names_free(&n);
    return ok;
}

static bool open_part(kn_checkpoint *c, int which, kn_pieces **part)
{
    char path[KN_FOLDER_PATH];
    const char *name = kn_part_name[which];
    if (!kn_folder_path(path, c->dir, name, ""))
        return false;
    if (!has_part(c, name))
        return check_absent(path);
    if (!(*part = kn_pieces_open(path)))
        return false;
    return (strcmp(kn_pieces_id(*part), c->id) == 0 ||
            kn_fail("%s: the files belong to two checkpoints: the tensors are of save %s, but "
                    "state.json is of %s",
                    path, kn_pieces_id(*part), c->id)) &&
           check_listed(c, name, *part);
}

static bool open_tensors(kn_checkpoint *c)
{
    c->has_optimizer = json_is_integer(json_object_get(c->state, "optimizer_steps"));
    return check_names(c) && open_part(c, KN_PART_MODEL, &c->model) &&
           open_part(c, KN_PART_OPTIMIZER, &c->optimizer);
}

/* Each tensor is of the rank in whose share its first byte lies. */
bool kn_checkpoint_check(const kn_checkpoint *c)
{
    kn_pieces *const part[KN_PARTS] = { c->model, c->optimizer };
    const int64_t ranks = kn_comm_size(c->comm);
    int64_t all = 0, at = 0;
    bool ok = true;
    for (int k = 0; k < KN_PARTS; k++)
        all += kn_pieces_bytes(part[k]);
    for (int k = 0; k < KN_PARTS; k++)
        for (int i = 0; ok && part[k] && i < kn_pieces_count(part[k]); i++) {
            if (at / (all / ranks + 1) == kn_rank(c->comm))
                ok = kn_pieces_verify(part[k], i, NULL, NULL);
            at += kn_piece_bytes(kn_pieces_tensor(part[k], i));
        }
    return ok;
}

/* ---- the program's own files ----------------------------------------------------------------- */

/* Of at most so many bytes. */
static kn_own_file *add_file(kn_checkpoint *c, const char *name, int64_t most)
{
    char path[KN_FOLDER_PATH];
    kn_own_file *f = &c->file[c->files];
    if (!kn_folder_path(path, c->dir, name, "") || !(f->name = kn_host_strdup(name)))
        return NULL;
    c->files++;
    int fd = kn_open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0); /* it may be a FIFO */
    if (fd < 0)
        kn_fail_system("cannot open %s: %m", path);
    else
        f->data = kn_file_copy(fd, path, most < 0 ? 0 : (size_t)most, &f->size);
    return f->data ? f : NULL;
}

/* A file of "own_files", with its size and checksum. */
static bool add_listed(kn_checkpoint *c, const json_t *listed)
{
    const char *name = json_string_value(json_object_get(listed, "name")),
               *text = json_string_value(json_object_get(listed, "checksum"));
    char sum[17];
    if (!name || !kn_checkpoint_file_name(name))
        return kn_fail("%s/%s: \"own_files\" has something other than the name of a file here; "
                       "the checkpoint is damaged",
                       c->dir, KN_STATE_FILE);
    const json_int_t bytes = json_integer_value(json_object_get(listed, "bytes"));
    const kn_own_file *f = add_file(c, name, bytes);
    if (!f)
        return false;
    snprintf(sum, sizeof sum, "%016llx", (unsigned long long)kn_checksum_of(f->data, f->size));
    return (bytes == (json_int_t)f->size && text && strcmp(text, sum) == 0) ||
           kn_fail("%s/%s isn't as it was saved: its size or checksum differs; the checkpoint is "
                   "damaged",
                   c->dir, name);
}

static bool open_files(kn_checkpoint *c)
{
    const json_t *list = json_object_get(c->state, "own_files");
    const size_t n = json_array_size(list);
    c->file = kn_host_calloc(n + 1, sizeof *c->file);
    bool ok = c->file != NULL;
    for (size_t i = 0; ok && i < n; i++)
        ok = add_listed(c, json_array_get(list, i));
    return ok;
}

/* ---- state.json ------------------------------------------------------------------------------ */

/* An object of state.json, as text. */
static char *text_of(const kn_checkpoint *c, const char *key)
{
    const json_t *object = json_object_get(c->state, key);
    if (!json_is_object(object)) {
        kn_fail("%s/%s: \"%s\" is missing or no object; the checkpoint is damaged", c->dir,
                KN_STATE_FILE, key);
        return NULL;
    }
    char *text = kn_json_text(object, 0), *copy = text ? kn_host_strdup(text) : NULL;
    free(text);
    if (!copy && kn_ok())
        kn_fail_memory("%s/%s could not be read", c->dir, KN_STATE_FILE);
    return copy;
}

static bool read_state(kn_checkpoint *c)
{
    if (!(c->state = kn_folder_state(c->dir)) ||
        !kn_folder_int(c->state, "step", 0, INT64_MAX, &c->step, c->dir) ||
        !kn_folder_int(c->state, "buffer_ranks", 1, 1 << 20, &c->buffer_ranks, c->dir))
        return false;
    const char *id = json_string_value(json_object_get(c->state, "id"));
    snprintf(c->id, sizeof c->id, "%s", id ? id : "");
    c->config = text_of(c, "model");
    c->record = c->config ? text_of(c, "record") : NULL;
    return c->record != NULL;
}

/* All names, and the optimizers' numbers. */
static bool name_all(kn_checkpoint *c)
{
    json_t *values = json_object_get(c->state, "values");
    char where[KN_FOLDER_PATH + 16];
    snprintf(where, sizeof where, "%s/%s", c->dir, KN_STATE_FILE);
    for (int k = 0; k < KN_PARTS; k++) {
        kn_pieces *p = k == KN_PART_MODEL ? c->model : c->optimizer;
        if (!(c->names[k] = kn_state_new()) || !kn_state_add_pieces(c->names[k], p))
            return false;
    }
    return kn_state_values_add(c->names[KN_PART_OPTIMIZER], values, where);
}

bool kn_checkpoint_read(kn_checkpoint *c)
{
    return read_state(c) && open_tensors(c) && name_all(c) &&
           (c->buffer_ranks == 1 || !c->optimizer ||
            c->buffer_ranks <= kn_pieces_count(c->optimizer) + 1 ||
            kn_fail("%s/%s: the buffers of %lld ranks aren't there; the checkpoint is damaged",
                    c->dir, KN_STATE_FILE, (long long)c->buffer_ranks)) &&
           open_files(c);
}

bool kn_checkpoint_read_foreign(kn_checkpoint *c)
{
    c->buffer_ranks = 1;
    c->config = kn_host_strdup("{}");
    c->record = kn_host_strdup("{}");
    c->state = json_object();
    return (c->state || kn_fail_memory("%s could not be read", c->dir)) && c->config && c->record &&
           (c->model = kn_pieces_open(c->dir)) != NULL && name_all(c);
}

void kn_checkpoint_clear(kn_checkpoint *c)
{
    json_decref(c->state);
    for (int k = 0; k < KN_PARTS; k++)
        kn_state_free(c->names[k]);
    kn_pieces_close(c->model);
    kn_pieces_close(c->optimizer);
    for (int i = 0; i < c->files; i++) {
        kn_host_free(c->file[i].name);
        kn_host_free(c->file[i].data);
    }
    kn_host_free(c->file);
    kn_host_free(c->config);
    kn_host_free(c->record);
    char *dir = c->dir;
    kn_comm *comm = c->comm;
    *c = (kn_checkpoint){ .dir = dir, .comm = comm };
}
