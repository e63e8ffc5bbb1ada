/* tests/nn/module_test.c: the tree of modules, parameters and buffers, modes, hooks, calls with
 * several tensors, initial values, counting of micro-batches. */
#include "nn/hooks.h"
#include "nn/layers.h"
#include "nn/nn_internal.h"
#include "tests/owned.h"
#include <pthread.h>

typedef struct inner {
    kn_module base;
    kn_linear fc;
    kn_dropout drop;
} inner;

typedef struct outer {
    kn_module base;
    kn_module layers;
    inner part[2];
} outer;

static kn_tensor *inner_forward(kn_module *self, kn_tensor *x)
{
    inner *m = (inner *)self;
    return kn_call(&m->drop, kn_call(&m->fc, x));
}

static kn_tensor *outer_forward(kn_module *self, kn_tensor *x)
{
    outer *m = (outer *)self;
    return kn_call(&m->part[1], kn_relu(kn_call(&m->part[0], x)));
}

static void build(outer *m)
{
    kn_module_init(&m->base, outer_forward);
    kn_module_list_init(&m->layers, &m->base, "layers");
    for (int i = 0; i < 2; i++) {
        char name[2] = { (char)('0' + i), 0 };
        kn_module_init(&m->part[i].base, inner_forward);
        kn_linear_init(&m->part[i].fc, &m->part[i].base, "fc", 4, 4); /* before it has a parent */
        kn_module_add(&m->layers, name, &m->part[i].base);
        kn_dropout_init(&m->part[i].drop, &m->part[i].base, "drop", 0.5);
    }
    kn_materialize(m, KN_CPU, 3);
    KN_CHECK_OK();
}

static kn_tensor *ones(void)
{
    return kn_ones(KN_F32, KN_CPU, KN_SHAPE(8, 4));
}

static bool append_path(kn_module *m, void *arg)
{
    strcat(strcat(arg, kn_module_path(m)), ",");
    return true;
}

KN_TEST(module, names_and_paths)
{
    OWNED_MODULE outer m;
    char all[256] = "";
    build(&m);
    KN_CHECK(strcmp(kn_module_path(&m), "") == 0 && strcmp(kn_module_class(&m), "outer") == 0);
    KN_CHECK(strcmp(kn_module_path(&m.part[1].fc), "layers.1.fc") == 0);
    KN_CHECK(strcmp(kn_module_class(&m.part[1].fc), "linear") == 0);
    KN_CHECK(kn_module_find(&m, "layers.1.fc") == &m.part[1].fc.base);
    KN_CHECK(kn_module_find(&m, "") == &m.base && kn_module_children(&m.layers) == 2);
    KN_CHECK(kn_module_child(&m.layers, 1) == &m.part[1].base);
    KN_CHECK(kn_apply_modules(&m, append_path, all));
    KN_CHECK(strcmp(all, "layers.0.fc,layers.0.drop,layers.0,layers.1.fc,layers.1.drop,layers.1,"
                         "layers,,") == 0,
             "%s", all);
    REFUSED(kn_module_find(&m, "layers.2"), "no module 'layers.2'");
    REFUSED(kn_module_child(&m.layers, 2), "has 2 children");
}

