"""A vision transformer on MNIST: torchrun --nproc-per-node N vit.py [--steps N]"""
import argparse
from itertools import count, islice

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms

LAYERS, DIM, HEADS, PATCH, PATCHES, BATCH = 3, 64, 4, 7, 16, 64


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(DIM, 3 * DIM)
        self.c_proj = nn.Linear(DIM, DIM)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, DIM // HEADS).transpose(1, 2)
            for part in self.c_attn(x).chunk(3, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v)
        return self.c_proj(y.transpose(1, 2).reshape(batch, length, DIM))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc = nn.Linear(DIM, 4 * DIM)
        self.c_proj = nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate='tanh'))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(DIM)
        self.attn = Attention()
        self.norm2 = nn.LayerNorm(DIM)
        self.mlp = MLP()

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(1, DIM, PATCH, stride=PATCH)
        self.token = nn.Parameter(0.02 * torch.empty(1, 1, DIM).normal_())
        self.position = nn.Parameter(0.02 * torch.empty(1, 1 + PATCHES, DIM).normal_())
        self.block = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, 10)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], 1, DIM), x], 1) + self.position
        for block in self.block:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def batches():
    data = datasets.MNIST('data', train=True, transform=transforms.ToTensor())
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data), drop_last=True)
    for epoch in count():
        loader.sampler.set_epoch(epoch)
        yield from loader


def main():
    parser = argparse.ArgumentParser(description='A ViT learns MNIST.')
    parser.add_argument('--steps', type=int, default=500, help='to train')
    steps = parser.parse_args().steps
    dist.init_process_group('gloo')
    torch.manual_seed(42)
    net = ViT()
    for module in (*net.block, net):
        fully_shard(module)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.05)
    for step, (x, y) in enumerate(islice(batches(), steps)):
        loss = F.cross_entropy(net(x), y, label_smoothing=0.1)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        if dist.get_rank() == 0 and (step % 100 == 0 or step == steps - 1):
            print(f'step {step:4d}  loss {loss.item():.4f}')
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
