/* kernels/cuda/cudnn/cudnn_plan.c: graphs become plans, plans are kept and run. The bytes of its
 * inputs are a plan's key; the fact that cuDNN has none is kept as well. */
#include "kernels/cuda/cudnn/cudnn.h"
#include "kernels/cuda/kernels/cuda.cuh"
#include "kernels/cuda/kernels/cuda_internal.h"
#include "kernels/cuda/runtime/runtime.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define CONFIGS 16
#define PLANS   512
#define MOST    ((uint64_t)1 << 30) /* bytes of workspace, where describe doesn't say */

/* ---- making ---------------------------------------------------------------------------------- */

/* What a plan is made for: a GPU by its description, which needs no GPU, or the one of a handle.
 * NVIDIA documents the description for plans that are loaded; a library that refuses it otherwise
 * gets the handle. */
typedef struct target {
    kn_dnn_desc device;
    cudnnHandle_t handle; /* NULL: the device's */
} target;

static kn_dnn_desc device_of(int index, const char *json)
{
    kn_dnn_desc d = NULL;
    int32_t id = index;
    bool ok = kn_dnn_make(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, &d);
    if (json)
        ok = ok && kn_dnn_put(d, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR,
                              (int64_t)strlen(json), json);
    else
        ok = ok && kn_dnn_put(d, CUDNN_ATTR_DEVICEPROP_DEVICE_ID, CUDNN_TYPE_INT32, 1, &id);
    if (ok && kn_dnn_finish(d))
        return d;
    kn_dnn_destroy(d);
    return NULL;
}

/* The numerical notes of a configuration's engine; all of them where it doesn't tell. */
static uint32_t notes_of(kn_dnn_desc config)
{
    cudnnBackendNumericalNote_t note[CUDNN_NUMERICAL_NOTE_TYPE_COUNT];
    kn_dnn_desc engine = NULL;
    int64_t n = 0;
    uint32_t bits = UINT32_MAX;
    if (kn_dnn_make(CUDNN_BACKEND_ENGINE_DESCRIPTOR, &engine) &&
        kn_dnn.get(config, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &n,
                   &engine) == CUDNN_STATUS_SUCCESS &&
        kn_dnn.get(engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE,
                   CUDNN_NUMERICAL_NOTE_TYPE_COUNT, &n, note) == CUDNN_STATUS_SUCCESS) {
        bits = 0;
        for (int64_t i = 0; i < n; i++)
            bits |= (uint32_t)1 << note[i];
    }
    kn_dnn_destroy(engine);
    return bits;
}

/* The plan of a configuration, or NULL where it doesn't compile for the device or isn't wanted. */
static kn_dnn_desc compile(kn_dnn_plan *p, const kn_dnn_problem *problem, target to,
                           kn_dnn_desc config)
{
    kn_dnn_desc plan = NULL;
    int64_t bytes = 0, n;
    uint32_t notes = notes_of(config);
    if (!(notes & problem->avoid) && kn_dnn_make(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, &plan) &&
        kn_dnn_put_desc(plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config) &&
        (to.handle
             ? kn_dnn_put(plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &to.handle)
             : kn_dnn_put_desc(plan, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, to.device)) &&
        kn_dnn_finish(plan) &&
        kn_dnn.get(plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &n,
                   &bytes) == CUDNN_STATUS_SUCCESS &&
        (uint64_t)bytes <= problem->most) {
        p->workspace = (size_t)bytes;
        p->notes = notes;
        return plan;
    }
    kn_dnn_destroy(plan);
    return NULL;
}

