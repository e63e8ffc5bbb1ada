#!/usr/bin/env python3
"""tests/cli/faults.py: runs programs while one operation on files, or one allocation, fails: each in turn, each in
every way; and while they are killed. Prints TAP. Whatever fails, the last whole checkpoint can be loaded, no fault is
silent, nothing is left behind after the next save, and no program crashes.

    tests/cli/faults.py --build build files            every operation of saves and loads
    tests/cli/faults.py --build build reading          every operation that opens the newest of two checkpoints
    tests/cli/faults.py --build build memory           every allocation of the programs
    tests/cli/faults.py --build build kills            a run on 2 ranks that saves every other step, killed at random
                                                       moments: one rank, or all of them
      --every N     only each N-th operation or allocation (the first is another one for each way)
      --count N     kills (default 200); --seed N: other moments (default 1)
      --only TEXT   only scenarios with this in their name
      --ways A,B    only these ways to fail: kill, torn, EIO, ENOSPC, EINTR, short, EACCES, ENFILE
      --jobs N      runs at a time (default the cores)
"""
import argparse
import concurrent.futures
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading

from faults_bench import Bench, Check, Folder, SECONDS, listing
from faults_files import scenarios
from faults_memory import memory
from faults_reading import reading


# ---- files ------------------------------------------------------------------------------------------------

CHANGES = {'write', 'sync', 'close', 'rename', 'unlink', 'link', 'mkdir', 'rmdir', 'truncate', 'grow'}
# The ways in which an operation on files can fail, and which can: all where there is no set.
WAYS = {'kill': None, 'torn': {'write'}, 'EIO': None, 'ENOSPC': CHANGES | {'open'}, 'EINTR': None, 'short': {'read', 'write'},
        'EACCES': {'open', 'list', 'look', 'rename', 'unlink', 'link', 'mkdir', 'rmdir'}, 'ENFILE': {'open', 'list'}}


def operations(bench, s, check):
    """Those of a scenario's undisturbed run, in order: their names and paths."""
    log = bench.place('log')
    s.prepare()
    run = bench.run(s.command(), {'LD_PRELOAD': bench.shim('file_faults'), 'FAULT_PATH': s.folder(), 'FAULT_RANK': s.rank,
                                  'FAULT_LOG': log})
    check(f'{s.name}: undisturbed', s.fault(run) if run.status == 0 else 'it fails', run.output)
    with open(log, encoding='utf-8', errors='replace') as f:
        ops = [line.rstrip('\n').split(' ', 5) for line in f if line.split(' ', 1)[0] == str(s.rank)]
    os.remove(log)
    return [(op[2], os.path.relpath(op[5], bench.at)) for op in ops]


def disturb(bench, s, way, at):
    """A scenario's run whose operation at fails in that way."""
    s.prepare()
    run = bench.run(s.command(), {'LD_PRELOAD': bench.shim('file_faults'), 'FAULT_PATH': s.folder(), 'FAULT_RANK': s.rank,
                                  'FAULT_AT': at, 'FAULT_DO': way})
    fault = run.fault(may_die=way in ('kill', 'torn'))
    if not fault and way in ('EINTR', 'short') and run.status != 0:
        fault = f'it does harm (status {run.status})'
    return fault or s.fault(run), run.output


def reads_once(bench, check):
    """A run on 2 ranks that goes on reads each byte of the tensors' files once, and their headers once a rank."""
    log = bench.place('log')
    bench.fresh()
    run = bench.run(bench.resume(bench.work, '--ranks', '2', '--stop-after', '3'), {
        'LD_PRELOAD': bench.shim('file_faults'), 'FAULT_PATH': '.safetensors', 'FAULT_OP': 'read', 'FAULT_LOG': log})
    times, header = {}, {}
    with open(log, encoding='utf-8') as f:
        for line in f:
            rank, _, _, at, count, path = line.strip().split(' ', 5)
            at, count = int(at), int(count)
            if count > 0 and os.path.relpath(path, bench.work) in listing(bench.good):
                with open(path.replace(bench.work, bench.good), 'rb') as g:
                    header[path] = 8 + int.from_bytes(g.read(8), 'little')
                for i in range(at, at + count):
                    key = (path, i) if i >= header[path] else (path, i, rank)
                    times[key] = times.get(key, 0) + 1
    os.remove(log)
    twice = sorted({k[0] for k, n in times.items() if n > 1})
    whole = sum(os.path.getsize(p.replace(bench.work, bench.good)) - n for p, n in header.items())
    data = sum(1 for k in times if len(k) == 2)
    fault = ('it fails' if run.status else f'{len(twice)} files have bytes that are read twice: {twice}' if twice else
             f'{data} of {whole} bytes are read' if data != whole or not whole else None)
    check('a load on 2 ranks reads each byte once', fault, run.output)


class Scenarios:
    """Those of a bench, made when they are needed."""

    def __init__(self, bench):
        self.bench, self.makers, self.made = bench, scenarios(bench), {}

    def __getitem__(self, name):
        if name not in self.made:
            self.made[name] = self.makers[name]()
            self.made[name].name = name
        return self.made[name]


