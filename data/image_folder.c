/* data/image_folder.c: sets of images in files, a folder per class. */
#include "data/images_internal.h"
#include "kernels/error_internal.h"
#include "kernels/memory_internal.h"
#include "tensor/files.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#define MOST_DEPTH 16 /* of folders in a class: a link to a folder above would never end */
#define MOST_PATH  4096

/* ---- lists of names ---------------------------------------------------------------------------
 */

/* Names one after another in text, each ended by 0. */
typedef struct names {
    char *text;
    int64_t size, room;
    int64_t *at; /* of each */
    int64_t count, places;
} names;

static bool add_name(names *n, const char *name)
{
    const size_t length = strlen(name) + 1;
    if (!kn_host_grow(&n->text, &n->room, n->size + (int64_t)length, 1) ||
        !kn_host_grow(&n->at, &n->places, n->count + 1, sizeof *n->at))
        return false;
    memcpy(n->text + n->size, name, length);
    n->at[n->count++] = n->size;
    n->size += (int64_t)length;
    return true;
}

static void free_names(names *n)
{
    kn_host_free(n->text);
    kn_host_free(n->at);
    *n = (names){ 0 };
}

static int compare(const void *a, const void *b, void *text)
{
    return strcmp((char *)text + *(const int64_t *)a, (char *)text + *(const int64_t *)b);
}

/* Sorts the names from number first on. */
static void sort_names(names *n, int64_t first)
{
    if (n->count > first)
        qsort_r(n->at + first, (size_t)(n->count - first), sizeof *n->at, compare, n->text);
}

/* ---- finding ----------------------------------------------------------------------------------
 */

struct kn_image_files {
    char *root;
    names file;     /* paths below root, sorted by class, then by name */
    int32_t *label; /* of each */
    int64_t others; /* files of another kind */
};

static bool is_image(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot && (strcasecmp(dot, ".jpg") == 0 || strcasecmp(dot, ".jpeg") == 0 ||
                   strcasecmp(dot, ".png") == 0);
}

static bool join(char *to, const char *a, const char *b)
{
    return snprintf(to, MOST_PATH, "%s/%s", a, b) < MOST_PATH ||
           kn_fail("the path %s/%s is longer than %d bytes", a, b, MOST_PATH - 1);
}

/* False also with an error. */
static bool is_folder(const char *path)
{
    struct stat st;
    return kn_look(path, &st) > 0 && S_ISDIR(st.st_mode);
}

/* The images below root/part, at whatever depth. */
static bool find_images(struct kn_image_files *f, const char *part, int depth)
{
    char *path = kn_host_alloc(MOST_PATH), *below = kn_host_alloc(MOST_PATH);
    bool ok = path && below && join(path, f->root, part);
    kn_folder_names n = { 0 };
    ok = ok && kn_folder_names_read(&n, path, NULL);
    if (ok && depth > MOST_DEPTH)
        ok = kn_fail("%s has more than %d folders in each other", f->root, MOST_DEPTH);
    for (int64_t i = 0; ok && i < n.count; i++) {
        const char *name = n.list[i].name;
        if (name[0] == '.')
            continue;
        ok = join(below, part, name);
        bool image = is_image(name);
        if (ok && image && n.list[i].type == DT_REG)
            ok = add_name(&f->file, below);
        else if (ok && join(path, f->root, below) && is_folder(path))
            ok = find_images(f, below, depth + 1);
        else if (ok && image)
            ok = add_name(&f->file, below);
        else
            f->others++;
        ok = ok && kn_ok();
    }
    kn_folder_names_free(&n);
    kn_host_free(below);
    kn_host_free(path);
    return ok;
}

static bool find_classes(const char *root, names *classes)
{
    char path[MOST_PATH];
    kn_folder_names n;
    bool ok = kn_folder_names_read(&n, root, NULL);
    for (int64_t i = 0; ok && i < n.count; i++) {
        const char *name = n.list[i].name;
        if (name[0] != '.' && (ok = join(path, root, name)) && is_folder(path))
            ok = add_name(classes, name);
        ok = ok && kn_ok();
    }
    kn_folder_names_free(&n);
    sort_names(classes, 0);
    if (ok && classes->count == 0)
        return kn_fail("%s has no folders, should have one for each class of images", root);
    return ok;
}

