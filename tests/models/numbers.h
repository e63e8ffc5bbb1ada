/* tests/models/numbers.h: a call for each struct of options with numbers. */
#include "knap.h"
#include "tests/owned.h"

static struct fixture {
    kn_linear l;
    kn_tensor *rows, *to, *half, *q, *line, *image, *w1, *w2, *scalar;
    kn_tokenizer *tokenizer;
    kn_text *text;
    kn_image_set *set;
    kn_tensor *pixels;
    kn_resnet net;
    char path[256], picture[256], exported[256], saved[256];
} in;

/* ---- the calls ------------------------------------------------------------------------------- */

#define OPTIM(make)  kn_optim_free(make)
#define LOADER(make) kn_loader_free(make)
#define LAYER(type, ...)                                                                           \
    do {                                                                                           \
        type m = { 0 };                                                                            \
        (void)type##_init_(&m, NULL, NULL, __VA_ARGS__);                                           \
        kn_module_free(&m);                                                                        \
    } while (0)

static int fill_one(kn_data_sample *s, void *arg)
{
    (void)arg;
    *(float *)s->field[0] = (float)s->index;
    return true;
}

static kn_values twice(kn_values x, void *arg)
{
    (void)arg;
    return KN_VALUES(kn_scale(x.v[0], 2));
}

static kn_tensor *no_logits(void *module, kn_tensor *ids)
{
    (void)module, (void)ids;
    return kn_zeros(KN_F32, KN_CPU, KN_SHAPE(3));
}

static kn_tensor *no_loss(void *module, kn_tensor *ids, kn_tensor *targets)
{
    (void)module, (void)ids, (void)targets;
    return kn_zeros(KN_F32, KN_CPU, 0, NULL);
}

static bool same_update(const kn_optim_part *p, void *arg)
{
    (void)arg;
    return p != NULL;
}

static void schedule(kn_schedule o)
{
    for (o.kind = KN_CONSTANT; o.kind < KN_OWN_SCHEDULE && kn_ok(); o.kind++)
        kn_schedule_at(&o, 3);
}

/* a of a constant, b of normal values. */
static void initialize(kn_initializer o)
{
    OWNED_MODULE kn_linear m = { 0 };
    o.kind = o.b == 0 ? KN_INIT_CONSTANT : KN_INIT_NORMAL;
    (void)kn_linear_init(&m, NULL, NULL, 2, 2, .weight = o);
}

static void summarize(kn_summary_options o)
{
    FILE *out = fopen("/dev/null", "w");
    (void)kn_summary_(out, &in.l, KN_VALUES(in.half), o);
    fclose(out);
}

static void export(kn_pretrained_save_options o)
{
    o.resnet = kn_resnet_config_of(&in.net);
    (void)kn_pretrained_save_(in.exported, &in.net, o);
}

static void load_state(kn_load_state_dict_options o)
{
    kn_state *s = kn_state_dict(&in.l);
    (void)kn_load_state_dict_(&in.l, s, o);
    kn_state_free(s);
}

static void load_checkpoint(kn_checkpoint_load_options o)
{
    kn_checkpoint *c = kn_checkpoint_open(in.saved, NULL);
    (void)kn_checkpoint_load_(c, &in.l, o);
    kn_checkpoint_free(c);
}

static void write_text(kn_write_text_options o)
{
    o.prompt = o.prompts_count ? NULL : "a";
    o.prompts = o.prompts_count ? &(kn_prompt){ "a" } : NULL;
    (void)kn_write_text_(&in.l, no_logits, in.tokenizer, o);
}

static void wrap(kn_fsdp_wrap_options o)
{
    OWNED_MODULE kn_linear l = { 0 };
    if (kn_linear_init(&l, NULL, NULL, 2, 2))
        (void)kn_fsdp_wrap_(&l, NULL, o);
}
#define WRAP(...) wrap(KN_OPTIONS(kn_fsdp_wrap_options, __VA_ARGS__))

