"""bench/peers/operations_nn.py: the operations of autograd/functional.h beside torch.nn.functional's."""
import torch
import torch.nn.functional as F

from knap import ZERO
from operations import row

REDUCTIONS = ('mean', 'sum', 'none')
NARROW = {'bounds': (1e-5, 1e-11), 'why': 'values of a group nearly equal: the gradient cancels'}


def code(k, reduction):
    return k.enums['KN_REDUCTION_' + reduction.upper()]


for word in ('softmax', 'log_softmax'):
    @row('kn_' + word, word)
    def _(d, word=word):
        shape = d.shape(least=1)
        dim = d.dim(len(shape))
        return [d.input(shape)], lambda k, x: getattr(k, word)(x, dim), lambda x: getattr(F, word)(x, dim)


def maybe(d, *shapes):
    """The first few of inputs that may be left out."""
    return [d.input(s) for s in shapes[:d.int(0, len(shapes))]]


def filled(t, count):
    return [*t, *[None] * (count - len(t))]


def dense(f, x, *arguments, **options):
    """f of row-major tensors, with a row-major gradient: torch 2.15's batch_norm and instance_norm compute wrong
    gradients for an expanded weight and for a gradient with other strides (the bias's isn't their sum)."""
    y = f(x, *(a.contiguous() if isinstance(a, torch.Tensor) else a for a in arguments), **options)
    y.register_hook(torch.Tensor.contiguous)
    return y


@row('kn_layer_norm', 'layer_norm', **NARROW)
def _(d):
    shape, eps = d.shape(least=1, smallest=2, largest=9), d.choice([0, 1e-3])
    c = shape[-1:]
    return [d.input(shape, ties=False), *maybe(d, c, c)], lambda k, x, *t: k.layer_norm(x, *filled(t, 2), eps), \
        lambda x, *t: F.layer_norm(x, c, *filled(t, 2), eps or 1e-5)


@row('kn_rms_norm', 'rms_norm', **NARROW)
def _(d):
    shape, eps = d.shape(least=1, largest=9), d.choice([0, 1e-3])
    c = shape[-1:]
    return [d.input(shape), *maybe(d, c)], lambda k, x, *t: k.rms_norm(x, *filled(t, 1), eps), \
        lambda x, *t: F.rms_norm(x, c, *filled(t, 1), eps or 1e-5)


@row('kn_group_norm', 'group_norm', **NARROW)
def _(d):
    groups, eps = d.int(1, 3), d.choice([0, 1e-3])
    c = groups * d.size(2, 3)
    shape = [d.size(1, 3), c] + d.shape(least=1, most=2, smallest=2)
    return [d.input(shape, ties=False), *maybe(d, [c], [c])], \
        lambda k, x, *t: k.group_norm(x, groups, *filled(t, 2), eps), \
        lambda x, *t: F.group_norm(x, groups, *filled(t, 2), eps or 1e-5)


@row('kn_instance_norm', 'instance_norm', **NARROW)
def _(d):
    shape = [d.size(1, 3), d.size(1, 4)] + d.shape(least=1, most=2, smallest=2)
    c = shape[1:2]
    return [d.input(shape, ties=False), *maybe(d, c, c)], lambda k, x, *t: k.instance_norm(x, *filled(t, 2), 0), \
        lambda x, *t: dense(F.instance_norm, x, None, None, *filled(t, 2))


@row('kn_batch_norm', 'batch_norm', **NARROW)
def _(d):
    shape, training = [d.size(2, 4), d.size(1, 4)] + d.shape(least=0, most=2, smallest=2), d.choice([True, False])
    c, momentum = shape[1:2], d.choice([0.1, 0.3])
    running = [d.input(c, 'positive', grad=False, layout=False) for _ in range(2)]

    def in_knap(k, mean, var, x, *t):
        return [k.batch_norm(x, *filled(t, 2), mean, var, training=training, momentum=momentum), mean, var]

    def in_torch(mean, var, x, *t):
        return [dense(F.batch_norm, x, mean, var, *filled(t, 2), training, momentum), mean, var]
    return [*running, d.input(shape, ties=False), *maybe(d, c, c)], in_knap, in_torch


