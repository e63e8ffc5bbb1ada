/* data/image_folder.c: sets of images in files, a folder per class. */
#include "data/images_internal.h"
#include "kernels/error_internal.h"
#include "kernels/memory_internal.h"
#include "tensor/files.h"

#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#define MOST_DEPTH 16 /* of folders in a class: a link to a folder above would never end */

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

static int compare(const void *a, const void *b, void *text)
{
    return strcmp((char *)text + *(const int64_t *)a, (char *)text + *(const int64_t *)b);
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

/* False also with an error. */
static bool is_folder(const char *path)
{
    struct stat st;
    return kn_look(path, &st) > 0 && S_ISDIR(st.st_mode);
}

/* The images below root/part, at whatever depth. */
static bool find_images(struct kn_image_files *f, const char *part, int depth)
{
    const kn_path path = kn_path_of(f->root, part, "");
    kn_folder_names n = { 0 };
    bool ok = kn_ok() && kn_folder_names_read(&n, path.text, NULL);
    if (ok && depth > MOST_DEPTH)
        ok = kn_fail("%s has more than %d folders in each other", f->root, MOST_DEPTH);
    for (int64_t i = 0; ok && i < n.count; i++) {
        const char *name = n.list[i].name;
        if (name[0] == '.')
            continue;
        const kn_path below = kn_path_of(part, name, "");
        const bool image = is_image(name);
        if (!(image && n.list[i].type == DT_REG) &&
            is_folder(kn_path_of(f->root, below.text, "").text))
            ok = find_images(f, below.text, depth + 1);
        else if (image)
            ok = add_name(&f->file, below.text);
        else
            f->others++;
        ok = ok && kn_ok();
    }
    kn_folder_names_free(&n);
    return ok;
}

static bool find_classes(kn_image_set *s, const char *root)
{
    kn_folder_names n;
    bool ok = kn_folder_names_read(&n, root, NULL) &&
              (s->class_name = kn_host_calloc((size_t)n.count + 1, sizeof *s->class_name));
    for (int64_t i = 0; ok && i < n.count; i++) {
        const char *name = n.list[i].name;
        if (name[0] != '.' && is_folder(kn_path_of(root, name, "").text))
            ok = (s->class_name[s->info.classes++] = kn_host_strdup(name));
        ok = ok && kn_ok();
    }
    kn_folder_names_free(&n);
    return ok && (s->info.classes > 0 ||
                  kn_fail("%s has no folders, should have one for each class of images", root));
}

/* The images of all classes with their labels. */
static bool find_all(kn_image_set *s, struct kn_image_files *f)
{
    for (int64_t c = 0; c < s->info.classes; c++) {
        const char *name = s->class_name[c];
        const int64_t first = f->file.count;
        f->others = 0;
        if (!find_images(f, name, 1))
            return false;
        if (f->file.count == first && !s->options.allow_empty)
            return kn_fail("the class %s/%s has no .jpg, .jpeg or .png files (but %lld others); "
                           "remove the folder, or set .allow_empty",
                           f->root, name, (long long)f->others);
        if (f->file.count > first)
            qsort_r(f->file.at + first, (size_t)(f->file.count - first), sizeof *f->file.at,
                    compare, f->file.text);
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
    const kn_path path = kn_path_of(f->root, f->file.text + f->file.at[index], "");
    return kn_ok() ? kn_image_file_read(path.text, s->options.max_pixels, room, out) : false;
}

static int64_t label_of(const kn_image_set *s, int64_t index)
{
    return s->files->label[index];
}

/* folder, folder/split, or folder/val; the caller frees it. */
static char *find_root(const char *folder, const char *split)
{
    if (!split)
        return kn_host_strdup(folder);
    kn_path path = kn_path_of(folder, split, "");
    if (!is_folder(path.text) && strcmp(split, "test") == 0)
        path = kn_path_of(folder, "val", "");
    if (is_folder(path.text))
        return kn_host_strdup(path.text);
    if (kn_ok())
        kn_fail("there is no folder %s/%s with a folder for each class; where %s itself holds the "
                "classes, give NULL as the split",
                folder, split, folder);
    return NULL;
}

bool kn_image_folder_open(kn_image_set *s, const char *folder, const char *split)
{
    struct kn_image_files *f = s->files = kn_host_calloc(1, sizeof *f);
    s->info = (kn_image_set_info){ .kind = "a folder of images", .channels = 3 };
    s->read = read_image;
    s->label = label_of;
    const bool ok =
        f && (f->root = find_root(folder, split)) && find_classes(s, f->root) && find_all(s, f);
    s->info.count = ok ? f->file.count : 0;
    return ok;
}

bool kn_image_folder_hash(const kn_image_set *s, kn_checksum *sum)
{
    const struct kn_image_files *f = s->files;
    struct stat st;
    for (int64_t i = 0; i < f->file.count; i++) {
        const char *name = f->file.text + f->file.at[i];
        const int there = kn_look(kn_path_of(f->root, name, "").text, &st);
        const int64_t size = there > 0 ? (int64_t)st.st_size : -1;
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
    kn_host_free(f->file.text);
    kn_host_free(f->file.at);
    kn_host_free(f->label);
    kn_host_free(f->root);
    kn_host_free(f);
}
