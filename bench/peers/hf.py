"""scripts/peers hf: language models of transformers, of GGUF and of llm.c, read by Knap.

    scripts/peers hf                          random models of random sizes: the text that both write, greedily, and that
                                              transformers writes from what generate --export wrote; the same through GGUFs
                                              that the gguf package wrote, and reads, and through llm.c's files
    scripts/peers hf --seed 3 --build build
    scripts/peers hf --write                  makes tests/models/imported and tests/models/one_file anew: small models, and
                                              what transformers says of them

Needs torch, transformers, tokenizers, gguf, sentencepiece."""
import argparse
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time

import one_file
import torch
import transformers
from safetensors.torch import load_file, save_file

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..')
GOLDEN = os.path.join(ROOT, 'tests', 'models', 'imported')
ONE_FILE = os.path.join(ROOT, 'tests', 'models', 'one_file')
TOKENIZER = os.path.join(ROOT, 'tests', 'models', 'tokenizers', 'gpt2', 'tokenizer.json')
SENTENCES = os.path.join(ROOT, 'tests', 'models', 'tokenizers', 'sentencepiece', 'tokenizer.model')
VOCAB, PROMPT = 700, 'The quick brown fox'
ROPE = {'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0, 'original_max_position_embeddings': 32}


def gpt2(embd, layers, heads, ctx):
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=ctx, n_embd=embd, n_layer=layers, n_head=heads, initializer_range=0.2))


def llama(embd, layers, heads, ctx, kind='Llama', vocab=VOCAB, **more):
    config = getattr(transformers, kind + 'Config')(
        vocab_size=vocab, hidden_size=embd, intermediate_size=2 * embd, num_hidden_layers=layers, num_attention_heads=heads,
        max_position_embeddings=ctx, initializer_range=0.2, **more)
    model = getattr(transformers, kind + 'ForCausalLM')(config)
    for name, weight in model.named_parameters():    # biases and norms, too
        if weight.ndim == 1:
            torch.nn.init.normal_(weight, float('norm' in name), 0.2)
    return model


MODELS = {
    'gpt2': (gpt2, {}),
    'llama': (llama, {}),
    'llama_tied': (llama, {'tie_word_embeddings': True, 'num_key_value_heads': 2}),
    'llama_rope': (llama, {'rope_theta': 500000.0, 'rope_scaling': ROPE, 'rms_norm_eps': 1e-5}),
    'mistral': (llama, {'kind': 'Mistral', 'num_key_value_heads': 2, 'sliding_window': 7}),
    'qwen2': (llama, {'kind': 'Qwen2', 'num_key_value_heads': 2, 'tie_word_embeddings': True}),
    'qwen3': (llama, {'kind': 'Qwen3', 'num_key_value_heads': 2, 'head_dim': 12}),
}


def save(model, folder, begins=False, **how):
    model.save_pretrained(folder, **how)
    shutil.copy(TOKENIZER, folder)
    if begins:    # as Llama's: every text begins with a token
        path, end = os.path.join(folder, 'tokenizer.json'), '<|endoftext|>'
        with open(path) as f:
            tokenizer = json.load(f)
        tokenizer['post_processor'] = {'type': 'Sequence', 'processors': [
            {'type': 'ByteLevel', 'add_prefix_space': True, 'trim_offsets': False, 'use_regex': True},
            {'type': 'TemplateProcessing', 'single': [{'SpecialToken': {'id': end, 'type_id': 0}}, {'Sequence': {'id': 'A', 'type_id': 0}}],
             'pair': [{'Sequence': {'id': 'A', 'type_id': 0}}, {'Sequence': {'id': 'B', 'type_id': 1}}],
             'special_tokens': {end: {'id': end, 'ids': [0], 'tokens': [end]}}}]}
        with open(path, 'w') as f:
            json.dump(tokenizer, f)


def bare_gpt2(folder):
    """A folder of GPT-2 as older programs wrote it: no "transformer." before the names, and the masks of attention."""
    path = os.path.join(folder, 'model.safetensors')
    tensors = {name.removeprefix('transformer.'): t for name, t in load_file(path).items()}
    for name in [n for n in tensors if n.endswith('.attn.c_attn.bias')]:
        tensors[name.replace('c_attn.bias', 'bias')] = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
    save_file(tensors, path, {'format': 'pt'})


def greedy(model, ids, count):
    model.eval()
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids


def say(model, path, ids):
    """What transformers makes of ids, for the tests."""
    with torch.no_grad():
        logits = model.eval()(ids).logits[0, -1].double()
    with open(path, 'w') as f:
        json.dump({'prompt': ids[0].tolist(), 'logits': [round(x, 6) for x in logits.tolist()],
                   'greedy': greedy(model, ids, 24)[0, ids.shape[1]:].tolist()}, f)