@row('kn_scaled_dot_product_attention', 'scaled_dot_product_attention')
def _(d):
    g, t, dim = d.int(1, 2), d.size(1, 6), d.choice([2, 4, 5, 8])
    b, h, s = d.size(1, 2), g * d.int(1, 2), t + d.int(0, 3)
    causal, scale = d.choice([True, False]), d.choice([None, 0.7])
    window = d.choice([0, 2]) if causal else 0
    inputs = [d.input([b, h, t, dim]), d.input([b, g, s, dim]), d.input([b, g, s, dim])]
    if d.int(0, 1):
        shape = [d.choice([1, b]), d.choice([1, h]), d.choice([1, t]), s]
        inputs += [d.input(shape, grad=d.choice([True, False]))]

    def in_knap(k, q, key, v, mask=None):
        return k.scaled_dot_product_attention(q, key, v, causal=causal, window=window, scale=scale or 0,
                                              mask=mask)

    def in_torch(q, key, v, mask=None):
        seen = torch.zeros(t, s, dtype=q.dtype)
        if causal:
            seen = seen.masked_fill(torch.ones(t, s).tril(s - t) == 0, float('-inf'))
        if window:
            seen = seen.masked_fill(torch.ones(t, s).tril(s - t - window) == 1, float('-inf'))
        mask = seen if mask is None else seen + mask    # row-major: torch 2.15 reads beyond expanded q and k
        return F.scaled_dot_product_attention(q.contiguous(), key.contiguous(), v.contiguous(), mask, scale=scale,
                                              enable_gqa=True)
    return inputs, in_knap, in_torch


@row('kn_rope', 'cat, cos, sin')
def _(d):
    half, start, base = d.int(1, 4), d.int(0, 9), d.choice([0, 500.0])
    shape = [d.size(1, 2), d.size(1, 3), d.size(1, 6), 2 * half]
    factor, low, high, ctx = d.choice([0.0, 8.0]), d.choice([1.0, 2.0]), 4.0, d.int(10, 500)

    def in_knap(k, x):
        scaling = {'scaling': k.struct('kn_rope_scaling', factor=factor, low_freq_factor=low, high_freq_factor=high,
                                       original_ctx=ctx)}
        return k.rope(x, base, start, **(scaling if factor else {}))

    def in_torch(x):
        places = torch.arange(start, start + shape[2], dtype=torch.float64)
        speed = (base or 10000.0) ** (-torch.arange(half, dtype=torch.float64) / half)
        if factor:  # Llama 3's scaling
            kept = ((ctx * speed / (2 * torch.pi) - low) / (high - low)).clamp(0, 1)
            speed = speed * kept + speed / factor * (1 - kept)
        angle = places[:, None] * speed
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
    return [d.input(shape)], in_knap, in_torch


# ---- losses ---------------------------------------------------------------------------------------

def loss(name, x='normal', target='normal', target_grad=True, **numbers):
    """A row of a loss of x and a target of one shape, with options drawn from (low, high)."""
    @row('kn_' + name, name)
    def _(d):
        shape, reduction = d.shape(), d.choice(REDUCTIONS)
        o = {n: d.rng.uniform(*of) for n, of in numbers.items() if d.int(0, 1)}
        return [d.input(shape, x), d.input(shape, target, grad=target_grad)], \
            lambda k, *t: getattr(k, name)(*t, reduction=code(k, reduction), **o), \
            lambda *t: getattr(F, name)(*t, reduction=reduction, **o)


loss('mse_loss')


def with_signs(name, count, **numbers):
    """A row of a loss of count inputs of one shape and of targets of 1 and -1."""
    @row('kn_' + name, name)
    def _(d):
        shape, reduction = d.shape(), d.choice(REDUCTIONS)
        o = {n: d.rng.uniform(*of) for n, of in numbers.items() if d.int(0, 1)}
        sign = torch.where(torch.rand(shape) < 0.5, 1.0, -1.0).double()
        inputs = [d.input(shape) for _ in range(count)]
        return inputs + [d.given(sign)], \
            lambda k, *t: getattr(k, name)(*t, reduction=code(k, reduction), **o), \
            lambda *t: getattr(F, name)(*t, reduction=reduction, **o)


with_signs('margin_ranking_loss', 2, margin=(0.1, 2))
with_signs('hinge_embedding_loss', 1, margin=(0.2, 2))


