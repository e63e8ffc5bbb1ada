#!/usr/bin/env bash
# tests/cli/train.sh: train_gpt and generate from outside: learning, logs, saving, resuming, Ctrl-C.
. "$(dirname "$0")/lib.sh"
train=$BUILD/models/train_gpt
generate=$BUILD/models/generate
[ -x "$train" ] && [ -x "$generate" ] || skip "build/models/train_gpt or generate is not built"

for _ in $(seq 400); do echo "the quick brown fox jumps over the lazy dog"; done >"$TMP/text"
tiny=("$train" --data "$TMP/text" --layers 2 --heads 2 --embd 32 --ctx 16 --batch 4 --threads 1
    --warmup 5 --eval-steps 3)

# column FILE NAME: that value of every line of a log.
column() { sed -E "s/.*\"$2\": ([^,}]*).*/\1/" "$1"; }
below() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a != "" && a + 0 < b + 0) }'; }
lines_are_json() { python3 -c 'import json, sys; [json.loads(l) for l in open(sys.argv[1])]' "$1"; }

# ---- learning ----------------------------------------------------------------------------------

run "${tiny[@]}" --steps 120 --lr 1e-2 --dropout 0 --eval-every 60 --log "$TMP/log" --out "$TMP/out" \
    --ranks 2 --sample-every 120 --sample-tokens 20
check "two ranks train" succeeds
for word in model parameters ranks strategy mesh layout dtypes threads "instruction set" libraries "memory a rank" \
    tokens/s left; do
    check "it tells $word" says "$word"
done
check "a line a step" test "$(wc -l <"$TMP/log")" -eq 120
check "the log is JSON" lines_are_json "$TMP/log"
check "the loss falls" below "$(column "$TMP/log" val_loss | tail -n 1)" 1.0
for rank in 1 2; do
    for part in model optimizer; do
        check "$part of rank $rank is there" test -n "$(echo "$TMP/out/step-00000120/$part/shard-0000$rank"-*)"
    done
done
for file in tokenizer.json state.json; do
    check "$file is there" test -s "$TMP/out/step-00000120/$file"
done
check "the checkpoint before stays" test -s "$TMP/out/step-00000060/state.json"
check "nothing half-written stays" test -z "$(find "$TMP/out" -name '*.saving' -o -name '*.tmp*' -o -name '*.old' -o -name '*.removing')"
for part in "" /step-00000060; do
    check "every byte agrees with its checksum (out$part)" "$BUILD/models/knap-checkpoint" verify "$TMP/out$part"
done

run "$generate" --from "$TMP/out" --prompt "the quick" --tokens 40 --temperature 0
check "generate goes on from the prompt" says "the quick brown fox"
"$generate" --from "$TMP/out" --prompt the --tokens 40 --seed 5 --top-k 5 --top-p 0.9 >"$TMP/a"
"$generate" --from "$TMP/out" --prompt the --tokens 40 --seed 5 --top-k 5 --top-p 0.9 >"$TMP/b"
check "the same seed writes the same" cmp "$TMP/a" "$TMP/b"
for ranks in 2 3 5; do
    check "$ranks ranks write the same" cmp "$TMP/a" <("$generate" --from "$TMP/out" --prompt the \
        --tokens 40 --seed 5 --top-k 5 --top-p 0.9 --ranks $ranks --threads 1)
done

# Whether oneDNN or Knap's kernels compute a kind of f32 product: timed once, kept, read again.
wide=("${tiny[@]/%32/64}" --steps 6)
run env KNAP_TUNE=1 KNAP_TUNED="$TMP/tuned" "${wide[@]}"
if ! says "libraries          none" >/dev/null; then
    check "products are timed" says "algorithms         timed when first met, 0 so far: $TMP/tuned"
    kinds=$(grep -cE '= (oneDNN|own)$' "$TMP/tuned")
    check "their kinds are kept" test "$kinds" -ge 4
    check "and nothing else" test "$kinds" = "$(grep -c . "$TMP/tuned")"
    run env KNAP_TUNED="$TMP/tuned" "${wide[@]}"
    check "a later run reads them" says "algorithms         $kinds timed before: $TMP/tuned"
fi

run "${tiny[@]}" --steps 5 --ranks 2 --summary --check
check "a summary and a check" succeeds
for word in "kept for backward" gpt_block "f32[4,16,32]"; do
    check "the summary tells $word" says "$word"
done

# Products of rounded factors: faster where the machine has them; elsewhere the same bits.
for products in exact tf32 bf16; do
    run "${tiny[@]/%32/64}" --steps 30 --eval-every 30 --f32-products $products --log "$TMP/log.$products"
    check "a run with $products products" succeeds
    taken=$(sed -n 's/^  f32 products  *//p' "$TMP/output")
    case $products-$taken in
    exact- | bf16-bf16) ;; # the default isn't told
    *) check "$products products are missed" test "$taken" = "exact: $products was asked for, which this cpu doesn't have" ;;
    esac
    column "$TMP/log.$products" loss >"$TMP/losses.$products"
