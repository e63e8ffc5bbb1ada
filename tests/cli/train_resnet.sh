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

# Folders of PNG files: "bad" with one cut short in each part, "names" with other classes to test than to train,
# "odd" with names that JSON, XML and terminals don't take as they are.
python3 - "$TMP" <<'END'
import os, struct, sys, zlib
def chunk(kind, data):
    return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
def png(side, grey):
    rows = (b'\0' + bytes([grey]) * side) * side
    return (b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', struct.pack('>IIBBBBB', side, side, 8, 0, 0, 0, 0)) +
            chunk(b'IDAT', zlib.compress(rows)) + chunk(b'IEND', b''))
def folder(name, part, classes, images=4):
    for k, c in enumerate(classes):
        path = os.path.join(os.fsencode(f'{sys.argv[1]}/{name}/{part}'), c)
        os.makedirs(path)
        for i in range(images):
            with open(path + b'/%d.png' % i, 'wb') as f:
                f.write(png(9 + i, 40 * k + i)[:40 if name == 'bad' and i == 2 and k == 1 else None])
for part in 'train', 'test':
    folder('bad', part, [b'a', b'b'])
    folder('odd', part, [b'caf\xe9', b'<&>"\'', b'tab\there', b'x' + b'\xc3\xa9' * 60])
folder('names', 'train', [b'cat', b'dog'])
folder('names', 'test', [b'cow', b'dog'])
END

# log_of FILE: the values of its steps without times and memory.
log_of() { sed -E 's/"(images_per_s|step_ms)": [^,]*, //g; s/"peak_bytes": .*//' "$1"; }
same_logs() { diff <(log_of "$1") <(log_of "$2"); }

# ---- learning ----------------------------------------------------------------------------------

train --epochs 6 --lr 0.05 --pad 2 --no-flip --out "$TMP/run" --log "$TMP/log" --pictures "$TMP/pictures" \
    --keep-best --export "$TMP/exported"
check "it trains" succeeds
check "the loss falls" loss_falls 1.8 3.5 2
cp "$TMP/output" "$TMP/learnt"
check "it prints a table by class" says "among the likeliest five"
check "with the set's names" says "across thin"
check "and the time that it waited for images" says "waited for images:"
check "the log has the share of right ones" grep -q '"val_accuracy": 0\.' "$TMP/log"
for file in curves.svg confusion.svg mistakes.svg mistakes.png mistakes.tsv; do
    check "$file is written" test -s "$TMP/pictures/$file"
done
check "SVG is XML" python3 -c "
import sys, xml.dom.minidom
for name in sys.argv[1:]: xml.dom.minidom.parse(name)" "$TMP"/pictures/*.svg

