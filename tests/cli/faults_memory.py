"""tests/cli/faults_memory.py: programs while one allocation fails, or that one and all after it: each in turn. A program
ends with a sentence or goes on to the same result; no checkpoint that was there is lost, or taken for a damaged one."""
import os
import shutil
import subprocess

from faults_bench import Folder, listing

OLDER = "isn't whole"


def code_of(library, program):
    """Where the code of a library lies that is linked into a program, by the names of its symbols: "BEGIN-END BEGIN-END ...".
    The CUDA runtime ends a program that has no memory in ways of its own."""
    lines = subprocess.run(['nm', '--numeric-sort', program], capture_output=True, text=True, check=True).stdout.splitlines()
    code = [line.split() for line in lines if line.split()[-2] in 'tT']
    runs, inside = [], False
    for address, _, name in code:
        if library in name and not inside:
            runs.append([address, address])
        elif inside:
            runs[-1][1] = address # of the next function, too: where this one ends
        inside = library in name
    return ' '.join(f'{begin}-{end}' for begin, end in runs if begin < end)


class Memory:
    """A command that prints the same text, or makes the same files in a folder, whenever it ends well. start: what lies in
    bench.work before. weight: of --every, where a run takes long."""

    def __init__(self, name, command, start=None, ranks=0, prints=False, makes=None, bits=False, weight=1):
        self.name, self.command, self.start, self.ranks = name, command, start, ranks
        self.prints, self.makes, self.bits, self.weight = prints, makes, bits, weight

    def prepare(self, bench):
        for at in (bench.work, self.makes):
            if at:
                shutil.rmtree(at, ignore_errors=True)
        if self.start:
            shutil.copytree(self.start, bench.work)

    def result(self, bench, run):
        return (run.output if self.prints else None, listing(self.makes) if self.makes else None,
                Folder.bits(bench.work) if self.bits else None)

    def fault(self, bench, run, want):
        if OLDER in run.output:
            return 'it takes a checkpoint for a damaged one'
        if run.status == 0 and self.result(bench, run) != want:
            return 'a silent fault: it ends well, with another result'
        if run.status != 0 and self.makes and os.path.exists(os.path.join(self.makes, 'config.json')) and not self.start:
            return 'it fails and leaves a configuration'
        step = Folder.step(self.start) if self.start else None
        if step is not None and (Folder.step(bench.work) or -1) < step:
            return f'the checkpoint of step {step} is gone'
        return None


def commands(bench):
    """Every program, and every way in which it takes memory for a checkpoint."""
    b, work = bench, bench.work
    gpt = b.tiny + ['--steps', '2', '--out', work]
    llama = gpt + ['--model', 'llama', '--kv-heads', '1']
    net = b.train_resnet(work)
    look = lambda *words: [b.program('knap-checkpoint'), *words]
    merged, exported = os.path.join(b.at, 'merged'), os.path.join(b.at, 'exports')
    picture = os.path.join(b.images, 'test', 'cat', '0.png')
    two, of_two, of_llama = (os.path.join(b.at, n) for n in ('two', 'of-two', 'of-llama'))
    shutil.copytree(b.good, two)
    b.must(b.resume(two, '--stop-after', '3'))
    for at, more in ((of_two, ['--ranks', '2']), (of_llama, ['--model', 'llama', '--kv-heads', '1'])):
        b.must(b.tiny + ['--steps', '9', '--stop-after', '2', '--out', at] + more)
    b.must(b.train_resnet(b.net))
    predict = [b.program('predict'), '--from', b.net, '--threads', '1']
    b.must(predict + ['--export', b.exported])
    generate = lambda at: [b.program('generate'), '--from', at, '--tokens', '4', '--threads', '1']
    later = ['--async-save', '--save-every', '1']
    on = ['--steps', '9', '--stop-after', '4', '--keep', '9', '--out', work, '--resume', 'latest']
    return [
        Memory('knap-checkpoint inspect', look('inspect', work), two, prints=True),
        Memory('knap-checkpoint verify', look('verify', work), two, prints=True),
        Memory('knap-checkpoint merge', look('merge', work, '--out', merged), of_two, makes=merged),
        Memory('knap-checkpoint merge --shard-size', look('merge', work, '--out', merged, '--shard-size', '2KB'), of_two,
               makes=merged),
        Memory('generate', generate(work), two, prints=True),
        Memory('generate, llama', generate(work), of_llama, prints=True),
        Memory('generate from a GGUF', generate(b.gguf), prints=True),
        Memory('generate --export --format gguf', generate(b.good)[:3] + ['--threads', '1', '--export', exported, '--format', 'gguf'], makes=exported),
        Memory('train_gpt --resume latest', b.tiny + on, two, bits=True, weight=7),
        Memory('train_gpt --resume latest --async-save', b.tiny + on + later, two, bits=True, weight=7),
        Memory('train_gpt --resume latest on 2 ranks', b.tiny + on + ['--ranks', '2'], of_two, ranks=2, bits=True, weight=7),
        Memory('train_gpt', gpt, bits=True, weight=7),
        Memory('train_gpt --async-save', gpt + later, bits=True, weight=7),
        Memory('train_gpt on 2 ranks', gpt + ['--ranks', '2'], ranks=2, bits=True, weight=7),
        Memory('train_gpt --model llama', llama, bits=True, weight=7),
        Memory('train_resnet', net, bits=True, weight=13),
        Memory('train_resnet --async-save', net + later, bits=True, weight=13),
        Memory('train_resnet --resume', [b.program('train_resnet'), '--resume', work, '--threads', '1', '--epochs', '2'], b.net,
               bits=True, weight=13),
        Memory('predict', predict + [picture], prints=True, weight=13),
        Memory('predict --export', predict + ['--export', exported], makes=exported, weight=13),
        Memory('predict from an export', [b.program('predict'), '--from', b.exported, '--threads', '1', picture], prints=True, weight=13),
    ]


def memory(bench, o, check):
    for m in commands(bench):
        if o.only not in m.name:
            continue
        every = o.every * m.weight
        for who in ['launcher', *range(m.ranks)] if m.ranks else ['']:
            counted = os.path.join(bench.at, 'count')
            env = {'LD_PRELOAD': bench.shim('alloc_faults'), 'KNAP_POOL': '0',
                   'ALLOC_NOT': code_of('libcudart_static', m.command[0])}
            name = m.name + (f', {who if who == "launcher" else f"rank {who}"}' if m.ranks else '')
            if m.ranks:
                env['ALLOC_RANK'] = who
            m.prepare(bench)
            r = bench.run(m.command, dict(env, ALLOC_COUNT=counted))
            check(f'{name}: undisturbed', None if r.status == 0 else 'it fails', r.output)
            if r.status != 0:
                continue
            want = m.result(bench, r)
            with open(counted, encoding='utf-8') as f:
                count = int(f.read())
            print(f'# {name}: {count} allocations')
            for more in (0, 1):
                for at in range(1 + more * (every // 2), count + 1, every):
                    m.prepare(bench)
                    run = bench.run(m.command, dict(env, ALLOC_AT=at, ALLOC_MORE=more))
                    fault = run.fault(may_die=False) or m.fault(bench, run, want)
                    check(f'{name}: allocation {at} of {count}{" and all after it" if more else ""}', fault,
                          run.output)
