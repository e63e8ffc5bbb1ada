/* tests/state/part_test.c: loads in part, of state dicts and checkpoint folders alike: names,
 * patterns, dtypes, parts of a module; and what a load that fails leaves. */
#include "tests/failing.h"
#include "tests/kn_test.h"
#include "tests/state/stored.h"

enum { SIDE = 4 };

/* Two layers of one shape, and a head that may be missing. */
typedef struct two {
    kn_module base;
    kn_linear a, b, head;
} two;

static kn_tensor *two_forward(kn_module *self, kn_tensor *x)
{
    two *m = (two *)self;
    return kn_call(&m->b, kn_call(&m->a, x));
}

typedef struct job {
    const way *w;
    char dir[256]; /* "": state dicts */
    int row;
} job;

static const char *dir_of(const job *j)
{
    return *j->dir ? j->dir : NULL;
}

static bool two_init(two *m, kn_comm *world, const way *w, kn_dtype dtype, bool head, uint64_t seed)
{
    *m = (two){ 0 };
    return kn_module_init(&m->base, two_forward) &&
           kn_module_defaults(m, .device = KN_META, .dtype = dtype) &&
           kn_linear_init(&m->a, &m->base, "a", SIDE, SIDE) &&
           kn_linear_init(&m->b, &m->base, "b", SIDE, SIDE) &&
           (!head || kn_linear_init(&m->head, &m->base, "head", SIDE, 3)) &&
           kn_fsdp_wrap(m, world, .strategy = w->strategy, .layout = w->layout,
                        .offload_dir = w->offload_dir, .wrap_class = "linear", .seed = seed);
}

/* ---- rows of options ------------------------------------------------------------------------- */

static const char *swapped(const char *name, void *arg)
{
    static _Thread_local char to[64];
    snprintf(to, sizeof to, "%c%s", *name == 'a' ? 'b' : 'a', name + 1);
    return arg && *name == 'b' ? NULL : to;
}

static const kn_rename swap[] = { { "a.*", "b.*" }, { "b.*", "a.*" } },
                       only_a[] = { { "a.*", "b.*" }, { "b.*", NULL } },
                       twice[] = { { "a.*", "b.*" } },
                       stars[] = { { "a*w*gh*", "b*w*gh*" },
                                   { "a*bi*", "b*bi*" },
                                   { "b.*", "a.*" } };

/* After the load, A and B are the other's layers: 'a', 'b' of what was stored, or '.' as before. */
typedef struct row {
    kn_load_state_dict_options o; /* those of KN_LOAD_OPTIONS */
    const char *save_only, *save_except;
    bool head;       /* the module has one, which wasn't stored */
    kn_dtype dtype;  /* of the module; stored in f32 */
    const char *now; /* of A and B, as weight and bias; NULL: refused with .text */
    const char *text;
} row;

static const row rows[] = {
    { .now = "aabb" },
    { .o = { .only = "a.*" }, .now = "aa.." },
    { .o = { .except = "*.bias" }, .now = "a.b." },
    { .o = { .only = "*.weight", .except = "a.*" }, .now = "..b." },
    { .o = { .renames = swap, .rename_count = 2 }, .now = "bbaa" },
    { .o = { .renames = stars, .rename_count = 3 }, .now = "bbaa" },
    { .o = { .renames = only_a, .rename_count = 2, .only = "b.*" }, .now = "..aa" },
    { .o = { .renames = only_a, .rename_count = 2 }, .text = "2 missing (a.weight, a.bias)" },
    { .o = { .renames = only_a, .rename_count = 2, .not_strict = true }, .now = "..aa" },
    { .o = { .renames = twice, .rename_count = 1 }, .text = "two names become 'b." },
    { .o = { .rename = swapped }, .now = "bbaa" },
    { .o = { .rename = swapped, .rename_arg = "", .not_strict = true }, .now = "..aa" },
    { .o = { .rename = swapped, .renames = swap, .rename_count = 2 }, .text = "give one of both" },
    { .o = { .renames = &(kn_rename){ "a", "*" }, .rename_count = 1 }, .text = "no more of them" },
    { .o = { .rename_count = 1 }, .text = ".renames is NULL" },
    { .head = true, .text = "2 missing (head.weight, head.bias)" },
    { .o = { .not_strict = true }, .head = true, .now = "aabb" },
    { .o = { .except = "head.*" }, .head = true, .now = "aabb" },
    { .dtype = KN_BF16, .now = "aabb" },
    { .save_only = "b.*", .text = "2 missing (a.weight, a.bias)" },
    { .save_only = "b.*", .o = { .only = "b.*" }, .now = "..bb" },
    { .save_except = "b.weight", .o = { .not_strict = true }, .now = "aa.b" },
    { .o = { .prefix = "model." }, .text = "missing" },
    { .o = { .prefix = "model.", .not_strict = true }, .text = "no name fits" },
};
enum { ROWS = sizeof rows / sizeof *rows };

