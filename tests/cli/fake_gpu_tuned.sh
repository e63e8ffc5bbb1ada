#!/usr/bin/env bash
# tests/cli/fake_gpu_tuned.sh: training runs whose products are timed and kept (KNAP_TUNE, KNAP_TUNED), on
# fake CUDA with a fake cuBLASLt (tests/gpu/fake_cublaslt.c), whose second algorithm is the fastest.
. "$(dirname "$0")/lib.sh"

gpu=$BUILD/tests/gpu/train_gpt_fake
[ -x "$gpu" ] && [ -f "$BUILD/tests/gpu/libfake_cublaslt.so" ] || skip "train_gpt_fake and libfake_cublaslt.so are not built"

mkdir "$TMP/libraries"
cp "$BUILD/tests/gpu/libfake_cublaslt.so" "$TMP/libraries/$(grep -aoE 'libcublasLt\.so\.[0-9]+' "$gpu" | head -1)"
for i in $(seq 60); do echo "line $i: $((i * 7919 % 997))"; done >"$TMP/text.txt"
export KNAP_COMM=local LD_LIBRARY_PATH="$TMP/libraries" FAKE_PROVIDERS=cublaslt,cuda FAKE_ALGORITHMS="5 3 4" KNAP_TUNED=$TMP/tuned.txt
tiny=(--layers 2 --heads 2 --embd 16 --ctx 8 --batch 2 --steps 6 --data "$TMP/text.txt" --dtype f32 --device cuda --threads 1)
keys() { sed -n 's/^[0-9a-f]* \(.*\) = .*/\1/p' "$1" | sort; }
losses() { grep -o '"loss": [^,]*\|"grad_norm": [^,]*' "$1"; }
same() { [ "$(losses "$1" | wc -l)" -ge 6 ] && diff <(losses "$1") <(losses "$2"); }
differ() { ! same "$@"; }

run env KNAP_TUNED=none "$gpu" "${tiny[@]}" --accum 2 --log "$TMP/heuristics"
check "by heuristics" succeeds
check "it says so" says "algorithms         chosen by heuristics, none was timed before (KNAP_TUNE=1 does): no file"
check "nothing is written" test ! -e "$KNAP_TUNED"
run env KNAP_TUNE=1 "$gpu" "${tiny[@]}" --accum 2 --log "$TMP/timed"
check "products are timed" succeeds
check "it says where they are kept" says "algorithms         timed when first met, 0 so far: $KNAP_TUNED"
lines=$(grep -c '= \(algorithm 6f676c610000000001[0-9a-f]*\|parts\), first 50[0-9.]* us, best 30[0-9.]* us$' "$KNAP_TUNED")
check "the fastest of each is kept" test "$lines" -gt 5
check "and no other" test "$lines" = "$(grep -c . "$KNAP_TUNED")"
run "$gpu" "${tiny[@]}" --accum 2 --log "$TMP/kept"
check "a later run reads them" says "algorithms         $lines timed before: $KNAP_TUNED"
check "with the same bits" same "$TMP/timed" "$TMP/kept"
check "which are others than before" differ "$TMP/kept" "$TMP/heuristics"
run "$gpu" "${tiny[@]}" --accum 2 --log "$TMP/graph" --cuda-graph
check "steps as a graph have them, too" same "$TMP/kept" "$TMP/graph"
cp "$KNAP_TUNED" "$TMP/before"
run env KNAP_TUNE=1 "$gpu" "${tiny[@]}" --accum 2 --log "$TMP/again"
check "what is known isn't timed again" cmp "$TMP/before" "$KNAP_TUNED"
rm "$KNAP_TUNED"
run env KNAP_TUNE=1 "$gpu" "${tiny[@]}" --accum 2 --log "$TMP/timed.graph" --cuda-graph
check "steps that become a graph are timed before" same "$TMP/kept" "$TMP/timed.graph"
check "all of them" diff <(keys "$KNAP_TUNED") <(keys "$TMP/before")

run "$gpu" "${tiny[@]}" --ranks 2 --log "$TMP/ranks"
check "two ranks read them" succeeds
run env KNAP_TUNE=1 "$gpu" "${tiny[@]}" --ranks 2
check "but don't time" fails "KNAP_TUNE=1 on 2 ranks: one rank times algorithms"
head -c 1000 /dev/urandom >"$TMP/random"
run env KNAP_TUNED="$TMP/random" "$gpu" "${tiny[@]}" --accum 2 --log "$TMP/damaged"
check "a damaged file stops nothing" same "$TMP/heuristics" "$TMP/damaged"
check "and is said" says "$TMP/random isn't used: it isn't one of Knap's files of choices"
finish
