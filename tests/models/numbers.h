/* tests/models/numbers.h: a call for each number among the options of public functions. */
#include "knap.h"
#include "tests/kn_test.h"

/* Values that have a meaning. */
enum {
    NEG = 1,     /* those below 0 */
    INF = 2,     /* the infinities */
    NANS = 4,    /* NaN */
    NOT_BIG = 8, /* a call with a large number would take long: it isn't made */
    UNNAMED = 16 /* the error tells it in other words: "betas are nan and 0.999" */
};

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

/* ---- calls with one number ------------------------------------------------------------------- */

#define OPTIM(make)  kn_optim_free(make)
#define LOADER(make) kn_loader_free(make)
#define GROUP(...)                                                                                 \
    OPTIM(kn_sgd(&in.l, .lr = 1, .groups = &(kn_optim_group){ "*", __VA_ARGS__ }, .group_count = 1))
#define LAYER(type, call)                                                                          \
    do {                                                                                           \
        type m = { 0 };                                                                            \
        (void)(call);                                                                              \
        kn_module_free(&m);                                                                        \
    } while (0)
#define SCHEDULE(...) kn_schedule_at(&(kn_schedule){ __VA_ARGS__ }, 3)

static int fill_one(kn_data_sample *s, void *arg)
{
    (void)arg;
    *(float *)s->field[0] = (float)s->index;
    return true;
}
#define ONE .field = { { KN_F32, 1, { 1 } } }

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

static bool same_update(const kn_optim_part *p, void *arg)
{
    (void)arg;
    return p != NULL;
}

static void wrap(kn_fsdp_wrap_options o)
{
    kn_linear l = { 0 };
    if (kn_linear_init(&l, NULL, NULL, 2, 2))
        (void)kn_fsdp_wrap_(&l, NULL, o);
    kn_module_free(&l);
}
#define WRAP(...) wrap(KN_OPTIONS(kn_fsdp_wrap_options, __VA_ARGS__))

static void sample(kn_sample_options o)
{
    kn_sample((float[]){ 1, 2, 3 }, 3, &o, 0);
}

