/* tests/fsdp/ties_test.c: parameters that two modules hold, in trees that change: the module that
 * declared one leaves its place, or comes to another tree; the rest trains on. What keeps something
 * for each parameter notices when they aren't the same. Rank functions return a status. */
#include "fsdp/ema.h"
#include "nn/nn_internal.h"
#include "tests/fsdp/net.h"
#include "tests/owned.h"

static bool listed(void *m, const char *name, const kn_tensor *t)
{
    const kn_param *p;
    int n = kn_params(m, &p), with_name = 0, with_tensor = 0;
    for (int i = 0; i < n; i++) {
        with_name += strcmp(p[i].name, name) == 0 && p[i].tensor == t;
        with_tensor += p[i].tensor == t;
    }
    return with_name == 1 && with_tensor == 1;
}

static kn_tensor *rest_forward(kn_module *self, kn_tensor *x)
{
    return kn_call(&((net *)self)->head, x);
}

/* The rest of a net without its wte. */
static kn_tensor *head_loss(net *m)
{
    float x[NET_BATCH * NET_DIM];
    int64_t targets[NET_BATCH];
    for (int i = 0; i < NET_BATCH * NET_DIM; i++)
        x[i] = (float)(i % 7) - 2.5f;
    for (int i = 0; i < NET_BATCH; i++)
        targets[i] = i * 2;
    return kn_cross_entropy(
        kn_call_method(m, rest_forward, kn_from(KN_F32, KN_CPU, x, KN_SHAPE(NET_BATCH, NET_DIM))),
        kn_from(KN_I64, KN_CPU, targets, KN_SHAPE(NET_BATCH)));
}

static bool tree_loss(net *m)
{
    IN_SCOPE;
    return kn_backward(head_loss(m));
}

typedef enum edit { REMOVE, REPLACE, FREE, FREE_THE_REMOVED, EDITS } edit;

static bool edits(net *m, edit e, kn_embedding *other)
{
    bool ok = e != REPLACE || (kn_embedding_init(other, NULL, "", NET_VOCAB, NET_DIM) &&
                               kn_module_replace(m, "wte", other));
    if (e == REMOVE || e == FREE_THE_REMOVED)
        ok = kn_module_remove(m, "wte") != NULL;
    if (e == FREE || e == FREE_THE_REMOVED)
        kn_module_free(&m->wte);
    return ok;
}

enum { SIZE = NET_VOCAB * NET_DIM };

static bool read_weight(net *m, const kn_tensor *w, float *to)
{
    const kn_param *p;
    for (int i = 0, n = kn_params(m, &p); i < n; i++)
        if (p[i].tensor == w)
            return kn_param_read(m, i, to);
    return kn_fail("the weight isn't listed");
}

/* A step of the whole tree, clipped; norm: of all its gradients. */
static bool step(net *m, kn_optim *o, float *norm)
{
    IN_SCOPE;
    bool ok = tree_loss(m);
    *norm = ok ? (float)kn_item(kn_clip_grad_norm(m, 100)) : 0;
    ok = ok && kn_step(o);
    return ok;
}

/* Two steps of the rest: the weight moves by its gradient, and the norm, averages, state and counts
 * have it. */
static bool goes_on(net *m, const kn_tensor *w, const char *name)
{
    float before[SIZE], after[SIZE], averages[SIZE] = { 0 }, norm = 0;
    kn_optim *o = kn_sgd(m, .lr = 0.5);
    kn_ema *e = kn_ema_new(m, .decay = 0.5);
    double sum = 0;
    bool ok = o && e && listed(m, name, w) && read_weight(m, w, before) && step(m, o, &norm) &&
              kn_ema_update(e) && read_weight(m, w, after) && kn_ema_swap(e) &&
              read_weight(m, w, averages) && kn_ema_swap(e);
    for (int i = 0; i < SIZE; i++)
        sum += (before[i] - after[i]) / 0.5 * ((before[i] - after[i]) / 0.5);
    ok = ok && memcmp(averages, after, sizeof after) == 0;
    kn_ema_free(e);
    kn_optim_free(o);
    ok = ok && ((norm > 0.01 && fabs(sqrt(sum) - norm) < 1e-5) ||
                kn_fail("the norm is %g, the step moved by %g", norm, sqrt(sum)));
    kn_state *state = ok ? kn_state_dict(m) : NULL;
    ok = ok && kn_state_has(state, name);
    kn_state_free(state);
    kn_zero_grad(m);
    return ok;
}

KN_TEST(ties, the_rest_trains_on_what_its_owner_left)
{
    for (edit e = 0; e < EDITS; e++) {
        net m;
        kn_embedding other;
        KN_CHECK(net_reference(&m));
        kn_tensor *w = kn_module_param(&m.head, "weight");
        KN_CHECK(listed(&m, "wte.weight", w) && listed(&m.head, "head.weight", w));
        KN_CHECK(edits(&m, e, &other) && goes_on(&m, w, "head.weight"), "%d", e);
        if (e == REMOVE || e == REPLACE) { /* the part that left holds it too */
            KN_CHECK(listed(&m.wte, "weight", w));
            KN_CHECK(tree_loss(&m) && kn_grads_wait(&m.wte));
            kn_zero_grad(&m.wte);
            KN_CHECK(!kn_grads_wait(&m));
        }
        if (e == REMOVE) {
            KN_CHECK(kn_module_add(&m.base, "wte", &m.wte.base) && listed(&m, "wte.weight", w));
            KN_CHECK(kn_module_remove(&m, "head") && listed(&m, "wte.weight", w) &&
                     listed(&m.head, "weight", w) && kn_module_add(&m.base, "head", &m.head));
        }
        KN_CHECK(kn_materialize(&m, KN_CPU, 5)); /* by the name of now */
        kn_module_free(&m);
        if (e == REPLACE)
            kn_module_free(&m.wte);
        KN_CHECK_OK();
    }
}

