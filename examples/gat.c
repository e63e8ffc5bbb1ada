/* examples/gat.c: graph attention (Velickovic et al., arXiv:1710.10903) tells the group of each
 * node of graphs that differ in size and in edges: gat [--ranks N] [--steps N]. A node's own
 * features say little; those of its neighbours, most of them of its group, say more. */
#include <knap.h>

enum { CLASSES = 4, HEADS = 4, WIDTH = 8, MICRO = 4 }; /* MICRO graphs a step */

/* ---- the model: features (N, CLASSES) and edges (E) -> logits (N, CLASSES) ------------------- */

typedef struct attention {
    kn_module base;
    kn_linear lin;
    kn_tensor *from, *to; /* the module owns them */
} attention;

/* in.v: nodes (N, C), and the nodes where each edge begins and ends (E) */
static kn_values attention_forward(kn_module *self, kn_values in, const void *arg)
{
    attention *a = (attention *)self;
    const int64_t last = -1, n = kn_size(in.v[0], 0);
    (void)arg;
    kn_tensor *h = kn_reshape(kn_call(&a->lin, in.v[0]), KN_SHAPE(-1, HEADS, WIDTH));
    kn_tensor *begin = kn_sum(kn_mul(h, a->from), 1, &last, false); /* (N, HEADS) */
    kn_tensor *end = kn_sum(kn_mul(h, a->to), 1, &last, false);
    kn_tensor *e = kn_add(kn_index_select(begin, 0, in.v[1]), kn_index_select(end, 0, in.v[2]));
    kn_tensor *w = kn_segment_softmax(kn_leaky_relu(e, .slope = 0.2), in.v[2], n);
    kn_tensor *sent = kn_mul(kn_unsqueeze(w, -1), kn_index_select(h, 0, in.v[1]));
    return KN_VALUES(kn_elu(kn_flatten(kn_segment_reduce(sent, in.v[2], n, KN_BY_SUM), 1, -1)));
}

static void attention_init(attention *a, kn_module *parent, const char *name, int64_t in)
{
    kn_module_init_n(&a->base, attention_forward);
    kn_module_add(parent, name, &a->base);
    kn_linear_init(&a->lin, &a->base, "lin", in, HEADS * WIDTH, .no_bias = true);
    a->from = kn_parameter(a, "src", KN_F32, KN_META, KN_NORMAL_INIT(0.3), KN_SHAPE(HEADS, WIDTH));
    a->to = kn_parameter(a, "dst", KN_F32, KN_META, KN_NORMAL_INIT(0.3), KN_SHAPE(HEADS, WIDTH));
}

typedef struct gat {
    kn_module base;
    attention first, second;
    kn_linear out;
} gat;

static kn_values gat_forward(kn_module *self, kn_values in, const void *arg)
{
    gat *g = (gat *)self;
    (void)arg;
    kn_tensor *x = kn_call_with(&g->first, in.v[0], in.v[1], in.v[2]);
    return KN_VALUES(kn_call(&g->out, kn_call_with(&g->second, x, in.v[1], in.v[2])));
}

static void gat_init(gat *g)
{
    kn_module_init_n(&g->base, gat_forward);
    kn_module_defaults(g, .device = KN_META); /* no bytes yet */
    attention_init(&g->first, &g->base, "first", CLASSES);
    attention_init(&g->second, &g->base, "second", HEADS * WIDTH);
    kn_linear_init(&g->out, &g->base, "out", HEADS * WIDTH, CLASSES);
}

/* ---- graphs ---------------------------------------------------------------------------------- */