KN_TEST(module, bad_trees)
{
    OWNED_MODULE outer m;
    kn_module alone, never = { 0 };
    build(&m);
    kn_module_init(&alone, outer_forward);
    REFUSED(kn_module_add(&m.base, "a.b", &alone), "hold a dot");
    KN_CHECK(!alone.impl, "what could not be added was not freed");
    kn_module_init(&alone, outer_forward);
    REFUSED(kn_module_add(&m.base, "layers", &alone), "a child named 'layers' already");
    kn_module_init(&alone, outer_forward);
    REFUSED(kn_module_add(&alone, "x", &m.part[0].base), "has a place in the tree already");
    REFUSED(kn_module_add(&m.layers, "x", &m.base), "its own ancestor");
    REFUSED(kn_module_add(&m.base, "x", &never), "not an initialised module");
    REFUSED(kn_linear_init(&m.part[0].fc, &m.part[0].base, "fc", 4, 4),
            "holds 'layers.0.fc' (linear) already");
    KN_CHECK(kn_module_children(&m.part[0]) == 2 && kn_param_count(&m) == 2 * 20);
    REFUSED(kn_call(&m.layers, ones()), "is a list of modules");
    REFUSED(kn_parameter(&m.part[0].fc, "weight", KN_F32, KN_CPU, KN_ONES_INIT, KN_SCALAR),
            "has a parameter 'weight' already");
    REFUSED(kn_parameter(&m, "ids", KN_I64, KN_CPU, KN_ONES_INIT, KN_SCALAR),
            "parameters are floats");
    REFUSED(kn_module_param(&m, "layers.0.fc.wieght"), "has no parameter 'wieght'");
    kn_module_free(&alone);
}

KN_TEST(module, parameters_freeze_and_share)
{
    OWNED_MODULE outer m;
    const kn_param *p;
    build(&m);
    KN_CHECK(kn_params(&m, &p) == 4 && kn_param_count(&m) == 40);
    KN_CHECK(strcmp(p[0].name, "layers.0.fc.weight") == 0);
    KN_CHECK(strcmp(p[3].name, "layers.1.fc.bias") == 0 && p[3].numel == 4 && p[3].start == 0);
    KN_CHECK(p[0].master && kn_ndim(p[0].master) == 1 && kn_numel(p[0].master) == 16);
    kn_freeze(&m.part[0], true);
    KN_CHECK(kn_params(&m, &p) == 4 && !p[0].trainable && !p[1].trainable && p[2].trainable);
    kn_train(&m, false);
    KN_CHECK(kn_backward(sum_of(kn_call(&m, ones()))));
    KN_CHECK(!kn_param_grad(&p[0]) && kn_param_grad(&p[2]));
    kn_freeze(&m, false);
    KN_CHECK(kn_params(&m, &p) == 4 && p[0].trainable);
    kn_tensor *w = kn_module_param(&m, "layers.1.fc.weight");
    KN_CHECK(kn_share_parameter(&m, "tied", w) && kn_module_param(&m, "tied") == w);
    KN_CHECK(kn_params(&m, &p) == 4 && kn_param_count(&m) == 40, "shared ones count once");
}

KN_TEST(module, buffers_and_print)
{
    OWNED_MODULE outer m;
    OWNED_BYTES char *text = NULL;
    size_t size = 0;
    build(&m);
    int64_t live = kn_live_tensors();
    kn_scope s = kn_scope_begin();
    KN_CHECK(kn_buffer(&m, "mask", kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, 2))));
    kn_scope_end(s);
    KN_CHECK(kn_live_tensors() == live + 1, "the module keeps its buffer");
    kn_share_parameter(&m, "tied", kn_module_param(&m, "layers.1.fc.weight"));
    kn_freeze(&m.part[0], true);
    FILE *f = open_memstream(&text, &size);
    KN_CHECK(kn_module_print(f, &m));
    fclose(f);
    const char *lines[] = {
        "outer\n",        "  tied f32[4,4] (shared)\n",         "  mask f32[2,2] (buffer)\n",
        "    0: inner\n", "        weight f32[4,4] (frozen)\n", "      drop: dropout\n",
        "40 parameters\n"
    };
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
        KN_CHECK(strstr(text, lines[i]), "no line '%s' in:\n%s", lines[i], text);
}

