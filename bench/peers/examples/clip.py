"""Pictures and captions by a contrastive loss: torchrun --nproc-per-node N clip.py [--steps N] [--gathered]"""
import argparse

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as over_ranks
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

PARTS, PAIRS = 8, 16
WORDS, KIND, PIXELS, HIDDEN, EMBD = 3, 8, 64, 128, 32
VOCAB = WORDS * KIND


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image1 = nn.Linear(PIXELS, HIDDEN)
        self.image2 = nn.Linear(HIDDEN, EMBD)
        self.words = nn.Embedding(VOCAB, HIDDEN)
        self.text = nn.Linear(HIDDEN, EMBD)
        self.scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, image, words):
        image = self.image2(F.relu(self.image1(image)))
        text = self.text(F.relu(self.words(words).mean(1)))
        return torch.cat([F.normalize(image, dim=-1) * self.scale.exp(), F.normalize(text, dim=-1)], 1)


def draw(seed, how, *args, **kwargs):
    torch.manual_seed(seed)
    return how(*args, **kwargs)


def pairs(part):
    words = draw(3 * part, torch.randint, 0, KIND, (PAIRS, WORDS)) + torch.arange(WORDS) * KIND
    pictures = draw(1, torch.randn, VOCAB, PIXELS)
    noise = draw(3 * part + 2, torch.randn, PAIRS, PIXELS)
    return F.embedding(words, pictures).sum(1) + noise, words


def contrast(own, all_, first):
    (image, text), (all_image, all_text) = own.chunk(2, 1), all_.chunk(2, 1)
    at = torch.arange(first, first + len(own))
    return (F.cross_entropy(image @ all_text.T, at) + F.cross_entropy(text @ all_image.T, at)) / 2


def gathered(net, parts):
    own = net(torch.cat([image for image, _ in parts]), torch.cat([words for _, words in parts]))
    all_ = torch.cat(over_ranks.all_gather(own))
    loss = contrast(own, all_, dist.get_rank() * len(own))
    loss.backward()
    loss = loss.detach()
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def cached(net, parts):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    features = []
    with torch.no_grad():
        for part in parts:
            own = net(*part)
            every = [torch.empty_like(own) for _ in range(ranks)]
            dist.all_gather(every, own)
            features += every
    all_ = torch.cat(features).requires_grad_()
    loss = contrast(all_, all_, 0)
    loss.backward()
    for i, part in enumerate(parts):
        first = (i * ranks + rank) * PAIRS
        net(*part).backward(all_.grad[first:first + PAIRS] * ranks)
    return loss


def main():
    parser = argparse.ArgumentParser(description='Pictures and captions.')
    parser.add_argument('--steps', type=int, default=200, help='to train')
    parser.add_argument('--gathered', action='store_true', help='one pass')
    args = parser.parse_args()
    dist.init_process_group('gloo')
    rank, ranks = dist.get_rank(), dist.get_world_size()
    assert PARTS % ranks == 0, f'{PARTS} parts for {ranks} ranks'
    torch.manual_seed(42)
    net = Clip()
    for module in (net.image1, net.image2, net.words, net.text, net):
        fully_shard(module)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(args.steps):
        parts = [pairs(step * PARTS + i * ranks + rank) for i in range(PARTS // ranks)]
        loss = (gathered if args.gathered else cached)(net, parts)
        opt.step()
        opt.zero_grad()
        if rank == 0 and (step % 50 == 0 or step == args.steps - 1):
            print(f'step {step:4d}  loss {loss.item():.6f}')
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
