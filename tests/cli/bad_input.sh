#!/usr/bin/env bash
# tests/cli/bad_input.sh: bad input of train_gpt and generate: one error message with a remedy,
# and a status other than 0.
. "$(dirname "$0")/lib.sh"
train=$BUILD/models/train_gpt
generate=$BUILD/models/generate
[ -x "$train" ] && [ -x "$generate" ] || skip "build/models/train_gpt or generate is not built"

for _ in $(seq 200); do echo "the quick brown fox jumps over the lazy dog"; done >"$TMP/text"
tiny=("$train" --data "$TMP/text" --layers 1 --heads 2 --embd 16 --ctx 8 --batch 2 --threads 1
    --eval-every 0)

# One message, of one line; the supervisor may add which rank ended first.
one_sentence() {
    [ "$(grep '^knap: ' "$TMP/output" | grep -vc 'the other ranks were ended$')" -eq 1 ] ||
        { cat "$TMP/output"; return 1; }
}
# refused NAME TEXT COMMAND...: it must fail with a message that contains TEXT.
refused() {
    local name=$1 text=$2
    shift 2
    run timeout 300 "$@"
    check "$name" fails "$text"
    check "$name, in one sentence" one_sentence
}

refused "missing data" "nowhere.txt" "$train" --data "$TMP/nowhere.txt"
: >"$TMP/empty"
refused "empty data" "$TMP/empty" "$train" --data "$TMP/empty"
refused "data is a folder" "$TMP" "$train" --data "$TMP"
refused "unknown option" "did you mean --steps" "${tiny[@]}" --stepss 3
refused "bad number" "--batch" "${tiny[@]}" --batch many
refused "unknown choice" "full_shard" "${tiny[@]}" --strategy sharded
refused "a choice that is near" "did you mean hybrid_shard" "${tiny[@]}" --strategy hybrid_shrad
refused "shards that don't divide" "3 shards (.mesh, --shards) don't divide the 2 ranks" "${tiny[@]}" --ranks 2 --shards 3
refused "a mesh of another size" "their product must be 2" "${tiny[@]}" --ranks 2 --shards 2 \
    --replicas 2
refused "a mesh of nothing" "no_shard" "${tiny[@]}" --ranks 2 --strategy no_shard --shards 2
refused "replicas that there aren't" "--all-reduce-last" "${tiny[@]}" --ranks 2 --all-reduce-last
refused "a check of recorded steps" "--check and --cuda-graph contradict each other" "${tiny[@]}" --check --cuda-graph
refused "a model that overflows" "check: forward of" "${tiny[@]}" --check --lr 1e20 --clip 0 --steps 6 \
    --warmup 1
refused "a rate that would rise" "--min-lr 0.5 is above --lr 0.1" "${tiny[@]}" --lr 0.1 --min-lr 0.5
refused "a warmup without an end" "--warmup 6 is more than the --steps 5" "${tiny[@]}" --warmup 6 --steps 5
for every in 0 1000; do
    refused "samples begin with a text it can't read, every $every" "~" "${tiny[@]}" --sample-every $every --prompt "~"
done
refused "samples that begin with nothing" "--prompt is empty" "${tiny[@]}" --sample-every 9 --prompt ""
refused "an unknown reshard" "always, never, or" "${tiny[@]}" --reshard sometimes
refused "a reshard that doesn't divide" "--reshard 3" "${tiny[@]}" --ranks 2 --reshard 3
refused "a learning rate of zero" "--lr is 0" "${tiny[@]}" --lr 0
refused "no bias in a Llama" "--no-bias is an option of a GPT" "${tiny[@]}" --model llama --no-bias
refused "a bias in a Llama" "--bias is an option of a GPT" "${tiny[@]}" --model llama --bias
refused "a decay of one" "--ema" "${tiny[@]}" --ema 1
refused "an unknown optimizer" "adamw" "${tiny[@]}" --optimizer muoon
refused "an unknown norm" "--clip-norm" "${tiny[@]}" --clip-norm zero
refused "a size without the policy" "--wrap size" "${tiny[@]}" --wrap-size 5
refused "a policy that wraps nothing" "wraps nothing" "${tiny[@]}" --wrap size
refused "no folder to offload into" "$TMP/none" "${tiny[@]}" --offload "$TMP/none"
refused "ranks beyond sense" "--ranks" "${tiny[@]}" --ranks 0
refused "heads don't divide channels" "3 heads don't divide 16 channels" "$train" \
    --data "$TMP/text" --heads 3 --embd 16
refused "context longer than the data" "--ctx" "$train" --data "$TMP/text" --ctx 5000
refused "a preset with sizes" "--layers" "$train" --data "$TMP/text" --model gpt2 --layers 3
refused "a folder that can't be made" "$TMP/text" "${tiny[@]}" --out "$TMP/text/out"
refused "a log that can't be written" "no/such/folder" "${tiny[@]}" --log no/such/folder/log

