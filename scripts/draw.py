#!/usr/bin/env python3
"""scripts/draw.py: pictures (SVG) of runs, with python3's standard library alone.

    scripts/draw.py loss LOG.jsonl >loss.svg     the curve of a log of train_gpt --log
    scripts/draw.py step TRACE.json >step.svg    the streams of a trace of kn_trace_write
"""
import json
import math
import sys

WIDTH, LEFT, RIGHT = 860, 70, 20
COLORS = ['#4477aa', '#228833', '#ccbb44', '#ee6677', '#aa3377', '#66ccee', '#dd8833', '#777777']


class Picture:
    """Shapes of an SVG, in the order in which they are drawn."""

    def __init__(self, height):
        self.height, self.shapes = height, []

    def add(self, tag, inside='', **attributes):
        names = ''.join(f' {k.replace("_", "-")}="{v}"' for k, v in attributes.items())
        inside = str(inside).replace('&', '&amp;').replace('<', '&lt;')
        self.shapes.append(f'<{tag}{names}>{inside}</{tag}>')

    def text(self, x, y, words, anchor='start', fill='#333333', size=12):
        self.add('text', words, x=f'{x:.1f}', y=f'{y:.1f}', text_anchor=anchor, fill=fill,
                 font_size=size)

    def line(self, x1, y1, x2, y2, stroke='#cccccc'):
        self.add('line', x1=f'{x1:.1f}', y1=f'{y1:.1f}', x2=f'{x2:.1f}', y2=f'{y2:.1f}',
                 stroke=stroke)

    def write(self):
        print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" '
              f'font-family="sans-serif">')
        print(f'<rect width="{WIDTH}" height="{self.height}" fill="#ffffff"/>')
        print('\n'.join(self.shapes) + '\n</svg>')


def ticks(low, high, count=6):
    """Round numbers between low and high, about count of them."""
    step = 10 ** math.floor(math.log10((high - low) / count))
    step *= next(k for k in (1, 2, 5, 10) if (high - low) / (k * step) <= count)
    first = math.ceil(low / step)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


# ---- the curve of a loss -------------------------------------------------------------------------

def loss(path):
    with open(path, encoding='utf-8') as f:
        rows = [json.loads(line) for line in f if line.strip()]
    train = [(r['step'], r['loss']) for r in rows if r.get('loss') is not None]
    val = [(r['step'], r['val_loss']) for r in rows if r.get('val_loss') is not None]
    if not train:
        sys.exit(f'{path} has no losses: give the file of train_gpt --log')
    every = [y for _, y in train + val]
    low, high = min(every), max(every)
    last, top, bottom = train[-1][0], 20, 320
    p = Picture(360)

    def x(step):
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last

    def y(value):
        return bottom - (bottom - top) * (value - low) / (high - low or 1)

    for t in ticks(low, high):
        p.line(LEFT, y(t), WIDTH - RIGHT, y(t), '#eeeeee')
        p.text(LEFT - 8, y(t) + 4, f'{t:g}', 'end')
    for t in ticks(0, last):
        p.text(x(t), bottom + 20, f'{t:g}', 'middle')
    for points, color, width in ((train, '#99bbdd', 1), (val, '#cc3344', 2)):
        p.add('polyline', points=' '.join(f'{x(a):.1f},{y(b):.1f}' for a, b in points), fill='none',
              stroke=color, stroke_width=width)
    p.text(WIDTH - RIGHT - 170, 40, 'training, each step', fill='#5588bb')
    p.text(WIDTH - RIGHT - 170, 58, 'validation', fill='#cc3344')
    if val:
        p.text(x(val[-1][0]), y(val[-1][1]) - 8, f'{val[-1][1]:.4f}', 'end', '#cc3344')
    p.text((LEFT + WIDTH - RIGHT) / 2, bottom + 36, 'step', 'middle')
    p.write()


# ---- the streams of a step -----------------------------------------------------------------------

def short(name, units):
    """The number of the unit that an event's name ends in; "r" for the root."""
    unit = name.split(' ')[-1]
    return str(units.index(unit)) if unit in units else 'r'


def step(path):
    with open(path, encoding='utf-8') as f:
        events = json.load(f)['traceEvents']
    row = {e['tid']: e['args']['name'] for e in events if e['ph'] == 'M'}
    events = [e for e in events if e['ph'] == 'X']
    if not events:
        sys.exit(f'{path} has no events: give a file of kn_trace_write')
    streams = [s for s in ('compute', 'gather', 'reduce', 'upload', 'download', 'host')
               if s in row.values()]
    spans = [e for e in events if e['cat'] == 'unit']
    units = []
    for e in spans:
        unit = e['name'].split(' ')[-1]
        if unit not in units:
            units.append(unit)
    begin = min(e['ts'] for e in events)
    end = max(e['ts'] + e['dur'] for e in events)
    height = 46
    p = Picture(46 + height * len(streams) + 34)

    def x(t):
        return LEFT + (WIDTH - LEFT - RIGHT) * (t - begin) / (end - begin)

    def draw(e, fill, label):
        top = 30 + height * streams.index(row[e['tid']])
        width = max(x(e['ts'] + e['dur']) - x(e['ts']), 0.5)
        p.add('rect', x=f'{x(e["ts"]):.1f}', y=top, width=f'{width:.1f}', height=30, fill=fill,
              stroke='#ffffff' if label else fill, stroke_width=0.5)
        if label and width > 9:
            p.text(x(e['ts']) + width / 2, top + 20, label, 'middle', '#ffffff')

    base = 30 + height * len(streams)
    for t in ticks(0, (end - begin) / 1e3, 8):
        p.line(x(begin + 1e3 * t), 24, x(begin + 1e3 * t), base, '#eeeeee')
        p.text(x(begin + 1e3 * t), base + 16, f'{t:g} ms', 'middle')
    for i, s in enumerate(streams):
        p.text(LEFT - 8, 50 + height * i, s, 'end')
    for e in sorted(events, key=lambda e: e['cat'] == 'unit'):
        stream = row[e['tid']]
        if e['dur'] <= 0 or stream not in streams:
            continue
        n = short(e['name'], units)
        color = '#bbbbbb' if n == 'r' else COLORS[int(n) % len(COLORS)]
        kind = {'forward': 'F', 'backward': 'B', 'all_gather': 'g', 'reduce_scatter': 's',
                'all_reduce': 'a'}.get(e['name'].split(' ')[0])
        draw(e, color, kind + n if kind else None)
    p.text(LEFT, 16, 'F forward, B backward, g all-gather, s reduce-scatter; 0 to '
           f'{len(units) - 1}: units, r and grey: the root')
    p.write()


if __name__ == '__main__':
    kinds = {'loss': loss, 'step': step}
    if len(sys.argv) != 3 or sys.argv[1] not in kinds:
        sys.exit(__doc__)
    kinds[sys.argv[1]](sys.argv[2])