/* X(struct, field, values with a meaning, call with v) */
#define ROWS(X)                                                                                    \
    X(kn_optim_group, lr_mul, 0, GROUP(.lr_mul = v))                                               \
    X(kn_optim_group, weight_decay, 0, GROUP(.weight_decay = v))                                   \
    X(kn_optim_group, min_ndim, 0, GROUP(.min_ndim = v))                                           \
    X(kn_optim_group, max_ndim, 0, GROUP(.max_ndim = v))                                           \
    X(kn_adamw_options, lr, 0, OPTIM(kn_adamw(&in.l, .lr = v)))                                    \
    X(kn_adamw_options, beta1, UNNAMED, OPTIM(kn_adamw(&in.l, .lr = 1, .beta1 = v)))               \
    X(kn_adamw_options, beta2, UNNAMED, OPTIM(kn_adamw(&in.l, .lr = 1, .beta2 = v)))               \
    X(kn_adamw_options, eps, 0, OPTIM(kn_adamw(&in.l, .lr = 1, .eps = v)))                         \
    X(kn_adamw_options, weight_decay, 0, OPTIM(kn_adamw(&in.l, .lr = 1, .weight_decay = v)))       \
    X(kn_adamw_options, group_count, NOT_BIG, OPTIM(kn_adamw(&in.l, .lr = 1, .group_count = v)))   \
    X(kn_lion_options, lr, 0, OPTIM(kn_lion(&in.l, .lr = v)))                                      \
    X(kn_lion_options, beta1, UNNAMED, OPTIM(kn_lion(&in.l, .lr = 1, .beta1 = v)))                 \
    X(kn_lion_options, beta2, UNNAMED, OPTIM(kn_lion(&in.l, .lr = 1, .beta2 = v)))                 \
    X(kn_lion_options, weight_decay, 0, OPTIM(kn_lion(&in.l, .lr = 1, .weight_decay = v)))         \
    X(kn_lion_options, group_count, NOT_BIG, OPTIM(kn_lion(&in.l, .lr = 1, .group_count = v)))     \
    X(kn_sgd_options, lr, 0, OPTIM(kn_sgd(&in.l, .lr = v)))                                        \
    X(kn_sgd_options, momentum, 0, OPTIM(kn_sgd(&in.l, .lr = 1, .momentum = v)))                   \
    X(kn_sgd_options, dampening, 0,                                                                \
      OPTIM(kn_sgd(&in.l, .lr = 1, .momentum = 0.5, .dampening = v)))                              \
    X(kn_sgd_options, weight_decay, 0, OPTIM(kn_sgd(&in.l, .lr = 1, .weight_decay = v)))           \
    X(kn_sgd_options, group_count, NOT_BIG, OPTIM(kn_sgd(&in.l, .lr = 1, .group_count = v)))       \
    X(kn_muon_options, lr, 0, OPTIM(kn_muon(&in.l, .lr = v)))                                      \
    X(kn_muon_options, momentum, 0, OPTIM(kn_muon(&in.l, .lr = 1, .momentum = v)))                 \
    X(kn_muon_options, ns, NEG, OPTIM(kn_muon(&in.l, .lr = 1, .ns = { v, 1, 1 })))                 \
    X(kn_muon_options, ns_steps, 0, OPTIM(kn_muon(&in.l, .lr = 1, .ns_steps = v)))                 \
    X(kn_muon_options, eps, 0, OPTIM(kn_muon(&in.l, .lr = 1, .eps = v)))                           \
    X(kn_muon_options, weight_decay, 0, OPTIM(kn_muon(&in.l, .lr = 1, .weight_decay = v)))         \
    X(kn_muon_options, adamw_lr_mul, 0, OPTIM(kn_muon(&in.l, .lr = 1, .adamw_lr_mul = v)))         \
    X(kn_muon_options, beta1, UNNAMED, OPTIM(kn_muon(&in.l, .lr = 1, .beta1 = v)))                 \
    X(kn_muon_options, beta2, UNNAMED, OPTIM(kn_muon(&in.l, .lr = 1, .beta2 = v)))                 \
    X(kn_muon_options, adamw_eps, 0, OPTIM(kn_muon(&in.l, .lr = 1, .adamw_eps = v)))               \
    X(kn_muon_options, window, 0, OPTIM(kn_muon(&in.l, .lr = 1, .window = v)))                     \
    X(kn_muon_options, group_count, NOT_BIG, OPTIM(kn_muon(&in.l, .lr = 1, .group_count = v)))     \
    X(kn_own_optim_options, lr, 0, OPTIM(kn_own_optim(&in.l, .update = same_update, .lr = v)))     \
    X(kn_own_optim_options, weight_decay, 0,                                                       \
      OPTIM(kn_own_optim(&in.l, .update = same_update, .lr = 1, .weight_decay = v)))               \
    X(kn_own_optim_options, group_count, NOT_BIG,                                                  \
      OPTIM(kn_own_optim(&in.l, .update = same_update, .lr = 1, .group_count = v)))                \
    X(kn_scaler_options, init_scale, 0, kn_scaler_free(kn_scaler_new(&in.l, .init_scale = v)))     \
    X(kn_scaler_options, growth, 0, kn_scaler_free(kn_scaler_new(&in.l, .growth = v)))             \
    X(kn_scaler_options, backoff, 0, kn_scaler_free(kn_scaler_new(&in.l, .backoff = v)))           \
    X(kn_scaler_options, interval, 0, kn_scaler_free(kn_scaler_new(&in.l, .interval = v)))         \
    X(kn_schedule, lr, 0, SCHEDULE(.lr = v))                                                       \
    X(kn_schedule, min_lr, 0, SCHEDULE(KN_COSINE, .lr = 1, .min_lr = v, .steps = 9))               \
    X(kn_schedule, warmup, 0, SCHEDULE(KN_COSINE, .lr = 1, .warmup = v, .steps = 9))               \
    X(kn_schedule, steps, 0, SCHEDULE(KN_COSINE, .lr = 1, .steps = v))                             \
    X(kn_schedule, power, 0, SCHEDULE(KN_POLYNOMIAL, .lr = 1, .steps = 9, .power = v))             \
    X(kn_schedule, every, 0, SCHEDULE(KN_STEP_DECAY, .lr = 1, .every = v))                         \
    X(kn_schedule, factor, 0, SCHEDULE(KN_STEP_DECAY, .lr = 1, .every = 2, .factor = v))           \
    X(kn_schedule, decay, 0, SCHEDULE(KN_WSD, .lr = 1, .steps = 9, .decay = v))                    \
    X(kn_norm_init_options, eps, 0, {                                                              \
        LAYER(kn_layer_norm, kn_layer_norm_init(&m, NULL, NULL, 4, .eps = v));                     \
        LAYER(kn_rms_norm, kn_rms_norm_init(&m, NULL, NULL, 4, .eps = v));                         \
    })                                                                                             \
    MORE_ROWS(X)

#define CONV2(...)                                                                                 \
    LAYER(kn_conv2d, kn_conv2d_init(&m, NULL, NULL, 2, 2, 2, .device = KN_META, __VA_ARGS__))
#define CONV1(...)                                                                                 \
    LAYER(kn_conv1d, kn_conv1d_init(&m, NULL, NULL, 2, 2, 2, .device = KN_META, __VA_ARGS__))
#define BACK2(...)                                                                                 \
    LAYER(kn_conv_transpose2d,                                                                     \
          kn_conv_transpose2d_init(&m, NULL, NULL, 2, 2, 2, .device = KN_META, __VA_ARGS__))
