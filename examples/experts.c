/* examples/experts.c: a mixture of experts on ranks of their own: experts [--ranks N] [--steps N]
 *
 * A net of which every rank has a shard sends each token to one of EXPERTS small nets, each of
 * which lives on one rank alone (Shazeer et al., arXiv:1701.06538; Fedus et al.: Switch, arXiv:
 * 2101.03961). Tokens go to the experts' ranks and back, and so do their gradients. A batch has
 * PARTS parts: experts see it whole, the shared net part by part, which is what it adds gradients
 * of; so any number of ranks has the same bits. */
#include <knap.h>

enum { PARTS = 4, TOKENS = 64, EXPERTS = 8, EMBD = 16, HIDDEN = 32 };

typedef struct expert {
    kn_module base;
    kn_linear up, down;
} expert;

static kn_tensor *expert_forward(kn_module *self, kn_tensor *x)
{
    expert *m = (expert *)self;
    return kn_call(&m->down, kn_relu(kn_call(&m->up, x)));
}

typedef struct experts { /* of a rank */
    kn_module base;
    expert expert[EXPERTS];
    int first, count; /* of all */
} experts;

/* Tokens (T, EMBD) and the numbers of their experts (T) -> the experts' results (T, EMBD) */
static kn_values experts_forward(kn_module *self, kn_values in, const void *arg)
{
    experts *m = (experts *)self;
    kn_tensor *x = in.v[0], *y = kn_zeros_like(x);
    (void)arg;
    for (int i = 0; i < m->count; i++) {
        kn_tensor *number = kn_full(KN_I64, KN_CPU, m->first + i, KN_SCALAR);
        kn_tensor *at = kn_reshape(kn_nonzero(kn_eq(in.v[1], number)), KN_SHAPE(-1));
        y = kn_index_add(y, 0, at, kn_call(&m->expert[i], kn_index_select(x, 0, at)));
    }
    return KN_VALUES(y);
}

static void experts_init(experts *m)
{
    kn_module_init_n(&m->base, experts_forward);
    for (int i = 0; i < m->count; i++) {
        expert *e = &m->expert[i];
        char name[16];
        snprintf(name, sizeof name, "expert%d", m->first + i);
        kn_module_init(&e->base, expert_forward);
        kn_module_add(&m->base, name, &e->base);
        kn_linear_init(&e->up, &e->base, "up", EMBD, HIDDEN);
        kn_linear_init(&e->down, &e->base, "down", HIDDEN, EMBD);
    }
}

typedef struct shared {
    kn_module base;
    kn_linear embed, router;
} shared;

/* Tokens (T, EMBD) -> what experts see of them, and how well each suits: (T, EMBD + EXPERTS) */
static kn_tensor *shared_forward(kn_module *self, kn_tensor *x)
{
    shared *m = (shared *)self;
    kn_tensor *h = kn_call(&m->embed, x);
    return kn_cat((kn_tensor *[]){ h, kn_call(&m->router, h) }, 2, 1);
}

/* A part on its way: its tokens in the order of their experts. */
typedef struct part {
    kn_tensor *target, *features, *leaf, *order, *there, *number;
    int64_t rows[EXPERTS], received[EXPERTS]; /* for each rank, and from each */
} part;

static void send(part *p, kn_comm *world)
{
    p->leaf = kn_require_grad(kn_detach(p->features), true);
    kn_tensor *number = kn_argmax(kn_slice(p->leaf, 1, EMBD, EMBD + EXPERTS), 1);
    const int64_t *id = kn_read_data(number, KN_I64);
    for (int t = 0; t < TOKENS && id; t++)
        p->rows[id[t] * kn_comm_size(world) / EXPERTS]++;
    p->order = kn_argsort(number, 0, false);
    kn_tensor *sent = kn_index_select(kn_slice(p->leaf, 1, 0, EMBD), 0, p->order);
    p->there = kn_all_to_all_tensor(world, sent, p->rows, p->received);
    p->number = kn_all_to_all_tensor(world, kn_index_select(number, 0, p->order), p->rows, NULL);
}

