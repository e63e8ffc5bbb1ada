/* tests/models/checkpoint_module_test.c: checkpoints of a user's module: buffers, any optimizer, on
 * one rank and on two, resumed to the same bits. */
#include "knap.h"
#include "tests/owned.h"
#include "tests/comm/comm_test.h"
#include "tests/models/temp.h"
#include "tests/state/forged.h"

enum { STEPS = 6, HALF = 3, BATCH = 4, SIDE = 6 };

typedef struct net {
    kn_module base;
    kn_conv2d conv;
    kn_batch_norm norm;
    kn_dropout drop;
    kn_linear fc;
} net;

static kn_tensor *net_forward(kn_module *self, kn_tensor *x) /* (B, 2, SIDE, SIDE) -> (B, 3) */
{
    net *n = (net *)self;
    x = kn_relu(kn_call(&n->norm, kn_call(&n->conv, x)));
    return kn_call(&n->fc, kn_call(&n->drop, kn_flatten(kn_adaptive_avg_pool2d(x, 2, 2), 1, -1)));
}

static bool net_init(net *n)
{
    *n = (net){ 0 };
    return kn_module_init(&n->base, net_forward) && kn_module_defaults(n, .device = KN_META) &&
           kn_conv2d_init(&n->conv, &n->base, "conv", 2, 4, 3) &&
           kn_batch_norm_init(&n->norm, &n->base, "norm", 4) &&
           kn_dropout_init(&n->drop, &n->base, "drop", 0.2) &&
           kn_linear_init(&n->fc, &n->base, "fc", 16, 3);
}

typedef enum method { ADAMW, MOMENTUM, PLAIN, MUON, METHODS } method;

static kn_optim *make_optim(net *n, method how)
{
    return how == ADAMW      ? kn_adamw(n, .lr = 0.01)
           : how == MOMENTUM ? kn_sgd(n, .lr = 0.05, .momentum = 0.9, .weight_decay = 0.01)
           : how == MUON     ? kn_muon(n, .lr = 0.05)
                             : kn_sgd(n, .lr = 0.05);
}

/* A net, its optimizer, and the bits of its losses. */
typedef struct trainer {
    net n;
    kn_optim *optim;
    kn_ema *ema; /* beside MUON */
    float loss[STEPS];
} trainer;

static bool trainer_init(trainer *t, method how)
{
    *t = (trainer){ 0 };
    kn_seed(7);
    kn_set_step(0);
    return net_init(&t->n) &&
           kn_fsdp_wrap(&t->n, kn_world(), .wrap_class = "conv2d,linear", .seed = 42) &&
           (t->optim = make_optim(&t->n, how)) &&
           (how != MUON || (t->ema = kn_ema_new(&t->n, .decay = 0.5)));
}

static void trainer_free(trainer *t)
{
    kn_optim_free(t->optim);
    kn_ema_free(t->ema);
    kn_module_free(&t->n);
}

static bool train(trainer *t, int begin, int end)
{
    int64_t target[BATCH] = { 0, 1, 2, 1 };
    for (int step = begin; step < end && kn_ok(); step++) {
        IN_SCOPE;
        uint64_t micro = (uint64_t)(step * 2 + kn_rank(kn_world()));
        kn_tensor *x = kn_randn(KN_F32, KN_CPU, 4, micro, KN_SHAPE(BATCH, 2, SIDE, SIDE));
        kn_tensor *y = kn_from(KN_I64, KN_CPU, target, KN_SHAPE(BATCH));
        kn_tensor *loss = kn_cross_entropy(kn_call(&t->n, x), y);
        t->loss[step] = (float)kn_item(loss);
        kn_backward(loss);
        kn_step(t->optim);
        if (t->ema)
            kn_ema_update(t->ema);
    }
    return kn_ok();
}

static bool same_tensor(kn_tensor *a, kn_tensor *b)
{
    char x[4096], y[4096];
    size_t bytes = (size_t)kn_numel(a) * kn_dtype_size(kn_dtype_of(a));
    return bytes <= sizeof x && kn_to_host(a, x, bytes) && kn_to_host(b, y, bytes) &&
           memcmp(x, y, bytes) == 0;
}

