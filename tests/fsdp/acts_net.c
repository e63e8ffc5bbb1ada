/* tests/fsdp/acts_net.c: the modules of a program of acts: parts in a row below a root. */
#include "tests/fsdp/acts.h"
#include "tests/owned.h"

static kn_tensor *part_forward(kn_module *self, kn_tensor *x)
{
    acts_module *m = (acts_module *)self;
    kn_tensor *y = kn_gelu_tanh(kn_call(&m->fc[0], x));
    return kn_add(x, kn_call(&m->fc[1], m->dropout ? kn_dropout(y, 0.5) : y));
}

static kn_tensor *row(acts_net *n, kn_tensor *x)
{
    for (int i = 0; i < ACTS_PARTS && x; i++) {
        int k = n->reverse ? ACTS_PARTS - 1 - i : i;
        kn_tensor *y = n->calls >> k & 1 ? kn_call(n->part[k], x) : x;
        x = n->uses >> k & 1 || !y ? y : x;
    }
    return x;
}

static kn_tensor *acts_forward(kn_module *self, kn_tensor *x)
{
    acts_net *n = (acts_net *)self;
    x = row(n, x);
    return n->gains && x ? kn_mul(x, n->gain) : x;
}

acts_module *acts_part_new(acts_net *n, const acts_program *p, int k, kn_device device)
{
    acts_module *m = &n->room[n->rooms++];
    m->dropout = p->dropout;
    n->part[k] = m;
    bool ok = kn_module_init(&m->base, part_forward);
    for (int j = 0; ok && j < 2; j++)
        ok = kn_linear_init(&m->fc[j], &m->base, j ? "1" : "0", ACTS_DIM, ACTS_DIM,
                            .device = device);
    return ok && kn_recompute(&m->base, p->recompute && !n->whole) ? m : NULL;
}

bool acts_net_init(acts_net *n, const acts_program *p, bool whole)
{
    memset(n, 0, sizeof *n);
    n->whole = whole;
    kn_device gain = whole || p->root != ROOT_FIRST ? KN_CPU : KN_META;
    bool ok = kn_module_init(&n->base, acts_forward) &&
              (n->gain = kn_parameter(&n->base, "gain", KN_F32, gain, KN_NORMAL_INIT(1),
                                      KN_SHAPE(ACTS_DIM)));
    for (int k = 0; ok && k < ACTS_PARTS; k++) {
        char name[2] = { (char)('a' + k), 0 };
        const acts_part *part = &p->part[k];
        kn_device d = whole || part->early || part->style == STYLE_PLAIN ? KN_CPU : KN_META;
        acts_module *m = acts_part_new(n, p, k, d);
        ok = m && (part->apart || kn_module_add(&n->base, name, &m->base));
    }
    return ok;
}

kn_tensor *acts_loss(acts_net *n, uint64_t micro, bool by_root)
{
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 5, micro, KN_SHAPE(2, ACTS_DIM));
    kn_tensor *y = by_root ? kn_call(n, x) : row(n, x);
    return y ? mean_square(y) : NULL;
}

void *acts_place(acts_net *n, int place)
{
    return place == AT_ROOT    ? (void *)n
           : place < AT_LINEAR ? (void *)n->part[place - AT_PART]
                               : &n->part[(place - AT_LINEAR) / 2]->fc[(place - AT_LINEAR) % 2];
}

int acts_above(int place)
{
    if (place >= ACTS_PLACES)
        return place - ACTS_PLACES == ACTS_GAIN ? AT_ROOT : AT_LINEAR + (place - ACTS_PLACES) / 2;
    return place >= AT_LINEAR ? AT_PART + (place - AT_LINEAR) / 2 : place - 1 < 0 ? -1 : AT_ROOT;
}

bool acts_under(int param, int place)
{
    int at = ACTS_PLACES + param;
    while (at >= 0 && at != place)
        at = acts_above(at);
    return at == place;
}

int acts_part_of(int place)
{
    int k = place >= ACTS_PLACES ? (place - ACTS_PLACES) / 4
            : place >= AT_LINEAR ? (place - AT_LINEAR) / 2
                                 : place - AT_PART;
    return k < ACTS_PARTS ? k : -1;
}

kn_tensor *acts_tensor(acts_net *n, int param)
{
    kn_linear *fc = param < ACTS_GAIN ? &n->part[param / 4]->fc[param / 2 % 2] : NULL;
    return fc ? kn_module_param(fc, param % 2 ? "bias" : "weight") : n->gain;
}

int acts_param(const kn_param *p, int k)
{
    const char *name = p->name;
    if (strcmp(name, "gain") == 0)
        return ACTS_GAIN;
    if (name[0] >= 'a') { /* it begins at the root */
        k = name[0] - 'a';
        name += 2;
    }
    return 4 * k + 2 * (name[0] - '0') + (name[2] == 'b');
}

void acts_fill(acts_values *v, int k, uint64_t seed)
{
    for (int i = 0; i < ACTS_PARAMS; i++)
        for (int e = 0; i / 4 == k && e < acts_numel(i); e++)
            v->of[i][e] =
                (float)(kn_hash64(seed, (uint64_t)(i * ACTS_NUMEL + e)) % 2001) / 2000 - 0.5f;
}

bool acts_has_optim(const acts_program *p, int place)
{
    static const int sets[] = { 1 << AT_ROOT,
                                7 << AT_PART,
                                15,
                                3,
                                1 | 4 | 1 << AT_LINEAR,
                                2 | 1 << AT_LINEAR | 4,
                                1 | 2 | 1 << (AT_LINEAR + 3) };
    return sets[p->optims] >> place & 1;
}

int acts_split(const acts_program *p, int k)
{
    return k < ACTS_PARTS && p->root == ROOT_PLAIN ? p->part[k].ranks : RANKS_ALL;
}

int acts_color(int split, int rank)
{
    const int color[] = { 0, rank / 2, rank % 2, rank > 0, rank };
    return color[split];
}

int acts_group(const acts_program *p, int k, int rank)
{
    bool plain = k < ACTS_PARTS && p->part[k].style == STYLE_PLAIN;
    return plain ? rank : acts_color(acts_split(p, k), rank);
}

int acts_ranks_of(const acts_program *p, int k, int rank)
{
    int n = 0;
    for (int r = 0; r <= p->ranks; r++)
        n += acts_group(p, k, r) == acts_group(p, k, rank);
    return n;
}

int acts_factor(const acts_program *p, int k, int rank)
{
    bool plain = k < ACTS_PARTS && p->part[k].style == STYLE_PLAIN;
    return plain ? 1 : p->factor && k == 1 ? 3 : acts_ranks_of(p, k, rank);
}

int acts_uses(const act *a, int rank)
{
    int parts = a->arg[0], last = ACTS_PARTS - 1;
    while (last > 0 && !(parts >> last & 1))
        last--;
    return a->arg[3] >> rank & 1 && parts != 1 << last ? parts & ~(1 << last) : parts;
}

bool acts_changes_nothing(const act *a)
{
    return a->kind >= ACT_EVALUATE;
}
