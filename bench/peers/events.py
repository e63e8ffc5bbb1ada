"""scripts/peers events: TensorBoard's own reader beside Knap's event files: the scalars of a run that was stopped,
begun again before its end and finished are those of its JSON lines, each step once."""
import argparse
import json
import os
import subprocess
import sys
import tempfile

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def main(arguments):
    parser = argparse.ArgumentParser(prog='scripts/peers events', description=__doc__)
    parser.add_argument('--build', default='build', help='the build folder (default build)')
    args = parser.parse_args(arguments)
    program = os.path.abspath(os.path.join(args.build, 'models', 'train_gpt'))
    with tempfile.TemporaryDirectory() as folder:
        with open(folder + '/text', 'w') as f:
            f.write('the quick brown fox jumps over the lazy dog\n' * 60)

        def run(*options):
            subprocess.run([program, '--threads', '1', '--tensorboard', 'events', *options], cwd=folder, check=True,
                           stdout=subprocess.DEVNULL)
        run('--data', 'text', '--ctx', '8', '--layers', '1', '--heads', '1', '--embd', '8', '--steps', '20', '--eval-every',
            '5', '--out', 'run', '--stop-after', '15')
        run('--resume', 'run/step-00000010')
        reader = EventAccumulator(folder + '/events', size_guidance={'scalars': 0})
        reader.Reload()
        with open(folder + '/run/log.jsonl') as f:
            lines = [json.loads(line) for line in f]
        wrong = 0
        for name in ('samples', 'loss', 'val_loss', 'val_perplexity', 'val_bits_per_byte', 'lr', 'grad_norm'):
            theirs = [(e.step, e.value) for e in reader.Scalars(name)]
            mine = [(line['step'], line[name]) for line in lines if line.get(name) is not None]
            same = len(mine) == len(theirs) and all(
                a[0] == b[0] and abs(a[1] - b[1]) <= 1e-6 * abs(b[1]) for a, b in zip(mine, theirs))
            wrong += not same
            print(f'{name:20} {len(mine):3} values  {"the same" if same else "differ"}')
    return 1 if wrong else 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
