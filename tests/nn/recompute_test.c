/* tests/nn/recompute_test.c: recomputed modules give the same gradients to the last bit: with
 * dropout, nested, with parameters shared with plain modules, with several inputs and results. (To
 * the last bit where a recomputed module's input is used by it alone: else the sums of the input's
 * gradient associate differently.) */
#include "nn/layers.h"
#include "tests/owned.h"

typedef struct block {
    kn_module base;
    kn_mlp mlp;
    kn_self_attention attn;
    kn_dropout drop;
} block;

typedef struct stack {
    kn_module base;
    block b[3];
} stack;

static kn_tensor *block_forward(kn_module *self, kn_tensor *x)
{
    block *b = (block *)self;
    x = kn_add(x, kn_call(&b->attn, x));
    return kn_add(x, kn_call(&b->drop, kn_call(&b->mlp, x)));
}

static kn_tensor *stack_forward(kn_module *self, kn_tensor *x)
{
    stack *s = (stack *)self;
    for (int i = 0; i < 3; i++)
        x = kn_call(&s->b[i], x);
    return kn_call(&s->b[0], x); /* one module called twice */
}

static void build(stack *s)
{
    kn_module_init(&s->base, stack_forward);
    for (int i = 0; i < 3; i++) {
        block *b = &s->b[i];
        char name[4] = { (char)('0' + i), 0 };
        kn_module_init(&b->base, block_forward);
        kn_module_add(&s->base, name, &b->base);
        kn_mlp_init(&b->mlp, &b->base, "mlp", 4, .dropout = 0.2);
        kn_self_attention_init(&b->attn, &b->base, "attn", 4, 2, .dropout = 0.2);
        kn_dropout_init(&b->drop, &b->base, "drop", 0.3);
    }
    kn_materialize(s, KN_CPU, 5);
    KN_CHECK_OK();
}

#define ROOM 4096

/* Two backwards; all gradients and the loss go to out. Returns their number. */
static int gradients(stack *s, float *out)
{
    const kn_param *p;
    int n = kn_params(s, &p), at = 0;
    kn_set_step(4);
    kn_tensor *x = kn_require_grad(kn_randn(KN_F32, KN_CPU, 1, 1, KN_SHAPE(2, 3, 4)), true);
    for (int round = 0; round < 2; round++) {
        IN_SCOPE;
        kn_tensor *y = kn_call(s, x), *loss = mean_square(y);
        KN_CHECK_OK();
        out[at++] = (float)kn_item(loss);
        KN_CHECK(kn_backward(loss));
    }
    for (int i = -1; i < n; i++) {
        kn_tensor *t = i < 0 ? x : p[i].tensor, *g = kn_grad(t);
        KN_CHECK(g && at + kn_numel(g) < ROOM);
        KN_CHECK(kn_to_host(g, out + at, (size_t)kn_numel(g) * sizeof(float)));
        at += (int)kn_numel(g);
        kn_clear_grad(t);
    }
    return at;
}

static void same_bits(const float *a, const float *b, int n, const char *what)
{
    for (int i = 0; i < n; i++)
        KN_CHECK(memcmp(&a[i], &b[i], sizeof *a) == 0, "%s: number %d is %.9g, should be %.9g",
                 what, i, b[i], a[i]);
}

KN_TEST(recompute, gradients_are_bit_equal)
{
    static float plain[ROOM], again[ROOM];
    OWNED_MODULE stack s;
    build(&s);
    int n = gradients(&s, plain);
    KN_CHECK(gradients(&s, again) == n);
    same_bits(plain, again, n, "plain, a second time");
    for (int i = 0; i < 3; i++)
        kn_recompute(&s.b[i], true);
    gradients(&s, again);
    same_bits(plain, again, n, "blocks");
    kn_recompute(&s.b[1].mlp, true);
    kn_recompute(&s, true);
    gradients(&s, again);
    same_bits(plain, again, n, "nested three deep");
    for (int i = 0; i < 3; i++)
        kn_recompute(&s.b[i], false);
    gradients(&s, again);
    same_bits(plain, again, n, "the whole, and one mlp inside");
    kn_train(&s, false);
    gradients(&s, again);
    KN_CHECK(memcmp(plain, again, sizeof(float)) != 0, "dropout was on all the time");
}

KN_TEST(recompute, keeps_less)
{
    int64_t held[2];
    OWNED_MODULE stack s;
    build(&s);
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 1, 1, KN_SHAPE(2, 16, 4));
    for (int on = 0; on < 2; on++) {
        for (int i = 0; i < 3; i++)
            kn_recompute(&s.b[i], on);
        IN_SCOPE;
        int64_t before = kn_ledger_read().live[KN_MEM_ACTIVATION];
        KN_CHECK(kn_call(&s, x) != NULL);
        held[on] = kn_ledger_read().live[KN_MEM_ACTIVATION] - before;
    }
    KN_CHECK(held[1] * 4 < held[0], "%lld bytes held, %lld without recompute", (long long)held[1],
             (long long)held[0]);
}

