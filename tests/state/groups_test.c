/* tests/state/groups_test.c: states of trees in which groups of ranks have parameters of their own
 * under one name (experts): each group's is saved, and comes back to it. */
#include "knap.h"
#include "tests/comm/comm_test.h"
#include "tests/models/temp.h"

enum { RANKS = 4, PARAMS = 4, MOST = 20 };

typedef struct net {
    kn_module base;
    kn_linear shared, expert;
} net;

static kn_tensor *net_forward(kn_module *self, kn_tensor *x)
{
    net *m = (net *)self;
    return kn_call(&m->expert, kn_gelu_tanh(kn_call(&m->shared, x)));
}

typedef struct run {
    net m;
    kn_optim *optim;
} run;

enum groups { PAIRS, EVERY_OTHER, ONE_APART, EACH, HALVES_OF_HALVES, ALL, WAYS };

static kn_comm *groups_of(kn_comm *world, enum groups how)
{
    int r = kn_rank(world);
    const int color[] = { r / 2, r % 2, r == RANKS - 1, r, r / 2, 0 };
    kn_comm *c = how == ALL ? world : kn_comm_split(world, color[how], r, "expert");
    return c && how == HALVES_OF_HALVES && r < 2 ? kn_comm_split(c, r, r, "half") : c;
}

/* The expert is wrapped first or last. */
static bool run_init(run *r, kn_comm *world, enum groups how, kn_layout_kind layout, uint64_t seed)
{
    memset(r, 0, sizeof *r);
    bool ok = kn_module_init(&r->m.base, net_forward) &&
              kn_linear_init(&r->m.shared, &r->m.base, "shared", 4, 4, .device = KN_META) &&
              kn_linear_init(&r->m.expert, &r->m.base, "expert", 4, 4, .device = KN_META);
    kn_comm *group = ok ? groups_of(world, how) : NULL;
    for (int k = 0; group && k < 2; k++)
        if (!((k == 0) == (layout == KN_LAYOUT_FLAT)
                  ? kn_fsdp_wrap(&r->m.expert, group, .layout = layout, .seed = seed)
                  : kn_fsdp_wrap(&r->m.shared, world, .layout = layout, .seed = seed)))
            return false;
    return group && (r->optim = kn_adamw(&r->m, .lr = 0.1));
}

static void run_free(run *r)
{
    kn_optim_free(r->optim);
    kn_module_free(&r->m);
}

static bool step(run *r, int micro)
{
    kn_scope scope = kn_scope_begin();
    kn_tensor *y = kn_call(&r->m, kn_randn(KN_F32, KN_CPU, 5, (uint64_t)micro, KN_SHAPE(2, 4)));
    bool ok = kn_backward(kn_mean(kn_mul(y, y), 0, NULL, false)) && kn_step(r->optim);
    kn_scope_end(scope);
    return ok;
}

typedef struct values {
    float of[2 * PARAMS][MOST]; /* parameters, and a state of each */
} values;

static bool read_all(run *r, values *v)
{
    memset(v, 0, sizeof *v);
    bool ok = true;
    for (int i = 0; ok && i < PARAMS; i++)
        ok = kn_param_read(&r->m, i, v->of[i]) &&
             kn_shard_read(&r->m, i, kn_optim_state(r->optim, i, "exp_avg"), v->of[PARAMS + i]);
    return ok;
}

typedef struct job {
    char dir[200];
    enum groups how;
} job;

