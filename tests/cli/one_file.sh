#!/usr/bin/env bash
# tests/cli/one_file.sh: generate and train_gpt begin with GGUFs and llm.c's weights, on one rank and on two; what
# generate exports in these formats is read again; a tied model with a head of its own.
. "$(dirname "$0")/lib.sh"

gpt=$BUILD/models/train_gpt generate=$BUILD/models/generate
[ -x "$gpt" ] && [ -x "$generate" ] || skip "train_gpt or generate is not built"
need_pcre2
cd "$TMP" || exit 1
tokenizer=$ROOT/tests/models/tokenizers/gpt2
cp "$ROOT"/tests/models/one_file/* . && chmod u+w ./* || exit 1

said() { # the ids of a prompt, and the likeliest behind it
    python3 -c "import json; w = json.load(open('$1.json')); print(','.join(map(str, w['prompt']))); print(*w['prompt'], *w['greedy'])"
}
for file in *.gguf *.bin; do
    mapfile -t ids < <(said "${file%.*}")
    for ranks in 1 2; do
        run "$generate" --from "$file" --prompt-ids "${ids[0]}" --print-ids --tokens 24 --temperature 0 --no-end --ranks $ranks
        check "$file on $ranks ranks: the ids of transformers" says "${ids[1]}"
    done
done
for file in gpt2_q8 llama_f16 llama_f32 qwen2_bf16; do
    mapfile -t ids < <(said $file)
    "$generate" --from $file.gguf --prompt 'The quick brown fox' --print-ids --tokens 24 --temperature 0 --no-end >got 2>err
    check "$file has its own tokenizer" grep -q "${ids[1]}" got
done
"$generate" --from gpt2_llmc.bin --tokenizer "$tokenizer" --prompt 'The quick brown fox' --tokens 9 --temperature 0 >got 2>err
check "llm.c's weights with a tokenizer by name" grep -q '^The quick brown fox' got

small=(--steps 3 --ctx 16 --batch 2)
text=(--data "$ROOT/tests/models/tokenizers/text")
run "$gpt" --init llama_f16.gguf "${small[@]}" "${text[@]}" --out run --ranks 2
check "train_gpt --init trains with a GGUF" eval 'succeeds && says "begins with" && says "vocabulary 700"'
run "$gpt" --init gpt2_q8.gguf "${small[@]}" "${text[@]}" --tokenizer "$tokenizer"
check "a GGUF's tokenizer may be named by its own file" succeeds
run "$generate" --from run --tokens 3 --prompt a
check "and it writes" succeeds
run "$gpt" --init gpt2_llmc16.bin "${small[@]}" "${text[@]}" --tokenizer "$tokenizer"
check "and with llm.c's weights and a tokenizer" succeeds
python3 -c "import struct; open('plain.bin', 'wb').write(struct.pack('<400H', *(i * 7919 % 700 for i in range(400))))"
for ranks in 1 2; do
    kinds=(--vocab 700)
    [ $ranks = 1 ] || kinds=() # the model's
    run "$gpt" --init gpt2_llmc.bin "${small[@]}" --data plain.bin "${kinds[@]}" --ranks $ranks
    check "$ranks ranks train llm.c's weights with tokens, without a tokenizer" succeeds
done
python3 -c "
import struct
ids = [i * 7919 % 700 for i in range(400)]
open('ids.bin', 'wb').write(struct.pack('<3i', 20240520, 1, 400) + bytes(1012) + struct.pack('<400H', *ids))"
run "$gpt" --init gpt2_llmc.bin "${small[@]}" --data ids.bin
check "llm.c's tokens have more kinds than this small model" fails "50257 kinds of token, the model's vocabulary 700"
for ranks in 1 2; do
    run "$gpt" --init gpt2_q8.gguf --steps 3 --ctx 16 --batch $((2 / ranks)) "${text[@]}" --lr 1e-30 --warmup 0 --log log$ranks --ranks $ranks
done
check "two ranks begin with the weights of one" python3 -c "
import json
a, b = ([json.loads(l)['loss'] for l in open(f'log{i}') if 'loss' in l] for i in (1, 2))
assert len(a) == len(b) == 3 and max(abs(x - y) for x, y in zip(a, b)) < 1e-5, (a, b)"

run "$gpt" --model custom --layers 1 --heads 2 --embd 16 "${small[@]}" "${text[@]}" --no-bias --out chars
run "$gpt" --model custom --layers 1 --heads 2 --embd 16 "${small[@]}" "${text[@]}" --tokenizer byte --out bytes
for model in chars bytes run gpt2_llmc.bin; do
    format=gguf named=()
    [ $model != gpt2_llmc.bin ] || named=(--tokenizer "$tokenizer")
    for ranks in 1 2; do
        run "$generate" --from $model "${named[@]}" --export out-$model --format $format --ranks $ranks
        check "$model becomes a $format by $ranks ranks" eval 'succeeds && says "exported to out-$model" && [ "$(ls out-$model)" = model.gguf ]'
        cmp <("$generate" --from $model "${named[@]}" --prompt 'The' --tokens 9) <("$generate" --from out-$model --prompt 'The' --tokens 9)
        check "and is the same" test $? = 0
    done
done
for model in gpt2_q8.gguf gpt2_llmc16.bin; do
    for dtype in f32 bf16; do
        run "$generate" --from $model --export out-llmc-$dtype --format llmc --dtype $dtype --ranks 2
        check "$model becomes llm.c's of $dtype" succeeds
        run "$generate" --from out-llmc-$dtype/model.bin --prompt-ids 3,1,4 --print-ids --tokens 5 --temperature 0
        check "which is read" succeeds
    done
done
cmp -s <(tail -c +1025 out-llmc-bf16/model.bin) <(tail -c +1025 gpt2_llmc16.bin)
check "what came from llm.c comes back bit for bit" test $? = 0
run "$generate" --from run --export half --format gguf --dtype f16
check "a GGUF in 16 bits is smaller" eval 'succeeds && [ "$(stat -c %s half/model.gguf)" -lt "$(stat -c %s out-run/model.gguf)" ]'

# A tied model with a head of its own, in another file: the embedding again, or zeros.
head_of() { # folder, name of the embedding, same or zeros: writes head.safetensors, with a head of the same shape
    python3 - "$@" <<'END_OF_PYTHON'
import json, struct, sys
folder, name = sys.argv[1], sys.argv[2]
with open(f'{folder}/model.safetensors', 'rb') as f:
    size = struct.unpack('<Q', f.read(8))[0]
    header = json.loads(f.read(size))
    begin, end = header[name]['data_offsets']
    f.seek(8 + size + begin)
    data = f.read(end - begin) if sys.argv[3] == 'same' else bytes(end - begin)
text = json.dumps({'lm_head.weight': {**header[name], 'data_offsets': [0, len(data)]}}).encode()
open(f'{folder}/head.safetensors', 'wb').write(struct.pack('<Q', len(text)) + text + data)
END_OF_PYTHON
}
cp -r "$ROOT/tests/models/imported/llama_tied" tied && chmod -R u+w tied && cp "$tokenizer/tokenizer.json" tied/
ids=(--prompt-ids 3,1,4 --print-ids --tokens 3 --temperature 0 --no-end)
run "$generate" --from tied "${ids[@]}"
cp output want
head_of tied model.embed_tokens.weight same
run "$generate" --from tied "${ids[@]}" --ranks 2
check "a head that is the embedding is none" cmp output want
head_of tied model.embed_tokens.weight zeros
run "$generate" --from tied "${ids[@]}" --ranks 2
check "another one is read, and a note says so" eval 'says "3 1 4 0 0 0" && says "it is read as untied, as transformers does"'
run "$generate" --from gpt2_llmc.bin --tokenizer "$tokenizer" --export gpt && head_of gpt transformer.wte.weight zeros
run "$generate" --from gpt "${ids[@]}"
check "a GPT has no head of its own" fails "'lm_head.weight' differs from its token embedding"

printf 'GGUF' >cut.gguf
head -c 60000 llama_f16.gguf >short.gguf
head -c 60000 gpt2_llmc.bin >short.bin
echo text >text.gguf
mkdir other && cp qwen3_f32.gguf other/model.gguf
while IFS='|' read -r words says; do
    eval "run $words"
    check "refused: $words" fails "$says"
done <<'END_OF_CASES'
"$generate" --from cut.gguf --tokens 1|ends within its header
"$generate" --from short.gguf --tokens 1|behind the end of the file
"$generate" --from short.bin --tokens 1|aren't those of a GPT of 2 layers
"$generate" --from text.gguf --tokens 1|text.gguf is no model: neither GGUF nor llm.c's weights
"$generate" --from gpt2_llmc.bin --tokens 1|holds no tokenizer, as all of llm.c's files: name GPT-2's
"$generate" --from bytes --tokenizer "$tokenizer" --tokens 1|the tokenizer has 700 ids, the model's vocabulary 256
"$generate" --from llama_f16.gguf --export x --format llmc|llm.c's files hold GPT-2s, and the model is a Llama
"$generate" --from gpt2_q8.gguf --export x --format llmc --dtype f16|of f32 or bf16, not f16
"$generate" --from gpt2_q8.gguf --export other --format gguf|other holds a model.gguf that Knap didn't export
"$generate" --from gpt2_q8.gguf --export half|half holds a model.gguf, an export of another format
"$generate" --from gpt2_q8.gguf --export half --format llmc --dtype f32|half holds a model.gguf, an export of another format
"$generate" --from gpt2_q8.gguf --format gguf|--format is for --export
"$gpt" --init gpt2_llmc.bin "${small[@]}" "${text[@]}"|holds no tokenizer, as all of llm.c's files
"$gpt" --init gpt2_q8.gguf "${small[@]}" "${text[@]}" --tokenizer byte|has a tokenizer of its own
END_OF_CASES
finish
