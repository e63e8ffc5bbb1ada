"""bench/peers/operations.py: Knap's operations beside torch's: how a case of each is drawn and called in both.

A row's function takes a Draw and gives (inputs, Knap's call, torch's call); the calls take the inputs."""
import torch
import torch.nn.functional as F

from knap import ZERO

ROWS = []


class Row:
    def __init__(self, name, judge, make, bounds=None, why=''):
        self.name, self.judge, self.make, self.why = name, judge, make, why
        self.bounds = dict(zip((torch.float32, torch.float64), bounds or ()))


def row(name, judge, bounds=None, why=''):
    def add(make):
        ROWS.append(Row(name, judge, make, bounds, why))
        return make
    return add


def torch_function(name):
    for home in (torch, F, torch.Tensor):
        if hasattr(home, name):
            return getattr(home, name)
    raise KeyError(name)


# ---- elementwise ----------------------------------------------------------------------------------

def simple(names, kind='normal', count=1, bounds=None, why='', **how):
    """Rows of operations that take count tensors and nothing else; 'a:b' is kn_a beside torch's b."""
    for pair in names.split():
        name, _, judge = pair.partition(':')
        judge = judge or name

        def make(d, name=name, f=torch_function(judge)):
            drawn = kind if isinstance(kind, str) else d.choice(kind)
            inputs = d.broadcast(count, drawn, **how) if count > 1 else \
                [d.input(d.shape(smallest=d.choice([0, 1, 1, 1])), drawn, **how)]
            return inputs, lambda k, *t: getattr(k, name)(*t), f
        ROWS.append(Row('kn_' + name, judge, make, bounds, why))


simple('add sub mul', count=2)
simple('div', 'positive', count=2)
simple('maximum minimum', ['normal', 'whole'], count=2)
simple('pow_tensor:pow', 'positive', count=2)
simple('eq ne lt le gt ge', 'whole', count=2, grad=False)
simple('neg abs square sign floor ceil round exp expm1 sin cos atan erf tanh sigmoid logsigmoid relu relu6 gelu silu '
       'mish hardswish')
simple('hardsigmoid', bounds=(1e-5, 1e-7), why='the gradient has a sixth, which is of f32 in torch')
simple('tan asin acos atanh erfinv', 'sides')
simple('log log1p log2 sqrt rsqrt reciprocal', 'positive')
simple('isnan isinf isfinite', grad=False)


def with_number(name, judge, in_torch, kind='normal', count=1, numbers=None):
    @row('kn_' + name, judge)
    def _(d):
        c = d.choice(numbers) if numbers else d.rng.uniform(-2, 2)
        inputs = d.broadcast(count, kind) if count > 1 else [d.input(d.shape(), kind)]
        return inputs, lambda k, *t: getattr(k, name)(*t, c), lambda *t: in_torch(*t, c)


with_number('add_scaled', 'add', lambda a, b, c: torch.add(a, b, alpha=c), count=2)
with_number('lerp', 'lerp', torch.lerp, count=2)
with_number('scale', 'mul', torch.mul)
for word in ('eq', 'ne', 'lt', 'le', 'gt', 'ge'):
    with_number(word + '_scalar', word, torch_function(word), 'whole', numbers=[0.0, 1.0, -1.0, 0.5])
with_number('add_scalar', 'add', torch.add)
with_number('pow', 'pow', torch.pow, 'positive', numbers=[-2.0, -0.5, 0.0, 0.5, 1.0, 1.7, 2.0, 3.0])


def optional(name, in_torch, judge=None, bounds=None, why='', **options):
    """A row of x with options, each of which is left out, or drawn from (low, high)."""
    @row('kn_' + name, judge or name, bounds, why)
    def _(d):
        o = {n: d.rng.uniform(*of) for n, of in options.items() if d.int(0, 1)}
        return [d.input(d.shape())], lambda k, x: getattr(k, name)(x, **o), lambda x: in_torch(x, **o)


optional('leaky_relu', lambda x, slope=0.01: F.leaky_relu(x, slope), slope=(0.1, 0.9))
optional('elu', F.elu, alpha=(0.2, 2))
optional('celu', F.celu, alpha=(0.2, 2), bounds=(1e-5, 1e-7), why='the gradient divides by an alpha that is of f32 in torch')
for word in ('hardshrink', 'softshrink'):
    optional(word, lambda x, f=getattr(F, word), **o: f(x, *o.values()), **{'lambda': (0.1, 2)})
