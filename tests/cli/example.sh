#!/usr/bin/env bash
# tests/cli/example.sh: the program of the README learns MNIST on one rank and on two.
. "$(dirname "$0")/lib.sh"

mlp=$BUILD/examples/mlp
[ -x "$mlp" ] || skip "$mlp is not built"
found=no
IFS=: read -r -a folders <<<"${KNAP_DATA:-}:${HOME:-}/.cache/knap"
for folder in "${folders[@]}"; do
    [ ! -f "$folder/mnist/train-images-idx3-ubyte.gz" ] || found=yes
done
export OMP_NUM_THREADS=1

if [ $found = no ]; then
    run timeout 600 "$mlp" --steps 2
    check "without MNIST it says where to get it" fails "scripts/get-data mnist"
    finish
fi

# losses N: as many lines "step S  loss L" with finite losses were printed.
losses() { [ "$(grep -cE '^step +[0-9]+  loss [0-9]+\.[0-9]+$' "$TMP/output")" = "$1" ]; }

for ranks in 1 2; do
    run timeout 600 "$mlp" --ranks $ranks --steps 101
    check "on $ranks ranks it runs to its end" succeeds
    check "on $ranks ranks rank 0 alone prints" losses 2
    check "on $ranks ranks the loss falls, from about log 10" loss_falls 2.1 2.5 3
    cp "$TMP/output" "$TMP/first$ranks"
done

run "$mlp" --help --ranks 2
check "--help lists the options once" test "$(grep -c -- "--steps N" "$TMP/output")" = 1
check "--help lists those of kn_init" says "--ranks N"
check "and is no error" succeeds
run "$mlp" --stesp 3
check "an unknown option is a sentence" fails "did you mean --steps"

run timeout 600 "$mlp" --ranks 2 --steps 101
check "a second run on 2 ranks prints the same" cmp "$TMP/output" "$TMP/first2"
check "the first micro-batch is the same on 1 and 2 ranks" \
    cmp <(head -n 1 "$TMP/first1") <(head -n 1 "$TMP/first2")

# Two ranks meet each micro-batch once: two calls of the loader on one rank see the same images,
# so only the number of micro-batches a step differs.
check "2 ranks learn from twice the images" \
    test "$(tail -n 1 "$TMP/first1")" != "$(tail -n 1 "$TMP/first2")"
finish
