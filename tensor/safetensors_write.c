/* tensor/safetensors_write.c: writing .safetensors files. The old file stays whole until the new
 * one is (tensor/whole_file.h). */
#include "tensor/safetensors_format.h"
#include "kernels/error_internal.h"
#include "kernels/memory.h"
#include "tensor/json.h"
#include "tensor/whole_file.h"
#include <jansson.h>
#include <string.h>

struct kn_safetensors_writer {
    char *path;
    kn_whole_file *file;
    uint64_t expected, written; /* bytes of data */
};

/* ---- the header ---------------------------------------------------------------------------- */

/* Adds "name": { dtype, shape, data_offsets } and moves *at behind the tensor. The name is unique,
 * and not the reserved one. */
static bool add_entry(json_t *header, const char *path, const kn_safetensors_entry *e, int64_t *at)
{
    const char *dtype = kn_safetensors_dtype_name(e->dtype);
    int64_t bytes, end;
    if (strcmp(e->name, SAFETENSORS_METADATA) == 0)
        return kn_fail("%s: the name %s is reserved", path, SAFETENSORS_METADATA);
    if (json_object_get(header, e->name))
        return kn_fail("%s: two tensors are named \"%.200s\"", path, e->name);
    if (!dtype)
        return kn_fail("%s: tensor \"%.200s\": %d is not a dtype", path, e->name, (int)e->dtype);
    if (e->ndim < 0 || e->ndim > KN_MAX_DIMS)
        return kn_fail("%s: tensor \"%.200s\": %d dims; 0 to %d are supported", path, e->name,
                       e->ndim, KN_MAX_DIMS);
    if (!kn_safetensors_bytes(e->dtype, e->ndim, e->shape, &bytes) ||
        __builtin_add_overflow(*at, bytes, &end))
        return kn_fail("%s: tensor \"%.200s\": a negative size or too many elements", path,
                       e->name);
    json_t *info =
        json_pack("{s:s, s:o, s:[I, I]}", "dtype", dtype, "shape", kn_json_sizes(e->shape, e->ndim),
                  "data_offsets", (json_int_t)*at, (json_int_t)end);
    if (!info || json_object_set_new(header, e->name, info) != 0)
        return kn_fail("%s: the name \"%.200s\" is not UTF-8, or memory is out", path, e->name);
    *at = end;
    return true;
}

static bool add_metadata(json_t *header, const char *path, const kn_safetensors_pair *meta, int n)
{
    json_t *object = n > 0 ? json_object() : NULL;
    if (n > 0 && json_object_set_new(header, SAFETENSORS_METADATA, object) != 0)
        return kn_fail("%s: out of memory for the metadata", path);
    for (int i = 0; i < n; i++) {
        if (!meta[i].key || !meta[i].value || json_object_get(object, meta[i].key))
            return kn_fail("%s: metadata %d (%.200s) lacks key or value, or comes twice", path, i,
                           meta[i].key ? meta[i].key : "no key");
        if (json_object_set_new(object, meta[i].key, json_string(meta[i].value)) != 0)
            return kn_fail("%s: metadata \"%.200s\" is not UTF-8, or memory is out", path,
                           meta[i].key);
    }
    return true;
}

/* Length, JSON and the spaces that bring the data to a multiple of KN_ALIGN. Caller frees. */
static char *pad_header(const char *path, json_t *header, size_t *size)
{
    size_t text = json_dumpb(header, NULL, 0, JSON_COMPACT);
    size_t whole = KN_ALIGNED(8 + text);
    if (text == 0 || whole - 8 > SAFETENSORS_MAX_HEADER)
        return kn_fail_null("%s: the header would have %zu bytes, at most %u are allowed", path,
                            text, SAFETENSORS_MAX_HEADER);
    char *b = kn_host_alloc(whole);
    if (!b)
        return NULL;
    memset(b, ' ', whole);
    for (int i = 0; i < 8; i++)
        b[i] = (char)((whole - 8) >> (8 * i) & 0xff);
    if (json_dumpb(header, b + 8, whole - 8, JSON_COMPACT) != text) {
        kn_fail("%s: out of memory for the header", path);
        kn_host_free(b);
        return NULL;
    }
    *size = whole;
    return b;
}

