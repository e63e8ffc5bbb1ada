/* examples/dlrm.c: a recommendation model learns clicks: dlrm [--ranks N] [--steps N]
 *
 * DLRM (Naumov et al., arXiv:1906.00091): numbers go through an MLP, categories through tables of
 * rows, and the products of all pairs of the vectors through another MLP. Tables are cut by rows
 * over the ranks; their gradients stay rows, and a step changes those alone. The clicks follow a
 * hidden taste for some rows; a few rows come often, most seldom. */
#include <knap.h>

enum { DENSE = 13, TABLES = 8, ROWS = 20000, IDS = 3, DIM = 16 }; /* IDS rows of each table */
enum { BATCH = 128, MICRO = 4, VECTORS = TABLES + 1, PAIRS = VECTORS * TABLES / 2 };

typedef struct dlrm {
    kn_module base;
    kn_linear bottom1, bottom2, top1, top2;
    kn_embedding_bag table[TABLES];
} dlrm;

/* numbers (B, DENSE), rows (B, TABLES, IDS) -> logits (B, 1) */
static kn_values dlrm_forward(kn_module *self, kn_values in, const void *arg)
{
    dlrm *m = (dlrm *)self;
    int64_t pair[PAIRS], n = 0;
    kn_tensor *x = kn_relu(kn_call(&m->bottom2, kn_relu(kn_call(&m->bottom1, in.v[0]))));
    kn_tensor *vector[VECTORS] = { x }, *ids[TABLES];
    kn_chunk(in.v[1], 1, TABLES, ids);
    for (int i = 0; i < TABLES; i++)
        vector[i + 1] = kn_call(&m->table[i], kn_reshape(ids[i], KN_SHAPE(-1, IDS)));
    for (int i = 0; i < VECTORS; i++)
        for (int k = 0; k < i; k++)
            pair[n++] = i * VECTORS + k;
    kn_tensor *all = kn_stack(vector, VECTORS, 1); /* (B, VECTORS, DIM) */
    all = kn_reshape(kn_matmul(all, kn_transpose(all, 1, 2)), KN_SHAPE(-1, VECTORS * VECTORS));
    all = kn_index_select(all, 1, kn_from(KN_I64, KN_CPU, pair, KN_SHAPE(PAIRS)));
    x = kn_relu(kn_call(&m->top1, kn_cat((kn_tensor *[]){ x, all }, 2, 1)));
    (void)arg;
    return KN_VALUES(kn_call(&m->top2, x));
}

static void dlrm_init(dlrm *m)
{
    char name[16];
    kn_module_init_n(&m->base, dlrm_forward);
    kn_module_defaults(m, .device = KN_META); /* no bytes yet */
    kn_linear_init(&m->bottom1, &m->base, "bottom1", DENSE, 64);
    kn_linear_init(&m->bottom2, &m->base, "bottom2", 64, DIM);
    kn_linear_init(&m->top1, &m->base, "top1", DIM + PAIRS, 64);
    kn_linear_init(&m->top2, &m->base, "top2", 64, 1);
    for (int i = 0; i < TABLES; i++) {
        snprintf(name, sizeof name, "table%d", i);
        kn_embedding_bag_init(&m->table[i], &m->base, name, ROWS, DIM, .mode = KN_BAG_SUM,
                              .sparse = true, .weight = KN_NORMAL_INIT(0.1));
    }
}

/* The loss of one micro-batch; its backward has run. taste (ROWS, 1). */
static double learn(dlrm *m, kn_tensor *taste, int64_t micro)
{
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 1, (uint64_t)micro, KN_SHAPE(BATCH, DENSE));
    kn_tensor *u = kn_rand(KN_F32, KN_CPU, 2, (uint64_t)micro, KN_SHAPE(BATCH, TABLES, IDS));
    kn_tensor *ids = kn_cast(kn_scale(kn_mul(u, kn_mul(u, u)), ROWS), KN_I64);
    kn_tensor *liked = kn_embedding_bag(taste, kn_flatten(ids, 1, 2), .mode = KN_BAG_SUM);
    kn_tensor *click = kn_cast(kn_gt(liked, kn_zeros_like(liked)), kn_dtype_of(x));
    kn_tensor *loss = kn_binary_cross_entropy_with_logits(kn_call_with(m, x, ids), click);
    kn_backward(loss);
    double value = kn_item(loss);
    kn_scope_end(scope);
    return value;
}

int main(int argc, char **argv)
{
    int64_t steps;
    const kn_option table[] = { { "steps", KN_OPTION_INT, 0, "300", "to train", .max = 1e9 },
                                { 0 } };
    kn_comm *world = kn_init(&argc, &argv); /* takes --ranks and --threads */
    kn_options *options = kn_options_main(table, &steps, argc, argv, "A DLRM learns clicks.");
    if (!options) /* --help, or an error */
        return kn_finish();
    if (MICRO % kn_comm_size(world))
        kn_fail("%d micro-batches don't divide among %d ranks", MICRO, kn_comm_size(world));
    dlrm net = { 0 };
    dlrm_init(&net);
    kn_fsdp_wrap(&net, world, .wrap_class = "linear", .seed = 42); /* and tables, by rows */
    kn_optim *opt = kn_adagrad(&net, .lr = 0.05);
    kn_tensor *taste = kn_randn(KN_F32, KN_CPU, 3, 0, KN_SHAPE(ROWS, 1));
    for (int64_t step = 0; step < steps && kn_ok(); step++) {
        double loss = 0;
        for (int64_t k = kn_rank(world); k < MICRO; k += kn_comm_size(world))
            loss += learn(&net, taste, step * MICRO + k) / MICRO;
        kn_step(opt);
        loss = kn_sum_over_ranks(world, loss);
        if (kn_ok() && kn_rank(world) == 0 && (step % 50 == 0 || step == steps - 1))
            printf("step %4d  loss %.6f\n", (int)step, loss);
    }
    kn_optim_free(opt), kn_module_free(&net), kn_options_free(options);
    return kn_finish();
}
