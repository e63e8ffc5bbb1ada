#!/usr/bin/env python3
"""tests/fuzz/seeds.py: writes the seeds of the corpora, tests/fuzz/<target>/seed-*: small inputs that
each reader takes. Inputs that once broke a reader lie beside them under other names, and stay.

Pictures of kinds that Python's own library can't write (JPEG) come from Pillow, where it is there."""
import gzip
import io
import json
import os
import struct
import zlib

HERE = os.path.dirname(os.path.abspath(__file__))


def seed(target, name, data):
    folder = os.path.join(HERE, target)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, 'seed-' + name), 'wb') as f:
        f.write(data if isinstance(data, bytes) else data.encode())


def safetensors(header, data=b'', text=None):
    text = (text or json.dumps(header)).encode()
    return struct.pack('<Q', len(text)) + text + data


def write_safetensors():
    two = {'a': {'dtype': 'F32', 'shape': [2, 1], 'data_offsets': [0, 8]},
           'b.c': {'dtype': 'BF16', 'shape': [], 'data_offsets': [8, 10]}}
    seed('safetensors', 'two', safetensors(two, bytes(10)))
    seed('safetensors', 'meta', safetensors({'__metadata__': {'format': 'pt', 'save': 'x'}, **two}, bytes(10)))
    seed('safetensors', 'none', safetensors({}))
    seed('safetensors', 'empty', safetensors({'e': {'dtype': 'I64', 'shape': [0, 3], 'data_offsets': [0, 0]}}))
    for dtype, size in (('F64', 8), ('I64', 8), ('I32', 4), ('I16', 2), ('I8', 1), ('U8', 1), ('BOOL', 1), ('F16', 2)):
        seed('safetensors', dtype.lower(), safetensors({'x': {'dtype': dtype, 'shape': [3], 'data_offsets': [0, 3 * size]}},
                                                       bytes(3 * size)))


def tokenizer(vocab, merges=(), **beside):
    return json.dumps({**beside, 'model': {'type': 'BPE', 'vocab': {t: i for i, t in enumerate(vocab)}, 'merges': list(merges)}},
                      ensure_ascii=False)


def byte_tokenizer():
    """GPT-2's alphabet: bytes that print stand for themselves, the others are numbered from U+0100 on."""
    prints = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
    others = [b for b in range(256) if b not in prints]
    return tokenizer([chr(b) if b in prints else chr(0x100 + others.index(b)) for b in range(256)],
                     pre_tokenizer={'type': 'ByteLevel', 'add_prefix_space': False, 'use_regex': False}, decoder={'type': 'ByteLevel'})


def write_tokenizers():
    seed('tokenizer', 'byte', byte_tokenizer())
    seed('tokenizer', 'char', tokenizer(['\n', ' ', 'a', 'b']))
    seed('tokenizer', 'wide', tokenizer(['a', 'é', '€', '😀']))
    seed('tokenizer', 'merges', tokenizer(['a', 'b', 'ab', ' '], [['a', 'b']], added_tokens=[
        {'id': 4, 'content': '<e>', 'special': True, 'rstrip': True}], pre_tokenizer={'type': 'Sequence', 'pretokenizers': [
            {'type': 'Split', 'pattern': {'Regex': ' ?[^\\s\\p{L}]+|\\p{L}+'}, 'behavior': 'MergedWithNext'},
            {'type': 'Digits', 'individual_digits': True}]}))
    seed('tokenizer', 'changes', tokenizer(
        ['▁', 'a', '▁a', '<0x41>', '?'], ['▁ a'], normalizer={'type': 'Sequence', 'normalizers': [
            {'type': 'NFC'}, {'type': 'Prepend', 'prepend': '▁'}, {'type': 'Replace', 'pattern': {'String': ' '}, 'content': '▁'}]},
        decoder={'type': 'Sequence', 'decoders': [{'type': 'Replace', 'pattern': {'String': '▁'}, 'content': ' '},
                                                  {'type': 'ByteFallback'}, {'type': 'Strip', 'content': ' ', 'start': 1, 'stop': 0}]}))

    def field(number, body):
        return bytes([number << 3 | 2, len(body)]) + body

    def piece(text, kind, score):
        return field(1, field(1, text.encode()) + b'\x15' + struct.pack('<f', score) + bytes([3 << 3, kind]))

    seed('sentencepiece', 'bpe', piece('<unk>', 2, 0) + piece('<s>', 3, 0) + piece('<0x41>', 6, 0) + piece('▁a', 1, -1) +
         piece('▁', 1, -2) + piece('a', 1, -3) + field(2, b'\x18\x02') + field(3, b'\x18\x01\x20\x00'))
    seed('merges', 'gpt2', '#version: 0.2\na b\nab a\n')


