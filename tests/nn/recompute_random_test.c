/* tests/nn/recompute_random_test.c: random programs with recompute beside the same ones without:
 * modules in a row and inside of each other, with draws, captured tensors, parameters of others,
 * buffers that they move, hooks and side results; between forward and backward steps, seeds, modes,
 * frozen parts, writes, edits of the tree and other forwards. All numbers agree to the last bit; a
 * backward with recompute may refuse where the program wrote or edited.
 * KNAP_RANDOM="first count" runs more programs. */
#include "nn/layers.h"
#include "nn/nn_internal.h"
#include "tests/owned.h"

enum { ROOM = 16384, WIDE = 3, PARTS = 4, LOSSES = 3 };

/* The forward of a part. */
enum {
    DROPS = 1,
    CAPTURES = 2,
    READS_OTHER = 4,
    MOVES = 8,
    NORMS = 16,
    ASKS_MODE = 32,
    ASKS_STEP = 64,
    PASSES = 128,
    HOOKS = 256,
    SIDE = 512,
    COUNTS = 1024,
    EVALUATES = 2048,
    RECIPES = 4096
};

typedef struct part part;
struct part {
    kn_module base;
    kn_linear fc;
    kn_batch_norm bn;
    kn_tensor *buffer;
    part *inner; /* called in the middle, or NULL */
    unsigned recipe;
    bool again; /* in the run with recompute */
};
typedef struct net {
    kn_module base;
    part p[PARTS];
    kn_linear spare[4];
    int spares;
    kn_tensor *captured;
    kn_tensor *side[PARTS]; /* of the newest forward, kept */
    int forwards, replays;
} net;

typedef struct run {
    float number[ROOM];
    int numbers; /* where an error stands, up to the act that made it */
    char error[512];
    int forwards;
    bool touched; /* something was written or edited while a backward waited */
} run;

static net n;
static run *now;
static uint64_t state;

static unsigned roll(unsigned sides)
{
    state = kn_hash64(state, 1);
    return (unsigned)(state >> 33) % sides;
}

static bool likely(unsigned percent)
{
    return roll(100) < percent;
}

static void note_value(double v)
{
    if (now->numbers < ROOM)
        now->number[now->numbers++] = (float)v;
}

static void note(const kn_tensor *t)
{
    float value[64];
    const int64_t count = t ? kn_numel(t) : 0;
    note_value((double)count);
    if (count == 0 || count > 64 || !kn_to_host(t, value, (size_t)count * sizeof *value))
        return;
    for (int64_t i = 0; i < count; i++)
        note_value(value[i]);
}

static kn_tensor *noted(kn_tensor *g, void *arg)
{
    (void)arg;
    note(g);
    return NULL;
}

/* ---- the modules ----------------------------------------------------------------------------- */

static kn_tensor *moved(part *p, kn_tensor *y)
{
    kn_tensor *before = kn_scale(p->buffer, 1);
    const bool mode = kn_set_grad_mode(false);
    if (kn_training(p))
        kn_lerp_(p->buffer, kn_mean(y, 1, (int64_t[]){ 0 }, false), 0.3);
    kn_set_grad_mode(mode);
    return kn_add(kn_mul(y, before), kn_scale(p->buffer, 0.5));
}

static void keep_side(int i, kn_tensor *y)
{
    kn_tensor_free(n.side[i]);
    n.side[i] = y ? kn_keep(kn_scale(y, 2)) : NULL;
}

static kn_tensor *part_forward(kn_module *self, kn_tensor *x)
{
    part *p = (part *)self;
    const unsigned does = p->recipe;
    kn_tensor *y = kn_tanh(kn_call(&p->fc, x));
    if (p->inner && kn_ok())
        y = kn_call(p->inner, y);
    if (does & EVALUATES && kn_ok()) {
        const bool mode = kn_set_grad_mode(false);
        kn_tensor *aside = kn_dropout(kn_call(&p->fc, x), 0.5);
        kn_set_grad_mode(mode);
        y = kn_add(y, aside);
    }
    y = does & NORMS ? kn_call(&p->bn, y) : y;
    y = does & DROPS ? kn_dropout(y, 0.5) : y;
    y = does & CAPTURES ? kn_mul(y, kn_exp(n.captured)) : y;
    if (does & READS_OTHER)
        y = kn_linear(y, kn_module_param(&n.p[(p - n.p + 1) % PARTS].fc, "weight"), NULL, false);
    y = does & MOVES ? moved(p, y) : y;
    y = does & ASKS_MODE ? kn_scale(y, kn_training(p) ? 1.5 : 0.5) : y;
    y = does & ASKS_STEP ? kn_scale(y, 1 + 0.1 * (double)kn_get_step()) : y;
    if (does & HOOKS && kn_requires_grad(y))
        kn_on_grad(y, noted, NULL);
    if (does & SIDE)
        keep_side((int)(p - n.p), y);
    if (does & COUNTS)
        *(kn_recomputing() ? &n.replays : &n.forwards) += 1;
    return does & PASSES ? kn_add(x, y) : y;
}

