#!/usr/bin/env bash
# tests/cli/slow_onednn3.sh: the kernels, and training over ranks, with oneDNN 3, where the system's is
# oneDNN 2. KNAP_ONEDNN3 names a folder with include/oneapi/dnnl/dnnl.h and lib/libdnnl.so; else pip
# installs it into a temporary folder.
. "$(dirname "$0")/lib.sh"

. "$ROOT/scripts/lib.sh"

place=${KNAP_ONEDNN3:-$TMP/onednn}
if [ -z "${KNAP_ONEDNN3:-}" ]; then
    command -v pip >/dev/null || skip "KNAP_ONEDNN3 names no installation of oneDNN 3, and there is no pip to get one"
    pip install --quiet --no-deps --ignore-installed --prefix "$place" onednn-cpu-gomp onednn-devel-cpu-gomp \
        >"$TMP/pip" 2>&1 || skip "pip could not install onednn-cpu-gomp: $(tail -n 1 "$TMP/pip")"
fi
header=$(find "$place" -path '*/oneapi/dnnl/dnnl.h' 2>/dev/null | head -n 1)
library=$(find "$place" -name libdnnl.so 2>/dev/null | head -n 1)
[ -n "$header" ] && [ -n "$library" ] || skip "$place has no oneapi/dnnl/dnnl.h or no libdnnl.so"
include=${header%/oneapi/dnnl/dnnl.h} lib=${library%/libdnnl.so}

build=$TMP/build
run "$MESON" setup "$build" "$ROOT" --buildtype=debugoptimized -Dcriterion=disabled -Dcuda=disabled \
    "-Dc_args=-I$include" "-Dc_link_args=-L$lib -Wl,-rpath,$lib"
check "meson finds it" succeeds
run ninja -C "$build" tests/test_kernels tests/test_autograd tests/test_fsdp tests/comm/rank_program
check "Knap builds with it" succeeds
[ "$bad" = 0 ] || finish
run "$build/tests/test_fsdp" --machine
check "it is oneDNN 3 that runs" says "oneDNN 3."
for isa in base avx2 avx512; do
    [ "$(KNAP_ISA=$isa "$build/tests/test_fsdp" --machine | cut -d, -f1)" = $isa ] || continue
    run env KNAP_ISA=$isa "$build/tests/test_kernels"
    check "$isa: kernels" succeeds
    run env KNAP_ISA=$isa "$build/tests/test_autograd"
    check "$isa: autograd" succeeds
    run env KNAP_ISA=$isa "$build/tests/test_fsdp" same_bits random. feature.
    check "$isa: training over ranks gives the bits of one process" succeeds
done
finish
