# scripts/jobs.sh: the jobs of scripts/test: one queue over all suites, and what each job passed. Sourced by scripts/test,
# which has the variables suites (their names in turn), tested (the build folder of what is neither for asan nor for
# tsan), fresh (yes where that folder was made now) and logs (a folder for files), and the function settle.

passed=0 failed=0 skipped=0
failures=() # each with its reason, for the end of the report

# ---- counting -----------------------------------------------------------------------------------

# count PASSED FAILED SKIPPED
count() { passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3)); }

fail_one() {
    say "FAIL $*"
    failures+=("$*")
    count 0 1 0
}
skip_one() {
    say "skipped: $*"
    count 0 0 1
}

# count_tap FILE STATUS NAME: adds up a TAP report; a program that ends with an error but no
# failed case counts as failed.
count_tap() {
    local skips oks fails
    skips=$(grep -cE '^ok\b.*# SKIP' "$1")
    oks=$(grep -cE '^ok\b' "$1")
    fails=$(grep -cE '^not ok\b' "$1")
    [ "$2" = 0 ] || [ "$fails" -gt 0 ] || fail_one "$3: ended with status $2"
    count $((oks - skips)) "$fails" "$skips"
}

# count_alone LOG STATUS NAME: adds up the last line of the shim's runner.
count_alone() {
    local line
    line=$(grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$1" | tail -n 1)
    if grep -q 'ThreadSanitizer: unexpected memory mapping' "$1"; then
        skip_one "$3: ThreadSanitizer does not start on this kernel"
        return
    elif [ -z "$line" ]; then
        fail_one "$3: ended with status $2 before its last line"
        return
    fi
    set -- $line "$2" "$3"
    [ "$7" = 0 ] || [ "$3" -gt 0 ] || fail_one "$8: ended with status $7"
    count "$1" "$3" "$5"
}

# count_build LOG STATUS FOLDER: a build counts only if it fails.
count_build() {
    [ "$2" = 0 ] && return
    cat "$1"
    fail_one "$3 does not build: see above"
}

# count_lint LOG STATUS TAP
count_lint() {
    cat "$1"
    count_tap "$3" "$2" scripts/lint
    [ "$2" = 0 ] || failures+=("scripts/lint:"$'\n'"$(grep -v ': skipped: ' "$1" | tail -n 15)")
}

# count_cli LOG STATUS SCRIPT: a test of programs from outside. It prints "ok" or "not ok" for
# each case, or only its status counts. Status 77: skipped, with the reason in its last line.
count_cli() {
    if [ "$2" = 77 ]; then
        skip_one "$3: $(tail -n 1 "$1")"
    elif grep -qE '^(not )?ok\b' "$1"; then
        count_tap "$1" "$2" "$3"
    elif [ "$2" = 0 ]; then
        count 1 0 0
    else
        fail_one "$3: ended with status $2"
    fi
}

# tell_failures NAME LOG: shows the last lines of the failed cases in the log, and keeps their reasons.
tell_failures() {
    local line
    python3 tests/failures.py --lines 15 "$2"
    while IFS= read -r line; do
        case $line in
        ' '*) [ ${#failures[@]} = 0 ] || failures[-1]+=$'\n'$line ;; # under the failure that ended the program
        ?*) failures+=("$1: $line") ;;
        esac
    done < <(python3 tests/failures.py "$2")
}

# counted NAME LOG TIME COMMAND...: counts by the command; tells what failed in the log.
counted() {
    local name=$1 log=$2 time=$3 before=($passed $failed $skipped)
    shift 3
    "$@"
    if [ $failed = "${before[1]}" ]; then
        grep '^skipped: ' "$log"
    else
        tell_failures "$name" "$log"
    fi
    say "-- $name: $((passed - before[0])) passed, $((failed - before[1])) failed," \
        "$((skipped - before[2])) skipped, $time"
}

# ---- the queue ----------------------------------------------------------------------------------
#
# A job is PROGRAM[@ISA][#K/N][,CASES], a test program under that instruction set, the K-th of N parts of its cases,
# or only the cases with one of these words in their name; or a script; or build-FOLDER, which calls build_FOLDER.

job=() suite_of=() begun=() # by number
order=()                    # the numbers: builds first, because other jobs wait for them

# add SUITE JOB...: at the end of the queue.
add() {
    local suite=$1 j
    shift
    for j in "$@"; do
        case $j in
        build-*/*) order+=(${#job[@]}) ;;
        build-*) order=(${#job[@]} "${order[@]}") ;;
        *) order+=(${#job[@]}) ;;
        esac
        job+=("$j") suite_of+=("$suite")
    done
}

# look N: whether that job may begin, waits for the job that builds its folder, lacks it because that failed, or has
# ended: then $state is may, waits, lacks or ended.
look() {
    local i
    state=may
    if [ -f "$logs/job$1.status" ]; then
        state=ended
    elif [[ ${job[$1]} == build-*/* ]]; then
        for i in "${!job[@]}"; do
            [ "${job[i]}" = "${job[$1]%%/*}" ] || continue
            state=waits
            [ ! -f "$logs/job$i.status" ] || { [ "$(<"$logs/job$i.status")" = 0 ] && state=may || state=lacks; }
        done
    fi
}

