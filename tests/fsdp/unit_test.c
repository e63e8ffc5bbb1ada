/* tests/fsdp/unit_test.c: what may be a unit, and control flow through units, where feature_test.c
 * doesn't have it. */
#include "tests/fsdp/matrix.h"
#include "tests/fsdp/two.h"

/* Sibling trees, two of them with a group as their root, of which one member or both run. */
static bool groups_as_roots(matrix_net *n, kn_comm *world, const matrix_spec *s)
{
    for (int i = 0; i < 4; i += 2) {
        kn_module *pair[2] = { matrix_block(n, i), matrix_block(n, i + 1) };
        if (!kn_fsdp_wrap_group_(pair, 2, world, matrix_options(s)))
            return false;
    }
    return kn_fsdp_wrap_(&n->turn.embed, world, matrix_options(s)) &&
           kn_fsdp_wrap_(&n->turn.head, world, matrix_options(s));
}

KN_TEST(unit, a_root_group_of_which_a_part_runs)
{
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int turn = 0; turn <= 1 + TURN_TWICE; turn++)
            MATRIX_CHECK(.model = MATRIX_TURN, .ranks = ranks, .wrap = groups_as_roots,
                         .workers = turn == 1, .only_turn = turn);
}

/* The inner call's end must not release what the outer one still needs. */
KN_TEST(unit, module_called_inside_itself)
{
    for (int s = KN_FULL_SHARD; s <= KN_NO_SHARD; s++)
        for (int p = KN_PREFETCH_PRE; p <= KN_PREFETCH_NONE; p++)
            MATRIX_CHECK(.model = MATRIX_TURN, .only_turn = 1 + TURN_NESTED, .recompute = p % 2,
                         .o = { .strategy = s, .backward_prefetch = p, .forward_prefetch = true });
}

/* ---- one unit by itself ---------------------------------------------------------------------- */

/* A loss of a parameter that the user gathered: no module was called. What a backward that isn't
 * the last one brings it is held back as that of a call. */
RANK_TEST(unit, a_parameter_used_outside_any_call, .processes = "12", .threads = "1")
{
    two m, plain, *both[2] = { &plain, &m };
    const kn_param *p;
    KN_CHECK(two_init(&plain, KN_META, KN_F32) && kn_materialize(&plain, KN_CPU, NET_SEED));
    KN_CHECK(two_init(&m, KN_META, KN_F32) &&
             kn_fsdp_wrap(&m, world, .wrap_class = "linear", .seed = NET_SEED));
    OWNED_OPTIM kn_optim *a = kn_sgd(&plain, .lr = 0.1), *b = kn_sgd(&m, .lr = 0.1);
    for (int last = 0; last < 2; last++) {
        KN_CHECK(kn_unshard_wait(kn_fsdp_unshard(&m.a)) && kn_fsdp_set_is_last_backward(&m, last));
        for (int i = 0; i < 2; i++) {
            kn_tensor *w = kn_module_param(&both[i]->a, "weight");
            KN_CHECK(kn_backward(sum_of(kn_mul(w, w))));
        }
        KN_CHECK(kn_params(&m, &p) == 4 && (p[0].source->held_back(&p[0]) == NULL) == last,
                 "last %d", last);
    }
    KN_CHECK(kn_grad_scale(&m) == 0.5 / kn_comm_size(world));
    KN_CHECK(kn_step(a) && kn_step(b));
    KN_CHECK(all_read_as(&m, &plain));
    kn_module_free(&m);
    kn_module_free(&plain);
}

typedef struct reader {
    kn_module base;
    two *of;
} reader;

/* tanh(x + w): its backward needs no w, its replay does. */
static kn_tensor *reader_forward(kn_module *self, kn_tensor *x)
{
    return kn_tanh(kn_add(x, kn_module_param(&((reader *)self)->of->b, "weight")));
}

/* b's frozen weight, gathered by the user, is read before b is called: in backward b ends first,
 * and the weight stays for the replay. */
