"""bench/peers/opinfo_table.py: PyTorch's operations as calls of Knap, with torch's arguments: TABLE[name](k, *arguments).

A call that takes an argument that its row doesn't name is refused by Python. A row calls kn_ functions alone; some are
made of two or three. Rows of functions that the headers lack count as without counterpart."""
import math

import torch

from knap import ZERO, Failed, Tensor

TABLE = {}
SHAPE_ONLY = set()    # draws, and memory without values
FIRST = {'nn.functional.max_pool1d', 'nn.functional.max_pool2d', 'nn.functional.max_pool3d', 'nn.functional.adaptive_max_pool1d',
         'nn.functional.adaptive_max_pool2d', 'nn.functional.adaptive_max_pool3d',    # without torch's positions of maxima
        'kthvalue', 'torch.ops.aten._scaled_dot_product_flash_attention_for_cpu'}
ANY = 'float64 float32 bfloat16 float16 int64 bool'
# Conventions that differ: (names, dtypes, why), or with a condition on a sample behind. Such samples aren't compared.
CONVENTIONS = [
    ('true_divide div/no_rounding_mode __rdiv__ square sum_to_size float_power pow nn.functional.softsign', 'int64 bool',
     'integers and bool stay what they are: no promotion to another dtype'),
    ('arange linspace linspace/tensor_overload', 'int64', 'computed in f64 and then truncated; torch truncates before'),
    ('item', 'int64 bool', 'kn_item is a double'),
    ('topk msort kthvalue', 'bfloat16 float16 int64 bool', 'of equals kn_sort takes the first; torch leaves it open'),
    ('remainder __rmod__', ANY, 'torch has no derivative for the divisor of a number', lambda x, a, o: any(
        not isinstance(p, torch.Tensor) and q.requires_grad for p, q in [(x, a[0]), (a[0], x)] if isinstance(q, torch.Tensor))),
    ('nn.functional.poisson_nll_loss', ANY, "Stirling's term of a target of 0 has no gradient; torch has NaN",
     lambda x, a, o: o.get('full') and bool((a[0] == 0).any())),
    ('__rsub__', ANY, 'torch has no such call of a number', lambda x, a, o: not isinstance(x, torch.Tensor)),
    ('nn.CrossEntropyLoss', ANY, 'the mean over targets that are all ignored is 0; torch has NaN',
     lambda x, a, o: bool((a[2][1] == a[0].ignore_index).all()) if not a[2][1].is_floating_point() else False),
]
# The same of single elements, which are left out: {names: why}.
NAN_STAYS = {'sign', 'sgn', 'nn.functional.silu', 'nn.functional.mish'}
OUTSIDE = {'acosh', 'logit', 'digamma'}
WHOLE = {'byte', 'int', 'long'}
NO_SLOPE = {'div/floor_rounding', 'div/trunc_rounding', 'floor_divide', 'fill'}
ELEMENTS = [(NAN_STAYS, 'NaN stays NaN, and slopes at infinity are their limits, where torch differs'),
            (OUTSIDE, 'where the result is NaN or infinite, its gradient is not compared: torch has finite numbers there, or NaN'),
            (WHOLE, 'a float outside of the integers is their nearest, NaN 0; torch has what the CPU makes of it'),
            (NO_SLOPE, 'steps and constants have no gradient; torch has zeros, and a missing gradient is compared as zeros')]
WIDER = {'nn.functional.cross_entropy', 'nn.functional.linear_cross_entropy', 'nn.functional.linear_cross_entropy/chunked',
         'nn.functional.linear_cross_entropy/chunked_none', 'nn.CrossEntropyLoss', 'nn.LinearCrossEntropyLoss',    # f32 of bf16
         'masked.argmax', 'masked.argmin'}    # i64; torch's are the dtype of x without a dim


def same(names):
    """'a:b': torch's a is kn_b of the same tensors."""
    for pair in names.split():
        name, _, own = pair.partition(':')
        own = own or name.split('.')[-1]
        TABLE[name] = lambda k, *t, own=own: getattr(k, own)(*t)


def rows(**more):
    TABLE.update({name.replace('__', '.', 1) if not name.startswith('__') else name: f for name, f in more.items()})


def nn(**more):
    TABLE.update({'nn.functional.' + name: f for name, f in more.items()})


def refuse(text):
    raise Failed('this table: ' + text)


