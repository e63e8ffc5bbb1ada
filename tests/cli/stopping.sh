#!/usr/bin/env bash
# tests/cli/stopping.sh: a trainer that gets SIGTERM, SIGINT or SIGHUP, once or twice at once, in whatever phase: it saves
# and ends well, on 1 and on 4 ranks. The signal comes at an operation on files that belongs to the phase. Phases without
# one (a text's evaluation, a sample): durable.sh.
. "$(dirname "$0")/lib.sh"
gpt=$BUILD/models/train_gpt
net=$BUILD/models/train_resnet
faults=$BUILD/tests/libfile_faults.so
[ -x "$gpt" ] && [ -x "$net" ] || skip "build/models/train_gpt or train_resnet is not built"
[ -f "$faults" ] || skip "build/tests/libfile_faults.so is not built"
LD_PRELOAD=$faults "$gpt" --help >/dev/null 2>&1 || skip "this build takes no preloaded library"

for _ in $(seq 200); do echo "the quick brown fox jumps over the lazy dog"; done >"$TMP/text"
python3 - "$(dirname "$0")" "$TMP/images" <<'END'
import os, sys
sys.dont_write_bytecode = True
sys.path.insert(0, sys.argv[1])
from faults_bench import png
for part in 'train', 'test':
    for c in 'cat', 'dog':
        at = os.path.join(sys.argv[2], part, c)
        os.makedirs(at)
        for i in range(8):
            with open(f'{at}/{i}.png', 'wb') as f:
                f.write(png(8, 20 * i))
END
endless_gpt=("$gpt" --data "$TMP/text" --layers 1 --heads 2 --embd 16 --ctx 8 --batch 2 --threads 1 --steps 1000000 --eval-every 0)
endless_net=("$net" --data "$TMP/images" --model resnet20 --image 8 --augment resized --batch 2 --threads 1 --epochs 100000)
clean() { [ -z "$(find "$1" -name '*.saving' -o -name '*.tmp*' -o -name '*.old' -o -name '*.removing' -o -name '*.new')" ] || { ls -la "$1"; return 1; }; }

# stopped SIGNALS PATH OP AT COMMAND...: the run gets them at that operation.
stopped() {
    local signals=$1 path=$2 op=$3 at=$4
    shift 4
    rm -rf "$TMP/run"
    { run env LD_PRELOAD="$faults" FAULT_PATH="$path" FAULT_OP="$op" FAULT_AT="$at" FAULT_DO="$signals" \
        timeout --signal=KILL 300 "$@" --out "$TMP/run"; } 2>/dev/null # the shell would speak of those that were killed
}
# It ended well, and what it saved is the last step that it made; with a number: at most that.
saved() {
    local step
    succeeds && says "--resume $TMP/run" && clean "$TMP/run" && step=$(step_of "$TMP/run") || return 1
    [ "$step" -le "${1:-1000000}" ] || { echo "it stopped after step $step"; return 1; }
}

for ranks in 1 4; do
    for signals in TERM INT HUP TERM-TERM TERM-INT-HUP; do
        stopped $signals model/shard write 1 "${endless_gpt[@]}" --ranks $ranks --save-every 2
        check "$signals in a save, $ranks ranks" saved 2
    done
    for when in "step-00000002.saving mkdir" "optimizer/shard sync" "step-00000002.saving/state.json write" \
        "step-00000002.saving rename" "step-00000002.saving/state.json rename"; do
        set -- $when
        stopped TERM-TERM "$1" "$2" 1 "${endless_gpt[@]}" --ranks $ranks --save-every 2
        check "in a save at $when, $ranks ranks" saved 2
        stopped TERM-TERM "$1" "$2" 1 "${endless_gpt[@]}" --ranks $ranks --save-every 2 --async-save
        check "in a save beside the training at $when, $ranks ranks" saved
    done
    stopped TERM step-00000002.removing rmdir 1 "${endless_gpt[@]}" --ranks $ranks --save-every 2 --keep 1
    check "while an older checkpoint goes, $ranks ranks" saved 4
    stopped TERM-TERM /test/ open 3 "${endless_net[@]}" --ranks $ranks --eval-every 1
    check "train_resnet in an evaluation, $ranks ranks" saved
    stopped TERM-TERM /train/ open 9 "${endless_net[@]}" --ranks $ranks
    check "train_resnet while images are read, $ranks ranks" saved
    stopped HUP model/shard sync 1 "${endless_net[@]}" --ranks $ranks --save-every 2
    check "train_resnet in a save, $ranks ranks" saved 2
    stopped INT-INT step-00000002.saving rename 1 "${endless_net[@]}" --ranks $ranks --save-every 2 --async-save
    check "train_resnet in a save beside the training, $ranks ranks" saved
done

# one rank alone gets it
export FAULT_RANK=3
stopped TERM model/shard write 1 "${endless_gpt[@]}" --ranks 4 --save-every 2
check "one rank of 4: all save" saved 2
unset FAULT_RANK

# while it loads there is nothing to save
for trainer in gpt net; do
    if [ $trainer = gpt ]; then stopped TERM model/shard write 1 "${endless_gpt[@]}" --save-every 2
    else stopped TERM model/shard write 1 "${endless_net[@]}" --save-every 2; fi
    rm -rf "$TMP/kept" && cp -r "$TMP/run" "$TMP/kept"
    for at in 1 3 5; do
        for ranks in 1 4; do
            rm -rf "$TMP/w" && cp -r "$TMP/kept" "$TMP/w"
            { run env LD_PRELOAD="$faults" FAULT_PATH=.safetensors FAULT_OP=read FAULT_AT=$at FAULT_DO=TERM-TERM \
                timeout --signal=KILL 300 "${!trainer}" --resume "$TMP/w" --threads 1 --ranks $ranks; } 2>/dev/null
            check "train_$trainer ends at once while it loads, $ranks ranks" test "$status" -ne 0 -a "$status" -ne 137
            check "and what is there stays" diff -r -x .lock "$TMP/kept" "$TMP/w"
        done
    done
done
finish
