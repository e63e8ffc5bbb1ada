#!/usr/bin/env bash
# tests/cli/advice.sh: an error says what to do, and that works: each row runs a command that is refused, finds the advice
# in its sentence, and runs the command as advised. Every option, command and variable that a sentence names is there.
. "$(dirname "$0")/lib.sh"
train=$BUILD/models/train_gpt generate=$BUILD/models/generate tool=$BUILD/models/knap-checkpoint
[ -x "$train" ] && [ -x "$generate" ] && [ -x "$tool" ] || skip "build/models/train_gpt, generate or knap-checkpoint is not built"

for _ in $(seq 60); do echo "the quick brown fox jumps over the lazy dog"; done >"$TMP/text"
sed 's/quick brown/brown quick/' "$TMP/text" >"$TMP/other"
new=("$train" --data "$TMP/text" --layers 1 --heads 2 --embd 16 --ctx 8 --batch 2 --threads 1 --eval-every 0 --steps 4)
run timeout 120 "${new[@]}" --stop-after 2 --out "$TMP/kept"
check "a run to go on from" succeeds
on=("$train" --resume "$TMP/run" --threads 1)
merge=("$tool" merge "$TMP/run" --out "$TMP/merged")

# follow "ADVICE" COMMAND... -- COMMAND...: the first is refused with that text, the second works. Both begin with the same
# files.
follow() {
    local advice=$1 refused=()
    shift
    while [ "$1" != -- ]; do refused+=("$1") && shift; done
    shift
    rm -rf "$TMP/run" "$TMP/merged" "$TMP/lost" && cp -r "$TMP/kept" "$TMP/run" && rm "$TMP/run/.lock"
    run timeout 120 "${refused[@]}"
    check "refused: $advice" fails "$advice"
    if [ "$1" = two_ranks ]; then run "$@"; else run timeout 120 "$@"; fi
    check "advised: $advice" succeeds
}
two_ranks() { # two_ranks PLACE: as another launcher starts them
    env RANK=0 WORLD_SIZE=2 KNAP_JOB=advice KNAP_RENDEZVOUS="$1" "${new[@]}" &
    env RANK=1 WORLD_SIZE=2 KNAP_JOB=advice KNAP_RENDEZVOUS="$1" "${new[@]}" && wait $!
}
follow "go on from it with --resume $TMP/run" "${new[@]}" --out "$TMP/run" -- "$train" --resume "$TMP/run"
follow "begin anew and replace it with --overwrite" "${new[@]}" --out "$TMP/run" -- "${new[@]}" --out "$TMP/run" --overwrite
follow "give a larger --steps" "${on[@]}" --steps 2 -- "${on[@]}" --steps 3
follow "leave it out to train to the end" "${on[@]}" --stop-after 2 -- "${on[@]}"
follow "give that as well" "$train" --resume latest -- "$train" --resume latest --out "$TMP/run"
follow "leave one of them out" "${on[@]}" --overwrite -- "${on[@]}"
follow "save elsewhere (--out)" "${on[@]}" --overwrite -- "${on[@]}" --out "$TMP/lost"
follow "--other-data" "${on[@]}" --data "$TMP/other" -- "${on[@]}" --data "$TMP/text"
follow "did you mean --steps?" "${new[@]/--steps/--stpes}" -- "${new[@]}"
follow "did you mean full_shard?" "${new[@]}" --strategy fullshard -- "${new[@]}" --strategy full_shard
follow "--help lists the options" "${new[@]}" --xyzzy 3 -- "$train" --help
follow "give --from DIR, a folder that train_gpt --out wrote" "$generate" -- "$generate" --from "$TMP/run" --tokens 3
follow "is longer than the model's context of 8" "$generate" --from "$TMP/run" --ctx 9 -- "$generate" --from "$TMP/run" --ctx 8 --tokens 3
follow "did you mean --top-k?" "$generate" --from "$TMP/run" --top-q 3 -- "$generate" --from "$TMP/run" --top-k 3 --tokens 3
follow "give --out FOLDER, where the files go" "$tool" merge "$TMP/run" -- "${merge[@]}"
follow "give bytes with a unit: 500MB, 5GB" "${merge[@]}" --shard-size many -- "${merge[@]}" --shard-size 500MB
follow "unset one" env KNAP_RANKS=2 "${new[@]}" --ranks 3 -- "${new[@]}" --ranks 3
follow "for example 60" env KNAP_TIMEOUT=soon "${new[@]}" -- env KNAP_TIMEOUT=60 "${new[@]}"
follow "run it on one rank first" env KNAP_TUNE=1 "${new[@]}" --ranks 2 -- env KNAP_TUNE=1 "${new[@]}"
follow "start with --ranks, not by setting KNAP_RANK" env KNAP_RANK=0 KNAP_WORLD=1 KNAP_LOCAL_FD=0 "$train" -- "${new[@]}" --ranks 1
follow "MASTER_ADDR=127.0.0.1 MASTER_PORT=" env RANK=0 WORLD_SIZE=2 "${new[@]}" -- env MASTER_ADDR=127.0.0.1 \
    MASTER_PORT=$((20000 + RANDOM % 10000)) WORLD_SIZE=2 bash -c 'RANK=0 "$@" & RANK=1 "$@" && wait $!' bash "${new[@]}"
