/* tests/fsdp/place_test.c: a unit's device and ranks: inputs and buffers move to its device, its
 * ranks are the world by default, ignored modules and parameters stay unchanged. The device is a
 * stand-in with memory of its own (stand_in.h). Rank functions return a status. */
#include "kernels/kernels_internal.h"
#include "tests/fsdp/net.h"
#include "tests/fsdp/stand_in.h"

enum { ROWS = 3, DIM = 4, WORDS = 5 };

/* (x [DIM, ROWS], side [ROWS, DIM], ids i64 [ROWS]) -> (fc(x^T) + word(ids) * scale + side *
 * offset, ids) */
typedef struct place_net {
    kn_module base;
    kn_linear fc;
    kn_embedding word;
    kn_tensor *scale; /* a buffer that the test made, on the CPU */
} place_net;

static kn_values place_forward(kn_module *self, kn_values in, const void *arg)
{
    place_net *m = (place_net *)self;
    kn_tensor *y = kn_call(&m->fc, kn_transpose(in.v[0], 0, 1));
    y = kn_add(y, kn_mul(kn_call(&m->word, in.v[2]), kn_module_buffer(self, "scale")));
    y = kn_add(y, kn_mul(in.v[1], kn_module_buffer(self, "offset")));
    return (kn_values){ 2, { y, in.v[2] } };
}

static bool place_init(place_net *m)
{
    memset(m, 0, sizeof *m);
    bool ok = kn_module_init_n(&m->base, place_forward) &&
              kn_linear_init(&m->fc, &m->base, "fc", DIM, DIM, .device = KN_META) &&
              kn_embedding_init(&m->word, &m->base, "word", WORDS, DIM, .device = KN_META);
    IN_SCOPE;
    m->scale = kn_from(KN_F32, KN_CPU, (float[]){ 1, -2, .5f, 3 }, KN_SHAPE(DIM));
    ok = ok && kn_buffer(m, "scale", m->scale) &&
         kn_declare_buffer(m, "offset", KN_F32, KN_META, KN_ONES_INIT, KN_SHAPE(DIM));
    return ok;
}

typedef struct seen {
    float y[ROWS * DIM], dx[ROWS * DIM], dside[ROWS * DIM], grad[256], scale[DIM];
    int64_t ids[ROWS];
    kn_device device, grad_device, buffer_device;
    int grads;
} seen;

typedef struct job {
    kn_device device;
    kn_dtype param_dtype;
    bool inline_streams;
    seen *out;
} job;

static bool host(const kn_tensor *t, float *to)
{
    IN_SCOPE;
    kn_tensor *f = kn_cast((kn_tensor *)t, KN_F32);
    return f && kn_to_host(f, to, (size_t)kn_numel(f) * sizeof *to);
}

static void pass_from_the_cpu(kn_comm *world, void *arg)
{
    const job *j = arg;
    OWNED_MODULE place_net m;
    seen *out = &j->out[kn_rank(world)];
    float v[ROWS * DIM];
    const kn_param *p;
    for (int i = 0; i < ROWS * DIM; i++)
        v[i] = (float)((i * 7 + kn_rank(world) * 3) % 11) / 4 - 1;
    KN_CHECK(place_init(&m) && kn_fsdp_wrap(&m, world, .wrap_class = "linear", .device = j->device,
                                            .param_dtype = j->param_dtype, .reduce_dtype = KN_F32,
                                            .buffer_dtype = j->param_dtype, .seed = 5));
    IN_SCOPE;
    kn_tensor *x = kn_require_grad(kn_from(KN_F32, KN_CPU, v, KN_SHAPE(DIM, ROWS)), true);
    kn_tensor *side = kn_require_grad(kn_from(KN_F32, KN_CPU, v, KN_SHAPE(ROWS, DIM)), true);
    kn_tensor *ids = kn_from(KN_I64, KN_CPU, (int64_t[]){ 3, 0, 3 }, KN_SHAPE(ROWS));
    kn_tensor *doubled = kn_scale(x, 2); /* not a leaf: its gradient continues to x */
    kn_values y = kn_call_n(&m, (kn_values){ 3, { doubled, side, ids } }, NULL, 0);
    KN_CHECK(kn_ok() && kn_backward(sum_of(kn_mul(y.v[0], y.v[0]))));
    out->device = kn_device_of(y.v[0]);
    out->grad_device = kn_device_of(kn_grad(x));
    out->buffer_device = kn_device_of(m.scale);
    KN_CHECK(kn_device_of(kn_module_buffer(&m, "offset")) == j->device, "the declared buffer");
    KN_CHECK(host(y.v[0], out->y) && host(kn_grad(x), out->dx) && host(kn_grad(side), out->dside) &&
             host(m.scale, out->scale) && kn_to_host(y.v[1], out->ids, sizeof out->ids));
    int n = kn_params(&m, &p);
    for (int i = 0; i < n; i++) {
        kn_tensor *g = kn_param_grad(&p[i]);
        KN_CHECK(g && host(g, out->grad + out->grads), "gradient of %s", p[i].name);
        out->grads += (int)kn_numel(g);
    }
}

