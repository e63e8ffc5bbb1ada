/* state/pieces_folder.c: which files belong together: those of a folder, or of an index as Hugging
 * Face's libraries write it. Both may come from a stranger. */
#include "kernels/error_internal.h"
#include "kernels/memory.h"
#include "state/pieces_internal.h"
#include "tensor/files.h"
#include "tensor/json.h"
#include "tensor/safetensors_format.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ENDING       "safetensors"
#define INDEX_ENDING "." ENDING ".index.json"

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
        if (kn_ends_in(n.list[i].name, "." ENDING))
            ok = kn_indexed_add(p, dir, n.list[i].name);
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
                 kn_indexed_add(p, dir, text);
    }
    json_decref(seen);
    return ok;
}

bool kn_indexed_check(const kn_pieces *p, const char *path, json_t *map)
{
    const char *name;
    json_t *file;
    json_object_foreach(map, name, file)
    {
        int i = kn_pieces_find(p, name);
        if (i < 0 || strcmp(kn_path_last(p->file[p->tensor[i].part->file].path),
                            json_string_value(file)) != 0)
            return kn_fail("%s: tensor \"%.200s\" isn't in the file %.200s that it names", path,
                           name, json_string_value(file));
    }
    return true;
}

/* The map of the index at path; NULL where there is none, or with an error. */
static json_t *read_map(const char *path)
{
    json_error_t e;
    size_t size;
    json_t *map = NULL, *index = NULL;
    char *text = kn_is_there(path) ? kn_file_read(path, SAFETENSORS_MAX_HEADER, &size) : NULL;
    if (!text)
        return NULL;
    if (!(index = kn_json_parse(text, size, JSON_REJECT_DUPLICATES, path, &e)))
        kn_fail("%s: %s in line %d", path, e.text, e.line);
    else if (!(map = json_incref(json_object_get(index, "weight_map"))))
        kn_fail("%s: it has no weight_map of names and files", path);
    kn_host_free(text);
    json_decref(index);
    return map;
}

/* path: of its index, which may not be there. */
static bool list_in(kn_pieces *p, const char *dir, const char *path, json_t **map)
{
    *map = read_map(path);
    bool ok = kn_ok() && (*map ? list_map(p, dir, path, *map) : list_folder(p, dir));
    if (p->files > 0)
        qsort(p->file, (size_t)p->files, sizeof *p->file, compare_files);
    return ok && (*map || check_numbers(p, dir));
}

bool kn_pieces_are_there(const char *path)
{
    struct stat st;
    kn_folder_names n;
    if (kn_look(path, &st) <= 0)
        return false;
    if (!S_ISDIR(st.st_mode))
        return kn_ends_in(path, INDEX_ENDING) || kn_ends_in(path, "." ENDING);
    bool there = false, ok = kn_folder_names_read(&n, path, NULL);
    for (int64_t i = 0; ok && i < n.count; i++)
        there = there || kn_ends_in(n.list[i].name, "." ENDING);
    kn_folder_names_free(&n);
    return there;
}

bool kn_indexed_list(kn_pieces *p, const char *path, json_t **map)
{
    struct stat st;
    const int there = kn_look(path, &st);
    if (there == 0)
        return kn_fail("%s: cannot open: there is no such file or folder", path);
    if (there < 0)
        return false;
    if (!S_ISDIR(st.st_mode))
        return kn_ends_in(path, INDEX_ENDING) ? list_in(p, kn_path_above(path).text, path, map)
                                              : kn_indexed_add(p, NULL, path);
    return list_in(p, path, kn_path_of(path, "model" INDEX_ENDING, "").text, map);
}