/* Whether layer now's weight (bias) is what from was, as its dtype rounds it. */
static bool is_from(kn_linear *now, kn_linear *from, const char *name)
{
    kn_state *x = kn_state_dict(now, .dtype = KN_BF16), *y = kn_state_dict(from, .dtype = KN_BF16);
    bool same = x && y && same_bytes(kn_state_tensor(x, name), kn_state_tensor(y, name));
    kn_state_free(x), kn_state_free(y);
    return same;
}

static bool ends_as(const row *r, two *other, two *m, two *before)
{
    for (int k = 0; k < 4; k++) {
        kn_linear *now = k < 2 ? &other->a : &other->b;
        const char what = r->now ? r->now[k] : '.';
        kn_linear *was = k < 2 ? &before->a : &before->b;
        kn_linear *from = what == 'a' ? &m->a : what == 'b' ? &m->b : was;
        if (!is_from(now, from, k % 2 ? "bias" : "weight"))
            return kn_ok() && kn_fail("number %d isn't '%c'", k, what);
    }
    return kn_ok();
}

#define OPTIONS(r)                                                                                 \
    .prefix = (r)->o.prefix, .only = (r)->o.only, .except = (r)->o.except,                         \
    .renames = (r)->o.renames, .rename_count = (r)->o.rename_count, .rename = (r)->o.rename,       \
    .rename_arg = (r)->o.rename_arg, .not_strict = (r)->o.not_strict

static int one_row(kn_comm *world, void *arg)
{
    const job *j = arg;
    const row *r = &rows[j->row];
    const kn_dtype dtype = r->dtype ? r->dtype : KN_F32;
    two m, other, before;
    stored t;
    EXPECT(two_init(&m, world, j->w, KN_F32, false, 1) &&
               two_init(&other, world, &ways[1], dtype, r->head, 2) &&
               two_init(&before, world, &ways[1], dtype, r->head, 2),
           "init");
    EXPECT(STORE(&t, dir_of(j), world, &m, NULL, .only = r->save_only, .except = r->save_except),
           "store");
    const bool ok = LOAD(&t, &other, NULL, OPTIONS(r));
    EXPECT(ok == (r->now != NULL), "row %d", j->row);
    if (!ok)
        EXPECT(strstr(kn_error(), r->text), "%s, not %s", kn_error(), r->text);
    kn_clear_error();
    EXPECT(kn_comm_size(world) > 1 && !ok ? true : ends_as(r, &other, &m, &before), "row %d",
           j->row);
    stored_free(&t);
    kn_module_free(&m), kn_module_free(&other), kn_module_free(&before);
    return !kn_ok();
}

KN_TEST(part, names_patterns_and_dtypes)
{
    for (int i = 0; i < ROWS; i++)
        for (int k = 0; k < 4; k++) {
            job j = { .w = &ways[i % 3], .row = i };
            if (k % 2)
                snprintf(j.dir, sizeof j.dir, "%s", temp_path("run"));
            const int failed = kn_spawn_threads(1 + k / 2, one_row, &j);
            KN_CHECK(failed == 0, "row %d, %d ranks, %s: %s", i, 1 + k / 2, j.dir,
                     kn_ok() ? "" : kn_error());
            kn_clear_error();
            remove_temp();
        }
}

/* ---- a module of its own, and one within another --------------------------------------------- */

