/* tests/state/several_test.c: several optimizers in a checkpoint, numbers of each rank, and folders
 * of other programs. */
#include "tests/kn_test.h"
#include "tests/state/stored.h"

typedef struct job {
    char dir[256], file[256];
    const way *w;
    int row;
} job;

/* ---- names with a '/' ------------------------------------------------------------------------ */

typedef struct slashed {
    kn_module base;
    kn_linear fc, other;
} slashed;

static kn_tensor *slashed_forward(kn_module *self, kn_tensor *x)
{
    slashed *m = (slashed *)self;
    return kn_call(&m->other, kn_call(&m->fc, x));
}

static bool slashed_init(slashed *m, kn_comm *world, uint64_t seed)
{
    *m = (slashed){ 0 };
    return kn_module_init(&m->base, slashed_forward) &&
           kn_linear_init(&m->fc, &m->base, "down/fc", 3, 3, .device = KN_META) &&
           kn_linear_init(&m->other, &m->base, "up", 3, 3, .device = KN_META) &&
           kn_fsdp_wrap(m, world, .wrap_class = "linear", .seed = seed);
}

/* Row 0: one optimizer without a name; row 1: beside one whose name a module's begins with. */
static int slashes(kn_comm *world, void *arg)
{
    const job *j = arg;
    slashed m, other;
    EXPECT(slashed_init(&m, world, 1) && slashed_init(&other, world, 2), "init");
    kn_optim *o = kn_adamw(&m, .lr = 0.1), *p = kn_adamw(&other, .lr = 1),
             *a = kn_sgd(&m.other, .lr = 0.2, .momentum = 0.5),
             *b = kn_sgd(&other.other, .lr = 2, .momentum = 0.5);
    const kn_named_optim from = { "down", a }, to = { "down", b };
    kn_scope scope = kn_scope_begin();
    for (int i = 0; i <= j->row; i++)
        EXPECT(kn_backward(
                   kn_sum(kn_call(&m, kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, 3))), 0, NULL, false)) &&
                   kn_step(i ? a : o),
               "step");
    kn_scope_end(scope);
    EXPECT(kn_checkpoint_save(j->dir, &m, .optim = o, .optims = &from, .optim_count = j->row,
                              .step = 1, .comm = world),
           "save");
    kn_checkpoint *c = kn_checkpoint_open(j->dir, world);
    EXPECT(c && kn_checkpoint_load(c, &other, .optim = p, .optims = &to, .optim_count = j->row) &&
               same_modules(&m, &other, o, p) && (!j->row || same_modules(&m, &other, a, b)),
           "load");
    kn_checkpoint_free(c);
    kn_optim_free(o), kn_optim_free(p), kn_optim_free(a), kn_optim_free(b);
    kn_module_free(&m), kn_module_free(&other);
    return !kn_ok();
}

KN_TEST(several, names_of_modules_with_a_slash)
{
    for (int k = 0; k < 4; k++) {
        job j = { .row = k % 2 };
        snprintf(j.dir, sizeof j.dir, "%s", temp_path("run"));
        on_threads(1 + k / 2, slashes, &j);
        remove_temp();
    }
}

/* ---- several optimizers ---------------------------------------------------------------------- */

typedef struct opts {
    kn_optim *o[3];
    kn_named_optim named[2];
    int count;
    bool plain; /* o[2] is .optim */
} opts;

/* Row 0: of two parts; row 1: both of the whole; row 2: of a part, beside one of the whole. */
static bool opts_init(opts *x, net *m, int row, double lr)
{
    *x = (opts){ .plain = row == 2, .count = row == 2 ? 1 : 2 };
    x->o[0] = kn_adamw(row == 1 ? (void *)m : &m->fc2, .lr = lr);
    x->o[1] = kn_sgd(row == 1 ? (void *)m : &m->ln, .lr = lr / 2, .momentum = 0.5);
    x->o[2] = kn_lion(m, .lr = lr / 4);
    x->named[0] = (kn_named_optim){ "gen", x->o[0] };
    x->named[1] = (kn_named_optim){ "gen.2", x->o[1] };
    return kn_ok();
}

