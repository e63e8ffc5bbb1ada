#!/usr/bin/env bash
# tests/cli/example_gpt.sh: examples/gpt.c learns a text on one rank and on two, and generates;
# bad input is an error message.
. "$(dirname "$0")/lib.sh"

gpt=$BUILD/examples/gpt
[ -x "$gpt" ] || skip "$gpt is not built"
export OMP_NUM_THREADS=1
cat "$ROOT"/docs/*.md >"$TMP/text"

# The sample: everything after the last line of a step.
sample() { sed '1,/^step  *59 /d' "$1"; }

for ranks in 1 2; do
    run timeout 600 "$gpt" --ranks $ranks --steps 60 --tokens 80 --data "$TMP/text"
    check "on $ranks ranks it runs to its end" succeeds
    check "on $ranks ranks the loss falls" loss_falls 0 100 1.3334
    check "on $ranks ranks it writes 80 characters" test "$(sample "$TMP/output" | wc -m)" -ge 80
    cp "$TMP/output" "$TMP/first$ranks"
done
run timeout 600 "$gpt" --ranks 2 --steps 60 --tokens 80 --data "$TMP/text"
check "a second run writes the same" cmp "$TMP/output" "$TMP/first2"
run "$gpt" --help
check "--help lists the options" says "--steps N"
run "$gpt" --data "$TMP/none"
check "a missing text is a sentence" fails "$TMP/none"
run "$gpt" --stesp 3
check "an unknown option is a sentence" fails "did you mean --steps"
: >"$TMP/empty"
run "$gpt" --data "$TMP/empty"
check "an empty text is a sentence" fails "empty"
finish
