#!/usr/bin/env bash
# tests/cli/chat.sh: generate --chat: a conversation line by line, by the run's template: what one prompt of the whole text
# gives; a context that is full; and what it refuses, in a sentence.
. "$(dirname "$0")/lib.sh"
gpt=$BUILD/models/train_gpt generate=$BUILD/models/generate
[ -x "$gpt" ] && [ -x "$generate" ] || skip "build/models/train_gpt or generate is not built"
cd "$TMP" || exit 1

python3 - <<'END'
import json, random
random.seed(1)
facts = {'sky': 'blue', 'grass': 'green', 'snow': 'white', 'coal': 'black'}
with open('talks.jsonl', 'w') as f:
    for i in range(200):
        said = []
        for _ in range(random.randrange(1, 4)):
            thing = random.choice(list(facts))
            said += [{'role': 'user', 'content': thing}, {'role': 'assistant', 'content': facts[thing]}]
        f.write(json.dumps({'messages': said}) + '\n')
END
# talk FROM LINES OPTION...: what it says to the lines.
talk() {
    local from=$1 lines=$2
    shift 2
    printf '%b' "$lines" | "$generate" --from "$from" --chat --temperature 0 --threads 1 "$@" >"$TMP/said" 2>"$TMP/notes"
    status=$?
    cat "$TMP/said" "$TMP/notes" >"$TMP/output"
}
# one PROMPT: what follows that text, until its end.
one() {
    "$generate" --from "$run" --prompt "$1" --temperature 0 --tokens 20 --threads 1 >"$TMP/one"
    python3 -c 'import sys; text = open("one").read()[:-1]; sys.stdout.write(text[len(sys.argv[1]):].strip(" "))' "$1"
}
nl=$'\n'
while read -r template model; do
    run=run_$template
    run "$gpt" --data talks.jsonl --tokenizer byte --template "$template" --model "$model" --layers 2 --heads 2 --embd 32 --ctx 128 \
        --batch 8 --steps 150 --lr 4e-3 --eval-every 0 --threads 1 --out "$run"
    check "$template: it trains" succeeds
    talk "$run" 'grass\n\nsnow\n/exit\nsky\n'
    check "$template: two lines are answered" eval 'succeeds && [ "$(wc -l <said)" = 2 ]'
    a=$(sed -n '1s/ *$//p' said) b=$(sed -n '2s/ *$//p' said)
    check "$template: it learned to answer" test "$a" = green -a "$b" = white
    case $template in
    chatml) turn() { echo "<|im_start|>user$nl$1<|im_end|>$nl<|im_start|>assistant$nl${2:+$2<|im_end|>$nl}"; } ;;
    llama2) turn() { echo "<s>[INST] $1 [/INST]${2:+ $2 </s>}"; } ;;
    esac
    first=$(turn grass; printf x) first=${first%??} # without echo's line end
    check "$template: the first answer is what follows the whole text" test "$(one "$first")" = "$a"
    both=$(turn grass "$a"; printf x) both=${both%??}
    more=$(turn snow; printf x) more=${more%??}
    check "$template: the second, too" test "$(one "$both$more")" = "$b"
done <<'END'
chatml custom
llama2 llama
END
run=run_chatml
talk "$run" 'grass\nsnow'
check "the end of input ends it; its last line needs no end" eval 'succeeds && [ "$(wc -l <said)" = 2 ]'
cp said alone
talk "$run" 'grass\nsnow' --ranks 2
check "two ranks say the same" cmp said alone
turn() { printf '<|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\n%s' "$1" "${2:+$2<|im_end|>$nl}"; }
talk "$run" 'grass\nsnow\ncoal\nwhy not\n'
check "a full context loses its oldest turn, and says so" eval 'succeeds && says "the context of 128 tokens is full: the oldest turn"'
kept=$(turn snow "$(sed -n 2p said)"; turn coal "$(sed -n 3p said)"; turn "why not"; printf x)
check "the answer is what follows the turns that are left" test "$(one "${kept%x}")" = "$(sed -n 4p said)"
talk "$run" "$(printf 'x%.0s' $(seq 200))\nsnow\n"
check "a line longer than the context is told, and the next one answered" eval 'succeeds && says "say it shorter" && [ "$(cat said)" = white ]'
talk "$run" 'grass\n' --tokens 2
check "an answer that is cut is told" says "as many tokens as --tokens"
talk "$run" 'grass\n' --system 'Be brief.'
check "a system's message" succeeds
run "$generate" --from "$run" --export hf
talk hf 'grass\nsnow'
check "an exported model talks the same" cmp said alone
run "$generate" --from "$run" --export gguf --format gguf
talk gguf 'grass\nsnow'
check "a GGUF has the template, too" cmp said alone
run "$generate" --from gguf --export again
check "and it goes on to transformers" cmp hf/tokenizer_config.json again/tokenizer_config.json
head -c 2000000 /dev/zero | tr '\0' x >long
run "$generate" --from "$run" --chat
check "no input is no conversation" succeeds
python3 -c "
import json
said = json.load(open('hf/tokenizer_config.json'))
json.dump({**said, 'chat_template': '{{ messages }}'}, open('hf/tokenizer_config.json', 'w'))"
run "$generate" --from hf --export other --ranks 2
check "a model with another template is exported, by two ranks" eval 'succeeds && ! grep -q chat_template other/tokenizer_config.json'
"$generate" --from "$run" --chat <long >"$TMP/output" 2>&1
status=$?
check "a line of 2 MB is refused" fails "a line of 2000000 bytes on standard input"
cp talks.jsonl text.txt
check "a plain model" "$gpt" --data text.txt --layers 1 --heads 1 --embd 8 --steps 1 --out plain --threads 1
while IFS='|' read -r words says; do
    eval "run \"$generate\" $words"
    check "refused: $words" fails "$says"
done <<'END_OF_CASES'
--from plain --chat|the model has no chat template on record
--from plain --chat --template chatml|the tokenizer lacks tokens of the template chatml, as <|im_end|>
--from plain --template chatml|--template is for --chat
--from plain --system hi|--system is for --chat
--from run_chatml --chat --prompt hi|--chat
--from run_chatml --chat --print-ids|--print-ids and --chat contradict each other
--from run_chatml --chat --evaluate text.txt|--chat and --evaluate contradict each other
--from run_chatml --chat --template alpaca|--template
END_OF_CASES
finish
