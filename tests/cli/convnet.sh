#!/usr/bin/env bash
# tests/cli/convnet.sh: a small convolutional net with batch norm learns MNIST: 97.5 % of the test images
# after 300 steps of 64.
. "$(dirname "$0")/lib.sh"

convnet=$BUILD/examples/convnet
[ -x "$convnet" ] || skip "$convnet is not built"
found=no
IFS=: read -r -a folders <<<"${KNAP_DATA:-}:${HOME:-}/.cache/knap"
for folder in "${folders[@]}"; do
    [ ! -f "$folder/mnist/train-images-idx3-ubyte.gz" ] || { found=$folder/mnist && break; }
done
[ $found != no ] || skip "MNIST is not on this machine (KNAP_DATA)"

right() {
    awk '/of the test images$/ { right = $1 } END { exit !(right > 97.5) }' "$TMP/output" ||
        { cat "$TMP/output"; return 1; }
}

run timeout 600 "$convnet" --threads 1 --steps 300
check "it runs to its end" succeeds
check "and knows more than 97.5 % of the test images" right

# From here on 1,000 of its images, of which an evaluation takes no time.
mkdir "$TMP/mnist"
python3 - "$found" "$TMP/mnist" <<'END'
import gzip, sys
for part in 'train', 't10k':
    for name, head, size in (f'{part}-images-idx3-ubyte.gz', 16, 784), (f'{part}-labels-idx1-ubyte.gz', 8, 1):
        data = gzip.open(f'{sys.argv[1]}/{name}').read(head + 1000 * size)
        gzip.open(f'{sys.argv[2]}/{name}', 'w').write(data[:4] + (1000).to_bytes(4, 'big') + data[8:])
END
export KNAP_DATA=$TMP
run timeout 600 "$convnet" --ranks 2 --steps 3
check "on 2 ranks as well" succeeds

# ---- saving and resuming: parameters, batch norm's statistics, AdamW's state ------------------

for ranks in 1 2; do
    for steps in "--steps 6 --out $TMP/whole" "--steps 6 --stop 3 --out $TMP/half" \
        "--steps 6 --from $TMP/half --out $TMP/rest"; do
        # shellcheck disable=SC2086
        run timeout 600 "$convnet" --ranks $ranks --threads 1 $steps
        check "$ranks ranks: ${steps//$TMP\//}" succeeds
        tail -n 1 "$TMP/output" >"$TMP/last" # of the test images
        case $steps in *whole*) cp "$TMP/last" "$TMP/right" ;; esac
    done
    check "$ranks ranks: the same accuracy" cmp "$TMP/right" "$TMP/last"
    check "$ranks ranks: the same state" same_training "$TMP/whole" "$TMP/rest"
done
check "batch norm's statistics are saved" grep -qr "bn1.running_mean" "$(newest "$TMP/rest")/model"
check "of each rank" grep -qr "bn1.running_mean.rank1" "$(newest "$TMP/rest")/optimizer"
run "$convnet" --from "$TMP/none"
check "a missing checkpoint is a sentence" fails "holds no checkpoint"
run "$convnet" --help
check "--help lists the options" says "--from PATH"
finish
