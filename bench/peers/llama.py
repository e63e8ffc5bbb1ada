"""scripts/peers llama: the numbers of tests/models/llama_golden.h, computed by transformers' own Llama in f64.

    scripts/peers llama                    prints the header; needs torch, transformers
    scripts/peers llama > tests/models/llama_golden.h

Four small models, of whose weights each is a function of its name and place (weights below; fill in
tests/models/llama_golden_test.c). transformers computes norms and angles in f32 whatever the model's dtype: here float32 stands for
float64 meanwhile. The same models in plain f32 must agree to 1e-5."""
import contextlib
import sys

import numpy as np
import torch
import transformers

VOCAB, EMBD, HIDDEN, HEADS, LAYERS, BATCH, LEN = 11, 32, 40, 4, 2, 2, 9
# name, key-value heads, untied, base, scaling
CASES = [('plain', 4, False, 10000.0, None),
         ('grouped', 2, True, 500.0, None),
         ('scaled', 1, False, 10000.0, (8.0, 1.0, 32.0, 1024)),
         ('scaled_untied', 2, True, 500000.0, (32.0, 1.0, 4.0, 64))]
GRADS = ['model.embed_tokens.weight', 'model.layers.0.self_attn.q_proj.weight', 'model.layers.0.self_attn.k_proj.weight',
         'model.layers.1.self_attn.v_proj.weight', 'model.layers.1.mlp.gate_proj.weight', 'model.layers.0.mlp.down_proj.weight',
         'model.layers.1.input_layernorm.weight', 'model.norm.weight']


def weights(name, shape):
    """Element i: bits of i and of the name's hash as a number in [-0.2, 0.2), plus 1 in norms."""
    h = 2166136261
    for c in name.encode():
        h = (h ^ c) * 16777619 % 2 ** 32
    u = (np.arange(np.prod(shape), dtype=np.uint64) * 2654435761 + h) % 2 ** 32
    u ^= u >> np.uint64(16)
    u = u * 0x85ebca6b % 2 ** 32
    u ^= u >> np.uint64(13)
    w = (u.astype(np.float64) / 2 ** 32 - 0.5) * 0.4
    return torch.from_numpy(w.reshape(shape) + ('norm' in name))


@contextlib.contextmanager
def float32_is(dtype):
    kept = torch.float, torch.float32
    torch.float = torch.float32 = dtype
    yield
    torch.float, torch.float32 = kept


def model_of(kv_heads, untied, base, scaling, dtype):
    rope = {'rope_type': 'default', 'rope_theta': base}
    if scaling:
        rope = {'rope_type': 'llama3', 'rope_theta': base, 'factor': scaling[0], 'low_freq_factor': scaling[1],
                'high_freq_factor': scaling[2], 'original_max_position_embeddings': scaling[3]}
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=EMBD, intermediate_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=kv_heads, max_position_embeddings=4096, rms_norm_eps=1e-5, rope_parameters=rope,
        tie_word_embeddings=not untied, attn_implementation='sdpa')
    m = transformers.LlamaForCausalLM(config).to(dtype)
    with torch.no_grad():
        for name, p in m.named_parameters():
            p.copy_(weights(name, tuple(p.shape)))
    return m


def run(case, dtype):
    with float32_is(dtype):
        m = model_of(*case[1:], dtype)
        ids = torch.tensor([(5 * i + 3 * i * i) % VOCAB for i in range(BATCH * LEN)]).reshape(BATCH, LEN)
        targets = torch.tensor([(7 * i + 2) % VOCAB for i in range(BATCH * LEN)]).reshape(BATCH, LEN)
        logits = m(ids).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1))
        loss.backward()
    grads = dict(m.named_parameters())
    sums = [grads[name].grad.double().square().sum().sqrt().item() for name in GRADS]
    picked = torch.stack([logits[0, 4], logits[1, LEN - 1]]).double()
    return [loss.item()] + picked.flatten().tolist() + sums


def line(values):
    return ', '.join(f'{v:.13g}' for v in values)


def main(args):
    if args:
        sys.exit(__doc__ if args == ['--help'] else 'scripts/peers llama takes no arguments: see scripts/peers llama --help.')
    print(f'''/* tests/models/llama_golden.h: losses, logits and gradients of small Llamas, computed in f64 by
 * transformers {transformers.__version__} on torch {torch.__version__.split('+')[0]}. Written by scripts/peers llama (bench/peers/llama.py). */
#ifndef KNAP_TESTS_LLAMA_GOLDEN_H
#define KNAP_TESTS_LLAMA_GOLDEN_H

enum {{ VOCAB = {VOCAB}, EMBD = {EMBD}, HIDDEN = {HIDDEN}, HEADS = {HEADS}, LAYERS = {LAYERS}, BATCH = {BATCH}, LEN = {LEN} }};

/* whose gradients' norms follow */
static const char *const golden_grads[] = {{
    {(','+chr(10)+'    ').join(f'"{g}"' for g in GRADS)}
}};
enum {{ GRADS = sizeof golden_grads / sizeof *golden_grads }};

static const struct {{
    const char *name;
    int kv_heads;
    bool untied;
    double base;
    kn_rope_scaling scaling;
    double loss, logits[2][VOCAB], grads[GRADS]; /* logits of row 0 at 4, of row 1 at the end */
}} golden[] = {{''')
    for case in CASES:
        name, kv_heads, untied, base, scaling = case
        exact, plain = run(case, torch.float64), run(case, torch.float32)
        far = max(abs(a - b) for a, b in zip(exact, plain))
        if not far < 1e-5:
            sys.exit(f'{name}: f32 is off by {far:g}')
        s = '{ 0 }' if not scaling else '{ ' + ', '.join(f'{v:g}' for v in scaling) + ' }'
        print(f'''    {{ "{name}", {kv_heads}, {'true' if untied else 'false'}, {base:g}, {s},
      {exact[0]:.13g},
      {{ {{ {line(exact[1:1 + VOCAB])} }},
        {{ {line(exact[1 + VOCAB:1 + 2 * VOCAB])} }} }},
      {{ {line(exact[1 + 2 * VOCAB:])} }} }},''')
    print('};\n\n#endif')
    return 0
