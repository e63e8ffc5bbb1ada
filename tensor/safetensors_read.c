/* tensor/safetensors_read.c: reading .safetensors files. The header is not trusted: each claim is
 * checked against the format and the file's size before it is used. Bytes are read, not mapped: a
 * file that is cut meanwhile is an error; with a mapping it would be SIGBUS. */
#include "kernels/error_internal.h"
#include "kernels/memory_internal.h"
#include "tensor/checksum.h"
#include "tensor/safetensors_format.h"
#include "tensor/tensor_internal.h"
#include "tensor/files.h"
#include "tensor/json.h"
#include "tensor/names.h"
#include <fcntl.h>
#include <jansson.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct entry {
    const char *name; /* lies in the header */
    kn_dtype dtype;
    int ndim;
    int64_t shape[KN_MAX_DIMS];
    int64_t begin, end; /* bytes from the start of the data */
    int index;          /* place in the header */
} entry;

struct kn_safetensors {
    char *path;
    int fd;
    size_t size;    /* of the file, when it was opened */
    size_t data_at; /* where the data begins in the file */
    uint64_t header_sum;
    char *header;   /* each tensor's name, in place of its JSON */
    json_t *meta;   /* NULL: the header has none */
    entry *entries; /* in order of their data */
    int count;
    int64_t room;        /* of entries */
    kn_name_table table; /* of entries */
};

/* ---- the file ------------------------------------------------------------------------------ */

static bool check_file(kn_safetensors *f)
{
    struct stat st;
    if (kn_file_facts(f->fd, &st) != 0)
        return kn_fail_system("%s: cannot read its size: %m", f->path);
    if (!S_ISREG(st.st_mode))
        return kn_fail("%s: not a regular file", f->path);
    if (st.st_size < 8)
        return kn_fail("%s: not a safetensors file: %lld bytes, the header length alone takes 8",
                       f->path, (long long)st.st_size);
    f->size = (size_t)st.st_size;
    return true;
}

/* ---- the header ---------------------------------------------------------------------------- */

/* Its length, then the JSON. */
static bool read_header(kn_safetensors *f)
{
    unsigned char b[8];
    uint64_t length = 0, room = f->size - 8;
    if (!kn_read_whole(f->fd, f->path, b, sizeof b, 0))
        return false;
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
    f->header = kn_host_alloc((size_t)length + 1);
    if (!f->header || !kn_read_whole(f->fd, f->path, f->header, (size_t)length, 8))
        return false;
    f->header[length] = 0;
    f->data_at = 8 + (size_t)length;
    kn_checksum sum;
    kn_checksum_begin(&sum);
    kn_checksum_add(&sum, b, sizeof b);
    kn_checksum_add(&sum, f->header, (size_t)length);
    f->header_sum = kn_checksum_end(&sum);
    return true;
}

static bool read_metadata(const kn_safetensors *f)
{
    const char *key;
    json_t *value;
    if (!json_is_object(f->meta))
        return kn_fail("%s: bad header: %s is not an object", f->path, SAFETENSORS_METADATA);
    json_object_foreach(f->meta, key, value)
    {
        if (!json_is_string(value))
            return kn_fail("%s: bad header: %s[\"%.200s\"] is not a string", f->path,
                           SAFETENSORS_METADATA, key);
    }
    return true;
}

