#!/usr/bin/env bash
# tests/cli/cuda_versions.sh: meson asks nvcc what it knows: an older toolkit, here a fake, builds for the GPUs and with
# the options that it has, and with cuDNN from the release that has all that Knap needs.
. "$(dirname "$0")/lib.sh"

if [ -x /usr/bin/meson ]; then meson=/usr/bin/meson; else meson=meson; fi
mkdir -p "$TMP"/cuda/{bin,include,lib64}
touch "$TMP/cuda/include/cuda_runtime_api.h"
echo 'int cudart;' | "${CC:-cc}" -c -x c -o "$TMP/cudart.o" - && ar rc "$TMP/cuda/lib64/libcudart_static.a" "$TMP/cudart.o" ||
    skip "no C compiler or no ar"
# toolkit ARCHITECTURES OPTION: an nvcc that knows these and refuses that option
toolkit() {
    cat >"$TMP/cuda/bin/nvcc" <<S
#!/bin/sh
case "\$*" in
*--list-gpu-arch*) for a in $1; do echo compute_\$a; done ;;
*$2*) echo "nvcc fatal   : Unknown option '$2'" >&2; exit 1 ;;
esac
S
    chmod +x "$TMP/cuda/bin/nvcc"
}
# set_up OPTION...: configures a build that has no cudnn.h but the fake's
set_up() {
    rm -rf "$TMP/build"
    run env PATH="$TMP/cuda/bin:$PATH" "$meson" setup "$TMP/build" "$ROOT" -Dtests=false -Donednn=disabled -Dmpi=disabled "$@"
}

toolkit "75 80 90" --compress-mode
touch "$TMP/cuda/include/cublasLt.h" # empty, and before one that the system may have
set_up -Dcuda=auto
check "a toolkit without cuBLASLt's header" succeeds
check "is no CUDA, for someone who wants the CPU" grep -qE "^ *CUDA *: no: no cublasLt.h beside nvcc" "$TMP/output"
set_up -Dcuda=enabled
check "and an error for someone who wants it" fails "-Dcuda=enabled: no cublasLt.h beside nvcc"
echo 'void cublasLtMatmul(void);' >"$TMP/cuda/include/cublasLt.h"
echo 'enum { CUDNN_BACKEND_OPERATION };' >"$TMP/cuda/include/cudnn.h"
set_up -Dcuda=enabled
check "an older toolkit" succeeds
check "builds for the GPUs that it knows" says "sm_80, sm_90 and PTX for later GPUs (not sm_100, sm_120, which this nvcc doesn't know)"
check "and says so" grep -q 'code=\[sm_80,sm_90,compute_80\]' "$TMP/build/build.ninja"
check "with its options" test -z "$(grep compress-mode "$TMP/build/build.ninja")"
check "without a cuDNN that is too old" says "NO: its header is older than 9.8"
set_up -Dcuda=enabled -Dgpu_arch=100,120
check "no GPU that it knows" fails "this nvcc compiles for none of sm_100, sm_120; it knows 75, 80, 90"
toolkit "80 90 100 120" --no-such-option
echo 'enum { CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR };' >"$TMP/cuda/include/cudnn.h"
set_up -Dcuda=enabled
check "a newer toolkit" succeeds
check "builds for all of them" says "sm_80, sm_90, sm_100, sm_120 and PTX for later GPUs"
check "smaller" grep -q -- --compress-mode=size "$TMP/build/build.ninja"
check "with cuDNN" grep -qE "^ *cuDNN *: YES" "$TMP/output"
mkdir -p "$TMP/cuda/targets/x86_64-linux"
mv "$TMP/cuda/include" "$TMP/cuda/lib64" "$TMP/cuda/targets/x86_64-linux/"
set_up -Dcuda=enabled
check "conda's folders are found" succeeds
check "with their headers" grep -q "isystem$TMP/cuda/targets/x86_64-linux/include" "$TMP/build/build.ninja"
check "no library is opened by a number of today's" test -z "$(grep -rnE '\.so\.1[0-9]' "$ROOT/kernels" "$ROOT/comm")"
finish
