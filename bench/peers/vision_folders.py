"""scripts/peers vision-folders: image models in folders, from torchvision and timm to Knap and back, with the same logits.

    scripts/peers vision-folders [--build build]      needs torch, torchvision, timm, safetensors

Models with drawn weights and statistics are written by timm.models.save_for_hf and, as state dictionaries alone, by
safetensors.torch.save_file. Knap's predict reads them, computes the logits of drawn pictures (which timm's transforms prepare for
timm) and exports them; timm.create_model('local-dir:...') and torchvision's load_state_dict(strict=True) open the export. All
logits must agree to 1e-4 of the largest one, or 2e-2 where the file is in bf16."""
import argparse
import json
import os
import subprocess
import sys
import tempfile

import numpy as np
import timm
import torch
import torchvision
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.data import create_transform, resolve_data_config
from timm.models import save_for_hf

# name, arguments of timm.create_model, changes of its pretrained_cfg
CASES = [('resnet18', {}, {}),
         ('resnet18', {'num_classes': 7}, {'input_size': (3, 64, 64), 'crop_pct': 0.875, 'interpolation': 'bilinear'}),
         ('resnet34', {'num_classes': 3, 'in_chans': 1}, {'input_size': (1, 48, 48)}),
         ('resnet50', {'num_classes': 11}, {'crop_mode': 'squash', 'mean': (0.4, 0.5, 0.6), 'std': (0.2, 0.3, 0.25)}),
         ('vit_tiny_patch16_224', {}, {}),
         ('vit_tiny_patch16_224', {'img_size': 32, 'patch_size': 8, 'num_classes': 5, 'depth': 3}, {}),
         ('vit_base_patch16_224', {'img_size': 48, 'embed_dim': 96, 'num_heads': 4, 'depth': 2, 'num_classes': 5}, {})]
SIZES = [(61, 83), (240, 200), (300, 512)]


def draw(model):
    """Statistics and gains that aren't 0 and 1."""
    with torch.no_grad():
        for name, t in model.state_dict().items():
            if name.endswith('running_var') or (t.ndim == 1 and name.endswith('weight')):
                t.uniform_(0.5, 1.5)
            elif t.is_floating_point() and t.ndim == 1:
                t.normal_(0, 0.2)
            elif t.is_floating_point():
                t.mul_(1.5)
    return model.eval()


def predict(build, *args):
    done = subprocess.run([os.path.join(build, 'models', 'predict'), *args], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f'predict {" ".join(args)}: {done.stderr}')


class Check:
    def __init__(self):
        self.bad = 0

    def far(self, what, got, want, bound):
        off = float((got - want).abs().max() / want.abs().max().clamp(min=1))
        self.bad += not off < bound
        print(f'{"ok" if off < bound else "BAD":4} {off:8.1e}  {what}', flush=True)


def logits_of(build, path, pictures, folder, *more):
    out = os.path.join(folder, 'logits.tsv')
    predict(build, '--from', path, '--logits', out, *more, *pictures)
    return torch.tensor([[float(v) for v in line.split('\t')] for line in open(out)])


def seen_by(model, pictures):
    transform = create_transform(**resolve_data_config({}, model=model))
    mode = 'L' if model.pretrained_cfg['input_size'][0] == 1 else 'RGB'
    with torch.no_grad():
        return torch.stack([model(transform(Image.open(p).convert(mode))[None])[0] for p in pictures])


def draw_pictures(folder):
    rng = np.random.default_rng(5)
    for i, (rows, columns) in enumerate(SIZES):
        coarse = rng.integers(0, 256, (rows // 8 + 1, columns // 8 + 1, 3)).astype(np.uint8)
        Image.fromarray(coarse).resize((columns, rows), Image.BICUBIC).save(f'{folder}/{i}.png')
    return [f'{folder}/{i}.png' for i in range(len(SIZES))]


def both_ways(build, case, folder, pictures, check):
    name, args, changes = case
    model = draw(timm.create_model(name, **args))
    model.pretrained_cfg.update(changes)
    given, back, half = (os.path.join(folder, d) for d in ('given', 'back', 'half'))
    save_for_hf(model, given, model_config={'label_names': [f'label {i}' for i in range(model.num_classes)]}, safe_serialization=True)
    model = timm.create_model(f'local-dir:{given}', pretrained=True).eval()
    want = seen_by(model, pictures)
    title = f'{name} {args or ""} {changes or ""}'
    check.far(f'{title}: timm\'s folder in Knap', logits_of(build, given, pictures, folder), want, 1e-4)
    predict(build, '--from', given, '--export', back)
    again = timm.create_model(f'local-dir:{back}', pretrained=True).eval()
    check.far(f'{title}: Knap\'s folder in timm', seen_by(again, pictures), want, 1e-4)
    check.far(f'{title}: Knap\'s folder in Knap', logits_of(build, back, pictures, folder), want, 1e-4)
    if json.load(open(f'{back}/config.json'))['label_names'][2] != 'label 2':
        sys.exit(f'{name}: the labels are lost')
    predict(build, '--from', given, '--export', half, '--dtype', 'bf16')
    check.far(f'{title}: in bf16', logits_of(build, half, pictures, folder), want, 2e-2)


def state_dictionary(build, name, classes, folder, pictures, check):
    model = draw(getattr(torchvision.models, name)(num_classes=classes))
    path, back = os.path.join(folder, 'state.safetensors'), os.path.join(folder, 'back')
    save_file(model.state_dict(), path)
    transform = torchvision.models.get_model_weights(name).IMAGENET1K_V1.transforms(antialias=True)
    with torch.no_grad():
        want = torch.stack([model(transform(Image.open(p))[None])[0] for p in pictures])
    check.far(f'{name}: torchvision\'s state dictionary in Knap', logits_of(build, path, pictures, folder, '--model', name), want, 1e-4)
    predict(build, '--from', path, '--model', name, '--export', back)
    other = getattr(torchvision.models, name)(num_classes=classes)
    other.load_state_dict(load_file(f'{back}/model.safetensors'), strict=True)
    same = all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values()))
    check.far(f'{name}: Knap\'s folder in torchvision, strict', torch.tensor([float(same)]), torch.tensor([1.0]), 1e-4)


def main(args):
    p = argparse.ArgumentParser(prog='scripts/peers vision-folders', description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--build', default='build', help='build folder')
    build = p.parse_args(args).build
    torch.manual_seed(1)
    check = Check()
    with tempfile.TemporaryDirectory() as folder:
        pictures = draw_pictures(folder)
        for i, case in enumerate(CASES):
            os.mkdir(f'{folder}/{i}')
            both_ways(build, case, f'{folder}/{i}', pictures, check)
        for name, classes in ('resnet18', 1000), ('resnet50', 13):
            os.mkdir(f'{folder}/{name}')
            state_dictionary(build, name, classes, f'{folder}/{name}', pictures, check)
    return 1 if check.bad else 0
