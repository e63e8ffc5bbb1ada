"""A diffusion model learns to draw digits: torchrun --nproc-per-node N diffusion.py [--steps N] [--out FILE.png]"""
import argparse
import math
from itertools import count

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms
from torchvision.utils import save_image

BATCH, MICRO, TIMES, WIDTH, EMBD = 32, 2, 100, 16, 64


class Block(nn.Module):
    def __init__(self, fan_in, fan_out):
        super().__init__()
        self.norm1 = nn.GroupNorm(4, fan_in)
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, padding=1)
        self.time = nn.Linear(EMBD, fan_out)
        self.norm2 = nn.GroupNorm(4, fan_out)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, padding=1)
        self.skip = nn.Conv2d(fan_in, fan_out, 1)

    def forward(self, x, time):
        y = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


def waves(time):
    frequency = torch.exp(torch.arange(EMBD // 2) * (-math.log(10000) / (EMBD // 2)))
    angle = time[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], 1)


def doubled(x, y):
    return torch.cat([F.interpolate(x, scale_factor=2), y], 1)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time1 = nn.Linear(EMBD, EMBD)
        self.time2 = nn.Linear(EMBD, EMBD)
        self.add_module('in', nn.Conv2d(1, WIDTH, 3, padding=1))
        self.down1 = Block(WIDTH, 2 * WIDTH)
        self.down2 = Block(2 * WIDTH, 2 * WIDTH)
        self.up1 = Block(4 * WIDTH, 2 * WIDTH)
        self.up2 = Block(3 * WIDTH, WIDTH)
        self.out = nn.Conv2d(WIDTH, 1, 3, padding=1)

    def forward(self, x, time):
        time = F.silu(self.time2(F.silu(self.time1(waves(time)))))
        x = self.get_submodule('in')(x)
        y = self.down1(F.avg_pool2d(x, 2), time)
        z = self.down2(F.avg_pool2d(y, 2), time)
        y = self.up1(doubled(z, y), time)
        return self.out(self.up2(doubled(y, x), time))


BETA = torch.linspace(1e-3, 0.2, TIMES, dtype=torch.float64)
LEFT = torch.cumprod(1 - BETA, 0)


def batches():
    data = datasets.MNIST('data', train=True, transform=transforms.ToTensor())
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data), drop_last=True)
    for epoch in count():
        loader.sampler.set_epoch(epoch)
        yield from loader


def learn(net, x):
    x = x * 2 - 1
    time = torch.randint(0, TIMES, (BATCH,))
    noise = torch.randn_like(x)
    left = LEFT[time].to(x.dtype).view(-1, 1, 1, 1)
    loss = F.mse_loss(net(left.sqrt() * x + (1 - left).sqrt() * noise, time), noise) / MICRO
    loss.backward()
    return loss.item()


@torch.no_grad()
def drawn(net, number):
    torch.manual_seed(3)
    x = torch.randn(number, 1, 28, 28)
    for t in reversed(range(TIMES)):
        noise = net(x, torch.full((number,), t))
        x = (x - BETA[t] / (1 - LEFT[t]).sqrt() * noise) / (1 - BETA[t]).sqrt()
        if t > 0:
            x = x + BETA[t].sqrt() * torch.randn_like(x)
    return x


def train(net, steps):
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
    average = [p.detach().clone() for p in net.parameters()]
    data = batches()
    for step in range(steps):
        loss = torch.tensor(0.0)
        for _ in range(dist.get_rank(), MICRO, dist.get_world_size()):
            loss += learn(net, next(data)[0])
        opt.step()
        opt.zero_grad()
        decay = min(0.99, (1 + step) / (10 + step)) if step else 0.0
        for a, p in zip(average, net.parameters()):
            a.lerp_(p.detach(), 1 - decay)
        dist.all_reduce(loss)
        if dist.get_rank() == 0 and (step % 50 == 0 or step == steps - 1):
            print(f'step {step:4d}  loss {loss:.6f}')
    for a, p in zip(average, net.parameters()):
        p.data.copy_(a)


def main():
    parser = argparse.ArgumentParser(description='A DDPM learns MNIST.')
    parser.add_argument('--steps', type=int, default=300, help='to train')
    parser.add_argument('--out', help='a PNG of 16 digits to write')
    args = parser.parse_args()
    dist.init_process_group('gloo')
    if MICRO % dist.get_world_size():
        parser.error(f"{MICRO} micro-batches don't divide among {dist.get_world_size()} ranks")
    torch.manual_seed(42)
    net = UNet()
    for module in (net.down1, net.down2, net.up1, net.up2, net):
        fully_shard(module)
    train(net, args.steps)
    if args.out:
        digits = drawn(net, 16)
        if dist.get_rank() == 0:
            save_image(digits, args.out, nrow=4, normalize=True, value_range=(-1, 1))
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
