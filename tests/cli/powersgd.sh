#!/usr/bin/env bash
# tests/cli/powersgd.sh: the example of a communication hook learns on one rank and, compressed, on two.
. "$(dirname "$0")/lib.sh"

powersgd=$BUILD/examples/powersgd
[ -x "$powersgd" ] || skip "$powersgd is not built"
export OMP_NUM_THREADS=1

# The last loss is below a fifth of the first, which is about log 8 = 2.08.
falls() {
    awk '/^step/ { if (!n++) first = $4; last = $4 }
         END { exit !(n > 1 && first > 1.8 && first < 2.5 && last < first / 5) }' "$TMP/output" ||
        { cat "$TMP/output"; return 1; }
}

for ranks in 1 2; do
    run timeout 60 "$powersgd" --ranks $ranks --steps 200
    check "on $ranks ranks it runs to its end" succeeds
    check "on $ranks ranks the loss falls" falls
    cp "$TMP/output" "$TMP/first$ranks"
done
check "it says what it sends" says "fc1 sends 384 of 8192 numbers"
run timeout 60 "$powersgd" --ranks 2 --steps 200
check "a second run prints the same" cmp "$TMP/output" "$TMP/first2"
check "compression shows" \
    test "$(tail -n 1 "$TMP/first1")" != "$(tail -n 1 "$TMP/first2")"
finish
