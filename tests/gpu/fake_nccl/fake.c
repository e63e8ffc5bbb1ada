/* tests/gpu/fake_nccl/fake.c: see fake.h. Built with -DOLD it lacks the functions of NCCL 2.18 and
 * 2.19. */
#include "tests/gpu/fake_nccl/fake.h"

#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

API fake_nccl fake_nccl_state = { .polls = 2 };

enum { SUCCESS = 0, INVALID_USAGE = 5, IN_PROGRESS = 7, MOST = 4, ROOM = 1 << 14, SPLITS = 128 };

/* A call that real NCCL forbids or leaves undefined ends the test. */
static bool must(bool ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "fake NCCL: %s\n", what);
        abort();
    }
    return ok;
}

/* ---- what ranks share ------------------------------------------------------------------------ */

/* A message buffer from one rank to another; full while it holds bytes. */
typedef struct box {
    _Atomic int full;
    size_t bytes;
    char data[ROOM];
} box;

typedef struct shared {
    _Atomic int here[MOST];
    struct {
        _Atomic int set;
        int color, key;
    } split[SPLITS][MOST];
    box box[MOST][MOST];
} shared;

typedef struct comm {
    shared *s;
    char name[160];
    int rank, size, splits;
    int pending;         /* remaining polls until done; more while ranks are missing */
    bool joining;        /* until all ranks have joined */
    struct comm **child; /* the running split's handle goes here */
    int child_color, child_at;
    _Atomic bool aborted;
    int held; /* registrations in use */
} comm;

typedef struct nccl_id {
    char bytes[128];
} nccl_id;

static shared *map(const char *name)
{
    char path[256];
    snprintf(path, sizeof path, "/dev/shm/%s", name);
    int fd = open(path, O_RDWR | O_CREAT, 0600);
    void *m = MAP_FAILED;
    if (fd >= 0 && ftruncate(fd, sizeof(shared)) == 0)
        m = mmap(NULL, sizeof(shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0)
        close(fd);
    return m == MAP_FAILED ? NULL : m;
}

static comm *join(const char *name, int rank, int size)
{
    comm *c = calloc(1, sizeof *c);
    c->s = map(name);
    c->rank = rank;
    c->size = size;
    c->joining = true;
    snprintf(c->name, sizeof c->name, "%s", name);
    atomic_store(&c->s->here[rank], 1);
    return c;
}

/* The last rank to join removes the name, which no other rank needs. */
static bool all_here(comm *c)
{
    char path[256];
    for (int r = 0; r < c->size; r++)
        if (!atomic_load(&c->s->here[r]))
            return false;
    snprintf(path, sizeof path, "/dev/shm/%s", c->name);
    if (c->rank == 0)
        unlink(path);
    return true;
}

/* ---- calls that don't block ------------------------------------------------------------------ */

/* A call begins: nothing may be in progress. */
static bool may(comm *c)
{
    return must(c && !atomic_load(&c->aborted), "a call on a communicator that is gone") &&
           must(c->pending <= 0 && !c->joining && !c->child, "a call while another is in progress");
}

static int later(comm *c)
{
    c->pending = fake_nccl_state.polls;
    return c->pending ? IN_PROGRESS : SUCCESS;
}

/* True if all members have given their color, which fixes the child. */
static bool finish_split(comm *c)
{
    int rank = 0, size = 0, at = c->child_at;
    char name[160];
    for (int r = 0; r < c->size; r++)
        if (!atomic_load(&c->s->split[at][r].set))
            return false;
    int color = c->s->split[at][c->rank].color, key = c->s->split[at][c->rank].key;
    for (int r = 0; r < c->size; r++) {
        if (c->s->split[at][r].color != color)
            continue;
        int other = c->s->split[at][r].key;
        rank += other < key || (other == key && r < c->rank);
        size++;
    }
    snprintf(name, sizeof name, "%.100s-%d-%d", c->name, at, color);
    *c->child = color < 0 ? NULL : join(name, rank, size);
    c->child = NULL;
    return true;
}

API int ncclCommGetAsyncError(comm *c, int *error)
{
    must(!atomic_load(&c->aborted), "a question to a communicator that is gone");
    *error = IN_PROGRESS;
    if (c->pending > 0)
        c->pending--;
    else if (c->joining && all_here(c))
        c->joining = false, *error = SUCCESS;
    else if (c->child && finish_split(c))
        *error = SUCCESS;
    else if (!c->joining && !c->child)
        *error = fake_nccl_state.async_error;
    return SUCCESS;
}

API int ncclGetVersion(int *v)
{
    *v = 22809;
    return SUCCESS;
}

API int ncclGetUniqueId(nccl_id *id)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    snprintf(id->bytes, sizeof id->bytes, "knap-fake-%d-%lld-%d", (int)getpid(),
             (long long)t.tv_sec * 1000000000 + t.tv_nsec, fake_nccl_state.ids++);
    return SUCCESS;
}