/* Tries the configurations of one mode of the heuristics in their order. */
static bool try_mode(kn_dnn_plan *p, const kn_dnn_problem *problem, target to,
                     cudnnBackendHeurMode_t mode)
{
    kn_dnn_desc configs[CONFIGS] = { NULL };
    int64_t found = 0;
    bool ok =
        kn_dnn_make(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, &p->heuristics) &&
        kn_dnn_put_desc(p->heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, p->operations) &&
        kn_dnn_put(p->heuristics, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode) &&
        (to.handle ||
         kn_dnn_put_desc(p->heuristics, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, to.device)) &&
        kn_dnn_finish(p->heuristics);
    for (int i = 0; ok && i < CONFIGS; i++)
        ok = kn_dnn_make(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, &configs[i]);
    ok = ok &&
         kn_dnn.get(p->heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                    CONFIGS, &found, configs) == CUDNN_STATUS_SUCCESS;
    for (int i = 0; ok && i < found && !p->plan; i++) {
        p->plan = compile(p, problem, to, configs[i]);
        if (p->plan) {
            p->config = configs[i];
            configs[i] = NULL;
        }
    }
    for (int i = 0; i < CONFIGS; i++)
        kn_dnn_destroy(configs[i]);
    if (p->plan)
        return true;
    kn_dnn_destroy(p->heuristics);
    p->heuristics = NULL;
    return false;
}

static void plan_end(kn_dnn_plan *p)
{
    if (!p)
        return;
    kn_dnn_destroy(p->plan);
    kn_dnn_destroy(p->config);
    kn_dnn_destroy(p->heuristics);
    kn_dnn_destroy(p->operations);
    kn_dnn_graph_end(&p->graph);
    free(p);
}

/* The first configuration of the heuristics that compiles; NULL where there is none, without an
 * error. */
static kn_dnn_plan *plan_make(const kn_dnn_problem *problem, const kn_dnn_kernel *how, target to)
{
    kn_dnn_plan *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    p->by_handle = to.handle != NULL;
    how->draw(&p->graph, problem);
    if ((to.device || to.handle) && !p->graph.bad &&
        kn_dnn_make(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, &p->operations) &&
        kn_dnn_put(p->operations, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                   p->graph.ops, p->graph.op) &&
        (!to.handle || kn_dnn_put(p->operations, CUDNN_ATTR_OPERATIONGRAPH_HANDLE,
                                  CUDNN_TYPE_HANDLE, 1, &to.handle)) &&
        kn_dnn_finish(p->operations) &&
        (try_mode(p, problem, to, CUDNN_HEUR_MODE_A) ||
         try_mode(p, problem, to, CUDNN_HEUR_MODE_FALLBACK)))
        return p;
    plan_end(p);
    return NULL;
}

/* ---- kept plans ------------------------------------------------------------------------------ */

typedef struct entry {
    uint64_t hash;
    kn_dnn_problem problem;
    kn_dnn_plan *plan; /* NULL: cuDNN has none */
} entry;

/* The lock is held while a plan runs: no thread may end it then, and the handle has one stream at a
 * time. */
static struct {
    pthread_mutex_t lock;
    kn_dnn_desc device;
    cudnnHandle_t handle;
    bool by_handle; /* plans are made of it, since the device's description was refused */
    entry entry[PLANS];
    int count;
} state = { .lock = PTHREAD_MUTEX_INITIALIZER };

/* FNV-1a (Fowler, Noll, Vo). */
static uint64_t hash_of(const kn_dnn_problem *p)
{
    const unsigned char *byte = (const unsigned char *)p;
    uint64_t h = 14695981039346656037u;
    for (size_t i = 0; i < sizeof *p; i++)
        h = (h ^ byte[i]) * 1099511628211u;
    return h;
}

static kn_dnn_plan *make_by_handle(const kn_dnn_problem *p, const kn_dnn_kernel *how)
{
    static _Atomic bool told;
    if (!state.handle && kn_dnn.create(&state.handle) != CUDNN_STATUS_SUCCESS)
        return NULL;
    kn_dnn_plan *plan = plan_make(p, how, (target){ .handle = state.handle });
    state.by_handle |= plan != NULL;
    if (plan)
        kn_cuda_tell(&told,
                     "cuDNN refuses plans made for a device's description (%s); from now on they "
                     "are made for a handle",
                     kn_kernel_name((kn_kernel)p->kernel));
    return plan;
}