optional('softplus', F.softplus, beta=(0.5, 3), threshold=(1, 5))
optional('hardtanh', lambda x, low=-1.0, high=1.0: F.hardtanh(x, low, high), low=(-2, -0.1), high=(0.1, 2))
optional('gelu_tanh', lambda x: F.gelu(x, approximate='tanh'), 'gelu(approximate=tanh)')


@row('kn_clamp', 'clamp', why='the bounds themselves are not drawn: there the gradient is 1 in Knap, 0 in torch 2.15')
def _(d):
    low, high = sorted(d.choice([-1.0, 0.0, 2.0, 0.7, -1.6]) for _ in range(2))
    return [d.input(d.shape())], lambda k, x: k.clamp(x, low, high), \
        lambda x: x.clamp(low, high)


for word in ('and', 'or', 'xor', 'not'):
    @row('kn_logical_' + word, 'logical_' + word)
    def _(d, word=word):
        shape = d.shape()
        return [d.bools(shape) for _ in range(1 if word == 'not' else 2)], \
            lambda k, *t: getattr(k, 'logical_' + word)(*t), getattr(torch, 'logical_' + word)


@row('kn_where', 'where')
def _(d):
    a, b = d.broadcast(2)
    mask = d.bools(torch.broadcast_shapes(a.values.shape, b.values.shape))
    return [mask, a, b], lambda k, *t: k.where(*t), torch.where


@row('kn_masked_fill', 'masked_fill')
def _(d):
    shape, value = d.shape(), d.rng.uniform(-3, 3)
    mask = d.bools([1 if d.int(0, 3) == 0 else s for s in shape])
    return [d.input(shape), mask], lambda k, x, m: k.masked_fill(x, m, value), lambda x, m: x.masked_fill(m, value)


@row('kn_cast', 'to', bounds=(1e-2, 1e-2), why='the gradient has the precision of the other dtype')
def _(d):
    to = d.choice([torch.bfloat16, torch.float16] + [torch.float32] * (d.dtype == torch.float64))
    return [d.input(d.shape())], lambda k, x: k.cast(x, k.dtype(to)), lambda x: x.to(to)


for word in ('to_device', 'contiguous'):
    @row('kn_' + word, 'to' if word == 'to_device' else word)
    def _(d, word=word):
        more = ['KN_CPU'] if word == 'to_device' else []
        return [d.input(d.shape())], lambda k, x: getattr(k, word)(x, *(k.enums[m] for m in more)), lambda x: x * 1


@row('kn_channels_last', 'contiguous(channels_last)')
def _(d):
    return [d.input(d.shape(4, 4))], lambda k, x: k.channels_last(x), \
        lambda x: x.contiguous(memory_format=torch.channels_last)


# ---- reductions -----------------------------------------------------------------------------------

def product(x, dims, keepdim):
    for i in sorted((i % x.dim() for i in dims), reverse=True):
        x = torch.prod(x, i, keepdim)
    return x


def over_dims(name, in_torch, kinds=('normal',), smallest=1, grad=True):
    @row('kn_' + name, name)
    def _(d):
        shape = d.shape(smallest=smallest)
        dims, judge, keep = *d.dims(len(shape)), d.choice([True, False])
        return [d.input(shape, d.choice(kinds), grad=grad)], lambda k, x: getattr(k, name)(x, len(dims), dims, keep), \
            lambda x: in_torch(x, judge, keep) if x.dim() else in_torch(x[None], [0], False)


over_dims('sum', torch.sum)
over_dims('mean', torch.mean)
over_dims('logsumexp', torch.logsumexp)
over_dims('prod', product, ('normal', 'whole'))
over_dims('any', torch.any, ('whole',), grad=False)
over_dims('all', torch.all, ('whole',), grad=False)


@row('kn_norm', 'linalg.vector_norm')
def _(d):
    shape, p = d.shape(), d.choice([0.0, 0.5, 1.0, 2.0, 3.0, float('inf'), float('-inf')])
    dims, judge, keep = *d.dims(len(shape)), d.choice([True, False])
    return [d.input(shape)], lambda k, x: k.norm(x, p, len(dims), dims, keep), \
        lambda x: torch.linalg.vector_norm(x, p, judge, keep) if x.dim() else torch.linalg.vector_norm(x[None], p)


