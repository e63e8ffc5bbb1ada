"""Language models in one file, by others' programs: GGUF by the gguf package, and llm.c's weights in the order of its train_gpt2.py.
Used by scripts/peers hf. Names come from the package's own table, ids and merges from a tokenizer.json."""
import json
import struct

import gguf
import numpy as np
import torch

TYPES = gguf.GGMLQuantizationType
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
ROPE = 'rope_freqs.weight'


def turned(array, heads):
    """Rows of queries or keys as llama.cpp's Llama has them: rotary pairs are neighbours."""
    return array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def arrays(model):
    """name in GGUF: (name in the model, f32 array as GGUF has it)."""
    c, out = model.config, {}
    arch = c.model_type if c.model_type != 'mistral' else 'llama'
    number = {name: n for n, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    layers = c.n_layer if arch == 'gpt2' else c.num_hidden_layers
    names = gguf.get_tensor_name_map(number, layers)
    for name, weight in model.named_parameters():
        array = weight.detach().float().numpy()
        if arch == 'gpt2' and weight.ndim == 2 and '.h.' in name:
            array = array.T
        if arch == 'llama' and ('q_proj' in name or 'k_proj' in name):
            array = turned(array, c.num_attention_heads if 'q_proj' in name else c.num_key_value_heads)
        out[names.get_name(name, try_suffixes=('.weight', '.bias'))] = name, array
    return arch, out


def divisors(c):
    rope = c.rope_parameters
    dim = getattr(c, 'head_dim', None) or c.hidden_size // c.num_attention_heads
    wave = 2 * np.pi * np.float64(rope['rope_theta']) ** (np.arange(0, dim, 2) / dim)
    low, high = rope['low_freq_factor'], rope['high_freq_factor']
    smooth = (rope['original_max_position_embeddings'] / wave - low) / (high - low)
    return (1 / ((1 - np.clip(smooth, 0, 1)) / rope['factor'] + np.clip(smooth, 0, 1))).astype(np.float32)


def add_config(w, model, arch):
    c = model.config
    if arch == 'gpt2':
        w.add_context_length(c.n_positions)
        w.add_embedding_length(c.n_embd)
        w.add_block_count(c.n_layer)
        w.add_feed_forward_length(4 * c.n_embd)
        w.add_head_count(c.n_head)
        w.add_layer_norm_eps(c.layer_norm_epsilon)
        return
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_block_count(c.num_hidden_layers)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    w.add_head_count_kv(c.num_key_value_heads)
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_rope_freq_base(c.rope_parameters['rope_theta'])
    if getattr(c, 'head_dim', None):
        w.add_key_length(c.head_dim)
        w.add_value_length(c.head_dim)
    if c.rope_parameters['rope_type'] == 'llama3':
        w.add_tensor(ROPE, divisors(c))


def add_bpe(w, path, pre):
    with open(path) as f:
        j = json.load(f)
    tokens = {i: t for t, i in j['model']['vocab'].items()}
    special = {t['id']: t['content'] for t in j['added_tokens']}
    tokens.update(special)
    w.add_tokenizer_model('gpt2')
    w.add_tokenizer_pre(pre)
    w.add_token_list([tokens[i] for i in range(len(tokens))])
    w.add_token_types([CONTROL if i in special else NORMAL for i in range(len(tokens))])
    w.add_token_merges([m if isinstance(m, str) else ' '.join(m) for m in j['model']['merges']])
    w.add_bos_token_id(min(special))
    w.add_eos_token_id(min(special))


def add_sentences(w, path):
    import sentencepiece
    s = sentencepiece.SentencePieceProcessor(model_file=path)
    kinds = [UNKNOWN if s.is_unknown(i) else CONTROL if s.is_control(i) else BYTE if s.is_byte(i) else NORMAL for i in range(s.get_piece_size())]
    w.add_tokenizer_model('llama')
    w.add_tokenizer_pre('default')
    w.add_token_list([s.id_to_piece(i).encode() for i in range(len(kinds))])
    w.add_token_scores([s.get_score(i) for i in range(len(kinds))])
    w.add_token_types(kinds)
    w.add_bos_token_id(s.bos_id())
    w.add_eos_token_id(s.eos_id())
    w.add_add_bos_token(True)


def write_gguf(model, path, kind, tokenizer, pre='gpt-2', head=False):
    """Writes model, whose weights become those of the file: products of this kind, vectors of f32. head: also a copy of the embedding."""
    arch, tensors = arrays(model)
    w = gguf.GGUFWriter(path, arch)
    add_config(w, model, arch)
    if tokenizer.endswith('.model'):
        add_sentences(w, tokenizer)
    else:
        add_bpe(w, tokenizer, pre)
    parameter = dict(model.named_parameters())
    if head:
        tensors['output.weight'] = None, tensors['token_embd.weight'][1]
    for there, (name, array) in tensors.items():
        as_is = array.ndim == 1 or there == 'position_embd.weight'
        stored = gguf.quantize(np.ascontiguousarray(array), TYPES.F32 if as_is else kind)
        w.add_tensor(there, stored, raw_dtype=None if as_is or kind in (TYPES.F32, TYPES.F16) else kind)
        if not as_is and name:
            array = gguf.dequantize(stored, kind).reshape(array.shape)
            if arch == 'gpt2' and '.h.' in name:
                array = array.T
            if arch == 'llama' and ('q_proj' in name or 'k_proj' in name):
                heads = model.config.num_attention_heads if 'q_proj' in name else model.config.num_key_value_heads
                array = array.reshape(heads, array.shape[0] // heads // 2, 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
            with torch.no_grad():
                parameter[name].copy_(torch.from_numpy(np.array(array)))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def same_gguf(model, path):
    """What of a GGUF of f32 differs from model; None: nothing."""
    reader = gguf.GGUFReader(path)
    arch, tensors = arrays(model)
    field = {name: f.contents() for name, f in reader.fields.items()}
    there = {t.name: t.data for t in reader.tensors}
    if model.config.model_type != 'gpt2' and model.config.rope_parameters['rope_type'] == 'llama3':
        tensors[ROPE] = None, divisors(model.config)
    if field['general.architecture'] != arch or set(there) != set(tensors):
        return f'{field["general.architecture"]}, {sorted(set(there) ^ set(tensors))}'
    for name, (_, array) in tensors.items():
        if name == ROPE and np.allclose(there[name], array, 1e-6):
            continue
        if there[name].shape != array.shape or there[name].tobytes() != np.ascontiguousarray(array).tobytes():
            return f'{name}: {there[name].shape}, should be {array.shape}, or other values'
    own = json.loads(field['tokenizer.huggingface.json'])
    added = {t['id']: t['content'] for t in own['added_tokens']}
    tokens = {**{i: t for t, i in own['model']['vocab'].items()}, **added}
    if field['tokenizer.ggml.tokens'] != [tokens[i] for i in range(len(tokens))]:
        return 'other tokens'
    if field['tokenizer.ggml.token_type'] != [CONTROL if i in added else NORMAL for i in range(len(tokens))]:
        return 'other types of tokens'
    if field['tokenizer.ggml.merges'] != [m if isinstance(m, str) else ' '.join(m) for m in own['model']['merges']]:
        return 'other merges'
    return None


def llmc_tensors(model):
    """The arrays of llm.c's file in its order: each kind for all blocks; products are [out, in]."""
    t, blocks = model.transformer, model.transformer.h
    rows = -(-t.wte.weight.shape[0] // 128) * 128
    yield torch.cat([t.wte.weight, torch.zeros(rows - t.wte.weight.shape[0], t.wte.weight.shape[1])])
    yield t.wpe.weight
    for part in ('ln_1', 'attn.c_attn', 'attn.c_proj', 'ln_2', 'mlp.c_fc', 'mlp.c_proj'):
        for kind in ('weight', 'bias'):
            for block in blocks:
                x = getattr(block.get_submodule(part), kind)
                yield x.T if x.ndim == 2 else x
    yield t.ln_f.weight
    yield t.ln_f.bias


def write_llmc(model, path, wide):
    """Writes model, whose weights become those of the file."""
    c = model.config
    with torch.no_grad():
        for weight in [] if wide else model.parameters():
            weight.copy_(weight.bfloat16())
    header = [20240326, 3 if wide else 5, c.n_positions, c.vocab_size, c.n_layer, c.n_head, c.n_embd, -(-c.vocab_size // 128) * 128]
    with open(path, 'wb') as f:
        f.write(struct.pack('<256i', *header, *[0] * (256 - len(header))))
        for x in llmc_tensors(model):
            x = x.detach().contiguous()
            f.write(x.numpy().tobytes() if wide else x.bfloat16().view(torch.int16).numpy().tobytes())


def same_llmc(model, path, wide=True):
    """Whether an exported file has the bytes of model's, but for Knap's mark in the last number of its header."""
    with open(path, 'rb') as f:
        got = f.read()
    write_llmc(model, path + '.want', wide)
    with open(path + '.want', 'rb') as f:
        want = f.read()
    return got[:1020] == want[:1020] and got[1024:] == want[1024:]
