/* tests/fsdp/norms_of_sums_test.c: kn_add_norm where a norm is a unit of its own: the unit's casts
 * and moves are for what is normed, and the residual stream beside it stays as it is. */
#include "tests/fsdp/net.h"

typedef struct stream {
    kn_module base;
    kn_linear fc;
    kn_layer_norm layer;
    kn_rms_norm rms;
    bool at_once;
} stream;

/* x -> the residual stream behind two norms, and the result of the second. */
static kn_values stream_forward(kn_module *self, kn_values in, const void *arg)
{
    stream *m = (stream *)self;
    kn_tensor *x = in.v[0], *h = kn_call(&m->fc, x);
    void *const norm[] = { &m->layer, &m->rms };
    for (int i = 0; i < 2; i++) {
        h = kn_cast(h, kn_dtype_of(x));
        if (m->at_once)
            h = kn_add_norm(norm[i], x, h, &x);
        else
            h = kn_call(norm[i], x = kn_add(x, h));
    }
    return KN_VALUES(x, h);
}

typedef struct setting {
    const char *name;
    const char *exact;              /* .full_precision_class of the unit around */
    bool apart;                     /* each norm is a unit, with what follows */
    kn_dtype param, output, around; /* .param_dtype, .output_dtype; .param_dtype around them */
    kn_cast_inputs cast;
    int seen; /* tensors that come to a norm: 1 where its unit casts, else 2, in one operation */
} setting;

static const setting settings[] = {
    { .name = "classes in full precision",
      .exact = "layer_norm,rms_norm",
      .around = KN_BF16,
      .seen = 1 },
    { .name = "f32 in bf16",
      .apart = true,
      .param = KN_F32,
      .output = KN_F32,
      .around = KN_BF16,
      .seen = 1 },
    { .name = "bf16 in f32", .apart = true, .param = KN_BF16, .output = KN_F32, .seen = 1 },
    { .name = "results in bf16", .apart = true, .param = KN_BF16, .output = KN_BF16, .seen = 1 },
    { .name = "results alone", .apart = true, .output = KN_BF16, .cast = KN_CAST_NONE, .seen = 1 },
    { .name = "in bf16", .apart = true, .param = KN_BF16, .around = KN_BF16, .seen = 2 },
    { .name = "inputs of the root alone",
      .apart = true,
      .param = KN_F32,
      .around = KN_BF16,
      .cast = KN_CAST_ROOT,
      .seen = 2 },
    { .name = "no casts", .apart = true, .seen = 2 },
};
enum { SETTINGS = sizeof settings / sizeof settings[0], WIDTH = 12, RESULTS = 2 + 1 + 5 };

static void look(kn_module_event *e, void *arg)
{
    *(int *)arg = e->in.n;
}

static bool stream_init(stream *m, const setting *s)
{
    return kn_module_init_n(&m->base, stream_forward) &&
           kn_linear_init(&m->fc, &m->base, "fc", WIDTH, WIDTH) &&
           kn_layer_norm_init(&m->layer, &m->base, "layer", WIDTH) &&
           kn_rms_norm_init(&m->rms, &m->base, "rms", WIDTH) &&
           (!s->apart || (kn_fsdp_wrap(&m->layer, NULL, .param_dtype = s->param,
                                       .output_dtype = s->output, .cast_inputs = s->cast) &&
                          kn_fsdp_wrap(&m->rms, NULL, .param_dtype = s->param,
                                       .output_dtype = s->output, .cast_inputs = s->cast))) &&
           kn_fsdp_wrap(m, NULL, .param_dtype = s->around, .full_precision_class = s->exact);
}

/* The stream, the norm, and the gradients of the input and of the parameters; all are kept. */
static void run(const setting *s, bool at_once, int recompute, kn_tensor *result[RESULTS])
{
    OWNED_MODULE stream m = { .at_once = at_once };
    const kn_param *p;
    int seen[2] = { 0 }, n = 0;
    IN_SCOPE;
    KN_CHECK(stream_init(&m, s) && kn_recompute(&m, recompute == 1) &&
                 kn_recompute(&m.layer, recompute == 2) && kn_recompute(&m.rms, recompute == 2),
             "%s", s->name);
    kn_module_hook(&m.layer, (kn_module_hooks){ .pre_forward = look, .arg = &seen[0] });
    kn_module_hook(&m.rms, (kn_module_hooks){ .pre_forward = look, .arg = &seen[1] });
    kn_tensor *x = kn_require_grad(kn_randn(KN_F32, KN_CPU, 1, 2, KN_SHAPE(5, WIDTH)), true);
    kn_values out = kn_call_n(&m, KN_VALUES(x), NULL, 0);
    KN_CHECK(out.n == 2, "%s", s->name);
    for (int i = 0; i < 2; i++)
        result[n++] = kn_keep(kn_detach(out.v[i]));
    kn_tensor *loss =
        sum_of(kn_add(kn_square(kn_cast(out.v[0], KN_F32)), kn_mul(kn_cast(out.v[1], KN_F32), x)));
    KN_CHECK(kn_backward(loss) && kn_params(&m, &p) == 5, "%s", s->name);
    result[n++] = kn_keep(kn_scale(kn_grad(x), 1));
    for (int i = 0; i < 5; i++)
        result[n++] = kn_keep(kn_scale(kn_param_grad(&p[i]), 1));
    const int want = at_once ? s->seen : 1;
    KN_CHECK(kn_ok() && seen[0] == want && seen[1] == want, "%s: %d and %d tensors came", s->name,
             seen[0], seen[1]);
}

/* Where the unit casts, gradients are those of two steps too; else tests/autograd/add_norm_test.c
 * compares them. */
KN_TEST(norms_of_sums, casts_are_for_the_norm_alone)
{
    for (int i = 0; i < SETTINGS * 3; i++) {
        const setting *s = &settings[i / 3];
        kn_tensor *one[RESULTS], *two[RESULTS];
        run(s, true, i % 3, one);
        run(s, false, i % 3, two);
        for (int k = 0; k < RESULTS; k++) {
            KN_CHECK(kn_dtype_of(one[k]) == kn_dtype_of(two[k]), "%s: result %d is %s, not %s",
                     s->name, k, kn_dtype_name(kn_dtype_of(one[k])),
                     kn_dtype_name(kn_dtype_of(two[k])));
            KN_CHECK((k >= 2 && s->seen == 2) ||
                         memcmp(kn_data(one[k]), kn_data(two[k]),
                                (size_t)kn_numel(two[k]) * kn_dtype_size(kn_dtype_of(two[k]))) == 0,
                     "%s: other bits of result %d", s->name, k);
            kn_tensor_free(one[k]);
            kn_tensor_free(two[k]);
        }
    }
}

/* A unit elsewhere moves what it norms; the sum stays where x is. */
KN_TEST(norms_of_sums, moves_are_for_the_norm_alone)
{
    OWNED_MODULE kn_layer_norm norm;
    IN_SCOPE;
    KN_CHECK(kn_layer_norm_init(&norm, NULL, "", WIDTH) &&
             kn_fsdp_wrap(&norm, NULL, .device = KN_META));
    kn_tensor *x = kn_ones(KN_F32, KN_CPU, KN_SHAPE(5, WIDTH)), *sum;
    kn_tensor *y = kn_add_norm(&norm, x, x, &sum);
    KN_CHECK(y && kn_device_of(y) == KN_META);
    KN_CHECK(kn_device_of(sum) == KN_CPU && ((const float *)kn_data(sum))[0] == 2);
}
