#!/usr/bin/env bash
# tests/cli/durable.sh: checkpoints survive: disks that are slow, full or fail, runs that diverge
# or are stopped, output that can't be written, two runs on one folder, readers beside a run,
# forged checkpoints.
. "$(dirname "$0")/lib.sh"
train=$BUILD/models/train_gpt
generate=$BUILD/models/generate
faults=$BUILD/tests/libfile_faults.so
[ -x "$train" ] && [ -x "$generate" ] || skip "build/models/train_gpt or generate is not built"
[ -f "$faults" ] || skip "build/tests/libfile_faults.so is not built"
LD_PRELOAD=$faults "$generate" --help >/dev/null 2>&1 || skip "this build takes no preloaded library"

for _ in $(seq 200); do echo "the quick brown fox jumps over the lazy dog"; done >"$TMP/text"
tiny=("$train" --data "$TMP/text" --layers 1 --heads 2 --embd 16 --ctx 8 --batch 2 --threads 1)
endless=("${tiny[@]}" --steps 1000000)
lines_are_json() { python3 -c 'import json, sys; [json.loads(l, parse_constant=int) for l in open(sys.argv[1])]' "$1"; }
clean() { [ -z "$(find "$1" -name '*.saving' -o -name '*.tmp*' -o -name '*.old' -o -name '*.removing' -o -name '*.new')" ] || { ls -la "$1"; return 1; }; }
has_saved() { test -s "$(newest "$1")/state.json"; }
# faulty PATH OP AT DO COMMAND...: run it with that fault.
faulty() {
    local path=$1 op=$2 at=$3 what=$4
    shift 4
    { run env LD_PRELOAD="$faults" FAULT_PATH="$path" FAULT_OP="$op" FAULT_AT="$at" FAULT_DO="$what" \
        timeout 600 "$@"; } 2>/dev/null # the shell would speak of those that were killed
}

# ---- a slow disk ----------------------------------------------------------------------------------

# in_time COMMAND...: run it with --timeout 3 and a disk that needs 4 s. On a machine so busy that a rank needs more
# than 3 s elsewhere that says nothing: again with more of both.
in_time() {
    for seconds in 3 9 27; do
        "$@"
        [ "$status" -ne 0 ] && grep -q "waited $seconds s" "$TMP/output" || break
    done
}
slow_save() {
    faulty optimizer/shard-00001-model-00001 sync 0 $((seconds * 1000 + 1000)) "${tiny[@]}" --ranks $ranks --timeout $seconds --steps 2 \
        --eval-every 0 --overwrite --out "$TMP/slow$ranks"
}
slow_load() {
    faulty .safetensors read 3 $((seconds * 1000 + 1000)) "$train" --resume "$TMP/slow2" --ranks 2 --threads 1 \
        --timeout $seconds --steps 3
}
for ranks in 1 2; do
    in_time slow_save
    check "a save slower than the timeout is no late rank, $ranks ranks" succeeds
    check "and it counts" test "$(step_of "$TMP/slow$ranks")" -eq 2
done
in_time slow_load
check "nor is a slow load" succeeds

# ---- disks that fail (at any operation: faults.sh) ----------------------------------------------------------

check "a checkpoint" "${tiny[@]}" --steps 9 --stop-after 2 --eval-every 0 --out "$TMP/good"
again() {
    rm -rf "$TMP/w"
    cp -r "$TMP/good" "$TMP/w"
}
again
mkdir "$TMP/store"
faulty "$TMP/store" grow 2 EINTR "${tiny[@]}" --steps 2 --eval-every 0 --offload "$TMP/store"
check "a signal while a store grows does no harm" succeeds
for type in 0x6969 0x9123683e; do # NFS; btrfs that doesn't take the flag for writing in place
    run env LD_PRELOAD="$faults" FAULT_FS=$type timeout 600 "${tiny[@]}" --steps 2 --eval-every 0 \
        --offload "$TMP/store" --ranks 2
    check "a store where a mapped file is promised no space is refused ($type)" fails "can't promise"
done
again
faulty optimizer/shard write 1 ENOSPC "$train" --resume "$TMP/w" --stop-after 3 --threads 1 --ranks 2
check "a full disk is said, on two ranks" fails "No space left on device"
check "and harms nothing" test "$(step_of "$TMP/w")" -eq 2

# ---- the best checkpoint, beside the latest one ------------------------------------------------------------

