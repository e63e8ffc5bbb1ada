#!/bin/sh
# nvcc.sh RESOURCES PTX NVCC ARGUMENT...: compiles, and keeps what ptxas says that each kernel takes
# of a GPU in the file RESOURCES, and the PTX in the file PTX; shows everything else that the
# compilers say.
resources=$1
ptx=$2
shift 2
between=$ptx.between # nvcc's intermediate files
mkdir -p "$between"
"$@" -Xptxas -v --keep --keep-dir "$between" 2>"$resources"
status=$?
[ $status -eq 0 ] && mv "$between"/*.ptx "$ptx" || status=1
rm -rf "$between"
grep -vE '^ptxas info|^ +[0-9]+ bytes stack frame' "$resources" >&2
exit $status
