"""Graph attention on varying graphs: torchrun --nproc-per-node N gat.py [--steps N]"""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

CLASSES, HEADS, WIDTH, MICRO = 4, 4, 8, 4


def softmax(e, index, n):
    at = index.view(-1, 1).expand_as(e)
    top = e.new_full((n, HEADS), -torch.inf).scatter_reduce(0, at, e.detach(), 'amax')
    e = (e - top[index]).exp()
    return e / e.new_zeros(n, HEADS).index_add(0, index, e)[index]


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.lin = nn.Linear(dim, HEADS * WIDTH, bias=False)
        self.src = nn.Parameter(torch.empty(HEADS, WIDTH))
        self.dst = nn.Parameter(torch.empty(HEADS, WIDTH))
        nn.init.normal_(self.src, std=0.3)
        nn.init.normal_(self.dst, std=0.3)

    def forward(self, x, begin, end):
        h = self.lin(x).view(-1, HEADS, WIDTH)
        e = (h * self.src).sum(-1)[begin] + (h * self.dst).sum(-1)[end]
        weight = softmax(F.leaky_relu(e, 0.2), end, len(x))
        y = torch.zeros_like(h).index_add(0, end, weight.unsqueeze(-1) * h[begin])
        return F.elu(y.flatten(1))


class GAT(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Attention(CLASSES)
        self.second = Attention(HEADS * WIDTH)
        self.out = nn.Linear(HEADS * WIDTH, CLASSES)

    def forward(self, x, begin, end):
        return self.out(self.second(self.first(x, begin, end), begin, end))


def graph(number):
    torch.manual_seed(number)
    n = 40 + number * 7 % 25
    y = torch.randint(0, CLASSES, (n,))
    noise = torch.randn(n, CLASSES)
    x = F.one_hot(y, CLASSES).to(noise.dtype) + 1.2 * noise
    begin = torch.randint(0, n, (12 * n,))
    end = torch.randint(0, n, (12 * n,))
    kept = (y[begin] == y[end]) | (torch.rand(12 * n) < 0.1)
    own = torch.arange(n)
    return x, y, torch.cat([begin[kept], own]), torch.cat([end[kept], own])


def learn(net, number):
    x, y, begin, end = graph(number)
    loss = F.cross_entropy(net(x, begin, end), y) / MICRO
    loss.backward()
    return loss.item()


def over_ranks(value):
    total = torch.tensor(value)
    dist.all_reduce(total)
    return total.item()


def train(net, steps):
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.01)
    for step in range(steps):
        loss = 0.0
        for k in range(dist.get_rank(), MICRO, dist.get_world_size()):
            loss += learn(net, step * MICRO + k)
        opt.step()
        opt.zero_grad()
        loss = over_ranks(loss)
        if dist.get_rank() == 0 and (step % 50 == 0 or step == steps - 1):
            print(f'step {step:4d}  loss {loss:.6f}')


@torch.no_grad()
def accuracy(net):
    net.eval()
    right = nodes = 0.0
    for k in range(dist.get_rank(), 40, dist.get_world_size()):
        x, y, begin, end = graph(1000000 + k)
        right += (net(x, begin, end).argmax(1) == y).sum().item()
        nodes += len(y)
    return over_ranks(right) / over_ranks(nodes)


def main():
    parser = argparse.ArgumentParser(description='Groups of nodes in graphs.')
    parser.add_argument('--steps', type=int, default=200, help='to train')
    steps = parser.parse_args().steps
    dist.init_process_group('gloo')
    if MICRO % dist.get_world_size():
        parser.error(f"{MICRO} micro-batches don't divide among {dist.get_world_size()} ranks")
    torch.manual_seed(42)
    net = GAT()
    for module in (net.first, net.second, net):
        fully_shard(module)
    train(net, steps)
    right = accuracy(net)
    if dist.get_rank() == 0:
        print(f'{100 * right:.1f} % of the nodes of new graphs')
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
