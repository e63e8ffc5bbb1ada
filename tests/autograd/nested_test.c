/* tests/autograd/nested_test.c: backwards that a hook runs through nodes of the backward around it,
 * wherever that is: each computes its own, and the leaves have the sum. */
#include "tests/owned.h"

enum { B = 2, T = 5, HEADS = 2, D = 4, IN = 6, OUT = 3 * HEADS * D, PLACES = 9 };

typedef enum what { NOTHING, KEEPING, FREEING, CATCHING, WHATS } what;

/* A forward, from two leaves to a loss, and another result of the same products. */
typedef struct tape {
    kn_tensor *w, *early, *y, *aux, *loss, *place[PLACES];
    what inside;
    bool too_late; /* the backward around it let go of what aux needs */
    int calls;
} tape;

static kn_tensor *total(kn_tensor *x)
{
    return sum_of(kn_square(x));
}

static kn_tensor *draw(uint64_t stream, int ndim, const int64_t *shape)
{
    return kn_randn(KN_F64, KN_CPU, 3, stream, ndim, shape);
}

static void make(tape *t, bool slices)
{
    kn_tensor *part[3], *x = draw(1, KN_SHAPE(B, T, IN));
    *t = (tape){ .w = draw(2, KN_SHAPE(OUT, IN)), .early = draw(3, KN_SHAPE(3)) };
    kn_require_grad(t->w, true);
    kn_require_grad(t->early, true);
    int n = 0;
    kn_tensor *z = t->place[n++] = kn_exp(t->early);
    kn_tensor *h = t->place[n++] = kn_tanh(kn_linear(x, t->w, NULL, false));
    t->y = t->place[n++] = kn_scale(h, 0.5);
    if (slices)
        for (int i = 0; i < 3; i++)
            part[i] = kn_slice(t->y, 2, i * HEADS * D, (i + 1) * HEADS * D);
    else
        kn_chunk(t->y, 2, 3, part);
    t->aux = total(t->y);
    for (int i = 0; i < 3; i++)
        part[i] = t->place[n++] = kn_transpose(kn_view(part[i], KN_SHAPE(B, T, HEADS, D)), 1, 2);
    kn_tensor *between = t->place[n++] = kn_exp(t->early);
    kn_tensor *o = t->place[n++] =
        kn_scaled_dot_product_attention(part[0], part[1], part[2], .causal = true);
    kn_tensor *late = t->place[n++] = kn_exp(t->early);
    t->loss = kn_add(kn_add(total(o), total(h)), total(kn_add(kn_add(z, between), late)));
    KN_CHECK(n == PLACES && kn_ok());
}

static kn_tensor *run_inside(kn_tensor *g, void *arg)
{
    tape *t = arg;
    kn_tensor *caught = NULL;
    (void)g;
    if (t->calls++ > 0) /* by the backward inside, which comes here too */
        return NULL;
    bool ok = t->inside == CATCHING ? kn_grad_of(t->aux, &t->y, 1, &caught, .retain_graph = true)
                                    : kn_backward(t->aux, .retain_graph = t->inside == KEEPING);
    KN_CHECK(ok == !t->too_late && (t->inside != CATCHING || caught));
    return NULL;
}

static double distance(kn_tensor *a, kn_tensor *b)
{
    return kn_item(sum_of(kn_abs(kn_sub(a, b))));
}

/* The gradient of w where a hook at a place runs the backward of aux, and where that is added to
 * the loss. place -1: without a hook. */
KN_TEST(nested, at_every_place_of_a_backward)
{
    for (int slices = 0; slices < 2; slices++)
        for (what inside = KEEPING; inside < WHATS; inside++)
            for (int place = 0; place < PLACES; place++)
                for (int retain = 0; retain < 2; retain++) {
                    IN_SCOPE;
                    tape plain, t;
                    make(&plain, slices);
                    KN_CHECK(kn_backward(inside == CATCHING ? plain.loss
                                                            : kn_add(plain.loss, plain.aux)));
                    make(&t, slices);
                    t.inside = inside;
                    t.too_late = place < 2 && !retain && inside != CATCHING;
                    KN_CHECK(kn_on_grad(t.place[place], run_inside, &t));
                    if (t.too_late) {
                        REFUSED(kn_backward(t.loss), "were freed by an earlier backward");
                    } else {
                        KN_CHECK(kn_backward(t.loss, .retain_graph = retain), "place %d, inside %d",
                                 place, inside);
                        const double far = distance(kn_grad(t.w), kn_grad(plain.w));
                        KN_CHECK(t.calls > 0 && far < 1e-12,
                                 "%d calls, %g at place %d, inside %d, %s", t.calls, far, place,
                                 inside, slices ? "slices" : "chunk");
                        KN_CHECK(distance(kn_grad(t.early), kn_grad(plain.early)) < 1e-12);
                    }
                }
    KN_CHECK_OK();
}
