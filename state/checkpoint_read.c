/* state/checkpoint_read.c: one checkpoint's files, on this rank: are they there, whole, and of one
 * save? A state.json may come from a stranger: nothing in it chooses a path outside of its folder,
 * or an amount of memory beyond that of the files. */
#include "kernels/error_internal.h"
#include "state/checkpoint_internal.h"
#include "state/saving.h"
#include "tensor/checksum.h"
#include "tensor/files.h"
#include "tensor/json.h"

#include <stdio.h>
#include <string.h>

bool kn_checkpoint_file_name(const char *name)
{
    static const char *const taken[] = { KN_STATE_FILE, "model", "optimizer", "values" };
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++)
        if (strcmp(name, taken[i]) == 0)
            return false;
    return name[0] != '.' && kn_checkpoint_is_plain(name, 99);
}

/* ---- the tensors ----------------------------------------------------------------------------- */

static bool open_part(kn_checkpoint *c, int which)
{
    kn_pieces **part = &c->part[which];
    const kn_path path = kn_path_of(c->dir, kn_part_name[which], "");
    if (!kn_pieces_are_there(path.text))
        return kn_ok();
    return (*part = kn_pieces_open(path.text)) &&
           (strcmp(kn_pieces_id(*part), c->id) == 0 ||
            kn_fail("%s: the files belong to two checkpoints: the tensors are of save %s, but "
                    "state.json is of %s",
                    path.text, kn_pieces_id(*part), c->id));
}

/* The files that are there are those that state.json lists, unchanged. */
static bool check_files(const kn_checkpoint *c)
{
    const json_t *listed = json_object_get(c->state, "files");
    json_t *there = kn_saved_files(c->part);
    size_t i = 0;
    while (i < json_array_size(there) &&
           json_equal(json_array_get(listed, i), json_array_get(there, i)))
        i++;
    const bool same = there && i == json_array_size(there) && i == json_array_size(listed);
    const json_t *one = json_array_get(i < json_array_size(there) ? there : listed, i);
    const char *name = json_string_value(json_object_get(one, "name"));
    if (there && !same)
        kn_fail("%s/%.200s isn't as it was saved: it isn't there, %s doesn't list it, or its size "
                "or header differs; the checkpoint is damaged",
                c->dir, name ? name : "", KN_STATE_FILE);
    json_decref(there);
    return same;
}

static bool open_tensors(kn_checkpoint *c)
{
    c->has_optimizer = json_is_integer(json_object_get(c->state, "optimizer_steps"));
    return open_part(c, KN_PART_MODEL) && open_part(c, KN_PART_OPTIMIZER) && check_files(c);
}

/* Each tensor is of the rank in whose share its first byte lies. */
bool kn_checkpoint_check(const kn_checkpoint *c)
{
    kn_pieces *const *part = c->part;
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
    kn_own_file *f = &c->file[c->files];
    if (!(f->name = kn_host_strdup(name)))
        return NULL;
    c->files++;
    f->data =
        kn_file_read(kn_path_of(c->dir, name, "").text, most < 0 ? 0 : (size_t)most, &f->size);
    return f->data ? f : NULL;
}

/* A file of "own_files", with its size and checksum. */
static bool add_listed(kn_checkpoint *c, const json_t *listed)
{
    const char *name = json_string_value(json_object_get(listed, "name"));
    if (!name || !kn_checkpoint_file_name(name))
        return kn_fail("%s/%s: \"own_files\" has something other than the name of a file here; "
                       "the checkpoint is damaged",
                       c->dir, KN_STATE_FILE);
    const kn_own_file *f = add_file(c, name, json_integer_value(json_object_get(listed, "bytes")));
    if (!f)
        return false;
    json_t *is = kn_saved_file("", name, (int64_t)f->size, kn_checksum_of(f->data, f->size));
    bool ok = (is || kn_fail_memory("%s/%s could not be read", c->dir, name)) &&
              (json_equal(is, listed) ||
               kn_fail("%s/%s isn't as it was saved: its size or checksum differs; the checkpoint "
                       "is damaged",
                       c->dir, name));
    json_decref(is);
    return ok;
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
    if (!json_is_object(object))
        return kn_fail_null("%s/%s: \"%s\" is missing or no object; the checkpoint is damaged",
                            c->dir, KN_STATE_FILE, key);
    return kn_json_text(object, 0, key);
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
    for (int k = 0; k < KN_PARTS; k++) {
        if (!(c->names[k] = kn_state_new()) || !kn_state_add_pieces(c->names[k], c->part[k]))
            return false;
    }
    return kn_state_values_add(c->names[KN_PART_OPTIMIZER], values,
                               kn_path_of(c->dir, KN_STATE_FILE, "").text);
}

bool kn_checkpoint_read(kn_checkpoint *c)
{
    return read_state(c) && open_tensors(c) && name_all(c) &&
           (c->buffer_ranks == 1 || !c->part[KN_PART_OPTIMIZER] ||
            c->buffer_ranks <= kn_pieces_count(c->part[KN_PART_OPTIMIZER]) + 1 ||
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
           (c->part[KN_PART_MODEL] = kn_pieces_open(c->dir)) != NULL && name_all(c);
}

void kn_checkpoint_clear(kn_checkpoint *c)
{
    json_decref(c->state);
    for (int k = 0; k < KN_PARTS; k++) {
        kn_state_free(c->names[k]);
        kn_pieces_close(c->part[k]);
    }
    for (int i = 0; i < c->files; i++) {
        kn_host_free(c->file[i].name);
        kn_host_free(c->file[i].data);
    }
    kn_host_free(c->file);
    kn_host_free(c->config);
    kn_host_free(c->record);
    kn_host_free(c->dir);
    *c = (kn_checkpoint){ .comm = c->comm, .passed = c->passed };
}
