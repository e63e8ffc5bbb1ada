#!/usr/bin/env bash
# tests/cli/checkpoint_tool.sh: knap-checkpoint inspects, verifies and merges shards, refuses what it can't do in a
# sentence, and prints no control character of a name.
. "$(dirname "$0")/lib.sh"

tool=$BUILD/models/knap-checkpoint
[ -x "$tool" ] || skip "knap-checkpoint is not built"
run python3 -c 'import json, struct'
[ "$status" = 0 ] || skip "python3 writes the files of this test"

# Two ranks' shards as another program writes them: "w" [4, 3] of which rank 0 has a row, a column "c" [2, 4] cut in the
# middle, a scalar, a tensor without elements, and a name that would clear the terminal.
python3 - "$TMP" <<'END'
import json, os, struct, sys

def write(path, tensors, offsets=None):
    header, data = {}, b''
    if offsets is not None:
        header['__metadata__'] = {'format': 'pt', 'DCP_VERSION': '1.0', 'DCP_SHARDING_INFO': json.dumps(
            {name: {'saved_offsets': at} for name, at in offsets.items()})}
    for name, (shape, values) in tensors.items():
        raw = struct.pack(f'<{len(values)}f', *values)
        header[name] = {'dtype': 'F32', 'shape': shape, 'data_offsets': [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    with open(path, 'wb') as f:
        f.write(struct.pack('<Q', len(text)) + text + data)

top = sys.argv[1]
for folder in 'run/model', 'run/optimizer', 'bad', 'hole':
    os.makedirs(f'{top}/{folder}')
for folder in 'run/model', 'run/optimizer':
    write(f'{top}/{folder}/shard-00001-model-00001-of-00001.safetensors',
          {'w': ([1, 3], [0, 1, 2]), 'c': ([2, 2], [0, 1, 4, 5]), 's': ([], [7]), 'none': ([0, 2], [])},
          {'w': [0, 0], 'c': [0, 0], 's': [], 'none': [0, 0]})
    write(f'{top}/{folder}/shard-00002-model-00001-of-00001.safetensors',
          {'w': ([3, 3], [3, 4, 5, 6, 7, 8, 9, 10, 11]), 'c': ([2, 2], [2, 3, 6, 7])}, {'w': [1, 0], 'c': [0, 2]})
write(f'{top}/bad/a.safetensors', {'a\x1b[2J\x9b\nb': ([1], [1])})
write(f'{top}/hole/a.safetensors', {'w\x1b[2J': ([1, 3], [0, 1, 2])}, {'w\x1b[2J': [1, 0]})
END

run "$tool" --help
check "--help has an example" says "knap-checkpoint verify run"
check "--help ends well" succeeds
run "$tool" inspect "$TMP/run"
check "inspect names the parts" says "model: 4 tensors, 84 B in 2 files"
check "inspect prints dtype, whole shape and size" grep -Eq "^  w +F32 +\[4, 3\] +48 B$" "$TMP/output"
check "inspect prints scalars and tensors without elements" grep -Eq "^  none +F32 +\[0, 2\] +0 B$" "$TMP/output"
run "$tool" inspect --part optimizer "$TMP/run"
check "--part picks one" eval 'says "optimizer: 4" && ! says "model: 4" >/dev/null'

# holds FILE: its tensors are those above, whole.
holds() {
    python3 - "$@" <<'END'
import json, struct, sys
seen = {}
for path in sys.argv[1:]:
    raw = open(path, 'rb').read()
    n, = struct.unpack('<Q', raw[:8])
    header = json.loads(raw[8:8 + n])
    assert header.pop('__metadata__')['format'] == 'pt'
    for name, t in header.items():
        a, b = t['data_offsets']
        seen[name] = t['shape'], list(struct.unpack(f'<{(b - a) // 4}f', raw[8 + n + a:8 + n + b]))
assert seen == {'w': ([4, 3], list(range(12))), 'c': ([2, 4], list(range(8))), 's': ([], [7]), 'none': ([0, 2], [])}, seen
END
}

run "$tool" merge "$TMP/run" --out "$TMP/one"
check "merge takes the model of a checkpoint" says "4 tensors, 84 B"
check "merge writes whole tensors" holds "$TMP/one/model.safetensors"
for out in step-00000001 step-00000001/model step-00000009 best ""; do
    mkdir -p "$TMP/saved/step-00000001/model" "$TMP/saved/optimizer" && touch "$TMP/saved/.lock"
    echo '{"version": 3, "step": 1, "number": 1}' >"$TMP/saved/step-00000001/state.json"
    run "$tool" merge "$TMP/run" --out "$TMP/saved/$out"
    check "merge doesn't write into a run's folder ($out)" fails "another folder"
done
check "and makes nothing there" test -z "$(find "$TMP/saved" -name '*.safetensors' -o -name 'step-*9' -o -name best)"
run "$tool" merge "$TMP/run" --out "$TMP/one"
check "merge never replaces a file" fails "model.safetensors is there already"
check "and leaves it as it was" holds "$TMP/one/model.safetensors"
run "$tool" merge --out "$TMP/more" --shard-size 48B "$TMP/run/optimizer"
check "merge writes shards of a size" holds "$TMP"/more/model-0000{1,2}-of-00002.safetensors
check "and an index of them" grep -q '"w": "model-00001-of-00002.safetensors"' "$TMP/more/model.safetensors.index.json"
check "with the sum of their bytes" grep -q '"total_size": 84' "$TMP/more/model.safetensors.index.json"
run "$tool" inspect "$TMP/more"
check "which inspect reads" says "4 tensors, 84 B in 2 files"

run "$tool" verify "$TMP/run"
check "verify says which bytes had no checksum" says "8 of 8 tensors have no checksum"
run "$tool" verify "$TMP/more"
check "verify finds merged files whole" says "4 tensors, 84 B: all bytes are as they were written"
check "and ends with 0" succeeds
printf 'x' | dd of="$TMP/more/model-00001-of-00002.safetensors" bs=1 seek=$(($(stat -c %s "$TMP/more/model-00001-of-00002.safetensors") - 1)) \
    conv=notrunc status=none
run "$tool" verify "$TMP/more"
check "verify names a damaged tensor and its file" says 'model-00001-of-00002.safetensors: tensor "w": its bytes have the checksum'
check "and fails" fails "1 of 4 tensors are damaged"
run "$tool" merge "$TMP/more" --out "$TMP/again"
check "merge refuses damaged bytes" fails "damaged"
check "and leaves no file" eval '[ -z "$(ls "$TMP/again")" ]'

run "$tool" inspect "$TMP/bad"
check "control characters of names aren't printed" eval 'succeeds && ! LC_ALL=C grep -q "[[:cntrl:]]" "$TMP/output"'
run "$tool" inspect "$TMP/hole"
check "a hole is an error" fails "no file holds its element [0, 0]"
check "whose text has no control characters either" eval '! LC_ALL=C grep -q "[[:cntrl:]]" "$TMP/output"'
rm "$TMP/run/model/shard-00001-model-00001-of-00001.safetensors"
run "$tool" inspect "$TMP/run"
check "a missing rank's file is an error" fails "a file is missing"

# A training's own checkpoints.
for _ in $(seq 50); do echo "the quick brown fox jumps over the lazy dog"; done >"$TMP/text"
run "$BUILD/models/train_gpt" --data "$TMP/text" --layers 1 --heads 2 --embd 16 --ctx 8 --batch 2 --threads 1 --ranks 2 \
    --steps 2 --save-every 1 --out "$TMP/trained"
check "a training on two ranks saves" succeeds
run "$tool" inspect "$TMP/trained"
check "inspect shows the newest checkpoint of a run" says "step-00000002: step 2, saved by 2 ranks"
check "its model and its optimizer" eval 'says "model: 16 tensors" && says "optimizer: 32 tensors"'
run "$tool" verify "$TMP/trained/step-00000001"
check "verify checks a checkpoint of a run" says "48 tensors"
check "and all of its bytes" says "all bytes are as they were written"
for edit in "s['files'][0]['name'] = '../../../../etc/passwd'" "s['files'][0]['name'] = 'other/shard'" \
    "s['files'][0]['name'] = 'model/../../x'" "s['files'][0]['name'] = 'model/'" "s['files'][0]['name'] = 7" "s['files'] = []" \
    "s['files'] = [f for f in s['files'] if not f['name'].startswith('model/')]" "s['files'].append({'name': '/etc/passwd'})"; do
    rm -rf "$TMP/edited" && cp -r "$TMP/trained/step-00000002" "$TMP/edited"
    edit_state "$TMP/edited" "$edit"
    run "$tool" verify "$TMP/edited"
    check "a list of other files is damage: $edit" fails "damaged"
done
run "$tool" merge "$TMP/trained" --out "$TMP/merged" --part optimizer
check "merge takes the part that is asked for" says "32 tensors"
shard=$TMP/trained/step-00000002/optimizer/shard-00002-model-00001-of-00002.safetensors
printf '\377' | dd of="$shard" bs=1 seek=$(($(stat -c %s "$shard") - 1)) conv=notrunc status=none
run "$tool" verify "$TMP/trained"
check "a damaged byte of a shard is found" fails "1 of 48 tensors are damaged"
truncate -s 100 "$shard"
run "$tool" verify "$TMP/trained"
check "verify fails where only an older checkpoint is whole" fails "the newest checkpoint isn't whole"
check "and says why" says "step-00000002 isn't whole"
mkdir "$TMP/plain"
cp "$TMP/one/model.safetensors" "$TMP/plain/step-1000.safetensors"
run "$tool" inspect "$TMP/plain"
check "a file's name makes no checkpoint" says "4 tensors, 84 B in 1 file"
run "$tool" inspect --part nothing "$TMP/trained"
check "a part that a checkpoint hasn't is refused" fails "there are model and optimizer"

mkdir "$TMP/empty"
run "$tool" inspect "$TMP/empty"
check "a folder without tensors is refused" fails "holds no checkpoint"
run "$tool" inspect "$TMP/nowhere"
check "a missing folder is refused" fails "nowhere: there is no such file or folder"
run "$tool" frobnicate "$TMP/run"
check "an unknown command is refused" fails 'the command "frobnicate" is unknown; there are inspect, verify and merge'
run "$tool" inspect
check "a missing folder's name is asked for" fails "give a command and a folder"
run "$tool" merge "$TMP/one"
check "merge asks for --out" fails "give --out FOLDER"
run "$tool" verify "$TMP/one" --out x
check "--out is only for merge" fails "--out is only for merge"
run "$tool" merge "$TMP/one" --out "$TMP/new" --shard-size many
check "a size that is none is refused" fails "give bytes with a unit"
run "$tool" merge "$TMP/one" --out "$TMP/new" --shard-size -5GB
check "and one below 1" fails "give bytes with a unit"
finish
