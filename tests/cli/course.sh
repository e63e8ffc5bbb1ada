#!/usr/bin/env bash
# tests/cli/course.sh: the exercises of docs/course. Each solution passes its checker; each starting file, and typical
# mistakes made in a solution, are refused in the sentence that names them, and nothing hangs.
. "$(dirname "$0")/lib.sh"

[ -e "$BUILD/libknap.so" ] || skip "$BUILD/libknap.so is not built"
case $(nm -D "$BUILD/libknap.so") in *__asan_* | *__tsan_*) skip "programs of the course link no sanitizer" ;; esac
export KNAP_BUILD=$BUILD
export COURSE_4=$ROOT/tests/course/4_gather.c # what the later exercises stand on
cd "$TMP" || exit 1

# A compiler that makes one object of files that are the same: most of the files beside a mistake are.
cat >"$TMP/cc" <<'END'
#!/usr/bin/env bash
files=() flags=() libraries=() objects=()
while [ $# -gt 0 ]; do
    case $1 in
    -o) program=$2 && shift ;;
    *.c) files+=("$1") ;;
    -l* | -L* | -Wl,*) libraries+=("$1") ;;
    *) flags+=("$1") ;;
    esac
    shift
done
for file in "${files[@]}"; do
    object=${0%/*}/$(cksum <"$file" | tr ' ' -).o
    [ -f "$object" ] || cc "${flags[@]}" -c -o "$object" "$file" || exit
    objects+=("$object")
done
exec cc -o "$program" "${objects[@]}" "${libraries[@]}"
END
chmod +x "$TMP/cc"
export CC=$TMP/cc

judge() { run timeout 120 "$ROOT/examples/course/check" "$@"; }

# solved N: the solution passes; outside of the part to write it is the starting file.
solved() {
    local solution
    solution=$(echo "$ROOT/tests/course/$1"_*.c)
    judge "$1" "$solution"
    check "$1: the solution is right" says "right: "
    check "$1: it says so in its status" succeeds
    check "$1: the solution differs from the starting file in the marked parts only" \
        cmp <(given "$solution") <(given "$ROOT/examples/course/${solution##*/}")
}
given() { awk '/^\/\* Answers/ { exit } head && /==== your part/ { part = 1 } head && !part && NF; /\*\/$/ { head = 1 } /end of your part/ { part = 0 }' "$1"; }

# unsolved N SENTENCE: the starting file is refused.
unsolved() {
    judge "$1"
    check "$1: the starting file is refused" fails "not yet: "
    check "$1: in the words: $2" says "$2"
}

# mistake N NAME SENTENCE SED: the solution with that change is refused.
mistake() {
    sed -E "$4" "$ROOT/tests/course/$1"_*.c >"$TMP/wrong.c"
    ! cmp -s "$TMP/wrong.c" "$(echo "$ROOT/tests/course/$1"_*.c)" || echo "$1: $2 changes nothing" >>"$TMP/wrong.c"
    judge "$1" "$TMP/wrong.c"
    check "$1: $2" fails "not yet: "
    check "$1: $2, in the words: $3" says_one "$3"
}

# says_one "TEXT|TEXT": the last run printed one of them.
says_one() { says "${1%%|*}" || says "${1##*|}"; }

for n in 1 2 3 4 5 6 7 8; do solved $n; done
unsolved 1 "nothing has walked the tape back"
unsolved 2 "let rank 0's become everyone's"
unsolved 3 "begin() must set ranks and part"
unsolved 4 "a layer computed with NaN"
unsolved 5 "nothing is gathered while a layer computes in forward"
unsolved 6 "or has another dtype"
unsolved 7 "the mean of all 6 micro-batches of a step"
unsolved 8 "the ranks are out of step"
COURSE_4='' judge 5 "$ROOT"/tests/course/5_*.c
check "5: where exercise 4 isn't done, that comes first" fails "exercise 4 comes first"

mistake 1 "the last use alone counts" "w is used twice, so its gradient is a sum" 's/grad \+= grad/grad = grad/'
mistake 1 "a leaf is told at each use" "Count the uses first" 's/--tape\[to\]\.left == 0 && //'
mistake 1 "a leaf is told at each use, and what it had at the first" "first when the gradient of w was 0.0844932" 's/--tape\[to\]\.left == 0 && //'
mistake 1 "a slope is forgotten" "multiplied by the slope" 's/\(1 - y->value \* y->value\)/1/'
mistake 1 "leaves are told at the end" "came late" 's/whole\(to\);/{}/; /^void backward/,$s/^}/    whole(2), whole(1), whole(0);\n}/'

mistake 2 "no broadcast" "let rank 0's become everyone's" '/kn_broadcast/,/;/d'
mistake 2 "the sum instead of the mean" "moved 2 times as far" 's/grad\[i\] \/= .*/;/'
mistake 2 "one rank skips a collective" "the ranks are out of step" 's/^    (kn_all_reduce)/    if (kn_rank(u->ranks) == 0)\n\1/'
mistake 2 "one rank skips a collective, in a hook" "in hook after the gradient of a tensor without a name, " 's/^    (kn_all_reduce)/    if (kn_rank(u->ranks) == 0)\n\1/'
mistake 2 "the biases are forgotten" "of weight and bias alike" '/kn_on_accumulated\(u->bias/d'
mistake 2 "nothing is reduced" "the gradient is the mean over ranks" '/kn_on_accumulated/d'

