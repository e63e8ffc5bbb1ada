# tests/models/numeric_options.py: numeric_options.py ROOT HEADER...: from the public headers, a C array with
# "struct.field" for each number in a struct whose name ends in _options, or that MORE names.
import os
import re
import sys

NUMBERS = 'double|float|int|int64_t|uint64_t|size_t'
ANY = ['seed', 'arg_size']    # every number has a meaning; the size of what another field points at
MORE = ['kn_schedule', 'kn_optim_group', 'kn_mesh', 'kn_rope_scaling', 'kn_initializer']


def without_comments(text):
    return re.sub(r'/\*.*?\*/', ' ', text, flags=re.S)


def fields_of(body):
    """The names of the numbers that a struct's body declares."""
    for declaration in body.split(';'):
        found = re.fullmatch(rf'\s*({NUMBERS})\s+([^()*]+)', declaration.strip(), flags=re.S)
        for name in found.group(2).split(',') if found else ():
            name = re.sub(r'\[.*', '', name.strip())
            if not name.startswith('_'):
                yield name


def main(root, headers):
    text = ''
    for header in headers:
        with open(os.path.join(root, header), encoding='utf-8') as file:
            text += file.read()
    shared = dict(re.findall(r'#define (KN_[A-Z]+_OPTIONS)\b((?:.*\\\n)*.*)', text))
    text = without_comments(text)
    names = []
    for struct, body in re.findall(r'struct (kn_\w+) \{(.*?)\n\}', text, flags=re.S):
        if not struct.endswith('_options') and struct not in MORE:
            continue
        for name, fields in shared.items():
            body = re.sub(rf'\b{name}\b', lambda _: without_comments(fields.replace('\\\n', '\n')), body)
        names += [f'{struct}.{field}' for field in fields_of(body) if field not in ANY]
    print('static const char *const numeric_options[] = {')
    for name in names:
        print(f'    "{name}",')
    print('};')


main(sys.argv[1], sys.argv[2:])
