#!/usr/bin/env python3
"""tests/lint/lint.py: the checks of the sources that no compiler makes, and the compilers' own.

Each check is a function that yields one line a complaint ("file:line: what is wrong") or raises
Skip; its docstring is its rule. Usage: scripts/lint [--build DIR] [--fresh] [--tap FILE] [CHECK...]
"""
import argparse
import concurrent.futures
import functools
import itertools
import json
import os
import re
import shlex
import shutil
import sys
import tempfile

sys.dont_write_bytecode = True
from files import HOUSE, MADE, ROOT, SCRIPTS, code_without_comments, lines, public_headers, run, sources, text
from names import kind_files, names, parity, suites

WARNINGS = ['-Wall', '-Wextra', '-Wshadow', '-Wstrict-prototypes', '-Wvla',
            '-Wno-missing-field-initializers', '-Wno-unknown-pragmas', '-Wno-unused-parameter',
            '-Wno-format-zero-length']
COLOURS = re.compile('\x1b\\[[0-9;]*[mK]')
MAX_LINES = 500
MAX_COLUMNS = 100
# Folders and files with longer lines; this list only shrinks.
WIDE = ('scripts/', 'tests/cli/', 'tests/gpu/emulator/emulate.h') + tuple(
    f'kernels/cuda/kernels/{f}' for f in (
        'attention_grad.cu', 'binary.cu', 'copy.cu', 'fill.cu', 'index.cuh', 'index_add.cu', 'norm_grad.cu',
        'pooling.cu', 'reduce.cu', 'reduce.cuh', 'rope.cu', 'sum.cu', 'unary.cu'))
# clang-format's versions agree on the project's style within this range (checked on its sources).
FORMAT_VERSIONS = range(14, 20)


class Skip(Exception):
    """The check can't run here; the message gives the reason."""


# ---- checks ---------------------------------------------------------------------------------------

def layers():
    """A folder includes only headers of folders before it in the house."""
    for path in sources('.c', '.h', '.cu', '.cuh'):
        folder = path.split('/')[0]
        if folder not in HOUSE:
            continue
        for number, line in enumerate(code_without_comments(path).splitlines(), 1):
            m = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
            if not m:
                continue
            target, here = m.group(1), f'{path}:{number}'
            if target == 'knap.h' and path.startswith('models/programs/'):
                continue
            if not os.path.exists(os.path.join(ROOT, target)):
                yield f'{here}: "{target}" is not a path from the root'
                continue
            owner = target.split('/')[0]
            if owner not in HOUSE:
                yield f'{here}: "{target}" is outside the house ({", ".join(HOUSE)})'
            elif HOUSE.index(owner) > HOUSE.index(folder):
                yield f'{here}: "{target}": {folder}/ stands below {owner}/'


def circles():
    """No file includes itself through others of its folder: x.c, x.h and x_internal.h are one."""
    graph = {}
    for path in sources('.c', '.h', '.cu', '.cuh'):
        folder = path.split('/')[0]
        if folder not in HOUSE:
            continue
        reached = graph.setdefault(stem(path), set())
        for target in re.findall(r'(?m)^\s*#\s*include\s+"([^"]+)"', code_without_comments(path)):
            if target.split('/')[0] == folder:
                reached.add(stem(target))
    for node in sorted(graph):
        for other in sorted(graph[node]):
            way = other != node and shortest(graph, other, node)
            if way and node == min(way):
                yield f'{node}: a circle of includes: {" -> ".join([node] + way)}'


def stem(path):
    return re.sub(r'(_internal)?\.\w+$', '', path)


def shortest(graph, begin, end):
    """The nodes from begin to end, along includes, or None."""
    ways = [[begin]]
    seen = {begin}
    for way in ways:
        if way[-1] == end:
            return way
        for following in sorted(graph.get(way[-1], set()) - seen):
            seen.add(following)
            ways.append(way + [following])
    return None


def installed_includes():
    """A public header includes only public headers, so that an installed one finds them."""
    public = public_headers()
    for path in public:
        for m in re.finditer(r'^\s*#\s*include\s+"([^"]+)"', code_without_comments(path), re.M):
            if m.group(1) not in public + MADE:
                yield f'{path}: includes "{m.group(1)}", which is not installed'


