#!/usr/bin/env bash
# tests/cli/text_data.sh: the forms in which train_gpt takes texts: folders and patterns of token files, data of their own
# to validate with, documents, conversations; and what it refuses, in a sentence.
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
--data mnist --tokenizer byte|mnist is a set of images; a text is shakespeare, a file or a folder
--data one.bin --vocab 300 --val-data nowhere|no data set, file or folder 'nowhere'
--data one.bin --vocab 300 --val-data bins/val_0.bin --ctx 500|use --ctx 499 or less
END_OF_CASES

# ---- documents ---------------------------------------------------------------------------------------

python3 - <<'END'
import json, random
random.seed(2)
words = 'the cat sat on a mat and saw the dog that ran to a red hat'.split()
with open('docs.jsonl', 'w') as lines, open('docs.txt', 'w') as text:
    for i in range(300):
        doc = ' '.join(random.choice(words) for _ in range(random.randrange(1, 30)))
        lines.write(json.dumps({'id': i, 'text': doc}) + '\n')
        text.write(doc + '\n===\n')
    lines.write('{"text": "%s"}\n{"text": ""}\n' % ('a cat ' * 5000))
    text.write('a cat ' * 5000 + '\n===\n===\n')
open('bad.jsonl', 'w').write('{"text": "a"}\n{"text": "b}\n')
open('plain.txt', 'w').write('no documents here ' * 100)
END
run "$gpt" --data docs.jsonl --field text "${small[@]}" --log lines.log --out run --prompt "the"
check "documents in lines of JSON" succeeds
run "$gpt" --data docs.txt --separator === "${small[@]}" --log parts.log
check "documents between separators" succeeds
check "both are the same" test "$(losses lines.log)" = "$(losses parts.log)"
run "$BUILD/models/generate" --from run --prompt "the" --tokens 4
check "the run's tokenizer has the end token" eval 'succeeds && grep -q "endoftext" run/step-00000004/tokenizer.json'
for _ in $(seq 400); do printf 'b\n=\n'; done >same.txt
run "$gpt" --data same.txt --separator = --end '<stop>' --layers 1 --heads 1 --embd 16 --ctx 8 --batch 8 --steps 60 --lr 1e-2 --threads 1 \
    --out stops
check "documents with an end of their own" succeeds
run "$BUILD/models/generate" --from stops --prompt b --tokens 4 --temperature 0
check "where generate ends a text, too" eval 'succeeds && [ "$(cat output)" = b ]'
run "$BUILD/models/generate" --from stops --prompt b --tokens 4 --temperature 0 --no-end
check "unless it is to go on" says "b<stop>b<stop>b"
masked=("$gpt" --data docs.jsonl --field text --mask-documents --layers 2 --heads 2 --embd 16 --ctx 32 --steps 4 --threads 1)
for model in custom llama; do
    run "${masked[@]}" --model $model --batch 4 --log one.log
    check "$model: masked documents" succeeds
    run "${masked[@]}" --model $model --batch 2 --ranks 2 --recompute --log two.log
    check "$model: on two ranks, recomputed" succeeds
    check "$model: the same losses" python3 -c "
a, b = $(losses one.log), $(losses two.log)
assert all(abs(x - y) < 1e-5 for x, y in zip(a, b)), (a, b)"
done
run "$tool" train --vocab 300 --out bpe docs.txt
run "$tool" encode --tokenizer bpe --field text --out docs.tokens docs.jsonl
check "knap-tokenize encodes documents" succeeds
"$tool" encode --tokenizer bpe --separator === --print-ids docs.txt >ids 2>&1
check "its ids are those of the file, an end token behind each" python3 -c "
import struct
ids = list(map(int, open('ids').read().split()))
data = open('docs.tokens', 'rb').read()[64:]
assert ids == list(struct.unpack(f'<{len(data) // 2}H', data)) and ids.count(0) == 301 and ids[-1] == 0"
run "$gpt" --data docs.tokens --mask-documents "${small[@]}" --log tokens.log
check "train_gpt masks a token file's documents" succeeds
run "$gpt" --data docs.jsonl --field text --tokenizer bpe --mask-documents "${small[@]}" --log lines.log
check "the same as from the lines" test "$(losses tokens.log)" = "$(losses lines.log)"
refused <<'END_OF_CASES'
--data bad.jsonl --field text|bad.jsonl:2: this line isn't JSON
--data docs.jsonl --field body|docs.jsonl:1: the line's object has no text "body" (--field)
--data docs.jsonl --field text --separator ===|--separator
--data docs.txt --separator $'=\n='|.separator has the end of a line
--data docs.tokens --field text|--field is for texts, and docs.tokens holds tokens
--data plain.txt --mask-documents|which token stands between the documents of plain.txt isn't known
--data docs.jsonl --field text --tokenizer bpe --end '<stop>'|no token '<stop>', which is to end a document
END_OF_CASES
run "$tool" encode --tokenizer bpe --field text --out x.tokens bad.jsonl
check "knap-tokenize names a bad line" fails "bad.jsonl:2: this line isn't JSON"
run "$tool" decode --tokenizer bpe --field text docs.tokens
check "decode takes no --field" fails "leave --field out"
# ---- conversations -----------------------------------------------------------------------------------

