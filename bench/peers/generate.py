"""scripts/peers generate: Knap's generate beside transformers' generate with its cache, and how long each takes to load a model.

    scripts/peers generate                       GPT-2 124M and a Llama of stories110M's sizes, random weights
    scripts/peers generate --tokens 64 --rounds 5 --build build

Tokens are drawn greedily by both, one text, from the same files; a round runs each of them once, and the best round counts. A speed
is that of the tokens behind the first half of them, so that start and prompt don't count. Loading: a process of Knap from its start
to its end, which writes no token, beside the calls in a process of Python that has imported everything.
Needs torch, transformers, safetensors."""
import argparse
import os
import subprocess
import sys
import tempfile
import time

import torch
import transformers
from safetensors.torch import load_file

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..')
PROMPT = [11, 22, 33, 44, 55, 66, 77, 88]


def models(ctx):
    yield 'gpt2', lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(n_positions=ctx, initializer_range=0.1))
    yield 'llama', lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        max_position_embeddings=ctx, tie_word_embeddings=True, initializer_range=0.1))


def timed(fn):
    begun = time.time()
    result = fn()
    return time.time() - begun, result


def knap(tool, folder, tokens, dtype, threads):
    run = subprocess.run([tool, '--from', folder, '--prompt-ids', ','.join(map(str, PROMPT)), '--print-ids', '--no-end', '--temperature', '0',
                          '--tokens', str(tokens), '--dtype', dtype, '--threads', str(threads)], capture_output=True, text=True)
    if run.returncode:
        sys.exit(run.stderr.strip())
    return [int(i) for i in run.stdout.split()]


def theirs(model, tokens):
    with torch.no_grad():
        ids = torch.tensor([PROMPT])
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
                              use_cache=True, pad_token_id=0)[0].tolist()


def compare(name, tool, folder, o):
    file = os.path.join(folder, 'model.safetensors')
    half, best = o.tokens // 2, {}

    def note(key, seconds):
        best[key] = min(seconds, best.get(key, seconds))

    for _ in range(o.rounds):
        note('knap loads', timed(lambda: knap(tool, folder, 0, 'f32', o.threads))[0])
        note('safetensors', timed(lambda: {n: t.clone() for n, t in load_file(file).items()})[0])
        note('transformers loads', timed(lambda: transformers.AutoModelForCausalLM.from_pretrained(folder))[0])
    print(f'{name}: {os.path.getsize(file) / 1e6:.0f} MB; Knap\'s generate starts, loads and ends in {best["knap loads"]:.2f} s; '
          f'safetensors\' load_file {best["safetensors"]:.2f} s, transformers\' from_pretrained {best["transformers loads"]:.2f} s', flush=True)
    for dtype, torch_dtype in (('f32', torch.float32), ('bf16', torch.bfloat16)):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).to(torch_dtype).eval()
        model.generation_config.eos_token_id = None
        for _ in range(o.rounds):
            for n in (half, o.tokens):
                seconds, mine = timed(lambda: knap(tool, folder, n, dtype, o.threads))
                note(f'knap {dtype} {n}', seconds)
                seconds, peer = timed(lambda: theirs(model, n))
                note(f'peer {dtype} {n}', seconds)
        same = next((i for i, (a, b) in enumerate(zip(mine, peer)) if a != b), len(peer)) - len(PROMPT)
        speed = {who: (o.tokens - half) / (best[f'{who} {dtype} {o.tokens}'] - best[f'{who} {dtype} {half}']) for who in ('knap', 'peer')}
        print(f'{name} {dtype}: Knap {speed["knap"]:.1f} tokens/s, transformers {speed["peer"]:.1f}; the first {same} of {o.tokens} tokens '
              'are the same', flush=True)


def main(args):
    p = argparse.ArgumentParser(prog='scripts/peers generate', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--tokens', type=int, default=128)
    p.add_argument('--rounds', type=int, default=3)
    p.add_argument('--threads', type=int, default=min(2, os.cpu_count()))
    p.add_argument('--build', default=os.path.join(ROOT, 'build'))
    o = p.parse_args(args)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(o.threads)
    for name, make in models(1024):
        torch.manual_seed(1)
        with tempfile.TemporaryDirectory() as folder:
            make().save_pretrained(folder)
            compare(name, os.path.join(o.build, 'models', 'generate'), folder, o)
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
