#!/usr/bin/env bash
# tests/cli/imported.sh: generate and train_gpt begin with folders of transformers, on one rank and on two; what they
# train goes on from its checkpoints, and others begin with those.
. "$(dirname "$0")/lib.sh"

gpt=$BUILD/models/train_gpt generate=$BUILD/models/generate
[ -x "$gpt" ] && [ -x "$generate" ] || skip "train_gpt or generate is not built"
need_pcre2
cd "$TMP" || exit 1
tokenizer=$ROOT/tests/models/tokenizers/gpt2/tokenizer.json
for model in gpt2 llama llama_tied llama_rope mistral qwen2 qwen3; do
    cp -r "$ROOT/tests/models/imported/$model" . && chmod -R u+w "$model" && cp "$tokenizer" "$model/" || exit 1
    mapfile -t ids < <(python3 -c "import json; w = json.load(open('$model/want.json')); print(*w['prompt'], *w['greedy'], sep='\n')")
    "$BUILD/models/knap-tokenize" decode --tokenizer "$model" "${ids[@]}" >want
    echo >>want
    for ranks in 1 2; do
        "$generate" --from $model --prompt 'The quick brown fox' --tokens 24 --temperature 0 --ranks $ranks >got 2>err
        check "generate --from $model on $ranks ranks writes what transformers does" cmp got want
    done
done

text=(--steps 3 --data "$ROOT/tests/models/tokenizers/text") small=(--ctx 16 --batch 2 "${text[@]}")
run "$gpt" --init llama_rope "${small[@]}" --out run
check "train_gpt --init trains" eval 'succeeds && says "begins with" && says "vocabulary 700"'
run "$gpt" --resume run --steps 5
check "and goes on" succeeds
run "$gpt" --init llama_rope "${text[@]}" --batch 1
check "rows are as long as the model's context" says "1 rows of 64"
run "$gpt" --init gpt2 "${small[@]}" --tokenizer gpt2
check "the same tokenizer may be named" succeeds
run "$generate" --from run --tokens 3 --prompt a
check "and writes" succeeds
run "$gpt" --init run "${small[@]}" --ranks 2 --ema 0.9 --dropout 0.1
check "a checkpoint is something to begin with, too" succeeds
run "$gpt" --init gpt2 "${small[@]}" --lr 1e-30 --warmup 0 --log log1
run "$gpt" --init gpt2 "${text[@]}" --ctx 16 --batch 1 --lr 1e-30 --warmup 0 --ranks 2 --log log2
check "two ranks begin with the weights of one" python3 -c "
import json
a, b = ([json.loads(l)['loss'] for l in open(f'log{i}') if 'loss' in l] for i in (1, 2))
assert len(a) == len(b) == 3 and max(abs(x - y) for x, y in zip(a, b)) < 1e-5, (a, b)"

for model in run gpt2 llama_rope; do
    for ranks in 1 2; do
        run "$generate" --from $model --export out-$model --ranks $ranks
        check "$model is exported by $ranks ranks" eval 'succeeds && says "exported to out-$model"'
        cmp <("$generate" --from $model --prompt 'The' --tokens 9) <("$generate" --from out-$model --prompt 'The' --tokens 9)
        check "and is the same" test $? = 0
    done
done
run "$generate" --from gpt2 --export out-gpt2 --dtype bf16
check "in 16 bits" python3 -c "
import json, struct
with open('out-gpt2/model.safetensors', 'rb') as f:
    header = json.loads(f.read(struct.unpack('<Q', f.read(8))[0]))
assert all(t['dtype'] == 'BF16' for n, t in header.items() if n != '__metadata__'), header
c = json.load(open('out-gpt2/config.json'))
assert c['dtype'] == c['torch_dtype'] == 'bfloat16' and c['n_ctx'] == 64 and c['eos_token_id'] == 0, c"

mapfile -t ids < <(python3 -c "import json; w = json.load(open('gpt2/want.json')); print(','.join(map(str, w['prompt']))); print(*w['prompt'], *w['greedy'])")
run "$generate" --from gpt2 --prompt-ids "${ids[0]}" --print-ids --tokens 24 --temperature 0 --no-end
check "ids in, ids out" says "${ids[1]}"
printf 'The quick brown fox' >prompt
"$generate" --from gpt2 --prompt-file prompt --tokens 9 --temperature 0 --ranks 2 >got 2>err
"$generate" --from gpt2 --prompt-file - --tokens 9 --temperature 0 <prompt >want 2>err
check "a prompt from a file or standard input" eval 'cmp got want && grep -q "The quick brown fox" got'
for model in gpt2 llama_rope qwen3; do # several texts at once, of two lengths; each is the one that its seed gives alone
    many=(--from $model --prompt 'The quick brown fox' --prompt a --samples 3 --tokens 30 --temperature 1.5)
    number=0
    for prompt in 'The quick brown fox' a; do
        for sample in 1 2 3; do
            number=$((number + 1))
            echo "--- $number of 6: prompt $((1 + number / 4)), seed $((40 + number))"
            "$generate" --from $model --prompt "$prompt" --tokens 30 --temperature 1.5 --seed $((40 + number))
        done
    done >want 2>err
    for ranks in 1 2; do
        "$generate" "${many[@]}" --seed 41 --ranks $ranks >got 2>err
        check "$model: texts at once on $ranks ranks are those written alone" cmp got want
    done
