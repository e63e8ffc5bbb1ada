"""scripts/peers fsdp: training steps of GPT-2 124M in f32 on local ranks, sharded and not, Knap (bench/fsdp.c) beside PyTorch on gloo.

    scripts/peers fsdp                             2 ranks of one thread: FULL_SHARD beside FSDP2, NO_SHARD beside DDP
    scripts/peers fsdp --ranks 4 --rounds 3 --build build --write FILE
    scripts/peers fsdp --collectives               8 ranks over TCP on the loopback beside gloo: all-gather, reduce-scatter, all-reduce

A round takes a step of each side in turn, from barrier to barrier; a line gives the median and the range, the last ones the median
of the rounds' ratios of PyTorch to Knap: above 1, Knap is faster. Both take a batch of 4 x 64 tokens a rank, clipping and AdamW;
the blocks and the whole model are units. Collectives: sizes are those of all ranks' parts together, times the slowest rank's."""
import argparse
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

import speed

KINDS = ('all_gather', 'reduce_scatter', 'all_reduce')


def train(model, sharded):
    import torch
    if sharded:
        from torch.distributed.fsdp import fully_shard
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        return model, model.parameters()
    return torch.nn.parallel.DistributedDataParallel(model), model.parameters()


def steps(pipe, sharded, ctx):
    import torch
    import torch.distributed as dist
    torch.manual_seed(1)
    model, data, _ = speed.language_model('gpt2', {'batch': 4, 'ctx': ctx}, False)
    run, parameters = train(model, sharded)
    parameters = list(parameters)
    opt = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.1, fused=True)

    def step():
        dist.barrier()
        begin = time.perf_counter()
        run(*data).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        dist.barrier()
        return time.perf_counter() - begin

    for _ in range(2):
        step()
    pipe.send(None)
    while pipe.recv():
        pipe.send(step())


def collectives(pipe, most, times):
    import torch
    import torch.distributed as dist
    ranks = dist.get_world_size()

    def measure(kind, size):
        count = size // ranks // 4
        whole, part = torch.zeros(count * ranks), torch.zeros(count)
        call = {'all_gather': lambda: dist.all_gather_into_tensor(whole, part),
                'reduce_scatter': lambda: dist.reduce_scatter_tensor(part, whole),
                'all_reduce': lambda: dist.all_reduce(whole)}[kind]
        repeats = times * (10 if size < 1 << 20 else 1)
        for n in (3, repeats):
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(n):
                call()
            seconds = (time.perf_counter() - begin) / n
        worst = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return worst.item()

    while pipe.recv():
        pipe.send({(kind, size): measure(kind, size) for kind in KINDS for size in sizes(most)})


def sizes(most):
    return [1 << k for k in range(10, 40, 2) if 1 << k <= most]


def rank_main(pipe, rank, ranks, meeting, work, *arguments):
    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    dist.init_process_group('gloo', init_method='file://' + meeting, rank=rank, world_size=ranks)
    work(pipe, *arguments)
    dist.destroy_process_group()


class Torch:
    """Ranks on gloo; the answer is rank 0's."""

    def __init__(self, ranks, work, *arguments):
        context = multiprocessing.get_context('spawn')
        self.folder = tempfile.TemporaryDirectory()
        self.pipes = []
        for rank in range(ranks):
            mine, other = context.Pipe()
            context.Process(target=rank_main, daemon=True,
                            args=(other, rank, ranks, os.path.join(self.folder.name, 'meeting'), work, *arguments)).start()
            other.close()
            self.pipes.append(mine)

    def ready(self):
        for pipe in self.pipes:
            pipe.recv()
        return self

    def ask(self):
        for pipe in self.pipes:
            pipe.send(True)
        return [pipe.recv() for pipe in self.pipes][0]

    def end(self):
        for pipe in self.pipes:
            pipe.send(False)