/* This rank's parts of parameters and optimizer state, and its buffers. */
static bool same_state(trainer *a, trainer *b, bool buffers)
{
    static const char *const name[] = { "norm.running_mean", "norm.running_var",
                                        "norm.num_batches_tracked" };
    const kn_param *p, *q;
    bool same = true;
    const char *state;
    int n = kn_params(&a->n, &p);
    kn_params(&b->n, &q);
    for (int i = 0; i < n; i++) {
        same = same && same_tensor(p[i].master, q[i].master);
        if (a->ema)
            same = same && same_tensor(kn_ema_value(a->ema, i), kn_ema_value(b->ema, i));
        for (int k = 0; (state = kn_optim_state_name_of(a->optim, i, k)); k++)
            same = same && same_tensor(kn_optim_state(a->optim, i, state),
                                       kn_optim_state(b->optim, i, state));
    }
    for (int i = 0; buffers && i < 3; i++)
        same =
            same && same_tensor(kn_module_buffer(&a->n, name[i]), kn_module_buffer(&b->n, name[i]));
    return same && kn_optim_steps(a->optim) == kn_optim_steps(b->optim) &&
           kn_ema_updates(a->ema) == kn_ema_updates(b->ema) && kn_ok();
}

static bool load(trainer *t, const char *dir)
{
    kn_checkpoint *c = kn_checkpoint_open(dir, NULL);
    bool ok = c && kn_checkpoint_load(c, &t->n, .optim = t->optim, .ema = t->ema);
    if (ok)
        kn_set_step(kn_checkpoint_step(c));
    kn_checkpoint_free(c);
    return ok;
}

typedef struct job {
    char dir[METHODS][256];
} job;

/* Trains to the end without a break, and again with one: saved, freed, loaded. */
static int resume(kn_comm *world, void *arg)
{
    const job *j = arg;
    kn_set_threads(1);
    for (method how = ADAMW; how < METHODS; how++) {
        trainer whole, first, second;
        EXPECT(trainer_init(&whole, how) && train(&whole, 0, STEPS));
        EXPECT(trainer_init(&first, how) && train(&first, 0, HALF));
        EXPECT(kn_checkpoint_save(j->dir[how], &first.n, .optim = first.optim, .ema = first.ema,
                                  .step = HALF, .config = "{\"side\": 6}"));
        EXPECT(trainer_init(&second, how) && load(&second, j->dir[how]));
        EXPECT(same_state(&first, &second, true), "loaded, method %d", how);
        EXPECT(train(&second, HALF, STEPS) && same_state(&whole, &second, true), "method %d", how);
        EXPECT(memcmp(whole.loss + HALF, second.loss + HALF, HALF * sizeof(float)) == 0);
        EXPECT(whole.loss[HALF] != whole.loss[HALF + 1]);
        trainer_free(&whole);
        trainer_free(&first);
        trainer_free(&second);
    }
    (void)world;
    return 0;
}

/* A load on another number of ranks: all but the other ranks' buffers. */
static int load_all(kn_comm *world, void *arg)
{
    const job *j = arg;
    kn_set_threads(1);
    for (method how = ADAMW; how < METHODS; how++) {
        trainer t;
        EXPECT(trainer_init(&t, how) && load(&t, j->dir[how]));
        EXPECT(kn_item(kn_module_buffer(&t.n, "norm.num_batches_tracked")) == HALF);
        EXPECT(kn_optim_steps(t.optim) == HALF && train(&t, HALF, STEPS));
        trainer_free(&t);
    }
    (void)world;
    return 0;
}

static void make_job(job *j, const char *name)
{
    char path[64];
    for (int how = 0; how < METHODS; how++) {
        snprintf(path, sizeof path, "%s%d", name, how);
        snprintf(j->dir[how], sizeof j->dir[how], "%s", temp_path(path));
    }
}

KN_TEST(checkpoint_module, resumed_to_the_same_bits)
{
    static job one, two;
    make_job(&one, "one");
    make_job(&two, "two");
    on_ranks(1, resume, &one);
    on_ranks(2, resume, &two);
    on_ranks(2, load_all, &one);
    on_ranks(1, load_all, &two);
}

