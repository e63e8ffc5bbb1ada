/* data/tensor_loader.c: batches of rows of tensors: views where the rows of a batch follow each
 * other, else gathered. */
#include "autograd/autograd.h"
#include "autograd/operations.h"
#include "data/loader_internal.h"

#include <string.h>

/* ---- rows ------------------------------------------------------------------------------------ */

int64_t kn_loader_view(const kn_loader *l, int64_t round)
{
    if (!l->source[0] || kn_device_of(l->source[0]) != l->device)
        return -1;
    kn_row first = kn_loader_row(l, round, 0), last = kn_loader_row(l, round, l->batch - 1);
    bool in_order = (!l->shuffle || l->batch == 1) && last.index - first.index == l->batch - 1;
    return in_order ? first.index : -1;
}

bool kn_loader_gathers_there(const kn_loader *l)
{
    return l->source[0] && kn_device_of(l->source[0]) != KN_CPU;
}

kn_tensor *kn_loader_rows_of(const kn_tensor *t, int64_t first, int64_t rows)
{
    int64_t shape[KN_MAX_DIMS];
    memcpy(shape, t->shape, sizeof shape);
    shape[0] = rows;
    return kn_tensor_alias(t, first * t->stride[0], t->ndim, shape, t->stride);
}

static kn_tensor *gathered(const kn_loader *l, int64_t round, int f)
{
    int64_t *index = kn_host_alloc((size_t)l->batch * sizeof *index);
    if (!index)
        return NULL;
    for (int64_t r = 0; r < l->batch; r++)
        index[r] = kn_loader_row(l, round, r).index;
    bool mode = kn_set_grad_mode(false);
    kn_tensor *at = kn_from(KN_I64, l->device, index, KN_SHAPE(l->batch));
    kn_tensor *t = at ? kn_index_select(l->source[f], 0, at) : NULL;
    kn_set_grad_mode(mode);
    kn_host_free(index);
    return t;
}

kn_tensor *kn_loader_rows(const kn_loader *l, int64_t round, int f, bool *copied)
{
    int64_t first = kn_loader_view(l, round);
    if (first >= 0)
        return kn_loader_rows_of(l->source[f], first, l->batch);
    *copied = true;
    return gathered(l, round, f);
}

/* Copies the rows of one sample; the tensors' bytes stay where they are while the loader lives. */
static int copy_sample(kn_data_sample *s, void *arg)
{
    const kn_loader *l = arg;
    for (int f = 0; f < l->fields; f++)
        memcpy(s->field[f], l->bytes[f] + (size_t)s->index * l->row_bytes[f], l->row_bytes[f]);
    return true;
}

/* ---- making ---------------------------------------------------------------------------------- */

/* Field f of the options; the number of samples comes with the first one. */
static bool check_source(kn_tensor *const *source, int f, kn_field *field)
{
    static const char *const caller = "kn_tensor_loader";
    const kn_tensor *t = source[f], *first = source[0];
    char text[96];
    if (!kn_check(t, caller))
        return false;
    kn_describe(t, text, sizeof text);
    if (t->ndim < 1)
        return kn_fail("%s: field %d is %s, without a dim of samples", caller, f, text);
    if (t->shape[0] != first->shape[0])
        return kn_fail("%s: field %d, %s, has %lld samples, but field 0 has %lld", caller, f, text,
                       (long long)t->shape[0], (long long)first->shape[0]);
    if (!kn_is_contiguous(t))
        return kn_fail("%s: field %d, %s, isn't contiguous; give kn_contiguous of it", caller, f,
                       text);
    if (kn_device_of(t) != kn_device_of(first))
        return kn_fail("%s: field %d, %s, is on %s, but field 0 on %s", caller, f, text,
                       kn_device_name(kn_device_of(t)), kn_device_name(kn_device_of(first)));
    *field = (kn_field){ .dtype = t->dtype, .ndim = t->ndim - 1 };
    memcpy(field->shape, t->shape + 1, (size_t)field->ndim * sizeof *field->shape);
    return true;
}

static int check_sources(kn_tensor *const *source, kn_field *field)
{
    int fields = 0;
    for (; fields < KN_MAX_FIELDS && source[fields]; fields++)
        if (!check_source(source, fields, &field[fields]))
            return 0;
    for (int f = fields; f < KN_MAX_FIELDS; f++)
        if (source[f])
            return kn_fail("kn_tensor_loader: field %d is NULL, but field %d is given", fields, f),
                   0;
    if (fields == 0)
        kn_fail("kn_tensor_loader: .field is empty; give at least one tensor");
    return fields;
}

static bool keep_sources(kn_loader *l, kn_tensor *const *source)
{
    for (int f = 0; f < l->fields; f++) {
        l->source[f] = kn_keep(source[f]);
        l->bytes[f] = kn_device_of(source[f]) == KN_META ? NULL : kn_array_of(source[f]).data;
    }
    return kn_ok();
}

kn_loader *kn_tensor_loader_(kn_comm *world, kn_tensor_loader_options o)
{
    kn_field field[KN_MAX_FIELDS] = { { 0 } };
    if (!kn_ok() || check_sources(o.field, field) == 0)
        return NULL;
    kn_device there = kn_device_of(o.field[0]);
    if (kn_size(o.field[0], 0) == 0)
        return kn_fail_null("kn_tensor_loader: the data set is empty");
    if (there != KN_CPU && o.device && o.device != there)
        return kn_fail_null("kn_tensor_loader: tensors on %s make batches on %s, not on %s",
                            kn_device_name(there), kn_device_name(there), kn_device_name(o.device));
    if (there != KN_CPU && o.workers > 0)
        return kn_fail_null(
            "kn_tensor_loader: .workers is %d, but tensors on %s are gathered there", o.workers,
            kn_device_name(there));
    o.device = o.device ? o.device : there;
    kn_loader *l = kn_loader_make("kn_tensor_loader", copy_sample, NULL, NULL, world,
                                  kn_size(o.field[0], 0), field, KN_LOADER_COMMON(o));
    if (!l)
        return NULL;
    l->arg = l;
    if (keep_sources(l, o.field))
        return l;
    kn_loader_free(l);
    return NULL;
}