static bool read_entry(const kn_safetensors *f, entry *e, const json_t *info)
{
    const char *dtype = json_string_value(json_object_get(info, "dtype"));
    const json_t *shape = json_object_get(info, "shape");
    int64_t offset[2], bytes, room = (int64_t)(f->size - f->data_at);
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
    if (!kn_json_read_sizes(shape, ndim, e->shape))
        return kn_fail("%s: tensor \"%.200s\": sizes must be integers >= 0", f->path, e->name);
    if (!kn_json_read_sizes(json_object_get(info, "data_offsets"), 2, offset) ||
        offset[1] < offset[0])
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

/* In order of their data the tensors must cover it exactly. */
static bool check_cover(const kn_safetensors *f)
{
    int64_t at = 0, room = (int64_t)(f->size - f->data_at);
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

static const entry *find(const kn_safetensors *f, const char *name)
{
    const int at = kn_name_table_find(&f->table, f->entries, sizeof *f->entries, name);
    return at >= 0 ? &f->entries[at] : NULL;
}

static bool make_table(kn_safetensors *f)
{
    if (!kn_name_table_grow(&f->table, f->entries, sizeof *f->entries, 0, f->count))
        return false;
    for (int i = 0; i < f->count; i++) {
        if (find(f, f->entries[i].name))
            return kn_fail("%s: bad header: duplicate tensor \"%.200s\"", f->path,
                           f->entries[i].name);
        kn_name_table_add(&f->table, f->entries, sizeof *f->entries, i);
    }
    return true;
}

/* The header's JSON is read value by value: a tree of all tensors takes twenty times its bytes. */
typedef struct reader {
    kn_safetensors *f;
    size_t at, length;
} reader;

/* The next character that isn't a space; 0 at the end. */
static char peek(reader *r)
{
    const char *text = r->f->header;
    while (r->at < r->length && text[r->at] && strchr(" \t\r\n", text[r->at]))
        r->at++;
    return text[r->at];
}

static bool skip(reader *r, char c)
{
    if (peek(r) != c)
        return kn_fail("%s: bad header: no '%c' at byte %zu", r->f->path, c, r->at);
    r->at++;
    return true;
}

static json_t *next_value(reader *r)
{
    json_error_t e;
    peek(r);
    json_t *j = kn_json_next(r->f->header + r->at, r->length - r->at,
                             JSON_REJECT_DUPLICATES | JSON_DECODE_ANY | JSON_DISABLE_EOF_CHECK,
                             r->f->path, &e);
    if (j)
        r->at += (size_t)e.position;
    else
        kn_fail("%s: bad header: %s at byte %zu", r->f->path, e.text, r->at + (size_t)e.position);
    return j;
}

/* Takes over info. */
static bool add_member(kn_safetensors *f, const char *name, json_t *info)
{
    bool ok;
    if (strcmp(name, SAFETENSORS_METADATA) == 0) {
        ok = !f->meta || kn_fail("%s: bad header: duplicate %s", f->path, name);
        if (ok) {
            f->meta = info;
            return read_metadata(f);
        }
    } else {
        ok = kn_host_grow(&f->entries, &f->room, f->count + 1, sizeof *f->entries);
        if (ok) {
            entry *e = &f->entries[f->count];
            *e = (entry){ .name = name, .index = f->count };
            ok = read_entry(f, e, info);
            f->count++;
        }
    }
    json_decref(info);
    return ok;
}

/* "name": value. The name goes where its JSON was: it is no longer than that, with its quotes. */
static bool read_member(reader *r)
{
    if (peek(r) != '"')
        return kn_fail("%s: bad header: no name at byte %zu", r->f->path, r->at);
    char *name = r->f->header + r->at;
    json_t *key = next_value(r);
    if (key)
        memcpy(name, json_string_value(key), json_string_length(key) + 1);
    json_decref(key);
    json_t *info = key && skip(r, ':') ? next_value(r) : NULL;
    return info && add_member(r->f, name, info);
}

static bool read_members(reader *r)
{
    if (r->length == 0 || r->f->header[0] != '{')
        return kn_fail("%s: not a safetensors file: the header does not begin with '{'",
                       r->f->path);
    r->at = 1;
    bool more = peek(r) != '}';
    while (more) {
        if (!read_member(r))
            return false;
        more = peek(r) == ',';
        r->at += more;
    }
    if (!skip(r, '}'))
        return false;
    peek(r);
    return r->at == r->length ||
           kn_fail("%s: bad header: more than an object at byte %zu", r->f->path, r->at);
}

static bool read_entries(kn_safetensors *f)
{
    reader r = { .f = f, .length = f->data_at - 8 };
    if (!kn_json_watch(f->header, r.length, f->path))
        return false;
    bool ok = read_members(&r);
    if (!kn_json_watched(f->path) || !ok)
        return false;
    bool sorted = true;
    for (int i = 1; i < f->count; i++)
        sorted &= compare_data(&f->entries[i - 1], &f->entries[i]) < 0;
    if (!sorted)
        qsort(f->entries, (size_t)f->count, sizeof *f->entries, compare_data);
    return make_table(f) && check_cover(f);
}

kn_safetensors *kn_safetensors_open_fd(const char *path, int fd)
{
    kn_safetensors *f = kn_ok() ? kn_host_calloc(1, sizeof *f) : NULL;
    if (!f) {
        close(fd);
        return NULL;
    }
    f->fd = fd;
    if ((f->path = kn_host_strdup(path)) && check_file(f) && read_header(f) && read_entries(f))
        return f;
    kn_safetensors_close(f);
    return NULL;
}

kn_safetensors *kn_safetensors_open(const char *path)
{
    if (!kn_given_path(path, "kn_safetensors_open", "the path"))
        return NULL;
    if (!kn_ok())
        return NULL;
    int fd = kn_open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0); /* no wait at a FIFO */
    if (fd >= 0)
        return kn_safetensors_open_fd(path, fd);
    kn_fail_system("%s: cannot open: %m", path);
    return NULL;
}

void kn_safetensors_close(kn_safetensors *f)
{
    if (!f)
        return;
    json_decref(f->meta);
    close(f->fd);
    kn_host_free(f->header);
    kn_host_free(f->entries);
    kn_host_free(f->table.slot);
    kn_host_free(f->path);
    kn_host_free(f);
}

/* ---- contents ------------------------------------------------------------------------- */

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
    return json_string_value(json_object_get(f->meta, key));
}

static const entry *find_or_fail(const kn_safetensors *f, const char *name)
{
    if (!kn_ok() || !f)
        return kn_fail_null("safetensors: no file");
    const entry *e = find(f, name);
    if (!e)
        kn_fail("%s: no tensor \"%.200s\" among its %d", f->path, name, f->count);
    return e;
}

int64_t kn_safetensors_place(const kn_safetensors *f, int i, kn_array *array)
{
    const entry *e = &f->entries[i];
    *array = (kn_array){ .dtype = e->dtype, .ndim = e->ndim };
    memcpy(array->shape, e->shape, (size_t)e->ndim * sizeof *e->shape);
    return (int64_t)f->data_at + e->begin;
}

int64_t kn_safetensors_size(const kn_safetensors *f)
{
    return (int64_t)f->size;
}

uint64_t kn_safetensors_header_sum(const kn_safetensors *f)
{
    return f->header_sum;
}

bool kn_safetensors_describe(const kn_safetensors *f, const char *name, kn_array *array)
{
    const entry *e = find_or_fail(f, name);
    if (e)
        kn_safetensors_place(f, (int)(e - f->entries), array);
    return e != NULL;
}

kn_tensor *kn_safetensors_get(kn_safetensors *f, const char *name)
{
    const entry *e = find_or_fail(f, name);
    if (!e)
        return NULL;
    kn_tensor *t =
        kn_tensor_new(e->dtype, KN_CPU, NULL, KN_MEM_DATA, e->ndim, e->shape, NULL, true);
    if (!t || !kn_read_whole(f->fd, f->path, t->storage->data, (size_t)(e->end - e->begin),
                             (int64_t)f->data_at + e->begin))
        return NULL;
    kn_set_name(t, e->name);
    return kn_ok() ? t : NULL;
}
