"""bench/peers/layers.py: the layers of nn/layers.h beside torch.nn: the result, and the gradients of inputs and parameters.

A case makes a module of torch and one of Knap; the parameters of both are the values that the case draws for the names
and shapes of torch's."""
import torch
import torch.nn.functional as F
from torch import nn

from knap import ZERO, Tensor
from operations import Row, ROWS
from operations_composed import bag_options


class Parameter:
    """A parameter as an input of a case: in Knap the layer's own tensor, which the row fills."""
    grad, layout, ties = True, False, False

    def __init__(self, values):
        self.values = self.base = values

    def lay_out(self, rng):
        pass

    def in_torch(self, dtype):
        leaf = self.base.to(dtype, copy=True).requires_grad_()
        return leaf, leaf

    def in_knap(self, k, dtype):
        t = Tensor(None)
        t.initial = self.base.to(dtype)
        return t, t


def layer(name, judge, why='', bounds=None):
    """A row of make(d), which gives torch's module, Knap's init(k, m, options) with the options of a dtype, the inputs
    beside parameters, and maybe how Knap calls the module with them."""
    def add(make):
        def case(d):
            module, init, inputs, *call = make(d)
            module = module.to(torch.float64)
            training = d.choice([True, False])
            module.train(training)
            names = [n for n, _ in module.named_parameters()]
            buffers = {n: b for n, b in module.named_buffers() if b.is_floating_point()}
            drawn = [Parameter(d.input(list(p.shape), layout=False).values * 0.5) for _, p in module.named_parameters()]
            state = {n: d.input(list(b.shape), 'positive', layout=False).values for n, b in buffers.items()}

            def in_torch(*t):
                x, dtype = t[len(names):], (t[0] if names else t[len(names)]).dtype
                moved = {n: b.to(dtype, copy=True) for n, b in state.items()}
                whole = dict(module.named_buffers(), **moved)
                own = dict(zip(names, t))
                y = torch.func.functional_call(module, (own, whole), x)
                return [*listed(y), *(whole[n] for n in moved)]

            def in_knap(k, *t):
                m, x = k.module(), t[len(names):]
                init(k, m, {'dtype': k.dtype(d.dtype)})
                k.train(m, training)
                if names or state:
                    k.materialize(m, k.enums['KN_CPU'], 1)
                mode = k.set_grad_mode(False)
                for n, p in zip(names, t):
                    p.handle = k.module_param(m, n).handle
                    k.copy_(p, k.tensor(p.initial))
                for n, b in state.items():
                    k.copy_(k.module_buffer(m, n), k.tensor(b.to(d.dtype)))
                k.set_grad_mode(mode)
                y = call[0](k, m, *x) if call else k.call(m, x[0])
                return [*listed(y), *(k.module_buffer(m, n) for n in state)]
            return [*drawn, *inputs], in_knap, in_torch
        ROWS.append(Row('kn_' + name, judge, case, bounds, why))
        return make
    return add


def listed(y):
    return y if isinstance(y, (list, tuple)) else [y]


def all_of(k, m, *x):
    """All results of kn_call_n; None stands for NULL."""
    given = k.struct('kn_values', n=len(x))
    for i, t in enumerate(x):
        given.v[i] = t.handle if t else None
    out = k.call_n(m, given, None, 0)
    return [Tensor(out.v[i]) for i in range(out.n)]


def several(k, m, *x):
    return all_of(k, m, *x)[0]


def simple(name, *arguments):
    """Knap's init with these arguments and options."""
    def init_of(**options):
        return lambda k, m, o: getattr(k, name)(m, None, '', *arguments, **options, **o)
    return init_of


class InOut(nn.Module):
    """A linear layer with weight [in, out]."""

    def __init__(self, inside, out, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(inside, out))
        self.bias = nn.Parameter(torch.zeros(out)) if bias else None

    def forward(self, x):
        return x @ self.weight if self.bias is None else x @ self.weight + self.bias


