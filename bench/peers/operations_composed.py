"""bench/peers/operations_composed.py: more operations of autograd/operations.h and autograd/distances.h beside torch's."""
import torch
import torch.nn.functional as F

from knap import ZERO
from operations import row, simple

simple('trunc frac exp2 sinh cosh asinh erfc selu softsign tanhshrink')
simple('acosh', 'above')
simple('lgamma log10', 'positive')
simple('digamma', 'positive', bounds=(1e-5, 1e-8), why='torch ends the series of the gradient early')
simple('atan2 logaddexp', count=2)
simple('floor_divide', 'positive', count=2, grad=False)


@row('kn_relu_squared', 'relu, square')
def _(d):
    return [d.input(d.shape())], lambda k, x: k.relu_squared(x), lambda x: F.relu(x).square()


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


def bag_options(d, v):
    """Knap's options of an embedding bag, torch's, and the offsets for n positions, or none."""
    mode, padding = d.choice(['sum', 'mean', 'max']), d.int(-9, 8)
    padding = padding if -v <= padding < v else None
    last = d.choice([True, False])
    own = {'mode': ['sum', 'mean', 'max'].index(mode) + 1, 'include_last_offset': last}
    return {**own, **({} if padding is None else {'padding_idx': padding or ZERO})}, \
        {'mode': mode, 'padding_idx': padding, 'include_last_offset': last}


def offsets(d, n, last):
    begin = sorted(d.int(0, n) for _ in range(d.int(0, 4)))
    return torch.tensor([0, *begin, *([n] if last else [])])


@row('kn_embedding_bag', 'embedding_bag')
def _(d):
    v, bags = d.int(1, 9), d.choice([True, False])
    own, theirs = bag_options(d, v)
    w, weighted = d.input([v, d.int(1, 9)]), theirs['mode'] == 'sum' and d.choice([True, False])
    if not bags:
        own['include_last_offset'] = theirs['include_last_offset'] = False
    shape = [d.int(1, 12)] if bags else [d.int(1, 4), d.int(1, 5)]
    at = offsets(d, shape[0], theirs['include_last_offset']) if bags else None
    more = [d.input(shape)] if weighted else []

    def in_knap(k, w, i, *by):
        given = {'offsets': k.tensor(at)} if bags else {}
        return k.embedding_bag(w, i, **own, **given, **({'per_sample_weights': by[0]} if by else {}))

    def in_torch(w, i, *by):
        by = by[0].contiguous() if by else None
        return F.embedding_bag(i.long(), w.contiguous(), at, per_sample_weights=by, **theirs)
    return [w, d.index(shape, v), *more], in_knap, in_torch


# ---- products -------------------------------------------------------------------------------------

@row('kn_matmul', 'matmul')
def _(d):
    m, n, k = (d.size(1, 20) for _ in range(3))
    a, b = d.broadcast(2)
    shapes = list(a.values.shape)[-2:] + [m, k], list(b.values.shape)[-2:] + [k, n]
    try:
        torch.broadcast_shapes(shapes[0][:-2], shapes[1][:-2])
    except RuntimeError:
        shapes = [m, k], [k, n]
    return [d.input(s) for s in shapes], lambda k, a, b: k.matmul(a, b), torch.matmul


EQUATIONS = ['ij,jk->ik', 'bhtd,bhsd->bhts', 'ii->i', 'ii', 'i,j->ij', '...ij,...jk->...ik', 'ijk->ki', 'ij,ij->',
             'a,ab,b', 'ba,cb', 'bij,bjk,kl->bil', 'iij,j->i', 'ij,kj->', 'a...,a->...']


@row('kn_einsum', 'einsum')
def _(d):
    equation = d.choice(EQUATIONS)
    size = {letter: d.size(1, 5) for letter in 'abcdhijklst'}
    lead = [d.int(1, 3)]
    shapes = [[n for c in operand.replace('...', '.') for n in (lead if c == '.' else [size[c]])]
              for operand in equation.split('->')[0].split(',')]
    return [d.input(s) for s in shapes], lambda k, *t: k.einsum(equation, len(t), t), \
        lambda *t: torch.einsum(equation, *t)


@row('kn_linear', 'linear')
def _(d):
    n, k, in_out = d.size(1, 20), d.size(1, 20), d.choice([True, False])
    inputs = [d.input(d.shape(least=1, most=3) + [k]), d.input([k, n] if in_out else [n, k])]
    inputs += [d.input([n])] if d.int(0, 1) else []
    return inputs, lambda k, x, w, b=None: k.linear(x, w, b, in_out), \
        lambda x, w, b=None: F.linear(x, w.t() if in_out else w, b)
