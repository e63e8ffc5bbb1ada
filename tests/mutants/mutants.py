#!/usr/bin/env python3
"""tests/mutants/mutants.py: measures how many faults the tests find. Makes changes of one line to a copy of the
sources (drops a call, flips a condition, moves a bound by one, ...), at places that a seed chooses; builds each,
runs the tests of its folder and of folders that use it, and lists the changes that they found. A change that no
test finds either has no visible effect or shows a missing test.

The copy and its build lie in build-mutants/ (or --work); the checkout itself is never written to. That folder also
holds the finished results: the same command continues after an interruption.
"""
import argparse
import collections
import glob
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
QUICK = 'fsdp random. schedule. unit. feature. branches.'    # these find most
# The tests of a folder's files, in turn until one fails: a program, and parts of cases' names (none: all).
TESTS = {
    'kernels': ['kernels', 'tensor', 'autograd', 'nn'],
    'comm': ['comm', QUICK, 'fsdp'],
    'tensor': ['tensor', 'autograd', 'state'],
    'autograd': ['autograd', 'optim', 'nn', QUICK, 'fsdp'],
    'data': ['data'],
    'nn': ['nn', 'models', QUICK, 'fsdp'],
    'optim': ['optim', QUICK, 'fsdp', 'state'],
    'fsdp': [QUICK, 'autograd', 'optim', 'fsdp', 'state'],
    'state': ['state'],
    'models': ['models'],
}
# Tests of other folders run these: tests/gpu, tests/cli.
ELSEWHERE = ('fsdp/replay.c', 'kernels/cuda/', 'comm/nccl/', 'comm/messages/mpi', 'models/programs/')
SLACK = 8       # times the duration of a group of tests without a change
LEAST = 60      # seconds

Mutant = collections.namedtuple('Mutant', 'path line operator before after')


def sources(names):
    """The files that names say, and those in the folders that they say."""
    found = []
    for name in names:
        path = os.path.join(ROOT, name)
        found += [path] if os.path.isfile(path) else glob.glob(os.path.join(path, '**', '*.c'), recursive=True)
    found = sorted({os.path.relpath(f, ROOT) for f in found})
    return [f for f in found if not f.startswith(ELSEWHERE)]


# ---- changes -------------------------------------------------------------------------------------------

def calls_of_truth():
    """A pattern of calls of Knap's functions that return bool."""
    names = {'KN_LAUNCH'}
    for path in glob.glob(os.path.join(ROOT, '[!b]*', '**', '*.[ch]'), recursive=True):
        with open(path, encoding='utf-8') as f:
            names.update(re.findall(r'^(?:static |inline |KN_API )*bool (\w+)\(', f.read(), re.M))
    names.discard('kn_fail')
    return rf'\b(?:{"|".join(sorted(names))})\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)'


# name, pattern, replacement: every place where the pattern matches is one change
OPERATORS = [
    ('call is true', calls_of_truth(), 'true'),
    ('statement dropped', r'^(\s+)(?!return|break|continue|goto|case|default|else|\}|[a-z_]+ \*?[a-z_]+ = )'
                          r'[a-z_][\w>.\-\[\]]*(?:\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)| [|&+\-]?= [^;]*|\+\+|--);$',
     r'\1;'),
    ('condition flipped', r'\bif \((.*)\)( \{)?$', r'if (!(\1))\2'),
    ('and is or', r' && ', ' || '),
    ('or is and', r' \|\| ', ' && '),
    ('bound moved', r' < ', ' <= '),
    ('bound moved', r' <= ', ' < '),
    ('bound moved', r' > ', ' >= '),
    ('bound moved', r' >= ', ' > '),
    ('equal is unequal', r' == ', ' != '),
    ('unequal is equal', r' != ', ' == '),
    ('one less', r' \+ 1\b', ''),
    ('one more', r' - 1\b', ''),
    ('begins at one', r'\bfor \(int i = 0;', 'for (int i = 1;'),
    ('assigns instead of adding', r' [|+]= ', ' = '),
    ('true is false', r'\btrue\b', 'false'),
    ('false is true', r'\bfalse\b', 'true'),
    ('not dropped', r'(?<![\w)])!(?=[a-z_])', ''),
    ('multiplies instead of dividing', r' / ', ' * '),
    ('subtracts instead of adding', r' \+ (?!1\b)', ' - '),
]


def code_lines(path):
    """(number, line) of code inside functions, without comments, error strings and declarations."""
    comment = False
    with open(path, encoding='utf-8') as f:
        for n, line in enumerate(f.read().splitlines(), 1):
            begins = comment
            if '/*' in line and '*/' not in line[line.index('/*'):]:
                comment = True
            elif '*/' in line:
                comment = False
            text = line.strip()
            if (begins or comment or not line.startswith('    ') or '"' in line or text.startswith(('*', '/*', '#'))):
                continue
            yield n, line