static seen *passes(job j, int ranks)
{
    j.out = shared_bytes(sizeof(seen) * 4);
    KN_CHECK(on_stand_in((stand_in){ .inline_streams = j.inline_streams }, ranks, pass_from_the_cpu,
                         &j) == 0);
    return j.out;
}

/* Values and gradients are those of a unit on the CPU, and gradients return to the inputs'
 * device. */
KN_TEST(place, inputs_and_buffers_move_to_the_units_device)
{
    if (THREADS_ONLY)
        KN_SKIP("the stand-in is a process's");
    for (int i = 0; i < 8; i++) {
        int ranks = 1 + i % 2;
        job j = { KN_CPU, i & 2 ? KN_BF16 : KN_DTYPE_DEFAULT, i & 4, NULL };
        seen *here = passes(j, ranks);
        j.device = STAND_IN;
        seen *there = passes(j, ranks);
        for (int r = 0; r < ranks; r++) {
            KN_CHECK(there[r].device == STAND_IN && there[r].buffer_device == STAND_IN, "case %d",
                     i);
            KN_CHECK(there[r].grad_device == KN_CPU, "case %d: the input's gradient", i);
            KN_CHECK(here[r].grads > 0 && here[r].dx[5] != 0 && here[r].scale[1] == -2, "case %d",
                     i);
            there[r].device = there[r].buffer_device = KN_CPU;
            KN_CHECK(memcmp(&here[r], &there[r], sizeof(seen)) == 0,
                     "case %d, rank %d: y %g and %g, dx %g and %g", i, r, (double)here[r].y[1],
                     (double)there[r].y[1], (double)here[r].dx[1], (double)there[r].dx[1]);
        }
        munmap(here, sizeof(seen) * 4);
        munmap(there, sizeof(seen) * 4);
    }
}

/* .timeout_s is that of the ranks that the unit was wrapped with; without it theirs stays. */
RANK_TEST(place, the_timeout_of_the_ranks, .threads = "2")
{
    place_net m;
    kn_comm_set_timeout(world, 50);
    for (int i = 0; i < 2; i++) {
        KN_CHECK(place_init(&m) && kn_fsdp_wrap(&m, world, .timeout_s = i ? 70 : 0));
        KN_CHECK(kn_comm_get_timeout(world) == (i ? 70 : 50), "%g s", kn_comm_get_timeout(world));
        kn_module_free(&m);
    }
}

/* Without .device the parameters' device is used, to hold them and to compute. */
static void where_parameters_are(kn_comm *world, void *arg)
{
    OWNED_MODULE place_net m;
    float v[ROWS * DIM] = { 1 };
    KN_CHECK(place_init(&m) && kn_materialize(&m, STAND_IN, 5));
    KN_CHECK(kn_fsdp_wrap(&m, world, .wrap_class = "linear"));
    const kn_param *p;
    int n = kn_params(&m, &p);
    for (int i = 0; i < n; i++)
        KN_CHECK(kn_device_of(p[i].tensor) == STAND_IN && kn_device_of(p[i].master) == STAND_IN,
                 "'%s' is elsewhere", p[i].name);
    KN_CHECK(kn_device_of(m.scale) == STAND_IN, "the buffer is elsewhere");
    IN_SCOPE;
    kn_tensor *x = kn_from(KN_F32, KN_CPU, v, KN_SHAPE(DIM, ROWS));
    kn_tensor *side = kn_from(KN_F32, KN_CPU, v, KN_SHAPE(ROWS, DIM));
    kn_tensor *ids = kn_from(KN_I64, KN_CPU, (int64_t[]){ 3, 0, 3 }, KN_SHAPE(ROWS));
    kn_values y = kn_call_n(&m, (kn_values){ 3, { x, side, ids } }, NULL, 0);
    KN_CHECK(y.n == 2 && kn_device_of(y.v[0]) == STAND_IN, "it computes elsewhere");
    KN_CHECK(kn_backward(sum_of(y.v[0])));
    for (int i = 0; i < n; i++)
        KN_CHECK(kn_device_of(kn_param_grad(&p[i])) == STAND_IN, "the gradient of '%s'", p[i].name);
}

