"""bench/peers/opinfo_nn.py: torch.nn's functions, modules and optimizers as calls of Knap, for opinfo_table.TABLE."""
import math

from knap import ZERO, Tensor
from opinfo_table import SHAPE_ONLY, TABLE, ints, n, nn, refuse, shape

OPTIMIZERS = {}


def pair(value, count=2):
    value = ints(value)
    return value * count if len(value) == 1 else value


def windows(count, **options):
    """Options of one dim, or of {rows, columns}."""
    if count == 1:
        return {name: ints(v)[0] for name, v in options.items() if v is not None}
    return {name + 's': pair(v, count) for name, v in options.items() if v is not None and ints(v) != []}


def convolution(count, transposed):
    name = f'conv{"_transpose" if transposed else ""}{count}d'

    def plain(k, x, w, b=None, stride=1, padding=0, dilation=1, groups=1):
        if padding == 'valid':
            padding = 0
        own = windows(count, stride=stride, dilation=dilation, pad=0 if padding == 'same' else padding)
        if padding == 'same':
            own['same'] = True
        return getattr(k, name)(x, w, b, groups=groups, **own)

    def over(k, x, w, b=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
        return getattr(k, name)(x, w, b, groups=groups, **windows(
            count, stride=stride, dilation=dilation, pad=padding, output_pad=output_padding))
    return over if transposed else plain


def max_pool(count):
    def call(k, x, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False):
        return getattr(k, f'max_pool{count}d')(x, ceil_mode=ceil_mode, **windows(
            count, kernel=kernel_size, stride=stride, pad=padding, dilation=dilation))
    return call


def avg_pool(count):
    def call(k, x, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None):
        if divisor_override is not None:
            refuse('a divisor')
        return getattr(k, f'avg_pool{count}d')(x, ceil_mode=ceil_mode, exclude_pad=not count_include_pad, **windows(
            count, kernel=kernel_size, stride=stride, pad=padding))
    return call


def adaptive(word, count):
    def call(k, x, size, return_indices=False):
        size = [w if w is not None else k.size(x, i - count) for i, w in enumerate(
            size if isinstance(size, (list, tuple)) else [size] * count)]
        return getattr(k, f'adaptive_{word}_pool{count}d')(x, *size)
    return call


def interpolate(k, x, size=None, scale_factor=None, mode='nearest', align_corners=None, recompute_scale_factor=None, antialias=False):
    word = 'KN_' + {'linear': 'bilinear', 'trilinear': 'bilinear'}.get(mode, mode).upper().replace('-', '_')
    if word not in k.enums:
        raise AttributeError(f'the headers have no {word}')
    own = {'mode': k.enums[word], 'align_corners': bool(align_corners)}
    if antialias:
        own['antialias'] = True
    name, v = ('size', size) if size is not None else ('scale', scale_factor)
    v = list(v) if isinstance(v, (list, tuple)) else [v]
    if recompute_scale_factor and size is None:    # of the size that they give
        name, v = 'size', [math.floor(n * f) for n, f in zip(shape(k, x)[2:], v * (k.ndim(x) - 2 if len(v) == 1 else 1))]
    zero = 0 if name == 'size' else 0.0
    return k.interpolate(x, **own, **({name: v[0]} if len(v) == 1 else {name + 's': v + [zero] * (3 - len(v))}))


def k_reduction(k, word):
    return k.enums['KN_REDUCTION_' + word.upper()]


def loss(name, *options, **renamed):
    def call(k, x, t, *a, reduction='mean', **o):
        o.update(zip(options, a))
        given = {renamed.get(m, m): v if isinstance(v, (Tensor, bool)) or v else ZERO for m, v in o.items() if v is not None}
        return getattr(k, name)(x, t, reduction=k.enums['KN_REDUCTION_' + reduction.upper()], **given)
    TABLE['nn.functional.' + name] = call


def last(k, x):
    """Classes, torch's dim 1, at the end."""
    return k.movedim(x, 1, -1) if k.ndim(x) > 2 else x


def classes(name):
    def call(k, x, t, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean', label_smoothing=0.0):
        more = {'smoothing': label_smoothing} if label_smoothing else {}
        if weight is not None:
            more['weight'] = weight
        same = shape(k, x) == shape(k, t)
        return getattr(k, name)(last(k, x), last(k, t) if same else t, reduction=k.enums['KN_REDUCTION_' + reduction.upper()],
                                ignore_index=ignore_index or ZERO, **more)
    return call


def linear_loss(k, x, w, t, *, linear_bias=None, weight=None, reduction='mean', ignore_index=None, label_smoothing=0.0,
                options=None):
    more, bias = {'weight': weight} if weight is not None else {}, linear_bias
    s = shape(k, w)
    if len(s) > 2:    # losses of several dims
        logits = k.linear(x, k.reshape(w, 2, [-1, s[-1]]), None if bias is None else k.reshape(bias, 1, [-1]), False)
        logits = k.reshape(logits, *n(shape(k, x)[:-1] + s[:-1]))
        return classes('cross_entropy')(k, logits, t, weight, None, -100 if ignore_index is None else ignore_index, None, reduction,
                                        label_smoothing)
    if bias is not None:
        more['bias'] = bias
    return k.linear_cross_entropy(x, w, t, reduction=k.enums['KN_REDUCTION_' + reduction.upper()], smoothing=label_smoothing,
                                  ignore_index=ZERO if ignore_index == 0 else ignore_index or 0, **more)


def attention(k, q, key, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    if k.ndim(q) == 3:    # of one head
        q, key, v = (k.unsqueeze(x, 1) for x in (q, key, v))
        mask = attn_mask if attn_mask is None or k.ndim(attn_mask) < 3 else k.unsqueeze(attn_mask, 1)
        return k.squeeze(attention(k, q, key, v, mask, dropout_p, is_causal, scale), 1, [1])
    more = {'mask': attn_mask} if attn_mask is not None else {}
    if is_causal:
        more.update(causal=True, align=k.enums['KN_CAUSAL_FIRST'])
    return k.scaled_dot_product_attention(q, key, v, dropout=dropout_p, scale=scale or 0, **more)


def normal_dims(f):
    """A norm over the last dims: as one dim."""
    def call(k, x, dims, *t, eps=None, **o):
        count, s = len(dims), shape(k, x)
        t = [*t, *o.values()]
        if t and not isinstance(t[-1], Tensor) and t[-1] is not None:
            eps = t.pop()
        one = [s[:len(s) - count] + [-1 if 0 not in s else __import__('math').prod(s[len(s) - count:])]]
        x = x if count == 1 else k.reshape(x, *n(one[0]))
        t = [w if w is None or count == 1 else k.reshape(w, 1, [-1]) for w in t]
        y = f(k, x, t, eps)
        return y if count == 1 else k.reshape(y, *n(s))
    return call


def batch_norm(k, x, mean, var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    return k.batch_norm(x, weight, bias, mean, var, training=training, momentum=ZERO if momentum == 0 else momentum or 0, eps=eps or ZERO)


def instance_norm(k, x, running_mean=None, running_var=None, weight=None, bias=None, use_input_stats=True, momentum=0.1, eps=1e-5):
    more = {n: t for n, t in (('running_mean', running_mean), ('running_var', running_var)) if t is not None}
    return k.instance_norm(x, weight, bias, eps or ZERO, use_running=not use_input_stats, momentum=momentum or ZERO, **more)


for count in (1, 2, 3):
    for f, word in ((convolution(count, False), 'conv'), (convolution(count, True), 'conv_transpose'),
                    (max_pool(count), 'max_pool'), (avg_pool(count), 'avg_pool'), (adaptive('avg', count), 'adaptive_avg_pool'),
                    (adaptive('max', count), 'adaptive_max_pool')):
        TABLE[f'nn.functional.{word}{count}d'] = f
for mode in ('nearest', 'nearest-exact', 'linear', 'bilinear', 'bicubic', 'trilinear', 'area'):
    TABLE['nn.functional.interpolate/' + mode] = interpolate
for word in ('mse_loss', 'l1_loss', 'soft_margin_loss', 'multilabel_margin_loss'):
    loss(word)
loss('huber_loss', delta='delta')
loss('smooth_l1_loss')
loss('binary_cross_entropy', 'weight')
loss('binary_cross_entropy_with_logits', 'weight')
loss('kl_div')
loss('hinge_embedding_loss')
TABLE['nn.functional.gaussian_nll_loss'] = lambda k, x, t, var, full=False, eps=1e-6, reduction='mean': k.gaussian_nll_loss(
    x, t, var if isinstance(var, Tensor) else k.full_like(x, var), full=full, eps=eps, reduction=k_reduction(k, reduction))
TABLE['nn.functional.poisson_nll_loss'] = lambda k, x, t, log_input=True, full=False, size_average=None, eps=1e-8, reduce=None, \
    reduction='mean': k.poisson_nll_loss(x, t, no_log_input=not log_input, full=full, eps=eps or ZERO,
                                         reduction=k_reduction(k, reduction))
for word in (1, 2, 3):    # of whole channels
    TABLE[f'nn.functional.dropout{word}d'] = lambda k, x, p=0.5, training=True, inplace=False: k.mul(x, k.dropout(k.ones(
        k.dtype_of(x), 0, *n([s if i < k.ndim(x) - 2 else 1 for i, s in enumerate(shape(k, x))])), p)) if training else x
    SHAPE_ONLY.add(f'nn.functional.dropout{word}d')
TABLE['torch.ops.aten._scaled_dot_product_flash_attention_for_cpu'] = lambda k, q, key, v, dropout_p=0.0, is_causal=False, \
    return_debug_mask=False, attn_mask=None, scale=None: attention(k, q, key, v, attn_mask, dropout_p, is_causal, scale)
nn(linear=lambda k, x, w, b=None: k.linear(x, w, b, False) if k.ndim(w) > 1 else k.matmul(x, w), cross_entropy=classes('cross_entropy'), nll_loss=classes('nll_loss'),
   linear_cross_entropy=linear_loss, scaled_dot_product_attention=attention, batch_norm=batch_norm, instance_norm=instance_norm,
   upsample_bilinear=lambda k, x, size=None, scale_factor=None: interpolate(k, x, size, scale_factor, 'bilinear', True),
   upsample_nearest=lambda k, x, size=None, scale_factor=None: interpolate(k, x, size, scale_factor),
   layer_norm=normal_dims(lambda k, x, t, eps: k.layer_norm(x, *(t + [None] * 2)[:2], eps or 0)),
   rms_norm=normal_dims(lambda k, x, t, eps: k.rms_norm(x, *(t + [None])[:1], eps or 1.1920928955078125e-07)),
   group_norm=lambda k, x, groups, weight=None, bias=None, eps=1e-5: k.group_norm(x, groups, weight, bias, eps),
   normalize=lambda k, x, p=2.0, dim=1, eps=1e-12: k.normalize(x, dim=dim or ZERO, eps=eps) if p == 2 else k.div(
       x, k.clamp(k.norm(x, float(p), 1, [dim], True), eps, math.inf)),
   cosine_similarity=lambda k, x, y, dim=1, eps=1e-8: k.cosine_similarity(x, y, dim=dim or ZERO, eps=eps),
   cosine_embedding_loss=lambda k, x, y, t, margin=0.0, size_average=None, reduce=None, reduction='mean': k.cosine_embedding_loss(
       x, y, t, margin=margin, reduction=k.enums['KN_REDUCTION_' + reduction.upper()]),
   pixel_shuffle=lambda k, x, upscale_factor: k.pixel_shuffle(x, upscale_factor),
   pixel_unshuffle=lambda k, x, downscale_factor: k.pixel_unshuffle(x, downscale_factor),
   channel_shuffle=lambda k, x, groups: k.channel_shuffle(x, groups),
   unfold=lambda k, x, kernel_size, dilation=1, padding=0, stride=1: k.unfold2d(x, **windows(
       2, kernel=kernel_size, dilation=dilation, pad=padding, stride=stride)),
   bilinear=lambda k, a, b, w, bias=None: (lambda y: y if bias is None else k.add(y, bias))(k.einsum('...i,oij,...j->...o', 3, [a, w, b])),
   pairwise_distance=lambda k, x, y, p=2.0, eps=1e-6, keepdim=False: k.norm(k.add_scalar(k.sub(x, y), eps), float(p), 1, [-1], keepdim))
TABLE['nn.functional.linear_cross_entropy/chunked'] = TABLE['nn.functional.linear_cross_entropy/chunked_none'] = linear_loss
TABLE['nn.functional.batch_norm/without_cudnn'] = batch_norm
SHAPE_ONLY.add('nn.functional.dropout')


# ---- optimizers -----------------------------------------------------------------------------------

def some(**given):
    """Options of Knap: a real 0 is KN_ZERO."""
    return {name: ZERO if v == 0 and not isinstance(v, bool) else v for name, v in given.items() if v is not None}


def adamw(decay, **more):
    return lambda k, lr=1e-3, weight_decay=decay, maximize=False, amsgrad=False, **o: ('adamw', some(
        lr=float(lr), weight_decay=weight_decay, maximize=maximize or None, amsgrad=amsgrad or None, **more))


OPTIMIZERS.update(
    AdamW=adamw(0.01), Adam=adamw(0, l2=True), SGD=lambda k, lr=1e-3, weight_decay=None, maximize=None, **o: (
        'sgd', some(lr=float(lr), weight_decay=weight_decay, maximize=maximize, **o)),
    Adagrad=lambda k, lr=1e-2, **o: ('adagrad', some(lr=float(lr), **o)),
    Muon=lambda k, lr=1e-3, weight_decay=0.1, momentum=0.95, ns_steps=5, ns_coefficients=None, adjust_lr_fn=None: ('muon', some(
        lr=float(lr), weight_decay=weight_decay, momentum=momentum, ns_steps=ns_steps, ns=ns_coefficients, scale=k.enums[
            {None: 'KN_MUON_ORIGINAL', 'match_rms_adamw': 'KN_MUON_MATCH_ADAMW', 'spectral_unclamped': 'KN_MUON_SPECTRAL'}[
                adjust_lr_fn]], ns_dtype=k.enums['KN_F64'])))
