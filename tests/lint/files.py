"""tests/lint/files.py: the files that the lint looks at, and their text."""
import os
import re
import subprocess

HOUSE = ['kernels', 'comm', 'tensor', 'autograd', 'data', 'nn', 'optim', 'fsdp', 'state', 'models']
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MADE = ['places.h']     # installed, and made while the library is built
SCRIPTS = '/script'    # among the endings of sources(): the programs in scripts/, which have none


def sources(*endings):
    """Paths below the root, sorted, without build folders and hidden ones."""
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [f for f in folders if f not in ('build', 'out', '__pycache__', 'subprojects')
                      and not f.startswith(('build-', '.'))]
        for f in files:
            path = os.path.relpath(os.path.join(folder, f), ROOT)
            if f.endswith(endings) or (SCRIPTS in endings and is_script(path)):
                found.append(path)
    return sorted(found)


def is_script(path):
    """The ending of a file's name; scripts in scripts/ have none."""
    return os.path.dirname(path) == 'scripts' and '.' not in os.path.basename(path)


def lines(path):
    """(number, line without its end) of a text file."""
    with open(os.path.join(ROOT, path), encoding='utf-8', errors='replace') as f:
        return list(enumerate(f.read().splitlines(), 1))


def text(path):
    with open(os.path.join(ROOT, path), encoding='utf-8', errors='replace', newline='') as f:
        return f.read()


def code_without_comments(path):
    """The file with comments blanked out, its line numbers kept."""
    def blank(m):
        return re.sub(r'[^\n]', ' ', m.group(0)) if m.group(0).startswith('/') else m.group(0)
    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', blank, text(path), flags=re.S)


def public_headers():
    """The headers that the root's meson.build installs."""
    block = re.search(r'^public_headers = \[(.*?)\]', text('meson.build'), re.S | re.M).group(1)
    return [h for h in ['knap.h'] + re.findall(r"'([^']+)'", block) if os.path.exists(os.path.join(ROOT, h))]


def run(command, cwd=ROOT):
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
