#!/usr/bin/env bash
# tests/cli/mpi.sh: ranks started by mpirun. Their results equal those of local ranks bit for bit;
# a rank that fails ends the job with one message; so do ranks that are out of step.
. "$(dirname "$0")/lib.sh"
program=$BUILD/tests/comm/rank_program
[ -x "$program" ] || program=$BUILD/tests/rank_program
[ -x "$program" ] || skip "rank_program is not built"
command -v mpirun >/dev/null || skip "there is no mpirun"
ldd "$program" | grep -q libmpi || skip "this libknap was built without MPI"

# Ranks on one machine, more of them than cores; in a container they run as root.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_btl_vader_single_copy_mechanism=none
export OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
mpi() { # mpi RANKS COMMAND...
    local n=$1
    shift
    run timeout 600 mpirun -n "$n" "$@"
}
mpi 2 true
[ "$status" = 0 ] || skip "mpirun cannot start two ranks here: $(tail -n 1 "$TMP/output")"

# The lines of a step (tests/comm/rank_step.c), without its number of meetings.
numbers() { sed -n 's/^\(rank .*: [0-9a-f]*\) in .*/\1/p' "$TMP/output" | sort; }

same_step() { # same_step RANKS
    run "$program" step --ranks "$1"
    numbers >"$TMP/local"
    mpi "$1" "$program" step
    numbers >"$TMP/mpi"
    [ "$(grep -c . "$TMP/local")" = "$1" ] && diff "$TMP/local" "$TMP/mpi"
}
for n in 1 2 3 4; do
    check "$n ranks: every collective gives the bits of local ranks" same_step $n
done

# Knap's message in the last run, and that each of the two others ends because of it; mpirun prints more.
one_sentence() { # one_sentence TEXT
    [ "$status" != 0 ] && [ "$(grep '^knap: ' "$TMP/output" | grep -cv '^knap: rank . ends: ')" = 1 ] && says "$1"
}
all_say() { # all_say TEXT
    one_sentence "$1" && [ "$(grep -c '^knap: rank . ends: rank . failed: ' "$TMP/output")" = 2 ] ||
        { cat "$TMP/output"; return 1; }
}
mpi 3 "$program" fail 1
check "an error on one rank ends all, and all say so" all_say "knap: rank 1: data: file is empty"
mpi 3 "$program" diverge 1
check "calls in different communicators" one_sentence "collectives don't match: rank"
check "name the call that is different" says "rank 1 calls all_reduce of 64 f32 (block.1) in communicator reduce"
for nth in 1 8 21 30 48 68; do
    mpi 3 "$program" step error 1 $nth
    check "an error at meeting $nth" all_say "knap: rank 1: a failure asked for"
done
# named RANK WORDS...: three ranks of which that one stops. On a busy machine another may be late, too: then again with
# more time.
named() {
    local rank=$1 seconds
    shift
    for seconds in 1 3 9 27; do
        KNAP_TIMEOUT=$seconds mpi 3 "$program" "$@"
        grep -q "waited $seconds s for rank" "$TMP/output" || return 1
        ! one_sentence "waited $seconds s for rank $rank in " >"$TMP/no" || return 0
    done
    cat "$TMP/no"
    return 1
}
check "a rank that stops is named in time" named 1 step stop 1 9
for order in "1 2" "2 1"; do
    # shellcheck disable=SC2086
    check "who waits itself is not named ($order)" named "${order% *}" chain $order
done
mpi 3 "$program" step crash 2 9
check "a rank that crashes ends all" test "$status" != 0 -a "$status" != 124
mpi 2 env RANK=0 WORLD_SIZE=2 "$program" ok
check "another launcher's variables left over" fails "contradicts OMPI_COMM_WORLD_RANK=1"
mpi 2 "$program" ok --ranks 3
check "--ranks under mpirun" fails "--ranks 3 (or KNAP_RANKS) contradicts OMPI_COMM_WORLD_SIZE=2"

# Training: losses and norms of a few steps.
train=$BUILD/models/train_gpt
train_to() { # train_to NAME COMMAND...
    local name=$1
    shift
    "$@" --data "$TMP/text" --tokenizer byte --layers 2 --heads 2 --embd 32 --ctx 16 --batch 3 \
        --steps 4 --warmup 2 --clip 0.5 --threads 1 --log "$TMP/$name.jsonl" || return 1
    sed -E 's/, "lr".*"grad_norm": ([^,]*),.*/ norm \1/' "$TMP/$name.jsonl" >"$TMP/$name"
    [ "$(grep -c 'norm [0-9]' "$TMP/$name")" = 4 ]
}
if [ -x "$train" ]; then
    cat "$ROOT"/docs/*.md "$ROOT"/README.md >"$TMP/text" 2>/dev/null
    same_training() {
        train_to local "$train" --ranks 4 && train_to mpi timeout 600 mpirun -n 4 "$train" &&
            diff "$TMP/local" "$TMP/mpi"
    }
    check "four ranks train to the same bits" same_training
fi
finish
