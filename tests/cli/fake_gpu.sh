#!/usr/bin/env bash
# tests/cli/fake_gpu.sh: train_gpt --device cuda without a GPU: the CUDA runtime is a fake, the
# kernels are emulated (tests/gpu/fake_cuda/fake.h). Its output, logs and checkpoints equal the
# CPU's except for rounding, the host doesn't wait in a steady step, and errors name their step.
. "$(dirname "$0")/lib.sh"
train=$BUILD/models/train_gpt
gpu=$BUILD/tests/gpu/train_gpt_fake
[ -x "$train" ] && [ -x "$gpu" ] || skip "build/tests/gpu/train_gpt_fake is not built: it needs nvcc"
export KNAP_COMM=local

for _ in $(seq 200); do echo "the quick brown fox jumps over the lazy dog"; done >"$TMP/text"
tiny=(--data "$TMP/text" --layers 1 --heads 2 --embd 16 --ctx 8 --batch 2 --threads 1
    --eval-steps 1)

column() { sed -E "s/.*\"$2\": ([^,}]*).*/\1/" "$1"; }
# near COLUMN: the two logs agree to four digits, line by line.
near() {
    paste <(column "$TMP/cpu" "$1") <(column "$TMP/gpu" "$1") | awk '
        $1 != $2 { d = $1 - $2; if ($1 == "null" || $2 == "null" || d * d > 1e-8 * $1 * $1) { print; bad = 1 } }
        END { exit bad || NR == 0 }'
}

for ranks in 1 2; do
    args=("${tiny[@]}" --steps 9 --eval-every 4 --sample-every 3 --sample-tokens 3 --accum 2 --ranks $ranks)
    rm -rf "$TMP/cpu" "$TMP/gpu"
    run "$train" "${args[@]}" --log "$TMP/cpu"
    check "cpu, $ranks ranks" succeeds
    run "$gpu" "${args[@]}" --device cuda --log "$TMP/gpu"
    check "fake gpu, $ranks ranks" succeeds
    for name in step loss val_loss lr grad_norm; do
        check "the same $name, $ranks ranks" near $name
    done
done

run "$gpu" "${tiny[@]}" --device cuda --steps 1 --f32-products bf16
check "a gpu takes tf32 where bf16 is allowed" says "f32 products       tf32: bf16 was asked for, which this gpu doesn't have"
run "$gpu" "${tiny[@]}" --device cuda --steps 1 --f32-products tf32 --deterministic
check "rounded factors aren't deterministic" fails "leave one of them out"

# waits STEPS OPTION...: the counts of a run of so many steps.
waits() {
    local steps=$1
    shift
    FAKE_WAITS=$TMP/waits "$gpu" "${tiny[@]}" --device cuda --eval-every 0 --steps "$steps" --log "$TMP/log" "$@" \
        >"$TMP/output" 2>&1 && cat "$TMP/waits"
}
for options in "" "--dtype f16" "--dtype bf16 --accum 2 --recompute"; do
    FAKE_LATE=2
    export FAKE_LATE
    # shellcheck disable=SC2086
    check "10 steps wait as often as 6 ($options)" test "$(waits 6 $options)" = "$(waits 10 $options)"
    check "and it counted" test -n "$(cat "$TMP/waits")"
done
unset FAKE_LATE

run "$gpu" "${tiny[@]}" --device cuda --steps 9 --stop-after 4 --out "$TMP/out" --log "$TMP/gpu"
check "it stops where it should" says "stopped after step 4 of 9; saved"
run "$gpu" --resume "$TMP/out" --threads 1 --log "$TMP/gpu"
check "and goes on" succeeds
check "a line a step" diff <(column "$TMP/gpu" step) <(seq 9)
run "$train" "${tiny[@]}" --steps 9 --eval-every 4 --log "$TMP/cpu"
check "as if it hadn't stopped" near loss

run "$gpu" "${tiny[@]}" --device cuda --steps 4 --eval-every 0 --record "$TMP/run.rec"
check "steps are recorded" says "recorded steps 2 to 3 of 1 ranks"
check "with their own losses" diff <(sed -nE 's/.*"w":"loss","c":"([0-9]*)".*/\1/p' "$TMP/run.rec") <(seq 2 3)

for how in now beside; do
    run "$gpu" "${tiny[@]}" --device cuda --steps 3 --eval-every 0 --save-every 1 --keep 0 --out "$TMP/$how" \
        $([ $how = now ] || echo --async-save)
    check "it saves each step, $how" succeeds
done
check "a save beside the training has the bytes of its step" same_training "$TMP/now/step-00000002" "$TMP/beside/step-00000002"

# A step as a graph: to the same digits, also around evaluations and samples. (With collectives
# through the host a step can't be recorded, which is reported.)
for options in "--dropout 0.2 --recompute" "--dtype bf16 --dropout 0.1" "--dtype f16"; do
    # shellcheck disable=SC2206
    args=("${tiny[@]}" --device cuda --steps 12 --eval-every 5 --sample-every 4 --sample-tokens 3 --accum 2
        --clip 0.5 $options)
    run "$gpu" "${args[@]}" --log "$TMP/plain"
    run "$gpu" "${args[@]}" --log "$TMP/gpu" --cuda-graph
    check "steps as a graph ($options)" succeeds
    check "it says so ($options)" says "step as a graph    from step 3 on"
    for name in step loss val_loss lr grad_norm; do
        check "a graph gives the same $name ($options)" diff <(column "$TMP/plain" $name) <(column "$TMP/gpu" $name)
    done
done
run "$gpu" "${tiny[@]}" --device cuda --steps 5 --ranks 2 --cuda-graph
check "two ranks through the host" succeeds
check "aren't recorded" says "steps aren't recorded as a graph: kn_stream_sync: the host waits for stream"
run "$train" "${tiny[@]}" --steps 3 --cuda-graph
check "the cpu" succeeds
check "records no steps" says "step as a graph    no: device cpu records no steps, cuda does"

for ranks in 1 2; do
    rm -rf "$TMP/out"
    run "$gpu" "${tiny[@]}" --device cuda --lr 1e30 --warmup 0 --clip 0 --ranks $ranks --log "$TMP/gpu" \
        --out "$TMP/out" --eval-every 3
    check "the loss is not finite, $ranks ranks" fails "step 2:"
    check "it names a tensor, $ranks ranks" says "transformer."
    check "nothing of it is logged, $ranks ranks" test "$(wc -l <"$TMP/gpu")" -eq 1
    check "nothing of it is saved, $ranks ranks" test -z "$(find "$TMP/out" -name "step-*")"
done
finish