/* A training goes on in another layout. */
static int saved(kn_comm *world, void *arg)
{
    const job *j = arg;
    run a, b;
    values before, after;
    char dir[240];
    snprintf(dir, sizeof dir, "%s/%d", j->dir, (int)j->how);
    EXPECT(run_init(&a, world, j->how, KN_LAYOUT_FLAT, 1) && step(&a, kn_rank(world)));
    EXPECT(read_all(&a, &before));
    EXPECT(kn_checkpoint_save(dir, &a.m, .optim = a.optim, .step = 1));
    EXPECT(run_init(&b, world, j->how, KN_LAYOUT_PER_PARAM, 2));
    kn_checkpoint *c = kn_checkpoint_open(dir, world);
    EXPECT(c && kn_checkpoint_load(c, &b.m, .optim = b.optim));
    kn_checkpoint_free(c);
    EXPECT(read_all(&b, &after) && memcmp(&before, &after, sizeof before) == 0);
    EXPECT(step(&a, 4 + kn_rank(world)) && step(&b, 4 + kn_rank(world)));
    EXPECT(read_all(&a, &before) && read_all(&b, &after));
    for (int i = 0; i < 2 * PARAMS; i++)
        for (int k = 0; k < MOST; k++)
            EXPECT(fabs((double)(before.of[i][k] - after.of[i][k])) < 1e-6, "tensor %d", i);
    run_free(&a);
    run_free(&b);
    return 0;
}

KN_TEST(groups, each_group_s_parameters_are_saved)
{
    job j;
    snprintf(j.dir, sizeof j.dir, "%s", temp_path("run"));
    for (j.how = 0; j.how < WAYS; j.how++)
        KN_CHECK(kn_spawn_threads(RANKS, saved, &j) == 0, "way %d", (int)j.how);
}

static int taken(kn_comm *world, void *arg)
{
    const enum groups how = *(const enum groups *)arg;
    for (kn_state_kind kind = KN_STATE_FULL; kind <= KN_STATE_LOCAL; kind++) {
        run a, b;
        values before, after;
        EXPECT(run_init(&a, world, how, KN_LAYOUT_FLAT, 1) && step(&a, kn_rank(world)));
        EXPECT(read_all(&a, &before));
        kn_state *s = kn_state_dict(&a.m, .kind = kind),
                 *o = kn_optim_state_dict(a.optim, .kind = kind);
        EXPECT(s && o && run_init(&b, world, how, KN_LAYOUT_FLAT, 2));
        EXPECT(kn_load_state_dict(&b.m, s) && kn_load_optim_state_dict(b.optim, o));
        EXPECT(read_all(&b, &after) && memcmp(&before, &after, sizeof before) == 0, "kind %d",
               (int)kind);
        kn_state_free(s);
        kn_state_free(o);
        run_free(&a);
        run_free(&b);
    }
    return 0;
}

KN_TEST(groups, each_rank_takes_the_state_of_its_group)
{
    for (enum groups how = 0; how < WAYS; how++)
        KN_CHECK(kn_spawn_threads(RANKS, taken, &how) == 0, "way %d", (int)how);
}

/* Other numbers of groups, and modules without them, have other names. */
static int refused(kn_comm *world, void *arg)
{
    const job *j = arg;
    run a, b;
    EXPECT(run_init(&a, world, PAIRS, KN_LAYOUT_FLAT, 1) &&
           kn_checkpoint_save(j->dir, &a.m, .step = 1));
    EXPECT(run_init(&b, world, j->how, KN_LAYOUT_FLAT, 1));
    kn_checkpoint *c = kn_checkpoint_open(j->dir, world);
    EXPECT(c && !kn_checkpoint_load(c, &b.m));
    EXPECT(strstr(kn_error(), "expert.weight"), "%s", kn_error());
    kn_clear_error();
    kn_checkpoint_free(c);
    run_free(&a);
    run_free(&b);
    return 0;
}

KN_TEST(groups, another_number_of_groups_is_refused)
{
    job j;
    for (j.how = EACH; j.how < WAYS; j.how++) {
        char name[16];
        snprintf(name, sizeof name, "run%d", (int)j.how);
        snprintf(j.dir, sizeof j.dir, "%s", temp_path(name));
        KN_CHECK(kn_spawn_threads(RANKS, refused, &j) == 0, "way %d", (int)j.how);
    }
}
