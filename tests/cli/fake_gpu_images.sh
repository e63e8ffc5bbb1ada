#!/usr/bin/env bash
# tests/cli/fake_gpu_images.sh: train_resnet --device cuda without a GPU, as fake_gpu.sh has it of train_gpt: the
# losses of the same command on the CPU, on one rank and two. (A step of the smallest vision transformer
# takes too long here: cuda_models_test.c has its kernels.)
. "$(dirname "$0")/lib.sh"
train=$BUILD/models/train_resnet
gpu=$BUILD/tests/gpu/train_resnet_fake
[ -x "$train" ] && [ -x "$gpu" ] || skip "build/tests/gpu/train_resnet_fake is not built: it needs nvcc"
export KNAP_COMM=local

# Images of 4 x 4 in three colours: 12 to train, 3 to test. The kernels are slow on the host.
python3 - "$TMP/set" <<'END'
import os, random, struct, sys, zlib
random.seed(3)
def chunk(kind, data):
    return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
def noisy(c):
    return min(255, max(0, c + random.randrange(-30, 30)))
def png(side, colour):
    rows = b''.join(b'\0' + bytes(noisy(c) for _ in range(side) for c in colour) for _ in range(side))
    return (b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', struct.pack('>IIBBBBB', side, side, 8, 2, 0, 0, 0)) +
            chunk(b'IDAT', zlib.compress(rows)) + chunk(b'IEND', b''))
for part, images in ('train', 4), ('test', 1):
    for k, name in enumerate(['red', 'green', 'blue']):
        os.makedirs(f'{sys.argv[1]}/{part}/{name}')
        for i in range(images):
            with open(f'{sys.argv[1]}/{part}/{name}/{i}.png', 'wb') as f:
                f.write(png(4, [200 if j == k else 60 for j in range(3)]))
END

column() { sed -E "s/.*\"$2\": ([^,}]*).*/\1/" "$1"; }
# near TOLERANCE COLUMN: the two logs agree within this part of a value, line by line.
near() {
    paste <(column "$TMP/cpu" "$2") <(column "$TMP/gpu" "$2") | awk -v tolerance="$1" '
        $1 != $2 { d = $1 - $2; if ($1 == "null" || $2 == "null" || NF != 2 || d * d > tolerance * tolerance * $1 * $1) { print; bad = 1 } }
        END { exit bad || NR == 0 }'
}
# same TEXT TOLERANCE: the last run and the CPU's wrote the same log.
same() {
    check "$1" succeeds
    for name in step loss val_loss lr grad_norm; do
        check "$1: the same $name" near "$2" $name
    done
}

tiny=(--data "$TMP/set" --image 4 --batch 2 --threads 1)
on_cpu() { rm -f "$TMP/cpu" "$TMP/gpu"; run timeout 300 "$train" "${tiny[@]}" "$@" --log "$TMP/cpu"; check "cpu: $*" succeeds; }
on_gpu() { run timeout 600 "$gpu" "${tiny[@]}" --device cuda --log "$TMP/gpu" "$@"; }

options=(--epochs 0.66 --lr 0.05 --ema 0.5 --mixup 0.4)
on_cpu "${options[@]}"
on_gpu "${options[@]}" --cuda-graph
# A recorded step has nothing that the host waits for.
check "four steps, the last of them replayed" says "step as a graph    from step 3 on"
same "averages of weights, mixed labels" 1e-4

options=(--epochs 0.66 --lr 0.01 --ranks 2 --sync-bn --recompute --optimizer adamw)
on_cpu "${options[@]}"
on_gpu "${options[@]}" --offload memory --stop-after 1 --out "$TMP/out"
check "two ranks stop" says "stopped after step 1 of 2; saved"
run timeout 600 "$gpu" --resume "$TMP/out" --ranks 2 --threads 1 --log "$TMP/gpu"
same "two ranks go on: one batch norm over both, recomputed, offloaded" 1e-4

options=(--epochs 0.16 --lr 0.01 --dtype bf16 --recompute)
on_cpu "${options[@]}"
on_gpu "${options[@]}"
same "bf16" 1e-2

finish
