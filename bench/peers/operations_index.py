"""bench/peers/operations_index.py: rows of operations.py: values joined, put and found by an index."""
import ctypes

import torch

from knap import Tensor
from operations import row

REDUCTIONS = ['sum', 'mean', 'prod', 'amax', 'amin']
SELF = 'equal elements of x and src are not drawn with include_self=False: torch counts such an x among the ties'


def reduction(d):
    """A reduction, Knap's number for it, whether x counts, and the values to draw."""
    by, include = d.int(0, 4), d.int(0, 1) == 1
    return REDUCTIONS[by], by, include, 'whole' if include and d.int(0, 1) else 'normal'


@row('kn_scatter_reduce', 'scatter_reduce', why=SELF)
def _(d):
    shape = d.shape(least=1)
    dim, size, (name, by, include, kind) = d.dim(len(shape)), [d.int(1, n) for n in shape], reduction(d)
    return [d.input(shape, kind), d.index(size, shape[dim]), d.input([n + d.int(0, 2) for n in size], kind)], \
        lambda k, x, i, s: k.scatter_reduce(x, dim, i, s, by, exclude_self=not include), \
        lambda x, i, s: x.scatter_reduce(dim, i.long(), s[tuple(slice(n) for n in size)], name, include_self=include)


def rows_by_index(d, kind):
    """x, an index along dim, src, dim."""
    shape, n = d.shape(least=1), d.int(1, 7)
    dim = d.dim(len(shape))
    src = list(shape)
    src[dim] = n
    return [d.input(shape, kind), d.index([n], shape[dim]), d.input(src, kind)], dim


@row('kn_index_reduce', 'index_reduce', why=SELF)
def _(d):
    name, by, include, kind = reduction(d)
    inputs, dim = rows_by_index(d, kind)

    def in_torch(x, i, s):
        at = i.long().view([-1 if n == dim % x.dim() else 1 for n in range(x.dim())]).expand(s.shape)
        return x.scatter_reduce(dim, at, s, name, include_self=include)
    return inputs, lambda k, x, i, s: k.index_reduce(x, dim, i, s, by, exclude_self=not include), in_torch


def segments(x, index, n, name):
    at = index.long().view([-1] + [1] * (x.dim() - 1)).expand(x.shape)
    none = x.new_full([n, *x.shape[1:]], 1.0 if name == 'prod' else 0.0)
    return none.scatter_reduce(0, at, x, name, include_self=name in ('sum', 'prod'))


@row('kn_segment_reduce', 'scatter_reduce')
def _(d):
    name, by, _, _ = reduction(d)
    x, n = d.input(d.shape(least=1)), d.int(1, 6)
    return [x, d.index([x.values.shape[0]], n)], lambda k, x, i: k.segment_reduce(x, i, n, by), \
        lambda x, i: segments(x, i, n, name)


@row('kn_segment_softmax', 'softmax, group by group')
def _(d):
    x, n = d.input(d.shape(least=1)), d.int(1, 6)

    def in_torch(x, i):
        parts = [(i == g).nonzero().flatten() for g in range(n)]
        return torch.cat([x[p].softmax(0) for p in parts])[torch.cat(parts).argsort()]
    return [x, d.index([x.values.shape[0]], n)], lambda k, x, i: k.segment_softmax(x, i, n), in_torch


def along(name, kinds, in_torch, count=1):
    """Running operations: x and a dim."""
    @row('kn_' + name, name)
    def _(d):
        x = d.input(d.shape(least=1), d.choice(kinds))
        dim = d.dim(x.values.dim())
        return [x], lambda k, x: k_along(k, name, x, dim, count), lambda x: in_torch(x, dim)


def k_along(k, name, x, dim, count):
    if count == 1:
        return getattr(k, name)(x, dim)
    at = ctypes.c_void_p()
    values = getattr(k, name)(x, dim, ctypes.byref(at))
    return values, Tensor(at.value)


along('cumprod', ['normal', 'whole', 'sides'], torch.cumprod)
along('logcumsumexp', ['normal', 'whole'], torch.logcumsumexp)
along('cummax', ['normal', 'whole'], torch.cummax, 2)
along('cummin', ['normal', 'whole'], torch.cummin, 2)


@row('kn_diff', 'diff')
def _(d):
    x, n = d.input(d.shape(least=1)), d.int(0, 3)
    dim = d.dim(x.values.dim())
    return [x], lambda k, x: k.diff(x, n, dim), lambda x: x.diff(n, dim)


# ---- put, found, counted ----------------------------------------------------------------------------