def linear(inside, out, bias, in_out):
    return InOut(inside, out, bias) if in_out else nn.Linear(inside, out, bias)


@layer('linear_init', 'nn.Linear')
def _(d):
    inside, out, bias, in_out = d.int(1, 9), d.int(1, 9), d.choice([True, False]), d.choice([True, False])
    return linear(inside, out, bias, in_out), simple('linear_init', inside, out)(no_bias=not bias, in_out=in_out), \
        [d.input(d.shape(1, 3) + [inside])]


@layer('embedding_init', 'nn.Embedding')
def _(d):
    v, c = d.int(1, 9), d.int(1, 9)
    return nn.Embedding(v, c), simple('embedding_init', v, c)(), [d.index(d.shape(), v)]


@layer('embedding_bag_init', 'nn.EmbeddingBag')
def _(d):
    v, c = d.int(1, 9), d.int(1, 9)
    own, theirs = bag_options(d, v)
    own['include_last_offset'] = theirs['include_last_offset'] = False
    return nn.EmbeddingBag(v, c, **theirs), simple('embedding_bag_init', v, c)(**own), [d.index([d.int(1, 4), d.int(1, 5)], v)]


@layer('layer_norm_init', 'nn.LayerNorm')
def _(d):
    c, bias, eps = d.int(3, 40), d.choice([True, False]), d.choice([0, 1e-3])
    return nn.LayerNorm(c, eps or 1e-5, bias=bias), simple('layer_norm_init', c)(no_bias=not bias, eps=eps), \
        [d.input(d.shape(0, 3) + [c], ties=False)]


@layer('rms_norm_init', 'nn.RMSNorm')
def _(d):
    c, eps = d.int(3, 40), d.choice([0, 1e-3])
    return nn.RMSNorm(c, eps or 1e-5), simple('rms_norm_init', c)(eps=eps), [d.input(d.shape(0, 3) + [c], ties=False)]


def convolution(name, judge, ndim, transposed):
    @layer(name, judge)
    def _(d):
        groups, stride, dilation = d.int(1, 3), d.int(1, 3), d.int(1, 2)
        own = {'stride': stride, 'pad': d.int(0, 2), 'dilation': dilation, 'groups': groups}
        more = {'output_padding': d.int(0, max(stride, dilation) - 1)} if transposed else {}
        if transposed:
            own['output_pad'] = more['output_padding']
        inside, out, bias = groups * d.int(1, 4), groups * d.int(1, 4), d.choice([True, False])
        kernel = [d.int(1, 3) for _ in range(ndim)] if ndim > 1 and d.int(0, 1) else d.int(1, 3)
        if isinstance(kernel, list):
            own['kernels'] = kernel
        module = getattr(nn, judge[3:])(inside, out, kernel, stride, own['pad'], dilation=dilation, groups=groups, bias=bias,
                                        **more)
        return module, simple(name, inside, out, 0 if isinstance(kernel, list) else kernel)(no_bias=not bias, **own), \
            [d.input([d.int(1, 3), inside] + [d.int(5, 9) for _ in range(ndim)])]


convolution('conv2d_init', 'nn.Conv2d', 2, False)
convolution('conv1d_init', 'nn.Conv1d', 1, False)
convolution('conv3d_init', 'nn.Conv3d', 3, False)
convolution('conv_transpose2d_init', 'nn.ConvTranspose2d', 2, True)
convolution('conv_transpose1d_init', 'nn.ConvTranspose1d', 1, True)


def dense_gradient(module):
    """module, whose result gets a row-major gradient: of others torch 2.15 computes wrong ones (operations_nn.dense)."""
    module.register_forward_hook(lambda _, inputs, y: y.register_hook(torch.Tensor.contiguous) and None)
    return module


