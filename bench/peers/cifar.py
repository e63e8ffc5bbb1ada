"""scripts/peers cifar [--seeds 1,2,3] [--sides torch,knap] [--lr 0.1] [--nesterov] [--batch 128] [--epochs 12]
[--dtype bf16] [--threads 1] [--compile] [--build build] [--out out/peers-cifar]: test accuracies of a ResNet-20 on
CIFAR-10, trained by one recipe in PyTorch and by train_resnet, over some seeds.

The recipe: batches in a new order each epoch, the last batch of an epoch going on with the next one; parts of 32 x 32
of images with 4 black pixels around, every second one mirrored; He's initial values by outputs, batch norms' last
factors 0; SGD with momentum 0.9 and weight decay 5e-4 of all parameters; one cycle of the rate, from a 25th of --lr
to --lr in 3/10 of the steps and to 0, along cosines. bf16 is autocast in PyTorch.

It reads the binary batches of CIFAR-10 in a folder of KNAP_DATA or in ~/.cache/knap. Each run leaves a file in --out;
a run whose file is there isn't repeated.
"""
import argparse
import json
import math
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

BATCH = 128    # of an evaluation


# ---- images --------------------------------------------------------------------------------------

def folder():
    """The first folder that holds the batches."""
    places = [p for p in os.environ.get('KNAP_DATA', '').split(':') if p] + [str(pathlib.Path.home() / '.cache/knap')]
    for place in places:
        if (pathlib.Path(place) / 'cifar10/data_batch_1.bin').is_file():
            return pathlib.Path(place) / 'cifar10'
    sys.exit(f'scripts/peers cifar: there is no cifar10/data_batch_1.bin in {", ".join(places)}: run scripts/get-data cifar10')


def read(names):
    """Pixels u8 [N,3,32,32] and labels [N]."""
    data = b''.join((folder() / name).read_bytes() for name in names)
    rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, 3073)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long()


def normal(pixels):
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)))
    return ((pixels.float() / 255 - mean) / std).to(memory_format=torch.channels_last)


def augmented(pixels):
    """A part of each image with 4 black pixels around, mirrored or not."""
    n = len(pixels)
    wide = F.pad(pixels, (4, 4, 4, 4))
    rows = torch.arange(32).view(1, 32) + torch.randint(0, 9, (n, 1))
    flip = torch.rand(n, 1) < 0.5
    cols = torch.where(flip, torch.arange(31, -1, -1).view(1, 32), torch.arange(32).view(1, 32)) + torch.randint(0, 9, (n, 1))
    which = torch.arange(n).view(n, 1, 1)
    return wide.permute(0, 2, 3, 1)[which, rows.view(n, 32, 1), cols.view(n, 1, 32)].permute(0, 3, 1, 2)


def batches(pixels, labels, size, steps):
    """Without end of an epoch: batches cross it."""
    order = torch.randperm(len(labels))
    for _ in range(steps):
        while len(order) < size:
            order = torch.cat((order, torch.randperm(len(labels))))
        yield normal(augmented(pixels[order[:size]])), labels[order[:size]]
        order = order[size:]


# ---- PyTorch -------------------------------------------------------------------------------------

class Block(nn.Module):
    def __init__(self, width, out, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.stride, self.more = stride, out - width
        nn.init.zeros_(self.bn2.weight)

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.more:
            x = F.pad(x[:, :, ::self.stride, ::self.stride], (0, 0, 0, 0, self.more // 2, self.more // 2))
        return F.relu(y + x)


def resnet20():
    layers, width = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()], 16
    for out in (16, 32, 64):
        for i in range(3):
            layers.append(Block(width, out, 2 if i == 0 and out > 16 else 1))
            width = out
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    for m in model.modules():
        if isinstance(m, nn.Conv2d):
            nn.init.kaiming_normal_(m.weight, mode='fan_out', nonlinearity='relu')
    return model.to(memory_format=torch.channels_last)


def accuracy(model, pixels, labels, dtype):
    model.eval()
    right = 0
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16, enabled=dtype == 'bf16'):
        for i in range(0, len(labels), BATCH):
            right += int((model(normal(pixels[i:i + BATCH])).argmax(1) == labels[i:i + BATCH]).sum())
    model.train()
    return 100 * right / len(labels)


def torch_run(options, seed):
    torch.manual_seed(seed)
    torch.set_num_threads(options.threads)
    train, test = read([f'data_batch_{i}.bin' for i in range(1, 6)]), read(['test_batch.bin'])
    model = resnet20()
    run = torch.compile(model) if options.compile else model
    steps = math.ceil(options.epochs * len(train[1]) / options.batch)
    optim = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, nesterov=options.nesterov,
                            weight_decay=5e-4, fused=True)
    rates = torch.optim.lr_scheduler.OneCycleLR(optim, options.lr, steps, pct_start=math.ceil(0.3 * steps) / steps,
                                                cycle_momentum=False, final_div_factor=math.inf)
    total = 0
    for step, (x, y) in enumerate(batches(*train, options.batch, steps), 1):
        with torch.autocast('cpu', torch.bfloat16, enabled=options.dtype == 'bf16'):
            loss = F.cross_entropy(run(x), y)
        optim.zero_grad()
        loss.backward()
        optim.step()
        rates.step()
        total += loss.item()
        if step % 100 == 0:
            print(f'torch, seed {seed}: step {step} of {steps}, loss {total / 100:.4f}', flush=True)
            total = 0
    return accuracy(model, *test, options.dtype)


