"""scripts/peers speed: training steps of models, Knap (bench/speed.c) beside PyTorch, in turns, and both beside the machine's floor.

    scripts/peers speed                            all rows
    scripts/peers speed gpt2/f32 resnet            the rows whose names contain one of these texts
    scripts/peers speed --rounds 5 --build build --write bench/results/cpu-xeon-amx-speed.txt

A round takes some steps of each side; a line gives the medians over the rounds, their range, and the median of the rounds' ratios
of the best PyTorch to Knap: above 1, Knap is faster. PyTorch runs eagerly and compiled, the head of a language model by logits and
cross_entropy and by linear_cross_entropy where it has one, with fused optimizers, bf16 by autocast, channels-last images. Both sides
compute the same sizes from random data; language models and transformers of images take AdamW and clipping, residual nets
momentum. The floor is that of bench/speed.c, with the higher one of both sides' product rates, and of their copy rates, which each
round measures anew: a side's share is the floor over its median. Memory is the most that a process held, its libraries included."""
import argparse
import multiprocessing
import os
import platform
import re
import statistics
import subprocess
import sys
import time

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..')
# Row: the model of bench/speed.c, its options, the threads, and the steps of a round.
SIZES = {
    'gpt2-4x64': ('gpt2', {'batch': 4, 'ctx': 64}, 2, 3),
    'gpt2-1x1024': ('gpt2', {'batch': 1, 'ctx': 1024}, 2, 1),
    'stories110m-4x64': ('stories110m', {'batch': 4, 'ctx': 64}, 2, 3),
    'char-2-threads': ('char', {'batch': 12, 'ctx': 64}, 2, 30),
    'char-1-thread': ('char', {'batch': 12, 'ctx': 64}, 1, 30),
    'vit-s16-8x224': ('vit_small_patch16_224', {'batch': 8}, 2, 3),
    'resnet50-8x224': ('resnet50', {'batch': 8, 'size': 224}, 2, 3),
    'resnet18-64x32': ('resnet18', {'batch': 64, 'size': 32}, 2, 3),
    'resnet20-128x32': ('resnet20', {'batch': 128, 'size': 32}, 2, 5),
}
ROWS = [f'{name}/{dtype}' for name in SIZES for dtype in ('f32', 'bf16') if not (name.startswith('char') and dtype == 'bf16')]
WARM = 2


def processor():
    with open('/proc/cpuinfo') as f:
        name = re.search(r'model name\s*: (.*)', f.read())
    return name.group(1) if name else platform.machine()


class Knap:
    """A process of bench/speed.c that answers lines."""

    def __init__(self, build, model, options, dtype, threads, steps):
        command = [os.path.join(build, 'bench', 'bench_speed'), '--model', model, '--dtype', dtype, '--threads', str(threads),
                   '--steps', str(steps), '--serve']
        for name, value in options.items():
            command += ['--' + name, str(value)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, what):
        self.process.stdin.write(what + '\n')
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f'scripts/peers speed: bench_speed ended with status {self.process.wait()}.')
        return [float(x) for x in line.split()]

    def end(self):
        answer = self.ask('end')
        self.process.wait()
        return answer