def model_includes():
    """A model includes only public headers: a user's model can use whatever it uses. A model is a file of models/ that
    makes a module, and its header; the table of its family (gpt_config.c) is the library's."""
    public = public_headers()
    files = [p for p in sources('.c', '.h') if os.path.dirname(p) == 'models']
    stems = [os.path.splitext(p)[0] for p in files
             if re.search(r'\bkn_module_init(_n)?\(', code_without_comments(p))]
    for path in files:
        if os.path.splitext(path)[0] not in stems:
            continue
        for number, line in enumerate(code_without_comments(path).splitlines(), 1):
            m = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
            if m and m.group(1) not in public:
                yield f'{path}:{number}: a model includes "{m.group(1)}", which is not installed'


def places():
    """scripts/places.py makes places.h of the public headers."""
    result = run([sys.executable, 'scripts/places.py', '.'] + public_headers())
    yield from result.stderr.splitlines()


def functions_page():
    """docs/functions.md is what scripts/functions.py makes of the public headers."""
    page, made = text('docs/functions.md').splitlines(), run([sys.executable, 'scripts/functions.py'])
    if made.returncode:
        yield f'scripts/functions.py: {made.stderr.strip()}'
        return
    pairs = itertools.zip_longest(page, made.stdout.splitlines(), fillvalue='')
    for number, (old, new) in enumerate(pairs, 1):
        if old != new:
            yield f'docs/functions.md:{number}: stale ("{new[:60]}"): scripts/functions.py >docs/functions.md'
            return


def operations_page():
    """docs/operations.md has a row for each public operation, layer and optimizer, or a reason why it has none."""
    result = run([sys.executable, 'bench/peers/covered.py', 'docs/operations.md'])
    yield from (result.stdout + result.stderr).splitlines()


def snippets():
    """A function or struct that a page shows, and an example begins with the same line, is the same there."""
    examples = [text(p) for p in sources('.c') if p.startswith('examples/')]
    shown = re.compile(r'^((?:static|int|typedef) [^\n]*)\n(?:[{ ][^\n]*\n|\n)*?\}[^\n]*\n', re.M)
    for path in sources('.md'):
        page = text(path)
        for m in shown.finditer(page):
            having = [e for e in examples if '\n' + m.group(1) + '\n' in e]
            if having and not any(m.group(0) in e for e in having):
                yield f'{path}:{page.count(chr(10), 0, m.start()) + 1}: "{m.group(1)}" differs from the example'


def public_comments():
    """A public function has a comment in its block of declarations, on it or before it."""
    for path in public_headers():
        block_has = in_comment = False
        for number, line in lines(path):
            if not line.strip():
                block_has = in_comment
                continue
            if '/*' in line or '//' in line or in_comment:
                block_has = True
            in_comment = line.rfind('/*') > line.rfind('*/') or (in_comment and '*/' not in line)
            m = re.match(r'KN_API\b[^(]*?\b(kn_\w+)\(', line)
            if m and not block_has and not comment_follows(path, number):
                yield f'{path}:{number}: {m.group(1)} has no comment in its block'


def comment_follows(path, number):
    """A comment stands on the declaration's own later lines or on the rest of its block."""
    for _, line in lines(path)[number - 1:]:
        if not line.strip():
            return False
        if '/*' in line or '//' in line:
            return True
    return False


def opening_comments():
    """Every file opens with a comment on its content: "/* path: ..." or "# path: ..."."""
    for path in sources('.c', '.h', '.cu', '.cuh', '.sh', '.py', SCRIPTS):
        head = [line for _, line in lines(path)[:3]]
        if head and head[0].startswith('#!'):
            head = head[1:]
        if not head or not re.match(r'(/\*|//|#|""")', head[0]):
            yield f'{path}:1: opens without a comment on its content'


def sizes():
    """No source has more than 500 lines: past that an idea is missing."""
    for path in sources('.c', '.h', '.cu', '.cuh', '.sh', '.py', SCRIPTS):
        count = len(lines(path))
        if count > MAX_LINES:
            yield f'{path}: {count} lines, at most {MAX_LINES}'