@row('kn_triplet_margin_loss', 'triplet_margin_loss')
def _(d):
    shape, reduction = d.shape(least=1), d.choice(REDUCTIONS)
    o = {'swap': d.choice([True, False]), 'p': d.choice([1.0, 2.0, 3.0]), 'margin': d.rng.uniform(0.2, 3)}
    return [d.input(shape, ties=False) for _ in range(3)], \
        lambda k, *t: k.triplet_margin_loss(*t, reduction=code(k, reduction), **o), \
        lambda *t: F.triplet_margin_loss(*t, reduction=reduction, **o)


@row('kn_pairwise_distance', 'pairwise_distance')
def _(d):
    shape, keep, p = d.shape(least=1), d.choice([True, False]), d.choice([1.0, 2.0, 3.0])
    return [d.input(shape), d.input(shape[d.int(0, len(shape) - 1):])], \
        lambda k, *t: k.pairwise_distance(*t, p=p, keep=keep), lambda *t: F.pairwise_distance(*t, p=p, keepdim=keep)


@row('kn_gaussian_nll_loss', 'gaussian_nll_loss')
def _(d):
    shape, reduction, full = d.shape(least=1), d.choice(REDUCTIONS), d.choice([True, False])
    return [d.input(shape), d.input(shape), d.input(shape[:-1] + [d.choice([1, shape[-1]])], 'positive')], \
        lambda k, *t: k.gaussian_nll_loss(*t, reduction=code(k, reduction), full=full, eps=0.5), \
        lambda *t: F.gaussian_nll_loss(*t, reduction=reduction, full=full, eps=0.5)


@row('kn_poisson_nll_loss', 'poisson_nll_loss', why='PyTorch gives no gradient by the target where full')
def _(d):
    shape, reduction, log, full = d.shape(), d.choice(REDUCTIONS), d.choice([True, False]), d.choice([True, False])
    return [d.input(shape, 'normal' if log else 'positive'), d.input(shape, 'positive', grad=not full)], \
        lambda k, *t: k.poisson_nll_loss(*t, reduction=code(k, reduction), full=full, no_log_input=not log), \
        lambda *t: F.poisson_nll_loss(*t, reduction=reduction, full=full, log_input=log)


@row('kn_channel_shuffle', 'channel_shuffle')
def _(d):
    g, shape = d.int(1, 4), d.shape(least=3)
    shape[1] = g * d.int(1, 4)
    return [d.input(shape)], lambda k, x: k.channel_shuffle(x, g), lambda x: x.unflatten(1, (g, -1)).transpose(1, 2).flatten(1, 2)


loss('l1_loss')
loss('huber_loss', delta=(0.3, 3))
loss('smooth_l1_loss', beta=(0.3, 3))


@row('kn_binary_cross_entropy', 'binary_cross_entropy')
def _(d):
    shape, reduction = d.shape(least=1), d.choice(REDUCTIONS)
    weight = [d.input(shape[-1:], 'positive', grad=False)] if d.int(0, 1) else []
    return [d.input(shape, 'unit'), d.input(shape, 'unit', grad=False), *weight], \
        lambda k, x, t, w=None: k.binary_cross_entropy(x, t, weight=w, reduction=code(k, reduction)), \
        lambda x, t, w=None: F.binary_cross_entropy(x, t, w, reduction=reduction)


@row('kn_binary_cross_entropy_with_logits', 'binary_cross_entropy_with_logits')
def _(d):
    shape, reduction, which = d.shape(least=1), d.choice(REDUCTIONS), d.int(0, 3)
    extra = [d.input(shape[-1:], 'positive', grad=False) for bit in (1, 2) if which & bit]

    def named(t):
        rest = list(t)
        return {n: rest.pop(0) for bit, n in ((1, 'weight'), (2, 'pos_weight')) if which & bit}
    return [d.input(shape), d.input(shape, 'unit'), *extra], \
        lambda k, x, t, *e: k.binary_cross_entropy_with_logits(x, t, reduction=code(k, reduction), **named(e)), \
        lambda x, t, *e: F.binary_cross_entropy_with_logits(x, t, reduction=reduction, **named(e))


@row('kn_kl_div', 'kl_div')
def _(d):
    shape, reduction, log = d.shape(least=1), d.choice([*REDUCTIONS, 'batchmean']), d.choice([True, False])
    return [d.input(shape), d.input(shape, 'normal' if log else 'unit')], \
        lambda k, *t: k.kl_div(*t, reduction=code(k, reduction), log_target=log), \
        lambda *t: F.kl_div(*t, reduction=reduction, log_target=log)


