"""An optimizer of one's own, AdaBelief: torchrun --nproc-per-node N optimizer.py [--steps N]"""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

BATCH, IN, HIDDEN, CLASSES = 64, 32, 64, 4


class AdaBelief(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.999), weight_decay=0.0):
        super().__init__(params, {'lr': lr, 'betas': betas, 'weight_decay': weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group['betas']
            for p in group['params']:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state['step'] = 0
                    state['exp_avg'] = torch.zeros_like(p)
                    state['exp_avg_var'] = torch.zeros_like(p)
                state['step'] += 1
                m, s, t = state['exp_avg'], state['exp_avg_var'], state['step']
                m.add_(p.grad - m, alpha=1 - b1)
                s.add_((p.grad - m) ** 2 - s, alpha=1 - b2)
                size = (s / (1 - b2 ** t)).sqrt() + 1e-8
                p.sub_(group['lr'] * (m / (1 - b1 ** t) / size + group['weight_decay'] * p))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(IN, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


def loss_of(net, micro):
    torch.manual_seed(0)
    teacher = torch.randn(CLASSES, IN)
    torch.manual_seed(1 + micro)
    x = torch.randn(BATCH, IN)
    return F.cross_entropy(net(x), F.linear(x, teacher).argmax(1))


def main():
    parser = argparse.ArgumentParser(description='Trains with AdaBelief.')
    parser.add_argument('--steps', type=int, default=300, help='to train')
    steps = parser.parse_args().steps
    dist.init_process_group('gloo')
    torch.manual_seed(42)
    net = MLP()
    for module in (net.fc1, net.fc2, net):
        fully_shard(module)
    opt = AdaBelief(net.parameters(), lr=3e-3, weight_decay=0.01)
    for step in range(steps):
        loss = loss_of(net, step * dist.get_world_size() + dist.get_rank())
        loss.backward()
        opt.step()
        opt.zero_grad()
        if dist.get_rank() == 0 and (step % 50 == 0 or step == steps - 1):
            print(f'step {step:4d}  loss {loss.item():.4f}')
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