def shape(k, x):
    return [k.size(x, i) for i in range(k.ndim(x))]


def ints(dims):
    return [int(d) for d in dims] if isinstance(dims, (list, tuple)) else [int(dims)]


def n(dims):
    """A count and a list; None is all."""
    dims = [] if dims is None else ints(dims)
    return len(dims), dims


def flat(a):
    return a[0] if len(a) == 1 and isinstance(a[0], (list, tuple)) else a


def like(k, value, x):
    """A number as a tensor beside x."""
    if isinstance(value, complex):
        refuse('no complex numbers')
    if isinstance(value, Tensor):
        return value
    if isinstance(value, torch.Tensor):
        return k.tensor(value)
    if k.dtype_of(x) == k.enums['KN_BOOL'] and not isinstance(value, bool) and value not in (0, 1):
        refuse('a number beside bools')
    if k.dtype_of(x) == k.enums['KN_BOOL'] and value in (0, 1):
        return k.cast(k.full(k.enums['KN_U8'], k.enums['KN_CPU'], int(value), 0, []), k.enums['KN_BOOL'])
    return k.full(k.dtype_of(x), k.enums['KN_CPU'], value, 0, [])


def both(k, a, b):
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        refuse('two numbers')
    x = a if isinstance(a, Tensor) else b
    return like(k, a, x), like(k, b, x)


def bits(word):
    """Of bool only, where they are kn_logical_."""
    def call(k, *t):
        t = both(k, *t) if len(t) > 1 else t
        if any(k.dtype_of(x) != k.enums['KN_BOOL'] for x in t):
            refuse('no bits of integers')
        return getattr(k, 'logical_' + word)(*t)
    return call


def cast(k, x, dtype):
    return x if dtype is None else k.cast(x, k.dtype(dtype))


def binary(names):
    for pair in names.split():
        name, _, own = pair.partition(':')

        def call(k, a, b, own=own or name):
            return getattr(k, own)(*both(k, a, b))
        TABLE[name] = call


def over(names):
    for name in names.split():
        def call(k, x, dim=None, keepdim=False, dtype=None, name=name):
            if k.ndim(x) == 0:    # dims 0 and -1 of a number
                dim = None
            return cast(k, getattr(k, name)(cast(k, x, dtype), *n(dim), bool(keepdim)), dtype)
        TABLE[name] = call


def slots(k, count, call):
    s = k.slots(count)
    call(s)
    return k.filled(s)


def with_indices(f):
    def call(k, *a, **o):
        s = k.slots(1)
        y = f(k, *a, indices=s, **o)
        return [y, *k.filled(s)]
    return call


# ---- elementwise ----------------------------------------------------------------------------------

same('abs neg positive:contiguous sign sgn:sign floor ceil exp expm1 log log1p log2 sqrt rsqrt reciprocal sin cos tan atan erf '
     'tanh sigmoid nn.functional.logsigmoid isnan isinf isfinite square logical_not logical_and logical_or logical_xor '
     'clone:contiguous contiguous acos asin sinh cosh asinh acosh atanh log10 trunc erfinv erfc frac exp2 lgamma digamma '
     'log_sigmoid:logsigmoid masked_select argwhere:nonzero alias_copy:contiguous '
     'logaddexp logaddexp2 copysign hypot fmax fmin masked.logaddexp:logaddexp')
binary('mul sub true_divide:div eq ne lt le gt ge maximum minimum max/binary:maximum min/binary:minimum __radd__:add __rmul__:mul '
       'atan2 floor_divide div/floor_rounding:floor_divide remainder fmod xlogy special.xlog1py:xlog1py')


def float_power(k, a, b):
    a, b = (cast(k, x, torch.float64) if isinstance(x, Tensor) else x for x in (a, b))
    return power(k, a, b)


def power(k, a, b):
    return k.pow(a, b) if isinstance(a, Tensor) and not isinstance(b, Tensor) else k.pow_tensor(*both(k, a, b))


def add(k, a, b, alpha=1):
    a, b = both(k, a, b)
    return k.add(a, b) if alpha == 1 else k.add_scaled(a, b, alpha)


def clamp(k, x, low=None, high=None, **names):
    low, high = names.get('min', low), names.get('max', high)
    if not isinstance(low, Tensor) and not isinstance(high, Tensor):
        return k.clamp(x, -math.inf if low is None else low, math.inf if high is None else high)
    x = x if low is None else k.maximum(x, like(k, low, x))
    return x if high is None else k.minimum(x, like(k, high, x))