def classes(d):
    """Rows of classes, targets, maybe weights, and options."""
    shape, reduction, ignore = d.shape(least=2, largest=6), d.choice(REDUCTIONS), d.choice([None, 0])
    weight = [d.input(shape[-1:], 'positive', grad=False)] if d.int(0, 1) else []
    return d.input(shape), d.index(shape[:-1], shape[-1]), weight, reduction, ignore


def torch_rows(f, x, t, w, **options):
    """f of rows [N, V]; a loss a row gets the targets' shape back."""
    rows = f(x.reshape(-1, x.shape[-1]), t.reshape(-1).long(), w, **options)
    return rows.reshape(t.shape) if options['reduction'] == 'none' else rows


def mean_of_none(options, w, t):
    """torch's mean where no target counts is NaN, Knap's 0."""
    counts = t != options['ignore_index']
    return options['reduction'] == 'mean' and not counts.any()


for word in ('nll_loss', 'cross_entropy'):
    @row('kn_' + word, word)
    def _(d, word=word):
        x, targets, weight, reduction, ignore = classes(d)
        smoothing = d.choice([0, 0.2]) if word == 'cross_entropy' else 0
        own = {'smoothing': smoothing} if smoothing else {}
        judge = {'label_smoothing': smoothing} if smoothing else {}
        judge.update(reduction=reduction, ignore_index=-100 if ignore is None else ignore)
        if word == 'cross_entropy' and d.int(0, 3) == 0:
            shape = list(x.values.shape)
            del judge['ignore_index']

            def rows(x, t, w=None):
                y = F.cross_entropy(x.reshape(-1, shape[-1]), t.reshape(-1, shape[-1]), w, **judge)
                return y.reshape(shape[:-1]) if reduction == 'none' else y
            return [x, d.input(shape, 'unit', grad=False), *weight], \
                lambda k, x, t, w=None: k.cross_entropy(x, t, weight=w, reduction=code(k, reduction), **own), rows

        def in_torch(x, t, w=None):
            if mean_of_none(judge, w, t):
                return x.sum() * 0
            return torch_rows(getattr(F, word), x, t, w, **judge)
        return [x, targets, *weight], \
            lambda k, x, t, w=None: getattr(k, word)(x, t, weight=w, reduction=code(k, reduction), ignore_index=
                                                     0 if ignore is None else ZERO, **own), in_torch


@row('kn_linear_cross_entropy', 'cross_entropy of linear')
def _(d):
    shape, classes, in_out = d.shape(least=2, largest=6), d.int(1, 8), d.choice([True, False])
    reduction, smoothing = d.choice(['mean', 'sum']), d.choice([0, 0.2])
    if d.int(0, 9) == 0:
        shape = [1100, 3]  # several chunks
    weight = d.input([shape[-1], classes] if in_out else [classes, shape[-1]])
    bias = [d.input([classes])] if d.int(0, 1) else []

    def in_torch(x, t, w, b=None):
        y = F.linear(x, w.t() if in_out else w, b)
        return torch_rows(F.cross_entropy, y, t, None, reduction=reduction, label_smoothing=smoothing)
    return [d.input(shape), d.index(shape[:-1], classes), weight, *bias], \
        lambda k, x, t, w, b=None: k.linear_cross_entropy(x, w, t, bias=b, in_out=in_out, smoothing=smoothing,
                                                          reduction=code(k, reduction)), in_torch


@row('kn_normalize', 'normalize')
def _(d):
    shape, eps = d.shape(least=1), d.choice([0, 1e-3, 2.0])
    dim = d.dim(len(shape))
    return [d.input(shape)], lambda k, x: k.normalize(x, dim=dim or ZERO, eps=eps), \
        lambda x: F.normalize(x, dim=dim, eps=eps or 1e-12)


@row('kn_cosine_similarity', 'cosine_similarity')
def _(d):
    x, y = d.broadcast(2)
    ndim, eps = max(x.values.dim(), y.values.dim()), d.choice([0, 1e-3])
    if ndim == 0:
        x, y, ndim = d.input([3]), d.input([3]), 1
    dim = d.dim(ndim)
    return [x, y], lambda k, *t: k.cosine_similarity(*t, dim=dim or ZERO, eps=eps), \
        lambda *t: F.cosine_similarity(*t, dim=dim, eps=eps or 1e-8)


