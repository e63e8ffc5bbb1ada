/* tests/gpu/fake_nccl/fake.c: communicators, calls that don't block, registered memory: see fake.h.
 * Of the functions of NCCL 2.18 and 2.19 it has those of VERSION. */
#include "tests/gpu/fake_nccl/inside.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>

API fake_nccl fake_nccl_state = { .version = VERSION, .polls = 2 };

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

/* As NCCL tells GPUs apart: the host, by its name and boot or by NCCL_HOSTID, and the bus id. */
static void place(char text[64])
{
    const char *host = getenv("NCCL_HOSTID");
    char bus[32] = "";
    fake_nccl_state.gpu(bus, sizeof bus);
    snprintf(text, 64, "%.30s %s", host ? host : "here", bus);
}

static comm *join(const char *name, int rank, int size, bool blocking)
{
    comm *c = calloc(1, sizeof *c);
    c->s = map(name);
    c->rank = rank;
    c->size = size;
    c->blocking = blocking;
    c->maker = pthread_self();
    c->joining = true;
    snprintf(c->name, sizeof c->name, "%s", name);
    place(c->s->gpu[rank]);
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

/* "Duplicate GPU detected": initTransportsRank, line 795 at 2.18.5, 946 at 2.29.2. */
static bool apart(const comm *c)
{
    for (int r = 0; r < c->size; r++)
        if (r != c->rank && strcmp(c->s->gpu[r], c->s->gpu[c->rank]) == 0)
            return false;
    return true;
}

/* ---- calls that don't block ------------------------------------------------------------------ */

bool fake_nccl_may(comm *c)
{
    return must(c && !atomic_load(&c->gone), "a call on a communicator that is gone") &&
           must(c->state != IN_PROGRESS, "a call while another is in progress") &&
           must(pthread_equal(c->maker, pthread_self()), "calls from two threads");
}

double fake_nccl_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* True if all members have given their color, which fixes the child; its name is in it from then
 * on. */
static bool named_child(const comm *c, char name[160], int *rank, int *size)
{
    int at = c->child_at, color = c->s->split[at][c->rank].color;
    int key = c->s->split[at][c->rank].key;
    for (int r = 0; r < c->size; r++)
        if (!atomic_load(&c->s->split[at][r].set))
            return false;
    for (int r = *rank = *size = 0; r < c->size; r++) {
        if (c->s->split[at][r].color != color)
            continue;
        int other = c->s->split[at][r].key;
        *rank += other < key || (other == key && r < c->rank);
        ++*size;
    }
    snprintf(name, 160, "%.100s-%d-%d", c->name, at, color);
    return true;
}

/* The child is whole when its handle is given. */
static bool split_work(comm *c)
{
    int rank, size;
    char name[160];
    if (!c->made) {
        if (!named_child(c, name, &rank, &size))
            return false;
        if (c->s->split[c->child_at][c->rank].color < 0) {
            c->child = NULL;
            return true;
        }
        c->made = join(name, rank, size, c->blocking);
    }
    if (!all_here(c->made))
        return false;
    c->made->joining = false;
    if (!apart(c->made))
        c->state = INVALID_USAGE;
    else
        *c->child = c->made;
    c->child = NULL;
    c->made = NULL;
    return true;
}

bool fake_nccl_work(comm *c)
{
    if (fake_nccl_seconds() < c->ready)
        return false;
    if (c->polls > 0) {
        c->polls--;
        return false;
    }
    if ((c->joining && !all_here(c)) || (c->child && !split_work(c)))
        return false;
    if (c->finalizing && c->recorded > 0)
        return false;
    if (c->joining && !apart(c))
        c->state = INVALID_USAGE;
    c->joining = false;
    fake_nccl_launch_queue(c);
    if (c->state == IN_PROGRESS)
        c->state = SUCCESS;
    return true;
}

API int ncclCommGetAsyncError(comm *c, int *error)
{
    must(!atomic_load(&c->gone), "a question to a communicator that is gone");
    if (c->state == IN_PROGRESS)
        fake_nccl_work(c);
    *error = c->state == SUCCESS ? fake_nccl_state.async_error : c->state;
    return SUCCESS;
}

API int ncclGetVersion(int *v)
{
    *v = fake_nccl_state.version;
    return SUCCESS;
}

API int ncclGetUniqueId(nccl_id *id)
{
    snprintf(id->bytes, sizeof id->bytes, "knap-fake-%d-%.9f-%d", (int)getpid(),
             fake_nccl_seconds(), fake_nccl_state.ids++);
    return SUCCESS;
}

static bool blocks(const void *config)
{
    return *(const int *)(const void *)((const char *)config + sizeof(size_t) +
                                        2 * sizeof(unsigned)) != 0;
}

API int ncclCommInitRankConfig(comm **c, int ranks, nccl_id id, int rank, void *config)
{
    if (!must(ranks <= MOST, "more ranks than the fake has room for"))
        return INVALID_USAGE;
    *c = join(id.bytes, rank, ranks, blocks(config));
    fake_nccl_state.inits++;
    return fake_nccl_answer(INIT, *c, true);
}

API int ncclCommFinalize(comm *c)
{
    if (!fake_nccl_may(c))
        return INVALID_USAGE;
    fake_nccl_state.finalizes++;
    must(c->held == 0, "memory is still registered with a communicator that ends");
    c->finalizing = true; /* "keep polling until all graphs referencing us die": commDestroySync */
    return fake_nccl_answer(FINALIZE, c, false);
}

API int ncclCommDestroy(comm *c)
{
    must(!atomic_load(&c->gone), "destroyed after an abort");
    must(c->state != IN_PROGRESS, "destroyed while a call is in progress");
    fake_nccl_state.destroys++;
    int result = fake_nccl_answer(DESTROY, c, false);
    atomic_store(&c->gone, true);
    return result;
}

/* Waited for in every mode, as ncclCommDestroy (line 1979 at 2.18.5, 2675 at 2.29.2). From 2.19 on
 * it first waits for the thread of a call in progress (ncclCommEnsureReady, ncclGroupJobAbort). */
API int ncclCommAbort(comm *c)
{
    must(!atomic_exchange(&c->gone, true), "aborted twice");
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

#if VERSION >= 21800
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
    if (!fake_nccl_may(c) || !must(c->splits < SPLITS, "more splits than the fake has room for"))
        return INVALID_USAGE;
    fake_nccl_state.splits++;
    must(!on_stack(made), "a split whose handle lies on the stack, and may come after its caller");
    *made = NULL;
    c->child_at = c->splits++;
    c->child = made;
    c->s->split[c->child_at][c->rank].color = color;
    c->s->split[c->child_at][c->rank].key = key;
    atomic_store(&c->s->split[c->child_at][c->rank].set, 1);
    return fake_nccl_answer(SPLIT, c, true);
}

#endif

/* ---- registered memory ----------------------------------------------------------------------- */

#if VERSION >= 21900
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
                must(!segment[i].held[k] || atomic_load(&segment[i].held[k]->gone),
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
                return fake_nccl_answer(REGISTER, c, false);
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
    return fake_nccl_answer(DEREGISTER, c, false);
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