/* Rank 0 is slower than the timeout that the tree's communicator has of its own. */
static int slow_rank(kn_comm *world, void *arg)
{
    const job *j = arg;
    trainer t = { 0 };
    kn_comm *tree = kn_comm_dup(world, "tree");
    EXPECT(tree && net_init(&t.n) && kn_fsdp_wrap(&t.n, tree, .wrap_class = "conv2d,linear"));
    kn_comm_set_timeout(tree, 0.02);
    kn_comm_slow(tree, kn_rank(world) == 0 ? 0.06 : 0, 0);
    EXPECT(kn_checkpoint_save(j->dir[0], &t.n) && kn_comm_get_timeout(tree) == 0.02);
    kn_checkpoint *c = kn_checkpoint_open(j->dir[0], world);
    EXPECT(c && kn_checkpoint_load(c, &t.n) && kn_comm_get_timeout(tree) == 0.02);
    kn_comm_set_timeout(tree, 0);
    kn_checkpoint_free(c);
    kn_module_free(&t.n);
    return 0;
}

KN_TEST(checkpoint_module, no_timeout_holds_meanwhile)
{
    static job j;
    make_job(&j, "slow");
    on_ranks(2, slow_rank, &j);
}

/* Each rank's statistics are saved; on other numbers of ranks all get those of rank 0. */
KN_TEST(checkpoint_module, files_hold_each_ranks_buffers)
{
    static job two;
    char path[300];
    make_job(&two, "run");
    on_ranks(2, resume, &two);
    kn_checkpoint *c = kn_checkpoint_open(two.dir[PLAIN], NULL);
    KN_CHECK(c != NULL);
    snprintf(path, sizeof path, "%s/optimizer/shard-00002-model-00001-of-00001.safetensors",
             kn_checkpoint_folder(c));
    kn_safetensors *state = kn_safetensors_open(path);
    KN_CHECK(state != NULL);
    KN_CHECK(kn_safetensors_count(state) == 2, "%d", kn_safetensors_count(state));
    kn_scope scope = kn_scope_begin();
    kn_tensor *a = kn_checkpoint_get(c, "norm.running_mean");
    kn_tensor *b = kn_safetensors_get(state, "norm.running_mean.rank1");
    KN_CHECK(a && b && !same_tensor(a, b));
    KN_CHECK(
        !kn_safetensors_has(state, "norm.num_batches_tracked.rank1")); /* equal on both ranks */
    trainer t;
    KN_CHECK(trainer_init(&t, PLAIN) && load(&t, two.dir[PLAIN]));
    KN_CHECK(same_tensor(kn_module_buffer(&t.n, "norm.running_mean"), a));
    trainer_free(&t);
    kn_scope_end(scope);
    kn_safetensors_close(state);
    kn_checkpoint_free(c);
}

/* A buffer that computes in bf16 is saved and loaded in its own dtype. */
static int full_buffers(kn_comm *world, void *arg)
{
    static const float value[] = { 1, 1.0001f, 300.7f }, zero[3];
    const char *dir = arg;
    for (int i = 0; i < 3; i++) { /* saves, loads in bf16, loads in f32 */
        net n;
        float got[3];
        kn_scope scope = kn_scope_begin();
        kn_tensor *table = kn_from(KN_F32, KN_CPU, i ? zero : value, KN_SHAPE(3));
        EXPECT(net_init(&n) && kn_buffer(&n.fc, "table", table) &&
                   kn_fsdp_wrap(&n, world, .seed = 42, .param_dtype = KN_BF16,
                                .buffer_dtype = i < 2 ? KN_BF16 : KN_DTYPE_DEFAULT),
               "wrap");
        EXPECT(i || kn_checkpoint_save(dir, &n, .step = 1), "save");
        kn_checkpoint *c = i ? kn_checkpoint_open(dir, world) : NULL;
        EXPECT(!i || (c && kn_checkpoint_load(c, &n)), "load");
        kn_checkpoint_free(c);
        table = kn_module_buffer(&n, "fc.table");
        EXPECT(kn_dtype_of(table) == (i < 2 ? KN_BF16 : KN_F32), "dtype in round %d", i);
        EXPECT(i == 2 ||
                   kn_item(kn_index_select(
                       table, 0, kn_from(KN_I64, KN_CPU, &(int64_t){ 2 }, KN_SHAPE(1)))) == 300,
               "what computes, in round %d", i);
        EXPECT(kn_module_full_buffers(&n, true) && kn_dtype_of(table) == KN_F32 &&
                   kn_to_host(table, got, sizeof got) && memcmp(got, value, sizeof got) == 0,
               "full values in round %d: %g %g %g", i, (double)got[0], (double)got[1],
               (double)got[2]);
        EXPECT(kn_module_full_buffers(&n, false), "back");
        kn_scope_end(scope);
        kn_module_free(&n);
    }
    return !kn_ok();
}