def div(k, a, b, rounding_mode=None):
    return {None: k.div, 'trunc': lambda a, b: k.trunc(k.div(k.detach(a), k.detach(b))), 'floor': k.floor_divide}[rounding_mode](*both(k, a, b))


def rounded(k, x, decimals=0):
    return k.round(x) if decimals == 0 else refuse('kn_round has no decimals')


def logit(k, x, eps=None):
    if eps is not None:    # the lower bound first, also where it is above the upper one
        low, high = like(k, eps, x), like(k, 1 - eps, x)
        x = k.where(k.lt(x, low), low, k.where(k.gt(x, high), high, x))
    return k.log(k.div(x, k.sub(like(k, 1, x), x)))


def rsub(k, a, b, alpha=1):
    a, b = both(k, a, b)
    return k.sub(b, a) if alpha == 1 else k.add_scaled(b, a, -alpha)


def isclose(k, a, b, rtol=1e-5, atol=1e-8, equal_nan=False):
    if k.dtype_of(a) == k.enums['KN_BOOL']:
        return k.eq(a, b)
    away = k.abs(k.sub(a, b))
    y = k.logical_or(k.eq(a, b), k.logical_and(k.isfinite(away), k.le(away, k.add_scalar(k.scale(k.abs(b), rtol), atol))))
    return k.logical_or(y, k.logical_and(k.isnan(a), k.isnan(b))) if equal_nan else y


def fill_where(k, x, mask, value):
    return k.masked_fill(x, mask, value) if not isinstance(value, Tensor) else k.where(mask, value, x)


rows(add=add, sub=lambda k, a, b, alpha=1: add(k, a, b, -alpha) if alpha != 1 else k.sub(*both(k, a, b)),
     clamp=clamp, clamp_min=lambda k, x, b: clamp(k, x, b), clamp_max=lambda k, x, b: clamp(k, x, None, b), pow=power,
     __rpow__=lambda k, a, b: power(k, b, a), float_power=float_power,
     __rdiv__=lambda k, a, b: k.div(*both(k, b, a)), __rsub__=rsub, rsub=rsub, __rmatmul__=lambda k, a, b: k.matmul(b, a),
     __rmod__=lambda k, a, b: k.remainder(*both(k, b, a)), lerp=lambda k, a, b, w: k.lerp(a, b, w) if not isinstance(w, Tensor)
     else k.add(a, k.mul(w, k.sub(b, a))), addcmul=lambda k, x, a, b, value=1: k.add_scaled(x, k.mul(a, b), value),
     addcdiv=lambda k, x, a, b, value=1: k.add_scaled(x, k.div(a, b), value), deg2rad=lambda k, x: k.scale(x, math.pi / 180),
     rad2deg=lambda k, x: k.scale(x, 180 / math.pi), where=lambda k, x, c, y: k.where(c, *both(k, x, y)), nonzero=lambda k, x, as_tuple=False: [k.select(k.nonzero(x), 1, i) for i in range(k.ndim(x))] if as_tuple and k.ndim(
         x) else k.nonzero(x if not as_tuple else k.reshape(x, 1, [1])) if not as_tuple else k.select(k.nonzero(k.reshape(x, 1, [1])), 1, 0),
     masked_fill=fill_where, logit=logit, equal=lambda k, a, b: k.all(k.eq(a, b), 0, None, False),
     heaviside=lambda k, x, v: k.where(k.eq(x, like(k, 0, x)), v, k.cast(k.gt(x, like(k, 0, x)), k.dtype_of(x))),
     fill=lambda k, x, value: k.full_like(x, value) if not isinstance(value, Tensor) else k.expand(value, *n(shape(k, x))),
     zero_=lambda k, x: k.zeros_like(x) if not k.requires_grad(x) else k.scale(x, 0), isposinf=lambda k, x: k.eq(x, like(k, math.inf, x)), isneginf=lambda k, x: k.eq(x, like(k, -math.inf, x)),
     nan_to_num=lambda k, x, nan=None, posinf=None, neginf=None: k.nan_to_num(x, **{
         m: v or ZERO for m, v in (('nan', nan), ('posinf', posinf), ('neginf', neginf)) if v is not None}),
     item=lambda k, x: k.item(x), to=lambda k, x, *a, **o: k.cast(x, next((k.dtype_of(d) if isinstance(d, Tensor) else k.dtype(d) for d in [
         *a, *o.values()] if isinstance(d, (Tensor, torch.dtype))), k.dtype_of(x))))
