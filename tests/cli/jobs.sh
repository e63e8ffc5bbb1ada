#!/usr/bin/env bash
# tests/cli/jobs.sh: the queue of scripts/test (scripts/jobs.sh): builds come before the programs that they make, and
# nothing that fails, dies or can't be built passes.
. "$(dirname "$0")/lib.sh"
cd "$TMP" || exit 1

says_all() { for line in "$@"; do says "$line" || return 1; done; }

mkdir build-asan build-tsan
mkdir -p build-test/tests
printf '#!/bin/sh\nfor a in "$@"; do [ "${a#--tap=}" = "$a" ] || echo "ok 1 - a" >"${a#--tap=}"; done\n' >build-test/tests/test_nn
chmod +x build-test/tests/test_nn
for program in good bad short; do
    {
        echo "#!/bin/sh"
        echo "echo args: \$*"
        [ $program = short ] || echo "echo '2 passed, 0 failed, 0 skipped'"
        [ $program = good ] || echo "exit 3"
    } >$program
    chmod +x $program
done
cat >queue <<'E2'
say() { printf '%s\n' "$*"; }
suites=(cli asan tsan) tested=build-test logs=$PWD/logs cli_seconds=60
mkdir logs
. "$ROOT/scripts/jobs.sh"
settle() { [ "$1" != asan ] || options+=(--settled); }
build_asan() { sleep 0.2; mv good bad short build-asan; }
build_tsan() { kill -KILL $BASHPID; }
add asan build-asan "build-asan/good#2/3,one two" build-asan/bad build-asan/short
add tsan build-tsan build-tsan/good
printf 'echo "ok 1 - a"\necho "not ok 2 - b"\nexit 1\n' >some.sh
add cli some.sh none.sh build-test/tests/test_nn
run_jobs 2
say "$table" "$passed, $failed, $skipped" "${failures[@]}"
E2
ROOT=$ROOT run bash queue
check "suites in turn, each whole" test "$(grep "^====" output | tr -d "\n")" = "==== cli==== asan==== tsan"
check "a script's cases" says "-- some.sh: 1 passed, 1 failed"
check "a program on Criterion, by its report" says "build-test/tests/test_nn: 1 passed, 0 failed"
check "a script that isn't there" says "none.sh: ended with status 127"
check "a part of the cases, in its suite's surroundings, once it is built" \
    grep -qx "args: --times --part 2/3 --settled one two" logs/job1.log
check "a program that ends with an error" says "build-asan/bad: ended with status 3"
check "a program that breaks off" says "build-asan/short: ended with status 3 before its last line"
check "a build that is killed" says "build-tsan does not build"
check "its programs don't run" test ! -e logs/job5.log
check "all in all" says_all "6, 5, 0"
finish
