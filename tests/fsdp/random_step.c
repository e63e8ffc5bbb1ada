/* tests/fsdp/random_step.c: code shared by the ranks and the plain reference of a random
 * program. */
#include "autograd/autograd_internal.h"
#include "tests/owned.h"
#include "tests/fsdp/random.h"

void random_begin(const random_program *p)
{
    kn_set_threads(1);
    kn_set_free_cores(p->option[O_WORKERS] ? 2 : 0);
    kn_seed(7);
    kn_set_step(0);
}

void random_draws_of(int micro)
{
    kn_context *c = kn_context_get();
    c->rng.micro = micro;
    c->rng.calls = 0;
}

int random_turn(const random_program *p, int round, int order[2])
{
    int pairs = p->option[O_PAIRS];
    order[0] = pairs == 2 ? round + 1 : round;
    order[1] = pairs == 2 ? round : round + 1;
    return pairs ? 2 : 1;
}

const random_event *random_event_at(const random_program *p, int step, int round, int *i)
{
    while (*i < RANDOM_EVENTS) {
        const random_event *e = &p->event[(*i)++];
        if (e->kind && e->step == step && e->round == round)
            return e;
    }
    return NULL;
}

bool random_scale_gain(random_net *n)
{
    WITHOUT_GRAD;
    IN_SCOPE;
    kn_tensor *less = kn_scale(n->gain, 0.75);
    bool ok = less && kn_copy_(n->gain, less);
    return ok;
}

float random_fill_value(const char *name, int64_t i)
{
    uint64_t h = kn_hash64(kn_hash_string(name), (uint64_t)i);
    return (float)(int64_t)(h % 2001) / 1000 - 1;
}

/* ---- optimizers ------------------------------------------------------------------------------ */

static bool has_trainable(kn_module *m)
{
    const kn_param *p;
    int n = kn_params(m, &p);
    for (int i = 0; i < n; i++)
        if (p[i].trainable)
            return true;
    return false;
}

/* A first optimizer may take a part of the tree; the root's steps the rest. */
bool random_optims_make(random_optims *s, random_net *n)
{
    int kind = n->p->option[O_OPTIMIZER];
    memset(s, 0, sizeof *s);
    s->of[1] = &n->m[0].base;
    for (int i = 1; n->p->option[O_OPTIMIZERS] && i < RANDOM_NODES && !s->of[0]; i++)
        if (n->p->node[i].kind && has_trainable(&n->m[i].base))
            s->of[0] = &n->m[i].base;
    for (int i = 0; i < 2; i++)
        if (s->of[i] &&
            !(s->o[i] = optimizer_make(i ? kind : (kind + 1) % OPTIMIZER_KINDS, s->of[i], false)))
            return false;
    double scale = n->p->option[O_SCALER] == 2 ? 0x1p100 : 256;
    if (n->p->option[O_SCALER])
        s->scaler = kn_scaler_new(&n->m[0], .init_scale = scale, .interval = 2, .backoff = 0x1p-40,
                                  .several = s->o[0] != NULL);
    return !n->p->option[O_SCALER] || s->scaler;
}

void random_optims_free(random_optims *s)
{
    kn_scaler_free(s->scaler);
    kn_optim_free(s->o[0]);
    kn_optim_free(s->o[1]);
}

/* A step leaves out parameters that were frozen since their gradient came. */
static bool has_gradient(kn_module *m)
{
    const kn_param *p;
    int n = kn_params(m, &p);
    for (int i = 0; i < n; i++)
        if (p[i].trainable && kn_param_grad(&p[i]))
            return true;
    return false;
}

static kn_tensor *clip(random_net *n)
{
    void *root = &n->m[0];
    switch (n->p->option[O_CLIP]) {
    case CLIP_NONE:
        return kn_zeros(KN_F32, KN_CPU, 0, NULL);
    case CLIP_MEASURE:
        return kn_clip_grad_norm(root, 0);
    case CLIP_SMALL:
        return kn_clip_grad_norm(root, 0.01);
    case CLIP_P1:
        return kn_clip_grad_norm_p(root, 0.5, 1);
    case CLIP_P3:
        return kn_clip_grad_norm_p(root, 0.5, 3);
    case CLIP_MAX:
        return kn_clip_grad_norm_p(root, 0.1, HUGE_VAL);
    default:
        return kn_clip_grad_norm(root, 0.5);
    }
}

bool random_optims_step(random_optims *s, random_net *n, float *norm)
{
    IN_SCOPE;
    kn_tensor *t = clip(n);
    *norm = t ? (float)kn_item(t) : 0;
    bool ok = t && kn_ok();
    bool any = false;
    for (int i = 0; i < 2 && ok; i++)
        if (s->o[i] && has_gradient(s->of[i])) {
            ok = s->scaler ? kn_scaler_step(s->scaler, s->o[i]) : kn_step(s->o[i]);
            any = true;
        }
    if (ok && any && s->scaler && s->o[0])
        ok = kn_scaler_update(s->scaler);
    return ok && kn_ok();
}

/* ---- reading --------------------------------------------------------------------------------- */

bool random_read_params(random_net *n, random_outcome *o, int step)
{
    const kn_param *p;
    o->params = kn_params(&n->m[0], &p);
    if (o->params > RANDOM_PARAMS)
        return kn_fail("the program has more than %d parameters", RANDOM_PARAMS);
    for (int i = 0; i < o->params; i++) {
        int64_t end = o->begin[i] + p[i].numel;
        snprintf(o->name[i], sizeof o->name[i], "%s", p[i].name);
        if (end > RANDOM_ELEMENTS)
            return kn_fail("the program has more than %d elements", RANDOM_ELEMENTS);
        if (!kn_param_read(&n->m[0], i, o->param[step] + o->begin[i]))
            return false;
        o->begin[i + 1] = end;
    }
    return kn_ok();
}