def changes(files):
    """All possible changes, by operator."""
    found = collections.defaultdict(list)
    for path in files:
        for n, line in code_lines(os.path.join(ROOT, path)):
            code = line.split(' /*')[0].rstrip()
            tail = line[len(code):]
            for name, pattern, by in OPERATORS:
                for m in re.finditer(pattern, code):
                    after = code[:m.start()] + m.expand(by) + code[m.end():] + tail
                    if after != line:
                        found[name].append(Mutant(path, n, name, line, after))
    return found


def choose(files, seed):
    """The changes in an order that the seed gives: operators and files take turns, a line comes once."""
    draw = random.Random(seed)
    lists = [list(v) for _, v in sorted(changes(files).items())]
    for v in lists:
        draw.shuffle(v)
    draw.shuffle(lists)
    seen, taken = set(), collections.Counter()
    while any(lists):
        for v in lists:
            v[:] = [m for m in v if (m.path, m.line) not in seen]
            if not v:
                continue
            m = min(v, key=lambda x: taken[x.path])  # the first of the file that was changed least
            v.remove(m)
            seen.add((m.path, m.line))
            taken[m.path] += 1
            yield m


# ---- building and running ------------------------------------------------------------------------------

def end_session(session):
    """Kills the remaining processes of a session: ranks have process groups of their own."""
    for name in os.listdir('/proc'):
        if not name.isdigit():
            continue
        try:
            with open(f'/proc/{name}/stat', encoding='utf-8', errors='replace') as f:
                if int(f.read().rsplit(')', 1)[1].split()[3]) == session:
                    os.kill(int(name), signal.SIGKILL)
        except (OSError, ValueError, IndexError):
            pass


def run(command, limit, log, **more):
    """Exit status of a command, or None where it took longer than limit seconds."""
    with open(log, 'a', encoding='utf-8') as out:
        p = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                             start_new_session=True, **more)
        try:
            return p.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end_session(p.pid)
            p.wait()


class Work:
    """The copy of the sources, its build, and the results so far."""

    def __init__(self, folder, jobs, again):
        self.folder = os.path.abspath(folder)
        self.source = os.path.join(self.folder, 'source')
        self.build = os.path.join(self.folder, 'build')
        self.log = os.path.join(self.folder, 'mutants.out')
        self.jobs = jobs
        self.kept = os.path.join(self.folder, 'results.json')
        self.done = {'usual': {}}    # seconds of the tests without a change; what each change led to
        if os.path.exists(self.kept) and not again:
            with open(self.kept, encoding='utf-8') as f:
                self.done = json.load(f)
        self.env = dict(os.environ, OMP_NUM_THREADS='1', GOMP_SPINCOUNT='100', KN_RANDOM_SHRINK='0',
                        TMPDIR=os.path.join(self.folder, 'tmp'))

    def copy(self):
        """Updates the copy from the checkout; unchanged files keep their times."""
        os.makedirs(self.env['TMPDIR'], exist_ok=True)
        listed = subprocess.run(['git', '-C', ROOT, 'ls-files', '-co', '--exclude-standard', '-z'], check=True,
                                stdout=subprocess.PIPE).stdout.decode().split('\0')
        names = {name for name in listed if os.path.isfile(os.path.join(ROOT, name))}
        for name in sorted(names):
            src, dst = os.path.join(ROOT, name), os.path.join(self.source, name)
            with open(src, 'rb') as f:
                data = f.read()
            if self.write(dst, data):
                self.done['usual'] = {}
            shutil.copymode(src, dst)
        for folder, _, files in os.walk(self.source):
            for f in files:    # gone from the checkout
                path = os.path.join(folder, f)
                if os.path.relpath(path, self.source) not in names:
                    os.remove(path)

    @staticmethod
    def write(path, data):
        """Whether path held other bytes."""
        if os.path.exists(path):
            with open(path, 'rb') as f:
                if f.read() == data:
                    return False
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, 'wb') as f:
            f.write(data)
        return True

    def keep(self):
        with open(self.kept, 'w', encoding='utf-8') as f:
            json.dump(self.done, f, indent=1)

    def setup(self):
        if not os.path.exists(os.path.join(self.build, 'build.ninja')):
            status = run(['meson', 'setup', self.build, self.source, '-Dcuda=disabled', '-Dcriterion=disabled',
                          '-Ddebug=false', '-Doptimization=2', '-Disas=native'], 600, self.log)
            if status:
                sys.exit(f'mutants: meson setup failed; see {self.log}')

    def make(self, groups):
        targets = {f'tests/test_{g.split()[0]}' for g in groups}
        if 'tests/test_comm' in targets:
            targets.add('tests/comm/rank_program')    # which its cases start
        return run(['ninja', '-C', self.build, f'-j{self.jobs}'] + sorted(targets), 1800, self.log) == 0

    def objects(self):
        """A hash of what was compiled."""
        hashed = hashlib.sha256()
        for path in sorted(glob.glob(os.path.join(self.build, '**', '*.o'), recursive=True)):
            with open(path, 'rb') as f:
                hashed.update(f.read())
        return hashed.digest()

    def test(self, group, limit):
        program, *cases = group.split()
        begin = time.time()
        status = run([os.path.join(self.build, 'tests', f'test_{program}'), '--stop'] + cases, limit, self.log,
                     cwd=self.folder, env=self.env)
        return status, time.time() - begin

    def baseline(self, groups):
        """Builds and runs the tests without a change: all must pass."""
        if not self.make(groups):
            sys.exit(f'mutants: the unchanged sources do not build; see {self.log}')
        for group in groups:
            if group not in self.done['usual']:
                status, seconds = self.test(group, 1200)
                if status != 0:
                    sys.exit(f'mutants: without a change the tests of {group} fail or take too long; see {self.log}')
                self.done['usual'][group] = seconds
                self.keep()

    def first_failure(self):
        """The last line "FAIL name" of the log."""
        with open(self.log, encoding='utf-8', errors='replace') as f:
            fails = [line[5:].strip() for line in f if line.startswith('FAIL ')]
        return fails[-1] if fails else '?'

    def try_one(self, m, passed):
        """The result of a change: (result, the test that found it). passed: the tests that have not found it."""
        groups = TESTS[m.path.split('/')[0]]
        self.baseline(groups)
        path = os.path.join(self.source, m.path)
        with open(path, 'rb') as f:
            original = f.read()
        before = self.objects()
        lines = original.decode().split('\n')
        assert lines[m.line - 1] == m.before
        lines[m.line - 1] = m.after
        try:
            self.write(path, '\n'.join(lines).encode())
            with open(self.log, 'w', encoding='utf-8') as f:
                f.write(f'{m.path}:{m.line}: {m.operator}\n- {m.before}\n+ {m.after}\n')
            if not self.make(groups):
                return 'does not compile', ''
            if self.objects() == before:
                return 'same code', ''
            for group in groups:
                if group in passed:
                    continue
                status, _ = self.test(group, max(LEAST, SLACK * self.done['usual'][group]))
                if status is None:
                    return 'found', f'{group} took too long'
                if status != 0:
                    return 'found', self.first_failure() if status == 1 else f'{group}: status {status}'
                passed.append(group)
                self.keep()
            return 'survived', ''
        finally:
            self.write(path, original)


