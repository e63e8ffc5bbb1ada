#!/usr/bin/env bash
# tests/cli/signals.sh: SIGUSR1 saves and the run goes on, SIGUSR2 saves and stops it: on 1 and 2 ranks, sent to the
# program that was started or to one rank of it, before the training and in it.
. "$(dirname "$0")/lib.sh"
gpt=$BUILD/models/train_gpt
[ -x "$gpt" ] || skip "build/models/train_gpt is not built"

for _ in $(seq 60); do echo "the quick brown fox jumps over the lazy dog"; done >"$TMP/text"
endless=("$gpt" --data "$TMP/text" --layers 1 --heads 2 --embd 16 --ctx 8 --batch 2 --threads 1 --steps 1000000
    --eval-every 0 --log "$TMP/log")

lines() { wc -l 2>/dev/null <"$TMP/log"; }
trained() { [ "$(lines)" -ge "$1" ]; }
begin() { # begin RANKS ARGUMENTS...
    local ranks=$1
    shift
    rm -rf "$TMP/run" "$TMP/log"
    "${endless[@]}" --ranks "$ranks" "$@" >"$TMP/output" 2>&1 </dev/null &
    program=$!
    wait_for trained 3
}
# whom RANKS: of whom the signal is; of several ranks one.
one_rank() { if [ "$1" = 1 ]; then echo "$program"; else children "$program" | tail -n 1; fi; }
saves_and_goes_on() { # saves_and_goes_on PID
    local before
    kill -USR1 "$1" && wait_for test -e "$TMP/run/.lock" && wait_for saved || return 1
    before=$(lines)
    wait_for trained $((before + 3)) || { echo "it doesn't go on"; cat "$TMP/output"; return 1; }
}
saved() { [ -n "$(ls -d "$TMP"/run/step-*[0-9]/state.json 2>/dev/null)" ]; }
saves_and_stops() {
    kill -USR2 "$1"
    ended $program
    succeeds && says "To go on:" && [ "$(step_of "$TMP/run")" = "$(lines)" ]
}

for ranks in 1 2; do
    for whom in program rank; do
        begin $ranks --out "$TMP/run"
        pid=$program
        [ $whom = program ] || pid=$(one_rank $ranks)
        check "SIGUSR1 to a $whom of $ranks" saves_and_goes_on "$pid"
        rm -rf "$TMP"/run/step-*
        check "SIGUSR1 once more" saves_and_goes_on "$pid"
        check "it says so" says "as SIGUSR1 asked; the run goes on"
        check "SIGUSR2 to a $whom of $ranks" saves_and_stops "$pid"
    done
done
begin 2 --out "$TMP/run" --async-save --save-every 2
check "SIGUSR1 among saves beside the training" saves_and_goes_on $program
check "and SIGUSR2" saves_and_stops $program
begin 1
kill -USR1 $program
check "without a folder it is said" wait_for says "no --out DIR was given"
kill -TERM $program
ended $program
check "and the run goes on, until it is stopped" succeeds

# before the training
"${endless[@]:0:15}" --steps 5 --out "$TMP/run" >"$TMP/output" 2>&1 </dev/null &
program=$!
sleep 0.1
kill -USR1 $program
ended $program
check "SIGUSR1 before the training" succeeds
finish