KN_TEST(checkpoint_module, buffers_in_full_precision)
{
    for (int ranks = 1; ranks <= 4; ranks *= 2) {
        char name[16];
        snprintf(name, sizeof name, "full%d", ranks);
        on_ranks(ranks, full_buffers, (void *)temp_path(name));
    }
}

/* ---- what may be left out, and what doesn't fit ---------------------------------------------- */

static bool is_there(const char *dir, const char *file)
{
    char path[600];
    snprintf(path, sizeof path, "%s/%s", dir, file);
    return access(path, F_OK) == 0;
}

KN_TEST(checkpoint_module, only_what_was_given)
{
    trainer t, u;
    char first[300];
    kn_tokenizer *tokenizer = kn_tokenizer_create("byte", "a", 1);
    char *text = kn_tokenizer_text(tokenizer);
    const kn_checkpoint_file file = { KN_TOKENIZER_FILE, text, strlen(text) };
    const char *dir = temp_path("run");
    KN_CHECK(trainer_init(&t, ADAMW) && train(&t, 0, 1));
    KN_CHECK(kn_checkpoint_save(dir, &t.n, .optim = t.optim, .step = 1, .files = &file,
                                .file_count = 1));
    snprintf(first, sizeof first, "%s/step-00000001", dir);
    KN_CHECK(is_there(first, "optimizer/shard-00001-model-00001-of-00001.safetensors") &&
             is_there(first, "tokenizer.json"));
    kn_checkpoint *c = kn_checkpoint_open(first, NULL);
    kn_tokenizer *again = c ? kn_checkpoint_tokenizer(c) : NULL;
    KN_CHECK(again && !strcmp(kn_tokenizer_kind(again), "byte") && train(&t, 1, 2));
    kn_tokenizer_free(again), kn_checkpoint_free(c);
    KN_CHECK(kn_checkpoint_save(dir, &t.n, .step = 2, .config = "{\"a\": [1.5]}", .keep = 1));
    KN_CHECK(!is_there(dir, "step-00000001"));
    c = kn_checkpoint_open(dir, NULL);
    snprintf(first, sizeof first, "%s/step-00000002", dir);
    KN_CHECK(c && kn_checkpoint_step(c) == 2 && !strcmp(kn_checkpoint_folder(c), first));
    KN_CHECK(!is_there(first, "optimizer") && !is_there(first, "tokenizer.json"));
    KN_CHECK(!strcmp(kn_checkpoint_config(c), "{\"a\": [1.5]}"), "%s", kn_checkpoint_config(c));
    KN_CHECK(kn_checkpoint_has(c, "norm.running_var"));
    KN_CHECK(trainer_init(&u, ADAMW) && kn_checkpoint_load(c, &u.n));
    KN_CHECK(
        same_tensor(kn_module_param(&t.n, "norm.weight"), kn_module_param(&u.n, "norm.weight")));
    REFUSED(kn_checkpoint_load(c, &u.n, .optim = u.optim), "saved without an optimizer");
    REFUSED(kn_checkpoint_tokenizer(c), "saved without a tokenizer");
    kn_gpt_config config;
    REFUSED(kn_gpt_config_saved(c, &config), "tells no sizes of a model");
    kn_checkpoint_free(c);
    kn_tokenizer_free(tokenizer), kn_host_free(text);
    trainer_free(&t), trainer_free(&u);
}

