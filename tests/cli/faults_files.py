"""tests/cli/faults_files.py: the runs that tests/cli/faults.py disturbs, and the state in which each may leave its files."""
import os
import shutil

from faults_bench import Folder, listing


class Scenario:
    """A command whose operations on files of bench.work fail, and the test of its end. changes: it writes there."""

    rank, changes = 0, True

    def __init__(self, bench):
        self.b = bench

    def folder(self):
        """The text that the path of an operation has which counts."""
        return self.b.work

    def prepare(self):
        self.b.fresh()

    def command(self):
        raise NotImplementedError

    def fault(self, run):
        """What is wrong after the run; None: nothing."""
        raise NotImplementedError


# ---- saves ------------------------------------------------------------------------------------------------

class Save(Scenario):
    """A run goes on from step 2, saves step 3."""

    last = 3

    def __init__(self, bench, ranks=1, rank=0, start=None, more=()):
        super().__init__(bench)
        self.rank, self.ranks, self.start, self.more = rank, ranks, start or bench.good, list(more)
        self.end = self.ends()

    def ends(self):
        """The bits of the run that went on after each checkpoint that may be the newest one. A step on two ranks is
        another one than on one: it has twice the batch."""
        self.prepare()
        end = {2: self.b.bits_at(self.b.work, self.last + 1)}
        self.b.must(self.command())
        end[self.last] = self.b.bits_at(self.b.work, self.last + 1)
        return end

    def prepare(self):
        self.b.fresh(self.start)

    def command(self):
        return self.b.resume(self.b.work, '--stop-after', str(self.last), '--ranks', str(self.ranks), *self.more)

    def from_newest(self, run):
        """Where a run ends well it went on from the newest checkpoint, or says that this one isn't whole."""
        return 'at step 2\n' in run.output or "isn't whole" in run.output

    def fault(self, run):
        step = Folder.step(self.b.work)
        if run.status == 0 and step != self.last:
            return f'a silent fault: the run ends well, and the checkpoint is of step {step}'
        if run.status == 0 and not self.from_newest(run):
            return 'a silent fault: the run began elsewhere than at the newest checkpoint'
        go_on = self.b.run(self.b.resume(self.b.work, '--stop-after', str(self.last + 1), *self.more))
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

    def ends(self):
        end = super().ends()
        self.b.fresh() # where the run is lost after step 3, it goes on from there on as many ranks
        self.b.must(self.b.resume(self.b.work, '--ranks', str(self.ranks), '--stop-after', '3'))
        return {**end, 3: self.b.bits_at(self.b.work, 5)}

    def command(self):
        return super().command() + ['--async-save', '--save-every', '1']


class SaveKept(Save):
    """A run that keeps its newest checkpoint and the best one, which is an older one."""

    def __init__(self, bench):
        super().__init__(bench, start=bench.kept, more=['--keep', '1', '--keep-best'])

    def fault(self, run):
        best = os.path.join(self.b.work, 'best')
        if not os.path.exists(os.path.join(best, 'state.json')):
            return 'the best checkpoint is lost'
        return super().fault(run)

    def left_behind(self):
        left, steps = super().left_behind(), [n for n in os.listdir(self.b.work) if n.startswith('step-')]
        best = os.readlink(os.path.join(self.b.work, 'best'))
        if not left and sorted(steps) != sorted({best, f'step-{self.last + 1:08}'}):
            return f'the next save keeps {sorted(steps)}, the best one is {best}'
        return left


class SaveNamed(Save):
    """A run with --out goes on by --resume auto, latest, or from a checkpoint that is named, from the newest of two."""

    def __init__(self, bench, resume):
        self.resume = resume
        super().__init__(bench, start=bench.two)

    def command(self):
        at = os.path.join(self.b.work, self.resume) if '-' in self.resume else self.resume
        return self.b.tiny + ['--steps', '9', '--out', self.b.work, '--resume', at, '--stop-after', '3']


