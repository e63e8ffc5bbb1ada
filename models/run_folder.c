/* models/run_folder.c: the folder that a training run saves into. */
#include "kernels/context.h"
#include "kernels/error_internal.h"
#include "kernels/memory.h"
#include "models/run_folder_internal.h"
#include "tensor/whole_file.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

const char *const kn_checkpoint_file[KN_FILES] = { "model.safetensors", "optimizer.safetensors",
                                                   "tokenizer.json", "state.json" };
static const char LOCK[] = ".lock";

struct kn_run_folder {
    int lock; /* -1: the file system has no locks */
};

bool kn_checkpoint_path(char path[KN_CHECKPOINT_PATH], const char *dir, const char *name,
                        const char *suffix)
{
    int n = snprintf(path, KN_CHECKPOINT_PATH, "%s/%s%s", dir, name, suffix);
    return (n > 0 && n < KN_CHECKPOINT_PATH) || kn_fail("checkpoint: the path %s is too long", dir);
}

/* ---- the folder ------------------------------------------------------------------------------ */

static bool make_folders(const char *dir)
{
    char path[KN_CHECKPOINT_PATH];
    if (!kn_checkpoint_path(path, dir, "", ""))
        return false;
    for (char *p = path + 1; *p; p++) {
        if (*p != '/')
            continue;
        *p = 0;
        if (mkdir(path, 0777) != 0 && errno != EEXIST)
            return kn_fail("checkpoint: cannot make the folder %s: %s", path, strerror(errno));
        *p = '/';
    }
    if (access(dir, W_OK | X_OK) != 0)
        return kn_fail("checkpoint: cannot write into %s: %s; choose another folder", dir,
                       strerror(errno));
    return true;
}

/* The error names the holder of the lock, which the lock file records. */
static bool refuse_second(const char *dir, int fd)
{
    char who[160] = "";
    ssize_t n = pread(fd, who, sizeof who - 1, 0);
    who[n > 0 ? n : 0] = '\0';
    return kn_fail("%s: another run saves there%s%s; wait for its end, or choose another "
                   "folder",
                   dir, *who ? ": " : "", who);
}

static void sign_lock(int fd)
{
    char who[160], host[65] = "";
    gethostname(host, sizeof host - 1);
    int n = snprintf(who, sizeof who, "process %ld on %s", (long)getpid(), host);
    if (ftruncate(fd, 0) == 0 && pwrite(fd, who, (size_t)n, 0) < 0)
        (void)ftruncate(fd, 0); /* on failure the holder stays unnamed */
}

static bool take_lock(kn_run_folder *f, const char *dir)
{
    char path[KN_CHECKPOINT_PATH];
    if (!kn_checkpoint_path(path, dir, LOCK, ""))
        return false;
    int fd = kn_open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666), failed;
    if (fd < 0)
        return kn_fail("checkpoint: cannot open %s: %s", path, strerror(errno));
    while ((failed = flock(fd, LOCK_EX | LOCK_NB)) != 0 && errno == EINTR)
        ;
    bool held = failed && errno == EWOULDBLOCK;
    if (!failed) {
        sign_lock(fd);
        f->lock = fd;
        return true;
    }
    if (held)
        refuse_second(dir, fd);
    close(fd);
    return !held;
}

/* ---- interrupted saves ----------------------------------------------------------------------- */

bool kn_run_folder_has_checkpoint(const char *dir)
{
    char path[KN_CHECKPOINT_PATH];
    for (int i = 0; i < 2; i++)
        if (kn_checkpoint_path(path, dir, kn_checkpoint_file[KN_FILE_STATE], i ? ".new" : "") &&
            access(path, F_OK) == 0)
            return true;
    return false;
}

bool kn_checkpoint_finish_renames(const char *dir)
{
    char from[KN_CHECKPOINT_PATH], to[KN_CHECKPOINT_PATH];
    if (!kn_checkpoint_path(from, dir, kn_checkpoint_file[KN_FILE_STATE], ".new"))
        return false;
    if (access(from, F_OK) != 0)
        return true;
    for (int i = 0; i < KN_FILES; i++) {
        const char *name = kn_checkpoint_file[i];
        if (!kn_checkpoint_path(from, dir, name, ".new") || !kn_checkpoint_path(to, dir, name, ""))
            return false;
        /* the other files' names must be on disk before state.json.new goes */
        if (i == KN_FILE_STATE && !kn_sync_folder(dir))
            return false;
        if (KN_AGAIN(rename(from, to)) != 0 && errno != ENOENT)
            return kn_fail("checkpoint: cannot rename %s: %s", from, strerror(errno));
    }
    return kn_sync_folder(dir);
}

/* model.safetensors.new, model.safetensors.new.tmp.12.0 and the like. */
static bool is_leftover(const char *name)
{
    for (int i = 0; i < KN_FILES; i++) {
        size_t n = strlen(kn_checkpoint_file[i]);
        const char *rest = name + n;
        if (strncmp(name, kn_checkpoint_file[i], n) == 0 &&
            (strcmp(rest, ".new") == 0 || strncmp(rest, ".new.tmp", 8) == 0 ||
             strncmp(rest, ".tmp.", 5) == 0))
            return true;
    }
    return false;
}

/* Removes files left by saves of dead processes. Call it under the lock, after finishing
 * renames. */
static void remove_leftovers(const char *dir)
{
    DIR *d = opendir(dir);
    for (struct dirent *e; d && (e = readdir(d));)
        if (is_leftover(e->d_name))
            (void)unlinkat(dirfd(d), e->d_name, 0);
    if (d)
        closedir(d);
}

kn_run_folder *kn_run_folder_claim(const char *dir)
{
    if (!kn_given_path(dir, "kn_run_folder_claim", "the folder"))
        return NULL;
    kn_run_folder *f = kn_host_calloc(1, sizeof *f);
    if (!f)
        return NULL;
    f->lock = -1;
    if (make_folders(dir) && take_lock(f, dir) && kn_checkpoint_finish_renames(dir)) {
        if (f->lock >= 0)
            remove_leftovers(dir);
        return f;
    }
    kn_run_folder_release(f);
    return NULL;
}

void kn_run_folder_release(kn_run_folder *f)
{
    if (!f)
        return;
    if (f->lock >= 0) {
        (void)!ftruncate(f->lock, 0);
        close(f->lock);
    }
    kn_host_free(f);
}
