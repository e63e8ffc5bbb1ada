"""bench/peers/opinfo.py: PyTorch's own test samples (torch.testing's databases) through Knap: scripts/peers opinfo."""
import argparse
import collections
import itertools
import json
import os
import random
import re
import signal
import sys
import traceback
import warnings

import torch
from torch.overrides import TorchFunctionMode
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db
from torch.testing._internal.opinfo import core

import knap
from knap import Tensor
from ops import Input, Wrong, as_list
from opinfo_nn import OPTIMIZERS
import opinfo_shape    # noqa: F401  fills TABLE
from optimizers import STEPS, knap_steps, loss, torch_steps
from opinfo_table import CONVENTIONS, ELEMENTS, FIRST, NAN_STAYS, NO_SLOPE, OUTSIDE, SHAPE_ONLY, TABLE, WHOLE, WIDER, n, shape

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool)
LAYOUTS = ('transposed', 'expanded', 'sliced', 'channels_last')
OWN_BOUNDS = {'nn.functional.hardsigmoid': 1e-7,    # torch's sixth is of f32
              'nn.functional.linear_cross_entropy/chunked_none': 0.05}    # logits are of 16 bits
BOUNDS = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 4e-3}
VARIED = 12      # samples of an entry that run in all layouts
SECONDS = 20     # of a sample


def laid_out(values, layout, grad):
    """values as an Input whose memory in Knap is in this order; None where the order isn't another one."""
    i, dims = Input(values, grad, True, False), values.dim()
    base = values
    if layout == 'transposed' and dims > 1:
        order = [*range(dims - 2), dims - 1, dims - 2]
        i.steps, base = [('permute', order)], values.permute(order)
    elif layout == 'channels_last' and dims == 4:
        i.steps, base = [('permute', [0, 3, 1, 2])], values.permute(0, 2, 3, 1)
    elif layout == 'sliced' and dims and values.numel():
        i.steps = [('slice', dims - 1, 1, 1 + values.shape[-1])]
        base = torch.cat([values.narrow(-1, 0, 1), values, values.narrow(-1, 0, 1)], -1)
    elif layout == 'expanded' and dims and values.numel() and grad:
        i.steps, base = [('expand', list(values.shape))], values.narrow(0, 0, 1)
    i.base = base.contiguous()
    return i


def walk(tree, f):
    """tree with f of each tensor in it."""
    if isinstance(tree, torch.Tensor):
        return f(tree)
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        made = [walk(t, f) for t in tree]
        return type(tree)(*made) if hasattr(tree, '_fields') else type(tree)(made)
    return {n: walk(t, f) for n, t in tree.items()} if isinstance(tree, dict) else tree


def results_of(tree):
    found = []
    walk(tree if isinstance(tree, (list, tuple)) else [tree], found.append)
    return found or [torch.as_tensor(tree) if isinstance(tree, (bool, int, float)) else tree]


def error_of(mine, judge, elementwise, size):
    """As ops.difference; elementwise: relative to each element, or to 1 where it is less."""
    narrow = judge.detach().to(mine.dtype).double() if mine.dtype != torch.bool else judge.detach().double()
    judge, mine = judge.detach().double(), mine.detach().double()
    judge = torch.where(torch.isfinite(narrow), judge, narrow)
    odd = ~torch.isfinite(judge)
    if not torch.equal(torch.isfinite(mine), ~odd) or not torch.equal(mine[odd].nan_to_num(7), judge[odd].nan_to_num(7)):
        return float('inf')
    if not judge[~odd].numel():
        return 0.0
    gap, large = (mine - judge)[~odd].abs(), judge[~odd].abs()
    return (gap / large.clamp(min=1) if elementwise else gap / max(large.max().item(), 0.1 * size, 1e-30)).max().item()


def by_torch(call, tree, inputs, dtype, cotangents, grads):
    at = iter(inputs)
    drawn = []

    def give(t):
        i = next(at)
        leaf, t = i.in_torch(dtype or i.base.dtype)
        drawn.append(leaf)
        return t.contiguous()
    x, a, o = walk(tree, give)
    results = results_of(call(x, *a, **o))
    graded = [(r, w) for r, w in zip(results, cotangents(results)) if grads and r.requires_grad]
    if graded:
        torch.autograd.backward([r for r, _ in graded], [w.to(r.dtype) for r, w in graded])
    return results, [None if not i.grad else torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                     for i, leaf in zip(inputs, drawn)], [r.requires_grad for r in results]