TABLE.update({'div/no_rounding_mode': div, 'div/trunc_rounding': div, 'div/floor_rounding': div, 'round': rounded,
              'round/decimals_0': rounded, 'isclose': isclose})
for word, dtype in (('bfloat16', torch.bfloat16), ('bool', torch.bool), ('byte', torch.uint8), ('double', torch.float64),
                    ('float', torch.float32), ('half', torch.float16), ('int', torch.int32), ('long', torch.int64)):
    TABLE[word] = lambda k, x, dtype=dtype, memory_format=None: cast(k, x, dtype)
for name, word in (('bitwise_and', 'and'), ('bitwise_or', 'or'), ('bitwise_xor', 'xor'), ('bitwise_not', 'not'), ('__rand__', 'and'),
                   ('__ror__', 'or'), ('__rxor__', 'xor')):
    TABLE[name] = bits(word)
nn(relu=lambda k, x, inplace=False: k.relu(x), relu6=lambda k, x, inplace=False: k.relu6(x),
   silu=lambda k, x, inplace=False: k.silu(x), mish=lambda k, x, inplace=False: k.mish(x),
   hardsigmoid=lambda k, x, inplace=False: k.hardsigmoid(x), hardswish=lambda k, x, inplace=False: k.hardswish(x),
   gelu=lambda k, x, approximate='none': k.gelu(x) if approximate == 'none' else k.gelu_tanh(x),
   leaky_relu=lambda k, x, negative_slope=0.01, inplace=False: k.leaky_relu(x, slope=negative_slope or ZERO),
   elu=lambda k, x, alpha=1.0, inplace=False: k.elu(x, alpha=alpha or ZERO),
   celu=lambda k, x, alpha=1.0, inplace=False: k.celu(x, alpha=alpha or ZERO), selu=lambda k, x, inplace=False: k.selu(x),
   softplus=lambda k, x, beta=1.0, threshold=20.0: k.softplus(x, beta=beta, threshold=threshold or ZERO),
   hardtanh=lambda k, x, min_val=-1.0, max_val=1.0, inplace=False: k.hardtanh(x, low=min_val or ZERO, high=max_val or ZERO),
   prelu=lambda k, x, weight: k.prelu(x, weight), glu=lambda k, x, dim=-1: k.mul((p := slots(k, 2, lambda s: k.chunk(x, dim, 2, s)))[0],
                                                                      k.sigmoid(p[1])),
   threshold=lambda k, x, threshold, value, inplace=False: k.where(k.le(x, like(k, threshold, x)), like(k, value, x), x),
   softshrink=lambda k, x, lambd=0.5: k.sub(x, k.clamp(x, -lambd, lambd)),
   hardshrink=lambda k, x, lambd=0.5: k.masked_fill(x, k.le(k.abs(x), like(k, lambd, x)), 0),
   softsign=lambda k, x: k.div(x, k.add_scalar(k.abs(x), 1)), tanhshrink=lambda k, x: k.sub(x, k.tanh(x)),
   softmin=lambda k, x, dim=None, dtype=None, _stacklevel=3: k.softmax(k.neg(cast(k, x, dtype)), dim),
   dropout=lambda k, x, p=0.5, training=True, inplace=False: k.dropout(x, p) if training else x)
TABLE['nn.functional.softmin/with_dtype'] = TABLE['nn.functional.softmin']
for word in ('softmax', 'log_softmax'):
    TABLE[word] = TABLE[word + '/with_dtype'] = lambda k, x, dim=None, dtype=None, _stacklevel=3, word=word: \
        getattr(k, word)(cast(k, x, dtype), dim)

# ---- reductions and order -------------------------------------------------------------------------

over('sum mean prod logsumexp any all amax amin')


def without_nan(mean):
    def call(k, x, dim=None, keepdim=False, dtype=None):
        y = TABLE['sum'](k, k.masked_fill(x, k.isnan(x), 0), dim, keepdim, dtype)
        return k.div(y, k.cast(TABLE['sum'](k, k.logical_not(k.isnan(x)), dim, keepdim), k.dtype_of(y))) if mean else y
    return call


