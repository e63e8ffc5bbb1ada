"""scripts/report_page.py: report_page.py PAGE FILE...: the page of knap-report as C, made while the program is built.

PAGE is models/report/page.html. Its lines <!-- styles -->, <!-- scripts --> and <!-- sources --> become the files that
end in .css, .js and .c; recordings go where <!-- recordings --> stands.
"""
import json
import os
import sys


def read(path):
    with open(path, encoding='utf-8') as file:
        return file.read()


def joined(paths, ending):
    return '\n'.join(read(path) for path in paths if path.endswith(ending))


def sources(paths):
    """The sources that verbs point into, by their path in the project."""
    found = {}
    for path in (p for p in paths if p.endswith('.c')):
        folder, name = os.path.split(path)
        found[f'{os.path.basename(folder)}/{name}'] = read(path)
    text = json.dumps(found).replace('<', '\\u003c')
    return f'<script type="application/json" id="sources">{text}</script>'


def as_c(name, text):
    print(f'extern const char {name}[];\nconst char {name}[] = {{')
    data = text.encode() + b'\0'
    for at in range(0, len(data), 24):
        print(','.join(str(b if b < 128 else b - 256) for b in data[at:at + 24]) + ',')
    print('};')


def main(page, files):
    text = read(page)
    text = text.replace('<!-- styles -->', f'<style>\n{joined(files, ".css")}</style>')
    text = text.replace('<!-- sources -->', sources(files))
    text = text.replace('<!-- scripts -->', f'<script>\n"use strict";\n{joined(files, ".js")}</script>')
    begin, end = text.split('<!-- recordings -->')
    print('/* Made by scripts/report_page.py of models/report. */')
    as_c('report_page', begin)
    as_c('report_page_end', end)


if __name__ == '__main__':
    main(sys.argv[1], sys.argv[2:])