# run_jobs N: all of the queue, N at a time, always the first that may begin. Scripts wait more than programs do: they
# come one after a program each, so that the cores have work.
run_jobs() {
    local i state running=0 scripts=() others=()
    for i in "${order[@]}"; do
        if [[ ${job[i]} == *.sh ]]; then scripts+=("$i"); else others+=("$i"); fi
    done
    order=()
    for i in "${!job[@]}"; do
        order+=(${others[i]:-} ${scripts[i]:-})
    done
    while :; do
        for i in "${order[@]}"; do
            [ $running -lt "$1" ] && [ -z "${begun[i]:-}" ] && look "$i" && [ $state = may ] || continue
            begun[i]=yes running=$((running + 1))
            run_job "$i" "$logs/job$i" &
        done
        tell_suites
        [ $running -gt 0 ] || break
        wait -n
        running=$((running - 1))
    done
    for i in "${!begun[@]}"; do
        [ ! -f "$logs/job$i.status" ] || continue
        echo "killed" >>"$logs/job$i.log"
        echo "0 s, 0 s of processors" >"$logs/job$i.time"
        : >>"$logs/job$i.tap"
        echo 137 >"$logs/job$i.status"
    done
    tell_suites
}

# The tests of the other folders fork ranks, on the shim.
on_criterion() { [[ $1 == $tested/tests/test_* && $1 != *_comm && $1 != *_data && $1 != *_fsdp && $1 != *_state && $1 != *_fuzz ]]; }

# run_job N FILE: its output, TAP report, times and status go to FILE.log, FILE.tap, FILE.time and FILE.status.
run_job() {
    local j=${job[$1]} program=${job[$1]%%[@#,]*} options=() cases=() under=() began=$SECONDS
    [[ $j != *@* ]] || KNAP_ISA=$(sed 's/.*@\([a-z0-9]*\).*/\1/' <<<"$j")
    [[ $j != *"#"* ]] || options=(--part "$(sed 's/.*#\([0-9/]*\).*/\1/' <<<"$j")")
    [[ $j != *,* ]] || read -ra cases <<<"${j#*,}"
    export OMP_WAIT_POLICY=passive # threads that spin would take the others' cores
    : >"$2.tap"
    {
        settle "${suite_of[$1]}" "$program"
        [ -z "${KNAP_ISA:-}" ] || export KNAP_ISA
        case $program in
        # A background job and its children ignore Ctrl-C, but some tests send that signal.
        *.sh) env --default-signal timeout --kill-after=10 "$cli_seconds" bash "$program" ;;
        scripts/lint) "$program" --build "$tested" ${fresh:+--fresh} --tap "$2.tap" ;;
        */*) if on_criterion "$program"; then # one case at a time: the cases bring their own threads and ranks
            "$program" --jobs 1 --tap="$2.tap"
        else
            "${under[@]}" "$program" --times "${options[@]}" "${cases[@]}"
        fi ;;
        *) "${program//-/_}" ;;
        esac
        echo $? >"$2.ended"
    } >"$2.log" 2>&1 </dev/null
    times >"$2.times" # of this shell, then of all that it waited for: minutes and seconds by users, by the system
    awk -F '[ms ]+' -v all=$((SECONDS - began)) \
        'END { printf "%d s, %d s of processors", all, ($1 + $3) * 60 + $2 + $4 }' "$2.times" >"$2.time"
    mv "$2.ended" "$2.status"
}

# ---- the report ---------------------------------------------------------------------------------

table='' told=0

# tell_suites: the results of the suites, in turn, each as soon as all its jobs have ended.
tell_suites() {
    local i state suite before seconds
    while [ $told -lt ${#suites[@]} ]; do
        suite=${suites[told]} before=($passed $failed $skipped) seconds=0
        for i in "${!job[@]}"; do
            [ "${suite_of[i]}" != "$suite" ] || { look "$i" && [[ $state == @(ended|lacks) ]]; } || return 0
        done
        say "==== $suite"
        for i in "${!job[@]}"; do
            [ "${suite_of[i]}" = "$suite" ] && look "$i" && [ $state = ended ] || continue
            count_job "${job[i]}" "$logs/job$i"
            seconds=$((seconds + $(sed 's/.*, \([0-9]*\) .*/\1/' "$logs/job$i.time")))
        done
        ! declare -F "after_$suite" >/dev/null || "after_$suite"
        table+=$(printf '%-10s %4d s of processors %5d passed %4d failed %4d skipped' "$suite" "$seconds" \
            $((passed - before[0])) $((failed - before[1])) $((skipped - before[2])))$'\n'
        told=$((told + 1))
    done
}

# count_job JOB FILE: counts the results of run_job.
count_job() {
    local how=(count_alone "$2.log")
    case $1 in
    build-*/*) ! on_criterion "${1%%[@#,]*}" || how=(count_tap "$2.tap") ;;
    build-*) how=(count_build "$2.log") ;;
    scripts/lint) count_lint "$2.log" "$(cat "$2.status")" "$2.tap" && return ;;
    *.sh) how=(count_cli "$2.log") ;;
    esac
    counted "${1%%,*}" "$2.log" "$(cat "$2.time")" "${how[@]}" "$(cat "$2.status")" "${1%%,*}"
}
