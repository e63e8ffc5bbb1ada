"""Which arm of a spiral: torchrun --nproc-per-node N spiral.py [--steps N] [--out DIR] [--from DIR]"""
import argparse
import math
from itertools import count, islice

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

DIM, BLOCKS, CLASSES, BATCH, MICRO, STEPS = 64, 3, 3, 48, 4, 200


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(DIM, eps=1e-5)
        self.gate = nn.Linear(DIM, 2 * DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)
        self.scale = nn.Parameter(torch.full((DIM,), 0.5))

    def forward(self, x):
        h = self.norm(x)
        return x + self.scale * self.down(F.silu(self.gate(h)) * self.up(h))


class Spiral(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module('in', nn.Linear(2, DIM))
        self.block = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.out = nn.Linear(DIM, CLASSES)

    def forward(self, x):
        x = self.get_submodule('in')(x)
        for block in self.block:
            x = block(x)
        return self.out(x)


class Points(Dataset):
    def __init__(self, seed):
        self.seed = seed

    def __len__(self):
        return 20 * MICRO * BATCH

    def __getitem__(self, i):
        draws = torch.Generator().manual_seed(self.seed * len(self) + i)
        arm = i % CLASSES
        radius = torch.rand((), generator=draws)
        angle = 6.2832 / CLASSES * arm + 5 * radius + 0.1 * torch.randn((), generator=draws)
        return torch.stack([radius * angle.cos(), radius * angle.sin()]), arm


def points(seed):
    data = Points(seed)
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data), drop_last=True)
    for epoch in count():
        loader.sampler.set_epoch(epoch)
        yield from loader


def over_ranks(value):
    total = torch.tensor(value)
    dist.all_reduce(total)
    return total.item()


def step_once(net, opt, data):
    total = 0.0
    for _ in range(MICRO // dist.get_world_size()):
        x, y = next(data)
        loss = F.cross_entropy(net(x), y, label_smoothing=0.01) / MICRO
        loss.backward()
        total += loss.item()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    return over_ranks(total)


@torch.no_grad()
def accuracy(net):
    net.eval()
    right = 0.0
    unseen = points(2)
    for _ in range(2 * MICRO // dist.get_world_size()):
        x, y = next(unseen)
        right += (net(x).argmax(1) == y).sum().item()
    net.train()
    return over_ranks(right) / (2 * MICRO * BATCH)


def learning_rate(step):
    if step < 20:
        return 1e-2 * (step + 1) / 21
    return 1e-3 + (1e-2 - 1e-3) * 0.5 * (1 + math.cos(math.pi * min(1, (step - 20) / (STEPS - 20))))


def train(net, args):
    scales = [p for name, p in net.named_parameters() if name.endswith('.scale')]
    rest = [p for name, p in net.named_parameters() if not name.endswith('.scale')]
    opt = torch.optim.AdamW([{'params': rest}, {'params': scales, 'weight_decay': 0}], lr=1e-2, weight_decay=0.01)
    first = 0
    if args.begin:
        model, optim = get_state_dict(net, opt)
        state = {'model': model, 'optim': optim, 'step': 0}
        dcp.load(state, checkpoint_id=args.begin)
        set_state_dict(net, opt, model_state_dict=state['model'], optim_state_dict=state['optim'])
        first = state['step']
    data = islice(points(1), first * MICRO // dist.get_world_size(), None)
    for step in range(first, args.steps):
        for group in opt.param_groups:
            group['lr'] = learning_rate(step)
        loss = step_once(net, opt, data)
        if dist.get_rank() == 0 and (step % 50 == 0 or step == args.steps - 1):
            print(f'step {step:4d}  loss {loss:.6f}')
    if args.out:
        model, optim = get_state_dict(net, opt)
        dcp.save({'model': model, 'optim': optim, 'step': args.steps}, checkpoint_id=args.out)


def main():
    parser = argparse.ArgumentParser(description='Which arm of the spiral?')
    parser.add_argument('--steps', type=int, default=200, help='where this run ends')
    parser.add_argument('--from', dest='begin', help='a checkpoint to go on from')
    parser.add_argument('--out', help='where to save one')
    args = parser.parse_args()
    dist.init_process_group('gloo')
    if MICRO % dist.get_world_size():
        parser.error(f"{MICRO} micro-batches don't divide among {dist.get_world_size()} ranks")
    torch.manual_seed(42)
    net = Spiral()
    for module in (*net.block, net):
        fully_shard(module)
    train(net, args)
    right = accuracy(net)
    if dist.get_rank() == 0:
        print(f'{100 * right:.1f} % of new points')
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
