"""A residual net on MNIST: torchrun --nproc-per-node N resnet.py [--steps N]"""
import argparse
from itertools import count, islice

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms

WIDTH, BATCH = 8, 32


class Block(nn.Module):
    def __init__(self, fan_in, fan_out):
        super().__init__()
        stride = 1 if fan_in == fan_out else 2
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(fan_out)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(fan_out)
        self.changes = stride != 1
        if self.changes:
            self.down = nn.Conv2d(fan_in, fan_out, 1, stride=stride, bias=False)
            self.bn_down = nn.BatchNorm2d(fan_out)

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + (self.bn_down(self.down(x)) if self.changes else x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, WIDTH, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(WIDTH)
        widths = [WIDTH, WIDTH, 2 * WIDTH, 4 * WIDTH]
        self.block = nn.ModuleList(Block(a, b) for a, b in zip(widths, widths[1:]))
        self.fc = nn.Linear(4 * WIDTH, 10)

    def forward(self, x):
        x = F.relu(self.bn(self.conv(x)))
        for block in self.block:
            x = block(x)
        return self.fc(x.mean((2, 3)))


def batches():
    data = datasets.MNIST('data', train=True, transform=transforms.ToTensor())
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data), drop_last=True)
    for epoch in count():
        loader.sampler.set_epoch(epoch)
        yield from loader


def main():
    parser = argparse.ArgumentParser(description='A ResNet learns MNIST.')
    parser.add_argument('--steps', type=int, default=300, help='to train')
    steps = parser.parse_args().steps
    dist.init_process_group('gloo')
    torch.manual_seed(42)
    net = ResNet()
    for module in (*net.block, net):
        fully_shard(module)
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    for step, (x, y) in enumerate(islice(batches(), steps)):
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        if dist.get_rank() == 0 and (step % 50 == 0 or step == steps - 1):
            print(f'step {step:4d}  loss {loss.item():.4f}')
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
