"""bench/peers/nanochat.py: scripts/peers nanochat: examples/nanochat.c beside the original (github.com/karpathy/nanochat).

    scripts/peers nanochat --original DIR         the losses of both in f64, from the same weights and batches
    scripts/peers nanochat --original DIR --minutes 13 --data TEXT.tokens --depth 4 --steps 400
                                                  both train side by side, so many minutes at most

DIR is a checkout of nanochat, whose model, optimizer and evaluation run as they are; the loop here has the formulas of
its scripts/base_train.py. Both see the same windows (kn_text_batch) of the same tokens. The time of each begins after its
first step, when PyTorch has compiled, and stands still in evaluations.
"""
import argparse
import ctypes
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time

import torch

import side_by_side

BOUND = 1e-9
# Two micro-batches a step, rows longer than the short window, and a vocabulary that is padded.
SMALL = ['--depth', '2', '--head-dim', '32', '--ctx', '160', '--batch', '1', '--total-batch', '320', '--windows', 'SL',
         '--warmup', '2', '--eval-every', '0', '--data', side_by_side.TEXT]
EPS = 2.0 ** -23


# ---- the original -------------------------------------------------------------------------------


def original(folder, dtype):
    """Its modules gpt, common, loss_eval, with computation in dtype."""
    sys.modules.pop('nanochat', None)    # this file
    sys.path.insert(0, folder)
    from nanochat import common
    common.COMPUTE_DTYPE = dtype
    from nanochat import gpt, loss_eval
    return gpt, common, loss_eval


