#!/usr/bin/env bash
# tests/cli/example_images.sh: examples/gan.c and examples/diffusion.c learn, write the same digits on 1 rank and on 2,
# and they are a picture.
. "$(dirname "$0")/lib.sh"

[ -x "$BUILD/examples/gan" ] || skip "the examples are not built"
found=no
IFS=: read -r -a folders <<<"${KNAP_DATA:-}:${HOME:-}/.cache/knap"
for folder in "${folders[@]}"; do
    [ ! -f "$folder/mnist/train-images-idx3-ubyte.gz" ] || found=yes
done
[ $found = yes ] || skip "MNIST is not on this machine (KNAP_DATA)"
export OMP_NUM_THREADS=1

# picture FILE WIDTH HEIGHT: a whole PNG of grey pixels of that size, of many shades.
picture() {
    python3 - "$@" <<'END'
import struct, sys, zlib
data, at, body = open(sys.argv[1], 'rb').read(), 8, b''
assert data[:8] == b'\x89PNG\r\n\x1a\n', 'no PNG'
while at < len(data):
    size, kind = struct.unpack('>I4s', data[at:at + 8])
    part = data[at + 8:at + 8 + size]
    assert struct.pack('>I', zlib.crc32(kind + part)) == data[at + 8 + size:at + 12 + size], f'checksum of {kind}'
    if kind == b'IHDR':
        shape = struct.unpack('>IIBB', part[:10])
    body += part if kind == b'IDAT' else b''
    at += 12 + size
assert kind == b'IEND' and shape == (int(sys.argv[2]), int(sys.argv[3]), 8, 0), shape
rows = zlib.decompress(body)
assert len(rows) == shape[1] * (shape[0] + 1), len(rows)
assert len(set(rows)) > 100, 'few shades'
END
}

# images NAME STEPS SIDE LOW HIGH N: the program learns in STEPS steps: the first number of its lines begins between LOW
# and HIGH and ends below an Nth of it. On 1 rank and on 2 it prints the same lines, and writes the same picture of
# SIDE x SIDE pixels.
images() {
    local ranks
    for ranks in 1 2; do
        run timeout 600 "$BUILD/examples/$1" --threads 1 --ranks $ranks --steps "$2" "${out[@]}"
        check "$1: on $ranks ranks it runs to its end" succeeds
        cp "$TMP/output" "$TMP/lines$ranks"
        [ ${#out[@]} = 0 ] || mv "$TMP/picture.png" "$TMP/$ranks.png"
    done
    check "$1: the loss falls" loss_falls "$4" "$5" "$6"
    check "$1: the losses are the same on 1 and 2 ranks" cmp "$TMP/lines1" "$TMP/lines2"
    if [ ${#out[@]} != 0 ]; then
        check "$1: and the pictures" cmp "$TMP/1.png" "$TMP/2.png"
        check "$1: its picture can be read" picture "$TMP/1.png" "$3" "$3"
    fi
    run "$BUILD/examples/$1" --ranks 3
    check "$1: 3 ranks are refused by a sentence" fails "micro-batches don't divide among 3 ranks"
    run "$BUILD/examples/$1" --help
    check "$1: --help lists the options" says "--out PATH"
}

out=(--out "$TMP/picture.png")
run "$BUILD/examples/gan" --steps 0 "${out[@]}"
if says "libpng wasn't found" >"$TMP/check"; then
    echo "# without libpng no pictures are written"
    out=()
fi
images gan 16 242 0.5 2 1.2
images diffusion 12 122 0.8 1.3 2
finish
