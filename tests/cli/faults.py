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
      --ways A,B    only these ways to fail
"""
import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile

from faults_bench import Bench, Check, Folder, SECONDS, listing
from faults_memory import memory
from faults_reading import reading

WAYS = ['kill', 'torn', 'EIO', 'ENOSPC', 'EINTR', 'short']


# ---- files ------------------------------------------------------------------------------------------------

class Save:
    """A run goes on from step 2, saves step 3."""

    last = 3

    def __init__(self, bench, ranks, rank):
        self.b, self.rank, self.name = bench, rank, f'save, rank {rank} of {ranks}'
        self.more = ['--stop-after', '3', '--ranks', str(ranks)]
        bench.fresh() # a step on two ranks is another one than on one: it has twice the batch
        bench.must(self.command())
        self.end = {2: bench.end, 3: bench.bits_at(bench.work, 4)}

    def prepare(self):
        self.b.fresh()

    def command(self):
        return self.b.resume(self.b.work, *self.more)

    def fault(self, run):
        step = Folder.step(self.b.work)
        if run.status == 0 and step != self.last:
            return f'a silent fault: the run ends well, and the checkpoint is of step {step}'
        go_on = self.b.run(self.b.resume(self.b.work, '--stop-after', str(self.last + 1)))
        if go_on.status != 0:
            return 'there is no whole checkpoint: ' + go_on.output.strip()[-300:]
        if Folder.bits(self.b.work) != self.end.get(step):
            return f'the run goes on from step {step} with other bits'
        return self.left_behind()

    def left_behind(self):
        left = Folder.leftovers(self.b.work)
        return f'the next save leaves {left}' if left else None


class SaveBeside(Save):
    """A run goes on from step 2, saves steps 3 and 4 beside the training. A save that fails doesn't end it: the one
    that the run's end waits for does."""

    last = 4

    def __init__(self, bench, ranks, rank):
        self.b, self.rank, self.name = bench, rank, f'save beside the training, rank {rank} of {ranks}'
        self.more = ['--stop-after', '4', '--ranks', str(ranks), '--async-save', '--save-every', '1']
        bench.fresh()
        bench.must(self.command())
        self.end = {4: bench.bits_at(bench.work, 5)}
        for step in (2, 3): # where the run is lost after so many steps, it goes on from there on as many ranks
            bench.fresh()
            bench.must(bench.resume(bench.work, '--ranks', str(ranks), '--stop-after', '3') if step == 3 else ['true'])
            self.end[step] = bench.bits_at(bench.work, 5)


class Begin(Save):
    """A new run makes its folder and saves step 2."""

    def __init__(self, bench):
        self.b, self.rank, self.name = bench, 0, 'first save'

    def prepare(self):
        shutil.rmtree(self.b.work, ignore_errors=True)

    def command(self):
        return self.b.tiny + ['--steps', '9', '--stop-after', '2', '--out', self.b.work]

    def fault(self, run):
        step = Folder.step(self.b.work)
        if run.status == 0 and step != 2:
            return f'a silent fault: the run ends well, and the checkpoint is of step {step}'
        again = self.b.run(self.command() + ['--overwrite'])
        if again.status != 0:
            return 'the same run again fails: ' + again.output.strip()[-300:]
        if Folder.bits(self.b.work) != Folder.bits(self.b.good):
            return 'the same run again has other bits'
        return self.left_behind()


class Load:
    """generate reads a checkpoint, which stays as it was."""

    def __init__(self, bench):
        self.b, self.rank, self.name = bench, 0, 'load'
        self.want = bench.must(self.command_of(bench.good))

    def command_of(self, at):
        return [self.b.program('generate'), '--from', at, '--tokens', '20', '--threads', '1']

    def prepare(self):
        self.b.fresh()
        self.before = listing(self.b.work)

    def command(self):
        return self.command_of(self.b.work)

    def fault(self, run):
        if run.status == 0 and run.output != self.want:
            return 'a silent fault: the text is another one'
        return None if listing(self.b.work) == self.before else 'the folder changed'


def reads_once(bench, check):
    """A run on 2 ranks that goes on reads each byte of the tensors' files once, and their headers once a rank."""
    log = os.path.join(bench.at, 'log')
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


def files(bench, o, check):
    scenarios = [Save(bench, 1, 0), Save(bench, 2, 0), Save(bench, 2, 1), Begin(bench), Load(bench),
                 SaveBeside(bench, 1, 0), SaveBeside(bench, 2, 0), SaveBeside(bench, 2, 1)]
    reads_once(bench, check)
    first = 0
    for s in scenarios:
        if o.only not in s.name:
            continue
        log = os.path.join(bench.at, 'log')
        env = {'LD_PRELOAD': bench.shim('file_faults'), 'FAULT_PATH': bench.work, 'FAULT_RANK': s.rank}
        s.prepare()
        undisturbed = bench.run(s.command(), dict(env, FAULT_LOG=log))
        check(f'{s.name}: undisturbed', s.fault(undisturbed) if undisturbed.status == 0 else 'it fails', undisturbed.output)
        with open(log, encoding='utf-8', errors='replace') as f:
            ops = [line.split(' ', 5) for line in f if line.split(' ', 1)[0] == str(s.rank)]
        os.remove(log)
        for way in o.ways:
            first = first % o.every + 1
            for at in range(first, len(ops) + 1, o.every):
                op, path = ops[at - 1][2], os.path.relpath(ops[at - 1][5].strip(), bench.work)
                if op in ('look', 'entry'):
                    continue
                s.prepare()
                run = bench.run(s.command(), dict(env, FAULT_AT=at, FAULT_DO=way))
                fault = run.fault(may_die=way in ('kill', 'torn'))
                if not fault and way in ('EINTR', 'short') and run.status != 0:
                    fault = f'it does harm (status {run.status})'
                fault = fault or s.fault(run)
                check(f'{s.name}: {way} at operation {at} of {len(ops)} ({op} {path})', fault, run.output)


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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('what', choices=['files', 'reading', 'memory', 'kills'])
    parser.add_argument('--build', required=True)
    parser.add_argument('--every', type=int, default=1)
    parser.add_argument('--only', default='')
    parser.add_argument('--ways', type=lambda t: t.split(','), default=WAYS)
    parser.add_argument('--count', type=int, default=200)
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument('--least', type=float, default=0.05, help='seconds before a kill')
    parser.add_argument('--most', type=float, default=1, help='seconds more, drawn up to this')
    o = parser.parse_args()
    check = Check()
    with tempfile.TemporaryDirectory(prefix='knap-faults-') as at:
        bench = Bench(os.path.abspath(o.build), at)
        {'files': files, 'reading': reading, 'memory': memory, 'kills': kills}[o.what](bench, o, check)
    return 1 if check.failed else 0


if __name__ == '__main__':
    sys.exit(main())