def tokens(width, vocab, ids):
    return b'KNTOKENS' + struct.pack('<IIQQ', 1, width, len(ids), vocab) + bytes(32) + struct.pack(
        '<%d%s' % (len(ids), 'H' if width == 2 else 'I'), *ids)


def write_texts():
    text = 'To be, or not to be: that is the question.'
    talk = [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Hi\n'}, {'role': 'assistant', 'content': text}]
    seed('documents', 'lines', '0' + ''.join(json.dumps({'text': text[:n]}) + '\n' for n in range(1, 12)))
    seed('documents', 'parts', '1' + (text + '\n--\n') * 9)
    for form in '2345':
        seed('documents', 'talks' + form, form + (json.dumps({'messages': talk}) + '\n') * 12)
    seed('documents', 'pairs', '5' + (json.dumps({'prompt': 'a', 'answer': 'b'}) + '\n' + json.dumps({'prompt': '', 'completion': ' é '}) + '\n') * 9)
    seed('text', 'plain', 'To be, or not to be: that is the question. Whether \'tis nobler\n')
    seed('text', 'wide', 'naïve €uro 😀' * 9)
    seed('text', 'u16', tokens(2, 5, [i % 5 for i in range(50)]))
    seed('text', 'u32', tokens(4, 70000, [i * 999 % 70000 for i in range(50)]))
    seed('text', 'tokenizer', tokens(2, 2, [0, 1] * 25) + b'||' + tokenizer(['a', 'b']).encode())
    seed('text', 'byte', tokens(2, 256, list(range(60))) + b'||' + byte_tokenizer().encode())


def choice(line):
    total = 0xcbf29ce484222325
    for byte in line.encode():
        total = (total ^ byte) * 0x100000001b3 % (1 << 64)
    return f'\n{total:016x} {line}\n'


def write_choices():
    algorithm = 'gpu, m 1 = algorithm ' + '0a' * 64 + ', first 40.1 us, best 38.0 us'
    seed('choices', 'one', choice(algorithm)[1:])
    seed('choices', 'lines', choice(algorithm) + choice('gpu, m 2 = parts, first 2.0 us, best 1.0 us'))
    seed('choices', 'damaged', choice(algorithm)[1:70] + choice(algorithm))
    seed('choices', 'foreign', 'another file = of another program\n')


def write_options():
    seed('options', 'model', '--layers\n2\n--heads=2\n--embd\n16\n--ctx\n8\n--no-bias\n--dropout=0.1\n')
    seed('options', 'llama', '--model\nllama\n--kv-heads\n2\n--hidden\n64\n--rope-base\n1e4\n--tied\n')
    seed('options', 'steps', '--steps\n10\n--lr\n1e-3\n--min-lr\n1e-4\n--warmup\n2\n--clip\n0.5\n--optimizer=muon\n')
    seed('options', 'ranks', '--strategy\nhybrid_shard\n--shards\n2\n--layout\nragged\n--reshard\n2\n')
    seed('options', 'recorded', '--steps=9\n\nlayers=2\nheads=2\nembd=16\nlr=0.001\nbias=true\nmodel=custom\ndtype=bf16\n')
    seed('options', 'path', '\nout=/tmp/x\n')
    seed('options', 'help', '--help\n')


def write_tables():
    seed('csv', 'names', '|| \0\0\na b c\n1 2 3\n4 5 6\n')
    seed('csv', 'target', 'y||,\0\0\nx,y,z\n1,2,3\n4,5,6\n')
    seed('csv', 'quoted', '-1|1|;\1\5\r\n"a;b";"c""d";e\r\n1;"2.5";-3e2\r\n4;5;6')
    seed('csv', 'missing', '1||,\2\20\n1,,NA\n?,5,nan\n')
    seed('csv', 'whole', '||,\2\12\n12345678901234,-7\n8,9\n')


def idx(kind, sizes, data):
    return struct.pack('>HBB', 0, kind, len(sizes)) + struct.pack('>%dI' % len(sizes), *sizes) + data


def write_idx():
    images, labels = idx(8, [2, 3, 2], bytes(range(12))), idx(8, [2], b'\1\2')
    seed('idx', 'u8', images)
    seed('idx', 'gzip', gzip.compress(images, mtime=0))
    for name, kind, size in (('i8', 9, 1), ('i16', 11, 2), ('i32', 12, 4), ('f32', 13, 4), ('f64', 14, 8)):
        seed('idx', name, idx(kind, [3], bytes(range(3 * size))))
    seed('mnist', 'two', images + b'||' + labels)
    seed('mnist', 'gzip', gzip.compress(images, mtime=0) + b'||' + gzip.compress(labels, mtime=0))


def write_cifar():
    names = b'cat\ndog\n|'
    for how in (0, 2):
        seed('cifar', 'ten-%d' % how, bytes([how]) + names + bytes([3]) + bytes(3072))
    for how in (1, 5, 7):
        seed('cifar', 'hundred-%d' % how, bytes([how]) + names + bytes([3, 7]) + bytes(3072))


def chunk(kind, data):
    return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))


