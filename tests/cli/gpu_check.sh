#!/usr/bin/env bash
# tests/cli/gpu_check.sh: scripts/gpu-check without a GPU. nvidia-smi, nvcc and the programs that
# need a GPU are fakes; the trainer is the real one, on the CPU. So this tests the script itself:
# parts, results, failures, time limits, resuming, and the ranks that it kills.
. "$(dirname "$0")/lib.sh"

trainer=$BUILD/models/train_gpt
[ -x "$trainer" ] && [ -x "$BUILD/models/train_resnet" ] || skip "the trainers are not built"
command -v pgrep >/dev/null || skip "no pgrep (procps)"

mkdir -p "$TMP"/{bin,b/models,b/bench,b/tests/gpu}
script() { cat >"$1" && chmod +x "$1"; }
script "$TMP/bin/nvidia-smi" <<'S'
#!/bin/sh
case $* in *--query-gpu=name\ *) echo "Pretended GPU 9000" ;; *) echo "Pretended GPU 9000, 999.99, 1 MiB, 1 MHz, 1 W" ;; esac
S
script "$TMP/bin/nvcc" <<'S'
#!/bin/sh
echo "Cuda compilation tools, release 13.0, V13.0.0"
S
printf '#!/bin/sh\n' | tee "$TMP/bin/ninja" "$TMP/bin/meson" >/dev/null
chmod +x "$TMP"/bin/*
touch "$TMP/b/build.ninja"

# The trainer on the CPU; this wrapper makes the errors that only a GPU can make.
script "$TMP/b/models/train_gpt" <<S
#!/usr/bin/env bash
[ "\${KNAP_CUDA_DEVICE:-0}" = 0 ] || { echo "knap: device cuda: no GPU 99: this machine has 1" >&2; exit 1; }
case "\$*" in *"--batch 65536"*) echo "knap: logits: out of GPU memory" >&2; exit 1 ;; esac
words=() size=(--layers 1 --heads 2 --embd 16 --ctx 8 --batch 2 --threads 1)
for a in "\$@"; do
    case \$a in cuda) a=cpu ;; --deterministic | --cuda-graph) continue ;; esac
    words+=("\$a")
done
unset KNAP_COMM
exec "$trainer" "\${words[@]}" "\${size[@]}"
S
script "$TMP/b/models/train_resnet" <<S
#!/usr/bin/env bash
words=(--image 4 --threads 1)
for a in "\$@"; do
    case \$a in cuda) a=cpu ;; --deterministic | --cuda-graph) continue ;; esac
    words+=("\$a")
done
exec "$BUILD/models/train_resnet" "\${words[@]}"
S
for p in tests/gpu/test_cuda_device tests/gpu/test_cuda_gradients tests/gpu/test_cuda_training \
    bench/bench_kernels bench/bench_gpt2 bench/bench_offload; do
    script "$TMP/b/$p" <<S
#!/bin/sh
echo "\${0##*/} \$*"
[ ! -f "$TMP/\${0##*/}.does" ] || . "$TMP/\${0##*/}.does"
S
done

gpu_check() { run env PATH="$TMP/bin:$PATH" KNAP_DATA= HOME="$TMP" timeout 900 "$ROOT/scripts/gpu-check" --build "$TMP/b" --out "$TMP/out" "$@"; }

gpu_check --part correctness
check "a part that passes" succeeds
check "its result is written" grep -q '^ok gradients of all operations' "$TMP/out/correctness.txt"
check "with the device's name" grep -q '^Pretended GPU 9000, 999.99' "$TMP/out/correctness.txt"
check "losses are compared" grep -q '^ok train_gpt, f32, cuda and cpu: 20 steps' "$TMP/out/correctness.txt"
check "of images, too" grep -q '^ok train_resnet, steps as a graph: 10 steps' "$TMP/out/correctness.txt"
check "a killed rank ends all" grep -q '^ok a rank is killed, local' "$TMP/out/correctness.txt"
check "and it is done" test "$(tail -1 "$TMP/out/correctness.txt")" = done
gpu_check --part correctness
check "it isn't done twice" says "correctness: done before"

echo 'exit 3' >"$TMP/bench_kernels.does"
gpu_check --part kernels
check "a failure is the exit status" fails "FAILED kernels: status 3"
rm "$TMP/bench_kernels.does"
gpu_check --part kernels
check "what failed isn't skipped" grep -q '^ok kernels' "$TMP/out/kernels.txt"

echo 'sleep 1000' >"$TMP/bench_gpt2.does"
for limit in 12 40 120; do # a slow machine needs some of it before the first
    gpu_check --part gpt2 --limit $limit
    ! grep -q "FAILED gpt2 124M" "$TMP/output" || break
done
check "a time limit holds" fails "FAILED gpt2 124M bf16: not done after"
check "and what comes after is left out" says "SKIPPED gpt2 1558M bf16: no time is left"
cat >"$TMP/bench_gpt2.does" <<'S'
case "$*" in *gpt2-xl*--recompute*) sleep 1000 ;; esac
S
gpu_check --part gpt2 --limit 8
rm "$TMP/bench_gpt2.does"
gpu_check --part gpt2
check "the next call goes on" succeeds
check "to the end" test "$(tail -1 "$TMP/out/gpt2.txt")" = done
gpu_check --part train
check "no text is no failure" succeeds
check "and is said" grep -q '^n/a Tiny Shakespeare' "$TMP/out/train.txt"
run "$ROOT/scripts/gpu-check" --part speed
check "an unknown part is an error" fails "no part 'speed'"
finish
