#!/usr/bin/env bash
# tests/cli/llama.sh: train_gpt --model llama and generate from outside: the same bits over ranks and settings,
# precisions, resuming, sampling; options and checkpoints that don't fit.
. "$(dirname "$0")/lib.sh"
train=$BUILD/models/train_gpt
generate=$BUILD/models/generate
[ -x "$train" ] && [ -x "$generate" ] || skip "build/models/train_gpt or generate is not built"

for _ in $(seq 400); do echo "the quick brown fox jumps over the lazy dog"; done >"$TMP/text"
tiny=("$train" --model llama --data "$TMP/text" --layers 2 --heads 4 --kv-heads 2 --embd 32 --ctx 16 --batch 4
    --threads 1 --warmup 5 --eval-steps 3)

# column FILE NAME: that value of every line of a log.
column() { sed -E "s/.*\"$2\": ([^,}]*).*/\1/" "$1"; }
below() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a != "" && a + 0 < b + 0) }'; }
same_log() {
    for name in loss val_loss grad_norm; do
        cmp <(column "$1" $name) <(column "$2" $name) || return 1
    done
}
refused() {
    local name=$1 text=$2
    shift 2
    run timeout 600 "$@"
    check "$name" fails "$text"
}

# ---- the same bits -------------------------------------------------------------------------------

bits=(--steps 8 --eval-every 4 --dropout 0.1)
check "one rank" "${tiny[@]}" "${bits[@]}" --accum 4 --log "$TMP/1" --out "$TMP/one"
mkdir "$TMP/store"
variant() { # NAME OPTIONS...
    local name=$1
    shift
    rm -f "$TMP/n"
    check "$name" "${tiny[@]}" "${bits[@]}" --log "$TMP/n" "$@"
    check "$name: the same bits" same_log "$TMP/1" "$TMP/n"
}
variant "two ranks, ragged" --ranks 2 --accum 2 --layout ragged
variant "two ranks, DDP, recompute" --ranks 2 --accum 2 --strategy no_shard --recompute
variant "four ranks, by parameter, offloaded" --ranks 4 --accum 1 --layout per_param --offload "$TMP/store" \
    --strategy shard_grad_op
for dtype in bf16 f16; do
    for ranks in 1 2; do
        rm -f "$TMP/$dtype$ranks"
        check "$dtype, $ranks ranks" "${tiny[@]}" --steps 6 --eval-every 6 --dtype $dtype --accum $((2 / ranks)) \
            --ranks $ranks --log "$TMP/$dtype$ranks"
    done
    check "$dtype: the same bits" same_log "$TMP/${dtype}1" "$TMP/${dtype}2"
done

# ---- resuming and writing ------------------------------------------------------------------------

check "four steps of eight on two ranks" "${tiny[@]}" "${bits[@]}" --ranks 2 --accum 2 --log "$TMP/parts" \
    --out "$TMP/two" --stop-after 4
check "the checkpoint says that it is a Llama" grep -q '"model_type": "llama"' "$(newest "$TMP/two")/state.json"
check "four more on one" "$train" --resume "$TMP/two" --log "$TMP/parts" --threads 1 --accum 4
check "the same log" same_log "$TMP/1" "$TMP/parts"
check "the same state" same_training "$TMP/one" "$TMP/two"

# a head of its own, a scaled rope
run "${tiny[@]}" --steps 100 --lr 1e-2 --eval-every 100 --log "$TMP/log" --out "$TMP/out" --no-tied \
    --rope-factor 8 --rope-original 32 --hidden 48 --sample-every 100 --sample-tokens 9
check "a hundred steps" succeeds
check "it tells its sizes" says "llama: 2 layers, 4 heads, 2 of keys and values, 32 channels, 48 in the MLP, context 16"
check "the loss falls" below "$(column "$TMP/log" val_loss | tail -n 1)" 1.0
run "$generate" --from "$TMP/out" --prompt "the quick" --tokens 30 --temperature 0
check "generate goes on from the prompt" says "the quick brown fox"
check "two ranks write the same" cmp "$TMP/output" <("$generate" --from "$TMP/out" --prompt "the quick" --tokens 30 \
    --temperature 0 --ranks 2 --threads 1)

# ---- what doesn't fit ----------------------------------------------------------------------------

refused "an option of Llamas" "--kv-heads is an option of a Llama, and --model custom is a GPT" "$train" --data "$TMP/text" \
    --kv-heads 2
refused "an option of GPTs" "--bias is an option of a GPT" "${tiny[@]}" --bias
refused "sizes beside a preset" "--hidden doesn't go with --model llama3.2-1b" "$train" --data "$TMP/text" \
    --model llama3.2-1b --hidden 64
refused "an original context alone" "--rope-original is for --rope-factor" "${tiny[@]}" --rope-original 32
refused "a factor below 1" "--rope-factor" "${tiny[@]}" --rope-factor 0.5
refused "key-value heads that don't divide" "3 key-value heads don't divide 4 heads" "$train" --model llama \
    --data "$TMP/text" --kv-heads 3
refused "heads of odd size" "heads of an even size" "$train" --model llama --data "$TMP/text" --heads 4 --embd 20
refused "a choice that is near" "did you mean llama3.2-1b" "$train" --data "$TMP/text" --model llama3.2-1
resume=("$train" --resume "$TMP/two" --threads 1 --steps 9)
refused "another kind of model" "--model custom: the training was begun with llama, which a resumed run can't change; leave --model out" "${resume[@]}" --model custom
refused "other heads" "the options make a model with heads 2, and the one of the checkpoint in" "${resume[@]}" --heads 2
refused "another MLP" "a model with hidden 96" "${resume[@]}" --hidden 96
refused "a head that isn't there" "a model with tied 0" "${resume[@]}" --no-tied
edit_state "$(newest "$TMP/two")" "s['model']['num_hidden_layers'] = 3"
refused "a damaged configuration" "holds a model of other sizes" "${resume[@]}"
refused "a damaged configuration, generate" "holds a model of other sizes" "$generate" --from "$TMP/two"
finish