/* The mean square error of a part's tokens, whose results are there. */
static kn_tensor *loss_of(part *p, kn_comm *world, kn_tensor *there)
{
    kn_tensor *home = kn_all_to_all_tensor(world, there, p->received, NULL);
    kn_tensor *gates = kn_softmax(kn_slice(p->leaf, 1, EMBD, EMBD + EXPERTS), 1);
    kn_tensor *y = kn_index_add(kn_zeros_like(p->target), 0, p->order, home);
    return kn_mse_loss(kn_mul(y, kn_amax(gates, KN_SHAPE(1), true)), p->target);
}

/* The loss of the batch; backward has run. */
static kn_tensor *learn(experts *own, kn_comm *world, part *p, int n)
{
    kn_tensor *x[PARTS], *id[PARTS], *loss[PARTS] = { 0 };
    for (int i = 0; i < n; i++)
        send(&p[i], world), x[i] = p[i].there, id[i] = p[i].number;
    kn_tensor *y = kn_call_with(own, kn_cat(x, n, 0), kn_cat(id, n, 0));
    for (int64_t i = 0, at = 0; i < n && kn_ok(); at += kn_size(x[i++], 0))
        loss[i] = loss_of(&p[i], world, kn_slice(y, 0, at, at + kn_size(x[i], 0)));
    kn_tensor *all = kn_stack(loss, n, 0);
    kn_backward(kn_scale(kn_sum(all, 0, NULL, false), 1.0 / PARTS));
    for (int i = 0; i < n && kn_ok(); i++) /* a step takes the mean over parts */
        kn_backward(p[i].features, .grad = kn_scale(kn_grad(p[i].leaf), PARTS));
    return kn_mean(kn_all_gather_tensor(world, kn_unsqueeze(kn_detach(all), 1), 1), 0, NULL, false);
}

int main(int argc, char **argv)
{
    int64_t steps;
    const kn_option table[] = { { "steps", KN_OPTION_INT, 0, "300", "to train", .max = 1e9 },
                                { 0 } };
    kn_comm *world = kn_init(&argc, &argv);
    kn_options *options = kn_options_main(table, &steps, argc, argv, "A mixture of experts.");
    const int ranks = kn_comm_size(world), rank = kn_rank(world);
    if (!options || (PARTS % ranks && !kn_fail("%d parts for %d ranks", PARTS, ranks)))
        return kn_finish();
    shared net = { 0 };
    experts own = { .first = EXPERTS / ranks * rank, .count = EXPERTS / ranks };
    kn_module_init(&net.base, shared_forward);
    kn_linear_init(&net.embed, &net.base, "embed", EMBD, EMBD);
    kn_linear_init(&net.router, &net.base, "router", EMBD, EXPERTS);
    experts_init(&own);
    kn_fsdp_wrap(&net, world, .wrap_class = "linear", .seed = 42);
    kn_fsdp_wrap(&own, kn_comm_self(), .wrap_class = "expert", .seed = 42);
    kn_optim *opt[] = { kn_adamw(&net, .lr = 3e-3), kn_adamw(&own, .lr = 3e-3) };
    for (int64_t step = 0; step < steps && kn_ok(); step++) {
        kn_scope scope = kn_scope_begin();
        part p[PARTS] = { 0 };
        kn_tensor *teacher = kn_randn(KN_F32, KN_CPU, 1, 0, KN_SHAPE(EMBD, EMBD));
        for (int i = 0; i < PARTS / ranks; i++) {
            const uint64_t number = (uint64_t)(step * PARTS + i * ranks + rank);
            kn_tensor *x = kn_randn(KN_F32, KN_CPU, 2, number, KN_SHAPE(TOKENS, EMBD));
            p[i].target = kn_abs(kn_linear(x, teacher, NULL, false));
            p[i].features = kn_call(&net, x);
        }
        kn_tensor *loss = learn(&own, world, p, PARTS / ranks);
        kn_step(opt[0]), kn_step(opt[1]);
        if (kn_ok() && rank == 0 && (step % 50 == 0 || step == steps - 1))
            printf("step %4d  loss %.6f\n", (int)step, kn_item(loss));
        kn_scope_end(scope);
    }
    kn_optim_free(opt[0]), kn_optim_free(opt[1]);
    kn_module_free(&net), kn_module_free(&own), kn_options_free(options);
    return kn_finish();
}
