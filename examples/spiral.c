/* examples/spiral.c: a model of one's own, from its modules to its checkpoint: spiral [--ranks N]
 * [--steps N] [--out DIR] [--from DIR]. docs/own-model.md explains it step by step. */
#include <knap.h>
#include <math.h>
#include <stddef.h>

enum { DIM = 64, BLOCKS = 3, CLASSES = 3, BATCH = 48, MICRO = 4 }; /* MICRO batches a step */
enum { STEPS = 200 };                                              /* of the schedule */

/* ---- the model: points (B, 2) -> logits (B, CLASSES) ----------------------------------------- */

typedef struct block {
    kn_module base; /* comes first */
    kn_rms_norm norm;
    kn_linear gate, up, down;
    kn_tensor *scale; /* a parameter of the block itself; the module owns it */
} block;

typedef struct spiral {
    kn_module base;
    kn_linear in;
    block block[BLOCKS];
    kn_linear out;
} spiral;

static kn_tensor *block_forward(kn_module *self, kn_tensor *x)
{
    block *b = (block *)self;
    kn_tensor *h = kn_call(&b->norm, x);
    h = kn_mul(kn_silu(kn_call(&b->gate, h)), kn_call(&b->up, h));
    return kn_add(x, kn_mul(b->scale, kn_call(&b->down, h)));
}

static kn_tensor *spiral_forward(kn_module *self, kn_tensor *x)
{
    spiral *s = (spiral *)self;
    x = kn_call(&s->in, x);
    for (int i = 0; i < BLOCKS; i++)
        x = kn_call(&s->block[i], x);
    return kn_call(&s->out, x);
}

static void block_init(block *b, kn_module *parent, const char *name)
{
    kn_initializer start = KN_CONSTANT_INIT(0.5);
    kn_module_init(&b->base, block_forward);
    kn_module_add(parent, name, &b->base);
    kn_rms_norm_init(&b->norm, &b->base, "norm", DIM);
    kn_linear_init(&b->gate, &b->base, "gate", DIM, 2 * DIM);
    kn_linear_init(&b->up, &b->base, "up", DIM, 2 * DIM);
    kn_linear_init(&b->down, &b->base, "down", 2 * DIM, DIM);
    b->scale = kn_parameter(b, "scale", KN_F32, KN_META, start, KN_SHAPE(DIM));
}

static void spiral_init(spiral *s)
{
    static const char *const name[BLOCKS] = { "block0", "block1", "block2" };
    kn_module_init(&s->base, spiral_forward);
    kn_module_defaults(s, .device = KN_META); /* no bytes yet */
    kn_linear_init(&s->in, &s->base, "in", 2, DIM);
    for (int i = 0; i < BLOCKS; i++)
        block_init(&s->block[i], &s->base, name[i]);
    kn_linear_init(&s->out, &s->base, "out", DIM, CLASSES);
}

/* ---- data: three arms of a spiral ------------------------------------------------------------ */

/* One point: a function of its number and its random draws, never of rank or thread. */
static int point(kn_data_sample *s, void *arg)
{
    float *xy = s->field[0];
    int64_t *arm = s->field[1];
    (void)arg;
    *arm = s->index % CLASSES;
    double radius = kn_draw_uniform(s);
    double angle = 6.2832 / CLASSES * (double)*arm + 5 * radius + 0.1 * kn_draw_normal(s);
    xy[0] = (float)(radius * cos(angle));
    xy[1] = (float)(radius * sin(angle));
    return true;
}

/* Batches x (BATCH, 2), y (BATCH); the points of an epoch are drawn anew. */
static kn_loader *points(kn_comm *world, uint64_t seed)
{
    return kn_loader_new(point, NULL, world, .samples = 20 * MICRO * BATCH, .batch = BATCH,
                         .accum = MICRO / kn_comm_size(world), .shuffle = true, .seed = seed,
                         .field = { { KN_F32, 1, { 2 } }, { .dtype = KN_I64 } });
}

/* ---- training, evaluation -------------------------------------------------------------------- */

