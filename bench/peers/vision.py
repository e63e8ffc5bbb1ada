"""scripts/peers vision: the numbers of tests/models/vision_golden.h, computed by torchvision's ResNets and timm's ViT in f64.

    scripts/peers vision                   prints the header; needs torch, torchvision, timm
    scripts/peers vision > tests/models/vision_golden.h

Weights, buffers and images are functions of names and places (values below; fill in tests/models/vision_golden_test.c). The nets
for CIFAR, which torchvision lacks, are written out here as in the paper. The same models in plain f32 must agree to
1e-4, and in f64 to 5e-5 when their parameters and images are moved by 3e-7: else an element before a relu lies within rounding of 0,
and gradients depend on the side that it falls to. Then another size of the images is to be found."""
import sys

import numpy as np
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

CLASSES, BATCH = 7, 3


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut without parameters (arXiv:1512.03385, 4.2, option A)."""
    def __init__(self, n, out, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(n, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.stride, self.more = stride, out - n

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        x = F.pad(x[:, :, ::self.stride, ::self.stride], (0, 0, 0, 0, self.more // 2, self.more - self.more // 2))
        return F.relu(y + x)


class Cifar(nn.Module):
    def __init__(self, blocks, classes):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        n = 16
        for k in range(3):
            layer = []
            for i in range(blocks):
                layer.append(Block(n, 16 << k, 2 if k and not i else 1))
                n = 16 << k
            setattr(self, f'layer{k + 1}', nn.Sequential(*layer))
        self.fc = nn.Linear(n, classes)

    def forward(self, x):
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.fc(x.mean((2, 3)))


def small_images():
    m = torchvision.models.resnet18(num_classes=CLASSES)
    m.conv1, m.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    return m


# preset, small images, rows, columns, model, names of gradients
CASES = [
    ('resnet18', False, 40, 56, lambda: torchvision.models.resnet18(num_classes=CLASSES),
     ['conv1.weight', 'layer1.0.bn1.weight', 'layer3.0.downsample.0.weight', 'layer4.1.bn2.bias', 'fc.weight']),
    ('resnet50', False, 33, 64, lambda: torchvision.models.resnet50(num_classes=CLASSES),
     ['conv1.weight', 'layer1.0.conv3.weight', 'layer2.0.downsample.1.weight', 'layer4.2.conv2.weight', 'fc.bias']),
    ('resnet18', True, 17, 16, small_images,
     ['conv1.weight', 'layer1.1.conv2.weight', 'layer2.0.conv1.weight', 'layer4.0.bn1.bias', 'fc.weight']),
    ('resnet20', True, 16, 15, lambda: Cifar(3, CLASSES),
     ['conv1.weight', 'layer1.2.conv2.weight', 'layer2.0.conv1.weight', 'layer3.2.bn2.weight', 'fc.weight']),
    ('vit_tiny_patch16_224', False, 32, 32,
     lambda: timm.create_model('vit_tiny_patch16_224', img_size=32, patch_size=8, num_classes=CLASSES),
     ['cls_token', 'pos_embed', 'patch_embed.proj.weight', 'blocks.3.attn.qkv.weight', 'blocks.11.mlp.fc1.bias']),
]
GRADS = 5


def values(name, shape):
    """Element i: bits of i and of the name's hash as a number of mean 0 and variance 2 / fan_in, or small where there is no fan_in,
    plus 1 for the weights of norms and running variances."""
    h = 2166136261
    for c in name.encode():
        h = (h ^ c) * 16777619 % 2 ** 32
    n = int(np.prod(shape))
    u = (np.arange(n, dtype=np.uint64) * 2654435761 + h) % 2 ** 32
    u ^= u >> np.uint64(16)
    u = u * 0x85ebca6b % 2 ** 32
    u ^= u >> np.uint64(13)
    width = 0.4 if len(shape) < 2 else np.sqrt(24 * shape[0] / n)
    w = (u.astype(np.float64) / 2 ** 32 - 0.5) * width
    w = w.reshape(shape) + (len(shape) == 1 and name.endswith(('weight', 'running_var')))
    return torch.from_numpy(w / 4 if 'bn3.' in name else w)    # quieter blocks: 16 of them one after another


def run(case, dtype, noise=None):
    def noisy(t):
        return t if noise is None else t * (1 + 3e-7 * torch.randn(t.shape, generator=noise, dtype=t.dtype))

    rows, columns = case[2:4]
    m = case[4]().to(dtype)
    with torch.no_grad():
        for name, t in list(m.named_parameters()) + list(m.named_buffers()):
            if t.is_floating_point():
                t.copy_(noisy(values(name, tuple(t.shape))))
    x = noisy(values('images', (BATCH, 3, rows, columns))).mul(10).to(dtype)
    y = torch.tensor([(5 * i + 2) % CLASSES for i in range(BATCH)])
    m.eval()
    seen = m(x).flatten().tolist()
    m.train()
    loss = F.cross_entropy(m(x), y)
    loss.backward()
    p = dict(m.named_parameters())
    norms = [p[name].grad.double().norm().item() for name in case[5]]
    moved = sum(b.double().square().sum().item() for name, b in m.named_buffers() if 'running' in name) ** 0.5
    return seen + [loss.item(), moved] + norms


def distance(want, got):
    return max(abs(a - b) / max(1, abs(a)) for a, b in zip(want, got))


def line(v):
    return ', '.join(f'{x:.13g}' for x in v)


def main(args):
    if args:
        sys.exit(__doc__ if args == ['--help'] else 'scripts/peers vision takes no arguments: see scripts/peers vision --help.')
    print(f'''/* tests/models/vision_golden.h: logits, losses, statistics and gradients of residual nets and a
 * vision transformer, computed in f64 by torchvision {torchvision.__version__.split('+')[0]} and timm {timm.__version__} on torch {
    torch.__version__.split('+')[0]}.
 * Written by scripts/peers vision (bench/peers/vision.py). */
#ifndef KNAP_TESTS_VISION_GOLDEN_H
#define KNAP_TESTS_VISION_GOLDEN_H

enum {{ CLASSES = {CLASSES}, BATCH = {BATCH}, GRADS = {GRADS} }};

static const struct {{
    const char *preset;
    bool small_images;
    int rows, columns;
    double logits[BATCH * CLASSES]; /* in evaluation */
    double loss, moved;             /* of one training step; the norm of all running statistics behind it */
    const char *name[GRADS];
    double grad[GRADS]; /* norms of their gradients */
}} golden[] = {{''')
    for case in CASES:
        exact = run(case, torch.float64)
        far = distance(exact, run(case, torch.float32))
        noise = [distance(exact, run(case, torch.float64, torch.Generator().manual_seed(i))) for i in range(4)]
        if not (far < 1e-4 and max(noise) < 5e-5):
            sys.exit(f'{case[0]}: f32 is off by {far:g}, moved inputs by {max(noise):g}')
        n = BATCH * CLASSES
        print(f'''    {{ "{case[0]}", {'true' if case[1] else 'false'}, {case[2]}, {case[3]},
      {{ {line(exact[:n])} }},
      {line(exact[n:n + 2])},
      {{ {', '.join(f'"{name}"' for name in case[5])} }},
      {{ {line(exact[n + 2:])} }} }},''')
        print(case[0], f'f32 is off by {far:.1e}', file=sys.stderr)
    print('};\n\n#endif')
    return 0