/* Features, where edges begin and end, groups; a function of the number alone. */
static kn_values graph(int64_t number)
{
    const int64_t n = 40 + number * 7 % 25, pairs = 12 * n;
    const uint64_t stream = (uint64_t)number;
    kn_tensor *y = kn_randint(KN_I64, KN_CPU, 0, CLASSES, 1, stream, KN_SHAPE(n));
    kn_tensor *noise = kn_randn(KN_F32, KN_CPU, 2, stream, KN_SHAPE(n, CLASSES));
    kn_tensor *x = kn_add_scaled(kn_cast(kn_one_hot(y, CLASSES), KN_F32), noise, 1.2);
    kn_tensor *from = kn_randint(KN_I64, KN_CPU, 0, n, 3, stream, KN_SHAPE(pairs));
    kn_tensor *to = kn_randint(KN_I64, KN_CPU, 0, n, 4, stream, KN_SHAPE(pairs));
    kn_tensor *u = kn_rand(KN_F32, KN_CPU, 5, stream, KN_SHAPE(pairs));
    kn_tensor *alike = kn_eq(kn_index_select(y, 0, from), kn_index_select(y, 0, to));
    kn_tensor *kept = kn_logical_or(alike, kn_lt(u, kn_full(KN_F32, KN_CPU, 0.1, KN_SCALAR)));
    kn_tensor *own = kn_arange(KN_I64, KN_CPU, n);
    from = kn_cat((kn_tensor *[]){ kn_masked_select(from, kept), own }, 2, 0);
    to = kn_cat((kn_tensor *[]){ kn_masked_select(to, kept), own }, 2, 0);
    return KN_VALUES(x, from, to, y);
}

/* ---- the program ----------------------------------------------------------------------------- */

static void train(gat *net, kn_comm *world, int64_t steps)
{
    kn_optim *opt = kn_adamw(net, .lr = 1e-2);
    for (int64_t step = 0; step < steps && kn_ok(); step++) {
        double loss = 0;
        for (int64_t k = kn_rank(world); k < MICRO; k += kn_comm_size(world)) {
            kn_scope scope = kn_scope_begin();
            kn_values g = graph(step * MICRO + k);
            kn_tensor *l = kn_cross_entropy(kn_call_with(net, g.v[0], g.v[1], g.v[2]), g.v[3]);
            loss += kn_backward(l) ? kn_item(l) : 0;
            kn_scope_end(scope);
        }
        kn_step(opt);
        loss = kn_sum_over_ranks(world, loss) / MICRO;
        if (kn_ok() && kn_rank(world) == 0 && (step % 50 == 0 || step == steps - 1))
            printf("step %4d  loss %.6f\n", (int)step, loss);
    }
    kn_optim_free(opt);
}

/* The part of the nodes of 40 new graphs whose group the net finds. */
static double accuracy(gat *net, kn_comm *world)
{
    double right = 0, nodes = 0;
    kn_train(net, false);
    for (int64_t k = kn_rank(world); k < 40; k += kn_comm_size(world)) {
        kn_scope scope = kn_scope_begin();
        kn_values g = graph(1000000 + k);
        kn_tensor *found = kn_argmax(kn_call_with(net, g.v[0], g.v[1], g.v[2]), 1);
        right += kn_item(kn_sum(kn_eq(found, g.v[3]), 0, NULL, false));
        nodes += (double)kn_numel(found);
        kn_scope_end(scope);
    }
    return kn_sum_over_ranks(world, right) / kn_sum_over_ranks(world, nodes);
}

int main(int argc, char **argv)
{
    int64_t steps;
    const kn_option table[] = { { "steps", KN_OPTION_INT, 0, "200", "to train", .max = 1e9 },
                                { 0 } };
    gat net = { 0 };
    kn_comm *world = kn_init(&argc, &argv); /* takes --ranks and --threads */
    kn_options *options = kn_options_main(table, &steps, argc, argv, "Groups of nodes in graphs.");
    if (!options) /* --help, or an error */
        return kn_finish();
    if (MICRO % kn_comm_size(world))
        kn_fail("%d micro-batches don't divide among %d ranks", MICRO, kn_comm_size(world));
    gat_init(&net);
    kn_fsdp_wrap(&net, world, .wrap_class = "attention", .seed = 42);
    train(&net, world, steps);
    double right = accuracy(&net, world);
    if (kn_ok() && kn_rank(world) == 0)
        printf("%.1f %% of the nodes of new graphs\n", 100 * right);
    kn_module_free(&net), kn_options_free(options);
    return kn_finish();
}
