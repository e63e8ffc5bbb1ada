# scripts/lib.sh: shared by the scripts: messages, packages, meson. Sourced, from bash.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT" || exit 1

say() { printf '%s\n' "$*"; }
die() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# Prints the comment block at the top of the calling script: its --help.
usage() { sed -n '2,/^$/{/^#/!q;s/^# \{0,1\}//p}' "$0"; }

jobs_count() { nproc 2>/dev/null || echo 2; }

# ---- packages ---------------------------------------------------------------------------------

BUILD_PACKAGES="meson ninja-build gcc libc6-dev pkg-config libdnnl-dev libjansson-dev zlib1g-dev
    libxxhash-dev libpng-dev libjpeg-dev libpcre2-dev libutf8proc-dev
    liblapack-dev libsqlite3-dev"
TEST_PACKAGES="libcriterion-dev clang-format clang valgrind python3 libopenmpi-dev openmpi-bin"

# have_header FILE: the C compiler finds it.
have_header() { printf '#include <%s>\n' "$1" | cc -E -o /dev/null - 2>/dev/null; }

# have PACKAGE: it is installed, or its needed files are found elsewhere.
have() {
    if [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; then
        return 0
    fi
    case $1 in
    ninja-build) command -v ninja ;;
    gcc) command -v cc ;;
    libc6-dev) have_header stdio.h ;;
    libdnnl-dev) have_header oneapi/dnnl/dnnl.h ;;
    libjansson-dev) pkg-config --exists jansson ;;
    zlib1g-dev) pkg-config --exists zlib ;;
    libxxhash-dev) pkg-config --exists libxxhash ;;
    libpng-dev) pkg-config --exists libpng ;;
    libjpeg-dev) pkg-config --exists libjpeg ;;
    libpcre2-dev) pkg-config --exists libpcre2-8 ;;
    libutf8proc-dev) pkg-config --exists libutf8proc ;;
    libsqlite3-dev) pkg-config --exists 'sqlite3 >= 3.38' ;;
    libopenmpi-dev) command -v mpicc ;;
    openmpi-bin) command -v mpirun ;;
    libcriterion-dev) pkg-config --exists criterion ;;
    *) command -v "$1" ;;
    esac >/dev/null 2>&1
}

# need PACKAGE...: installs the missing ones, in one go.
need() {
    local missing=() as_root=() p
    for p in "$@"; do
        have "$p" || missing+=("$p")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    command -v apt-get >/dev/null || die "missing: ${missing[*]} (Debian's names). There is no" \
        "apt-get here to install them: install them with your system's packages and run this again."
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null || die "missing: ${missing[*]}. Installing them takes root or" \
            "sudo: ask an administrator to run 'apt-get install ${missing[*]}'."
        as_root=(sudo)
    fi
    say "installing ${missing[*]}"
    "${as_root[@]}" apt-get -qq update || die "apt-get update failed: see its message above."
    local log
    log=$("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -y install \
        --no-install-recommends "${missing[@]}" 2>&1) || {
        printf '%s\n' "$log" >&2
        die "apt-get could not install ${missing[*]}: see its message above."
    }
}

# ---- building ---------------------------------------------------------------------------------

# Debian's meson, even where another one comes first in PATH.
if [ -x /usr/bin/meson ]; then MESON=/usr/bin/meson; else MESON=meson; fi

# gpu_archs: the compute capabilities of this machine's GPUs as -Dgpu_arch takes them, oldest first;
# nothing without a GPU.
gpu_archs() {
    timeout 20 nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null |
        sed -n 's/^ *\([0-9]*\)\.\([0-9]\) *$/\1\2/p' | sort -nu | paste -sd, -
}

# configure DIR OPTION...: a meson build folder with these options, made or brought up to date.
# A folder with these options stays as it is; one made by hand keeps its other options.
configure() {
    local dir=$1 want how=()
    shift
    want="$ROOT $*"
    if [ -f "$dir/build.ninja" ]; then
        if [ ! -f "$dir/.options" ]; then
            how=(--reconfigure)
        elif [ "$(cat "$dir/.options")" = "$want" ]; then
            return 0
        else
            rm -rf "$dir"
        fi
    fi
    mkdir -p "$dir"
    "$MESON" setup "${how[@]}" "$dir" "$ROOT" "$@" >"$dir/setup.txt" 2>&1 || {
        cat "$dir/setup.txt" >&2
        return 1
    }
    printf '%s' "$want" >"$dir/.options"
}

# compile DIR TARGET...: quiet unless something fails.
compile() {
    local dir=$1 log=$1/compile.txt
    shift
    ninja -C "$dir" "$@" >"$log" 2>&1 || {
        grep -vE '^\[[0-9]+/[0-9]+\] (Compiling|Linking|Generating)' "$log" >&2
        return 1
    }
}
