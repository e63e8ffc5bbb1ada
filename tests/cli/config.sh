#!/usr/bin/env bash
# tests/cli/config.sh: options in files: RUN/config.toml repeats a run, ranks included; the command line wins; a
# resumed run leaves it; what is refused, on any rank.
. "$(dirname "$0")/lib.sh"
gpt=$BUILD/models/train_gpt
images=$BUILD/models/train_resnet
[ -x "$gpt" ] && [ -x "$images" ] || skip "build/models/train_gpt or train_resnet is not built"
cd "$TMP" || exit 1
for _ in $(seq 60); do echo "the quick brown fox jumps over the lazy dog"; done >text

# losses FILE: of a log.
losses() { sed -E 's/.*"loss": ([^,]*), "val_loss": ([^,]*),.*/\1 \2/' "$1"; }

run "$gpt" --data text --ctx 8 --layers 1 --heads 1 --embd 8 --steps 8 --no-sync --accum 2 --lr .004 --ranks 2 --threads 1 \
    --eval-every 4 --prompt $'a "b"\n' --tokenizer byte --out run --log first
check "a run of two ranks" succeeds
check "its options are TOML" python3 - <<'END'
try: import tomllib
except ImportError: raise SystemExit(0)
c = tomllib.load(open('run/config.toml', 'rb'))
assert c == {'data': 'text', 'ctx': 8, 'layers': 1, 'heads': 1, 'embd': 8, 'steps': 8, 'no-sync': True, 'accum': 2, 'lr': 0.004,
             'ranks': 2, 'eval-every': 4, 'prompt': 'a "b"\n', 'tokenizer': 'byte', 'out': 'run', 'log': 'first'}, c
END
run "$gpt" --config run/config.toml
check "the same folder isn't used twice" fails "run already holds a checkpoint"
check "nor the log" test "$(wc -l <first)" = 8
run "$gpt" --config run/config.toml --out again --log second --threads 1
check "the run, repeated" eval 'succeeds && says "2 (local)"'
check "has the same losses" diff <(losses first) <(losses second)
check "and the same options but for the folders" diff <(grep -v "^out\|^log\|^threads\|^# threads" run/config.toml) \
    <(grep -v "^out\|^log\|^threads\|^# threads" again/config.toml)
run "$gpt" --config run/config.toml --out one --log third --ranks 1 --lr 0.002 --stop-after 4
check "the command line wins" eval 'succeeds && says "1 (self)" && grep -q "^lr = 0.002" one/config.toml && grep -q "^ranks = 1" one/config.toml'
{ cat run/config.toml; echo 'threads = 1'; } >threads.toml
run "$gpt" --config threads.toml --out sixth --log sixth_log
check "the ranks that a file asks for have its threads" eval 'succeeds && says "2 (local)"'
cp one/config.toml begun
run "$gpt" --resume one --steps 10
check "a resumed run goes on" succeeds
check "and leaves the options with which the run began" cmp begun one/config.toml
run "$gpt" --config run/config.toml --resume one --out other --ranks 1 --steps 12 --log fourth
check "a file beside a checkpoint: its values are given" eval 'succeeds && says "--lr 0.004; 0.002 when it was saved"'
check "a run that goes on elsewhere has a file there, too" grep -q "^steps = 12" other/config.toml
run "$gpt" --resume one --out fifth --threads 1 --steps 12
check "with what the checkpoint recorded" eval 'succeeds && grep -q "^lr = 0.002" fifth/config.toml && grep -q "^no-sync = true" fifth/config.toml'

printf 'plot = true\npatience = 2\n' >>run/config.toml
run "$gpt" --config run/config.toml --resume run --eval-only --ranks 1
check "a run's file serves its evaluation, which leaves the log" eval 'succeeds && says ": val " && [ "$(wc -l <first)" = 8 ]'
run "$gpt" --config run/config.toml --resume run --eval-only --ranks 1 --log first
check "but not a log on the command line" fails "--eval-only and --log contradict each other"

printf 'init = "run"\nsteps = 12\ndata = "text"\nctx = 8\n' >init.toml
run "$gpt" --config init.toml --resume one --threads 1
check "the command line wins over what contradicts it" succeeds

while IFS='|' read -r text says; do
    printf '%b' "$text" >bad.toml
    for ranks in 1 2; do
        run "$gpt" --data text --config bad.toml --ranks $ranks
        check "refused on $ranks ranks: $text" fails "$says"
    done
done <<'END_OF_CASES'
\nstpes = 5|bad.toml:2: unknown option --stpes; did you mean --steps?
lr = "1e-3"|bad.toml:1: lr takes no text; leave the quotes out
lr = 1e-3\nlr = 1e-3|bad.toml:2: lr is in line 1 already
config = "x"|bad.toml:1: a file of options names no other one
[training]|bad.toml:1: tables
momentum = 0.9|bad.toml:1: unknown option --momentum
warmup = 9\nsteps = 5|--warmup 9 is more than the --steps 5
END_OF_CASES
run "$gpt" --config nothing.toml
check "a file that isn't there" fails "cannot open nothing.toml"
run "$gpt" --config .
check "a folder" fails ". is not a regular file"
printf 'ranks = 4097\n' >bad.toml
run "$gpt" --config bad.toml
check "more ranks than there may be" fails "bad.toml:1: --ranks must lie between 1 and 4096"

small_set set
run "$images" --data set --batch 4 --epochs 0.8 --no-flip --schedule step --momentum 0.8 --out images --threads 1 --log pictured
check "images" succeeds
run "$images" --config images/config.toml --out again.images --log again.pictured
check "images, repeated" eval 'succeeds && diff <(losses pictured) <(losses again.pictured)'
run "$gpt" --config images/config.toml
check "another program's options" fails "images/config.toml:8: unknown option --flip"
finish
