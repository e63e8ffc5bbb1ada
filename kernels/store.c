/* kernels/store.c: memory in an unnamed file, for states that are larger than memory. The file is
 * cut into segments, in order of their offset; a segment that is taken is mapped, one that is free
 * is a hole, or keeps its place for the next (gradients come and go with every step, and the file
 * system takes its time for both). Sizes are whole pages: its blocks are large. */
#include "kernels/store.h"
#include "kernels/error_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#define PAGE ((size_t)4096)
#define FEW  ((size_t)16 << 20)
/* More than any disk has: sizes stay far from the largest file offset. */
#define LARGEST ((size_t)1 << 50)

typedef struct segment {
    struct segment *next; /* the one that follows in the file */
    size_t offset, bytes;
    char *at;    /* its mapping; NULL: free */
    bool placed; /* every byte of it has its place on the disk */
    bool hole;   /* none has */
} segment;

typedef struct store {
    kn_memory memory; /* first: the user's handle */
    struct store *next;
    int fd;
    char *dir;
    segment *segments;
    size_t end; /* of the file */
    size_t taken;
    bool closed;
} store;

/* Stores are few and their calls rare, so one lock does for all of them. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static store *stores;

static size_t pages(size_t bytes)
{
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

/* ---- segments -------------------------------------------------------------------------------- */

/* The first free segment of at least so many bytes; its rest becomes a segment of its own. */
static segment *find_free(store *s, size_t bytes)
{
    for (segment *g = s->segments; g; g = g->next) {
        if (g->at || g->bytes < bytes)
            continue;
        if (g->bytes > bytes) {
            segment *rest = kn_host_alloc(sizeof *rest);
            if (!rest)
                return NULL;
            *rest = *g;
            rest->offset += bytes;
            rest->bytes -= bytes;
            g->bytes = bytes;
            g->next = rest;
        }
        return g;
    }
    return NULL;
}

static segment *append(store *s, size_t bytes)
{
    segment **at = &s->segments, *g = kn_host_alloc(sizeof *g);
    if (!g)
        return NULL;
    while (*at)
        at = &(*at)->next;
    *g = (segment){ .offset = s->end, .bytes = bytes, .hole = true };
    s->end += bytes;
    return *at = g;
}

/* Free neighbours become one; those of two kinds only if a place is needed. */
static void merge(store *s, bool kinds)
{
    for (segment *g = s->segments; g; g = g->next)
        while (!g->at && g->next && !g->next->at && (kinds || g->next->hole == g->hole)) {
            segment *gone = g->next;
            g->bytes += gone->bytes;
            g->placed = g->placed && gone->placed;
            g->hole = g->hole && gone->hole;
            g->next = gone->next;
            kn_host_free(gone);
        }
}

/* If the file system can't, the place stays in use until it is taken again. */
static void punch(store *s, segment *g)
{
    g->hole = fallocate(s->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)g->offset,
                        (off_t)g->bytes) == 0;
    g->placed = false;
}

/* Free segments keep their place as long as they are few bytes, or less than the bytes in use. */
static void punch_surplus(store *s)
{
    size_t kept = 0;
    for (segment *g = s->segments; g; g = g->next)
        kept += g->at || g->hole ? 0 : g->bytes;
    for (segment *g = s->segments; g && kept > s->taken && kept > FEW; g = g->next)
        if (!g->at && !g->hole)
            punch(s, g);
}

/* An errno, EFBIG if the process may not write so large a file, without the signal that would end
 * it. */
