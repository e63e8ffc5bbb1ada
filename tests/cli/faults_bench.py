"""tests/cli/faults_bench.py: the runs of tests/cli/faults.py, their folders, and the programs under test."""
import glob
import hashlib
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import zlib

SECONDS = 300       # of a run; it is hung after that


class Run:
    """A finished command: its exit status (negative: the signal), its output; hung: it had to be killed."""

    def __init__(self, command, env, cwd):
        whole = dict(os.environ, OMP_NUM_THREADS='1', **{k: str(v) for k, v in env.items()})
        with subprocess.Popen(command, env=whole, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, start_new_session=True) as p:
            self.hung = False
            try:
                self.output = p.communicate(timeout=SECONDS)[0].decode(errors='replace')
            except subprocess.TimeoutExpired:
                self.hung = True
                os.killpg(p.pid, signal.SIGKILL)
                self.output = p.communicate()[0].decode(errors='replace')
            self.status = p.returncode

    def fault(self, may_die):
        """What is wrong with the way in which it ended; None: nothing."""
        if self.hung:
            return f'it hangs (ended after {SECONDS} s)'
        if 'closed twice' in self.output:
            return 'it closes a descriptor twice'
        if may_die and self.status in (-signal.SIGKILL, 128 + signal.SIGKILL):
            return None
        if self.status < 0 or self.status >= 126:
            return f'it crashes (status {self.status})'
        if self.status > 0 and not re.search(r'\w+: \S.{14,}', self.output):
            return f'it fails (status {self.status}) without a sentence'
        return None


class Check:
    """TAP lines, and the count of the cases that failed."""

    def __init__(self):
        self.cases = self.failed = 0

    def __call__(self, name, fault, output=''):
        self.cases += 1
        self.failed += fault is not None
        print(f'{"not ok" if fault else "ok"} {self.cases} - {name}{": " + fault if fault else ""}', flush=True)
        for line in output.splitlines()[-8:] if fault else []:
            print('#   ' + line, flush=True)


class Folder:
    """A run's folder: checkpoints in folders step-N (state/checkpoint.h)."""

    @staticmethod
    def read_state(at):
        """The number of the save and the step that a checkpoint's state tells; None: it isn't whole."""
        try:
            with open(os.path.join(at, 'state.json'), encoding='utf-8') as f:
                state = json.load(f)
            return state['number'], state['step']
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @classmethod
    def newest(cls, at):
        """The step and the folder of the newest checkpoint that has its state; (None, None) without one. A folder
        step-N.saving that has it counts: the next run renames it."""
        found = [(cls.read_state(os.path.join(at, name)), os.path.join(at, name))
                 for name in (os.listdir(at) if os.path.isdir(at) else []) if re.fullmatch(r'step-[0-9]+(\.saving)?', name)]
        state, path = max((f for f in found if f[0]), default=((None, None), None))
        return state[1], path

    @classmethod
    def step(cls, at):
        return cls.newest(at)[0]

    @staticmethod
    def wait_for_lock(at):
        """Until nobody holds it: a killed process closes its output before its other files."""
        path = os.path.join(at, '.lock')
        if os.path.exists(path):
            subprocess.run(['flock', path, 'true'], timeout=SECONDS, check=True)

    @staticmethod
    def leftovers(at):
        return [os.path.join(folder, n) for folder, folders, names in os.walk(at) for n in names + folders
                if re.search(r'\.(new|tmp|saving|old|removing)', n)]

    @classmethod
    def bits(cls, at):
        """A sum of all tensors of the newest checkpoint, without the save's random name."""
        h = hashlib.sha256()
        for path in sorted(glob.glob(os.path.join(cls.newest(at)[1], '*', '*.safetensors'))):
            with open(path, 'rb') as f:
                header = json.loads(f.read(int.from_bytes(f.read(8), 'little')))
                header.pop('__metadata__', None)
                h.update(os.path.basename(path).encode() + json.dumps(header, sort_keys=True).encode() + f.read())
        return h.hexdigest()


def listing(at):
    """All files below a folder with their contents."""
    out = {}
    for folder, _, names in os.walk(at):
        for n in names:
            with open(os.path.join(folder, n), 'rb') as f:
                out[os.path.relpath(os.path.join(folder, n), at)] = hashlib.sha256(f.read()).hexdigest()
    return out


def png(side, grey):
    def chunk(kind, data):
        return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
    return (b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', struct.pack('>IIBBBBB', side, side, 8, 0, 0, 0, 0)) +
            chunk(b'IDAT', zlib.compress((b'\0' + bytes([grey]) * side) * side)) + chunk(b'IEND', b''))