KN_TEST(module, freeing_lets_go_of_everything)
{
    int64_t live = kn_live_tensors();
    kn_ledger was = kn_ledger_read();
    outer m;
    build(&m);
    const kn_param *p;
    kn_params(&m, &p);
    KN_CHECK(kn_ledger_read().live[KN_MEM_PARAM] >= was.live[KN_MEM_PARAM] + 160);
    kn_module_free(&m);
    KN_CHECK(kn_live_tensors() == live && kn_ledger_read().live_total == was.live_total);
    kn_module_free(&m); /* no effect */
    REFUSED(kn_call(&m, ones()), "not an initialised module");
}

KN_TEST(module, train_and_eval)
{
    OWNED_MODULE outer m;
    build(&m);
    KN_CHECK(kn_training(&m) && kn_training(&m.part[0].drop));
    kn_tensor *x = ones(), *a = kn_call(&m.part[0].drop, x), *b = kn_call(&m.part[0].drop, x);
    int zeros = 0, differ = 0;
    const float *u = kn_data(a), *v = kn_data(b);
    for (int i = 0; i < 32; i++) {
        KN_CHECK(u[i] == 0 || u[i] == 2);
        zeros += u[i] == 0;
        differ += u[i] != v[i];
    }
    KN_CHECK(zeros > 4 && zeros < 28 && differ > 0, "%d zeros, %d differ", zeros, differ);
    kn_train(&m.layers, false);
    KN_CHECK(kn_training(&m) && !kn_training(&m.part[0].drop));
    KN_CHECK(kn_call(&m.part[0].drop, x) == x, "no draw in eval");
    kn_train(&m, true);
    KN_CHECK(kn_training(&m.part[0].drop));
}

KN_TEST(module, draws_depend_on_step_and_micro_batch)
{
    OWNED_MODULE outer m;
    float r[5][32];
    build(&m);
    /* Twice step 1; step 2; again step 1 after an evaluation; micro-batch 2 of step 1. */
    for (int run = 0; run < 5; run++) {
        kn_set_step(run == 2 ? 2 : 1);
        if (run == 3) {
            WITHOUT_GRAD;
            kn_call(&m.part[0].drop, ones());
        } else if (run == 4) {
            KN_CHECK(kn_backward(sum_of(kn_call(&m, ones()))));
        }
        KN_CHECK(kn_to_host(kn_call(&m.part[0].drop, ones()), r[run], sizeof r[run]));
    }
    KN_CHECK(memcmp(r[0], r[1], sizeof r[0]) == 0, "the same step draws the same");
    KN_CHECK(memcmp(r[0], r[2], sizeof r[0]) != 0 && memcmp(r[0], r[4], sizeof r[0]) != 0);
    KN_CHECK(memcmp(r[0], r[3], sizeof r[0]) == 0, "evaluating shifts what training draws");
}

/* ---- hooks ----------------------------------------------------------------------------------- */

static char order[256];

static void note(char what, kn_module *m, void *arg)
{
    char s[8] = { what, *(char *)arg, ' ', 0 };
    KN_CHECK(m->impl != NULL);
    strcat(order, s);
}
static void pre_forward(kn_module_event *e, void *arg)
{
    note('f', e->module, arg);
}
static void post_forward(kn_module_event *e, void *arg)
{
    note('F', e->module, arg);
}
static void pre_backward(kn_module_event *e, void *arg)
{
    note('b', e->module, arg);
}
static void post_backward(kn_module_event *e, void *arg)
{
    note('B', e->module, arg);
}

KN_TEST(module, hooks_in_order)
{
    OWNED_MODULE outer m;
    build(&m);
    void *where[3] = { &m, &m.part[0], &m.part[1] };
    for (int i = 0; i < 3; i++)
        KN_CHECK(
            kn_module_hook(where[i], (kn_module_hooks){ pre_forward, post_forward, pre_backward,
                                                        post_backward, &"o01"[i] }));
    for (int on = 0; on < 2; on++) {
        order[0] = '\0';
        kn_tensor *x = kn_require_grad(ones(), true), *y = kn_call(&m, x);
        KN_CHECK(kn_backward(sum_of(y)));
        /* recomputed, part 0 runs its forward again, before its backward */
        const char *want = on ? "fo f0 F0 f1 F1 Fo bo b1 B1 b0 f0 F0 B0 Bo "
                              : "fo f0 F0 f1 F1 Fo bo b1 B1 b0 B0 Bo ";
        KN_CHECK(strcmp(order, want) == 0, "order: %s", order);
        kn_recompute(&m.part[0], true);
    }
}

