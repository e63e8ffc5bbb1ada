#!/usr/bin/env python3
"""scripts/functions.py: the page of public functions, made from the headers.

    scripts/functions.py >docs/functions.md

A function's meaning is the first sentence of the comment behind its declaration, or of the one before it, which counts
for all declarations down to a blank line or to one with a comment of its own. `scripts/lint functions_page` fails where the page is stale.
"""
import itertools
import os
import re
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'tests', 'lint'))
from files import public_headers, text

HEAD = """# Public functions

Every function that a program may call, by header, with the first sentence of its comment;
functions that share a comment share a row. The header has the rest. `...` stands for options:
`kn_sgd(&net, .lr = 0.1)`. `scripts/functions.py` makes this page, `scripts/lint` compares it with
the headers.
"""
PART = re.compile(r'''
    (?P<blank>\n[ \t]*(?=\n))
  | KN_API\s(?P<function>[^;]*);(?:[ \t]*/\*(?P<behind>.*?)\*/)?
  | /\*(?P<before>.*?)\*/
  | ^[ \t]*\#(?:[^\n]*\\\n)*[^\n]*
  | ^typedef[^;{]*\{(?:[^\n]*\}|.*?\n\})[^;\n]*;
''', re.X | re.S | re.M)


def first_sentence(comment):
    """The first sentence of a comment's text, on one line, or '' for the title of a section."""
    paragraph = re.split(r'\n[ \t]*\*?(?:[ \t]*\n|[ ]{4,})', comment)[0]
    words = ' '.join(re.sub(r'\n[ \t]*\*', ' ', paragraph).split())
    return '' if words.startswith('---') else re.split(r'(?<!\.)(?<!et al)\.(?:\s|$)', words)[0]


def call(declaration, macros):
    """kn_sgd(module, ...): the macro that takes options where there is one, else the names of the arguments."""
    name, inside = re.search(r'\b(kn_\w+)\s*\((.*)\)', declaration, re.S).groups()
    plain = name.rstrip('_')
    if name != plain and plain in macros:
        return plain, macros[plain]
    inside = re.sub(r'\(\*(\w+)\)\(.*?\)', r'\1', inside)    # a pointer to a function
    names = [re.sub(r'\[.*', '', a).split()[-1].lstrip('*') for a in inside.split(',')]
    return name, '' if names == ['void'] else ', '.join(names)


def functions(header):
    """(name, arguments, meaning) of each function of a header."""
    source = text(header)
    macros = dict(re.findall(r'(?m)^#define (kn_\w+)\(([^)]*)\)', source))
    meaning = ''
    for part in PART.finditer(source):
        if part['blank'] is not None:
            meaning = ''
        elif part['before'] is not None:
            meaning = first_sentence(part['before'])
        elif part['function']:
            own = first_sentence(part['behind'] or '')
            yield *call(re.sub(r'\s*KN_PRINTF\(.*', '', part['function'], flags=re.S), macros), own or meaning
            meaning = '' if own else meaning


def main():
    print(HEAD)
    for header in public_headers():
        rows = [list(same) for _, same in itertools.groupby(functions(header), key=lambda f: f[2])]
        if not rows:
            continue
        print(f'## [{header}](../{header})\n\n| functions | |\n|---|---|')
        for row in rows:
            calls = '<br>'.join(f'`{name}({arguments})`' for name, arguments, _ in row)
            print(f'| {calls} | ' + re.sub(r'([|*<\\])', r'\\\1', row[0][2]) + ' |')
        print()


if __name__ == '__main__':
    main()
