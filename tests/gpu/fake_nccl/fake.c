/* tests/gpu/fake_nccl/fake.c: communicators, calls that don't block, registered memory: see fake.h.
 * Built with -DOLD it lacks the functions of NCCL 2.18 and 2.19. */
#include "tests/gpu/fake_nccl/inside.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>

API fake_nccl fake_nccl_state = { .polls = 2 };

/* ---- joining --------------------------------------------------------------------------------- */

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

bool fake_nccl_may(comm *c)
{
    return must(c && !atomic_load(&c->aborted), "a call on a communicator that is gone") &&
           must(c->pending <= 0 && !c->joining && !c->child, "a call while another is in progress");
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int fake_nccl_later(comm *c)
{
    c->pending = fake_nccl_state.polls;
    c->begun = fake_nccl_state.busy_us > 0 ? seconds() : 0;
    if (c->begun > 0 && c->pending == 0)
        c->pending = 1;
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
    if (c->begun > 0 && seconds() < c->begun + 1e-6 * fake_nccl_state.busy_us)
        return SUCCESS;
    if (c->begun > 0)
        c->begun = c->pending = 0;
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
    snprintf(id->bytes, sizeof id->bytes, "knap-fake-%d-%.9f-%d", (int)getpid(), seconds(),
             fake_nccl_state.ids++);
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
    if (!fake_nccl_may(c))
        return INVALID_USAGE;
    fake_nccl_state.finalizes++;
    must(c->held == 0, "memory is still registered with a communicator that ends");
    return fake_nccl_later(c);
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
/* Of this thread, in one of the frames just above. */
static bool on_stack(const void *p)
{
    char here;
    uintptr_t from = (uintptr_t)&here;
    return (uintptr_t)p > from && (uintptr_t)p < from + 65536;
}

API int ncclCommSplit(comm *c, int color, int key, comm **made, void *config)
{
    (void)config;
    if (!fake_nccl_may(c) || c->splits >= SPLITS)
        return INVALID_USAGE;
    fake_nccl_state.splits++;
    must(!on_stack(made), "a split whose handle lies on the stack, and may come after its caller");
    c->child_at = c->splits++;
    c->child = made;
    c->s->split[c->child_at][c->rank].color = color;
    c->s->split[c->child_at][c->rank].key = key;
    atomic_store(&c->s->split[c->child_at][c->rank].set, 1);
    return fake_nccl_later(c), IN_PROGRESS;
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
    if (!fake_nccl_may(c) || fake_nccl_state.fail_register)
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
                return fake_nccl_later(c);
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

bool fake_nccl_in_held(const comm *c, const void *p)
{
    for (int i = 0; i < 64; i++)
        for (int k = 0; segment[i].p && k < 16; k++)
            if (segment[i].held[k] == c && (const char *)p >= segment[i].p &&
                (const char *)p < segment[i].p + segment[i].bytes)
                return true;
    return false;
}
#else
bool fake_nccl_in_held(const comm *c, const void *p)
{
    (void)c, (void)p;
    return false;
}
#endif