mistake 3 "momentum of all elements" "and its shards take 1216" 's/momentum = take_zeros\(u->part/momentum = take_zeros(u->numel/'
mistake 3 "rounded down" "make shards of 98, rounded up; yours have 97" 's/\(u->numel \+ size - 1\) \/ size/u->numel \/ size/'
mistake 3 "one element too many" "rounded up; yours have 57" 's/\(u->numel \+ size - 1\) \/ size/u->numel \/ size + 1/'
mistake 3 "no gather" "must then get the parts of the others" '/kn_all_gather/d'
mistake 3 "the sum instead of the mean" "moved 2 times as far" 's/u->grad\[i\] \/ \(float\)size/u->grad[i]/'
mistake 3 "both ranks update the first part" "element 98 of in.weight" 's/ \+ kn_rank\(u->ranks\) \* u->part//'
mistake 3 "whole gradients are kept" "kn_give them back" '/kn_give/d'

mistake 4 "kept after forward" "give each unit back after its forward" '/after_forward/s/$/\n        gather(u);/'
mistake 4 "not gathered for backward" "a layer computed with NaN" '/before_backward/d'
mistake 4 "reduced before the gradient was whole" "packed before they were whole" 's/--u->missing == 0/--u->missing == 1/'
mistake 4 "one rank skips a reduction" "the ranks are out of step" 's/^    kn_reduce_scatter/    if (kn_rank(u->ranks) == 0)\n&/'
mistake 4 "whole gradients are kept" "after backward a rank holds" '/kn_give\(&u->grad_room/d'
mistake 4 "never released after backward" "and when its gradients are whole" '/^    release\(u\)/d'
mistake 4 "the bias is forgotten" "v.whole never ran" '/kn_on_accumulated\(u->bias/d'
mistake 4 "a crash" "it crashed" 's/float \*sum = kn_take.*/float *sum = NULL; abort();/'

mistake 5 "waits at once" "nothing is gathered while a layer computes in forward" 's/kn_event_record\(u->arrived, gathers\);/& kn_event_sync(u->arrived);/'
mistake 5 "one communicator for both" "the ranks are out of step" 's/kn_reduce_scatter\(u->reducers/kn_reduce_scatter(u->ranks/'
# Where other programs hold the gather up, the layer computes with what was there before: NaN.
mistake 5 "never waits" "you compute before the gather has arrived|hasn't arrived" '/kn_event_wait\(u->arrived/d'
mistake 5 "gathers all units ahead" "gather one unit ahead" 's/issue\(u \+ 1\)/issue(u + 1), issue(u - u->index + UNITS - 1)/'
mistake 5 "waits for each reduction" "backward waits too often" 's/reducing = u;/&\n    finish_reduction();/'
mistake 5 "reductions are never finished" "finish a reduction before the next one begins" '/^    finish_reduction\(\);$/d'

mistake 6 "masters in bf16" "masters stay f32" 's/^    kn_all_gather.*/    kn_copy_(kn_borrow(KN_F32, u->shard, KN_SHAPE(u->part)), kn_borrow(KN_BF16, mine, KN_SHAPE(u->part)));\n&/'
mistake 6 "the sum in bf16" "Gradients travel in bf16, and their sum is f32" \
    's/kn_reduce_scatter\(u->ranks, u->grad/uint16_t low[400];\n    kn_reduce_scatter(u->ranks, low/; s/KN_F32, KN_BF16,/KN_BF16, KN_BF16,/
     s/^    kn_give\(&u->grad_room/    kn_copy_(kn_borrow(KN_F32, u->grad, KN_SHAPE(u->part)), kn_borrow(KN_BF16, low, KN_SHAPE(u->part)));\n&/'

mistake 7 "divided by ranks" "the mean of all 6 micro-batches of a step" 's/\/ MICROS/\/ (float)kn_comm_size(u->ranks)/'
mistake 7 "loads from the beginning" "3 ranks saved that" '/pread/s/at \+ place\(u\)/at/'
mistake 7 "the last micro-batch alone" "the mean of all 6 micro-batches of a step" 's/reduce\(u, u->grad\)/reduce(u, NULL)/'
mistake 7 "gradients of the step before stay" "and of no others" '/u->grad\[i\] = 0/d'
mistake 7 "the sum over ranks is added last" "added in another order" \
    's/^    reduce\(u, u->grad\)/    float before[400];\n    for (int64_t i = 0; i < u->part; i++)\n        before[i] = u->grad[i];\n    reduce(u, NULL);\n    for (int64_t i = 0; i < u->part; i++)\n        u->grad[i] += before[i]/'
mistake 7 "padding is saved" "elements have a place, padding none" 's/return \(rest < 0 .*/return (u->part + 0 * rest) * 4;/'
mistake 7 "each rank saves at the beginning" "elements have a place, padding none" 's/return kn_rank\(u->ranks\) \* u->part \*/return 0 * u->part */'

mistake 8 "rank 1 has no second micro-batch" "the ranks are out of step" 's/m - rank < MICROS/m < MICROS/'
mistake 8 "each rank clips by its own shards" "scaled them by different factors" '/kn_all_reduce_max/d'
mistake 8 "values of before the step" "the first step is right, but after the last one" '/release\(&n->unit/d'
finish