RANK_TEST(unit, a_replay_reads_a_parameter_of_another_unit, .threads = "2")
{
    float grad[2][20];
    for (int again = 0; again < 2; again++) {
        TWO_WRAPPED(m, world, .wrap_class = "linear", .seed = NET_SEED);
        OWNED_MODULE reader r = { .of = &m };
        IN_SCOPE;
        KN_CHECK(kn_module_init(&r.base, reader_forward) && kn_recompute(&r, again));
        KN_CHECK(kn_require_grad(kn_module_param(&m.b, "weight"), false));
        kn_tensor *x = kn_require_grad(kn_randn(KN_F32, KN_CPU, 5, 1, KN_SHAPE(4, 5)), true);
        KN_CHECK(kn_unshard_wait(kn_fsdp_unshard(&m.b)));
        KN_CHECK(kn_backward(sum_of(kn_call(&m.b, kn_call(&r, x)))), "recompute %d", again);
        KN_CHECK(kn_to_host(kn_grad(x), grad[again], sizeof grad[again]));
    }
    KN_CHECK(memcmp(grad[0], grad[1], sizeof grad[0]) == 0);
}

/* The replay of the root is not a second forward: each unit begins and ends once. */
KN_TEST(unit, a_root_that_recomputes_records_its_order)
{
    TWO_WRAPPED(m, NULL, .wrap_class = "linear");
    kn_recompute(&m, true);
    IN_SCOPE;
    KN_CHECK(two_loss(&m, 0));
    int visits = kn_unit_of(m.base.impl)->schedule->order.visits;
    KN_CHECK(visits == 4, "%d visits", visits);
}

/* Modules are freed while gathers run on workers: no access may follow (valgrind, TSan). */
RANK_TEST(unit, modules_freed_while_a_gather_runs_on_a_worker_thread, .threads = "2")
{
    kn_set_free_cores(2);
    for (int i = 0; i < 5; i++) {
        TWO_WRAPPED(m, world, .wrap_class = "linear");
        kn_comm_slow(world, 0.002, 0);
        kn_fsdp_unshard(&m.a);
        kn_fsdp_unshard(&m.b);
    }
}

/* ---- one parameter twice in an operation ----------------------------------------------------- */

typedef struct turned {
    kn_module base;
    kn_tensor *w; /* [3, 3] */
} turned;

static kn_tensor *turned_twice(kn_module *self, kn_tensor *x)
{
    turned *m = (turned *)self;
    return kn_matmul(x, kn_matmul(m->w, m->w));
}

static bool turned_backward(turned *m)
{
    IN_SCOPE;
    kn_tensor *y = kn_call(m, kn_randn(KN_F32, KN_CPU, 5, 1, KN_SHAPE(2, 3)));
    return kn_backward(sum_of(kn_mul(y, y)));
}

/* Both gradients of a product of a parameter with itself come to its place. */
RANK_TEST(unit, a_parameter_multiplied_by_itself, .processes = "12", .threads = "1")
{
    turned m[2];
    float w[2][9];
    for (int k = 0; k < 2; k++) {
        KN_CHECK(kn_module_init(&m[k].base, turned_twice));
        m[k].w = kn_parameter(&m[k], "w", KN_F32, KN_META, KN_NORMAL_INIT(0.5), KN_SHAPE(3, 3));
        KN_CHECK(k ? kn_materialize(&m[k], KN_CPU, NET_SEED)
                   : kn_fsdp_wrap(&m[k], world, .seed = NET_SEED));
        kn_optim *o = kn_sgd(&m[k], .lr = 0.25);
        KN_CHECK(turned_backward(&m[k]) && kn_step(o) && kn_param_read(&m[k], 0, w[k]));
        kn_optim_free(o);
        kn_module_free(&m[k]);
    }
    KN_CHECK(memcmp(w[0], w[1], sizeof w[0]) == 0, "%g, expected %g", (double)w[0][0],
             (double)w[1][0]);
}
