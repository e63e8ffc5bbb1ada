"""bench/peers/ops.py: scripts/peers ops: PyTorch as judge of Knap's operations, layers and optimizers."""
import argparse
import os
import random
import sys
import textwrap
import warnings

import torch

import distributions    # noqa: F401  adds the rows of autograd/distributions.h
import knap
import layers        # noqa: F401  adds the rows of nn/layers.h
import operations_composed    # noqa: F401  more of autograd/operations.h
import operations_index    # noqa: F401  values by an index
import operations_linalg    # noqa: F401  those of autograd/linalg.h
import operations_sequences    # noqa: F401  those of autograd/sequences.h
import operations_nn    # noqa: F401  those of autograd/functional.h
import operations_volumes    # noqa: F401  those of autograd/volumes.h and autograd/spectral.h
import optimizers    # noqa: F401  those of optim/optim.h
from covered import HEADERS, WITHOUT, complaints, public, rows_of
from operations import ROWS

BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-12}
ILL = 4    # where a result cancels, f32 may be so many times as far off as torch's f32


class Wrong(Exception):
    """A result differs from torch's in kind; the message says in which way."""


class Input:
    """Values and the way in which they lie in memory: steps lead from a row-major base to them."""

    def __init__(self, values, grad, ties, layout):
        self.values, self.grad, self.ties, self.layout, self.steps = values, grad, ties, layout, []

    def lay_out(self, rng):
        base = self.values
        dims = [i for i, n in enumerate(base.shape) if n > 1] if self.layout else []
        if dims and self.ties and rng.random() < 0.2:
            self.steps.insert(0, ('expand', list(base.shape)))
            base = base.narrow(rng.choice(dims), 0, 1)
        if dims and rng.random() < 0.3:
            dim, before, after = rng.choice(dims), rng.randint(0, 2), rng.randint(0, 2)
            self.steps.insert(0, ('slice', dim, before, before + base.shape[dim]))
            edge = base.narrow(dim, 0, 1)
            base = torch.cat([edge] * before + [base] + [edge] * after, dim)
        if dims and rng.random() < 0.3:
            order = rng.sample(range(base.dim()), base.dim())
            self.steps.insert(0, ('permute', order))
            base = base.permute([order.index(i) for i in range(base.dim())])
        self.base = base.contiguous()

    def in_torch(self, dtype):
        base = self.base.to(dtype) if self.base.is_floating_point() else self.base.clone()
        leaf = base.clone().requires_grad_(self.grad)
        t = leaf
        for step, *how in self.steps:
            t = {'expand': lambda s: t.expand(s), 'permute': lambda o: t.permute(o),
                 'slice': lambda d, b, e: t.narrow(d, b, e - b)}[step](*how)
        return leaf, t

    def in_knap(self, k, dtype):
        leaf = k.tensor(self.base.to(dtype) if self.base.is_floating_point() else self.base)
        if self.grad:
            k.require_grad(leaf, True)
        t = leaf
        for step, *how in self.steps:
            t = {'expand': lambda s: k.expand(t, len(s), s), 'permute': lambda o: k.permute(t, len(o), o),
                 'slice': lambda d, b, e: k.slice(t, d, b, e)}[step](*how)
        return leaf, t


