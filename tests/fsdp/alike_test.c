/* tests/fsdp/alike_test.c: ranks that declare other parameters, or hold other values, are told so
 * at the wrap; kn_fsdp_check finds what changed on one rank later. Rank functions return a
 * status. */
#include "fsdp/ema.h"
#include "kernels/choices.h"
#include "kernels/faults.h"
#include "tests/fsdp/two.h"
#include "tests/owned.h"

#include <sys/mman.h>

static bool is_last(kn_comm *world)
{
    return kn_rank(world) == kn_comm_size(world) - 1;
}

/* ---- parameters that differ at the wrap ------------------------------------------------------ */

typedef struct pair {
    kn_module base, first, second;
} pair;

static kn_tensor *times_weight(kn_module *self, kn_tensor *x)
{
    return kn_mul(x, kn_module_param(self, "weight"));
}

static kn_tensor *pair_forward(kn_module *self, kn_tensor *x)
{
    pair *m = (pair *)self;
    return kn_call(&m->second, kn_call(&m->first, x));
}

typedef enum slip {
    OTHER_ORDER,
    OTHER_NAME,
    OTHER_SHAPE,
    OTHER_DTYPE,
    FROZEN,
    ONE_MORE,
    TIED,
    OTHER_RULE,
    OTHER_BUFFER,
    SLIPS
} slip;

static const char *const slip_says[SLIPS] = {
    "parameter number 0 is 'first.weight', f32[8] on rank 0 and 'second.weight', f32[8] on rank %d",
    "parameter number 1 is 'second.weight', f32[8] on rank 0 and 'second.scale', f32[8] on rank %d",
    "parameter number 1 is 'second.weight', f32[8] on rank 0 and 'second.weight', f32[2,4] on rank "
    "%d",
    "parameter number 1 is 'second.weight', f32[8] on rank 0 and 'second.weight', bf16[8] on rank "
    "%d",
    "parameter number 1 is 'second.weight', f32[8] on rank 0 and 'second.weight', f32[8], frozen "
    "on rank %d",
    "parameter number 2 is missing on rank 0 and 'second.more', f32[8] on rank %d",
    "parameter number 1 is 'second.weight', f32[8] on rank 0 and missing on rank %d",
    "the hash of the values of 'second.weight' is none (declared, by rule",
    "the next buffer is 'scale', f32[3] on rank 0 and 'scale', f32[4] on rank %d",
};

static bool declare(pair *m, int which, slip s, bool slips, kn_device d)
{
    kn_module *of = which ? &m->second : &m->first;
    slips = slips && which;
    int64_t shape[2] = { slips && s == OTHER_SHAPE ? 2 : 8, 4 };
    kn_initializer rule =
        slips && s == OTHER_RULE ? (kn_initializer)KN_ZEROS_INIT : (kn_initializer)KN_ONES_INIT;
    return kn_module_init(of, times_weight) &&
           kn_module_add(&m->base, which ? "second" : "first", of) &&
           (slips && s == TIED
                ? kn_share_parameter(of, "weight", kn_module_param(&m->first, "weight"))
                : kn_parameter(of, slips && s == OTHER_NAME ? "scale" : "weight",
                               slips && s == OTHER_DTYPE ? KN_BF16 : KN_F32, d, rule,
                               slips && s == OTHER_SHAPE ? 2 : 1, shape) != NULL) &&
           (!(slips && s == ONE_MORE) ||
            kn_parameter(of, "more", KN_F32, d, KN_ONES_INIT, 1, shape)) &&
           (!(slips && s == FROZEN) || kn_require_grad(kn_module_param(of, "weight"), false));
}

static bool pair_init(pair *m, slip s, bool slips, kn_device d)
{
    memset(m, 0, sizeof *m);
    int turned = slips && s == OTHER_ORDER;
    return kn_module_init(&m->base, pair_forward) && declare(m, turned, s, slips, d) &&
           declare(m, !turned, s, slips, d) &&
           kn_declare_buffer(&m->base, "scale", KN_F32, d, KN_ONES_INIT, 1,
                             (int64_t[]){ slips && s == OTHER_BUFFER ? 4 : 3 });
}

