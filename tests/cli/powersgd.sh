#!/usr/bin/env bash
# tests/cli/powersgd.sh: the example of a communication hook learns on one rank and, compressed, on two.
. "$(dirname "$0")/lib.sh"

powersgd=$BUILD/examples/powersgd
[ -x "$powersgd" ] || skip "$powersgd is not built"
export OMP_NUM_THREADS=1

for ranks in 1 2; do
    run timeout 600 "$powersgd" --ranks $ranks --steps 200
    check "on $ranks ranks it runs to its end" succeeds
    check "on $ranks ranks the loss falls, from about log 8" loss_falls 1.8 2.5 5
    cp "$TMP/output" "$TMP/first$ranks"
done
check "it says what it sends" says "fc1 sends 384 of 8192 numbers"
run timeout 600 "$powersgd" --ranks 2 --steps 200
check "a second run prints the same" cmp "$TMP/output" "$TMP/first2"
check "compression shows" \
    test "$(tail -n 1 "$TMP/first1")" != "$(tail -n 1 "$TMP/first2")"
finish
