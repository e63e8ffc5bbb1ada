#!/usr/bin/env bash
# tests/cli/lint.sh: every check of the lint finds its faults in a small tree of sources made for
# it, and finds nothing once the fault is removed.
. "$(dirname "$0")/lib.sh"

house=$TMP/house
mkdir -p "$house/kernels" "$house/tensor" "$house/comm/local" "$house/tests/lint" "$house/tests/kernels" "$house/tests/fsdp" "$house/tests/models" "$house/scripts" "$house/models" \
    "$house/build-test" "$house/docs" "$house/autograd" "$house/state" "$house/examples"
cp "$ROOT"/tests/lint/*.py "$house/tests/lint/"
cp "$ROOT/.clang-format" "$house/"
printf '# Tour\n\n## The first hour\n\n| 1 | `kernels/a.c`\n\n## The rest\n' >"$house/docs/tour.md"
printf '# Change\n\n## An elementwise operation\n' >"$house/docs/change.md"
cat >"$house/meson.build" <<'END'
public_headers = ['kernels/types.h', 'tensor/tensor.h']
END
echo "files('a.c')" >"$house/kernels/meson.build"
echo "files()" >"$house/comm/meson.build"
printf '/* kernels/types.h: types. */\n/* Does it. */\nKN_API int kn_do(void);\n' \
    >"$house/kernels/types.h"
printf '/* tensor/tensor.h: tensors. */\n#include "kernels/types.h"\n' >"$house/tensor/tensor.h"
printf '/* kernels/a.c: a. */\nint a(int x);\nint a(int x)\n{\n    return x;\n}\n' \
    >"$house/kernels/a.c"
printf '/* tests/kernels/adding_test.c: a. */\nKN_TEST(adding, carries)\n{\n}\n' \
    >"$house/tests/kernels/adding_test.c"
echo "files('adding_test.c')" >"$house/tests/kernels/meson.build"
cat >"$house/build-test/compile_commands.json" <<END
[{"directory": "$house/build-test", "file": "../kernels/a.c",
  "command": "cc -I.. -std=gnu17 -c ../kernels/a.c"}]
END

