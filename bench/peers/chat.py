"""scripts/peers chat: ids of conversations by the templates that generate --export writes.

    scripts/peers chat                     tests/models/chat_golden.json anew: conversations, and their ids by transformers'
                                           apply_chat_template; test_models compares Knap's ids with them
    scripts/peers chat --seed 3 --build build

Needs torch, transformers."""
import argparse
import json
import os
import random
import subprocess
import sys
import tempfile

import transformers

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..')
GOLDEN = os.path.join(ROOT, 'tests', 'models', 'chat_golden.json')
WORDS = ['hello', '  lead', ' trail ', 'new\nline', '\n\nstart', 'é ü 漢字', 'a\u00a0', "I'm 12345 ok!", '<tag>', '', 'tabs\t\tin',
         '\u3000wide\u3000', '1+1=2.', '<|im_end|> in text']


def conversation():
    def text():
        return ' '.join(random.choice(WORDS) for _ in range(random.randrange(6)))
    messages = [{'role': 'system', 'content': text()}] if random.random() < .4 else []
    for _ in range(random.randrange(1, 4)):
        messages += [{'role': 'user', 'content': text()}, {'role': 'assistant', 'content': text()}]
    return messages


def main(argv):
    parser = argparse.ArgumentParser('scripts/peers chat', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--build', default=os.path.join(ROOT, 'build'))
    parser.add_argument('--seed', type=int, default=1)
    args = parser.parse_args(argv)
    random.seed(args.seed)
    tokenizer = os.path.join(ROOT, 'tests', 'models', 'tokenizers', 'gpt2')
    talks, golden = [conversation() for _ in range(12)], []
    with tempfile.TemporaryDirectory() as folder:
        data, run, out = (os.path.join(folder, name) for name in ('data', 'run', 'out'))
        with open(data, 'w') as f:
            f.writelines(json.dumps({'messages': t}) + '\n' for t in talks)
        for chat in 'chatml', 'llama3', 'llama2', 'plain':
            for command in (['train_gpt', '--data', data, '--tokenizer', tokenizer, '--template', chat, '--layers', '1', '--heads', '1',
                             '--embd', '8', '--steps', '1', '--ctx', '512', '--batch', '1', '--out', run, '--overwrite'],
                            ['generate', '--from', run, '--export', out]):
                done = subprocess.run([os.path.join(args.build, 'models', command[0]), *command[1:]], capture_output=True, text=True)
                if done.returncode:
                    sys.exit(done.stderr)
            auto = transformers.AutoTokenizer.from_pretrained(out)
            golden += [{'template': chat, 'messages': t, 'ids': auto.apply_chat_template(t, return_dict=False)} for t in talks]
    with open(GOLDEN, 'w') as f:
        f.write('[\n' + ',\n'.join(json.dumps(g) for g in golden) + '\n]\n')
    print(f'{len(golden)} conversations, {sum(len(g["ids"]) for g in golden)} ids')