def png(width, height, depth, colour, interlace=0, extra=b''):
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    row = b'\0' + bytes(range(1, (width * channels * depth + 7) // 8 + 1))
    passes = [(width, height)] if not interlace else [
        ((width - x + w - 1) // w, (height - y + h - 1) // h)
        for x, y, w, h in ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))]
    rows = b''.join((b'\0' + row[1:(w * channels * depth + 7) // 8 + 1]) * h for w, h in passes if w and h)
    return (b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', struct.pack('>IIBBBBB', width, height, depth, colour, 0, 0, interlace))
            + extra + chunk(b'IDAT', zlib.compress(rows)) + chunk(b'IEND', b''))


def write_pictures():
    palette = chunk(b'PLTE', bytes(48)) + chunk(b'tRNS', b'\0\x80\xff')
    pictures = {'grey': png(5, 4, 8, 0), 'bits': png(9, 3, 1, 0), 'deep': png(3, 3, 16, 2), 'palette': png(5, 4, 4, 3, 0, palette),
                'alpha': png(4, 4, 8, 6), 'grey-alpha': png(4, 4, 16, 4), 'interlaced': png(9, 9, 8, 2, 1)}
    for name, data in pictures.items():
        seed('png', name, data)
    jpegs = {}
    try:
        from PIL import Image
        for mode in ('L', 'RGB', 'CMYK'):
            for progressive in (False, True):
                file = io.BytesIO()
                Image.linear_gradient('L').resize((20, 12)).convert(mode).save(
                    file, 'JPEG', progressive=progressive, quality=20, restart_marker_blocks=1 if mode == 'L' else 0)
                jpegs[mode.lower() + ('-progressive' if progressive else '')] = file.getvalue()
    except ImportError:
        pass
    for name, data in jpegs.items():
        seed('jpeg', name, data)
    seed('image_folder', 'two', b'cat/1.png\n' + pictures['grey'] + b'||dog/a/2.PNG\n' + pictures['alpha'])
    if 'rgb' in jpegs:
        seed('image_folder', 'jpeg', b'cat/1.jpg\n' + jpegs['rgb'] + b'||dog/x.txt\nno||dog/2.jpeg\n' + jpegs['l'])
    seed('image_folder', 'wrong', 'cat/1.jpg\nGIF89a')


def write_checkpoints():
    def members(name, values):
        seed('checkpoint', name, json.dumps(values)[1:])

    base = {'step': 3, 'buffer_ranks': 1, 'model': {}, 'record': {}}
    gpt = {'model_type': 'gpt2', 'layers': 1, 'heads': 2, 'embd': 16, 'ctx': 8, 'vocab': 28, 'dropout': 0.0, 'bias': True,
           'tied': True}
    llama = {'model_type': 'llama', 'num_hidden_layers': 1, 'num_attention_heads': 2, 'num_key_value_heads': 1,
             'hidden_size': 16, 'intermediate_size': 64, 'max_position_embeddings': 8, 'vocab_size': 28,
             'rms_norm_eps': 1e-5, 'rope_theta': 10000.0, 'rope_scaling': None, 'tie_word_embeddings': True}
    resnet = {'model_type': 'resnet', 'architecture': 'resnet20', 'num_classes': 10, 'in_chans': 3, 'width': 16,
              'num_features': 64, 'blocks': [3, 3, 3, 0], 'bottleneck': False, 'small_images': True, 'cifar': True,
              'plain_gamma': False, 'image_size': 32, 'label_names': ['cat', 'dog'],
              'pretrained_cfg': {'input_size': [3, 32, 32], 'mean': [0.5, 0.5, 0.5], 'std': [0.2, 0.2, 0.2]}}
    vit = {'model_type': 'vit', 'architecture': 'vit_cifar', 'num_classes': 10, 'num_features': 16, 'dropout': 0.1,
           'model_args': {'img_size': 32, 'patch_size': 4, 'in_chans': 3, 'embed_dim': 16, 'depth': 2, 'num_heads': 2},
           'pretrained_cfg': resnet['pretrained_cfg']}
    for name, model in (('none', {}), ('gpt', gpt), ('llama', llama), ('resnet', resnet), ('vit', vit)):
        members(name, {**base, 'model': model})
    members('whole', {**base, 'optimizer_steps': 2, 'record': {'options': {'layers': '1', 'lr': '0.001'}},
                      'scaler': {'scale': 65536.0, 'good': 1, 'skipped': 0}})
    numbers = {'step': 2, 'lr': 0.5, 'lr_mul': 1.0, 'weight_decay': 0.1, 'beta1': 0.9, 'beta2': 0.99, 'eps': 1e-8}
    values = {f'{before}{name}.{key}': x for before in ('', 'gen/') for name in ('weight', 'bias') for key, x in numbers.items()}
    trained = {**base, 'optimizer_steps': 2}
    for name, more in (('values', values), ('values-differ', {**values, 'bias.step': 3, 'bias.lr': 0.25}),
                       ('values-range', {**values, 'weight.beta1': 1.0, 'bias.beta1': 1.0}),
                       ('values-huge', {**values, 'weight.step': (1 << 63) - 1, 'weight.lr': -1e308}),
                       ('values-wrong', {**values, 'weight.step': 'two', 'weight.exp_avg': 1, 'bias.lr': [], '': 0})):
        members(name, {**trained, 'values': more})
    members('values-list', {**trained, 'values': [values]})
    own = {'sample': 7, 'note': 'ä', 'share': 0.5}
    for name, more in (('own', [own, {}, None]), ('own-object', own), ('own-wrong', [{'a': [1]}, 3, {'a': {}, 'b': None}])):
        members(name, {**trained, 'own': more})
    sound = {**base, 'version': 3, 'id': 'f', 'number': 1}
    for name, more in (('all-none', {}), ('all-files', {'files': [7, {'name': 'model/../../x'}, {'name': 'optimizer/'}]}),
                       ('all-own', {'own_files': [{'name': '/etc/passwd'}, {'name': '..', 'bytes': 1 << 62}]}),
                       ('all-replaces', {'id': 'x' * 50, 'replaces': ['f', 7, None]}), ('all-version', {'version': 2})):
        seed('checkpoint', name, json.dumps({**sound, **more}))


def write_pretrained():
    args = {'img_size': [8, 8], 'patch_size': 4, 'embed_dim': 4, 'depth': 1, 'num_heads': 2, 'in_chans': 3}
    images = {'input_size': [3, 8, 8], 'fixed_input_size': True, 'interpolation': 'bicubic', 'crop_pct': 0.9, 'crop_mode': 'center',
              'mean': [0.5] * 3, 'std': [0.5] * 3, 'pool_size': None, 'num_classes': 3, 'classifier': 'head'}
    timm = {'architecture': 'vit_tiny_patch16_224.augreg', 'num_classes': 3, 'global_pool': 'token', 'label_names': ['a', 'b', 'c'],
            'model_args': {**args, 'dynamic_img_size': False}, 'pretrained_cfg': images}
    seed('pretrained', 'timm', json.dumps(timm))
    seed('pretrained', 'knap', json.dumps({**timm, 'knap': {
        'model_type': 'vit', 'num_classes': 3, 'dropout': 0.0, 'model_args': {**args, 'img_size': 8}}}))
    seed('pretrained', 'flat', json.dumps({
        **images, 'architecture': 'vit_tiny_patch16_224', 'model_args': args, 'label_names': {'0': 'x', '2': 'y'}}))
    seed('pretrained', 'huge', json.dumps({**timm, 'knap': {
        'model_type': 'resnet', 'blocks': [10000] * 4, 'num_classes': 10 ** 9, 'in_chans': 3, 'width': 1 << 24, 'bottleneck': True}}))


def write_meetings():
    seed('meeting_file', 'one', 'knap t3\ntoken %s\nnet 12ab\nport 4000\naddress 10.0.0.1\naddress fe80::1\n' % ('0f' * 16))
    seed('meeting_file', 'old', 'knap t2\ntoken x\n')

    seat = bytes([0x20, 1] + [0] * 14) * 2 + bytes(16 * 6) + struct.pack('<QQii', 5, 6, 4000, 2)
    seed('tcp_seat', 'two', seat)
    seed('tcp_seat', 'nine', seat[:-4] + struct.pack('<i', 9))
    seed('tcp_seat', 'minus', seat[:-4] + struct.pack('<i', -1))
    for sealed in (0, 1):
        for rank, size in ((1, 3),) if sealed else ((1, 2),):
            seed('tcp_hello', f'{sealed}-{rank}-{size}', bytes([sealed]) + b'knap t3\0' + struct.pack(
                '<QQQii', 1, 2, 1640, rank, size) + seat + b'x' * 44 + bytes(4))
        for sender in (0, 1, 2):
            seed('tcp_greeting', f'{sealed}-{sender}', bytes([sealed]) + b'knap t3\0' + struct.pack('<iiii', sender, 0, 1, 0)
                 + b'x' * 44)


def shard(name, tensors, data, sums=None):
    """tensors: name -> (dtype, sizes, offsets, whole shape)"""
    header, at = {}, 0
    info = {n: {'saved_offsets': t[2], 'global_shape': t[3]} for n, t in tensors.items()}
    for n, (dtype, sizes, _, _) in tensors.items():
        size = {'F32': 4, 'U8': 1}[dtype]
        for s in sizes:
            size *= s
        header[n] = {'dtype': dtype, 'shape': sizes, 'data_offsets': [at, at + size]}
        at += size
    meta = {'format': 'pt', 'DCP_VERSION': '1.0', 'DCP_SHARDING_INFO': json.dumps(info), 'KNAP_ID': 'abc'}
    if sums:
        meta['KNAP_XXH3'] = json.dumps(sums)
    return name.encode() + b'\n' + json.dumps({'__metadata__': meta, **header}).encode() + b'\n\n' + data[:at]


def write_shards():
    first, second = 'shard-00001-model-00001-of-00001.safetensors', 'shard-00002-model-00001-of-00001.safetensors'
    data = bytes(64)
    seed('pieces', 'rows', shard(first, {'w': ('F32', [1, 2], [0, 0], [3, 2])}, data) + b'||' +
         shard(second, {'w': ('F32', [2, 2], [1, 0], [3, 2]), 'b': ('U8', [3], [0], [3])}, data))
    seed('pieces', 'columns', shard(first, {'w': ('U8', [2, 2], [0, 0], [2, 3])}, data) + b'||' +
         shard(second, {'w': ('U8', [2, 1], [0, 2], [2, 3])}, data))
    seed('pieces', 'sums', shard(first, {'w': ('U8', [1], [0], [1])}, data, {'w': 'c44bdff4074eecdb'}))
    seed('pieces', 'scalar', shard(first, {'w': ('F32', [], [], []), 'e': ('F32', [0, 4], [0, 0], [0, 4])}, data))
    plain = b'{"w": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}\n\nab'
    seed('pieces', 'plain', b'model.safetensors\n' + plain)
    seed('pieces', 'index', b'a.safetensors\n' + plain + b'||model.safetensors.index.json\n' +
         b'{"metadata": {"total_size": 2}, "weight_map": {"w": "a.safetensors"}}')
    name, index = 'model-0000%d-of-00002.safetensors', b'||model.safetensors.index.json\n'
    two = name.encode() % 1 + b'\n' + plain + b'||' + name.encode() % 2 + b'\n' + plain.replace(b'"w"', b'"v"')
    both = {'w': name % 1, 'v': name % 2}
    for what, weights in (('two', both), ('swapped', {'w': name % 2, 'v': name % 1}), ('some', {'w': name % 1}),
                          ('gone', {**both, 'x': 'gone.safetensors'}), ('more', {**both, 'x': name % 1}),
                          ('outside', {**both, 'x': '../x.safetensors'}), ('itself', {'w': 'model.safetensors.index.json'}),
                          ('number', {**both, 'x': 7}), ('none', {}), ('list', [both])):
        seed('pieces', 'index-' + what, two + index + json.dumps({'weight_map': weights}).encode())
    seed('pieces', 'index-twice', two + index + b'{"weight_map": {"w": "a", "w": "b"}}')
    seed('pieces', 'index-cut', two + index + b'{"weight_map": {"w": "')
    huge = 1 << 62
    seed('pieces', 'huge', shard(first, {'w': ('U8', [0], [0], [huge])}, data))
    seed('pieces', 'huge-empty', shard(first, {'w': ('U8', [0, 1, 1], [0, 0, 0], [0, huge, huge])}, data))


if __name__ == '__main__':
    for write in (write_safetensors, write_tokenizers, write_texts, write_choices, write_options, write_tables, write_idx, write_cifar,
                  write_pictures, write_checkpoints, write_pretrained, write_meetings, write_shards):
        write()
