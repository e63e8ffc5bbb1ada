"""tests/failures.py LOG: the failed cases that a log of tests holds, each with the reason, indented by four spaces below
its name, in a few lines: what the shim's runner, Criterion and tests/cli print, and TAP. With --lines N, a case's last N
lines instead of the reason. What follows the last case, where the program did not end well, stands under an empty name."""
import argparse
import re

WIDTH = 400  # of a line that is shown
MESSAGE = re.compile(r'\S+\.(c|cc|h|cu):\d+: ')
END_OF_CASE = re.compile(r' *\d+\.\d\d s[ ,]|\d+ passed, \d+ failed|\[====\]')
SAID_ABOVE = re.compile(r'\[----\]( *$|.*(: Assertion Failed|conditions for this assertion))')
CRASH = re.compile('killed by signal|[Uu]nexpected signal')
NEWS = re.compile(r'knap: |.*(SUMMARY: |ERROR: \w+Sanitizer|runtime error: |killed by signal|[Uu]nexpected signal|Timed out)')


def blocks(lines):
    """(name, lines) of each failed case, then those after the last case under ''."""
    block, name = [], None
    for line in lines:
        m = re.match(r'(FAIL|\[FAIL\]) (.*)|(not ok\b.*)', line)
        tap = line.startswith(('ok', 'not ok', '#'))
        if name and not line.startswith(('#', ' ')):  # TAP tells the reason after the name
            yield name, block
            block, name = [], None
        if m and m.group(3):
            block, name = [], line
        elif m:
            yield m.group(2), block
            block = []
        elif END_OF_CASE.match(line) or (tap and not name):
            block = []
        elif line.strip(' #') and not SAID_ABOVE.match(line):
            block.append(line.removeprefix('[----] '))
    yield name or '', block


def reason(block):
    """The first and last messages of a failed check, with the news before them; else the news, else the last lines."""
    at = [i for i, line in enumerate(block) if MESSAGE.match(line)]
    news = [i for i, line in enumerate(block) if NEWS.match(line)]
    if at:
        before = [i for i in news if i < at[-1]]
        rest = range(at[-1] + 1, min(at[-1] + 3, len(block)))  # a message may have several lines
        chosen = before[-1:] + at[:2] + at[-1:] + list(rest)
    else:
        chosen = news[:2] + news[-2:] or range(max(0, len(block) - 4), len(block))
    crash = [i for i in chosen if CRASH.search(block[i])]
    before_crash = [k for i in crash for k in range(max(0, i - 2), i)]
    return [block[i] for i in sorted({*chosen, *before_crash})]


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--lines', type=int, help='of each case; without it the reason')
    p.add_argument('log')
    options = p.parse_args()
    with open(options.log, encoding='utf-8', errors='replace') as f:
        for name, block in blocks(f.read().splitlines()):
            shown = block[-options.lines:] if options.lines else reason(block)
            if name or shown:
                print('\n    '.join(line[:WIDTH] for line in [name] + shown))


main()
