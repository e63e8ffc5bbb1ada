#!/usr/bin/env bash
# tests/cli/same_bits.sh: losses and gradient norms are the same bits for every number of ranks,
# strategy, layout and schedule that adds the same micro-batches (docs/architecture.md, idea 9).
. "$(dirname "$0")/lib.sh"
train=$BUILD/models/train_gpt
[ -x "$train" ] || skip "build/models/train_gpt is not built"
steps=${KNAP_SAME_STEPS:-8}

cat "$ROOT"/docs/*.md "$ROOT"/README.md "$ROOT"/kernels/kernels.h >"$TMP/text" 2>/dev/null

# train_to NAME OPTIONS...: keeps step, loss and norm of each step in $TMP/NAME. Launched by ${by[@]}.
by=()
train_to() {
    local name=$1
    shift
    timeout 600 "${by[@]}" "$train" --data "$TMP/text" --tokenizer byte --layers 2 --heads 2 --embd 32 --ctx 16 --batch 3 \
        --steps "$steps" --warmup 2 --clip 0.5 --dropout 0.1 --threads 1 --eval-every 4 \
        --eval-steps 3 --log "$TMP/$name.jsonl" "$@" || return 1
    sed -E 's/, "lr".*"grad_norm": ([^,]*),.*/ norm \1/' "$TMP/$name.jsonl" >"$TMP/$name"
    [ "$(grep -c 'norm [0-9]' "$TMP/$name")" -eq "$steps" ]
}

# same NAME OPTIONS...: the run gives the same lines as the first. like REFERENCE NAME OPTIONS...: as
# that one.
like() {
    local reference=$1
    shift
    train_to "$@" && diff "$TMP/$reference" "$TMP/$1"
}
same() { like one "$@"; }
differs() { train_to "$@" && ! diff -q "$TMP/one" "$TMP/$1"; }

check "one rank, four micro-batches" train_to one --ranks 1 --accum 4
check "the same command again" same again --ranks 1 --accum 4
two=(--ranks 2 --accum 2)
four=(--ranks 4 --accum 1)
check "two ranks" same two "${two[@]}"
check "four ranks" same four "${four[@]}"

# strategies and layouts
check "one rank, replicated" same one_no --ranks 1 --accum 4 --strategy no_shard
check "two ranks, replicated" same two_no "${two[@]}" --strategy no_shard
check "four ranks, replicated" same four_no "${four[@]}" --strategy no_shard
check "two ranks keep what they gathered" same two_grad "${two[@]}" --strategy shard_grad_op
check "four ranks, hybrid with one replica" same four_one "${four[@]}" --strategy hybrid_shard \
    --shards 4
check "four ranks, a layout by parameter" same per_param "${four[@]}" --layout per_param
check "two ranks, a ragged layout" same ragged "${two[@]}" --layout ragged
check "small parameters whole" same whole "${two[@]}" --keep-whole-below 1000
check "units by size" same size "${two[@]}" --wrap size --wrap-size 4000

# prefetch and offload
check "two ranks, no prefetch" same none "${two[@]}" --prefetch none
check "four ranks, late prefetch" same post "${four[@]}" --prefetch post
check "two ranks, forward prefetch" same forward "${two[@]}" --forward-prefetch --max-gathers 1 --max-reductions 2
check "four ranks keep a copy in pairs" same pairs "${four[@]}" --reshard 2
check "two ranks keep parameters over micro-batches" same kept "${two[@]}" --keep-gathered
check "two ranks, recompute" same recompute "${two[@]}" --recompute
mkdir "$TMP/store"
check "two ranks, offloaded" same offload "${two[@]}" --offload "$TMP/store"
check "four ranks, all at once" same all "${four[@]}" --layout ragged --strategy shard_grad_op \
    --forward-prefetch --offload "$TMP/store" --keep-whole-below 100 --recompute
check "and nothing is left in the folder" test -z "$(ls -A "$TMP/store")"

# launchers
by_torchrun() {
    local status=0 rank
    export WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + $$ % 12000))
    RANK=1 LOCAL_RANK=1 "$@" >"$TMP/rank1" 2>&1 </dev/null &
    rank=$!
    RANK=0 LOCAL_RANK=0 "$@" || status=1
    wait $rank || { cat "$TMP/rank1"; status=1; }
    return $status
}
export -f by_torchrun
export TMP
by=(bash -c 'by_torchrun "$@"' by_torchrun)
check "two ranks of another launcher" same torchrun --accum 2
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
if command -v mpirun >/dev/null; then
    by=(mpirun -n 2)
    check "two ranks of mpirun" same mpirun --accum 2 --layout ragged
else
    echo "ok $((cases += 1)) - two ranks of mpirun # SKIP no mpirun here"
fi
by=()

# hybrid adds replicas after shards, no-sync micro-batches before ranks: other groupings, the same in
# every layout
check "two replicas of two shards" train_to hybrid "${four[@]}" --strategy hybrid_shard --shards 2
check "the same in another layout" like hybrid hybrid_pp "${four[@]}" --strategy hybrid_shard \
    --replicas 2 --layout per_param
check "the same, keeping what was gathered" like hybrid hybrid_grad "${four[@]}" \
    --strategy hybrid_shard_grad_op --shards 2
check "replicas that add once a step" train_to last --ranks 4 --accum 2 --shards 2 --all-reduce-last
check "the same in a ragged layout" like last last_ragged --ranks 4 --accum 2 --replicas 2 \
    --all-reduce-last --layout ragged
check "one rank without sync" same one_later --ranks 1 --accum 4 --no-sync
check "two ranks without sync" train_to later "${two[@]}" --no-sync
check "the same, replicated" like later later_no "${two[@]}" --no-sync --strategy no_shard

# other numbers, the same in every strategy
check "bf16" train_to bf16 "${two[@]}" --dtype bf16
check "bf16, replicated" like bf16 bf16_no "${two[@]}" --dtype bf16 --strategy no_shard
check "f16 with a scaled loss" train_to f16 "${two[@]}" --dtype f16
check "f16, another layout" like f16 f16_ragged "${two[@]}" --dtype f16 --layout ragged
check "another seed differs" differs other "${two[@]}" --seed 7
check "another norm differs" differs norm "${two[@]}" --clip-norm inf
check "gradients sent in bf16 differ" differs hook "${two[@]}" --hook bf16
check "gradients reduced in bf16 differ" differs reduce "${two[@]}" --reduce-dtype bf16
finish
