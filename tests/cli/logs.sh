#!/usr/bin/env bash
# tests/cli/logs.sh: a run's values in files: JSON lines in its folder and elsewhere, a table, TensorBoard's event
# files, read here by a reader of their own; a run that goes on cuts off the steps behind its checkpoint.
. "$(dirname "$0")/lib.sh"
gpt=$BUILD/models/train_gpt
[ -x "$gpt" ] || skip "build/models/train_gpt is not built"
cd "$TMP" || exit 1
for _ in $(seq 60); do echo "the quick brown fox jumps over the lazy dog"; done >text
tiny=("$gpt" --data text --ctx 8 --layers 1 --heads 1 --embd 8 --steps 12 --eval-every 4 --eval-steps 2 --threads 1)

cat >same.py <<'END'
"""same.py JSONL CSV FOLDER: the three have the values of 12 steps, but for those that depend on time and memory."""
import csv, glob, json, math, struct, sys

def crc32c(data):
    crc = 0xffffffff
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82f63b78 if crc & 1 else 0)
    return crc ^ 0xffffffff

def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xa282ead8) & 0xffffffff

assert crc32c(b'123456789') == 0xe3069283    # the checksum's published value

def records(path):
    data = open(path, 'rb').read()
    while data:
        size, = struct.unpack('<Q', data[:8])
        assert struct.unpack('<I', data[8:12])[0] == masked(data[:8])
        record, data = data[12:12 + size], data[12 + size:]
        assert len(record) == size and struct.unpack('<I', data[:4])[0] == masked(record)
        yield record
        data = data[4:]

def varint(b):
    n = shift = 0
    while True:
        n, shift, byte, b = n | (b[0] & 0x7f) << shift, shift + 7, b[0], b[1:]
        if byte < 0x80:
            return n, b

def fields(b):
    while b:
        key, b = varint(b)
        if key & 7 == 0:
            value, b = varint(b)
        elif key & 7 == 2:
            n, b = varint(b)
            value, b = b[:n], b[n:]
        else:
            form = {1: '<d', 5: '<f'}[key & 7]
            value, b = struct.unpack(form, b[:struct.calcsize(form)])[0], b[struct.calcsize(form):]
        yield key >> 3, value

events = {}
for path in sorted(glob.glob(sys.argv[3] + '/events.out.tfevents.*')):
    for number, record in enumerate(records(path)):
        event = dict(fields(record))
        assert 1e9 < event[1] < 1e11
        if number == 0:
            assert event[3] == b'brain.Event:2'
        elif number == 1:    # the start: what follows takes the place of later steps
            assert event[7] == b'\x08\x01'
            events = {step: v for step, v in events.items() if step < event.get(2, 0)}
        else:
            values = [dict(fields(v)) for key, v in fields(event[5])]
            events[event[2]] = {v[1].decode(): v[2] for v in values}

lines = [json.loads(line) for line in open(sys.argv[1])]
places = {'tokens_per_s': 0.06, 'step_ms': 6e-4, 'muon_ms': 6e-4}    # as JSON has them
rows = list(csv.DictReader(open(sys.argv[2])))
assert [l['step'] for l in lines] == [int(r['step']) for r in rows] == sorted(events) == list(range(1, 13)), (len(rows), sorted(events))
for line, row in zip(lines, rows):
    event = events[line['step']]
    flat = {k: v for k, v in line.items() if k != 'peak_bytes'}
    flat.update({'peak_bytes/' + k: v for k, v in line['peak_bytes'].items()})
    assert set(flat) <= set(row) and set(row) - set(flat) <= {'val_accuracy', 'val_perplexity', 'val_bits_per_byte'}
    for name, value in flat.items():
        if value is None:
            assert row[name] == '' and name not in event
        else:
            assert float(row[name]) == value, (name, row[name], value)
            assert name == 'step' or math.isclose(event[name], value, rel_tol=1e-6, abs_tol=places.get(name, 0)), (name, event[name], value)
    assert ('val_perplexity' in flat) == (line['step'] % 4 == 0)
END

all=(--log table.csv --tensorboard events)
run "${tiny[@]}" --out run "${all[@]}"
check "a run with all logs" succeeds
check "which say the same" python3 same.py run/log.jsonl table.csv events
run "${tiny[@]}" --out run --overwrite "${all[@]}" --stop-after 9
check "begun anew, it stops" succeeds
check "and all begin anew" test "$(wc -l <run/log.jsonl)-$(wc -l <table.csv)" = 9-10
printf '{"step": 10, "samples": 120, "lo' >>run/log.jsonl # as a crash leaves it
printf '10,120,3.2' >>table.csv
run "$gpt" --resume run/step-00000008 --threads 1 "${all[@]}"
check "it goes on before its end" succeeds
check "no step is there twice" python3 same.py run/log.jsonl table.csv events
run "${tiny[@]}" --out other --log other/log.jsonl
check "the folder's log may be named" eval 'succeeds && [ "$(wc -l <other/log.jsonl)" = 12 ]'
printf '{"st' >>other/log.jsonl
run "$gpt" --resume other --log other/log.jsonl --steps 14 --threads 1
check "and goes on behind its last whole line" python3 -c "
import json
assert [json.loads(line)['step'] for line in open('other/log.jsonl')] == list(range(1, 15))"
run "${tiny[@]}" --log /dev/stdout --stop-after 1
check "a log may be no file" says '{"step": 1, "samples": 12, "loss": '
run "${tiny[@]}" --stop-after 1
check "without folders there is no log" eval 'succeeds && [ ! -e log.jsonl ]'

check "more steps, stopped" "${tiny[@]}" --out third --log third.csv --stop-after 2
sed -i 's/,lr,/,rate,/' third.csv
run "$gpt" --resume third --log third.csv
check "a table of other columns" fails "third.csv has other columns than this run's log"
check "stays" grep -q ,rate, third.csv
run "${tiny[@]}" --tensorboard text
check "a folder that is a file" fails "--tensorboard text: a file that is no folder lies there"
run "${tiny[@]}" --tensorboard no/such/folder
check "a folder that can't be made" fails "--tensorboard no/such/folder: cannot make the folder"
run "${tiny[@]}" --log no/such/log
check "a log that can't be written" fails "cannot write the log no/such/log"
if [ -e /dev/full ]; then
    run "${tiny[@]}" --log /dev/full
    check "a full disk" fails "cannot write the log /dev/full: No space left on device; the run stopped there"
fi
finish
