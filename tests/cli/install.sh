#!/usr/bin/env bash
# tests/cli/install.sh: meson install puts libknap, its headers, knap.pc and the programs in place,
# and a program outside the tree builds against them with pkg-config and runs.
. "$(dirname "$0")/lib.sh"

[ -f "$ROOT/knap.h" ] || skip "knap.h is not written yet"
if [ -x /usr/bin/meson ]; then meson=/usr/bin/meson; else meson=meson; fi

run "$meson" install -C "$BUILD" --destdir "$TMP/stage" --no-rebuild
check "meson install" succeeds
[ "$status" = 0 ] || finish
prefix=$TMP/stage$("$meson" introspect "$BUILD" --buildoptions |
    python3 -c 'import json, sys
print([o["value"] for o in json.load(sys.stdin) if o["name"] == "prefix"][0])')
lib=$(dirname "$(find "$prefix" -name libknap.so)")
check "libknap.so.0 is there" test -e "$lib/libknap.so.0"
check "knap.h is there" test -f "$prefix/include/knap/knap.h"
check "knap.pc is there" test -f "$lib/pkgconfig/knap.pc"
check "train_gpt is there" test -x "$prefix/bin/train_gpt"
check "generate is there" test -x "$prefix/bin/generate"
check "knap-checkpoint is there" test -x "$prefix/bin/knap-checkpoint"

# Hidden visibility: every exported name is Knap's.
nm -D --defined-only "$lib/libknap.so" | awk '{print $3}' | grep -v '^kn_' >"$TMP/foreign"
check "exports only kn_ names" test ! -s "$TMP/foreign"
grep -rhoE 'KN_API [^;(]*kn_\w+\(' "$prefix/include/knap" | grep -oE 'kn_\w+\($' | tr -d '(' | sort -u >"$TMP/declared"
nm -D --defined-only "$lib/libknap.so" | awk '{print $3}' | sort >"$TMP/exported"
check "the headers declare hundreds of functions" test "$(wc -l <"$TMP/declared")" -gt 500
comm -23 "$TMP/declared" "$TMP/exported" >"$TMP/lost"
check "exports every function that a header declares: $(tr '\n' ' ' <"$TMP/lost")" test ! -s "$TMP/lost"

# pkg-config with the staged prefix in place of the final one.
knap_flags() { PKG_CONFIG_PATH=$lib/pkgconfig pkg-config --define-variable=prefix="$prefix" "$@" knap; }
cat >"$TMP/each.c" <<'END'
#include <knap.h>
int main(void)
{
    const kn_initializer start[] = { KN_NORMAL_INIT(1), KN_UNIFORM_INIT(0, 1), KN_XAVIER_UNIFORM_INIT(1),
                                     KN_ORTHOGONAL_INIT(1), KN_ZEROS_INIT };
    kn_linear l = { 0 };
    kn_linear_init(&l, NULL, "", 2, 3, .weight = start[3]);
    kn_tensor *y = kn_call(&l, kn_ones(KN_F32, KN_CPU, KN_SHAPE(1, 2)));
    kn_backward(kn_cross_entropy(y, kn_zeros(KN_I64, KN_CPU, KN_SHAPE(1)), .smoothing = 0.1));
    static const kn_adamw_options rates[] = { { ._size = sizeof(kn_adamw_options), .lr = 0.1 },
                                              { ._size = sizeof(kn_adamw_options), .lr = 0.2, .beta1 = 0.8 } };
    y = kn_leaky_relu(kn_softmax(y));
    kn_optim *o = kn_adamw_(&l, rates[0]);
    kn_step(o);
    kn_optim_free(o);
    kn_module_free(&l);
    return kn_ok() ? 0 : 1;
}
END
mkdir "$TMP/outside"
cd "$TMP/outside" || exit 1
# shellcheck disable=SC2046
run cc -std=gnu17 -Wall -Wextra -Wpedantic -Werror ../each.c -o each $(knap_flags --cflags --libs)
check "a program that includes knap.h compiles without warnings" succeeds
for compiler in gcc clang; do
    command -v "$compiler" >/dev/null || continue
    # shellcheck disable=SC2046
    run "$compiler" -std=gnu17 -Wall -Wextra -Wpedantic -Werror -fsyntax-only ../each.c $(knap_flags --cflags)
    check "with $compiler, too" succeeds
done
run env LD_LIBRARY_PATH="$lib" ./each
check "and runs" succeeds

printf '#include <knap.h>\nkn_tensor *f(kn_tensor *x)\n{\n    return kn_relu(kn_exp(kn_pow(x, x)));\n}\n' >../wrong.c
# shellcheck disable=SC2046
run cc -std=gnu17 -c ../wrong.c -o wrong.o $(knap_flags --cflags)
check "a wrong argument is an error of its own place" fails "wrong.c:4:"
# gcc adds the function's declaration, clang a line for each of the calls around it, too.
check "in few lines" test "$(grep -cE ': (error|note): ' "$TMP/output")" -le "$(cc --version | grep -q clang && echo 5 || echo 2)"

if [ -f "$ROOT/examples/mlp.c" ]; then
    cp "$ROOT/examples/mlp.c" .
    # shellcheck disable=SC2046
    run cc -O2 mlp.c -o mlp $(knap_flags --cflags --libs)
    check "the example of the README builds outside the tree" succeeds
    # shellcheck disable=SC2046
    run cc -O2 "$ROOT/examples/spiral.c" -o spiral $(knap_flags --cflags --libs)
    check "and the one of docs/own-model.md, which takes sines" succeeds
    found=no
    IFS=: read -r -a folders <<<"${KNAP_DATA:-}:${HOME:-}/.cache/knap"
    for folder in "${folders[@]}"; do
        [ ! -f "$folder/mnist/train-images-idx3-ubyte.gz" ] || found=yes
    done
    if [ $found = yes ]; then
        run env LD_LIBRARY_PATH="$lib" OMP_NUM_THREADS=1 timeout 600 ./mlp --steps 20
        check "and runs 20 steps" succeeds
        check "and tells its loss" says "loss"
    else
        echo "ok $((cases += 1)) - the example runs # SKIP no MNIST in KNAP_DATA or ~/.cache/knap"
    fi
fi
finish
