/* tests/fsdp/every_ranks_test.c: each operation of the rows of tests/autograd/every.h, with its
 * inputs as the parameters of a unit: two ranks have the bits of one process, in each layout, with
 * recompute and without. So the gradients of leaves come in every form that a backward gives. */
#include "tests/autograd/every.h"
#include "tests/fsdp/matrix.h"
#include "tests/owned.h"

enum { OTHERS = 256 };

/* Of the modules that are made. */
static const every_case *row;
static every_set set;

typedef struct applied {
    kn_module base;
    kn_tensor *leaf[EVERY_MAX_IN];
} applied;

typedef struct net {
    kn_module base;
    applied a;
    kn_tensor *others; /* [OTHERS] */
} net;

static kn_tensor *applied_forward(kn_module *self, kn_tensor *x)
{
    kn_tensor *in[EVERY_MAX_IN], *y;
    every_inputs(&set, ((applied *)self)->leaf, in);
    y = row->call(in);
    return y ? kn_mul(kn_cast(y, KN_F32), x) : NULL;
}

static kn_tensor *net_forward(kn_module *self, kn_tensor *x)
{
    net *n = (net *)self;
    kn_tensor *y = kn_call(&n->a, x);
    return y ? kn_add(sum_of(kn_mul(y, y)), sum_of(n->others)) : NULL;
}

static bool declare(void *own)
{
    net *n = own;
    char name[8];
    bool ok = kn_module_init(&n->base, net_forward) &&
              kn_module_init(&n->a.base, applied_forward) &&
              kn_module_add(&n->base, "a", &n->a.base);
    for (int i = 0; i < set.n && ok; i++) {
        const input_spec s = leaf_spec(&set.in[i]);
        snprintf(name, sizeof name, "%d", i);
        n->a.leaf[i] = kn_parameter(&n->a, name, KN_F32, KN_META, KN_UNIFORM_INIT(s.low, s.high),
                                    s.ndim, s.shape);
        ok = n->a.leaf[i] != NULL;
    }
    n->others = kn_parameter(n, "others", KN_F32, KN_META, KN_ONES_INIT, KN_SHAPE(OTHERS));
    return ok && n->others;
}

static kn_tensor *loss(void *own, int step, int micro)
{
    return kn_call(own, kn_full(KN_F32, KN_CPU, 1 + 0.25 * micro, KN_SCALAR));
}

KN_TEST(every_ranks, operation_has_the_bits_of_one_process)
{
    size_t rows = 0;
    EACH_CASE(c)
    {
        row = c;
        set = (every_set){ 0 };
        for (size_t k = 0; k <= rows % 4 && every_next(c, &set); k++)
            ; /* one of its sets */
        if (!c->differentiable)
            continue;
        rows++; /* .bytes: each has a reference of its own */
        if (rows % (size_t)kn_one_in(8))
            continue;
        MATRIX_CHECK(.model = MATRIX_OWN, .bytes = sizeof(net) + rows, .declare = declare,
                     .loss = loss, .threads = true, .rounds = 1, .steps = 1,
                     .optimizer = OPTIMIZER_SGD,
                     .o = { .wrap_class = "applied",
                            .recompute_class = rows % 2 ? "applied" : NULL,
                            .layout = (kn_layout_kind)(KN_LAYOUT_FLAT + rows % 3) });
    }
    KN_CHECK(rows > 150, "%d rows only", (int)rows);
}