#define BACK1(...)                                                                                 \
    LAYER(kn_conv_transpose1d,                                                                     \
          kn_conv_transpose1d_init(&m, NULL, NULL, 2, 2, 2, .device = KN_META, __VA_ARGS__))
#define SELF(...)                                                                                  \
    LAYER(kn_self_attention,                                                                       \
          kn_self_attention_init(&m, NULL, NULL, 4, 2, .device = KN_META, __VA_ARGS__))
#define MULTI(...)                                                                                 \
    LAYER(kn_multi_head_attention,                                                                 \
          kn_multi_head_attention_init(&m, NULL, NULL, 4, 2, .device = KN_META, __VA_ARGS__))

#define MORE_ROWS(X)                                                                               \
    X(kn_conv2d_init_options, stride, 0, CONV2(.stride = v))                                       \
    X(kn_conv2d_init_options, pad, 0, CONV2(.pad = v))                                             \
    X(kn_conv2d_init_options, dilation, 0, CONV2(.dilation = v))                                   \
    X(kn_conv2d_init_options, groups, 0, CONV2(.groups = v))                                       \
    X(kn_conv2d_init_options, kernels, 0,                                                          \
      LAYER(kn_conv2d,                                                                             \
            kn_conv2d_init(&m, NULL, NULL, 2, 2, 0, .kernels = { v, 2 }, .device = KN_META)))      \
    X(kn_conv2d_init_options, strides, 0, CONV2(.strides = { v, 1 }))                              \
    X(kn_conv2d_init_options, pads, 0, CONV2(.pads = { v, 1 }))                                    \
    X(kn_conv2d_init_options, dilations, 0, CONV2(.dilations = { 1, v }))                          \
    X(kn_conv1d_init_options, stride, 0, CONV1(.stride = v))                                       \
    X(kn_conv1d_init_options, pad, 0, CONV1(.pad = v))                                             \
    X(kn_conv1d_init_options, dilation, 0, CONV1(.dilation = v))                                   \
    X(kn_conv1d_init_options, groups, 0, CONV1(.groups = v))                                       \
    X(kn_conv_transpose2d_init_options, stride, 0, BACK2(.stride = v))                             \
    X(kn_conv_transpose2d_init_options, pad, 0, BACK2(.pad = v))                                   \
    X(kn_conv_transpose2d_init_options, output_pad, 0, BACK2(.output_pad = v))                     \
    X(kn_conv_transpose2d_init_options, dilation, 0, BACK2(.dilation = v))                         \
    X(kn_conv_transpose2d_init_options, groups, 0, BACK2(.groups = v))                             \
    X(kn_conv_transpose2d_init_options, kernels, 0,                                                \
      LAYER(kn_conv_transpose2d,                                                                   \
            kn_conv_transpose2d_init(&m, NULL, NULL, 2, 2, 0, .kernels = { v, 2 },                 \
                                     .device = KN_META)))                                          \
    X(kn_conv_transpose2d_init_options, strides, 0, BACK2(.strides = { v, 1 }))                    \
    X(kn_conv_transpose2d_init_options, pads, 0, BACK2(.pads = { v, 1 }))                          \
    X(kn_conv_transpose2d_init_options, output_pads, 0, BACK2(.output_pads = { v, 1 }))            \
    X(kn_conv_transpose2d_init_options, dilations, 0, BACK2(.dilations = { 1, v }))                \
    X(kn_conv_transpose1d_init_options, stride, 0, BACK1(.stride = v))                             \
    X(kn_conv_transpose1d_init_options, pad, 0, BACK1(.pad = v))                                   \
    X(kn_conv_transpose1d_init_options, output_pad, 0, BACK1(.output_pad = v))                     \
    X(kn_conv_transpose1d_init_options, dilation, 0, BACK1(.dilation = v))                         \
    X(kn_conv_transpose1d_init_options, groups, 0, BACK1(.groups = v))                             \
    X(kn_batch_norm_init_options, eps, 0,                                                          \
      LAYER(kn_batch_norm, kn_batch_norm_init(&m, NULL, NULL, 4, .eps = v)))                       \
    X(kn_batch_norm_init_options, momentum, 0,                                                     \
      LAYER(kn_batch_norm, kn_batch_norm_init(&m, NULL, NULL, 4, .momentum = v)))                  \
    X(kn_group_norm_init_options, eps, 0,                                                          \
      LAYER(kn_group_norm, kn_group_norm_init(&m, NULL, NULL, 2, 4, .eps = v)))                    \
    X(kn_instance_norm_init_options, eps, 0,                                                       \
      LAYER(kn_instance_norm, kn_instance_norm_init(&m, NULL, NULL, 4, .eps = v)))                 \
    X(kn_self_attention_init_options, kv_heads, UNNAMED, SELF(.kv_heads = v))                      \
    X(kn_self_attention_init_options, rope_base, UNNAMED, SELF(.rope = true, .rope_base = v))      \
    X(kn_self_attention_init_options, qk_norm_eps, UNNAMED,                                        \
      SELF(.qk_norm = true, .qk_norm_eps = v))                                                     \
    X(kn_self_attention_init_options, dropout, 0, SELF(.dropout = v))                              \
    X(kn_multi_head_attention_init_options, kv_dim, 0, MULTI(.kv_dim = v))                         \
    X(kn_multi_head_attention_init_options, head_dim, UNNAMED, MULTI(.head_dim = v))               \
    X(kn_multi_head_attention_init_options, window, 0, MULTI(.causal = true, .window = v))         \
    X(kn_multi_head_attention_init_options, kv_heads, UNNAMED, MULTI(.kv_heads = v))               \
    X(kn_multi_head_attention_init_options, rope_base, UNNAMED,                                    \
      MULTI(.rope = true, .rope_base = v))                                                         \
    X(kn_multi_head_attention_init_options, qk_norm_eps, UNNAMED,                                  \
      MULTI(.qk_norm = true, .qk_norm_eps = v))                                                    \
    X(kn_multi_head_attention_init_options, dropout, 0, MULTI(.dropout = v))                       \
    X(kn_mlp_init_options, hidden, UNNAMED,                                                        \
      LAYER(kn_mlp, kn_mlp_init(&m, NULL, NULL, 4, .hidden = v, .device = KN_META)))               \
    X(kn_mlp_init_options, dropout, 0,                                                             \
      LAYER(kn_mlp, kn_mlp_init(&m, NULL, NULL, 4, .dropout = v)))                                 \
    X(kn_swiglu_init_options, dropout, 0,                                                          \
      LAYER(kn_swiglu, kn_swiglu_init(&m, NULL, NULL, 4, 4, .dropout = v)))                        \
    X(kn_initializer, a, NEG | UNNAMED,                                                            \
      LAYER(kn_linear, kn_linear_init(&m, NULL, NULL, 2, 2, .weight = KN_CONSTANT_INIT(v))))       \
    X(kn_initializer, b, UNNAMED,                                                                  \
      LAYER(kn_linear, kn_linear_init(&m, NULL, NULL, 2, 2, .weight = KN_NORMAL_INIT(v))))         \
    X(kn_summary_options, depth, 0, {                                                              \
        FILE *out = fopen("/dev/null", "w");                                                       \
        (void)kn_summary(out, &in.l, KN_VALUES(in.half), .depth = v);                              \
        fclose(out);                                                                               \
    })                                                                                             \
    X(kn_rope_scaling, factor, 0, kn_rope(in.q, 0, 0, .scaling = { .factor = v }))                 \
    X(kn_rope_scaling, low_freq_factor, 0,                                                         \
      kn_rope(in.q, 0, 0, .scaling = { .factor = 2, .low_freq_factor = v }))                       \
    X(kn_rope_scaling, high_freq_factor, 0,                                                        \
      kn_rope(in.q, 0, 0, .scaling = { .factor = 2, .high_freq_factor = v }))                      \
    X(kn_rope_scaling, original_ctx, 0,                                                            \
      kn_rope(in.q, 0, 0, .scaling = { .factor = 2, .original_ctx = v }))                          \
    LAST_ROWS(X)