KNAP_TUNE=1 refused "ranks that would time algorithms each by itself" "KNAP_TUNE=1 on 2 ranks" "${tiny[@]}" --ranks 2
KNAP_TUNE=yes refused "a switch that is neither on nor off" "KNAP_TUNE=yes: must be 1 (on) or 0 (off)" "${tiny[@]}" --ranks 2

for ranks in 1 2; do
    refused "the loss is not finite, $ranks ranks" "step 2:" "${tiny[@]}" --lr 1e30 --warmup 0 \
        --clip 0 --ranks $ranks
    check "it names a tensor" says "transformer."
done

# ---- checkpoints ----------------------------------------------------------------------------------

check "a checkpoint to damage" "${tiny[@]}" --steps 9 --stop-after 2 --out "$TMP/good"
# damaged: a fresh copy in $TMP/bad
damaged() {
    rm -rf "$TMP/bad"
    cp -r "$TMP/good" "$TMP/bad"
}
resume=("$train" --resume "$TMP/bad" --threads 1)
refused "no checkpoint" "holds no checkpoint: there is no such folder" "$train" --resume "$TMP/none"
refused "a file for a checkpoint" "holds no checkpoint: it is a file" "$train" --resume "$0"
refused "a file for a folder" "cannot write into $TMP/empty: Not a directory" "${tiny[@]}" --out "$TMP/empty"
refused "a folder for a checkpoint" "nor a folder step-N with one" "$train" --resume "$TMP"
refused "a checkpoint for a run's folder" "lies in a folder of the run in" "${tiny[@]}" --out "$TMP/good/step-00000002"
for from in "$TMP/good" "$TMP/good/step-00000002"; do
    refused "going on in a run and replacing it" "leave one of them out, or save elsewhere" "$train" --resume "$from" \
        --overwrite
done
refused "generate without one" "--from" "$generate"
refused "nothing left" "nothing is left" "$train" --resume "$TMP/good" --steps 2
damaged
refused "a checkpoint of another shape" "a model with embd 32" "${resume[@]}" --embd 32
refused "of another depth" "a model with layers 2" "${resume[@]}" --layers 2
refused "of another shape, two ranks" "a model with embd 32" "${resume[@]}" --embd 32 --ranks 2
step=$TMP/bad/step-00000002 shard=shard-00001-model-00001-of-00001.safetensors
truncate -s 1000 "$step/model/$shard"
refused "a truncated file" "$shard" "${resume[@]}"
refused "a truncated file, generate" "$shard" "$generate" --from "$TMP/bad"
damaged
printf '\xff\xff\xff\xff\xff\xff\xff\x7f{}' >"$step/model/$shard"
refused "a hostile header" "$shard" "${resume[@]}"
damaged
rm "$step/optimizer/$shard"
refused "a missing file" "optimizer" "${resume[@]}"
damaged
edit_state "$step" "s['step'] = -5"
refused "a bad step" '"step"' "${resume[@]}"
damaged
edit_state "$step" "s['version'] = 2"
refused "an older version" "is of version 2, and version 3 is read" "${resume[@]}"
damaged
echo '{"version": ' >"$step/state.json"
refused "broken JSON" "state.json" "${resume[@]}"
damaged
edit_state "$step" "s['step'] = 3"
refused "a step of another checkpoint" '"step"' "${resume[@]}"
damaged
sed -i 's/"score": /"score":  /' "$step/state.json"
refused "a byte more in state.json" "state.json isn't as it was saved: its checksum differs" "${resume[@]}"
refused "which knap-checkpoint finds" "state.json isn't as it was saved" "$BUILD/models/knap-checkpoint" verify "$step"
damaged
echo '{}' >"$step/tokenizer.json"
refused "a damaged tokenizer" "tokenizer.json" "${resume[@]}"
refused "a prompt it can't read" "~" "$generate" --from "$TMP/good" --prompt "~"
# a reader that has enough ends it without a word, as it ends cat
quiet_end() { [ "$1" -eq 141 ] && [ ! -s "$TMP/said" ] || { echo "status $1"; cat "$TMP/said"; return 1; }; }
for ranks in 1 2; do
    env --default-signal=PIPE "$generate" --from "$TMP/good" --tokens 100000 --ranks $ranks --threads 1 \
        2>"$TMP/said" </dev/null | head -c 5 >/dev/null
    check "generate with $ranks ranks into head" quiet_end "${PIPESTATUS[0]}"
done

