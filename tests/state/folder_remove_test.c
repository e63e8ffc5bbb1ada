/* tests/state/folder_remove_test.c: checkpoints are removed while another user puts links in their
 * place. */
#include "knap.h"
#include "tests/models/temp.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/syscall.h>

/* ---- another user, before any one operation on files ----------------------------------------- */

static atomic_int left; /* operations until the swap; 0: none comes */
static const char *victim;

/* The victim moves away, and a link to a home comes in its place. */
static void swap(void)
{
    if (atomic_load(&left) == 0 || atomic_fetch_sub(&left, 1) > 1)
        return;
    renameat(AT_FDCWD, temp_path(victim), AT_FDCWD, temp_path("moved"));
    KN_CHECK(symlink(temp_path("home"), temp_path(victim)) == 0 || errno == ENOENT ||
             errno == EEXIST);
}

/* The library's operations are these functions. */

int lstat(const char *path, struct stat *st)
{
    swap();
    return fstatat(AT_FDCWD, path, st, AT_SYMLINK_NOFOLLOW);
}

int unlink(const char *path)
{
    swap();
    return (int)syscall(SYS_unlinkat, AT_FDCWD, path, 0);
}

int rmdir(const char *path)
{
    swap();
    return (int)syscall(SYS_unlinkat, AT_FDCWD, path, AT_REMOVEDIR);
}

int unlinkat(int dir, const char *path, int flags)
{
    swap();
    return (int)syscall(SYS_unlinkat, dir, path, flags);
}

DIR *opendir(const char *path)
{
    swap();
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return fd < 0 ? NULL : fdopendir(fd);
}

int openat(int dir, const char *path, int flags, ...)
{
    va_list ap;
    swap();
    va_start(ap, flags);
    mode_t mode = flags & O_CREAT ? va_arg(ap, mode_t) : 0;
    va_end(ap);
    return (int)syscall(SYS_openat, dir, path, flags, mode);
}

/* ---- what stays ------------------------------------------------------------------------------ */

static bool is_there(const char *name)
{
    return access(temp_path(name), F_OK) == 0;
}

static void make(const char *name)
{
    KN_CHECK(mkdir(temp_path(name), 0777) == 0, "%s", name);
}

#define LEFTOVER "run/step-00000001.removing"

static void begin(void)
{
    make("home");
    make("home/model");
    write_temp("home/letter", "x", 1);
    write_temp("home/model/letter", "x", 1);
    make("run");
    make(LEFTOVER);
    make(LEFTOVER "/model");
    make(LEFTOVER "/optimizer");
    write_temp(LEFTOVER "/model/letter", "x", 1);
    write_temp(LEFTOVER "/optimizer/letter", "x", 1);
    write_temp(LEFTOVER "/state.json", "x", 1);
}

/* A claim removes the leftover; before its at-th operation the victim is swapped. False: it has
 * fewer. */
static bool claim_while(int at)
{
    begin();
    atomic_store(&left, at);
    kn_run_folder *f = kn_run_folder_claim(temp_path("run"));
    bool swapped = atomic_exchange(&left, 0) == 0;
    KN_CHECK(f != NULL, "%s", kn_error());
    kn_run_folder_release(f);
    KN_CHECK(is_there("home/letter") && is_there("home/model/letter"),
             "%s is a link from operation %d on, and what it names goes", victim, at);
    KN_CHECK(swapped || !is_there(LEFTOVER));
    remove_temp();
    return swapped;
}

KN_TEST(folder_remove, a_link_that_comes_meanwhile_is_not_followed)
{
    static const char *const victims[] = { LEFTOVER, LEFTOVER "/model", LEFTOVER "/optimizer" };
    for (size_t i = 0; i < 3; i++) {
        int at = 1;
        for (victim = victims[i]; claim_while(at); at++)
            ;
        KN_CHECK(at > 8, "%d operations remove three folders and three files", at);
    }
}
