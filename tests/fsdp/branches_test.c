/* tests/fsdp/branches_test.c: ranks whose backwards reach different units: branches with and
 * without parameters of the units around them, a chain of which only a part reaches the loss,
 * frozen units, recompute inside and around units, rounds without sync. Each rank's data select
 * other parts. This file writes the programs; random.h trains them and compares their bits with one
 * process that adds in the same grouping. */
#include "kernels/context.h"
#include "tests/fsdp/net.h"
#include "tests/fsdp/random.h"
#include <stdarg.h>

enum { PARTS = 5 };

/* The units: two in a container (m2, a unit itself or not), one alone, a chain of two in a
 * container. */
static const int part_node[PARTS] = { 3, 4, 6, 8, 9 };

typedef struct setting {
    int ranks, strategy, prefetch;
    bool pair_is_unit, workers;
    unsigned frozen; /* bit i: part i is frozen */
    /* Bit 0: the pair, 1: each of its units, 2: the chain's units, 3: the root. */
    unsigned recompute;
    bool unsynced; /* the first round of a step */
    bool twice;    /* both rounds' forwards come before their backwards, the last one's first */
    int data;      /* selects the parts that each micro-batch uses: 0 to 7 */
} setting;

/* Adds words to a program's text. */
__attribute__((format(printf, 2, 3))) static void say(char text[1024], const char *format, ...)
{
    va_list args;
    size_t used = strlen(text);
    va_start(args, format);
    vsnprintf(text + used, 1024 - used, format, args);
    va_end(args);
}

static void check(const setting *s)
{
    static const char *const strategy[] = { "full_shard", "shard_grad_op", "no_shard" };
    static const char *const prefetch[] = { "pre", "post", "none" };
    char text[1024] = "m1.kind=linear m2.kind=residual m2.when=loss_micro m3.kind=mlp m3.in=m2 "
                      "m4.kind=mlp m4.in=m2 m5.kind=linear m5.in=m2 m6.kind=mlp m7.kind=seq "
                      "m7.when=loss_micro m8.kind=mlp m8.in=m7 m9.kind=mlp m9.in=m7";
    say(text, " ranks=%d strategy=%s backward_prefetch=%s wrap=policy uses=%d%s%s%s", s->ranks,
        strategy[s->strategy], prefetch[s->prefetch], s->data % 8, s->workers ? " workers=yes" : "",
        s->unsynced ? " no_sync=1" : "", s->twice ? " pairs=swapped" : "");
    say(text, "%s%s%s", s->pair_is_unit ? " m2.unit=yes" : "",
        s->recompute & 1 ? " m2.recompute=yes" : "", s->recompute & 8 ? " m0.recompute=yes" : "");
    for (int i = 0; i < PARTS; i++) {
        int m = part_node[i];
        unsigned again = i < 2 ? s->recompute & 2 : i > 2 ? s->recompute & 4 : 0;
        say(text, " m%d.unit=yes", m);
        if (m != 8) /* the chain's first is used wherever the chain is */
            say(text, " m%d.when=loss_micro", m);
        if (s->frozen >> i & 1)
            say(text, " m%d.frozen=yes", m);
        if (again)
            say(text, " m%d.recompute=yes", m);
    }
    random_check_program(text);
}

KN_TEST(branches, what_was_held_back_on_some_ranks_is_reduced_on_all)
{
    for (int ranks = 1; ranks <= 3; ranks++)
        for (int d = 0; d < 4; d++)
            check(&(setting){ .ranks = ranks, .unsynced = true, .data = d });
}

/* A unit runs on every rank, but on some ranks its parameters are unused (inactive experts). */
KN_TEST(branches, all_parameters_without_gradient_on_some_ranks)
{
    static const char *const how[] = { "strategy=full_shard", "layout=per_param", "layout=ragged",
                                       "strategy=shard_grad_op", "strategy=no_shard" };
    for (int ranks = 2; ranks <= 4; ranks++)
        for (int i = 0; i < 5; i++) {
            char text[256];
            snprintf(text, sizeof text,
                     "ranks=%d rounds=1 %s wrap=seq m1.kind=linear m2.kind=residual m3.kind=mlp "
                     "m3.in=m2 m3.when=run_micro uses=%d",
                     ranks, how[i], i);
            random_check_program(text);
        }
}

/* a -> part -> v -> part, where the second call of part alone runs part's unit t. */
typedef struct partly {
    kn_module base, part;
    kn_linear a, v, t;
    bool detaches; /* on this rank nothing reaches back behind the second call */
    bool reads;    /* the first call reads t's weight, without a call of t */
} partly;

