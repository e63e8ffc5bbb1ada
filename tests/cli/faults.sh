#!/usr/bin/env bash
# tests/cli/faults.sh: a sample of tests/cli/faults.py: operations on files and allocations that fail under
# the programs, kills.
. "$(dirname "$0")/lib.sh"
command -v python3 >/dev/null || skip "no python3"
for file in models/train_gpt models/train_resnet models/generate models/predict models/knap-checkpoint tests/libfile_faults.so tests/liballoc_faults.so; do
    [ -f "$BUILD/$file" ] || skip "build/$file is not built"
done
LD_PRELOAD=$BUILD/tests/libfile_faults.so "$BUILD/models/generate" --help >/dev/null 2>&1 || skip "this build takes no preloaded library"
every=${KNAP_FAULTS_EVERY:-41} # KNAP_FAULTS_EVERY=1: each operation
{
    python3 "$ROOT/tests/cli/faults.py" --build "$BUILD" --every "$every" files
    python3 "$ROOT/tests/cli/faults.py" --build "$BUILD" --every $((3 * every)) reading
    python3 "$ROOT/tests/cli/faults.py" --build "$BUILD" --every $((17 * every)) memory
    python3 "$ROOT/tests/cli/faults.py" --build "$BUILD" --count 12 kills
} >"$TMP/output"
cat "$TMP/output"
grep -q '^ok' "$TMP/output" && ! grep -q '^not ok' "$TMP/output"