run "${tiny[@]}" --steps 9 --lr 0.01 --warmup 0 --eval-every 1 --eval-steps 20 --stop-after 2 --keep-best --out "$TMP/best"
check "the best checkpoint is named" says "best: step 2 with a validation loss of"
kept() { local step; step=$(step_of "$TMP/w/best") && [ "$step" -ge 2 ] && "$generate" --from "$TMP/w/best" --tokens 1 --threads 1; }
go_on=("$train" --resume "$TMP/w" --stop-after 3 --threads 1)
rm -rf "$TMP/w" && cp -r "$TMP/best" "$TMP/w"
run env LD_PRELOAD="$faults" FAULT_PATH="$TMP/w" FAULT_COUNT="$TMP/count" "${go_on[@]}"
check "a better one replaces it" [ "$(step_of "$TMP/w/best")" = 3 ]
at=$(cat "$TMP/count")
for what in kill ENOSPC; do
    for part in 3 6 9; do
        rm -rf "$TMP/w" && cp -r "$TMP/best" "$TMP/w"
        faulty "$TMP/w" any $((at * part / 10)) $what "${go_on[@]}"
        check "$what at operation $((at * part / 10)) leaves a best checkpoint" kept
        run "$train" --resume "$TMP/w" --stop-after 4 --threads 1
        check "and the run goes on to the same one" [ "$(step_of "$TMP/w/best")" = 4 ]
        check "with nothing left behind" clean "$TMP/w"
    done
done

# ---- a run that diverges --------------------------------------------------------------------------------

again
run "$train" --resume "$TMP/w" --steps 3 --lr 1e30 --min-lr 1e30 --warmup 0 --clip 0 --eval-every 1 --log "$TMP/log" --threads 1
check "a loss that isn't finite is refused" fails "diverged"
check "and what was saved before stays" test "$(step_of "$TMP/w")" -eq 2
check "the log is JSON" lines_are_json "$TMP/log"
check "without NaN" test -z "$(grep -i 'nan\|inf' "$TMP/log")"
rm -rf "$TMP/old" && mkdir "$TMP/old" && cp -r "$TMP/good/step-00000002" "$TMP/old"
edit_state "$TMP/old/step-00000002" "
# a weight so large that decay makes it infinite, while the loss is fine
for listed in s['files']:
    shard = '$TMP/old/step-00000002/' + listed['name']
    raw = bytearray(open(shard, 'rb').read())
    n, = struct.unpack('<Q', raw[:8])
    weight = json.loads(raw[8:8 + n]).get('transformer.wpe.weight')
    if weight:
        begin, end = (8 + n + x for x in weight['data_offsets'])
        was = sum(raw[begin:end])
        raw[begin:begin + 4] = struct.pack('<f', 1e7)
        raw[:8 + n] = raw[:8 + n].replace(was.encode(), sum(raw[begin:end]).encode())
        listed['checksum'] = sum(raw[:8 + n])
        open(shard, 'wb').write(raw)"
run "$train" --resume "$TMP/old" --steps 2 --lr 1e30 --min-lr 1e30 --warmup 0 --clip 0 --weight-decay 1000 \
    --eval-every 0 --ranks 2 --threads 1
check "weights that aren't finite are never saved" fails "of transformer.wpe.weight is not finite"
check "what was saved before stays" test "$(cd "$TMP/old" && echo step-*)" = step-00000002

# ---- output that nobody takes ---------------------------------------------------------------------------

run timeout 300 "${endless[@]}" --eval-every 0 --log /dev/full --out "$TMP/full"
check "a full disk under the log is an error" fails "cannot write the log /dev/full"
check "and the run is saved" has_saved "$TMP/full"
"${tiny[@]}" --steps 2 >/dev/full 2>"$TMP/output" </dev/null
status=$?
check "a full disk under the table is an error" fails "standard output"
"$generate" --from "$TMP/good" --tokens 3 >/dev/full 2>"$TMP/output"
status=$?
check "as it is for a text" fails "standard output"
"$generate" --help >/dev/full 2>"$TMP/output"
status=$?
check "and for help" fails "standard output"
for ranks in 1 2; do
    { timeout 300 "${tiny[@]}" --ranks $ranks --steps 1000000 --eval-every 1 --eval-steps 1 --out "$TMP/pipe$ranks" 2>"$TMP/output"
        echo $? >"$TMP/status"; } | head -n 25 >/dev/null
    status=$(cat "$TMP/status")
    check "a reader that leaves is an error, $ranks ranks" fails "Broken pipe"
    check "and the run is saved" has_saved "$TMP/pipe$ranks"
done
again
(ulimit -f 1; run "$train" --resume "$TMP/w" --stop-after 3 --threads 1; [ "$status" -eq 1 ] && says "File too large")
check "a limit of the file size is a sentence" test $? -eq 0

