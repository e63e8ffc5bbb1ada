#!/usr/bin/env bash
# tests/cli/cuda_plans.sh: cuDNN makes plans for attention, convolution and batch norm without a GPU, from
# descriptions of GPUs. cuDNN needs a driver: this test makes one without a GPU whose functions all succeed.
# KNAP_PLANS=part: each plan for one of the GPUs, in turn; else each plan for each of them.
. "$(dirname "$0")/lib.sh"

plans=$BUILD/tests/gpu/cuda_plans
[ -x "$plans" ] || skip "$plans is not built: no nvcc or no cudnn.h"
for stub in /usr/local/cuda/lib64/stubs/libcuda.so "${CUDA_HOME:-/usr/local/cuda}"/lib*/stubs/libcuda.so; do
    [ ! -f "$stub" ] || break
done
[ -f "$stub" ] || skip "CUDA's stub of libcuda.so isn't there"

# The functions that return data; all others return 0.
own='cuInit cuDriverGetVersion cuDeviceGetCount cuLibraryLoadData cuLibraryGetKernel cuKernelGetFunction
cuGetErrorString cuGetErrorName cuGetProcAddress cuGetProcAddress_v2'
{
    cat <<'C'
#define _GNU_SOURCE
#include <dlfcn.h>
int cuInit(unsigned f) { return f * 0 + 100; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuDeviceGetCount(int *v) { *v = 0; return 100; }
int cuLibraryLoadData(void **l) { *l = (void *)0x1000; return 0; }
int cuLibraryGetKernel(void **k) { *k = (void *)0x2000; return 0; }
int cuKernelGetFunction(void **f) { *f = (void *)0x3000; return 0; }
int cuGetErrorString(int e, const char **s) { *s = "none"; return e * 0; }
int cuGetErrorName(int e, const char **s) { *s = "NONE"; return e * 0; }
int cuGetProcAddress_v2(const char *s, void **p)
{
    void *h = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    *p = h ? dlsym(h, s) : 0;
    return *p ? 0 : 500;
}
int cuGetProcAddress(const char *s, void **p) { return cuGetProcAddress_v2(s, p); }
C
    nm -D --defined-only "$stub" | awk -v own="$own" '
        BEGIN { split(own, list); for (i in list) skip[list[i]] = 1 }
        $2 == "T" { sub(/@.*/, "", $3); if (!($3 in skip)) print "int " $3 "(void) { return 0; }" }'
} >"$TMP/driver.c"
mkdir "$TMP/driver"
"${CC:-gcc}" -shared -fPIC -w -o "$TMP/driver/libcuda.so.1" "$TMP/driver.c" -ldl ||
    skip "the driver for this test does not compile"

part=0
for device in h200:90 a100:80 b200:100 r5090:120; do
    part=$((part + 1))
    LD_LIBRARY_PATH=$TMP/driver${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} run timeout 600 "$plans" \
        "$ROOT/tests/gpu/devices/${device%:*}.json" "${device#*:}" \
        $([ "${KNAP_PLANS:-}" != part ] || echo $part/4)
    [ "$status" != 77 ] || skip "$(cat "$TMP/output")"
    check "plans for ${device%:*}" succeeds
done
finish
