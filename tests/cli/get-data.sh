#!/usr/bin/env bash
# tests/cli/get-data.sh: scripts/get-data keeps intact files and refuses others. A fake curl
# serves the files of $KNAP_DATA, so that no network is needed.
. "$(dirname "$0")/lib.sh"

mkdir -p "$TMP/bin" "$TMP/cache"
cat >"$TMP/bin/curl" <<'END'
#!/bin/sh
while [ $# -gt 1 ]; do
    [ "$1" != --output ] || to=$2
    shift
done
[ -n "$SERVED" ] || exit 22
cp "$SERVED" "$to"
END
chmod +x "$TMP/bin/curl"
export PATH="$TMP/bin:$PATH" KNAP_CACHE="$TMP/cache" SERVED=''
has=${KNAP_DATA:-}
export KNAP_DATA=
file=$TMP/cache/tinyshakespeare/input.txt

run "$ROOT/scripts/get-data"
check "no name is an error" fails "One of: shakespeare, mnist, fashion-mnist, cifar10, cifar100"
run "$ROOT/scripts/get-data" imagenet
check "an unknown name is an error" fails "unknown data set 'imagenet'"
run "$ROOT/scripts/get-data" --help
check "--help tells the data sets" says "scripts/get-data shakespeare"
run "$ROOT/scripts/get-data" shakespeare
check "a download that fails is an error" fails "check the network"
check "and leaves nothing" test ! -e "$file" -a ! -e "$file.part"
echo "not a play" >"$TMP/wrong"
SERVED=$TMP/wrong run "$ROOT/scripts/get-data" shakespeare
check "other bytes are refused" fails "instead of 86c4e6aa"
check "and not kept" test ! -e "$file" -a ! -e "$file.part"

# Archives: what is in them is checked, not what is beside it.
run "$ROOT/scripts/get-data" cifar10
check "CIFAR-10: a download that fails is an error" fails "check the network"
SERVED=$TMP/wrong run "$ROOT/scripts/get-data" cifar10
check "an archive with another MD5 is refused" fails "instead of c32a1d4a"
SERVED=$TMP/wrong run "$ROOT/scripts/get-data" cifar100
check "CIFAR-100 likewise" fails "instead of 03b5dce0"
SERVED=$TMP/wrong run "$ROOT/scripts/get-data" fashion-mnist
check "Fashion-MNIST likewise" fails "instead of 8d4fb7e6"
mkdir -p "$TMP/packed/cifar10"
echo 'raise SystemExit(3)' >"$TMP/packed/cifar10/unpack_cifar10.py"
KNAP_DATA=$TMP/packed run "$ROOT/scripts/get-data" cifar10
check "an unpacker that fails is told, and the network asked" fails "check the network"
check "... told" says "packed/cifar10 could not be unpacked"

IFS=: read -r -a folders <<<"$has"
for folder in "${folders[@]}"; do
    [ ! -f "$folder/tinyshakespeare/input.txt" ] || SERVED=$folder/tinyshakespeare/input.txt
done
if [ -n "$SERVED" ]; then
    run "$ROOT/scripts/get-data" shakespeare
    check "the right bytes are kept" succeeds
    check "where the programs look" cmp "$SERVED" "$file"
    SERVED=$TMP/wrong run "$ROOT/scripts/get-data" shakespeare
    check "and not fetched again" says "already here"
    echo more >>"$file"
    run "$ROOT/scripts/get-data" shakespeare
    check "unless they were damaged" cmp "$SERVED" "$file"
    rm "$file"
    KNAP_DATA=$has SERVED=$TMP/wrong run "$ROOT/scripts/get-data" shakespeare
    check "a folder of KNAP_DATA comes before the network" cmp "${SERVED}" "$file"
fi
finish