typedef struct slipping {
    slip s;
    int wrapped; /* whole, by policy, as a group */
    kn_device device;
} slipping;

static bool any(kn_module *m, bool recurse, int64_t unclaimed, kn_fsdp_wrap_options *o, void *arg)
{
    return recurse || unclaimed > 0;
}

static bool wrap_pair(pair *m, kn_comm *world, const slipping *w)
{
    bool turned = w->s == OTHER_ORDER && is_last(world);
    kn_module *group[] = { turned ? &m->second : &m->first, turned ? &m->first : &m->second };
    bool sync = w->s == OTHER_BUFFER;
    return w->wrapped == 2 && !sync
               ? kn_fsdp_wrap_group(group, 2, world)
               : kn_fsdp_wrap(m, world, .sync_from_rank0 = sync, .policy = w->wrapped ? any : NULL);
}

static void refuses_slip(kn_comm *world, void *arg)
{
    const slipping *w = arg;
    char says[256];
    OWNED_MODULE pair m;
    snprintf(says, sizeof says, slip_says[w->s], kn_comm_size(world) - 1);
    KN_CHECK(pair_init(&m, w->s, is_last(world), w->device));
    REFUSED(wrap_pair(&m, world, w), "kn_fsdp_wrap: ", says);
    KN_CHECK(!kn_fsdp_is_unit(&m) && !kn_fsdp_is_unit(&m.first) && !kn_fsdp_is_unit(&m.second));
    KN_CHECK(w->device == KN_META || kn_param_unfilled(kn_module_param(&m.first, "weight")));
    kn_module_free(&m);
    KN_CHECK(pair_init(&m, w->s, true, KN_META) && kn_fsdp_wrap(&m, kn_comm_self()), "alone");
}

KN_TEST(alike, parameters_that_differ_over_ranks)
{
    for (int ranks = 2; ranks <= 4; ranks += 2)
        for (int i = 0; i < SLIPS * 3 * 2; i++) {
            slipping w = { i % SLIPS, i / SLIPS % 3, i / SLIPS / 3 ? KN_CPU : KN_META };
            KN_CHECK(spawn_threads(ranks, refuses_slip, &w) == 0, "%d ranks, slip %d, way %d",
                     ranks, (int)w.s, w.wrapped);
        }
}

static int second_dim_on_one(const char *name, int ndim, const int64_t *shape, void *arg)
{
    return *(bool *)arg && ndim == 2;
}

static kn_dtype low_on_one(const char *name, int ndim, const int64_t *shape, void *arg)
{
    return *(bool *)arg && strcmp(name, "b.bias") == 0 ? KN_BF16 : KN_F32;
}

static void refuses_answers(kn_comm *world, void *arg)
{
    bool dims = *(bool *)arg, last = is_last(world);
    OWNED_MODULE kn_linear m = { 0 };
    OWNED_MODULE two t;
    KN_CHECK(kn_linear_init(&m, NULL, "m", 8, 8, .device = KN_META) &&
             two_init(&t, KN_META, KN_F32));
    if (dims)
        REFUSED(kn_fsdp_wrap(&m, world, .layout = KN_LAYOUT_PER_PARAM,
                             .placement = second_dim_on_one, .placement_arg = &last),
                "'weight', in f32, cut along dim 0 on rank 0 and 'weight', in f32, cut "
                "along dim 1 on rank",
                ".placement must answer alike");
    else
        KN_CHECK(
            !kn_fsdp_wrap(&t, world, .param_dtype_of = low_on_one, .param_dtype_of_arg = &last) &&
            error_has("'b.bias'", "bf16"));
}