python3 - <<'END'
import json, random
random.seed(1)
facts = {'the sky': 'blue', 'grass': 'green', 'snow': 'white', 'coal': 'black'}
with open('talks.jsonl', 'w') as f:
    for i in range(80):
        said = [{'role': 'system', 'content': 'Be brief.'}] if i % 4 == 0 else []
        for _ in range(random.randrange(1, 3)):
            thing = random.choice(list(facts))
            said += [{'role': 'user', 'content': f'What is {thing}?'}, {'role': 'assistant', 'content': f'It is {facts[thing]}.'}]
        pair = {'prompt': said[-2]['content'], 'completion': said[-1]['content']}
        f.write(json.dumps(pair if i % 5 == 0 else {'messages': said}) + '\n')
    f.write('{"messages": [{"role": "user", "content": "And?"}]}\n')
    f.write(json.dumps({'prompt': 'Say much', 'answer': 'well ' * 100}) + '\n')
open('wrong.jsonl', 'w').write('{"prompt": "a", "answer": "b"}\n{"question": "a"}\n')
open('one.jsonl', 'w').write('{"prompt": "a", "answer": "b"}\n')
END
talk=("$gpt" --data talks.jsonl --tokenizer byte --template auto --layers 1 --heads 2 --embd 16 --ctx 120 --steps 6 --eval-every 3
    --eval-steps 4 --threads 1)
run "${talk[@]}" --batch 4 --out talks --log whole.log
check "conversations" eval 'succeeds && says "81 by chatml, in 72 rows to train" && says "1 left out without an answer"'
for how in "--batch 2 --ranks 2" "--batch 2 --accum 2" "--batch 1 --accum 2 --ranks 2 --no-sync"; do
    # shellcheck disable=SC2086
    run "${talk[@]}" $how --log parts.log
    check "the mean is over the counted tokens: $how" python3 -c "
a, b = $(losses whole.log), $(losses parts.log)
assert all(abs(x - y) < 2e-6 * x for x, y in zip(a, b)), (a, b)"
done
run "${talk[@]}" --batch 2 --mask-documents
check "several in a row" eval 'succeeds && grep -qE "81 by chatml, in [1-6][0-9] rows to train" "$TMP/output"'
check "the run's tokenizer has the template's tokens" grep -q 'im_end' talks/step-00000006/tokenizer.json
run "$BUILD/models/generate" --from talks --export chat_hf
check "an export has the template" python3 -c "
import json
config = json.load(open('chat_hf/tokenizer_config.json'))
assert '<|im_start|>' in config['chat_template'] and config['eos_token'] == '<|im_end|>', config"
run "$gpt" --init chat_hf --data talks.jsonl --template auto --steps 1 --batch 2
check "--init follows an exported model's template" eval 'succeeds && says "by chatml"'
mkdir gpt2 && cp "$ROOT"/tests/models/imported/gpt2/* "$ROOT/tests/models/tokenizers/gpt2/tokenizer.json" gpt2
run "$gpt" --init gpt2 --data talks.jsonl --template auto --steps 1 --batch 2
check "--init of a tokenizer with <|endoftext|> alone" eval 'succeeds && says "by plain"'
sed 's/chat_template": "[^"]*"/chat_template": "{{ messages }}"/' -i chat_hf/tokenizer_config.json
refused <<END_OF_CASES
--data wrong.jsonl --template chatml --tokenizer byte|wrong.jsonl:2: neither "messages"
--data one.jsonl --template chatml --tokenizer byte|of 1 conversations the 1 that fit are kept for validation
--data talks.jsonl --tokenizer byte|name the field that is the text (--field text), or the template
--data plain.txt --template auto|plain.txt:1: this line isn't JSON
--data docs.tokens --tokenizer byte|docs.tokens comes with the tokenizer that made its tokens
--data talks.jsonl --template chatml --tokenizer byte --ctx 4|none with an answer in its first 5 tokens
--data talks.jsonl --template chatml|of which no char tokenizer is made
--data talks.jsonl --template chatty --tokenizer byte|--template
--data talks.jsonl --template plain --tokenizer byte --field text|--field is for documents, and --template says where conversations end; leave one of them out
--data docs.tokens --template chatml|--template is for texts
END_OF_CASES
run "$gpt" --init gpt2 --data talks.jsonl --template chatml --steps 1
check "refused: tokens that the model has no room for" fails "it has no room for the tokens of --template; try --template plain"
run "$gpt" --init chat_hf --data talks.jsonl --template auto --steps 1
check "refused: a template that isn't known" fails "the chat template is none of those that are known"
finish
