"""scripts/peers dcp [--build build]: PyTorch's distributed checkpoints read Knap's shards exactly, and merge them.

bench_checkpoint writes the shards of a small model for each layout on 1, 2 and 4 ranks; element i of a tensor holds i.
dcp.load with HuggingFaceStorageReader and consolidate_safetensors_files must give those numbers, and so must the files
that knap-checkpoint merge writes, read by the package safetensors.
"""
import argparse
import os
import subprocess
import sys
import tempfile
import warnings

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

SHAPES = {'wte.weight': (31, 12), 'h.0.bias': (37,), 'h.0.attn.weight': (9, 16), 'conv.weight': (5, 3, 3, 2),
          'half.weight': (16, 3), 'scale': (), 'steps': (5,)}
DTYPES = {'half.weight': torch.bfloat16, 'steps': torch.int64}
INTEGERS = ['steps']    # torch 2.15's consolidate_safetensors_files asks for their torch.finfo, which fails
FLOATS = [name for name in SHAPES if name not in INTEGERS]


def expected():
    return {name: torch.arange(torch.Size(shape).numel()).to(DTYPES.get(name, torch.float32)).reshape(shape)
            for name, shape in SHAPES.items()}


def compare(what, got, without=()):
    want = {name: x for name, x in expected().items() if name not in without}
    wrong = [name for name in want if name not in got or got[name].dtype != want[name].dtype
             or got[name].shape != want[name].shape or not torch.equal(got[name], want[name])]
    wrong += sorted(set(got) - set(want))
    print(f'{"not ok" if wrong else "ok"}: {what}' + (f': {", ".join(wrong)}' if wrong else ''), flush=True)
    return not wrong


def loaded(folder):
    state = {name: torch.full_like(x, -1) for name, x in expected().items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(folder), no_dist=True)
    return state


def folder_of(path):
    merged = {}
    for name in sorted(os.listdir(path)):
        if name.endswith('.safetensors'):
            merged |= load_file(os.path.join(path, name))
    return merged


def main(arguments):
    parser = argparse.ArgumentParser(prog='scripts/peers dcp', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--build', default='build', help='the build folder, with bench/bench_checkpoint')
    options = parser.parse_args(arguments)
    warnings.filterwarnings('ignore', message='torch.distributed is disabled')
    good = True
    for layout in ('flat', 'per_param', 'ragged'):
        for ranks in (1, 2, 4):
            what = f'{layout}, {ranks} ranks'
            with tempfile.TemporaryDirectory() as top:
                folder = {x: os.path.join(top, x) for x in ('shards', 'torch', 'one', 'more')}
                os.mkdir(folder['shards'])
                os.mkdir(folder['torch'])
                subprocess.run([f'{options.build}/bench/bench_checkpoint', '--example', folder['shards'], '--layout', layout,
                                '--ranks', str(ranks)], check=True)
                good &= compare(f'{what}: dcp.load', loaded(folder['shards']))
                consolidate_safetensors_files(folder['shards'], folder['torch'],
                                              fqn_to_index_mapping=dict.fromkeys(FLOATS, 1))
                good &= compare(f'{what}: consolidate_safetensors_files', folder_of(folder['torch']), INTEGERS)
                for out, more in (('one', []), ('more', ['--shard-size', '700B'])):
                    subprocess.run([f'{options.build}/models/knap-checkpoint', 'merge', folder['shards'], '--out', folder[out],
                                    *more], check=True, stdout=subprocess.DEVNULL)
                    good &= compare(f'{what}: knap-checkpoint merge {" ".join(more)}', folder_of(folder[out]))
                    good &= compare(f'{what}: and dcp.load of it', loaded(folder[out]))
    return 0 if good else 1


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