#define TEXTS(...)   LOADER(kn_text_loader(in.text, NULL, __VA_ARGS__))
#define SAMPLES(...) LOADER(kn_loader_new(fill_one, NULL, NULL, ONE, __VA_ARGS__))
#define TENSORS(...) LOADER(kn_tensor_loader(NULL, .field = { in.half }, __VA_ARGS__))
#define LEARN(...)                                                                                 \
    kn_tokenizer_free(                                                                             \
        kn_tokenizer_train((const char *[]){ "aab" }, (size_t[]){ 3 }, 1, __VA_ARGS__))
static kn_tensor *no_loss(void *module, kn_tensor *ids, kn_tensor *targets)
{
    (void)module, (void)ids, (void)targets;
    return kn_zeros(KN_F32, KN_CPU, 0, NULL);
}
#define EVALUATE(...)                                                                              \
    kn_text_evaluate(&in.l, no_loss, in.text, &(kn_text_score){ 0 }, .comm = kn_comm_self(),       \
                     __VA_ARGS__)
#define WRITE(...) (void)kn_write_text(&in.l, no_logits, in.tokenizer, .prompt = "a", __VA_ARGS__)
#define WRITES(...)                                                                                \
    (void)kn_write_text(&in.l, no_logits, in.tokenizer, .prompts = &(kn_prompt){ "a" }, __VA_ARGS__)