static int grow(const store *s, const segment *g)
{
    static const struct timespec at_once;
    sigset_t one, before, pending;
    sigemptyset(&one);
    sigaddset(&one, SIGXFSZ);
    sigpending(&pending);
    pthread_sigmask(SIG_BLOCK, &one, &before);
    int error;
    do
        error = posix_fallocate(s->fd, (off_t)g->offset, (off_t)g->bytes);
    while (error == EINTR); /* it begins again where it was */
    if (error == EFBIG && !sigismember(&pending, SIGXFSZ))
        sigtimedwait(&one, NULL, &at_once); /* it came to this thread; no other one shall see it */
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

/* Gives the free segment its place on the disk and an address. */
static bool map(store *s, segment *g)
{
    int error = g->placed ? 0 : grow(s, g);
    if (error)
        return kn_fail(
            "store: the file in '%s' can't grow by %zu bytes (%.1f MiB) to %zu: %s; free "
            "space there or choose another folder",
            s->dir, g->bytes, (double)g->bytes / (1 << 20), s->end, strerror(error));
    void *p = mmap(NULL, g->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, s->fd, (off_t)g->offset);
    if (p == MAP_FAILED)
        return kn_fail("store: %zu bytes of the file in '%s' can't be mapped: %s", g->bytes, s->dir,
                       strerror(errno));
    g->at = p;
    g->placed = true;
    g->hole = false;
    return true;
}

/* ---- take and give --------------------------------------------------------------------------- */

static void *take(kn_memory *self, size_t bytes)
{
    store *s = (store *)self;
    if (bytes > LARGEST || s->closed)
        return kn_fail_null("store: %zu bytes of the file in '%s' are asked for %s", bytes, s->dir,
                            s->closed ? "after it was closed" : "at once; no disk has them");
    pthread_mutex_lock(&lock);
    segment *g = find_free(s, pages(bytes));
    if (!g && kn_ok()) {
        merge(s, true);
        g = find_free(s, pages(bytes));
    }
    if (!g && kn_ok())
        g = append(s, pages(bytes));
    if (g && !map(s, g)) {
        punch(s, g); /* the size before posix_fallocate failed */
        merge(s, false);
        g = NULL;
    }
    if (g)
        s->taken += g->bytes;
    void *p = g ? g->at : NULL;
    pthread_mutex_unlock(&lock);
    return p;
}

static void destroy(store *s)
{
    for (store **at = &stores; *at; at = &(*at)->next)
        if (*at == s) {
            *at = s->next;
            break;
        }
    while (s->segments) {
        segment *g = s->segments;
        s->segments = g->next;
        kn_host_free(g);
    }
    if (s->fd >= 0)
        close(s->fd);
    kn_host_free(s->dir);
    kn_host_free(s);
}

static void give(kn_memory *self, void *p, size_t bytes)
{
    (void)bytes;
    store *s = (store *)self;
    pthread_mutex_lock(&lock);
    for (segment *g = s->segments; g; g = g->next) {
        if (g->at != p)
            continue;
        munmap(g->at, g->bytes);
        g->at = NULL;
        s->taken -= g->bytes;
        break;
    }
    merge(s, false);
    if (s->closed && s->taken == 0)
        destroy(s);
    else
        punch_surplus(s);
    pthread_mutex_unlock(&lock);
}

/* ---- opening and closing --------------------------------------------------------------------- */

/* A file without a name; if the file system has no such thing, one that loses its name at once. */
static int unnamed_file(const char *dir)
{
    int fd = open(dir, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL))
        return fd;
    char path[4096];
    int n = snprintf(path, sizeof path, "%s/knap-store-XXXXXX", dir);
    if (n < 0 || (size_t)n >= sizeof path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    fd = mkostemp(path, O_CLOEXEC);
    if (fd >= 0)
        unlink(path);
    return fd;
}

/* Whether what posix_fallocate promises holds when mapped pages are written: where it doesn't, a
 * full disk is a SIGBUS, or pages that are lost. NULL: it does; otherwise the name of the file
 * system. */
static const char *breaks_promises(int fd)
{
    static const struct {
        uint32_t magic;
        const char *name;
    } bad[] = { { NFS_SUPER_MAGIC, "NFS" },   { 0x65735546, "FUSE" },
                { CIFS_SUPER_MAGIC, "CIFS" }, { SMB2_SUPER_MAGIC, "SMB" },
                { CEPH_SUPER_MAGIC, "Ceph" }, { V9FS_MAGIC, "9p" },
                { AFS_SUPER_MAGIC, "AFS" },   { 0x2fc12fc1, "ZFS" },
                { 0xca451a4e, "bcachefs" },   { BTRFS_SUPER_MAGIC, "btrfs" } };
    struct statfs fs;
    if (fstatfs(fd, &fs) != 0)
        return NULL;
    int flags = 0,
        nocow =
            FS_NOCOW_FL; /* btrfs writes files with this flag in place; set before the first byte */
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if ((uint32_t)fs.f_type == bad[i].magic) {
            bool in_place = bad[i].magic == BTRFS_SUPER_MAGIC &&
                            ioctl(fd, FS_IOC_GETFLAGS, &flags) == 0 &&
                            ioctl(fd, FS_IOC_SETFLAGS, &(int){ flags | nocow }) == 0;
            return in_place ? NULL : bad[i].name;
        }
    return NULL;
}

/* The file of a store, or -1 with an error. */
static int file_in(const char *dir)
{
    int fd = unnamed_file(dir);
    const char *fs = fd >= 0 ? breaks_promises(fd) : NULL;
    if (fd < 0)
        kn_fail(
            "store: no file can be made in '%s': %s; name a folder that this program may write to",
            dir, strerror(errno));
    if (!fs)
        return fd;
    close(fd);
    kn_fail("store: '%s' lies on %s, which can't promise a mapped file its space on the disk: once "
            "it is full, the "
            "program would be killed; name a folder on a local disk with ext4 or xfs",
            dir, fs);
    return -1;
}

kn_memory *kn_store_open(const char *dir)
{
    struct stat st;
    if (!dir || !*dir || stat(dir, &st) != 0 || !S_ISDIR(st.st_mode))
        return kn_fail_null("store: there is no folder '%s'; make it, or name another",
                            dir ? dir : "");
    store *s = kn_host_calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->memory = (kn_memory){ .name = "the store", .device = KN_CPU, .take = take, .give = give };
    s->dir = kn_host_strdup(dir);
    s->fd = s->dir ? file_in(dir) : -1;
    pthread_mutex_lock(&lock);
    if (s->fd < 0) {
        destroy(s);
        s = NULL;
    } else {
        s->next = stores;
        stores = s;
    }
    pthread_mutex_unlock(&lock);
    return s ? &s->memory : NULL;
}

void kn_store_close(kn_memory *m)
{
    store *s = (store *)m;
    if (!s)
        return;
    pthread_mutex_lock(&lock);
    s->closed = true;
    if (s->taken == 0)
        destroy(s);
    pthread_mutex_unlock(&lock);
}

bool kn_memory_is_store(const kn_memory *m)
{
    return m && m->take == take;
}

/* ---- reading ahead and writing back ---------------------------------------------------------- */

/* The pages of [p, p + bytes) that lie in one segment of a store; NULL if they don't. */
static segment *segment_of(const void *p, size_t bytes, store **of, size_t *begin, size_t *size)
{
    const char *a = p;
    for (store *s = stores; s; s = s->next)
        for (segment *g = s->segments; g; g = g->next) {
            if (!g->at || a < g->at || bytes > g->bytes || a + bytes > g->at + g->bytes)
                continue;
            *of = s;
            *begin = (size_t)(a - g->at) / PAGE * PAGE;
            *size = pages((size_t)(a - g->at) + bytes) - *begin;
            return g;
        }
    return NULL;
}

void kn_store_ahead(const void *p, size_t bytes)
{
    store *s;
    size_t begin, size;
    pthread_mutex_lock(&lock);
    segment *g = bytes ? segment_of(p, bytes, &s, &begin, &size) : NULL;
    if (g)
        madvise(g->at + begin, size, MADV_WILLNEED);
    pthread_mutex_unlock(&lock);
}

/* Dirty pages can't go before they are written, which begins here; those that are clean go at once,
 * the others when the disk has them. */
void kn_store_done(const void *p, size_t bytes)
{
    store *s;
    size_t begin, size;
    pthread_mutex_lock(&lock);
    segment *g = bytes ? segment_of(p, bytes, &s, &begin, &size) : NULL;
    if (g) {
        sync_file_range(s->fd, (off_t)(g->offset + begin), (off_t)size, SYNC_FILE_RANGE_WRITE);
#ifdef MADV_COLD
        madvise(g->at + begin, size, MADV_COLD);
#endif
    }
    pthread_mutex_unlock(&lock);
}

/* ---- windows --------------------------------------------------------------------------------- */

typedef void (*span_fn)(const void *p, size_t bytes);

static size_t tell_item(const kn_store_walk *w, int item, span_fn fn)
{
    kn_span span[KN_STORE_SPANS];
    size_t bytes = 0;
    int spans = w->spans(w->arg, item, span);
    for (int i = 0; i < spans; i++) {
        bytes += span[i].bytes;
        if (fn)
            fn(span[i].at, span[i].bytes);
    }
    return bytes;
}

/* Reads items from begin on ahead, up to a window's worth and at least one. Returns where they
 * end. */
static int read_window(const kn_store_walk *w, int begin, int limit)
{
    int end = begin;
    for (size_t bytes = 0; end < limit; end++) {
        bytes += tell_item(w, end, NULL);
        if (end > begin && bytes > KN_STORE_WINDOW)
            break;
        tell_item(w, end, kn_store_ahead);
    }
    return end;
}

bool kn_store_next(kn_store_walk *w)
{
    for (int i = w->begin; i < w->end; i++)
        tell_item(w, i, kn_store_done);
    w->begin = w->end;
    if (w->begin >= w->last)
        return false;
    w->end = read_window(w, w->begin, w->last);
    read_window(w, w->end, w->items);
    return true;
}
