#!/usr/bin/env bash
# tests/cli/example_gpt.sh: examples/gpt.c learns a text on one rank and on two, and generates;
# bad input is an error message.
. "$(dirname "$0")/lib.sh"

gpt=$BUILD/examples/gpt
[ -x "$gpt" ] || skip "$gpt is not built"
export OMP_NUM_THREADS=1
cat "$ROOT"/docs/*.md >"$TMP/text"

# learns RANKS STEPS N: the first loss falls below an Nth.
learns() {
    run timeout 600 "$gpt" --ranks "$1" --steps "$2" --tokens 80 --data "$TMP/text"
    check "on $1 ranks it runs to its end" succeeds
    check "on $1 ranks the loss falls" loss_falls 0 100 "$3"
    # the sample: everything after the last line of a step
    check "on $1 ranks it writes 80 characters" test "$(sed "1,/^step  *$(($2 - 1)) /d" "$TMP/output" | wc -m)" -ge 80
}
learns 1 60 1.3334
learns 2 16 1.1
cp "$TMP/output" "$TMP/first"
run timeout 600 "$gpt" --ranks 2 --steps 16 --tokens 80 --data "$TMP/text"
check "a second run writes the same" cmp "$TMP/output" "$TMP/first"
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