static kn_tensor *net_forward(kn_module *self, kn_tensor *x)
{
    (void)self;
    for (int i = 0; i < PARTS; i++)
        if (n.p[i].base.impl->parent == n.base.impl && kn_ok())
            x = kn_call(&n.p[i], x);
    return x;
}

static kn_tensor *leaf(uint64_t stream)
{
    return kn_require_grad(kn_randn(KN_F32, KN_CPU, 5, stream, KN_SHAPE(2, WIDE)), true);
}

/* Part i is in the net or in one of the parts before it. */
static bool build_part(int i, bool again)
{
    part *p = &n.p[i];
    char name[] = { 'p', (char)('0' + i), 0 };
    kn_module *parent = &n.base;
    p->recipe = roll(RECIPES) & roll(RECIPES);
    p->again = likely(60);
    for (int k = 0; k < i; k++)
        if (!n.p[k].inner && likely(30) && parent == &n.base) {
            n.p[k].inner = p;
            parent = &n.p[k].base;
        }
    const kn_initializer ones = KN_ONES_INIT;
    return kn_module_init(&p->base, part_forward) && kn_module_add(parent, name, &p->base) &&
           kn_linear_init(&p->fc, &p->base, "fc", WIDE, WIDE) &&
           kn_batch_norm_init(&p->bn, &p->base, "bn", WIDE) &&
           (p->buffer = kn_declare_buffer(p, "b", KN_F32, KN_CPU, ones, KN_SHAPE(WIDE))) &&
           kn_recompute(p, again && p->again);
}

static bool build(bool again)
{
    n = (net){ 0 };
    kn_seed(3);
    kn_set_step(0);
    const bool whole = likely(20);
    bool ok = kn_module_init(&n.base, net_forward);
    for (int i = 0; i < PARTS && ok; i++)
        ok = build_part(i, again);
    kn_recompute(&n, again && whole);
    kn_tensor *from = leaf(77);
    n.captured = kn_keep(likely(15) ? kn_tanh(from) : from);
    return ok && kn_materialize(&n, KN_CPU, 1 + roll(1000));
}

/* ---- acts ------------------------------------------------------------------------------------ */

typedef struct waiting {
    kn_tensor *loss, *x;
    bool ran; /* a backward has come, which kept the graph */
} waiting;

static void note_grads(const kn_tensor *x)
{
    const kn_param *p;
    const int count = kn_ok() ? kn_params(&n, &p) : 0;
    for (int i = 0; i < count; i++)
        note(kn_grad(p[i].tensor));
    note(kn_grad(x));
    note_value(n.forwards);
}

static void forward(waiting *w, uint64_t stream)
{
    now->touched |= now->forwards++ > 0; /* buffers move */
    kn_tensor *x = leaf(stream), *y = kn_call(&n, likely(70) ? x : kn_detach(x));
    kn_tensor *loss = kn_ok() ? sum_of(kn_mul(y, y)) : NULL;
    for (int i = 0; i < PARTS && loss; i++)
        if (n.side[i]) {
            loss = kn_add(loss, mean_of(n.side[i]));
            keep_side(i, NULL);
        }
    *w = (waiting){ loss, x, false };
    note(loss);
}

static void backward(waiting *w, bool retain)
{
    if (!kn_requires_grad(w->loss))
        retain = false;
    else
        kn_backward(w->loss, .retain_graph = retain);
    note_grads(w->x);
    *w = retain ? *w : (waiting){ 0 };
}

static void gradient(const waiting *w)
{
    kn_tensor *of = kn_module_param(&n.p[roll(PARTS)].fc, "weight"), *g = NULL;
    if (!kn_requires_grad(w->loss) || !kn_requires_grad(of))
        return;
    kn_grad_of(w->loss, &of, 1, &g, .retain_graph = true);
    note(g);
}

/* As an optimizer does; half of the time it is one of something else. */
static void step(void)
{
    const kn_param *p;
    int64_t seen = kn_steps_seen();
    const bool own = likely(10), mode = kn_set_grad_mode(false);
    const int count = own ? kn_params(&n, &p) : 0;
    for (int i = 0; i < count; i++)
        if (kn_grad(p[i].tensor)) {
            kn_add_(p[i].tensor, kn_grad(p[i].tensor), -0.01);
            kn_clear_grad(p[i].tensor);
        }
    kn_set_grad_mode(mode);
    kn_step_taken(&seen);
    now->touched |= own;
}

static void edit(void)
{
    kn_linear *l = n.spares < 4 ? &n.spare[n.spares++] : NULL;
    char path[] = { 'f', 'c', 0 };
    if (!l)
        return;
    part *p = &n.p[roll(PARTS)];
    now->touched = true;
    if (likely(50)) {
        char name[] = { 's', (char)('0' + n.spares), 0 };
        kn_linear_init(l, &p->base, name, 2, 2);
    } else {
        kn_linear_init(l, NULL, "", WIDE, WIDE);
        kn_module_replace(p, path, l);
    }
    kn_materialize(&n, KN_CPU, 9);
}

