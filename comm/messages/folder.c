/* comm/messages/folder.c: ranks that exchange messages as files of a folder that all of them see:
 * for hosts that share a disk and no network. A message is written beside and renamed, so that it
 * is there whole; the receiver looks for it, reads it and removes it. */
#include "comm/launch/launch.h"
#include "comm/messages/messages.h"
#include "kernels/trace.h"
#include "tensor/files.h"
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define LOOK_NS    (100 * 1000)
#define PATIENCE_S 1.5 /* for the words of others, at the end */

typedef struct folder_world {
    kn_message_world base;
    char path[3072];
    int64_t *told, *heard; /* [size] words to and from each rank so far */
} folder_world;

typedef struct folder_comm {
    kn_message_comm base;
    int64_t *sent, *came; /* [size] messages to and from each rank so far */
    bool *waits;          /* [size] for this exchange's message of that rank */
} folder_comm;

typedef struct file_name {
    char text[3328];
} file_name;

/* Of message n of a family of messages: a communicator, or -1: words. From, to: of the world. */
static file_name name_of(const folder_world *w, int64_t family, int from, int to, int64_t n)
{
    file_name f;
    snprintf(f.text, sizeof f.text, "%s/%lld.%d.%d.%lld", w->path, (long long)family, from, to,
             (long long)n);
    return f;
}

static void look_again_soon(void)
{
    nanosleep(&(struct timespec){ .tv_nsec = LOOK_NS }, NULL);
}

/* ---- messages -------------------------------------------------------------------------------- */

