"""A GPT from text to sample: torchrun --nproc-per-node N gpt.py [--steps N] [--data FILE]"""
import argparse
import math
from itertools import count, islice

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

LAYERS, HEADS, DIM, CTX, BATCH = 4, 4, 128, 64, 12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1 = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.proj = nn.Linear(DIM, DIM)
        self.ln2 = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def attention(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, DIM // HEADS).transpose(1, 2)
            for part in self.qkv(x).chunk(3, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, DIM))

    def forward(self, x):
        x = x + self.attention(self.ln1(x))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate='tanh'))


class GPT(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.token = nn.Embedding(vocab, DIM)
        self.position = nn.Embedding(CTX, DIM)
        self.block = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, vocab)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                last = name.endswith(('proj.weight', 'down.weight'))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * LAYERS) if last else 0.02)

    def forward(self, ids):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.block:
            x = block(x)
        return self.head(self.ln(x))


class Text(Dataset):
    def __init__(self, path):
        with open(path, encoding='utf-8') as f:
            text = f.read()
        self.chars = sorted(set(text))
        number = {c: i for i, c in enumerate(self.chars)}
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


def learning_rate(step, steps):
    if step < 100:
        return 4e-3 * (step + 1) / 101
    return 4e-4 + (4e-3 - 4e-4) * 0.5 * (1 + math.cos(math.pi * (step - 100) / (steps - 100)))


def train(net, text, steps):
    opt = torch.optim.AdamW(net.parameters(), lr=4e-3, betas=(0.9, 0.99), weight_decay=0.1)
    for step, (x, y) in enumerate(islice(batches(text), steps)):
        loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        for group in opt.param_groups:
            group['lr'] = learning_rate(step, steps)
        opt.step()
        opt.zero_grad()
        if dist.get_rank() == 0 and (step % 100 == 0 or step == steps - 1):
            print(f'step {step:4d}  loss {loss.item():.4f}')


@torch.no_grad()
def write(net, text, tokens):
    torch.manual_seed(1337)
    net.eval()
    ids = torch.tensor([[text.chars.index('\n')]])
    for _ in range(tokens):
        logits = net(ids[:, -CTX:])[:, -1] / 0.8
        values, index = logits.topk(min(200, logits.shape[-1]))
        ids = torch.cat([ids, index.gather(1, torch.multinomial(values.softmax(-1), 1))], 1)
    return ''.join(text.chars[i] for i in ids[0])


def main():
    parser = argparse.ArgumentParser(description='A small GPT learns a text and writes.')
    parser.add_argument('--steps', type=int, default=2000, help='optimizer steps')
    parser.add_argument('--tokens', type=int, default=300, help='to write')
    parser.add_argument('--data', default='input.txt', help='a text file')
    args = parser.parse_args()
    dist.init_process_group('gloo')
    torch.manual_seed(1337)
    text = Text(args.data)
    net = GPT(len(text.chars))
    for module in (*net.block, net):
        fully_shard(module)
    train(net, text, args.steps)
    written = write(net, text, args.tokens)
    if dist.get_rank() == 0:
        print(written)
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