# ---- stopping -------------------------------------------------------------------------------------------

set -m # background jobs have a group of their own, and don't ignore SIGINT
# begin NAME OPTIONS...: starts a run into $TMP/NAME and waits until it trains.
begin() {
    local name=$1
    shift
    rm -rf "${TMP:?}/$name" "$TMP/log"
    case "$*" in *--eval-every*) ;; *) set -- --eval-every 0 "$@" ;; esac
    "${endless[@]}" --log "$TMP/log" --out "$TMP/$name" "$@" >"$TMP/output" 2>&1 </dev/null &
    pid=$!
    wait_for test -s "$TMP/log"
}
# one_request COMMAND...: it makes signals that follow each other closely, and the run ends. On a busy machine they may
# come more than a second apart, which is a second request to end at once: again then.
one_request() {
    for _ in 1 2 3 4 5 6; do
        "$@"
        [ $status -ne 0 ] || break
    done
}
saved() { succeeds && has_saved "$TMP/$1" && clean "$TMP/$1" && says "--resume $TMP/$1"; }

for ranks in 1 4; do
    for sig in INT TERM HUP; do
        begin sig --ranks $ranks
        kill -$sig $pid
        ended $pid
        check "SIG$sig saves, $ranks ranks" saved sig
        begin sig --ranks $ranks
        kill -$sig -$pid
        ended $pid
        check "SIG$sig to the group saves, $ranks ranks" saved sig
    done
    process_and_group() {
        begin sig --ranks $ranks
        kill -TERM $pid
        kill -TERM -$pid 2>/dev/null
        ended $pid
    }
    one_request process_and_group
    check "a process and its group: one request, $ranks ranks" saved sig
    endless=(timeout 1000 "${endless[@]}") # which passes the signal on to all, as when time is over
    under_timeout() {
        begin sig --ranks $ranks
        kill -TERM $pid
        ended $pid
        ! has_saved "$TMP/sig" || status=0
    }
    one_request under_timeout
    endless=("${endless[@]:2}")
    check "timeout(1): one request, $ranks ranks" has_saved "$TMP/sig"

    # an evaluation that would take hours, and a sample
    begin sig --ranks $ranks --eval-every 2 --eval-steps 100000000
    sleep 0.5
    kill -INT -$pid
    ended $pid
    check "in an evaluation, $ranks ranks" saved sig
    begin sig --ranks $ranks --sample-every 2 --sample-tokens 1048576
    sleep 0.5
    kill -INT -$pid
    ended $pid
    check "in a sample, $ranks ranks" saved sig

    # a slow save, and a second signal
    export FAULT_PATH=model/shard-00001-model-00001 FAULT_OP=sync FAULT_DO=1500
    twice() {
        LD_PRELOAD=$faults begin sig --ranks $ranks
        kill -INT -$pid
        sleep 0.2
        kill -INT -$pid
        ended $pid
    }
    one_request twice
    check "in a slow save, and once more at once, $ranks ranks" saved sig
    FAULT_DO=600000 LD_PRELOAD=$faults begin sig --ranks $ranks
    kill -INT -$pid
    wait_for grep -q "once more" "$TMP/output"
    for _ in $(seq 100); do # the first may have been noticed late
        sleep 1.2
        kill -INT -$pid 2>/dev/null
        ! gone $pid || break
    done
    ended $pid
    check "a second Ctrl-C after the notice ends at once, $ranks ranks" test $status -eq 130
    check "one rank said so" test "$(grep -c 'once more' "$TMP/output")" -eq 1
    unset FAULT_PATH FAULT_OP FAULT_DO

    # a shell's background job ignores SIGINT, and nohup's SIGHUP
    begin_ignoring() (trap '' INT HUP; begin "$@"; echo $pid >"$TMP/pid")
    begin_ignoring sig --ranks $ranks
    pid=$(cat "$TMP/pid")
    for victim in "$pid" $(children "$pid"); do
        kill -INT "$victim"
        kill -HUP "$victim"
    done
    sleep 0.5
    check "signals that were ignored stay so, $ranks ranks" kill -0 "$pid"
    check "and nobody speaks of stopping" test -z "$(grep 'once more' "$TMP/output")"
    kill -TERM "$pid"
    wait_for has_saved "$TMP/sig"
    check "SIGTERM still stops" has_saved "$TMP/sig"
    wait_for gone "$pid"
