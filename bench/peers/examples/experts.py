"""A mixture of experts on ranks of their own: torchrun --nproc-per-node N experts.py [--steps N]"""
import argparse

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as over_ranks
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

PARTS, TOKENS, EXPERTS, EMBD, HIDDEN = 4, 64, 8, 16, 32


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(EMBD, HIDDEN)
        self.down = nn.Linear(HIDDEN, EMBD)

    def forward(self, x):
        return self.down(F.relu(self.up(x)))


class Experts(nn.Module):
    def __init__(self, first, count):
        super().__init__()
        self.expert = nn.ModuleDict({str(first + i): Expert() for i in range(count)})

    def forward(self, x, number):
        y = torch.zeros_like(x)
        for name, expert in self.expert.items():
            at = (number == int(name)).nonzero().flatten()
            y = y.index_add(0, at, expert(x[at]))
        return y


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(EMBD, EMBD)
        self.router = nn.Linear(EMBD, EXPERTS)

    def forward(self, x):
        h = self.embed(x)
        return torch.cat([h, self.router(h)], 1)


class Part:
    """A part on its way: its tokens in the order of their experts."""

    def __init__(self, net, target, x):
        self.target, self.features = target, net(x)
        self.leaf = self.features.detach().requires_grad_()

    def send(self):
        ranks = dist.get_world_size()
        number = self.leaf[:, EMBD:].argmax(1)
        rows = torch.bincount(number * ranks // EXPERTS, minlength=ranks)
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows)
        self.rows = rows.tolist()
        self.received = received.tolist()
        self.order = number.argsort(stable=True)
        x = self.leaf[:, :EMBD][self.order]
        self.there = over_ranks.all_to_all_single(x.new_empty(sum(self.received), EMBD), x, self.received, self.rows)
        self.number = number.new_empty(sum(self.received))
        dist.all_to_all_single(self.number, number[self.order], self.received, self.rows)

    def loss(self, there):
        home = over_ranks.all_to_all_single(there.new_empty(TOKENS, EMBD), there, self.rows, self.received)
        gate = self.leaf[:, EMBD:].softmax(1).amax(1, keepdim=True)
        y = torch.zeros_like(self.target).index_add(0, self.order, home)
        return F.mse_loss(y * gate, self.target)


def learn(own, parts):
    for part in parts:
        part.send()
    there = torch.cat([part.there for part in parts])
    y = own(there, torch.cat([part.number for part in parts]))
    losses = [part.loss(there) for part, there in zip(parts, y.split([len(part.there) for part in parts]))]
    (torch.stack(losses).sum() / PARTS).backward()
    for part in parts:
        part.features.backward(part.leaf.grad * dist.get_world_size())
    loss = torch.stack(losses).detach().mean()
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def main():
    parser = argparse.ArgumentParser(description='A mixture of experts.')
    parser.add_argument('--steps', type=int, default=300, help='to train')
    steps = parser.parse_args().steps
    dist.init_process_group('gloo')
    rank, ranks = dist.get_rank(), dist.get_world_size()
    assert PARTS % ranks == 0, f'{PARTS} parts for {ranks} ranks'
    torch.manual_seed(42)
    net = Shared()
    for module in (net.embed, net.router, net):
        fully_shard(module)
    torch.manual_seed(43 + rank)
    own = Experts(EXPERTS // ranks * rank, EXPERTS // ranks)
    opts = [torch.optim.AdamW(m.parameters(), lr=3e-3) for m in (net, own)]
    for step in range(steps):
        torch.manual_seed(0)
        teacher = torch.randn(EMBD, EMBD)
        parts = []
        for i in range(PARTS // ranks):
            torch.manual_seed(1 + step * PARTS + i * ranks + rank)
            x = torch.randn(TOKENS, EMBD)
            parts.append(Part(net, F.linear(x, teacher).abs(), x))
        loss = learn(own, parts)
        for opt in opts:
            opt.step()
            opt.zero_grad()
        if rank == 0 and (step % 50 == 0 or step == steps - 1):
            print(f'step {step:4d}  loss {loss.item():.6f}')
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