/* ---- several tensors ------------------------------------------------------------------------- */

static kn_values swap_forward(kn_module *self, kn_values in, const void *arg)
{
    (void)self;
    if (in.n != 2)
        return (kn_values){ kn_fail("swap: takes two"), { NULL } };
    double f = arg ? *(const double *)arg : 1;
    return (kn_values){ 2, { kn_scale(in.v[1], f), in.v[0] } };
}
static kn_tensor *nothing_forward(kn_module *self, kn_tensor *x)
{
    (void)self;
    (void)x;
    return NULL;
}

KN_TEST(module, several_inputs_and_results)
{
    OWNED_MODULE kn_module m;
    double f = 4;
    kn_module_init_n(&m, swap_forward);
    kn_tensor *a = kn_full(KN_F32, KN_CPU, 2, KN_SCALAR),
              *b = kn_full(KN_F32, KN_CPU, 3, KN_SCALAR);
    kn_values out = kn_call_n(&m, (kn_values){ 2, { a, b } }, &f, sizeof f);
    KN_CHECK(out.n == 2 && kn_item(out.v[0]) == 12 && out.v[1] == a);
    out = kn_call_n(&m, (kn_values){ 2, { a, b } }, NULL, 0);
    KN_CHECK(out.n == 2 && kn_item(out.v[0]) == 3);
    REFUSED(kn_call(&m, a), "takes two");
    kn_module_free(&m);
    kn_module_init(&m, nothing_forward);
    REFUSED(kn_call(&m, a), "forward returned NULL");
    REFUSED(kn_call_n(&m, (kn_values){ 2, { a, b } }, NULL, 0).n,
            "takes one tensor, 2 were passed");
}

static kn_values too_many_forward(kn_module *self, kn_values in, const void *arg)
{
    (void)self;
    in.n = *(const int *)arg;
    return in;
}

KN_TEST(module, more_values_than_there_is_room_for)
{
    kn_module m;
    kn_tensor *a = kn_full(KN_F32, KN_CPU, 2, KN_SCALAR);
    kn_values in = { KN_MAX_VALUES, { a, a, a, a, a, a, a, a } };
    int n = KN_MAX_VALUES;
    for (int again = 0; again < 2; again++) {
        KN_CHECK(kn_module_init_n(&m, too_many_forward) && kn_recompute(&m, again));
        KN_CHECK(kn_call_n(&m, in, &n, sizeof n).n == KN_MAX_VALUES);
        for (int bad = -1; bad <= KN_MAX_VALUES + 1; bad += KN_MAX_VALUES + 2) {
            REFUSED(kn_call_n(&m, in, &bad, sizeof bad).n, "at most 8 are possible");
            kn_values many = { bad, { a } };
            REFUSED(kn_call_n(&m, many, &n, sizeof n).n, "at most 8 are possible");
        }
        kn_module_free(&m);
    }
}

KN_TEST(module, enter_and_leave)
{
    OWNED_MODULE outer m;
    build(&m);
    int64_t live = kn_live_tensors();
    kn_scope s = kn_scope_begin();
    kn_entered e = kn_enter(&m.part[0]);
    kn_tensor *x = ones(), *y = kn_call(&m.part[0].fc, x), *bad = kn_matmul(x, x);
    KN_CHECK(!bad && strstr(kn_error(), "layers.0"), "errors name the module");
    kn_clear_error();
    kn_leave(e, &y, 1);
    KN_CHECK(kn_size(y, 1) == 4 && !kn_context_get()->frame);
    KN_CHECK(kn_backward(sum_of(y)));
    kn_scope_end(s);
    const kn_param *p;
    int n = kn_params(&m, &p);
    for (int i = 0; i < n; i++)
        kn_clear_grad(p[i].tensor);
    KN_CHECK(kn_live_tensors() == live + n, "%lld live",
             (long long)kn_live_tensors()); /* masters */
}

