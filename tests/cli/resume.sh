#!/usr/bin/env bash
# tests/cli/resume.sh: a run that was stopped and goes on by the command that it printed is the undisturbed one, whatever
# its options: each option of each trainer, at another value than its default. With other ranks or batches it goes on
# with the same samples; with other data, or names, it says so.
. "$(dirname "$0")/lib.sh"
gpt=$BUILD/models/train_gpt
images=$BUILD/models/train_resnet
[ -x "$gpt" ] && [ -x "$images" ] || skip "build/models/train_gpt or train_resnet is not built"

for _ in $(seq 60); do echo "the quick brown fox jumps over the lazy dog"; done >"$TMP/text"
small_set "$TMP/set"

# log_of FILE: the values of its steps without times and memory.
log_of() { sed -E 's/"[a-z]*(_per_s|_ms)": [^,]*, //g; s/"peak_bytes": .*//' "$1"; }
record_of() { python3 -c 'import json, sys; print(json.dumps(json.load(open(sys.argv[1] + "/state.json"))["record"], sort_keys=True, indent=1))' "$(newest "$1")"; }

covered=" help version config eval-only out log tensorboard plot resume overwrite stop-after" # by other tests

# resumes NAME STOP PROGRAM OPTIONS...: whole and in two parts, in folders of their own. Options in MORE are those of the
# first part alone.
resumes() {
    local name=$1 stop=$2 word go
    shift 2
    for word in "$@" ${MORE:-}; do
        [[ $word != --* ]] || covered+=" ${word#--}"
    done
    rm -rf "$TMP/whole" "$TMP/parts"
    mkdir -p "$TMP/whole/store" "$TMP/parts/store"
    cd "$TMP/whole" || exit 1
    # shellcheck disable=SC2086
    run timeout 300 "$@" ${MORE:-} --out run --log "the log"
    check "$name: the whole" succeeds
    cd "$TMP/parts" || exit 1
    # shellcheck disable=SC2086
    run timeout 300 "$@" ${MORE:-} --out run --log "the log" --stop-after "$stop"
    check "$name: a part" says "stopped after step $stop"
    go=$(sed -n 's/.*To go on: //p' "$TMP/output")
    run eval "timeout 300 $go"
    check "$name: the rest" succeeds
    check "$name: nothing changed" test -z "$(grep "when it was saved" "$TMP/output")"
    check "$name: the same log" diff <(log_of "$TMP/whole/the log") <(log_of "$TMP/parts/the log")
    check "$name: the same state" same_training "$TMP/whole/run" "$TMP/parts/run"
    check "$name: the same record" diff <(record_of "$TMP/whole/run") <(record_of "$TMP/parts/run")
    [[ "$*" != *"--save-every 1 "* ]] || check "$name: the same checkpoints" diff <(ls "$TMP/whole/run") <(ls "$TMP/parts/run")
    cd "$ROOT" || exit 1
}

# covers PROGRAM EXEMPT...: every option of --help was in some run.
covers() {
    local option missing="" program=$1
    shift
    covered+=" $*"
    for option in $("$program" --help | sed -n 's/^  --\([a-z0-9-]*\).*/\1/p'); do
        [[ "$covered " == *" $option "* || "$covered " == *" no-$option "* ]] || missing+=" $option"
    done
    check "$(basename "$program"): no option was left out" test -z "$missing" || echo "#   $missing"
    covered=" help version config eval-only out log tensorboard plot resume overwrite stop-after"
}

cuda="device deterministic cuda-graph"
text=(--data "$TMP/text" --tokenizer byte --ctx 8 --batch 3 --eval-every 2)

resumes "a GPT" 3 "$gpt" "${text[@]}" --layers 1 --heads 2 --embd 16 --no-bias --dropout 0.1 --recompute --dtype bf16 \
    --reduce-dtype bf16 --accum 2 --no-sync --steps 6 --optimizer muon --lr 2e-3 --min-lr 1e-4 --warmup 2 --weight-decay 0.2 \
    --beta1 0.8 --beta2 0.95 --patience 50 --ema 0.8 --clip 0.5 --clip-norm inf --seed 7 --eval-steps 2 --sample-every 2 --sample-tokens 3 \
    --prompt "the 'fox'" --save-every 1 --keep 0 --keep-best --async-save --strategy shard_grad_op --layout ragged --wrap size \
    --wrap-size 500 --keep-whole-below 20 --prefetch post --max-gathers 3 --max-reductions 2 --reshard never \
    --keep-gathered --offload store --timeout 250 --ranks 2 --threads 1
