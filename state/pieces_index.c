/* state/pieces_index.c: which bytes of which files hold which part of which tensor. Headers and
 * indices may come from a stranger: each claim is checked before it is used. */
#include "kernels/error_internal.h"
#include "kernels/memory_internal.h"
#include "state/pieces_internal.h"
#include "tensor/safetensors_format.h"
#include "tensor/files.h"
#include "tensor/json.h"
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ---- one file's tensors ---------------------------------------------------------------------- */

/* A rectangle as its header tells it, before those of a tensor come together. */
typedef struct told {
    char *name;
    kn_dtype dtype;
    int ndim;
    bool has_shape;
    int64_t shape[KN_MAX_DIMS];
    kn_indexed_part part;
} told;

typedef struct reading {
    kn_pieces *p;
    kn_safetensors *header;
    json_t *info, *sums; /* what the metadata says of parts and checksums; NULL: nothing */
    const char *path;
    told *told;
    int count;
    int64_t room;
} reading;

/* The metadata of key is itself the text of a JSON object. */
static bool read_text(const reading *r, const char *key, json_t **object)
{
    json_error_t e;
    const char *text = kn_safetensors_meta(r->header, key);
    *object = NULL;
    if (!text)
        return true;
    *object = kn_json_parse(text, strlen(text), JSON_REJECT_DUPLICATES, r->path, &e);
    if (!*object)
        return kn_fail("%s: bad metadata %s: %s at byte %d", r->path, key, e.text, e.position);
    return json_is_object(*object) || kn_fail("%s: metadata %s is no object", r->path, key);
}

static bool read_part(const reading *r, told *t)
{
    const json_t *info = json_object_get(r->info, t->name);
    const json_t *shape = json_object_get(info, "global_shape");
    if (!r->info)
        return true;
    if (!kn_json_read_sizes(json_object_get(info, "saved_offsets"), (size_t)t->ndim,
                            t->part.r.offset))
        return kn_fail("%s: tensor \"%.200s\": %s has no list of %d saved_offsets >= 0 for it",
                       r->path, t->name, KN_SHARD_INFO, t->ndim);
    t->has_shape = shape != NULL;
    return !shape || kn_json_read_sizes(shape, (size_t)t->ndim, t->shape) ||
           kn_fail("%s: tensor \"%.200s\": its global_shape is no list of %d sizes >= 0", r->path,
                   t->name, t->ndim);
}

static bool read_sum(const reading *r, told *t)
{
    const json_t *sum = json_object_get(r->sums, t->name);
    const char *text = json_string_value(sum);
    if (!sum)
        return true;
    t->part.has_sum = text && strlen(text) == 16 && strspn(text, "0123456789abcdef") == 16;
    t->part.sum = t->part.has_sum ? strtoull(text, NULL, 16) : 0;
    return t->part.has_sum || kn_fail("%s: tensor \"%.200s\": its checksum in %s isn't 16 digits "
                                      "of hexadecimal",
                                      r->path, t->name, KN_SHARD_SUMS);
}

/* Adds a tensor's rectangle of that shape, at a place in a file; NULL with an error. */
static told *tell(reading *r, const char *name, kn_dtype dtype, int ndim, const int64_t *shape,
                  kn_indexed_part part)
{
    char *copy = kn_host_grow(&r->told, &r->room, r->count + 1, sizeof *r->told)
                     ? kn_host_strdup(name)
                     : NULL;
    if (!copy)
        return NULL;
    told *t = &r->told[r->count++];
    *t = (told){ .name = copy, .dtype = dtype, .ndim = ndim, .part = part };
    memcpy(t->part.r.size, shape, (size_t)ndim * sizeof *shape);
    return t;
}

static bool read_tensor(reading *r, int file, int i)
{
    kn_array a;
    const int64_t at = kn_safetensors_place(r->header, i, &a);
    told *t = tell(r, kn_safetensors_name(r->header, i), a.dtype, a.ndim, a.shape,
                   (kn_indexed_part){ .file = file, .at = at });
    return t && read_part(r, t) && read_sum(r, t);
}

/* All files of a checkpoint carry the same id. */
static bool read_id(const reading *r, int file)
{
    const char *id = kn_safetensors_meta(r->header, KN_SHARD_ID);
    if (id && (strlen(id) >= sizeof r->p->id || !*id))
        return kn_fail("%s: metadata %s has %zu characters; 1 to %zu are allowed", r->path,
                       KN_SHARD_ID, strlen(id), sizeof r->p->id - 1);
    if (file == 0)
        snprintf(r->p->id, sizeof r->p->id, "%s", id ? id : "");
    if (strcmp(r->p->id, id ? id : "") == 0)
        return true;
    return strncmp(r->p->id, KN_VALUES_ID, strlen(KN_VALUES_ID)) == 0
               ? kn_fail("%s and %s are of states with other values, such as the number of steps: "
                         "their ranks weren't at the same step; load a checkpoint in their place",
                         r->p->file[0].path, r->path)
               : kn_fail("%s and %s aren't of one checkpoint: their ids are \"%s\" and \"%s\"; "
                         "remove the "
                         "one that doesn't belong here",
                         r->p->file[0].path, r->path, r->p->id, id ? id : "");
}

