/* state/folder.c: the folder of a run, from claim to release. */
#include "kernels/error_internal.h"
#include "state/folder_internal.h"
#include "tensor/files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static bool make_folders(const char *dir)
{
    int failed, tries = 0;
    kn_path path = kn_path_of(dir, "", "");
    for (char *p = path.text + 1; *p; p++) {
        if (*p != '/')
            continue;
        *p = 0;
        if (KN_AGAIN(mkdir(path.text, 0777)) != 0 && errno != EEXIST)
            return kn_fail_system("checkpoint: cannot make the folder %s: %m", path.text);
        *p = '/';
    }
    /* with its slash at the end: a file is none */
    while ((failed = access(path.text, W_OK | X_OK)) != 0 && kn_try_again(&tries, false))
        ;
    if (failed)
        return kn_fail_system("checkpoint: cannot write into %s: %m; choose another folder", dir);
    return true;
}

enum { HOLDER = 160 }; /* bytes of a lock file, at most: the name of its holder, or none */

static void sign_lock(int fd)
{
    char who[HOLDER], host[65] = "";
    gethostname(host, sizeof host - 1);
    int n = snprintf(who, sizeof who, "process %ld on %s", (long)getpid(), host);
    if (ftruncate(fd, 0) == 0 && pwrite(fd, who, (size_t)n, 0) != n)
        (void)!ftruncate(fd, 0); /* on failure the holder stays unnamed */
}

/* Whether the file was made by a run of this user, or of the folder's: a claim empties it. Its text
 * comes into who. */
static bool is_lock(int fd, const char *dir, char who[HOLDER])
{
    struct stat st, folder;
    long process;
    int words = 0;
    bool known = KN_AGAIN(fstat(fd, &st)) == 0 && kn_look(dir, &folder) > 0 &&
                 S_ISREG(st.st_mode) && st.st_nlink == 1 && st.st_size < HOLDER &&
                 (st.st_uid == geteuid() || st.st_uid == folder.st_uid);
    ssize_t n = known ? pread(fd, who, HOLDER - 1, 0) : 0;
    who[n > 0 ? n : 0] = '\0';
    return known && (!*who || (sscanf(who, "process %ld on %n", &process, &words) == 1 &&
                               words > 0 && strlen(who) == (size_t)n && !strchr(who, '\n')));
}

static bool take_lock(kn_run_folder *f)
{
    char who[HOLDER];
    const kn_path path = kn_path_of(f->dir, KN_LOCK_FILE, "");
    /* for this user alone: who can open it can hold it */
    int fd = kn_open(path.text, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
    if (fd < 0)
        return kn_fail_system("checkpoint: cannot open %s: %m", path.text);
    if (!is_lock(fd, f->dir, who)) {
        close(fd);
        return kn_fail("%s isn't a file that a run has made, and one would empty it: move it away, "
                       "or choose another folder",
                       path.text);
    }
    (void)!fchmod(fd, 0600);
    int failed = KN_AGAIN(flock(fd, LOCK_EX | LOCK_NB));
    bool held = failed && errno == EWOULDBLOCK;
    if (!failed) {
        sign_lock(fd);
        f->lock = fd;
        return true;
    }
    if (held)
        kn_fail("%s: another run saves there%s%s; wait for its end, or choose another folder",
                f->dir, *who ? ": " : "", who);
    close(fd);
    return !held;
}

static bool claim(kn_run_folder *f, bool overwrite)
{
    kn_listing l = { 0 };
    bool ok = kn_folder_fits(f->dir) && kn_folder_outside(f->dir) && make_folders(f->dir) &&
              take_lock(f) &&
              (f->lock < 0 ? kn_folder_list(&l, f->dir) : kn_folder_recover(f->dir, &l)) &&
              kn_listing_is_sure(&l);
    f->number = kn_listing_number(&l);
    kn_listing_free(&l);
    f->overwrites = overwrite;
    return ok;
}

kn_run_folder *kn_run_folder_claim_(const char *dir, kn_run_folder_options o)
{
    if (!kn_given_path(dir, "kn_run_folder_claim", "the folder"))
        return NULL;
    kn_run_folder *f = kn_host_calloc(1, sizeof *f);
    if (!f)
        return NULL;
    f->lock = -1;
    f->comm = o.comm ? o.comm : kn_world();
    f->dir = kn_host_strdup(dir);
    if (kn_hosts_begin_slow(f->comm) &&
        kn_hosts_end_slow(f->comm, kn_rank(f->comm) > 0 || claim(f, o.overwrite)))
        return f;
    kn_run_folder_release(f);
    return NULL;
}

void kn_run_folder_release(kn_run_folder *f)
{
    if (!f)
        return;
    kn_saving_drop(f);
    if (f->lock >= 0) {
        (void)!ftruncate(f->lock, 0);
        close(f->lock);
    }
    json_decref(f->replaces);
    kn_host_free(f->dir);
    kn_host_free(f);
}