rows(nansum=without_nan(False), nanmean=without_nan(True), count_nonzero=lambda k, x, dim=None: TABLE['sum'](
    k, k.ne(x, like(k, 0, x)), dim))


def extreme(word):
    def call(k, x, dim=None, keepdim=False):
        if dim is None:
            return getattr(k, 'a' + word)(x, 0, None, keepdim)
        y = with_indices(lambda k, x, indices: k.topk(x, 1, dim, smallest=word == 'min', indices=indices))(k, x)
        return y if keepdim else [k.squeeze(t, *n(dim)) for t in y]
    return call


def place(word):
    def call(k, x, dim=None, keepdim=False, dtype=None):
        y = getattr(k, word)(x if dim is not None else k.reshape(x, 1, [-1]), 0 if dim is None else dim)
        if not keepdim or k.ndim(x) == 0:
            return y
        return k.unsqueeze(y, dim if dim >= 0 else dim - 0) if dim is not None else k.reshape(y, k.ndim(x), [1] * k.ndim(x))
    return call


def spread(word):
    def call(k, x, dim=None, correction=None, keepdim=False, unbiased=None):
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        c = correction if correction is not None else 0 if unbiased is False else 1
        return getattr(k, word)(x, *n(dim), correction=c or ZERO, keep=keepdim)
    return call


def moments(word):
    def call(k, x, *a, **o):
        o.setdefault('keepdim', False)
        dim = o.get('dim', a[0] if a and not isinstance(a[0], bool) else None)
        return [spread(word)(k, x, *a, **o), k.mean(x, *n(dim), o['keepdim'])]
    return call


def norm(k, x, ord=2, dim=None, keepdim=False, dtype=None):
    return k.norm(cast(k, x, dtype), float(ord), *n(dim), keepdim)


def median(k, x, dim=None, keepdim=False):
    number = k.ndim(x) == 0
    x, d = (k.reshape(x, 1, [-1]), 0) if dim is None or number else (x, dim)
    y = with_indices(lambda k, x, indices: k.sort(x, d, indices=indices))(k, x)
    at = (shape(k, x)[d] - 1) // 2
    y = [k.slice(t, d, at, at + 1) for t in y]
    y = y if keepdim and not number else [k.squeeze(t, *n(d)) for t in y]
    return y[0] if dim is None else y


rows(argmax=place('argmax'), argmin=place('argmin'), var=spread('var'), std=spread('std'), var_mean=moments('var'),
     std_mean=moments('std'), linalg__vector_norm=norm, aminmax=lambda k, x, dim=None, keepdim=False: [
         TABLE['amin'](k, x, dim, keepdim), TABLE['amax'](k, x, dim, keepdim)], median=median,
     cumsum=lambda k, x, dim, dtype=None: k.cumsum(cast(k, x, dtype), dim),
     cumprod=lambda k, x, dim, dtype=None: k.cumprod(cast(k, x, dtype), dim), logcumsumexp=lambda k, x, dim: k.logcumsumexp(x, dim),
     cummax=with_indices(lambda k, x, dim, **o: k.cummax(x, dim, *o.values())),
     cummin=with_indices(lambda k, x, dim, **o: k.cummin(x, dim, *o.values())),
     sort=with_indices(lambda k, x, dim=-1, descending=False, stable=False, indices=None: k.sort(
         x, dim, descending=descending, indices=indices)), msort=lambda k, x: k.sort(x, 0),
     argsort=lambda k, x, dim=-1, descending=False, stable=False: k.argsort(x, dim, descending),
     topk=with_indices(lambda k, x, count, dim=-1, largest=True, sorted=True, indices=None: k.topk(
         x, count, dim, smallest=not largest, indices=indices)), trace=lambda k, x: k.sum(k.diagonal(x, 0, 0, 1), 0, None, False),
     kthvalue=with_indices(lambda k, x, at, dim=-1, keepdim=False, indices=None: last_of(k, k.topk(
         x, at, dim, smallest=True, indices=indices), indices, dim, keepdim)), dist=lambda k, a, b, p=2: k.norm(k.sub(a, b), float(p), 0, None, False))
for word in ('max', 'min'):
    TABLE[f'{word}/reduction_with_dim'] = TABLE[f'{word}/reduction_no_dim'] = extreme(word)
for word in ('var', 'std'):
    TABLE[word + '/unbiased'], TABLE[word + '_mean/unbiased'] = spread(word), moments(word)
