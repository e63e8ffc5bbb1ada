#!/usr/bin/env bash
# tests/cli/cuda_resources.sh: registers, shared memory and spills of every CUDA kernel of the
# build, so that no launch fails on a GPU for lack of them; the check itself is tested, too.
. "$(dirname "$0")/lib.sh"

command -v python3 >/dev/null || skip "no python3"
command -v c++filt >/dev/null || skip "no c++filt (binutils)"
set -- "$BUILD"/kernels/cuda/*.cu.res
[ -f "$1" ] || skip "no CUDA kernels in $BUILD: no nvcc, or -Dcuda=disabled"

python3 "$ROOT/tests/cli/cuda_resources.py" "$BUILD" || bad=1
cases=4

mkdir "$TMP/wrong"
cat >"$TMP/wrong/softmax.cu.res" <<'RES'
ptxas info    : Compiling entry function '_Z14softmax_kernelIfLb1EEv12softmax_callIT_Ei' for 'sm_90'
ptxas info    : Function properties for _Z14softmax_kernelIfLb1EEv12softmax_callIT_Ei
    8 bytes stack frame, 400 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 130 registers, used 1 barriers, 8 bytes cumulative stack size, 50000 bytes smem
ptxas info    : Compiling entry function '_Z14strange_kernelIfEvT_' for 'sm_90'
ptxas info    : Used 10 registers, used 1 barriers
RES
run python3 "$ROOT/tests/cli/cuda_resources.py" "$TMP/wrong"
check "a kernel without a bound is found" fails "strange_kernel (softmax.cu, sm_90): no KN_KERNEL"
check "so are too many registers" fails "softmax_kernel (softmax.cu, sm_90): 130 registers x 512 threads"
check "too much shared memory" fails "50000 bytes, besides dynamic ones"
check "and spills" fails "400 bytes, 130 registers"
finish