def characters():
    """No tabs, no spaces at the ends of lines, no Windows line ends."""
    for path in sources('.c', '.h', '.cu', '.cuh', '.sh', '.py', '.md', '.build', '.txt', SCRIPTS):
        for number, line in lines(path):
            if '\t' in line:
                yield f'{path}:{number}: a tab'
            if line != line.rstrip() and not path.endswith('.md'):
                yield f'{path}:{number}: space at the end of the line'
        if '\r' in text(path):
            yield f'{path}: Windows line ends'


def columns():
    """No line has more than 100 columns; of pages, tables and code are free."""
    for path in sources('.c', '.h', '.cu', '.cuh', '.md', '.sh', SCRIPTS):
        if path.startswith(WIDE):
            continue
        fenced = False
        for number, line in lines(path):
            fenced ^= path.endswith('.md') and line.lstrip().startswith('```')
            free = path.endswith('.md') and (fenced or line.startswith(('|', '    ')))
            if len(line) > MAX_COLUMNS and not free:
                yield f'{path}:{number}: {len(line)} columns, at most {MAX_COLUMNS}'


def tour():
    """The files of the tour's first hour have at most 5,000 lines together."""
    page = text('docs/tour.md').split('## The first hour')[1].split('\n## ')[0]
    files = re.findall(r'^\| \d+ \| `([^`]+)`', page, re.M)
    count = sum(len(lines(path)) for path in files)
    if not files or count > 5000:
        yield f'docs/tour.md: the first hour covers {count} lines in {len(files)} files'


def faults():
    """What reads files tells a fault of a system call by kn_fail_system, which keeps errno: a reader of checkpoints must
    not take it for damage. And it looks for files by tensor/files.h: a fault isn't a file that isn't there. Texts of JSON
    are made by kn_json_text: jansson's own call goes on without a key where memory runs out."""
    for path in sources('.c'):
        if path.split('/')[0] not in ('tensor', 'data', 'state', 'models') or path == 'tensor/files.c':
            continue
        code = code_without_comments(path)
        for m in re.finditer(r'\bkn_fail\((?:[^;"]|"(?:[^"\\]|\\.)*")*?\bstrerror\(errno|\baccess\([^;]*F_OK|'
                             r'(?<![\w.])(?:stat|opendir|json_dumps)\(', code):
            call = m.group(0).split('(')[0]
            header = 'tensor/json.h' if call == 'json_dumps' else 'tensor/files.h'
            yield f'{path}:{code.count(chr(10), 0, m.end()) + 1}: {call}: see {header}'


def words():
    """Nothing left to do, no path of somebody's machine."""
    wrong = re.compile('|'.join([r'\bTO' + r'DO\b', r'\bFIX' + r'ME\b', r'\bXX' + r'X\b',
                                 r'(?<![\w.])/wor' + r'k/', r'(?<![\w.])/ro' + r'ot/',
                                 r'(?<![\w.])/home/\w']))
    for path in sources('.c', '.h', '.cu', '.cuh', '.sh', '.py', '.md', '.build', '.txt', '.tsv', SCRIPTS):
        for number, line in lines(path):
            m = wrong.search(line)
            if m:
                yield f'{path}:{number}: "{m.group(0)}"'


def listed():
    """Every C file of the house and of its tests is listed in a meson.build."""
    folders = HOUSE + ['tests/' + f for f in HOUSE + ['gpu']]
    builds = {f: '\n'.join(text(p) for p in sources('meson.build') if p.startswith(f + '/'))
              for f in folders}
    for path in sources('.c', '.cu'):
        for folder in folders:
            if path.startswith(folder + '/'):
                stem = os.path.splitext(os.path.basename(path))[0]
                if not re.search(r"[/']" + re.escape(stem) + r"(\.cu?)?'", builds[folder]):
                    yield f'{path}: not in a meson.build of {folder}/'


