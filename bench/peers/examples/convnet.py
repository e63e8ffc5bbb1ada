"""Convolutions and batch norm on MNIST: torchrun --nproc-per-node N convnet.py [--steps N] [--out DIR] [--from DIR]"""
import argparse
from itertools import count

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(32)
        self.fc = nn.Linear(32 * 7 * 7, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.fc(x.flatten(1))


def batches():
    data = datasets.MNIST('data', train=True, transform=transforms.ToTensor())
    loader = DataLoader(data, batch_size=64, sampler=DistributedSampler(data), drop_last=True)
    for epoch in count():
        loader.sampler.set_epoch(epoch)
        yield from loader


@torch.no_grad()
def accuracy(net):
    loader = DataLoader(datasets.MNIST('data', train=False, transform=transforms.ToTensor()), batch_size=500)
    net.eval()
    right = 0
    for _, (x, y) in zip(range(20), loader):
        right += (net(x).argmax(1) == y).sum().item()
    net.train()
    return right / 100


def save(folder, net, opt, step):
    model, optim = get_state_dict(net, opt)
    dcp.save({'model': model, 'optim': optim, 'step': step}, checkpoint_id=folder)


def load(folder, net, opt):
    model, optim = get_state_dict(net, opt)
    state = {'model': model, 'optim': optim, 'step': 0}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(net, opt, model_state_dict=state['model'], optim_state_dict=state['optim'])
    return state['step']


def train(net, opt, begin, args):
    data = batches()
    for step in range(args.stop or args.steps):
        x, y = next(data)
        if step < begin:
            continue
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        for group in opt.param_groups:
            group['lr'] = 4e-3 * (1 - step / args.steps)
        opt.step()
        opt.zero_grad()
        if dist.get_rank() == 0 and (step % 50 == 0 or step == args.steps - 1):
            print(f'step {step:4d}  loss {loss.item():.4f}')


def main():
    parser = argparse.ArgumentParser(description='A convolutional net learns MNIST.')
    parser.add_argument('--steps', type=int, default=300, help='until the learning rate is 0')
    parser.add_argument('--stop', type=int, default=0, help='stop after this many of them')
    parser.add_argument('--out', help='folder to save into')
    parser.add_argument('--from', dest='begin', help='folder to continue from')
    args = parser.parse_args()
    dist.init_process_group('gloo')
    torch.manual_seed(42)
    net = ConvNet()
    for module in (net.conv1, net.conv2, net.fc, net):
        fully_shard(module)
    opt = torch.optim.AdamW(net.parameters(), lr=4e-3, weight_decay=0.01)
    train(net, opt, load(args.begin, net, opt) if args.begin else 0, args)
    if args.out:
        save(args.out, net, opt, args.stop or args.steps)
    right = accuracy(net)
    if dist.get_rank() == 0:
        print(f'{right:.2f} % of the test images')
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