# ---- Knap ----------------------------------------------------------------------------------------

def knap_run(options, seed):
    """The last evaluation of train_resnet's log."""
    out = run_name(options, 'knap', seed)
    log = f'{out}.jsonl'
    command = [f'{options.build}/models/train_resnet', '--data', str(folder()), '--model', 'resnet20', '--batch',
               str(options.batch), '--epochs', f'{options.epochs:g}', '--lr', f'{options.lr:g}', '--schedule',
               'one_cycle', '--momentum', '0.9', '--nesterov' if options.nesterov else '--no-nesterov',
               '--weight-decay', '5e-4', '--dtype', options.dtype, '--seed', str(seed), '--threads',
               str(options.threads), '--eval-every', str(math.ceil(options.epochs)), '--log', log, '--pictures', out]
    print(' '.join(command), flush=True)
    subprocess.run(command, check=True)
    with open(log, encoding='utf-8') as f:
        return 100 * [row['val_accuracy'] for row in map(json.loads, f) if row.get('val_accuracy') is not None][-1]


# ---- both ----------------------------------------------------------------------------------------

def run_name(options, side, seed):
    return f'{options.out}/{side}-{options.dtype}-{options.epochs:g}-{options.batch}-{options.lr:g}' + \
        f'{"-nesterov" if options.nesterov else ""}-{seed}'


def processor_seconds():
    return sum(sum(resource.getrusage(w)[:2]) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def result(options, side, seed):
    """Of a file of an earlier run, else of a run."""
    path = pathlib.Path(run_name(options, side, seed) + '.json')
    if not path.is_file():
        begin, busy = time.monotonic(), processor_seconds()
        right = {'torch': torch_run, 'knap': knap_run}[side](options, seed)
        made = {'accuracy': right, 'seconds': time.monotonic() - begin, 'processor_seconds': processor_seconds() - busy}
        path.write_text(json.dumps(made) + '\n', encoding='utf-8')
    return json.loads(path.read_text(encoding='utf-8'))


def main(args):
    parser = argparse.ArgumentParser(prog='scripts/peers cifar', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--seeds', default='1,2,3')
    parser.add_argument('--sides', default='torch,knap')
    parser.add_argument('--lr', type=float, default=0.1)
    parser.add_argument('--nesterov', action='store_true')
    parser.add_argument('--batch', type=int, default=128)
    parser.add_argument('--dtype', choices=('f32', 'bf16'), default='bf16')
    parser.add_argument('--epochs', type=float, default=12)
    parser.add_argument('--threads', type=int, default=1)
    parser.add_argument('--compile', action='store_true', help='torch.compile: faster, takes a C++ compiler')
    parser.add_argument('--build', default='build')
    parser.add_argument('--out', default='out/peers-cifar')
    options = parser.parse_args(args)
    os.makedirs(options.out, exist_ok=True)
    seeds, lines = [int(s) for s in options.seeds.split(',')], []
    for side in options.sides.split(','):
        runs = [result(options, side, seed) for seed in seeds]
        right = [r['accuracy'] for r in runs]
        lines.append((side, ', '.join(f'{a:.2f}' for a in right), f'{statistics.mean(right):.2f}',
                      f'{statistics.stdev(right):.2f}' if len(right) > 1 else '-',
                      ', '.join(f'{r["seconds"] / 60:.1f} ({r["processor_seconds"] / 60:.1f})' for r in runs)))
    print(f'\nResNet-20, CIFAR-10, {options.epochs:g} epochs, --lr {options.lr:g}{" --nesterov" if options.nesterov else ""}, '
          f'batch {options.batch}, {options.dtype}, {options.threads} threads, seeds {options.seeds}\n')
    print('| | test accuracy in % | mean | standard deviation | minutes (of processors) |\n|---|---|---|---|---|')
    for line in lines:
        print('| ' + ' | '.join(line) + ' |')
    return 0