class Draw:
    """Draws a case: shapes, values and options."""

    def __init__(self, rng, dtype):
        self.rng, self.dtype = rng, dtype
        self.choice, self.int = rng.choice, rng.randint

    def size(self, low, high):
        """Of a dim."""
        return self.int(low, high)

    def shape(self, least=0, most=4, smallest=1, largest=5):
        """Sizes of least to most dims; one of them is large now and then."""
        sizes = [self.int(smallest, largest) for _ in range(self.int(least, most))]
        if sizes and self.rng.random() < 0.15:
            sizes[self.rng.randrange(len(sizes))] = self.int(17, 70)
        return sizes

    def input(self, shape, kind='normal', grad=True, ties=True, layout=True):
        """Floats of a kind: normal, positive, unit (inside 0 to 1), sides (of -1 to 1), above (1), whole (many are equal)."""
        n, u = torch.randn(shape, dtype=torch.float64), torch.rand(shape, dtype=torch.float64)
        v = {'normal': 2 * n, 'positive': 0.2 + 3 * u, 'unit': 0.05 + 0.9 * u, 'sides': 1.8 * u - 0.9,
             'above': 1.1 + 3 * u, 'whole': n.mul(1.5).round()}[kind]
        return Input(v.float().double() if self.dtype == torch.float32 else v, grad, ties, layout)

    def index(self, shape, below, ties=True):
        v = torch.randint(0, below, shape)
        return Input(v.int() if self.rng.random() < 0.2 else v, False, ties, True)

    def given(self, values, ties=True):
        return Input(values, False, ties, True)

    def bools(self, shape, ties=True):
        return self.given(torch.rand(shape) < 0.5, ties)

    def broadcast(self, count, kind='normal', **how):
        """Inputs whose shapes broadcast."""
        shape = self.shape()
        shapes = [[1 if self.rng.random() < 0.2 else s for s in shape][self.choice([0, 0, 0, self.int(0, len(shape))]):]
                  for _ in range(count)]
        return [self.input(s, kind, **how) for s in shapes]

    def dims(self, ndim):
        """Dims to reduce as (n, dims) and as torch's; n == 0: all."""
        chosen = self.rng.sample(range(ndim), self.int(0, ndim))
        return [d - ndim if self.rng.random() < 0.3 else d for d in chosen], chosen or list(range(ndim))

    def dim(self, ndim):
        return self.int(-ndim, ndim - 1)


def as_list(outputs):
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def difference(name, mine, judge, size):
    """The largest difference, relative to the largest value. Infinite and NaN are where torch has them."""
    if list(mine.shape) != list(judge.shape):
        raise Wrong(f'{name} has shape {list(mine.shape)}, torch {list(judge.shape)}')
    judge, narrow = judge.detach().double(), judge.detach().to(mine.dtype).double()
    mine, judge = mine.detach().double(), torch.where(torch.isfinite(narrow), judge, narrow)    # what overflows does
    odd = ~torch.isfinite(judge)
    if not torch.equal(torch.isfinite(mine), ~odd) or not torch.equal(mine[odd].nan_to_num(7), judge[odd].nan_to_num(7)):
        raise Wrong(f'{name} has NaN or infinity elsewhere than torch: {mine.flatten()[:6].tolist()}, '
                    f'torch {judge.flatten()[:6].tolist()}')
    if judge.numel() == 0 or odd.all():
        return 0.0
    gap = (mine - judge)[~odd].abs().max().item()
    return gap and gap / max(judge[~odd].abs().max().item(), 0.1 * size)


def by_torch(inputs, in_torch, dtype, draw):
    """torch's results and the gradients by the inputs; draw gives the gradient of result n."""
    drawn = [i.in_torch(dtype) for i in inputs]
    results = as_list(in_torch(*(t for _, t in drawn)))
    graded = [(r, draw(n, r).in_torch(r.dtype)[1]) for n, r in enumerate(results) if r.requires_grad]
    if graded:
        torch.autograd.backward(*map(list, zip(*graded)))
    return results, [torch.zeros(i.base.shape) if leaf.grad is None else leaf.grad for i, (leaf, _) in zip(inputs, drawn)]


def by_knap(k, inputs, in_knap, dtype, cotangents):
    """The same of Knap."""
    drawn = [i.in_knap(k, dtype) for i in inputs]
    results = as_list(in_knap(k, *(t for _, t in drawn)))
    values = [k.values(r) for r in results]
    for n, w in cotangents.items():
        if n >= len(results) or not k.requires_grad(results[n]):
            raise Wrong(f'result {n} has no gradient, in torch it has')
        k.backward(results[n], grad=w.in_knap(k, values[n].dtype)[1].handle, retain_graph=True)
    grads = [k.grad(leaf) if i.grad else None for i, (leaf, _) in zip(inputs, drawn)]
    return values, [k.values(g) if g else torch.zeros(i.base.shape) for i, g in zip(inputs, grads)]


