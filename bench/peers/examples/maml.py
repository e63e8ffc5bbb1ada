"""A net learns to learn: torchrun --nproc-per-node N maml.py [--steps N]"""
import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

POINTS, WIDTH, MICRO = 10, 40, 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        size = (1, WIDTH, WIDTH, 1)
        self.w = nn.ParameterList()
        for a, b in zip(size, size[1:]):
            self.w.append(torch.empty(b, a).normal_() / math.sqrt(a))
            self.w.append(torch.zeros(b))

    def forward(self, x, y):
        w, (x, x2), (y, y2) = list(self.w), x.chunk(2), y.chunk(2)
        g = torch.autograd.grad(F.mse_loss(predict(w, x), y), w, create_graph=True)
        w = [p - 0.01 * d for p, d in zip(w, g)]
        return F.mse_loss(predict(w, x2), y2)


def predict(w, x):
    x = F.relu(F.linear(x, w[0], w[1]))
    return F.linear(F.relu(F.linear(x, w[2], w[3])), w[4], w[5])


def loss_of(net):
    wave = torch.rand(2, 1)
    x = torch.rand(2 * POINTS, 1) * 10 - 5
    y = (wave[0] * 4.9 + 0.1) * torch.sin(x + wave[1] * math.pi)
    return net(x, y)


def main():
    parser = argparse.ArgumentParser(description='A net learns to learn waves.')
    parser.add_argument('--steps', type=int, default=1000, help='to train')
    steps = parser.parse_args().steps
    dist.init_process_group('gloo')
    if MICRO % dist.get_world_size():
        parser.error(f"{MICRO} micro-batches don't divide among {dist.get_world_size()} ranks")
    torch.manual_seed(42)
    net = Net()
    for p in net.parameters():    # fully_shard has no parameters that a gradient is taken of
        dist.broadcast(p.data, 0)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0)
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
        if dist.get_rank() == 0 and (step % 100 == 0 or step == steps - 1):
            print(f'step {step:4d}  loss {total:.5f}')
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