for word in ('var', 'std'):
    @row('kn_' + word, word)
    def _(d, word=word):
        shape = d.shape(least=1, smallest=3)
        dims, judge = d.dims(len(shape))
        correction, keep = d.choice([0, 1, 2]), d.choice([True, False])
        return [d.input(shape, ties=False)], \
            lambda k, x: getattr(k, word)(x, len(dims), dims, correction=correction or ZERO, keep=keep), \
            lambda x: getattr(torch, word)(x, judge, correction=correction, keepdim=keep)


for word in ('amax', 'amin'):
    @row('kn_' + word, word)
    def _(d, word=word):
        shape, keep = d.shape(least=1), d.choice([True, False])
        dims, judge = d.dims(len(shape))
        return [d.input(shape, d.choice(['normal', 'whole']))], \
            lambda k, x: getattr(k, word)(x, len(dims), dims, keep), lambda x: getattr(torch, word)(x, judge, keep)


for word in ('argmax', 'argmin'):
    @row('kn_' + word, word)
    def _(d, word=word):
        shape = d.shape(least=1)
        dim = d.dim(len(shape))
        return [d.input(shape, d.choice(['normal', 'whole']), grad=False)], \
            lambda k, x: getattr(k, word)(x, dim), lambda x: getattr(torch, word)(x, dim)


# ---- indexing and order ---------------------------------------------------------------------------

@row('kn_gather', 'gather')
def _(d):
    shape = d.shape(least=1)
    dim = d.dim(len(shape))
    index = [d.int(1, n) for n in shape]
    index[dim] = d.size(1, 7)
    return [d.input(shape), d.index(index, shape[dim])], lambda k, x, i: k.gather(x, dim, i), \
        lambda x, i: x.gather(dim, i.long())


@row('kn_take_along_dim', 'take_along_dim')
def _(d):
    shape = d.shape(least=1)
    dim = d.dim(len(shape))
    index = [d.choice([1, n]) for n in shape]
    index[dim] = d.size(1, 7)
    return [d.input(shape), d.index(index, shape[dim])], lambda k, x, i: k.take_along_dim(x, i, dim), \
        lambda x, i: x.take_along_dim(i.long(), dim)


for word in ('scatter', 'scatter_add'):
    @row('kn_' + word, word)
    def _(d, word=word):
        shape = d.shape(least=1)
        dim = d.dim(len(shape))
        size = [d.int(1, n) for n in shape]
        if word == 'scatter':    # positions differ: torch leaves the order of equal ones open
            full = [shape[i] if i == dim % len(shape) else n for i, n in enumerate(size)]
            index = d.given(torch.rand(full).argsort(dim).narrow(dim, 0, size[dim]), ties=False)
        else:
            index = d.index(size, shape[dim])
        return [d.input(shape), index, d.input([n + d.int(0, 2) for n in size])], \
            lambda k, x, i, s: getattr(k, word)(x, dim, i, s), \
            lambda x, i, s: getattr(x, word)(dim, i.long(), s[tuple(slice(n) for n in size)])    # torch's gradient needs it


@row('kn_index_add', 'index_add')
def _(d):
    shape, n = d.shape(least=1), d.size(1, 7)
    dim = d.dim(len(shape))
    src = list(shape)
    src[dim] = n
    return [d.input(shape), d.index([n], shape[dim]), d.input(src)], lambda k, x, i, s: k.index_add(x, dim, i, s), \
        lambda x, i, s: x.index_add(dim, i, s)


@row('kn_index_select', 'index_select')
def _(d):
    shape = d.shape(least=1)
    dim = d.dim(len(shape))
    return [d.input(shape), d.index([d.size(1, 7)], shape[dim])], lambda k, x, i: k.index_select(x, dim, i), \
        lambda x, i: x.index_select(dim, i)


@row('kn_nonzero', 'nonzero')
def _(d):
    return [d.input(d.shape(), 'whole', grad=False)], lambda k, x: k.nonzero(x), torch.nonzero


@row('kn_masked_select', 'masked_select')
def _(d):
    shape = d.shape()
    mask = d.bools([1 if d.int(0, 3) == 0 else s for s in shape])
    return [d.input([1 if d.int(0, 5) == 0 else s for s in shape]), mask], lambda k, *t: k.masked_select(*t), \
        torch.masked_select


@row('kn_one_hot', 'one_hot')
def _(d):
    n = d.int(1, 6)
    return [d.index(d.shape(), n)], lambda k, i: k.one_hot(i, n), lambda i: F.one_hot(i.long(), n)