/* X(struct, the options that the others need, a call with the options o) */
#define ROWS(X)                                                                                    \
    X(kn_optim_group, (.pattern = "*"),                                                            \
      OPTIM(kn_sgd(&in.l, .lr = 1, .groups = &o, .group_count = 1)))                               \
    X(kn_adamw_options, (.lr = 1), OPTIM(kn_adamw_(&in.l, o)))                                     \
    X(kn_lion_options, (.lr = 1), OPTIM(kn_lion_(&in.l, o)))                                       \
    X(kn_sgd_options, (.lr = 1, .momentum = 0.5), OPTIM(kn_sgd_(&in.l, o)))                        \
    X(kn_adagrad_options, (.lr = 1), OPTIM(kn_adagrad_(&in.l, o)))                                 \
    X(kn_muon_options, (.lr = 1), OPTIM(kn_muon_(&in.l, o)))                                       \
    X(kn_own_optim_options, (.lr = 1, .update = same_update), OPTIM(kn_own_optim_(&in.l, o)))      \
    X(kn_scaler_options, (), kn_scaler_free(kn_scaler_new_(&in.l, o)))                             \
    X(kn_schedule, (.lr = 1, .warmup = 1, .steps = 9, .every = 2), schedule(o))                    \
    X(kn_norm_init_options, (), {                                                                  \
        LAYER(kn_layer_norm, 4, o);                                                                \
        LAYER(kn_rms_norm, 4, o);                                                                  \
    })                                                                                             \
    X(kn_embedding_init_options, (), LAYER(kn_embedding, 4, 2, o))                                 \
    X(kn_embedding_bag_init_options, (), LAYER(kn_embedding_bag, 4, 2, o))                         \
    X(kn_conv2d_init_options, (.device = KN_META),                                                 \
      LAYER(kn_conv2d, 2, 2, o.kernels[0] ? 0 : 2, o))                                             \
    X(kn_conv3d_init_options, (.device = KN_META),                                                 \
      LAYER(kn_conv3d, 2, 2, o.kernels[0] ? 0 : 2, o))                                             \
    X(kn_conv1d_init_options, (.device = KN_META), LAYER(kn_conv1d, 2, 2, 2, o))                   \
    X(kn_conv_transpose2d_init_options, (.stride = 2, .device = KN_META),                          \
      LAYER(kn_conv_transpose2d, 2, 2, o.kernels[0] ? 0 : 2, o))                                   \
    X(kn_conv_transpose1d_init_options, (.stride = 2, .device = KN_META),                          \
      LAYER(kn_conv_transpose1d, 2, 2, 2, o))                                                      \
    X(kn_batch_norm_init_options, (), LAYER(kn_batch_norm, 4, o))                                  \
    X(kn_group_norm_init_options, (), LAYER(kn_group_norm, 2, 4, o))                               \
    X(kn_instance_norm_init_options, (.track_running_stats = true), LAYER(kn_instance_norm, 4, o)) \
    X(kn_self_attention_init_options, (.rope = true, .qk_norm = true, .device = KN_META),          \
      LAYER(kn_self_attention, 4, 2, o))                                                           \
    X(kn_multi_head_attention_init_options,                                                        \
      (.causal = true, .rope = true, .qk_norm = true, .device = KN_META),                          \
      LAYER(kn_multi_head_attention, 4, 2, o))                                                     \
    X(kn_mlp_init_options, (.device = KN_META), LAYER(kn_mlp, 4, o))                               \
    X(kn_swiglu_init_options, (), LAYER(kn_swiglu, 4, 4, o))                                       \
    X(kn_recurrent_init_options, (.layers = 2, .device = KN_META), {                               \
        LAYER(kn_lstm, 4, 4, o);                                                                   \
        LAYER(kn_rnn, 4, 4, o);                                                                    \
    })                                                                                             \
    X(kn_initializer, (), initialize(o))                                                           \
    X(kn_summary_options, (), summarize(o))                                                        \
    X(kn_rope_scaling, (.factor = 2), kn_rope(in.q, 0, 0, .scaling = o))                           \
    X(kn_checkpoint_save_options, (), (void)kn_checkpoint_save_(in.path, &in.l, o))                \
    X(kn_pretrained_save_options, (.std = { 1, 1, 1 }), export(o))                                 \
    X(kn_load_state_dict_options, (), load_state(o))                                               \
    X(kn_checkpoint_load_options, (), load_checkpoint(o))                                          \
    X(kn_image_save_options, (.high = 2), (void)kn_image_save_(in.picture, in.image, o))           \
    X(kn_image_set_open_options, (), kn_image_set_free(kn_image_set_open_("shapes", "train", o)))  \
    X(kn_image_read_options, (), (void)kn_image_read_(in.picture, o))                              \
    X(kn_augment_image_options, (), (void)kn_augment_image_(in.pixels, o))                         \
    X(kn_image_loader_options, (.batch = 2, .workers = 1),                                         \
      LOADER(kn_image_loader_(in.set, NULL, o)))                                                   \
    X(kn_text_read_options, (),                                                                    \
      kn_text_free(kn_text_read_(in.path, &(kn_tokenizer *){ NULL }, o)))                          \
    X(kn_text_options, (.batch = 1, .ctx = 1, .workers = 1),                                       \
      LOADER(kn_text_loader_(in.text, NULL, o)))                                                   \
    X(kn_sample_options, (.temperature = 1), kn_sample((float[]){ 1, 2, 3 }, 3, &o, 0))            \
    X(kn_tokenizer_train_options, (.vocab = 300),                                                  \
      kn_tokenizer_free(kn_tokenizer_train_((const char *[]){ "aab" }, (size_t[]){ 3 }, 1, o)))    \
    X(kn_text_evaluate_options, (.ctx = 4, .comm = kn_comm_self()),                                \
      kn_text_evaluate_(&in.l, no_loss, in.text, &(kn_text_score){ 0 }, o))                        \
    X(kn_write_text_options, (.tokens = 1), write_text(o))                                         \
    X(kn_loader_new_options,                                                                       \
      (.samples = 4, .batch = 1, .workers = 1, .field = { { KN_F32, 1, { 1 } } }),                 \
      LOADER(kn_loader_new_(fill_one, NULL, NULL, o)))                                             \
    X(kn_tensor_loader_options, (.batch = 1, .workers = 1), {                                      \
        o.field[0] = in.half;                                                                      \
        LOADER(kn_tensor_loader_(NULL, o));                                                        \
    })                                                                                             \
    X(kn_gradcheck_options, (), (void)kn_gradcheck_(twice, KN_VALUES(in.scalar), o))               \
    X(kn_scaled_dot_product_attention_options, (.causal = true),                                   \
      kn_scaled_dot_product_attention_(in.q, in.q, in.q, o))                                       \
    X(kn_embedding_options, (), kn_embedding_(in.rows, in.to, o))                                  \
    X(kn_embedding_bag_options, (), kn_embedding_bag_(in.rows, kn_unsqueeze(in.to, 0), o))         \
    X(kn_huber_loss_options, (), kn_huber_loss_(in.rows, in.rows, o))                              \
    X(kn_smooth_l1_loss_options, (), kn_smooth_l1_loss_(in.rows, in.rows, o))                      \
    X(kn_nll_loss_options, (), kn_nll_loss_(in.rows, in.to, o))                                    \
    X(kn_cross_entropy_options, (), kn_cross_entropy_(in.rows, in.to, o))                          \
    X(kn_linear_cross_entropy_options, (), kn_linear_cross_entropy_(in.rows, in.rows, in.to, o))   \
    X(kn_normalize_options, (), kn_normalize_(in.rows, o))                                         \
    X(kn_cosine_similarity_options, (), kn_cosine_similarity_(in.rows, in.rows, o))                \
    X(kn_cosine_embedding_loss_options, (), kn_cosine_embedding_loss_(in.rows, in.rows, in.to, o)) \
    X(kn_conv2d_options, (), kn_conv2d_(in.image, in.w2, NULL, o))                                 \
    X(kn_conv1d_options, (), kn_conv1d_(in.line, in.w1, NULL, o))                                  \
    X(kn_conv_transpose2d_options, (.stride = 2), kn_conv_transpose2d_(in.image, in.w2, NULL, o))  \
    X(kn_conv_transpose1d_options, (.stride = 2), kn_conv_transpose1d_(in.line, in.w1, NULL, o))   \
    X(kn_batch_norm_options, (.training = true),                                                   \
      kn_batch_norm_(in.rows, NULL, NULL, NULL, NULL, o))                                          \
    X(kn_instance_norm_options, (), kn_instance_norm_(in.line, NULL, NULL, 0, o))                  \
    X(kn_pool2d_options, (.kernel = 2), {                                                          \
        o.kernel = o.kernels[0] ? 0 : o.kernel;                                                    \
        kn_max_pool2d_(in.image, o);                                                               \
    })                                                                                             \
    X(kn_pool1d_options, (.kernel = 2), kn_max_pool1d_(in.line, o))                                \
    X(kn_unfold2d_options, (.kernel = 2), {                                                        \
        o.kernel = o.kernels[0] ? 0 : o.kernel;                                                    \
        kn_unfold2d_(in.image, o);                                                                 \
    })                                                                                             \
    X(kn_interpolate_options, (), kn_interpolate_(in.image, o))                                    \
    X(kn_leaky_relu_options, (), kn_leaky_relu_(in.rows, o))                                       \
    X(kn_elu_options, (), kn_elu_(in.rows, o))                                                     \
    X(kn_softplus_options, (), kn_softplus_(in.rows, o))                                           \
    X(kn_hardtanh_options, (), kn_hardtanh_(in.rows, o))                                           \
    X(kn_shrink_options, (), kn_softshrink_(in.rows, o))                                           \
    X(kn_nan_to_num_options, (), kn_nan_to_num_(in.rows, o))                                       \
    X(kn_pairwise_distance_options, (), kn_pairwise_distance_(in.rows, in.rows, o))                \
    X(kn_cdist_options, (), kn_cdist_(in.rows, in.rows, o))                                        \
    X(kn_margin_ranking_loss_options, (), kn_margin_ranking_loss_(in.rows, in.rows, in.rows, o))   \
    X(kn_hinge_embedding_loss_options, (), kn_hinge_embedding_loss_(in.rows, in.rows, o))          \
    X(kn_triplet_margin_loss_options, (), kn_triplet_margin_loss_(in.rows, in.rows, in.rows, o))   \
    X(kn_gaussian_nll_loss_options, (), kn_gaussian_nll_loss_(in.rows, in.rows, in.rows, o))       \
    X(kn_poisson_nll_loss_options, (), kn_poisson_nll_loss_(in.rows, in.rows, o))                  \
    X(kn_conv3d_options, (),                                                                       \
      kn_conv3d_(kn_unsqueeze(in.image, 2), kn_unsqueeze(in.w2, 2), NULL, o))                      \
    X(kn_pool3d_options, (.kernel = 1), {                                                          \
        o.kernel = o.kernels[0] ? 0 : o.kernel;                                                    \
        kn_max_pool3d_(kn_unsqueeze(in.image, 2), o);                                              \
    })                                                                                             \
    X(kn_stft_options, (.n_fft = 4), {                                                             \
        kn_tensor *y = kn_stft_(kn_squeeze(in.line, 1, (int64_t[]){ 0 }), o);                      \
        (void)(y ? kn_istft_(y, o) : NULL);                                                        \
    })                                                                                             \
    X(kn_ctc_loss_options, (),                                                                     \
      kn_ctc_loss_(kn_log_softmax(in.line), kn_unsqueeze(kn_add_scalar(in.to, 1), 1),              \
                   kn_add_scalar(in.to, 1), kn_add_scalar(in.to, 1), o))                           \
    X(kn_var_options, (), kn_var_(in.rows, 0, NULL, o))                                            \
    X(kn_mesh, (), WRAP(.mesh = o))                                                                \
    X(kn_fsdp_wrap_options, (), wrap(o))                                                           \
    X(kn_ema_options, (), kn_ema_free(kn_ema_new_(&in.l, o)))                                      \
    X(kn_replay_options, (), kn_replay_free(kn_replay_new_(&in.l, o)))                             \
    X(kn_arange_options, (), kn_arange_(0, 0, 4, o))

