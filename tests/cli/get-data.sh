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
file=$TMP/cache/tinyshakespeare/input.txt

run "$ROOT/scripts/get-data"
check "no name is an error" fails "One of: shakespeare, mnist"
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

IFS=: read -r -a folders <<<"${KNAP_DATA:-}"
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
fi
finish
