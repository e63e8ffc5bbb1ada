# tests/fsdp/schedule_head.py IN OUT: the three lines of a step at the head of fsdp/schedule.c, as a C header.
import re
import sys

with open(sys.argv[1]) as f:
    head = f.read().split('*/')[0]
steps = dict(re.findall(r'^ \*\s+(PRE|POST|NONE):\s+(.*)$', head, re.M))
with open(sys.argv[2], 'w') as f:
    f.write('/* schedule_head.h: made from fsdp/schedule.c by tests/fsdp/schedule_head.py. */\n')
    for name in ('PRE', 'POST', 'NONE'):
        f.write(f'#define SCHEDULE_{name} "{steps[name]}"\n')
