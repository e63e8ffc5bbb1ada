#!/usr/bin/env bash
# tests/cli/quickstart.sh: scripts/quickstart fetches Tiny Shakespeare, or does without. Its programs are stand-ins
# that tell their arguments; so is curl, which serves a file of $KNAP_DATA.
. "$(dirname "$0")/lib.sh"

mkdir -p "$TMP/bin" "$TMP/clone/scripts" "$TMP/clone/build/models" "$TMP/home"
cp "$ROOT/scripts/lib.sh" "$ROOT/scripts/quickstart" "$ROOT/scripts/get-data" "$TMP/clone/scripts"
echo 'a page' >"$TMP/clone/page.md"
program() { printf '#!/bin/bash\n%s\n' "$2" >"$1" && chmod +x "$1"; }
program "$TMP/bin/curl" 'while [ $# -gt 1 ]; do [ "$1" != --output ] || to=$2; shift; done
echo called >>"$CALLS"; [ -z "$SLOW" ] || exec sleep 60
[ -n "$SERVED" ] && cp "$SERVED" "$to"'
program "$TMP/clone/scripts/build" '[ -z "$BROKEN" ]'
program "$TMP/clone/build/models/train_gpt" 'echo "trains: $*"'
program "$TMP/clone/build/models/generate" 'echo "writes: $*"'
has=${KNAP_DATA:-} shakespeare=''
export PATH="$TMP/bin:$PATH" HOME="$TMP/home" CALLS="$TMP/calls" SERVED='' SLOW='' BROKEN='' KNAP_DATA=''
unset KNAP_CACHE
cd "$TMP/clone" || exit 1
kept=$HOME/.cache/knap/tinyshakespeare/input.txt

run scripts/quickstart
check "without a network it trains on the bundled corpus" eval 'succeeds && says "--data out/corpus.txt"'
check "... and says so in one line" eval '[ "$(grep -c "^text:" "$TMP/output")" = 1 ] && says "could not be fetched"'
check "which holds the pages" grep -q 'a page' out/corpus.txt
begun=$SECONDS
SLOW=yes run scripts/quickstart
check "a network that doesn't answer takes 10 s" eval 'succeeds && says "could not be fetched" && [ $((SECONDS - begun)) -lt 30 ]'
echo "not a play" >"$TMP/wrong"
SERVED=$TMP/wrong run scripts/quickstart
check "another file isn't taken for it" eval 'succeeds && says "--data out/corpus.txt" && [ ! -e "$kept" ]'
CALLS=$TMP/others BROKEN=yes SLOW=yes run scripts/quickstart
check "a build that fails ends it" eval '[ "$status" = 1 ] && ! says "trains:" >"$TMP/nothing"'
rm "$CALLS"
run scripts/quickstart --data page.md
check "nothing is fetched for a text of the user's" eval 'succeeds && says "page.md" && [ ! -e "$CALLS" ]'

IFS=: read -r -a folders <<<"$has"
for folder in "${folders[@]}"; do
    [ ! -f "$folder/tinyshakespeare/input.txt" ] || shakespeare=$folder
done
if [ -n "$shakespeare" ]; then
    SERVED=$shakespeare/tinyshakespeare/input.txt run scripts/quickstart
    check "the fetched file is trained on" eval 'succeeds && says "--data shakespeare" && says "$kept"'
    rm "$CALLS"
    run scripts/quickstart
    check "and not fetched again" eval 'succeeds && says "--data shakespeare" && [ ! -e "$CALLS" ]'
    rm -r "$HOME/.cache"
    KNAP_DATA=$shakespeare run scripts/quickstart
    check "nor where KNAP_DATA has it" eval 'succeeds && says "--data shakespeare" && [ ! -e "$CALLS" ]'
fi
finish