static int begin_file(const file_name *f, file_name *beside)
{
    snprintf(beside->text, sizeof beside->text, "%.3300s+", f->text);
    return kn_open(beside->text, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
}

static bool write_all(int fd, const char *data, int64_t bytes)
{
    for (int64_t at = 0, n; at < bytes; at += n)
        if ((n = KN_AGAIN(write(fd, data + at, (size_t)(bytes - at)))) <= 0)
            return false;
    return true;
}

static bool end_file(int fd, const file_name *beside, const file_name *f, bool ok)
{
    ok = (fd < 0 || close(fd) == 0) && ok && rename(beside->text, f->text) == 0;
    if (!ok)
        unlink(beside->text);
    return ok;
}

static bool send_to(folder_comm *c, const kn_message_parts *p, int j)
{
    const kn_comm *base = &c->base.base;
    file_name beside, f = name_of((folder_world *)c->base.w, base->id, base->member[base->rank],
                                  base->member[j], c->sent[j]++);
    const int fd = begin_file(&f, &beside);
    bool ok = fd >= 0;
    for (int i = 0; ok && i < p->parts; i++)
        ok = write_all(fd, p->part[i].send + j * p->part[i].send_stride, p->part[i].send_bytes);
    return end_file(fd, &beside, &f, ok) ||
           kn_fail_system("cannot write a message to rank %d, %s: %m", j, f.text);
}

/* Waits until the file is there. */
static bool wait_for(folder_comm *c, const kn_comm_call *call, int j, const char *path)
{
    const double begin = kn_now(), limit = kn_comm_timeout(&c->base.base);
    double ask = 0.05;
    while (access(path, F_OK) != 0) {
        if (!kn_message_hopeful(&c->base, call, j) ||
            !kn_message_in_time(&c->base, call, kn_now() - begin, limit))
            return false;
        if (kn_now() - begin > ask) {
            kn_message_ask_where(&c->base, call, j);
            ask *= 2;
        }
        look_again_soon();
    }
    return true;
}

static bool receive_from(folder_comm *c, const kn_comm_call *call, const kn_message_parts *p, int j)
{
    const kn_comm *base = &c->base.base;
    const file_name f = name_of((folder_world *)c->base.w, base->id, base->member[j],
                                base->member[base->rank], c->came[j]++);
    if (!wait_for(c, call, j, f.text))
        return false;
    const int fd = kn_open(f.text, O_RDONLY | O_CLOEXEC, 0);
    bool ok = fd >= 0;
    off_t at = 0;
    for (int i = 0; ok && i < p->parts; i++) {
        const ssize_t n = (ssize_t)p->part[i].receive_bytes;
        ok = kn_read_at(fd, p->part[i].receive + j * p->part[i].receive_stride, (size_t)n, at) == n;
        at += n;
    }
    if (fd >= 0)
        close(fd);
    unlink(f.text);
    c->waits[j] = false;
    return ok || kn_fail_system("cannot read a message of rank %d, %s: %m", j, f.text);
}

static bool exchange(kn_message_comm *base, const kn_comm_call *call, const kn_message_parts *p,
                     int tag)
{
    folder_comm *c = (folder_comm *)base;
    const int me = base->base.rank, n = base->base.size;
    bool ok = true;
    (void)tag; /* messages between two ranks come in their order */
    base->asked_late = 0;
    for (int j = 0; j < n; j++)
        c->waits[j] = kn_message_receive_bytes(p, me, j) > 0;
    for (int j = 0; ok && j < n; j++)
        ok = kn_message_send_bytes(p, me, j) == 0 || send_to(c, p, j);
    for (int j = 0; ok && j < n; j++)
        ok = !c->waits[j] || receive_from(c, call, p, j);
    return ok;
}

static bool is_open(kn_message_comm *c, int peer)
{
    return ((folder_comm *)c)->waits[peer];
}

/* ---- words ----------------------------------------------------------------------------------- */

static void tell(kn_message_world *base, int r, const kn_message_word *word)
{
    folder_world *w = (folder_world *)base;
    file_name beside, f = name_of(w, -1, base->first->rank, r, w->told[r]);
    const int fd = begin_file(&f, &beside);
    if (end_file(fd, &beside, &f, fd >= 0 && write_all(fd, (const char *)word, sizeof *word)))
        w->told[r]++;
}

static bool listen_to_all(kn_message_world *base)
{
    folder_world *w = (folder_world *)base;
    for (int r = 0; r < base->first->size; r++)
        for (;;) {
            kn_message_word word;
            const file_name f = name_of(w, -1, r, base->first->rank, w->heard[r]);
            const int fd = open(f.text, O_RDONLY | O_CLOEXEC);
            if (fd < 0)
                break;
            const bool whole = kn_read_at(fd, &word, sizeof word, 0) == (ssize_t)sizeof word;
            close(fd);
            unlink(f.text);
            w->heard[r]++;
            if (whole && !kn_message_heard(base, r, &word))
                return false;
        }
    return true;
}

static bool may(kn_message_world *w)
{
    return pthread_equal(pthread_self(), w->main);
}

static const kn_transport by_files = { exchange, tell, listen_to_all, may, is_open, NULL };

/* ---- worlds ---------------------------------------------------------------------------------- */

static bool begin(kn_comm *base, int size)
{
    folder_comm *c = (folder_comm *)base;
    c->sent = kn_host_calloc((size_t)size, sizeof *c->sent);
    c->came = kn_host_calloc((size_t)size, sizeof *c->came);
    c->waits = kn_host_calloc((size_t)size, sizeof *c->waits);
    return kn_message_comm_begin(&c->base, size) && c->sent && c->came && c->waits;
}

static bool all_left(const kn_message_world *w)
{
    int left = 1; /* this rank */
    for (int r = 0; r < w->first->size; r++)
        left += atomic_load(&w->left[r]);
    return left >= w->first->size;
}

static void end(kn_comm *base)
{
    folder_comm *c = (folder_comm *)base;
    kn_message_world *w = c->base.w;
    if (base == w->first) {
        kn_message_say_goodbye(w);
        for (double until = kn_now() + PATIENCE_S; kn_now() < until && !all_left(w);) {
            listen_to_all(w);
            look_again_soon();
        }
        rmdir(((folder_world *)w)->path); /* the last one finds it empty */
    }
    kn_message_comm_end(&c->base);
    kn_host_free(c->sent);
    kn_host_free(c->came);
    kn_host_free(c->waits);
}

static void drop(folder_world *w)
{
    if (!w)
        return;
    kn_message_world_end(&w->base);
    kn_host_free(w->told);
    kn_host_free(w->heard);
    kn_host_free(w);
}

static void close_world(kn_comm_world *world)
{
    drop(world->backend);
}

static const kn_comm_ops ops = { .backend = "folder",
                                 .bytes = sizeof(folder_comm),
                                 .begin = begin,
                                 .end = end,
                                 .close = close_world,
                                 KN_MESSAGE_OPS };

/* Rank 0 makes the folder, the others wait for it. */
static bool meet(const folder_world *w, int rank)
{
    const double until = kn_now() + 60;
    if (rank == 0)
        return mkdir(w->path, 0700) == 0 ||
               kn_fail_system("ranks can't meet in %s, which rank 0 makes: %m", w->path);
    while (access(w->path, F_OK) != 0) {
        if (kn_now() > until)
            return kn_fail("rank 0 didn't make %s, where ranks meet, in 60 s", w->path);
        look_again_soon();
    }
    return true;
}

kn_comm *kn_comm_folder(const char *path, int rank, int size)
{
    kn_comm_world *world = kn_comm_world_make();
    folder_world *w = kn_host_calloc(1, sizeof *w);
    kn_comm *c = NULL;
    if (!world || !w)
        goto fail;
    world->backend = w;
    w->told = kn_host_calloc((size_t)size, sizeof *w->told);
    w->heard = kn_host_calloc((size_t)size, sizeof *w->heard);
    snprintf(w->path, sizeof w->path, "%s", path);
    if (!w->told || !w->heard || !kn_message_world_begin(&w->base, &by_files, size) ||
        !meet(w, rank) || !(c = kn_comm_make(world, &ops, size)))
        goto fail;
    w->base.first = c;
    world->memory = kn_device_memory(KN_CPU);
    world->inline_only = true;
    kn_set_free_cores(0);
    kn_comm_enter(c, world, &ops, rank, size, "world");
    return c;
fail:
    drop(w);
    kn_host_free(world);
    return NULL;
}
