"""bench/peers/times.py: scripts/peers ops --times: the time of each operation, forward and with gradients, beside PyTorch's.

A case is a row's, of row-major f32, in three sizes. Knap's and torch's calls take turns in slices of a millisecond, and
the fastest slice of each counts: the machine may be shared. What the way from Python to Knap takes is measured beside
them, by calls that do nothing, and taken off; torch's own is part of its time."""
import itertools
import math
import os
import random
import statistics
import sys
import time

import torch
import torch.nn.functional as F

import knap
from ops import Draw, Input, as_list

SIZES = {'small': 256, 'medium': 1 << 17, 'large': 1 << 22}    # elements; large: 16 MiB
LENGTHS = (16, 64, 256, 1024, 4096, 8192)
SLOW = 0.02    # seconds of a call from which a case is drawn smaller


class Sized(Draw):
    """Draws cases of about so many elements."""

    def __init__(self, rng, numel):
        super().__init__(rng, torch.float32)
        self.numel, self.factor = numel, max(1.0, (numel / 972) ** 0.25)

    def shape(self, least=0, most=4, smallest=1, largest=5):
        sizes = [1] * self.int(max(least, 1), max(least, min(most, 3)))
        for _ in range(round(math.log2(self.numel))):
            sizes[self.rng.randrange(len(sizes))] *= 2
        return [max(s, smallest) for s in sizes]

    def size(self, low, high):
        return round(high * self.factor)

    def input(self, shape, kind='normal', grad=True, **how):
        return super().input(shape, kind, grad, ties=False, layout=False)


class Nothing:
    """A library whose functions all do nothing."""

    def __init__(self, library):
        self._library = library

    def __getattr__(self, name):
        self.__dict__[name] = self._library['kn_grad_mode' if name != 'kn_ok' else name]
        return self.__dict__[name]


def by_turns(calls, rounds, threads):
    """The seconds of each call in its fastest slice."""
    def slice_of(call, n):
        begin = time.perf_counter()
        for _ in range(n):
            call()
        return (time.perf_counter() - begin) / n
    once = [min(slice_of(call, 1) for _ in range(2)) for call in calls]
    best = list(once)
    for _ in range(rounds):
        for i, call in enumerate(calls):
            if threads > 1:
                time.sleep(0.003)    # the other side's threads stop waiting for work
                call()
            best[i] = min(best[i], slice_of(call, max(1, int(1e-3 / once[i]))))
    return best


def sides(k, inputs, in_knap, in_torch, backward, dtype=torch.float32):
    """Calls of Knap and of torch; None if there is no gradient. A leaf's gradient is its own memory: Knap copies where torch
    would keep the memory of the given one, so torch's side copies, too."""
    theirs = [i.in_torch(dtype) for i in inputs]
    first = as_list(in_torch(*(t for _, t in theirs)))
    graded = next((n for n, r in enumerate(first) if r.requires_grad), None)
    if backward and graded is None:
        return None
    slope = torch.randn_like(first[graded]).contiguous() if backward else None
    lent = []
    if backward:
        first[graded].backward(slope)
        memory = slope.untyped_storage().data_ptr()
        lent = [leaf for leaf, _ in theirs if leaf.grad is not None and leaf.grad.untyped_storage().data_ptr() == memory]
        for leaf, _ in theirs:
            leaf.grad = None
    ours, given = [i.in_knap(k, dtype) for i in inputs], k.tensor(slope).handle if backward else None
    leaves = [(mine, leaf) for (mine, _), (leaf, _) in zip(ours, theirs) if leaf.requires_grad]

    def knaps(k):
        scope = k.scope_begin()
        results = as_list(in_knap(k, *(t for _, t in ours)))
        if backward:
            k.backward(results[graded], grad=given)
            for leaf, _ in leaves:
                k.clear_grad(leaf)
        k.scope_end(scope)

    def torchs():
        results = as_list(in_torch(*(t for _, t in theirs)))
        if backward:
            results[graded].backward(slope)
            for leaf in lent:
                leaf.grad.clone()
            for _, leaf in leaves:
                leaf.grad = None
    return knaps, torchs


def case_of(row, seed, size):
    """A case small enough, and the shapes of its inputs."""
    numel = SIZES[size]
    while True:
        rng = random.Random(f'{seed} {row.name} {size}')
        torch.manual_seed(rng.getrandbits(60))
        case = row.make(Sized(rng, numel))
        for i in case[0]:
            i.lay_out(rng)
        drawn = [i.in_torch(torch.float32)[1] for i in case[0]]
        begin = time.perf_counter()
        case[2](*drawn)
        if time.perf_counter() - begin < SLOW or numel < 64:
            return case, ' '.join('x'.join(map(str, i.base.shape)) or 'scalar' for i in case[0])
        numel //= 4


def timed(k, idle, case, threads, backward):
    """Seconds of Knap and of torch, again where Knap seems slower."""
    calls = sides(k, *case, backward)
    if not calls:
        return None
    best = [math.inf] * 3
    for rounds in (3, 9, 18):
        found = by_turns([lambda: calls[0](k), calls[1], lambda: calls[0](idle)], rounds, threads)
        best = [min(a, b) for a, b in zip(best, found)]
        if best[0] - best[2] <= best[1]:
            break
    return best[0] - best[2], best[1]


