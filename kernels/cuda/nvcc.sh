#!/bin/sh
# nvcc.sh RESOURCES PTX NVCC ARGUMENT...: compiles, and keeps what ptxas says that each kernel takes
# of a GPU in the file RESOURCES, and the PTX in the file PTX; shows everything else that the
# compilers say. NVCC_CACHE=FOLDER: results lie there too, and serve again where the command, the
# compiler and all files that it read are the same, in any checkout (scripts/test sets it).
resources=$1
ptx=$2
shift 2
before=
for word in "$@"; do
    case $before in
    -o) object=$word ;;
    -MF) depends=$word ;;
    esac
    before=$word
done
root=$(cd "$(dirname "$0")/../.." && pwd)

hash() { sha256sum | cut -c1-32; }
# The bytes of all files that the last such command read.
files_read() {
    sed "s|^[^:]*:||; s|\\\\$||; s|@ROOT@|$root|g" "$same_command" 2>/dev/null |
        xargs sha256sum 2>/dev/null | cut -c1-64
}
# Whether one of them changed since the file $began.
changed() {
    sed "s|^[^:]*:||; s|\\\\$||; s|@ROOT@|$root|g" "$same_command" |
        xargs sh -c 'find -L "$@" -prune -cnewer "$0"' "$began" | grep -q .
}
show() { grep -vE '^ptxas info|^ +[0-9]+ bytes stack frame' "$resources" >&2; }

same_command=
case $root in *[!A-Za-z0-9_./+-]*) NVCC_CACHE= ;; esac # lists of files hold paths as they are
if [ -n "${NVCC_CACHE:-}" ] && mkdir -p "$NVCC_CACHE"; then
    same_command=$NVCC_CACHE/$({ "$1" --version && "${NVCC_CCBIN:-c++}" --version &&
        env | grep -E '^(NVCC_[AP]|CPATH=|C(PLUS)?_INCLUDE_PATH=)' | sort; printf '%s\n' "$@"; } |
        sed "s|$root|@ROOT@|g" | hash)
    kept=$same_command-$(files_read | hash)
    if [ -d "$kept" ] && cp "$kept/o" "$object" && cp "$kept/res" "$resources" &&
        cp "$kept/ptx" "$ptx"; then
        sed "s|@ROOT@|$root|g" "$same_command" >"$depends"
        touch "$kept" "$same_command"
        show
        exit 0
    fi
fi

between=$ptx.between # nvcc's intermediate files
mkdir -p "$between"
began=$between/began
: >"$began"
"$@" -Xptxas -v --keep --keep-dir "$between" 2>"$resources"
status=$?
[ $status -eq 0 ] && mv "$between"/*.ptx "$ptx" || status=1
show
if [ $status -eq 0 ] && [ -n "$same_command" ]; then
    sed "s|$root|@ROOT@|g" "$depends" >"$same_command.$$" && mv "$same_command.$$" "$same_command"
    kept=$same_command-$(files_read | hash)
    ! changed && mkdir -p "$kept.$$" && cp "$object" "$kept.$$/o" &&
        cp "$resources" "$kept.$$/res" && cp "$ptx" "$kept.$$/ptx" &&
        mv -T "$kept.$$" "$kept" 2>/dev/null || rm -rf "$kept.$$"
    # what wasn't used for a month
    find "$NVCC_CACHE" -mindepth 1 -maxdepth 1 -mtime +30 -exec rm -rf {} +
fi
rm -rf "$between"
exit $status