API int ncclCommInitRankConfig(comm **c, int ranks, nccl_id id, int rank, void *config)
{
    int blocking = *(int *)(void *)((char *)config + sizeof(size_t) + 2 * sizeof(unsigned));
    if (ranks > MOST || blocking != 0)
        return INVALID_USAGE;
    *c = join(id.bytes, rank, ranks);
    fake_nccl_state.inits++;
    return IN_PROGRESS;
}

API int ncclCommFinalize(comm *c)
{
    if (!may(c))
        return INVALID_USAGE;
    fake_nccl_state.finalizes++;
    must(c->held == 0, "memory is still registered with a communicator that ends");
    return later(c);
}

API int ncclCommDestroy(comm *c)
{
    must(!atomic_load(&c->aborted), "destroyed after an abort");
    fake_nccl_state.destroys++;
    return SUCCESS;
}

API int ncclCommAbort(comm *c)
{
    must(!atomic_exchange(&c->aborted, true), "aborted twice");
    __atomic_fetch_add(&fake_nccl_state.aborts, 1, __ATOMIC_SEQ_CST);
    if (fake_nccl_state.slow_abort_ms)
        usleep((unsigned)fake_nccl_state.slow_abort_ms * 1000);
    return SUCCESS;
}

API const char *ncclGetErrorString(int e)
{
    return e == IN_PROGRESS ? "NCCL operation in progress"
           : e == 6         ? "remote process exited or there was a network error"
                            : "invalid usage";
}

API const char *ncclGetLastError(comm *c)
{
    (void)c;
    return "";
}

#ifndef OLD
API int ncclCommSplit(comm *c, int color, int key, comm **made, void *config)
{
    (void)config;
    if (!may(c) || c->splits >= SPLITS)
        return INVALID_USAGE;
    fake_nccl_state.splits++;
    c->child_at = c->splits++;
    c->child = made;
    c->s->split[c->child_at][c->rank].color = color;
    c->s->split[c->child_at][c->rank].key = key;
    atomic_store(&c->s->split[c->child_at][c->rank].set, 1);
    return later(c), IN_PROGRESS;
}

/* ---- registered memory ----------------------------------------------------------------------- */

static struct {
    char *p;
    size_t bytes;
    comm *held[16];
} segment[64];

API int ncclMemAlloc(void **p, size_t bytes)
{
    *p = fake_nccl_state.fail_memory ? NULL : aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (!*p)
        return 1;
    memset(*p, 0xaa, bytes);
    for (int i = 0; i < 64; i++)
        if (!segment[i].p) {
            memset(&segment[i], 0, sizeof segment[i]);
            segment[i].p = *p;
            segment[i].bytes = bytes;
            break;
        }
    fake_nccl_state.memory += bytes;
    return SUCCESS;
}

API int ncclMemFree(void *p)
{
    for (int i = 0; i < 64; i++)
        if (segment[i].p == p) {
            for (int k = 0; k < 16; k++) /* still registered with a communicator */
                must(!segment[i].held[k] || atomic_load(&segment[i].held[k]->aborted),
                     "memory was freed while registered");
            fake_nccl_state.memory -= segment[i].bytes;
            segment[i].p = NULL;
        }
    free(p);
    return SUCCESS;
}

API int ncclCommRegister(comm *c, void *p, size_t bytes, void **handle)
{
    if (!may(c) || fake_nccl_state.fail_register)
        return INVALID_USAGE;
    for (int i = 0; i < 64; i++) {
        if (segment[i].p != p || segment[i].bytes < bytes)
            continue;
        for (int k = 0; k < 16; k++)
            if (!segment[i].held[k]) {
                segment[i].held[k] = c;
                *handle = &segment[i].held[k];
                fake_nccl_state.enrolled++;
                c->held++;
                return later(c);
            }
    }
    return INVALID_USAGE;
}