/* The images of all classes with their labels. */
static bool find_all(kn_image_set *s, struct kn_image_files *f, const names *classes)
{
    for (int64_t c = 0; c < classes->count; c++) {
        const char *name = classes->text + classes->at[c];
        const int64_t first = f->file.count;
        f->others = 0;
        if (!(s->class_name[c] = kn_host_strdup(name)) || !find_images(f, name, 1))
            return false;
        if (f->file.count == first && !s->options.allow_empty)
            return kn_fail("the class %s/%s has no .jpg, .jpeg or .png files (but %lld others); "
                           "remove the folder, or set .allow_empty",
                           f->root, name, (long long)f->others);
        sort_names(&f->file, first);
        int32_t *label = kn_host_realloc(f->label, (size_t)(f->file.count + 1) * sizeof *label);
        if (!label)
            return false;
        f->label = label;
        for (int64_t i = first; i < f->file.count; i++)
            label[i] = (int32_t)c;
    }
    return f->file.count > 0 || kn_fail("%s has no images", f->root);
}

/* ---- the set -----------------------------------------------------------------------------------
 */

static int read_image(const kn_image_set *s, int64_t index, kn_image_room *room, kn_pixels *out)
{
    const struct kn_image_files *f = s->files;
    char path[MOST_PATH];
    if (!join(path, f->root, f->file.text + f->file.at[index]))
        return false;
    return kn_image_file_read(path, s->options.max_pixels, room, out);
}

static int64_t label_of(const kn_image_set *s, int64_t index)
{
    return s->files->label[index];
}

/* folder, folder/split, or folder/val; the caller frees it. */
static char *find_root(const char *folder, const char *split)
{
    char path[MOST_PATH];
    if (!split)
        return kn_host_strdup(folder);
    if (!join(path, folder, split))
        return NULL;
    if (!is_folder(path) && strcmp(split, "test") == 0 && !join(path, folder, "val"))
        return NULL;
    if (is_folder(path))
        return kn_host_strdup(path);
    if (kn_ok())
        kn_fail("there is no folder %s/%s with a folder for each class; where %s itself holds the "
                "classes, give NULL as the split",
                folder, split, folder);
    return NULL;
}

bool kn_image_folder_open(kn_image_set *s, const char *folder, const char *split)
{
    names classes = { 0 };
    struct kn_image_files *f = kn_host_calloc(1, sizeof *f);
    s->files = f;
    bool ok = f && (f->root = find_root(folder, split)) && find_classes(f->root, &classes);
    if (ok) {
        s->class_name = kn_host_calloc((size_t)classes.count, sizeof *s->class_name);
        s->info = (kn_image_set_info){ .kind = "a folder of images",
                                       .classes = s->class_name ? classes.count : 0,
                                       .channels = 3 };
        ok = s->class_name && find_all(s, f, &classes);
    }
    if (ok) {
        s->info.count = f->file.count;
        s->read = read_image;
        s->label = label_of;
    }
    free_names(&classes);
    return ok;
}

bool kn_image_folder_hash(const kn_image_set *s, kn_checksum *sum)
{
    const struct kn_image_files *f = s->files;
    char path[MOST_PATH];
    struct stat st;
    for (int64_t i = 0; i < f->file.count; i++) {
        const char *name = f->file.text + f->file.at[i];
        if (!join(path, f->root, name))
            return false;
        const int64_t size = kn_look(path, &st) > 0 ? (int64_t)st.st_size : -1;
        kn_checksum_add(sum, name, strlen(name) + 1);
        kn_checksum_add(sum, &size, sizeof size);
    }
    return kn_ok();
}

void kn_image_folder_free(kn_image_set *s)
{
    struct kn_image_files *f = s->files;
    if (!f)
        return;
    free_names(&f->file);
    kn_host_free(f->label);
    kn_host_free(f->root);
    kn_host_free(f);
}
