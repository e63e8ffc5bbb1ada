"""tests/cli/faults_reading.py: programs open the newest of two checkpoints while files can't be read just now: each operation
on files in turn, with each error, once, as often as is tried again, and from then on. A passing fault is got over; any
other is an error. Neither is taken for damage, or for a file that isn't there: the older checkpoint is never taken, no
run begins anew, and the newest stays."""
import os
import shutil

from faults_bench import Folder, listing

# The errors that are tried again, and how often the same operation may fail with them (tensor/files.h).
PASSES = {'EINTR': 1, 'EAGAIN': 4, 'ESTALE': 4, 'ETIMEDOUT': 4, 'EIO': 1}
LOOKS = ('look', 'list', 'entry', 'open', 'read')
STAYS = ['EIO', 'ESTALE', 'ETIMEDOUT', 'EAGAIN', 'EACCES', 'EMFILE', 'ENFILE', 'ENOMEM', 'EPERM', 'ENODEV']
OLDER = "isn't whole"


class Newest:
    """A folder with checkpoints of steps 2 and 3."""

    rank = 0 # where the faults are

    def __init__(self, bench):
        self.b = bench
        self.two = os.path.join(bench.at, 'two')
        shutil.rmtree(self.two, ignore_errors=True)
        shutil.copytree(bench.good, self.two)
        bench.must(bench.resume(self.two, '--stop-after', '3'))

    def prepare(self):
        shutil.rmtree(self.b.work, ignore_errors=True)
        shutil.copytree(self.two, self.b.work)
        self.before = listing(self.b.work)
        self.log = self.read_log()

    def read_log(self):
        with open(os.path.join(self.b.work, 'log.jsonl'), 'rb') as f:
            return f.read()

    def harm(self):
        """What is there no longer, or differs."""
        now = listing(self.b.work)
        lost = sorted(n for n, sum in self.before.items() if now.get(n) != sum and n not in ('.lock', 'log.jsonl'))
        if not self.read_log().startswith(self.log): # to which a run that goes on appends
            lost.append('log.jsonl')
        return f'these are lost or changed: {lost}' if lost else None


class Reads(Newest):
    """A program that reads, and prints the same as ever."""

    def __init__(self, bench, name, *command):
        super().__init__(bench)
        self.name, self.arguments = name, list(command)

    def command(self):
        return [self.b.program(self.arguments[0])] + self.arguments[1:]

    def fault(self, run):
        if OLDER in run.output:
            return 'it speaks of damage'
        if run.status == 0 and run.output != self.want:
            return 'a silent fault: the output is another one'
        return self.harm()


class GoesOn(Newest):
    """A run goes on for a step."""

    def __init__(self, bench, *resume):
        super().__init__(bench)
        self.resume = list(resume)
        self.name = 'train_gpt ' + ' '.join(os.path.basename(r) for r in resume)

    def command(self):
        return self.b.tiny + ['--steps', '9', '--out', self.b.work, '--stop-after', '4', '--keep', '9'] + self.resume

    def fault(self, run):
        if OLDER in run.output:
            return 'it speaks of damage'
        if 'step    1' in run.output.replace('step 1 ', 'step    1'):
            return 'it begins anew'
        if run.status == 0 and (Folder.step(self.b.work) != 4 or Folder.bits(self.b.work) != self.want):
            return 'a silent fault: it ends well, and its checkpoint is another one'
        return self.harm()


def operations(bench, s):
    """(number, operation, path) of each that reads, and what the undisturbed run gives."""
    log = os.path.join(bench.at, 'log')
    s.prepare()
    run = bench.run(s.command(), {'LD_PRELOAD': bench.shim('file_faults'), 'FAULT_PATH': bench.work, 'FAULT_LOG': log,
                                  'FAULT_RANK': s.rank})
    s.want = run.output if isinstance(s, Reads) else Folder.bits(bench.work)
    with open(log, encoding='utf-8', errors='replace') as f:
        ops = [line.rstrip('\n').split(' ', 5) for line in f]
    os.remove(log)
    end = next((i for i, o in enumerate(ops) if o[2] == 'mkdir' and '.saving' in o[5]), len(ops)) # a save: faults.py files
    return run, [(int(o[1]), o[2], os.path.relpath(o[5], bench.work)) for o in ops[:end] if o[2] in LOOKS and o[0] == str(s.rank)]


def reading(bench, o, check):
    scenarios = [Reads(bench, 'generate', 'generate', '--from', bench.work, '--tokens', '8', '--threads', '1'),
                 Reads(bench, 'knap-checkpoint verify', 'knap-checkpoint', 'verify', bench.work),
                 GoesOn(bench, '--resume', 'latest'), GoesOn(bench, '--resume', 'auto'),
                 Reads(bench, 'generate on 2 ranks, rank 1', 'generate', '--from', bench.work, '--tokens', '8', '--threads', '1',
                       '--ranks', '2')]
    scenarios[-1].rank = 1
    for s in scenarios:
        if o.only not in s.name:
            continue
        undisturbed, ops = operations(bench, s)
        check(f'{s.name}: undisturbed', None if undisturbed.status == 0 else 'it fails', undisturbed.output)
        ways = [(e, times) for e, times in PASSES.items()] + [(e, 0) for e in STAYS]
        for k, (error, times) in enumerate(ways):
            for at, op, path in ops[k % o.every::o.every]:
                s.prepare()
                run = bench.run(s.command(), {
                    'LD_PRELOAD': bench.shim('file_faults'), 'FAULT_PATH': bench.work, 'FAULT_AT': at, 'FAULT_DO': error,
                    'FAULT_TIMES': times, 'FAULT_RANK': s.rank})
                fault = run.fault(may_die=False) or s.fault(run)
                if not fault and times and run.status != 0 and (error != 'EIO' or op == 'read'):
                    fault = f'it is not got over (status {run.status})'
                often = f'{times} times' if times else 'from there on'
                check(f'{s.name}: {error} {often} at operation {at} ({op} {path})', fault, run.output)
