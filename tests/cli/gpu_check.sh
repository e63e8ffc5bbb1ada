#!/usr/bin/env bash
# tests/cli/gpu_check.sh: scripts/gpu-check without a GPU. nvidia-smi, nvcc and the programs that
# need a GPU are fakes; the trainer is the real one, on the CPU. So this tests the script itself:
# parts, results, failures, time limits, resuming, and the ranks that it kills.
. "$(dirname "$0")/lib.sh"

trainer=$BUILD/models/train_gpt
[ -x "$trainer" ] && [ -x "$BUILD/models/train_resnet" ] || skip "the trainers are not built"
[ -x "$BUILD/bench/bench_predict" ] || skip "bench/bench_predict is not built"
command -v pgrep >/dev/null || skip "no pgrep (procps)"

mkdir -p "$TMP"/{bin,b/models,b/bench,b/tests/gpu}
script() { cat >"$1" && chmod +x "$1"; }
script "$TMP/bin/nvidia-smi" <<'S'
#!/bin/sh
name=${GPU:-Pretended GPU 9000}
case $* in *--query-gpu=name\ *) echo "$name" ;; *compute_cap*) echo "${CAPABILITY:-9.0}" ;;
-L) i=0; while [ $i -lt ${GPUS:-1} ]; do echo "GPU $i: $name"; i=$((i + 1)); done ;; topo*) echo topology ;; -q) echo "${FABRIC:-}" ;; *) echo "$name, 999.99, 1 MiB, 1 MHz, 1 W" ;; esac
S
script "$TMP/bin/nvcc" <<'S'
#!/bin/sh
echo "Cuda compilation tools, release 13.0, V13.0.0"
S
printf '#!/bin/sh\n' >"$TMP/bin/ldconfig"
script "$TMP/bin/meson" <<S
#!/bin/sh
echo "\$*" >>$TMP/meson
S
script "$TMP/bin/ninja" <<S
#!/bin/sh
echo "\$CFLAGS \$LD_LIBRARY_PATH" >$TMP/environment
S
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
    bench/bench_kernels bench/bench_gpt2 bench/bench_offload bench/bench_collectives; do
    script "$TMP/b/$p" <<S
#!/bin/sh
echo "\${0##*/} \$*"
[ ! -f "$TMP/\${0##*/}.does" ] || . "$TMP/\${0##*/}.does"
S
done

ln -s "$BUILD/bench/bench_predict" "$TMP/b/bench/"

gpu_check() { run env PATH="$TMP/bin:$PATH" KNAP_DATA= HOME="$TMP" timeout 900 "$ROOT/scripts/gpu-check" --build "$TMP/b" --out "$TMP/out" "$@"; }

gpu_check --part correctness
check "a build without cuDNN isn't measured" fails "this build is without cuDNN"
echo "args: -DKN_HAVE_CUDNN" >"$TMP/b/build.ninja"
CAPABILITY=8.0 gpu_check --part none --build-only
check "parts are known before anything is built" fails "no part 'none'"
CAPABILITY=8.0 gpu_check --build-only
check "a folder for no GPU or another is configured again" grep -q "^setup --reconfigure .* -Dgpu_arch=80$" "$TMP/meson"
CAPABILITY=12.0 gpu_check --build-only --arch 90,100
check "for those that are asked for" grep -q "^setup --reconfigure .* -Dgpu_arch=90,100$" "$TMP/meson"
echo "args: -DKN_HAVE_CUDNN code=[sm_80,sm_90,compute_80]" >"$TMP/b/build.ninja"
rm "$TMP/meson"
gpu_check --build-only
check "one for this GPU is taken as it is" test ! -e "$TMP/meson"
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
check "a GPU without a data sheet has no prediction" grep -q "^n/a the predicted steps: no data sheet of 'Pretended GPU 9000'" "$TMP/out/gpt2.txt"
cat >"$TMP/bench_gpt2.does" <<'S'
case "$*" in
*--graph*) echo "gpt2, as a graph, bf16, batch 4 x 1024, 1 rank: 1.00 ms a step, 4096000 tokens/s" ;;
*"--model gpt2 "*--sweep*)
    echo "gpt2 bf16, batch 1 x 1024, 1 rank: 9.00 ms a step, 113777 tokens/s"
    echo "kernel adamw: 1 calls, 9.0000 ms a step by cuda"
    echo "gpt2 bf16, batch 2 x 1024, 1 rank: 6.00 ms a step, 341333 tokens/s"
    echo "kernel matmul, 9.664 GFLOP: 72 calls, 0.9900 ms a step by cublaslt"
    echo "kernel adamw: 1 calls, 2.5000 ms a step by cuda"
    echo "kernel softmax: 12 calls, 0.5000 ms a step by cuda"
    echo "gpt2 bf16, batch 4 x 1024, 1 rank: 16.00 ms a step, 256000 tokens/s"
    echo "kernel adamw: 1 calls, 9.0000 ms a step by cuda"
    ;;