char *kn_safetensors_header(const char *path, const kn_safetensors_entry *entry, int entries,
                            const kn_safetensors_pair *meta, int metas, size_t *size, int64_t *data)
{
    *data = 0;
    json_t *header = json_object();
    bool ok = header || kn_fail("%s: out of memory for the header", path);
    ok = ok && add_metadata(header, path, meta, metas);
    for (int i = 0; i < entries && ok; i++)
        ok = entry[i].name ? add_entry(header, path, &entry[i], data)
                           : kn_fail("%s: tensor %d has no name", path, i);
    char *bytes = ok ? pad_header(path, header, size) : NULL;
    json_decref(header);
    return bytes;
}

/* ---- the file ------------------------------------------------------------------------------ */

void kn_safetensors_abandon(kn_safetensors_writer *w)
{
    if (!w)
        return;
    kn_whole_file_abandon(w->file);
    kn_host_free(w->path);
    kn_host_free(w);
}

kn_safetensors_writer *kn_safetensors_create(const char *path, const kn_safetensors_entry *entry,
                                             int entries, const kn_safetensors_pair *meta,
                                             int metas)
{
    if (!kn_given_path(path, "kn_safetensors_create", "the path") ||
        (entries > 0 && !kn_given(entry, "kn_safetensors_create", "the list of entries")) ||
        (metas > 0 && !kn_given(meta, "kn_safetensors_create", "the list of metadata")))
        return NULL;
    size_t size = 0;
    int64_t data = 0;
    char *bytes =
        kn_ok() ? kn_safetensors_header(path, entry, entries, meta, metas, &size, &data) : NULL;
    kn_safetensors_writer *w = bytes ? kn_host_calloc(1, sizeof *w) : NULL;
    if (!w)
        goto fail;
    w->expected = (uint64_t)data;
    if (!(w->path = kn_host_strdup(path)) || !(w->file = kn_whole_file_create(path)) ||
        !kn_whole_file_write(w->file, bytes, size))
        goto fail;
    kn_host_free(bytes);
    return w;
fail:
    kn_safetensors_abandon(w);
    kn_host_free(bytes);
    return NULL;
}

bool kn_safetensors_append(kn_safetensors_writer *w, const void *data, size_t bytes)
{
    if (!kn_ok())
        return false;
    if (!w || (!data && bytes > 0))
        return kn_fail("safetensors: append without %s", w ? "data" : "a writer");
    if (bytes > w->expected - w->written)
        return kn_fail("%s: %zu bytes more than its header says (%llu)", w->path,
                       bytes - (size_t)(w->expected - w->written), (unsigned long long)w->expected);
    if (!kn_whole_file_write(w->file, data, bytes))
        return false;
    w->written += bytes;
    return true;
}

bool kn_safetensors_commit(kn_safetensors_writer *w)
{
    if (!w)
        return kn_ok() ? kn_fail("safetensors: commit without a writer") : false;
    bool ok = kn_ok();
    if (ok && w->written != w->expected)
        ok = kn_fail("%s: %llu of %llu bytes of data were written", w->path,
                     (unsigned long long)w->written, (unsigned long long)w->expected);
    if (ok) {
        ok = kn_whole_file_commit(w->file);
        w->file = NULL;
    }
    kn_safetensors_abandon(w);
    return ok;
}

bool kn_safetensors_save(const char *path, const kn_safetensors_entry *entry, int entries,
                         const kn_safetensors_pair *meta, int metas)
{
    if (!kn_given_path(path, "kn_safetensors_save", "the path"))
        return false;
    kn_safetensors_writer *w = kn_safetensors_create(path, entry, entries, meta, metas);
    for (int i = 0; w && i < entries; i++) {
        int64_t bytes = 0;
        kn_safetensors_bytes(entry[i].dtype, entry[i].ndim, entry[i].shape, &bytes);
        if (bytes > 0 && !kn_safetensors_append(w, entry[i].data, (size_t)bytes)) {
            kn_safetensors_abandon(w);
            return false;
        }
    }
    return w && kn_safetensors_commit(w);
}