def one_case(k, row, seed, dtype):
    """The worst difference of a case's results and gradients from torch's in f64, of the same values; and, in f32 where
    it is more than the row's bound, the worst of torch in f32."""
    rng = random.Random(seed)
    torch.manual_seed(rng.getrandbits(60))
    inputs, in_knap, in_torch = row.make(Draw(rng, dtype))
    for i in inputs:
        i.lay_out(rng)
    cotangents = {}

    def draw(n, result):
        if n not in cotangents:
            values = torch.randn(result.shape, dtype=torch.float64)
            values = values.to(dtype if result.dtype == torch.float64 else result.dtype).to(result.dtype)
            cotangents[n] = Input(values, False, True, True)
            cotangents[n].lay_out(rng)
        return cotangents[n]
    judge, judge_grads = by_torch(inputs, in_torch, torch.float64, draw)
    values, grads = by_knap(k, inputs, in_knap, dtype, cotangents)
    if len(values) != len(judge):
        raise Wrong(f'{len(values)} results, torch has {len(judge)}')
    for n, (v, j) in enumerate(zip(values, judge)):
        wanted = dtype if j.dtype == torch.float64 else j.dtype
        if v.dtype != wanted:
            raise Wrong(f'result {n} has dtype {v.dtype}, expected {wanted}')
    bases = [i.base for i in inputs if i.base.is_floating_point() and i.base.numel()]
    size = max([b.abs().max().item() for b in bases] + [0])
    with_grads = max([size] + [w.base.abs().max().item() for w in cotangents.values() if w.base.numel()])

    def worst(values, grads):
        return max([difference(f'result {n}', v, j, size) for n, (v, j) in enumerate(zip(values, judge))]
                   + [difference(f'the gradient of input {n}', g, j, with_grads)
                      for n, (g, j) in enumerate(zip(grads, judge_grads))])
    found = worst(values, grads)
    narrow = dtype == torch.float32 and found > row.bounds.get(dtype, BOUNDS[dtype])
    return found, worst(*by_torch(inputs, in_torch, dtype, draw)) if narrow else 0.0


def check(k, row, options):
    """The worst difference for each dtype, and messages."""
    worst, wrong = {}, []
    for dtype in (torch.float32, torch.float64):
        worst[dtype] = 0.0, 0.0
        for case in range(options.cases):
            scope = k.scope_begin()
            where = f'{row.name} {str(dtype)[6:]} case {case}'
            try:
                found, own = one_case(k, row, f'{options.seed} {row.name} {case}', dtype)
                worst[dtype] = max(worst[dtype], (found, own))
                bound = max(row.bounds.get(dtype, BOUNDS[dtype]), ILL * own)
                if not found <= bound:
                    wrong.append(f'{where}: differs by {found:.2g}, at most {bound:.0e} is right')
            except (Wrong, knap.Failed) as why:
                wrong.append(f'{where}: {why}')
            except (RuntimeError, IndexError, ValueError, TypeError) as why:
                wrong.append(f'{where}: torch or this table: {type(why).__name__}: {str(why).splitlines()[0]}')
            k.free_modules()
            k.scope_end(scope)
    return worst, wrong


TITLE = """# Beside PyTorch

Each public operation, layer and optimizer with its name in PyTorch, and the largest difference from it that
`scripts/peers ops` has found, relative to the largest value of a result: of results and gradients, over random shapes,
strides and options, in training and evaluation, of optimizers after ten steps. PyTorch {version} computes in f64;
1e-5 in f32 and 1e-12 in f64 is right, or 4 times the difference of PyTorch in f32, which then stands beside it.
`scripts/peers ops --cases 100 --page {page}` writes this page, with `--only NAME` one row of it; `scripts/lint` holds it
to the headers. [from-pytorch.md](from-pytorch.md) has the differences that bite.
"""


def page_of(path, table):
    """Writes the page anew, with these rows and, for others, those that are there."""
    rows = {}
    if os.path.exists(path):
        with open(path, encoding='utf-8') as f:
            rows = {name: row for name, row in rows_of(f.read()).items() if name not in WITHOUT}
    rows.update(table)
    relative = os.path.relpath(path, knap.ROOT)
    with open(path, 'w', encoding='utf-8') as f:
        words = TITLE.format(version=torch.__version__.split('+')[0], page=relative).split('\n\n')
        f.write('\n\n'.join(w if w.startswith('#') else textwrap.fill(w, 100) for w in words) + '\n')
        for header, names in public().items():
            f.write(f'\n## {HEADERS[header]}: {header}\n\n| Knap | PyTorch | cases | f32 | f64 |\n|---|---|---|---|---|\n')
            f.writelines(rows[name] + '\n' for name in names if name in rows)
        f.write('\n## Without a row\n\n| Why | Knap |\n|---|---|\n')
        for why in dict.fromkeys(WITHOUT.values()):
            f.write(f'| {why} | {", ".join(f"`{n}`" for n, w in WITHOUT.items() if w == why)} |\n')


