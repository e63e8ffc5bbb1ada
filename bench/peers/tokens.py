"""scripts/peers tokens: knap-tokenize beside the tokenizers library and sentencepiece.

    scripts/peers tokens                      ids, merges and speed on new texts; needs torch, tokenizers, sentencepiece
    scripts/peers tokens --seed 3 --build build
    scripts/peers tokens --text FILE          on a text of yours
    scripts/peers tokens --write              makes tests/models/tokenizers anew: small tokenizers, a text, and its ids' hashes

Texts are of many scripts, code, random code points, and what cuts words in odd places."""
import argparse
import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..')
GOLDEN = os.path.join(ROOT, 'tests', 'models', 'tokenizers')
TEXT_PARTS = 16
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN = LLAMA3.replace('{1,3}', '')
SEVERAL = [r'\p{N}{1,3}', r'[\p{Han}]+|[\p{Hiragana}\p{Katakana}]+|\p{Latin}+',
           r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+"]
SCRIPTS = [(0x20, 0x7e), (0xa0, 0x17f), (0x300, 0x36f), (0x370, 0x3ff), (0x400, 0x4ff), (0x590, 0x5ff), (0x600, 0x6ff),
           (0x900, 0x97f), (0xe00, 0xe7f), (0x2000, 0x206f), (0x3040, 0x30ff), (0x4e00, 0x9fff), (0xac00, 0xd7a3), (0x1f300, 0x1f6ff)]
SPACES = [' ', '  ', '\n', '\n\n', '\t', ' \n', '   ', '\r\n', '\u00a0', '\u3000', '\u180e', '\u0085', '\u2028', '']
ODD = ["I'm", "don't", "WE'LL", "'\u017f", '123456', '3.14', "''s", ' ', '  ', '\n', '{}()', '<s>', '</s>', 'é', 'e\u0301', 'ﬁ',
       '\u212b', '각', '\u1100\u1161\u11a8', '<0x41>', '▁', '▁▁a', '<mask>', ' <mask> ', '<x>  ', 'é!', 'e\u0301!',
       'ab\U00031350c', 'x\u180ey', '12\U00010d413']
MORE_ODD = ['漢々・\U0002ebf0x', '<x> \n\n \n', '\ua7cb\ua7dc']    # not in the golden text, on whose ids other files rest
SENTENCES = ['Der schnelle braune Fuchs springt über den faulen Hund. ', 'Съешь ещё этих мягких французских булок, да выпей чаю. ',
             '素早い茶色の狐がのろまな犬を飛び越える。', '敏捷的棕色狐狸跳过了懒狗。', '빠른 갈색 여우가 게으른 개를 뛰어넘는다. ',
             'नमस्ते दुनिया, यह एक परीक्षण है। ', 'مرحبا بالعالم، هذا اختبار. ', 'שלום עולם, זה מבחן. ', 'สวัสดีชาวโลก นี่คือการทดสอบ ',
             'Ελληνικό κείμενο για δοκιμή. ', 'Việt Nam đất nước tôi yêu. ', 'for (int i = 0; i < n; i++)\n    x[i] += 1.5e-3;\n\n']


RULES = {'ﬁ': 'fi', 'é': 'e', 'e\u0301': 'e', 'e\u0301\u0301': 'E', '\u212b': 'Å', '\n': ' ', '\u3000': ' x', '\t': '', '\u1100\u1161': '가',
         '\u00a0': ' ', 'А': 'а', '犬': '犬犬'}
SYMBOLS = ['<mask>', 'ﬁ', 'don', "n't", 'd j', '\u1100', '<x>']


def make_text(seed, size, odd=(*ODD, *MORE_ODD)):
    draw = random.Random(seed)

    def point():
        u = draw.randrange(1, 0x110000 - 0x800)
        return chr(u if u < 0xd800 else u + 0x800)

    def word():
        low, high = draw.choice(SCRIPTS)
        return ''.join(chr(draw.randint(low, high)) for _ in range(draw.randint(1, 8)))

    text, length = [' ' * 300 + 'a' * 500 + '\n' * 200 + 'ab ' * 200 + '1' * 300], 0
    while length < size:
        kind = draw.randrange(4)
        text.append(point() if kind == 0 else word() + draw.choice(SPACES) if kind == 1 else
                    draw.choice(odd) if kind == 2 else draw.choice(SENTENCES))
        length += len(text[-1].encode())
    return ''.join(text)


# ---- tokenizers ------------------------------------------------------------------------------------------------------------------

def byte_level(text, vocab, cuts=None, normalizer=None, ignore_merges=False, lines=False, specials=('<|endoftext|>',)):
    t = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    t.normalizer = normalizer
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cuts is None)
    t.pre_tokenizer = whole if cuts is None else pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(c), 'isolated') for c in cuts] + [whole])
    t.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=list(specials), show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    if lines:
        with tempfile.NamedTemporaryFile('w', newline='', suffix='.txt') as f:
            f.write(text)
            f.flush()
            t.train([f.name], trainer)
    else:
        t.train_from_iterator([text] if isinstance(text, str) else text, trainer)
    return t