API int ncclCommDeregister(comm *c, void *handle)
{
    comm **held = handle;
    must(*held == c, "the handle of another communicator");
    *held = NULL;
    c->held--;
    fake_nccl_state.dismissed++;
    return SUCCESS;
}

static bool in_held(const comm *c, const void *p)
{
    for (int i = 0; i < 64; i++)
        for (int k = 0; segment[i].p && k < 16; k++)
            if (segment[i].held[k] == c && (const char *)p >= segment[i].p &&
                (const char *)p < segment[i].p + segment[i].bytes)
                return true;
    return false;
}
#else
static bool in_held(const comm *c, const void *p)
{
    (void)c, (void)p;
    return false;
}
#endif

/* ---- moving bytes ---------------------------------------------------------------------------- */

typedef struct part {
    bool send;
    int peer;
    char *p;
    size_t bytes, at;
} part;

typedef struct job {
    comm *c;
    struct job *next; /* of a group */
    void *stream;
    part part[64 * MOST];
    int parts;
    void (*end)(struct job *j); /* then */
    char *dst, *room;
    size_t count;
    int type;
} job;

/* Parts between two ranks move one after the other. */
static bool first(const job *j, const part *t)
{
    for (const part *p = j->part; p < t; p++)
        if (p->send == t->send && p->peer == t->peer && p->at < p->bytes)
            return false;
    return true;
}

/* Moves as much of a part as its buffer takes or holds. */
static void move(job *j, part *t)
{
    box *b = t->send ? &j->c->s->box[j->c->rank][t->peer] : &j->c->s->box[t->peer][j->c->rank];
    if (atomic_load(&b->full) == t->send)
        return;
    if (t->send) {
        b->bytes = t->bytes - t->at < ROOM ? t->bytes - t->at : ROOM;
        memcpy(b->data, t->p + t->at, b->bytes);
    } else {
        memcpy(t->p + t->at, b->data, b->bytes);
    }
    t->at += b->bytes;
    atomic_store(&b->full, t->send);
}

static void work(void *arg)
{
    job *j = arg;
    bool done = false;
    for (int looks = 0; !done && !atomic_load(&j->c->aborted); looks++) {
        done = true;
        for (int i = 0; i < j->parts; i++) {
            if (j->part[i].at < j->part[i].bytes && first(j, &j->part[i]))
                move(j, &j->part[i]);
            done = done && j->part[i].at == j->part[i].bytes;
        }
        if (looks > 100)
            usleep(20);
    }
    if (done && j->end)
        j->end(j);
    free(j->room);
    free(j);
}

static void add(job *j, bool send, const void *p, size_t bytes, int peer)
{
    j->part[j->parts++] = (part){ send, peer, (char *)(uintptr_t)p, bytes, 0 };
}

static size_t size_of(int type)
{
    return type == 1 ? 1 : type == 4 || type == 8 ? 8 : type == 6 || type == 9 ? 2 : 4;
}

static job *begin(comm *c, const void *src, const void *dst)
{
    job *j = calloc(1, sizeof *j);
    j->c = c;
    fake_nccl_state.calls++;
    fake_nccl_state.calls_in_held += in_held(c, src) && in_held(c, dst);
    return j;
}

static _Thread_local job *grouped,
    *letters; /* the calls of a group; the one that sends and receives */
static _Thread_local int depth;

static int launch(job *j, void *stream)
{
    comm *c = j->c;
    j->stream = stream;
    if (depth > 0) {
        job **at = &grouped;
        while (*at)
            at = &(*at)->next;
        *at = j;
        return must(grouped->c == c, "a group over several communicators") ? SUCCESS
                                                                           : INVALID_USAGE;
    }
    fake_nccl_state.launch(stream, work, j);
    return later(c);
}

