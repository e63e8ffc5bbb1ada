/* tests/fsdp/call_test.c: ways to call a unit other than by its forward inside the root's:
 * directly, as an outermost call of its own, and by methods. */
#include "tests/fsdp/random.h"
#include "tests/fsdp/two.h"

/* The mean square of the layer's result for micro-batch `micro`; scoped. */
static kn_tensor *part_loss(kn_linear *part, int64_t in, int micro)
{
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 6, (uint64_t)micro, KN_SHAPE(2, in));
    kn_tensor *y = kn_call(part, x);
    return mean_square(y);
}

/* A forward alone, with an unused tape or without. */
static bool part_forward(kn_linear *part, int64_t in, bool grad, double *loss)
{
    IN_SCOPE;
    bool mode = kn_set_grad_mode(grad);
    kn_tensor *y = part_loss(part, in, 7);
    *loss = y ? kn_item(y) : NAN;
    kn_set_grad_mode(mode);
    return kn_ok();
}

static bool part_backward(kn_linear *part, int64_t in, int micro)
{
    IN_SCOPE;
    return kn_backward(part_loss(part, in, micro));
}

typedef struct heard {
    char line[512];
} heard;

static void hear(const kn_fsdp_event *e, void *arg)
{
    heard *h = arg;
    size_t n = strlen(h->line);
    snprintf(h->line + n, sizeof h->line - n, "%s%s %s", n ? ", " : "", kn_fsdp_event_name(e->kind),
             e->unit);
}

RANK_TEST(call, a_nested_unit_moves_nothing_else, .threads = "2")
{
    double loss;
    heard h = { "" };
    TWO_WRAPPED(m, world, .wrap_class = "linear", .forward_prefetch = true);
    KN_CHECK(two_backward(&m, 0) && kn_fsdp_on_event(&m, hear, &h));
    KN_CHECK(part_forward(&m.a, 4, false, &loss));
    KN_CHECK(strcmp(h.line, "gather a, gathered a, release a") == 0, "%s", h.line);
    h.line[0] = 0;
    KN_CHECK(part_backward(&m.a, 4, 1));
    KN_CHECK(strcmp(h.line, "gather a, gathered a, release a, gather a, gathered a, release a, "
                            "reduce a, reduced a") == 0,
             "%s", h.line);
    h.line[0] = 0;
    kn_set_grad_mode(false);
    KN_CHECK(two_evaluate(&m, &loss));
    kn_set_grad_mode(true);
    KN_CHECK(strstr(h.line, "gather a, gathered a, gather b") == h.line,
             "the root's order is known as before: %s", h.line);
    KN_CHECK(kn_ledger_read().live[KN_MEM_GATHERED] == 0 &&
             kn_ledger_read().live[KN_MEM_UNREDUCED] == 0);
}

/* Another use of the tree ends the call of a group of which one module ran. */
RANK_TEST(call, a_part_of_a_group_then_something_else, .threads = "124")
{
    double loss;
    TWO(m);
    kn_module *group[] = { &m.a.base, &m.b.base };
    KN_CHECK(kn_fsdp_wrap_group(group, 2, world) && kn_fsdp_wrap(&m, world));
    for (int grad = 0; grad < 2; grad++) {
        KN_CHECK(part_forward(&m.a, 4, grad, &loss));
        kn_summon_scope s = kn_summon(&m.b);
        KN_CHECK(s.s && kn_summon_end(s));
        KN_CHECK(part_forward(&m.a, 4, grad, &loss) && kn_fsdp_reshard(&m.a));
        KN_CHECK(kn_ledger_read().live[KN_MEM_GATHERED] == 0);
        KN_CHECK(two_backward(&m, grad));
    }
}

