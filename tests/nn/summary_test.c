/* tests/nn/summary_test.c: a summary counts parameters, operations and what is kept for backward;
 * it computes nothing and leaves the model as it was. */
#include "nn/summary.h"
#include "nn/hooks.h"
#include "nn/layers.h"
#include "nn/nn_internal.h"
#include "tests/owned.h"

enum { B = 4, IN = 6, HID = 10, OUT = 3 };

typedef struct mlp {
    kn_module base;
    kn_linear a, b, c; /* c shares b's weight */
    kn_module list;
} mlp;

static int forwards;

static kn_tensor *mlp_forward(kn_module *self, kn_tensor *x) /* (B, IN) -> (B, HID) */
{
    mlp *m = (mlp *)self;
    forwards++;
    x = kn_relu(kn_call(&m->a, x));
    return kn_call(&m->c, kn_call(&m->b, kn_call(&m->b, x)));
}

/* c: a linear with b's weight and a method of its own. */
static kn_tensor *tied_forward(kn_module *self, kn_tensor *x)
{
    return kn_linear(x, kn_module_param(self, "weight"), NULL, false);
}

static void build(mlp *m, kn_device device)
{
    *m = (mlp){ 0 };
    kn_module_init(&m->base, mlp_forward);
    kn_module_defaults(m, .device = device);
    kn_linear_init(&m->a, &m->base, "a", IN, HID);
    kn_linear_init(&m->b, &m->base, "b", HID, HID, .no_bias = true);
    kn_module_init(&m->c.base, tied_forward);
    kn_module_add(&m->base, "c", &m->c.base);
    kn_share_parameter(&m->c, "weight", kn_module_param(&m->b, "weight"));
    kn_module_list_init(&m->list, &m->base, "list");
    KN_CHECK_OK();
}

static void user_hook(kn_module_event *e, void *arg)
{
    (void)e;
    ++*(int *)arg;
}

KN_TEST(summary, counts)
{
    OWNED_MODULE mlp m;
    int hooked = 0;
    build(&m, KN_META);
    kn_freeze(&m.a, true);
    kn_module_hook(&m.b, (kn_module_hooks){ .pre_forward = user_hook, .arg = &hooked });
    forwards = 0;
    kn_tensor *x = kn_zeros(KN_F32, KN_META, KN_SHAPE(B, IN));
    kn_summary_table *s = kn_summary_new(&m, KN_VALUES(x));
    KN_CHECK(s && s->rows == 5);
    const kn_summary_row *all = &s->row[0], *a = &s->row[1], *b = &s->row[2], *c = &s->row[3];
    KN_CHECK(all->params == IN * HID + HID + HID * HID && all->trainable == HID * HID);
    KN_CHECK(all->param_bytes == 4 * all->params && c->params == 0 && a->trainable == 0);
    KN_CHECK(all->calls == 1 && a->calls == 1 && b->calls == 2 && c->calls == 1);
    KN_CHECK(s->row[4].calls == 0 && s->row[4].params == 0 && all->depth == 0 && c->depth == 1);
    KN_CHECK(b->results == 1 && b->ndim[0] == 2 && b->shape[0][0] == B && b->shape[0][1] == HID);
    const double product = 2.0 * B * HID * HID;
    KN_CHECK(b->forward == 2 * product && c->forward == product, "%g", b->forward);
    KN_CHECK(a->forward >= 2.0 * B * IN * HID && a->forward <= 2.0 * B * IN * HID + B * HID);
    KN_CHECK(all->forward >= a->forward + b->forward + c->forward);
    /* the first b has no gradient of its input to compute: 1 + 2 products and a sum of gradients */
    KN_CHECK(b->backward >= 3 * product && b->backward <= 3 * product + 2 * HID * HID, "%g",
             b->backward);
    KN_CHECK(a->backward == 0 && a->kept == 0 && all->backward >= b->backward + c->backward);
    KN_CHECK(b->kept == 2 * B * HID * 4 && c->kept == B * HID * 4, "inputs of the products");
    KN_CHECK(all->kept == 3 * B * HID * 4, "%lld", (long long)all->kept);
    KN_CHECK(forwards == 1 && hooked == 0 && m.base.impl->hooks == 0 && m.b.base.impl->hooks == 1);
    kn_summary_free(s);
    s = kn_summary_new(&m, KN_VALUES(x), .no_backward = true);
    KN_CHECK(s && s->row[0].backward == 0 && s->row[0].kept == 0 &&
             s->row[2].forward == 2 * product);
    kn_summary_free(s);
}