train --resume "$TMP/run" --out "$TMP/longer" --epochs 7 --log "$TMP/log" --pictures "$TMP/longer.pictures"
check "a longer run draws the whole curve" [ "$(grep -o 'points="[^"]*' "$TMP/longer.pictures/curves.svg" | head -1 | grep -o , | wc -l)" = 7 ]

train_plain --resume "$TMP/run/best" --data "$TMP/set" --eval-only
check "--eval-only finds the best one's share" says "$(sed -n 's/^best: step .* with \(.*\) right, kept.*/\1 right/p' "$TMP/learnt")"
check "and its classes" says "across thin"
train --resume "$TMP/run" --eval-only --pictures "$TMP/none"
check "which draws nothing" fails "--eval-only and --pictures contradict each other"
train --epochs 6 --lr 1 --schedule constant --patience 1 --log "$TMP/early" --seed 2
check "--patience ends it" says "without a better one"

# ---- resuming and sharding ---------------------------------------------------------------------

small="--model resnet20 --epochs 1 --eval-every 1 --keep-best --jitter 0.2 --erase 0.3 --mixup 0.4 --ema 0.9"
for ranks in 1 2; do
    # shellcheck disable=SC2086
    {
        train $small --ranks $ranks --out "$TMP/whole$ranks" --log "$TMP/whole.log" --pictures "$TMP/whole"
        check "$ranks ranks: a whole run" succeeds
        train $small --ranks $ranks --out "$TMP/half$ranks" --log "$TMP/half.log" --stop-after 2
        check "$ranks ranks: a stopped one" says "stopped after step 2"
        train --ranks $ranks --resume "$TMP/half$ranks" --log "$TMP/half.log" --pictures "$TMP/half"
        check "$ranks ranks: resumed" succeeds
        check "$ranks ranks: the same curve" cmp "$TMP/whole/curves.svg" "$TMP/half/curves.svg"
        check "$ranks ranks: the same bits" same_logs "$TMP/whole.log" "$TMP/half.log"
        check "$ranks ranks: the same model" same_model "$TMP/whole$ranks" "$TMP/half$ranks"
    }
done
for more in "--strategy no_shard" "--layout per_param" "--strategy shard_grad_op --layout ragged" "--workers 2"; do
    # shellcheck disable=SC2086
    train $small --ranks 2 $more --out "$TMP/other" --overwrite
    check "2 ranks $more: the same model" same_model "$TMP/whole2" "$TMP/other"
done
train --epochs 0.2 --model vit_cifar --optimizer adamw --dtype bf16 --recompute --cutmix 1 --schedule cosine
check "a vision transformer in bf16" succeeds
train --epochs 0.2 --model resnet20 --optimizer muon --schedule step --sync-bn --ranks 2 --eval-every 0 --accum 2
check "a ResNet-20 with muon and one batch over ranks" succeeds
train --epochs 0.1 --model resnet18 --eval-every 0
check "a ResNet-18" succeeds

# ---- the best checkpoint -------------------------------------------------------------------------

# evaluation DIR: the step and the share of right ones that the checkpoint there was kept for.
evaluation() {
    python3 -c 'import json, sys; s = json.load(open(sys.argv[1] + "/state.json")); print(s["step"], round(1 - s["score"], 6))' "$1"
}
best_of_log() {
    python3 -c 'import json, sys; e = [json.loads(l) for l in open(sys.argv[1])]; e = [x for x in e if "val_accuracy" in x and x["step"] <= 60]
best = max(e, key=lambda x: (x["val_accuracy"], -x["step"])); print(best["step"], round(best["val_accuracy"], 6))' "$1"
}
check "the best evaluation's checkpoint is kept" [ "$(evaluation "$TMP/run/best")" = "$(best_of_log "$TMP/log")" ]
check "a resumed run keeps the same one" same_training "$TMP/whole2/best" "$TMP/half2/best"
cp -r "$TMP/run" "$TMP/better"
edit_state "$TMP/better/best" "s['score'] = -1.0"
kept=$(readlink "$TMP/better/best") before=$(cksum "$TMP"/better/best/*.json "$TMP"/better/best/*/*)
train --resume "$TMP/better" --epochs 8 --keep 1
check "a run that goes on names the best one" says "with 200.00 % right, kept in $TMP/better/best"
check "and no worse one replaces it" [ "$(readlink "$TMP/better/best")" = "$kept" ]
check "nor changes it" [ "$(cksum "$TMP"/better/best/*.json "$TMP"/better/best/*/*)" = "$before" ]
check "one newer checkpoint is there" test "$(cd "$TMP/better" && echo step-*)" = "$kept $(basename "$(newest "$TMP/better")")"
train --epochs 0.1 --eval-every 1 --keep-best --out "$TMP/better" --overwrite
check "one of another run doesn't count" [ "$(step_of "$TMP/better/best")" = 1 ]

# ---- exports and weights to begin with -----------------------------------------------------------

check "the export's classes are the set's" python3 -c "
import json, sys
c = json.load(open(sys.argv[1]))
assert c['architecture'] == 'knap_resnet20' and c['label_names'][:2] == ['across thin', 'down thin'], c
assert c['pretrained_cfg']['input_size'] == [3, 32, 32] and c['num_classes'] == 10, c" "$TMP/exported/config.json"
for from in exported run/best; do
    run timeout 60 "$BUILD/models/predict" --from "$TMP/$from" --logits "$TMP/logits" "$TMP/pictures/mistakes.png"
    check "predict opens $from" succeeds
    mv "$TMP/logits" "$TMP/logits.${from%/*}"
done
check "both are the best model" cmp "$TMP/logits.exported" "$TMP/logits.run"
run timeout 60 "$BUILD/models/predict" --from "$TMP/exported/model.safetensors" --model resnet20 --top 1 --export "$TMP/half" \
    --dtype bf16 "$TMP/pictures/mistakes.png"
check "a file of tensors, and its export in bf16" says "exported to $TMP/half"
check "its classes have numbers" grep -q '%  class [0-9]$' "$TMP/output"
train_plain --data "$TMP/odd" --batch 2 --epochs 2 --init "$TMP/half" --out "$TMP/tuned" --ranks 2 --stop-after 2
check "a run begins with weights" says "the last layer is new: 4 classes, not 10"
train_plain --resume "$TMP/tuned" --ranks 2 --export "$TMP/tuned.export"
check "and goes on without them" says "exported to $TMP/tuned.export: the last model"
train --init "$TMP/run" --epochs 0.1 --eval-every 1 --lr 0.1
check "a run's checkpoint has weights, too" says "its last layer too"
check "which know the set" awk '{ for (i = 3; i <= NF; i++) if ($i == "right" && $(i - 1) == "%") right = $(i - 2) }
    END { exit !(right > 30) }' "$TMP/output"

# ---- folders -----------------------------------------------------------------------------------

folder="--batch 2 --image 8 --epochs 0.5"
# shellcheck disable=SC2086
{
    train_plain --data "$TMP/bad" $folder --ranks 2 --skip-bad --pictures "$TMP/bad.pictures"
    check "--skip-bad takes other images" succeeds
    check "and says so" says "test images that can't be read: "
    train_plain --data "$TMP/bad" --batch 1 --image 8 --epochs 0.2 --ranks 2 --no-flip
    check "without it one of either rank is an error, at once" fails "test/b/2.png: libpng says"
    train_plain --data "$TMP/odd" $folder --out "$TMP/odd.run" --pictures "$TMP/odd.pictures"
    check "names of any bytes" succeeds
    check "in XML and UTF-8" python3 -c "
import sys, xml.dom.minidom
xml.dom.minidom.parse(sys.argv[1])
for line in open(sys.argv[2], encoding='utf-8'): assert line.count('\t') == 3, line
for file in sys.argv[3:]: open(file, encoding='utf-8').read()
" "$TMP/odd.pictures/confusion.svg" "$TMP/odd.pictures/mistakes.tsv" "$TMP/output"
    train_plain --data "$TMP/names" $folder
    check "other classes to test than to train" fails "is cat, of the test images cow"
    train_plain --data "$TMP/odd" --batch 16 --image 1 --epochs 1
    check "a single step of a cycle, of one pixel an image" succeeds
}

# The checkpoint names the set that was found, so that a set that comes later can't take its place.
HOME="$TMP" KNAP_DATA="$TMP/nowhere" train_plain --batch 2 --epochs 0.001 --eval-every 0 --stop-after 1 --out "$TMP/found"
check "without --data and CIFAR-10 it draws images" says "drawn by a formula"
check "and a resumed run does so, too" grep -q '"data": "shapes"' "$(newest "$TMP/found")/state.json"

# Without batch norms one rank of two micro-batches trains the same model as two ranks, and so the
# evaluation of all images must count the same, whichever rank saw an image.
for ranks in 1 2; do
    train --model vit_cifar --optimizer adamw --epochs 0.4 --ranks $ranks --accum $((3 - ranks)) --pictures "$TMP/seen$ranks"
    check "$ranks ranks evaluate" says "among the likeliest five"
    sed -n '/^class /,/^all /p' "$TMP/output" >"$TMP/seen$ranks/table"
done
check "all images are counted once" grep -q '^all  *40 ' "$TMP/seen2/table"
for file in table mistakes.tsv confusion.svg; do
    check "2 ranks see the same $file" cmp "$TMP/seen1/$file" "$TMP/seen2/$file"
done

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
run timeout 60 "$predict" --from "$TMP/run" --data "$TMP/set" --count 5 --top 1 --save "$TMP/saved"
check "predict names test images of a set" succeeds
check "beside their classes" grep -Eq '/saved/4.png: c4$' "$TMP/output"
check "and counts the right ones" grep -Eq '^right: [0-5] of 5, ' "$TMP/output"
cp "$TMP/output" "$TMP/of_set"
run timeout 60 "$predict" --from "$TMP/run" --top 1 "$TMP/saved"/[0-4].png
check "its files have the pixels" diff <(grep ' %  ' "$TMP/of_set") <(grep ' %  ' "$TMP/output")
run timeout 60 "$predict" --from "$TMP/run" --data "$TMP/set" --top 1
check "all of them: as the trainer counted" says "right: $(awk '/^all /{print $3*$2/100}' "$TMP/learnt") of 40, "
run "$predict" --from "$TMP/run" --data "$TMP/nowhere"
check "a set that isn't there" fails "nowhere"
run "$predict" --from "$TMP/run" --save "$TMP/saved" "$TMP/pictures/mistakes.png"
check "--save without a set" fails "leave it out"
run "$predict" --from "$TMP/run" --data "$TMP/set" --save "$TMP/log"
check "a folder that can't be made" fails "$TMP/log"
run "$predict" --from "$TMP/run"
check "without an image" fails "give one image or several"
run "$predict" "$TMP/pictures/mistakes.png"
check "without a model" fails "give --from PATH"
run "$predict" --from "$TMP/set" x.png
check "a folder without a checkpoint" fails "holds no model"
run "$predict" --help
check "predict --help lists the options" says "--top N"

# ---- a look before training --------------------------------------------------------------------

train --grid "$TMP/grid.png"
check "--grid prints labels" says "down thin"
check "and writes a PNG" test -s "$TMP/grid.png"
train --summary --epochs 0.1 --eval-every 0 --momentum 0
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
run timeout 60 "$BUILD/models/train_gpt" --resume "$TMP/run"
check "refused: another program's checkpoint" fails "another one saved it"
refuses "--patch is an option of a vision transformer" --patch 4
refuses "--stem is an option of a residual net" --model vit_cifar --stem small
refuses "--pad is for --augment crop" --augment none --pad 2
refuses "give an even --batch" --data "$TMP/set" --batch 3 --mixup 0.2
refuses "use a smaller --batch" --data "$TMP/set" --batch 500
refuses "--min-lr 1 is above --lr" --min-lr 1
refuses "patches of 5 don't divide images of 32 rows" --model vit_cifar --patch 5
refuses "a folder for each class" --data "$TMP"
refuses "holds a resnet20, not a resnet32" --init "$TMP/run" --model resnet32
refuses "has small; leave it out" --init "$TMP/run" --stem large
refuses "cannot open $TMP/none" --init "$TMP/none"
refuses "resume" --init "$TMP/run" --resume "$TMP/run"
refuses "--keep-best is for --out" --keep-best
refuses "give --eval-every above 0 as well" --keep-best --eval-every 0 --out "$TMP/never"
refuses "holds the checkpoint of a run" --export "$TMP/run" --epochs 0.1
run_step=$(basename "$(newest "$TMP/run")")
for at in "$run_step/model" step-00000009 step-00000009.damaged best/more; do
    refuses "choose another folder" --export "$TMP/run/$at" --epochs 0.1
    check "nothing is made there ($at)" test -z "$(find "$TMP/run" -name 'model.safetensors' -o -name 'step-00000009*' -o -name more)"
done
refuses "choose another folder" --pictures "$TMP/run/step-00000009" --epochs 0.1
check "nor a folder for pictures" test ! -e "$TMP/run/step-00000009"
refuses "saves its checkpoints there" --export "$TMP/same" --out "$TMP/same" --epochs 0.1
refuses "choose another folder" --export "$TMP/same/best" --out "$TMP/same" --keep-best --epochs 0.1
refuses "--resume $TMP/run" --out "$TMP/run" --epochs 1
refuses "cannot make the folder" --pictures /dev/null/x --epochs 0.1
refuses "a file that is no folder lies there" --pictures "$TMP/log" --epochs 0.1
refuses "give a larger --epochs" --resume "$TMP/run" --epochs 6
refuses "so that 1 to 9 of these 10 steps" --epochs 1 --warmup 10
refuses "so that 1 to 9 of these 10 steps" --epochs 1 --warmup 0
refuses "--warmup 11 is more than the 10 steps" --epochs 1 --warmup 11 --schedule cosine
refuses "--nesterov is for --optimizer sgd; give that as well" --optimizer adamw --nesterov
refuses "--nesterov needs a --momentum above 0" --nesterov --momentum 0
refuses "--beta2 is for --optimizer adamw or muon" --beta2 0.9
refuses "--min-lr is for --schedule one_cycle or cosine" --schedule step --min-lr 0.01
refuses "give 0 or more, or -1" --weight-decay -0.5
mkfifo "$TMP/pipe"
refuses "a device or a pipe" --grid "$TMP/pipe"
truncate -s 30000 "$TMP/set/data_batch_3.bin"
refuses "data_batch_3.bin" --epochs 1
finish
