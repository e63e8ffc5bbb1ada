"""A Llama of one's own learns a text: torchrun --nproc-per-node N llama.py [--steps N] [--data FILE]"""
import argparse
from itertools import count, islice

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

LAYERS, DIM, HEADS, KV_HEADS, HIDDEN, CTX, BATCH = 3, 96, 6, 2, 256, 64, 8


def rope(x):
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half) / half)
    angle = torch.arange(x.shape[2])[:, None] * frequency
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(DIM, DIM, bias=False)
        self.k_proj = nn.Linear(DIM, DIM // HEADS * KV_HEADS, bias=False)
        self.v_proj = nn.Linear(DIM, DIM // HEADS * KV_HEADS, bias=False)
        self.o_proj = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            proj(x).view(batch, length, -1, DIM // HEADS).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(rope(q), rope(k), v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, DIM))


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(DIM, HIDDEN, bias=False)
        self.up_proj = nn.Linear(DIM, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.RMSNorm(DIM, eps=1e-5)
        self.attn = Attention()
        self.norm2 = nn.RMSNorm(DIM, eps=1e-5)
        self.mlp = SwiGLU()

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.embed = nn.Embedding(vocab, DIM)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.block = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM, eps=1e-5)
        self.head = nn.Linear(DIM, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.block:
            x = block(x)
        return self.head(self.norm(x))


class Text(Dataset):
    def __init__(self, path):
        with open(path, encoding='utf-8') as f:
            text = f.read()
        number = {c: i for i, c in enumerate(sorted(set(text)))}
        self.vocab = len(number)
        self.ids = torch.tensor([number[c] for c in text[:len(text) * 9 // 10]])

    def __len__(self):
        return len(self.ids) - CTX

    def __getitem__(self, i):
        return self.ids[i:i + CTX], self.ids[i + 1:i + CTX + 1]


def batches(text):
    loader = DataLoader(text, batch_size=BATCH, sampler=DistributedSampler(text), drop_last=True)
    for epoch in count():
        loader.sampler.set_epoch(epoch)
        yield from loader


def main():
    parser = argparse.ArgumentParser(description='A small Llama learns a text.')
    parser.add_argument('--steps', type=int, default=500, help='to train')
    parser.add_argument('--data', default='input.txt', help='a text file')
    args = parser.parse_args()
    dist.init_process_group('gloo')
    torch.manual_seed(1)
    text = Text(args.data)
    model = Llama(text.vocab)
    for module in (*model.block, model):
        fully_shard(module)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for step, (x, y) in enumerate(islice(batches(text), args.steps)):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        if dist.get_rank() == 0 and (step % 100 == 0 or step == args.steps - 1):
            print(f'step {step:4d}  loss {loss.item():.4f}')
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