static kn_dnn_plan *make_here(const kn_dnn_problem *p, const kn_dnn_kernel *how)
{
    kn_dnn_plan *plan = NULL;
    if (!state.device)
        state.device = device_of(kn_cuda_index(), NULL);
    if (!state.by_handle)
        plan = plan_make(p, how, (target){ .device = state.device });
    return plan ? plan : make_by_handle(p, how);
}

/* Of a kept plan that was refused when it ran: one made by the handle; NULL: there is none. */
static kn_dnn_plan *make_again(const kn_dnn_problem *p, const kn_dnn_kernel *how,
                               const kn_dnn_plan *refused)
{
    kn_dnn_plan *plan = make_by_handle(p, how);
    for (int i = 0; plan && i < state.count; i++)
        if (state.entry[i].plan == refused) {
            plan_end(state.entry[i].plan);
            state.entry[i].plan = plan;
            break;
        }
    return plan;
}

/* A computation that it should take. Without the compiler that is the reason for all of them. */
static void tell_none(const kn_dnn_problem *p)
{
    static _Atomic bool told[KN_K_COUNT], told_compiler;
    const char *missing = kn_cudnn_library.missing;
    char text[512];
    if (missing[0])
        kn_cuda_tell(&told_compiler,
                     "cuDNN has no plan for %s: it compiles with a library that can't be loaded: "
                     "%s (LD_LIBRARY_PATH); another way or Knap's kernels compute, slower",
                     kn_kernel_name((kn_kernel)p->kernel), missing);
    else
        kn_cuda_tell(&told[p->kernel],
                     "cuDNN has no plan for %s (%s); another way or Knap's kernel computes it, "
                     "slower; where all plans are missing, look for libcudnn_engines_*.so beside "
                     "libcudnn.so (CUDNN_LOGLEVEL_DBG=1)",
                     kn_kernel_name((kn_kernel)p->kernel), kn_dnn_said(text, sizeof text));
}

static kn_dnn_plan *find(const kn_dnn_problem *p, const kn_dnn_kernel *how)
{
    uint64_t hash = hash_of(p);
    for (int i = 0; i < state.count; i++)
        if (state.entry[i].hash == hash && memcmp(&state.entry[i].problem, p, sizeof *p) == 0)
            return state.entry[i].plan;
    if (state.count == PLANS) {
        for (int i = 0; i < PLANS; i++)
            plan_end(state.entry[i].plan);
        state.count = 0;
    }
    entry *e = &state.entry[state.count++];
    *e = (entry){ hash, *p, make_here(p, how) };
    if (!e->plan)
        tell_none(p);
    return e->plan;
}

/* ---- running --------------------------------------------------------------------------------- */

static void bind(kn_dnn_pack *b, int64_t id, const void *data, size_t room)
{
    b->id[b->n] = id;
    b->data[b->n] = (void *)(uintptr_t)data;
    b->room[b->n++] = (room + 255) / 256 * 256;
}

void kn_dnn_bind(kn_dnn_pack *b, int64_t id, const void *data)
{
    bind(b, id, data, 0);
}

void kn_dnn_bind_room(kn_dnn_pack *b, int64_t id, size_t bytes)
{
    bind(b, id, NULL, bytes);
}

void kn_dnn_bind_scalar(kn_dnn_pack *b, int64_t id, float value)
{
    b->scalar[b->scalars] = value;
    bind(b, id, &b->scalar[b->scalars++], 0);
}

void kn_dnn_bind_copy(kn_dnn_pack *b, int64_t id, const kn_array *there, kn_array room, bool after)
{
    b->copy[b->copies++] = (kn_dnn_copy){ *there, room, b->n, after };
    bind(b, id, NULL, (size_t)kn_array_numel(&room) * kn_dtype_size(room.dtype));
}

void kn_dnn_bind_draw(kn_dnn_pack *b, int64_t seed_id, int64_t offset_id, uint64_t seed,
                      const uint64_t *seed_at, uint64_t stream)
{
    b->draw = (kn_dnn_draw){ true, b->n, seed, stream, seed_at };
    bind(b, seed_id, NULL, sizeof(uint64_t));
    bind(b, offset_id, NULL, sizeof(uint64_t));
}