static bool whole_loss(net *m)
{
    return net_backward(m, 0);
}

/* A part's list has what it holds, wherever that was declared. */
static void parts(kn_comm *world, void *arg)
{
    float x[SIZE], y[SIZE];
    NET_WRAPPED(m, world, .seed = NET_SEED);
    NET_WHOLE(plain);
    KN_CHECK(kn_call(&m, kn_from(KN_I64, KN_CPU, (int64_t[]){ 1 }, KN_SHAPE(1))));
    kn_tensor *w = kn_module_param(&m.head, "weight");
    KN_CHECK(listed(&m.head, "head.weight", w) && listed(&m.wte, "wte.weight", w));
    if (arg) /* the unit keeps it for the head */
        kn_module_free(&m.wte);
    OWNED_OPTIM kn_optim *o = kn_sgd(&m.head, .lr = 0.5),
                         *of_plain = kn_sgd(&plain.head, .lr = 0.5);
    KN_CHECK(o && of_plain);
    for (int i = 0; i < 2; i++) {
        IN_SCOPE;
        bool (*backward)(net *) = arg ? tree_loss : whole_loss;
        KN_CHECK(backward(&m) && backward(&plain));
        KN_CHECK(kn_clip_grad_norm(&m.head, 1) && kn_clip_grad_norm(&plain.head, 1));
        KN_CHECK(kn_step(o) && kn_step(of_plain));
        kn_zero_grad(&m), kn_zero_grad(&plain);
    }
    KN_CHECK(read_weight(&m, w, x) &&
                 read_weight(&plain, kn_module_param(&plain.head, "weight"), y) &&
                 memcmp(x, y, sizeof x) == 0,
             "other weights");
}

KN_TEST(ties, parts_and_owners_that_are_freed_over_ranks)
{
    KN_CHECK(spawn_threads(1, parts, NULL) == 0);
    KN_CHECK(spawn_threads(2, parts, NULL) == 0);
    KN_CHECK(spawn_threads(2, parts, (void *)1) == 0);
}

/* A parameter of two trees can't be cut for one of them. */
KN_TEST(ties, trees_that_hold_one_parameter)
{
    net m;
    kn_module student;
    KN_CHECK(net_init(&m, KN_META) && kn_module_init(&student, head_forward) &&
             kn_share_parameter(&student, "weight", kn_module_param(&m.wte, "weight")));
    KN_CHECK(listed(&student, "weight", kn_module_param(&m.wte, "weight")));
    REFUSED(kn_materialize(&student, KN_CPU, 3), "a module of another tree declared it");
    REFUSED(kn_fsdp_wrap(&student, kn_comm_self()), "a module of another tree declared it");
    KN_CHECK(kn_materialize(&m, KN_CPU, 3) && kn_materialize(&student, KN_CPU, 9));
    const kn_param *p;
    KN_CHECK(kn_params(&student, &p) == 1 && kn_device_of(p[0].master) == KN_CPU);
    KN_CHECK(kn_fsdp_wrap(&m, kn_comm_self()));
    REFUSED(kn_params(&student, &p), "sharded with another tree that holds it");
    kn_module_free(&m);
    kn_module_free(&student);
    KN_CHECK_OK();
}

/* ---- what keeps something for each parameter ------------------------------------------------- */

KN_TEST(ties, optimizers_and_averages_know_their_parameters)
{
    kn_linear again;
    NET_WHOLE(m);
    OWNED_OPTIM kn_optim *o = kn_sgd(&m, .lr = 0.5, .momentum = 0.9);
    OWNED_EMA kn_ema *e = kn_ema_new(&m);
    kn_freeze(&m.fc2, true);
    KN_CHECK(net_backward(&m, 0) && kn_step(o) && kn_ema_update(e));
    kn_freeze(&m.fc2, false);
    KN_CHECK(net_backward(&m, 0) && kn_step(o) && kn_ema_update(e));
    KN_CHECK(kn_module_remove(&m, "ln") && kn_module_add(&m.base, "norm", &m.ln.base));
    KN_CHECK(kn_ema_update(e), "another name");
    kn_module_free(&m.fc2);
    KN_CHECK(kn_linear_init(&again, &m.base, "fc2", NET_HIDDEN, NET_DIM) &&
             kn_materialize(&m, KN_CPU, 3));
    REFUSED(kn_optim_state(o, 0, "momentum"), "parameter number");
    REFUSED(kn_ema_update(e), "'fc2.weight' when the kn_ema was made");
}
