# tests/cli/lib.sh: for the scripts beside it, which test programs and scripts from outside. Sourced.
#
# Each script runs on its own (bash tests/cli/train.sh) or from scripts/test, which sets KNAP_BUILD. It
# prints a TAP line a case through check and ends with finish, or calls skip when it cannot run.

set -u
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
BUILD=${KNAP_BUILD:-$ROOT/build}
TMP=$(mktemp -d "${TMPDIR:-/tmp}/knap-cli.XXXXXX")
trap 'rm -rf "$TMP"' EXIT
cases=0 bad=0

skip() {
    echo "$*"
    exit 77
}

# check NAME COMMAND...: a case; it passes if the command succeeds. If it fails, its output is shown.
check() {
    local name=$1
    shift
    cases=$((cases + 1))
    if "$@" >"$TMP/check" 2>&1; then
        echo "ok $cases - $name"
    else
        bad=$((bad + 1))
        echo "not ok $cases - $name: $*"
        sed 's/^/#   /' "$TMP/check"
    fi
}

# run COMMAND...: keeps its output in $TMP/output and its status in $status.
run() {
    "$@" >"$TMP/output" 2>&1 </dev/null
    status=$?
}

# says TEXT: the last run printed it. fails TEXT: and it ended with a status other than 0.
says() { grep -qF -- "$1" "$TMP/output" || { cat "$TMP/output"; return 1; }; }
fails() { says "$1" && [ "$status" -ne 0 ]; }
succeeds() { [ "$status" -eq 0 ] || { cat "$TMP/output"; return 1; }; }

# wait_for COMMAND...: until it succeeds, 5 minutes at most.
wait_for() {
    for _ in $(seq 6000); do
        "$@" >/dev/null 2>&1 && return 0
        sleep 0.05
    done
    return 1
}

# gone PID: no such process runs; one that nobody has waited for yet is gone, too.
gone() { [[ $(sed 's/.*) //' "/proc/$1/stat" 2>/dev/null) != [!ZX]* ]]; }

# children PID: the processes that it has started and that still run.
children() {
    local stat state parent
    for stat in /proc/[0-9]*/stat; do
        { read -r state parent _ < <(sed 's/.*) //' "$stat"); } 2>/dev/null || continue
        [ "$parent" != "$1" ] || [ "$state" = Z ] || basename "${stat%/stat}"
    done
}

# ended PID: waits until that background job ends; its status. After 5 minutes it is killed, and late is yes: where a
# test asks for an end at once, nothing else would end the job sooner. Machines are too uneven for shorter limits.
ended() {
    late=no
    wait_for gone "$1" || { late=yes; kill -KILL "$1" -"$1" 2>/dev/null; }
    wait "$1"
    status=$?
}

# loss_falls LOW HIGH N: the last run's lines "step S  loss L" begin between LOW and HIGH, and the last loss is
# below an Nth of the first.
loss_falls() {
    awk -v low="$1" -v high="$2" -v n="$3" '/^step/ { if (!lines++) first = $4; last = $4 }
         END { exit !(lines > 1 && first > low && first < high && last < first / n) }' "$TMP/output" ||
        { cat "$TMP/output"; return 1; }
}

# same_save FILE FILE: files of two checkpoints agree except for the save's random name.
same_save() {
    cmp <(LC_ALL=C sed -E 's/"save": ?"[0-9a-f]*"//' "$1") <(LC_ALL=C sed -E 's/"save": ?"[0-9a-f]*"//' "$2")
}

finish() {
    [ $bad -eq 0 ]
    exit
}