def by_knap(k, call, tree, inputs, cotangents, needed, torch_results, name):
    first, wider = name in FIRST, name in WIDER
    at, drawn = iter(inputs), []

    def give(t):
        leaf, t = next(at).in_knap(k, None)
        drawn.append(leaf)
        return t
    x, a, o = walk(tree, give)
    results = call(k, x, *a, **o)
    results = list(results) if isinstance(results, (list, tuple)) else [results]
    values = [k.values(r) if isinstance(r, Tensor) else torch.as_tensor(r) for r in results]
    if first:
        results, values, torch_results = results[:1], values[:1], torch_results[:1]
    if len(values) != len(torch_results):
        raise Wrong(f'{len(values)} results, torch has {len(torch_results)}')
    for v, t in zip(values, torch_results):
        if (v.dtype != t.dtype and not wider) or v.shape != t.shape:
            raise Wrong(f'a result is {v.dtype}{list(v.shape)}, in torch {t.dtype}{list(t.shape)}')
    for r, v, w, need in zip(results, values, cotangents, needed):
        if need and not k.requires_grad(r) and name not in NO_SLOPE:
            raise Wrong('a result has no gradient, in torch it has')
        if need and k.requires_grad(r):
            k.backward(r, grad=k.tensor(w.to(v.dtype).expand(v.shape)).handle, retain_graph=True)
    grads = [k.grad(leaf) if i.grad else None for i, leaf in zip(inputs, drawn)]
    return values, [k.values(g) if g else torch.zeros(i.base.shape) if i.grad else None for i, g in zip(inputs, grads)]


def left_out(name, call, tree, inputs, what, mine):
    """Masks of the elements that aren't compared."""
    for i in inputs:
        x = i.base if what == 'the gradient' else i.in_torch(i.base.dtype)[1].detach()
        if x.shape != mine.shape or not x.is_floating_point():
            continue
        if name in NAN_STAYS:
            yield ~x.isfinite()
        elif what == 'the gradient':    # at NaN it is no number, in torch maybe 0
            yield x.isnan()
        if name in OUTSIDE and what == 'the gradient':
            yield ~call(x, *tree[1], **tree[2]).isfinite()
        if name in WHOLE:
            ends = torch.iinfo(mine.dtype)
            yield ~((x.double() > ends.min - 1.0) & (x.double() < ends.max + 1.0))


def in_knap(self, k, dtype):
    return Input_in_knap(self, k, self.base.dtype)


Input_in_knap, Input.in_knap = Input.in_knap, in_knap