@row('kn_cosine_embedding_loss', 'cosine_embedding_loss')
def _(d):
    n, reduction, margin = d.int(1, 5), d.choice(REDUCTIONS), d.choice([0.0, 0.3, -0.5])
    sign = d.given(2 * torch.randint(0, 2, [n]) - 1)
    shape = [n, d.int(2, 6)]
    return [d.input(shape), d.input(shape), sign], \
        lambda k, *t: k.cosine_embedding_loss(*t, margin=margin, reduction=code(k, reduction)), \
        lambda *t: F.cosine_embedding_loss(*t, margin=margin, reduction=reduction)


@row('kn_pad', 'pad')
def _(d):
    mode, shape = d.choice(['constant', 'reflect', 'replicate', 'circular']), d.shape(3, 4, smallest=3, largest=6)
    sizes = [d.int(-1 if mode == 'constant' else 0, 2) for _ in range(2 * (len(shape) - 2))]
    value = d.rng.uniform(-2, 2) if mode == 'constant' else 0.0
    return [d.input(shape)], lambda k, x: k.pad(x, k.enums['KN_PAD_' + mode.upper()], value, len(sizes), sizes), \
        lambda x: F.pad(x, sizes, mode, value if mode == 'constant' else None)


# ---- images ---------------------------------------------------------------------------------------

def pairs(d, ndim, **ranges):
    """Options of ndim-dimensional windows: for both dims at once or, for images, {rows, columns}."""
    own, judge = {}, {}
    for name, (low, high) in ranges.items():
        if ndim == 2 and d.int(0, 1):
            own[name + 's'] = judge[name] = [d.int(max(low, 1), max(high, 1)), d.int(max(low, 1), max(high, 1))]
        else:
            own[name] = d.int(low, high)
            judge[name] = [own[name]] * ndim
    return own, judge