def language_model(model, options, linear_loss):
    import torch
    import torch.nn as nn
    import torch.nn.functional as F

    llama = model != 'gpt2' and model != 'char'
    layers, heads, c, vocab, inner, bias = {'gpt2': (12, 12, 768, 50257, 3072, True), 'char': (4, 4, 128, 65, 512, False),
                                            'stories110m': (12, 12, 768, 32000, 2048, False)}[model]
    ctx = options['ctx']
    angles = torch.outer(torch.arange(ctx), 1e4 ** (-torch.arange(0, c // heads, 2) / (c // heads)))

    def turned(x):
        cos, sin = angles.cos(), angles.sin()
        a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            norm = (lambda: nn.RMSNorm(c)) if llama else (lambda: nn.LayerNorm(c, bias=bias))
            self.norm_1, self.norm_2 = norm(), norm()
            self.attn, self.proj = nn.Linear(c, 3 * c, bias), nn.Linear(c, c, bias)
            self.fc, self.out = nn.Linear(c, inner, bias), nn.Linear(inner, c, bias)
            self.gate = nn.Linear(c, inner, bias) if llama else None

        def forward(self, x):
            q, k, v = (y.unflatten(2, (heads, -1)).transpose(1, 2) for y in self.attn(self.norm_1(x)).split(c, 2))
            if llama:
                q, k = turned(q), turned(k)
            x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            y = self.norm_2(x)
            return x + self.out(F.silu(self.gate(y)) * self.fc(y) if llama else F.gelu(self.fc(y), approximate='tanh'))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte = nn.Embedding(vocab, c)
            self.wpe = None if llama else nn.Embedding(max(ctx, 1024) if model == 'gpt2' else ctx, c)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm = nn.RMSNorm(c) if llama else nn.LayerNorm(c, bias=bias)
            for p in self.parameters():
                if p.dim() > 1:
                    nn.init.normal_(p, std=0.02)

        def forward(self, ids, targets):
            x = self.wte(ids)
            if self.wpe:
                x = x + self.wpe(torch.arange(ctx))
            for block in self.blocks:
                x = block(x)
            x = self.norm(x)
            if linear_loss:
                return F.linear_cross_entropy(x.flatten(0, 1), self.wte.weight, targets.flatten())
            return F.cross_entropy(F.linear(x, self.wte.weight).flatten(0, 1).float(), targets.flatten())

    shape = (options['batch'], ctx)
    return Model(), (torch.randint(0, vocab, shape), torch.randint(0, vocab, shape)), True


def image_model(model, options):
    import torch
    import torch.nn.functional as F
    import torchvision

    if model.startswith('vit'):
        net, size, classes = torchvision.models.VisionTransformer(224, 16, 12, 6, 384, 1536), 224, 1000
    else:
        import resnet
        net, classes = resnet.net(model, options['size'])
        size = options['size']
    net = net.to(memory_format=torch.channels_last)
    x = torch.randn(options['batch'], 3, size, size).to(memory_format=torch.channels_last)

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x, y):
            return F.cross_entropy(self.net(x).float(), y)

    return Loss(), (x, torch.randint(0, classes, (options['batch'],))), model.startswith('vit')


def serve(pipe, model, options, dtype, threads, steps, compiled, linear_loss):
    """The other side of Torch, in a process of its own, so that its memory is its own."""
    import resource
    import threading
    from multiprocessing import connection

    import torch

    def end_with_parent():
        connection.wait([multiprocessing.parent_process().sentinel])
        os._exit(1)
    threading.Thread(target=end_with_parent, daemon=True).start()

    def most_memory():
        return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    if linear_loss and not hasattr(torch.nn.functional, 'linear_cross_entropy'):
        pipe.send(None)
        return
    images = re.match('vit|resnet', model)
    net, data, transformer = image_model(model, options) if images else language_model(model, options, linear_loss)
    run = torch.compile(net) if compiled else net
    opt = (torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0.1, fused=True) if transformer else
           torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, fused=True))

    def step():
        begin, busy = time.perf_counter(), time.process_time()
        with torch.autocast('cpu', torch.bfloat16, enabled=dtype == 'bf16'):
            loss = run(*data)
        loss.backward()
        if transformer:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        return time.perf_counter() - begin, time.process_time() - busy

    def rates():
        product = copy = 0
        kind = torch.bfloat16 if dtype == 'bf16' else torch.float32
        for n in [1024] * 8 + [2048] * 4:
            a, b = torch.randn(n, n).to(kind), torch.randn(n, n).to(kind)
            begin = time.perf_counter()
            a @ b
            product = max(product, 2 * n ** 3 / (time.perf_counter() - begin))
        a, b = torch.zeros(1 << 26), torch.zeros(1 << 26)
        for _ in range(6):
            begin = time.perf_counter()
            b.copy_(a)
            copy = max(copy, 2 * 4 * 2 ** 26 / (time.perf_counter() - begin))
        return product, copy

    try:
        for _ in range(WARM):
            step()
    except Exception as error:    # the compiler has limits of its own
        print(f'PyTorch {"compiled" if compiled else "eager"}: {str(error).splitlines()[0]}', file=sys.stderr)
        pipe.send(None)
        return
    pipe.send(True)
    peak = 0    # without the arrays of the rates
    while (what := pipe.recv()) != 'end':
        if what == 'steps':
            taken = sorted(step() for _ in range(steps))
            pipe.send((taken[steps // 2][0], sum(t[1] for t in taken) / steps))
        else:
            peak = peak or most_memory()
            pipe.send(rates())
    pipe.send(peak or most_memory())


class Torch:
    def __init__(self, *arguments):
        context = multiprocessing.get_context('spawn')
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, *arguments), daemon=True)
        self.process.start()
        other.close()
        self.works = self.pipe.recv() is not None

    def ask(self, what):
        self.pipe.send(what)
        return self.pipe.recv()


def ms(values):
    return f'{1e3 * statistics.median(values):.1f} ({1e3 * min(values):.1f} to {1e3 * max(values):.1f})'


def measure(row, options, say):
    size, dtype = row.split('/')
    model, sizes, threads, steps = SIZES[size]
    threads = min(threads, os.cpu_count())
    sides = {}
    for compiled in [False] if options.no_compile else [False, True]:
        for linear_loss in [False, True] if 'ctx' in sizes else [False]:
            side = Torch(model, sizes, dtype, threads, steps, compiled, linear_loss)
            if side.works:
                sides[('compiled' if compiled else 'eager') + (', linear_cross_entropy' if linear_loss else '')] = side
    if not sides:
        sys.exit(f'scripts/peers speed: PyTorch takes no step of {row} here.')
    mine = Knap(options.build, model, sizes, dtype, threads, steps)
    times = {name: [] for name in ['Knap', *sides]}
    busy, product, copy = {name: [] for name in times}, 0, 0
    for _ in range(options.rounds):
        for name in times:
            side = mine if name == 'Knap' else sides[name]
            seconds, processors = side.ask('steps')
            times[name].append(seconds)
            busy[name].append(processors)
        for side in [mine, next(iter(sides.values()))]:
            p, c = side.ask('rates')
            product, copy = max(product, p), max(copy, c)
    flops, bytes_, peak = mine.end()
    peaks = {'Knap': peak, **{name: side.ask('end') for name, side in sides.items()}}
    floor = flops / product + bytes_ / copy
    best = min(sides, key=lambda name: statistics.median(times[name]))
    ratio = statistics.median(min(times[name][i] for name in sides) / times['Knap'][i] for i in range(options.rounds))
    say(f'{row}, {threads} thread{"s" * (threads > 1)}: {ratio:.2f} times PyTorch\'s best; floor {1e3 * floor:.1f} ms ({product / 1e9:.0f} '
        f'GFLOP/s, {copy / 1e9:.1f} GB/s)')
    for name in times:
        share = floor / statistics.median(times[name])
        say(f'    {name:32} {ms(times[name]):28} ms, {1e3 * statistics.median(busy[name]):8.1f} of processors, floor {100 * share:3.0f} %, '
            f'{peaks[name] / 1e9:.2f} GB{"  <- best" if name == best else ""}')


def main(args):
    import torch
    p = argparse.ArgumentParser(prog='scripts/peers speed', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('rows', nargs='*', help='parts of names: ' + ' '.join(ROWS))
    p.add_argument('--rounds', type=int, default=5)
    p.add_argument('--build', default=os.path.join(ROOT, 'build'))
    p.add_argument('--no-compile', action='store_true', help='PyTorch runs eagerly only')
    p.add_argument('--write', metavar='FILE', help='a copy of what is printed')
    o = p.parse_args(args)
    rows = [row for row in ROWS if not o.rows or any(part in row for part in o.rows)]
    if not rows or o.rounds < 1:
        p.error('no row has such a name; --help lists them' if not rows else '--rounds is at least 1')
    if not os.path.exists(os.path.join(o.build, 'bench', 'bench_speed')):
        sys.exit(f'scripts/peers speed: {o.build}/bench/bench_speed is missing: ninja -C {o.build} bench/bench_speed')
    lines = []

    def say(line):
        print(line, flush=True)
        lines.append(line)
        if o.write:
            with open(o.write, 'w') as f:
                f.write('\n'.join(lines) + '\n')

    say(f'{processor()}, {os.cpu_count()} cores; PyTorch {torch.__version__}; medians of {o.rounds} rounds (range)')
    for row in rows:
        measure(row, o, say)
    return 0
