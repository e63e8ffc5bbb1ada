"""bench/peers/operations_linalg.py: the operations of autograd/linalg.h beside torch.linalg's."""
import torch

from operations import row


def matrices(d, rows=None, columns=None):
    """Far from singular ones, whose values on the diagonal lie apart."""
    rows = rows or d.int(1, 5)
    columns = columns or rows
    x = d.input(d.shape(most=2, largest=3) + [rows, columns], 'unit', ties=False)
    x.values = (x.values + torch.eye(rows, columns).double() * (6 + 4 * torch.arange(columns))).float().double()
    return x


def twice(k, x):
    return k.add(x, k.transpose(x, -1, -2))


def with_slots(name, count):
    def in_knap(k, x):
        slots = [k.slots(1) for _ in range(count)]
        return [getattr(k, name)(x, *slots)] + [k.filled(s)[0] for s in slots]
    return in_knap


@row('kn_inv', 'linalg.inv')
def _(d):
    return [matrices(d)], lambda k, x: k.inv(x), torch.linalg.inv


@row('kn_det', 'linalg.det')
def _(d):
    return [matrices(d)], lambda k, x: k.det(x), torch.linalg.det


@row('kn_slogdet', 'linalg.slogdet')
def _(d):
    return [matrices(d)], with_slots('slogdet', 1), lambda x: [torch.linalg.slogdet(x)[1], torch.linalg.slogdet(x)[0].detach()]


@row('kn_solve', 'linalg.solve')
def _(d):
    a = matrices(d)
    return [a, d.input(list(a.values.shape[:-1]) + [d.int(1, 4)])], lambda k, a, b: k.solve(a, b), torch.linalg.solve


@row('kn_cholesky', 'linalg.cholesky')
def _(d):
    return [matrices(d)], lambda k, x: k.cholesky(twice(k, x)), lambda x: torch.linalg.cholesky(x + x.mT)


@row('kn_eigh', 'linalg.eigh', why='vectors squared: their signs are free')
def _(d):
    def in_knap(k, x):
        w, v = with_slots('eigh', 1)(k, twice(k, x))
        return [w, k.square(v)]

    def in_torch(x):
        w, v = torch.linalg.eigh(x + x.mT)
        return [w, v ** 2]
    return [matrices(d)], in_knap, in_torch


@row('kn_qr', 'linalg.qr', why='squared: the signs are free')
def _(d):
    columns = d.int(1, 4)

    def in_torch(x):
        return [t ** 2 for t in torch.linalg.qr(x)]
    return [matrices(d, columns + d.int(0, 2), columns)], \
        lambda k, x: [k.square(t) for t in with_slots('qr', 1)(k, x)], in_torch


@row('kn_svd', 'linalg.svd', why='vectors squared: their signs are free')
def _(d):
    def in_knap(k, x):
        s, u, vt = with_slots('svd', 2)(k, x)
        return [s, k.square(u), k.square(vt)]

    def in_torch(x):
        u, s, vt = torch.linalg.svd(x, full_matrices=False)
        return [s, u ** 2, vt ** 2]
    return [matrices(d, d.int(1, 5), d.int(1, 5))], in_knap, in_torch
