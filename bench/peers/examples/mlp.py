"""An MLP on MNIST, sharded over its ranks: torchrun --nproc-per-node N mlp.py [--steps N]"""
import argparse
from itertools import count, islice

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(784, 512)
        self.fc2 = nn.Linear(512, 10)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x), approximate='tanh'))


def batches(batch_size):
    data = datasets.MNIST('data', train=True, transform=transforms.ToTensor())
    loader = DataLoader(data, batch_size=batch_size, sampler=DistributedSampler(data), drop_last=True)
    for epoch in count():
        loader.sampler.set_epoch(epoch)
        yield from loader


def main():
    parser = argparse.ArgumentParser(description='An MLP learns MNIST.')
    parser.add_argument('--steps', type=int, default=1000, help='to train')
    steps = parser.parse_args().steps
    dist.init_process_group('gloo')
    torch.manual_seed(42)
    net = MLP()
    for module in (net.fc1, net.fc2, net):
        fully_shard(module)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1)
    for step, (x, y) in enumerate(islice(batches(128), steps)):
        loss = F.cross_entropy(net(x.flatten(1)), y)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        if dist.get_rank() == 0 and (step % 100 == 0 or step == steps - 1):
            print(f'step {step:4d}  loss {loss.item():.4f}')
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
