"""A DCGAN learns to write digits: torchrun --nproc-per-node N gan.py [--steps N] [--out FILE.png]"""
import argparse
from itertools import count

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms
from torchvision.utils import save_image

NOISE, WIDTH, BATCH, MICRO = 64, 32, 32, 2


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.up1 = nn.ConvTranspose2d(NOISE, 2 * WIDTH, 7)
        self.bn1 = nn.BatchNorm2d(2 * WIDTH)
        self.up2 = nn.ConvTranspose2d(2 * WIDTH, WIDTH, 4, stride=2, padding=1)
        self.bn2 = nn.BatchNorm2d(WIDTH)
        self.up3 = nn.ConvTranspose2d(WIDTH, 1, 4, stride=2, padding=1)

    def forward(self, z):
        x = F.relu(self.bn1(self.up1(z.view(-1, NOISE, 1, 1))))
        x = F.relu(self.bn2(self.up2(x)))
        return torch.tanh(self.up3(x))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1 = nn.Conv2d(1, WIDTH, 4, stride=2, padding=1)
        self.down2 = nn.Conv2d(WIDTH, 2 * WIDTH, 4, stride=2, padding=1)
        self.bn = nn.BatchNorm2d(2 * WIDTH)
        self.down3 = nn.Conv2d(2 * WIDTH, 1, 7)

    def forward(self, x):
        x = F.leaky_relu(self.down1(x), 0.2)
        x = F.leaky_relu(self.bn(self.down2(x)), 0.2)
        return self.down3(x).flatten()


def start(module):
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, std=0.02)


def batches():
    data = datasets.MNIST('data', train=True, transform=transforms.ToTensor())
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data), drop_last=True)
    for epoch in count():
        loader.sampler.set_epoch(epoch)
        yield from loader


def loss_of(logits, truth):
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, truth))


def judge(g, d, real):
    with torch.no_grad():
        made = g(torch.randn(BATCH, NOISE))
    loss = (loss_of(d(real * 2 - 1), 1.0) + loss_of(d(made), 0.0)) / MICRO
    loss.backward()
    return loss.item()


def forge(g, d):
    loss = loss_of(d(g(torch.randn(BATCH, NOISE))), 1.0) / MICRO
    loss.backward()
    return loss.item()


def train(g, d, steps):
    opt_g = torch.optim.AdamW(g.parameters(), lr=1e-3, betas=(0.5, 0.999), weight_decay=0)
    opt_d = torch.optim.AdamW(d.parameters(), lr=2e-4, betas=(0.5, 0.999), weight_decay=0)
    data = batches()
    micros = range(dist.get_rank(), MICRO, dist.get_world_size())
    for step in range(steps):
        loss_d = sum(judge(g, d, next(data)[0]) for _ in micros)
        opt_d.step()
        opt_d.zero_grad()
        loss_g = sum(forge(g, d) for _ in micros)
        opt_g.step()
        opt_g.zero_grad()
        opt_d.zero_grad()
        losses = torch.tensor([loss_d, loss_g])
        dist.all_reduce(losses)
        if dist.get_rank() == 0 and (step % 50 == 0 or step == steps - 1):
            print(f'step {step:4d}  discriminator {losses[0]:.6f}  generator {losses[1]:.6f}')


def main():
    parser = argparse.ArgumentParser(description='A DCGAN learns MNIST.')
    parser.add_argument('--steps', type=int, default=300, help='to train')
    parser.add_argument('--out', help='a PNG of 64 digits to write')
    args = parser.parse_args()
    dist.init_process_group('gloo')
    if MICRO % dist.get_world_size():
        parser.error(f"{MICRO} micro-batches don't divide among {dist.get_world_size()} ranks")
    torch.manual_seed(1)
    g, d = Generator().apply(start), Discriminator().apply(start)
    for module in (g.up1, g.up2, g.up3, g, d.down1, d.down2, d.down3, d):
        fully_shard(module)
    train(g, d, args.steps)
    if args.out:
        with torch.no_grad():
            digits = g(torch.randn(64, NOISE))
        if dist.get_rank() == 0:
            save_image(digits, args.out, nrow=8, normalize=True, value_range=(-1, 1))
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