def model_of(gpt, s, vocab):
    dim = -(-s.depth * 64 // s.head_dim) * s.head_dim
    heads = dim // s.head_dim
    config = gpt.GPTConfig(sequence_len=s.ctx, vocab_size=vocab, n_layer=s.depth, n_head=heads, n_kv_head=heads, n_embd=dim,
                           window_pattern=s.windows)
    with torch.device('meta'):
        return gpt.GPT(config)


def begin(model, values, s):
    """Gives model the C program's first values. It turns queries and keys the other way round than Knap: the same with the
    halves of each head exchanged."""
    theirs = {'smear_gate.weight': 'smear.gate.weight', 'smear_lambda': 'smear.lambda', 'backout_lambda': 'smear.backout'}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in ('resid_lambdas', 'x0_lambdas'):
                value = torch.cat([values[f'{name}.{i}'] for i in range(s.depth)])
            else:
                value = values[theirs.get(name, name)]
            if name.endswith(('c_q.weight', 'c_k.weight')):
                value = value.view(-1, 2, s.head_dim // 2, value.shape[1]).flip(1).reshape(value.shape)
            if value.shape != p.shape:
                raise side_by_side.Wrong(f'{name} is {list(p.shape)}, in the C program {list(value.shape)}')
            p.copy_(value)


def train(gpt, model, s, vocab, batches, after):
    """The loop of base_train.py. batches() gives x, y of a micro-batch; after(step, losses) comes after each step, and
    before the first with losses None."""
    B_REF = 2 ** 19
    def scaling(m):
        counts = m.num_scaling_params()
        return counts['transformer_matrices'] + counts['lm_head']
    twelve = scaling(model_of(gpt, argparse.Namespace(**{**vars(s), 'depth': 12}), vocab))
    scale = math.sqrt(s.total_batch / B_REF)
    decay = 0.28 * scale * twelve / scaling(model)
    optimizer = model.setup_optimizer(unembedding_lr=0.008 * scale, embedding_lr=0.3 * scale, scalar_lr=0.5 * scale,
                                      matrix_lr=0.02 * scale, weight_decay=decay)
    for name, value in vars(optimizer).items():    # rates and factors in the dtype of the comparison
        if torch.is_tensor(value):
            setattr(optimizer, name, value.to(torch.get_default_dtype()))
    compiled = torch.compile(model, dynamic=False)
    micro = s.total_batch // (s.batch * s.ctx)
    down = round(0.65 * s.steps)
    after(-1, None, compiled)
    for step in range(s.steps):
        losses = []
        for _ in range(micro):
            loss = compiled(*batches())
            losses.append(loss.item())
            (loss / micro).backward()
        left = min(1, (s.steps - step) / down)
        rate = (step + 1) / s.warmup if step < s.warmup else left + (1 - left) * 0.05
        momentum = 0.85 + 0.12 * step / 400 if step < 400 else 0.90 + 0.07 * left
        for group in optimizer.param_groups:
            group['lr'] = group['initial_lr'] * rate
            if group['kind'] == 'muon':
                group['momentum'] = momentum
                group['weight_decay'] = decay * 0.5 * (1 + math.cos(math.pi * step / s.steps))
        optimizer.step()
        model.zero_grad(set_to_none=True)
        after(step, losses, compiled)


def settings(arguments):
    """The C program's options that the original needs, from its command line."""
    p = argparse.ArgumentParser()
    for name, value in (('depth', 6), ('head-dim', 64), ('ctx', 512), ('batch', 32), ('total-batch', 16384), ('steps', 5000),
                        ('warmup', 40), ('eval-every', 100), ('eval-tokens', 524288)):
        p.add_argument('--' + name, type=int, default=value)
    p.add_argument('--windows', default='L')
    p.add_argument('--data')
    return p.parse_args(arguments)


# ---- losses in f64 ------------------------------------------------------------------------------


def tape_of(build, arguments):
    """What the C program writes in f64 up to its first evaluation, and its parameters."""
    side_by_side.EXAMPLES['nanochat'] = arguments
    with tempfile.TemporaryDirectory() as folder:
        rows = side_by_side.run_in_c('nanochat', build, folder)
    return rows, {name: value for kind, name, value in rows if kind == 'param'}


def compare(a):
    """The largest relative difference between the losses."""
    os.environ['TORCHDYNAMO_DISABLE'] = '1'
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double    # what it does in f32 beside narrower computation
    gpt, _, _ = original(a.original, torch.float64)
    gpt.norm = lambda x: torch.nn.functional.rms_norm(x, (x.size(-1),), eps=EPS)    # not the eps of f64
    arange = torch.arange
    rows, values = tape_of(a.build, SMALL)
    s = settings([*SMALL, '--steps', str(side_by_side.STEPS)])
    feeds = iter([value for kind, _, value in rows if kind == 'batch'])
    expected = [float(value) for kind, _, value in rows if kind == 'loss']
    with open(side_by_side.TEXT, encoding='utf8') as f:
        vocab = len(set(f.read()))
    model = model_of(gpt, s, vocab)
    model.to_empty(device='cpu')
    torch.arange = lambda *x, **o: arange(*x, **{**o, 'dtype': torch.float64 if o.get('dtype') == torch.float32 else o.get('dtype')})
    model.init_weights()    # rotary angles
    torch.arange = arange
    begin(model, values, s)
    found = []
    train(gpt, model, s, vocab, lambda: (next(feeds), next(feeds)), lambda step, losses, _: found.extend(losses or []))
    if len(found) != len(expected):
        raise side_by_side.Wrong(f'{len(found)} losses in PyTorch, {len(expected)} in the C program')
    error = max(abs(x - y) / y for x, y in zip(found, expected))
    print(f'losses of {s.steps} steps of {s.total_batch // (s.batch * s.ctx)} micro-batches in f64: from {expected[0]:.6f} to '
          f'{expected[-1]:.6f}, largest relative difference {error:.1e}')
    return error


# ---- training side by side ----------------------------------------------------------------------


def child(folder, build, weights, arguments):
    """The original's run, in a process of its own: the lines of the C program."""
    torch.set_num_threads(1)
    gpt, _, loss_eval = original(folder, torch.float32)
    s = settings(arguments)
    library = ctypes.CDLL(os.path.abspath(os.path.join(build, 'libknap.so')))
    library.kn_text_map.restype = ctypes.c_void_p
    library.kn_text_batch.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64] + [ctypes.c_int64] * 3 + [ctypes.c_void_p] * 2
    tokens = library.kn_text_map(s.data.encode())
    with open(s.data + '.json', encoding='utf8') as f:
        ids = json.load(f)
    special = {t['id'] for t in ids.get('added_tokens', []) if t.get('special')}    # they stand for no text
    ids = {**ids['model']['vocab'], **{t['content']: t['id'] for t in ids.get('added_tokens', [])}}
    token_bytes = torch.zeros(len(ids), dtype=torch.int64)
    for token, i in ids.items():
        token_bytes[i] = 0 if i in special else len(token)    # byte-level: a character for each byte

    def windows(split):
        first = 0
        while True:
            x, y = torch.empty(2, s.batch, s.ctx, dtype=torch.int64)
            if not library.kn_text_batch(tokens, split, 0, first, s.batch, s.ctx, x.data_ptr(), y.data_ptr()):
                raise SystemExit('scripts/peers nanochat: kn_text_batch failed')
            first += s.batch
            yield x, y

    model = model_of(gpt, s, len(ids))
    model.to_empty(device='cpu')
    model.init_weights()
    begin(model, torch.load(weights), s)

    def after(step, losses, compiled):
        if losses is not None:
            print(f'step {step:4d}  loss {losses[0]:.4f}', flush=True)
        if (step + 1) % s.eval_every == 0 or step + 1 == s.steps:
            compiled.eval()
            bits = loss_eval.evaluate_bpb(compiled, windows(1), s.eval_tokens // (s.batch * s.ctx), token_bytes)
            compiled.train()
            print(f'eval {step + 1:4d}  bits per byte {bits:.5f}', flush=True)
    train_windows = windows(0)
    train(gpt, model, s, len(ids), lambda: next(train_windows), after)


class Run(threading.Thread):
    """A program's evaluations: (minutes that it has trained, step, bits per byte). It has one thread, so its minutes are its
    processor's: what else the machine does counts less."""

    def __init__(self, command, core, minutes, echo):
        super().__init__()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, 'OMP_NUM_THREADS': '1'},
                                        preexec_fn=lambda: os.sched_setaffinity(0, {core}))
        self.minutes, self.echo, self.evals, self.steps, self.trained, self.waited = minutes, echo, [], 0, 0.0, 0.0

    def busy(self):
        with open(f'/proc/{self.process.pid}/stat', encoding='utf8') as f:
            fields = f.read().rpartition(')')[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK')

    def run(self):
        last = None
        for line in self.process.stdout:
            now, clock, words = self.busy(), time.monotonic(), line.split() or ['']
            if words[0] == 'step':
                if last and self.steps:
                    self.trained += now - last[0]
                    self.waited += clock - last[1]
                self.steps += 1
            elif words[0] == 'eval':
                self.evals.append((self.trained / 60, int(words[1]), float(words[-1])))
                print(f'{self.echo:9s} {self.trained / 60:6.2f} minutes  step {words[1]:>5s}  bits per byte {words[-1]}', flush=True)
            last = now, clock
            if self.waited > 60 * self.minutes:
                self.process.terminate()
        self.process.wait()


def minutes_to(evals, bits):
    """When the curve first came down to bits, on the line between two evaluations; None: it never did."""
    for (t0, _, b0), (t1, _, b1) in zip(evals, evals[1:]):
        if b1 <= bits:
            return t0 + (t1 - t0) * (b0 - bits) / (b0 - b1)
    return None


def race(a, program):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise side_by_side.Wrong('training side by side needs 2 cores')
    with tempfile.TemporaryDirectory() as folder:
        weights = os.path.join(folder, 'weights.pt')
        arguments = ['--data', a.data, '--steps', str(a.steps), *program]
        torch.save(tape_of(a.build, ['--data', a.data, *program])[1], weights)
        knap = Run([os.path.join(a.build, 'examples', 'nanochat'), '--threads', '1', *arguments], cores[0], a.minutes, 'Knap')
        here = Run([sys.executable, os.path.abspath(__file__), a.original, a.build, weights, *arguments], cores[1], a.minutes, 'original')
        for r in (knap, here):
            r.start()
        for r in (knap, here):
            r.join()
    for name, r in (('Knap', knap), ('original', here)):
        ms = [1000 * t / max(1, r.steps - 1) for t in (r.trained, r.waited)]
        print(f'{name}: {r.steps} steps in {r.trained / 60:.2f} minutes, {ms[0]:.0f} ms a step; by the clock {ms[1]:.0f} ms a step')
    for minutes, step, bits in knap.evals[1:]:
        theirs = minutes_to(here.evals, bits)
        print(f'step {step:5d}  {bits:.4f} bits per byte: Knap after {minutes:5.2f} minutes, the original after '
              + (f'{theirs:5.2f}: {theirs / minutes:.2f} times as long' if theirs else 'more than it trained'))


def main(arguments):
    p = argparse.ArgumentParser(prog='scripts/peers nanochat', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--original', required=True, help='a checkout of nanochat')
    p.add_argument('--build', default='build', help='folder of libknap.so and examples/nanochat (build)')
    p.add_argument('--minutes', type=float, default=0, help='both train so long at most, on a thread and a core each (0: losses in f64)')
    p.add_argument('--data', help='tokens of knap-tokenize, with its tokenizer beside them')
    p.add_argument('--steps', type=int, default=5000)
    a, program = p.parse_known_args(arguments)
    if a.minutes and not a.data:
        p.error('--minutes needs --data, a token file')
    try:
        if a.minutes:
            race(a, program)
            return 0
        return 0 if compare(a) <= BOUND else 1
    except side_by_side.Wrong as wrong:
        sys.exit(f'scripts/peers nanochat: {wrong}')


if __name__ == '__main__':
    child(*sys.argv[1:4], sys.argv[4:])
