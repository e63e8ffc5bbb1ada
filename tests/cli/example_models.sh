#!/usr/bin/env bash
# tests/cli/example_models.sh: a Llama, nanochat's GPT, a vision transformer and a residual net (examples/llama.c,
# nanochat.c, vit.c, resnet.c) learn on one rank and on two; examples compute in f64 and say what they see for scripts/peers examples.
. "$(dirname "$0")/lib.sh"

[ -x "$BUILD/examples/llama" ] || skip "the examples are not built"
export OMP_NUM_THREADS=1

# learns NAME LOW HIGH N ARGUMENTS...: the first loss lies between LOW and HIGH, that after 30 steps below an Nth of it.
learns() {
    local ranks
    for ranks in 1 2; do
        run timeout 600 "$BUILD/examples/$1" --threads 1 --ranks $ranks --steps 30 "${@:5}"
        check "$1: on $ranks ranks it runs to its end" succeeds
        check "$1: on $ranks ranks the loss falls" loss_falls "$2" "$3" "$4"
        cp "$TMP/output" "$TMP/lines$ranks"
    done
    check "$1: the first micro-batch is the same on 1 and 2 ranks" \
        cmp <(head -n 1 "$TMP/lines1") <(head -n 1 "$TMP/lines2")
    run "$BUILD/examples/$1" --help
    check "$1: --help lists the options" says "--steps N"
}

learns llama 4 6 1.25 --data "$ROOT/docs/fsdp.md"
run "$BUILD/examples/llama" --data "$TMP/none"
check "llama: a missing text is a sentence" fails "none"
small=(--depth 2 --head-dim 32 --ctx 64 --batch 2 --total-batch 256 --warmup 5 --windows SL)
learns nanochat 4 6 1.1 "${small[@]}" --eval-every 0 --data "$ROOT/docs/fsdp.md"
check "nanochat: all losses are the same on 1 and 2 ranks" cmp "$TMP/lines1" "$TMP/lines2"
run "$BUILD/examples/nanochat" "${small[@]}" --threads 1 --steps 8 --eval-every 4 --eval-tokens 512 --data "$ROOT/docs/fsdp.md"
check "nanochat: bits per byte at the beginning, between and at the end" succeeds
falls() { awk '/^eval/ { if (n++ && $6 >= last) exit 1; last = $6; if ($2 != 4 * (n - 1) || last < 1 || last > 8) exit 1 }
               END { exit n != 3 }' "$TMP/output" || { cat "$TMP/output"; return 1; }; }
check "nanochat: and they fall" falls
run "$BUILD/examples/nanochat" --windows SLX
check "nanochat: a wrong window is a sentence" fails "--windows is 'SLX'; give a letter a layer, L or S"
run "$BUILD/examples/nanochat" --total-batch 100
check "nanochat: so is a step that micro-batches don't fill" fails "--total-batch is 100 tokens; it must be a multiple of"
run "$BUILD/examples/nanochat" --head-dim 31
check "nanochat: an odd width of heads" fails "--head-dim is 31; it must be even"
run "$BUILD/examples/nanochat" --eval-tokens 100
check "nanochat: an evaluation of less than a batch" fails "--eval-tokens is 100; a batch has 16384"
run "$BUILD/examples/nanochat" --data "$TMP/none"
check "nanochat: and a missing text" fails "none"

found=no
IFS=: read -r -a folders <<<"${KNAP_DATA:-}:${HOME:-}/.cache/knap"
for folder in "${folders[@]}"; do
    [ ! -f "$folder/mnist/train-images-idx3-ubyte.gz" ] || found=yes
done
if [ $found = yes ]; then
    learns vit 2 3 1.1
    learns resnet 2 3 1.3
else
    echo "# MNIST is not on this machine (KNAP_DATA): vit and resnet don't run"
fi

# ---- the tape of scripts/peers examples ---------------------------------------------------------

cc -std=gnu17 -w -I "$ROOT" -I "$BUILD" -include "$ROOT/bench/peers/in_f64.h" "$ROOT/examples/optimizer.c" -o "$TMP/optimizer" \
    -L "$BUILD" -Wl,-rpath,"$BUILD" -lknap -lm >"$TMP/output" 2>&1
status=$?
check "in f64: an example compiles" succeeds
run env KNAP_TAPE="$TMP/tape" "$TMP/optimizer" --steps 3
check "in f64: and runs" succeeds
tape() { [ "$(LC_ALL=C grep -ac "$1" "$TMP/tape")" = "$2" ] || { LC_ALL=C grep -a ' f64' "$TMP/tape"; return 1; }; }
check "in f64: its tape has the parameters" tape 'param fc1.weight f64 64 32$' 1
check "in f64: and a loss for each step" tape 'loss loss f64$' 3
check "in f64: and the draws, two for each" tape 'draw randn f64' 6
finish