@layer('batch_norm_init', 'nn.BatchNorm1d, 2d, 3d')
def _(d):
    c, ndim, affine, running = d.int(1, 5), d.int(1, 3), d.choice([True, False]), d.choice([True, True, False])
    momentum, eps, cumulative = d.choice([0, 0.3]), d.choice([0, 1e-3]), running and d.choice([True, False, False])
    momentum = 0 if cumulative else momentum
    module = getattr(nn, f'BatchNorm{ndim}d')(c, eps or 1e-5, None if cumulative else momentum or 0.1, affine, running)
    return dense_gradient(module), simple('batch_norm_init', c)(momentum=momentum, eps=eps, no_affine=not affine, no_running=not running,
                                                cumulative=cumulative), \
        [d.input([d.int(4, 6), c] + [d.int(3, 5) for _ in range(ndim)], ties=False)]


@layer('group_norm_init', 'nn.GroupNorm')
def _(d):
    groups, affine, eps = d.int(1, 4), d.choice([True, False]), d.choice([0, 1e-3])
    c = groups * d.int(1, 4)
    return nn.GroupNorm(groups, c, eps or 1e-5, affine), \
        simple('group_norm_init', groups, c)(no_affine=not affine, eps=eps), [d.input([d.int(1, 3), c, 3, 4], ties=False)]


@layer('instance_norm_init', 'nn.InstanceNorm1d, 2d, 3d')
def _(d):
    c, ndim, affine, eps = d.int(1, 5), d.int(1, 3), d.choice([True, False]), d.choice([0, 1e-3])
    tracks, momentum = d.choice([True, False]), d.choice([0, 0.3])
    return dense_gradient(getattr(nn, f'InstanceNorm{ndim}d')(c, eps or 1e-5, momentum or 0.1, affine, tracks)), \
        simple('instance_norm_init', c)(affine=affine, eps=eps, track_running_stats=tracks, momentum=momentum if tracks else 0), \
        [d.input([d.int(1, 3), c] + [d.int(3, 5) for _ in range(ndim)], ties=False)]


def recurrent(name, judge):
    @layer(name, judge, bounds=(5e-5, 1e-11), why='states given or not, packed sequences; errors go on from step to step')
    def _(d):
        inside, hidden, layers = d.int(1, 9), d.choice([d.int(1, 9), d.int(10, 40)]), d.int(1, 3)
        ways, bias, first, relu = d.int(1, 2), d.choice([True, False]), d.choice([True, False]), d.choice([True, False])
        more = {'nonlinearity': 'relu' if relu else 'tanh'} if judge == 'nn.RNN' else {}
        module = getattr(nn, judge[3:])(inside, hidden, layers, bias=bias, batch_first=first, bidirectional=ways == 2, **more)
        t, n, states = d.int(1, 6), d.int(1, 9), 2 if judge == 'nn.LSTM' else 1
        inputs = [d.input([n, t, inside] if first else [t, n, inside])]
        given, packed = d.choice([True, False]), d.choice([True, False])
        if given:
            inputs += [d.input([layers * ways, n, hidden]) for _ in range(states)]
        if packed:
            inputs.append(d.given(torch.randint(1, t + 1, [n]), ties=False))
        forward = module.forward

        def in_torch(x, *rest):
            lengths, rest = (rest[-1], rest[:-1]) if packed else (None, rest)
            hx = (tuple(rest) if states == 2 else rest[0]) if given else None
            if packed:
                x = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=False)
            y, last = forward(x, hx)
            if packed:
                y, _ = nn.utils.rnn.pad_packed_sequence(y, batch_first=first, total_length=t)
            return [y, *listed(last)] if given or packed else y
        module.forward = in_torch

        def call(k, m, x, *rest):
            if not given and not packed:
                return k.call(m, x)
            return all_of(k, m, x, *([] if given else [None] * states), *rest)
        own = {'relu': relu} if more else {}
        return module, simple(name, inside, hidden)(layers=layers, no_bias=not bias, batch_first=first,
                                                    bidirectional=ways == 2, **own), inputs, call


recurrent('lstm_init', 'nn.LSTM')
recurrent('gru_init', 'nn.GRU')
recurrent('rnn_init', 'nn.RNN')