/* A forward that fails, or whose input is an error, leaves nothing behind. */
KN_TEST(call, a_nested_unit_that_fails)
{
    double loss;
    TWO_WRAPPED(m, NULL, .wrap_class = "linear");
    for (int i = 0; i < 2; i++) {
        kn_scope scope = kn_scope_begin();
        kn_device d = i ? KN_META : KN_CPU;
        KN_CHECK(!kn_call(&m.a, kn_ones(KN_F32, d, KN_SHAPE(2, i ? 4 : 3))));
        KN_CHECK(error_has(i ? "is on meta" : "linear", "a"));
        kn_summon_scope s = kn_summon(&m.a);
        REFUSED(kn_call(&m.a, kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, 4))), "'a'", "summoned");
        KN_CHECK(kn_summon_end(s));
        kn_scope_end(scope);
        KN_CHECK(two_backward(&m, i) && part_forward(&m.a, 4, true, &loss) &&
                 part_backward(&m.a, 4, i));
    }
}

/* ---- methods --------------------------------------------------------------------------------- */

static _Thread_local kn_dtype seen; /* by the method, at its begin */
static _Thread_local int encoded;   /* how often the method ran */

static kn_tensor *encode(kn_module *self, kn_tensor *x)
{
    two *m = (two *)self;
    seen = x ? kn_dtype_of(x) : KN_DTYPE_DEFAULT;
    encoded++;
    return kn_call(&m->b, kn_relu(kn_call(&m->a, x)));
}

/* (x, scale in arg) -> (encoded, x) */
static kn_values encode_n(kn_module *self, kn_values in, const void *arg)
{
    kn_tensor *y = encode(self, kn_scale(in.v[0], *(const double *)arg));
    return (kn_values){ 2, { y, in.v[0] } };
}

typedef struct method_setting {
    kn_fsdp_wrap_options o;
    bool recompute, several, nested; /* the module lies in a root, of which nothing else runs */
} method_setting;

static const method_setting methods[] = {
    { .o = { .wrap_class = "linear" } },
    { .o = { .wrap_class = "linear", .param_dtype = KN_BF16, .reduce_dtype = KN_F32 } },
    { .o = { .param_dtype = KN_BF16, .output_dtype = KN_F32 }, .recompute = true },
    { .o = { .wrap_class = "linear", .param_dtype = KN_F16, .cast_inputs = KN_CAST_ROOT },
      .several = true,
      .recompute = true },
    { .o = { .param_dtype = KN_BF16, .output_dtype = KN_F32, .strategy = KN_SHARD_GRAD_OP },
      .nested = true,
      .several = true },
    { .o = { .strategy = KN_FULL_SHARD }, .nested = true }, /* released after it */
};

typedef struct outer {
    kn_module base;
    two m;
} outer;

static kn_tensor *outer_forward(kn_module *self, kn_tensor *x)
{
    return kn_call(&((outer *)self)->m, x);
}

/* Whose forward is two's, or the method. */
static bool make_method(outer *n, kn_comm *world, const method_setting *s, kn_forward1 forward)
{
    kn_fsdp_wrap_options o = s->o;
    memset(n, 0, sizeof *n);
    o._size = sizeof o;
    o.seed = NET_SEED;
    bool ok = kn_module_init(&n->base, outer_forward) && kn_module_init(&n->m.base, forward) &&
              kn_linear_init(&n->m.a, &n->m.base, "a", 4, 5, .device = KN_META) &&
              kn_linear_init(&n->m.b, &n->m.base, "b", 5, 4, .device = KN_META) &&
              kn_module_add(&n->base, "m", &n->m.base) && kn_recompute(&n->m, s->recompute);
    if (ok && s->nested)
        ok = kn_fsdp_wrap_(&n->m, world, o);
    return ok && kn_fsdp_wrap_(s->nested ? (void *)n : (void *)&n->m, world, o);
}

