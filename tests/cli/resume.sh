#!/usr/bin/env bash
# tests/cli/resume.sh: a run that was stopped and goes on by the command that it printed is the undisturbed one, whatever
# its options: each option of each trainer, at another value than its default.
. "$(dirname "$0")/lib.sh"
gpt=$BUILD/models/train_gpt
images=$BUILD/models/train_resnet
[ -x "$gpt" ] && [ -x "$images" ] || skip "build/models/train_gpt or train_resnet is not built"

for _ in $(seq 60); do echo "the quick brown fox jumps over the lazy dog"; done >"$TMP/text"
mkdir "$TMP/set"
python3 - "$TMP/set" <<'END'
import random, sys
random.seed(3)
for name in [f'data_batch_{i}' for i in range(1, 6)] + ['test_batch']:
    with open(f'{sys.argv[1]}/{name}.bin', 'wb') as f:
        for i in range(10):
            f.write(bytes([i]) + bytes(random.randrange(20 * i, 20 * i + 60) for _ in range(3072)))
END

# log_of FILE: the values of its steps without times and memory.
log_of() { sed -E 's/"[a-z]*(_per_s|_ms)": [^,]*, //g; s/"peak_bytes": .*//' "$1"; }
record_of() { python3 -c 'import json, sys; print(json.dumps(json.load(open(sys.argv[1] + "/state.json"))["record"], sort_keys=True, indent=1))' "$(newest "$1")"; }

covered=" help out log resume overwrite stop-after" # by other tests

# resumes NAME STOP PROGRAM OPTIONS...: whole and in two parts, in folders of their own. Options in MORE are those of the
# first part alone.
resumes() {
    local name=$1 stop=$2 word go
    shift 2
    for word in "$@" ${MORE:-}; do
        [[ $word != --* ]] || covered+=" ${word#--}"
    done
    rm -rf "$TMP/whole" "$TMP/parts"
    mkdir -p "$TMP/whole/store" "$TMP/parts/store"
    cd "$TMP/whole" || exit 1
    # shellcheck disable=SC2086
    run timeout 300 "$@" ${MORE:-} --out run --log "the log"
    check "$name: the whole" succeeds
    cd "$TMP/parts" || exit 1
    # shellcheck disable=SC2086
    run timeout 300 "$@" ${MORE:-} --out run --log "the log" --stop-after "$stop"
    check "$name: a part" says "stopped after step $stop"
    go=$(sed -n 's/.*To go on: //p' "$TMP/output")
    run eval "timeout 300 $go"
    check "$name: the rest" succeeds
    check "$name: nothing changed" test -z "$(grep "when it was saved" "$TMP/output")"
    check "$name: the same log" diff <(log_of "$TMP/whole/the log") <(log_of "$TMP/parts/the log")
    check "$name: the same state" same_training "$TMP/whole/run" "$TMP/parts/run"
    check "$name: the same record" diff <(record_of "$TMP/whole/run") <(record_of "$TMP/parts/run")
    [[ "$*" != *"--save-every 1 "* ]] || check "$name: the same checkpoints" diff <(ls "$TMP/whole/run") <(ls "$TMP/parts/run")
    cd "$ROOT" || exit 1
}

# covers PROGRAM EXEMPT...: every option of --help was in some run.
covers() {
    local option missing="" program=$1
    shift
    covered+=" $*"
    for option in $("$program" --help | sed -n 's/^  --\([a-z0-9-]*\).*/\1/p'); do
        [[ "$covered " == *" $option "* || "$covered " == *" no-$option "* ]] || missing+=" $option"
    done
    check "$(basename "$program"): no option was left out" test -z "$missing" || echo "#   $missing"
    covered=" help out log resume overwrite stop-after"
}

cuda="device tf32 deterministic cuda-graph"
text=(--data "$TMP/text" --tokenizer byte --ctx 8 --batch 3 --eval-every 2)

resumes "a GPT" 3 "$gpt" "${text[@]}" --layers 1 --heads 2 --embd 16 --no-bias --dropout 0.1 --recompute --dtype bf16 \
    --reduce-dtype bf16 --accum 2 --no-sync --steps 6 --optimizer muon --lr 2e-3 --min-lr 1e-4 --warmup 2 --weight-decay 0.2 \
    --beta2 0.95 --ema 0.8 --clip 0.5 --clip-norm inf --seed 7 --eval-steps 2 --sample-every 2 --sample-tokens 3 \
    --prompt "the 'fox'" --save-every 1 --keep 0 --keep-best --async-save --strategy shard_grad_op --layout ragged --wrap size \
    --wrap-size 500 --keep-whole-below 20 --prefetch post --max-gathers 3 --max-reductions 2 --reshard never \
    --keep-gathered --offload store --timeout 250 --ranks 2 --threads 1
MORE=--summary resumes "a mesh" 3 "$gpt" "${text[@]}" --layers 2 --heads 1 --embd 8 --hook bf16_stochastic --accum 2 --steps 5 \
    --strategy hybrid_shard --replicas 2 --shards 2 --all-reduce-last --forward-prefetch --check --ranks 4 --threads 1
resumes "a Llama" 2 "$gpt" "${text[@]}" --model llama --layers 1 --heads 2 --embd 16 --kv-heads 1 --hidden 24 --no-tied \
    --rope-base 5000 --rope-factor 2 --rope-original 4 --steps 4 --threads 1
resumes "rates left open" 3 "$gpt" "${text[@]}" --layers 1 --heads 1 --embd 8 --steps 40 --threads 1
covers "$gpt" $cuda

pictures=(--data "$TMP/set" --batch 4 --threads 1)
check "weights to begin with" "$images" "${pictures[@]}" --model resnet18 --epochs 0.1 --eval-every 0 --export "$TMP/weights"
MORE="--init $TMP/weights --summary" resumes "a residual net" 3 "$images" "${pictures[@]}" --image 16 --pad 2 --no-flip --jitter 0.3 \
    --erase 0.4 --mixup 0.2 --cutmix 0.3 --smoothing 0.1 --workers 2 --model resnet18 --sync-bn --recompute \
    --accum 2 --no-sync --epochs 1.5 --lr 0.01 --schedule cosine --min-lr 1e-4 --warmup 2 --momentum 0.8 --no-nesterov \
    --weight-decay 1e-3 --ema 0.8 --clip 0.5 --clip-norm 1 --seed 7 --eval-every 0 --skip-bad --export exported \
    --save-every 1 --keep 3 --dtype bf16 --reduce-dtype bf16 --layout per_param --ranks 2
check "a residual net: the same export" cmp "$TMP"/{whole,parts}/exported/model.safetensors
resumes "a vision transformer" 5 "$images" "${pictures[@]}" --model vit_cifar --patch 8 --dropout 0.1 --augment resized \
    --optimizer adamw --beta2 0.95 --epochs 0.8 --keep-best --async-save --pictures shown
check "a vision transformer: the same curves" cmp "$TMP"/{whole,parts}/shown/curves.svg
for schedule in one_cycle step constant; do
    resumes "a ResNet-20, $schedule, with its rate left open" 4 "$images" "${pictures[@]}" --schedule $schedule --epochs 0.6
done
resumes "a ResNet-20 at another rate than that left open" 4 "$images" "${pictures[@]}" --lr 0.01 --stem small --epochs 0.6
covers "$images" $cuda grid hook timeout strategy replicas shards wrap wrap-size keep-whole-below prefetch forward-prefetch \
    max-gathers max-reductions reshard keep-gathered all-reduce-last offload check # rows of train_gpt's
finish