static void evaluate(void)
{
    const bool mode = kn_set_grad_mode(false);
    note(kn_call(&n, leaf(50)));
    kn_set_grad_mode(mode);
    for (int i = 0; i < PARTS; i++)
        keep_side(i, NULL);
    now->touched = true; /* buffers moved */
}

static void act(waiting *w, bool again)
{
    const unsigned kind = roll(20), at = roll(LOSSES), k = roll(PARTS);
    const bool on = likely(50);
    if (kind < 5 && !w[at].loss)
        forward(&w[at], 100 + roll(100));
    else if (kind < 9 && w[at].loss)
        backward(&w[at], on);
    else if (kind == 9 && w[at].loss)
        gradient(&w[at]);
    else if (kind == 10)
        step();
    else if (kind == 11)
        kn_seed(roll(5));
    else if (kind == 12)
        kn_set_step(roll(5));
    else if (kind == 13)
        kn_train(&n.p[k], on);
    else if (kind == 14)
        kn_freeze(&n.p[k], on);
    else if (kind == 15 && likely(50))
        kn_recompute(&n.p[k], again && on);
    else if (kind == 16 && likely(15)) {
        kn_fill_(n.p[k].buffer, 0.75);
        now->touched = true;
    } else if (kind == 17 && likely(30))
        edit();
    else if (kind == 18)
        evaluate();
    else if (kind == 19)
        note(n.p[k].buffer);
}

static void program(uint64_t seed, bool again, run *r)
{
    waiting w[LOSSES] = { { 0 } };
    state = seed;
    now = r;
    r->numbers = r->forwards = 0;
    r->touched = false;
    const kn_scope scope = kn_scope_begin();
    const unsigned acts = build(again) ? 6 + roll(14) : 0;
    forward(&w[0], 99);
    for (unsigned i = 0; i < acts + LOSSES && kn_ok(); i++) {
        const int numbers = r->numbers;
        if (i < acts)
            act(w, again);
        else if (w[i - acts].loss)
            backward(&w[i - acts], false);
        r->numbers = kn_ok() ? r->numbers : numbers;
    }
    for (int i = 0; i < PARTS && kn_ok(); i++)
        note(n.p[i].buffer);
    snprintf(r->error, sizeof r->error, "%s", kn_ok() ? "" : kn_error());
    kn_clear_error();
    for (int i = 0; i < PARTS; i++)
        keep_side(i, NULL);
    kn_tensor_free(n.captured);
    kn_scope_end(scope);
    kn_module_free(&n);
}

/* ---- comparing ------------------------------------------------------------------------------- */

typedef struct tally {
    int programs, refused, plain_refused, wrong;
} tally;

static bool may_refuse(const run *r)
{
    return r->touched && (strstr(r->error, "written in place") || strstr(r->error, "changed"));
}

static void compare(uint64_t seed, tally *t)
{
    static run plain, again;
    program(seed, false, &plain);
    program(seed, true, &again);
    const bool stopped = *plain.error || *again.error;
    const int least = plain.numbers < again.numbers ? plain.numbers : again.numbers;
    int k = 0;
    while (k < least && memcmp(&plain.number[k], &again.number[k], sizeof(float)) == 0)
        k++;
    const bool same = (k == plain.numbers && k == again.numbers) || (stopped && k == least);
    const bool allowed = *plain.error ? *again.error : !*again.error || may_refuse(&again);
    t->programs++;
    t->plain_refused += *plain.error != 0;
    t->refused += *again.error && !*plain.error;
    if (same && allowed)
        return;
    t->wrong++;
    fprintf(stderr,
            "seed %llu: number %d of %d and %d is %.9g, %.9g without recompute; errors '%s' and "
            "'%s' without\n",
            (unsigned long long)seed, k, again.numbers, plain.numbers,
            k < again.numbers ? (double)again.number[k] : 0,
            k < plain.numbers ? (double)plain.number[k] : 0, again.error, plain.error);
}

KN_TEST(recompute_random, programs)
{
    const char *more = getenv("KNAP_RANDOM");
    unsigned long long first = 1, count = 400;
    if (more)
        KN_CHECK(sscanf(more, "%llu %llu", &first, &count) == 2, "KNAP_RANDOM=\"first count\"");
    tally t = { 0 };
    for (uint64_t seed = first; seed < first + count && t.wrong < 10; seed++)
        compare(seed, &t);
    fprintf(stderr, "%d programs from seed %llu: %d refused with recompute alone, %d always\n",
            t.programs, first, t.refused, t.plain_refused);
    KN_CHECK(t.wrong == 0, "%d programs differ", t.wrong);
    KN_CHECK(t.refused * 4 < t.programs, "most programs are refused");
}