/* A parameter that isn't finite is a diverged run; a buffer may be a mask of -inf. */
KN_TEST(checkpoint_module, masks_may_be_infinite)
{
    OWNED_MODULE kn_linear line = { 0 };
    const char *dir = temp_path("run");
    KN_CHECK(kn_linear_init(&line, NULL, NULL, 2, 2) && kn_materialize(&line, KN_CPU, 1));
    KN_CHECK(kn_buffer(&line, "mask", kn_full(KN_F32, KN_CPU, -INFINITY, KN_SHAPE(3))));
    KN_CHECK(kn_checkpoint_save(dir, &line, .step = 1));
    KN_CHECK(kn_fill_(kn_module_buffer(&line, "mask"), 0));
    kn_checkpoint *c = kn_checkpoint_open(dir, NULL);
    KN_CHECK(kn_checkpoint_load(c, &line) &&
             ((float *)kn_data(kn_module_buffer(&line, "mask")))[2] == -INFINITY);
    kn_checkpoint_free(c);
    bool mode = kn_set_grad_mode(false);
    KN_CHECK(kn_fill_(kn_module_param(&line, "bias"), INFINITY));
    kn_set_grad_mode(mode);
    REFUSED(kn_checkpoint_save(dir, &line, .step = 2), "element 0 of bias is not finite");
}

/* .step is the caller's count, of epochs for instance; the optimizer counts by itself. */
KN_TEST(checkpoint_module, the_step_is_the_callers)
{
    trainer t, u;
    const char *dir = temp_path("run");
    KN_CHECK(trainer_init(&t, ADAMW) && trainer_init(&u, ADAMW) && train(&t, 0, 2));
    KN_CHECK(kn_checkpoint_save(dir, &t.n, .optim = t.optim));
    REFUSED(kn_checkpoint_save(dir, &t.n, .optim = t.optim, .step = -1), ".step is -1");
    KN_CHECK(load(&u, dir) && same_state(&t, &u, true));
    trainer_free(&t);
    trainer_free(&u);
}

KN_TEST(checkpoint_module, what_does_not_fit_is_an_error)
{
    trainer t, other;
    kn_linear line = { 0 };
    const char *dir = temp_path("run");
    KN_CHECK(trainer_init(&t, ADAMW) && trainer_init(&other, MOMENTUM) && train(&t, 0, 1));
    REFUSED(kn_checkpoint_save(dir, &t.n, .config = "[1]"), ".config is no JSON object");
    REFUSED(kn_checkpoint_save(dir, &t.n, .config = "{"), ".config is no JSON object");
    REFUSED(kn_checkpoint_save(dir, &t.n, .optim = other.optim), "the optimizer was made for");
    KN_CHECK(!kn_run_folder_has_checkpoint(dir) && !is_there(dir, "step-00000000") &&
             !is_there(dir, "step-00000000.saving"));
    KN_CHECK(kn_checkpoint_save(dir, &t.n, .optim = t.optim, .step = 1));
    kn_checkpoint *c = kn_checkpoint_open(dir, NULL);
    REFUSED(kn_checkpoint_load(c, &other.n, .optim = other.optim),
            "6 missing (conv.weight.momentum");
    REFUSED(kn_checkpoint_load(c, &other.n, .optim = t.optim), "the optimizer was made for");
    KN_CHECK(kn_linear_init(&line, NULL, NULL, 4, 2) && kn_materialize(&line, KN_CPU, 1));
    REFUSED(kn_checkpoint_load(c, &line), "it is of another model");
    kn_ema *ema = kn_ema_new(&t.n);
    REFUSED(kn_checkpoint_load(c, &t.n, .optim = t.optim, .ema = ema), "without averages");
    kn_ema_free(ema);
    kn_checkpoint_free(c);
    kn_run_folder *held = kn_run_folder_claim(dir);
    REFUSED(kn_checkpoint_save(dir, &t.n, .step = 2), "another run saves there");
    KN_CHECK(kn_checkpoint_save(dir, &t.n, .step = 2, .folder = held));
    kn_run_folder_release(held);
    kn_module_free(&line);
    trainer_free(&t);
    trainer_free(&other);
}

