/* state/pieces_index.c: which bytes of which files hold which part of which tensor. Headers and
 * indices may come from a stranger: each claim is checked before it is used. */
#include "kernels/error_internal.h"
#include "kernels/memory.h"
#include "state/pieces_internal.h"
#include "state/shard_file.h"
#include "tensor/safetensors_format.h"
#include "tensor/files.h"
#include "tensor/json.h"
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define ENDING "safetensors"

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
    int count, room;
} reading;

static bool read_list(const json_t *list, int n, int64_t *out)
{
    if (!json_is_array(list) || json_array_size(list) != (size_t)n)
        return false;
    for (int d = 0; d < n; d++) {
        const json_t *x = json_array_get(list, (size_t)d);
        if (!json_is_integer(x) || json_integer_value(x) < 0)
            return false;
        out[d] = json_integer_value(x);
    }
    return true;
}

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
    if (!read_list(json_object_get(info, "saved_offsets"), t->ndim, t->part.r.offset))
        return kn_fail("%s: tensor \"%.200s\": %s has no list of %d saved_offsets >= 0 for it",
                       r->path, t->name, KN_SHARD_INFO, t->ndim);
    t->has_shape = shape != NULL;
    return !shape || read_list(shape, t->ndim, t->shape) ||
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

static bool read_tensor(reading *r, int file, int i)
{
    kn_array a;
    if (r->count == r->room) {
        int room = r->room ? 2 * r->room : 64;
        told *more = kn_host_realloc(r->told, (size_t)room * sizeof *more);
        if (!more)
            return false;
        r->told = more;
        r->room = room;
    }
    told *t = &r->told[r->count];
    *t = (told){ .part.file = file };
    t->part.at = kn_safetensors_place(r->header, i, &a);
    t->dtype = a.dtype;
    t->ndim = a.ndim;
    memcpy(t->part.r.size, a.shape, (size_t)a.ndim * sizeof *a.shape);
    if (!(t->name = kn_host_strdup(kn_safetensors_name(r->header, i))))
        return false;
    r->count++;
    return read_part(r, t) && read_sum(r, t);
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
    return strcmp(r->p->id, id ? id : "") == 0 ||
           kn_fail(
               "%s and %s aren't of one checkpoint: their ids are \"%s\" and \"%s\"; remove the "
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
    bool ok = read_id(r, file) && read_text(r, KN_SHARD_INFO, &r->info) &&
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
    int64_t bytes, end, numel = 1;
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
    for (int d = 0; d < t->ndim; d++)
        numel *= piece->shape[d];
    piece->part = (kn_interval){ 0, numel, numel > 0, numel, 0 };
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

static int compare_names(const void *x, const void *y, void *tensors)
{
    const kn_indexed_tensor *t = tensors;
    return strcmp(t[*(const int *)x].piece.name, t[*(const int *)y].piece.name);
}

/* In the order of the files all tensors are read without seeking. */
static bool sort_tensors(kn_pieces *p)
{
    size_t n = (size_t)p->tensors;
    if (!(p->by_name = kn_host_calloc(n + 1, sizeof *p->by_name)))
        return false;
    qsort(p->tensor, n, sizeof *p->tensor, compare_places);
    for (int i = 0; i < p->tensors; i++)
        p->by_name[i] = i;
    qsort_r(p->by_name, n, sizeof *p->by_name, compare_names, p->tensor);
    return true;
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

/* ---- the folder ------------------------------------------------------------------------------ */

static bool add_file(kn_pieces *p, const char *dir, const char *name)
{
    size_t room = (dir ? strlen(dir) + 1 : 0) + strlen(name) + 1;
    if ((p->files & (p->files - 1)) == 0) { /* a power of 2: full */
        size_t most = p->files ? 2 * (size_t)p->files : 1;
        kn_indexed_file *more = kn_host_realloc(p->file, most * sizeof *more);
        if (!more)
            return false;
        p->file = more;
    }
    kn_indexed_file *f = &p->file[p->files];
    *f = (kn_indexed_file){ .fd = -1 };
    if (!(f->path = kn_host_alloc(room)))
        return false;
    p->files++;
    snprintf(f->path, room, "%s%s%s", dir ? dir : "", dir ? "/" : "", name);
    const char *slash = strrchr(name, '/');
    snprintf(f->info.name, sizeof f->info.name, "%s", slash ? slash + 1 : name);
    return true;
}

static int compare_files(const void *x, const void *y)
{
    const kn_indexed_file *a = x, *b = y;
    return strcmp(a->path, b->path);
}

static bool list_folder(kn_pieces *p, const char *dir)
{
    kn_folder_names n;
    bool ok = kn_folder_names_read(&n, dir, NULL);
    for (int64_t i = 0; ok && i < n.count; i++) {
        const char *name = n.list[i].name, *dot = strrchr(name, '.');
        if (dot && dot != name && strcmp(dot + 1, ENDING) == 0)
            ok = add_file(p, dir, name);
    }
    kn_folder_names_free(&n);
    if (ok && p->files == 0)
        return kn_fail("%s: no file in this folder ends in .%s", dir, ENDING);
    return ok;
}

/* "model-00002-of-00007.safetensors": the length before the numbers, 0 for other names. Names of
 * shards say how many files some rank wrote: others may have written fewer. */
static size_t read_numbers(const char *name, int *file, int *files)
{
    char again[sizeof((kn_piece_file *)0)->name];
    size_t n = strlen(name), end = strlen("-00002-of-00007." ENDING);
    if (n <= end || strncmp(name, "shard-", 6) == 0 ||
        sscanf(name + n - end, "-%5d-of-%5d", file, files) != 2)
        return 0;
    snprintf(again, sizeof again, "%.*s-%05d-of-%05d." ENDING, (int)(n - end), name, *file, *files);
    return strcmp(again, name) == 0 ? n - end : 0;
}

/* Without an index a file's name alone tells that there are others: a model whose files were
 * written, or fetched, in part would pass for a whole one. */
static bool check_numbers(kn_pieces *p, const char *dir)
{
    for (int i = 0, before = 0; i < p->files; i++) { /* in order of names */
        int file = 0, files = 0, next = 0, of = 0;
        const char *name = p->file[i].info.name;
        size_t n = read_numbers(name, &file, &files);
        bool last = i + 1 == p->files || read_numbers(p->file[i + 1].info.name, &next, &of) != n ||
                    of != files || strncmp(p->file[i + 1].info.name, name, n) != 0;
        if (n > 0 && (file != before + 1 || (last && file != files)))
            return kn_fail("%s: %s is one of %d files, but not all of them are there, nor an index "
                           "that says which belong together; the folder holds a part of a model",
                           dir, name, files);
        before = n > 0 && !last ? file : 0;
    }
    return true;
}

/* The files that the map of an index names, each once, and in this folder. */
static bool list_map(kn_pieces *p, const char *dir, const char *path, json_t *map)
{
    const char *name;
    json_t *file, *seen = json_object();
    bool ok = seen || kn_fail_memory("%s could not be read", path);
    if (!json_is_object(map) || json_object_size(map) == 0)
        ok = kn_fail("%s: it has no weight_map of names and files", path);
    json_object_foreach(map, name, file)
    {
        const char *text = json_string_value(file);
        if (ok && (!text || !*text || strchr(text, '/')))
            ok = kn_fail("%s: the file of \"%.200s\" is no name of a file in this folder", path,
                         name);
        if (ok && !json_object_get(seen, text))
            ok = (json_object_set_new(seen, text, json_true()) == 0 ||
                  kn_fail_memory("%s could not be read", path)) &&
                 add_file(p, dir, text);
    }
    json_decref(seen);
    return ok;
}

static bool check_map(const kn_pieces *p, const char *path, json_t *map)
{
    const char *name;
    json_t *file;
    json_object_foreach(map, name, file)
    {
        int i = kn_pieces_find(p, name);
        if (i < 0 || strcmp(strrchr(p->file[p->tensor[i].part->file].path, '/') + 1,
                            json_string_value(file)) != 0)
            return kn_fail("%s: tensor \"%.200s\" isn't in the file %.200s that it names", path,
                           name, json_string_value(file));
    }
    return true;
}

/* The map of a folder's index; NULL where it has none, or with an error. */
static json_t *read_map(const char *dir, char **path)
{
    json_error_t e;
    struct stat st;
    size_t size, room = strlen(dir) + 64;
    if (!(*path = kn_host_alloc(room)))
        return NULL;
    snprintf(*path, room, "%s/model.%s.index.json", dir, ENDING);
    if (kn_look(*path, &st) <= 0)
        return NULL;
    if (!S_ISREG(st.st_mode) || st.st_size > SAFETENSORS_MAX_HEADER) {
        kn_fail("%s: not a regular file of at most %u bytes", *path, SAFETENSORS_MAX_HEADER);
        return NULL;
    }
    int fd = kn_open(*path, O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0);
    char *text = fd >= 0 ? kn_file_copy(fd, *path, SAFETENSORS_MAX_HEADER, &size) : NULL;
    json_t *map = NULL,
           *index = text ? kn_json_parse(text, size, JSON_REJECT_DUPLICATES, *path, &e) : NULL;
    kn_host_free(text);
    if (fd < 0)
        kn_fail_system("%s: cannot open: %m", *path);
    else if (!index)
        kn_fail("%s: %s in line %d", *path, e.text, e.line);
    else if (!(map = json_incref(json_object_get(index, "weight_map"))))
        kn_fail("%s: it has no weight_map of names and files", *path);
    json_decref(index);
    return map;
}

static bool index_files(kn_pieces *p)
{
    reading r = { .p = p };
    bool ok = true;
    for (int i = 0; i < p->files && ok; i++)
        ok = read_file(&r, i);
    ok = ok && gather(&r);
    for (int i = 0; i < r.count; i++)
        kn_host_free(r.told[i].name);
    kn_host_free(r.told);
    return ok;
}

static bool open_folder(kn_pieces *p, const char *dir)
{
    char *path = NULL;
    json_t *map = read_map(dir, &path);
    bool ok = kn_ok() && (map ? list_map(p, dir, path, map) : list_folder(p, dir));
    if (p->files > 0)
        qsort(p->file, (size_t)p->files, sizeof *p->file, compare_files);
    ok =
        ok && (map || check_numbers(p, dir)) && index_files(p) && (!map || check_map(p, path, map));
    json_decref(map);
    kn_host_free(path);
    return ok;
}

kn_pieces *kn_pieces_open(const char *path)
{
    struct stat st;
    kn_pieces *p = kn_ok() ? kn_host_calloc(1, sizeof *p) : NULL;
    if (!p)
        return NULL;
    const int there = kn_look(path, &st);
    bool ok = there > 0;
    if (there == 0)
        kn_fail("%s: cannot open: there is no such file or folder", path);
    if (ok && S_ISDIR(st.st_mode))
        ok = open_folder(p, path);
    else if (ok)
        ok = add_file(p, NULL, path) && index_files(p);
    if (ok)
        return p;
    kn_pieces_close(p);
    return NULL;
}

void kn_pieces_close(kn_pieces *p)
{
    if (!p)
        return;
    for (int i = 0; i < p->files; i++) {
        if (p->file[i].fd >= 0)
            close(p->file[i].fd);
        kn_host_free(p->file[i].path);
    }
    for (int i = 0; i < p->tensors; i++)
        kn_host_free((char *)p->tensor[i].piece.name);
    kn_host_free(p->file);
    kn_host_free(p->tensor);
    kn_host_free(p->by_name);
    kn_host_free(p->part);
    kn_host_free(p->room);
    kn_host_free(p);
}