KN_TEST(alike, functions_that_answer_by_rank)
{
    for (int i = 0; i < 2; i++)
        KN_CHECK(spawn_threads(2 + 2 * i, refuses_answers, &(bool){ i }) == 0, "%d", i);
}

/* ---- values that differ at the wrap ---------------------------------------------------------- */

RANK_TEST(alike, values_that_differ_over_ranks, .threads = "24", .cases = 2)
{
    int how = *(int *)arg; /* another value on the last rank, none, or the sign of a zero */
    TWO(m);
    KN_CHECK((how == 1 && is_last(world) ? true : kn_materialize(&m, KN_CPU, 5)));
    float *b = how == 1 && is_last(world) ? NULL : kn_data(kn_module_param(&m.b, "weight"));
    if (b && is_last(world))
        b[7] += 1;
    KN_CHECK(!kn_fsdp_wrap(&m, world, .wrap_class = "linear"));
    KN_CHECK(how ? error_has("the hash of the values of 'a.weight' is ", "none (declared")
                 : error_has("the hash of the values of 'b.weight' is ", ".sync_from_rank0"));
    KN_CHECK(!kn_fsdp_is_unit(&m.a) && !kn_fsdp_is_unit(&m));
}

/* ---- on request ------------------------------------------------------------------------------ */

typedef struct checked {
    kn_module base;
    kn_linear a, b, c; /* c.bias is ignored */
    kn_batch_norm norm;
} checked;

static kn_tensor *checked_forward(kn_module *self, kn_tensor *x)
{
    checked *m = (checked *)self;
    x = kn_call(&m->norm, kn_call(&m->a, x));
    return kn_call(&m->c, kn_call(&m->b, x));
}

static bool checked_init(checked *m, kn_device d)
{
    memset(m, 0, sizeof *m);
    return kn_module_init(&m->base, checked_forward) &&
           kn_linear_init(&m->a, &m->base, "a", 4, 8, .device = d) &&
           kn_batch_norm_init(&m->norm, &m->base, "norm", 8, .device = d) &&
           kn_linear_init(&m->b, &m->base, "b", 8, 8, .device = d) &&
           kn_linear_init(&m->c, &m->base, "c", 8, 4, .device = d) &&
           kn_declare_buffer(&m->base, "scale", KN_F32, d, KN_ONES_INIT, KN_SHAPE(3));
}

typedef enum change {
    NOTHING,
    MASTER,
    SMALL,
    STATE,
    IGNORED,
    BUFFER,
    STATISTIC,
    STEPS,
    RATE,
    AVERAGE,
    NEED_OF_GRADIENT,
    CHANGES
} change;

typedef struct changing {
    const way *way;
    change what;
} changing;

static bool add_one(const kn_tensor *t)
{
    float *x = kn_numel(t) > 0 ? kn_data(t) : NULL;
    if (x)
        x[kn_numel(t) - 1] += 1;
    return x != NULL;
}

/* The number of the parameter, and whether other ranks have a copy of what this one has of it. */
static int number_of(checked *m, const char *name, bool *copied)
{
    const kn_param *p;
    int n = kn_params(m, &p), i = 0;
    while (i < n && strcmp(p[i].name, name) != 0)
        i++;
    *copied = kn_bucket_of(&p[i])->replicas > 1;
    return i;
}