/* A layer alone goes into one of the whole's, with its optimizer's state, and back. */
static int alone(kn_comm *world, void *arg)
{
    const job *j = arg;
    two m, other;
    kn_linear line = { 0 };
    stored whole, part;
    EXPECT(two_init(&m, world, j->w, KN_F32, false, 1) &&
               two_init(&other, world, &ways[0], KN_F32, false, 2) &&
               kn_linear_init(&line, NULL, NULL, SIDE, SIDE, .device = KN_META) &&
               kn_fsdp_wrap(&line, world, .seed = 3),
           "init");
    kn_optim *o = kn_adamw(&m, .lr = 0.1), *p = kn_adamw(&line, .lr = 1),
             *q = kn_adamw(&other.b, .lr = 1);
    kn_scope scope = kn_scope_begin();
    EXPECT(kn_backward(
               kn_sum(kn_call(&m, kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, SIDE))), 0, NULL, false)) &&
               kn_step(o),
           "step");
    kn_scope_end(scope);
    EXPECT(STORE(&whole, dir_of(j), world, &m, o), "store");
    EXPECT(whole.c ? kn_checkpoint_load(whole.c, &line, .optim = p, .prefix = "b.")
                   : kn_load_state_dict(&line, whole.s, .prefix = "b.") &&
                         kn_load_optim_state_dict(p, whole.so, .prefix = "b."),
           "out of the whole");
    EXPECT(same_modules(&m.b, &line, NULL, NULL) && kn_optim_steps(p) == 1 && kn_lr(p) == 0.1,
           "out of it");
    stored_free(&whole);
    EXPECT(STORE(&part, dir_of(j), world, &line, p), "store");
    EXPECT(part.c ? kn_checkpoint_load(part.c, &other.b, .optim = q, .prefix = "")
                  : kn_load_state_dict(&other.b, part.s),
           "into the whole");
    EXPECT(same_modules(&m.b, &other.b, NULL, NULL) && (!part.c || kn_lr(q) == 0.1), "into it");
    stored_free(&part);
    kn_optim_free(o), kn_optim_free(p), kn_optim_free(q);
    kn_module_free(&m), kn_module_free(&other), kn_module_free(&line);
    return !kn_ok();
}

KN_TEST(part, a_module_alone_and_within_another)
{
    for (int k = 0; k < 8; k++) {
        job j = { .w = &ways[k / 2 == 3 ? 7 : k / 2] };
        if (k % 2)
            snprintf(j.dir, sizeof j.dir, "%s", temp_path("run"));
        on_threads(1, alone, &j);
        remove_temp();
        on_threads(2, alone, &j);
        remove_temp();
    }
}

/* ---- ranks in another order ------------------------------------------------------------------ */

static int turned(kn_comm *world, void *arg)
{
    const job *j = arg;
    two m, other;
    kn_comm *back = kn_comm_split(world, 0, kn_comm_size(world) - kn_rank(world), "turned");
    EXPECT(back && two_init(&m, back, j->w, KN_F32, false, 1) &&
               two_init(&other, world, j->w, KN_F32, false, 2),
           "init");
    const float rank = (float)kn_rank(back);
    kn_scope scope = kn_scope_begin();
    EXPECT(kn_buffer(&m.b, "own", kn_from(KN_F32, KN_CPU, &rank, KN_SHAPE(1))) &&
               kn_buffer(&other.b, "own", kn_zeros(KN_F32, KN_CPU, KN_SHAPE(1))),
           "buffers");
    kn_scope_end(scope);
    kn_optim *o = kn_adamw(&m, .lr = 0.1);
    kn_run_folder *f = kn_run_folder_claim(j->dir, .comm = world);
    EXPECT(f && kn_checkpoint_save(j->dir, &m, .optim = o, .step = 1, .folder = f), "save");
    kn_run_folder_release(f);
    kn_checkpoint *c = kn_checkpoint_open(j->dir, world);
    EXPECT(c && kn_checkpoint_load(c, &other) && same_modules(&m, &other, NULL, NULL), "load");
    EXPECT(kn_checkpoint_load(c, &m, .optim = o) && same_modules(&m, &other, NULL, NULL), "back");
    EXPECT(*(const float *)kn_data(kn_module_buffer(&m.b, "own")) == rank, "its own buffer");
    kn_checkpoint_free(c);
    kn_optim_free(o);
    kn_module_free(&m), kn_module_free(&other);
    return !kn_ok();
}

KN_TEST(part, ranks_in_another_order)
{
    for (int i = 0; i < 3; i++) {
        job j = { .w = &ways[i] };
        snprintf(j.dir, sizeof j.dir, "%s", temp_path("run"));
        on_threads(2, turned, &j);
        on_threads(4, turned, &j);
        remove_temp();
    }
}

/* ---- a load that fails ----------------------------------------------------------------------- */

