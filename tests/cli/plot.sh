#!/usr/bin/env bash
# tests/cli/plot.sh: the losses of runs as a picture: the points of an SVG, read back through its axes, are the log's;
# of long logs means of steps; the same with characters, while it trains too; what is refused.
. "$(dirname "$0")/lib.sh"
gpt=$BUILD/models/train_gpt plot=$BUILD/models/knap-plot
[ -x "$gpt" ] && [ -x "$plot" ] || skip "build/models/train_gpt or knap-plot is not built"
cd "$TMP" || exit 1
for _ in $(seq 60); do echo "the quick brown fox jumps over the lazy dog"; done >text
tiny=("$gpt" --data text --ctx 8 --layers 1 --heads 1 --embd 8 --lr 1e-2 --steps 40 --eval-every 10 --eval-steps 2 --threads 1)

cat >read.py <<'END'
"""read.py SVG LOGARITHMIC LOG[:WORD]...: each log's lines are in the picture, in this order."""
import json, math, sys, xml.etree.ElementTree as xml
root = xml.parse(sys.argv[1]).getroot()
name = lambda e: e.tag.split('}')[1]
text = [e for e in root if name(e) == 'text']
up = math.log10 if sys.argv[2] == 'yes' else float
ticks = [(float(e.get('y')) - 4, up(float(e.text))) for e in text if e.get('text-anchor') == 'end' and e.text != 'steps']
places = [(float(e.get('x')), float(e.text)) for e in text if e.get('text-anchor') == 'middle']
def axis(marks):
    (a, x), (b, y) = marks[0], marks[-1]
    for at, value in marks:    # evenly spaced
        assert abs(x + (at - a) * (y - x) / (b - a) - value) <= 2e-3 * abs(y - x), marks
    return lambda at: x + (at - a) * (y - x) / (b - a)
height, place = axis(ticks), axis(places)
pixel = abs(height(1) - height(0)), abs(place(1) - place(0))
lines = [[tuple(map(float, p.split(','))) for p in e.get('points').split()] for e in root if name(e) == 'polyline']
want = []
for log in sys.argv[3:]:
    steps = {}
    for line in open(log.split(':')[0]):
        try: l = json.loads(line)
        except ValueError: continue
        steps = {n: v for n, v in steps.items() if n < l['step']}
        steps[l['step']] = l
    if not log.endswith(':val'):
        want.append([(n, l['loss']) for n, l in steps.items()])
    want.append([(n, l['val_loss']) for n, l in steps.items() if l['val_loss'] is not None])
    want = [w for w in want if w]
assert len(lines) == len(want), (len(lines), len(want))
for line, values in zip(lines, want):
    while len(values) > 2000:    # joined, two and two
        values = [((a[0] + b[0]) / 2, (a[1] + b[1]) / 2) for a, b in zip(values[::2], values[1::2])]
    assert len(line) == len(values), (len(line), len(values))
    for (x, y), (step, loss) in zip(line, values):
        assert abs(place(x) - step) < pixel[1] and abs(height(y) - up(loss)) < pixel[0], (place(x), step, height(y), up(loss))
END

check "a run" "${tiny[@]}" --out "a <run>"
check "another" "${tiny[@]}" --lr=1e-2 --seed 3 --out b
run "$plot" "a <run>" b --out both.svg
check "two runs in one picture" succeeds
check "whose points are the log's" python3 read.py both.svg no "a <run>/log.jsonl" b/log.jsonl
check "and whose names stand below" grep -q '>a &#60;run&#62;: [0-9.]*</text>' both.svg
run "$plot" b/log.jsonl "a <run>" --log-scale --only-val --out logarithm.svg
check "with a logarithm" python3 read.py logarithm.svg yes b/log.jsonl:val "a <run>/log.jsonl:val"
check "over samples" eval '"$plot" b --samples --out samples.svg && grep -q ">samples</text>" samples.svg && grep -q "middle\">400</text>" samples.svg'
"$plot" b --out plain.svg
"$plot" b --smooth 0.9 --out smooth.svg
check "smoothing changes the thin line" test "$(grep -c . plain.svg)" = "$(grep -c . smooth.svg)" -a "$(grep polyline plain.svg | head -n 1)" != "$(grep polyline smooth.svg | head -n 1)"
check "alone" test "$(grep polyline plain.svg | tail -n 1)" = "$(grep polyline smooth.svg | tail -n 1)"

python3 - <<'END'
import json
def line(step, loss): return json.dumps({'step': step, 'samples': 8 * step, 'loss': loss, 'val_loss': None}) + '\n'
open('long', 'w').write(''.join(line(i, 1 + 1000 / (i + 99)) for i in range(1, 8001)))
open('again', 'w').write(''.join(line(i, 3 / i) for i in (*range(1, 7), *range(4, 9))) + 'no line\n{"step": 9, "sam')
open('flat', 'w').write(line(1, 2) + line(2, 2))
open('odd', 'w').write(line(1, 1e308) + line(2, -1e308) + line(3, 5e-324) + '{"step": 4, "samples": 1, "loss": null}\n{"step": 5, "samples": 1, "loss": 1e999}\n')
open('tiny', 'w').write(line(1, 5e-324) + line(2, 0))
open('large', 'w').write(line(1, 1e17) + line(2, 1e17 + 32))
END
for log in long again; do
    check "$log" eval '"$plot" $log --out $log.svg && python3 read.py $log.svg no $log'
done
for log in flat odd tiny large; do
    for more in "" "--log-scale" "--out x.svg"; do
        # shellcheck disable=SC2086
        check "$log $more" timeout 20 "$plot" $log $more
    done
done
cp flat kept
run "$plot" kept --out kept
check "a picture doesn't replace a log" eval 'fails "give a name that ends in .svg" && cmp -s flat kept'
check "a name that is no UTF-8" eval 'cp flat "$(printf "f\xff")" && "$plot" "$(printf "f\xff")" --out x.svg && python3 -c "import xml.dom.minidom as m; m.parse(\"x.svg\")"'

run "$plot" "a <run>" b
check "with characters" eval 'succeeds && says "x  b: "'
check "of 80 columns" awk 'length > 80 { exit 1 } /\|/ { n++ } END { exit n != 20 }' "$TMP/output"
run "${tiny[@]}" --plot --out c --stop-after 20
check "while it trains" test "$(grep -c '^ *o  val: ' "$TMP/output")-$(grep -c '^ *1  .* 20 steps$' "$TMP/output")" = 2-1
run "$gpt" --resume c --plot --threads 1
check "and of the steps before it went on" test "$(grep -c '^ *1  .* 40 steps$' "$TMP/output")" = 1
check "the command to go on has it" eval 'run "${tiny[@]}" --plot --out d --stop-after 3; says "--resume d --plot"'

touch empty
mkdir folder
printf 'step,samples,loss\n1,8,2\n' >table.csv
while IFS='|' read -r words says; do
    eval "run \"\$plot\" $words"
    check "refused: knap-plot $words" fails "$says"
done <<'END_OF_CASES'
|give the folder of a run, or its log
none|none isn't there; give a run's folder or its log
folder|cannot read the log folder/log.jsonl: No such file
empty|empty has no line of a step
table.csv|table.csv has no line of a step, as --log of a trainer writes them in JSON
b --smooth 1|--smooth must lie between 0 and 0.9999
b --out no/such/x.svg|no/such/x.svg
b b b b b b b b b b b b b b b b b|17 runs are more than the 16
END_OF_CASES
finish