static void opts_free(opts *x)
{
    for (int i = 0; i < 3; i++)
        kn_optim_free(x->o[i]);
}

#define OPTIMS(x)                                                                                  \
    .optim = (x).plain ? (x).o[2] : NULL, .optims = (x).named, .optim_count = (x).count

/* A step of each that is saved. */
static bool steps(net *m, opts *x, kn_comm *world)
{
    const int ranks = kn_comm_size(world);
    bool ok = true;
    for (int i = 0; ok && i < 3; i++) {
        if (i < 2 ? i >= x->count : !x->plain)
            continue;
        for (int micro = 0; ok && micro < MICRO / ranks; micro++)
            ok = net_backward(m, i * MICRO + micro * ranks + kn_rank(world));
        ok = ok && kn_step(x->o[i]);
        kn_zero_grad(m);
    }
    return ok;
}

/* All states in one dictionary. */
static kn_state *all_of(net *m, opts *x)
{
    kn_state *s = kn_state_dict(m, .prefix = "m.");
    bool ok = s != NULL;
    for (int i = 0; ok && i < 3; i++) {
        char prefix[16];
        snprintf(prefix, sizeof prefix, "%d.", i);
        if (i < 2 ? i < x->count : x->plain) {
            kn_state *one = kn_optim_state_dict(x->o[i], .prefix = prefix);
            ok = one && kn_state_merge(s, one);
        }
    }
    return ok ? s : NULL;
}

static int saves(kn_comm *world, void *arg)
{
    const job *j = arg;
    net m;
    opts x;
    EXPECT(net_init(&m, KN_META) && net_wrap(&m, world, j->w) && opts_init(&x, &m, j->row, 0.1) &&
               steps(&m, &x, world),
           "step");
    kn_state *own = kn_state_new(), *all = all_of(&m, &x);
    EXPECT(own && kn_state_set_int(own, "sample", 100 + kn_rank(world)) &&
               kn_state_set_text(own, "note", "\xc3\xa4") && kn_state_put(own, .random = true),
           "own");
    EXPECT(kn_checkpoint_save(j->dir, &m, .step = 1, .comm = world, .own = own, OPTIMS(x)), "save");
    EXPECT(all && (kn_rank(world) > 0 || kn_state_save(all, j->file)), "reference");
    kn_state_free(own), kn_state_free(all);
    opts_free(&x);
    kn_module_free(&m);
    return !kn_ok();
}

static int loads(kn_comm *world, void *arg)
{
    const job *j = arg;
    net m;
    opts x;
    EXPECT(net_other(&m, world, &ways[1]) && opts_init(&x, &m, j->row, 1), "init");
    kn_checkpoint *c = kn_checkpoint_open(j->dir, world);
    EXPECT(c && kn_checkpoint_load(c, &m, OPTIMS(x)), "load");
    kn_state *all = all_of(&m, &x), *want = kn_state_open(j->file);
    EXPECT(all && want && kn_state_count(all) == kn_state_count(want), "count");
    for (int i = 0; i < kn_state_count(all); i++) {
        const char *name = kn_state_name(all, i);
        EXPECT(kn_state_type(all, name) == KN_STATE_TENSOR
                   ? same_bytes(kn_state_tensor(all, name), kn_state_tensor(want, name))
                   : kn_state_number(all, name) == kn_state_number(want, name),
               "row %d: %s", j->row, name);
    }
    EXPECT(kn_checkpoint_own_ranks(c) == 2, "ranks");
    for (int r = 0; r < 2; r++) {
        kn_state *own = kn_checkpoint_own(c, r);
        EXPECT(own && kn_state_int(own, "sample") == 100 + r &&
                   strcmp(kn_state_text(own, "note"), "\xc3\xa4") == 0 &&
                   kn_state_get(own, .random = true),
               "own");
        kn_state_free(own);
    }
    kn_state_free(all), kn_state_free(want);
    kn_checkpoint_free(c);
    opts_free(&x);
    kn_module_free(&m);
    return !kn_ok();
}