class Evaluated(nn.Module):
    """Dropout as it is in evaluation; Knap's draws are its own."""

    def forward(self, x):
        return x * 1


@layer('dropout_init', 'nn.Dropout', why='p = 0, or in evaluation')
def _(d):
    p = d.choice([0.0, 0.4])

    def call(k, m, x):
        k.train(m, p == 0)
        return k.call(m, x)
    return Evaluated(), lambda k, m, o: k.dropout_init(m, None, '', p), [d.input(d.shape())], call


@layer('activation_init', 'nn.ReLU, nn.Tanh and the like')
def _(d):
    name, judge = d.choice([('kn_relu', nn.ReLU()), ('kn_tanh', nn.Tanh()), ('kn_silu', nn.SiLU()), ('kn_gelu', nn.GELU())])
    return judge, lambda k, m, o: k.activation_init(m, None, '', k.address(name)), [d.input(d.shape())]


@layer('sequential_init', 'nn.Sequential')
def _(d):
    a, b, c = d.int(1, 9), d.int(1, 9), d.int(1, 9)

    def init(k, m, o):
        first, act, last = k.part(), k.part(), k.part()
        k.sequential_init(m, None, '')
        k.linear_init(first, None, '', a, b, **o)
        k.activation_init(act, None, '', k.address('kn_tanh'))
        k.linear_init(last, None, '', b, c, **o)
        for part in (first, act, last):
            k.sequential_append(m, part)
    return nn.Sequential(nn.Linear(a, b), nn.Tanh(), nn.Linear(b, c)), init, [d.input(d.shape(1, 3) + [a])]


