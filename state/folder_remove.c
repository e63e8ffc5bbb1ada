/* state/folder_remove.c: removes a folder of checkpoints' files.
 *
 * Each folder is opened by its name in the open folder above it, and never through a link, and its
 * files are removed by their names in it. So nothing outside of it is removed, even if another user
 * who may write there puts a link in the place of one of the folders meanwhile. */
#include "kernels/error_internal.h"
#include "state/folder_internal.h"
#include "tensor/files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

enum { DEPTH = 4 }; /* of folders in folders */

static int open_folder_at(int above, const char *name, int flags)
{
    int fd, tries = 0;
    while ((fd = openat(above, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | flags)) < 0 &&
           kn_try_again(&tries, false))
        ;
    return fd;
}

static bool remove_at(int above, const char *name, const char *path, int depth);

/* Closes fd, the folder path. */
static bool remove_entries(int fd, const char *path, int depth)
{
    DIR *d = fdopendir(fd);
    if (!d) {
        close(fd);
        return kn_fail_system("checkpoint: cannot read the folder %s to remove it: %m", path);
    }
    bool ok = true;
    for (struct dirent *e; ok && (e = readdir(d));)
        ok = strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0 ||
             remove_at(dirfd(d), e->d_name, kn_path_of(path, e->d_name, "").text, depth - 1);
    closedir(d);
    return ok;
}

/* Removes name from the open folder above; path is for errors. */
static bool remove_at(int above, const char *name, const char *path, int depth)
{
    if (KN_AGAIN(unlinkat(above, name, 0)) == 0 || errno == ENOENT)
        return true;
    if (errno != EISDIR)
        return kn_fail_system("checkpoint: cannot remove %s: %m", path);
    if (depth == 0)
        return kn_fail("checkpoint: cannot remove %s: no checkpoint has folders that deep", path);
    int fd = open_folder_at(above, name, O_NOFOLLOW);
    if (fd < 0)
        return kn_fail_system("checkpoint: cannot read the folder %s to remove it: %m", path);
    return remove_entries(fd, path, depth) &&
           (KN_AGAIN(unlinkat(above, name, AT_REMOVEDIR)) == 0 || errno == ENOENT ||
            kn_fail_system("checkpoint: cannot remove the folder %s: %m", path));
}

bool kn_folder_remove(const char *path)
{
    const kn_path above = kn_path_above(path);
    int fd = open_folder_at(AT_FDCWD, above.text, 0);
    if (fd < 0)
        return errno == ENOENT ||
               kn_fail_system("checkpoint: cannot remove %s: cannot open %s: %m", path, above.text);
    bool ok = remove_at(fd, kn_path_last(path), path, DEPTH);
    close(fd);
    return ok;
}
