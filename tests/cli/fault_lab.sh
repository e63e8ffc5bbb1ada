#!/usr/bin/env bash
# tests/cli/fault_lab.sh: --fault: every kind of fault on 2 and 3 ranks, and what a student sees of it: the page
# docs/failures.md, held to runs.
. "$(dirname "$0")/lib.sh"
train=$BUILD/models/train_gpt images=$BUILD/models/train_resnet tool=$BUILD/models/knap-checkpoint
ranks_of=$BUILD/tests/comm/rank_program
[ -x "$train" ] && [ -x "$images" ] && [ -x "$tool" ] || skip "build/models/train_gpt, train_resnet or knap-checkpoint is not built"

for _ in $(seq 60); do echo "the quick brown fox jumps over the lazy dog"; done >"$TMP/text"
small=("$train" --data "$TMP/text" --tokenizer byte --layers 2 --heads 2 --embd 16 --ctx 16 --batch 2 --threads 1 --steps 5
    --warmup 0 --eval-every 0 --layout per_param)

# lab N FAULT OPTION...: trains on N ranks, the last of which has the fault; $r is its number.
lab() {
    local n=$1 fault=$2
    shift 2
    r=$((n - 1))
    rm -f "$TMP/log"
    run timeout 300 "${small[@]}" --ranks "$n" --log "$TMP/log" --fault "rank $r: $fault" "$@"
    call=$(sed -n "s/^knap: fault: rank $r: $fault: //p" "$TMP/output")
}
# ends STATUS TEXT: so the run ended; beside the announcement of the fault one sentence says why.
ends() {
    [ "$status" = "$1" ] && [ "$(grep -c '^knap: fault: ' "$TMP/output")" = 1 ] &&
        [ "$(grep '^knap: ' "$TMP/output" | grep -vc '^knap: fault: ')" = 1 ] && says "knap: $2" || { echo "status $status"; cat "$TMP/output"; return 1; }
}
# alike FROM TO, other FROM: losses of these steps have the bits of the undisturbed run, or don't from that step on.
losses() { python3 -c 'import json, sys; [print(json.loads(line)["loss"]) for line in open(sys.argv[1])]' "$1"; }
alike() { diff <(losses "$TMP/whole" | sed -n "$1,$2p") <(losses "$TMP/log" | sed -n "$1,$2p"); }
other() { ! diff <(losses "$TMP/whole" | sed -n "$1p") <(losses "$TMP/log" | sed -n "$1p") >/dev/null; }
took_ms() { python3 -c 'import json, sys; ms = [json.loads(line)["step_ms"] for line in open(sys.argv[1])]; print(ms); sys.exit(ms[2] < 900 or len(ms) != 5)' "$TMP/log"; }

