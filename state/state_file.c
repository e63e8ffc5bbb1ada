/* state/state_file.c: a full state in one .safetensors file: tensors as such, numbers and texts as
 * JSON in its metadata. */
#include "kernels/error_internal.h"
#include "state/dict_internal.h"
#include "state/shard_file.h"
#include "tensor/safetensors.h"
#include "tensor/tensor_internal.h"

#include <stdlib.h>
#include <string.h>

/* What may be written: whole tensors. */
static bool list_tensors(const kn_state *s, kn_safetensors_entry *list, int *count)
{
    *count = 0;
    for (int i = 0; i < s->count; i++) {
        kn_state_item *item = &s->list[i];
        if (item->type != KN_STATE_TENSOR)
            continue;
        if (item->flat || item->shards > 1)
            return kn_fail("kn_state_save: '%s' is a part, of rank %d of %d: take the state full",
                           item->name, item->rank, item->ranks);
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

bool kn_state_save(const kn_state *s, const char *path)
{
    static const char what[] = "kn_state_save";
    if (!kn_ok() || !kn_given(s, what, "the state") || !kn_given_path(path, what, "the path"))
        return false;
    if (s->count == 0)
        return kn_fail("%s: the state is empty: one taken with .rank0_only is saved on rank 0",
                       what);
    int count;
    kn_safetensors_entry *list = kn_host_calloc((size_t)s->count, sizeof *list);
    char *values = list && list_tensors(s, list, &count) ? kn_state_values_text(s) : NULL;
    const kn_safetensors_pair meta[] = { { "format", "pt" }, { KN_SHARD_VALUES, values } };
    bool ok = values && kn_safetensors_save(path, list, count, meta, 2);
    kn_host_free(list);
    free(values);
    return ok;
}

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