printf '/* examples/e.c: e. */\nstatic int one(void)\n{\n    return 1;\n}\n' >"$house/examples/e.c"
echo "executable('e', 'e.c')" >"$house/examples/meson.build"
cp "$ROOT/scripts/functions.py" "$house/scripts/"
sed '/^WITHOUT = /,/split())$/c WITHOUT = {"kn_do"}' "$ROOT/scripts/places.py" >"$house/scripts/places.py"
printf '# scripts/lint: as it is called.\n' >"$house/scripts/lint"
sed -i 's/kn_sgd/kn_do/' "$house/scripts/functions.py" # the small house has no optimizer
python3 "$house/scripts/functions.py" >"$house/docs/functions.md"
mkdir -p "$house/bench/peers"
sed "/^HEADERS = /,/}\$/c HEADERS = {'kernels/types.h': 'T'}
    s|^WITHOUT = {|WITHOUT = {}; OTHERS = {|" \
    "$ROOT/bench/peers/covered.py" >"$house/bench/peers/covered.py"
printf '# Page\n\n| `kn_do` | do |\n' >"$house/docs/operations.md"

lint() { run python3 "$house/tests/lint/lint.py" "$@"; }

lint
check "a clean house passes" succeeds

# finds CHECK FILE TEXT COMPLAINT: TEXT appended to FILE makes CHECK complain; FILE is restored.
finds() {
    local was=
    if [ -e "$house/$2" ]; then
        was=$TMP/was
        cp "$house/$2" "$was"
    fi
    printf "$3" >>"$house/$2"
    lint "$1"
    check "$1 finds: $4" fails "$4"
    if [ -n "$was" ]; then cp "$was" "$house/$2"; else rm "$house/$2"; fi
}

finds layers kernels/a.c '#include "tensor/tensor.h"\n' 'kernels/ stands below tensor/'
finds layers kernels/a.c '#include "nowhere.h"\n' 'not a path from the root'
finds layers comm/local/c.c '#include "tensor/tensor.h"\n' 'comm/ stands below tensor/'
finds layers kernels/a.c '#include "tests/lint/lint.py"\n' 'outside the house'
finds installed_includes tensor/tensor.h '#include "kernels/a.c"\n' 'which is not installed'
printf '/* models/m.c */\n#include "nn/nn.h"\nbool m(void) { return kn_module_init(0, 0); }\n' >"$house/models/m.c"
finds model_includes models/m.c '#include "nn/nn_internal.h"\n' 'models/m.c:4: a model includes "nn/nn_internal.h"'
rm "$house/models/m.c"
finds public_comments kernels/types.h '\nKN_API int kn_bare(void);\n' 'kn_bare has no comment'
finds places kernels/types.h '/* It. */\nKN_API int kn_it;\n' 'no declaration of a function: KN_API int kn_it'
sed -i s/kn_do/kn_gone/ "$house/scripts/places.py"
lint places
check "places finds a function that is gone" fails "no header declares kn_gone"
sed -i s/kn_gone/kn_do/ "$house/scripts/places.py"
finds functions_page kernels/types.h '/* Ends it. */\nKN_API void kn_end(void);\n' 'docs/functions.md:'
finds operations_page kernels/types.h '/* Ends it. */\nKN_API void kn_end(void);\n' 'kn_end has no row in docs/operations.md'
finds operations_page docs/operations.md '| `kn_gone` | gone |\n' 'kn_gone is no public function'
finds snippets docs/a.md 'static int one(void)\n{\n    return 2;\n}\n' '"static int one(void)" differs from the example'
finds opening_comments kernels/b.c 'int b;\n' 'opens without a comment'
finds sizes kernels/a.c "$(printf '//\\n%.0s' {1..500})" 'lines, at most 500'
finds characters kernels/a.c '//\tx\n' 'a tab'
finds characters kernels/a.c '// \n' 'space at the end'
finds characters kernels/a.c '//\r\n' 'Windows line ends'
finds words kernels/a.c '// TO''DO: more\n' 'kernels/a.c:7'
finds words docs/a.md 'see /ro''ot/x\n' 'docs/a.md:1'
finds listed kernels/b.c '/* b */\n' 'kernels/b.c: not in a meson.build'
finds listed comm/local/c.c '/* c */\n' 'comm/local/c.c: not in a meson.build'
finds names kernels/a.c '/* as kernels/b.c has it */\n' '"kernels/b.c" is not there'
finds names docs/a.md 'see nosuch.c\n' 'no file is called "nosuch.c"'
finds names kernels/a.c '/* kn_do, kn_undo */\n' 'nothing is called "kn_undo"'
finds names docs/a.md 'tested by adding.carries, adding.borrows\n' 'no test is called "adding.borrows"'
finds suites tests/kernels/adding_test.c 'KN_TEST(taking, borrows)\n{\n}\n' 'belongs into a file taking_test.c'
finds suites docs/fsdp.md '| adding | adding.carries |\n' 'adding.carries has no link'
finds suites docs/fsdp.md '| adding | [adding.nothing][adding] |\n\n[adding]: ../tests/kernels/adding_test.c\n' \
    'adding.nothing has no link'
parity() { finds parity tests/fsdp/parity.tsv "$@"; }
row='1\tpage\t7\tadds\tworks\tkn_do\tadding.carries\n'
printf "# number\n${row}2\tpage\t-\ttakes\topen\t-\tnobody takes (adding.*)\n" >"$house/tests/fsdp/parity.tsv"
lint parity
check "a table of parity passes" succeeds
parity "$row" '1 is no number, or stands twice'
parity '3\tpage\t7\tadds\tworks\tadding.carries\n' '6 columns, not 7'
parity '3\tpage\t\tadds\tworks\tkn_do\tadding.carries\n' 'columns, not 7 that hold something'
parity '3\tpage\there\tadds\tworks\tkn_do\tadding.carries\n' '"here" is no line'
parity '3\tpage\t7\tadds\tperhaps\tkn_do\tadding.carries\n' '"perhaps" is none of works'
parity '3\tpage\t7\tadds\tworks\tkn_do, kn_undo\tadding.carries\n' '"kn_undo" is neither public'
parity '3\tpage\t7\tadds\tworks\t.pace\tadding.carries\n' '".pace" is neither public'
parity '3\tpage\t7\tadds\tworks\t--pace\tadding.carries\n' '"--pace" is neither public'
parity '3\tpage\t7\tadds\tworks\tkn_do\tadding.carries, adding.borrows\n' 'no test "adding.borrows"'
parity '3\tpage\t7\tadds\tworks\tkn_do\ttaking.*\n' 'no test "taking.*"'
parity '3\tpage\t7\tadds\tworks\tkn_do\tit was tried by hand\n' 'no test "it was tried by hand"'
parity '3\tpage\t7\ttakes\topen\t-\tadding.carries\n' 'is no reason'
parity '3\tpage\t7\ttakes\tnone\t-\tkn_undo does\n' '"kn_undo" is neither public'
parity '3\tpage\t7\ttakes\topen\t-\tas adding.borrows has it\n' 'no test "adding.borrows"'
finds shell scripts/x 'if true; then\n' 'scripts/x'
finds warnings_gcc kernels/a.c 'static int unused(void)\n{\n    return 1;\n}\n' 'kernels/a.c:7'
# compiled COMMAND...: what the build says of the source, each with a definition of its own.
compiled() {
    local command
    for command in "$@"; do
        printf '{"directory": "%s", "file": "../kernels/a.c", "output": "a.o", "command": "%s -I.. -c ../kernels/a.c"}\n' \
            "$house/build-test" "$command"
    done | paste -sd, | sed 's/.*/[&]/' >"$house/build-test/compile_commands.json"
}
cp "$house/kernels/a.c" "$TMP/a.c"
printf '#ifdef TWO\nstatic int unused(void)\n{\n    return 1;\n}\n#endif\n' >>"$house/kernels/a.c"
compiled "gcc -DONE" "gcc -DTWO" "gcc -DTHREE"
lint warnings_gcc
check "warnings_gcc finds what is there by a definition" fails 'kernels/a.c:8'
compiled "gcc -DONE" "gcc -DTWO -Wall -Wextra -Wshadow -Wstrict-prototypes -Wvla -Werror"
: >"$house/build-test/a.o"
touch -d '1 minute ago' "$house/kernels/a.c"
lint warnings_gcc
check "warnings_gcc believes the build, where a warning was an error" succeeds
touch -d '2 minutes ago' "$house/build-test/a.o"
lint warnings_gcc
check "but not one of an older source" fails 'kernels/a.c:8'
cp "$TMP/a.c" "$house/kernels/a.c"
compiled "gcc"
! command -v clang-format >/dev/null ||
    finds format kernels/a.c 'int  b ;\n' 'not formatted'
! command -v clang >/dev/null ||
    finds warnings_clang kernels/a.c 'static int unused(void)\n{\n    return 1;\n}\n' 'kernels/a.c:7'
lint nonesuch
check "an unknown check is an error" fails "unknown check nonesuch"
finish