for n in 2 3; do
    r=$((n - 1)) at="at collective 7 of step 3"
    run timeout 300 "${small[@]}" --ranks $n --log "$TMP/whole"
    check "$n ranks: undisturbed" succeeds

    lab $n "kill $at"
    check "$n ranks, kill: the call" grep -q "^reduce_scatter of [0-9]* f32 and others, 2 buffers (transformer.h.1) in communicator reduce$" <<<"$call"
    check "$n ranks, kill: the rank, the signal, the call" ends 137 "rank $r was killed by signal 9 (Killed) in $call; the other ranks were ended"
    cp "$TMP/output" "$TMP/killed"
    lab $n "kill $at"
    check "$n ranks, kill: the same again" diff <(grep ^knap: "$TMP/killed") <(grep ^knap: "$TMP/output")
    lab $n "crash $at"
    check "$n ranks, crash" ends 139 "rank $r was killed by signal 11 (Segmentation fault) in $call; the other ranks were ended"
    lab $n "exit $at"
    check "$n ranks, exit" ends 7 "rank $r exited with status 7 in $call; the other ranks were ended"
    lab $n "error $at"
    check "$n ranks, error" ends 1 "rank $r: a failure asked for"
    for seconds in 2 8 32; do # on a busy machine another rank may be late
        lab $n "stop $at" --timeout $seconds
        grep -q "waited $seconds s for rank $r in $call" "$TMP/output" && break
    done
    check "$n ranks, stop: who waits, for whom, in which call" ends 1 "rank "
    check "$n ranks, stop: the last call" says " waited $seconds s for rank $r in $call; the last call of rank $r was $call, which it has not finished: it is stopped"
    lab $n "delay 900 ms $at"
    check "$n ranks, delay: the run goes on" succeeds
    check "$n ranks, delay: that step takes so long" took_ms
    check "$n ranks, delay: no bit changes" alike 1 5

    lab $n "other shape $at"
    count=$(cut -d' ' -f3 <<<"$call")
    check "$n ranks, other shape: both ranks, both calls" says "collectives don't match: rank 0 calls ${call/$count/$((count - 1))}, rank $r calls $call; counts or dtypes of their buffers differ: every rank must"
    check "$n ranks, other shape: once" ends 1 "rank "
    lab $n "skip $at"
    check "$n ranks, skip: the call, and the one that the rank makes in its place" says "collectives don't match: rank 0 calls $call, rank $r calls reduce_scatter of"
    check "$n ranks, skip: once" ends 1 "rank "

    lab $n "flip bit 6 of byte 3 $at"
    check "$n ranks, flipped bit: the run goes on" succeeds
    check "$n ranks, flipped bit: losses are alike until that step's gradient counts" alike 1 3
    check "$n ranks, flipped bit: and differ then" other 4
    lab $n "flip bit 6 of byte 900000000 $at"
    check "$n ranks, flipped bit: behind the end" ends 1 "rank $r: the fault \"rank $r: flip bit 6 of byte 900000000 $at\" flips nothing: the call's first buffer has"
    lab $n "flip bit 7 of byte 3 of transformer.ln_f.weight after step 2"
    check "$n ranks, a parameter's bit: the run goes on" succeeds
    check "$n ranks, a parameter's bit: losses are alike until the next forward" alike 1 2
    check "$n ranks, a parameter's bit: and differ then" other 3
    lab $n "flip bit 6 of byte 3 of transformer.ln_f.weight after step 2"
    check "$n ranks, an exponent's bit" fails "step 3: the loss is nan and the gradient's norm nan; the first tensor with a value that is not finite is "
    lab $n "flip bit 6 of byte 3 of transformer.ln_f.weight after step 2" --check
    check "$n ranks, an exponent's bit, --check: the module" fails "check: forward of 'layer_norm' made values that aren't finite"

    lab $n "no memory at allocation 40 of step 3"
    check "$n ranks, no memory" ends 1 "rank $r: out of memory: "
    cp "$TMP/output" "$TMP/killed"
    lab $n "no memory at allocation 40 of step 3"
    check "$n ranks, no memory: the same again" diff <(grep ^knap: "$TMP/killed") <(grep ^knap: "$TMP/output")

    rm -rf "$TMP/run"
    lab $n "disk full at save 2" --out "$TMP/run" --save-every 2
    check "$n ranks, full disk: the rank, its file, the reason" grep -q "^knap: rank $r: cannot write $TMP/run/step-00000004.saving/model/shard-0000$n-.*: No space left on device$" "$TMP/output"
    check "$n ranks, full disk: the save before stays" test "$(ls "$TMP/run" | grep step-)" = step-00000002
    check "$n ranks, full disk: whole" "$tool" verify "$TMP/run"
    run timeout 300 "$train" --resume "$TMP/run" --threads 1 --ranks "$n" --log "$TMP/log"
    check "$n ranks, full disk: and the run goes on from it" succeeds
    check "$n ranks, full disk: with the same bits" diff <(losses "$TMP/whole" | sed -n 3,5p) <(losses "$TMP/log" | tail -n 3)
    rm -rf "$TMP/run"
    lab $n "disk full at save 1" --out "$TMP/run" --save-every 2 --async-save
    check "$n ranks, full disk, beside the training: the next save succeeds" succeeds
    check "$n ranks, full disk, beside the training: who and why" grep -q "^knap: rank $r: the save of step 2 failed, and the training goes on: cannot write .*: No space left on device$" "$TMP/output"
    check "$n ranks, full disk, beside the training: only that save" test "$(ls "$TMP/run" | grep -c step-)" = 2

    lab $n "kill at step 2"
    check "$n ranks, at a step" ends 137 "rank $r was killed by signal 9 (Killed) after "
    lab $n "exit at allocation 9 of step 3"
    check "$n ranks, at an allocation" ends 7 "rank $r exited with status 7 after "
    rm -rf "$TMP/run"
    lab $n "error at save 1" --out "$TMP/run"
    check "$n ranks, at a save" ends 1 "rank $r: a failure asked for"
    lab $n "kill at collective 999 of step 3"
    check "$n ranks: a collective that isn't there" fails "knap: rank $r: the fault \"rank $r: kill at collective 999 of step 3\" never came: its step had 11 such places"
done

# a fault that never comes
never() { # never TEXT OPTION...
    local text=$1
    shift
    run timeout 300 "${small[@]}" "$@"
    check "never: $text" fails "never came: $text"
}
never "the program ended after 5 steps" --fault "rank 0: kill at step 9"
never "there were 0 such places" --fault "rank 0: kill at save 1"
never "no optimizer has that parameter" --fault "rank 0: flip bit 0 of byte 0 of x.weight after step 2"