def convolution(name, ndim, transposed):
    @row('kn_' + name, name)
    def _(d):
        ranges = {'stride': (1, 3), 'pad': (0, 2), 'dilation': (1, 2)}
        own, judge = pairs(d, ndim, **ranges)
        own['groups'] = groups = d.int(1, 3)
        c, o, kernel = groups * d.size(1, 4), groups * d.size(1, 4), [d.int(1, 3) for _ in range(ndim)]
        x = d.input([d.size(1, 3), c] + [d.size(5, 9) for _ in range(ndim)])
        w = d.input([c, o // groups, *kernel] if transposed else [o, c // groups, *kernel])
        bias = [d.input([o])] if d.int(0, 1) else []
        more = {}
        if transposed:
            own['output_pad'] = d.int(0, max(min(judge['stride']), min(judge['dilation'])) - 1)
            more['output_padding'] = own['output_pad']
        return [x, w, *bias], lambda k, x, w, b=None: getattr(k, name)(x, w, b, **own), \
            lambda x, w, b=None: getattr(F, name)(x, w, b, stride=judge['stride'], padding=judge['pad'],
                                                  dilation=judge['dilation'], groups=groups, **more)


for word in ('conv', 'conv_transpose'):
    convolution(word + '2d', 2, word != 'conv')
    convolution(word + '1d', 1, word != 'conv')


def image(d, **how):
    return d.input([d.size(1, 3), d.size(1, 4), d.size(5, 9), d.size(5, 9)], **how)


for word in ('max_pool2d', 'avg_pool2d'):
    @row('kn_' + word, word)
    def _(d, word=word):
        own, judge = pairs(d, 2, kernel=(2, 3), stride=(1, 3))
        own['pad'], own['ceil_mode'] = d.int(0, 1), d.choice([True, False])
        more = {}
        if word == 'max_pool2d':
            own['dilation'] = more['dilation'] = d.int(1, 2)
        else:
            own['exclude_pad'] = d.choice([True, False])
            more['count_include_pad'] = not own['exclude_pad']
        return [image(d)], lambda k, x: getattr(k, word)(x, **own), \
            lambda x: getattr(F, word)(x, judge['kernel'], judge['stride'], own['pad'], ceil_mode=own['ceil_mode'], **more)


@row('kn_adaptive_avg_pool2d', 'adaptive_avg_pool2d')
def _(d):
    size = d.int(1, 11), d.int(1, 11)
    return [image(d)], lambda k, x: k.adaptive_avg_pool2d(x, *size), lambda x: F.adaptive_avg_pool2d(x, size)


for word in ('max_pool1d', 'avg_pool1d'):
    @row('kn_' + word, word)
    def _(d, word=word):
        own = {'kernel': d.int(2, 3), 'stride': d.int(1, 3), 'pad': d.int(0, 1), 'ceil_mode': d.choice([True, False])}
        more = {}
        if word == 'max_pool1d':
            own['dilation'] = more['dilation'] = d.int(1, 2)
        else:
            own['exclude_pad'] = d.choice([True, False])
            more['count_include_pad'] = not own['exclude_pad']
        return [d.input([d.size(1, 3), d.size(1, 4), d.size(5, 12)])], lambda k, x: getattr(k, word)(x, **own), \
            lambda x: getattr(F, word)(x, own['kernel'], own['stride'], own['pad'], ceil_mode=own['ceil_mode'], **more)


@row('kn_adaptive_avg_pool1d', 'adaptive_avg_pool1d')
def _(d):
    size = d.int(1, 11)
    return [d.input([d.size(1, 3), d.size(1, 4), d.size(1, 12)])], lambda k, x: k.adaptive_avg_pool1d(x, size), \
        lambda x: F.adaptive_avg_pool1d(x, size)


@row('kn_fold2d', 'fold')
def _(d):
    own, judge = pairs(d, 2, kernel=(1, 3), stride=(1, 3), pad=(0, 2), dilation=(1, 2))
    size, c = [d.size(5, 9), d.size(5, 9)], d.size(1, 3)
    places = [(n + 2 * p - e * (r - 1) - 1) // s + 1
              for n, p, e, r, s in zip(size, judge['pad'], judge['dilation'], judge['kernel'], judge['stride'])]
    return [d.input([d.int(1, 3), c * judge['kernel'][0] * judge['kernel'][1], places[0] * places[1]])], \
        lambda k, x: k.fold2d(x, *size, **own), \
        lambda x: F.fold(x, size, judge['kernel'], judge['dilation'], judge['pad'], judge['stride'])


@row('kn_unfold2d', 'unfold')
def _(d):
    own, judge = pairs(d, 2, kernel=(1, 3), stride=(1, 3), pad=(0, 2), dilation=(1, 2))
    return [image(d)], lambda k, x: k.unfold2d(x, **own), \
        lambda x: F.unfold(x, judge['kernel'], judge['dilation'], judge['pad'], judge['stride'])


@row('kn_interpolate', 'interpolate')
def _(d):
    mode, n = d.choice(['nearest', 'bilinear', 'bicubic', 'nearest-exact', 'area']), d.choice([1, 2, 2, 2, 3])
    n = 2 if mode == 'bicubic' else n
    corners = mode in ('bilinear', 'bicubic') and d.choice([True, False])
    smooth = n == 2 and mode in ('bilinear', 'bicubic') and not corners and d.choice([True, False])
    if d.int(0, 1):
        size = [d.int(1, 13) for _ in range(n)]
        own, judge = {'sizes': size}, {'size': size}
    else:
        scale = [d.choice([0.5, 1.5, 2.0, 1.7, 0.4]) for _ in range(n)]
        own, judge = {'scales': scale}, {'scale_factor': scale}
    in_torch = {1: 'linear', 2: 'bilinear', 3: 'trilinear'}[n] if mode == 'bilinear' else mode
    return [d.input([d.int(1, 3), d.int(1, 4)] + [d.int(5, 9) for _ in range(n)])], \
        lambda k, x: k.interpolate(x, mode=k.enums['KN_' + mode.upper().replace('-', '_')], align_corners=corners,
                                   antialias=smooth, **own), \
        lambda x: F.interpolate(x, mode=in_torch, align_corners=corners if mode in ('bilinear', 'bicubic') else None,
                                antialias=smooth, **judge)


for word in ('pixel_shuffle', 'pixel_unshuffle'):
    @row('kn_' + word, word)
    def _(d, word=word):
        r = d.int(1, 3)
        c, h, w = d.size(1, 3), d.size(1, 4), d.size(1, 4)
        shape = d.shape(0, 2) + ([c * r * r, h, w] if word == 'pixel_shuffle' else [c, h * r, w * r])

        def in_torch(x):    # of 4 dims: torch refuses some orders of 5
            y = getattr(F, word)(x.reshape(-1, *shape[-3:]), r)
            return y.reshape(*shape[:-3], *y.shape[1:])
        return [d.input(shape)], lambda k, x: getattr(k, word)(x, r), in_torch