/* The last rank changes something by itself. True where that must be found; *says: its name. */
static bool change_one(checked *m, kn_optim *o, kn_ema *e, change what, bool last,
                       const char **says)
{
    const kn_param *p;
    bool copied, small_copied;
    int i = number_of(m, "b.weight", &copied), k = number_of(m, "b.bias", &small_copied);
    kn_params(m, &p);
    kn_tensor *of[CHANGES] = { [MASTER] = p[i].master,
                               [SMALL] = p[k].master,
                               [STATE] = kn_optim_state(o, i, "exp_avg_sq"),
                               [IGNORED] = kn_module_param(&m->c, "bias"),
                               [BUFFER] = kn_module_buffer(m, "scale"),
                               [STATISTIC] = kn_module_buffer(m, "norm.running_mean"),
                               [AVERAGE] = kn_ema_value(e, i) };
    *says = what == MASTER    ? "b.weight' is "
            : what == SMALL   ? "b.bias' is "
            : what == STATE   ? "the hash of 'exp_avg_sq' of "
            : what == IGNORED ? "the hash of 'c.bias'"
            : what == BUFFER  ? "the hash of buffer 'scale'"
            : what == STEPS   ? "the number of steps of 'checked' is 1 on rank 0 and 7 on rank"
            : what == RATE    ? "learning rate of 'checked' is 0.5 on rank 0 and 0.25 on rank"
            : what == AVERAGE ? "the hash of the average of "
                              : "the next parameter is 'b.bias', f32[8] on rank 0 and 'b.bias', "
                                "f32[8], frozen on rank";
    if (last && of[what])
        add_one(of[what]);
    else if (last && what == STEPS)
        kn_optim_set_steps(o, 7);
    else if (last && what == RATE)
        kn_set_lr(o, 0.25);
    else if (last && what == NEED_OF_GRADIENT)
        kn_require_grad(kn_module_param(&m->b, "bias"), false);
    copied = what == SMALL ? small_copied : copied;
    return what != NOTHING && what != STATISTIC &&
           (copied || !(what == MASTER || what == SMALL || what == STATE || what == AVERAGE));
}

static void finds_change(kn_comm *world, void *arg)
{
    const changing *w = arg;
    const char *says;
    OWNED_MODULE checked m;
    KN_CHECK(checked_init(&m, KN_CPU));
    KN_CHECK(
        kn_fsdp_wrap(&m, world, WAY_OPTIONS(w->way), .wrap_class = "linear", .ignore = "c.bias"));
    KN_CHECK(
        kn_require_grad(kn_module_param(&m.c, "bias"), false)); /* nobody reduces its gradient */
    OWNED_OPTIM kn_optim *o = kn_adamw(&m, .lr = 0.5);
    KN_CHECK(kn_fsdp_check(&m, .optim = o), "before a step");
    KN_CHECK(two_backward(&m, kn_rank(world)) && kn_step(o));
    OWNED_EMA kn_ema *e = kn_ema_new(&m);
    KN_CHECK(o && e && kn_fsdp_check(&m, .optim = o, .ema = e), "as it was");
    bool found = change_one(&m, o, e, w->what, is_last(world), &says);
    if (kn_comm_size(world) > 1 && found)
        REFUSED(kn_fsdp_check(&m, .optim = o, .ema = e), "kn_fsdp_check: ", says);
    else
        KN_CHECK(kn_fsdp_check(&m, .optim = o, .ema = e), "nothing differs");
    if (!found)
        KN_CHECK(two_backward(&m, kn_rank(world)) && kn_step(o), "another step");
}

KN_TEST(alike, what_one_rank_changed_is_found)
{
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        for (int i = 0; i < WAYS; i++)
            for (int what = 0; what < CHANGES; what++) {
                changing w = { &ways[i], what };
                if (ways[i].ranks && ways[i].ranks != ranks)
                    continue;
                KN_CHECK(spawn_threads(ranks, finds_change, &w) == 0, "%d ranks, way %d, change %d",
                         ranks, i, what);
            }
}

