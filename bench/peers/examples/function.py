"""An operation of one's own, weights of three values: torchrun --nproc-per-node N function.py [--steps N]"""
import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

BATCH, IN, HIDDEN, CLASSES = 64, 32, 64, 4


class Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, s, q):
        ctx.save_for_backward(w, s)
        ctx.q = q
        return s * (w / s).clamp(-q, q).round()

    @staticmethod
    def backward(ctx, dy):
        w, s = ctx.saved_tensors
        v = w / s
        inside = v.abs() < ctx.q
        ds = dy * torch.where(inside, v.round() - v, ctx.q * v.sign())
        return dy * inside, ds.sum(), None


class Coarse(nn.Module):
    def __init__(self, fan_in, fan_out):
        super().__init__()
        deviation = 1 / math.sqrt(fan_in)
        self.weight = nn.Parameter(deviation * torch.empty(fan_out, fan_in).normal_())
        self.step = nn.Parameter(torch.tensor(deviation))

    def forward(self, x):
        return F.linear(x, Quantize.apply(self.weight, self.step, 1))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = Coarse(IN, HIDDEN)
        self.fc2 = Coarse(HIDDEN, CLASSES)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


def loss_of(net, micro):
    torch.manual_seed(0)
    teacher = torch.randn(CLASSES, IN)
    torch.manual_seed(1 + micro)
    x = torch.randn(BATCH, IN)
    return F.cross_entropy(net(x), F.linear(x, teacher).argmax(1))


def main():
    parser = argparse.ArgumentParser(description='Weights of three values.')
    parser.add_argument('--steps', type=int, default=300, help='to train')
    steps = parser.parse_args().steps
    dist.init_process_group('gloo')
    torch.manual_seed(42)
    net = MLP()
    for module in (net.fc1, net.fc2):
        fully_shard(module, ignored_params={module.step})
    fully_shard(net, ignored_params={net.fc1.step, net.fc2.step})
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for step in range(steps):
        loss = loss_of(net, step * dist.get_world_size() + dist.get_rank())
        loss.backward()
        for module in (net.fc1, net.fc2):
            dist.all_reduce(module.step.grad, op=dist.ReduceOp.SUM)
            module.step.grad /= dist.get_world_size()
        opt.step()
        opt.zero_grad()
        if dist.get_rank() == 0 and (step % 50 == 0 or step == steps - 1):
            print(f'step {step:4d}  loss {loss.item():.4f}')
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
