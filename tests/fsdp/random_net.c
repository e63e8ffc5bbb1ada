/* tests/fsdp/random_net.c: the modules of a random program. Every module takes x[B, D] and gives
 * the same shape. */
#include "tests/fsdp/random.h"

enum { VOCAB = 6 };

/* ---- when a module runs ---------------------------------------------------------------------- */

static bool by_round(const random_net *n, int at)
{
    return (n->step + n->round + at) % 2 == 0;
}

/* Alternating, or by a hash of the micro-batch. */
static bool by_micro(const random_net *n, int at)
{
    uint64_t seed = (uint64_t)random_number(n->p, O_USES);
    if (seed)
        return kn_hash64(kn_hash64(seed, (uint64_t)(n->step * 64 + n->micro)), (uint64_t)at) & 1;
    return (n->step + n->micro + at) % 2 == 0;
}

static bool runs(const random_net *n, int at)
{
    int when = n->p->node[at].when;
    return when == WHEN_ROUND ? by_round(n, at) : when != WHEN_RUN_MICRO || by_micro(n, at);
}

static bool counts(const random_net *n, int at)
{
    int when = n->p->node[at].when;
    return when == WHEN_LOSS_ROUND ? by_round(n, at) : when != WHEN_LOSS_MICRO || by_micro(n, at);
}

/* ---- what a module computes ------------------------------------------------------------------ */

static kn_tensor *call_children(random_net *n, int at, kn_tensor *x);

static kn_tensor *own(random_module *m, kn_tensor *x)
{
    bool ignored = m->net->p->node[m->at].ignored && /* its buffers stay as well */
                   m->net->p->option[O_IGNORED_AS] != IGNORED_AS_PARAMS;
    bool cast = m->net->buffer && !ignored;
    kn_tensor *b = cast ? kn_cast(m->buffer, m->net->buffer) : m->buffer;
    x = kn_add(kn_mul(kn_mul(x, m->own[0]), m->own[2]), m->own[1]);
    return kn_tanh(kn_add(x, kn_cast(b, kn_dtype_of(x))));
}

/* In full precision: the reference casts explicitly where a unit casts. */
static kn_tensor *normalize(random_module *m, void *norm, kn_tensor *x)
{
    const random_program *p = m->net->p;
    bool full = m->net->input &&
                (random_full_precision(p, m->at) || random_full_precision_inside(p, m->at));
    kn_tensor *y = kn_call(norm, full ? kn_cast(x, KN_F32) : x);
    return y && full ? kn_cast(y, kn_dtype_of(x)) : y;
}

/* A residual block over x as images of one row of D pixels. */
static kn_tensor *conv_block(random_module *m, kn_tensor *x)
{
    const int64_t B = kn_shape(x)[0], D = kn_shape(x)[1];
    kn_tensor *y = kn_call(&m->conv[0], kn_reshape(x, KN_SHAPE(B, 1, 1, D)));
    y = kn_relu(normalize(m, &m->batch, y));
    y = m->at % 2 ? kn_max_pool2d(y, .kernel = 3, .stride = 1, .pad = 1)
                  : kn_avg_pool2d(y, .kernel = 3, .stride = 1, .pad = 1);
    return kn_add(x, kn_reshape(kn_call(&m->conv[1], y), KN_SHAPE(B, D)));
}

static kn_tensor *partly(random_module *m, kn_tensor *x)
{
    x = kn_mul(x, m->own[0]);
    return by_micro(m->net, m->at) ? kn_add(x, m->own[1]) : x;
}

static kn_tensor *compute(random_module *m, kn_tensor *x)
{
    switch (m->net->p->node[m->at].kind) {
    case KIND_LINEAR:
        return kn_tanh(kn_call(&m->fc[0], x));
    case KIND_MLP:
        return kn_call(&m->fc[1], kn_gelu_tanh(kn_call(&m->fc[0], x)));
    case KIND_NORM:
        return normalize(m, &m->norm, x);
    case KIND_RMSNORM:
        return normalize(m, &m->rms, x);
    case KIND_BATCHNORM:
        return normalize(m, &m->batch, x);
    case KIND_OWN:
        return own(m, x);
    case KIND_UNUSED:
        return kn_scale(x, 0.75);
    case KIND_PARTLY:
        return partly(m, x);
    case KIND_SHARED:
        return kn_sigmoid(kn_linear(x, kn_module_param(m, "weight"), NULL, false));
    case KIND_DROPOUT:
        return kn_call(&m->drop, x);
    case KIND_CONV:
        return conv_block(m, x);
    case KIND_SEQ:
        return call_children(m->net, m->at, x);
    default:
        return kn_add(x, kn_scale(call_children(m->net, m->at, x), 0.5));
    }
}