/* ---- initial values -------------------------------------------------------------------------- */

static void weights(outer *m, const char *name, float *w)
{
    KN_CHECK(kn_to_host(kn_module_param(m, name), w, 16 * sizeof *w));
}

KN_TEST(module, initial_values_depend_on_seed_name_and_index)
{
    OWNED_MODULE outer m;
    float a[16], b[16], c[16];
    build(&m);
    weights(&m, "layers.0.fc.weight", a);
    weights(&m, "layers.1.fc.weight", b);
    KN_CHECK(memcmp(a, b, sizeof a) != 0, "two names, the same values");
    KN_CHECK(kn_materialize(&m, KN_CPU, 3));
    weights(&m, "layers.0.fc.weight", c);
    KN_CHECK(memcmp(a, c, sizeof a) == 0, "the same seed, other values");
    KN_CHECK(kn_materialize(&m, KN_CPU, 4));
    weights(&m, "layers.0.fc.weight", c);
    KN_CHECK(memcmp(a, c, sizeof a) != 0, "another seed, the same values");
    for (int i = 0; i < 16; i++)
        KN_CHECK(c[i] >= -0.5f && c[i] < 0.5f, "outside of 1/sqrt(in): %g", c[i]);
    /* any part of a parameter can be filled by itself */
    kn_initializer init = KN_NORMAL_INIT(0.5);
    kn_tensor *whole = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(50)),
              *part = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(9));
    KN_CHECK(kn_init_fill(&init, 1, "x.weight", whole, 0));
    KN_CHECK(kn_init_fill(&init, 1, "x.weight", part, 33));
    KN_CHECK(memcmp((float *)kn_data(whole) + 33, kn_data(part), 9 * sizeof(float)) == 0);
}

KN_TEST(module, meta_then_materialised)
{
    OWNED_MODULE kn_linear meta, real;
    const kn_param *p;
    KN_CHECK(kn_linear_init(&meta, NULL, "", 4, 3, .device = KN_META));
    KN_CHECK(kn_linear_init(&real, NULL, "", 4, 3));
    KN_CHECK(kn_params(&meta, &p) == 2 && kn_device_of(p[0].tensor) == KN_META);
    KN_CHECK(kn_materialize(&meta, KN_CPU, 9) && kn_materialize(&real, KN_CPU, 9));
    KN_CHECK(kn_params(&meta, &p) == 2 && kn_device_of(p[0].master) == KN_CPU,
             "the list is as it was before");
    float a[12], b[12];
    KN_CHECK(kn_to_host(kn_module_param(&meta, "weight"), a, sizeof a));
    KN_CHECK(kn_to_host(kn_module_param(&real, "weight"), b, sizeof b));
    KN_CHECK(memcmp(a, b, sizeof a) == 0);
    KN_CHECK(memcmp(a, kn_data(p[0].master), sizeof a) == 0, "the master is another storage");
}

typedef struct stack_state {
    int count;
    kn_linear layer[]; /* [count] */
} stack_state;

static kn_tensor *stack_forward(kn_module *self, kn_tensor *x)
{
    stack_state *s = kn_module_data(self);
    for (int i = 0; i < s->count; i++)
        x = kn_call(&s->layer[i], x);
    return x;
}