MORE=--summary resumes "a mesh" 3 "$gpt" "${text[@]}" --layers 2 --heads 1 --embd 8 --hook bf16_stochastic --accum 2 --steps 5 \
    --strategy hybrid_shard --replicas 2 --shards 2 --all-reduce-last --forward-prefetch --check --ranks 4 --threads 1
resumes "a Llama" 2 "$gpt" "${text[@]}" --model llama --layers 1 --heads 2 --embd 16 --kv-heads 1 --hidden 24 --no-tied \
    --rope-base 5000 --rope-factor 2 --rope-original 4 --f32-products bf16 --steps 4 --threads 1
resumes "rates left open" 3 "$gpt" "${text[@]}" --layers 1 --heads 1 --embd 8 --steps 40 --threads 1
MORE="--init $ROOT/tests/models/imported/llama_rope" resumes "a model of transformers" 2 "$gpt" "${text[@]}" --steps 4 --threads 1
mkdir "$TMP/shards"
for i in 1 2 3; do head -c $((900 * i)) "$TMP/text" >"$TMP/shards/$i.txt"; done
resumes "a folder of texts" 2 "$gpt" --tokenizer byte --ctx 8 --batch 3 --data "$TMP/shards" --val-data "$TMP/text" --layers 1 --heads 1 --embd 8 --steps 4 --threads 1
for n in $(seq 20); do echo "{\"words\": \"$(head -c $((2 * n)) "$TMP/text")\"}"; done >"$TMP/lines"
resumes "masked documents" 2 "$gpt" --data "$TMP/lines" --field words --end "<e>" --mask-documents --ctx 8 --batch 3 --layers 1 \
    --heads 1 --embd 8 --steps 4 --threads 1
for n in $(seq 20); do echo "{\"prompt\": \"$n\", \"answer\": \"$(head -c $((2 * n)) "$TMP/text")\"}"; done >"$TMP/talks"
for how in "" --mask-documents; do
    # shellcheck disable=SC2086
    resumes "conversations $how" 3 "$gpt" --data "$TMP/talks" --tokenizer byte --template llama2 --ctx 60 --batch 2 --accum 2 \
        --layers 1 --heads 1 --embd 8 --steps 11 --eval-every 2 --threads 1 $how
done
covers "$gpt" $cuda fit fault explain record record-steps record-values other-data init vocab separator

pictures=(--data "$TMP/set" --batch 4 --threads 1)
check "weights to begin with" "$images" "${pictures[@]}" --model resnet20 --epochs 0.1 --eval-every 0 --export "$TMP/weights"
MORE="--init $TMP/weights --summary" resumes "a residual net" 3 "$images" "${pictures[@]}" --image 16 --pad 2 --no-flip --jitter 0.3 \
    --erase 0.4 --mixup 0.2 --cutmix 0.3 --smoothing 0.1 --workers 2 --model resnet20 --sync-bn --recompute \
    --accum 2 --no-sync --epochs 1.5 --lr 0.01 --schedule cosine --min-lr 1e-4 --warmup 2 --momentum 0.8 --no-nesterov \
    --weight-decay 1e-3 --ema 0.8 --no-ema-buffers --clip 0.5 --clip-norm 1 --seed 7 --eval-every 0 --skip-bad --export exported \
    --save-every 1 --keep 3 --dtype bf16 --reduce-dtype bf16 --layout per_param --ranks 2
check "a residual net: the same export" cmp "$TMP"/{whole,parts}/exported/model.safetensors
resumes "a vision transformer" 5 "$images" "${pictures[@]}" --model vit_cifar --patch 8 --dropout 0.1 --augment resized \
    --f32-products bf16 --optimizer adamw --beta1 0.8 --beta2 0.95 --patience 50 --epochs 0.8 --keep-best --async-save --pictures shown
