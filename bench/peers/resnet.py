"""scripts/peers resnet [--build build] [--rounds 5] [--dtypes f32,bf16] [--threads N] [--no-compile] [NET ...]: seconds of a
training step of residual nets, Knap (bench/resnet.c) beside PyTorch, in turns: torchvision's nets and the paper's for
CIFAR, eager and compiled, channels-last, fused SGD with momentum, bf16 by autocast. A NET is model:batch:size; without any,
resnet50:8:224, resnet18:64:32 and resnet20:128:32. The processor time of a step is printed too: beside other programs it
tells more.
"""
import argparse
import os
import re
import statistics
import subprocess
import time

import torch
import torch.nn.functional as F
import torchvision


class Block(torch.nn.Module):
    """Of the nets for CIFAR: the shortcut between stages has no parameters (option A of He et al., arXiv:1512.03385)."""
    def __init__(self, before, channels, stride):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(before, channels, 3, stride, 1, bias=False)
        self.conv2 = torch.nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = torch.nn.BatchNorm2d(channels), torch.nn.BatchNorm2d(channels)
        self.stride, self.more = stride, channels - before

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.more:
            x = F.pad(x[:, :, ::self.stride, ::self.stride], (0, 0, 0, 0, self.more // 2, self.more - self.more // 2))
        return F.relu(y + x)


def cifar(depth):
    layers, before = [torch.nn.Conv2d(3, 16, 3, 1, 1, bias=False), torch.nn.BatchNorm2d(16), torch.nn.ReLU()], 16
    for stage in range(3):
        for i in range((depth - 2) // 6):
            layers.append(Block(before, 16 << stage, 2 if stage and not i else 1))
            before = 16 << stage
    return torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(before, 10))


def knap(options, net, dtype):
    model, batch, size = net
    command = [f'{options.build}/bench/bench_resnet', '--dtype', dtype, '--steps', '3', '--model', model,
               '--batch', str(batch), '--size', str(size)]
    environment = {**os.environ, 'OMP_NUM_THREADS': str(torch.get_num_threads())}
    line = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.split('\n')[0]
    return tuple(float(x) / 1e3 for x in re.search(r': ([\d.]+) ms a step .*, ([\d.]+) ms of processors', line).groups())


class Torch:
    def __init__(self, net, dtype, compiled):
        torch.manual_seed(1)
        model, batch, size = net
        if re.fullmatch('resnet(20|32|44|56|110)', model):
            self.model, classes = cifar(int(model[6:])), 10
        else:
            self.model, classes = getattr(torchvision.models, model)(), 1000
            if size < 64:
                self.model.conv1, self.model.maxpool = torch.nn.Conv2d(3, 64, 3, 1, 1, bias=False), torch.nn.Identity()
        self.model = self.model.to(memory_format=torch.channels_last)
        self.run = torch.compile(self.model) if compiled else self.model
        self.x = torch.randn(batch, 3, size, size).to(memory_format=torch.channels_last)
        self.y = torch.randint(0, classes, (batch,))
        self.optim = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9, fused=True)
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


def measure(options, net):
    model, batch, size = net
    print(f'{model}, {batch} x {size} x {size}, {torch.get_num_threads()} threads: ms a step (ms of processors)')
    for dtype in options.dtypes.split(','):
        sides = {'Knap': lambda: knap(options, net, dtype), 'PyTorch': Torch(net, dtype, False).median}
        if not options.no_compile:
            sides['PyTorch, compiled'] = Torch(net, dtype, True).median
        rounds = [{name: side() for name, side in sides.items()} for _ in range(options.rounds)]
        for name in sides:
            wall, busy = (statistics.median(r[name][k] for r in rounds) for k in (0, 1))
            times, work = (statistics.median(r[name][k] / r['Knap'][k] for r in rounds) for k in (0, 1))
            print(f"{dtype:5} {name:18} {1e3 * wall:8.0f} ({1e3 * busy:.0f}), {times:.2f} times Knap's ({work:.2f})", flush=True)


def parse_net(text):
    parts = text.split(':')
    if len(parts) != 3 or not parts[1].isdigit() or not parts[2].isdigit():
        raise argparse.ArgumentTypeError(f'{text} is not model:batch:size, as resnet18:64:32')
    return parts[0], int(parts[1]), int(parts[2])


def main(args):
    parser = argparse.ArgumentParser(prog='scripts/peers resnet', description=__doc__)
    parser.add_argument('nets', nargs='*', type=parse_net, metavar='NET')
    parser.add_argument('--build', default='build')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--dtypes', default='f32,bf16')
    parser.add_argument('--threads', type=int)
    parser.add_argument('--no-compile', action='store_true')
    options = parser.parse_args(args)
    if options.threads:
        torch.set_num_threads(options.threads)
    for net in options.nets or [('resnet50', 8, 224), ('resnet18', 64, 32), ('resnet20', 128, 32)]:
        measure(options, net)
    return 0
