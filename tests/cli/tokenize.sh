#!/usr/bin/env bash
# tests/cli/tokenize.sh: knap-tokenize trains, encodes, decodes; train_gpt trains on what it wrote, and with its
# tokenizer, whose file a checkpoint keeps; and what it refuses, in a sentence.
. "$(dirname "$0")/lib.sh"

tool=$BUILD/models/knap-tokenize gpt=$BUILD/models/train_gpt
[ -x "$tool" ] || skip "knap-tokenize is not built"
golden=$ROOT/tests/models/tokenizers
need_pcre2
cd "$TMP" || exit 1
small=(--layers 1 --heads 2 --embd 16 --ctx 16 --batch 2 --steps 4)

check "info prints kind, ids, merges and added tokens" eval 'succeeds && says "kind        bpe" && says "<|endoftext|> (0)"'
run "$tool"
check "without arguments it explains them, and fails" eval 'fails "give a command: train, encode, decode or info" && says "knap-tokenize encode --tokenizer T --out FILE"'
run "$tool" --help
check "--help explains the commands" eval 'succeeds && says "knap-tokenize decode --tokenizer T FILE|ID..."'
run "$tool" train --vocab 700 --out new "$golden/text"
check "train writes a folder" eval 'succeeds && says "700 ids, new/tokenizer.json"'
check "the merges are those of the tokenizers library" python3 -c "
import json
mine, theirs = (json.load(open(p))['model'] for p in ('new/tokenizer.json', '$golden/gpt2/tokenizer.json'))
assert mine['vocab'] == theirs['vocab'] and mine['merges'] == theirs['merges']"
run "$tool" train --vocab=600 --pattern '\p{L}+|\d|[^\p{L}\d]+' --special '<a>' --special '<b>' --by-line --least 2 --out own.json "$golden/text"
check "train takes a pattern, tokens and a file" eval 'succeeds && says "own.json"'
run "$tool" info --tokenizer own.json
check "the tokens come first" says "<a> (0) <b> (1)"

run "$tool" encode --tokenizer new --out text.tokens "$golden/text"
check "encode writes tokens" eval 'succeeds && says "bytes a token, text.tokens"'
"$tool" decode --tokenizer new text.tokens >back 2>err
check "decode gives the text back" cmp back "$golden/text"
run "$tool" encode --tokenizer new --print-ids --behind '<|endoftext|>' "$golden/ids" "$golden/ids"
read -ra ids <"$TMP/output"
check "--print-ids prints ids, --behind puts one behind each file" eval 'succeeds && [ "${ids[-1]}" = 0 ] && [ "$(grep -o "\b0\b" "$TMP/output" | wc -l)" = 2 ]'
"$tool" decode --tokenizer new "${ids[@]}" >back 2>err
check "decode takes ids" eval 'cmp back <(cat "$golden/ids"; printf "<|endoftext|>"; cat "$golden/ids"; printf "<|endoftext|>")'
printf 'any \xff\xfe bytes \xc3' >bytes
run "$tool" encode --tokenizer "$golden/llama3" --print-ids bytes
read -ra ids <"$TMP/output"
"$tool" decode --tokenizer "$golden/llama3" "${ids[@]}" >back 2>err
check "bytes that are no UTF-8 come back" cmp back bytes

run "$tool" train --vocab 600 --out own.json --overwrite "$golden/text"
check "train --overwrite replaces a tokenizer" succeeds
mkdir -p sets/tinyshakespeare && cp "$golden/text" sets/tinyshakespeare/input.txt
KNAP_DATA=$PWD/sets run "$tool" train --vocab 600 --out named.json shakespeare
check "a text may be a data set's name" eval 'succeeds && cmp own.json named.json'
run "$gpt" --data text.tokens "${small[@]}" --sample-every 4 --sample-tokens 3
check "train_gpt trains on a token file" succeeds
run "$gpt" --data "$golden/text" --tokenizer new "${small[@]}" --out run
check "train_gpt trains with a tokenizer's folder" succeeds
check "the checkpoint keeps its file" cmp new/tokenizer.json run/step-00000004/tokenizer.json
rm -r new
run "$gpt" --resume run --steps 6
check "a resumed run has it from there" succeeds
run "$BUILD/models/generate" --from run --tokens 4 --prompt 'The cat'
check "generate writes with it" eval 'succeeds && says "The cat"'

