#!/usr/bin/env bash
# tests/cli/environment.sh: an environment at the start that programs don't expect: descriptors that are closed, limits, a
# mask of permissions, a locale. A run works as ever, or ends with a sentence that names the reason; what it prints never
# lands in a file that it opens.
. "$(dirname "$0")/lib.sh"
gpt=$BUILD/models/train_gpt tool=$BUILD/models/knap-checkpoint
[ -x "$gpt" ] && [ -x "$tool" ] || skip "build/models/train_gpt or knap-checkpoint is not built"

for _ in $(seq 60); do echo "the quick brown fox jumps over the lazy dog"; done >"$TMP/text"
tiny=("$gpt" --data "$TMP/text" --layers 1 --heads 2 --embd 16 --ctx 8 --batch 2 --threads 1 --steps 3 --eval-every 0)

# without CLOSED COMMAND...: with these standard descriptors closed, such as 01 or 2; the others in $TMP/output.
without() {
    local closed=$1
    shift
    exec 3>"$TMP/output" # open and close themselves need no descriptor from 0 to 2
    (
        exec >&3 2>&3 </dev/null 3>&-
        [[ $closed != *0* ]] || exec 0>&-
        [[ $closed != *1* ]] || exec 1>&-
        [[ $closed != *2* ]] || exec 2>&-
        exec timeout 120 "$@"
    )
    status=$?
    exec 3>&-
}
# Each line of the log is an object, the lock is empty, and the checkpoint whole.
whole() {
    [ "$status" = 0 ] || { echo "status $status"; cat "$TMP/output"; return 1; }
    python3 -c "
import json
lines = [json.loads(line) for line in open('$TMP/log')]
assert len(lines) == 3, lines" && [ ! -s "$TMP/run/.lock" ] && "$tool" verify "$(newest "$TMP/run")" >/dev/null
}
for closed in 0 1 2 01 02 12 012; do
    for ranks in 1 2; do
        rm -rf "$TMP/run" "$TMP/log"
        without $closed "${tiny[@]}" --ranks $ranks --out "$TMP/run" --log "$TMP/log"
        check "closed: $closed, $ranks ranks" whole
    done
    rm -rf "$TMP/merged"
    without $closed "$tool" merge "$(newest "$TMP/run")" --out "$TMP/merged"
    check "closed: $closed, knap-checkpoint" "$tool" verify "$TMP/merged"
done

# Limits, and what is missing.
limited() { # limited LIMITS COMMAND...
    local limits=$1
    shift
    run timeout 120 bash -c "$limits; exec \"\$@\"" bash "$@"
}
works_or_says() { [ "$status" = 0 ] || fails "$1"; }
for files in 4 6 8 16 40; do
    limited "ulimit -n $files" "${tiny[@]}"
    check "ulimit -n $files, one rank" works_or_says "pen files"
    limited "ulimit -n $files" "${tiny[@]}" --ranks 2
    check "ulimit -n $files, two ranks" works_or_says "pen files"
done
limited "ulimit -Sn 12" "${tiny[@]}" --ranks 2
check "a soft limit is raised" succeeds
if unshare -rm true 2>/dev/null; then
    for ranks in 1 2; do
        run unshare -rm bash -c 'mount -t tmpfs none /proc && exec "$@"' bash timeout 120 "${tiny[@]}" --ranks $ranks
        check "no /proc, $ranks ranks" succeeds
    done
fi
for mask in 000 077 0777; do
    rm -rf "$TMP/run"
    limited "umask $mask" "${tiny[@]}" --out "$TMP/run"
    check "umask $mask" works_or_says "cannot"
    [ $mask = 0777 ] || check "the lock is its user's, umask $mask" test "$(stat -c %a "$TMP/run/.lock")" = 600
done
for locale in C POSIX C.UTF-8 xx_YY.nonsense; do
    rm -rf "$TMP/run"
    run env LC_ALL=$locale "${tiny[@]}" --out "$TMP/run"
    check "locale $locale" succeeds
done

# A name that is no UTF-8.
odd=$TMP/$'t\xff\xfe'
if cp "$TMP/text" "$odd" 2>/dev/null; then
    rm -rf "$TMP/run"
    run timeout 120 "$gpt" --data "$odd" "${tiny[@]:3}" --out "$TMP/run"
    check "a name that is no UTF-8 is said" fails "isn't valid UTF-8, as which a checkpoint records it"
    ln -s "$odd" "$TMP/link"
    run timeout 120 "$gpt" --data "$TMP/link" "${tiny[@]:3}" --out "$TMP/run"
    check "and the advice works" succeeds
    run timeout 120 "$gpt" --data "$odd" "${tiny[@]:3}"
    check "without a checkpoint it is read" succeeds
fi
finish
