#!/usr/bin/env bash
# tests/cli/example_function.sh: examples/function.c, an operation of one's own, learns on one rank and on two.
. "$(dirname "$0")/lib.sh"

function=$BUILD/examples/function
[ -x "$function" ] || skip "$function is not built"
export OMP_NUM_THREADS=1

for ranks in 1 2; do
    run timeout 60 "$function" --ranks $ranks --steps 300
    check "on $ranks ranks it runs to its end" succeeds
    check "on $ranks ranks the loss falls, from about log 4" loss_falls 1 2.5 2
    cp "$TMP/output" "$TMP/first$ranks"
done
check "the first micro-batch is the same on 1 and 2 ranks" \
    cmp <(head -n 1 "$TMP/first1") <(head -n 1 "$TMP/first2")
run "$function" --help
check "--help lists the options" says "--steps N"

lines=$(sed -n '/^static kn_values quantize_forward/,/^\/\* ----/p' "$ROOT/examples/function.c" |
    grep -cvE '^ *(/\*.*)?$')
check "the operation takes at most 40 lines, here $lines" test "$lines" -gt 10 -a "$lines" -le 40
finish
