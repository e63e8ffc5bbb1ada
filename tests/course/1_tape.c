/* tests/course/1_tape.c: a solution of exercise 1. */
#include "course.h"

/* ==== your part ==== */
/* grad is one more part of the gradient of value number to. */
static void give(node *tape, int to, double grad, void (*whole)(int leaf))
{
    tape[to].grad += grad;
    if (--tape[to].left == 0 && tape[to].kind == LEAF)
        whole(to);
}

void backward(node *tape, int n, void (*whole)(int leaf))
{
    for (int i = 0; i < n; i++)
        tape[i].grad = 0, tape[i].left = 0;
    for (int i = 0; i < n; i++) {
        if (tape[i].kind != LEAF)
            tape[tape[i].a].left++;
        if (tape[i].kind == ADD || tape[i].kind == MUL)
            tape[tape[i].b].left++;
    }
    tape[n - 1].grad = 1;
    for (int i = n - 1; i >= 0; i--) {
        const node *y = &tape[i];
        if (y->kind == ADD) {
            give(tape, y->a, y->grad, whole);
            give(tape, y->b, y->grad, whole);
        } else if (y->kind == MUL) {
            double a = tape[y->a].value, b = tape[y->b].value;
            give(tape, y->a, y->grad * b, whole);
            give(tape, y->b, y->grad * a, whole);
        } else if (y->kind == TANH) {
            give(tape, y->a, y->grad * (1 - y->value * y->value), whole);
        }
    }
}
/* ==== end of your part ==== */

/* Answers.
 * 1. Each value stands after those that it is made of, so the walk from the end comes to a
 *    value after all of its uses. Any order with this property will do.
 * 2. Send it to the other ranks while the walk goes on: exercise 2.
 * 3. It counts one use more. This walk also hands 0 on from that value, so w is told, but maybe
 *    later than it could be. Knap counts only what leads to the result. */