typedef struct nest {
    kn_module base, inner;
} nest;

/* Keeps its result, not its input. */
static kn_tensor *inner_forward(kn_module *self, kn_tensor *x)
{
    (void)self;
    return kn_tanh(kn_scale(x, 2));
}

static kn_tensor *outer_forward(kn_module *self, kn_tensor *x)
{
    for (int i = 0; i < 4; i++)
        x = kn_call(&((nest *)self)->inner, x);
    return x;
}

static kn_tensor *note_bytes(kn_tensor *g, void *arg)
{
    (void)g;
    *(int64_t *)arg = kn_ledger_read().live[KN_MEM_ACTIVATION];
    return NULL;
}

/* After the replay of an inner call, what the outer one made as its input isn't needed any more. */
KN_TEST(recompute, inner_calls_keep_no_inputs)
{
    int64_t held[2];
    for (int nested = 0; nested < 2; nested++) {
        OWNED_MODULE nest m = { 0 };
        IN_SCOPE;
        KN_CHECK(kn_module_init(&m.base, outer_forward) && kn_recompute(&m, true));
        KN_CHECK(kn_module_init(&m.inner, inner_forward) && kn_recompute(&m.inner, nested) &&
                 kn_module_add(&m.base, "inner", &m.inner));
        kn_tensor *x = kn_require_grad(kn_ones(KN_F32, KN_CPU, KN_SHAPE(64)), true);
        kn_on_grad(x, note_bytes, &held[nested]);
        const int64_t before = kn_ledger_read().live[KN_MEM_ACTIVATION];
        KN_CHECK(kn_backward(sum_of(kn_call(&m, x)), .retain_graph = true));
        held[nested] -= before;
    }
    KN_CHECK(held[1] <= held[0], "%lld bytes, %lld in one call", (long long)held[1],
             (long long)held[0]);
}

/* ---- several inputs and results -------------------------------------------------------------- */

typedef struct pair {
    kn_module base;
    kn_linear l;
} pair;

/* (a, b) -> (a, scale * l(a) * b, a): the first and the last result are the input itself. The
 * product keeps what was scaled. */
static kn_values pair_forward(kn_module *self, kn_values in, const void *arg)
{
    kn_tensor *y = kn_scale(kn_call(&((pair *)self)->l, in.v[0]), *(const double *)arg);
    return (kn_values){ 3, { in.v[0], kn_mul(y, in.v[1]), in.v[0] } };
}

static void run_pair(pair *p, double grad[3][9])
{
    double three = 3;
    kn_tensor *a = kn_require_grad(kn_randn(KN_F64, KN_CPU, 1, 1, KN_SHAPE(3, 3)), true);
    kn_tensor *b = kn_require_grad(kn_randn(KN_F64, KN_CPU, 1, 2, KN_SHAPE(3, 3)), true);
    kn_tensor *w = kn_module_param(p, "l.weight");
    kn_tensor *sum = kn_add(a, a);
    kn_values out = kn_call_n(p, (kn_values){ 2, { sum, b } }, &three, sizeof three);
    three = 1e9; /* the argument was copied */
    KN_CHECK(out.n == 3);
    kn_tensor *y = kn_add(kn_mul(out.v[0], out.v[1]), kn_exp(out.v[2]));
    KN_CHECK(kn_backward(sum_of(kn_mul(y, y))));
    memcpy(grad[0], kn_data(kn_grad(a)), sizeof grad[0]);
    memcpy(grad[1], kn_data(kn_grad(b)), sizeof grad[1]);
    memcpy(grad[2], kn_data(kn_grad(w)), sizeof grad[2]);
    kn_clear_grad(w);
    kn_clear_grad(kn_module_param(p, "l.bias"));
}

KN_TEST(recompute, inputs_passed_through)
{
    OWNED_MODULE pair p;
    double plain[3][9], again[3][9];
    kn_module_init_n(&p.base, pair_forward);
    kn_linear_init(&p.l, &p.base, "l", 3, 3, .dtype = KN_F64);
    kn_materialize(&p, KN_CPU, 3);
    run_pair(&p, plain);
    kn_recompute(&p, true);
    run_pair(&p, again);
    for (int i = 0; i < 27; i++)
        KN_CHECK(fabs(plain[i / 9][i % 9] - again[i / 9][i % 9]) <=
                     1e-12 * (1 + fabs(plain[i / 9][i % 9])),
                 "gradient %d of tensor %d is %g, should be %g", i % 9, i / 9, again[i / 9][i % 9],
                 plain[i / 9][i % 9]);
}