follow "must be tcp:HOST:PORT, of rank 0, or file:/PATH" env RANK=0 WORLD_SIZE=2 KNAP_RENDEZVOUS=udp:here "${new[@]}" -- two_ranks "file:$TMP/meet"
follow "move it away" bash -c 'echo notes >"$0/.lock"; exec "$@"' "$TMP/run" "${on[@]}" -- bash -c 'mv "$0/.lock" "$0/notes"; exec "$@"' "$TMP/run" "${on[@]}"
follow "fetch or save it again" bash -c 'truncate -s 100 "$0"/step-*/model/*.safetensors; exec "$@"' "$TMP/run" "$tool" verify "$TMP/run" -- "$tool" verify "$TMP/kept"

# What sentences name.
named() {
    local p
    for p in "$BUILD"/models/*; do
        [ ! -x "$p" ] || [ ! -f "$p" ] || "$p" --help
    done >"$TMP/help"
    python3 - "$ROOT" "$TMP/help" <<'END'
import pathlib, re, sys
root, shown = pathlib.Path(sys.argv[1]), open(sys.argv[2]).read()
docs = ''.join(p.read_text() for p in [root / 'README.md', *(root / 'docs').glob('*.md')])
flags = set(re.findall(r'--([a-z][a-z0-9-]*)', shown))
flags |= {'no-' + f for f in flags} | {'mpi'}  # of srun
bad, count = [], 0
for folder in 'kernels comm tensor autograd data nn optim fsdp state models'.split():
    for path in sorted((root / folder).rglob('*.[ch]')):
        source = re.sub(r'/\*.*?\*/', '', path.read_text(), flags=re.S)
        texts = re.findall(r'"(?:[^"\\\n]|\\.)*"(?:\s*"(?:[^"\\\n]|\\.)*")*', source)
        for text in (re.sub(r'"\s*"', '', t) for t in texts if 'style=' not in t): # of CSS
            names = [n for n in re.findall(r'(?<![\w-])--([a-z][a-z0-9-]*[a-z0-9])(?![\w-])', text) if n not in flags]
            names += [n for n in re.findall(r'knap-checkpoint ([a-z]+)', text) if not re.search(rf'\b{n}\b', shown)]
            names += [n for n in re.findall(r'\bKNAP_[A-Z_]+', text) if ' ' in text and n not in docs]
            names += [n for n in re.findall(r'\b(?:scripts|docs)/[\w.-]+', text) if not (root / n).exists()]
            count += '--' in text
            bad += [f'{path.relative_to(root)}: {n} in {text[:120]}' for n in names]
print('\n'.join(bad) or f'{count} sentences with options')
sys.exit(bool(bad) or count < 50)
END
}
check "options, commands, variables and pages in sentences are there" named
finish
