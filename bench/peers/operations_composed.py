"""bench/peers/operations_composed.py: more operations of autograd/operations.h and autograd/distances.h beside torch's."""
import torch
import torch.nn.functional as F

from operations import row, simple

simple('trunc frac exp2 sinh cosh asinh erfc selu softsign tanhshrink')
simple('acosh', 'above')
simple('lgamma log10', 'positive')
simple('digamma', 'positive', bounds=(1e-5, 1e-8), why='torch ends the series of the gradient early')
simple('atan2 logaddexp', count=2)
simple('floor_divide', 'positive', count=2, grad=False)


for word in ('remainder', 'fmod'):
    @row('kn_' + word, word)
    def _(d, word=word):
        a, b = d.broadcast(2)
        return [a, d.input(b.values.shape, 'positive')], lambda k, *t: getattr(k, word)(*t), getattr(torch, word)


@row('kn_prelu', 'prelu')
def _(d):
    shape = d.shape(least=1)
    return [d.input(shape), d.input([d.choice([1, shape[1] if len(shape) > 1 else 1])])], lambda k, *t: k.prelu(*t), F.prelu


@row('kn_nan_to_num', 'nan_to_num')
def _(d):
    o = {n: d.rng.uniform(-3, 3) for n in ('nan', 'posinf', 'neginf') if d.int(0, 1)}
    return [d.input(d.shape())], lambda k, x: k.nan_to_num(k.log(x), **o), lambda x: torch.log(x).nan_to_num(**o)


@row('kn_diag_embed', 'diag_embed')
def _(d):
    shape, offset = d.shape(least=1), d.int(-3, 3)
    dims = d.rng.sample(range(len(shape) + 1), 2)
    return [d.input(shape)], lambda k, x: k.diag_embed(x, offset, *dims), lambda x: torch.diag_embed(x, offset, *dims)


@row('kn_meshgrid', 'meshgrid')
def _(d):
    n, xy = d.int(2, 4), d.choice([True, False])

    def in_knap(k, *x):
        slot = k.slots(n)
        k.meshgrid([t.handle for t in x], n, xy, slot)
        return k.filled(slot)
    return [d.input([d.int(1, 5)]) for _ in range(n)], in_knap, \
        lambda *x: list(torch.meshgrid(*x, indexing='xy' if xy else 'ij'))


@row('kn_cdist', 'cdist')
def _(d):
    shape, p, rows = d.shape(least=1, most=3), d.choice([1.0, 2.0, 2.0, 3.0]), d.choice([d.int(1, 5), 27])
    return [d.input(shape[:-1] + [d.int(1, 5), shape[-1]], ties=False), d.input(shape[:-1] + [rows, shape[-1]], ties=False)], \
        lambda k, *t: k.cdist(*t, p=p), lambda *t: torch.cdist(*t, p=p)
