#!/usr/bin/env bash
# tests/cli/example_timeline.sh: examples/timeline writes the trace of a sharded step, and scripts/draw.py
# draws it, with each unit's gathers and reductions; also the curve of a log.
. "$(dirname "$0")/lib.sh"

timeline=$BUILD/examples/timeline draw=$ROOT/scripts/draw.py
[ -x "$timeline" ] || skip "$timeline is not built"
command -v python3 >/dev/null || skip "python3 is not installed"

# has N LABEL: the picture has N boxes with this label.
has() { [ "$(grep -c ">$2</text>" "$TMP/step.svg")" = "$1" ]; }

run timeout 600 "$timeline" --help
check "--help says what it writes" says "usage: timeline [FILE]"
run timeout 600 "$timeline" "$TMP/trace.json"
check "the trace is written" succeeds
python3 "$draw" step "$TMP/trace.json" >"$TMP/step.svg"
check "and drawn" test -s "$TMP/step.svg"
for unit in 0 1 2 3; do
    check "unit $unit is gathered twice" has 2 g$unit
    check "unit $unit runs forward and backward" eval "has 1 F$unit && has 1 B$unit"
    check "unit $unit is reduced once" has 1 s$unit
done

printf '{"step": %d, "loss": %g, "val_loss": %s}\n' 1 4 null 2 3 2.5 3 2 2.25 >"$TMP/log.jsonl"
python3 "$draw" loss "$TMP/log.jsonl" >"$TMP/loss.svg"
check "a log's curve is drawn, with its last validation loss" grep -q '>2.2500</text>' "$TMP/loss.svg"
run python3 "$draw" loss "$TMP/trace.json.none"
check "a file that is not there is an error" fails "trace.json.none"
finish
