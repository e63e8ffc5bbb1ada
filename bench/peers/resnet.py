"""scripts/peers resnet [--build build] [--rounds 5] [--dtypes f32,bf16] [--model resnet50] [--batch 8] [--size 224]
[--no-compile]: seconds of a training step of a residual net, Knap (bench/resnet.c) beside torchvision's in PyTorch, in
turns: eager and compiled, channels-last, SGD with momentum, bf16 by autocast. The processor time of a step is printed too:
beside other programs it tells more.
"""
import argparse
import re
import statistics
import subprocess
import time

import torch
import torch.nn.functional as F
import torchvision


def knap(options, dtype):
    command = [f'{options.build}/bench/bench_resnet', '--dtype', dtype, '--steps', '3', '--model', options.model,
               '--batch', str(options.batch), '--size', str(options.size)]
    line = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split('\n')[0]
    return tuple(float(x) / 1e3 for x in re.search(r': ([\d.]+) ms a step .*, ([\d.]+) ms of processors', line).groups())


class Torch:
    def __init__(self, options, dtype, compiled):
        torch.manual_seed(1)
        self.model = getattr(torchvision.models, options.model)()
        if options.size < 64:
            self.model.conv1, self.model.maxpool = torch.nn.Conv2d(3, 64, 3, 1, 1, bias=False), torch.nn.Identity()
        self.model = self.model.to(memory_format=torch.channels_last)
        self.run = torch.compile(self.model) if compiled else self.model
        self.x = torch.randn(options.batch, 3, options.size, options.size).to(memory_format=torch.channels_last)
        self.y = torch.randint(0, 1000, (options.batch,))
        self.optim = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.dtype = dtype
        for _ in range(2):
            self.step()

    def step(self):
        begin, busy = time.perf_counter(), time.process_time()
        with torch.autocast('cpu', torch.bfloat16, enabled=self.dtype == 'bf16'):
            loss = F.cross_entropy(self.run(self.x).float(), self.y)
        loss.backward()
        self.optim.step()
        self.optim.zero_grad()
        return time.perf_counter() - begin, time.process_time() - busy

    def median(self):
        steps = [self.step() for _ in range(3)]
        return statistics.median(s[0] for s in steps), statistics.median(s[1] for s in steps)


def main(args):
    parser = argparse.ArgumentParser(prog='scripts/peers resnet', description=__doc__)
    parser.add_argument('--build', default='build')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--dtypes', default='f32,bf16')
    parser.add_argument('--model', default='resnet50')
    parser.add_argument('--batch', type=int, default=8)
    parser.add_argument('--size', type=int, default=224)
    parser.add_argument('--no-compile', action='store_true')
    options = parser.parse_args(args)
    print(f'{options.model}, {options.batch} x {options.size} x {options.size}, {torch.get_num_threads()} threads: ms a step '
          '(ms of processors)')
    for dtype in options.dtypes.split(','):
        sides = {'Knap': lambda: knap(options, dtype), 'PyTorch': Torch(options, dtype, False).median}
        if not options.no_compile:
            sides['PyTorch, compiled'] = Torch(options, dtype, True).median
        rounds = [{name: side() for name, side in sides.items()} for _ in range(options.rounds)]
        for name in sides:
            wall, busy = (statistics.median(r[name][k] for r in rounds) for k in (0, 1))
            times = statistics.median(r[name][0] / r['Knap'][0] for r in rounds)
            print(f'{dtype:5} {name:18} {1e3 * wall:8.0f} ({1e3 * busy:.0f}), {times:.2f} times Knap\'s')
    return 0