def turned(x, base):
    """Rotary embedding of x[B,H,T,D]."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * base ** (-torch.arange(half, dtype=x.dtype) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class Heads(nn.Module):
    """Attention by heads: what both modules of attention do between their projections."""

    def prepare(self, dim, heads, kv_heads, o):
        self.dim, self.heads, self.kv_heads, self.o = dim, heads, kv_heads or heads, o
        if o['qk_norm']:
            self.q_norm, self.k_norm = nn.RMSNorm(dim // heads, 1e-5), nn.RMSNorm(dim // heads, 1e-5)

    def attend(self, q, k, v, mask=None):
        B, d = q.shape[0], self.dim // self.heads
        q, k, v = (x.reshape(B, -1, h, d) for x, h in ((q, self.heads), (k, self.kv_heads), (v, self.kv_heads)))
        if self.o['qk_norm']:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if self.o['rope']:
            q, k = turned(q, self.o['rope_base'] or 10000.0), turned(k, self.o['rope_base'] or 10000.0)
        if self.o['causal']:
            below = torch.ones(q.shape[2], k.shape[2]).tril(k.shape[2] - q.shape[2]) == 1
            seen = torch.zeros(below.shape, dtype=q.dtype).masked_fill(~below, float('-inf'))
            mask = seen if mask is None else seen + mask
        y = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return y.transpose(1, 2).reshape(B, -1, self.dim)


class SelfAttention(Heads):
    def __init__(self, dim, heads, kv_heads, bias, in_out, o):
        super().__init__()
        self.c_attn = linear(dim, dim + 2 * (kv_heads or heads) * dim // heads, bias, in_out)
        self.c_proj = linear(dim, dim, bias, in_out)
        self.prepare(dim, heads, kv_heads, o)

    def forward(self, x):
        kv = self.kv_heads * self.dim // self.heads
        return self.c_proj(self.attend(*self.c_attn(x).split([self.dim, kv, kv], -1)))


class CrossAttention(Heads):
    def __init__(self, dim, kv_dim, heads, kv_heads, bias, o):
        super().__init__()
        kv = (kv_heads or heads) * dim // heads
        self.q_proj, self.k_proj = nn.Linear(dim, dim, bias), nn.Linear(kv_dim, kv, bias)
        self.v_proj, self.o_proj = nn.Linear(kv_dim, kv, bias), nn.Linear(dim, dim, bias)
        self.prepare(dim, heads, kv_heads, o)

    def forward(self, x, context=None, mask=None):
        context = x if context is None else context
        return self.o_proj(self.attend(self.q_proj(x), self.k_proj(context), self.v_proj(context), mask))


def attention(d):
    """dim, heads, kv_heads and options that both modules of attention take."""
    kv_heads, times = d.int(1, 2), d.int(1, 2)
    heads = kv_heads * times
    rope = d.choice([True, False])
    o = {'rope': rope, 'rope_base': d.choice([0, 500.0]) if rope else 0, 'qk_norm': d.choice([True, False])}
    return heads * 2 * d.int(1 + o['qk_norm'], 3 + o['qk_norm']), heads, kv_heads if times > 1 else d.choice([0, kv_heads]), o


SMALL = {'bounds': (2e-4, 1e-10), 'why': 'norms of queries near 0; of one key their gradients cancel'}


@layer('self_attention_init', 'F.scaled_dot_product_attention between nn.Linear', **SMALL)
def _(d):
    dim, heads, kv_heads, o = attention(d)
    bias, in_out, causal = (d.choice([True, False]) for _ in range(3))
    return SelfAttention(dim, heads, kv_heads, bias, in_out, {'causal': causal, **o}), \
        simple('self_attention_init', dim, heads)(kv_heads=kv_heads, no_bias=not bias, in_out=in_out,
                                                  not_causal=not causal, **o), \
        [d.input([d.int(1, 3), d.int(1, 6), dim])]


@layer('multi_head_attention_init', 'nn.MultiheadAttention', **SMALL)
def _(d):
    dim, heads, kv_heads, o = attention(d)
    bias, own = d.choice([True, False]), d.choice([True, False])
    o['causal'] = d.choice([True, False])
    kv_dim = dim if own else d.int(1, 9)
    batch, t, s = d.int(1, 3), d.int(1, 5), d.int(5, 7)
    inputs = [d.input([batch, t, dim])] + ([] if own else [d.input([batch, s, kv_dim])])
    masked = d.choice([True, False])
    if masked:
        inputs.append(d.input([1, 1, t, t if own else s]))
    module = CrossAttention(dim, kv_dim, heads, kv_heads, bias, o)

    def call(k, m, x, *more):
        return several(k, m, x, *([None] * (own and masked)), *more)
    if own and masked:
        forward = module.forward
        module.forward = lambda x, mask: forward(x, None, mask)
    return module, simple('multi_head_attention_init', dim, heads)(
        kv_heads=kv_heads, kv_dim=0 if own else kv_dim, no_bias=not bias, **o), inputs, call


class Mlp(nn.Module):
    def __init__(self, dim, hidden, bias, in_out):
        super().__init__()
        self.c_fc, self.c_proj = linear(dim, hidden, bias, in_out), linear(hidden, dim, bias, in_out)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate='tanh'))


@layer('mlp_init', 'nn.Linear, nn.GELU, nn.Linear')
def _(d):
    dim, hidden, bias, in_out = d.int(1, 9), d.choice([0, d.int(1, 20)]), d.choice([True, False]), d.choice([True, False])
    return Mlp(dim, hidden or 4 * dim, bias, in_out), \
        simple('mlp_init', dim)(hidden=hidden, no_bias=not bias, in_out=in_out), [d.input(d.shape(0, 3) + [dim])]


class Swiglu(nn.Module):
    def __init__(self, dim, hidden, bias):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(dim, hidden, bias), nn.Linear(dim, hidden, bias)
        self.down_proj = nn.Linear(hidden, dim, bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@layer('swiglu_init', 'nn.Linear, F.silu')
def _(d):
    dim, hidden, bias = d.int(1, 9), d.int(1, 20), d.choice([True, False])
    return Swiglu(dim, hidden, bias), simple('swiglu_init', dim, hidden)(no_bias=not bias), [d.input(d.shape(0, 3) + [dim])]
