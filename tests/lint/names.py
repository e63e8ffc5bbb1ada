"""tests/lint/names.py: checks of names: those in comments, pages and tables are those that exist."""
import fnmatch
import os
import re

from files import HOUSE, MADE, ROOT, SCRIPTS, code_without_comments, lines, public_headers, sources, text

TEST = r'\b(?:KN_\w*|RANK_)TEST\w*\((\w+),\s*(\w+)'    # suite, case


def comments_of(path):
    """(number, text) of each line of a page, of the comments of a C file, of a script's comments."""
    if path.endswith('.md'):
        return lines(path)
    if path.endswith(('.c', '.h', '.cu', '.cuh', '.cc')):
        code = code_without_comments(path).splitlines()
        return [(n, line if not bare.strip() else line[len(bare.rstrip()):])
                for (n, line), bare in zip(lines(path), code) if line.rstrip() != bare.rstrip()]
    return [(n, line) for n, line in lines(path) if line.lstrip().startswith(('#', '"""'))]


def names():
    """Every path, kn_ name and test that a comment or a page names exists."""
    commented = sources('.c', '.h', '.cu', '.cuh', '.cc', '.sh', '.md', SCRIPTS)
    everything = sources('')
    folders = sorted({p.split('/')[0] for p in everything if '/' in p})
    files = {os.path.basename(p) for p in everything}
    known = set(everything) | {os.path.dirname(p) for p in everything}
    code = [p for p in everything if p.endswith(('.c', '.h', '.cu', '.cuh', '.cc', '.in', '.build'))]
    words_of = {p: code_without_comments(p) if not p.endswith('.build') else text(p) for p in code}
    identifiers = set(re.findall(r'\b[A-Za-z_]\w*', '\n'.join(words_of.values())))
    cases = test_cases()
    path_in = re.compile(r'(?<![\w./$-])(?:' + '|'.join(map(re.escape, folders)) + r')/[\w./*{},-]*[\w*}]')
    file_in = re.compile(r'(?<![\w./*{}<,-])[A-Za-z]\w*\.(?:c|h|cu|cuh|cc)\b(?![./]\w)')
    name_in = re.compile(r'\b(kn_\w+|KN_[A-Z]\w+)(\*?)')
    case_in = re.compile(r'(?<![\w./-])(' + '|'.join(sorted(cases) or ['-']) + r')\.([a-z]\w*)(\*?)')
    for path in commented:
        if path == 'CHANGELOG.md':    # old names, too
            continue
        for number, line in comments_of(path):
            here = f'{path}:{number}'
            for m in path_in.finditer(line):
                if not any(matches(known, p) for p in unfolded(m.group(0))):
                    yield f'{here}: "{m.group(0)}" is not there'
            for m in file_in.finditer(line):
                if m.group(0) not in files | {*MADE, 'llm.c'}:    # the project of that name
                    yield f'{here}: no file is called "{m.group(0)}"'
            for m in name_in.finditer(line):
                name, star = m.groups()
                if name not in identifiers and not ((star or name.endswith('_')) and any(
                        i.startswith(name) for i in identifiers)):
                    yield f'{here}: nothing is called "{name}"'
            for m in case_in.finditer(line) if path.endswith('.md') and path != 'docs/functions.md' else ():
                suite, case, star = m.groups()
                if case in ('c', 'h', 'cpp', 'cu', 'md', 'sh', 'py', 'json'):
                    continue
                if case not in cases[suite] and not (star and any(
                        c.startswith(case) for c in cases[suite])):
                    yield f'{here}: no test is called "{suite}.{case}"'


def test_cases():
    """{suite: {case}} of all tests."""
    cases = {}
    for path in sources('.c'):
        for suite, case in re.findall(TEST, code_without_comments(path)):
            cases.setdefault(suite, set()).add(case)
    return cases


def suites():
    """A test's suite is its file: tests/*/SUITE_test.c; docs/fsdp.md's table links each test to that file."""
    cases = {}
    for path in sources('.c'):
        stem = os.path.basename(path)[:-len('.c')]
        for suite, case in re.findall(TEST, code_without_comments(path)):
            cases.setdefault(path, set()).add(f'{suite}.{case}')
            if path.startswith('tests/') and stem != suite + '_test':
                yield f'{path}: {suite}.{case} belongs into a file {suite}_test.c'
    page = 'docs/fsdp.md'
    if not os.path.exists(os.path.join(ROOT, page)):
        return
    named = {case.split('.')[0] for all_cases in cases.values() for case in all_cases}
    test = re.compile(r'(\[?)(?<![\w./-])((' + '|'.join(sorted(named) or ['-']) + r')\.([a-z]\w*|\*))(?:\]\[(\w+)\])?')
    links = dict(re.findall(r'^\[(\w+)\]: (\S+)', text(page), re.M))
    for number, line in lines(page):
        for m in test.finditer(line) if line.startswith('|') else ():
            _, case, suite, name, link = m.groups()
            if name in ('c', 'h', 'sh', 'md'):
                continue
            path = os.path.normpath(os.path.join('docs', links.get(link or '', '-')))
            if not m.group(1) or not any(
                    c == case or name == '*' or (name.endswith('_') and c.startswith(case))
                    for c in cases.get(path, ()) if c.startswith(suite + '.')):
                yield f'{page}:{number}: {case} has no link to its file: [{case}][{suite}], and [{suite}]: PATH below'