KN_TEST(place, a_unit_computes_where_its_parameters_are)
{
    if (THREADS_ONLY)
        KN_SKIP("the stand-in is a process's");
    for (int ranks = 1; ranks <= 2; ranks++)
        KN_CHECK(on_stand_in((stand_in){ 0 }, ranks, where_parameters_are, NULL) == 0, "%d ranks",
                 ranks);
}

/* .comm of kn_init comes before KNAP_COMM: "nccl" is an error in a build without CUDA. */
KN_TEST(place, collectives_go_the_way_that_kn_init_was_given)
{
    if (THREADS_ONLY)
        KN_SKIP("the stand-in is a process's");
    bool cuda = kn_device_table_of(KN_CUDA) != NULL;
    for (int nccl = 0; nccl < 2; nccl++) {
        setenv("KNAP_COMM", nccl ? "local" : "nccl", 1);
        KN_CHECK(kn_init(NULL, NULL, .comm = nccl ? "nccl" : "local") && kn_ok());
        int failed = on_stand_in((stand_in){ 0 }, 2, where_parameters_are, NULL);
        KN_CHECK((failed == 0) == (!nccl || cuda), "nccl %d: %d ranks failed", nccl, failed);
        KN_CHECK(kn_finish() == 0);
    }
    unsetenv("KNAP_COMM");
}

KN_TEST(place, values_that_do_not_exist)
{
    OWNED_MODULE place_net m;
    KN_CHECK(place_init(&m) && kn_fsdp_wrap(&m, NULL));
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = kn_ones(KN_F32, KN_META, KN_SHAPE(DIM, ROWS));
    kn_tensor *ids = kn_zeros(KN_I64, KN_CPU, KN_SHAPE(ROWS));
    kn_call_n(&m, (kn_values){ 3, { x, x, ids } }, NULL, 0);
    KN_CHECK_ERROR("computes on cpu, but its input f32[4,3] is on meta");
    kn_scope_end(scope);
    kn_module_free(&m);
    KN_CHECK(kn_module_init(&m.base, NULL) && kn_linear_init(&m.fc, &m.base, "fc", DIM, DIM));
    scope = kn_scope_begin();
    kn_buffer(&m.fc, "mean", kn_zeros(KN_F32, KN_META, KN_SHAPE(DIM)));
    kn_scope_end(scope);
    REFUSED(kn_fsdp_wrap(&m, NULL), "buffer 'fc.mean' is on meta, where it has no values");
}

static int64_t elements_here(void *m)
{
    const kn_param *p;
    int64_t here = 0;
    for (int i = kn_params(m, &p); i-- > 0;)
        here += kn_numel(p[i].master);
    return here;
}

/* ---- the ranks ------------------------------------------------------------------------------- */

