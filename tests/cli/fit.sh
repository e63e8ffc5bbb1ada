#!/usr/bin/env bash
# tests/cli/fit.sh: --fit from outside: its bytes are those of the run's ledger, its command runs.
. "$(dirname "$0")/lib.sh"
train=$BUILD/models/train_gpt
images=$BUILD/models/train_resnet
[ -x "$train" ] && [ -x "$images" ] || skip "build/models/train_gpt or train_resnet is not built"

for _ in $(seq 200); do echo "the quick brown fox jumps over the lazy dog"; done >"$TMP/text"
text=("$train" --data "$TMP/text" --layers 3 --heads 4 --embd 128 --ctx 64 --batch 8 --warmup 1 --eval-every 0
    --steps 3)
small=("$train" --data "$TMP/text" --layers 2 --embd 64)
shapes=("$images" --data shapes --batch 16 --epochs 0.003 --eval-every 0 --threads 1)

# peaks FILE: of a log's last step, as --fit prints them: parameters, gradients, optimizer, gathered, computed.
peaks() {
    tail -n 1 "$1" | python3 -c '
import json, sys
def shown(n):
    unit = 0
    while n >= 1000 and unit < 4:
        n, unit = n / 1000, unit + 1
    return "-" if n == 0 else f"{n:.{1 if unit else 0}f}" + " " + ["B", "kB", "MB", "GB", "TB"][unit]
peak = json.loads(sys.stdin.read())["peak_bytes"]
print(*(shown(peak[k]) for k in ("parameters", "gradients", "optimizer", "gathered", "activations")), sep=", ")'
}
# table STRATEGY LAYOUT RECOMPUTE: the same of a row of --fit; unreduced ones may be fewer where a core is missing.
table() {
    sed -nE "s/^$1 +$2 +$3 +- +//p" "$TMP/output" | sed -E 's/ ([kMGT]?B)/_\1/g' |
        awk '{ print $1 ", " $2 ", " $3 ", " $4 ", " $6 }' | tr _ ' '
}

# same_bytes STRATEGY LAYOUT RECOMPUTE PROGRAM...: two ranks that train so have the peaks of --fit.
same_bytes() {
    local strategy=$1 layout=$2 recompute=$3
    shift 3
    rm -f "$TMP/log"
    "$@" --ranks 2 --strategy "$strategy" --layout "$layout" --log "$TMP/log" || return 1
    run "$@" --ranks 2 --strategy "$strategy" --layout "$layout" --fit 10G
    echo "run: $(peaks "$TMP/log")"
    echo "fit: $(table "$strategy" "$layout" "$recompute")"
    [ -s "$TMP/log" ] && same "$(peaks "$TMP/log")" "$(table "$strategy" "$layout" "$recompute")"
}
same() { [ "$1" = "$2" ]; }
check "full_shard" same_bytes full_shard flat - "${text[@]}"
check "no_shard with averages" same_bytes no_shard flat - "${text[@]}" --ema 0.9
check "shard_grad_op, ragged, a Llama with dropout" same_bytes shard_grad_op ragged - "${text[@]}" --model llama \
    --dropout 0.1
check "per_param, recompute, bf16" same_bytes full_shard per_param yes "${text[@]}" --recompute --dtype bf16
check "f16, kept gathered, two micro-batches" same_bytes full_shard flat - "${text[@]}" --dtype f16 \
    --keep-gathered --accum 2
check "Muon without sync" same_bytes full_shard flat - "${text[@]}" --optimizer muon --accum 3 --no-sync
# The loader's batches are data on the CPU, not computed: 196,608 bytes of 25.7 MB.
same() { [ "${1%,*}" = "${2%,*}" ] && [ "${1##*,}" = " 25.5 MB" ] && [ "${2##*,}" = " 25.7 MB" ]; }
check "images" same_bytes full_shard flat - "${shapes[@]}"

# ---- what fits ---------------------------------------------------------------------------------

# rows STRATEGY RECOMPUTE: the most that fit.
rows() { sed -nE "s/^$1 +flat +$2 +- .* ([0-9]+)( \*)?$/\1/p" "$TMP/output"; }
least() { [ "$status" -eq 0 ] && [ "$(rows "$1" "$2")" -gt "$(rows "$3" "$4")" ]; }
command_of() { tail -n 1 "$TMP/output"; }
run "${text[@]}" --ranks 64 --fit 60MiB --device cuda
check "ranks that nobody has, on a GPU that isn't there" test "$status" -eq 0
check "every way is tried" test "$(grep -cE '^(full|no|shard)' "$TMP/output")" -eq 36
check "shards leave room" least full_shard - no_shard -
check "recompute does" least full_shard yes full_shard -
check "what is given stays in the command" says "--ranks 64 --device cuda"

run "${small[@]}" --ranks 2 --batch 5000 --fit 60MiB --strategy full_shard --layout flat --no-recompute
most=$(rows full_shard -)
check "fewer rows where --batch doesn't fit" says "nothing fits with --batch 5000; with $most:"
fit=("${small[@]}" --ranks 2 --strategy full_shard --layout flat --fit 60MiB)
check "so many fit" eval '"${fit[@]}" --batch "$most" | grep -q "\*$"'
check "one more doesn't" eval '! "${fit[@]}" --no-recompute --batch $((most + 1)) | grep -q "\*$"'
run "${fit[@]}" --out "$TMP/out" --steps 3 --batch 2
check "no folder is made" test ! -e "$TMP/out"
eval "$(command_of) --threads 1" >"$TMP/run" 2>&1
check "the command runs" grep -q "full_shard" "$TMP/run"
check "and writes its folder" test -e "$TMP/out/config.toml"
run "${shapes[@]}" --fit 1T --pictures "$TMP/pictures" --strategy full_shard --layout flat --no-recompute
check "nor one for pictures" test ! -e "$TMP/pictures"
check "no more rows than --batch takes" test "$(rows full_shard -)" -le 1048576
run "${small[@]}" --ctx 4 --fit 9T --strategy full_shard --layout flat --no-recompute
check "of a small model either" test "$(rows full_shard -)" -eq 1048576
run "${shapes[@]}" --fit 1G --grid "$TMP/grid.png"
check "--grid ends before" test "$(grep -c full_shard "$TMP/output")" -eq 0
printf 'fit = "1G"\n' >"$TMP/config.toml"
run "${text[@]}" --config "$TMP/config.toml"
check "a file of options has none" fails "fit"

# ---- bad input ---------------------------------------------------------------------------------

for size in x 0 -1 1.5G 99999999T; do
    run "${text[@]}" "--fit=$size"
    check "--fit $size" fails "--fit takes the memory of a rank, such as 24GiB"
done
run "${text[@]}" --fit 1M
check "no row fits" fails "not even one row fits"
run "${text[@]}" --fit 1G --resume "$TMP/out"
check "a checkpoint" fails "--fit and --resume contradict each other"
run "${text[@]}" --ranks 4 --shards 2 --strategy no_shard --fit 1G
check "a mesh that can't be" fails "leave the mesh out"

finish