PARITY = 'tests/fsdp/parity.tsv'
VERDICTS = ('works', 'none', 'open')


def parity():
    """tests/fsdp/parity.tsv: a number stands once, "works" names tests that exist, other verdicts give a reason."""
    if not os.path.exists(os.path.join(ROOT, PARITY)):
        return
    cases, seen = test_cases(), set()
    public = set(re.findall(r'\w+', '\n'.join(code_without_comments(p) for p in public_headers())))
    strings = set(re.findall(r'"([\w-]+)', '\n'.join(text(p) for p in sources('.c'))))
    for line_number, line in lines(PARITY):
        if line.startswith('#'):
            continue
        here, row = f'{PARITY}:{line_number}', line.split('\t')
        if len(row) != 7 or '' in row:
            yield f'{here}: {len(row)} columns, not 7 that hold something each'
            continue
        number, _, place, _, verdict, names_of_row, why = row
        if not number.isdigit() or number in seen:
            yield f'{here}: {number} is no number, or stands twice'
        seen.add(number)
        if place != '-' and not place.isdigit():
            yield f'{here}: "{place}" is no line'
        if verdict not in VERDICTS:
            yield f'{here}: "{verdict}" is none of {", ".join(VERDICTS)}'
        named = names_of_row.split(', ') if names_of_row != '-' else []
        for name in named + re.findall(r'\b(?:kn|KN)_\w+', why if verdict != 'works' else ''):
            if not is_public(name, public, strings):
                yield f'{here}: "{name}" is neither public nor an option'
        tests = why.split(', ') if verdict == 'works' else re.findall(r'\b\w+\.(?:\w+\*?|\*)', why)
        for test in tests:
            suite, _, case = test.partition('.')
            if suite in cases or verdict == 'works':
                script = test.startswith('tests/cli/') and os.path.exists(os.path.join(ROOT, test))
                if not script and not fnmatch.filter(cases.get(suite, ()), case):
                    yield f'{here}: there is no test "{test}"'
        if verdict != 'works' and not re.search('[a-z]{3}', re.sub(r'\b\w+\.[\w*]+', '', why)):
            yield f'{here}: "{why}" is no reason'


def is_public(name, public, strings):
    """kn_function, KN_NAME, .option, --flag, KNAP_VARIABLE"""
    if name.startswith(('--', 'KNAP_')):
        return name.lstrip('-') in strings
    return name.startswith(('kn_', 'KN_', '.')) and name.lstrip('.') in public


def unfolded(path):
    """The paths in a/{b,c}/d."""
    m = re.search(r'\{([^{}]*)\}', path)
    if not m:
        return [path]
    return [p for part in m.group(1).split(',')
            for p in unfolded(path[:m.start()] + part + path[m.end():])]


def matches(known, path):
    """True if the path exists: as it is, without its ending, as a pattern, or as a program of bench/."""
    path = path.rstrip('/.').replace('bench/bench_', 'bench/')
    if path in known or path + '.c' in known or path + '.cu' in known:
        return True
    return '*' in path and bool(fnmatch.filter(known, path))


def kind_files():
    """The word silu, in any case, stands in at most 2 product files, all named in docs/change.md.

    silu stands for every elementwise kind: its row in kernels/kinds.h and its public declaration. A third file
    repeats a fact of the row, and the two will disagree one day.
    """
    section = text('docs/change.md').split('\n## An elementwise operation')[1].split('\n## ')[0]
    product = tuple(f + '/' for f in HOUSE if f not in ('models', 'nn'))    # they may use it
    having = [p for p in sources('.c', '.h', '.cu', '.cuh', '.in')
              if (p.startswith(product) or '/' not in p) and 'silu' in text(p).lower()]
    if len(having) > 2:
        yield f'silu stands in {len(having)} files, at most 2: {", ".join(having)}'
    for path in having:
        if f'`{path}`' not in section:
            yield f'{path}: silu stands here, but docs/change.md does not name this file'
