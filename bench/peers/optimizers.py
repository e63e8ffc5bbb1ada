"""bench/peers/optimizers.py: ten steps of Knap's optimizers beside torch.optim's; clipping, loss scaling and schedules.

A case draws parameters and, for each step, their gradients; the results are the parameters after the last step."""
import ctypes
import inspect
import math

import torch
from torch.optim import lr_scheduler

from knap import ZERO
from operations import Row, ROWS

STEPS = 10


def optimizer(name, judge, why='', bounds=None, drawn=lambda d: d.shape(1, 3, largest=9)):
    """A row of make(d): Knap's step maker(k, module), torch's maker(parameters). A maker gives step(losses): in Knap after
    the backward of a sum of products, in torch with gradients in place; it may give numbers, which are results too."""
    def add(make):
        def case(d):
            shapes = [drawn(d) for _ in range(d.int(1, 3))]
            begin = [d.input(s, grad=False) for s in shapes]
            grads = [d.input(s, grad=False) for _ in range(STEPS) for s in shapes]
            in_knap_by, in_torch_by = make(d)

            def in_torch(*t):
                params = [x.detach().clone().requires_grad_() for x in t[:len(shapes)]]
                step, numbers = in_torch_by(params), []
                for i in range(STEPS):
                    numbers.append(step(t[len(shapes) * (i + 1):len(shapes) * (i + 2)]))
                return [p.detach() for p in params] + [n.detach() for n in numbers if n is not None]

            def in_knap(k, *t):
                m, dtype = k.module(), k.dtype(d.dtype)
                k.module_list_init(m, None, '')
                params = [k.parameter(m, f'p{i}', dtype, k.enums['KN_CPU'], k.struct('kn_initializer'), len(s), s)
                          for i, s in enumerate(shapes)]
                k.materialize(m, k.enums['KN_CPU'], 1)
                mode = k.set_grad_mode(False)
                for p, x in zip(params, t):
                    k.copy_(p, x)
                k.set_grad_mode(mode)
                step, numbers = in_knap_by(k, m), []
                for i in range(STEPS):
                    numbers.append(step(lambda i=i: loss(k, params, t[len(shapes) * (i + 1):])))
                return [k.detach(p) for p in params] + [n for n in numbers if n is not None]
            return [*begin, *grads], in_knap, in_torch
        ROWS.append(Row('kn_' + name, judge, case, bounds, why))
        return make
    return add


def loss(k, params, grads):
    """sum p g: a loss with these gradients."""
    parts = [k.sum(k.mul(p, g), 0, None, False) for p, g in zip(params, grads)]
    total = parts[0]
    for part in parts[1:]:
        total = k.add(total, part)
    return total


def knap_steps(maker, **options):
    """in_knap_by of an optimizer without more."""
    def by(k, m):
        o = k.optimizer(maker, m, **options)

        def step(made):
            k.backward(made())
            k.step(o)
        return step
    return by


def torch_steps(maker, **options):
    def by(params):
        o = maker(params, **options)

        def step(grads):
            for p, g in zip(params, grads):
                p.grad = g.clone()
            o.step()
        return step
    return by


def maybe(d, value):
    """The value, or 0 for the default."""
    return d.choice([0, value])


def zero(value):
    """The value as Knap's option: KN_ZERO for a real 0."""
    return ZERO if value == 0 else value


@optimizer('sgd', 'optim.SGD')
def _(d):
    lr, decay, momentum = d.rng.uniform(1e-3, 0.3), maybe(d, 0.1), maybe(d, 0.9)
    nesterov = momentum != 0 and d.choice([True, False])
    dampening = maybe(d, 0.3) if momentum and not nesterov else 0
    o = {'lr': lr, 'momentum': momentum, 'weight_decay': decay, 'nesterov': nesterov, 'dampening': dampening}
    return knap_steps('sgd', **o), torch_steps(torch.optim.SGD, **o)


