#!/usr/bin/env python3
"""tests/fuzz/seeds.py: writes the seeds of the corpora, tests/fuzz/<target>/seed-*: small inputs that
each reader takes. Inputs that once broke a reader lie beside them under other names, and stay.

Pictures of kinds that Python's own library can't write (JPEG) come from Pillow, where it is there."""
import base64
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


def character_table():
    """SentencePiece's, of a trie: a becomes y, an acute e becomes E."""
    unit = [0] * 512

    def child(at, to, ends, label):
        unit[at] = (at ^ to) << 10 | ends << 8 | label
    unit[0] = 256 << 10
    child(256 ^ ord('A'), 40, 1, ord('A'))
    child(256 ^ 0xc3, 256, 0, 0xc3)
    child(256 ^ 0xa9, 41, 1, 0xa9)
    unit[40], unit[41] = 1 << 31, 2 | 1 << 31
    return struct.pack('<I512I', 2048, *unit) + b'y\0E\0'


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

    table = base64.b64encode(character_table()).decode()
    for name, more in (('map', {}), ('map-longest', {'longest': True})):
        seed('tokenizer', name, tokenizer(
            ['▁', 'a', 'E', 'y', '12', 'b'], normalizer={'type': 'Sequence', 'normalizers': [
                {'type': 'Precompiled', 'precompiled_charsmap': table, **more}, {'type': 'Strip', 'strip_left': True, 'strip_right': True},
                {'type': 'Replace', 'pattern': {'Regex': ' {2,}'}, 'content': '▁'}]}, pre_tokenizer={
                    'type': 'Split', 'pattern': {'Regex': '[\\p{Han}]|\\P{Latin}'}, 'behavior': 'Isolated'},
            added_tokens=[
                {'id': 6, 'content': 'bé', 'user_defined': True}, {'id': 7, 'content': '<e>', 'rstrip': True, 'normalized': False}],
            decoder={'type': 'Metaspace', 'replacement': '▁'}))

    def field(number, body):
        length = bytes([len(body)]) if len(body) < 128 else bytes([len(body) & 127 | 128, len(body) >> 7])
        return bytes([number << 3 | 2]) + length + body

    def piece(text, kind, score):
        return field(1, field(1, text.encode()) + b'\x15' + struct.pack('<f', score) + bytes([3 << 3, kind]))

    seed('sentencepiece', 'bpe', piece('<unk>', 2, 0) + piece('<s>', 3, 0) + piece('<0x41>', 6, 0) + piece('▁a', 1, -1) +
         piece('▁', 1, -2) + piece('a', 1, -3) + field(2, b'\x18\x02') + field(3, b'\x18\x01\x20\x00'))
    seed('sentencepiece', 'map', piece('<unk>', 2, 0) + piece('b', 4, 0) + piece('▁a', 1, -1) + piece('▁', 1, -2) + piece('a', 1, -3) +
         piece('E', 1, -4) + field(2, b'\x18\x02') + field(3, field(2, character_table())))
    seed('merges', 'vocabulary', '#version: 0.2\na b\n||{"a": 1, "b": 0, "ab": 2, "<|e|>": 3}')
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
    seed('text', 'llmc', struct.pack('<256i', 20240520, 1, 40, *[0] * 253) + struct.pack('<40H', *[i * 1000 for i in range(40)]))
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
    seed('options_file', 'model', '# a run\r\nlayers = 2\nlr = 1.5e-3 # peak\nbias = false\nsteps = 1_000\n')
    seed('options_file', 'texts', 'data = \'C:\\x\'\nprompt = "\\"\\u00e9\\U0001F600\\n\\\\"\noptimizer = "muon"\n')
    seed('options_file', 'twice', 'lr = 1\nlr = 1\n')


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


def gguf(values, tensors, version=3, counts=None, alignment=32):
    """A GGUF: values are (key, type, ...) as written; tensors (name, sizes with the last dim first, type, bytes)."""
    def text(t):
        t = t if isinstance(t, bytes) else t.encode()
        return struct.pack('<Q', len(t)) + t

    def value(kind, x):
        if kind in (8, 9):
            return text(x) if kind == 8 else struct.pack('<IQ', x[0], len(x[1])) + b''.join(value(x[0], y) for y in x[1])
        return struct.pack('<' + {0: 'B', 4: 'I', 5: 'i', 6: 'f', 7: '?', 10: 'Q', 12: 'd'}[kind], x)

    head, data = b'', b''
    for key, kind, x in values:
        head += text(key) + struct.pack('<I', kind) + value(kind, x)
    for name, sizes, kind, content in tensors:
        head += text(name) + struct.pack(f'<I{len(sizes)}QIQ', len(sizes), *sizes, kind, len(data))
        data += content + bytes(-len(content) % alignment)
    head = b'GGUF' + struct.pack('<IQQ', version, *(counts or (len(tensors), len(values)))) + head
    return head + bytes(-len(head) % alignment) + data


