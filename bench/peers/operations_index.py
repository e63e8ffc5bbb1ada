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
