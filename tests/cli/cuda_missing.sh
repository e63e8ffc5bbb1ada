#!/usr/bin/env bash
# tests/cli/cuda_missing.sh: a binary with CUDA runs without a GPU; --device cuda is then one error message. With a GPU
# and without NVIDIA's libraries Knap's own kernels take over, and the table at the start says so.
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

gpu=$BUILD/tests/gpu/train_gpt_fake
[ -x "$gpu" ] || finish
library() { "${CC:-cc}" -shared -fPIC -x c -o "$TMP/libraries/$1" - <<<"unsigned long $2(void) { return $3; }"; }
small=(--layers 1 --heads 2 --embd 16 --ctx 8 --batch 1 --steps 2 --data "$TMP/text.txt" --dtype bf16 --device cuda)
cublas=$(grep -aoE 'libcublasLt\.so\.[0-9]+' "$gpu" | head -1)
mkdir "$TMP/libraries"
library "$cublas" cublasLtGetVersion 130000
library libcudnn.so.9 cudnnGetVersion 90701
library libcudnn_graph.so.9 cudnnGraphVersion 90701 # without it the real one ends the process
run "$gpu" "${small[@]}" --log "$TMP/own"
check "Knap's kernels alone" succeeds
run env LD_LIBRARY_PATH="$TMP/libraries" FAKE_PROVIDERS=cublaslt,cudnn,cuda "$gpu" "${small[@]}" --log "$TMP/instead"
check "libraries that don't fit stop nothing" succeeds
check "they train" test "$(grep -c '"loss": ' "$TMP/instead")" = 2
check "on Knap's kernels" diff <(grep -o '"loss": [^,]*' "$TMP/own") <(grep -o '"loss": [^,]*' "$TMP/instead")
check "it says what is missing" says "cuBLASLt here doesn't fit this build: it has no cublasLtCreate"
check "and what that costs" says "matrix products run on Knap's kernels, without tensor cores"
check "it says which is too old" says "cuDNN 9.7.1 is too old: this build needs 9.8.0 or newer; attention, convolutions"
check "each once" test "$(grep -c '^  slow here ' "$TMP/output")" = 2
finish