/* The loss of a micro-batch, by the method or by a call of the forward. */
static kn_tensor *method_loss(outer *n, const method_setting *s, bool method, int micro)
{
    double twice = 2;
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 5, (uint64_t)micro, KN_SHAPE(2, 4)), *y;
    kn_require_grad(x, true);
    if (s->several && method)
        y = kn_call_method_n(&n->m, encode_n, (kn_values){ 1, { x } }, &twice, sizeof twice).v[0];
    else if (method)
        y = kn_call_method(&n->m, encode, x);
    else
        y = kn_call(&n->m, s->several ? kn_scale(x, 2) : x);
    twice = 1e9; /* the argument was copied */
    kn_dtype in = s->o.param_dtype ? s->o.param_dtype : KN_F32;
    kn_dtype out = s->o.output_dtype ? s->o.output_dtype : in;
    if (kn_ok() && (seen != in || kn_dtype_of(y) != out))
        kn_fail("it computes in %s and gives %s", kn_dtype_name(seen),
                kn_dtype_name(kn_dtype_of(y)));
    y = kn_cast(y, KN_F32);
    return mean_square(y);
}

static void backward_begins(kn_module_event *e, void *arg)
{
    (*(int *)arg)++;
}

static void hear_move(const kn_fsdp_event *e, void *arg)
{
    char *line = arg;
    size_t n = strlen(line);
    snprintf(line + n, 2048 - n, "%s %s, ", kn_fsdp_event_name(e->kind), e->unit);
}

/* A call by the method equals a call of a module whose forward is the method: its values, the
 * gathers and releases of units, and how often it runs. */
RANK_TEST(call, methods_are_cast_and_gathered_as_a_forward, .threads = "124", ROWS(methods))
{
    const method_setting *s = arg;
    outer n[2]; /* the second has the method as its forward */
    int begun = 0, ran[2];
    double loss[2];
    char moves[2][2048];
    const kn_param *p[2];
    KN_CHECK(make_method(&n[0], world, s, two_forward) && make_method(&n[1], world, s, encode));
    KN_CHECK(kn_module_hook(&n[0].m,
                            (kn_module_hooks){ .pre_backward = backward_begins, .arg = &begun }));
    kn_optim *o[2] = { kn_sgd(&n[0], .lr = 0.5), kn_sgd(&n[1], .lr = 0.5) };
    for (int step = 0; step < 2; step++)
        for (int k = 0; k < 2; k++) {
            IN_SCOPE;
            moves[k][0] = '\0';
            encoded = 0;
            KN_CHECK(kn_fsdp_on_event(&n[k], hear_move, moves[k]));
            kn_tensor *l = method_loss(&n[k], s, k == 0, step * 4 + kn_rank(world));
            loss[k] = l ? kn_item(l) : NAN;
            KN_CHECK(kn_backward(l) && kn_step(o[k]));
            ran[k] = encoded;
            KN_CHECK(ran[k] == 1 + s->recompute, "it ran %d times", ran[k]);
            KN_CHECK(k == 0 || strcmp(moves[0], moves[1]) == 0, "%s, not %s", moves[0], moves[1]);
            KN_CHECK(k == 0 || loss[0] == loss[1], "%g, not %g", loss[0], loss[1]);
        }
    KN_CHECK(begun >= 2, "hooks of backward ran %d times", begun);
    int params = kn_params(&n[1], &p[1]);
    KN_CHECK(params == 4 && kn_params(&n[0], &p[0]) == params);
    for (int i = 0; i < params; i++)
        KN_CHECK(same_bytes(p[0][i].master, p[1][i].master), "%s", p[0][i].name);
    kn_optim_free(o[0]);
    kn_optim_free(o[1]);
    kn_module_free(&n[0]);
    kn_module_free(&n[1]);
}

