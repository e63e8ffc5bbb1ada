"""scripts/peers images [--build build] [--rounds 5] [--images 400]: images a second on one core (of processor
time), Knap's loaders beside PIL and torchvision, in turns.

Photographs are imitated: JPEG files of 500 x 375 pixels, smooth shapes and noise, at quality 85, made anew in a folder of
its own. They get RandomResizedCrop(224), RandomHorizontalFlip, ToTensor, Normalize; images of 32 x 32 in memory get
RandomCrop(32, padding=4) instead. Neither side has workers.
"""
import argparse
import os
import random
import statistics
import subprocess
import tempfile
import time

import numpy
import torch
from PIL import Image
from torchvision import transforms

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def photograph(rng):
    y, x = numpy.mgrid[0:375, 0:500].astype(numpy.float32)
    image = numpy.zeros((375, 500, 3), numpy.float32)
    for _ in range(12):
        a, b, phase = rng.uniform(-0.08, 0.08), rng.uniform(-0.08, 0.08), rng.uniform(0, 6.3)
        image += numpy.sin(a * x + b * y + phase)[..., None] * rng.uniform(5, 25, 3)
    image += rng.normal(0, 6, image.shape)
    return Image.fromarray(numpy.clip(image + 128, 0, 255).astype(numpy.uint8))


def make_folder(folder, count):
    rng = numpy.random.default_rng(1)
    for i in range(count):
        os.makedirs(f'{folder}/class{i % 2}', exist_ok=True)
        photograph(rng).save(f'{folder}/class{i % 2}/{i}.jpg', quality=85)


def knap(build, data, split, images):
    command = [f'{build}/bench/bench_images', data] + ([split] if split else []) + ['--images', str(images)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0])


def rate(samples, transform, images, batch=50):
    rest = [transforms.RandomHorizontalFlip(), transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    change = transforms.Compose([transform] + rest)
    begin = time.process_time()
    for i in range(0, images, batch):
        torch.stack([change(samples(random.randrange(1 << 30))) for _ in range(batch)])
    return images / (time.process_time() - begin)


def main(args):
    parser = argparse.ArgumentParser(prog='scripts/peers images', description=__doc__)
    parser.add_argument('--build', default='build')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--images', type=int, default=400)
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    small = [Image.fromarray(numpy.random.default_rng(i).integers(0, 256, (32, 32, 3), dtype=numpy.uint8)) for i in range(500)]
    with tempfile.TemporaryDirectory() as folder:
        make_folder(folder, 60)
        files = [os.path.join(d, f) for d, _, names in os.walk(folder) for f in names]
        cifar = f'{folder}/cifar'
        os.makedirs(cifar)
        for i in range(5):
            with open(f'{cifar}/data_batch_{i + 1}.bin', 'wb') as out:
                for image in small[100 * i:100 * (i + 1)]:
                    out.write(b'\0' + numpy.asarray(image).transpose(2, 0, 1).tobytes())
        photographs = f'{folder}/photographs'
        os.makedirs(photographs)
        for name in ('class0', 'class1'):
            os.rename(f'{folder}/{name}', f'{photographs}/{name}')
        files = [f.replace(folder, photographs, 1) for f in files]
        rows = {'JPEG 500 x 375 to 224': (lambda: knap(options.build, photographs, None, options.images),
                                          lambda: rate(lambda i: Image.open(files[i % len(files)]).convert('RGB'),
                                                       transforms.RandomResizedCrop(224), options.images)),
                '32 x 32 in memory': (lambda: knap(options.build, cifar, 'train', 40 * options.images),
                                      lambda: rate(lambda i: small[i % 500], transforms.RandomCrop(32, padding=4),
                                                   10 * options.images))}
        print('images/s a core            Knap  torchvision  ratio')
        for name, (ours, theirs) in rows.items():
            pairs = [(ours(), theirs()) for _ in range(options.rounds)]
            a, b = (statistics.median(p[k] for p in pairs) for k in (0, 1))
            print(f'{name:24} {a:7.0f} {b:12.0f} {statistics.median(x / y for x, y in pairs):6.2f}')
    return 0