esac
S
GPU="NVIDIA H200" gpu_check --part gpt2 --again
rm "$TMP/bench_gpt2.does"
check "a prediction stands beside what was measured" succeeds
check "of the fastest batch" grep -q '^predicted  a step of gpt2 bf16, batch 2 x 1024, on one H200' "$TMP/out/gpt2.txt"
check "a kernel as predicted isn't marked" grep -Eq '^predicted  matmul, 9.664 GFLOP +72 .* 0.990 +[01]\.[0-9]+  cublaslt$' "$TMP/out/gpt2.txt"
check "one that isn't, is" grep -Eq '^predicted  adamw .* 2.500 +2.9[0-9]  cuda  OFF$' "$TMP/out/gpt2.txt"
check "and one that wasn't predicted" grep -Eq '^predicted  softmax .* 0.500 +-  cuda  OFF$' "$TMP/out/gpt2.txt"
check "other models' steps aren't taken" grep -q '^predicted  nothing measured stands beside it: no such step in ' "$TMP/out/gpt2.txt"
check "products and attention must run in NVIDIA's libraries" \
    grep -q 'gpt2-xl .*--sweep.* --expect matmul=cublaslt,attention=cudnn,attention_grad=cudnn' "$TMP/out/gpt2.txt"

# Algorithms are timed into a file beside the results; a step runs without it and with it.
gpu_check --part tune
check "a file without a product is a failure" fails "FAILED timing: no product was kept"
key="cuBLASLt 13.1.0, NVIDIA H200, 0 of 132 multiprocessors, workspace 1, m 8, n 9, k 10, lda 8, ldb 9, ldd 8, batch 1, sa 0, sb 0, sd 0, in bf16, out f32, ta 0"
cat >"$TMP/bench_gpt2.does" <<S
[ "\$KNAP_TUNE" != 1 ] || printf '\n0123456789abcdef %s = algorithm 0a, first 40.5 us, best 30.0 us\n' "$key" >>"\$KNAP_TUNED"
echo "tuned: \$KNAP_TUNE \${KNAP_TUNED##*/}"
S
gpu_check --part tune
check "algorithms are timed" succeeds
check "the first beside the best" grep -q '^10.5 us less: m 8, n 9, k 10, batch 1, bf16 to f32, algorithm: first 40.5 us, best 30.0 us' "$TMP/out/tune.txt"
check "and in all" grep -q '^1 products: first 40.5 us, best 30.0 us in all' "$TMP/out/tune.txt"
check "a step without, one that times, one with them" test "$(grep '^tuned: ' "$TMP/out/tune.txt" | tr '\n' ,)" = "tuned:  none,tuned: 1 tuned.txt,tuned:  tuned.txt,"
gpu_check --part gpt2 --out "$TMP/others"
check "other parts don't read it" test "$(grep -c '^tuned:  none' "$TMP/others/gpt2.txt")" = 6
rm "$TMP/bench_gpt2.does"

