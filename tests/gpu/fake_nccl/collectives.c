/* tests/gpu/fake_nccl/collectives.c: collectives, messages and groups of them: see fake.h. */
#include "tests/gpu/fake_nccl/inside.h"

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
    bool recorded; /* into a graph */
    bool in_held;  /* all buffers are registered */
    part part[64 * MOST];
    int parts;
    void (*end)(struct job *j); /* then */
    char *dst, *room;
    const char *src;
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

/* Once, or in each launch of the graph in which it was recorded. */
static void work(void *arg)
{
    job *j = arg;
    bool done = false;
    for (int i = 0; i < j->parts; i++)
        j->part[i].at = 0;
    for (int looks = 0; !done && !atomic_load(&j->c->gone); looks++) {
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
}

static void drop(void *arg)
{
    job *j = arg;
    j->c->recorded -= j->recorded;
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
    j->in_held = fake_nccl_in_held(c, src) && fake_nccl_in_held(c, dst);
    return j;
}

/* The calls of a group; the one that sends and receives. */
static _Thread_local job *grouped, *letters;
static _Thread_local int depth;

/* At the end of a queue. */
static void append(job **at, job *j)
{
    while (*at)
        at = &(*at)->next;
    *at = j;
}

void fake_nccl_launch_queue(comm *c)
{
    while (c->queue) {
        job *j = c->queue;
        c->queue = j->next;
        fake_nccl_state.calls++;
        fake_nccl_state.calls_in_held += j->in_held;
        j->recorded = fake_nccl_state.recording(j->stream);
        c->recorded += j->recorded;
        fake_nccl_state.launch(j->stream, work, drop, j);
    }
}

/* Between ranks that have exchanged nothing before. */
static bool connects(const job *j)
{
    bool first_time = false;
    for (int i = 0; i < j->parts; i++) {
        first_time = first_time || !j->c->connected[j->part[i].peer];
        fake_nccl_state.connected += !j->c->connected[j->part[i].peer];
        j->c->connected[j->part[i].peer] = true;
    }
    return first_time;
}

static int launch(job *j, void *stream)
{
    j->stream = stream;
    if (depth == 0) {
        append(&j->c->queue, j);
        return fake_nccl_answer(COLLECTIVE, j->c, false);
    }
    append(&grouped, j);
    return must(grouped->c == j->c, "a group over several communicators") ? SUCCESS : INVALID_USAGE;
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
    if (!fake_nccl_may(c))
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
    if (!fake_nccl_may(c) || op != 0 || (type != 2 && type != 4 && type != 7 && type != 8))
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

static void copy_own(job *j)
{
    memcpy(j->dst, j->src, j->count);
}

API int ncclBroadcast(const void *src, void *dst, size_t n, int type, int root, comm *c,
                      void *stream)
{
    size_t bytes = n * size_of(type);
    if (!fake_nccl_may(c))
        return INVALID_USAGE;
    job *j = begin(c, src, dst);
    for (int r = 0; r < c->size && c->rank == root; r++)
        if (r != root)
            add(j, true, src, bytes, r);
    if (c->rank != root)
        add(j, false, dst, bytes, root);
    else if (src != dst) {
        j->src = src;
        j->dst = dst;
        j->count = bytes;
        j->end = copy_own;
    }
    return launch(j, stream);
}

/* ---- groups ---------------------------------------------------------------------------------- */

API int ncclGroupStart(void)
{
    depth++;
    return SUCCESS;
}

static int end_group(function f)
{
    job *j = grouped;
    bool first_time = letters && connects(letters);
    grouped = letters = NULL;
    if (!j)
        return SUCCESS;
    append(&j->c->queue, j);
    return fake_nccl_answer(f, j->c, first_time);
}

API int ncclGroupEnd(void)
{
    return --depth > 0 ? SUCCESS : end_group(GROUP);
}

/* Outside a group each is one of its own. */
static int letter(bool send, const void *p, size_t n, int type, int peer, comm *c, void *stream)
{
    if (!fake_nccl_may(c))
        return INVALID_USAGE;
    depth++;
    if (!letters) {
        letters = begin(c, p, p);
        launch(letters, stream);
    }
    must(letters->c == c, "letters of several communicators in a group");
    must(letters->parts < 64 * MOST, "more letters than the fake can hold");
    letters->in_held = letters->in_held && fake_nccl_in_held(c, p);
    add(letters, send, p, n * size_of(type), peer);
    return --depth > 0 ? SUCCESS : end_group(LETTER);
}

API int ncclSend(const void *p, size_t n, int type, int peer, comm *c, void *stream)
{
    return letter(true, p, n, type, peer, c, stream);
}

API int ncclRecv(void *p, size_t n, int type, int peer, comm *c, void *stream)
{
    return letter(false, p, n, type, peer, c, stream);
}