/* Data beside the struct: a number of layers known only at run time. */
KN_TEST(module, data_of_its_own)
{
    static const char *const name[] = { "0", "1", "2" };
    struct {
        kn_module base;
    } m, copy;
    OWNED_MODULE kn_linear fc;
    const char text[] = "text";
    KN_CHECK(kn_module_init(&m.base, stack_forward) && !kn_module_data(&m) && kn_ok());
    KN_CHECK(kn_module_set_data(&m, NULL, sizeof(stack_state) + 3 * sizeof(kn_linear)));
    stack_state *s = kn_module_data(&m);
    KN_CHECK(s && s->count == 0 && !s->layer[2].base.impl, "zeros");
    s->count = 3;
    for (int i = 0; i < 3; i++)
        KN_CHECK(kn_linear_init(&s->layer[i], &m.base, name[i], 4, 4));
    KN_CHECK(kn_numel(kn_call(&m, ones())) == 32);
    REFUSED(kn_module_set_data(&m, text, sizeof text), "has data already");
    KN_CHECK(kn_module_init(&copy.base, stack_forward));
    KN_CHECK(kn_module_set_data(&copy, text, sizeof text) && kn_module_data(&copy) != text);
    KN_CHECK(strcmp(kn_module_data(&copy), "text") == 0);
    KN_CHECK(kn_linear_init(&fc, NULL, "", 2, 2) && !kn_module_set_data(&fc, text, sizeof text));
    KN_CHECK_ERROR("layers of the library keep their settings there");
    REFUSED(kn_module_set_data(NULL, text, 1), "kn_module_set_data");
    kn_module_free(&m);
    kn_module_free(&copy);
}

KN_TEST(module, buffers_are_listed)
{
    OWNED_MODULE kn_batch_norm b;
    const char *name;
    KN_CHECK(kn_batch_norm_init(&b, NULL, "", 3) && kn_module_buffers(&b) == 3);
    KN_CHECK(kn_module_buffer_at(&b, 1, &name) == kn_module_buffer(&b, "running_var"));
    KN_CHECK(strcmp(name, "running_var") == 0 && kn_module_buffer_at(&b, 0, NULL));
    REFUSED(kn_module_buffer_at(&b, 3, &name), "has 3 buffers, there is no number 3");
}

KN_TEST(module, declared_buffers_begin_anew)
{
    OWNED_MODULE kn_batch_norm b;
    KN_CHECK(kn_batch_norm_init(&b, NULL, "", 3));
    kn_tensor *var = kn_module_buffer(&b, "running_var");
    KN_CHECK(kn_fill_(var, 5) && kn_materialize(&b, KN_CPU, 1) && kn_item(mean_of(var)) == 1);
}

KN_TEST(module, rounds_are_counted)
{
    OWNED_MODULE outer m;
    build(&m);
    KN_CHECK(kn_grad_scale(&m) == 1);
    for (int i = 1; i <= 3; i++) {
        KN_CHECK(kn_backward(sum_of(kn_call(&m, ones()))));
        KN_CHECK(kn_grad_scale(&m) == 1.0 / i && kn_grad_scale(&m.part[0]) == 1.0 / i);
    }
}

static void *init_elsewhere(void *m)
{
    return kn_module_init_(m, inner_forward, NULL, "inner") ? m : NULL;
}

/* Of two heaps there may be no memory between two records. */
KN_TEST(module, a_struct_may_hold_any_bytes_before)
{
    OWNED_MODULE kn_module here, there, m;
    pthread_t thread;
    KN_CHECK(kn_module_init_(&here, inner_forward, NULL, "inner") &&
             pthread_create(&thread, NULL, init_elsewhere, &there) == 0);
    pthread_join(thread, NULL);
    uintptr_t a = (uintptr_t)here.impl, b = (uintptr_t)there.impl;
    m.impl = (kn_module_impl *)((a / 2 + b / 2) / 64 * 64);
    REFUSED(kn_impl(&m, "kn_module_path"), "not an initialised module");
    KN_CHECK(kn_module_init_(&m, inner_forward, NULL, "inner"));
}