KN_TEST(several, optimizers_by_name_and_each_ranks_own)
{
    for (int row = 0; row < 3; row++) {
        job j = { .w = &ways[row], .row = row };
        snprintf(j.dir, sizeof j.dir, "%s", temp_path("run"));
        snprintf(j.file, sizeof j.file, "%s", temp_path("all.safetensors"));
        on_threads(2, saves, &j);
        for (int ranks = 1; ranks <= 4; ranks *= 2)
            on_threads(ranks, loads, &j);
        remove_temp();
    }
}

/* Each by its name, in any order, some or none; others stay as they are. */
KN_TEST(several, some_of_them)
{
    net m, other;
    opts x, y;
    const char *dir = temp_path("run");
    KN_CHECK(net_reference(&m) && net_other(&other, NULL, NULL) && opts_init(&x, &m, 1, 0.1) &&
             opts_init(&y, &other, 1, 1) && steps(&m, &x, kn_comm_self()));
    KN_CHECK(kn_checkpoint_save(dir, &m, OPTIMS(x)));
    kn_checkpoint *c = kn_checkpoint_open(dir, NULL);
    KN_CHECK(c && kn_checkpoint_load(c, &other, .optims = &y.named[1], .optim_count = 1));
    KN_CHECK(kn_lr(y.o[1]) == 0.05 && kn_lr(y.o[0]) == 1 && kn_optim_steps(y.o[0]) == 0);
    KN_CHECK(kn_checkpoint_load(c, &other) && kn_checkpoint_own_ranks(c) == 0);
    REFUSED(kn_checkpoint_load(c, &other, .optim = y.o[0]), "missing (wte.weight.exp_avg");
    y.named[0].name = "third";
    REFUSED(kn_checkpoint_load(c, &other, OPTIMS(y)), "missing");
    y.named[0].name = "gen.2";
    REFUSED(kn_checkpoint_load(c, &other, OPTIMS(y)), "two of .optims are called 'gen.2'");
    y.named[0].name = "a/b";
    REFUSED(kn_checkpoint_save(dir, &other, OPTIMS(y)), ".optims[0] is 'a/b'");
    y.named[0] = (kn_named_optim){ "none", NULL };
    REFUSED(kn_checkpoint_save(dir, &other, OPTIMS(y)), "without an optimizer");
    REFUSED(kn_checkpoint_save(dir, &other, OPTIMS(x)), "the optimizer was made for");
    REFUSED(kn_checkpoint_save(dir, &other, .optim_count = 2), ".optims is NULL");
    REFUSED(kn_checkpoint_own(c, 0), "there is nothing of rank 0: 0 gave .own");
    kn_state *s = kn_state_dict(&m);
    REFUSED(kn_checkpoint_save(dir, &m, .own = s), ".own has the tensor 'wte.weight'");
    kn_state_free(s);
    kn_checkpoint_free(c);
    opts_free(&x), opts_free(&y);
    kn_module_free(&m), kn_module_free(&other);
}

static int unequal(kn_comm *world, void *arg)
{
    net m;
    EXPECT(net_init(&m, KN_META) && net_wrap(&m, world, &ways[0]), "init");
    kn_state *own = kn_state_new();
    EXPECT(!kn_checkpoint_save(arg, &m, .own = kn_rank(world) ? own : NULL), "saved");
    EXPECT(strstr(kn_error(), "some ranks give .own and others don't"), "text");
    kn_clear_error();
    kn_state_free(own);
    kn_module_free(&m);
    kn_clear_error();
    return 0;
}

KN_TEST(several, all_ranks_give_their_own)
{
    KN_CHECK(kn_spawn_threads(2, unequal, (void *)temp_path("run")) == 0);
    kn_clear_error();
}