def shell():
    """Shell scripts parse, and shellcheck finds no error in them where it is installed."""
    scripts = [p for p in sources('.sh', SCRIPTS) if 'python' not in text(p).split('\n')[0]]
    for path in scripts:
        done = run(['bash', '-n', path])
        if done.returncode:
            yield f'{path}: {done.stderr.strip()}'
    if shutil.which('shellcheck') and scripts:
        done = run(['shellcheck', '--severity=error', '--shell=bash', '--format=gcc'] + scripts)
        yield from done.stdout.splitlines()


def format_():
    """C sources are as clang-format writes them (.clang-format in the root)."""
    tool = shutil.which('clang-format')
    if not tool:
        raise Skip('clang-format is not installed')
    version = re.search(r'version (\d+)', run([tool, '--version']).stdout)
    if not version or int(version.group(1)) not in FORMAT_VERSIONS:
        raise Skip(f'clang-format {version.group(1) if version else "?"} formats differently; '
                   f'{FORMAT_VERSIONS[0]} to {FORMAT_VERSIONS[-1]} agree with the sources')
    files = sources('.c', '.h')
    done = run([tool, '--dry-run', '-Werror', '--ferror-limit=1'] + files)
    for m in re.finditer(r'^(\S+?:\d+):\d+: error', done.stderr, re.M):
        yield f'{m.group(1)}: not formatted: clang-format -i {m.group(1).split(":")[0]}'
    if done.returncode and not re.search(r': error', done.stderr):
        yield done.stderr.strip()


def warnings_gcc():
    """gcc has no warning."""
    yield from warnings_of('gcc')


def warnings_clang():
    """clang has no warning."""
    yield from warnings_of('clang')


def warnings_of(compiler):
    if not shutil.which(compiler):
        raise Skip(f'{compiler} is not installed')
    build = os.path.join(ROOT, options.build)
    database = os.path.join(build, 'compile_commands.json')
    if not os.path.exists(database):
        raise Skip(f'{options.build}/compile_commands.json is not there: scripts/test --suite lint')
    extra = ['-Wno-initializer-overrides'] + openmp_header(build) if compiler == 'clang' else []
    # gcc finds some (unused functions, uninitialized values) only when it goes on to compile. What it compiled with
    # warnings as errors had none. What ccache knows costs nothing, but it knows only what was compiled: where the build
    # was by gcc, its own commands.
    ccache = None if options.fresh else shutil.which('ccache')
    how = ['-O1', '-c'] if compiler == 'gcc' else ['-O0', '-c'] if ccache else ['-fsyntax-only']
    jobs, clean = {}, set()
    with open(database, encoding='utf-8') as f:
        entries = json.load(f)
    defined = set(re.findall(r' -D(\w+)', ' '.join(e['command'] for e in entries))) - {'KN_CRITERION'}
    for entry in entries:
        words = shlex.split(entry['command'])
        keep = [a for a in words[1:] if re.match(r'-(D|U|I|isystem|m(?!mem)|std=|fopenmp|pthread)', a)]
        path = os.path.normpath(os.path.join(build, entry['file']))
        if not path.startswith(ROOT) or not path.endswith('.c') or not os.path.exists(path):
            continue
        # The shim's own form of a test has the same warnings as Criterion's.
        told, newest = definitions_told(os.path.relpath(path, ROOT), defined)
        key = (path, *sorted({a for a in keep if a[1] == 'm' or a[1] == 'D' and a[2:].split('=')[0] in told}))
        jobs.setdefault(key, [ccache] * bool(ccache) + [compiler] + how + keep + WARNINGS + extra + [path])
        if compiler == 'gcc' and with_warnings(words) and os.path.exists(os.path.join(build, entry['output'])):
            if '-Werror' in words and os.path.getmtime(os.path.join(build, entry['output'])) > newest:
                clean.add(key)
            elif ccache and os.path.basename(words[0]) == 'ccache':
                jobs[key] = words
    jobs = {key: command for key, command in jobs.items() if key not in clean}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 2) as pool, tempfile.TemporaryDirectory() as room:
        complaints = set()
        commands = [elsewhere(c, f'{room}/{n}') for n, c in enumerate(jobs.values())]
        for done in pool.map(lambda c: run(c, cwd=build), commands):
            errors = COLOURS.sub('', done.stderr)
            complaints.update(line.replace(ROOT + '/', '').removeprefix('../') for line in errors.splitlines()
                              if re.search(r': (warning|error|fatal error):', line))
            if done.returncode and not complaints:
                complaints.add(errors.strip())
    yield from sorted(complaints)