@row('kn_embedding', 'embedding')
def _(d):
    v, padding = d.size(1, 9), d.int(-9, 8)
    padding = padding if -v <= padding < v else None
    own = {} if padding is None else {'padding_idx': padding or ZERO}
    return [d.input([v, d.size(1, 9)]), d.index(d.shape(), v)], lambda k, w, i: k.embedding(w, i, **own), \
        lambda w, i: F.embedding(i, w, padding)


@row('kn_sort', 'sort(stable)')
def _(d):
    shape, down = d.shape(least=1), d.choice([True, False])
    dim = d.dim(len(shape))

    def in_knap(k, x):
        slot = k.slots(1)
        y = k.sort(x, dim, descending=down, indices=slot)
        return [y, *k.filled(slot)]
    return [d.input(shape, d.choice(['normal', 'whole']))], in_knap, \
        lambda x: list(torch.sort(x, dim=dim, descending=down, stable=True))


@row('kn_argsort', 'argsort(stable)')
def _(d):
    shape, down = d.shape(least=1), d.choice([True, False])
    dim = d.dim(len(shape))
    return [d.input(shape, d.choice(['normal', 'whole']), grad=False)], lambda k, x: k.argsort(x, dim, down), \
        lambda x: torch.argsort(x, dim=dim, descending=down, stable=True)


@row('kn_topk', 'topk')
def _(d):
    shape, smallest = d.shape(least=1), d.choice([True, False])
    dim = d.dim(len(shape))
    n = d.int(0, shape[dim])

    def in_knap(k, x):
        slot = k.slots(1)
        y = k.topk(x, n, dim, smallest=smallest, indices=slot)
        return [y, *k.filled(slot)]
    return [d.input(shape, ties=False)], in_knap, lambda x: list(torch.topk(x, n, dim, largest=not smallest))


@row('kn_cumsum', 'cumsum')
def _(d):
    shape = d.shape(least=1)
    dim = d.dim(len(shape))
    return [d.input(shape)], lambda k, x: k.cumsum(x, dim), lambda x: x.cumsum(dim)


# ---- shape ----------------------------------------------------------------------------------------

def reshaped(d, shape):
    """Another shape of as many elements: dims move together, 1s come and go, one size may be -1."""
    total = torch.Size(shape).numel()
    new = d.choice([[total], [1, total], list(reversed(shape)), shape + [1], shape[:-2] + [shape[-1] * shape[-2]]
                    if len(shape) > 1 else shape])
    if new and d.int(0, 2) == 0:
        new = [-1] + new[1:]
    return new


for word in ('reshape', 'view'):
    @row('kn_' + word, word)
    def _(d, word=word):
        shape = d.shape(least=1)
        new = reshaped(d, shape)
        return [d.input(shape, layout=word == 'reshape')], lambda k, x: getattr(k, word)(x, len(new), new), \
            lambda x: getattr(x, word)(new)


def with_dims(name, draw, in_torch=None, least=1):
    """A row of x and arguments that draw(d, shape) gives; a list of them is (its length, it) in Knap."""
    @row('kn_' + name, name)
    def _(d):
        shape = d.shape(least=least)
        arguments = draw(d, shape)
        flat = [v for a in arguments for v in ((len(a), a) if isinstance(a, list) else (a,))]
        f = in_torch or torch_function(name)
        return [d.input(shape)], lambda k, x: getattr(k, name)(x, *flat), lambda x: f(x, *arguments)


def some_dims(d, shape):
    return [d.rng.sample(range(len(shape)), d.int(1, len(shape)))]


def slices(d, shape):
    dim = d.dim(len(shape))
    begin = d.int(0, shape[dim])
    return dim, begin, d.int(begin, shape[dim])


def windows(d, shape):
    dim = d.dim(len(shape))
    return dim, d.int(1, shape[dim]), d.int(1, 3)


def repeats(d, shape):
    return [[d.int(1, 3) for _ in range(len(shape) + d.int(0, 2))]]


with_dims('transpose', lambda d, s: (d.dim(len(s)), d.dim(len(s))))
with_dims('permute', lambda d, s: [d.rng.sample(range(len(s)), len(s))])
with_dims('slice', slices, lambda x, dim, b, e: x.narrow(dim, b, e - b))
with_dims('slice_step', lambda d, s: (*slices(d, s), d.int(1, 4)), lambda x, dim, b, e, step: x.index_select(
    dim, torch.arange(b, e, step)))