RANK_TEST(place, no_communicator_means_the_world, .threads = "23", .processes = "3")
{
    const kn_param *p;
    NET_WRAPPED(a, NULL, .seed = NET_SEED);
    NET_WRAPPED(b, kn_comm_self(), .seed = NET_SEED);
    KN_CHECK(kn_comm_size(kn_comm_self()) == 1 && kn_rank(kn_comm_self()) == 0, "self");
    KN_CHECK(kn_params(&a, &p) > 1 && kn_bucket_of(&p[0])->unit->comm == world, "not the world");
    KN_CHECK(elements_here(&a) < kn_param_count(&a), "not sharded");
    KN_CHECK(elements_here(&b) == kn_param_count(&b), "not this rank alone");
    KN_CHECK(net_backward(&a, kn_rank(world)) && net_backward(&b, kn_rank(world)));
    KN_CHECK(kn_grad_scale(&a) == 1.0 / kn_comm_size(world) && kn_grad_scale(&b) == 1, "scale");
    NET(c);
    KN_CHECK(kn_fsdp_wrap(&c.fc1, kn_comm_self()) && kn_fsdp_wrap(&c, NULL));
    KN_CHECK(!net_backward(&c, 0) && strstr(kn_error(), "'fc1'") &&
                 strstr(kn_error(), "another communicator (1 ranks)"),
             "two communicators");
    kn_clear_error();
}

/* A program started by another launcher as one of several ranks that never called kn_init. */
KN_TEST(place, ranks_without_kn_init)
{
    NET(m);
    setenv("RANK", "0", 1);
    setenv("WORLD_SIZE", "4", 1);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    setenv("MASTER_PORT", "29500", 1);
    bool ok = kn_fsdp_wrap(&m, NULL);
    unsetenv("RANK");
    unsetenv("WORLD_SIZE");
    unsetenv("MASTER_ADDR");
    unsetenv("MASTER_PORT");
    REFUSED(ok, "kn_init");
}

/* ---- one place for all units of a tree ------------------------------------------------------- */

static bool meta_below(kn_module *m, bool recurse, int64_t unclaimed, kn_fsdp_wrap_options *o,
                       void *arg)
{
    if (strcmp(kn_module_path(m), "fc1") == 0)
        o->device = KN_META;
    return strcmp(kn_module_class(m), "linear") == 0;
}

RANK_TEST(place, units_of_a_tree_share_a_device, .threads = "12")
{
    for (int i = 0; i < 2; i++) {
        NET(m);
        bool ok = i == 0 ? kn_fsdp_wrap(&m.fc1, world, .device = KN_META) && kn_fsdp_wrap(&m, world)
                         : kn_fsdp_wrap(&m, world, .policy = meta_below);
        KN_CHECK(!(ok && net_backward(&m, 0)), "it ran");
        KN_CHECK(strstr(kn_error(), "'fc1'") && strstr(kn_error(), ".device = meta") &&
                     strstr(kn_error(), "with cpu"),
                 "case %d", i);
        kn_clear_error();
    }
}

/* ---- names of what is left alone ------------------------------------------------------------- */

/* Long names, at any position of the list, with blanks. */
KN_TEST(place, patterns_have_no_limit)
{
    char list[2048] = "", deep[600];
    memset(deep, 'n', 599);
    deep[599] = 0;
    kn_module inner = { 0 };
    NET(m);
    KN_CHECK(kn_module_init(&inner, NULL) && kn_module_add(&m.base, deep, &inner) &&
             kn_parameter(&inner, "spare", KN_F32, KN_CPU, KN_ONES_INIT, KN_SHAPE(3)) &&
             kn_parameter(&inner, "other", KN_F32, KN_CPU, KN_ONES_INIT, KN_SHAPE(3)));
    snprintf(list, sizeof list, "no.such , %s.spare, ln.*", deep);
    KN_CHECK(kn_fsdp_wrap(&m, NULL, .ignore = list, .wrap_class = "embedding , linear"));
    KN_CHECK(kn_fsdp_is_unit(&m.wte) && kn_fsdp_is_unit(&m.fc1), "names with blanks around them");
    const kn_param *p;
    int n = kn_params(&m, &p), alone = 0;
    for (int i = 0; i < n; i++) {
        bool ignored = strstr(p[i].name, "spare") || strncmp(p[i].name, "ln.", 3) == 0;
        alone += ignored;
        KN_CHECK(!kn_bucket_of(&p[i]) == ignored, "%s", p[i].name);
    }
    KN_CHECK(alone == 3, "%d parameters left alone", alone);
    snprintf(list, sizeof list, "%s.other", deep);
    KN_CHECK(kn_module_param(&m, list) == inner.impl->param[1].tensor);
}

