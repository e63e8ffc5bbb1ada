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

# state_of NAME STATE.JSON...: that whole number of each, with its path behind it.
state_of() { grep -m 1 -HoE "^ \"$1\": [0-9]+" "${@:2}" | sed -E 's/(.*):[^:]*: ([0-9]+)$/\2 \1/'; }

# newest RUN: the folder of its newest checkpoint; of a checkpoint: itself.
newest() {
    [ ! -s "$1/state.json" ] || { echo "$1" && return; }
    state_of number "$1"/step-*/state.json | sort -n | tail -n 1 | sed 's/^[0-9]* //; s/.state\.json$//'
}

# step_of RUN: the step of its newest checkpoint, or of a checkpoint.
step_of() { state_of step "$(newest "$1")/state.json" | cut -d' ' -f1; }

# edit_state CHECKPOINT PYTHON: changes its state.json, s, by that Python, and gives it a checksum that fits; sum(bytes) is
# the checksum of bytes.
edit_state() {
    python3 -c "
import json, struct, subprocess
def sum(data): return subprocess.run(['$BUILD/tests/xxh3'], input=data, stdout=subprocess.PIPE, check=True).stdout.decode().strip()
path = '$1/state.json'
s = json.load(open(path))
del s['checksum']
$2
text = json.dumps(s, indent=1)[:-2] + ',\n \"checksum\": \"'
open(path, 'w').write(text + sum(text.encode()) + '\"\n}\n')"
}

# same_part RUN RUN PART: the newest checkpoints agree in that part: the bytes of whole tensors, whichever rank wrote
# them.
same_part() {
    local run n=0
    for run in "$1" "$2"; do
        n=$((n + 1))
        rm -rf "$TMP/merged$n"
        "$BUILD/models/knap-checkpoint" merge "$(newest "$run")" --part "$3" --out "$TMP/merged$n" >/dev/null || return 1
    done
    python3 -c "
import json, sys
def tensors(path):
    with open(path, 'rb') as f:
        size = int.from_bytes(f.read(8), 'little')
        header, data = json.loads(f.read(size)), f.read()
    header.pop('__metadata__', None)
    return {name: (t['dtype'], t['shape'], data[slice(*t['data_offsets'])]) for name, t in header.items()}
a, b = tensors(sys.argv[1]), tensors(sys.argv[2])
differ = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
sys.exit(f'these differ: {differ}' if differ or not a else 0)" "$TMP/merged1/model.safetensors" "$TMP/merged2/model.safetensors"
}
same_model() { same_part "$1" "$2" model; }
same_training() { same_model "$1" "$2" && same_part "$1" "$2" optimizer; }

# need_pcre2: skips the script where the build lacks what cuts texts into words.
need_pcre2() {
    run "$BUILD/models/knap-tokenize" info --tokenizer "$ROOT/tests/models/tokenizers/gpt2"
    ! says "without PCRE2" >/dev/null || skip "this build has no PCRE2"
}
# small_set FOLDER: 60 images of 10 classes in CIFAR-10's form; their brightness tells the class.
small_set() {
    mkdir "$1"
    python3 - "$1" <<'END'
import random, sys
random.seed(3)
for name in [f'data_batch_{i}' for i in range(1, 6)] + ['test_batch']:
    with open(f'{sys.argv[1]}/{name}.bin', 'wb') as f:
        for i in range(10):
            f.write(bytes([i]) + bytes(random.randrange(20 * i, 20 * i + 60) for _ in range(3072)))
END
}

finish() {
    [ $bad -eq 0 ]
    exit
}
