#!/usr/bin/env bash
# tests/cli/example_ranks.sh: losses over the batch of all ranks (examples/clip.c) and experts on ranks of their own
# (examples/experts.c) learn, with the same bits on 1, 2 and 4 ranks.
. "$(dirname "$0")/lib.sh"

[ -x "$BUILD/examples/clip" ] || skip "the examples are not built"
export OMP_NUM_THREADS=1

# learns NAME OPTIONS...: on 1, 2 and 4 ranks; the outputs are $TMP/NAME.RANKS.
learns() {
    local ranks
    for ranks in 1 2 4; do
        run timeout 600 "$BUILD/examples/$1" --ranks $ranks "${@:2}"
        check "$1 ${*:2}: on $ranks ranks it runs to its end" succeeds
        cp "$TMP/output" "$TMP/$1.$ranks"
    done
}

learns clip
check "clip: the loss falls" loss_falls 5 6 5
for ranks in 2 4; do
    check "clip: $ranks ranks have the bits of one" cmp "$TMP/clip.1" "$TMP/clip.$ranks"
done
cp "$TMP/clip.1" "$TMP/cached"
learns clip --gathered
for ranks in 1 2 4; do
    check "clip: in one pass $ranks ranks differ by rounding only" \
        test "$(paste -d' ' "$TMP/cached" "$TMP/clip.$ranks" | awk '{ d = $4 - $8; n += d < -2e-5 || d > 2e-5 } END { print NR, n + 0 }')" = "5 0"
done
run timeout 60 "$BUILD/examples/clip" --ranks 3
check "clip: ranks that the parts don't divide among are refused" says "8 parts for 3 ranks"

learns experts
check "experts: the loss falls" loss_falls 10 20 3
for ranks in 2 4; do
    check "experts: $ranks ranks have the bits of one" cmp "$TMP/experts.1" "$TMP/experts.$ranks"
done
finish
