"""scripts/peers finetune: models of transformers, fine-tuned by train_gpt on 2 ranks and by PyTorch.

    scripts/peers finetune                    a GPT-2 and a Llama, each trained a little on one text by PyTorch, then tuned on
                                              another by both: the losses of all steps, which may differ by 1 %
    scripts/peers finetune --seed 3 --steps 300 --build build

Both take the same windows of the same tokens (kn_text_batch), AdamW, clipping and the rates that train_gpt logs.
Needs torch, transformers, tokenizers."""
import argparse
import ctypes
import glob
import json
import os
import subprocess
import sys
import tempfile
import time

import torch
import transformers

import hf

ROWS, RANKS, CTX = 8, 2, 64
MAKERS = {'gpt2': hf.gpt2, 'llama': hf.llama}


def text_of(*patterns):
    text = ''
    for path in sorted(p for pattern in patterns for p in glob.glob(os.path.join(hf.ROOT, pattern))):
        with open(path, encoding='utf8') as f:
            text += f.read()
    return text


def tokens_of(build, text, work, name):
    """A token file of the text, and a function that gives windows first .. first + rows - 1 of its training half."""
    path, out = os.path.join(work, name), os.path.join(work, name + '.tokens')
    with open(path, 'w', encoding='utf8') as f:
        f.write(text)
    subprocess.run([os.path.join(build, 'models', 'knap-tokenize'), 'encode', '--tokenizer', hf.TOKENIZER, '--out', out, path],
                   check=True, stdout=subprocess.DEVNULL)
    library = ctypes.CDLL(os.path.abspath(os.path.join(build, 'libknap.so')))
    library.kn_text_map.restype = ctypes.c_void_p
    library.kn_text_batch.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64] + [ctypes.c_int64] * 3 + [ctypes.c_void_p] * 2
    tokens = library.kn_text_map(out.encode())

    def windows(seed, first, rows):
        x, y = torch.empty(2, rows, CTX, dtype=torch.int64)
        if not library.kn_text_batch(tokens, 0, seed, first, rows, CTX, x.data_ptr(), y.data_ptr()):
            raise SystemExit('scripts/peers finetune: kn_text_batch failed')
        return x, y
    return out, windows


def train(model, windows, seed, rows, rates):
    """The losses of the steps. Matrices decay, as train_gpt has it."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW([{'params': [p for p in parameters if p.ndim > 1], 'weight_decay': 0.1},
                                   {'params': [p for p in parameters if p.ndim < 2], 'weight_decay': 0.0}], betas=(0.9, 0.99))
    losses = []
    model.train()
    for step, rate in enumerate(rates):
        x, y = windows(seed, step * rows, rows)
        for group in optimizer.param_groups:
            group['lr'] = rate
        loss = torch.nn.functional.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def compare(build, seed, steps, work):
    _, before = tokens_of(build, text_of('README.md', 'docs/*.md'), work, 'pages')
    data, windows = tokens_of(build, text_of('models/*.c', 'nn/*.c'), work, 'sources')
    wrong = 0
    for number, (name, make) in enumerate(MAKERS.items()):
        torch.manual_seed(seed + number)
        model, folder = make(64, 3, 4, 128), os.path.join(work, name)
        model.config.resid_pdrop = model.config.embd_pdrop = model.config.attn_pdrop = 0.0
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        train(model, before, seed, ROWS, [3e-3] * 100)
        hf.save(model, folder)
        log = os.path.join(work, name + '.jsonl')
        run = subprocess.run([os.path.join(build, 'models', 'train_gpt'), '--init', folder, '--data', data, '--ctx', str(CTX), '--batch',
                              str(ROWS), '--steps', str(steps), '--lr', '1e-3', '--ranks', str(RANKS), '--threads', '1', '--seed', str(seed),
                              '--beta2', '0.99', '--weight-decay', '0.1', '--clip', '1', '--eval-every', '0', '--log', log],
                             capture_output=True, text=True)
        if run.returncode:
            print(f'{name}: {run.stderr.strip()}')
            wrong += 1
            continue
        with open(log) as f:
            lines = [row for row in map(json.loads, f) if row.get('loss') is not None]
        ours = [row['loss'] for row in lines]
        theirs = train(model, windows, seed, ROWS * RANKS, [row['lr'] for row in lines])
        most = max(abs(a / b - 1) for a, b in zip(ours, theirs))
        last = [sum(losses[-10:]) / 10 for losses in (ours, theirs)]
        good = len(ours) == steps and most < 0.01 and theirs[0] - last[1] > 0.3
        wrong += not good
        print(f'{name}: loss {ours[0]:.5f} at first (PyTorch {theirs[0]:.5f}), {last[0]:.5f} over the last 10 of {steps} steps '
              f'(PyTorch {last[1]:.5f}); no step differs by more than {100 * most:.1g} %{"" if good else ": WRONG"}')
    print(f'seed {seed}: {len(MAKERS)} models, {RANKS} ranks, {wrong} wrong')
    return 1 if wrong else 0


def main(args):
    p = argparse.ArgumentParser(prog='scripts/peers finetune', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--seed', type=int, default=int(time.time()))
    p.add_argument('--steps', type=int, default=200)
    p.add_argument('--build', default=os.path.join(hf.ROOT, 'build'))
    o = p.parse_args(args)
    torch.set_num_threads(1)    # of small models
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as work:
        return compare(o.build, o.seed, o.steps, work)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