/* Two ranks are named: those that should be copies of each other. */
RANK_TEST(alike, the_ranks_of_a_mesh_that_hold_copies_are_named, .threads = "4", .cases = 2)
{
    OWNED_MODULE checked m;
    const kn_param *p;
    bool copied, norms = *(int *)arg;
    KN_CHECK(checked_init(&m, KN_META) && (!norms || kn_sync_batch_norm(&m, world) == 1) &&
             kn_fsdp_wrap(&m, world, .strategy = KN_HYBRID_SHARD, .mesh = { 2, 2 },
                          .layout = KN_LAYOUT_PER_PARAM));
    int i = number_of(&m, "a.weight", &copied);
    KN_CHECK(kn_params(&m, &p) > i && two_backward(&m, kn_rank(world)) && kn_fsdp_check(&m));
    if (kn_rank(world) == 1)
        add_one(norms ? kn_module_buffer(&m, "norm.running_mean") : p[i].master);
    KN_CHECK(kn_fsdp_check(&m, .ignore = "a.*, norm.running*"), "patterns");
    KN_CHECK(!kn_fsdp_check(&m));
    KN_CHECK(norms ? error_has("the hash of buffer 'norm.running_mean' is ", " on rank 1;")
                   : error_has("the hash of the shard of 'a.weight' is ", " on rank 3;"));
}

/* A module that nothing shards, a summoned one, an optimizer of before; on meta only names. */
RANK_TEST(alike, modules_that_cannot_be_checked, .threads = "12")
{
    OWNED_MODULE two m;
    KN_CHECK(two_init(&m, KN_META, KN_F32) && kn_fsdp_wrap(&m, world, .device = KN_META) &&
                 kn_fsdp_check(&m),
             "on meta");
    kn_module_free(&m);
    KN_CHECK(two_init(&m, KN_CPU, KN_F32));
    OWNED_OPTIM kn_optim *early = kn_sgd(&m, .lr = 1);
    KN_CHECK(kn_fsdp_wrap(&m, world, .strategy = KN_NO_SHARD) && kn_fsdp_check(&m));
    kn_summon_scope s = kn_summon(&m);
    REFUSED(kn_fsdp_check(&m), "is summoned", "end the scope");
    KN_CHECK(kn_summon_end(s) || kn_comm_size(world) > 1); /* the error has ended several ranks */
    kn_clear_error();
}

/* ---- errors half-way ------------------------------------------------------------------------- */

typedef struct fault {
    int64_t allocation; /* of the last rank that fails; 0: none */
    int meeting;        /* of the last rank, at which an error comes to stand; 0: none */
    bool checks, differ;
    _Atomic int64_t made; /* allocations, of the last rank */
} fault;

/* A wrap, or a check, that fails on one rank is an error on all of them and leaves nothing. */
static void fails_half_way(kn_comm *world, void *arg)
{
    fault *f = arg;
    OWNED_OPTIM kn_optim *o = NULL;
    bool last = is_last(world);
    TWO(m);
    KN_CHECK(kn_materialize(&m, KN_CPU, 5));
    if (f->checks) {
        KN_CHECK(kn_fsdp_wrap(&m, world, .strategy = KN_NO_SHARD) && (o = kn_sgd(&m, .lr = 1)));
        KN_CHECK(kn_fsdp_check(&m, .optim = o), "before");
    }
    const kn_param *p;
    KN_CHECK(kn_params(&m, &p) == 4 && (!last || !f->differ || add_one(p[2].master)));
    if (last) {
        kn_fail_alloc(f->allocation);
        kn_fault_at(KN_AT_MEETING, f->meeting, KN_FAULT_ERROR);
    }
    bool ok = f->checks ? kn_fsdp_check(&m, .optim = o) : kn_fsdp_wrap(&m, world);
    if (last)
        f->made = kn_fail_alloc(0);
    kn_fault_at(KN_AT_MEETING, 0, KN_FAULT_ERROR);
    bool faulty = f->allocation || f->meeting;
    bool either = faulty && !last && !f->checks; /* its unit was made before the other's fault */
    KN_CHECK(ok == kn_ok() && ((either && !f->differ) || ok == !(f->differ || faulty)), "%d", ok);
    kn_clear_error();
    KN_CHECK(f->checks || ok || !kn_fsdp_is_unit(&m), "a unit is left");
}

static bool leaves_nothing(fault *f)
{
    int64_t live = kn_live_tensors();
    return spawn_threads(2, fails_half_way, f) == 0 && kn_live_tensors() == live;
}