static bool make_key(const kn_dnn_pack *b)
{
    const kn_dnn_draw *d = &b->draw;
    return !d->used || kn_cuda_draw_key(b->data[d->at], b->data[d->at + 1], d->seed, d->seed_at,
                                        d->stream) == KN_DONE;
}

/* Before the plan or after it. Knap's copy needs no scratch. */
static bool copy(kn_dnn_pack *b, bool after)
{
    bool ok = true;
    for (int i = 0; ok && i < b->copies; i++) {
        kn_dnn_copy *c = &b->copy[i];
        c->room.data = b->data[c->at];
        kn_copy_args a = { after ? c->there : c->room, after ? c->room : c->there };
        ok = c->after != after || kn_cuda_own_provider->run[KN_K_COPY](&a) == KN_DONE;
    }
    return ok;
}

/* Gives out one piece of scratch, whose rest is the workspace; NULL with an error. */
static char *lay_out(kn_dnn_pack *b, size_t workspace)
{
    size_t used = 0;
    for (int i = 0; i < b->n; i++)
        used += b->room[i];
    char *at = kn_cuda_scratch(used + workspace);
    for (int i = 0; at && i < b->n; i++)
        if (b->room[i] > 0) {
            b->data[i] = at;
            at += b->room[i];
        }
    return at;
}

/* out: the first array of the kernel's arguments, which names the case. */
static bool check(kn_kernel k, const kn_array *out, cudnnStatus_t e, const char *what)
{
    char text[512], shape[128];
    return e == CUDNN_STATUS_SUCCESS ||
           kn_fail("%s to %s: cuDNN says %s to %s: %s", kn_kernel_name(k),
                   kn_array_describe(out, shape, sizeof shape), kn_dnn.status(e), what,
                   kn_dnn_said(text, sizeof text));
}

/* refused: cuDNN doesn't run a plan made for a device's description; no error then. */
static bool execute(kn_kernel k, const kn_array *out, const kn_dnn_plan *p, kn_dnn_pack *b,
                    bool *refused)
{
    kn_dnn_desc pack = NULL;
    *refused = false;
    char *workspace = lay_out(b, p->workspace);
    bool ok = workspace != NULL;
    ok = ok && (state.handle || check(k, out, kn_dnn.create(&state.handle), "making its handle"));
    ok = ok && check(k, out, kn_dnn.set_stream(state.handle, (cudaStream_t)kn_cuda_stream()),
                     "the stream");
    ok = ok && make_key(b) && copy(b, false);
    if (ok) {
        ok = kn_dnn_make(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack) &&
             kn_dnn_put(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, b->n, b->id) &&
             kn_dnn_put(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, b->n,
                        b->data) &&
             kn_dnn_put(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1,
                        &workspace) &&
             kn_dnn_finish(pack);
        cudnnStatus_t e = ok ? kn_dnn.execute(state.handle, p->plan, pack) : CUDNN_STATUS_BAD_PARAM;
        *refused = e != CUDNN_STATUS_SUCCESS && !p->by_handle;
        ok = !*refused && check(k, out, e, "running");
    }
    ok = ok && copy(b, true);
    kn_dnn_destroy(pack);
    return ok;
}

/* Bytes that describe leaves alone are zero, padding too. */
static void begin(kn_dnn_problem *p, kn_kernel k, int arch)
{
    memset(p, 0, sizeof *p);
    p->kernel = k;
    p->arch = arch;
    p->most = MOST;
}

static int64_t parts_of(const kn_dnn_kernel *how, const void *args)
{
    return how->parts ? how->parts(args) : 1;
}

/* The arguments of part i, which are those of the whole where there is only one. */
static const void *part_of(const kn_dnn_kernel *how, const void *args, int64_t n, int64_t i,
                           kn_dnn_args *to)
{
    if (n == 1)
        return args;
    how->part(args, i, to);
    return to;
}

