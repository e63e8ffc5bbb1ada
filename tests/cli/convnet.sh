#!/usr/bin/env bash
# tests/cli/convnet.sh: a small convolutional net with batch norm learns MNIST: 97.5 % of the test images
# after 300 steps of 64.
. "$(dirname "$0")/lib.sh"

convnet=$BUILD/examples/convnet
[ -x "$convnet" ] || skip "$convnet is not built"
found=no
IFS=: read -r -a folders <<<"${KNAP_DATA:-}:${HOME:-}/.cache/knap"
for folder in "${folders[@]}"; do
    [ ! -f "$folder/mnist/train-images-idx3-ubyte.gz" ] || found=yes
done
[ $found = yes ] || skip "MNIST is not on this machine (KNAP_DATA)"

right() {
    awk '/of the test images$/ { right = $1 } END { exit !(right > 97.5) }' "$TMP/output" ||
        { cat "$TMP/output"; return 1; }
}

run timeout 300 "$convnet" --threads 1 --steps 300
check "it runs to its end" succeeds
check "and knows more than 97.5 % of the test images" right
run timeout 120 "$convnet" --ranks 2 --steps 3
check "on 2 ranks as well" succeeds
finish