done
printf 'The quick brown fox\r\n\na' >lines
"$generate" --from qwen3 --prompts lines --samples 3 --tokens 30 --temperature 1.5 --seed 41 --ranks 2 >got 2>err
check "a prompt in each line of a file" cmp got want
"$generate" --from qwen3 --prompts - --samples 3 --tokens 30 --temperature 1.5 --seed 41 <lines >got 2>err
check "or of standard input" cmp got want
run "$generate" --from gpt2 --prompt-ids 1,2 --prompt-ids 3 --print-ids --tokens 4 --temperature 0 --no-end --dtype bf16
check "several lists of ids, computed in 16 bits" \
    eval 'succeeds && says "1 of 2: prompt 1, seed 1337" && grep -Eq "^1 2( [0-9]+){4}$" output && grep -Eq "^3( [0-9]+){4}$" output'
python3 - <<'END_OF_PYTHON'
import json
w = json.load(open('gpt2/want.json'))
end = w['greedy'][5]
c = json.load(open('gpt2/config.json'))
json.dump({**c, 'eos_token_id': [699, end]}, open('gpt2/config.json', 'w'))
print(*w['prompt'], *w['greedy'][:w['greedy'].index(end)], file=open('want', 'w'))
END_OF_PYTHON
"$generate" --from gpt2 --prompt-ids "${ids[0]}" --print-ids --tokens 24 --temperature 0 >got 2>err
check "the text ends where the configuration says" cmp got want

for ranks in 1 2; do
    run "$generate" --from llama --evaluate "$ROOT/tests/models/tokenizers/ids" --stride 20 --ranks $ranks
    check "a text is evaluated on $ranks ranks" eval 'succeeds && says "perplexity" && says "bits a byte"'
    cp output "score-$ranks"
done
check "to the same figures" cmp score-1 score-2

mkdir no-tokenizer && cp gpt2/model* gpt2/config.json no-tokenizer/
mkdir no-model pickled && cp gpt2/config.json pickled/ && echo >pickled/pytorch_model.bin
cp -r llama cut && head -c 9000 llama/model-00001-of-00003.safetensors >cut/model-00001-of-00003.safetensors
while IFS='|' read -r words says; do
    eval "run $words"
    check "refused: $words" fails "$says"
done <<'END_OF_CASES'
"$generate" --from no-tokenizer --tokens 1|holds no tokenizer
"$generate" --from pickled --tokens 1|write its pytorch_model.bin again
"$generate" --from gpt2 --export gpt2|that Knap didn't export
"$generate" --from gpt2 --export run|holds the checkpoint of a run
"$generate" --from gpt2 --export x --temperature 0|--temperature and --export contradict each other
"$generate" --from gpt2 --evaluate prompt --prompt x|--prompt and --evaluate contradict each other
"$generate" --from no-model --tokens 1|no-model holds no model
"$generate" --from gpt2 --stride 4|--stride is for --evaluate
"$generate" --from gpt2 --evaluate prompt --stride 65|.stride 65
"$generate" --from gpt2 --evaluate nowhere|nowhere
"$generate" --from gpt2 --samples 2 --temperature 0|--temperature 0 are all the same
"$generate" --from gpt2 --samples 0|--samples must lie between 1 and
"$generate" --from gpt2 --prompts /dev/null|has no prompt
"$generate" --from gpt2 --prompts nowhere|cannot open the prompt nowhere
"$generate" --from gpt2 --prompts lines --prompt a|--prompt and --prompts contradict each other
"$generate" --from gpt2 --prompt a --prompt ''|the prompt is empty (number 2)
"$generate" --from gpt2 --prompt $'a\x1eb'|the character U+001E
"$generate" --from gpt2 --evaluate prompt --samples 2|--samples and --evaluate contradict each other
"$generate" --from gpt2 --prompt-ids 1,700|700 is outside the model's vocabulary of 700
"$generate" --from gpt2 --prompt-ids 1,,2|give ids with commas
"$generate" --from gpt2 --prompt-ids 1 --prompt-file prompt|--prompt-file and --prompt-ids contradict each other
"$generate" --from gpt2 --prompt-ids 1 --prompt a|--prompt
"$generate" --from gpt2 --prompt-file nowhere|cannot open the prompt nowhere
"$generate" --from cut --tokens 1|model-00001-of-00003.safetensors
"$generate" --from nowhere --tokens 1|there is no folder or file nowhere
"$gpt" --init gpt2 "${small[@]}" --layers 3|--layers 3: the model of --init gpt2 has 2; leave it out
"$gpt" --init gpt2 "${small[@]}" --model llama|the model of --init gpt2 has custom
"$gpt" --init gpt2 "${text[@]}" --ctx 65|is longer than the model's context of 64
"$gpt" --init gpt2 "${small[@]}" --tokenizer char|the model of --init gpt2 has a tokenizer of its own
"$gpt" --init gpt2 --resume run|--init
"$gpt" --resume out-gpt2|begin a training of their own (--init)
END_OF_CASES
finish
