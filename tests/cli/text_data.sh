#!/usr/bin/env bash
# tests/cli/text_data.sh: the forms in which train_gpt takes texts: folders and patterns of token files, data of their own
# to validate with; and what it refuses, in a sentence.
. "$(dirname "$0")/lib.sh"
gpt=$BUILD/models/train_gpt tool=$BUILD/models/knap-tokenize
[ -x "$gpt" ] && [ -x "$tool" ] || skip "build/models/train_gpt or knap-tokenize is not built"
cd "$TMP" || exit 1
small=(--layers 1 --heads 2 --embd 16 --batch 2 --steps 4 --threads 1)
losses() { python3 -c 'import json, sys; print([json.loads(l)["loss"] for l in open(sys.argv[1])])' "$1"; }
# refused: lines "options of train_gpt|what it says".
refused() {
    local words says
    while IFS='|' read -r words says; do
        eval "run \"$gpt\" ${small[*]} $words"
        check "refused: $words" fails "$says"
    done
}

# ---- several files -----------------------------------------------------------------------------------

python3 - <<'END'
import os, random, struct
random.seed(5)
ids = [random.randrange(300) for _ in range(3000)]
os.mkdir('bins')
def write(name, ids): open(name, 'wb').write(struct.pack(f'<{len(ids)}H', *ids))
def llmc(name, ids): open(name, 'wb').write(struct.pack('<256i', 20240520, 1, len(ids), *[0] * 253) + struct.pack(f'<{len(ids)}H', *ids))
write('one.bin', ids)
for i in range(3): write(f'bins/train_{i}.bin', ids[i * 1000:i * 1000 + 1000])
write('bins/val_0.bin', ids[:500])
llmc('fine.bin', ids)
END
run "$gpt" --data one.bin --vocab 300 "${small[@]}" --log one.log
check "tokens of one file" succeeds
run "$gpt" --data 'bins/train_*.bin' --vocab 300 "${small[@]}" --log several.log
check "tokens of several files" eval 'succeeds && says "bins/train_*.bin: 2700 tokens to train, 300 to validate"'
check "several files are one text" test "$(losses one.log)" = "$(losses several.log)"
run "$gpt" --data 'bins/train_*.bin' --val-data bins/val_0.bin --vocab 300 "${small[@]}"
check "validation has data of its own" eval 'succeeds && says "3000 tokens to train, 500 to validate, of bins/val_0.bin"'
run "$gpt" --data fine.bin --val-data fine.bin "${small[@]}" --ranks 2
check "llm.c's files, on two ranks" eval 'succeeds && says "3000 tokens to train, 3000 to validate"'
refused <<'END_OF_CASES'
--data 'bins/x*.bin' --vocab 300|no file matches bins/x*.bin
--data bins|say how many kinds there are
--data bins --vocab 200|outside the vocabulary of 200
--data fine.bin --val-data bins --vocab 300|--vocab is for tokens without a header, which fine.bin isn't
--data one.bin --vocab 300 --val-data nowhere|no data set or file 'nowhere'
--data one.bin --vocab 300 --val-data bins/val_0.bin --ctx 500|use --ctx 499 or less
END_OF_CASES
finish
