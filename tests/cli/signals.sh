#!/usr/bin/env bash
# tests/cli/signals.sh: SIGUSR1 saves and the run goes on, SIGUSR2 saves and stops it: on 1 and 2 ranks, sent to the
# program that was started or to one rank of it, before the training and in it. Every other signal ends the run or does
# nothing, and loses no checkpoint.
. "$(dirname "$0")/lib.sh"
gpt=$BUILD/models/train_gpt
faults=$BUILD/tests/libfile_faults.so
[ -x "$gpt" ] || skip "build/models/train_gpt is not built"
ulimit -c 0

for _ in $(seq 60); do echo "the quick brown fox jumps over the lazy dog"; done >"$TMP/text"
endless=("$gpt" --data "$TMP/text" --layers 1 --heads 2 --embd 16 --ctx 8 --batch 2 --threads 1 --steps 1000000
    --eval-every 0 --log "$TMP/log")

lines() { wc -l 2>/dev/null <"$TMP/log"; }
trained() { [ "$(lines)" -ge "$1" ]; }
begin() { # begin RANKS ARGUMENTS...
    local ranks=$1
    shift
    rm -rf "$TMP/run" "$TMP/log"
    # a shell's background jobs ignore SIGQUIT
    env --default-signal=QUIT "${endless[@]}" --ranks "$ranks" "$@" >"$TMP/output" 2>&1 </dev/null &
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
saves_and_stops() { # saves_and_stops PID [SIGNAL]
    kill -"${2:-USR2}" "$1"
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

# what else asks for a stop: a power failure; the kernel, of a run that used its time, once a second
for ranks in 1 2; do
    begin $ranks --out "$TMP/run"
    kill -PWR $program
    ended $program
    check "SIGPWR, $ranks ranks" succeeds
    check "it saved" test "$(step_of "$TMP/run")" = "$(lines)"
    rm -rf "$TMP/run" "$TMP/log"
    run timeout 300 bash -c 'ulimit -St 1; exec "$@"' bash "${endless[@]}" --ranks $ranks --out "$TMP/run"
    check "SIGXCPU, $ranks ranks" succeeds
    check "it saved" test "$(step_of "$TMP/run")" = "$(lines)"
done
if [ -f "$faults" ]; then
    FAULT_PATH=model/shard FAULT_OP=sync FAULT_AT=1 FAULT_DO=2500 LD_PRELOAD=$faults begin 1 --out "$TMP/run"
    for _ in 1 2; do kill -XCPU $program && sleep 1.2; done
    ended $program
    check "SIGXCPU again, while it saves" succeeds
fi

# every other signal ends a run or does nothing; what was saved stays, and the folder is free
others="QUIT ABRT SEGV ALRM PIPE XFSZ IO RTMIN+3"
for ranks in 1 2; do
    for sig in $others; do
        begin $ranks --out "$TMP/run" --save-every 2
        wait_for saved
        kill -$sig "$(one_rank $ranks)"
        case $sig in
        PIPE | XFSZ)
            before=$(lines)
            check "SIG$sig, $ranks ranks: it goes on" wait_for trained $((before + 2))
            kill -TERM $program
            ended $program
            check "SIG$sig, $ranks ranks: and ends well" succeeds
            ;;
        *)
            ended $program 2>/dev/null
            check "SIG$sig, $ranks ranks: it ends" test "$status" -gt 128 -a $late = no
            [ $ranks = 1 ] || check "SIG$sig, $ranks ranks: it says so" says "killed by signal $(kill -l $sig)"
            ;;
        esac
        rm -f "$TMP/log"
        run timeout 300 "$gpt" --ranks $ranks --resume "$TMP/run" --stop-after $(($(step_of "$TMP/run") + 1))
        check "SIG$sig, $ranks ranks: and goes on from what it saved" succeeds
    done
done

# a launcher that blocks signals
blocked="import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
os.execv(sys.argv[1], sys.argv[1:])"
for ranks in 1 2; do
    rm -rf "$TMP/run" "$TMP/log"
    python3 -c "$blocked" "${endless[@]}" --ranks $ranks --out "$TMP/run" >"$TMP/output" 2>&1 </dev/null &
    program=$!
    wait_for trained 3
    check "SIGUSR1 that was blocked at the start, $ranks ranks" saves_and_goes_on $program
    check "and SIGTERM" saves_and_stops $program TERM
done

# before the training
rm -rf "$TMP/run"
"${endless[@]:0:15}" --steps 5 --out "$TMP/run" >"$TMP/output" 2>&1 </dev/null &
program=$!
sleep 0.1
kill -USR1 $program
ended $program
check "SIGUSR1 before the training" succeeds
finish