# ---- the command ---------------------------------------------------------------------------------------

def table(results):
    print('| | place | change | line before | line after | found by |')
    print('|---|---|---|---|---|---|')
    for i, r in enumerate(results, 1):
        code = [r[k].strip().replace('|', '\\|') for k in ('before', 'after')]
        print(f"| {i} | {r['path']}:{r['line']} | {r['operator']} | `{code[0]}` | `{code[1]}` | "
              f"{r['by'] if r['result'] == 'found' else '**' + r['result'] + '**'} |")


def parse():
    p = argparse.ArgumentParser(prog='scripts/mutants', description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--seed', type=int, default=1, help='chooses the places (default 1)')
    p.add_argument('--count', type=int, default=30, help='changes that compile and alter the code (default 30)')
    p.add_argument('--work', default=os.path.join(ROOT, 'build-mutants'),
                   help='folder of the copy (default build-mutants)')
    p.add_argument('--jobs', type=int, default=2, help='compilers side by side (default 2)')
    p.add_argument('--list', action='store_true', help='only print the changes to try')
    p.add_argument('--again', action='store_true', help='forget what earlier runs in this folder found')
    p.add_argument('--survivors', action='store_true', help='try again those that survived')
    p.add_argument('files', nargs='*', default=list(TESTS), help=f'sources or folders (default: {" ".join(TESTS)})')
    o = p.parse_args()
    for name in o.files:
        if not os.path.exists(os.path.join(ROOT, name)) or os.path.normpath(name).split('/')[0] not in TESTS:
            p.error(f'{name} is no source or folder of {", ".join(TESTS)}')
        if not sources([name]):
            p.error(f'{name} has no source whose tests run here: those of tests/gpu and tests/cli are not tried')
    return o


def main():
    o = parse()
    order = choose(sources(o.files), o.seed)
    if o.list:
        for m in itertools.islice(order, o.count):
            print(f'{m.path}:{m.line}: {m.operator}\n- {m.before.strip()}\n+ {m.after.strip()}')
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit('mutants: stopped; the same command goes on'))
    work = Work(o.work, o.jobs, o.again)
    work.copy()
    work.setup()
    results = []
    for m in order:
        if len(results) == o.count:
            break
        key = f'{m.path}|{m.before}|{m.after}'
        if o.survivors and work.done.get(key, {}).get('result') == 'survived':
            del work.done[key]
        r = work.done.setdefault(key, dict(m._asdict(), result='', passed=[]))
        if not r['result']:
            r['result'], r['by'] = work.try_one(m, r['passed'])
            work.keep()
            print(f"{m.path}:{m.line}: {m.operator}: {r['result']} {r['by']}", file=sys.stderr, flush=True)
        r['line'] = m.line
        if r['result'] in ('found', 'survived'):
            results.append(r)
    table(results)
    survived = sum(r['result'] == 'survived' for r in results)
    print(f'{len(results) - survived} found, {survived} survived')
    return 1 if survived else 0


if __name__ == '__main__':
    sys.exit(main())
