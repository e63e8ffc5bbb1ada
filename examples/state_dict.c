/* examples/state_dict.c: trains, keeps the whole state in one file, and goes on from it on another
 * number of ranks, with another layout: the losses have the same bits.
 *
 *     build/examples/state_dict --ranks 4 --save run.safetensors
 *     build/examples/state_dict --ranks 2 --load run.safetensors */
#include <knap.h>

enum { MICRO = 4, STEPS = 20 }; /* micro-batches a step, over all ranks; steps before and behind */

typedef struct two_layers {
    kn_module base;
    kn_linear in, out;
} two_layers;

static kn_tensor *forward(kn_module *self, kn_tensor *x) /* (16, 8) -> (16, 1) */
{
    two_layers *m = (two_layers *)self;
    return kn_call(&m->out, kn_gelu_tanh(kn_call(&m->in, x)));
}

/* From step `first` on; prints this rank's last loss. */
static void train(two_layers *m, kn_optim *opt, kn_comm *world, int first)
{
    const int ranks = kn_comm_size(world), rank = kn_rank(world);
    for (int step = first; step < first + STEPS && kn_ok(); step++) {
        double sum = 0;
        kn_scope s = kn_scope_begin();
        for (int i = 0; i < MICRO / ranks; i++) {
            const uint64_t micro = (uint64_t)(step * MICRO + i * ranks + rank);
            kn_tensor *x = kn_randn(KN_F32, KN_CPU, 7, micro, KN_SHAPE(16, 8));
            kn_tensor *loss = kn_mse_loss(kn_call(m, x), kn_amax(x, KN_SHAPE(1), true));
            sum += kn_item(loss);
            kn_backward(loss);
        }
        kn_step(opt);
        kn_scope_end(s);
        sum = kn_sum_over_ranks(world, sum) / MICRO;
        if (step == first + STEPS - 1 && rank == 0)
            printf("step %d: loss %.9g\n", step, sum);
    }
}

static void save(two_layers *m, const kn_optim *opt, kn_comm *world, const char *path)
{
    kn_state *s = kn_state_dict(m, .rank0_only = true, .prefix = "model.");
    kn_state_merge(s, kn_optim_state_dict(opt, .rank0_only = true, .prefix = "optim."));
    kn_state_set_int(s, "step", STEPS);
    if (kn_rank(world) == 0)
        kn_state_save(s, path);
    kn_state_free(s);
}

/* Returns the step to go on with. */
static int load(two_layers *m, kn_optim *opt, const char *path)
{
    kn_state *s = kn_state_open(path);
    kn_load_state_dict(m, s, .prefix = "model.");
    kn_load_optim_state_dict(opt, s, .prefix = "optim."); /* with its rate and step number */
    const int step = (int)kn_state_int(s, "step");
    kn_state_free(s);
    return step;
}

typedef struct settings {
    const char *save, *load;
} settings;

int main(int argc, char **argv)
{
    settings set;
    const kn_option table[] = {
        { "save", KN_OPTION_PATH, offsetof(settings, save), NULL, "file for the state" },
        { "load", KN_OPTION_PATH, offsetof(settings, load), NULL, "file to go on from" },
        { 0 }
    };
    kn_comm *world = kn_init(&argc, &argv); /* takes --ranks */
    kn_options *options = kn_options_main(table, &set, argc, argv, "A state moves.");
    if (!options)
        return kn_finish();
    two_layers m = { 0 };
    kn_module_init(&m.base, forward);
    kn_linear_init(&m.in, &m.base, "in", 8, 32);
    kn_linear_init(&m.out, &m.base, "out", 32, 1);
    kn_fsdp_wrap(&m, world, .wrap_class = "linear",
                 .layout = set.load ? KN_LAYOUT_PER_PARAM : KN_LAYOUT_FLAT);
    kn_optim *opt = kn_adamw(&m, .lr = 0.01);
    int step = set.load ? load(&m, opt, set.load) : 0;
    train(&m, opt, world, step);
    if (set.save) { /* and then what a run that goes on from it must print */
        save(&m, opt, world, set.save);
        train(&m, opt, world, STEPS);
    }
    kn_optim_free(opt), kn_module_free(&m), kn_options_free(options);
    return kn_finish();
}