def files(bench, o, check):
    """Each case is a scenario, a way and an operation; threads take them one after another, each in a folder of its own."""
    reads_once(bench, check)
    every = Scenarios(bench)
    names = [n for n in every.makers if o.only in n]
    cases, first = [], 0
    for name in names:
        s = every[name]
        ops = operations(bench, s, check)
        for way in o.ways:
            first = first % o.every + 1
            cases += [(name, way, at + 1, len(ops), *op) for at, op in enumerate(ops)
                      if (at + 1 - first) % o.every == 0 and (WAYS[way] is None or op[0] in WAYS[way])]
    local, made = threading.local(), itertools.count(1)

    def one(case):
        name, way, at, count, op, path = case
        if not hasattr(local, 'every'):
            local.every = Scenarios(Bench(bench.build, f'{bench.at}{next(made)}'))
        fault, output = disturb(local.every.bench, local.every[name], way, at)
        return f'{name}: {way} at operation {at} of {count} ({op} {path})', fault, output

    with concurrent.futures.ThreadPoolExecutor(o.jobs) as pool:
        for result in pool.map(one, cases):
            check(*result)
    print(f'# {len(cases)} faults in {len(names)} scenarios, {check.failed} failed')


# ---- kills -------------------------------------------------------------------------------------------------

def ranks_of(pid):
    """The processes that it started."""
    try:
        with open(f'/proc/{pid}/task/{pid}/children', encoding='utf-8') as f:
            return [int(n) for n in f.read().split()]
    except OSError:
        return []


def kill_one_run(command, cwd, wait, victim):
    """Starts it, and after so many seconds kills all its processes (None) or one rank. True: the kill came in time."""
    with subprocess.Popen(command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          start_new_session=True, env=dict(os.environ, OMP_NUM_THREADS='1')) as p:
        try:
            output = p.communicate(timeout=wait)[0]
            return False, p.returncode, output.decode(errors='replace')
        except subprocess.TimeoutExpired:
            pass
        ranks = ranks_of(p.pid)
        if victim is None or not ranks:
            os.killpg(p.pid, signal.SIGKILL)
        else:
            try:
                os.kill(ranks[victim % len(ranks)], signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            output = p.communicate(timeout=SECONDS)[0]
        except subprocess.TimeoutExpired:
            os.killpg(p.pid, signal.SIGKILL)
            return True, None, p.communicate()[0].decode(errors='replace')
        return True, p.returncode, output.decode(errors='replace')


def kills(bench, o, check):
    random.seed(o.seed)
    shutil.rmtree(bench.work, ignore_errors=True)
    saving = ['--save-every', '2', '--keep', '3']
    begin = [bench.program('train_gpt'), '--data', bench.text, '--layers', '1', '--heads', '2', '--embd', '16', '--ctx', '8',
             '--batch', '2', '--threads', '1', '--steps', str(10 ** 9), '--warmup', '0', '--lr', '1e-3', '--min-lr', '1e-3',
             '--ranks', '2', '--timeout', '600']
    killed = lost = last = 0
    while killed < o.count:
        there = Folder.step(bench.work) is not None
        command = ([bench.program('train_gpt'), '--resume', bench.work, '--threads', '1', '--ranks', '2'] if there
                   else begin + ['--eval-every', '0', '--out', bench.work, '--overwrite'])
        command += saving + random.choice([[], ['--async-save']])
        in_time, status, output = kill_one_run(command, bench.at, o.least + random.random() * o.most,
                                               random.choice([None, None, 0, 1]))
        killed += in_time
        Folder.wait_for_lock(bench.work)
        step, fault = Folder.step(bench.work), None
        if not in_time:
            fault = f'the run ends by itself (status {status})'
        elif status is None:
            fault = 'the other rank hangs after the kill'
        elif (step or 0) < last:
            fault = f'the checkpoint of step {last} is lost: the newest is of {step}'
        lost += fault is not None
        last = max(last, step or 0)
        if fault or killed % 50 == 0:
            check(f'kill {killed}, at step {step}', fault, output)
        if fault and not in_time:
            break
    end = last + 2
    run = bench.run([bench.program('train_gpt'), '--resume', bench.work, '--threads', '1', '--ranks', '2', '--stop-after',
                     str(end)])
    check(f'the run goes on after {killed} kills, from step {last}', None if run.status == 0 else 'it fails', run.output)
    check('and leaves nothing behind', ' '.join(Folder.leftovers(bench.work)) or None)
    whole = os.path.join(bench.at, 'whole')
    run = bench.run(begin + ['--out', whole, '--eval-every', '0', '--stop-after', str(end)])
    same = run.status == 0 and Folder.bits(bench.work) == Folder.bits(whole)
    check(f'its {end} steps have the bits of the undisturbed run', None if same else 'they differ', run.output)
    print(f'# {killed} kills, {lost} lost')


def workplace():
    """Where runs save thousands of times: in memory, where there is room."""
    memory = '/dev/shm'
    room = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 2 ** 30
    return os.environ.get('TMPDIR') or (memory if room else None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('what', choices=['files', 'reading', 'memory', 'kills'])
    parser.add_argument('--build', required=True)
    parser.add_argument('--every', type=int, default=1)
    parser.add_argument('--only', default='')
    parser.add_argument('--ways', type=lambda t: t.split(','), default=list(WAYS))
    parser.add_argument('--jobs', type=int, default=os.cpu_count())
    parser.add_argument('--count', type=int, default=200)
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument('--least', type=float, default=0.05, help='seconds before a kill')
    parser.add_argument('--most', type=float, default=1, help='seconds more, drawn up to this')
    o = parser.parse_args()
    check = Check()
    with tempfile.TemporaryDirectory(prefix='knap-faults-', dir=workplace()) as at:
        bench = Bench(os.path.abspath(o.build), os.path.join(at, 'b'))
        {'files': files, 'reading': reading, 'memory': memory, 'kills': kills}[o.what](bench, o, check)
    return 1 if check.failed else 0


if __name__ == '__main__':
    sys.exit(main())