def write_golden():
    shutil.rmtree(GOLDEN, ignore_errors=True)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=TOKENIZER)
    for number, (name, (make, more)) in enumerate(MODELS.items()):
        torch.manual_seed(number)
        folder = os.path.join(GOLDEN, name)
        model = make(16, 2, 4, 64, **more)
        save(model, folder, **({'max_shard_size': '40KB'} if name in ('llama', 'gpt2') else {}))
        if name == 'llama_tied':    # another dtype in the file, to which the weights are rounded
            with torch.no_grad():
                for weight in model.parameters():
                    weight.copy_(weight.bfloat16())
            save(copy.deepcopy(model).to(torch.bfloat16), folder)
        os.remove(os.path.join(folder, 'tokenizer.json'))    # that of tests/models/tokenizers/gpt2
        say(model, os.path.join(folder, 'want.json'), torch.tensor([tokenizer(PROMPT, add_special_tokens=False).input_ids]))
        generation = os.path.join(folder, 'generation_config.json')
        if os.path.exists(generation):
            os.remove(generation)


def write_one_file():
    import sentencepiece
    shutil.rmtree(ONE_FILE, ignore_errors=True)
    os.makedirs(ONE_FILE)
    types = one_file.TYPES
    ids = torch.tensor([transformers.PreTrainedTokenizerFast(tokenizer_file=TOKENIZER)(PROMPT).input_ids])
    pieces = sentencepiece.SentencePieceProcessor(model_file=SENTENCES)
    rope = {'rope_theta': 500000.0, 'rope_scaling': {**ROPE, 'original_max_position_embeddings': 8192}}
    for number, (name, model, kind) in enumerate((
            ('gpt2_q8', lambda: gpt2(32, 1, 4, 64), types.Q8_0),
            ('llama_f16', lambda: llama(32, 1, 4, 64, num_key_value_heads=2, tie_word_embeddings=True, **rope), types.F16),
            ('llama_f32', lambda: llama(8, 2, 2, 64, vocab=len(pieces)), types.F32),
            ('qwen2_bf16', lambda: llama(16, 2, 4, 64, kind='Qwen2', num_key_value_heads=2), types.BF16),
            ('qwen3_f32', lambda: llama(16, 1, 4, 64, kind='Qwen3', num_key_value_heads=2, head_dim=12, tie_word_embeddings=True), types.F32),
            ('gpt2_llmc', lambda: gpt2(16, 2, 4, 64), True),
            ('gpt2_llmc16', lambda: gpt2(16, 2, 2, 64), False))):
        torch.manual_seed(number)
        made, path = model(), os.path.join(ONE_FILE, name)
        if isinstance(kind, bool):
            one_file.write_llmc(made, path + '.bin', kind)
        else:
            one_file.write_gguf(made, path + '.gguf', kind, SENTENCES if name == 'llama_f32' else TOKENIZER, head=name == 'gpt2_q8')
        say(made, path + '.json', torch.tensor([[pieces.bos_id(), *pieces.encode(PROMPT)]]) if name == 'llama_f32' else ids)


def text_of(tool, source, count, *more):
    """What generate writes, or why not."""
    run = subprocess.run([tool, '--from', source, '--prompt', PROMPT, '--tokens', str(count), '--temperature', '0', '--no-end', *more],
                         capture_output=True)
    return run.stdout[:-1].decode(errors='replace') if run.returncode == 0 else 'ERROR ' + run.stderr.decode().strip()


def export(tool, source, out, *more):
    """None, or why not."""
    run = subprocess.run([tool, '--from', source, '--export', out, *more], capture_output=True)
    return None if run.returncode == 0 else run.stderr.decode().strip()


def through_folder(tool, model, folder, work, say_wrong, begins):
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=os.path.join(folder, 'tokenizer.json'))
    ids = torch.tensor([tokenizer(PROMPT).input_ids])
    count = 100 if model.config.max_position_embeddings >= 128 else 40
    want = tokenizer.decode(greedy(model, ids, count)[0][begins:])
    for ranks in ('1', '2'):
        got = text_of(tool, folder, count, '--ranks', ranks)
        say_wrong(got != want, f'read by {ranks} ranks', got)
        out = os.path.join(work, ranks)
        error, same, back = export(tool, folder, out, '--ranks', ranks), False, None
        if not error:
            back = transformers.AutoModelForCausalLM.from_pretrained(out)
            text = transformers.AutoTokenizer.from_pretrained(out).decode(greedy(back, ids, count)[0][begins:])
            same = text == want and back.dtype == torch.float32
        say_wrong(not same, f'exported by {ranks} ranks', error)
    return ids, count, want


