/* examples/speech.c: a recognizer learns to spell what it hears: speech [--ranks N] [--steps N]
 *
 * Made-up speech: a word of WORD letters, each a sound of BANDS frequencies that lasts for 2 to 5
 * frames, in noise. Nobody says which frame belongs to which letter: an LSTM that reads forward and
 * backward names a letter or a blank for each frame, and the loss sums over all ways to spell the
 * word so (CTC; Graves et al., 2006). */
#include <knap.h>
#include <math.h>

enum { BATCH = 8, MICRO = 4 }; /* MICRO batches a step */
enum { LETTERS = 9, WORD = 6, LONGEST = 5, FRAMES = WORD * LONGEST, BANDS = 16, HIDDEN = 64 };

typedef struct recognizer {
    kn_module base;
    kn_lstm lstm;
    kn_linear head;
} recognizer;

/* x (FRAMES, B, BANDS), frames (B) -> logarithms of probabilities (FRAMES, B, LETTERS + blank) */
static kn_values recognizer_forward(kn_module *self, kn_values in, const void *arg)
{
    recognizer *r = (recognizer *)self;
    (void)arg;
    kn_values heard = kn_call_n(&r->lstm, KN_VALUES(in.v[0], NULL, NULL, in.v[1]), NULL, 0);
    return KN_VALUES(kn_log_softmax(kn_call(&r->head, heard.v[0])));
}

static void recognizer_init(recognizer *r)
{
    kn_module_init_n(&r->base, recognizer_forward);
    kn_module_defaults(r, .device = KN_META); /* no bytes yet */
    kn_lstm_init(&r->lstm, &r->base, "lstm", BANDS, HIDDEN, .layers = 2, .bidirectional = true);
    kn_linear_init(&r->head, &r->base, "head", 2 * HIDDEN, LETTERS + 1);
}

/* Words number n, spoken: sin(letter (band + 1)) for as many frames as each letter lasts, in noise;
 * the frames, letters and number of letters of each row. */
static kn_values spoken(int64_t n)
{
    int64_t frames[BATCH] = { 0 };
    const uint64_t draw = 2 * (uint64_t)n;
    kn_tensor *letters = kn_randint(KN_I64, KN_CPU, 1, LETTERS + 1, 1, draw, KN_SHAPE(BATCH, WORD));
    kn_tensor *times =
        kn_randint(KN_I64, KN_CPU, 2, LONGEST + 1, 1, draw + 1, KN_SHAPE(BATCH, WORD));
    kn_tensor *x = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(FRAMES, BATCH, BANDS));
    const int64_t *letter = kn_data(letters), *time = kn_data(times);
    float *sound = kn_data(x);
    for (int i = 0; i < BATCH * WORD && kn_ok(); i++)
        for (int64_t k = 0, b = i / WORD; k < time[i]; k++, frames[b]++)
            for (int64_t f = 0, at = (frames[b] * BATCH + b) * BANDS; f < BANDS; f++)
                sound[at + f] = (float)sin((double)(letter[i] * (f + 1)));
    kn_tensor *noise = kn_randn(KN_F32, KN_CPU, 2, draw, KN_SHAPE(FRAMES, BATCH, BANDS));
    return KN_VALUES(kn_add_scaled(x, noise, 0.5), kn_from(KN_I64, KN_CPU, frames, KN_SHAPE(BATCH)),
                     letters, kn_full(KN_I64, KN_CPU, WORD, KN_SHAPE(BATCH)));
}

/* The loss of a micro-batch; backward has run. */
static double learn(recognizer *r, int64_t micro)
{
    kn_scope scope = kn_scope_begin();
    kn_values said = spoken(micro);
    kn_tensor *heard = kn_call_with(r, said.v[0], said.v[1]);
    kn_tensor *loss = kn_ctc_loss(heard, said.v[2], said.v[1], said.v[3]);
    kn_backward(loss);
    double value = kn_item(loss);
    kn_scope_end(scope);
    return value;
}

static void train(recognizer *r, kn_comm *world, int64_t steps)
{
    kn_optim *opt = kn_adamw(r, .lr = 3e-3);
    for (int64_t step = 0; step < steps && kn_ok(); step++) {
        double loss = 0;
        for (int64_t k = kn_rank(world); k < MICRO; k += kn_comm_size(world))
            loss += learn(r, step * MICRO + k);
        kn_step(opt);
        loss = kn_sum_over_ranks(world, loss) / MICRO;
        if (kn_ok() && kn_rank(world) == 0 && (step % 20 == 0 || step == steps - 1))
            printf("step %4d  loss %.6f\n", (int)step, loss);
    }
    kn_optim_free(opt);
}

/* Prints some words and what r hears: the likeliest class of each frame, without repetitions and
 * blanks. Collective. */
static void spell(recognizer *r, kn_comm *world)
{
    kn_values said = spoken(-1);
    kn_train(r, false);
    kn_set_grad_mode(false);
    kn_tensor *best = kn_argmax(kn_call_with(r, said.v[0], said.v[1]), -1); /* (FRAMES, B) */
    const int64_t *class = kn_data(best), *frames = kn_data(said.v[1]), *word = kn_data(said.v[2]);
    for (int b = 0; b < 3 && kn_ok() && kn_rank(world) == 0; b++, word += WORD) {
        printf("said ");
        for (int w = 0; w < WORD; w++)
            putchar((int)('a' - 1 + word[w]));
        printf("  heard ");
        for (int64_t t = 0, last = 0; t < frames[b]; last = class[t++ * BATCH + b])
            if (class[t * BATCH + b] != last && class[t * BATCH + b] != 0)
                putchar((int)('a' - 1 + class[t * BATCH + b]));
        putchar('\n');
    }
}

int main(int argc, char **argv)
{
    static const kn_option table[] = {
        { "steps", KN_OPTION_INT, 0, "200", "to train", .max = 1e9 },
        { 0 },
    };
    int64_t steps = 0;
    recognizer r = { 0 };
    kn_comm *world = kn_init(&argc, &argv); /* takes --ranks and --threads */
    kn_options *options = kn_options_main(table, &steps, argc, argv, "An LSTM learns to spell.");
    if (!options) /* --help, or an error */
        return kn_finish();
    if (MICRO % kn_comm_size(world))
        kn_fail("%d micro-batches don't divide among %d ranks", MICRO, kn_comm_size(world));
    recognizer_init(&r);
    kn_fsdp_wrap(&r, world, .wrap_class = "lstm", .seed = 1);
    train(&r, world, steps);
    spell(&r, world);
    kn_module_free(&r), kn_options_free(options);
    return kn_finish();
}