class Begin(Scenario):
    """A new run makes its folder and saves step 2; with before, it replaces that folder's run."""

    def __init__(self, bench, before=None, ranks=1, rank=0):
        super().__init__(bench)
        self.before, self.rank, self.ranks = before, rank, ranks
        self.prepare()
        bench.must(self.command())
        self.end = Folder.bits(bench.work)

    def prepare(self):
        shutil.rmtree(self.b.work, ignore_errors=True)
        if self.before:
            self.b.fresh(self.before)

    def command(self):
        return self.b.tiny + ['--steps', '9', '--stop-after', '2', '--out', self.b.work, '--ranks', str(self.ranks),
                              *(['--overwrite'] if self.before else [])]

    def fault(self, run):
        step = Folder.step(self.b.work)
        if run.status == 0 and (step != 2 or Folder.bits(self.b.work) != self.end):
            return f'a silent fault: the run ends well, and the checkpoint is of step {step}'
        if self.before or run.status == 0:
            if self.b.run(self.b.generate(self.b.work)).status != 0:
                return 'there is no whole checkpoint'
            if Folder.bits(self.b.work) not in (self.end, self.before and Folder.bits(self.before)):
                return 'the checkpoint is neither the new one nor the one before'
        again = self.b.run(self.command() + ([] if self.before else ['--overwrite']))
        if again.status != 0:
            return 'the same run again fails: ' + again.output.strip()[-300:]
        if Folder.bits(self.b.work) != self.end:
            return 'the same run again has other bits'
        left = Folder.leftovers(self.b.work)
        steps = [n for n in os.listdir(self.b.work) if n.startswith('step-')]
        return f'the same run again leaves {left}, {steps}' if left or len(steps) != 1 else None


class SaveNet(Scenario):
    """train_resnet goes on from step 1, saves step 2 as the best one."""

    def __init__(self, bench):
        super().__init__(bench)
        bench.fresh(bench.first_net)
        bench.must(self.command())
        self.end = Folder.bits(bench.work)

    def prepare(self):
        self.b.fresh(self.b.first_net)

    def command(self):
        return [self.b.program('train_resnet'), '--resume', self.b.work, '--threads', '1']

    def fault(self, run):
        if run.status == 0 and (Folder.step(self.b.work) != 2 or Folder.bits(self.b.work) != self.end):
            return 'a silent fault: the run ends well, and its checkpoint is another one'
        again = self.b.run(self.command() if Folder.step(self.b.work) == 1 else self.b.predict(self.b.work))
        if again.status != 0 or Folder.bits(self.b.work) != self.end:
            return 'the run cannot go on to its end: ' + again.output.strip()[-300:]
        left = [n for n in Folder.leftovers(self.b.work) if Folder.step(self.b.work) == 1]
        return f'the next save leaves {left}' if left else None


# ---- writers of other files --------------------------------------------------------------------------------

class Write(Scenario):
    """A program writes a model for others into a folder: it is there as a whole or refused by its readers, and the
    same command again writes it as a whole. before: the folder holds another model meanwhile, or nothing."""

    def __init__(self, bench, command, read, before=None):
        super().__init__(bench)
        self.out, self.before = os.path.join(bench.work, 'out'), before
        self.made, self.read = command, read
        self.whole = []
        for make in ([before] if before else []) + [command]:
            self.prepare()
            bench.must(make(self.out))
            self.whole.append((bench.must(read(self.out)), listing(self.out)))

    def prepare(self):
        shutil.rmtree(self.b.work, ignore_errors=True)
        os.makedirs(self.b.work)
        if self.before:
            self.b.must(self.before(self.out))

    def command(self):
        return self.made(self.out)

    def fault(self, run):
        if run.status == 0 and listing(self.out) != self.whole[-1][1]:
            return f'a silent fault: it ends well, and the folder holds {sorted(listing(self.out))}'
        read = self.b.run(self.read(self.out))
        if read.status == 0 and read.output not in [w[0] for w in self.whole]:
            return f'a reader takes what is there: {sorted(listing(self.out))}'
        again = self.b.run(self.command())
        if again.status != 0 and not (read.status == 0 and 'is there already' in again.output):
            return 'the same command again fails: ' + again.output.strip()[-300:]
        left = listing(self.out)
        return None if left == self.whole[-1][1] else f'after the same command again the folder holds {sorted(left)}'


# ---- loads ------------------------------------------------------------------------------------------------

class Read(Scenario):
    """A program that changes nothing reads start, or a file or folder in it: its output is the same or it says why not."""

    changes = False

    def __init__(self, bench, start, command, below=''):
        super().__init__(bench)
        self.start, self.below, self.made = start, below, command
        self.prepare()
        self.want = bench.must(self.command())

    def prepare(self):
        self.b.fresh(self.start)
        self.before = listing(self.b.work)

    def command(self):
        return self.made(os.path.join(self.b.work, self.below) if self.below else self.b.work)

    def fault(self, run):
        if run.status == 0 and run.output != self.want and "isn't whole" not in run.output:
            return 'a silent fault: the output is another one'
        return None if listing(self.b.work) == self.before else 'the folder changed'