TABLE.update({'norm': lambda k, x, p=2, dim=None, keepdim=False, dtype=None: norm(
    k, x, 2 if p in (None, 'fro') else p if not isinstance(p, str) else refuse('no nuclear norm'), dim, keepdim, dtype)})
TABLE['norm/fro'] = TABLE['norm/inf'] = TABLE['norm']


def last_of(k, y, indices, dim, keepdim):
    found = [k.slice(t, dim, k.size(t, dim) - 1, k.size(t, dim)) for t in (y, *k.filled(indices))]
    found = found if keepdim else [k.squeeze(t, *n(dim)) for t in found]
    indices[0] = found[1].handle
    return found[0]


def masked(name, fill, f):
    """torch.masked's: f of x with fill where the mask doesn't hold."""
    def call(k, x, *a, mask=None, **o):
        if mask is not None:
            x = k.where(mask, x, like(k, fill(k, x), x))
        return f(k, x, *a, **o)
    TABLE['masked.' + name] = call


def lowest(sign):
    def value(k, x):
        dtype = next((d for d in (torch.int64, torch.int32, torch.uint8) if k.dtype(d) == k.dtype_of(x)), None)
        if dtype is None:
            return sign * math.inf
        return torch.tensor(torch.iinfo(dtype).min if sign < 0 else torch.iinfo(dtype).max, dtype=dtype)
    return value


for word, fill in (('sum', lambda k, x: 0), ('prod', lambda k, x: 1), ('amax', lowest(-1)), ('amin', lowest(1)),
                   ('softmax', lowest(-1)), ('log_softmax', lowest(-1)), ('logsumexp', lowest(-1)), ('cumsum', lambda k, x: 0),
                   ('cumprod', lambda k, x: 1), ('argmax', lowest(-1)), ('argmin', lowest(1))):
    masked(word, fill, TABLE[word])
masked('softmin', lowest(1), TABLE['nn.functional.softmin'])
masked('normalize', lambda k, x: 0, lambda k, x, ord, dim, eps=1e-12, dtype=None: TABLE['nn.functional.normalize'](
    k, cast(k, x, dtype), ord, dim, eps))


def masked_norm(k, x, ord=2, dim=None, keepdim=False, dtype=None, mask=None):
    ord = 2 if ord is None else ord
    if mask is not None:    # what doesn't count
        x = k.where(mask, x, like(k, 0 if ord >= 0 else math.inf, x))
    return norm(k, x, ord, dim, keepdim, dtype)


def masked_logaddexp(k, a, b, input_mask=None, other_mask=None):
    a, b = (x if m is None else k.where(m, x, like(k, -math.inf, x)) for x, m in ((a, input_mask), (b, other_mask)))
    return k.logaddexp(a, b)


TABLE['masked.norm'], TABLE['masked.logaddexp'] = masked_norm, masked_logaddexp

# ---- products -------------------------------------------------------------------------------------

same('matmul mm:matmul bmm:matmul mv:matmul dot:matmul vdot:matmul')


def add_product(sum_first=False):
    def call(k, x, a, b, beta=1, alpha=1):
        y = k.matmul(a, b)
        y = k.sum(y, 1, [0], False) if sum_first else y
        if beta == 0:    # x isn't read
            return k.expand(y if alpha == 1 else k.scale(y, alpha), *n(list(torch.broadcast_shapes(shape(k, x), shape(k, y)))))
        return k.add_scaled(y if alpha == 1 else k.scale(y, alpha), x, beta) if k.ndim(y) == k.ndim(x) else k.add(
            k.scale(y, alpha), k.scale(x, beta))
    return call


rows(addmm=add_product(), addmv=add_product(), baddbmm=add_product(), addbmm=add_product(True),
     einsum=lambda k, x, *a, **o: refuse('an equation of lists'), outer=lambda k, a, b: k.mul(k.unsqueeze(a, 1), b),
     addr=lambda k, x, a, b, beta=1, alpha=1: k.add(k.scale(x, beta), k.scale(k.mul(k.unsqueeze(a, 1), b), alpha)),
     inner=lambda k, a, b: k.matmul(a, b) if k.ndim(b) == 1 else k.mul(a, b) if 0 in (k.ndim(a), k.ndim(b)) else k.matmul(
         a, k.transpose(b, -1, -2)) if k.ndim(b) == 2 else refuse('b of more dims'),
     linalg__vecdot=lambda k, a, b, dim=-1: k.sum(k.mul(a, b), 1, [dim], False),
     linalg__multi_dot=lambda k, t: product(k, t), tensordot=lambda k, a, b, dims=2: contract(k, a, b, dims))
