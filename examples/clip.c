/* examples/clip.c: pictures and captions by a contrastive loss: clip [--ranks N] [--steps N]
 * [--gathered]
 *
 * Two encoders learn features in which a picture lies near its own caption and far from all others
 * of the batch, which is that of all ranks (Radford et al.: CLIP, arXiv:2103.00020). Two ways:
 *
 *   gathered   each rank's features against those of all ranks, which backward goes through. One
 *              pass; ranks add in another order than one process does.
 *   cached     features of all parts of the batch first, without a graph; the loss over them, and
 *              its gradient, on each rank alike; then a backward for each part (Gao et al.,
 *              arXiv:2101.06983). Encoders run twice and hold the graph of one part only, so the
 *              batch may be of any size, and any number of ranks has the same bits. */
#include <knap.h>

enum { PARTS = 8, PAIRS = 16 }; /* of a batch; pairs of a part */
enum { WORDS = 3, KIND = 8, VOCAB = WORDS * KIND, PIXELS = 64, HIDDEN = 128, EMBD = 32 };

typedef struct clip {
    kn_module base;
    kn_linear image1, image2, text;
    kn_embedding words;
    kn_tensor *scale; /* [1], the logarithm of what the products are multiplied by */
} clip;

/* Pictures (B, PIXELS) and captions (B, WORDS) -> features of both, side by side (B, 2 EMBD) */
static kn_values clip_forward(kn_module *self, kn_values in, const void *arg)
{
    clip *m = (clip *)self;
    (void)arg;
    kn_tensor *image = kn_call(&m->image2, kn_relu(kn_call(&m->image1, in.v[0])));
    kn_tensor *words = kn_mean(kn_call(&m->words, in.v[1]), 1, (int64_t[]){ 1 }, false);
    kn_tensor *text = kn_normalize(kn_call(&m->text, kn_relu(words)));
    kn_tensor *both[] = { kn_mul(kn_normalize(image), kn_exp(m->scale)), text };
    return KN_VALUES(kn_cat(both, 2, 1));
}

static void clip_init(clip *m)
{
    kn_module_init_n(&m->base, clip_forward);
    kn_linear_init(&m->image1, &m->base, "image1", PIXELS, HIDDEN);
    kn_linear_init(&m->image2, &m->base, "image2", HIDDEN, EMBD);
    kn_embedding_init(&m->words, &m->base, "words", VOCAB, HIDDEN);
    kn_linear_init(&m->text, &m->base, "text", HIDDEN, EMBD);
    m->scale = kn_parameter(m, "scale", KN_F32, KN_CPU, KN_CONSTANT_INIT(2), KN_SHAPE(1));
}

/* ---- data ------------------------------------------------------------------------------------ */

/* A caption has one word of each kind; its picture is the sum of those of its words, and noise. */
static kn_values pairs(uint64_t part)
{
    kn_tensor *word = kn_randint(KN_I64, KN_CPU, 0, KIND, 1, part, KN_SHAPE(PAIRS, WORDS));
    kn_tensor *pictures = kn_randn(KN_F32, KN_CPU, 2, 0, KN_SHAPE(VOCAB, PIXELS));
    word = kn_add(word, kn_scale(kn_arange(KN_I64, KN_CPU, WORDS), KIND));
    kn_tensor *seen = kn_sum(kn_embedding(pictures, word), 1, (int64_t[]){ 1 }, false);
    return KN_VALUES(kn_add(seen, kn_randn(KN_F32, KN_CPU, 3, part, KN_SHAPE(PAIRS, PIXELS))),
                     word);
}

/* ---- the loss -------------------------------------------------------------------------------- */

/* Each picture of own, rows first and on of all, finds its caption among all, and the captions
 * their pictures. */
static kn_tensor *contrast(kn_tensor *own, kn_tensor *all, int64_t first)
{
    kn_tensor *a[2] = { 0 }, *b[2] = { 0 };
    kn_tensor *at = kn_arange(KN_I64, KN_CPU, first + kn_size(own, 0), .start = first);
    kn_chunk(own, 1, 2, a), kn_chunk(all, 1, 2, b);
    kn_tensor *caption = kn_cross_entropy(kn_linear(a[0], b[1], NULL, false), at);
    kn_tensor *picture = kn_cross_entropy(kn_linear(a[1], b[0], NULL, false), at);
    return kn_scale(kn_add(caption, picture), 0.5);
}

/* The loss; backward has run. */
static kn_tensor *gathered(clip *net, kn_comm *world, const kn_values *part, int parts)
{
    kn_tensor *features[PARTS];
    for (int i = 0; i < parts; i++)
        features[i] = kn_call_with_(net, part[i]);
    kn_tensor *own = kn_cat(features, parts, 0), *all = kn_all_gather_tensor(world, own, 0);
    kn_tensor *loss = contrast(own, all, kn_rank(world) * parts * PAIRS);
    return kn_backward(loss) ? kn_mean_tensor(world, kn_detach(loss)) : NULL;
}

static kn_tensor *cached(clip *net, kn_comm *world, const kn_values *part, int parts)
{
    kn_tensor *features[PARTS], *grad[PARTS];
    kn_set_grad_mode(false);
    for (int i = 0; i < parts; i++)
        features[i] = kn_all_gather_tensor(world, kn_call_with_(net, part[i]), 0);
    kn_set_grad_mode(true);
    kn_tensor *all = kn_require_grad(kn_cat(features, parts, 0), true);
    kn_tensor *loss = contrast(all, all, 0);
    kn_backward(loss);
    kn_chunk(kn_scale(kn_grad(all), PARTS), 0, PARTS, grad); /* a step takes the mean over parts */
    for (int i = 0; i < parts && kn_ok(); i++)
        kn_backward(kn_call_with_(net, part[i]), .grad = grad[PARTS / parts * i + kn_rank(world)]);
    return loss;
}

typedef struct settings {
    int64_t steps;
    bool gathered;
} settings;

int main(int argc, char **argv)
{
    settings s;
    const kn_option table[] = {
        { "steps", KN_OPTION_INT, offsetof(settings, steps), "200", "to train", .max = 1e9 },
        { "gathered", KN_OPTION_FLAG, offsetof(settings, gathered), NULL, "one pass" },
        { 0 }
    };
    kn_comm *world = kn_init(&argc, &argv);
    kn_options *options = kn_options_main(table, &s, argc, argv, "Pictures and captions.");
    const int ranks = kn_comm_size(world), rank = kn_rank(world);
    if (!options || (PARTS % ranks && !kn_fail("%d parts for %d ranks", PARTS, ranks)))
        return kn_finish();
    clip net = { 0 };
    clip_init(&net);
    kn_fsdp_wrap(&net, world, .wrap_class = "linear", .seed = 42);
    kn_optim *opt = kn_adamw(&net, .lr = 1e-3);
    for (int64_t step = 0; step < s.steps && kn_ok(); step++) {
        kn_scope scope = kn_scope_begin();
        kn_values part[PARTS];
        for (int i = 0; i < PARTS / ranks; i++)
            part[i] = pairs((uint64_t)(step * PARTS + i * ranks + rank));
        kn_tensor *loss = (s.gathered ? gathered : cached)(&net, world, part, PARTS / ranks);
        kn_step(opt);
        if (kn_ok() && rank == 0 && (step % 50 == 0 || step == s.steps - 1))
            printf("step %4d  loss %.6f\n", (int)step, kn_item(loss));
        kn_scope_end(scope);
    }
    kn_optim_free(opt), kn_module_free(&net), kn_options_free(options);
    return kn_finish();
}
