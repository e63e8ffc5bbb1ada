/* tensor/safetensors_read.c: reading .safetensors files through a mapping. Nothing in the header is
 * believed: each claim is checked against the format and the file's size before it is used. */
#include "tensor/safetensors_format.h"
#include "tensor/tensor_internal.h"
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* The mapped file, held by the open file and by every storage on it. */
typedef struct mapping {
    int refs;
    char *bytes;
    size_t size;
} mapping;

typedef struct entry {
    const char *name; /* lies in the JSON tree */
    kn_dtype dtype;
    int ndim;
    int64_t shape[KN_MAX_DIMS];
    int64_t begin, end; /* bytes from the start of the data */
    int index;          /* place in the header */
} entry;

struct kn_safetensors {
    char *path;
    mapping *map;
    size_t data_at; /* where the data begins in the file */
    json_t *header;
    int count;
    entry *entries; /* in order of their data */
    const entry **by_name;
};

/* ---- the mapping --------------------------------------------------------------------------- */

static void mapping_unref(void *arg)
{
    mapping *m = arg;
    if (!m || --m->refs > 0)
        return;
    if (m->bytes)
        munmap(m->bytes, m->size);
    kn_free_host(m);
}

static mapping *mapping_open(const char *path)
{
    struct stat st;
    mapping *m = NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        kn_fail("%s: cannot open: %s", path, strerror(errno));
        return NULL;
    }
    if (fstat(fd, &st) != 0) {
        kn_fail("%s: cannot read its size: %s", path, strerror(errno));
        goto done;
    }
    if (!S_ISREG(st.st_mode)) {
        kn_fail("%s: not a regular file", path);
        goto done;
    }
    if (st.st_size < 8) {
        kn_fail("%s: not a safetensors file: %lld bytes, the header length alone takes 8", path,
                (long long)st.st_size);
        goto done;
    }
    if (!(m = kn_calloc(1, sizeof *m)))
        goto done;
    void *p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (p == MAP_FAILED) {
        kn_fail("%s: cannot map %lld bytes: %s", path, (long long)st.st_size, strerror(errno));
        kn_free_host(m);
        m = NULL;
        goto done;
    }
    *m = (mapping){ .refs = 1, .bytes = p, .size = (size_t)st.st_size };
done:
    close(fd);
    return m;
}

/* ---- the header ---------------------------------------------------------------------------- */

/* Length and first byte, then the JSON. */
static bool read_header(kn_safetensors *f)
{
    const unsigned char *b = (const unsigned char *)f->map->bytes;
    uint64_t length = 0, room = f->map->size - 8;
    for (int i = 7; i >= 0; i--)
        length = length << 8 | b[i];
    if (length > SAFETENSORS_MAX_HEADER)
        return kn_fail(
            "%s: not a safetensors file: its header would have %llu bytes, at most %u are "
            "allowed",
            f->path, (unsigned long long)length, SAFETENSORS_MAX_HEADER);
    if (length > room)
        return kn_fail("%s: truncated: the header has %llu bytes, the file only %llu after its "
                       "length: fetch or save it again",
                       f->path, (unsigned long long)length, (unsigned long long)room);
    if (length == 0 || b[8] != '{')
        return kn_fail("%s: not a safetensors file: the header does not begin with '{'", f->path);
    json_error_t e;
    f->header = json_loadb((const char *)b + 8, (size_t)length, JSON_REJECT_DUPLICATES, &e);
    if (!f->header)
        return kn_fail("%s: bad header: %s at byte %d", f->path, e.text, e.position);
    f->data_at = 8 + (size_t)length;
    return true;
}

static bool read_metadata(const kn_safetensors *f)
{
    const char *key;
    json_t *value, *meta = json_object_get(f->header, SAFETENSORS_METADATA);
    if (meta && !json_is_object(meta))
        return kn_fail("%s: bad header: %s is not an object", f->path, SAFETENSORS_METADATA);
    json_object_foreach(meta, key, value)
    {
        if (!json_is_string(value))
            return kn_fail("%s: bad header: %s[\"%.200s\"] is not a string", f->path,
                           SAFETENSORS_METADATA, key);
    }
    return true;
}