class Knap:
    """Ranks of bench/fsdp.c."""

    def __init__(self, o, name):
        self.process = subprocess.Popen(
            [os.path.join(o.build, 'bench', 'bench_fsdp'), '--serve', '--only', name, '--ranks', str(o.ranks), '--threads', '1',
             '--ctx', str(o.ctx)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self):
        try:
            self.process.stdin.write('steps\n')
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ''
        if not line:
            sys.exit(f'scripts/peers fsdp: bench_fsdp ended with status {self.process.wait()}.')
        return float(line)

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def compare_steps(o, say):
    sides = {'Knap FULL_SHARD': Knap(o, 'full_shard'), 'Knap NO_SHARD': Knap(o, 'no_shard'),
             'PyTorch FSDP2': Torch(o.ranks, steps, True, o.ctx).ready(), 'PyTorch DDP': Torch(o.ranks, steps, False, o.ctx).ready()}
    for name in ('Knap FULL_SHARD', 'Knap NO_SHARD'):
        sides[name].ask()
    taken = {name: [] for name in sides}
    for _ in range(o.rounds):
        for name, side in sides.items():
            taken[name].append(1e3 * side.ask())
    for side in sides.values():
        side.end()
    say(f'GPT-2 124M, f32, 4 x {o.ctx} tokens a rank, {o.ranks} ranks of one thread, ms a step:')
    for name, t in taken.items():
        say(f'    {name:16} {statistics.median(t):8.1f} ({min(t):.1f} to {max(t):.1f})')
    for what, mine, other in (('sharded', 'Knap FULL_SHARD', 'PyTorch FSDP2'), ('not sharded', 'Knap NO_SHARD', 'PyTorch DDP'),
                              ('sharded, of NO_SHARD', 'Knap FULL_SHARD', 'Knap NO_SHARD'),
                              ('sharded, of DDP', 'PyTorch FSDP2', 'PyTorch DDP')):
        ratios = [b / a for a, b in zip(taken[mine], taken[other])]
        say(f'    {what}: {other} / {mine} {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})')


def knap_collectives(o):
    """One run of bench/collectives.c, whose ranks meet over TCP."""
    with tempfile.TemporaryDirectory() as folder:
        command = [os.path.join(o.build, 'bench', 'bench_collectives'), '--device', 'cpu', '--dtype', 'f32', '--kib', '1', '--mib',
                   str(o.mib), '--times', str(o.times), '--threads', '1']
        running = [subprocess.Popen(command, stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL, text=True,
                                    env={**os.environ, 'KNAP_RENDEZVOUS': f'file:{folder}/meeting', 'RANK': str(rank),
                                         'WORLD_SIZE': str(o.ranks), 'LOCAL_RANK': str(rank), 'MASTER_ADDR': '127.0.0.1',
                                         'MASTER_PORT': '29513'}) for rank in range(o.ranks)]
        text = running[0].communicate()[0]
        if any([p.wait() for p in running]):
            sys.exit('scripts/peers fsdp: bench_collectives failed.')
    return {(kind, int(float(kib) * 1024)): float(us) / 1e6
            for kind, kib, us in re.findall(r'^(\w+) +f32 +([\d.]+) KiB +([\d.]+) us', text, re.M)}


def compare_collectives(o, say):
    other = Torch(o.ranks, collectives, o.mib << 20, o.times)
    mine, theirs = [], []
    for _ in range(o.rounds):
        mine.append(knap_collectives(o))
        theirs.append(other.ask())
    other.end()
    say(f'{o.ranks} ranks, f32, over TCP on the loopback: Knap, gloo (us, medians of {o.rounds}), gloo / Knap')
    for key in theirs[0]:
        a, b = [1e6 * t[key] for t in mine], [1e6 * t[key] for t in theirs]
        ratios = [y / x for x, y in zip(a, b)]
        say(f'    {key[0]:14} {key[1] >> 10:6} KiB {statistics.median(a):10.1f} {statistics.median(b):10.1f}   '
            f'{statistics.median(ratios):5.2f} ({min(ratios):.2f} to {max(ratios):.2f})')


def main(args):
    import torch
    p = argparse.ArgumentParser(prog='scripts/peers fsdp', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--collectives', action='store_true')
    p.add_argument('--ranks', type=int, help='default 2, with --collectives 8')
    p.add_argument('--rounds', type=int, help='default 5, with --collectives 3')
    p.add_argument('--ctx', type=int, default=64)
    p.add_argument('--mib', type=int, default=64, help='the largest collective')
    p.add_argument('--times', type=int, default=5, help='calls of a collective, ten times as many below 1 MiB')
    p.add_argument('--build', default=os.path.join(speed.ROOT, 'build'))
    p.add_argument('--write', metavar='FILE', help='a copy of what is printed')
    o = p.parse_args(args)
    o.ranks = o.ranks or (8 if o.collectives else 2)
    o.rounds = o.rounds or (3 if o.collectives else 5)
    if min(o.ranks, o.rounds, o.ctx, o.mib, o.times) < 1:
        p.error('--ranks, --rounds, --ctx, --mib and --times are at least 1')
    program = 'bench_collectives' if o.collectives else 'bench_fsdp'
    if not os.path.exists(os.path.join(o.build, 'bench', program)):
        sys.exit(f'scripts/peers fsdp: {o.build}/bench/{program} is missing: ninja -C {o.build} bench/{program}')
    lines = []

    def say(line):
        print(line, flush=True)
        lines.append(line)

    say(f'{speed.processor()}, {os.cpu_count()} cores; PyTorch {torch.__version__}')
    (compare_collectives if o.collectives else compare_steps)(o, say)
    if o.write:
        with open(o.write, 'w') as f:
            f.write('\n'.join(lines) + '\n')
    return 0