check "a vision transformer: the same curves" cmp "$TMP"/{whole,parts}/shown/curves.svg
for schedule in one_cycle step constant; do
    resumes "a ResNet-20, $schedule, with its rate left open" 4 "$images" "${pictures[@]}" --schedule $schedule --epochs 0.6
done
resumes "a ResNet-20 at another rate than that left open" 4 "$images" "${pictures[@]}" --lr 0.01 --stem small --epochs 0.6
covers "$images" $cuda fit fault explain record record-steps record-values grid other-data hook timeout strategy replicas shards wrap wrap-size keep-whole-below prefetch forward-prefetch \
    max-gathers max-reductions reshard keep-gathered all-reduce-last offload check # rows of train_gpt's

# ---- other ranks, other batches --------------------------------------------------------------------

# near LOG LOG: they end at the same sample, and have about the same rate after each.
near() { python3 - "$1" "$2" <<'END'
import json, sys
rate = lambda path: {l['samples']: l['lr'] for l in map(json.loads, open(path))}
a, b = rate(sys.argv[1]), rate(sys.argv[2])
assert max(a) == max(b), (max(a), max(b))
top = max(a.values())
for n in a.keys() & b.keys():
    assert abs(a[n] - b[n]) < 0.15 * top, (n, a[n], b[n])
END
}

# continues NAME SAMPLES PROGRAM OPTIONS... -- OPTIONS...: stopped after step 4, then with the options behind --.
continues() {
    local name=$1 samples=$2 first=() then=()
    shift 2
    while [ "$1" != -- ]; do first+=("$1"); shift; done
    shift
    then=("$@")
    rm -rf "$TMP/whole" "$TMP/parts"
    check "$name: undisturbed" "${first[@]}" --log "$TMP/whole"
    rm -f "$TMP/parts.log"
    check "$name: a part" "${first[@]}" --out "$TMP/parts" --log "$TMP/parts.log" --stop-after 4
    run "${first[0]}" --resume "$TMP/parts" --threads 1 --log "$TMP/parts.log" "${then[@]}"
    check "$name: the rest" succeeds
    check "$name: it tells its steps" says "rows a step; "
    check "$name: as many samples" test "$(tail -n 1 "$TMP/parts.log" | sed 's/.*"samples": \([0-9]*\),.*/\1/')" = "$samples"
    check "$name: the same rates" near "$TMP/whole" "$TMP/parts.log"
}
words=("$gpt" "${text[@]}" --layers 1 --heads 1 --embd 8 --warmup 2 --threads 1)
continues "2 ranks, then 1" 72 "${words[@]}" --steps 12 --ranks 2 -- --ranks 1
continues "1 rank, then 2" 36 "${words[@]}" --steps 12 -- --ranks 2
continues "a larger batch" 36 "${words[@]}" --steps 12 -- --batch 6
continues "images, 2 ranks, then 1" 96 "$images" "${pictures[@]}" --epochs 1.9 --ranks 2 -- --ranks 1
continues "images, 1 rank, then 2" 96 "$images" "${pictures[@]}" --epochs 1.9 -- --ranks 2
continues "images, a batch that doesn't divide" 96 "$images" "${pictures[@]}" --epochs 1.9 -- --batch 5