#define IMAGES(...)  LOADER(kn_image_loader(in.set, NULL, __VA_ARGS__))
#define ATTEND(...)  kn_scaled_dot_product_attention(in.q, in.q, in.q, __VA_ARGS__)
#define CHECKED(...) (void)kn_gradcheck(twice, KN_VALUES(in.scalar), __VA_ARGS__)

#define EXPORT(...)                                                                                \
    (void)kn_pretrained_save(in.exported, &in.net, .resnet = kn_resnet_config_of(&in.net),         \
                             __VA_ARGS__)

#define LOADED(...)                                                                                \
    kn_state *s = kn_state_dict(&in.l);                                                            \
    (void)kn_load_state_dict(&in.l, s, __VA_ARGS__);                                               \
    kn_state_free(s)
#define OPENED(...)                                                                                \
    kn_checkpoint *c = kn_checkpoint_open(in.saved, NULL);                                         \
    (void)kn_checkpoint_load(c, &in.l, __VA_ARGS__);                                               \
    kn_checkpoint_free(c)

#define LAST_ROWS(X)                                                                               \
    X(kn_checkpoint_save_options, step, 0, (void)kn_checkpoint_save(in.path, &in.l, .step = v))    \
    X(kn_pretrained_save_options, side, 0, EXPORT(.side = v))                                      \
    X(kn_pretrained_save_options, mean, NEG, EXPORT(.mean = { v, 0, 0 }, .std = { 1, 1, 1 }))      \
    X(kn_pretrained_save_options, std, 0, EXPORT(.std = { v, 1, 1 }))                              \
    X(kn_pretrained_save_options, crop_pct, 0, EXPORT(.crop_pct = v))                              \
    X(kn_checkpoint_save_options, keep, 0, (void)kn_checkpoint_save(in.path, &in.l, .keep = v))    \
    X(kn_checkpoint_save_options, file_count, 0,                                                   \
      (void)kn_checkpoint_save(in.path, &in.l, .file_count = v))                                   \
    X(kn_checkpoint_save_options, optim_count, 0,                                                  \
      (void)kn_checkpoint_save(in.path, &in.l, .optim_count = v))                                  \
    X(kn_load_state_dict_options, rename_count, 0, LOADED(.rename_count = v))                      \
    X(kn_checkpoint_load_options, rename_count, 0, OPENED(.rename_count = v))                      \
    X(kn_checkpoint_load_options, optim_count, 0, OPENED(.optim_count = v))                        \
    X(kn_checkpoint_save_options, score, NEG | INF | NANS,                                         \
      (void)kn_checkpoint_save(in.path, &in.l, .score = v))                                        \
    X(kn_image_save_options, columns, 0, (void)kn_image_save(in.picture, in.image, .columns = v))  \
    X(kn_image_save_options, gap, 0, (void)kn_image_save(in.picture, in.image, .gap = v))          \
    X(kn_image_save_options, low, NEG,                                                             \
      (void)kn_image_save(in.picture, in.image, .low = v, .high = 2))                              \
    X(kn_image_save_options, high, 0, (void)kn_image_save(in.picture, in.image, .high = v))        \
    X(kn_image_set_open_options, max_pixels, 0,                                                    \
      kn_image_set_free(kn_image_set_open("shapes", "train", .max_pixels = v)))                    \
    X(kn_image_read_options, max_pixels, 0, (void)kn_image_read(in.picture, .max_pixels = v))      \
    X(kn_augment_image_options, epoch, 0, (void)kn_augment_image(in.pixels, .epoch = v))           \
    X(kn_augment_image_options, index, UNNAMED, (void)kn_augment_image(in.pixels, .index = v))     \
    X(kn_image_loader_options, mixup_alpha, 0, IMAGES(.batch = 2, .mixup_alpha = v))               \
    X(kn_image_loader_options, cutmix_alpha, 0, IMAGES(.batch = 2, .cutmix_alpha = v))             \
    X(kn_image_loader_options, batch, 0, IMAGES(.batch = v))                                       \
    X(kn_image_loader_options, accum, 0, IMAGES(.batch = 1, .accum = v))                           \
    X(kn_image_loader_options, workers, 0, IMAGES(.batch = 1, .workers = v))                       \
    X(kn_image_loader_options, ahead, 0, IMAGES(.batch = 1, .workers = 1, .ahead = v))             \
    X(kn_text_read_options, vocab, 0,                                                              \
      kn_text_free(kn_text_read(in.path, &(kn_tokenizer *){ NULL }, .vocab = v)))                  \
    X(kn_text_options, ctx, UNNAMED, TEXTS(.batch = 1, .ctx = v))                                  \
    X(kn_text_options, batch, 0, TEXTS(.batch = v, .ctx = 1))                                      \
    X(kn_text_options, accum, 0, TEXTS(.batch = 1, .ctx = 1, .accum = v))                          \
    X(kn_text_options, workers, 0, TEXTS(.batch = 1, .ctx = 1, .workers = v))                      \
    X(kn_text_options, ahead, 0, TEXTS(.batch = 1, .ctx = 1, .workers = 1, .ahead = v))            \
    X(kn_sample_options, temperature, 0, sample((kn_sample_options){ .temperature = v }))          \
    X(kn_sample_options, top_k, 0, sample((kn_sample_options){ .temperature = 1, .top_k = v }))    \
    X(kn_sample_options, top_p, 0, sample((kn_sample_options){ .temperature = 1, .top_p = v }))    \
    X(kn_tokenizer_train_options, vocab, 0, LEARN(.vocab = v))                                     \
    X(kn_tokenizer_train_options, least, NOT_BIG, LEARN(.vocab = 300, .least = v))                 \
    X(kn_text_evaluate_options, ctx, NOT_BIG, EVALUATE(.ctx = v))                                  \
    X(kn_text_evaluate_options, stride, 0, EVALUATE(.ctx = 4, .stride = v))                        \
    X(kn_text_evaluate_options, batch, NOT_BIG, EVALUATE(.ctx = 4, .batch = v))                    \
    X(kn_write_text_options, tokens, NOT_BIG, WRITE(.tokens = v))                                  \
    X(kn_write_text_options, prompt_count, NOT_BIG, WRITE(.tokens = 1, .prompt_count = v))         \
    X(kn_write_text_options, prompts_count, 0, WRITES(.tokens = 1, .prompts_count = v))            \
    X(kn_write_text_options, samples, 0, WRITE(.tokens = 1, .samples = v))                         \
    X(kn_write_text_options, stop_count, NOT_BIG, WRITE(.tokens = 1, .stop_count = v))             \
    X(kn_write_text_options, ctx, 0, WRITE(.tokens = 1, .ctx = v))                                 \
    X(kn_loader_new_options, samples, 0, SAMPLES(.samples = v, .batch = 1))                        \
    X(kn_loader_new_options, batch, 0, SAMPLES(.samples = 4, .batch = v))                          \
    X(kn_loader_new_options, accum, 0, SAMPLES(.samples = 4, .batch = 1, .accum = v))              \
    X(kn_loader_new_options, workers, 0, SAMPLES(.samples = 4, .batch = 1, .workers = v))          \
    X(kn_loader_new_options, ahead, 0,                                                             \
      SAMPLES(.samples = 4, .batch = 1, .workers = 1, .ahead = v))                                 \
    X(kn_tensor_loader_options, batch, 0, TENSORS(.batch = v))                                     \
    X(kn_tensor_loader_options, accum, 0, TENSORS(.batch = 1, .accum = v))                         \
    X(kn_tensor_loader_options, workers, 0, TENSORS(.batch = 1, .workers = v))                     \
    X(kn_tensor_loader_options, ahead, 0, TENSORS(.batch = 1, .workers = 1, .ahead = v))           \
    X(kn_gradcheck_options, eps, 0, CHECKED(.eps = v))                                             \
    X(kn_gradcheck_options, atol, 0, CHECKED(.atol = v))                                           \
    X(kn_gradcheck_options, rtol, 0, CHECKED(.rtol = v))                                           \
    X(kn_gradcheck_options, one_in, 0, CHECKED(.one_in = v))                                       \
    X(kn_scaled_dot_product_attention_options, scale, NEG, ATTEND(.scale = v))                     \
    X(kn_scaled_dot_product_attention_options, dropout, 0, ATTEND(.dropout = v))                   \
    X(kn_scaled_dot_product_attention_options, window, 0, ATTEND(.causal = true, .window = v))     \
    X(kn_huber_loss_options, delta, 0, kn_huber_loss(in.rows, in.rows, .delta = v))                \
    X(kn_smooth_l1_loss_options, beta, 0, kn_smooth_l1_loss(in.rows, in.rows, .beta = v))          \
    X(kn_nll_loss_options, ignore_index, NEG, kn_nll_loss(in.rows, in.to, .ignore_index = v))      \
    X(kn_cross_entropy_options, ignore_index, NEG,                                                 \
      kn_cross_entropy(in.rows, in.to, .ignore_index = v))                                         \
    X(kn_cross_entropy_options, smoothing, 0, kn_cross_entropy(in.rows, in.to, .smoothing = v))    \
    X(kn_linear_cross_entropy_options, ignore_index, NEG,                                          \
      kn_linear_cross_entropy(in.rows, in.rows, in.to, .ignore_index = v))                         \
    X(kn_linear_cross_entropy_options, smoothing, 0,                                               \
      kn_linear_cross_entropy(in.rows, in.rows, in.to, .smoothing = v))                            \
    X(kn_normalize_options, dim, 0, kn_normalize(in.rows, .dim = v == -1 ? -9 : v))                \
    X(kn_normalize_options, eps, 0, kn_normalize(in.rows, .eps = v))                               \
    X(kn_cosine_similarity_options, dim, 0,                                                        \
      kn_cosine_similarity(in.rows, in.rows, .dim = v == -1 ? -9 : v))                             \
    X(kn_cosine_similarity_options, eps, 0, kn_cosine_similarity(in.rows, in.rows, .eps = v))      \
    X(kn_cosine_embedding_loss_options, margin, 0,                                                 \
      kn_cosine_embedding_loss(in.rows, in.rows, in.to, .margin = v == -1 ? -2 : v))               \
    OP_ROWS(X)

