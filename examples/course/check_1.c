/* examples/course/check_1.c: the checker of exercise 1. */
#include "course.h"
#include <math.h>

void backward(node *tape, int n, void (*whole)(int leaf));

enum { X, W, V, LEAVES, NODES = 8 };
static node tape[NODES] = { /* tanh(tanh(x w) w + v) */
                            [X] = { LEAF }, [W] = { LEAF }, [V] = { LEAF }, { MUL, X, W },
                            { TANH, 3 },    { MUL, 4, W },  { ADD, 5, V },  { TANH, 6 }
};
static const char *const name[] = { "x", "w", "v" };
static int calls[NODES];
static double when_whole[NODES];
static bool late; /* v was told after x had its gradient */

static void whole(int leaf)
{
    if (leaf < 0 || leaf >= LEAVES)
        wrong("whole(%d) was called, and value %d is no leaf.", leaf, leaf);
    if (calls[leaf]++ == 0)
        when_whole[leaf] = tape[leaf].grad;
    late = late || (leaf == V && tape[X].grad != 0);
}

int main(void)
{
    kn_tensor *t[NODES];
    double want[LEAVES], off[LEAVES];
    for (int i = 0; i < NODES; i++) {
        const node *y = &tape[i];
        t[i] = y->kind == LEAF   ? kn_full(KN_F64, KN_CPU, 0.4 + 0.3 * i, KN_SCALAR)
               : y->kind == TANH ? kn_tanh(t[y->a])
               : y->kind == MUL  ? kn_mul(t[y->a], t[y->b])
                                 : kn_add(t[y->a], t[y->b]);
        if (i < LEAVES)
            kn_require_grad(t[i], true);
        tape[i].value = kn_item(t[i]);
    }
    kn_backward(t[NODES - 1]);
    backward(tape, NODES, whole);
    for (int i = 0; i < LEAVES; i++) {
        want[i] = kn_item(kn_grad(t[i]));
        off[i] = fabs(tape[i].grad / want[i] - 1);
        if (tape[i].grad == 0)
            wrong("the gradient of %s is 0: nothing has walked the tape back to it.", name[i]);
    }
    if (off[W] > 1e-12 && off[X] < 1e-12)
        wrong("the gradient of w is %.9g, and Knap's is %.9g, though that of x is right: w is used "
              "twice, so its gradient is a sum.",
              tape[W].grad, want[W]);
    for (int i = 0; i < LEAVES; i++) {
        if (off[i] > 1e-12)
            wrong("the gradient of %s is %.9g, and Knap's is %.9g: is each gradient that goes on "
                  "multiplied by the slope of its operation?",
                  name[i], tape[i].grad, want[i]);
        if (!calls[i])
            wrong("whole(%d) was never called: nobody knows that %s is whole.", i, name[i]);
        if (calls[i] > 1 || when_whole[i] != tape[i].grad)
            wrong("whole(%d) was called %d times, first when the gradient of %s was %.9g of %.9g. "
                  "Count the uses first.",
                  i, calls[i], name[i], when_whole[i], tape[i].grad);
    }
    if (late)
        wrong("whole(%d) came late: v had its gradient when the sum had gone back, before x.", V);
    right("three gradients as Knap's, each told once, at the earliest moment.");
}