/* Modules named by .ignore stay unchanged, with their buffers. */
RANK_TEST(place, ignored_modules_keep_their_buffers, .processes = "23", .threads = "3")
{
    int rank = kn_rank(world);
    NET(m);
    kn_scope scope = kn_scope_begin();
    float own = 7 + (float)rank;
    KN_CHECK(kn_buffer(&m.fc1, "count", kn_from(KN_F32, KN_CPU, &own, KN_SHAPE(1))) &&
                 kn_buffer(&m.fc2, "count", kn_from(KN_F32, KN_CPU, &own, KN_SHAPE(1))) &&
                 kn_declare_buffer(&m.fc1, "later", KN_F32, KN_META, KN_ONES_INIT, KN_SHAPE(2)),
             "buffers");
    kn_scope_end(scope);
    KN_CHECK(kn_fsdp_wrap(&m, world, .ignore = "fc1.*", .buffer_dtype = KN_BF16,
                          .sync_from_rank0 = true));
    const kn_tensor *alone = kn_module_buffer(&m, "fc1.count");
    const kn_tensor *other = kn_module_buffer(&m, "fc2.count");
    KN_CHECK(kn_dtype_of(alone) == KN_F32 && *(float *)kn_data(alone) == own, "was changed");
    KN_CHECK(kn_device_of(kn_module_buffer(&m, "fc1.later")) == KN_META, "was moved");
    KN_CHECK(kn_dtype_of(other) == KN_BF16 && kn_item(other) == 7, "wasn't changed");
}

/* A folder whose name holds a comma isn't a list with "memory" in it. */
KN_TEST(place, a_folder_is_no_list)
{
    NET(m);
    REFUSED(kn_fsdp_wrap(&m, NULL, .offload_dir = "/no/such,memory"), "/no/such,memory");
}

/* ---- prefetch lists -------------------------------------------------------------------------- */

KN_TEST(place, prefetch_lists_name_units_of_the_same_model)
{
    net m, other;
    KN_CHECK(net_init(&m, KN_META) && kn_fsdp_wrap(&m, NULL, .wrap_class = "linear") &&
             net_init(&other, KN_META) && kn_fsdp_wrap(&other, NULL, .wrap_class = "linear"));
    kn_module *mine[] = { &m.fc2.base }, *foreign[] = { &m.fc2.base, &other.fc2.base };
    REFUSED(kn_fsdp_prefetch_forward(&m.fc1, foreign, 2), "'fc2'");
    REFUSED(kn_fsdp_prefetch_backward(&m.fc1, foreign, 2), "another model");
    KN_CHECK(kn_fsdp_prefetch_forward(&m.fc1, mine, 1) && net_backward(&m, 0));
    kn_module *across[] = { &m.wte.base, &other.wte.base };
    REFUSED(kn_fsdp_wrap_group(across, 2, NULL), "another model");
    kn_module_free(&other);
    KN_CHECK(net_backward(&m, 0));
    kn_module_free(&m);
}

/* Freeing a part of a model frees its unit: the rest reports an error, and lists that named it are
 * not read. */
RANK_TEST(place, a_part_of_a_model_that_is_freed, .processes = "12", .threads = "1")
{
    NET_WRAPPED(m, world, .wrap_class = "linear");
    kn_module *next[] = { &m.fc2.base };
    KN_CHECK(kn_fsdp_prefetch_forward(&m.fc1, next, 1) && net_backward(&m, 0));
    kn_module_free(&m.fc2);
    KN_CHECK(!net_backward(&m, 0) && strstr(kn_error(), "not an initialised module"), "it ran");
    kn_clear_error();
}

/* Sibling units below a module that isn't a unit are trees of their own: each has its schedule. */
RANK_TEST(place, prefetch_lists_over_sibling_trees, .processes = "2")
{
    NET(m);
    KN_CHECK(kn_fsdp_wrap(&m.fc1, world) && kn_fsdp_wrap(&m.fc2, world) &&
             kn_fsdp_wrap(&m.ln, world) && kn_materialize(&m.wte, KN_CPU, 1));
    kn_module *next[] = { &m.fc2.base };
    KN_CHECK(kn_fsdp_prefetch_forward(&m.fc1, next, 1) &&
             kn_fsdp_prefetch_backward(&m.fc2, next, 1));
    KN_CHECK(net_backward(&m, 0) && net_backward(&m, 1));
}
