#!/usr/bin/env bash
# tests/cli/hardening.sh: what the compiler and the linker put around the code (meson.build), in the files as built: a
# guard of the stack, the C library's checks of sizes, tables of addresses that nobody can write once a program has begun,
# programs at random places, no stack or data that can be run, and landing places for jumps.
. "$(dirname "$0")/lib.sh"
command -v readelf >/dev/null || skip "there is no readelf"
files=("$BUILD/libknap.so")
for p in "$BUILD"/models/*; do [ ! -x "$p" ] || [ ! -f "$p" ] || files+=("$p"); done
[ ${#files[@]} -gt 4 ] && [ -f "${files[0]}" ] || skip "build/models/train_gpt or libknap.so is not built"

flags() { readelf -lW "$1" | sed -nE "s/^ *$2 .* 0x[0-9a-f]+ +([RWE ]+) +0x[0-9a-f]+$/\1/p" | tr -d ' '; }
calls() { readelf -sW "$1" | grep -qE " UND +$2(@|$)"; }
now() { readelf -dW "$1" | grep -qE '\((FLAGS|BIND_NOW)\).*(BIND_NOW|0x0)' && readelf -dW "$1" | grep -qE '\(FLAGS_1\).*\bNOW\b'; }
pie() { readelf -dW "$1" | grep -qE '\(FLAGS_1\).*\bPIE\b'; }
# No segment can be written and run.
apart() {
    local f
    [ -n "$(flags "$1" LOAD)" ] || return 1
    for f in $(flags "$1" LOAD) $(flags "$1" GNU_STACK); do [[ $f != *W*E* ]] || { readelf -lW "$1"; return 1; }; done
}
# Where there is an optimizer and no sanitizer.
fortified=$(python3 -c "
import json, sys
option = {o['name']: o['value'] for o in json.load(open(sys.argv[1]))}
print('yes' if option['b_sanitize'] == 'none' and option['optimization'] not in ('0', 'plain') else 'no')" \
    "$BUILD/meson-info/intro-buildoptions.json")

for f in "${files[@]}"; do
    name=${f##*/}
    check "$name: a guard of the stack" calls "$f" __stack_chk_fail
    [ "$fortified" = no ] || check "$name: checks of sizes" calls "$f" '__[a-z]+_chk'
    check "$name: read-only tables" test "$(flags "$f" GNU_RELRO)" = R
    check "$name: all addresses at the start" now "$f"
    check "$name: a stack that can't be run" test "$(flags "$f" GNU_STACK)" = RW
    check "$name: nothing that can be written and run" apart "$f"
    [ "$name" = libknap.so ] || check "$name: at a random place" pie "$f"
done

# file_faults.c counts and fails what a program does with files, also where it is checked.
seen() {
    local name
    for name in $(readelf -sW "$1" | sed -nE 's/.* UND +(__(p?read|p?write|open|openat|readlink|realpath)[a-z0-9]*_(chk|[0-9]))(@.*| .*)?$/\1/p'); do
        readelf -sW "$BUILD/tests/libfile_faults.so" | grep -qE " [0-9]+ $name$" || { echo "$name isn't there"; return 1; }
    done
}
[ ! -f "$BUILD/tests/libfile_faults.so" ] || check "faults of files reach checked calls" seen "$BUILD/models/train_gpt"

# A program has the note only where all that is linked has it, the C library's start, too: so each object is looked at.
if [ "$(uname -m)" = x86_64 ]; then
    mapfile -t objects < <(find "$BUILD" -name '*.c.o' -path '*libknap_*')
    marked() {
        readelf -nW "${objects[@]}" |
            awk '/^File: / { n++; name = $2; next } /IBT, SHSTK/ { has[name] = 1 }
                 END { for (i in has) m++; print m " of " n; exit m != n || n < 300 }'
    }
    check "landing places for jumps, in ${#objects[@]} objects" marked
fi
finish