static bool read_file(reading *r, int file)
{
    kn_indexed_file *f = &r->p->file[file];
    r->path = f->path;
    int fd = kn_indexed_copy(r->p, file);
    if (fd < 0 || !(r->header = kn_safetensors_open_fd(f->path, fd)))
        return false;
    f->info.bytes = kn_safetensors_size(r->header);
    f->info.checksum = kn_safetensors_header_sum(r->header);
    const char *values = kn_safetensors_meta(r->header, KN_SHARD_VALUES);
    bool ok = !values || r->p->values || (r->p->values = kn_host_strdup(values));
    ok = ok && read_id(r, file) && read_text(r, KN_SHARD_INFO, &r->info) &&
         read_text(r, KN_SHARD_SUMS, &r->sums);
    for (int i = 0; i < kn_safetensors_count(r->header) && ok; i++)
        ok = read_tensor(r, file, i);
    json_decref(r->info);
    json_decref(r->sums);
    kn_safetensors_close(r->header);
    r->info = r->sums = NULL;
    return ok;
}

/* ---- all files' tensors ---------------------------------------------------------------------- */

static int compare_told(const void *x, const void *y)
{
    const told *a = x, *b = y;
    int order = strcmp(a->name, b->name);
    return order ? order : a->part.file - b->part.file;
}

/* Whether both tell of the same tensor. */
static bool agree(const kn_pieces *p, const told *a, const told *b)
{
    const char *what =
        a->dtype != b->dtype ? "dtypes"
        : a->ndim != b->ndim ? "numbers of dims"
        : a->has_shape != b->has_shape || memcmp(a->shape, b->shape, sizeof a->shape) != 0
            ? "whole shapes"
            : NULL;
    return !what || kn_fail("tensor \"%.200s\" has different %s in %s and %s", a->name, what,
                            p->file[a->part.file].path, p->file[b->part.file].path);
}

/* The whole shape is what the files say, or where they don't the end of the last rectangle. */
static bool find_shape(const told *t, int n, kn_piece *piece)
{
    int64_t bytes, end;
    *piece = (kn_piece){ t->name, t->dtype, t->ndim, { 0 }, { 0 } };
    memcpy(piece->shape, t->shape, sizeof piece->shape);
    for (int i = 0; i < n; i++)
        for (int d = 0; d < t->ndim; d++) {
            if (__builtin_add_overflow(t[i].part.r.offset[d], t[i].part.r.size[d], &end))
                return kn_fail("tensor \"%.200s\": its part ends beyond any size", t->name);
            if (!t->has_shape && end > piece->shape[d])
                piece->shape[d] = end;
        }
    if (!kn_safetensors_bytes(t->dtype, t->ndim, piece->shape, &bytes))
        return kn_fail("tensor \"%.200s\": its shape has too many elements", t->name);
    piece->part = kn_interval_whole(kn_shape_numel(t->ndim, piece->shape));
    return true;
}

static bool check_cover(const kn_pieces *p, const kn_indexed_tensor *t)
{
    const char **file = kn_host_calloc((size_t)t->parts, sizeof *file);
    kn_rectangle *r = kn_host_calloc((size_t)t->parts, sizeof *r);
    bool ok = file && r;
    for (int i = 0; i < t->parts && ok; i++) {
        r[i] = t->part[i].r;
        file[i] = p->file[t->part[i].file].info.name;
    }
    ok = ok && kn_rectangles_cover(t->piece.name, t->piece.ndim, t->piece.shape, r, file, t->parts);
    kn_host_free(file);
    kn_host_free(r);
    return ok;
}

static int compare_places(const void *x, const void *y)
{
    const kn_indexed_tensor *s = x, *t = y;
    if (s->part->file != t->part->file)
        return s->part->file - t->part->file;
    if (s->part->at != t->part->at)
        return s->part->at > t->part->at ? 1 : -1;
    return strcmp(s->piece.name, t->piece.name); /* without elements */
}

/* In the order of the files all tensors are read without seeking. */
static bool sort_tensors(kn_pieces *p)
{
    qsort(p->tensor, (size_t)p->tensors, sizeof *p->tensor, compare_places);
    return kn_name_table_grow(&p->table, p->tensor, sizeof *p->tensor, p->tensors, p->tensors);
}

