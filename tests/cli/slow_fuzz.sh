#!/usr/bin/env bash
# tests/cli/slow_fuzz.sh: libFuzzer makes up inputs for every reader, a minute each (scripts/fuzz).
command -v clang >/dev/null || {
    echo "there is no clang"
    exit 77
}
exec "$(dirname "$0")/../../scripts/fuzz" --tap --seconds "${KNAP_FUZZ_SECONDS:-60}"