def parse(arguments):
    p = argparse.ArgumentParser(
        prog='scripts/peers ops', formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Compares Knap's operations, layers and optimizers with PyTorch on random shapes, strides and options.",
        epilog='example: scripts/peers ops --build build --only pool2d --cases 50\n\n'
               'Differences are relative to the largest value of a result (a tenth of the largest input, where\n'
               'that is more); torch computes in f64. At most 1e-5 in f32 and 1e-12 in f64 is right; where values\n'
               'cancel, also 4 times the difference of torch in f32, which then stands beside it. Prints a table\n'
               '(markdown); the exit status is 1 where a row fails or a public function has none.')
    p.add_argument('--build', default='build', metavar='DIR', help='the folder with libknap.so (build)')
    p.add_argument('--seed', type=int, default=1, help='of all draws (1)')
    p.add_argument('--cases', type=int, metavar='N', help='cases an operation and dtype (20; 2 with --times)')
    p.add_argument('--only', action='append', metavar='NAME', help='operations with this in their name; may be given twice')
    p.add_argument('--page', metavar='FILE', help='write the rows that pass into this page')
    p.add_argument('--times', action='store_true', help='the time of operations in three sizes, beside torch\'s; --cases of each')
    p.add_argument('--attention', action='store_true', help='with --times: attention instead, over lengths, dtypes, dropout and threads; '
                   '--only takes lines that have all of the given words')
    p.add_argument('--above', type=float, default=1.0, metavar='RATIO', help='with --times: print those slower than this (1)')
    o = p.parse_args(arguments)
    o.cases = (2 if o.times else 20) if o.cases is None else o.cases
    if o.cases < 1:
        p.error('--cases is at least 1')
    if not os.path.exists(os.path.join(o.build, 'libknap.so')):
        p.error(f'{o.build} has no libknap.so: scripts/build makes it, --build names another folder')
    return o


def main(arguments):
    options = parse(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter('ignore')    # torch's advice on reductions
    k = knap.Knap(options.build)
    wrong_names = list(complaints([row.name for row in ROWS], 'bench/peers'))
    rows = [r for r in ROWS if not options.only or any(o in r.name for o in options.only)]
    if not rows and not options.attention:
        wrong_names.append(f'--only {" ".join(options.only)}: no operation has that in its name')
    if options.times:
        import times
        names = {n for header, of in public().items() if header.startswith('autograd') for n in of}
        return times.main(k, [r for r in rows if r.name in names], options)
    table, failed = {}, 0
    print(f'torch {torch.__version__}, seed {options.seed}\n\n| Knap | PyTorch | cases | f32 | f64 |\n|---|---|---|---|---|')
    for row in rows:
        worst, wrong = check(k, row, options)
        failed += bool(wrong)
        for line in wrong[:4]:
            print(line, file=sys.stderr)
        if len(wrong) > 4:
            print(f'{row.name}: {len(wrong) - 4} more', file=sys.stderr)
        note = (f' ({row.why})' if row.why else '') + (' **wrong**' if wrong else '')
        table[row.name] = (f'| `{row.name}` | {row.judge}{note} | {2 * options.cases} | '
                           + ' | '.join(f'{found:.1e}' + (f' (PyTorch in f32: {own:.1e})' if own else '')
                                        for found, own in worst.values()) + ' |')
        print(table[row.name], flush=True)
        if wrong:
            del table[row.name]
    print(f'\n{len(rows)} rows, {failed} fail.')
    for line in wrong_names:
        print(line, file=sys.stderr)
    if options.page:
        page_of(options.page, table)
    return 1 if failed or wrong_names else 0