static bool fails_here(const random_net *n, int at, int how)
{
    return n->failing == how && n->fail_node == at;
}

static kn_tensor *body(kn_module *self, kn_tensor *x)
{
    random_module *m = (random_module *)self;
    kn_tensor *y = x ? compute(m, x) : NULL;
    if (fails_here(m->net, m->at, EVENT_FAIL_FORWARD)) {
        kn_fail("the forward of m%d was to fail", m->at);
        return NULL;
    }
    return y;
}

/* Two classes, so that a policy by class can tell them apart. */
static kn_tensor *part_forward(kn_module *self, kn_tensor *x)
{
    return body(self, x);
}

static kn_tensor *seq_forward(kn_module *self, kn_tensor *x)
{
    return body(self, x);
}

static kn_tensor *call_once(random_module *m, kn_tensor *x)
{
    int entered = m->net->p->node[m->at].entered;
    if (entered != ENTERED_BY_HAND)
        return entered ? kn_call_method(m, body, x) : kn_call(m, x);
    kn_entered e = kn_enter(m);
    kn_tensor *y = kn_ok() ? body(&m->base, x) : NULL;
    kn_leave(e, &y, y != NULL);
    return kn_ok() ? y : NULL;
}

static kn_tensor *call_children(random_net *n, int at, kn_tensor *x)
{
    for (int i = at + 1; i < RANDOM_NODES && x; i++) {
        const random_node *node = &n->p->node[i];
        if (!node->kind || node->parent != at || !runs(n, i))
            continue;
        kn_tensor *y = call_once(&n->m[i], x);
        if (node->twice && y)
            y = call_once(&n->m[i], y);
        x = !y || counts(n, i) ? y : x;
    }
    return x;
}

/* (x, ids, targets) -> the loss, or its inputs. */
static kn_values root_forward(kn_module *self, kn_values in, const void *arg)
{
    random_module *m = (random_module *)self;
    random_net *n = m->net;
    kn_tensor *x = in.v[0];
    if (n->p->option[O_HEAD] != HEAD_MSE)
        x = kn_add(kn_call(&n->embed, in.v[1]), x);
    x = call_children(n, 0, x);
    x = x ? kn_mul(x, n->gain) : NULL;
    if (x && n->p->option[O_HEAD] == HEAD_TIED)
        x = kn_linear(x, kn_module_param(m, "head"), NULL, false);
    if (fails_here(n, 0, EVENT_FAIL_FORWARD))
        kn_fail("the forward of the root was to fail");
    return (kn_values){ x != NULL, { x } };
}

/* ---- hooks ----------------------------------------------------------------------------------- */

static void hook(kn_module *self, int how, const char *what)
{
    random_module *m = (random_module *)self;
    if (fails_here(m->net, m->at, how))
        kn_fail("the %s hook of m%d was to fail", what, m->at);
}

static void pre_forward(kn_module_event *e, void *arg)
{
    hook(e->module, EVENT_FAIL_PRE_FORWARD, "pre-forward");
}

static void post_forward(kn_module_event *e, void *arg)
{
    hook(e->module, EVENT_FAIL_POST_FORWARD, "post-forward");
}

static void pre_backward(kn_module_event *e, void *arg)
{
    hook(e->module, EVENT_FAIL_PRE_BACKWARD, "pre-backward");
}

static void post_backward(kn_module_event *e, void *arg)
{
    hook(e->module, EVENT_FAIL_POST_BACKWARD, "post-backward");
}

/* Hook of the root's gain: doubles its gradient, or fails. */
static kn_tensor *gain_hook(kn_tensor *grad, void *arg)
{
    const random_net *n = arg;
    if (n->masters)
        return NULL;
    if (n->failing == EVENT_FAIL_GRAD) {
        kn_fail("the gradient's hook was to fail");
        return NULL;
    }
    return n->p->option[O_LEAF_HOOK] == LEAF_HOOK_PARAM ? kn_scale(grad, 2) : NULL;
}

static kn_tensor *halve(kn_tensor *grad, void *arg)
{
    return kn_scale(grad, 0.5);
}

/* ---- declaring ------------------------------------------------------------------------------- */

typedef struct making {
    random_net *n;
    kn_device device;
    int64_t dim;
} making;

static kn_tensor *declare(making *k, random_module *m, const char *name, int ndim,
                          const int64_t *shape)
{
    return kn_parameter(m, name, k->n->dtype, k->device, KN_NORMAL_INIT(0.7), ndim, shape);
}

