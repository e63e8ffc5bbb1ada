#!/usr/bin/env bash
# tests/cli/packages.sh: the scripts install missing packages and nothing else; if they can't, one
# message gives the reason. Fake commands record their arguments.
. "$(dirname "$0")/lib.sh"

bin=$TMP/bin
mkdir "$bin"
for tool in bash env dirname cat mkdir; do
    ln -s "$(command -v $tool)" "$bin/$tool"
done
stand_in() { printf '#!/bin/bash\n%s\n' "$2" >"$bin/$1" && chmod +x "$bin/$1"; }
stand_in id 'echo ${AS:-0}'
stand_in sudo 'echo "sudo $*" >>"$CALLS"; exec "$@"'
stand_in apt-get 'echo "apt-get $*" >>"$CALLS"'
stand_in dpkg-query '[ "${!#}" = here ] && echo -n installed'
export CALLS=$TMP/calls

# need PACKAGE...: runs need of scripts/lib.sh with only the fake commands in PATH.
need() {
    rm -f "$CALLS"
    run env PATH="$bin" bash -c '. "$0/scripts/lib.sh"; need "$@"' "$ROOT" "$@"
    touch "$CALLS"
}

need here
check "nothing missing: nothing done" test "$status" = 0 -a ! -s "$CALLS"
need here knap-missing-1 knap-missing-2
check "root: updates once" test "$(grep -c 'apt-get.*update' "$CALLS")" = 1
check "and installs what is missing" grep -q 'install.*knap-missing-1 knap-missing-2$' "$CALLS"
check "in one go, without sudo" test "$(grep -c . "$CALLS")" = 2
AS=1000 need knap-missing-1
check "a user: through sudo" test "$(grep -c '^sudo ' "$CALLS")" = 2
rm "$bin/sudo"
AS=1000 need knap-missing-1
check "a user without sudo: says so" fails "takes root or sudo"
check "and names the packages" says "apt-get install knap-missing-1"
stand_in apt-get 'exit 100'
need knap-missing-1
check "apt-get that fails is an error" fails "apt-get update failed"
rm "$bin/apt-get"
need knap-missing-1
check "no apt-get: says so" fails "no apt-get here"

for script in build test quickstart; do
    run "$ROOT/scripts/$script" --help
    check "$script --help" says "scripts/$script"
    run "$ROOT/scripts/$script" --no-such-option
    check "$script: an unknown option is an error" fails "unknown argument '--no-such-option'"
done
run "$ROOT/scripts/test" --suite nonesuch
check "test: an unknown suite is an error" fails "unknown suite 'nonesuch'"
finish
