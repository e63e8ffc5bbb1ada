/* state/state_file.c: a state in .safetensors files: tensors as such, numbers and texts as JSON in
 * the metadata. A full state is one file; of a sharded one each rank writes its part into a folder,
 * and all files of a folder are opened together. */
#include "kernels/error_internal.h"
#include "state/dict_internal.h"
#include "state/pieces_internal.h"
#include "tensor/checksum.h"
#include "tensor/files.h"
#include "tensor/safetensors.h"
#include "tensor/tensor_internal.h"
#include "tensor/whole_file.h"

#include <stdio.h>
#include <string.h>

/* ---- a full state ---------------------------------------------------------------------------- */

static bool list_tensors(const kn_state *s, kn_safetensors_entry *list, int *count)
{
    *count = 0;
    for (int i = 0; i < s->count; i++) {
        kn_state_item *item = &s->list[i];
        if (item->type != KN_STATE_TENSOR)
            continue;
        kn_safetensors_entry *e = &list[(*count)++];
        *e = (kn_safetensors_entry){ .name = item->name, .dtype = item->dtype };
        e->ndim = item->ndim;
        memcpy(e->shape, item->shape, (size_t)e->ndim * sizeof *e->shape);
        const kn_tensor *t = kn_state_item_tensor(item);
        if (!t)
            return false;
        e->data = kn_array_of(t).data;
    }
    return kn_ok();
}

static bool save_whole(const kn_state *s, const char *path, const char *values)
{
    int count;
    kn_safetensors_entry *list = kn_host_calloc((size_t)s->count, sizeof *list);
    const kn_safetensors_pair meta[] = { { "format", "pt" }, { KN_SHARD_VALUES, values } };
    const bool ok =
        list && list_tensors(s, list, &count) && kn_safetensors_save(path, list, count, meta, 2);
    kn_host_free(list);
    return ok;
}

/* ---- a rank's part --------------------------------------------------------------------------- */

/* What this rank writes: of parts that several ranks have one of them does, of the rest rank 0. */
static int list_parts(const kn_state *s, int rank, kn_piece *piece, kn_state_item **of)
{
    int count = 0;
    for (int i = 0; i < s->count; i++) {
        kn_state_item *item = &s->list[i];
        if (item->type != KN_STATE_TENSOR || !(item->shards ? item->saver : rank == 0))
            continue;
        kn_piece *p = &piece[count];
        *p = (kn_piece){ .name = item->name, .dtype = item->dtype, .ndim = item->ndim };
        memcpy(p->shape, item->shape, sizeof p->shape);
        p->part = item->shards > 1 ? item->part
                                   : kn_interval_whole(kn_shape_numel(item->ndim, item->shape));
        of[count++] = item;
    }
    return count;
}

static bool append(kn_pieces_writer *w, kn_state_item *item)
{
    const kn_tensor *t = kn_state_item_tensor(item);
    return t && kn_pieces_append(w, kn_array_of(t).data,
                                 (size_t)kn_numel(t) * kn_dtype_size(item->dtype));
}

/* Nothing is sent: the id, a hash of the values, tells who opens the files whether they are of one
 * step. */
static bool save_part(const kn_state *s, int rank, const char *dir, const char *values)
{
    char id[KN_CHECKPOINT_ID];
    kn_piece *piece = kn_host_calloc((size_t)s->count, sizeof *piece);
    kn_state_item **of = kn_host_calloc((size_t)s->count, sizeof *of);
    int count = piece && of ? list_parts(s, rank, piece, of) : 0;
    snprintf(id, sizeof id, KN_VALUES_ID "%016llx",
             (unsigned long long)kn_checksum_of(values, strlen(values)));
    bool ok = kn_ok() && kn_folder_make(dir, "kn_state_save: ");
    kn_pieces_writer *w =
        ok && count > 0 ? kn_pieces_create(dir, rank, id, values, piece, count) : NULL;
    for (int i = 0; w && ok && i < count; i++)
        ok = append(w, of[i]);
    if (w)
        ok = kn_pieces_commit(w) && kn_sync_folder(dir);
    kn_host_free(piece);
    kn_host_free(of);
    return ok && kn_ok();
}

/* The rank whose parts are in s; -1: it holds whole tensors only. False with an error for parts
 * that only their own sharding can place. */
static bool find_rank(const kn_state *s, int *rank)
{
    *rank = -1;
    for (int i = 0; i < s->count; i++) {
        const kn_state_item *item = &s->list[i];
        if (item->flat)
            return kn_fail("kn_state_save: '%s' is a unit's flat part, which only its own sharding "
                           "can place: take the state as KN_STATE_SHARDED or full",
                           item->name);
        if (item->shards > 1)
            *rank = item->rank;
    }
    return true;
}

bool kn_state_save(const kn_state *s, const char *path)
{
    static const char what[] = "kn_state_save";
    int rank;
    if (!kn_ok() || !kn_given(s, what, "the state") || !kn_given_path(path, what, "the path"))
        return false;
    if (s->count == 0)
        return kn_fail("%s: the state is empty: one taken with .rank0_only is saved on rank 0",
                       what);
    char *values = find_rank(s, &rank) ? kn_state_values_text(s) : NULL;
    const bool ok =
        values && (rank < 0 ? save_whole(s, path, values) : save_part(s, rank, path, values));
    kn_host_free(values);
    return ok;
}

/* ---- opening --------------------------------------------------------------------------------- */

kn_state *kn_state_open(const char *path)
{
    if (!kn_ok() || !kn_given_path(path, "kn_state_open", "the path"))
        return NULL;
    kn_pieces *p = kn_pieces_open(path);
    kn_state *s = p ? kn_state_new() : NULL;
    const char *values = p ? kn_pieces_values(p) : NULL;
    const bool ok = s && kn_state_add_pieces(s, p) &&
                    (!values || kn_state_values_parse(s, values, strlen(values), path));
    kn_pieces_close(p);
    if (ok)
        return s;
    kn_state_free(s);
    return NULL;
}