/* One optimizer step over MICRO micro-batches, shared out among the ranks; returns their loss. */
static double step_once(spiral *net, kn_optim *opt, kn_comm *world, kn_loader *data)
{
    double sum = 0;
    for (int k = 0; k < MICRO / kn_comm_size(world); k++) {
        kn_scope scope = kn_scope_begin();
        kn_batch b = kn_next(data);
        kn_tensor *loss = kn_cross_entropy(kn_call(net, b.x), b.y, .smoothing = 0.01);
        kn_backward(loss); /* adds to the gradients; the step divides by the micro-batches */
        sum += kn_item(loss);
        kn_scope_end(scope);
    }
    kn_clip_grad_norm(net, 1.0);
    kn_step(opt); /* drops the gradients, too */
    return kn_sum_over_ranks(world, sum) / MICRO;
}

/* The part of unseen points whose arm the model finds. */
static double accuracy(spiral *net, kn_comm *world)
{
    double right = 0;
    bool mode = kn_set_grad_mode(false);
    kn_loader *unseen = points(world, 2);
    kn_train(net, false);
    for (int k = 0; k < 2 * MICRO / kn_comm_size(world); k++) {
        kn_scope scope = kn_scope_begin();
        kn_batch b = kn_next(unseen);
        kn_tensor *hit = kn_eq(kn_argmax(kn_call(net, b.x), 1), b.y);
        right += kn_item(kn_sum(hit, 0, NULL, false));
        kn_scope_end(scope);
    }
    kn_train(net, true);
    kn_set_grad_mode(mode);
    kn_loader_free(unseen);
    return kn_sum_over_ranks(world, right) / (2 * MICRO * BATCH);
}

static void train(spiral *net, kn_comm *world, int64_t steps, const char *from, const char *out)
{
    kn_schedule lr = { KN_COSINE, .lr = 1e-2, .min_lr = 1e-3, .warmup = 20, .steps = STEPS };
    kn_optim_group group = { "*.scale", .weight_decay = KN_ZERO };
    kn_optim *opt = kn_adamw(net, .lr = lr.lr, .groups = &group, .group_count = 1);
    kn_checkpoint *saved = from ? kn_checkpoint_open(from, world) : NULL;
    int64_t first = saved ? kn_checkpoint_step(saved) : 0;
    kn_loader *data = points(world, 1);
    if (saved)
        kn_checkpoint_load(saved, net, .optim = opt);
    kn_checkpoint_free(saved);
    kn_loader_seek(data, first * MICRO / kn_comm_size(world));
    for (int64_t step = first; step < steps && kn_ok(); step++) {
        kn_set_lr(opt, kn_schedule_at(&lr, step));
        double loss = step_once(net, opt, world, data);
        if (kn_ok() && kn_rank(world) == 0 && (step % 50 == 0 || step == steps - 1))
            printf("step %4d  loss %.6f\n", (int)step, loss);
    }
    if (out)
        kn_checkpoint_save(out, net, .optim = opt, .step = steps);
    kn_optim_free(opt), kn_loader_free(data);
}

typedef struct settings {
    int64_t steps;
    const char *from, *out;
} settings;

int main(int argc, char **argv)
{
    static const kn_option table[] = {
        { "steps", KN_OPTION_INT, offsetof(settings, steps), "200", "where this run ends",
          .max = 1e6 },
        { "from", KN_OPTION_PATH, offsetof(settings, from), NULL, "a checkpoint to go on from" },
        { "out", KN_OPTION_PATH, offsetof(settings, out), NULL, "where to save one" },
        { 0 },
    };
    settings s = { 0 };
    spiral net = { 0 };
    kn_comm *world = kn_init(&argc, &argv); /* takes --ranks and --threads */
    kn_options *options = kn_options_main(table, &s, argc, argv, "Which arm of the spiral?");
    if (!options) /* --help, or an error */
        return kn_finish();
    spiral_init(&net);
    if (MICRO % kn_comm_size(world))
        kn_fail("%d micro-batches don't divide among %d ranks", MICRO, kn_comm_size(world));
    kn_fsdp_wrap(&net, world, .wrap_class = "block", .seed = 42);
    train(&net, world, s.steps, s.from, s.out);
    double right = accuracy(&net, world);
    if (kn_ok() && kn_rank(world) == 0)
        printf("%.1f %% of new points\n", 100 * right);
    kn_module_free(&net), kn_options_free(options);
    return kn_finish();
}