def one_sample(k, name, call, own, tree, layout, elementwise):
    """None where the sample has no other form in this layout; else the numbers of compared gradients."""
    inputs = []

    def note(t):
        if t.is_complex() or t.dtype not in knap.DTYPES or t.layout != torch.strided:
            raise knap.Failed(f'this table: no {t.dtype}')
        inputs.append(laid_out(t.detach(), layout, t.requires_grad))
        return t
    walk(tree, note)
    if layout and not any(i.steps for i in inputs):
        return None
    draws, drawn = torch.Generator().manual_seed(1), []

    def cotangents(results):
        if not drawn:
            drawn.extend(torch.randn(r.shape, dtype=torch.float64, generator=draws).to(narrow_of(r)).double() for r in results)
        return drawn
    dtypes = [i.base.dtype for i in inputs if i.base.is_floating_point()]
    narrow_of = lambda r: r.dtype if r.is_floating_point() else torch.float32
    shape_only = name in SHAPE_ONLY or tree[2].get('dropout_p', 0) > 0
    plain, plain_grads, needed = by_torch(call, tree, inputs, None, cotangents, not shape_only)
    needed = [n and not shape_only for n in needed]
    values, grads = by_knap(k, own, tree, inputs, drawn, needed, plain, name)
    if shape_only:
        return 0
    judge, judge_grads = plain, plain_grads
    if any(d != torch.float64 for d in dtypes):
        try:
            judge, judge_grads, _ = by_torch(call, tree, inputs, torch.float64, cotangents, True)
        except RuntimeError:
            pass    # dtypes that don't go together; then torch in the dtype is the judge
    size = max([b.base.double().abs().nan_to_num(0, 0, 0).max().item() for b in inputs if b.base.numel()] + [0])
    count = 0
    for what, mine, own_torch, exact in ([('the result', *t) for t in zip(values, plain, judge)]
                                   + [('the gradient', *t) for t in zip(grads, plain_grads, judge_grads)]):
        if mine is None:
            continue
        count += what == 'the gradient' and any(needed)
        s = max([size] + [w.abs().max().item() for w in drawn if w.numel()]) if what == 'the gradient' else size
        mine = mine.to(own_torch.dtype)
        for odd in left_out(name, call, tree, inputs, what, mine) if elementwise or name in WHOLE else []:
            mine, own_torch, exact = (t.masked_fill(odd, 0) for t in (mine, own_torch, exact))
        bound = max(BOUNDS.get(mine.dtype, 0), OWN_BOUNDS.get(name, 0))
        found = error_of(mine, exact, elementwise, s)
        beside = error_of(mine, own_torch, elementwise, s) if found > bound else 0
        torchs = error_of(own_torch, exact, elementwise, s) if min(found, beside) > bound else 0
        if torchs == float('inf') and mine.dtype in (torch.bfloat16, torch.float16):
            continue    # torch overflows in 16 bits, too
        if min(found, beside) > bound and not found <= 4 * torchs:
            raise Wrong(f'{what} differs by {found:.2g} from torch in f64, by {beside:.2g} from torch in {mine.dtype}: '
                        f'{mine.flatten()[:5].tolist()}, torch {own_torch.flatten()[:5].tolist()}')
    return count


def samples(op, dtype, grad):
    torch.manual_seed(0)
    random.seed(0)
    made = op.sample_inputs('cpu', dtype, requires_grad=grad)
    if dtype == torch.float32 and isinstance(op, (core.UnaryUfuncInfo, core.BinaryUfuncInfo)):
        made = op.reference_inputs('cpu', dtype, requires_grad=grad)
    for s in made:
        if getattr(op, 'name', '') in ('sort', 'argsort'):
            names = dict(zip(('dim', 'descending'), s.args))
            s.args, s.kwargs = (), {**names, **s.kwargs, 'stable': True}
        yield s.input, s.args, s.kwargs


class Module:
    """A module of torch as an entry: its forward's calls of functions, played in Knap."""
    supports_autograd = True

    def __init__(self, info):
        self.info, self.made = info, {}

    def supports_dtype(self, dtype, device):
        return dtype in self.info.dtypes and dtype.is_floating_point

    def sample_inputs(self, device, dtype, requires_grad):
        for training in (True, False):
            for given in self.info.module_inputs_func(self.info, device, dtype, requires_grad, training):
                if given.forward_input is None:
                    continue
                c, f = given.constructor_input, given.forward_input
                m = self.info.module_cls(*c.args, **c.kwargs).train(training)
                m = m.to(dtype)
                if any(isinstance(p, torch.nn.UninitializedParameter) for p in m.parameters()):
                    m(*f.args, **f.kwargs)
                names = [name for name, _ in m.named_parameters()]
                state = {name: b for name, b in m.named_buffers() if b.is_floating_point()}
                tensors = [t.detach().to(dtype).requires_grad_() for t in m.parameters()] + [b.to(dtype) for b in state.values()]
                yield core.SampleInput(tensors, args=(m, [*names, *state], list(f.args), dict(f.kwargs)))

    def op(self, tensors, m, names, a, o):
        self.leaves, self.calls = [*tensors], []
        walk([a, o], self.leaves.append)
        with Calls(self.calls):
            y = torch.func.functional_call(m, dict(zip(names, tensors)), tuple(a), o)
        self.results = results_of(y)
        return [*self.results, *(t for t in tensors if not t.requires_grad)]

    def in_knap(self, k, tensors, m, names, a, o):
        own = [*tensors]
        knap_leaves([a, o], own)
        known = {id(t): x for t, x in zip(self.leaves, own)}
        for name, args, kwargs, result in self.calls:
            args, kwargs = (walk(t, lambda t: known[id(t)] if id(t) in known else k.tensor(t)) for t in (args, kwargs))
            if name not in TABLE:
                raise AttributeError(f'the headers have no {name}')
            y = TABLE[name](k, *args, **kwargs)
            known.update(zip(map(id, results_of(result)), y if isinstance(y, (list, tuple)) else [y]))
        return [known[id(t)] for t in self.results] + [x for t, x in zip(self.leaves, tensors) if not t.requires_grad]