printf '{}' >empty.json
printf 'junk' >x.model
# SentencePiece's: the pieces <unk> and another of a type, of a BPE, and what follows
pieces() { printf "\n\x09\n\x05<unk>\x18\x02\n\x06\n\x02$1\x18\x$2\x12\x02\x18\x02${3:-}"; }
pieces '  ' 04 >wide.model
pieces aa 04 '\x1a\x0e\x12\x0c\x04\0\0\0\0\0\0\0a  \0' >map.model
pieces aa 04 '\x1a\x04\x12\x02\x04\0' >short.model
pieces aa 01 '\x1a\x02\x28\0' >odd.model
pieces '  ' 04 '\x1a\x02\x20\0' >kept.model
run "$tool" info --tokenizer kept.model
check "a SentencePiece model with its user's symbol is read" eval 'succeeds && says "  (1)"'
while IFS='|' read -r words says; do
    eval "run \"$tool\" $words"
    check "refused: $words" fails "$says"
done <<'END_OF_CASES'
cook|the command "cook" is unknown
encode x|encode: give --tokenizer
encode --tokenizer own.json bytes|give --out FILE
encode --tokenizer own.json --out t --behind '<c>' bytes|the tokenizer has no such token
encode --tokenizer own.json --out t|give at least one file of text
encode --tokenizer own.json --out t missing|missing
encode --tokenizer missing.json --out t bytes|cannot open the tokenizer file
encode --tokenizer empty.json --out t bytes|it has no "model"
encode --tokenizer . --out t bytes|holds no tokenizer
encode --tokenizer x.model --out t bytes|is no SentencePiece model
info --tokenizer wide.model|takes away spaces behind others, but not those of its user's symbols
info --tokenizer map.model|but not those of its table of characters
info --tokenizer short.model|its table of characters ("precompiled_charsmap") is damaged
info --tokenizer odd.model|spaces behind its words, or as they are
encode --tokenizer own.json --out bytes bytes|is one of the texts
encode --tokenizer own.json --out empty.json bytes|is a file that isn't of tokens
encode --tokenizer own.json --out . bytes|is a folder
encode --tokenizer own.json --out t text.tokens|is a token file already
encode --tokenizer own.json --out t --print-ids bytes|--print-ids and --out contradict each other
decode --tokenizer own.json --out t text.tokens|leave --out out
encode --tokenizer own.json --vocab 300 --out t bytes|encode: --vocab is only for train; leave --vocab out
train --vocab 300 --tokenizer own.json --out t bytes|train: --tokenizer is only for encode|decode|info
info --tokenizer own.json --print-ids|info: --print-ids is only for encode
train --vocab 300 --out own.json bytes|own.json is there already
train --vocab 300 --pattern gpt4 --out t bytes|no pattern called 'gpt4'
encode --tokenizer own.json --out no/such/t bytes|cannot write
decode --tokenizer own.json 1,x|is neither a token file nor an id
decode --tokenizer own.json 999999|outside the vocabulary
decode --tokenizer own.json|give a token file, or ids
train --out t bytes|give --vocab N
train --vocab 300 bytes|give --out FOLDER
train --vocab 257 --special 'a b' --out t bytes|it takes 258
train --vocab 300 --pattern '(' --out t bytes|isn't one
train --vocab 10 --out t bytes|--vocab
train --vocab 300 --out own.json/t bytes|own.json/t
END_OF_CASES
run "$gpt" --data bytes --tokenizer empty.json "${small[@]}"
check "train_gpt refuses a file that is no tokenizer" fails 'it has no "model"'
run "$gpt" --data bytes --tokenizer nothing "${small[@]}"
check "train_gpt names the tokenizer that isn't there" fails "nothing"
finish