static bool add_layers(two *m, kn_device b)
{
    *m = (two){ 0 };
    return kn_module_init(&m->base, two_forward) &&
           kn_linear_init(&m->a, &m->base, "a", SIDE, SIDE, .device = KN_CPU) &&
           kn_linear_init(&m->b, &m->base, "b", SIDE, SIDE, .device = b);
}

/* A later parameter lies on meta. */
KN_TEST(part, what_has_no_bytes_is_found_before_the_first_write)
{
    for (int k = 0; k < 2; k++) {
        two m, other;
        stored t;
        const char *dir = k ? temp_path("run") : NULL;
        KN_CHECK(add_layers(&m, KN_CPU) && kn_materialize(&m, KN_CPU, 1) &&
                 add_layers(&other, KN_META) && kn_materialize(&other.a, KN_CPU, 2) &&
                 STORE(&t, dir, kn_comm_self(), &m, NULL));
        kn_state *before = kn_state_dict(&other.a);
        REFUSED(LOAD(&t, &other, NULL, 0), "'b.weight' lies on meta");
        kn_state *after = kn_state_dict(&other.a);
        KN_CHECK(same_states(before, after));
        KN_CHECK(LOAD(&t, &other.a, NULL, .prefix = "a."));
        kn_state_free(before), kn_state_free(after);
        stored_free(&t);
        kn_module_free(&m), kn_module_free(&other);
    }
}

/* A graph that saved what a local state is loaded over: where a unit computes with the masters,
 * each of its parameters was written, not the first alone. */
KN_TEST(part, a_graph_of_before_a_local_load_is_refused)
{
    OWNED_MODULE two m;
    KN_CHECK(add_layers(&m, KN_META) &&
             kn_fsdp_wrap(&m, kn_comm_self(), .strategy = KN_NO_SHARD, .layout = KN_LAYOUT_FLAT));
    kn_state *local = kn_state_dict(&m, .kind = KN_STATE_LOCAL);
    kn_scope scope = kn_scope_begin();
    kn_tensor *y = kn_call(&m, kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, SIDE)));
    KN_CHECK(local && y && kn_load_state_dict(&m, local));
    REFUSED(kn_backward(kn_sum(y, 0, NULL, false)), "write to a copy instead in b");
    kn_scope_end(scope);
    kn_state_free(local);
}

typedef struct failing {
    net m, other;
    kn_optim *o, *p;
    stored t;
    kn_state *before;
} failing;

static bool loads(void *arg)
{
    failing *f = arg;
    kn_load_report r = { 0 };
    const kn_rename none = { "*", "*" };
    const bool ok =
        f->t.c ? kn_checkpoint_load(f->t.c, &f->other, .optim = f->p, .renames = &none,
                                    .rename_count = 1, .not_strict = true, .report = &r)
               : kn_load_state_dict(&f->other, f->t.s, .renames = &none, .rename_count = 1);
    kn_load_report_free(&r);
    return ok;
}

static void nothing_was_written(void *arg)
{
    const failing *f = arg;
    kn_state *after = kn_state_dict((void *)&f->other);
    KN_CHECK(after && same_states(f->before, after) && kn_lr(f->p) == 0.2);
    kn_state_free(after);
}

static void memory_fails(const char *dir, const way *w)
{
    failing f = { 0 };
    KN_CHECK(net_init(&f.m, KN_META) && net_wrap(&f.m, kn_comm_self(), w) &&
             net_other(&f.other, kn_comm_self(), &ways[1]));
    f.o = kn_adamw(&f.m, .lr = 0.1), f.p = kn_adamw(&f.other, .lr = 0.2);
    KN_CHECK(net_step(&f.m, f.o, kn_comm_self(), 0) && STORE(&f.t, dir, kn_comm_self(), &f.m, f.o));
    kn_freeze(&f.other.fc2, true); /* gets its state from the load */
    f.before = kn_state_dict(&f.other);
    each_allocation_fails(loads, nothing_was_written, &f, 50);
    KN_CHECK(same_modules(&f.m, &f.other, NULL, NULL));
    kn_state_free(f.before);
    stored_free(&f.t);
    kn_optim_free(f.o), kn_optim_free(f.p);
    kn_module_free(&f.m), kn_module_free(&f.other);
}

KN_TEST(part, memory_runs_out)
{
    for (int i = 0; i < 3; i++) {
        memory_fails(NULL, &ways[i]);
        memory_fails(temp_path("run"), &ways[i]);
        remove_temp();
    }
}
