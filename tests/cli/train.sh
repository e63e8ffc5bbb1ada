#!/usr/bin/env bash
# tests/cli/train.sh: train_gpt and generate from outside: learning, logs, saving, resuming, Ctrl-C.
. "$(dirname "$0")/lib.sh"
train=$BUILD/models/train_gpt
generate=$BUILD/models/generate
[ -x "$train" ] && [ -x "$generate" ] || skip "build/models/train_gpt or generate is not built"

for _ in $(seq 400); do echo "the quick brown fox jumps over the lazy dog"; done >"$TMP/text"
tiny=("$train" --data "$TMP/text" --layers 2 --heads 2 --embd 32 --ctx 16 --batch 4 --threads 1
    --warmup 5 --eval-steps 3)

# column FILE NAME: that value of every line of a log.
column() { sed -E "s/.*\"$2\": ([^,}]*).*/\1/" "$1"; }
below() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a != "" && a + 0 < b + 0) }'; }
lines_are_json() { python3 -c 'import json, sys; [json.loads(l) for l in open(sys.argv[1])]' "$1"; }

# ---- learning ----------------------------------------------------------------------------------

run "${tiny[@]}" --steps 120 --lr 1e-2 --dropout 0 --eval-every 60 --log "$TMP/log" --out "$TMP/out" \
    --ranks 2 --sample-every 120 --sample-tokens 20
check "two ranks train" succeeds
for word in model parameters ranks strategy mesh layout dtypes threads "instruction set" libraries "memory a rank" \
    tokens/s left; do
    check "it tells $word" says "$word"
done
check "a line a step" test "$(wc -l <"$TMP/log")" -eq 120
check "the log is JSON" lines_are_json "$TMP/log"
check "the loss falls" below "$(column "$TMP/log" val_loss | tail -n 1)" 1.0
for file in model.safetensors optimizer.safetensors tokenizer.json state.json; do
    check "$file is there" test -s "$TMP/out/$file"
done
check "nothing half-written stays" test -z "$(find "$TMP/out" -name '*.new*' -o -name '*.tmp*')"

run "$generate" --from "$TMP/out" --prompt "the quick" --tokens 40 --temperature 0
check "generate goes on from the prompt" says "the quick brown fox"
"$generate" --from "$TMP/out" --prompt the --tokens 40 --seed 5 --top-k 5 --top-p 0.9 >"$TMP/a"
"$generate" --from "$TMP/out" --prompt the --tokens 40 --seed 5 --top-k 5 --top-p 0.9 >"$TMP/b"
check "the same seed writes the same" cmp "$TMP/a" "$TMP/b"
for ranks in 2 3 5; do
    check "$ranks ranks write the same" cmp "$TMP/a" <("$generate" --from "$TMP/out" --prompt the \
        --tokens 40 --seed 5 --top-k 5 --top-p 0.9 --ranks $ranks --threads 1)
done

run "${tiny[@]}" --steps 5 --ranks 2 --summary --check
check "a summary and a check" succeeds
for word in "kept for backward" gpt_block "f32[4,16,32]"; do
    check "the summary tells $word" says "$word"
done

# ---- resuming keeps the bits ---------------------------------------------------------------------

bits=(--steps 10 --dropout 0.1 --accum 2 --eval-every 5)
check "ten steps" "${tiny[@]}" "${bits[@]}" --log "$TMP/whole" --out "$TMP/w"
check "five steps" "${tiny[@]}" "${bits[@]}" --log "$TMP/parts" --out "$TMP/p" --stop-after 5
check "five more" "$train" --resume "$TMP/p" --log "$TMP/parts" --threads 1
for name in step loss val_loss lr grad_norm; do
    check "the same $name" diff <(column "$TMP/whole" $name) <(column "$TMP/parts" $name)
done
for file in model.safetensors optimizer.safetensors; do
    check "the same $file" same_save "$TMP/w/$file" "$TMP/p/$file"