/* The parts in room, in rank order. */
static void add_up(job *j)
{
    for (size_t i = 0; i < j->count; i++) {
        double d = 0;
        float f = 0;
        uint64_t u = 0;
        for (int r = 0; r < j->c->size; r++) {
            size_t at = (size_t)r * j->count + i;
            d += j->type == 8 ? ((double *)(void *)j->room)[at] : 0;
            f += j->type == 7 ? ((float *)(void *)j->room)[at] : 0;
            u += j->type == 4   ? ((uint64_t *)(void *)j->room)[at]
                 : j->type == 2 ? ((uint32_t *)(void *)j->room)[at]
                                : 0;
        }
        if (j->type == 8)
            ((double *)(void *)j->dst)[i] = d;
        else if (j->type == 7)
            ((float *)(void *)j->dst)[i] = f;
        else if (j->type == 4)
            ((uint64_t *)(void *)j->dst)[i] = u;
        else
            ((uint32_t *)(void *)j->dst)[i] = (uint32_t)u;
    }
}

API int ncclAllGather(const void *src, void *dst, size_t n, int type, comm *c, void *stream)
{
    size_t bytes = n * size_of(type);
    if (!may(c))
        return INVALID_USAGE;
    job *j = begin(c, src, dst);
    for (int r = 0; r < c->size; r++) {
        add(j, true, src, bytes, r);
        add(j, false, (char *)dst + (size_t)r * bytes, bytes, r);
    }
    return launch(j, stream);
}

/* stride: from this rank's part to the next rank's. */
static int reduce(const void *src, void *dst, size_t n, size_t stride, int type, int op, comm *c,
                  void *stream)
{
    size_t bytes = n * size_of(type);
    if (!may(c) || op != 0 || (type != 2 && type != 4 && type != 7 && type != 8))
        return INVALID_USAGE;
    job *j = begin(c, src, dst);
    j->room = malloc(bytes * (size_t)c->size + 1);
    j->dst = dst;
    j->count = n;
    j->type = type;
    j->end = add_up;
    for (int r = 0; r < c->size; r++) {
        add(j, true, (const char *)src + (size_t)r * stride, bytes, r);
        add(j, false, j->room + (size_t)r * bytes, bytes, r);
    }
    return launch(j, stream);
}

API int ncclReduceScatter(const void *src, void *dst, size_t n, int type, int op, comm *c,
                          void *stream)
{
    return reduce(src, dst, n, n * size_of(type), type, op, c, stream);
}

API int ncclAllReduce(const void *src, void *dst, size_t n, int type, int op, comm *c, void *stream)
{
    return reduce(src, dst, n, 0, type, op, c, stream);
}

API int ncclBroadcast(const void *src, void *dst, size_t n, int type, int root, comm *c,
                      void *stream)
{
    size_t bytes = n * size_of(type);
    if (!may(c))
        return INVALID_USAGE;
    job *j = begin(c, src, dst);
    for (int r = 0; r < c->size && c->rank == root; r++)
        if (r != root)
            add(j, true, src, bytes, r);
    if (c->rank != root)
        add(j, false, dst, bytes, root);
    else if (src != dst)
        memcpy(dst, src, bytes);
    return launch(j, stream);
}

/* ---- groups ---------------------------------------------------------------------------------- */

API int ncclGroupStart(void)
{
    depth++;
    return SUCCESS;
}

static int in_group(bool send, const void *p, size_t n, int type, int peer, comm *c, void *stream)
{
    if (depth == 0 || !may(c))
        return INVALID_USAGE;
    if (!letters) {
        letters = begin(c, NULL, NULL);
        launch(letters, stream);
    }
    if (letters->c != c || !must(letters->parts < 64 * MOST, "more letters than the fake can hold"))
        return INVALID_USAGE;
    add(letters, send, p, n * size_of(type), peer);
    return SUCCESS;
}

API int ncclSend(const void *p, size_t n, int type, int peer, comm *c, void *stream)
{
    return in_group(true, p, n, type, peer, c, stream);
}

API int ncclRecv(void *p, size_t n, int type, int peer, comm *c, void *stream)
{
    return in_group(false, p, n, type, peer, c, stream);
}

API int ncclGroupEnd(void)
{
    int result = SUCCESS;
    if (--depth > 0)
        return SUCCESS;
    letters = NULL;
    while (grouped) {
        job *j = grouped;
        grouped = j->next;
        result = launch(j, j->stream);
    }
    return result;
}