class Optimizer:
    """An optimizer of torch as an entry: the parameters after ten steps with the samples' options."""
    supports_autograd = False

    def __init__(self, info):
        self.info = info

    def supports_dtype(self, dtype, device):
        return dtype in (torch.float32, torch.float64)

    def sample_inputs(self, device, dtype, requires_grad):
        for given in self.info.optim_inputs_func(device):
            drawn = [torch.randn(s, dtype=dtype) for _ in range(STEPS + 1) for s in ([5, 7], [6, 3])]
            yield core.SampleInput(drawn, args=(given.kwargs,))

    def op(self, drawn, options):
        p = [x.detach().clone().requires_grad_() for x in drawn[:2]]
        step = torch_steps(self.info.optim_cls, **options)(p)
        for i in range(STEPS):
            step(drawn[2 * i + 2:2 * i + 4])
        return [x.detach() for x in p]

    def in_knap(self, k, drawn, options):
        options = {name: k.item(v) if isinstance(v, Tensor) else v for name, v in options.items()}
        maker, own = OPTIMIZERS[self.info.name](k, **options)
        m, p = k.module(), []
        k.module_list_init(m, None, '')
        for i, x in enumerate(drawn[:2]):
            p.append(k.parameter(m, f'p{i}', k.dtype_of(x), k.enums['KN_CPU'], k.struct('kn_initializer'), *n(shape(k, x))))
        k.materialize(m, k.enums['KN_CPU'], 1)
        mode = k.set_grad_mode(False)
        for to, x in zip(p, drawn):
            k.copy_(to, x)
        k.set_grad_mode(mode)
        step = knap_steps(maker, **own)(k, m)
        for i in range(STEPS):
            step(lambda: loss(k, p, drawn[2 * i + 2:2 * i + 4]))
        return [k.detach(x) for x in p]


def knap_leaves(tree, found):
    if isinstance(tree, Tensor):
        found.append(tree)
    for t in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ():
        knap_leaves(t, found)