/* A list of exactly n integers >= 0. */
static bool read_sizes(const json_t *list, size_t n, int64_t *out)
{
    if (!json_is_array(list) || json_array_size(list) != n)
        return false;
    for (size_t i = 0; i < n; i++) {
        const json_t *x = json_array_get(list, i);
        if (!json_is_integer(x) || json_integer_value(x) < 0)
            return false;
        out[i] = json_integer_value(x);
    }
    return true;
}

static bool read_entry(const kn_safetensors *f, entry *e, const json_t *info)
{
    const char *dtype = json_string_value(json_object_get(info, "dtype"));
    const json_t *shape = json_object_get(info, "shape");
    int64_t offset[2], bytes, room = (int64_t)(f->map->size - f->data_at);
    size_t ndim = json_array_size(shape);
    if (!json_is_object(info) || !dtype || !json_is_array(shape))
        return kn_fail("%s: tensor \"%.200s\": needs dtype, shape and data_offsets", f->path,
                       e->name);
    e->dtype = kn_safetensors_dtype_parse(dtype);
    if (e->dtype == KN_DTYPE_DEFAULT)
        return kn_fail("%s: tensor \"%.200s\": dtype \"%.40s\"; supported are %s", f->path, e->name,
                       dtype, SAFETENSORS_DTYPES);
    if (ndim > KN_MAX_DIMS)
        return kn_fail("%s: tensor \"%.200s\": %zu dims; at most %d are supported", f->path,
                       e->name, ndim, KN_MAX_DIMS);
    e->ndim = (int)ndim;
    if (!read_sizes(shape, ndim, e->shape))
        return kn_fail("%s: tensor \"%.200s\": sizes must be integers >= 0", f->path, e->name);
    if (!read_sizes(json_object_get(info, "data_offsets"), 2, offset) || offset[1] < offset[0])
        return kn_fail(
            "%s: tensor \"%.200s\": data_offsets must be two integers, 0 <= begin <= end", f->path,
            e->name);
    e->begin = offset[0];
    e->end = offset[1];
    if (e->end > room)
        return kn_fail("%s: tensor \"%.200s\" ends at byte %lld of %lld bytes of data: the file is "
                       "truncated or its header is wrong",
                       f->path, e->name, (long long)e->end, (long long)room);
    if (!kn_safetensors_bytes(e->dtype, e->ndim, e->shape, &bytes))
        return kn_fail("%s: tensor \"%.200s\": its shape has too many elements", f->path, e->name);
    if (bytes != e->end - e->begin)
        return kn_fail(
            "%s: tensor \"%.200s\": shape and dtype %s need %lld bytes, data_offsets give "
            "%lld",
            f->path, e->name, dtype, (long long)bytes, (long long)(e->end - e->begin));
    return true;
}

static int compare_data(const void *x, const void *y)
{
    const entry *a = x, *b = y;
    if (a->begin != b->begin)
        return a->begin < b->begin ? -1 : 1;
    if (a->end != b->end)
        return a->end < b->end ? -1 : 1;
    return a->index - b->index;
}

static int compare_names(const void *x, const void *y)
{
    const entry *const *a = x, *const *b = y;
    return strcmp((*a)->name, (*b)->name);
}

/* In order of their data the tensors must cover it exactly. */
static bool check_cover(const kn_safetensors *f)
{
    int64_t at = 0, room = (int64_t)(f->map->size - f->data_at);
    for (int i = 0; i < f->count; i++) {
        const entry *e = &f->entries[i];
        if (e->begin != at)
            return kn_fail("%s: tensor \"%.200s\" begins at byte %lld, %s byte %lld where the one "
                           "before it ends",
                           f->path, e->name, (long long)e->begin,
                           e->begin < at ? "overlapping what lies before" : "leaving a hole after",
                           (long long)at);
        at = e->end;
    }
    if (at != room)
        return kn_fail("%s: its tensors end at byte %lld, but %lld bytes of data follow the header",
                       f->path, (long long)at, (long long)room);
    return true;
}