class ReadData(Scenario):
    """A trainer reads its data: the run ends with the same bits, or it says why not."""

    changes = False

    def __init__(self, bench, data, command):
        super().__init__(bench)
        self.data, self.made, self.out = data, command, os.path.join(bench.at, 'of-data')
        bench.must(self.command())
        self.end = Folder.bits(self.out)

    def folder(self):
        return self.data

    def prepare(self):
        shutil.rmtree(self.out, ignore_errors=True)

    def command(self):
        return self.made(self.out)

    def fault(self, run):
        return 'a silent fault: the model is another one' if run.status == 0 and Folder.bits(self.out) != self.end else None


def scenarios(bench):
    """The names and makers of all."""
    b = bench
    merge = lambda out, *more: [b.program('knap-checkpoint'), 'merge', b.good, '--out', out, *more]
    parts = lambda out: merge(out, '--shard-size', '5KB')
    tool = lambda what: lambda at: [b.program('knap-checkpoint'), what, at]
    export = lambda net: lambda out: [b.program('predict'), '--from', net, '--threads', '1', '--export', out]
    one_file = lambda form, run: lambda out: [b.program('generate'), '--from', run, '--threads', '1', '--export', out, '--format', form]
    ids = lambda at: b.generate(at) + ['--prompt-ids', '1', '--print-ids']
    trained = lambda out: b.train_resnet(b.net + '.again') + ['--export', out]
    begin = lambda out: b.tiny + ['--steps', '9', '--stop-after', '2', '--out', out]
    ranked = lambda name, make: {f'{name}, rank {k} of {r}': lambda r=r, k=k: make(r, k) for r, k in [(1, 0), (2, 0), (2, 1)]}
    return {
        **ranked('save', lambda r, k: Save(b, r, k)),
        **ranked('save beside the training', lambda r, k: SaveBeside(b, r, k)),
        'save, the newest and the best kept': lambda: SaveKept(b),
        **{f'save, --resume {how}': lambda how=how: SaveNamed(b, how) for how in ['auto', 'latest', 'step-00000002']},
        **ranked('first save', lambda r, k: Begin(b, None, r, k)),
        **ranked('overwrite', lambda r, k: Begin(b, b.other, r, k)),
        'save of train_resnet': lambda: SaveNet(b),
        'merge': lambda: Write(b, merge, tool('inspect')),
        'merge in parts': lambda: Write(b, parts, tool('inspect')),
        'export': lambda: Write(b, export(b.net), b.predict),
        'export over an older one': lambda: Write(b, export(b.net), b.predict, export(b.other_net)),
        'export of train_resnet': lambda: Write(b, trained, b.predict),
        'export of a GGUF': lambda: Write(b, one_file('gguf', b.good), b.generate),
        'export of a GGUF over an older one': lambda: Write(b, one_file('gguf', b.good), b.generate, one_file('gguf', b.other)),
        'export for llm.c': lambda: Write(b, one_file('llmc', b.good), ids),
        'generate': lambda: Read(b, b.two, b.generate),
        'generate, a GGUF': lambda: Read(b, b.gguf, b.generate),
        'generate, best': lambda: Read(b, b.kept, b.generate, 'best'),
        'inspect': lambda: Read(b, b.two, tool('inspect')),
        'verify': lambda: Read(b, b.two, tool('verify')),
        'inspect of parts': lambda: Read(b, b.parts, tool('inspect')),
        'predict': lambda: Read(b, b.net, b.predict),
        'predict, exported': lambda: Read(b, b.exported, b.predict),
        'predict, a file': lambda: Read(b, b.exported, lambda at: b.predict(at) + ['--model', 'resnet20'], 'model.safetensors'),
        'predict, test images': lambda: Read(b, b.images, lambda at: [b.program('predict'), '--from', b.net, '--threads', '1',
                                                                      '--data', at]),
        'data of train_gpt': lambda: ReadData(b, b.text, begin),
        'data of train_resnet': lambda: ReadData(b, b.images, b.train_resnet),
        'model of train_resnet': lambda: ReadData(b, b.exported, lambda out: b.train_resnet(out) + ['--init', b.exported]),
    }