class Calls(TorchFunctionMode):
    """Notes the calls that give tensors, by their name in TABLE."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name, kwargs = getattr(function, '__name__', ''), kwargs or {}
        mode = '/' + str(kwargs.get('mode', args[2] if len(args) > 2 else 'constant')) if name == 'pad' else ''
        names = ['nn.functional.' + name + mode, 'nn.functional.' + name.strip('_'), name, name.strip('_')]
        result = function(*args, **kwargs)
        if any(isinstance(r, torch.Tensor) and r.is_floating_point() for r in results_of(result)):
            self.calls.append((next((full for full in names if full in TABLE), name), args, kwargs, result))
        return result


def jobs_of(op, most):
    """(dtype, layout, sample number, sample) of an entry."""
    for dtype in DTYPES:
        if op.supports_dtype(dtype, 'cpu'):
            grad = dtype.is_floating_point and op.supports_autograd
            for at, tree in enumerate(itertools.islice(samples(op, dtype, grad), most)):
                for layout in (None, *(LAYOUTS if dtype == torch.float32 and at < VARIED else ())):
                    yield dtype, layout, at, tree


def line_of(tree):
    return re.sub(r'\s+', ' ', str(walk(list(tree), lambda t: f'{str(t.dtype)[6:]}{list(t.shape)}')))[:200]


class Late(BaseException):
    pass


def late(*_):
    raise Late()


def run_entry(k, op, name, first, out, most):
    """In a process of its own: a line a sample."""
    signal.signal(signal.SIGALRM, late)
    elementwise, some = isinstance(op, (core.UnaryUfuncInfo, core.BinaryUfuncInfo)), first > 0
    for at, (dtype, layout, sample, tree) in enumerate(jobs_of(op, most)):
        if at < first:
            continue
        where = f'{name} {str(dtype)[6:]} {layout or "plain"} sample {sample}: {line_of(tree)}'
        print(json.dumps(['begin', where]), file=out, flush=True)
        why = next((c[2] for c in CONVENTIONS if name in c[0].split() and str(dtype)[6:] in c[1].split() and all(
            holds(*tree) for holds in c[3:])), None)
        if why:
            print(json.dumps(['convention', why]), file=out, flush=True)
            continue
        scope = k.scope_begin()
        signal.alarm(SECONDS)
        try:
            found = one_sample(k, name, op.op, op.in_knap if isinstance(op, (Module, Optimizer)) else TABLE[name], tree, layout, elementwise)
            kind, text = ('none', '') if found is None else ('compared', found)
        except knap.Failed as why:
            kind, text = 'refused', str(why)
        except Wrong as why:
            kind, text = 'wrong', str(why)
        except AttributeError as why:
            kind, text = 'missing' if 'the headers have no' in str(why) else 'table', str(why)
        except TypeError as why:
            kind, text = 'refused' if 'unexpected keyword' in str(why) or 'positional arguments but' in str(why) else 'table', str(why)
        except Late:
            kind, text = 'late', ''
        except Exception as why:
            kind, text = 'table', ''.join(traceback.format_exception(why)[-2:])
        signal.alarm(0)
        some = some or kind == 'compared'
        kind = 'refused' if kind == 'missing' and some else kind    # others of the entry have a counterpart
        k.free_modules()
        k.clear_error()
        k.scope_end(scope)
        print(json.dumps([kind, text]), file=out, flush=True)
        if kind == 'missing':
            break


def in_pieces(k, op, name, note, most):
    """All samples of an entry; a process that dies is one crash, and the next one goes on behind it."""
    done = 0
    while True:
        end, begin = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(end)
            try:
                run_entry(k, op, name, done, os.fdopen(begin, 'w'), most)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        os.close(begin)
        where = None
        with os.fdopen(end) as lines:
            for kind, text in map(json.loads, lines):
                if kind == 'begin':
                    where = text
                else:
                    note(kind, where, text)
                    where, done = None, done + 1
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            if status:
                note('table', name, f'the samples end with {status}')
            return
        note('crashed', where or name, f'signal {os.WTERMSIG(status)}')
        done += 1


def main(arguments):
    p = argparse.ArgumentParser(prog='scripts/peers opinfo')
    p.add_argument('--build', default='build', metavar='DIR', help='the folder with libknap.so (build)')
    p.add_argument('--only', action='append', metavar='NAME', help='entries of this name; may be given twice')
    p.add_argument('--most', type=int, metavar='N', help='samples an entry and dtype (all)')
    p.add_argument('--log', metavar='FILE', help='a line for each sample that was not compared')
    o = p.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter('ignore')
    k = knap.Knap(o.build)
    k.clear_error()
    log = open(o.log, 'w', encoding='utf-8') if o.log else None
    total, missing, reasons, conventions = collections.Counter(), [], collections.Counter(), collections.Counter()
    entries = [(op.name + ('/' + op.variant_test_name if op.variant_test_name else ''), op) for op in op_db]
    for name, op in entries + [(m.name, Module(m)) for m in module_db] + [(m.name, Optimizer(m)) for m in optim_db]:
        if o.only and name not in o.only:
            continue
        if name not in TABLE and name not in OPTIMIZERS and not isinstance(op, Module):
            missing.append(name)
            continue
        counts = collections.Counter()

        def note(kind, where, text):
            counts[kind] += 1
            if kind == 'compared':
                counts['gradients'] += text
            elif kind != 'none':
                if kind == 'convention':
                    conventions[text] += 1
                if kind == 'refused':
                    reasons[name + ': ' + re.sub(r'[-\d.]+', '0', text.splitlines()[0])[:110]] += 1
                if log:
                    print(kind, where, text, sep=' | ', file=log, flush=True)
        in_pieces(k, op, name, note, o.most)
        if counts['missing'] and not counts['compared']:
            missing.append(name)
            continue
        total.update(counts)
        print(f'{name:40} ' + ' '.join(f'{c} {n}' for c, n in counts.items() if c != 'none'), flush=True)
    print(dict(total), len(missing), 'without')
    print('without:', *missing)
    for text, count in reasons.most_common(70):
        print(count, text)
    print('conventions that differ:')
    for text, count in conventions.most_common():
        print(f'{count} samples: {text}')
    for names, text in ELEMENTS:
        print('some elements of', ', '.join(sorted(names)) + ':', text)
    return 0