# texts that are none
bad() { # bad SENTENCE FAULT
    run timeout 60 "${small[@]}" --ranks 2 --fault "$2"
    check "bad: $2" fails "$1"
    check "bad: $2: said once, before ranks are started" test "$(wc -l <"$TMP/output")" = 1
}
bad "doesn't begin with its rank: give one as in \"rank 1: kill at collective 17 of step 3\"" "kill at step 2"
bad "doesn't begin with its rank" "rank one: kill at step 2"
bad "there are ranks from 0 to 1; give one of them, or start more (--ranks)" "rank 2: kill at step 2"
bad "is of no kind: give \"kill\", \"stop\", \"crash\", \"exit\", \"error\", \"delay MS ms\", \"no memory\", \"other shape\", \"skip\", \"flip bit K of byte B of NAME\", \"flip bit K of byte B\", \"disk full\"" "rank 1: explode at step 2"
bad "is of no kind" "rank 1: kills at step 2"
bad "is of no kind" "rank 1: delay at step 2"
bad "a delay has 1 to 3600000 milliseconds" "rank 1: delay 99999999 ms at step 2"
bad "a delay has 1 to 3600000 milliseconds" "rank 1: delay 0 ms at step 2"
bad "a byte has bits 0 to 7" "rank 1: flip bit 8 of byte 0 at collective 1 of step 2"
bad "is at no place that it can be at: give \"at allocation K of step N\", \"at collective K of step N\", \"at step N\", \"at save N\", with numbers from 1" "rank 1: kill"
bad "is at no place that it can be at" "rank 1: kill at step 0"
bad "is at no place that it can be at" "rank 1: kill at collective 0 of step 2"
bad "is at no place that it can be at" "rank 1: kill at collective 2 of step 0"
bad "is at no place that it can be at" "rank 1: kill at collective 3"
bad "is at no place that it can be at" "rank 1: kill after step 3"
bad "is at no place that it can be at" "rank 1: kill at step 99999999999999999999999999"
bad "is at no place that it can be at: give \"at collective K of step N\", with" "rank 1: skip at step 3"
bad "is at no place that it can be at: give \"at allocation K of step N\", with" "rank 1: no memory at save 3"
bad "is at no place that it can be at: give \"at save N\", with" "rank 1: disk full at step 3"
bad "is at no place that it can be at: give \"after step N\", with" "rank 1: flip bit 0 of byte 0 of w at step 3"
bad "is at no place that it can be at: give \"at collective K of step N\", with" "rank 1: flip bit 0 of byte 0 of"
bad "goes on behind its place: take \"and 3\" away" "rank 1: kill at step 2 and 3"
bad "is of no kind" "rank 1: $(printf 'x%.0s' $(seq 400)) at step 2"
bad "--fault needs a text" ""
run timeout 60 "${small[@]}" --fault "rank 0: skip at collective 1 of step 2"
check "one rank has no collectives" fails "is at a collective, which one rank doesn't make: start several (--ranks 2)"
run timeout 60 env KNAP_FAULT="rank 0: kill at step 1" "${small[@]}" --fault "rank 0: kill at step 2"
check "two faults" fails "--fault \"rank 0: kill at step 2\" contradicts another one or KNAP_FAULT, \"rank 0: kill at step 1\": give one"
run timeout 60 "${small[@]}" --fit 1GiB --fault "rank 0: kill at step 1"
check "--fit" fails "--fault and --fit contradict each other"

# other ways to ask, other programs, other launchers
printf 'fault = "rank 1: exit at collective 2 of step 2"\nranks = 2\n' >"$TMP/config"
run timeout 300 "${small[@]}" --config "$TMP/config"
check "in a file of options" ends 7 "rank 1 exited with status 7 in "
run timeout 300 env KNAP_FAULT="rank 1: skip at collective 9 of step 1" "$images" --data shapes --batch 4 --threads 1 --epochs 0.002 --eval-every 0 --ranks 2
check "in the environment, images" ends 1 "rank "
check "in the environment, images: the call" says "collectives don't match: rank 0 calls "
run "$images" --help
check "--help" says "--fault TEXT"
if [ -x "$ranks_of" ]; then
    run timeout 300 "$ranks_of" step --ranks 2 --fault "rank 1: skip at collective 3 of step 1"
    check "any program with kn_init" says "collectives don't match: rank 0 calls comm_split (half) in communicator world, rank 1 calls "
    run timeout 300 "$ranks_of" step --ranks 2 --fault "rank 1: other shape at collective 3 of step 1"
    check "a call without a count" fails "knap: rank 1: the fault \"rank 1: other shape at collective 3 of step 1\" is at comm_split, which has no other shape: give another collective"
fi
over_tcp() { # over_tcp FAULT: two ranks that another launcher starts
    local rank
    for rank in 0 1; do
        env RANK=$rank WORLD_SIZE=2 KNAP_JOB=lab KNAP_RENDEZVOUS="file:$TMP/meet" timeout 300 "${small[@]}" --fault "$1" >"$TMP/rank$rank" 2>&1 &
    done
    wait 2>/dev/null
    cat "$TMP/rank0" "$TMP/rank1" >"$TMP/output"
}
over_tcp "rank 1: other shape at collective 7 of step 3"
check "over TCP: another shape" says "knap: rank 0: collectives don't match: rank 0 calls reduce_scatter of"
over_tcp "rank 1: kill at collective 7 of step 3"
check "over TCP: a dead rank, and its last call" says "knap: rank 1 died without an error message; its last call known to rank 0 was "
finish