static bool linear(making *k, random_module *m, int i, int64_t in, int64_t out)
{
    return kn_linear_init(&m->fc[i], &m->base, i ? "down" : "fc", in, out, .dtype = k->n->dtype,
                          .device = k->device, .no_bias = m->at % 3 == 2);
}

static bool conv(making *k, random_module *m, int i, int64_t in, int64_t out)
{
    return kn_conv2d_init(&m->conv[i], &m->base, i ? "conv2" : "conv1", in, out, 3, .pad = 1,
                          .dtype = k->n->dtype, .device = k->device, .no_bias = m->at % 3 == 2);
}

/* The weight [D, D] of the linear module before m; else one of its own. */
static bool share(making *k, random_module *m)
{
    for (int i = m->at - 1; i > 0; i--)
        if (k->n->p->node[i].kind == KIND_LINEAR)
            return kn_share_parameter(m, "weight", kn_module_param(&k->n->m[i].fc[0], "weight"));
    return declare(k, m, "weight", KN_SHAPE(k->dim, k->dim)) != NULL;
}

static bool fill_module(making *k, random_module *m, const random_node *node)
{
    static const int hidden[] = { 5, 1, 2, 3, 7, 8, 12, 16 };
    int64_t d = k->dim, h = hidden[node->hidden];
    bool f32 = random_full_precision(k->n->p, m->at) || random_norms_in_f32(k->n->p, m->at);
    kn_dtype dtype = f32 ? KN_F32 : k->n->dtype;
    switch (node->kind) {
    case KIND_LINEAR:
        return linear(k, m, 0, d, d);
    case KIND_MLP:
        return linear(k, m, 0, d, h) && linear(k, m, 1, h, d);
    case KIND_NORM:
        return kn_layer_norm_init(&m->norm, &m->base, "norm", d, .dtype = dtype,
                                  .device = k->device);
    case KIND_RMSNORM:
        return kn_rms_norm_init(&m->rms, &m->base, "norm", d, .dtype = dtype, .device = k->device);
    case KIND_BATCHNORM:
        return kn_batch_norm_init(&m->batch, &m->base, "norm", d, .dtype = dtype,
                                  .device = k->device);
    case KIND_CONV:
        f32 = random_full_precision_inside(k->n->p, m->at);
        return conv(k, m, 0, 1, h) && conv(k, m, 1, h, 1) &&
               kn_batch_norm_init(&m->batch, &m->base, "norm", h,
                                  .dtype = f32 ? KN_F32 : k->n->dtype, .device = k->device);
    case KIND_OWN:
        m->buffer =
            kn_declare_buffer(m, "shift", KN_F32, k->device, KN_CONSTANT_INIT(0.3), KN_SHAPE(1));
        /* fallthrough */
    case KIND_PARTLY:
        m->own[0] = declare(k, m, "scale", KN_SHAPE(d));
        m->own[1] = declare(k, m, "one", KN_SHAPE(1));
        m->own[2] = declare(k, m, "scalar", 0, NULL);
        return m->own[0] && m->own[1] && m->own[2];
    case KIND_UNUSED:
        return declare(k, m, "spare", KN_SHAPE(h, 3)) &&
               declare(k, m, "other",
                       KN_SHAPE(h, 1, 1, 1, 1, 1, 1, 2)); /* the largest number of dims */
    case KIND_SHARED:
        return share(k, m);
    case KIND_DROPOUT:
        return kn_dropout_init(&m->drop, &m->base, "drop", 0.3);
    default:
        return true;
    }
}

static bool make_module(making *k, int i)
{
    random_net *n = k->n;
    random_module *m = &n->m[i];
    const random_node *node = &n->p->node[i];
    char name[8];
    snprintf(name, sizeof name, "m%d", i);
    m->net = n;
    m->at = i;
    bool seq = node->kind == KIND_SEQ || node->kind == KIND_RESIDUAL;
    bool ok = i == 0 ? kn_module_init_n(&m->base, root_forward)
              : seq  ? kn_module_init(&m->base, seq_forward)
                     : kn_module_init(&m->base, part_forward);
    ok = ok && (i == 0 || kn_module_add(&n->m[node->parent].base, name, &m->base)) &&
         fill_module(k, m, node) &&
         kn_module_hook(
             m, (kn_module_hooks){ pre_forward, post_forward, pre_backward, post_backward, NULL });
    return ok && (!node->recompute || kn_recompute(m, true));
}