done
# files of the first versions: no name of the save, no count of optimizer steps, no type of the model
cp -r "$TMP/p" "$TMP/old" && rm "$TMP/old"/*.safetensors
check "five steps again" "${tiny[@]}" "${bits[@]}" --out "$TMP/old" --overwrite --stop-after 5
python3 - "$TMP/old" <<'END'
import json, re, sys
for name in 'state', 'tokenizer':
    j = json.load(open(f'{sys.argv[1]}/{name}.json'))
    for key in 'save', 'optimizer_steps':
        j.pop(key, None)
    j.get('model', {}).pop('model_type', None)
    json.dump(j, open(f'{sys.argv[1]}/{name}.json', 'w'))
for name in 'model', 'optimizer':
    path = f'{sys.argv[1]}/{name}.safetensors'
    data, count = re.subn(rb',\s*"save":\s*"[0-9a-f]{32}"', lambda m: b' ' * len(m.group(0)), open(path, 'rb').read())
    assert count == 1
    open(path, 'wb').write(data)
END
check "an old file is written from" "$generate" --from "$TMP/old" --tokens 3
check "and gone on from" "$train" --resume "$TMP/old" --threads 1
check "to the same bits" same_save "$TMP/w/model.safetensors" "$TMP/old/model.safetensors"
# the reverse: saved by two ranks with half the micro-batches each, resumed by one
check "five steps on two ranks" "${tiny[@]}" --steps 10 --dropout 0.1 --accum 1 --eval-every 5 \
    --ranks 2 --log "$TMP/mixed" --out "$TMP/m" --stop-after 5
check "five more on one" "$train" --resume "$TMP/m" --log "$TMP/mixed" --threads 1 --accum 2
check "the same weights" same_save "$TMP/w/model.safetensors" "$TMP/m/model.safetensors"

# a checkpoint is independent of strategy, layout, mesh and offload
mkdir "$TMP/store"
check "five steps, cut by parameter, offloaded" "${tiny[@]}" --steps 10 --dropout 0.1 --accum 1 \
    --eval-every 5 --ranks 2 --layout per_param --strategy shard_grad_op --offload "$TMP/store" \
    --log "$TMP/cut" --out "$TMP/x" --stop-after 5
check "five more on one, ragged" "$train" --resume "$TMP/x" --log "$TMP/cut" --threads 1 --accum 2 \
    --layout ragged
for name in loss grad_norm; do
    check "the same $name" diff <(column "$TMP/whole" $name) <(column "$TMP/cut" $name)
done
for file in model.safetensors optimizer.safetensors; do
    check "the same $file" same_save "$TMP/w/$file" "$TMP/x/$file"
done
# Muon's momentum and averages of the weights, saved by two ranks and gone on with by one
muon=("${tiny[@]}" --optimizer muon --ema 0.9 --steps 10 --eval-every 5)
run "${muon[@]}" --accum 2 --log "$TMP/muon" --out "$TMP/u"
check "ten steps with Muon and averages" succeeds
check "it tells Muon's share of a step" says "/s  muon "
check "the table counts the averages" says " a rank, beside the optimizer's state"
check "five on two ranks" "${muon[@]}" --accum 1 --ranks 2 --layout ragged --log "$TMP/muon_parts" \
    --out "$TMP/v" --stop-after 5
check "five more on one with averages" "$train" --resume "$TMP/v" --log "$TMP/muon_parts" \
    --threads 1 --accum 2
for name in loss val_loss grad_norm; do
    check "the same $name with averages" diff <(column "$TMP/muon" $name) \
        <(column "$TMP/muon_parts" $name)
done
for file in model.safetensors optimizer.safetensors; do
    check "the same $file with averages" same_save "$TMP/u/$file" "$TMP/v/$file"
done
check "the averages are written from" "$generate" --from "$TMP/u" --tokens 3
# the scale of the loss is saved as well; with a single token a step the first scales are too large
f16=("$train" --data "$TMP/text" --layers 2 --heads 2 --embd 32 --ctx 1 --batch 1 --threads 1
    --warmup 5 --dropout 0.1 --steps 10 --dtype f16 --reduce-dtype f16 --eval-every 0)
check "ten steps in f16" "${f16[@]}" --log "$TMP/f16" --out "$TMP/f"
check "steps that overflow are skipped" grep -q '"grad_norm": null' "$TMP/f16"
check "the log stays JSON" lines_are_json "$TMP/f16"
check "five in f16" "${f16[@]}" --log "$TMP/f16_parts" --out "$TMP/g" --stop-after 5
check "five more in f16" "$train" --resume "$TMP/g" --log "$TMP/f16_parts" --threads 1
for name in loss grad_norm; do
    check "the same $name in f16" diff <(column "$TMP/f16" $name) <(column "$TMP/f16_parts" $name)
done
scaler() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["scaler"])' "$1"; }
check "and the same scale" test "$(scaler "$TMP/f/state.json")" = "$(scaler "$TMP/g/state.json")"

# ---- Ctrl-C ---------------------------------------------------------------------------------------

for ranks in 1 2; do
    rm -f "$TMP/log"
    set -m # else a background job ignores SIGINT
    "${tiny[@]}" --steps 1000000 --ranks $ranks --eval-every 0 --log "$TMP/log" \
        --out "$TMP/c$ranks" >"$TMP/output" 2>&1 </dev/null &
    pid=$!
    set +m
    wait_for test -s "$TMP/log"
    kill -INT $pid
    ended $pid
    check "Ctrl-C ends $ranks ranks well" succeeds
    check "and says how to resume" says "--resume $TMP/c$ranks"
    check "and has saved" test -s "$TMP/c$ranks/state.json"
done
run "${tiny[@]}" --steps 9 --stop-after 2
check "without --out it says that nothing was saved" says "nothing was saved"
finish
