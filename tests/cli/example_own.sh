#!/usr/bin/env bash
# tests/cli/example_own.sh: an operation and an optimizer of one's own (examples/function.c, examples/optimizer.c)
# learn on one rank and on two, and are short.
. "$(dirname "$0")/lib.sh"

[ -x "$BUILD/examples/function" ] || skip "the examples are not built"
export OMP_NUM_THREADS=1

# learns NAME FUNCTION MOST: the program; what is its user's own begins at FUNCTION, at most MOST lines.
learns() {
    local ranks lines
    for ranks in 1 2; do
        run timeout 60 "$BUILD/examples/$1" --ranks $ranks --steps 300
        check "$1: on $ranks ranks it runs to its end" succeeds
        check "$1: on $ranks ranks the loss falls, from about log 4" loss_falls 1 2.5 2
        cp "$TMP/output" "$TMP/first$ranks"
    done
    check "$1: the first micro-batch is the same on 1 and 2 ranks" \
        cmp <(head -n 1 "$TMP/first1") <(head -n 1 "$TMP/first2")
    run "$BUILD/examples/$1" --help
    check "$1: --help lists the options" says "--steps N"
    lines=$(sed -n "/^static .* $2(/,/^\/\* ----/p" "$ROOT/examples/$1.c" | grep -cvE '^ *(/\*.*)?$')
    check "$1: at most $3 lines are one's own, here $lines" test "$lines" -gt 10 -a "$lines" -le "$3"
}

learns function quantize_forward 40
learns optimizer adabelief 30
finish