/* A model with values, its gradients and its random numbers stay as they are. */
KN_TEST(summary, leaves_the_model_as_it_was)
{
    mlp m;
    build(&m, KN_CPU);
    kn_materialize(&m, KN_CPU, 7);
    kn_tensor *w = kn_module_param(&m.b, "weight"), *x = kn_ones(KN_F32, KN_CPU, KN_SHAPE(B, IN));
    kn_backward(mean_of(kn_call(&m, x)));
    float before[2][HID * HID], after[2][HID * HID];
    double scale = kn_grad_scale(&m);
    kn_to_host(w, before[0], sizeof before[0]);
    kn_to_host(kn_grad(w), before[1], sizeof before[1]);
    const void *data = kn_data(w);
    const kn_ledger l = kn_ledger_read();
    kn_summary_table *s = kn_summary_new(&m, KN_VALUES(x));
    KN_CHECK(s && s->row[0].backward > 0);
    kn_ledger now = kn_ledger_read();
    KN_CHECK(now.live_total == l.live_total && now.peak_total == l.peak_total);
    kn_to_host(w, after[0], sizeof after[0]);
    kn_to_host(kn_grad(w), after[1], sizeof after[1]);
    KN_CHECK(memcmp(before, after, sizeof before) == 0 && kn_data(w) == data);
    KN_CHECK(kn_grad_scale(&m) == scale && kn_device_of(w) == KN_CPU);
    kn_summary_free(s);
    kn_module_free(&m);
    KN_CHECK_OK();
}

KN_TEST(summary, recompute_keeps_less_and_computes_more)
{
    kn_summary_row row[2];
    for (int on = 0; on < 2; on++) {
        OWNED_MODULE kn_module root;
        kn_mlp part = { 0 };
        kn_module_list_init(&root, NULL, "");
        kn_module_defaults(&root, .device = KN_META);
        kn_mlp_init(&part, &root, "mlp", 16, .dropout = 0.1);
        kn_recompute(&part, on);
        kn_summary_table *s =
            kn_summary_new(&part, KN_VALUES(kn_zeros(KN_F32, KN_META, KN_SHAPE(2, 8, 16))));
        KN_CHECK(s && s->row[1].calls == 1);
        row[on] = s ? s->row[0] : (kn_summary_row){ 0 };
        kn_summary_free(s);
    }
    KN_CHECK(row[0].forward == row[1].forward && row[0].kept > 0 && row[1].kept == 0);
    KN_CHECK(row[1].backward == row[0].backward + row[0].forward, "%g %g", row[1].backward,
             row[0].backward + row[0].forward);
}

/* ---- what is counted once -------------------------------------------------------------------- */

typedef struct nest {
    kn_module base, outer, inner, square;
    kn_mlp part;
} nest;

static kn_tensor *square_forward(kn_module *self, kn_tensor *x)
{
    (void)self;
    return kn_mul(x, x); /* both keep the same bytes */
}

static kn_tensor *nest_forward(kn_module *self, kn_tensor *x) /* (B, IN) */
{
    nest *n = (nest *)self;
    kn_tensor *half = kn_slice(x, 0, 0, B / 2);
    kn_call(&n->square, half);
    return kn_call(&n->part, kn_call(&n->square, x));
}

/* Bytes that are kept twice count once; lists cost what lies right below them; the results are
 * those of the first call. */