def through_gguf(tool, model, folder, work, ids, say_wrong, draw):
    """Exported by two ranks, and read by the gguf package and by transformers; then written by the package, and read by two ranks."""
    c, begins = model.config, ids.shape[1]
    error = export(tool, folder, work, '--format', 'gguf', '--ranks', '2')
    say_wrong(error or one_file.same_gguf(model, os.path.join(work, 'model.gguf')), 'as a GGUF', error)
    plain = c.model_type in ('llama', 'qwen2') and c.rope_parameters['rope_type'] == 'default' and not error
    if plain:
        back = transformers.AutoModelForCausalLM.from_pretrained(work, gguf_file='model.gguf')
        say_wrong(not torch.equal(greedy(back, ids, 20), greedy(model, ids, 20)), 'a GGUF read by transformers', None)
    whole = c.hidden_size % 32 == 0
    kind = draw.choice([one_file.TYPES.F32, one_file.TYPES.F16, one_file.TYPES.BF16, *([one_file.TYPES.Q8_0] * 3 if whole else [])])
    rope = getattr(c, 'rope_parameters', None) or {}
    if c.model_type == 'mistral' or (rope.get('rope_type') == 'llama3' and rope['original_max_position_embeddings'] != 8192):
        return kind.name    # which llama.cpp's file doesn't tell
    other, path = copy.deepcopy(model), os.path.join(work, 'other.gguf')
    one_file.write_gguf(other, path, kind, TOKENIZER, head=draw.random() < 0.5 and c.tie_word_embeddings and c.model_type == 'gpt2')
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=TOKENIZER)
    bare = torch.tensor([tokenizer(PROMPT).input_ids])
    want = tokenizer.decode(greedy(other, bare, 40)[0])
    got = text_of(tool, path, 40, '--ranks', '2')
    say_wrong(got != want, f'a GGUF of {kind.name}, {begins} ids', got)
    return kind.name


def through_llmc(tool, model, folder, work, say_wrong, wide):
    error = export(tool, folder, work, '--format', 'llmc', '--ranks', '2', '--dtype', 'f32' if wide else 'bf16')
    say_wrong(error or not one_file.same_llmc(copy.deepcopy(model), os.path.join(work, 'model.bin'), wide), "as llm.c's", error)
    other, path = copy.deepcopy(model), os.path.join(work, 'other.bin')
    one_file.write_llmc(other, path, wide)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=TOKENIZER)
    want = tokenizer.decode(greedy(other, torch.tensor([tokenizer(PROMPT).input_ids]), 40)[0])
    got = text_of(tool, path, 40, '--ranks', '2', '--tokenizer', TOKENIZER)
    say_wrong(got != want, "llm.c's", got)


def own_head(tool, model, folder, ids, say_wrong):
    """A model that is to be tied, whose file holds another head."""
    path = os.path.join(folder, 'head.safetensors')
    index = os.path.join(folder, 'model.safetensors.index.json')
    if os.path.exists(index):
        os.remove(index)
    with torch.no_grad():
        head = torch.randn_like(model.get_input_embeddings().weight)
    save_file({'lm_head.weight': head}, path)
    got = text_of(tool, folder, 20)
    if model.config.model_type == 'gpt2':
        say_wrong("differs from its token embedding" not in got, 'a head of its own', got)
        return
    one = os.path.join(folder, 'model.safetensors')
    save_file({**load_file(one), 'lm_head.weight': head}, one, {'format': 'pt'})
    os.remove(path)
    back = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=os.path.join(folder, 'tokenizer.json'))
    say_wrong(got != tokenizer.decode(greedy(back, ids, 20)[0], skip_special_tokens=True), 'a head of its own', got)


def compare(tool, seed, work):
    draw, wrong, kinds = random.Random(seed), 0, []
    for k, (name, (make, more)) in enumerate(list(MODELS.items()) * 2):
        def say_wrong(is_wrong, what, why, name=name):
            nonlocal wrong
            wrong += bool(is_wrong)
            if is_wrong:
                print(f'{name}, {what}: {why or is_wrong or "another text"}')
        torch.manual_seed(seed + k)
        heads = draw.choice([2, 4])
        model = make(heads * 2 * draw.randint(4, 12), draw.randint(1, 4), heads, draw.choice([64, 128]), **more)
        folder, bare = os.path.join(work, f'{k}'), name == 'gpt2' and k > 0
        one = bare or name in ('llama_tied', 'qwen2')
        save(model, folder, k % 3 == 1, **({} if k % 2 or one else {'max_shard_size': '60KB'}))
        if bare:
            bare_gpt2(folder)
        out = [os.path.join(work, f'{k}-{i}') for i in range(3)]
        for path in out:
            os.makedirs(path)
        ids, _, _ = through_folder(tool, model, folder, out[0], say_wrong, k % 3 == 1)
        kinds.append(through_gguf(tool, model, folder, out[1], ids, say_wrong, draw))
        if name == 'gpt2':
            through_llmc(tool, model, folder, out[2], say_wrong, k % 2 == 0)
        if one and not (name == 'gpt2' and k == 0):
            own_head(tool, model, folder, ids, say_wrong)
    print(f'seed {seed}: {2 * len(MODELS)} models on 1 and 2 ranks, read and exported, in GGUFs of {", ".join(sorted(set(kinds)))}, {wrong} wrong')
    return 1 if wrong else 0


def main(args):
    p = argparse.ArgumentParser(prog='scripts/peers hf', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--seed', type=int, default=int(time.time()))
    p.add_argument('--build', default=os.path.join(ROOT, 'build'))
    p.add_argument('--write', action='store_true')
    o = p.parse_args(args)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if o.write:
        write_golden()
        write_one_file()
        return 0
    with tempfile.TemporaryDirectory() as work:
        return compare(os.path.join(o.build, 'models', 'generate'), o.seed, work)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
