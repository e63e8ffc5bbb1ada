"""Low-rank adapters for a GPT: torchrun --nproc-per-node N lora.py [--steps N]"""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from bundled_gpt import GPT

BATCH, CTX, VOCAB, RANK, LAYERS = 8, 16, 31, 8, 2


class LoRA(nn.Module):
    def __init__(self, inner):
        super().__init__()
        fan_in, fan_out = inner.weight.shape
        self.inner = inner
        self.a = nn.Parameter(0.1 * torch.empty(RANK, fan_in).normal_())
        self.b = nn.Parameter(torch.zeros(fan_out, RANK))

    def forward(self, x):
        return self.inner(x) + F.linear(F.linear(x, self.a), self.b)


def loss_of(model, factor, micro):
    rows = [[(micro * BATCH + i) * 7 % VOCAB] for i in range(BATCH)]
    for row in rows:
        for _ in range(CTX):
            row.append((factor * row[-1] + 1) % VOCAB)
    ids = torch.tensor(rows)
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def train(model, rank, ranks, factor, steps):
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(steps):
        loss = loss_of(model, factor, step * ranks + rank)
        loss.backward()
        opt.step()
        opt.zero_grad()
        if dist.get_rank() == 0 and (step % 50 == 0 or step == steps - 1):
            print(f'step {step:4d}  loss {loss.item():.4f}')


def main():
    parser = argparse.ArgumentParser(description='Adapts a GPT by LoRA.')
    parser.add_argument('--steps', type=int, default=100, help='of each training')
    steps = parser.parse_args().steps
    dist.init_process_group('gloo')
    torch.manual_seed(42)
    model = GPT(LAYERS, heads=2, embd=32, ctx=CTX, vocab=VOCAB)
    train(model, 0, 1, 3, steps)
    model.requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = LoRA(block.attn.c_attn)
        block.mlp.c_fc = LoRA(block.mlp.c_fc)
    for module in (*(m for m in model.modules() if isinstance(m, LoRA)), model):
        fully_shard(module)
    if dist.get_rank() == 0:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        print(f'{trained} of {sum(p.numel() for p in model.parameters())} parameters are trained')
    train(model, dist.get_rank(), dist.get_world_size(), 5, steps)
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
