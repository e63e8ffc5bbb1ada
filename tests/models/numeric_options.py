# tests/models/numeric_options.py: numeric_options.py ROOT HEADER...: from the public headers, a macro that gives
# X(struct, field) for each number in a struct whose name ends in _options, or that MORE names.
import os
import re
import sys

NUMBERS = 'double|float|int|int64_t|uint64_t|size_t'
ANY = ['seed', 'arg_size']    # every number has a meaning; the size of what another field points at
MORE = ['kn_schedule', 'kn_optim_group', 'kn_mesh', 'kn_rope_scaling', 'kn_initializer']
ELSEWHERE = [                       # numbers that numbers.h has no call for, and why
    'kn_mnist_options.batch', 'kn_mnist_options.accum', 'kn_mnist_options.workers',
    'kn_mnist_options.ahead',       # need files; loaders share their code
    'kn_csv_read_options.fill',     # NAN has a meaning: tests/data/csv_test.c
    'kn_init_options.timeout_s',    # once a process: tests/comm
    'kn_export_options.end_count',  # needs a language model: imported_test.c
]


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
    numbers = []
    for struct, body in re.findall(r'struct (kn_\w+) \{(.*?)\n\}', text, flags=re.S):
        if not struct.endswith('_options') and struct not in MORE:
            continue
        for name, fields in shared.items():
            body = re.sub(rf'\b{name}\b', lambda _: without_comments(fields.replace('\\\n', '\n')), body)
        numbers += [f'{struct}.{field}' for field in fields_of(body) if field not in ANY]
    missing = [name for name in ELSEWHERE if name not in numbers]
    if missing:
        sys.exit(f'no such number: {", ".join(missing)}')
    print('#define NUMBERS(X) \\')
    for name in numbers:
        if name not in ELSEWHERE:
            print(f'    X({name.replace(".", ", ")}) \\')
    print()


main(sys.argv[1], sys.argv[2:])