KN_TEST(call, a_method_that_is_missing_or_fails)
{
    IN_SCOPE;
    TWO_WRAPPED(m, NULL, .wrap_class = "linear");
    kn_tensor *x = kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, 4));
    REFUSED(kn_call_method(&m, NULL, x), "kn_call_method", "the method is NULL");
    KN_CHECK(kn_call_method_n(&m, NULL, (kn_values){ 1, { x } }, NULL, 0).n == 0 &&
             error_has("kn_call_method", "the method is NULL"));
    REFUSED(kn_call_method(&m, encode, kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, 3))), "linear", "a");
    KN_CHECK(kn_backward(sum_of(kn_call_method(&m, encode, x))));
}

KN_TEST(call, inputs_of_a_method_move_to_the_units_device)
{
    IN_SCOPE;
    TWO_WRAPPED(m, NULL, .device = KN_META);
    kn_tensor *y = kn_call_method(&m, encode, kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, 4)));
    KN_CHECK(y && kn_device_of(y) == KN_META && kn_backward(sum_of(y)));
}

/* ---- random programs ------------------------------------------------------------------------- */

/* Draws a program in which a unit is called directly; false if it has none. */
static bool draw(uint64_t seed, random_program *p)
{
    static const int wrap[] = { WRAP_HAND, WRAP_PARTS, WRAP_SEQ, WRAP_POLICY, WRAP_GROUPS };
    *p = random_draw(seed);
    p->option[O_WRAP] = wrap[seed % 5];
    for (int i = 0; i < RANDOM_EVENTS; i++)
        p->event[i].kind = EVENT_CALL + (int)(seed >> i & 1);
    p->event[RANDOM_EVENTS - 1].kind = EVENT_CALL_BACKWARD;
    random_settle(p);
    for (int i = 0; i < RANDOM_EVENTS; i++) {
        random_event *e = &p->event[i];
        for (int k = 0; k < RANDOM_NODES && e->node == 0; k++)
            if (random_runs_alone(p, (int)(seed + (uint64_t)k) % RANDOM_NODES))
                e->node = (int)(seed + (uint64_t)k) % RANDOM_NODES;
    }
    random_settle(p);
    return p->event[0].node > 0;
}

KN_TEST(call, random_programs)
{
    int found = 0;
    for (uint64_t seed = 1; found < 30 && seed < 200; seed++) {
        char text[4096];
        random_program p;
        if (!draw(seed, &p))
            continue;
        if (found++ % kn_one_in(5) == 0)
            random_check_program(random_text(&p, text, sizeof text));
    }
    KN_CHECK(found == 30, "%d programs", found);
}

/* ---- inputs that aren't given ---------------------------------------------------------------- */

static kn_values maybe_forward(kn_module *self, kn_values in, const void *arg)
{
    kn_tensor *y = kn_mul(in.v[0], kn_module_param(self, "w"));
    return KN_VALUES(in.v[1] ? kn_add(y, in.v[1]) : y);
}

/* A unit moves and casts those that are there. */
KN_TEST(call, inputs_may_be_missing)
{
    for (int again = 0; again < 2; again++) {
        OWNED_MODULE kn_module m;
        KN_CHECK(kn_module_init_n(&m, maybe_forward) &&
                 kn_parameter(&m, "w", KN_F32, KN_META, KN_ONES_INIT, 1, (int64_t[]){ 4 }) &&
                 kn_recompute(&m, again) &&
                 kn_fsdp_wrap(&m, NULL, .param_dtype = KN_BF16, .reduce_dtype = KN_F32));
        IN_SCOPE;
        kn_tensor *x = kn_full(KN_F32, KN_CPU, 2, KN_SHAPE(4));
        for (int missing = 0; missing < 2; missing++) {
            kn_values y = kn_call_n(&m, KN_VALUES(x, missing ? NULL : x), NULL, 0);
            KN_CHECK(y.n == 1 && kn_backward(sum_of(y.v[0])));
            KN_CHECK(kn_item(sum_of(y.v[0])) == (missing ? 8 : 16));
        }
        const kn_param *p;
        KN_CHECK(kn_params(&m, &p) == 1 && kn_item(sum_of(kn_param_grad(&p[0]))) == 16);
    }
}