def make_all(text, vocab, folder):
    """Small tokenizers of every kind, each in a folder of its own: [name, function that gives a text's ids]."""
    made = {'gpt2': byte_level(text, vocab), 'llama3': byte_level(text, vocab, [LLAMA3], ignore_merges=True),
            'qwen': byte_level(text, vocab, [QWEN], normalizers.NFC()), 'several': byte_level(text, vocab, SEVERAL)}
    spaced = byte_level(text, vocab)
    spaced.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    spaced.add_tokens([AddedToken('<mask>', lstrip=True, special=True), AddedToken('<x>', rstrip=True), AddedToken('\n\n')])
    made['spaced'] = spaced
    made['qwen'].add_tokens([AddedToken('é!', normalized=True)])    # found in what the normalizer makes
    # Tokens that no merge makes any more: with ignore_merges a word that is one is found.
    fewer = json.loads(made['llama3'].to_str())
    del fewer['model']['merges'][-len(fewer['model']['merges']) // 4:]
    made['llama3'] = Tokenizer.from_str(json.dumps(fewer))
    for name, t in made.items():
        os.makedirs(os.path.join(folder, name), exist_ok=True)
        t.save(os.path.join(folder, name, 'tokenizer.json'), pretty=False)
    result = {name: (lambda s, t=t: t.encode(s, add_special_tokens=False).ids) for name, t in made.items()}
    result['sentencepiece'] = pieces(folder, 'sentencepiece', normalization_rule_name='identity', remove_extra_whitespaces=False)
    with open(os.path.join(folder, 'rules'), 'w') as f:    # code points, and those that go in their place
        f.write(''.join(f'{" ".join(f"{ord(c):X}" for c in a)}\t{" ".join(f"{ord(c):X}" for c in b)}\n' for a, b in RULES.items()))
    result['symbols'] = pieces(folder, 'symbols', normalization_rule_tsv='../rules', user_defined_symbols=SYMBOLS)
    os.remove(os.path.join(folder, 'rules'))
    return result


def make_more(folder):
    """More kinds, whose tables of characters are too large to keep: SentencePiece's own, and as tokenizers reads one."""
    made = {'nmt_nfkc': {}, 'nfkc_cf': {'normalization_rule_name': 'nfkc_cf', 'add_dummy_prefix': False, 'user_defined_symbols': SYMBOLS},
            'nmt_nfkc_cf': {'normalization_rule_name': 'nmt_nfkc_cf', 'remove_extra_whitespaces': False, 'user_defined_symbols': SYMBOLS + ['  ']},
            'nfkc': {'normalization_rule_name': 'nfkc', 'byte_fallback': False, 'character_coverage': 1.0, 'vocab_size': 500},
            'spaces': {'normalization_rule_name': 'identity', 'user_defined_symbols': ['▁▁', ' a', 'a▁', '▁ ▁']}}
    result = {name: pieces(folder, name, **options) for name, options in made.items()}
    for name, to in ('nmt_nfkc', ' '), ('nfkc_cf', '▁'):
        with open(os.path.join(folder, name, 'tokenizer.model'), 'rb') as f:
            table = dict(fields(dict(fields(f.read()))[3]))[2]
        t = Tokenizer(models.BPE(byte_fallback=True))
        t.normalizer = normalizers.Sequence([normalizers.Precompiled(table), normalizers.Strip(left=to == ' ', right=True),
                                             normalizers.Replace(Regex(' {2,}'), to)])
        t.pre_tokenizer = pre_tokenizers.Metaspace(split=to == ' ')
        t.decoder = decoders.Metaspace()
        t.train_from_iterator(SENTENCES * 20, trainers.BpeTrainer(vocab_size=900, show_progress=False, special_tokens=[
            f'<0x{i:02X}>' for i in range(256)]))
        t.add_tokens([AddedToken('<mask>', lstrip=True, special=True), AddedToken('<x>', rstrip=True, normalized=False), AddedToken('ﬁ!')])
        os.makedirs(os.path.join(folder, name + '_json'))
        t.save(os.path.join(folder, name + '_json', 'tokenizer.json'), pretty=False)
        result[name + '_json'] = lambda s, t=t: t.encode(s, add_special_tokens=False).ids
    return result


def fields(message):
    """The numbers and values of a message of protocol buffers."""
    at = 0

    def number():
        nonlocal at
        value = shift = 0
        while True:
            at, value, shift = at + 1, value | (message[at] & 127) << shift, shift + 7
            if message[at - 1] < 128:
                return value
    while at < len(message):
        key = number()
        size = {0: 0, 1: 8, 2: None, 5: 4}[key & 7]
        size = number() if size is None else size
        value = message[at:at + size] if key & 7 else number()
        at += size if key & 7 else 0
        yield key >> 3, value


def pieces(folder, name, **options):
    """A SentencePiece model of its own kind of normalization: the function that gives a text's ids."""
    folder = os.path.join(folder, name)
    os.makedirs(folder, exist_ok=True)
    with contextlib.chdir(folder):    # a model keeps the paths
        with open('text', 'w', newline='') as f:
            f.write(''.join(SENTENCES) * 20 + 'the cat sat on the mat. ' * 20)
        sentencepiece.SentencePieceTrainer.train(
            input='text', model_prefix='tokenizer', model_type='bpe', minloglevel=2,
            **{'vocab_size': 700, 'byte_fallback': True, 'character_coverage': 0.98, 'max_sentence_length': 100000, **options})
    os.remove(os.path.join(folder, 'text'))
    os.remove(os.path.join(folder, 'tokenizer.vocab'))
    model = sentencepiece.SentencePieceProcessor(model_file=os.path.join(folder, 'tokenizer.model'))
    # The tokens <s> and </s> in a text are those tokens for Knap, as for transformers; sentencepiece reads them as text.
    return lambda s: None if '<s>' in s or '</s>' in s else model.encode(s)


# ---- golden files ----------------------------------------------------------------------------------------------------------------

def parts(text):
    size = (len(text) + TEXT_PARTS - 1) // TEXT_PARTS
    return [text[i * size:(i + 1) * size] for i in range(TEXT_PARTS)]


def fnv(ids):
    h = 0xcbf29ce484222325
    for i in ids:
        for byte in i.to_bytes(4, 'little'):
            h = (h ^ byte) * 0x100000001b3 % 2 ** 64
    return h


def write_golden():
    shutil.rmtree(GOLDEN, ignore_errors=True)
    os.makedirs(GOLDEN)
    text = make_text(1, 60000, ODD)
    with open(os.path.join(GOLDEN, 'text'), 'w', newline='') as f:
        f.write(text)
    made = make_all(text, 700, GOLDEN)
    with open(os.path.join(GOLDEN, 'ids'), 'w') as f:
        f.write('# scripts/peers tokens --write: tokenizer, first byte and bytes of a part of the text, ids, FNV-1a of the ids as u32\n')
        at = 0
        for part in parts(text):
            size = len(part.encode())
            for name, ids_of in made.items():
                ids, begin = ids_of(part), part
                if ids is None:
                    begin = re.split('</?s>', part)[0]
                    ids = ids_of(begin)
                f.write(f'{name} {at} {len(begin.encode())} {len(ids)} {fnv(ids):016x}\n')
            at += size
    return 0


# ---- side by side ----------------------------------------------------------------------------------------------------------------

def knap_ids(tool, folder, text, work):
    path = os.path.join(work, 'x')
    with open(path, 'w', newline='') as f:
        f.write(text)
    run = subprocess.run([tool, 'encode', '--tokenizer', folder, '--print-ids', path], capture_output=True, text=True)
    return [int(i) for i in run.stdout.split()] if run.returncode == 0 else run.stderr.strip()


def compare_ids(tool, seed, work):
    wrong = 0
    made = {**make_all(make_text(seed, 400000), 3000, work), **make_more(work)}
    for k in range(4):
        text = make_text(seed * 100 + k, 300000 if k == 0 else 60000)
        for name, ids_of in made.items():
            want = ids_of(text)
            if want is None:
                text = text.replace('<s>', '').replace('</s>', '')
                want = ids_of(text)
            got = knap_ids(tool, os.path.join(work, name), text, work)
            if want != got:
                wrong += 1
                at = next((i for i, (a, b) in enumerate(zip(want, got)) if a != b), min(len(want), len(got)))
                print(f'{name}: {got}' if isinstance(got, str) else f'{name}: {len(got)} ids, {len(want)} wanted; id {at}: {got[at - 3:at + 6]} '
                      f'for {want[at - 3:at + 6]}')
    print(f'ids: {4 * len(made)} texts and tokenizers, {wrong} wrong')
    return wrong


def compare_training(tool, text, work):
    wrong, path, out = 0, os.path.join(work, 'train'), os.path.join(work, 'mine.json')
    plain, end = text.replace('<|endoftext|>', ''), '<|endoftext|>'
    # Knap leaves special tokens out, the library counts them as text: it is given the parts between them.
    documents = [plain[i:i + 10000] for i in range(0, len(plain), 10000)]
    for name, cuts, lines, text in [('gpt2', None, False, plain), ('gpt2', None, True, plain), ('llama3', [LLAMA3], False, plain),
                                    ('qwen', [QWEN], False, plain), ('gpt2', None, False, documents)]:
        with open(path, 'w', newline='') as f:
            f.write(text if text is plain else end.join(text))
        begun = time.time()
        subprocess.run([tool, 'train', '--vocab', '4096', '--pattern', name, '--out', out, '--overwrite', path] + ['--by-line'] * lines,
                       check=True, stdout=subprocess.DEVNULL)
        mine, begun = time.time() - begun, time.time()
        peer = json.loads(byte_level(text, 4096, cuts, lines=lines).to_str())['model']
        theirs = time.time() - begun
        with open(out) as f:
            ours = json.load(f)['model']
        same = [tuple(m) for m in ours['merges']] == [tuple(m) for m in peer['merges']] and ours['vocab'] == peer['vocab']
        wrong += not same
        print(f'training {name}{" by line" * lines}{f" of {len(text)} texts" * (text is documents)}: {len(peer["merges"])} merges {"equal" if same else "DIFFER"}; '
              f'{mine:.2f} s, tokenizers {theirs:.2f} s')
    return wrong


def compare_speed(tool, text, work):
    path, json_path = os.path.join(work, 'speed'), os.path.join(work, 'gpt2', 'tokenizer.json')
    lines = text.splitlines(keepends=True)
    with open(path, 'w', newline='') as f:
        f.write(text)
    peer, size = Tokenizer.from_file(json_path), len(text.encode()) / 1e6
    for threads in (1, os.cpu_count()):
        os.environ['RAYON_NUM_THREADS'] = str(threads)
        took = []
        for _ in range(3):
            begun = time.time()
            subprocess.run([tool, 'encode', '--tokenizer', json_path, '--out', path + '.tokens', path], check=True,
                           env=dict(os.environ, OMP_NUM_THREADS=str(threads)), stdout=subprocess.DEVNULL)
            mine, begun = time.time() - begun, time.time()
            if threads > 1:
                peer.encode_batch(lines, add_special_tokens=False)
            else:
                peer.encode(text, add_special_tokens=False)
            took.append((size / mine, size / (time.time() - begun)))
        print(f'{threads} thread{"s" * (threads > 1)}: {max(t[0] for t in took):.1f} MB/s with start and file, tokenizers '
              f'{max(t[1] for t in took):.1f}, {size:.1f} MB')


def main(args):
    p = argparse.ArgumentParser(prog='scripts/peers tokens', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--seed', type=int, default=int(time.time()))
    p.add_argument('--build', default=os.path.join(ROOT, 'build'))
    p.add_argument('--text')
    p.add_argument('--write', action='store_true')
    o = p.parse_args(args)
    if o.write:
        return write_golden()
    tool = os.path.join(o.build, 'models', 'knap-tokenize')
    with tempfile.TemporaryDirectory() as work:
        if o.text:
            with open(o.text, newline='', errors='replace') as f:
                text = f.read()
        else:
            text = make_text(o.seed, 2000000)
        print(f'seed {o.seed}')
        wrong = compare_ids(tool, o.seed, work) + compare_training(tool, text, work)
        compare_speed(tool, text, work)
    return 1 if wrong else 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
