#!/usr/bin/env bash
# tests/cli/train_resnet.sh: the trainer of image models: it learns, resumes to the same bits, shards to the same
# bits, draws its pictures, and refuses what doesn't fit.
. "$(dirname "$0")/lib.sh"

trainer=$BUILD/models/train_resnet
[ -x "$trainer" ] || skip "$trainer is not built"

# Ten classes of striped images in CIFAR-10's format, 40 images a file.
mkdir "$TMP/set"
python3 - "$TMP/set" <<'END'
import random, sys
random.seed(7)
def image(label):
    shift = random.randrange(32)
    planes = bytearray()
    for c in range(3):
        for y in range(32):
            for x in range(32):
                on = ((x if label % 2 else y) + shift) // (2 + label // 2) % 2
                planes.append(min(255, max(0, (200 if on else 60) + 20 * (c == label % 3) + random.randrange(-9, 10))))
    return bytes([label]) + bytes(planes)
for name in [f'data_batch_{i}.bin' for i in range(1, 6)] + ['test_batch.bin']:
    with open(f'{sys.argv[1]}/{name}', 'wb') as f:
        f.write(b''.join(image(i % 10) for i in range(40)))
with open(f'{sys.argv[1]}/batches.meta.txt', 'w') as f:
    f.write('\n'.join('across thin,down thin,c2,c3,c4,c5,c6,c7,c8,c9'.split(',')) + '\n')
END

train() { run timeout 300 "$trainer" --data "$TMP/set" --threads 1 --batch 20 "$@"; }
train_plain() { run timeout 300 "$trainer" --threads 1 "$@"; }

# log_of FILE: the values of its steps without times and memory.
log_of() { sed -E 's/"(images_per_s|step_ms)": [^,]*, //g; s/"peak_bytes": .*//' "$1"; }
same_logs() { diff <(log_of "$1") <(log_of "$2"); }

# ---- learning ----------------------------------------------------------------------------------

train --epochs 6 --lr 0.05 --pad 2 --no-flip --out "$TMP/run" --log "$TMP/log" --pictures "$TMP/pictures"
check "it trains" succeeds
check "the loss falls" loss_falls 1.8 3.5 2
check "it prints a table by class" says "among the likeliest five"
check "with the set's names" says "across thin"
check "and the time that it waited for images" says "waited for images:"
check "the log has the share of right ones" grep -q '"val_accuracy": 0\.' "$TMP/log"
for file in curves.svg confusion.svg mistakes.png mistakes.tsv; do
    check "$file is written" test -s "$TMP/pictures/$file"
done
check "SVG is XML" python3 -c "
import sys, xml.dom.minidom
for name in sys.argv[1:]: xml.dom.minidom.parse(name)" "$TMP/pictures/curves.svg" "$TMP/pictures/confusion.svg"

# ---- resuming and sharding ---------------------------------------------------------------------

small="--model resnet20 --epochs 1 --eval-every 1 --jitter 0.2 --erase 0.3 --mixup 0.4 --ema 0.9"
for ranks in 1 2; do
    # shellcheck disable=SC2086
    {
        train $small --ranks $ranks --out "$TMP/whole$ranks" --log "$TMP/whole.log"
        check "$ranks ranks: a whole run" succeeds
        train $small --ranks $ranks --out "$TMP/half$ranks" --log "$TMP/half.log" --stop-after 2
        check "$ranks ranks: a stopped one" says "stopped after step 2"
        train --ranks $ranks --resume "$TMP/half$ranks" --log "$TMP/half.log"
        check "$ranks ranks: resumed" succeeds
        check "$ranks ranks: the same bits" same_logs "$TMP/whole.log" "$TMP/half.log"
        check "$ranks ranks: the same model" same_save "$TMP/whole$ranks/model.safetensors" "$TMP/half$ranks/model.safetensors"
    }
done
for more in "--strategy no_shard" "--layout per_param" "--strategy shard_grad_op --layout ragged" "--workers 2"; do
    # shellcheck disable=SC2086
    train $small --ranks 2 $more --out "$TMP/other" --overwrite
    check "2 ranks $more: the same model" same_save "$TMP/whole2/model.safetensors" "$TMP/other/model.safetensors"
done
train --epochs 0.2 --model vit_cifar --optimizer adamw --dtype bf16 --recompute --cutmix 1 --schedule cosine
check "a vision transformer in bf16" succeeds
train --epochs 0.2 --model resnet18 --optimizer muon --schedule step --sync-bn --ranks 2 --eval-every 0 --accum 2
check "a ResNet-18 with muon and one batch over ranks" succeeds

# ---- predicting --------------------------------------------------------------------------------

predict=$BUILD/models/predict
run timeout 60 "$predict" --from "$TMP/run" "$TMP/pictures/mistakes.png" --top 2 "$TMP/pictures/mistakes.png"
check "predict prints classes" succeeds
check "two an image" [ "$(grep -c ' %  ' "$TMP/output")" = 4 ]
check "and the set's names" grep -Eq '%  (across thin|down thin|c[2-9])$' "$TMP/output"
run timeout 60 "$predict" --from "$TMP/run" "$TMP/log" "$TMP/none.png" "$TMP/pictures/mistakes.png"
check "a file that is no image is named" fails "$TMP/log"
check "and one that isn't there" fails "none.png"
check "the others are predicted" says " %  "
run "$predict" --from "$TMP/run"
check "without an image" fails "give one image or several"
run "$predict" "$TMP/pictures/mistakes.png"
check "without a model" fails "give --from DIR"
run "$predict" --from "$TMP/set" x.png
check "a folder without a checkpoint" fails "holds no checkpoint"
run "$predict" --help
check "predict --help lists the options" says "--top N"

# ---- a look before training --------------------------------------------------------------------

train --grid "$TMP/grid.png"
check "--grid prints labels" says "down thin"
check "and writes a PNG" test -s "$TMP/grid.png"
train --summary --epochs 0.1 --eval-every 0
check "--summary lists the modules" says "resnet_block"
run "$trainer" --help
check "--help lists the options" says "--sync-bn"

# ---- what doesn't fit --------------------------------------------------------------------------

refuses() {
    local text=$1 how=train
    shift
    [[ " $* " != *" --"@(batch|data)" "* ]] || how=train_plain
    $how "$@"
    check "refused: $*" fails "$text"
}
refuses "--patch is an option of a vision transformer" --patch 4
refuses "--stem is an option of a residual net" --model vit_cifar --stem small
refuses "--pad is for --augment crop" --augment none --pad 2
refuses "give an even --batch" --data "$TMP/set" --batch 3 --mixup 0.2
refuses "use a smaller --batch" --data "$TMP/set" --batch 500
refuses "--min-lr 1 is above --lr" --min-lr 1
refuses "patches of 5 don't divide images of 32 rows" --model vit_cifar --patch 5
refuses "a folder for each class" --data "$TMP"
refuses "--resume $TMP/run" --out "$TMP/run" --epochs 1
refuses "cannot make the folder" --pictures /dev/null/x --epochs 0.1
truncate -s 30000 "$TMP/set/data_batch_3.bin"
refuses "data_batch_3.bin" --epochs 1
finish