done
run env KNAP_F32_PRODUCTS=bf16 "${tiny[@]/%32/64}" --steps 30 --eval-every 30 --log "$TMP/log.none"
check "a trainer has an option instead" says "KNAP_F32_PRODUCTS=bf16; --f32-products is"
check "exact is the default" cmp <(column "$TMP/log.none" loss) "$TMP/losses.exact"
check "a cpu has none of tf32" cmp "$TMP/losses.tf32" "$TMP/losses.exact"
near() { paste "$1" "$2" | awk '{ d = $1 - $2; if (d < -0.05 || d > 0.05) exit 1 } END { exit NR != 30 }'; }
check "losses with bf16 are near" near "$TMP/losses.bf16" "$TMP/losses.exact"
if [ "$taken" = bf16 ]; then
    check "and others" test "$(cat "$TMP/losses.bf16")" != "$(cat "$TMP/losses.exact")"
else
    check "this cpu has none of bf16" cmp "$TMP/losses.bf16" "$TMP/losses.exact"
fi
run "${wide[@]}" --f32-products half
check "no other products" fails "exact|tf32|bf16"
run env KNAP_F32_PRODUCTS=medium "$generate" --from "$TMP/out" --tokens 1
check "KNAP_F32_PRODUCTS has no others" fails "KNAP_F32_PRODUCTS=medium: must be exact, tf32 or bf16"

version=$(sed -n "s/^  version: '\(.*\)',$/\1/p" "$ROOT/meson.build")
for program in train_gpt train_resnet generate predict knap-tokenize knap-checkpoint; do
    run "$BUILD/models/$program" --version
    check "$program has a version" test "$status-$(cat "$TMP/output")" = "0-$program (Knap) $version"
done

# ---- resuming keeps the bits ---------------------------------------------------------------------

bits=(--steps 10 --dropout 0.1 --accum 2 --eval-every 5)
check "ten steps" "${tiny[@]}" "${bits[@]}" --log "$TMP/whole" --out "$TMP/w"
check "five steps" "${tiny[@]}" "${bits[@]}" --log "$TMP/parts" --out "$TMP/p" --stop-after 5
check "five more" "$train" --resume "$TMP/p" --log "$TMP/parts" --threads 1
for name in step loss val_loss lr grad_norm; do
    check "the same $name" diff <(column "$TMP/whole" $name) <(column "$TMP/parts" $name)
done
check "the same state" same_training "$TMP/w" "$TMP/p"
# the reverse: saved by two ranks with half the micro-batches each, resumed by one
run "${tiny[@]}" --steps 10 --dropout 0.1 --accum 1 --eval-every 5 \
    --ranks 2 --log "$TMP/mixed" --out "$TMP/m" --stop-after 5
check "five steps on two ranks" succeeds
check "how they go on" says "To go on: $train --resume $TMP/m --ranks 2"
cp -r "$TMP/m" "$TMP/halved"
run "$train" --resume "$TMP/halved" --threads 1 --stop-after 11
check "a step of half the rows is told" says "when it was saved: of 40 samples, step 5 is now step 10 of 20"
run "$train" --resume "$TMP/halved" --threads 1 --stop-after 11
check "a step at which it stops no more" fails "is at step 11, where --stop-after 11 would stop no more"
run "$train" --resume "$TMP/halved" --threads 1 --stop-after 12 --lr 0.002 --beta2 .990 --seed 7 --eval-every 10
check "another rate is told" says "--lr 0.002; 1e-3 when it was saved"
check "but not what follows from it" test -z "$(grep -- "--min-lr" "$TMP/output")"
check "and another seed" says "--seed 7; 1337 when it was saved"
check "not the same again" test -z "$(grep -E -- "--eval-every|--beta2" "$TMP/output" | grep -F "when it was saved")"
run "$train" --resume "$TMP/m" --log "$TMP/mixed" --threads 1 --accum 2
check "five more on one" succeeds
check "whose steps are the same" test -z "$(grep -F "when it was saved" "$TMP/output")"
check "the same state" same_training "$TMP/w" "$TMP/m"

run "$train" --resume "$TMP/p" --steps 12 --embd 48
check "a model of other sizes names the option" fails "the options make a model with embd 48, and the one of the checkpoint in $TMP/p/step-00000010 has 32"
# a checkpoint is independent of strategy, layout, mesh and offload
mkdir "$TMP/store"
check "five steps, cut by parameter, offloaded" "${tiny[@]}" --steps 10 --dropout 0.1 --accum 1 \
    --eval-every 5 --ranks 2 --layout per_param --strategy shard_grad_op --offload "$TMP/store" \
    --log "$TMP/cut" --out "$TMP/x" --stop-after 5
