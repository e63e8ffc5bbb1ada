#!/usr/bin/env bash
# tests/cli/diff.sh: knap-diff from outside: two recordings, or two commands.
. "$(dirname "$0")/lib.sh"
train=$BUILD/models/train_gpt
diff=$BUILD/models/knap-diff
[ -x "$train" ] && [ -x "$diff" ] || skip "build/models/train_gpt or knap-diff is not built"

for _ in $(seq 60); do echo "the quick brown fox jumps over the lazy dog"; done >"$TMP/text"
text=("$train" --data "$TMP/text" --layers 2 --heads 2 --embd 16 --ctx 8 --batch 2 --warmup 1 --eval-every 0
    --sample-every 0 --steps 4 --threads 1)
record() { # record NAME OPTION...
    "${text[@]}" --record-values --record "$TMP/$1.rec" "${@:2}" >"$TMP/output" 2>&1 </dev/null
}
for run in "a" "b" "seed --seed 2" "half --dtype bf16" "ranks --ranks 2" "ragged --ranks 2 --layout ragged" \
    "late --ranks 2 --prefetch none" "rate --lr 0.002" "again --recompute" "accum --accum 2" \
    "both --accum 2 --recompute" "behind --record-steps 3-4"; do
    # shellcheck disable=SC2086 # a name and options
    check "recording: $run" record $run
done
"${text[@]}" --record "$TMP/bare.rec" >/dev/null 2>&1

same() { [ "$status" = 0 ] && says "$1"; }
other() { [ "$status" = 1 ] && says "$1"; }
run "$diff" "$TMP/a.rec" "$TMP/b.rec"
check "the same run twice" same "values: the same"
run "$diff" "$TMP/a.rec" "$TMP/seed.rec"
check "another seed: the first activation" other "the first that differs is the activation transformer.wpe of rank 0"
check "its operation is named" says "index_select of transformer.wpe"
check "the order is the same" says "calls and verbs of rank 0: the same"
run "$diff" "$TMP/a.rec" "$TMP/rate.rec"
check "another rate: step 2's parameters were written by it" other "values: the first that differs"
run "$diff" "$TMP/a.rec" "$TMP/half.rec"
check "another dtype is a setting" other "param_dtype: f32 and bf16"
run "$diff" "$TMP/ranks.rec" "$TMP/ragged.rec"
check "another layout" says "layout: flat and ragged"
check "has the same values" says "values: the same"
check "and the same order" says "calls and verbs of rank 1: the same"
run "$diff" "$TMP/ranks.rec" "$TMP/late.rec"
check "another schedule" other "backward_prefetch: pre and none"
check "differs at a verb, with its cause" says "because: .backward_prefetch PRE of gpt"
check "and has the same values" says "values: the same"
run "$diff" "$TMP/a.rec" "$TMP/again.rec"
check "a forward that runs again for backward is no further value" says "values: the same"
run "$diff" "$TMP/accum.rec" "$TMP/ranks.rec"
check "a step's values beside those of the same step" says "values: the same"
run "$diff" "$TMP/accum.rec" "$TMP/both.rec"
check "run again for each micro-batch" says "values: the same"
run "$diff" "$TMP/a.rec" "$TMP/seed.rec" --tolerance 3
check "a tolerance of all" says "values: the same"
run "$diff" "$TMP/a.rec" "$TMP/bare.rec"
check "without values it says so" says "record them with --record-values"
run "$diff" "${text[*]} --seed 5" "${text[*]} --seed 5"
check "two commands, the same" same "values: the same"
run "$diff" "${text[*]} --seed 5" "${text[*]} --seed 6"
check "two commands that differ" other "values: the first that differs"

sed 's/"x":"f32\[8,16\]","h":"\(.\)/"x":"f32[8,16]","h":"z\1/' "$TMP/a.rec" >"$TMP/flip.rec"
run "$diff" "$TMP/a.rec" "$TMP/flip.rec"
check "behind the elements shown" other "behind the elements shown: the digests are"
flip_last() { # flip_last NAME WORDS: the digest of NAME's last event with these words is another one.
    tac "$TMP/$1.rec" | sed "0,/$2/{/$2/s/\"h\":\"/\"h\":\"z/}" | tac >"$TMP/flip.rec"
}
flip_last ranks '"r":0.*"m":"activation"'
run "$diff" "$TMP/accum.rec" "$TMP/flip.rec"
check "the last step's values, too" other "the first that differs is the activation gpt of rank 0"
check "with the operations since the value before" says "made since the value before, transformer.ln_f by"
flip_last a '"m":"parameter"'
run "$diff" "$TMP/a.rec" "$TMP/flip.rec"
check "a parameter" other "the first that differs is the parameter"
check "no operation stands between it and the one before" eval '! says "before, then"'
head -n -100 "$TMP/a.rec" >"$TMP/short.rec"
run "$diff" "$TMP/a.rec" "$TMP/short.rec"
check "one ends before the other" other "  B: nothing more"
sed '0,/"v":\["[^"]*"/s//"v":["inf"/' "$TMP/a.rec" >"$TMP/inf.rec"
run "$diff" "$TMP/a.rec" "$TMP/inf.rec" --tolerance 0.1
check "an infinity is beyond any tolerance" other "  B: inf"
run "$diff" "$TMP/inf.rec" "$TMP/inf.rec" --tolerance 0.1
check "the same infinity isn't" same "values: the same"
sed 's/"w":"loss","c":"2","n":[0-9.]*/"w":"loss","c":"2","n":"nan"/' "$TMP/a.rec" >"$TMP/nan.rec"
run "$diff" "$TMP/a.rec" "$TMP/nan.rec"
check "a loss that is no number" other " and nan"
run "$diff" "$TMP/a.rec" "$TMP/behind.rec"
check "numbers of other steps" other "numbers: A has loss of step 2, B has loss of step 3"
head -1 "$TMP/a.rec" >"$TMP/long.rec"
for i in 1 2; do
    printf '{"r":0,"i":%d,"t":%d,"k":"value","w":"%0600d","m":"gradient","h":"%d"}\n' $i $i 0 $i >>"$TMP/long.rec"
done
run timeout 20 "$diff" "$TMP/long.rec" "$TMP/long.rec"
check "names may be long" says "values: the same 2"

sed 's/\("clock": *"[a-z]*\)"/\1\\u001b[31m"/' "$TMP/a.rec" >"$TMP/coloured.rec"
run "$diff" "$TMP/a.rec" "$TMP/coloured.rec"
check "a text's control characters aren't printed" says "?[31m"

run "$diff" "$TMP/a.rec"
check "one alone" fails "give two recordings"
run "$diff" "$TMP/a.rec" "$TMP/none.rec"
check "no file" fails "none.rec"
echo "{}" >"$TMP/empty.rec"
run "$diff" "$TMP/a.rec" "$TMP/empty.rec"
check "no recording" fails "empty.rec is no recording"
run "$diff" "false now" "false then"
check "a command that fails" fails "the command failed: false now"
finish