/* ---- a parameter of a recomputed and a plain module ------------------------------------------ */

typedef struct tied {
    kn_module base;
    kn_linear a, b;
} tied;

static kn_tensor *tied_linear_forward(kn_module *self, kn_tensor *x)
{
    return kn_linear(x, kn_module_param(self, "weight"), NULL, false);
}
static kn_tensor *tied_forward(kn_module *self, kn_tensor *x)
{
    tied *t = (tied *)self;
    return kn_call(&t->a, kn_tanh(kn_call(&t->b, kn_tanh(kn_call(&t->a, x)))));
}

static int completed;
static void count_completions(kn_tensor *leaf, void *arg)
{
    (void)leaf;
    (void)arg;
    completed++;
}

KN_TEST(recompute, a_parameter_shared_with_a_plain_module)
{
    OWNED_MODULE tied t;
    float g[3][9];
    kn_module_init(&t.base, tied_forward);
    kn_linear_init(&t.a, &t.base, "a", 3, 3, .no_bias = true);
    kn_module_init(&t.b.base, tied_linear_forward);
    kn_module_add(&t.base, "b", &t.b.base);
    kn_tensor *w = kn_module_param(&t.a, "weight");
    KN_CHECK(kn_share_parameter(&t.b, "weight", w) && kn_materialize(&t, KN_CPU, 3));
    const kn_param *list;
    KN_CHECK(kn_params(&t, &list) == 1 && kn_param_count(&t) == 9);
    kn_on_accumulated(w, count_completions, NULL);
    for (int run = 0; run < 3; run++) {
        kn_recompute(&t.a, run == 1);
        kn_recompute(&t.b, run == 2);
        completed = 0;
        kn_tensor *y = kn_call(&t, kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, 3)));
        KN_CHECK(kn_backward(sum_of(y)));
        KN_CHECK(completed == 1, "run %d: the gradient was complete %d times", run, completed);
        KN_CHECK(kn_to_host(kn_grad(w), g[run], sizeof g[run]));
        KN_CHECK(kn_grad_scale(&t) == 1, "one round a backward");
        kn_clear_grad(w);
    }
    same_bits(g[0], g[1], 9, "the owner recomputed");
    same_bits(g[0], g[2], 9, "the sharer recomputed");
}

/* The replay would compute with other values than the forward did, and its gradients be wrong
 * without a word. */
/* A parameter that was frozen or not when forward ran is so in its replay. */
KN_TEST(recompute, what_is_frozen_between_forward_and_backward_is_as_without)
{
    float grad[2][2][4];
    for (int again = 0; again < 2; again++)
        for (int frozen = 0; frozen < 2; frozen++) {
            OWNED_MODULE kn_linear fc = { 0 };
            IN_SCOPE;
            KN_CHECK(kn_linear_init(&fc, NULL, NULL, 2, 2) && kn_materialize(&fc, KN_CPU, 5));
            KN_CHECK(kn_recompute(&fc, again));
            kn_tensor *w = kn_module_param(&fc, "weight");
            kn_tensor *x = kn_require_grad(kn_ones(KN_F32, KN_CPU, KN_SHAPE(3, 2)), true);
            kn_freeze(&fc, frozen);
            kn_tensor *y = sum_of(kn_call(&fc, x));
            kn_freeze(&fc, !frozen);
            KN_CHECK(kn_backward(y));
            kn_tensor *g = kn_grad(w);
            KN_CHECK((g == NULL) == frozen && kn_requires_grad(w) == frozen);
            KN_CHECK(frozen || kn_to_host(g, grad[again][frozen], sizeof grad[0][0]));
        }
    KN_CHECK(memcmp(grad[0][0], grad[1][0], sizeof grad[0][0]) == 0);
}

KN_TEST(recompute, a_parameter_written_before_the_replay_is_named)
{
    static const char *const written[] = { "weight", "bias" };
    for (int frozen = 0; frozen < 2; frozen++)
        for (int i = 0; i < 2; i++) {
            OWNED_MODULE kn_linear l;
            char text[64];
            KN_CHECK(kn_linear_init(&l, NULL, "", 3, 3) && kn_recompute(&l, true));
            kn_tensor *w = kn_module_param(&l, written[i]);
            KN_CHECK(kn_require_grad(w, !frozen));
            IN_SCOPE;
            kn_tensor *y = kn_call(&l, kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, 3)));
            bool mode = kn_set_grad_mode(false);
            KN_CHECK(kn_fill_(w, 2));
            kn_set_grad_mode(mode);
            KN_CHECK(!kn_backward(sum_of(y)));
            snprintf(text, sizeof text, "'%s' was written in place", kn_name(w));
            KN_CHECK_ERROR(text);
        }
}