/* Brings together what was told of each tensor; takes the names. */
static bool gather(reading *r)
{
    kn_pieces *p = r->p;
    size_t room = (size_t)r->count + 1;
    if (r->count > 0)
        qsort(r->told, (size_t)r->count, sizeof *r->told, compare_told);
    p->tensor = kn_host_calloc(room, sizeof *p->tensor);
    p->part = kn_host_calloc(room, sizeof *p->part);
    if (!p->tensor || !p->part)
        return false;
    for (int i = 0, n; i < r->count; i += n) {
        told *t = &r->told[i];
        kn_indexed_tensor *x = &p->tensor[p->tensors];
        for (n = 1; i + n < r->count && strcmp(t->name, t[n].name) == 0; n++)
            if (!agree(p, t, &t[n]))
                return false;
        for (int k = 0; k < n; k++)
            p->part[i + k] = t[k].part;
        if (!find_shape(t, n, &x->piece))
            return false;
        p->tensors++;
        t->name = NULL;
        x->part = &p->part[i];
        x->parts = n;
        if (!check_cover(p, x))
            return false;
    }
    return sort_tensors(p);
}

/* ---- all of it ------------------------------------------------------------------------------- */

bool kn_indexed_add(kn_pieces *p, const char *dir, const char *name)
{
    if (!kn_host_grow(&p->file, &p->room_for_files, p->files + 1, sizeof *p->file))
        return false;
    kn_indexed_file *f = &p->file[p->files];
    *f = (kn_indexed_file){ .fd = -1 };
    if (!(f->path = kn_host_strdup(dir ? kn_path_of(dir, name, "").text : name)))
        return false;
    p->files++;
    snprintf(f->info.name, sizeof f->info.name, "%s", kn_path_last(name));
    return true;
}

/* What was told of all files becomes the index; ok: so far. */
static bool end_reading(reading *r, bool ok)
{
    ok = ok && gather(r);
    for (int i = 0; i < r->count; i++)
        kn_host_free(r->told[i].name);
    kn_host_free(r->told);
    return ok;
}

static bool index_files(kn_pieces *p)
{
    reading r = { .p = p };
    bool ok = true;
    for (int i = 0; i < p->files && ok; i++)
        ok = read_file(&r, i);
    return end_reading(&r, ok);
}

kn_pieces *kn_pieces_open(const char *path)
{
    json_t *map = NULL;
    kn_pieces *p = kn_ok() ? kn_host_calloc(1, sizeof *p) : NULL;
    bool ok = p && kn_indexed_list(p, path, &map) && index_files(p) &&
              (!map || kn_indexed_check(p, path, map));
    json_decref(map);
    if (ok)
        return p;
    kn_pieces_close(p);
    return NULL;
}

static bool take_foreign(reading *r, const kn_foreign_piece *f)
{
    int64_t bytes, end;
    const kn_piece *p = &f->piece;
    if (!tell(r, p->name, p->dtype, p->ndim, p->shape,
              (kn_indexed_part){ .at = f->at, .form = f->form }))
        return false;
    return (kn_foreign_bytes(f, &bytes) && f->at >= 0 &&
            !__builtin_add_overflow(f->at, bytes, &end) && end <= r->p->file->info.bytes) ||
           kn_fail("%s: the tensor '%.200s' ends behind the end of the file, which was cut, or is "
                   "damaged; fetch it again",
                   r->path, p->name);
}

kn_pieces *kn_pieces_of(const char *path, const struct stat *seen, const kn_foreign_piece *list,
                        int count)
{
    kn_pieces *p = kn_ok() ? kn_host_calloc(1, sizeof *p) : NULL;
    reading r = { .p = p, .path = path };
    bool ok = p && kn_indexed_add(p, NULL, path) && kn_indexed_open(p, 0) >= 0;
    if (ok && !kn_same_file(seen, &p->file->identity))
        ok = kn_fail("%s: the file was replaced while it was opened; open it again", path);
    if (ok)
        p->file->info.bytes = p->file->identity.st_size;
    for (int i = 0; ok && i < count; i++)
        ok = take_foreign(&r, &list[i]);
    if (end_reading(&r, ok))
        return p;
    kn_pieces_close(p);
    return NULL;
}

kn_pieces *kn_pieces_ref(kn_pieces *p)
{
    p->refs++;
    return p;
}

const char *kn_pieces_values(const kn_pieces *p)
{
    return p->values;
}

void kn_pieces_close(kn_pieces *p)
{
    if (!p || p->refs-- > 0)
        return;
    kn_host_free(p->values);
    for (int i = 0; i < p->files; i++) {
        if (p->file[i].fd >= 0)
            close(p->file[i].fd);
        kn_host_free(p->file[i].path);
    }
    for (int i = 0; i < p->tensors; i++)
        kn_host_free((char *)p->tensor[i].piece.name);
    kn_host_free(p->file);
    kn_host_free(p->tensor);
    kn_host_free(p->table.slot);
    kn_host_free(p->part);
    kn_host_free(p->room);
    kn_host_free(p);
}
