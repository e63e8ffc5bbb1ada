/* nn/rounds.c: counts the micro-batches that are summed in gradients; a step divides the raw sums
 * by their number. */
#include "kernels/memory_internal.h"
#include "nn/nn_internal.h"

/* The doubt about a backward goes. Returns the round that it counted, or 0. */
static int64_t take_doubt(kn_root *root, uint64_t pass)
{
    int64_t round = 0;
    int left = 0;
    for (int i = 0; i < root->doubts; i++)
        if (root->doubt[i].pass == pass)
            round = root->doubt[i].round;
        else
            root->doubt[left++] = root->doubt[i];
    root->doubts = left;
    return round;
}

/* Undoes the count of a backward that failed. */
static void take_round_back(void *arg)
{
    kn_root *root = ((kn_module_impl *)arg)->root;
    if (!root) /* the module was added to another tree meanwhile */
        return;
    take_doubt(root, root->last_pass);
    root->last_pass = 0;
    root->rounds -= root->rounds > 0;
}

void kn_module_grads_changed(kn_module_impl *m, double divisor)
{
    kn_root *root = kn_root_of(m);
    if (divisor > 0)
        root->divisor = divisor;
    root->grad_changes++; /* measured norms are out of date */
}

static bool count(kn_module_impl *top)
{
    kn_root *root = top->root;
    if (!kn_on_backward(NULL, take_round_back, top))
        return false;
    root->last_pass = kn_backward_pass();
    root->rounds++;
    return true;
}

void kn_module_round(kn_module_impl *m, double divisor)
{
    kn_module_impl *top = kn_impl_root(m);
    if (top->root->last_pass != kn_backward_pass() && !count(top))
        return;
    top->root->brought = kn_backward_pass();
    kn_module_grads_changed(m, divisor);
}

bool kn_module_round_in_doubt(kn_module_impl *m, unsigned char *brought)
{
    kn_module_impl *top = kn_impl_root(m);
    kn_root *root = top->root;
    uint64_t pass = kn_backward_pass();
    *brought = root->brought == pass;
    if (root->last_pass == pass)
        return true;
    if (!kn_host_grow(&root->doubt, &root->doubt_room, root->doubts + 1, sizeof *root->doubt) ||
        !count(top))
        return false;
    root->doubt[root->doubts++] = (kn_doubt){ pass, root->rounds };
    return true;
}

/* Rounds that were taken from m and the modules below it may include the one that goes. */
static void forget_round(kn_module_impl *m, int64_t round)
{
    m->taken -= m->taken >= round;
    for (int i = 0; i < m->children; i++)
        forget_round(m->child[i]->impl, round);
}

void kn_module_round_settle(kn_module_impl *m, uint64_t pass, bool brought)
{
    kn_module_impl *top = kn_impl_root(m);
    kn_root *root = top->root;
    int64_t round = take_doubt(root, pass);
    if (brought || round == 0)
        return;
    root->rounds--;
    for (int i = 0; i < root->doubts; i++)
        root->doubt[i].round -= root->doubt[i].round > round;
    forget_round(top, round);
}

static void forget_taken(kn_module_impl *m)
{
    m->taken = 0;
    for (int i = 0; i < m->children; i++)
        forget_taken(m->child[i]->impl);
}

/* Restarts the count of a tree that holds no gradient. */
static void rounds_reset(kn_module_impl *top)
{
    top->root->rounds = 0;
    top->root->doubts = 0;
    top->root->grad_changes++;
    kn_set_loss_scale(top->root, NULL);
    forget_taken(top);
}

static bool waits(const kn_module_impl *m)
{
    for (int i = 0; i < m->params; i++) {
        const kn_param_entry *e = &m->param[i];
        const kn_param p = { .tensor = e->tensor, .index = e->unit_index, .source = e->source };
        const kn_param_source *s = e->source;
        if (e->owner && (s ? s->waits(&p) : kn_leaf_waits(&p)))
            return true;
    }
    for (int i = 0; i < m->children; i++)
        if (waits(m->child[i]->impl))
            return true;
    return false;
}

void kn_rounds_take(kn_module_impl *m)
{
    kn_module_impl *top = kn_impl_root(m), *empty = NULL;
    if (top->root->rounds == 0)
        return;
    for (; m && !waits(m); m = m->parent)
        empty = m;
    if (empty == top)
        rounds_reset(top);
    else if (empty)
        empty->taken = top->root->rounds;
}

void kn_zero_grad(void *module)
{
    const kn_param *p;
    int n = kn_params(module, &p);
    for (int i = 0; i < n; i++)
        kn_clear_grad(p[i].tensor);
}

int64_t kn_rounds_of(const kn_module_impl *m)
{
    int64_t taken = 0;
    for (; m->parent; m = m->parent)
        taken = m->taken > taken ? m->taken : taken;
    taken = m->taken > taken ? m->taken : taken;
    return m->root->rounds - taken;
}

/* A module at or below m with gradients of other rounds, or NULL. */
static const kn_module_impl *odd_one(const kn_module_impl *m, int64_t rounds)
{
    if (kn_rounds_of(m) != rounds && waits(m))
        return m;
    for (int i = 0; i < m->children; i++) {
        const kn_module_impl *odd = odd_one(m->child[i]->impl, rounds);
        if (odd)
            return odd;
    }
    return NULL;
}

bool kn_rounds_agree(const kn_module_impl *m, const char *what)
{
    int64_t rounds = kn_rounds_of(m);
    const kn_module_impl *odd = odd_one(m, rounds);
    return !odd ||
           kn_fail(
               "%s: gradients of '%s' are of %lld micro-batches a rank, others of %lld, because "
               "another optimizer stepped it in between; give every parameter to one optimizer",
               what, kn_module_shown(odd), (long long)kn_rounds_of(odd), (long long)rounds);
}

double kn_grad_share(kn_module_impl *m)
{
    int64_t rounds = kn_rounds_of(m);
    return rounds == 0 ? 1 : 1.0 / ((double)rounds * kn_root_of(m)->divisor);
}

double kn_grad_scale(void *module)
{
    kn_module_impl *m = kn_impl(module, "kn_grad_scale");
    int64_t rounds = m ? kn_rounds_of(m) : 0;
    if (rounds == 0)
        return 1;
    kn_root *root = kn_root_of(m);
    double scale = root->loss_scale ? kn_item(root->loss_scale) : 1;
    return 1.0 / ((double)rounds * root->divisor * scale);
}