KN_TEST(summary, lists_and_repetitions)
{
    OWNED_MODULE nest n = { 0 };
    kn_module_init(&n.base, nest_forward);
    kn_module_defaults(&n, .device = KN_META);
    kn_module_init(&n.square, square_forward);
    kn_module_add(&n.base, "square", &n.square);
    kn_module_list_init(&n.outer, &n.base, "outer");
    kn_module_list_init(&n.inner, &n.outer, "inner");
    kn_mlp_init(&n.part, &n.inner, "mlp", IN);
    kn_tensor *x = kn_require_grad(kn_zeros(KN_F32, KN_META, KN_SHAPE(B, IN)), true);
    kn_summary_table *s = kn_summary_new(&n, KN_VALUES(x));
    KN_CHECK(s && s->rows > 5);
    const kn_summary_row *square = &s->row[1], *outer = &s->row[2], *inner = outer + 1,
                         *part = outer + 2;
    KN_CHECK(square->calls == 2 && square->shape[0][0] == B / 2 && square->shape[0][1] == IN);
    KN_CHECK(square->kept == B * IN * 4, "%lld bytes", (long long)square->kept);
    KN_CHECK(outer->calls == 0 && inner->calls == 0 && part->calls == 1 && part->forward > 0);
    KN_CHECK(outer->forward == part->forward && inner->forward == part->forward &&
             outer->backward == part->backward && outer->kept == part->kept && part->kept > 0);
    kn_summary_free(s);
}

/* Three digits and a prefix, also where they round up to the next one. */
KN_TEST(summary, amounts)
{
    char text[1024] = "";
    kn_summary_row row = { .calls = 1, .forward = 999.4e3, .backward = 999.6e3, .kept = 999 };
    OWNED_MODULE kn_module m;
    kn_module_list_init(&m, NULL, "list");
    row.module = &m;
    kn_summary_table s = { .rows = 1, .row = &row };
    FILE *out = fmemopen(text, sizeof text, "w");
    KN_CHECK(kn_summary_print(out, &s, 0));
    fclose(out);
    KN_CHECK(strstr(text, "999 k forward, 1 M backward; kept for backward: 999 B"), "%s", text);
}

static kn_tensor *reading_forward(kn_module *self, kn_tensor *x)
{
    (void)self;
    return kn_scale(x, kn_item(sum_of(x)));
}

static void inside(kn_module_event *e, void *arg)
{
    (void)arg;
    kn_summary_free(kn_summary_new(e->module, e->in));
}

KN_TEST(summary, prints_and_refuses)
{
    mlp m;
    build(&m, KN_META);
    kn_tensor *x = kn_zeros(KN_F32, KN_META, KN_SHAPE(B, IN));
    char text[4096] = "";
    FILE *out = fmemopen(text, sizeof text, "w");
    KN_CHECK(kn_summary(out, &m, KN_VALUES(x), .depth = 1));
    fclose(out);
    KN_CHECK(strstr(text, "b x2") && strstr(text, "f32[4,10]") && strstr(text, "(all)"), "%s",
             text);
    KN_CHECK(strstr(text, "170 parameters, 170 trainable, 680 B"), "%s", text);
    REFUSED(kn_summary(stdout, &m, KN_VALUES(kn_zeros(KN_F32, KN_META, KN_SHAPE(B, 5)))),
            "(mlp) doesn't run without values");
    KN_CHECK(kn_device_of(kn_module_param(&m.a, "weight")) == KN_META);
    REFUSED(kn_summary(NULL, &m, KN_VALUES(x)), "the file is NULL");
    REFUSED(kn_summary_print(stdout, NULL, 0), "the summary is NULL");
    REFUSED(kn_summary_new(&m, (kn_values){ .n = 9 }), "9 inputs");
    kn_module_free(&m);
    OWNED_MODULE kn_module reading;
    kn_module_init(&reading, reading_forward);
    REFUSED(kn_summary(stdout, &reading, KN_VALUES(x)), "doesn't run without values");
    kn_module_hook(&reading, (kn_module_hooks){ .pre_forward = inside });
    REFUSED(kn_call(&reading, kn_ones(KN_F32, KN_CPU, KN_SHAPE(2))), "while a module is called");
}
