"""bench/peers/side_by_side.py: scripts/peers examples: the programs of examples/ beside PyTorch's of bench/peers/examples.

Both begin with the same parameters, see the same batches and draws, and compute in f64: in_f64.h makes the C program
write them to a file, and the functions here give them to the PyTorch program in place of its own.
"""
import argparse
import ast
import importlib.util
import io
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import tokenize
import types

import numpy
import torch
import torch.nn as nn

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, '..', '..')
BOUND = 1e-9
STEPS = 10
TEXT = os.path.join(ROOT, 'docs', 'fsdp.md')    # any text of some length
# Example: its arguments besides --steps. Each C program lies in examples/, each PyTorch program in bench/peers/examples/.
EXAMPLES = {
    'mlp': [], 'convnet': [], 'resnet': [], 'vit': [], 'spiral': [], 'gpt': ['--tokens', '1', '--data', TEXT],
    'llama': ['--data', TEXT], 'dlrm': [], 'lora': [], 'clip': [], 'experts': [], 'gan': [], 'diffusion': [], 'function': [], 'optimizer': [], 'pinn': [], 'maml': [],
}
NUMPY = {'f32': 'f4', 'f64': 'f8', 'i64': 'i8', 'i32': 'i4'}


class Wrong(Exception):
    """The two programs differ; the message says in which way."""


class Ended(Exception):
    """The PyTorch program begins an evaluation, where the C program has ended."""


# ---- lines --------------------------------------------------------------------------------------


def lines_of_c(source):
    """Lines that hold something besides comments."""
    def blank(m):
        return m.group(0) if m.group(0)[0] == '"' else '\n' * m.group(0).count('\n')
    return sum(1 for line in re.sub(r'"(?:\\.|[^"\\])*"|/\*.*?\*/|//[^\n]*', blank, source, flags=re.S).split('\n') if line.strip())