/* ---- what numbers mean ----------------------------------------------------------------------- */

enum {
    NEG = 1,       /* those below 0 have a meaning */
    MINUS_ONE = 2, /* -1 alone */
    INF = 4,       /* the infinities */
    NANS = 8,      /* NaN */
    NOT_BIG = 16,  /* a call with a large number would take long: it isn't made */
    UNNAMED = 32   /* the error tells it in other words: "3 key-value heads don't divide" */
};

static const struct {
    const char *name; /* the end of it: ".eps" is that of every struct */
    int meaning;
} meanings[] = {
    { ".group_count", NOT_BIG },
    { "muon_options.ns", NEG },
    { ".kv_heads", UNNAMED },
    { ".rope_base", UNNAMED },
    { ".qk_norm_eps", UNNAMED },
    { ".head_dim", UNNAMED },
    { ".hidden", UNNAMED },
    { "initializer.a", NEG | UNNAMED },
    { "initializer.b", UNNAMED },
    { ".mean", NEG },
    { ".score", NEG | INF | NANS },
    { "image_save_options.low", NEG },
    { "augment_image_options.index", UNNAMED },
    { "kn_text_options.ctx", UNNAMED },
    { ".least", NOT_BIG },
    { "text_evaluate_options.ctx", NOT_BIG },
    { "text_evaluate_options.batch", NOT_BIG },
    { "write_text_options.tokens", NOT_BIG },
    { ".prompt_count", NOT_BIG },
    { ".stop_count", NOT_BIG },
    { "attention_options.scale", NEG },
    { ".ignore_index", NEG },
    { ".padding_idx", NEG },
    { "distance_options.p", INF },
    { "cdist_options.p", INF },
    { "triplet_margin_loss_options.p", INF },
    { "nan_to_num_options.nan", NEG | INF | NANS },
    { "nan_to_num_options.posinf", NEG | INF | NANS },
    { "nan_to_num_options.neginf", NEG | INF | NANS },
    { "ranking_loss_options.margin", NEG },
    { "hinge_embedding_loss_options.margin", NEG },
    { "triplet_margin_loss_options.margin", NEG },
    { "interpolate_options.size", UNNAMED },
    { "interpolate_options.sizes", UNNAMED },
    { ".slope", NEG },
    { ".alpha", NEG },
    { ".threshold", NEG },
    { "hardtanh_options.low", NEG },
    { ".correction", NEG },
    { "arange_options.start", NEG | UNNAMED },
    { ".dim", MINUS_ONE },
    { ".margin", MINUS_ONE },
    { "hardtanh_options.high", MINUS_ONE },
    { ".reshard_after_forward", MINUS_ONE },
};