# A peer is built with its authors' flags, and given tokens; what Python's packages of NVIDIA's bring is used.
mkdir -p "$TMP"/{llmc,site/nvidia/cudnn/include,site/nvidia/cudnn/lib}
touch "$TMP/site/nvidia/cudnn/include/cudnn.h" "$TMP/site/nvidia/cudnn/lib/libcudnn.so.9"
echo 'raise ImportError' >"$TMP/site/torch.py"
cat >"$TMP/llmc/Makefile" <<'M'
train_gpt2cu: ; printf '#!/bin/sh\necho cudnn $(USE_CUDNN), sm_$(GPU_COMPUTE_CAPABILITY): "$$@"\n' >$@ && chmod +x $@
M
export PYTHONPATH=$TMP/site
gpu_check --part peers --llmc "$TMP/llmc"
check "the peers" succeeds
check "PyTorch isn't here" grep -q '^n/a PyTorch' "$TMP/out/peers.txt"
check "llm.c is built with cuDNN" grep -q '^cudnn 1, sm_90: -e d12 -b 64 .*-i .*llmc.train.bin' "$TMP/out/peers.txt"
check "it has tokens" test "$(stat -c %s "$TMP/b/llmc.train.bin")" = $((1024 + 2 * 1048576))
check "Python's libraries are found" grep -q "$TMP/site/nvidia/cudnn/lib" "$TMP/environment"
echo '#include <cudnn.h>' | "${CC:-cc}" -E - >/dev/null 2>&1 ||
    check "and headers" grep -q -- "-I$TMP/site/nvidia/cudnn/include" "$TMP/environment"
rm "$TMP/llmc/train_gpt2cu"
echo 'train_gpt2cu: ; false' >"$TMP/llmc/Makefile"
gpu_check --part peers --llmc "$TMP/llmc" --again
check "a peer that doesn't build is said" fails "FAILED llm.c: status 1"
unset PYTHONPATH

if [ -x "$BUILD/bench/bench_gpt2" ]; then
    small=(--device cpu --layers 1 --batch 1 --ctx 8 --steps 1 --dtype f32)
    run "$BUILD/bench/bench_gpt2" "${small[@]}" --expect norm=cublaslt,conv=cudnn
    check "a kernel of another provider is a failure" fails "NOT only in cublaslt"
    check "so is one that didn't run" says "conv ran nowhere, NOT in cudnn"
    provider=$(sed -n 's/^norm ran in \([a-z0-9]*\), .*/\1/p' "$TMP/output")
    run "$BUILD/bench/bench_gpt2" "${small[@]}" --expect "norm=$provider"
    check "the right one is none" succeeds
fi

# Several GPUs; a part whose links hold, and one of which one breaks.
gpu_check --part ranks
check "one GPU has no ranks" grep -q "^n/a ranks: nvidia-smi -L shows 1 GPU" "$TMP/out/ranks.txt"
echo 'case "$*" in *gpt2*--ranks\ 1) echo "gpt2 bf16, batch 32 x 1024, 1 rank: 1 ms a step, 1000 tokens/s" ;;
*--ranks\ 2) echo "gpt2 bf16, batch 32 x 1024, 2 ranks: 1 ms a step, 1800 tokens/s" ;; esac' >"$TMP/bench_gpt2.does"
GPUS=3 gpu_check --part ranks --again
check "two of three have them" succeeds
check "losses are those of one" grep -q '^ok 2 GPUs, losses: 20 steps' "$TMP/out/ranks.txt"
check "so are recorded ones" grep -q '^ok 2 GPUs, recorded and eager: 20 steps' "$TMP/out/ranks.txt"
check "and those of ranks that see one GPU" grep -q '^ok 2 GPUs, one visible each: 20 steps' "$TMP/out/ranks.txt"
check "a rank is killed" grep -q '^ok 2 GPUs, a rank is killed' "$TMP/out/ranks.txt"
check "speeds stand beside one GPU's" grep -q "^2 GPUs: 1800 tokens/s, 90.0 % of 2 times one GPU's" "$TMP/out/ranks.txt"
check "not of more than there are" test -z "$(grep '4 GPUs' "$TMP/out/ranks.txt")"
rm "$TMP/bench_gpt2.does"
echo 'echo "knap: ranks 0, 1 share a GPU (PCI 0000:1b)"' >"$TMP/bench_collectives.does"
GPUS=2 gpu_check --part ranks --again
check "ranks that share a GPU are a failure" fails "FAILED collectives of two GPUs"
check "it says what to look at" says "LOOK AT NCCL: the same command with NCCL_DEBUG=INFO"
check "and what stands on it is left out" says "SKIPPED losses of 2 GPUs: it stands on 'collectives of two GPUs'"
rm "$TMP/bench_collectives.does"
FABRIC='    Fabric
        State : In Progress' GPUS=2 gpu_check --part ranks --again