def lines_of_python(source):
    """Lines that hold something besides comments and docstrings."""
    lines = set()
    for t in tokenize.generate_tokens(io.StringIO(source).readline):
        if t.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
            lines.update(range(t.start[0], t.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def read(*path):
    with open(os.path.join(ROOT, *path), encoding='utf-8') as f:
        return f.read()


# ---- the C program's tape -----------------------------------------------------------------------


def run_in_c(name, build, folder):
    """Compiles the example in f64, runs it, and reads what it wrote: [(kind, name, tensor)]."""
    program, path = os.path.join(folder, name), os.path.join(folder, name + '.tape')
    subprocess.run(['cc', '-std=gnu17', '-O1', '-w', '-I', ROOT, '-I', build, '-include', os.path.join(HERE, 'in_f64.h'),
                    os.path.join(ROOT, 'examples', name + '.c'), '-o', program, '-L', build, '-Wl,-rpath,' + os.path.abspath(build),
                    '-lknap', '-lm'], check=True)
    done = subprocess.run([program, '--steps', str(STEPS), *EXAMPLES[name]], env={**os.environ, 'KNAP_TAPE': path},
                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise Wrong(f'the C program failed: {done.stderr.strip()}')
    tape = []
    with open(path, 'rb') as f:
        while line := f.readline().decode().split():
            kind, what, dtype, *sizes = line
            shape = [int(n) for n in sizes]
            values = numpy.fromfile(f, NUMPY[dtype], int(numpy.prod(shape)))
            tape.append((kind, what, torch.from_numpy(values.reshape(shape))))
    return tape


class Tape:
    """What the C program wrote, as the PyTorch program asks for it."""

    def __init__(self, tape):
        self.losses = [float(t) for kind, _, t in tape if kind == 'loss']
        self.feeds = [row for row in tape if row[0] in ('batch', 'draw')]
        self.models = []
        for kind, name, t in tape:
            if kind == 'model':
                self.models.append({})
            elif kind == 'param':
                self.models[-1][plain(name)] = t
        self.at, self.found, self.begun = 0, [], set()

    def next(self, kind, name):
        if self.at == len(self.feeds):
            raise Wrong(f'PyTorch asks for a {name} of which the C program had no more')
        row = self.feeds[self.at]
        if row[:2] != (kind, name):
            raise Wrong(f'PyTorch asks for {kind} {name}, the C program had {row[0]} {row[1]} as number {self.at}')
        self.at += 1
        return row[2]

    def begin(self, module):
        """Gives module the C program's first values, where it has the names of one of its models."""
        names = frozenset(plain(n) for n, _ in module.named_parameters())
        if names in self.begun:
            return
        self.begun.add(names)
        model = next((m for m in self.models if m.keys() == names), None)
        if model is None:
            raise Wrong(f'no model of the C program has the parameters {sorted(names)}: {[sorted(m) for m in self.models]}')
        with torch.no_grad():
            for name, p in module.named_parameters():
                local = p.to_local() if hasattr(p, 'to_local') else p
                if local.shape != model[plain(name)].shape:
                    raise Wrong(f'{name} is {list(local.shape)}, in the C program {list(model[plain(name)].shape)}')
                local.copy_(model[plain(name)])


def plain(name):
    """block.0.fc and block0.fc are one name."""
    return re.sub(r'\.(\d+)\b', r'\1', name)


# ---- the PyTorch program ------------------------------------------------------------------------


def stand_ins(tape):
    """Modules and functions of PyTorch that the tape replaces, as (holder, name, value)."""
    calls = [0]
    called, backward = nn.Module.__call__, torch.Tensor.backward

    def call(self, *args, **kwargs):
        if not calls[0] and next(self.parameters(), None) is not None:
            tape.begin(self)
        calls[0] += 1
        try:
            return called(self, *args, **kwargs)
        finally:
            calls[0] -= 1

    def noted_backward(self, *args, **kwargs):
        if self.dim() == 0:
            tape.found.append(self.item())
        return backward(self, *args, **kwargs)

    class Batches:
        def __init__(self, data, **options):
            self.images = getattr(data, 'images', False)
            self.sampler = types.SimpleNamespace(set_epoch=lambda epoch: None)

        def __iter__(self):
            while True:
                x, y = tape.next('batch', 'x'), tape.next('batch', 'y')
                yield (x.view(-1, 1, 28, 28) if self.images else x), y

    class Images:
        images = True

        def __init__(self, *args, **kwargs):
            pass

        def __len__(self):
            return 60000

    def draw(name):
        def drawn(*args, **kwargs):
            t = tape.next('draw', name)
            shape = kwargs.get('size') or next((a for a in args if isinstance(a, (tuple, list, torch.Size))), None) or args
            if tuple(shape) != tuple(t.shape):
                raise Wrong(f'torch.{name} of {tuple(shape)}, in the C program of {tuple(t.shape)}')
            return t
        return drawn

    vision = {n: types.ModuleType(n) for n in ('torchvision', 'torchvision.datasets', 'torchvision.transforms', 'torchvision.utils')}
    vision['torchvision.datasets'].MNIST = Images
    vision['torchvision.transforms'].ToTensor = lambda: None
    vision['torchvision.utils'].save_image = None
    for n, m in list(vision.items())[1:]:
        setattr(vision['torchvision'], n.split('.')[1], m)
    sys.modules.update(vision)
    def ended(self):
        raise Ended
    yield nn.Module, '__call__', call
    yield nn.Module, 'eval', ended
    yield torch.Tensor, 'backward', noted_backward
    yield torch.utils.data, 'DataLoader', Batches
    for name in ('rand', 'randn', 'randint'):
        yield torch, name, draw(name)
    yield torch, 'randn_like', lambda x: draw('randn')(tuple(x.shape))


def run_in_torch(name, tape):
    """Runs the PyTorch program on the tape; its losses."""
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    os.environ.update(RANK='0', WORLD_SIZE='1', LOCAL_RANK='0', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
    path = os.path.join(HERE, 'examples', name + '.py')
    before, arguments = [], sys.argv
    try:
        for holder, what, value in stand_ins(tape):
            before.append((holder, what, getattr(holder, what)))
            setattr(holder, what, value)
        sys.argv = [path, '--steps', str(STEPS), *EXAMPLES[name]]
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.main()
    except Ended:
        pass
    finally:
        sys.argv = arguments
        for holder, what, value in before:
            setattr(holder, what, value)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    # Where it divides the losses of micro-batches by their number, Knap's step does.
    return [loss * getattr(module, 'MICRO', 1) for loss in tape.found]


def compare(name, build, folder):
    """The largest relative difference between the losses, and their number."""
    tape = Tape(run_in_c(name, build, folder))
    found = run_in_torch(name, tape)
    if len(found) != len(tape.losses):
        raise Wrong(f'{len(found)} losses in PyTorch, {len(tape.losses)} in the C program')
    return max(abs(a - b) / abs(b) for a, b in zip(found, tape.losses)), len(found)


# ---- the command --------------------------------------------------------------------------------


def main(arguments):
    p = argparse.ArgumentParser(prog='scripts/peers examples', description=__doc__)
    p.add_argument('--build', default='build', help='folder of libknap.so (build)')
    p.add_argument('--only', default='', help='examples whose name contains this')
    p.add_argument('--lines', action='store_true', help='only counts lines, and runs nothing')
    a = p.parse_args(arguments)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    print(f'{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}; the first {STEPS} steps in f64\n')
    print('| example | lines of C | of PyTorch | ratio | losses | largest relative difference |\n|---|---|---|---|---|---|')
    bad = 0
    for name in (n for n in EXAMPLES if a.only in n):
        c, python = lines_of_c(read('examples', name + '.c')), lines_of_python(read('bench', 'peers', 'examples', name + '.py'))
        row, told = f'| {name} | {c} | {python} | {c / python:.2f} |', ''
        if not a.lines:
            try:
                with tempfile.TemporaryDirectory() as folder, open(os.devnull, 'w') as nowhere:
                    out, sys.stdout = sys.stdout, nowhere
                    try:
                        error, count = compare(name, a.build, folder)
                    finally:
                        sys.stdout = out
                row += f' {count} | {error:.1e} |'
                told = '' if error <= BOUND else f'{name}: the losses differ by more than {BOUND:g}'
            except Exception as wrong:    # whatever an example raises: the others run all the same
                told = f'{name}: {wrong}' if isinstance(wrong, Wrong) else f'{name}: {type(wrong).__name__}: {wrong}'
                row += ' | |'
        print(row, flush=True)
        if told:
            print(told, file=sys.stderr)
            bad += 1
    return 1 if bad else 0
