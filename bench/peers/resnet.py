"""bench/peers/resnet.py: torchvision's residual nets and the paper's for CIFAR, for scripts/peers speed."""
import re

import torch
import torch.nn.functional as F
import torchvision


class Block(torch.nn.Module):
    """Of the nets for CIFAR: the shortcut between stages has no parameters (option A of He et al., arXiv:1512.03385)."""
    def __init__(self, before, channels, stride):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(before, channels, 3, stride, 1, bias=False)
        self.conv2 = torch.nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = torch.nn.BatchNorm2d(channels), torch.nn.BatchNorm2d(channels)
        self.stride, self.more = stride, channels - before

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.more:
            x = F.pad(x[:, :, ::self.stride, ::self.stride], (0, 0, 0, 0, self.more // 2, self.more - self.more // 2))
        return F.relu(y + x)


def cifar(depth):
    layers, before = [torch.nn.Conv2d(3, 16, 3, 1, 1, bias=False), torch.nn.BatchNorm2d(16), torch.nn.ReLU()], 16
    for stage in range(3):
        for i in range((depth - 2) // 6):
            layers.append(Block(before, 16 << stage, 2 if stage and not i else 1))
            before = 16 << stage
    return torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(before, 10))


def net(model, size):
    """The net for images of that size, and the number of its classes."""
    if re.fullmatch('resnet(20|32|44|56|110)', model):
        return cifar(int(model[6:])), 10
    made = getattr(torchvision.models, model)()
    if size < 64:
        made.conv1, made.maxpool = torch.nn.Conv2d(3, 64, 3, 1, 1, bias=False), torch.nn.Identity()
    return made, 1000
