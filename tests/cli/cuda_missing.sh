#!/usr/bin/env bash
# tests/cli/cuda_missing.sh: a binary with CUDA runs without a GPU; --device cuda is then one error message.
. "$(dirname "$0")/lib.sh"

trainer=$BUILD/models/train_gpt
[ -x "$trainer" ] || skip "$trainer is not built"
! ls /dev/nvidia[0-9]* >/dev/null 2>&1 || skip "this machine has a GPU"
export OMP_NUM_THREADS=1

printf 'To be, or not to be, that is the question.\n%.0s' $(seq 50) >"$TMP/text.txt"
small=(--layers 1 --heads 1 --embd 8 --ctx 8 --batch 1 --steps 1 --data "$TMP/text.txt")
run timeout 600 "$trainer" --device cuda "${small[@]}"
check "--device cuda fails with a sentence" fails "device cuda: this"
check "which says it once" test "$(grep -c 'device cuda: ' "$TMP/output")" = 1
run timeout 600 env KNAP_CUDA_DEVICE=3 "$trainer" --device cuda --ranks 2 "${small[@]}"
check "so with two ranks" fails "device cuda: this"
finish