check "a fabric that isn't ready is the first" says "LOOK AT the driver and nvidia-fabricmanager"

# The first part: what it finds broken stops the others.
FABRIC= gpu_check --part start
check "the first steps pass" succeeds
check "on NVIDIA's libraries" grep -q -- '--steps 2 --dtype bf16 --expect matmul=cublaslt,attention=cudnn' "$TMP/out/start.txt"
echo 'case "$*" in *--graph*) echo "steps aren'"'"'t recorded as a graph: no" ;; esac' >"$TMP/bench_gpt2.does"
gpu_check --part start,kernels --again
check "a step that isn't recorded is a failure" fails "FAILED a recorded step"
check "on which eager steps don't stand" grep -q '^done' "$TMP/out/kernels.txt"
echo 'case "$*" in *cublaslt*) echo "matmul ran in cuda, NOT only in cublaslt"; exit 1 ;; esac' >"$TMP/bench_gpt2.does"
gpu_check --part start,kernels,train --again
check "so is a library that doesn't run" fails "FAILED a step by NVIDIA's libraries: status 1"
check "it says what to look at" says "LOOK AT lines above that begin with 'knap: cu'"
check "and the parts after it are left out" says "SKIPPED train: it stands on 'a step by NVIDIA's libraries' of the part start"
rm "$TMP/bench_gpt2.does"
gpu_check --part start
check "once mended they go on" succeeds

gpu_check --part train
check "no text is no failure" succeeds
check "and is said" grep -q '^n/a Tiny Shakespeare' "$TMP/out/train.txt"

mv "$TMP/out/gpt2.txt" "$TMP/measured.txt"
gpu_check --predict --device H200 --batch 64
check "a step is predicted without a GPU" succeeds
check "each line says so" test "$(grep -vc '^predicted  ' "$TMP/output")" = 0
check "with its speed" grep -Eq '^predicted  [0-9]+ tokens/s, MFU [0-9.]+ %' "$TMP/output"
check "and that nothing was measured" says "nothing measured stands beside it: no results of this GPU were given"
cp "$TMP/measured.txt" "$TMP/out/gpt2.txt"
gpu_check --predict --device H200
check "saved results stand beside it" grep -Eq '^predicted  adamw .* 2.500 +2.9[0-9]  cuda  OFF$' "$TMP/output"
gpu_check --predict --device H200 --batch 4 --measured "$TMP/measured.txt"
check "those of the batch that was asked for" grep -Eq '^predicted  in all .* 16.000 ' "$TMP/output"
gpu_check --predict --device A100 --model gpt2-xl
check "where none is measured, the batch is one that fits" grep -q 'gpt2-xl bf16, batch 16 x 1024, on one A100' "$TMP/output"
gpu_check --predict --device A100 --model gpt2-xl --batch 32
check "a batch that doesn't fit is said to" grep -Eq 'GB of 80: it does NOT fit$' "$TMP/output"
gpu_check --predict --device H300
check "an unknown GPU is an error" fails "--device has no choice 'H300'; did you mean H100? (choices: A100|H100|H200|B200)"
gpu_check --predict --model gpt3
check "so is an unknown model" fails "there is no GPT 'gpt3'; there are gpt2, "
gpu_check --predict --measured "$TMP/none"
check "and a file that is not there" fails "--measured $TMP/none"
gpu_check --predict --ranks 2
check "several ranks are" fails "a step of one rank is predicted; leave --ranks away"
gpu_check --predict --help
check "--help has the options" says "--device NAME"
run "$ROOT/scripts/gpu-check" --part speed
check "an unknown part is an error" fails "no part 'speed'"
finish
