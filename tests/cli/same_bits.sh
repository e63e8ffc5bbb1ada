#!/usr/bin/env bash
# tests/cli/same_bits.sh: losses and gradient norms are the same bits for every number of ranks,
# strategy and prefetch that adds the same micro-batches (docs/architecture.md, idea 9).
. "$(dirname "$0")/lib.sh"
train=$BUILD/models/train_gpt
[ -x "$train" ] || skip "build/models/train_gpt is not built"
steps=${KNAP_SAME_STEPS:-8}

cat "$ROOT"/docs/*.md "$ROOT"/README.md "$ROOT"/kernels/base.h >"$TMP/text" 2>/dev/null

# train_to NAME OPTIONS...: keeps step, loss and norm of each step in $TMP/NAME.
train_to() {
    local name=$1
    shift
    "$train" --data "$TMP/text" --tokenizer byte --layers 2 --heads 2 --embd 32 --ctx 16 --batch 3 \
        --steps "$steps" --warmup 2 --clip 0.5 --dropout 0.1 --threads 1 --eval-every 4 \
        --eval-steps 3 --log "$TMP/$name.jsonl" "$@" || return 1
    sed -E 's/, "lr".*"grad_norm": ([^,]*),.*/ norm \1/' "$TMP/$name.jsonl" >"$TMP/$name"
    [ "$(grep -c 'norm [0-9]' "$TMP/$name")" -eq "$steps" ]
}

# same NAME OPTIONS...: the run gives the same lines as the first.
same() {
    train_to "$@" && diff "$TMP/one" "$TMP/$1"
}

check "one rank, four micro-batches" train_to one --ranks 1 --accum 4
check "the same command again" same again --ranks 1 --accum 4
check "two ranks" same two --ranks 2 --accum 2
check "four ranks" same four --ranks 4 --accum 1
check "two ranks, replicated" same two_no --ranks 2 --accum 2 --strategy no_shard
check "four ranks, replicated" same four_no --ranks 4 --accum 1 --strategy no_shard
check "one rank, replicated" same one_no --ranks 1 --accum 4 --strategy no_shard
check "two ranks, no prefetch" same none --ranks 2 --accum 2 --prefetch none
check "four ranks, late prefetch" same post --ranks 4 --accum 1 --prefetch post
check "two ranks, recompute" same recompute --ranks 2 --accum 2 --recompute
different() { train_to other --ranks 2 --accum 2 --seed 7 && ! diff -q "$TMP/one" "$TMP/other"; }
check "another seed differs" different
finish