static bool read_entries(kn_safetensors *f)
{
    const char *key;
    json_t *info;
    size_t room = json_object_size(f->header);
    if (!(f->entries = kn_calloc(room, sizeof *f->entries)) ||
        !(f->by_name = kn_calloc(room, sizeof *f->by_name)))
        return false;
    json_object_foreach(f->header, key, info)
    {
        if (strcmp(key, SAFETENSORS_METADATA) == 0)
            continue;
        entry *e = &f->entries[f->count];
        e->name = key;
        e->index = f->count++;
        if (!read_entry(f, e, info))
            return false;
    }
    qsort(f->entries, (size_t)f->count, sizeof *f->entries, compare_data);
    for (int i = 0; i < f->count; i++)
        f->by_name[i] = &f->entries[i];
    qsort(f->by_name, (size_t)f->count, sizeof *f->by_name, compare_names);
    return check_cover(f);
}

kn_safetensors *kn_safetensors_open(const char *path)
{
    if (!kn_ok())
        return NULL;
    kn_safetensors *f = kn_calloc(1, sizeof *f);
    if (!f)
        return NULL;
    if ((f->path = kn_strdup(path)) && (f->map = mapping_open(path)) && read_header(f) &&
        read_metadata(f) && read_entries(f))
        return f;
    kn_safetensors_close(f);
    return NULL;
}

void kn_safetensors_close(kn_safetensors *f)
{
    if (!f)
        return;
    json_decref(f->header);
    mapping_unref(f->map);
    kn_free_host(f->entries);
    kn_free_host(f->by_name);
    kn_free_host(f->path);
    kn_free_host(f);
}

/* ---- what is in it ------------------------------------------------------------------------- */

static const entry *find(const kn_safetensors *f, const char *name)
{
    int low = 0, high = f->count;
    while (low < high) {
        int mid = low + (high - low) / 2;
        int order = strcmp(name, f->by_name[mid]->name);
        if (order == 0)
            return f->by_name[mid];
        if (order < 0)
            high = mid;
        else
            low = mid + 1;
    }
    return NULL;
}

int kn_safetensors_count(const kn_safetensors *f)
{
    return f ? f->count : 0;
}

const char *kn_safetensors_name(const kn_safetensors *f, int i)
{
    return f && i >= 0 && i < f->count ? f->entries[i].name : NULL;
}

bool kn_safetensors_has(const kn_safetensors *f, const char *name)
{
    return f && find(f, name);
}

const char *kn_safetensors_meta(const kn_safetensors *f, const char *key)
{
    if (!f)
        return NULL;
    return json_string_value(
        json_object_get(json_object_get(f->header, SAFETENSORS_METADATA), key));
}

/* Tensors whose bytes lie at no multiple of their element size (the format allows that) are copied:
 * no kernel takes such an address. */
static kn_tensor *copied(const entry *e, const void *bytes)
{
    kn_tensor *t =
        kn_tensor_new(e->dtype, KN_CPU, NULL, KN_MEM_DATA, e->ndim, e->shape, NULL, true);
    if (t)
        memcpy(t->storage->data, bytes, (size_t)(e->end - e->begin));
    return t;
}

kn_tensor *kn_safetensors_get(kn_safetensors *f, const char *name)
{
    if (!kn_ok() || !f)
        return kn_fail("safetensors: no file"), NULL;
    const entry *e = find(f, name);
    if (!e) {
        kn_fail("%s: no tensor \"%.200s\" among its %d", f->path, name, f->count);
        return NULL;
    }
    char *bytes = f->map->bytes + f->data_at + e->begin;
    kn_tensor *t = NULL;
    if ((uintptr_t)bytes % kn_dtype_size(e->dtype) != 0) {
        t = copied(e, bytes);
    } else {
        kn_storage *s = kn_storage_wrap(KN_CPU, bytes, (size_t)(e->end - e->begin), mapping_unref,
                                        f->map, e->name);
        if (!s)
            return NULL;
        f->map->refs++;
        s->read_only = true;
        t = kn_tensor_on(s, 0, e->dtype, e->ndim, e->shape, NULL, true);
        kn_storage_unref(s);
    }
    if (t)
        kn_set_name(t, e->name);
    return t && kn_ok() ? t : NULL;
}