@row('kn_index', 'x[i, :, j]')
def _(d):
    shape = d.shape(least=1)
    size = [[3, 1], [1, 2], [3, 2], [2]][d.int(0, 3)]
    index = [torch.randint(-s, s, size) if d.int(0, 1) else None for s in shape]
    if not any(i is not None for i in index):
        index[-1] = torch.randint(-shape[-1], shape[-1], size)

    def of(t):
        t = iter(t)
        return [i if i is None else next(t) for i in index]
    return [d.input(shape), *(d.given(i, ties=False) for i in index if i is not None)], \
        lambda k, x, *i: k.index(x, len(shape), of(i)), lambda x, *i: x[tuple(slice(None) if t is None else t for t in of(i))]


@row('kn_index_put', 'index_put')
def _(d):
    shape, add = d.shape(least=1), d.int(0, 1) == 1
    n, size = d.int(1, len(shape)), [d.int(1, 3), d.int(1, 4)]
    if add:
        index = [torch.randint(-s, s, [size[0], 1] if d.int(0, 1) else size) for s in shape[:n]]
    else:    # places differ: torch leaves the order of equal ones open
        numel = torch.Size(shape[:n]).numel()
        flat = torch.randperm(numel)[:size[0]]
        index = [i - s * d.int(0, 1) for i, s in zip(torch.unravel_index(flat, shape[:n]), shape)]
    at = torch.broadcast_shapes(*(i.shape for i in index))
    values = d.input([*at, *shape[n:]] if d.int(0, 1) else shape[n:])
    return [d.input(shape), values, *(d.given(i, ties=False) for i in index)], \
        lambda k, x, v, *i: k.index_put(x, n, list(i), v, add), lambda x, v, *i: x.index_put(i, v, accumulate=add)


@row('kn_index_copy', 'index_copy')
def _(d):
    shape = d.shape(least=1)
    dim = d.dim(len(shape))
    index = torch.randperm(shape[dim])[:d.int(1, shape[dim])]
    src = list(shape)
    src[dim] = len(index)
    return [d.input(shape), d.given(index, ties=False), d.input(src)], lambda k, x, i, s: k.index_copy(x, dim, i, s), \
        lambda x, i, s: x.index_copy(dim, i, s)


@row('kn_masked_scatter', 'masked_scatter')
def _(d):
    shape = d.shape(least=1)
    mask = d.bools([1 if d.int(0, 3) == 0 else s for s in shape])
    return [d.input(shape), mask, d.input([torch.Size(shape).numel() + d.int(0, 2)])], \
        lambda k, x, m, s: k.masked_scatter(x, m, s), torch.masked_scatter


@row('kn_searchsorted', 'searchsorted')
def _(d):
    shape, right, lines = d.shape(least=1), d.int(0, 1) == 1, d.int(0, 1)
    ordered = torch.randn([*(shape[:-1] if lines else []), d.int(1, 9)]).mul(1.5).round().sort(-1)[0].double()
    return [d.given(ordered, ties=False), d.input(shape, 'whole', grad=False)], lambda k, s, x: k.searchsorted(s, x, right), \
        lambda s, x: torch.searchsorted(s.contiguous(), x.contiguous(), right=right)


@row('kn_bucketize', 'bucketize')
def _(d):
    right, ordered = d.int(0, 1) == 1, torch.randn([d.int(1, 9)]).mul(1.5).round().sort()[0].double()
    return [d.input(d.shape(), 'whole', grad=False), d.given(ordered)], lambda k, x, b: k.bucketize(x, b, right), \
        lambda x, b: torch.bucketize(x, b, right=right)


@row('kn_isin', 'isin')
def _(d):
    return [d.input(d.shape(), 'whole', grad=False), d.input(d.shape(most=2), 'whole', grad=False)], \
        lambda k, x, e: k.isin(x, e), lambda x, e: torch.isin(x.contiguous(), e.contiguous())    # torch fails on some strides


@row('kn_bincount', 'bincount')
def _(d):
    n, least = d.int(1, 20), d.int(0, 9)
    weights = [d.input([n], grad=False)] * d.int(0, 1)
    return [d.index([n], 7), *weights], lambda k, x, w=None: k.bincount(x, w, least), \
        lambda x, w=None: torch.bincount(x, w, least)


@row('kn_unique', 'unique')
def _(d):
    def in_knap(k, x):
        inverse, counts = ctypes.c_void_p(), ctypes.c_void_p()
        values = k.unique(x, ctypes.byref(inverse), ctypes.byref(counts))
        return values, Tensor(inverse.value), Tensor(counts.value)
    return [d.input(d.shape(), 'whole', grad=False)], in_knap, \
        lambda x: x.unique(return_inverse=True, return_counts=True)


@row('kn_histc', 'histc')
def _(d):
    bins, (low, high) = d.int(1, 9), d.choice([(0.0, 0.0), (-1.0, 2.0), (0.5, 0.5)])
    return [d.input(d.shape(least=1), grad=False)], lambda k, x: k.histc(x, bins, low, high), \
        lambda x: x.histc(bins, low, high)
