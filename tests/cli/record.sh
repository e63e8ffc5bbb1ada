#!/usr/bin/env bash
# tests/cli/record.sh: --record and --explain of the trainers from outside.
. "$(dirname "$0")/lib.sh"
train=$BUILD/models/train_gpt
images=$BUILD/models/train_resnet
[ -x "$train" ] && [ -x "$images" ] || skip "build/models/train_gpt or train_resnet is not built"

for _ in $(seq 60); do echo "the quick brown fox jumps over the lazy dog"; done >"$TMP/text"
text=("$train" --data "$TMP/text" --layers 3 --heads 2 --embd 16 --ctx 8 --batch 2 --warmup 1 --eval-every 0
    --sample-every 0 --steps 5)
shapes=("$images" --data shapes --model resnet20 --batch 4 --epochs 0.005 --eval-every 0 --threads 1)

# facts FILE: ranks, steps and their losses, kinds of events of a recording.
facts() {
    python3 - "$1" <<'PYTHON'
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
head, events = lines[0], lines[1:]
print("ranks", head["ranks"], *sorted({e["r"] for e in events}))
print("steps", *sorted({e["n"] for e in events if e["k"] == "step"}))
print("losses", *(f'{e["c"]}:{e["n"]:.4f}' for e in events if e["k"] == "number" and e["w"] == "loss" and e["r"] == 0))
print("kinds", *sorted({e["k"] for e in events}))
print("units", *(u["path"] or "root" for u in head["units"]))
for unit in head["units"]:
    for bucket in unit["buckets"]:
        for p in bucket["params"]:
            assert sum(b - a for a, b in p["parts"]) == p["numel"], p
PYTHON
}
facts_of() { facts "$TMP/$1.rec" >"$TMP/output" 2>&1; }

run "${text[@]}" --ranks 2 --record "$TMP/a.rec" --log "$TMP/log.csv"
check "two ranks are recorded" succeeds
check "the end says so" says "recorded steps 2 to 3 of 2 ranks: $TMP/a.rec"
check "shards of its parameters are whole" facts_of a
for fact in "ranks 2 0 1" "steps 2 3" "kinds call give number run step take verb" \
    "units root transformer.h.0 transformer.h.1 transformer.h.2"; do
    check "the recording has $fact" says "$fact"
done
same_losses() { grep -oE 'losses.*' "$TMP/output" | grep -q "2:$(printf %.4f "$(sed -n 3p "$TMP/log.csv" | cut -d, -f3)")" ||
    { cat "$TMP/output" "$TMP/log.csv"; return 1; }; }
check "its losses are those of the log" same_losses

run "${text[@]}" --record "$TMP/b.rec" --record-steps 4 --record-values
facts_of b
check "one step, with values" says "kinds call give number run step take value"
check "the step that was asked for" says "steps 4"

run "${text[@]}" --ranks 2 --record "$TMP/d.rec" --record-steps 4-9
check "a recording ends with the run" says "recorded steps 4 to 5 of 2 ranks"
facts "$TMP/d.rec" >"$TMP/output" 2>&1
check "and is written" says "steps 4 5"
run "${text[@]}" --record "$TMP/d.rec" --record-steps 3-5 --stop-after 4
check "also where the run is stopped" says "recorded steps 3 to 4 of 1 ranks"

run "${text[@]}" --ranks 2 --explain all
check "a step is explained" succeeds
check "its line is the schedule" says \
    "step 2 on rank 0: groot Froot g0 F0 g1 F1 g2 F2 g2 Broot g1 B2 s2 g0 B1 s1 B0 s0 sroot"
check "a sentence names cause and line" says ".backward_prefetch PRE of transformer.h.2 (fsdp/prefetch.c:"
run "${text[@]}" --ranks 2 --explain transformer.h.1 --prefetch none
check "without prefetch" says "g2 F2 Broot g2 B2 s2 g1 B1 s1 g0 B0 s0"
check "of one unit" says "transformer.h.1: backward begins"
of_no_other() { ! says "transformer.h.0: forward"; }
check "of no other" of_no_other

run "${shapes[@]}" --ranks 2 --record "$TMP/c.rec" --record-steps 2
facts_of c
check "images are recorded, too" says "steps 2"

# Ranks whose clocks are 5,000 s apart, as on two machines: what one gathers is on the way for the other, too.
rank() { # rank R COMMAND...
    env RANK="$1" WORLD_SIZE=2 KNAP_JOB="record $$" KNAP_RENDEZVOUS="file:$TMP/meet" timeout 120 "${@:2}"
}
apart() {
    rank 0 "${text[@]}" --record "$TMP/apart.rec" &
    rank 1 unshare --time --monotonic 5000 --fork "${text[@]}" --record "$TMP/apart.rec" && wait $!
}
if unshare --time --monotonic 5000 --fork true 2>/dev/null; then
    check "ranks with clocks of their own" apart
    check "their gathers are side by side" python3 - "$TMP/apart.rec" <<'PYTHON'
import json, sys
events = [json.loads(line) for line in open(sys.argv[1])][1:]
spans = [[(e["t"], e["t"] + e.get("d", 0)) for e in events if e["r"] == r and e.get("w", "").startswith("all_gather")]
         for r in (0, 1)]
assert len(spans[0]) == len(spans[1]) > 5
assert all(max(a[0], b[0]) < min(a[1], b[1]) + 1e5 for a, b in zip(*spans)), spans  # microseconds
PYTHON
else
    echo "# no clocks of one's own here (unshare --time): they weren't tried"
fi

bad() { # bad TEXT OPTION...
    local text=$1
    shift
    run "${text_run[@]}" "$@"
    check "$* is refused" fails "$text"
}
text_run=("${text[@]}")
bad "give --record-steps" --record "$TMP/x" --record-steps 9
bad "give a step, or the first and the last" --record "$TMP/x" --record-steps 2-
bad "the last comes after the first" --record "$TMP/x" --record-steps 3-2
bad "No such file or directory" --record "$TMP/nowhere/x"
bad "No space left on device" --record /dev/full
bad "has no module of that path; give all, gpt (the root), or a path such as transformer.h.0" --explain h.1
bad "record" --record "$TMP/x" --explain all
bad "--record-steps is for --record or --explain" --record-steps 2
bad "--record-values is for --record" --record-values
bad "--record-values is for --record" --explain all --record-values
bad "--explain and --cuda-graph contradict each other" --explain all --cuda-graph
bad "has no module of that path" --explain transformer.h.9
finish