/* No collective follows an error. */
static bool mismatches(trainer *a, trainer *b, trainer *c, kn_checkpoint *saved, const char *dir)
{
    bool ok =
        !kn_checkpoint_load(saved, &b->n, .optim = b->optim) && strstr(kn_error(), "with averages");
    kn_clear_error();
    ok = ok && !kn_checkpoint_load(saved, &b->n, .ema = b->ema) && strstr(kn_error(), ".optim");
    kn_clear_error();
    ok = ok && !kn_checkpoint_save(dir, &c->n, .optim = c->optim, .ema = a->ema) &&
         strstr(kn_error(), "another module");
    kn_clear_error();
    return ok;
}

/* Replaces the value of "ema_updates" in the state that was saved in dir. */
static void set_updates(const char *dir, const char *from, const char *to)
{
    char path[300], before[50], after[50];
    snprintf(path, sizeof path, "%s/step-00000000/state.json", dir);
    snprintf(before, sizeof before, "\"ema_updates\": %s,", from);
    snprintf(after, sizeof after, "\"ema_updates\": %s,", to);
    forge_state(path, before, after);
}

KN_TEST(checkpoint_module, a_damaged_count_of_averages_is_an_error)
{
    static const char *const bad[] = { "-1", "1.5", "\"1\"", "null", "[]" };
    trainer t, u;
    const char *dir = temp_path("run");
    KN_CHECK(trainer_init(&t, MUON) && trainer_init(&u, MUON) && train(&t, 0, 2));
    KN_CHECK(kn_checkpoint_save(dir, &t.n, .optim = t.optim, .ema = t.ema));
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        set_updates(dir, i ? bad[i - 1] : "2", bad[i]);
        KN_CHECK(!load(&u, dir), "%s", bad[i]);
        KN_CHECK_ERROR("state.json: \"ema_updates\" is missing or not a whole number");
    }
    set_updates(dir, "[]", "7");
    KN_CHECK(load(&u, dir) && kn_ema_updates(u.ema) == 7);
    trainer_free(&t);
    trainer_free(&u);
}

/* The saved model is the averages, also where the module holds them; a load for training gives the
 * training's values and the averages, one for use the averages. Mismatches are errors. */
static int averages(kn_comm *world, void *arg)
{
    const job *j = arg;
    trainer a, b, c;
    kn_set_threads(1);
    for (int swapped = 0; swapped < 2; swapped++) {
        EXPECT(trainer_init(&a, MUON) && trainer_init(&b, MUON) && trainer_init(&c, PLAIN));
        EXPECT(train(&a, 0, HALF) && (!swapped || kn_ema_swap(a.ema)));
        EXPECT(kn_checkpoint_save(j->dir[0], &a.n, .optim = a.optim, .ema = a.ema, .step = HALF));
        EXPECT(kn_ema_swapped(a.ema) == swapped && (!swapped || kn_ema_swap(a.ema)));
        EXPECT(load(&b, j->dir[0]) && same_state(&a, &b, true) && kn_ema_updates(b.ema) == HALF);
        kn_checkpoint *saved = kn_checkpoint_open(j->dir[0], NULL);
        EXPECT(saved && kn_checkpoint_load(saved, &c.n) && kn_ema_swap(a.ema));
        const kn_param *p, *q;
        int n = kn_params(&a.n, &p);
        EXPECT(kn_params(&c.n, &q) == n);
        for (int i = 0; i < n; i++)
            EXPECT(same_tensor(p[i].master, q[i].master));
        EXPECT(!swapped || mismatches(&a, &b, &c, saved, j->dir[1]));
        kn_checkpoint_free(saved);
        trainer_free(&a), trainer_free(&b), trainer_free(&c);
    }
    (void)world;
    return 0;
}

KN_TEST(checkpoint_module, averages_are_the_saved_model)
{
    static job j;
    make_job(&j, "averages");
    KN_CHECK(kn_spawn(1, averages, &j) == 0);
    KN_CHECK(kn_spawn(2, averages, &j) == 0);
}