@optimizer('adamw', 'optim.AdamW, optim.Adam')
def _(d):
    lr, decay, l2 = d.rng.uniform(1e-3, 0.1), d.choice([0, 0.01, 0.3]), d.int(0, 2) == 0
    beta1, beta2, eps = d.choice([0.9, 0.5, 0.0]), d.choice([0.999, 0.8]), d.choice([1e-8, 1e-3])
    both = {'amsgrad': d.int(0, 2) == 0, 'maximize': d.int(0, 2) == 0}
    return knap_steps('adamw', lr=lr, beta1=zero(beta1), beta2=beta2, eps=eps, weight_decay=zero(decay), l2=l2, **both), torch_steps(
        torch.optim.Adam if l2 else torch.optim.AdamW, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay, **both)


@optimizer('adagrad', 'optim.Adagrad')
def _(d):
    lr, decay, fade, eps = d.rng.uniform(1e-3, 0.1), maybe(d, 0.3), d.choice([0, 0.1]), d.choice([1e-10, 1e-3])
    return knap_steps('adagrad', lr=lr, weight_decay=decay, lr_decay=fade, eps=eps), \
        torch_steps(torch.optim.Adagrad, lr=lr, weight_decay=decay, lr_decay=fade, eps=eps)


class Lion:
    """Algorithm 2 of Chen et al., arXiv:2302.06675."""

    def __init__(self, params, lr, beta1, beta2, weight_decay):
        self.params, self.lr, self.b1, self.b2, self.decay = params, lr, beta1, beta2, weight_decay
        self.m = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self):
        for p, m in zip(self.params, self.m):
            update = torch.sign(self.b1 * m + (1 - self.b1) * p.grad)
            p -= self.lr * (update + self.decay * p)
            m.copy_(self.b2 * m + (1 - self.b2) * p.grad)


@optimizer('lion', "the paper's formula (torch has none)")
def _(d):
    lr, decay, beta1, beta2 = d.rng.uniform(1e-3, 0.1), maybe(d, 0.3), d.choice([0.9, 0.5]), d.choice([0.99, 0.8])
    return knap_steps('lion', lr=lr, beta1=beta1, beta2=beta2, weight_decay=decay), \
        torch_steps(Lion, lr=lr, beta1=beta1, beta2=beta2, weight_decay=decay)


def orthogonal():
    """torch's Newton-Schulz steps in the dtype of their matrix; its own are in bf16."""
    space = {'torch': torch, 'Tensor': torch.Tensor}
    exec(inspect.getsource(torch.optim._muon._zeropower_via_newtonschulz).replace('torch.bfloat16', 'grad.dtype'), space)
    return space['_zeropower_via_newtonschulz']


if hasattr(torch.optim, 'Muon'):
    torch.optim._muon._zeropower_via_newtonschulz = orthogonal()


@optimizer('muon', 'optim.Muon; optim.AdamW of vectors', why='products in f32 and f64, where torch takes bf16',
           drawn=lambda d: [d.int(2, 12), d.int(2, 12)] if d.int(0, 2) else [d.int(1, 9)])
def _(d):
    lr, decay, momentum, steps = d.rng.uniform(1e-3, 0.1), d.choice([0.0, 0.1, 0.3]), d.choice([0.95, 0.5]), d.int(1, 5)
    nesterov, scale = d.choice([True, False]), d.choice(['original', 'match_rms_adamw', 'spectral_unclamped'])
    kinds = {'original': 'ORIGINAL', 'match_rms_adamw': 'MATCH_ADAMW', 'spectral_unclamped': 'SPECTRAL'}

    def in_knap_by(k, m):
        return knap_steps('muon', lr=lr, momentum=momentum, no_nesterov=not nesterov, ns_steps=steps,
                          scale=k.enums['KN_MUON_' + kinds[scale]], weight_decay=zero(decay),
                          ns_dtype=k.dtype(d.dtype))(k, m)

    def in_torch_by(params):
        matrices, others = [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]
        made = []
        if matrices:
            made.append(torch.optim.Muon(matrices, lr=lr, weight_decay=decay, momentum=momentum, nesterov=nesterov,
                                         ns_steps=steps, adjust_lr_fn=scale))
        if others:
            made.append(torch.optim.AdamW(others, lr=lr, weight_decay=decay))

        def step(grads):
            for p, g in zip(params, grads):
                p.grad = g.clone()
            for o in made:
                o.step()
        return step
    return in_knap_by, in_torch_by