static kn_tensor *part_forward(kn_module *self, kn_tensor *x)
{
    const partly *m = (partly *)((char *)self - offsetof(partly, part));
    return m->reads ? kn_linear(x, kn_module_param(&m->t, "weight"), NULL, false) : kn_scale(x, 2);
}

static kn_tensor *part_with_unit(kn_module *self, kn_tensor *x)
{
    return kn_call(&((partly *)((char *)self - offsetof(partly, part)))->t, x);
}

static kn_tensor *partly_forward(kn_module *self, kn_tensor *x)
{
    partly *m = (partly *)self;
    x = kn_call(&m->v, kn_call(&m->part, kn_call(&m->a, x)));
    return kn_call_method(&m->part, part_with_unit, m->detaches ? kn_detach(x) : x);
}

typedef struct partly_setting {
    int strategy, prefetch;
    bool reads;
} partly_setting;

static bool partly_step(partly *m, kn_comm *world, const partly_setting *s, bool recompute)
{
    memset(m, 0, sizeof *m);
    bool ok = kn_module_init(&m->base, partly_forward) &&
              kn_linear_init(&m->a, &m->base, "a", 4, 4, .device = KN_META) &&
              kn_linear_init(&m->v, &m->base, "v", 4, 4, .device = KN_META) &&
              kn_module_init(&m->part, part_forward) && kn_module_add(&m->base, "part", &m->part) &&
              kn_linear_init(&m->t, &m->part, "t", 4, 4, .device = KN_META) &&
              kn_recompute(&m->part, recompute) &&
              kn_fsdp_wrap(m, world, .wrap_class = "linear", .strategy = s->strategy,
                           .backward_prefetch = s->prefetch, .seed = NET_SEED);
    m->reads = s->reads;
    m->detaches = !s->reads && kn_rank(world) % 2 == 1;
    OWNED_OPTIM kn_optim *o = kn_sgd(m, .lr = 0.5);
    for (int step = 0; step < 2 && ok; step++) {
        IN_SCOPE;
        kn_tensor *x =
            kn_randn(KN_F32, KN_CPU, 5, (uint64_t)(step * 4 + kn_rank(world)), KN_SHAPE(2, 4));
        ok = kn_backward(sum_of(kn_call(m, x))) && kn_step(o);
    }
    return ok;
}

static void partly_equal(kn_comm *world, void *arg)
{
    partly m[2];
    const kn_param *p[2];
    KN_CHECK(partly_step(&m[0], world, arg, false));
    KN_CHECK(partly_step(&m[1], world, arg, true));
    int params = kn_params(&m[0], &p[0]);
    KN_CHECK(params == 6 && kn_params(&m[1], &p[1]) == params);
    for (int i = 0; i < params; i++)
        KN_CHECK(same_bytes(p[0][i].master, p[1][i].master), "%s", p[0][i].name);
    kn_module_free(&m[0]);
    kn_module_free(&m[1]);
}

/* The unit's turn doesn't wait for calls that did not run it, on the ranks that reach those. */
KN_TEST(branches, a_unit_in_one_of_two_recomputed_calls)
{
    for (int ranks = 1; ranks <= 4; ranks += ranks)
        for (int i = 0; i < 8; i++) {
            partly_setting s = { .strategy = i < 6 ? i / 2 : KN_NO_SHARD,
                                 .prefetch = i % 2 ? KN_PREFETCH_POST : KN_PREFETCH_PRE,
                                 .reads = i >= 6 };
            KN_CHECK(spawn_threads(ranks, partly_equal, &s) == 0,
                     "%d ranks, strategy %d, prefetch %d%s", ranks, s.strategy, s.prefetch,
                     s.reads ? ", t is read without a call" : "");
        }
}

KN_TEST(branches, random_programs)
{
    for (uint64_t i = 0; i < 120; i += (uint64_t)kn_one_in(7)) {
        uint64_t h = kn_hash64(i, 0xb7a4c4e5);
        check(&(setting){ .ranks = 1 + (int)(h % 4),
                          .strategy = (int)(h >> 4 & 255) % 3,
                          .prefetch = (int)(h >> 8 & 255) % 3,
                          .pair_is_unit = h >> 12 & 1,
                          .workers = h >> 13 & 1,
                          .frozen = (h >> 14 & 1) ? (unsigned)(h >> 16 & 31) : 0,
                          .recompute = (h >> 24 & 1) ? (unsigned)(h >> 28 & 15) : 0,
                          .unsynced = h >> 32 & 1,
                          .twice = (h >> 36 & 255) % 3 == 0,
                          .data = (int)(h >> 44 & 7) });
    }
}