#define CONVOLVE2(...) kn_conv2d(in.image, in.w2, NULL, __VA_ARGS__)
#define CONVOLVE1(...) kn_conv1d(in.line, in.w1, NULL, __VA_ARGS__)
#define GO_BACK2(...)  kn_conv_transpose2d(in.image, in.w2, NULL, __VA_ARGS__)
#define GO_BACK1(...)  kn_conv_transpose1d(in.line, in.w1, NULL, __VA_ARGS__)
#define NORM(...)      kn_batch_norm(in.rows, NULL, NULL, NULL, NULL, .training = true, __VA_ARGS__)

#define OP_ROWS(X)                                                                                 \
    X(kn_conv2d_options, stride, 0, CONVOLVE2(.stride = v))                                        \
    X(kn_conv2d_options, pad, 0, CONVOLVE2(.pad = v))                                              \
    X(kn_conv2d_options, dilation, 0, CONVOLVE2(.dilation = v))                                    \
    X(kn_conv2d_options, strides, 0, CONVOLVE2(.strides = { v, 1 }))                               \
    X(kn_conv2d_options, pads, 0, CONVOLVE2(.pads = { 1, v }))                                     \
    X(kn_conv2d_options, dilations, 0, CONVOLVE2(.dilations = { v, 1 }))                           \
    X(kn_conv2d_options, groups, 0, CONVOLVE2(.groups = v))                                        \
    X(kn_conv1d_options, stride, 0, CONVOLVE1(.stride = v))                                        \
    X(kn_conv1d_options, pad, 0, CONVOLVE1(.pad = v))                                              \
    X(kn_conv1d_options, dilation, 0, CONVOLVE1(.dilation = v))                                    \
    X(kn_conv1d_options, groups, 0, CONVOLVE1(.groups = v))                                        \
    X(kn_conv_transpose2d_options, stride, 0, GO_BACK2(.stride = v))                               \
    X(kn_conv_transpose2d_options, pad, 0, GO_BACK2(.pad = v))                                     \
    X(kn_conv_transpose2d_options, output_pad, 0, GO_BACK2(.output_pad = v))                       \
    X(kn_conv_transpose2d_options, dilation, 0, GO_BACK2(.dilation = v))                           \
    X(kn_conv_transpose2d_options, strides, 0, GO_BACK2(.strides = { v, 1 }))                      \
    X(kn_conv_transpose2d_options, pads, 0, GO_BACK2(.pads = { 1, v }))                            \
    X(kn_conv_transpose2d_options, output_pads, 0, GO_BACK2(.output_pads = { v, 0 }))              \
    X(kn_conv_transpose2d_options, dilations, 0, GO_BACK2(.dilations = { v, 1 }))                  \
    X(kn_conv_transpose2d_options, groups, 0, GO_BACK2(.groups = v))                               \
    X(kn_conv_transpose1d_options, stride, 0, GO_BACK1(.stride = v))                               \
    X(kn_conv_transpose1d_options, pad, 0, GO_BACK1(.pad = v))                                     \
    X(kn_conv_transpose1d_options, output_pad, 0, GO_BACK1(.output_pad = v))                       \
    X(kn_conv_transpose1d_options, dilation, 0, GO_BACK1(.dilation = v))                           \
    X(kn_conv_transpose1d_options, groups, 0, GO_BACK1(.groups = v))                               \
    X(kn_batch_norm_options, momentum, 0, NORM(.momentum = v))                                     \
    X(kn_batch_norm_options, eps, 0, NORM(.eps = v))                                               \
    X(kn_pool2d_options, kernel, 0, kn_max_pool2d(in.image, .kernel = v))                          \
    X(kn_pool2d_options, stride, 0, kn_max_pool2d(in.image, .kernel = 2, .stride = v))             \
    X(kn_pool2d_options, pad, 0, kn_avg_pool2d(in.image, .kernel = 2, .pad = v))                   \
    X(kn_pool2d_options, dilation, 0, kn_max_pool2d(in.image, .kernel = 2, .dilation = v))         \
    X(kn_pool2d_options, kernels, 0, kn_avg_pool2d(in.image, .kernels = { v, 1 }))                 \
    X(kn_pool2d_options, strides, 0, kn_avg_pool2d(in.image, .kernel = 2, .strides = { v, 1 }))    \
    X(kn_pool2d_options, pads, 0, kn_max_pool2d(in.image, .kernel = 2, .pads = { v, 1 }))          \
    X(kn_pool2d_options, dilations, 0,                                                             \
      kn_max_pool2d(in.image, .kernel = 2, .dilations = { v, 1 }))                                 \
    X(kn_pool1d_options, kernel, 0, kn_max_pool1d(in.line, .kernel = v))                           \
    X(kn_pool1d_options, stride, 0, kn_avg_pool1d(in.line, .kernel = 2, .stride = v))              \
    X(kn_pool1d_options, pad, 0, kn_max_pool1d(in.line, .kernel = 2, .pad = v))                    \
    X(kn_pool1d_options, dilation, 0, kn_max_pool1d(in.line, .kernel = 2, .dilation = v))          \
    X(kn_unfold2d_options, kernel, 0, kn_unfold2d(in.image, .kernel = v))                          \
    X(kn_unfold2d_options, stride, 0, kn_unfold2d(in.image, .kernel = 2, .stride = v))             \
    X(kn_unfold2d_options, pad, 0, kn_unfold2d(in.image, .kernel = 2, .pad = v))                   \
    X(kn_unfold2d_options, dilation, 0, kn_unfold2d(in.image, .kernel = 2, .dilation = v))         \
    X(kn_unfold2d_options, kernels, 0, kn_unfold2d(in.image, .kernels = { v, 1 }))                 \
    X(kn_unfold2d_options, strides, 0, kn_unfold2d(in.image, .kernel = 2, .strides = { v, 1 }))    \
    X(kn_unfold2d_options, pads, 0, kn_unfold2d(in.image, .kernel = 2, .pads = { v, 1 }))          \
    X(kn_unfold2d_options, dilations, 0,                                                           \
      kn_unfold2d(in.image, .kernel = 2, .dilations = { v, 1 }))                                   \
    X(kn_interpolate_options, size, UNNAMED, kn_interpolate(in.image, .size = v))                  \
    X(kn_interpolate_options, sizes, UNNAMED, kn_interpolate(in.image, .sizes = { v, 1 }))         \
    X(kn_interpolate_options, scale, 0, kn_interpolate(in.image, .scale = v))                      \
    X(kn_interpolate_options, scales, 0, kn_interpolate(in.image, .scales = { v, 1 }))             \
    X(kn_leaky_relu_options, slope, NEG, kn_leaky_relu(in.rows, .slope = v))                       \
    X(kn_elu_options, alpha, NEG, kn_elu(in.rows, .alpha = v))                                     \
    X(kn_softplus_options, beta, 0, kn_softplus(in.rows, .beta = v))                               \
    X(kn_softplus_options, threshold, NEG, kn_softplus(in.rows, .threshold = v))                   \
    X(kn_hardtanh_options, low, NEG, kn_hardtanh(in.rows, .low = v))                               \
    X(kn_hardtanh_options, high, 0, kn_hardtanh(in.rows, .high = v == -1 ? -2 : v))                \
    X(kn_var_options, correction, NEG, kn_var(in.rows, 0, NULL, .correction = v))                  \
    X(kn_mesh, replicas, 0, WRAP(.mesh.replicas = v))                                              \
    X(kn_mesh, shards, 0, WRAP(.mesh.shards = v))                                                  \
    X(kn_fsdp_wrap_options, reshard_after_forward, 0,                                              \
      WRAP(.reshard_after_forward = v == -1 ? -9 : v))                                             \
    X(kn_fsdp_wrap_options, keep_whole_below, 0, WRAP(.keep_whole_below = v))                      \
    X(kn_fsdp_wrap_options, max_gathers, 0, WRAP(.max_gathers = v))                                \
    X(kn_fsdp_wrap_options, max_reductions, 0, WRAP(.max_reductions = v))                          \
    X(kn_fsdp_wrap_options, min_params, 0, WRAP(.min_params = v))                                  \
    X(kn_fsdp_wrap_options, divide_factor, 0, WRAP(.divide_factor = v))                            \
    X(kn_fsdp_wrap_options, predivide_factor, 0, WRAP(.predivide_factor = v))                      \
    X(kn_fsdp_wrap_options, timeout_s, 0, WRAP(.timeout_s = v))                                    \
    X(kn_ema_options, decay, 0, kn_ema_free(kn_ema_new(&in.l, .decay = v)))                        \
    X(kn_ema_options, warmup, 0, kn_ema_free(kn_ema_new(&in.l, .warmup = v)))                      \
    X(kn_replay_options, eager_steps, 0, kn_replay_free(kn_replay_new(&in.l, .eager_steps = v)))   \
    X(kn_arange_options, start, NEG | UNNAMED, kn_arange(0, 0, 4, .start = v))                     \
    X(kn_arange_options, step, 0, kn_arange(0, 0, 4, .step = v))