check "five more on one, ragged" "$train" --resume "$TMP/x" --log "$TMP/cut" --threads 1 --accum 2 \
    --layout ragged
for name in loss grad_norm; do
    check "the same $name" diff <(column "$TMP/whole" $name) <(column "$TMP/cut" $name)
done
check "the same state" same_training "$TMP/w" "$TMP/x"
# Muon's momentum and averages of the weights, saved by two ranks and gone on with by one
muon=("${tiny[@]}" --optimizer muon --ema 0.9 --steps 10 --eval-every 5)
run "${muon[@]}" --accum 2 --log "$TMP/muon" --out "$TMP/u"
check "ten steps with Muon and averages" succeeds
check "it tells Muon's share of a step" says "/s  muon "
check "the table counts the averages" says " a rank, beside the optimizer's state"
check "five on two ranks" "${muon[@]}" --accum 1 --ranks 2 --layout ragged --log "$TMP/muon_parts" \
    --out "$TMP/v" --stop-after 5
check "five more on one with averages" "$train" --resume "$TMP/v" --log "$TMP/muon_parts" \
    --threads 1 --accum 2
for name in loss val_loss grad_norm; do
    check "the same $name with averages" diff <(column "$TMP/muon" $name) \
        <(column "$TMP/muon_parts" $name)
done
check "the same state with averages" same_training "$TMP/u" "$TMP/v"
check "the averages are written from" "$generate" --from "$TMP/u" --tokens 3
# the best one, one command line for a job that is restarted, saving beside the training
job=("${tiny[@]}" --steps 12 --lr 1e-2 --dropout 0.1 --accum 1 --ranks 2 --eval-every 3 --save-every 3 --keep 3 --keep-best --out)
check "a run without a break" "${job[@]}" "$TMP/j1" --async-save
check "keeps the newest" test "$(cd "$TMP/j1" && echo step-*)" = "step-00000006 step-00000009 step-00000012"
check "and the best" test "$(readlink "$TMP/j1/best")" = step-00000012
check "which is written from" "$generate" --from "$TMP/j1/best" --tokens 3
for stop in 1 5 9 12; do
    check "a job, started until step $stop" "${job[@]}" "$TMP/j2" --resume auto --stop-after $stop
done
check "the same state" same_training "$TMP/j1" "$TMP/j2"
check "the same best" test "$(readlink "$TMP/j2/best")" = step-00000012
check "and again from step 6" "$train" --resume "$TMP/j1/step-00000006" --threads 1 --accum 2 --layout per_param
check "on one rank, cut otherwise" same_training "$TMP/j1" "$TMP/j2"
rm -rf "$TMP/j1" "$TMP/j2"
# a worse evaluation never replaces the best one, nor does a resumed run forget it
check "a good start" "${tiny[@]}" --lr 1e-3 --min-lr 1e-3 --eval-every 2 --keep 1 --keep-best --out "$TMP/k" --steps 9 --stop-after 2
best=$(readlink "$TMP/k/best")
check "that gets worse" "$train" --resume "$TMP/k" --out "$TMP/k" --threads 1 --steps 6 --lr 3 --min-lr 3 --clip 0 --keep 1
check "keeps its best" test "$(readlink "$TMP/k/best")" = "$best" -a -s "$TMP/k/best/state.json"
check "and the newest" test "$(cd "$TMP/k" && echo step-*)" = "$best step-00000006"
# the scale of the loss is saved as well; with a single token a step the first scales are too large
f16=("$train" --data "$TMP/text" --layers 2 --heads 2 --embd 32 --ctx 1 --batch 1 --threads 1
    --warmup 5 --dropout 0.1 --steps 10 --dtype f16 --reduce-dtype f16 --eval-every 0)
check "ten steps in f16" "${f16[@]}" --log "$TMP/f16" --out "$TMP/f"
check "steps that overflow are skipped" grep -q '"grad_norm": null' "$TMP/f16"
check "the log stays JSON" lines_are_json "$TMP/f16"
check "five in f16" "${f16[@]}" --log "$TMP/f16_parts" --out "$TMP/g" --stop-after 5
check "five more in f16" "$train" --resume "$TMP/g" --log "$TMP/f16_parts" --threads 1
for name in loss grad_norm; do
    check "the same $name in f16" diff <(column "$TMP/f16" $name) <(column "$TMP/f16_parts" $name)
done
scaler() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["scaler"])' "$1"; }
check "and the same scale" test "$(scaler "$(newest "$TMP/f")/state.json")" = "$(scaler "$(newest "$TMP/g")/state.json")"

# ---- evaluation ----------------------------------------------------------------------------------

