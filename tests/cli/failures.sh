#!/usr/bin/env bash
# tests/cli/failures.sh: tests/failures.py finds the failed cases of a log, and the lines that tell why, however long the
# output around them.
. "$(dirname "$0")/lib.sh"
command -v python3 >/dev/null || skip "no python3"

told() { python3 "$ROOT/tests/failures.py" "$@" >"$TMP/told"; }
is() { diff - "$TMP/told"; }
noise() { for i in $(seq 60); do echo "knap: rank 1 failed: expected error $i"; done; }

# the shim's runner
{
    noise
    echo "    0.10 s  a.passes"
    noise
    echo "../tests/a_test.c:7: rank 1: x == 1: x is 2 the cause"
    noise
    echo "../tests/a_test.c:9: failed == 0: 1 of 2 processes failed"
    echo "and a second line"
    echo "FAIL a.fails"
    echo "    0.20 s  a.fails"
    echo "some last words"
    echo "a.dies: killed by signal 6"
    echo "FAIL a.dies"
    echo "    0.20 s  a.dies"
    echo "1 passed, 2 failed, 0 skipped"
} >"$TMP/log"
told "$TMP/log"
check "the shim's runner: names, messages of failed checks, deaths" is <<'END'
a.fails
    ../tests/a_test.c:7: rank 1: x == 1: x is 2 the cause
    knap: rank 1 failed: expected error 60
    ../tests/a_test.c:9: failed == 0: 1 of 2 processes failed
    and a second line
a.dies
    some last words
    a.dies: killed by signal 6
END
told --lines 2 "$TMP/log"
check "the last lines of each" is <<'END'
a.fails
    ../tests/a_test.c:9: failed == 0: 1 of 2 processes failed
    and a second line
a.dies
    some last words
    a.dies: killed by signal 6
END
noise >"$TMP/log"
echo "SUMMARY: AddressSanitizer: 5 byte(s) leaked" >>"$TMP/log"
told "$TMP/log"
check "a program that breaks off" grep -q "AddressSanitizer: 5 byte" "$TMP/told"

# Criterion
{
    noise
    echo "../tests/b_test.c:3: y > 0: y is -1"
    printf '%s\n' "[----] ../tests/b_test.c:3: Assertion Failed" "[----]   " \
        "[----]   The conditions for this assertion were not met." "[----]   " "[FAIL] b::fails: (0.00s)"
    echo "[----] ../tests/b_test.c:5: Unexpected signal caught below this line!"
    echo "[FAIL] b::dies: CRASH!"
    echo "[FAIL] b::hangs: Timed out. (300.06s)"
    echo "[====] Synthesis: Tested: 6 | Passing: 3 | Failing: 3 | Crashing: 1 "
} >"$TMP/log"
told --lines 1 "$TMP/log"
check "Criterion" is <<'END'
b::fails: (0.00s)
    ../tests/b_test.c:3: y > 0: y is -1
b::dies: CRASH!
    ../tests/b_test.c:5: Unexpected signal caught below this line!
b::hangs: Timed out. (300.06s)
END

# scripts
printf '%s\n' "ok 1 - one" "not ok 2 - two: says yes" "#   line 1" "#   no" "ok 3 - three" "not ok 4 - four" >"$TMP/log"
told "$TMP/log"
check "scripts" is <<'END'
not ok 2 - two: says yes
    #   line 1
    #   no
not ok 4 - four
END
printf 'ok 1 - one\n1 passed, 0 failed, 0 skipped\n' >"$TMP/log"
told "$TMP/log"
check "nothing failed: nothing told" test ! -s "$TMP/told"
finish