# a complete save whose renaming was interrupted is renamed by the next run
damaged
mv "$step" "$step.saving"
check "an interrupted rename is finished" "${resume[@]}"
# an incomplete save leaves the old checkpoint
damaged
mkdir -p "$TMP/bad/step-00000003.saving/model"
echo half >"$TMP/bad/step-00000003.saving/model/$shard"
check "a save that broke off harms nothing" "${resume[@]}"
# the newest that is whole
damaged
cp -r "$step" "$TMP/bad/step-00000007"
edit_state "$TMP/bad/step-00000007" "s['step'] = 7; s['number'] = 2"
truncate -s 1000 "$TMP/bad/step-00000007/optimizer/$shard"
run "${resume[@]}" --ranks 2 --stop-after 3
check "a damaged checkpoint gives way to the one before" succeeds
check "and that is said" says "step-00000007 isn't whole"
check "and counts no more" says "step-00000007 is set aside as $TMP/bad/step-00000007.damaged"
check "so that --keep 2 leaves two that are whole" test "$(cd "$TMP/bad" && echo step-*)" = "step-00000002 step-00000003 step-00000007.damaged"
refused "a damaged one that is named" "$shard" "$train" --resume "$TMP/bad/step-00000007.damaged" --threads 1
run "${resume[@]}" --stop-after 8
check "a save of its step replaces nothing" test -d "$TMP/bad/step-00000007.damaged" -a -s "$TMP/bad/step-00000008/state.json"
# nothing is set aside where the run doesn't go on, or only reads
damaged
cp -r "$step" "$TMP/bad/step-00000007"
edit_state "$TMP/bad/step-00000007" "s['step'] = 7; s['number'] = 2"
truncate -s 1000 "$TMP/bad/step-00000007/optimizer/$shard"
files=$(ls "$TMP/bad")
run "${resume[@]}" --embd 32
check "a run of other sizes" fails "a model with embd 32"
check "a reader takes the one before" "$generate" --from "$TMP/bad" --tokens 1 --threads 1
run "$BUILD/models/knap-checkpoint" verify "$TMP/bad"
check "verify names the newest" fails "the newest checkpoint isn't whole"
check "a run that saves elsewhere goes on" "${resume[@]}" --stop-after 3 --out "$TMP/elsewhere"
check "the folder is as it was" test "$(ls "$TMP/bad")" = "$files"
flip() { printf "\\x$(printf %02x $(($(tail -c 1 "$1" | od -An -tu1) ^ 1)))" | dd of="$1" bs=1 seek=$(($(stat -c %s "$1") - 1)) conv=notrunc status=none; }
for ranks in 1 2; do
    damaged
    cp -r "$step" "$TMP/bad/step-00000007"
    edit_state "$TMP/bad/step-00000007" "s['step'] = 7; s['number'] = 2"
    flip "$TMP/bad/step-00000007/optimizer/$shard"
    run "${tiny[@]}" --steps 9 --stop-after 3 --out "$TMP/bad" --resume latest --ranks $ranks
    check "so does one with a byte that differs, $ranks ranks" succeeds
    check "and it says which" says "step-00000007 isn't whole: $TMP/bad/step-00000007/optimizer/$shard: tensor"
    check "and sets it aside" test -d "$TMP/bad/step-00000007.damaged" -a ! -e "$TMP/bad/step-00000007"
done
refused "the latest of nothing" "give that as well" "${tiny[@]}" --resume latest
refused "the latest of an empty folder" "holds no checkpoint" "${tiny[@]}" --resume latest --out "$TMP/none"
refused "going on and beginning anew" "leave one of them out" "${tiny[@]}" --resume auto --out "$TMP/none" --overwrite
refused "the best without evaluations" "eval-every above 0" "${tiny[@]}" --keep-best --out "$TMP/none"
refused "the best of no folder" "--keep-best is for --out" "$train" --data "$TMP/text" --keep-best
refused "saves without a folder" "--save-every is for --out" "${tiny[@]}" --save-every 3
check "nothing was made" test ! -e "$TMP/none"

# ---- a rank dies ------------------------------------------------------------------------------------

rm -f "$TMP/log"
"${tiny[@]}" --steps 1000000 --ranks 2 --timeout 100000 --log "$TMP/log" >"$TMP/output" 2>&1 </dev/null &
pid=$!
wait_for test -s "$TMP/log"
others=$(children $pid)
for p in $others; do
    ! tr '\0' '\n' <"/proc/$p/environ" | grep -qx KNAP_RANK=1 || victim=$p
done
kill -KILL "$victim"
ended $pid
check "a killed rank ends the run and is named" fails "rank 1 was killed"
check "without waiting for its timeout" test $late = no
all_gone() { for p in $others; do gone "$p" || return 1; done; }
check "no rank stays" wait_for all_gone
finish