def one_file_models():
    """(name, values, tensors) of a small GPT-2 and a small Llama with its two kinds of tokenizers."""
    def number(n, kind=0):
        return b'\x34' * (n * (2 if kind == 1 else 4)) if kind != 8 else (b'\x00\x3c' + bytes(range(32))) * (n // 32)

    bpe = [('tokenizer.ggml.model', 8, 'gpt2'), ('tokenizer.ggml.pre', 8, 'gpt-2'), ('tokenizer.ggml.tokens', 9, (8, ['a', 'b', 'ab', '<e>'])),
           ('tokenizer.ggml.token_type', 9, (5, [1, 1, 1, 3])), ('tokenizer.ggml.merges', 9, (8, ['a b'])), ('tokenizer.ggml.eos_token_id', 4, 3)]
    pieces = [('tokenizer.ggml.model', 8, 'llama'), ('tokenizer.ggml.tokens', 9, (8, ['<unk>', '<s>', 'a', '\u2581', '\u2581a'])),
              ('tokenizer.ggml.scores', 9, (6, [0, 0, -2, -3, -1])), ('tokenizer.ggml.token_type', 9, (5, [2, 3, 1, 1, 1])),
              ('tokenizer.ggml.bos_token_id', 4, 1)]
    own = [('tokenizer.huggingface.json', 8, tokenizer(['a', 'b', 'ab'], [['a', 'b']]))]
    gpt = [('general.architecture', 8, 'gpt2'), *((f'gpt2.{k}', 4, n) for k, n in (
        ('block_count', 1), ('attention.head_count', 2), ('embedding_length', 4), ('context_length', 4), ('feed_forward_length', 16)))]
    weights = [('token_embd.weight', [4, 4], 0), ('position_embd.weight', [4, 4], 0)]
    for name, out, into in (('attn_norm', 4, 0), ('attn_qkv', 12, 4), ('attn_output', 4, 4), ('ffn_norm', 4, 0), ('ffn_up', 16, 4), ('ffn_down', 4, 16)):
        weights += [(f'blk.0.{name}.weight', [into, out] if into else [out], 1 if into else 0), (f'blk.0.{name}.bias', [out], 0)]
    weights += [('output_norm.weight', [4], 0), ('output_norm.bias', [4], 0)]
    llama = [('general.architecture', 8, 'llama'), *((f'llama.{k}', 4, n) for k, n in (
        ('block_count', 1), ('attention.head_count', 2), ('attention.head_count_kv', 1), ('embedding_length', 32), ('context_length', 4),
        ('feed_forward_length', 32), ('rope.dimension_count', 16))), ('llama.attention.layer_norm_rms_epsilon', 6, 1e-5)]
    parts = [('token_embd.weight', [32, 5], 8), ('output_norm.weight', [32], 0), ('output.weight', [32, 5], 8), ('rope_freqs.weight', [8], 0)]
    for name, out in (('attn_q', 32), ('attn_k', 16), ('attn_v', 16), ('attn_output', 32), ('ffn_gate', 32), ('ffn_up', 32), ('ffn_down', 32)):
        parts.append((f'blk.0.{name}.weight', [32, out], 8))
    parts += [('blk.0.attn_norm.weight', [32], 0), ('blk.0.ffn_norm.weight', [32], 0)]

    def filled(list_):
        return [(name, sizes, kind, struct.pack('<f', 1) * 8 if 'rope' in name else number(sizes[0] * (sizes + [1])[1], kind))
                for name, sizes, kind in list_]
    return (('gpt2', gpt + bpe, filled(weights)), ('llama', llama + pieces, filled(parts)), ('own', llama + own, filled(parts)))


def write_one_file():
    for name, values, tensors in one_file_models():
        seed('gguf', name, gguf(values, tensors))
    _, values, tensors = one_file_models()[0]
    seed('gguf', 'head', gguf(values, [*tensors, ('output.weight', *tensors[0][1:])]))
    huge = (1 << 64) - 1
    seed('gguf', 'old', gguf(values, tensors, 1))
    seed('gguf', 'swapped', gguf(values, tensors, 0x03000000))
    seed('gguf', 'many-values', gguf(values, tensors, counts=(len(tensors), huge)))
    seed('gguf', 'many-tensors', gguf(values, tensors, counts=(huge, len(values))))
    seed('gguf', 'cut', gguf(values, tensors)[:-40])
    seed('gguf', 'twice', gguf(values, [*tensors, tensors[0]]))
    seed('gguf', 'key-twice', gguf([*values, values[1]], tensors))
    seed('gguf', 'other', gguf(values, [*tensors, ('x', [4], 0, bytes(16))]))
    seed('gguf', 'wide', gguf(values, [('token_embd.weight', [1 << 62, 1 << 62], 0, bytes(64)), *tensors[1:]]))
    seed('gguf', 'kind', gguf(values, [('token_embd.weight', [4, 4], 12, bytes(64)), *tensors[1:]]))
    seed('gguf', 'dims', gguf(values, [('token_embd.weight', [4, 4, 1, 1, 1], 0, bytes(64)), *tensors[1:]]))
    for what, kind, x in (('long-array', 9, (4, [])), ('alignment', 4, 48), ('layers', 4, 100000), ('text', 8, 'x')):
        key = {'alignment': 'general.alignment', 'layers': 'gpt2.block_count'}.get(what, 'gpt2.embedding_length')
        changed = gguf([v for v in values if v[0] != key] + [(key, kind, x)], tensors)
        seed('gguf', what, changed.replace(struct.pack('<IQ', 4, 0), struct.pack('<IQ', 4, 1 << 61)) if what == 'long-array' else changed)
    magic, sizes = 20240326, (4, 5, 1, 2, 4, 128)
    for name, version, width in (('f32', 3, 4), ('bf16', 5, 2)):
        whole = (128 * 4 + 4 * 4 + 12 * 16 + 13 * 4 + 8) * width
        seed('llmc', name, struct.pack('<8i', magic, version, *sizes) + b'\x34' * whole)
    seed('llmc', 'version', struct.pack('<8i', magic, 2, *sizes))
    seed('llmc', 'cut', struct.pack('<8i', magic, 3, *sizes) + bytes(100))
    seed('llmc', 'negative', struct.pack('<8i', magic, 3, 4, -5, 1, 2, 4, 128))
    seed('llmc', 'huge', struct.pack('<8i', magic, 5, 1 << 30, 1 << 30, 100000, 1, 1 << 24, 1 << 30))
    config = {'model_type': 'llama', 'num_hidden_layers': 1, 'num_attention_heads': 2, 'num_key_value_heads': 2, 'hidden_size': 4,
              'intermediate_size': 4, 'max_position_embeddings': 4, 'vocab_size': 5, 'rms_norm_eps': 1e-5, 'tie_word_embeddings': True,
              'eos_token_id': [3, 99], 'rope_theta': 10000.0}
    seed('import_config', 'llama', json.dumps(config))
    for what, more in (('mistral', {'model_type': 'mistral', 'sliding_window': 2}), ('gemma', {'model_type': 'gemma'}),
                       ('quantized', {'quantization_config': {'quant_method': 'gptq'}}), ('layers', {'num_hidden_layers': 100000}),
                       ('vocab', {'vocab_size': 1 << 40}), ('heads', {'num_attention_heads': 0}), ('untied', {'tie_word_embeddings': False}),
                       ('rope', {'rope_scaling': {'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
                                                  'original_max_position_embeddings': 8192}})):
        seed('import_config', what, json.dumps({**config, **more}))
    gpt = {'model_type': 'gpt2', 'n_layer': 1, 'n_head': 2, 'n_embd': 4, 'n_positions': 4, 'vocab_size': 5}
    seed('import_config', 'gpt2', json.dumps(gpt))


if __name__ == '__main__':
    for write in (write_safetensors, write_tokenizers, write_texts, write_choices, write_options, write_tables, write_idx, write_cifar,
                  write_pictures, write_checkpoints, write_pretrained, write_meetings, write_shards, write_one_file):
        write()