def clipping(name, draw_p, **more):
    @optimizer(name, 'nn.utils.clip_grad_norm_', **more)
    def _(d):
        most, p = d.choice([0.1, 1.0, 5.0, 100.0]), draw_p(d)

        def in_knap_by(k, m):
            o = k.optimizer('sgd', m, lr=0.1)

            def step(made):
                k.backward(made())
                norm = getattr(k, name)(m, most, *([p] if name.endswith('_p') else []))
                k.step(o)
                return norm if d.dtype == torch.float32 else None    # it is an f32
            return step

        def in_torch_by(params):
            o = torch.optim.SGD(params, lr=0.1)

            def step(grads):
                for x, g in zip(params, grads):
                    x.grad = g.clone()
                norm = torch.nn.utils.clip_grad_norm_(params, most, p)
                o.step()
                return norm.float() if d.dtype == torch.float32 else None
            return step
        return in_knap_by, in_torch_by


clipping('clip_grad_norm', lambda d: 2.0)
clipping('clip_grad_norm_p', lambda d: d.choice([1.0, 2.0, 3.0, math.inf]), bounds=(1e-5, 1e-6),
         why='the largest magnitude is an f32')


@optimizer('clip_grad_value', 'nn.utils.clip_grad_value_')
def _(d):
    most = d.choice([1e-3, 0.01, 0.1, 1.0])

    def in_knap_by(k, m):
        o = k.optimizer('sgd', m, lr=0.1)

        def step(made):
            k.backward(made())
            k.clip_grad_value(m, most)
            k.step(o)
        return step

    def in_torch_by(params):
        o = torch.optim.SGD(params, lr=0.1)

        def step(grads):
            for x, g in zip(params, grads):
                x.grad = g.clone()
            torch.nn.utils.clip_grad_value_(params, most)
            o.step()
        return step
    return in_knap_by, in_torch_by


@optimizer('scaler_new', 'amp.GradScaler')
def _(d):
    bad = {d.int(0, STEPS - 1) for _ in range(2)}    # steps whose loss overflows
    first, growth, backoff, interval = 2.0 ** d.int(0, 12), d.choice([2.0, 4.0]), d.choice([0.5, 0.25]), d.int(1, 3)

    def in_knap_by(k, m):
        o, at = k.optimizer('adamw', m, lr=0.05), [0]
        s = k.scaler(m, init_scale=first, growth=growth, backoff=backoff, interval=interval)

        def step(made):
            scaled = k.scale_loss(s, made())
            k.backward(k.scale(scaled, math.inf) if at[0] in bad else scaled)
            k.scaler_step(s, o)
            at[0] += 1
            return k.tensor(torch.tensor(k.scaler_get(s).scale, dtype=torch.float32))
        return step

    def in_torch_by(params):
        o, scale, good, at = torch.optim.AdamW(params, lr=0.05), [first], [0], [0]

        def step(grads):
            for x, g in zip(params, grads):
                x.grad = g.clone()
            if at[0] in bad:    # the rule of torch.amp.GradScaler, which takes no f64
                scale[0], good[0] = scale[0] * backoff, 0
            else:
                o.step()
                good[0] += 1
                if good[0] == interval:
                    scale[0], good[0] = scale[0] * growth, 0
            at[0] += 1
            return torch.tensor(scale[0], dtype=torch.float32)
        return step
    return in_knap_by, in_torch_by