KN_TEST(alike, an_error_half_way_is_one_on_all_ranks)
{
    for (int i = 0; i < 4; i++) {
        fault f = { .checks = i & 1, .differ = i & 2 };
        KN_CHECK(leaves_nothing(&f), "case %d", i);
        int64_t made = f.made;
        KN_CHECK(made > 3, "only %d", (int)made);
        for (f.allocation = 1; f.allocation <= made; f.allocation++)
            KN_CHECK(leaves_nothing(&f), "case %d, allocation %d", i, (int)f.allocation);
        f.allocation = 0;
        for (f.meeting = 1; f.meeting <= (f.differ ? 5 : 1); f.meeting++)
            KN_CHECK(leaves_nothing(&f), "case %d, meeting %d", i, f.meeting);
    }
}

/* ---- settings of processes ------------------------------------------------------------------- */

typedef struct choices {
    const char *file[2];     /* of each rank */
    char *said;              /* memory that both ranks see: rank 1's error */
    kn_products products[2]; /* of each rank */
} choices;

static int wraps_with_its_own(kn_comm *world, void *arg)
{
    const choices *c = arg;
    OWNED_MODULE net m;
    setenv("KNAP_TUNED", c->file[kn_rank(world)], 1);
    kn_choices_forget();
    kn_set_f32_products(c->products[kn_rank(world)]);
    const bool ok = net_init(&m, KN_CPU) && kn_fsdp_wrap(&m, world);
    if (kn_rank(world) == 1)
        snprintf(c->said, 4096, "%s", kn_error() ? kn_error() : "");
    return !ok;
}

KN_TEST(alike, settings_that_differ_over_ranks)
{
    char folder[] = "/tmp/knap-alike-XXXXXX", file[64];
    KN_CHECK(mkdtemp(folder) != NULL);
    snprintf(file, sizeof file, "%s/tuned.txt", folder);
    setenv("KNAP_COMM", "local", 1);
    setenv("KNAP_TUNED", file, 1);
    kn_choices_forget();
    kn_choice_keep("k", "v");
    choices c = { { file, file },
                  mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0) };
    KN_CHECK(c.said != MAP_FAILED);
    KN_CHECK(kn_spawn(2, wraps_with_its_own, &c) == 0, "%s", c.said);
    c.products[1] = KN_PRODUCTS_TF32;
    KN_CHECK(kn_spawn(2, wraps_with_its_own, &c) == 2);
    KN_CHECK(strstr(c.said, "kn_fsdp_wrap: kn_set_f32_products is exact on rank 0 and tf32 on rank "
                            "1; give all ranks the same"),
             "%s", c.said);
    c.products[0] = KN_PRODUCTS_TF32;
    KN_CHECK(kn_spawn(2, wraps_with_its_own, &c) == 0, "%s", c.said);
    c.file[0] = "none";
    KN_CHECK(kn_spawn(2, wraps_with_its_own, &c) == 2);
    KN_CHECK(strstr(c.said, "kn_fsdp_wrap: the hash of the file of timed algorithms (KNAP_TUNED) "
                            "is 0 on rank 0 and ") &&
                 strstr(c.said, " on rank 1; copy the file to all hosts, or set KNAP_TUNED=none"),
             "%s", c.said);
    setenv("KNAP_TUNE", "1", 1);
    KN_CHECK(kn_spawn(2, wraps_with_its_own, &c) == 2);
    KN_CHECK(strstr(c.said, "KNAP_TUNE=1 on 2 ranks: one rank times algorithms"), "%s", c.said);
    kn_clear_error();
    unsetenv("KNAP_TUNE");
    unsetenv("KNAP_COMM");
    setenv("KNAP_TUNED", "none", 1);
    kn_choices_forget();
    munmap(c.said, 4096);
    KN_CHECK(unlink(file) == 0 && rmdir(folder) == 0);
}