done
again
export FAULT_PATH="$TMP/w/" FAULT_OP=read FAULT_DO=4000 # for each of the reads
LD_PRELOAD=$faults "$train" --resume "$TMP/w" --threads 1 --ranks 2 >"$TMP/output" 2>&1 &
pid=$!
sleep 1
kill -INT -$pid
ended $pid
unset FAULT_PATH FAULT_OP FAULT_DO
check "while it loads there is nothing to save: it ends at once" test $status -ne 0 -a $late = no
check "and what is there stays" test "$(step_of "$TMP/w")" -eq 2
set +m

# ---- two runs on one folder -------------------------------------------------------------------------------

again
"$train" --resume "$TMP/w" --steps 1000000 --log "$TMP/log2" --threads 1 >"$TMP/first" 2>&1 </dev/null &
pid=$!
wait_for test -s "$TMP/log2"
run timeout 300 "${tiny[@]}" --steps 3 --out "$TMP/w" --overwrite
check "a second run on a folder is refused, and the first is named" fails "process $pid on $(uname -n)"
run timeout 300 "$train" --resume "$TMP/w" --ranks 2 --threads 1
check "so is going on from it" fails "process $pid"
check "the first goes on" kill -0 $pid
kill -TERM $pid
wait $pid
check "a run's end frees the folder" "$train" --resume "$TMP/w" --steps 2000000 --stop-after "$(($(step_of "$TMP/w") + 1))" --threads 1

again
run "${tiny[@]}" --steps 3 --eval-every 0 --out "$TMP/w"
check "a checkpoint isn't replaced unasked" fails "--overwrite"
check "it is as it was" diff -r "$TMP/good" "$TMP/w"
check "asked it is" "${tiny[@]}" --steps 3 --eval-every 0 --out "$TMP/w" --overwrite
mkdir -p "$TMP/w/step-00000009.saving/model" "$TMP/w/step-00000001.removing" && touch "$TMP/w/step-00000009.saving/model/shard" "$TMP/w/mine.tmp"
check "what dead saves left" "$train" --resume "$TMP/w" --steps 4 --threads 1
check "is removed, and nothing else" test "$(cd "$TMP/w" && echo *)" = "config.toml log.jsonl mine.tmp step-00000003 step-00000004"

# files of two saves of the same step
check "another checkpoint of that step" "${tiny[@]}" --seed 5 --steps 9 --stop-after 2 --eval-every 0 --out "$TMP/other"
for file in model/shard-00001-model-00001-of-00001.safetensors optimizer/shard-00001-model-00001-of-00001.safetensors state.json; do
    again
    cp "$TMP/other/step-00000002/$file" "$TMP/w/step-00000002/$file"
    run "$train" --resume "$TMP/w" --threads 1 --ranks 2
    check "another save's $file is refused" fails "two checkpoints"
done

# another run's first checkpoint, after this one found none: the summary, which comes between looking and claiming, goes
# into a pipe that is full
mkfifo "$TMP/pipe"
exec 5<>"$TMP/pipe"
while timeout 1 head -c 4096 /dev/zero >&5; do :; done
"${tiny[@]}" --steps 3 --summary --out "$TMP/late" >"$TMP/pipe" 2>"$TMP/output" </dev/null &
pid=$!
# waits_in_vain: the process slept for a second.
waits_in_vain() {
    local before
    before=$(sed 's/.*) //' "/proc/$pid/stat")
    sleep 1
    [[ $before = S* && $before = "$(sed 's/.*) //' "/proc/$pid/stat")" ]]
}
wait_for waits_in_vain
cp -r "$TMP/good" "$TMP/late"
cat "$TMP/pipe" >/dev/null 5>&- &
exec 5>&-
ended $pid
check "a checkpoint that appeared meanwhile isn't replaced" fails "another run saved a checkpoint in $TMP/late meanwhile"
check "and stays" diff -r -x .lock "$TMP/good" "$TMP/late"

# a run whose folder has the name of a checkpoint
run "${tiny[@]}" --steps 9 --stop-after 2 --eval-every 0 --out "$TMP/step-00000123"
check "a run's folder called like a checkpoint" "${tiny[@]}" --steps 9 --stop-after 3 --eval-every 0 --out "$TMP/step-00000123" --resume auto
check "goes on there" "$train" --resume "$TMP/step-00000123" --stop-after 4 --threads 1
check "and saves there" test "$(step_of "$TMP/step-00000123")" -eq 4 -a ! -e "$TMP/step-00000004"

# ---- saves beside the training that fail ---------------------------------------------------------------------

# the save of step 3 fails in its thread, and Ctrl-C comes while the main thread is still at it
FAULT_PATH=step-00000003.saving/optimizer FAULT_OP=mkdir FAULT_AT=1 FAULT_DO=stop LD_PRELOAD=$faults \
    "${tiny[@]}" --steps 9 --eval-every 0 --save-every 3 --async-save --out "$TMP/i" >"$TMP/output" 2>&1 </dev/null &
