"""A recommendation model (DLRM) learns clicks: torchrun --nproc-per-node N dlrm.py [--steps N]"""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

DENSE, TABLES, ROWS, IDS, DIM = 13, 8, 20000, 3, 16
BATCH, MICRO, VECTORS = 128, 4, TABLES + 1
PAIRS = VECTORS * TABLES // 2


class DLRM(nn.Module):
    def __init__(self):
        super().__init__()
        self.bottom1 = nn.Linear(DENSE, 64)
        self.bottom2 = nn.Linear(64, DIM)
        self.top1 = nn.Linear(DIM + PAIRS, 64)
        self.top2 = nn.Linear(64, 1)
        self.table = nn.ModuleList(nn.EmbeddingBag(ROWS, DIM, mode='sum', sparse=True) for _ in range(TABLES))
        for table in self.table:
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, x, ids):
        x = F.relu(self.bottom2(F.relu(self.bottom1(x))))
        vectors = torch.stack([x] + [t(ids[:, i]) for i, t in enumerate(self.table)], 1)
        i, k = torch.tril_indices(VECTORS, VECTORS, -1)
        pairs = (vectors @ vectors.transpose(1, 2))[:, i, k]
        return self.top2(F.relu(self.top1(torch.cat([x, pairs], 1))))


def learn(net, taste):
    x = torch.randn(BATCH, DENSE)
    u = torch.rand(BATCH, TABLES, IDS)
    ids = (u * (u * u) * ROWS).long()
    click = (taste[ids.flatten(1)].sum(1) > 0).to(x.dtype)
    loss = F.binary_cross_entropy_with_logits(net(x, ids), click) / MICRO
    loss.backward()
    return loss.item()


def reduce_rows(tables):
    for table in tables:    # fully_shard has no tables of rows: each rank holds them all
        table.weight.grad = table.weight.grad.coalesce()
        dist.all_reduce(table.weight.grad)
        table.weight.grad /= dist.get_world_size()


def main():
    parser = argparse.ArgumentParser(description='A DLRM learns clicks.')
    parser.add_argument('--steps', type=int, default=300, help='to train')
    steps = parser.parse_args().steps
    dist.init_process_group('gloo')
    if MICRO % dist.get_world_size():
        parser.error(f"{MICRO} micro-batches don't divide among {dist.get_world_size()} ranks")
    torch.manual_seed(42)
    net = DLRM()
    for module in (net.bottom1, net.bottom2, net.top1, net.top2):
        fully_shard(module)
    fully_shard(net, ignored_params={table.weight for table in net.table})
    opt = torch.optim.Adagrad(net.parameters(), lr=0.05, foreach=False)
    taste = torch.randn(ROWS, 1)
    for step in range(steps):
        loss = torch.tensor(0.0)
        for _ in range(dist.get_rank(), MICRO, dist.get_world_size()):
            loss += learn(net, taste)
        reduce_rows(net.table)
        opt.step()
        opt.zero_grad()
        dist.all_reduce(loss)
        if dist.get_rank() == 0 and (step % 50 == 0 or step == steps - 1):
            print(f'step {step:4d}  loss {loss.item():.6f}')
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
