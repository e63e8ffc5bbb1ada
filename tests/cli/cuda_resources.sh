#!/usr/bin/env bash
# tests/cli/cuda_resources.sh: registers, shared memory and spills of every CUDA kernel of the
# build, so that no launch fails on a GPU for lack of them; the 16-byte accesses of the hot ones, so
# that none silently loses its pace. The checks themselves are tested, too.
. "$(dirname "$0")/lib.sh"

command -v python3 >/dev/null || skip "no python3"
command -v c++filt >/dev/null || skip "no c++filt (binutils)"
set -- "$BUILD"/kernels/cuda/*.cu.res
[ -f "$1" ] || skip "no CUDA kernels in $BUILD: no nvcc, or -Dcuda=disabled"

python3 "$ROOT/tests/cli/cuda_resources.py" "$BUILD" || bad=1
python3 "$ROOT/tests/cli/cuda_accesses.py" "$BUILD" || bad=1
cases=6

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

# PTX of kernels that lost something: loads, stores, the knowledge where they go.
cat >"$TMP/wrong/softmax.cu.ptx" <<'PTX'
.visible .entry _Z14softmax_kernelIfLb1EEv12softmax_callIT_Ei(
    .param .align 8 .b8 _Z14softmax_kernelIfLb1EEv12softmax_callIT_Ei_param_0[240]
)
{
    ld.param.u64 %rd1, [_Z14softmax_kernelIfLb1EEv12softmax_callIT_Ei_param_0];
    ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];
    ld.global.v2.f32 {%f1, %f2}, [%rd1];
    ld.shared.v4.f32 {%f1, %f2, %f3, %f4}, [%r1];
    @%p1 st.global.f32 [%rd1], %f1;
    st.v4.f32 [%rd1], {%f1, %f2, %f3, %f4};
    ret;
}
.visible .entry _Z14strange_kernelIfEvT_(
    .param .f32 _Z14strange_kernelIfEvT__param_0
)
{
    st.global.v2.f64 [%rd1], {%fd1, %fd2};
}
PTX
run python3 "$ROOT/tests/cli/cuda_accesses.py" "$TMP/wrong"
lost="softmax_kernel<float, true> (softmax.cu): "
check "a hot kernel that lost its 16-byte loads is found" fails "${lost}1 loads of 16 bytes, 6 expected"
check "so are its stores" fails "${lost}0 stores of 16 bytes, 1 expected"
check "narrower accesses" fails "${lost}2 narrower accesses, 0 expected"
check "accesses of unknown memory" fails "${lost}1 accesses whose memory the compiler doesn't know"
check "local memory" fails "${lost}8 bytes of local memory, 0 expected"
check "a kernel without a row" fails "strange_kernel<float> (softmax.cu): stores 16 bytes at a time"
check "and a row without a kernel" fails "norm_kernel<(float|kn_bf16|kn_f16), true: no kernel fits"

# nvcc.sh with a compiler that counts: results serve again, until a file that the compiler read changes.
mkdir "$TMP/compiled"
cd "$TMP/compiled" || exit 1
cat >nvcc <<'END'
#!/usr/bin/env bash
[ "$1" != --version ] || { echo 1 && exit; }
echo >>runs
echo ptx >"${*: -1}/a.ptx"
cat a.cu a.cuh >a.o
printf 'a.o: a.cu \\\n a.cuh\n' >a.d
echo "a.cu: a warning" >&2
END
chmod +x nvcc
compiled() {
    rm -f a.o a.d a.ptx a.res
    run env NVCC_CACHE="$TMP/kept" "$ROOT/kernels/cuda/nvcc.sh" a.res a.ptx ./nvcc "$@" -MF a.d -o a.o a.cu
    cat a.cu a.cuh | cmp - a.o && cmp a.ptx <(echo ptx) && [ -s a.d ] && [ -s a.res ] && says "a warning" >/dev/null &&
        [ "$(wc -l <runs)" = "$runs" ]
}
echo 1 >a.cu
echo 2 >a.cuh
runs=1
check "nvcc.sh compiles" compiled
check "the same result serves again" compiled
echo 3 >a.cuh
runs=2
check "not for another header" compiled
runs=3
check "nor for another option" compiled -O0
echo 2 >a.cuh
check "the first one is still there" compiled
finish