static bool make_root(making *k)
{
    random_net *n = k->n;
    n->gain = declare(k, &n->m[0], "gain", KN_SHAPE(k->dim));
    if (!n->gain || (n->p->option[O_HEAD] != HEAD_MSE &&
                     !kn_embedding_init(&n->embed, &n->m[0].base, "embed", VOCAB, k->dim,
                                        .dtype = n->dtype, .device = k->device)))
        return false;
    if (n->p->option[O_HEAD] == HEAD_TIED &&
        !kn_share_parameter(&n->m[0], "head", kn_module_param(&n->embed, "weight")))
        return false;
    bool hooked = n->p->option[O_LEAF_HOOK] == LEAF_HOOK_PARAM;
    for (int i = 0; i < RANDOM_EVENTS; i++)
        hooked |= n->p->event[i].kind == EVENT_FAIL_GRAD;
    return !hooked || kn_on_grad(n->gain, gain_hook, n);
}

bool random_net_init(random_net *n, const random_program *p, kn_dtype dtype, kn_device device)
{
    memset(n, 0, sizeof *n);
    n->p = p;
    n->dtype = dtype;
    making k = { n, device, random_number(p, O_DIM) };
    for (int i = 0; i < RANDOM_NODES; i++)
        if (p->node[i].kind && (!make_module(&k, i) || (i == 0 && !make_root(&k))))
            return false;
    for (int i = 1; i < RANDOM_NODES; i++)
        if (p->node[i].kind && p->node[i].frozen)
            kn_freeze(&n->m[i], true);
    return kn_ok();
}

/* ---- a loss ---------------------------------------------------------------------------------- */

void random_at(random_net *n, int step, int round, int micro)
{
    n->step = step;
    n->round = round;
    n->micro = micro;
}

/* Between -1 and 1, by the position in the run. */
static kn_tensor *numbers(const random_net *n, int rows, int dim, int what)
{
    float v[64];
    for (int i = 0; i < rows * dim; i++)
        v[i] =
            (float)((n->step * 37 + n->micro * 101 + i * 29 + i * i % 7 + what * 11) % 200) / 100 -
            1;
    return kn_from(KN_F32, KN_CPU, v, KN_SHAPE(rows, dim));
}

static kn_tensor *places(const random_net *n, int rows, int what)
{
    int64_t v[8];
    for (int i = 0; i < rows; i++)
        v[i] = (n->step * 5 + n->micro * 3 + i * 7 + what) % VOCAB;
    return kn_from(KN_I64, KN_CPU, v, KN_SHAPE(rows));
}

kn_tensor *random_loss(random_net *n, int step, int round, int micro)
{
    int rows = random_number(n->p, O_BATCH), dim = random_number(n->p, O_DIM);
    random_at(n, step, round, micro);
    kn_tensor *x = numbers(n, rows, dim, 0), *y = numbers(n, rows, dim, 1);
    kn_tensor *ids = places(n, rows, 0), *targets = places(n, rows, 1);
    if (n->failing == EVENT_FAIL_INPUT)
        x = kn_empty(KN_F32, KN_META, KN_SHAPE(rows, dim));
    if (n->input && n->failing != EVENT_FAIL_INPUT)
        x = kn_cast(x, n->input);
    kn_values out = kn_call_n(&n->m[0], (kn_values){ 2, { x, ids } }, NULL, 0);
    if (!kn_ok() || out.n != 1)
        return NULL;
    kn_tensor *z = n->output ? kn_cast(out.v[0], n->output) : out.v[0];
    if (n->p->option[O_LEAF_HOOK] == LEAF_HOOK_INPUT && kn_grad_mode() && kn_requires_grad(z))
        kn_on_grad(z, halve, NULL);
    z = kn_cast(z, KN_F32);
    kn_tensor *loss =
        n->p->option[O_HEAD] == HEAD_TIED ? kn_cross_entropy(z, targets) : kn_mse_loss(z, y);
    if (n->failing == EVENT_FAIL_LOSS) {
        kn_fail("the loss was to fail");
        return NULL;
    }
    return loss;
}

/* The input requires grad: so a backward has a graph on each rank, for all data. */
kn_tensor *random_part_loss(random_net *n, int node, int step, int round, int micro)
{
    if (node == 0)
        return random_loss(n, step, round, micro);
    int rows = random_number(n->p, O_BATCH), dim = random_number(n->p, O_DIM);
    random_at(n, step, round, micro);
    kn_tensor *x = numbers(n, rows, dim, 2), *y = numbers(n, rows, dim, 3);
    kn_require_grad(x, kn_grad_mode());
    kn_tensor *z = call_once(&n->m[node], n->input ? kn_cast(x, n->input) : x);
    return kn_mse_loss(kn_cast(z, KN_F32), y);
}