pid=$!
wait_for grep -q "^State:.T" /proc/$pid/status
rmdir "$TMP/i/step-00000003.saving/model" && touch "$TMP/i/step-00000003.saving/model"
kill -TERM $pid
kill -CONT $pid
ended $pid
check "a save that fails where the run stops is told" says "the save of step 3 failed"
check "and made again" succeeds
check "before the run says so" test "$(step_of "$TMP/i")" -eq 3
# equal scores: the second is the best one, since the first has none on the disk
faulty step-00000001.saving/model/shard write 1 ENOSPC "${tiny[@]}" --steps 9 --stop-after 3 --lr 1e-30 --min-lr 1e-30 --weight-decay 0 \
    --eval-every 1 --save-every 9 --keep-best --async-save --out "$TMP/b"
check "a best one that wasn't saved is told" says "the save of step 1 failed"
check "and counts no more" test "$(readlink "$TMP/b/best")" = step-00000002

# ---- readers beside a run --------------------------------------------------------------------------------

rm -rf "$TMP/live"
export FAULT_PATH="$TMP/live/" FAULT_OP=rename FAULT_DO=30
LD_PRELOAD=$faults "${tiny[@]}" --steps 1000000 --eval-every 1 --eval-steps 1 --out "$TMP/live" >"$TMP/first" 2>&1 </dev/null &
pid=$!
unset FAULT_PATH FAULT_OP FAULT_DO
wait_for has_saved "$TMP/live"
reads() { for _ in $(seq 15); do "$generate" --from "$TMP/live" --tokens 1 --threads 1 --ranks $1 || return 1; done; }
check "generate reads while a run saves" reads 1
check "and on 2 ranks" reads 2
kill -KILL $pid
wait $pid 2>/dev/null
# a complete save before renaming: readers read it and leave its files
rm -rf "$TMP/live"
cp -r "$TMP/other" "$TMP/live"
cp -r "$TMP/good/step-00000002" "$TMP/live/step-00000002.saving"
edit_state "$TMP/live/step-00000002.saving" "s['number'] = 2"
files=$(ls "$TMP/live")
check "a save that waits to be renamed is read" cmp <("$generate" --from "$TMP/live" --tokens 40 --threads 1) \
    <("$generate" --from "$TMP/good" --tokens 40 --threads 1)
check "and left alone" test "$(ls "$TMP/live")" = "$files"

# ---- checkpoints from strangers ----------------------------------------------------------------------------

# forged TEXT: $TMP/w with state.json changed by that line of Python.
forged() {
    again
    edit_state "$TMP/w/step-00000002" "$1"
}
echo mine >"$TMP/mine"
for name in log out offload resume; do
    forged "s['record']['options']['$name'] = '$TMP/mine'"
    run "$train" --resume "$TMP/w" --threads 1
    check "--$name is never taken from a file" fails "--$name"
done
check "nothing was appended" test "$(cat "$TMP/mine")" = mine
forged "s['record']['options']['out'] = '$TMP/elsewhere/deep'"
run "$train" --resume "$TMP/w" --threads 1
check "and no folder made" test ! -e "$TMP/elsewhere"
for size in "'vocab'] = 1 << 29" "'ctx'] = 1 << 29" "'embd'] = 1 << 22" "'layers'] = 90000"; do
    forged "s['model'][$size"
    run timeout 300 bash -c "ulimit -v 4000000; exec '$generate' --from '$TMP/w' --threads 1"
    check "sizes that the files don't have are refused ($size)" fails "other sizes"
done
forged "s['record']['options']['a\\\\x1b[2J\\\\u009b\\\\nb'] = 'x'"
run "$train" --resume "$TMP/w" --threads 1
check "an option's name is refused" fails "the checkpoint records an option"
check "without its control characters" test -z "$(LC_ALL=C grep -P '\x1b|\xc2\x9b' "$TMP/output")"
for file in model/shard-00001-model-00001-of-00001.safetensors optimizer/shard-00001-model-00001-of-00001.safetensors \
    tokenizer.json state.json; do
    again
    rm "$TMP/w/step-00000002/$file"
    mkfifo "$TMP/w/step-00000002/$file"
    run timeout 300 "$train" --resume "$TMP/w" --threads 1
    check "a FIFO in place of $file is refused" fails "not a regular file"
done
mkfifo "$TMP/fifo"
run timeout 300 "$train" --data "$TMP/fifo" --threads 1
check "as in place of a text" fails "not a regular file"
finish