with_dims('select', lambda d, s: ((dim := d.dim(len(s))), d.int(-s[dim], s[dim] - 1)))
with_dims('unsqueeze', lambda d, s: [d.int(-len(s) - 1, len(s))])
with_dims('flatten', lambda d, s: sorted((d.int(0, len(s) - 1), d.int(0, len(s) - 1))), least=1)
with_dims('movedim', lambda d, s: (d.dim(len(s)), d.dim(len(s))))
with_dims('diagonal', lambda d, s: [d.int(-5, 5), *d.rng.sample(range(len(s)), 2)], least=2)
with_dims('unfold', windows, torch.Tensor.unfold)
with_dims('flip', some_dims)
with_dims('repeat', repeats, lambda x, times: x.repeat(times))
with_dims('tile', lambda d, s: [[d.int(1, 3) for _ in range(d.int(1, 5))]], lambda x, times: x.tile(times))
with_dims('tril', lambda d, s: [d.int(-4, 4)], least=2)
with_dims('triu', lambda d, s: [d.int(-4, 4)], least=2)
with_dims('squeeze', lambda d, s: some_dims(d, s), lambda x, dims: x.squeeze(dims))


@row('kn_expand', 'expand')
def _(d):
    shape = d.shape()
    new = [d.int(1, 3) for _ in range(d.int(0, 2))] + [d.int(1, 4) if n == 1 else d.choice([n, -1]) for n in shape]
    return [d.input(shape)], lambda k, x: k.expand(x, len(new), new), lambda x: x.expand(new)


@row('kn_unflatten', 'unflatten')
def _(d):
    shape, sizes = d.shape(least=1, most=3), [d.int(1, 3), d.int(1, 3), d.int(1, 2)]
    dim = d.dim(len(shape))
    shape[dim] = sizes[0] * sizes[1] * sizes[2]
    sizes[d.int(0, 2)] = -1
    return [d.input(shape)], lambda k, x: k.unflatten(x, dim, 3, sizes), lambda x: x.unflatten(dim, sizes)


@row('kn_chunk', 'chunk')
def _(d):
    shape, n = d.shape(least=1), d.int(1, 4)
    dim = d.dim(len(shape))
    shape[dim] *= n

    def in_knap(k, x):
        slots = k.slots(n)
        k.chunk(x, dim, n, slots)
        return k.filled(slots)
    return [d.input(shape)], in_knap, lambda x: x.chunk(n, dim)


@row('kn_split', 'split')
def _(d):
    shape, sizes = d.shape(least=1), [d.int(0, 3) for _ in range(d.int(1, 4))]
    dim = d.dim(len(shape))
    shape[dim] = sum(sizes)

    def in_knap(k, x):
        slots = k.slots(len(sizes))
        k.split(x, dim, len(sizes), sizes, slots)
        return k.filled(slots)
    return [d.input(shape)], in_knap, lambda x: x.split(sizes, dim)


@row('kn_cat', 'cat')
def _(d):
    shape = d.shape(least=1)
    dim = d.dim(len(shape))
    shapes = [[d.int(0, 4) if i == dim % len(shape) else n for i, n in enumerate(shape)] for _ in range(d.int(1, 5))]
    return [d.input(s) for s in shapes], lambda k, *t: k.cat(t, len(t), dim), lambda *t: torch.cat(t, dim)


@row('kn_stack', 'stack')
def _(d):
    shape = d.shape()
    dim = d.int(-len(shape) - 1, len(shape))
    return [d.input(shape) for _ in range(d.int(1, 5))], lambda k, *t: k.stack(t, len(t), dim), \
        lambda *t: torch.stack(t, dim)


@row('kn_roll', 'roll')
def _(d):
    shape = d.shape(least=1)
    dims = d.rng.sample(range(len(shape)), d.int(1, len(shape))) if d.int(0, 3) else []
    shifts = [d.int(-7, 7) for _ in dims or [0]]
    return [d.input(shape)], lambda k, x: k.roll(x, len(shifts), shifts, dims), \
        lambda x: x.roll(shifts, dims) if dims else x.roll(shifts[0])


@row('kn_repeat_interleave', 'repeat_interleave')
def _(d):
    shape = d.shape(least=1)
    dim = d.dim(len(shape))
    times = [d.int(0, 3) for _ in range(d.choice([1, shape[dim]]))]
    return [d.input(shape)], lambda k, x: k.repeat_interleave(x, dim, len(times), times), \
        lambda x: x.repeat_interleave(torch.tensor(times) if len(times) > 1 else times[0], dim)