def definitions_told(path, defined, known={}):
    """Those of these names that stand in the file or in a file of the project that it includes, because no other
    definition (-D) changes anything there; and when the newest of these files was written."""
    told, newest, files = set(), 0, [path]
    for path in files:  # which grows
        if path not in known:
            code = text(path)
            known[path] = (defined.intersection(re.findall(r'\w+', code)), os.path.getmtime(os.path.join(ROOT, path)),
                           [p for p in re.findall(r'(?m)^\s*#\s*include\s+"([^"]+)"', code)
                            if os.path.exists(os.path.join(ROOT, p))])
        told |= known[path][0]
        newest = max(newest, known[path][1])
        files += [p for p in known[path][2] if p not in files]
    return told, newest


def with_warnings(words):
    """The build's command runs gcc, with all warnings."""
    return (is_gcc(words[os.path.basename(words[0]) == 'ccache']) and
            all(w in words for w in WARNINGS if not w.startswith('-Wno-')))


@functools.lru_cache
def is_gcc(compiler):
    return 'Free Software Foundation' in run([compiler, '--version']).stdout


def elsewhere(command, stem):
    """The command with its output at stem."""
    words = list(command)
    if '-c' in words and '-o' not in words:
        words += ['-o', '']
    for option, ending in (('-o', '.o'), ('-MF', '.d')):
        if option in words:
            words[words.index(option) + 1] = stem + ending
    return words


def openmp_header(build):
    """clang without a runtime of its own reads gcc's omp.h: a copy alone, because clang's stdatomic.h
    would go on to gcc's if it saw the whole folder."""
    found = run(['gcc', '-print-file-name=include/omp.h']).stdout.strip()
    if not os.path.isabs(found):
        return []
    folder = os.path.join(build, 'openmp')
    os.makedirs(folder, exist_ok=True)
    shutil.copy(found, folder)
    return ['-idirafter', folder]


# ---- running --------------------------------------------------------------------------------------

CHECKS = [layers, circles, installed_includes, model_includes, places, functions_page,
          operations_page, snippets, public_comments, opening_comments, sizes, columns, tour, characters, faults, words, listed, names, suites, parity,
          kind_files, shell, format_, warnings_gcc, warnings_clang]


def parse():
    names = [c.__name__.rstrip('_') for c in CHECKS]
    rules = '\n'.join(f'  {n:20}{c.__doc__}' for n, c in zip(names, CHECKS))
    p = argparse.ArgumentParser(prog='scripts/lint', description='Checks the sources:\n' + rules,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--build', default='build-test', help='build folder with compile_commands.json')
    p.add_argument('--fresh', action='store_true', help='compile without ccache, which has nothing of these sources yet')
    p.add_argument('--tap', help='also write a TAP report here')
    p.add_argument('checks', nargs='*', metavar='CHECK', help='only these')
    o = p.parse_args()
    unknown = [c for c in o.checks if c not in names]
    if unknown:
        p.error(f'unknown check {unknown[0]}: one of {", ".join(names)}')
    return o


def main():
    failed, tap = 0, []
    for check in CHECKS:
        name = check.__name__.rstrip('_')
        if options.checks and name not in options.checks:
            continue
        try:
            complaints = list(check())
        except Skip as why:
            print(f'{name}: skipped: {why}')
            tap.append(f'ok - lint::{name} # SKIP {why}')
            continue
        for line in complaints:
            print(f'{name}: {line}')
        failed += bool(complaints)
        tap.append(('not ok' if complaints else 'ok') + f' - lint::{name}')
    if options.tap:
        with open(options.tap, 'w', encoding='utf-8') as f:
            f.write('\n'.join(tap) + '\n')
    print(f'{len(tap)} checks, {failed} failed')
    return 1 if failed else 0


options = parse()
if __name__ == '__main__':
    sys.exit(main())