# ---- schedules ------------------------------------------------------------------------------------

def warmed(o, warmup, behind):
    """torch's schedule behind a linear warm-up to lr in warmup steps, from lr / (warmup + 1)."""
    if warmup == 0:
        return behind(o)
    rise = lr_scheduler.LinearLR(o, 1 / (warmup + 1), 1.0, warmup)
    return lr_scheduler.SequentialLR(o, [rise, behind(o)], [warmup])


def schedule(d):
    """A schedule of Knap as fields, and torch's of an optimizer with rate lr."""
    kind = d.choice(['CONSTANT', 'LINEAR', 'COSINE', 'POLYNOMIAL', 'STEP_DECAY', 'WSD', 'ONE_CYCLE'])
    lr, low, warmup, falls = d.rng.uniform(1e-3, 1), d.choice([0.0, 1e-4]), d.int(0, 5), d.int(4, 30)
    fields = {'kind': kind, 'lr': lr, 'min_lr': low, 'warmup': warmup, 'steps': warmup + falls}
    if kind == 'CONSTANT':
        return fields, lambda o: warmed(o, warmup, lambda o: lr_scheduler.ConstantLR(o, 1.0, 1))
    if kind == 'LINEAR':
        return fields, lambda o: warmed(o, warmup, lambda o: lr_scheduler.LinearLR(o, 1.0, low / lr, falls))
    if kind == 'COSINE':
        return fields, lambda o: warmed(o, warmup, lambda o: lr_scheduler.CosineAnnealingLR(o, falls, low))
    if kind == 'POLYNOMIAL':
        fields.update(power=d.choice([0.5, 1.0, 2.0]), min_lr=0.0)
        return fields, lambda o: warmed(o, warmup, lambda o: lr_scheduler.PolynomialLR(o, falls, fields['power']))
    if kind == 'STEP_DECAY':
        fields.update(every=d.int(1, 9), factor=d.choice([0.5, 0.9]), min_lr=0.0)
        return fields, lambda o: warmed(o, warmup, lambda o: lr_scheduler.StepLR(o, fields['every'], fields['factor']))
    if kind == 'WSD':
        fields.update(decay=d.int(1, falls))
        flat = falls - fields['decay']

        def share(step):    # of lr: torch's general schedule with the paper's formula
            left = min(1.0, max(0, flat + fields['decay'] - step) / fields['decay'])
            return (low + left * (lr - low)) / lr
        return fields, lambda o: warmed(o, warmup, lambda o: lr_scheduler.LambdaLR(o, share))
    fields.update(warmup=max(2, warmup))
    fields.update(steps=fields['warmup'] + falls)
    return fields, lambda o: lr_scheduler.OneCycleLR(
        o, lr, total_steps=fields['steps'], pct_start=fields['warmup'] / fields['steps'], div_factor=25,
        final_div_factor=lr / 25 / low if low else 1e300, cycle_momentum=False)


def rates(d):
    fields, maker = schedule(d)
    steps = fields['steps']

    def in_torch(x):
        o = torch.optim.SGD([torch.zeros(1, requires_grad=True)], fields['lr'])
        s, found = maker(o), []
        for i in range(steps):
            found.append(o.param_groups[0]['lr'])
            o.step()
            if i + 1 < steps:
                s.step()
        return torch.tensor(found, dtype=x.dtype)

    def in_knap(k, x):
        own = dict(fields, kind=k.enums['KN_' + fields['kind']])
        s = k.struct('kn_schedule', **own)
        return k.tensor(torch.tensor([k.schedule_at(ctypes.byref(s), i) for i in range(steps)], dtype=d.dtype))
    return [d.input([1], grad=False)], in_knap, in_torch


ROWS.append(Row('kn_schedule_at', 'torch.optim.lr_scheduler: ConstantLR, LinearLR, CosineAnnealingLR, PolynomialLR, StepLR, '
                'OneCycleLR, LambdaLR', rates))
