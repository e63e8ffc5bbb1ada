#!/usr/bin/env bash
# tests/cli/example_own.sh: an operation and an optimizer of one's own (examples/function.c, examples/optimizer.c)
# learn on one rank and on two, and are short; adapters of a GPT learn (examples/lora.c); a model of one's own
# (examples/spiral.c) goes on from its checkpoint; losses made of gradients (examples/pinn.c, examples/maml.c).
. "$(dirname "$0")/lib.sh"

[ -x "$BUILD/examples/function" ] || skip "the examples are not built"
export OMP_NUM_THREADS=1

# learns NAME FUNCTION MOST: the program; what is its user's own begins at FUNCTION, at most MOST lines.
learns() {
    local ranks lines
    for ranks in 1 2; do
        run timeout 600 "$BUILD/examples/$1" --ranks $ranks --steps 300
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

# No line of the last run has a loss of NaN or 0; where it failed, it said why.
prints_no_bad_loss() {
    ! grep -qE 'nan|loss 0\.0+$' "$TMP/output" && { [ "$status" -eq 0 ] || says "out of memory"; }
}

# Adapters in the places of a frozen GPT's layers: the second training begins high and learns.
for ranks in 1 2; do
    run timeout 600 "$BUILD/examples/lora" --ranks $ranks
    check "lora: on $ranks ranks it runs to its end" succeeds
    sed -i '1,/parameters are trained/d' "$TMP/output"
    check "lora: on $ranks ranks the adapters learn" loss_falls 3 20 8
done

# spiral NAME OPTIONS...: the program's output in $TMP/NAME.
spiral() {
    run timeout 600 "$BUILD/examples/spiral" "${@:2}"
    check "spiral: $1: it runs to its end" succeeds
    cp "$TMP/output" "$TMP/$1"
}

# Losses made of gradients: the same lines on any number of ranks.
for program in pinn maml; do
    for ranks in 1 2 4; do
        run timeout 600 "$BUILD/examples/$program" --threads 1 --ranks $ranks --steps 201
        check "$program: on $ranks ranks it runs to its end" succeeds
        cp "$TMP/output" "$TMP/lines$ranks"
    done
    check "$program: the losses are the same on 1 and 2 ranks" cmp "$TMP/lines1" "$TMP/lines2"
    check "$program: and on 4" cmp "$TMP/lines1" "$TMP/lines4"
    run "$BUILD/examples/$program" --ranks 3
    check "$program: 3 ranks are refused by a sentence" fails "micro-batches don't divide among 3 ranks"
done
run timeout 600 "$BUILD/examples/pinn" --threads 1 --steps 300
check "pinn: the loss falls" loss_falls 0.1 1 4

# A state that four ranks saved goes on with the same losses on two, in another layout.
run timeout 600 "$BUILD/examples/state_dict" --ranks 4 --save "$TMP/state.safetensors"
check "state_dict: four ranks save" succeeds
tail -n 1 "$TMP/output" >"$TMP/four"
run timeout 600 "$BUILD/examples/state_dict" --ranks 2 --load "$TMP/state.safetensors"
check "state_dict: two ranks load" succeeds
check "state_dict: the losses have the same bits" cmp "$TMP/output" "$TMP/four"

# A step that fails prints no value: the limits let it fail at the first or at a later one.
for program in function optimizer spiral; do
    for limit in 100K 200K 400K; do
        run env KNAP_MEMORY_LIMIT=$limit timeout 60 "$BUILD/examples/$program" --steps 3
        check "$program: no value of a step that failed, $limit" prints_no_bad_loss
    done
done

spiral one --steps 60
check "spiral: it finds the arm of nine points in ten" grep -qE '^(9[0-9]|100)\.. % of new points' "$TMP/one"
spiral half --ranks 2 --steps 30 --out "$TMP/half"
spiral whole --ranks 2 --steps 60 --from "$TMP/half"
check "spiral: 2 ranks that go on from a checkpoint end as 1 rank that never stopped" \
    cmp <(tail -n 2 "$TMP/one") <(tail -n 2 "$TMP/whole")
finish