TABLE.update({'addmm/decomposed': TABLE['addmm'], 'einsum': lambda k, t, equation: k.einsum(equation, len(t), list(t))})


def cross(k, a, b, dim=None):
    shapes = torch.broadcast_shapes(shape(k, a), shape(k, b))
    a, b = (k.expand(x, *n(list(shapes))) for x in (a, b))
    dim = shapes.index(3) if dim is None else dim
    r = lambda x, by: k.roll(x, 1, [by], [dim])
    return k.sub(k.mul(r(a, -1), r(b, -2)), k.mul(r(a, -2), r(b, -1)))


def matrix_norm(k, x, ord='fro', dim=(-2, -1), keepdim=False, dtype=None):
    x, dim = cast(k, x, dtype), [d % k.ndim(x) for d in dim]
    if ord in ('fro', None):
        return k.norm(x, 2.0, *n(dim), keepdim)
    if ord not in (1, -1, math.inf, -math.inf):    # of the singular values
        rest = [d for d in range(k.ndim(x)) if d not in dim]
        s = k.svd(k.permute(x, *n(rest + dim)), k.slots(1), k.slots(1))
        y = k.sum(s, 1, [-1], False) if ord == 'nuc' else (k.amax if ord > 0 else k.amin)(s, 1, [-1], False)
        return k.reshape(y, *n([1 if d in dim else k.size(x, d) for d in range(k.ndim(x))])) if keepdim else y
    first, second = dim if abs(ord) == 1 else dim[::-1]
    y = (k.amax if ord > 0 else k.amin)(k.sum(k.abs(x), 1, [first], True), 1, [second], True)
    return y if keepdim else k.squeeze(y, *n(dim))


def any_norm(k, x, ord=None, dim=None, keepdim=False, dtype=None):
    if isinstance(ord, str) or (ord is not None and len(ints(dim) if dim is not None else shape(k, x)) == 2):
        return matrix_norm(k, x, ord, dim if dim is not None else (-2, -1), keepdim, dtype)
    return norm(k, x, 2 if ord is None else ord, dim, keepdim, dtype)


TABLE.update({'linalg.matrix_norm': matrix_norm, 'linalg.norm': any_norm, 'linalg.norm/subgradients_at_zero': any_norm, 'cross': cross,
              'linalg.cross': lambda k, a, b, dim=-1: cross(k, a, b, dim),
              'linalg.matrix_power': lambda k, x, p: product(k, [x] * p) if p > 0 else k.add(k.scale(x, 0), k.eye(
                  k.dtype_of(x), k.enums['KN_CPU'], k.size(x, -1), k.size(x, -1))) if p == 0 else product(k, [k.inv(x)] * -p),
              'kron': lambda k, a, b: k.reshape(k.einsum(f'{(i := "abcdefgh"[:k.ndim(a)])},{(j := "ijklmnop"[:k.ndim(b)])}->' + ''.join(
                  x + y for x, y in zip(i.rjust(len(j)), j.rjust(len(i)))).replace(' ', ''), 2, [a, b]), *n([
                      p * q for p, q in zip([1] * (len(j) - len(i)) + shape(k, a), [1] * (len(i) - len(j)) + shape(k, b))]))})


def product(k, t):
    y = t[0]
    for x in t[1:]:
        y = k.matmul(y, x)
    return y


def contract(k, a, b, dims):
    if isinstance(dims, int):
        dims = [range(k.ndim(a) - dims, k.ndim(a)), range(dims)]
    a_dims, b_dims = ([d % k.ndim(x) for d in ds] for x, ds in zip((a, b), dims))
    of_a, of_b = list('abcdefghij'[:k.ndim(a)]), list('klmnopqrst'[:k.ndim(b)])
    for i, j in zip(a_dims, b_dims):
        of_b[j] = of_a[i]
    rest = [c for i, c in enumerate(of_a) if i not in a_dims] + [c for j, c in enumerate(of_b) if j not in b_dims]
    return k.einsum(f'{"".join(of_a)},{"".join(of_b)}->{"".join(rest)}', 2, [a, b])