# The same samples: with a rate of next to nothing losses are functions of the samples, so the mean over the same ones is
# the same, however they are cut into steps.
still=("$gpt" "${text[@]}" --layers 1 --heads 1 --embd 8 --lr 1e-30 --warmup 0 --steps 12 --threads 1)
mean() { python3 -c 'import json, sys
lines = [json.loads(l) for l in open(sys.argv[1])]
print("%.5f" % (sum(l["loss"] * (l["samples"] - p) for l, p in zip(lines, [0] + [l["samples"] for l in lines])) / lines[-1]["samples"]))' "$1"; }
check "without learning" "${still[@]}" --log "$TMP/still"
for more in "--batch 1" "--batch 6" "--ranks 3 --batch 1" "--ranks 2 --accum 2 --batch 1"; do
    rm -rf "$TMP/moved"*
    check "four steps" "${still[@]}" --log "$TMP/moved.log" --out "$TMP/moved" --stop-after 4
    # shellcheck disable=SC2086
    check "the rest with $more" "$gpt" --resume "$TMP/moved" --threads 1 --log "$TMP/moved.log" $more
    check "$more: the same samples" test "$(mean "$TMP/still")" = "$(mean "$TMP/moved.log")"
done

# ---- other data, other names -----------------------------------------------------------------------

# changed NAME SAYS PROGRAM OPTIONS...: refused, and accepted by --other-data, which the table tells.
changed() {
    local name=$1 says=$2
    shift 2
    run "$@"
    check "$name is refused" fails "$says"
    run "$@" --other-data
    check "$name is accepted by name" succeeds
    check "$name is told" says "other data"
}
cp "$TMP/text" "$TMP/longer"
check "a text" "$gpt" --data "$TMP/longer" --ctx 8 --layers 1 --heads 1 --embd 8 --steps 4 --out "$TMP/read" --stop-after 2
cp "$TMP/longer" "$TMP/moved.text"
run "$gpt" --resume "$TMP/read" --data "$TMP/moved.text" --out "$TMP/elsewhere"
check "the same text elsewhere will do" succeeds
echo "the quick brown fox" >>"$TMP/longer"
changed "a longer text" "these are 2394 + 266 tokens" "$gpt" --resume "$TMP/read"
changed "data to validate with" "these are" "$gpt" --resume "$TMP/read" --data "$TMP/moved.text" --val-data "$TMP/text" --steps 8 --out "$TMP/read2"
run "$gpt" --resume "$TMP/read" --tokenizer byte --steps 9
check "another tokenizer is refused" fails "the training was begun with char"

python3 - "$TMP/folder" <<'END'
import os, random, struct, sys, zlib
random.seed(1)
def chunk(kind, data):
    return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
for part in 'train', 'test':
    for k, name in enumerate(['bird', 'cat', 'dog']):
        os.makedirs(f'{sys.argv[1]}/{part}/{name}')
        for i in range(4):
            rows = b''.join(b'\0' + bytes(random.randrange(60 * k, 60 * k + 60) for _ in range(9)) for _ in range(9))
            with open(f'{sys.argv[1]}/{part}/{name}/{i}.png', 'wb') as f:
                f.write(b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', struct.pack('>IIBBBBB', 9, 9, 8, 0, 0, 0, 0)) +
                        chunk(b'IDAT', zlib.compress(rows)) + chunk(b'IEND', b''))
END
classes=("$images" --data "$TMP/folder" --image 8 --batch 3 --epochs 1 --eval-every 0 --threads 1)
check "a folder of images" "${classes[@]}" --out "$TMP/seen" --stop-after 2
for part in train test; do mv "$TMP/folder/$part/bird" "$TMP/folder/$part/robin"; done
changed "a class of another name" "class 0 is cat here and bird in" "$images" --resume "$TMP/seen" --out "$TMP/seen2" --overwrite
for part in train test; do mv "$TMP/folder/$part/robin" "$TMP/folder/$part/bird"; done
cp "$TMP/folder/train/cat/0.png" "$TMP/folder/train/cat/9.png"
changed "another image" "these are 13 + 12 images of 3 classes" "$images" --resume "$TMP/seen" --out "$TMP/seen3" --overwrite

# ---- the context -------------------------------------------------------------------------------------

# A model with positions that were never trained writes with those that were.
check "a short context" "$gpt" --model stories15m --data "$TMP/text" --tokenizer byte --ctx 6 --batch 1 --steps 1 --eval-every 0 \
    --out "$TMP/short"
write() { "$BUILD/models/generate" --from "$TMP/short" --prompt "the quick brown" --tokens 3 --temperature 0 "$@"; }
write >"$TMP/a"
write --ctx 6 >"$TMP/b"
check "generate uses the trained context" cmp "$TMP/a" "$TMP/b"
run write --ctx 100000
check "and none beyond the model's" fails "is longer than the model's context of"
run write --top-p 0
check "no share is refused" fails "leaves no token to choose"
finish