class Bench:
    """The programs, a text, pictures and sound checkpoints of each trainer, in a temporary folder."""

    def __init__(self, build, at):
        self.build, self.at = build, at
        os.makedirs(at, exist_ok=True)
        self.program = lambda n: os.path.join(build, 'models', n)
        self.shim = lambda n: os.path.join(build, 'tests', f'lib{n}.so')
        self.place = lambda n: os.path.join(at, n)
        self.text, self.images, self.work = self.place('text'), self.place('images'), self.place('w')
        with open(self.text, 'w', encoding='utf-8') as f:
            f.write('the quick brown fox jumps over the lazy dog\n' * 200)
        for part in ('train', 'test'):
            for c in ('cat', 'dog'):
                os.makedirs(os.path.join(self.images, part, c))
                for i in range(2):
                    with open(os.path.join(self.images, part, c, f'{i}.png'), 'wb') as f:
                        f.write(png(8 + i, 40 * i))
        self.tiny = [self.program('train_gpt'), '--data', self.text, '--layers', '1', '--heads', '2', '--embd', '16',
                     '--ctx', '8', '--batch', '2', '--threads', '1', '--eval-every', '0']
        self.good, self.net = self.place('good'), self.place('net')
        self.must(self.tiny + ['--steps', '9', '--stop-after', '2', '--out', self.good])
        self.must(self.train_resnet(self.net))
        self.exported = self.export(self.net)

    def make(self, name, command):
        """A folder that a command makes, once. """
        at = self.place(name)
        if not os.path.exists(at):
            self.must(command(at))
        return at

    # Sound folders: with steps 1 and 2; with step 2, and step 1 as the best; of another run; merged in parts; of
    # train_resnet at step 1, and of another model.

    @property
    def two(self):
        return self.make('two', lambda at: self.tiny + ['--steps', '9', '--stop-after', '2', '--save-every', '1', '--out', at])

    @property
    def kept(self):
        return self.make('kept', lambda at: self.tiny[:-1] + ['1', '--steps', '9', '--stop-after', '2', '--lr', '9', '--warmup', '0',
                                                              '--eval-steps', '2', '--keep', '1', '--keep-best', '--out', at])

    @property
    def other(self):
        return self.make('other', lambda at: self.tiny + ['--seed', '7', '--steps', '9', '--stop-after', '3', '--save-every', '1',
                                                          '--out', at])

    @property
    def parts(self):
        return self.make('parts', lambda at: [self.program('knap-checkpoint'), 'merge', self.good, '--out', at,
                                              '--shard-size', '5KB'])

    @property
    def gguf(self):
        return self.make('gguf', lambda at: self.generate(self.good)[:3] + ['--threads', '1', '--export', at, '--format', 'gguf'])

    @property
    def first_net(self):
        return self.make('first-net', lambda at: self.train_resnet(at) + ['--stop-after', '1'])

    @property
    def other_net(self):
        return self.make('other-net', lambda at: self.train_resnet(at, 'resnet32'))

    def train_resnet(self, at, model='resnet20'):
        return [self.program('train_resnet'), '--data', self.images, '--model', model, '--image', '8', '--augment',
                'resized', '--batch', '2', '--epochs', '1', '--threads', '1', '--out', at, '--overwrite', '--keep-best']

    def export(self, net):
        return self.make('exported', lambda at: [self.program('predict'), '--from', net, '--threads', '1', '--export', at])

    def predict(self, at):
        return [self.program('predict'), '--from', at, '--threads', '1', os.path.join(self.images, 'test', 'cat', '0.png')]

    def generate(self, at):
        return [self.program('generate'), '--from', at, '--tokens', '20', '--threads', '1']

    def resume(self, at, *more):
        return [self.program('train_gpt'), '--resume', at, '--threads', '1', *more]

    def run(self, command, env=None):
        return Run(command, env or {}, self.at)

    def must(self, command):
        r = self.run(command)
        if r.status != 0:
            sys.exit(f'{" ".join(command)}\n{r.output}')
        return r.output

    def fresh(self, start=None):
        """A copy of a folder (good) to work in. """
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(start or self.good, self.work, symlinks=True)

    def bits_at(self, at, step, *more):
        """The bits of the run after so many steps, gone on from a copy of the folder."""
        copy = at + '.copy'
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(at, copy, symlinks=True)
        self.must(self.resume(copy, '--stop-after', str(step), *more))
        bits = Folder.bits(copy)
        shutil.rmtree(copy)
        return bits
