"""A net is the solution of an equation: torchrun --nproc-per-node N pinn.py [--steps N]"""
import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn

POINTS, WIDTH, MICRO = 64, 32, 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc_in = nn.Linear(2, WIDTH)
        self.mid = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, t, x):
        h = torch.tanh(self.fc_in(torch.cat((t, x), 1)))
        return self.out(torch.tanh(self.mid(h)))


def slope(u, x):
    return torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]


def loss_of(net):
    x = torch.rand(POINTS, 1)
    t = torch.rand(POINTS, 1).requires_grad_()
    x = (x * 2 - 1).requires_grad_()
    u = net(t, x)
    u_x = slope(u, x)
    u_xx = slope(u_x, x)
    off = slope(u, t) + u * u_x - 0.01 / math.pi * u_xx
    begin = net(torch.zeros_like(t), x) + torch.sin(math.pi * x)
    edge = net(t, x.sign())
    return torch.cat((off, begin, edge), 1).square().mean()


def main():
    parser = argparse.ArgumentParser(description="A net solves Burgers' equation.")
    parser.add_argument('--steps', type=int, default=500, help='to train')
    steps = parser.parse_args().steps
    dist.init_process_group('gloo')
    if MICRO % dist.get_world_size():
        parser.error(f"{MICRO} micro-batches don't divide among {dist.get_world_size()} ranks")
    torch.manual_seed(42)
    net = Net()
    for p in net.parameters():    # fully_shard lets go of parameters that a backward of a gradient needs
        dist.broadcast(p.data, 0)
    opt = torch.optim.AdamW(net.parameters(), lr=5e-3, weight_decay=0)
    for step in range(steps):
        total = torch.zeros(())
        for _ in range(dist.get_rank(), MICRO, dist.get_world_size()):
            loss = loss_of(net) / MICRO
            loss.backward()
            total += loss.item()
        for p in net.parameters():
            dist.all_reduce(p.grad)
        opt.step()
        opt.zero_grad()
        dist.all_reduce(total)
        if dist.get_rank() == 0 and (step % 50 == 0 or step == steps - 1):
            print(f'step {step:4d}  loss {total:.6f}')
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