# A character of this text takes two bytes, so bits a byte are half of those a token.
for _ in $(seq 60); do printf 'éàéèêéôé'; done >"$TMP/accents"
odd=("$train" --data "$TMP/accents" --layers 1 --heads 1 --embd 8 --ctx 8 --threads 1 --eval-steps 5)
for ranks in 1 2; do
    check "$ranks ranks evaluate" "${odd[@]}" --steps 10 --eval-every 5 --lr 1e-2 --ema 0.8 --ranks $ranks --log "$TMP/evaluated$ranks" --out "$TMP/e$ranks"
    check "perplexity and bits a byte" python3 - "$TMP/evaluated$ranks" <<'END'
import json, math, sys
lines = [json.loads(l) for l in open(sys.argv[1])]
assert [l['step'] for l in lines if 'val_perplexity' in l] == [5, 10]
for l in lines[4::5]:
    assert abs(math.log(l['val_perplexity']) - l['val_loss']) < 1e-6, l
    assert abs(l['val_bits_per_byte'] * 2 * math.log(2) - l['val_loss']) < 1e-6, l
END
    run "$train" --resume "$TMP/e1" --eval-only --ranks $ranks --threads 1
    check "$ranks ranks: --eval-only has the training's number" says \
        "$TMP/e1/step-00000010: val $(printf %.4f "$(column "$TMP/evaluated1" val_loss | tail -n 1)"), perplexity"
done
run "$train" --init "$TMP/e1" --data "$TMP/accents" --eval-only --eval-steps 5
check "of --init, too" says "$TMP/e1: val $(printf %.4f "$(column "$TMP/evaluated1" val_loss | tail -n 1)"), perplexity"
mkdir "$TMP/nothing"
while IFS='|' read -r words says; do
    eval "run \"\$train\" --eval-only $words"
    check "refused: --eval-only $words" fails "$says"
done <<END_OF_CASES
|give --resume or --init
--resume auto --out $TMP/nothing|give --resume or --init
--resume $TMP/e1 --log $TMP/nothing.log|--eval-only and --log contradict each other
--resume $TMP/e1 --record $TMP/nothing.rec|--eval-only and --record contradict each other
--resume $TMP/e1 --explain all|--eval-only and --explain contradict each other
--resume $TMP/e1 --export x|unknown option --export
END_OF_CASES
check "nothing was written" test "$(ls "$TMP/nothing"; find "$TMP" -name nothing.log)" = ""

# ---- an early end --------------------------------------------------------------------------------

worse=("${odd[@]}" --steps 60 --lr 3 --min-lr 3 --warmup 0)
run "${worse[@]}" --eval-every 2 --patience 3 --out "$TMP/early" --log "$TMP/early.log"
check "evaluations that get no better end it" eval 'succeeds && says "stopped early after step" && says ": 3 evaluations without a better one"'
last=$(column "$TMP/early.log" step | tail -n 1)
check "at the right one" python3 -c "
import json, sys
val = [l['val_loss'] for l in map(json.loads, open(sys.argv[1])) if l['val_loss'] is not None]
assert len(val) < 30 and min(range(len(val)), key=val.__getitem__) == len(val) - 4, val" "$TMP/early.log"
check "it has saved" test "$(step_of "$TMP/early")" = "$last"
run "$train" --resume "$TMP/early"
check "a run that has ended so doesn't go on" fails "is behind 3 evaluations without a better one"
run "$train" --resume "$TMP/early" --patience 4 --log "$TMP/early.log"
check "but with more patience" eval 'succeeds && says ": 4 evaluations without a better one"'
check "parts of it" "${worse[@]}" --eval-every 2 --patience 3 --out "$TMP/early2" --stop-after $((last - 3))
run "$train" --resume "$TMP/early2" --threads 1
check "end at the same step" eval 'succeeds && says "stopped early after step $last of 60"'
run "${worse[@]}" --patience 3 --eval-every 0
check "without evaluations" fails "--patience counts evaluations"

# ---- Ctrl-C ---------------------------------------------------------------------------------------

for ranks in 1 2; do
    rm -f "$TMP/log"
    set -m # else a background job ignores SIGINT
    "${tiny[@]}" --steps 1000000 --ranks $ranks --eval-every 0 --log "$TMP/log" \
        --out "$TMP/c$ranks" >"$TMP/output" 2>&1 </dev/null &
    pid=$!
    set +m
    wait_for test -s "$TMP/log"
    kill -INT $pid
    ended $pid
    check "Ctrl-C ends $ranks ranks well" succeeds
    check "and says how to resume" says "--resume $TMP/c$ranks"
    check "and has saved" test -s "$(newest "$TMP/c$ranks")/state.json"
done
run "${tiny[@]}" --steps 9 --stop-after 2
check "without --out it says that nothing was saved" says "nothing was saved"
finish
