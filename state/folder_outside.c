/* state/folder_outside.c: which folders are a run's own. A file in one of them is taken for a part
 * of a checkpoint, and goes with it; one that somebody else makes is taken for a damaged
 * one. */
#include "kernels/error.h"
#include "state/folder_internal.h"
#include "tensor/files.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Whether a run makes folders of this name in its own. */
static bool is_name_of_run(const char *name)
{
    static const char *const end[] = { ".saving", ".old", ".removing" };
    bool is = strcmp(name, "best") == 0 || kn_folder_checkpoint(name) >= 0;
    for (size_t i = 0; i < sizeof end / sizeof *end; i++)
        is = is || kn_folder_step(name, end[i]) >= 0;
    return is;
}

/* A run saves there, or has done so. A folder may be called like a checkpoint. False also with an
 * error. */
static bool is_run(const char *dir)
{
    kn_listing l = { 0 };
    bool is = kn_is_there(kn_path_of(dir, KN_LOCK_FILE, "").text);
    if (!is && kn_ok() && kn_folder_list(&l, dir))
        for (int i = 0; i < l.count; i++)
            is = is || !l.list[i].why[0];
    kn_listing_free(&l);
    return is;
}

/* dir without links, as far as it is there, into path. */
static bool resolve(char path[KN_FOLDER_PATH], const char *dir)
{
    char there[KN_FOLDER_PATH], rest[KN_FOLDER_PATH] = "", more[KN_FOLDER_PATH];
    struct stat st;
    int is = 0;
    bool fits = snprintf(there, sizeof there, "%s", dir) < (int)sizeof there;
    while (fits && *there && (is = kn_look(there, &st)) == 0) {
        for (size_t n = strlen(there); n > 1 && there[n - 1] == '/';)
            there[--n] = 0;
        char *slash = strrchr(there, '/');
        fits = snprintf(more, sizeof more, "/%s%s", slash ? slash + 1 : there, rest) <
               (int)sizeof more;
        memcpy(rest, more, sizeof rest);
        there[slash ? slash - there + (slash == there) : 0] = 0;
    }
    char *real = fits && is >= 0 ? kn_real_path(*there ? there : ".") : NULL;
    fits = fits && (!real || snprintf(path, KN_FOLDER_PATH, "%s%s", real, rest) < KN_FOLDER_PATH);
    free(real);
    return fits ? kn_ok() : kn_fail("the path %s is too long", dir);
}

bool kn_folder_outside(const char *dir)
{
    char path[KN_FOLDER_PATH], *slash;
    if (!resolve(path, dir))
        return false;
    while ((slash = strrchr(path, '/'))) {
        const bool taken = is_name_of_run(slash + 1);
        *slash = 0;
        if (taken && is_run(*path ? path : "/"))
            return kn_fail("%s is or lies in a folder of the run in %s, which replaces and removes "
                           "those; choose another folder",
                           dir, *path ? path : "/");
    }
    return kn_ok();
}
