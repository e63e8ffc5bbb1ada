#!/usr/bin/env bash
# tests/cli/bench_args.sh: options of the benchmarks (bench/args.h). They aren't built here; each
# must list in its usage what it reads, and a small program stands for all of them.
. "$(dirname "$0")/lib.sh"

# reads FILE: every option that a benchmark reads is in its usage, and the usage is looked at first.
reads() {
    local name
    grep -A1 '^int main' "$1" >/dev/null && grep -A2 '^int main' "$1" | grep -q 'args_begin(argc, argv,' || {
        echo "main doesn't begin with args_begin"
        return 1
    }
    for name in $(grep -oE '\(argc, argv, "--[a-z_]+"' "$1" | grep -oE -- '--[a-z_]+' | sort -u); do
        grep -qE -- "\\[${name}[] ]" <(grep -v '^ \*' "$1") || {
            echo "$name isn't in the usage"
            return 1
        }
    done
}
for f in $(grep -l '"bench/args.h"' "$ROOT"/bench/*.c); do
    check "${f##*/} lists its options" reads "$f"
done

cat >"$TMP/bench.c" <<'C'
#include "bench/args.h"
int main(int argc, char **argv)
{
    args_begin(argc, argv, "Measures.\n  bench [--batch N] [--graph] [--rate X]", 1);
    printf("batch %d rate %g%s\n", (int)number(argc, argv, "--batch", 8),
           real(argc, argv, "--rate", 0.5), flag(argc, argv, "--graph") ? " graph" : "");
    return 0;
}
C
check "a benchmark compiles" ${CC:-cc} -Wall -Wextra -Werror -I"$ROOT" -o "$TMP/bench" "$TMP/bench.c"
run "$TMP/bench"
check "without options" says "batch 8 rate 0.5"
run "$TMP/bench" --graph --batch 64 --rate 1e3 word
check "with options" says "batch 64 rate 1000 graph"
run "$TMP/bench" --help
check "--help lists the options" says "[--batch N] [--graph] [--rate X]"
check "and is no error" test "$status" = 0
run "$TMP/bench" --bach 64
check "an option that isn't there is an error" fails "--bach: there is no such option"
check "which lists those that are" says "[--batch N]"
run "$TMP/bench" --grap
check "also the beginning of one" fails "--grap: there is no such option"
run "$TMP/bench" --batch
check "a value is missing" fails "--batch: its value is missing"
run "$TMP/bench" --batch --graph
check "another option is no value" fails "--batch: its value is missing"
run "$TMP/bench" --batch many
check "a value is no number" fails "--batch many: the value must be a number"
run "$TMP/bench" --batch 1.5
check "a value is no whole number" fails "--batch 1.5: the value must be a whole number"
run "$TMP/bench" one two
check "words beyond the usage" fails "two: a word that belongs to no option"
finish
