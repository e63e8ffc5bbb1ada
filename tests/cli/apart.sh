#!/usr/bin/env bash
# tests/cli/apart.sh: ranks that don't fit each other, as launchers start them: each with options, data and an
# environment of its own. What would train another model than one process does is refused on all ranks, before anything
# is written, by a sentence that names it and two values.
. "$(dirname "$0")/lib.sh"
gpt=$BUILD/models/train_gpt net=$BUILD/models/train_resnet
[ -x "$gpt" ] && [ -x "$net" ] || skip "build/models/train_gpt or train_resnet is not built"
port=$((20000 + RANDOM % 10000))

# rank R N COMMAND...: as torchrun starts it; place=tcp: as on a host of its own.
rank() {
    local r=$1 n=$2 place=()
    shift 2
    [ "${over-}" != tcp ] || place=("KNAP_RENDEZVOUS=tcp:127.0.0.1:$port")
    env RANK="$r" WORLD_SIZE="$n" LOCAL_RANK="$r" LOCAL_WORLD_SIZE="$n" MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
        KNAP_JOB="apart $$" "${place[@]}" timeout 120 "$@"
}
# pair: two ranks, with the arrays first and second as their commands.
pair() {
    rank 0 2 "${first[@]}" >"$TMP/output" 2>&1 &
    rank 1 2 "${second[@]}" >"$TMP/second" 2>&1
    status2=$?
    wait $!
    status=$?
    cat "$TMP/second" >>"$TMP/output"
}
# refuses TEXT...: both ranks failed, and said each.
refuses() {
    local text
    [ "$status" = 1 ] && [ "$status2" = 1 ] || { echo "status $status and $status2"; cat "$TMP/output"; return 1; }
    for text; do says "$text" || return 1; done
}

for i in $(seq 60); do echo "the quick brown fox jumps over the lazy dog"; done >"$TMP/text"
sed 's/quick brown/brown quick/' "$TMP/text" >"$TMP/other"
gpt_run=("$gpt" --data "$TMP/text" --layers 1 --heads 2 --embd 16 --ctx 8 --batch 2 --threads 1 --steps 2 --eval-every 0)
net_run=("$net" --data shapes --model resnet20 --batch 4 --threads 1 --epochs 0.002 --eval-every 0)

# Every option that --help lists, with another value on one rank, but those that a rank may have for itself.
own=" ranks threads fault timeout summary log tensorboard plot config overwrite workers version help "
other_value() { # other_value NAME PLACEHOLDER HELP
    local choices
    [ "$1" != data ] || { echo mnist; return; }
    case $2 in
    N) echo 3 ;;
    X) [[ $1 == rope-* ]] && echo 1.5 || echo 0.5 ;;
    NAME)
        choices=${3##*: }
        choices=${choices%% (default*}
        echo "${choices##*|}"
        ;;
    PATH) echo "$TMP/elsewhere/$1" ;;
    TEXT) echo another ;;
    esac
}
# each_option PROGRAM: lines "name placeholder help"
each_option() { "$1" --help | sed -nE 's/^  --([a-z0-9-]+)( (N|X|NAME|PATH|TEXT))? +(.*)/\1 \3 | \4/p'; }

for kind in gpt net; do
    base="${kind}_run[@]" && program=("${!base}")
    each_option "${program[0]}" >"$TMP/options"
    check "$kind: --help lists options" test "$(wc -l <"$TMP/options")" -gt 50
    while read -r name placeholder help; do
        [[ $own != *" $name "* ]] || continue
        [ "$placeholder" != "|" ] || placeholder=
        second=()
        for word in "${program[@]}"; do # its own value in the place of the common one
            [ "${skip_next-}" != yes ] || { skip_next=no; continue; }
            [ "$word" != "--$name" ] || { skip_next=yes; continue; }
            second+=("$word")
        done
        if [ -z "$placeholder" ]; then
            flag=--$name
            [[ $help != *"(default true)"* ]] || flag=--no-$name
            second+=("$flag")
        else
            second+=("--$name" "$(other_value "$name" "$placeholder" "$help")")
        fi
        first=("${program[@]}")
        pair
        check "$kind: --$name" refuses "options: --$name is " " on rank 0 and " "give all ranks the same"
    done <"$TMP/options"
done

first=("${gpt_run[@]}") second=("${gpt_run[@]}" --help)
pair
check "--help on one rank" refuses "options: --help is not given on rank 0 and given on rank 1"
second=("${net_run[@]}")
pair
check "another program" refuses "options: --data is a path on rank 0 and shapes on rank 1"
second=("${gpt_run[@]}" --lr 5)
over=tcp
pair
check "over TCP" refuses "options: --lr is 1e-3 on rank 0 and 5 on rank 1"
second=("${gpt_run[@]}" --lr 0.001 --sample-tokens 0200 --log "$TMP/log" --summary)
pair
check "the same in other words" succeeds
over=

mkdir "$TMP/there"
cp "$TMP/text" "$TMP/there"
first=("${gpt_run[@]}") second=("${gpt_run[@]}")
second[2]=$TMP/there/text
pair
check "a copy of the data" succeeds
second[2]=$TMP/other
pair
check "other data" refuses "data: --data is 2376 + 264 tokens of 28 kinds, hash "
finish
