#!/usr/bin/env bash
# tests/cli/json_memory.sh: memory runs out, and stays out, in the middle of a text of JSON. jansson takes no notice
# where its buffer for a string can't grow, and ends the program later; each end must be one with a sentence.
. "$(dirname "$0")/lib.sh"

lib=$BUILD/tests/liballoc_faults.so
[ -e "$lib" ] || skip "$lib is missing: the tests aren't built"
[ "$(nm -D "$BUILD/models/knap-checkpoint" | grep -c __asan)" = 0 ] || skip "a sanitizer has its own allocator"

# Many small values, then a string that takes most of the memory that a parse keeps for its end.
python3 - "$TMP/model.safetensors" <<'END'
import json, struct, sys
header = {'__metadata__': {**{f'k{i}': 'v' for i in range(1000)}, 'long': 'v' * 20000}}
text = json.dumps(header).encode()
open(sys.argv[1], 'wb').write(struct.pack('<Q', len(text)) + text)
END
inspect() { env LD_PRELOAD="$lib" "$@" "$BUILD/models/knap-checkpoint" inspect "$TMP/model.safetensors"; }

run inspect ALLOC_COUNT="$TMP/count"
check "with memory it is read" succeeds
all=$(cat "$TMP/count")
# CUDA's runtime library takes memory before main, and crashes without.
env LD_PRELOAD="$lib" ALLOC_COUNT="$TMP/before" "$BUILD/models/knap-checkpoint" --help >/dev/null
before=$(cat "$TMP/before")

# sound: with the n-th allocation and all after it gone, in turn: a sentence about memory and a status of its own.
sound() {
    local n
    for ((n = before + 1; n <= all; n += 1 + (all - before) / 60)); do
        run inspect ALLOC_AT=$n ALLOC_MORE=1
        if [ "$status" -ge 126 ]; then
            echo "allocation $n of $all: status $status"
            cat "$TMP/output"
            return 1
        fi
    done
}
check "from any allocation on without, it ends with a sentence" sound
check "and says so" fails "memory"

finish
