"""bench/peers/operations_sequences.py: the operations of autograd/sequences.h beside torch's."""
import torch
import torch.nn.functional as F

from operations import row
from operations_nn import REDUCTIONS, code


@row('kn_recurrent', 'LSTM, GRU, RNN of one layer and direction')
def _(d):
    cell, t, n, inside, hidden = d.int(0, 3), d.int(1, 5), d.int(1, 8), d.int(1, 9), d.int(1, 20)
    rows, bias, reverse = hidden * [4, 3, 1, 1][cell], d.choice([True, False]), d.choice([True, False])
    inputs = [d.input([t, n, inside])] + [d.input(s) for s in ([rows, inside], [rows, hidden])]
    inputs += [d.input([n, hidden]) for _ in range(2 if cell == 0 else 1)] + [d.input([rows]) for _ in range(2 * bias)]

    def in_torch(x, w_ih, w_hh, *rest):
        states, biases = [s[None] for s in rest[:2 if cell == 0 else 1]], list(rest[2 if cell == 0 else 1:])
        f = getattr(torch, ['lstm', 'gru', 'rnn_tanh', 'rnn_relu'][cell])
        y, *_ = f(x.flip(0) if reverse else x, states if cell == 0 else states[0], [w_ih, w_hh, *biases], bias, 1, 0.0, True,
                  False, False)
        return y.flip(0) if reverse else y

    def in_knap(k, x, w_ih, w_hh, h0, *rest):
        own = {'c0': rest[0]} if cell == 0 else {}
        biases = rest[1:] if cell == 0 else rest
        return k.recurrent(x, w_ih, w_hh, cell=cell, reverse=reverse, h0=h0, **own, **dict(zip(('b_ih', 'b_hh'), biases)))
    return inputs, in_knap, in_torch


@row('kn_ctc_loss', 'ctc_loss of log_softmax', why='the gradient is that by log_softmax\'s input')
def _(d):
    t, n, c, most = d.int(3, 20), d.int(1, 5), d.int(2, 9), d.int(1, 7)
    blank, zero, reduction = d.int(0, c - 1), True, d.choice(REDUCTIONS)
    frames, labels = torch.randint(1, t + 1, [n]), torch.randint(0, most + 1, [n])
    targets = torch.randint(0, c - 1, [n, most])
    targets = targets + (targets >= blank)
    if d.choice([True, False]):
        targets = torch.cat([row[:k] for row, k in zip(targets, labels)])
    if d.choice([True, False, False]):    # with infinite losses none is compared but as infinite
        zero, frames = False, labels * 2 + 1
        t = int(frames.max())
    return [d.input([t, n, c]), *(d.given(v, ties=False) for v in (targets, frames, labels))], \
        lambda k, x, g, f, l: k.ctc_loss(k.log_softmax(x, -1), g, f, l, blank=blank, zero_infinity=zero,
                                         reduction=code(k, reduction)), \
        lambda x, g, f, l: F.ctc_loss(x.log_softmax(-1), g, f, l, blank, reduction, zero)