/* The lock is held. Declines without a trace where the library has no plan. */
static kn_status run_part(kn_kernel k, const kn_dnn_kernel *how, const void *args, bool plan_only)
{
    kn_dnn_problem p;
    begin(&p, k, kn_cuda_arch());
    kn_dnn_plan *plan = how->describe(&p, args) ? find(&p, how) : NULL;
    if (!plan || plan_only)
        return plan ? KN_DONE : KN_DECLINED;
    bool refused = true, done = false;
    for (int tries = 0; plan && refused && tries < 2; tries++) {
        kn_dnn_pack b = { 0 };
        how->bind(&b, &p, args);
        done = execute(k, args, plan, &b, &refused);
        plan = refused ? make_again(&p, how, plan) : plan;
    }
    return done ? KN_DONE : plan ? KN_FAILED : KN_DECLINED;
}

/* Nothing is written before each size of a part has its plan. */
static kn_status run_parts(kn_kernel k, const kn_dnn_kernel *how, const void *args)
{
    kn_dnn_args to;
    kn_status s = KN_DONE;
    int64_t n = parts_of(how, args);
    for (int64_t i = 0; n > 1 && i < n && s == KN_DONE; i += n - 1)
        s = run_part(k, how, part_of(how, args, n, i, &to), true);
    for (int64_t i = 0; i < n && s == KN_DONE; i++)
        s = run_part(k, how, part_of(how, args, n, i, &to), false);
    return s;
}

/* Whether all that the computation needs has its plan. */
static bool has_needs(const kn_dnn_kernel *how, const void *args)
{
    const kn_dnn_kernel *other;
    kn_dnn_args to;
    kn_kernel k;
    for (int i = 0; how->needs && (other = how->needs(args, i, &k, &to)); i++)
        if (run_part(k, other, &to, true) != KN_DONE)
            return false;
    return true;
}

kn_status kn_dnn_run(kn_kernel k, const kn_dnn_kernel *how, const void *args)
{
    kn_dnn_problem p;
    begin(&p, k, kn_cuda_arch());
    if (!how->describe(&p, args) || !kn_cuda_library_open(&kn_cudnn_library))
        return KN_DECLINED;
    pthread_mutex_lock(&state.lock);
    kn_status status = has_needs(how, args) ? run_parts(k, how, args) : KN_DECLINED;
    pthread_mutex_unlock(&state.lock);
    return status;
}

static bool try_part(const char *json, int arch, kn_kernel k, const kn_dnn_kernel *how,
                     const void *args, kn_dnn_found *found)
{
    kn_dnn_problem p;
    begin(&p, k, arch);
    if (!how->describe(&p, args) || !kn_cuda_library_open(&kn_cudnn_library))
        return false;
    kn_dnn_desc device = device_of(0, json);
    kn_dnn_plan *plan = plan_make(&p, how, (target){ .device = device });
    if (plan && plan->workspace >= found->workspace)
        *found = (kn_dnn_found){ plan->workspace, plan->notes };
    bool made = plan != NULL;
    plan_end(plan);
    kn_dnn_destroy(device);
    return made;
}

bool kn_dnn_try(const char *json, int arch, kn_kernel k, const kn_dnn_kernel *how, const void *args,
                kn_dnn_found *found)
{
    kn_dnn_problem p;
    kn_dnn_args to;
    begin(&p, k, arch);
    bool made = how->describe(&p, args);
    *found = (kn_dnn_found){ 0 };
    int64_t n = made ? parts_of(how, args) : 0;
    for (int64_t i = 0; i < n && made; i += n > 1 ? n - 1 : 1)
        made = try_part(json, arch, k, how, part_of(how, args, n, i, &to), found);
    const kn_dnn_kernel *other;
    kn_dnn_found unused;
    for (int i = 0; made && how->needs && (other = how->needs(args, i, &k, &to)); i++)
        made = try_part(json, arch, k, other, &to, &unused);
    return made;
}