def machine():
    with open('/proc/cpuinfo', encoding='utf-8') as f:
        model = next((line.split(':')[1].strip() for line in f if line.startswith('model name')), 'unknown processor')
    return f'{model}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}'


def line_of(ratio, what, ours, theirs):
    return f'{ratio:6.2f}  {what}: {ours * 1e6:.1f} us, PyTorch {theirs * 1e6:.1f}'


def medians(calls, threads, rounds=5):
    """The median seconds of each call; they take turns in slices of 20 ms."""
    taken = [[] for _ in calls]
    for _ in range(rounds):
        for call, seconds in zip(calls, taken):
            if threads > 1:
                time.sleep(0.003)    # the other side's threads stop waiting for work
            call()
            begin, n = time.perf_counter(), 0
            while time.perf_counter() - begin < 0.02 or n == 0:
                call()
                n += 1
            seconds.append((time.perf_counter() - begin) / n)
    return [statistics.median(seconds) for seconds in taken]


def rate_of_product(k, dtype, threads):
    scope = k.scope_begin()
    square = k.tensor(torch.randn(2048, 2048).to(dtype))
    seconds, = medians([lambda: k.matmul(square, square)], threads, 3)
    k.scope_end(scope)
    return 2 * 2048 ** 3 / seconds


def attention_line(k, idle, case, operations, product, threads):
    """Of one setting: medians, the rate and its share of the product's."""
    calls = sides(k, *case)
    ours, theirs, way = medians([lambda: calls[0](k), calls[1], lambda: calls[0](idle)], threads)
    ours -= way
    rate = operations / ours
    return (f'{ours * 1e3:10.3f} {theirs * 1e3:10.3f} ms {theirs / ours:6.2f} {rate / 1e9:8.1f} GFLOP/s {100 * rate / product:4.0f} %'
            f'{"  SLOWER" if ours > theirs else ""}')


def attention(k, options):
    """Attention by heads of 64, forward and both ways, beside PyTorch's, and Knap's product of 2048 cubed in the same run. A
    causal call counts half of the operations; both ways are 3.5 times those of forward."""
    idle = knap.Knap(options.build)
    idle._library = Nothing(k._library)
    print(f'{machine()}\n{"":56}      Knap    PyTorch     ratio    rate, of the product\'s')
    for name, length, threads in itertools.product(('f32', 'bf16'), LENGTHS, (2, 1)):
        dtype, heads = torch.float32 if name == 'f32' else torch.bfloat16, 96 if length < 256 else 12 if length < 4096 else 2
        scope, product = k.scope_begin(), 0
        torch.set_num_threads(threads)
        k.set_threads(threads)
        inputs = [Input(torch.randn(1, heads, length, 64), True, False, False) for _ in range(3)]
        for i in inputs:
            i.lay_out(random)
        for causal, dropout, backward in itertools.product((True, False), (0.0, 0.1), (False, True)):
            what = (f'{name} T={length} {"causal" if causal else "full"} {"dropout " if dropout else ""}'
                    f'{"both" if backward else "forward"} threads={threads}')
            if options.only and not all(o in what for o in options.only):
                continue
            if not product:
                product = rate_of_product(k, dtype, threads)
            case = (inputs, lambda k, q, x, v: k.scaled_dot_product_attention(q, x, v, causal=causal, dropout=dropout),
                    lambda q, x, v: F.scaled_dot_product_attention(q, x, v, is_causal=causal, dropout_p=dropout), backward, dtype)
            operations = 4 * heads * length ** 2 * 64 * (0.5 if causal else 1) * (3.5 if backward else 1)
            print(f'{what:56}{attention_line(k, idle, case, operations, product, threads)}', flush=True)
        k.scope_end(scope)
    return 0


def main(k, rows, options):
    if options.attention:
        return attention(k, options)
    idle = knap.Knap(options.build)
    idle._library = Nothing(k._library)
    found, count, cases = [], 0, options.cases
    for row in rows:
        for size in SIZES:
            for n in range(cases):
                scope = k.scope_begin()
                try:
                    case, shapes = case_of(row, f'{options.seed} {n}', size)
                    for threads in (1, 2):
                        torch.set_num_threads(threads)
                        k.set_threads(threads)
                        for backward in (False, True):
                            seconds = timed(k, idle, case, threads, backward)
                            if seconds:
                                what = f'{row.name} {size} {shapes}: {"both ways" if backward else "forward"}, threads {threads}'
                                found.append((seconds[0] / seconds[1], what, *seconds))
                                if seconds[0] > options.above * seconds[1]:
                                    print(line_of(*found[-1]), file=sys.stderr, flush=True)
                except (knap.Failed, RuntimeError, IndexError, ValueError, TypeError) as why:
                    print(f'{row.name} {size}: not timed: {str(why).splitlines()[0]}', flush=True)
                k.free_modules()
                k.scope_end(scope)
    print(f'{machine()}\n{len(found)} times of {len(rows)} operations; those above {options.above:g} of PyTorch\'s:')
    for one in sorted(found, reverse=True):
        count += one[0] > 1.2
        if one[0] > options.above:
            print(line_of(*one))
    print(f'{count} above 1.2')
    return 0
