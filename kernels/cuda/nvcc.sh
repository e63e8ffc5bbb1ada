#!/bin/sh
# nvcc.sh RESOURCES NVCC ARGUMENT...: compiles, and keeps what ptxas says that each kernel takes of
# a GPU in the file RESOURCES; everything else that the compilers say is shown.
resources=$1
shift
"$@" -Xptxas -v 2>"$resources"
status=$?
grep -vE '^ptxas info|^ +[0-9]+ bytes stack frame' "$resources" >&2
exit $status
