/* tests/fsdp/random_draw.c: programs as numbers: drawing them, making them fit, text, shrinking,
 * coverage. */
#include "tests/fsdp/random.h"
#include <ctype.h>

/* A number of a program: its name, the names of its values (the simplest first), how often it isn't
 * 0. */
typedef struct field {
    const char *name, *values;
    int percent;
} field;

static const field option_field[O_OPTIONS] = {
    [O_RANKS] = { "ranks", "2 1 3 4", 60 },
    [O_STEPS] = { "steps", "2 3 4", 30 },
    [O_ROUNDS] = { "rounds", "2 1 3 4", 50 },
    [O_DIM] = { "dim", "4 1 2 3 5 7 8 16", 70 },
    [O_BATCH] = { "batch", "2 1 3", 40 },
    [O_HEAD] = { "head", "mse embed tied", 50 },
    [O_STRATEGY] = { "strategy", "full grad_op none hybrid hybrid_grad_op", 70 },
    [O_MESH] = { "mesh", "small large one", 50 },
    [O_LAYOUT] = { "layout", "flat per_param ragged", 60 },
    [O_PLACEMENT] = { "placement", "rows last", 30 },
    [O_WHOLE_BELOW] = { "keep_whole_below", "0 5 20 1000", 25 },
    [O_WRAP] = { "wrap", "root linear parts seq size policy hand groups unwrapped", 95 },
    [O_BACKWARD_PREFETCH] = { "backward_prefetch", "default pre post none", 60 },
    [O_FORWARD_PREFETCH] = { "forward_prefetch", "no yes", 40 },
    [O_LISTS] = { "prefetch_lists", "no next all", 15 },
    [O_GATHERS] = { "max_gathers", "0 1 2 4", 40 },
    [O_REDUCTIONS] = { "max_reductions", "0 1 2 4", 30 },
    [O_RESHARD] = { "reshard_after_forward", "0 -1 1 2", 40 },
    [O_KEEP_GATHERED] = { "keep_gathered", "no yes", 15 },
    [O_PARAM_DTYPE] = { "param_dtype", "declared f32 bf16 f16", 30 },
    [O_REDUCE_DTYPE] = { "reduce_dtype", "param f32 bf16 f16", 25 },
    [O_KEEP_LOW] = { "keep_low_precision_grads", "no yes", 30 },
    [O_CAST_INPUTS] = { "cast_inputs", "default all root none", 30 },
    [O_OUTPUT_DTYPE] = { "output_dtype", "no f32 bf16", 20 },
    [O_BUFFER_DTYPE] = { "buffer_dtype", "no f32 bf16", 20 },
    [O_FULL_PRECISION] = { "full_precision_class", "no layer_norm", 25 },
    [O_OFFLOAD] = { "offload", "no file", 20 },
    [O_INIT] = { "init", "meta cpu fill rank0", 40 },
    [O_REDUCE_OP] = { "reduce_op", "default average sum", 20 },
    [O_DIVIDE] = { "divide_factor", "0 1 3 8", 15 },
    [O_PREDIVIDE] = { "predivide_factor", "0 2 4", 15 },
    [O_COMM_HOOK] = { "comm_hook", "no default bf16", 15 },
    [O_DATA] = { "data", "own same", 15 },
    [O_USES] = { "uses", "0 1 2 3 4 5 6 7", 30 },
    [O_SKIP_SYNC] = { "no_sync", "0 1 2 3 4 5 6 7", 25 },
    [O_SKIP_ALL_REDUCE] = { "no_all_reduce", "0 1 2 3 4 5 6 7", 30 },
    [O_PAIRS] = { "pairs", "no yes swapped", 15 },
    [O_LEAF_HOOK] = { "grad_hook", "no param activation", 15 },
    [O_OPTIMIZER] = { "optimizer", "adamw sgd momentum nesterov", 50 },
    [O_OPTIMIZERS] = { "optimizers", "1 2", 20 },
    [O_CLIP] = { "clip", "0.5 none measure 0.01 p1 p3 max", 50 },
    [O_SCALER] = { "scaler", "no 256 too_large", 15 },
    [O_WORKERS] = { "workers", "no yes", 25 },
    [O_THREADS] = { "ranks_are", "processes threads", 20 },
};
enum { NODE_FIELDS = sizeof(random_node) / sizeof(int) };
static const field node_field[NODE_FIELDS] = {
    { "kind",
      "none linear mlp norm rms_norm batchnorm own unused partly shared dropout seq residual", 70 },
    { "in", "m0 m1 m2 m3 m4 m5 m6 m7 m8", 60 },
    { "when", "always round loss_round loss_micro run_micro", 40 },
    { "twice", "no yes", 20 },
    { "unit", "no yes", 60 },
    { "other", "no yes", 30 },
    { "recompute", "no yes", 25 },
    { "entered", "no yes", 15 },
    { "frozen", "no yes", 15 },
    { "ignored", "no yes", 10 },
    { "hidden", "5 1 2 3 7 8 12 16", 70 },
};
enum { EVENT_FIELDS = sizeof(random_event) / sizeof(int) };
static const field event_field[EVENT_FIELDS] = {
    { "kind",
      "none evaluate abandon summon summon_write summon_rank0 apply read unshard unshard_reshard "
      "reshard clear zero never_reshard always_reshard freeze retain fail_forward fail_pre_forward "
      "fail_post_forward fail_input fail_loss "
      "fail_pre_backward fail_post_backward fail_grad fail_comm_hook "
      "fail_stale",
      50 },
    { "step", "0 1 2 3", 60 },
    { "round", "0 1 2 3", 50 },
    { "at", "m0 m1 m2 m3 m4 m5 m6 m7 m8 m9", 80 },
    { "who", "all 0 1 2 3", 40 },
};
enum {
    NODES_AT = O_OPTIONS,
    EVENTS_AT = NODES_AT + RANDOM_NODES * NODE_FIELDS,
    FIELDS = EVENTS_AT + RANDOM_EVENTS * EVENT_FIELDS
};
_Static_assert(sizeof(random_program) == FIELDS * sizeof(int), "a program is numbers only");

/* ---- the numbers of a program, one after another --------------------------------------------- */

static const field *field_at(int i)
{
    if (i < NODES_AT)
        return &option_field[i];
    if (i < EVENTS_AT)
        return &node_field[(i - NODES_AT) % NODE_FIELDS];
    return &event_field[(i - EVENTS_AT) % EVENT_FIELDS];
}

static int *number_at(random_program *p, int i)
{
    return (int *)p + i;
}

static int values_of(const field *f)
{
    int n = 1;
    for (const char *s = f->values; *s; s++)
        n += *s == ' ';
    return n;
}

static const char *value_name(const field *f, int v, char *buf, size_t size)
{
    const char *s = f->values;
    for (; v > 0; v--)
        s = strchr(s, ' ') + 1;
    snprintf(buf, size, "%.*s", (int)strcspn(s, " "), s);
    return buf;
}

/* "ranks", "m3.kind", "e0.step" */
static const char *field_name(int i, char *buf, size_t size)
{
    const char *name = field_at(i)->name;
    if (i < NODES_AT)
        snprintf(buf, size, "%s", name);
    else if (i < EVENTS_AT)
        snprintf(buf, size, "m%d.%s", (i - NODES_AT) / NODE_FIELDS, name);
    else
        snprintf(buf, size, "e%d.%s", (i - EVENTS_AT) / EVENT_FIELDS, name);
    return buf;
}

int random_number(const random_program *p, int option)
{
    char name[32];
    return (int)strtol(value_name(&option_field[option], p->option[option], name, sizeof name),
                       NULL, 0);
}

/* ---- drawing --------------------------------------------------------------------------------- */

static uint64_t next(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u; /* splitmix64 */
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static int below(uint64_t *state, int n)
{
    return (int)(next(state) % (uint64_t)n);
}

random_program random_draw(uint64_t seed)
{
    random_program p;
    memset(&p, 0, sizeof p);
    uint64_t state = seed;
    int busy =
        50 + below(&state, 150); /* percent of the usual chance: simple programs and wild ones */
    for (int i = 0; i < FIELDS; i++) {
        const field *f = field_at(i);
        bool kind = strcmp(f->name, "kind") == 0;
        if (below(&state, 100) < (kind ? f->percent : f->percent * busy / 100))
            *number_at(&p, i) = 1 + below(&state, values_of(f) - 1);
    }
    if (random_fails(&p) &&
        below(&state, 10) < 6) /* ranks that others hear of refuse to go on: one is alone */
        p.option[O_RANKS] = 1;
    random_settle(&p);
    return p;
}

/* ---- what fits together ---------------------------------------------------------------------- */

static bool is_container(int kind)
{
    return kind == KIND_SEQ || kind == KIND_RESIDUAL;
}

static bool has_own(int kind)
{
    return kind != KIND_NONE && kind != KIND_SHARED && kind != KIND_DROPOUT && !is_container(kind);
}

static bool inside(const random_program *p, int node, int outer)
{
    while (node > outer)
        node = p->node[node].parent;
    return node == outer;
}

bool random_full_precision(const random_program *p, int node)
{
    int kind = p->node[node].kind;
    return p->option[O_PARAM_DTYPE] &&
           (kind == KIND_BATCHNORM || (kind == KIND_NORM && p->option[O_FULL_PRECISION]));
}

static bool may_be_unit(const random_program *p, int node)
{
    const random_node *n = &p->node[node];
    if (random_full_precision(p, node))
        return true;
    switch (p->option[O_WRAP]) {
    case WRAP_ROOT:
    case WRAP_UNWRAPPED:
        return false;
    case WRAP_LINEAR:
        return n->kind == KIND_LINEAR || n->kind == KIND_MLP;
    case WRAP_PARTS:
        return !is_container(n->kind);
    case WRAP_SEQ:
        return is_container(n->kind);
    case WRAP_SIZE:
        return true;
    default:
        return n->unit;
    }
}

bool random_holds_units(const random_program *p, int node)
{
    for (int i = node; i < RANDOM_NODES; i++)
        if (p->node[i].kind && inside(p, i, node) && may_be_unit(p, i))
            return true;
    return false;
}

static void settle_tree(random_program *p)
{
    p->node[0] = (random_node){ .kind = KIND_SEQ, .recompute = p->node[0].recompute };
    for (int i = 1; i < RANDOM_NODES; i++) {
        random_node *n = &p->node[i];
        n->parent %= i;
        while (n->parent && (!n->kind || !is_container(p->node[n->parent].kind)))
            n->parent--;
        if (n->kind != KIND_LINEAR && n->kind != KIND_MLP && n->kind != KIND_UNUSED)
            n->hidden = 0;
        if (!n->kind)
            *n = (random_node){ 0 };
        if (n->kind == KIND_BATCHNORM && random_number(p, O_BATCH) == 1) /* no variance */
            n->kind = KIND_RMSNORM;
        if (n->kind == KIND_BATCHNORM && !p->option[O_PARAM_DTYPE]) /* its running ones must fit */
            p->option[O_BUFFER_DTYPE] = 0;
        if (n->recompute)
            n->entered = 0;
    }
}

/* Whether a policy surely finds something at node i: one that wraps nothing is an error. */
static bool surely_wrapped(const random_program *p, int i)
{
    const random_node *n = &p->node[i];
    if (random_full_precision(p, i)) /* a unit, but not by the policy */
        return false;
    switch (p->option[O_WRAP]) {
    case WRAP_LINEAR:
    case WRAP_SIZE: /* two in three have a bias, which nobody shares */
        return (n->kind == KIND_LINEAR && i % 3 != 2) || n->kind == KIND_MLP;
    case WRAP_SEQ: /* a container that holds parameters */
        return n->parent > 0 && has_own(n->kind) && n->kind != KIND_LINEAR &&
               n->kind != KIND_BATCHNORM;
    default:
        return has_own(n->kind) && may_be_unit(p, i) && (n->kind != KIND_LINEAR || i % 3 != 2);
    }
}

static void settle_wrap(random_program *p)
{
    int *wrap = &p->option[O_WRAP], found = 0;
    if (*wrap == WRAP_SIZE && random_number(p, O_DIM) < 4) /* too small for it */
        *wrap = WRAP_LINEAR;
    for (int i = 1; i < RANDOM_NODES; i++) {
        random_node *n = &p->node[i];
        if (*wrap < WRAP_POLICY || (*wrap == WRAP_GROUPS && n->parent))
            n->unit = 0;
        n->other = n->unit && n->other;
        found += surely_wrapped(p, i);
    }
    if (!found && *wrap != WRAP_UNWRAPPED)
        *wrap = WRAP_ROOT;
    for (int i = 0; i < RANDOM_NODES && (*wrap == WRAP_ROOT || *wrap == WRAP_UNWRAPPED); i++)
        p->node[i].unit = p->node[i].other = 0;
}

/* Plain training on one rank, as the engine accumulates by itself: nothing of fsdp is there to be
 * set. */
static void settle_unwrapped(random_program *p)
{
    static const int of_fsdp[] = { O_RANKS,         O_STRATEGY,        O_LAYOUT,
                                   O_WHOLE_BELOW,   O_LISTS,           O_RESHARD,
                                   O_PARAM_DTYPE,   O_REDUCE_DTYPE,    O_OUTPUT_DTYPE,
                                   O_BUFFER_DTYPE,  O_OFFLOAD,         O_INIT,
                                   O_REDUCE_OP,     O_DIVIDE,          O_PREDIVIDE,
                                   O_COMM_HOOK,     O_SKIP_SYNC,       O_DATA,
                                   O_KEEP_GATHERED, O_SKIP_ALL_REDUCE, O_FORWARD_PREFETCH,
                                   O_GATHERS,       O_REDUCTIONS,      O_BACKWARD_PREFETCH };
    if (p->option[O_WRAP] != WRAP_UNWRAPPED)
        return;
    for (size_t i = 0; i < sizeof of_fsdp / sizeof *of_fsdp; i++)
        p->option[of_fsdp[i]] = 0;
    p->option[O_RANKS] = 1; /* one */
    for (int i = 0; i < RANDOM_NODES; i++)
        p->node[i].ignored = 0;
    for (int i = 0; i < RANDOM_EVENTS; i++)
        if ((p->event[i].kind >= EVENT_SUMMON && p->event[i].kind <= EVENT_RESHARD) ||
            p->event[i].kind == EVENT_NEVER_RESHARD || p->event[i].kind == EVENT_ALWAYS_RESHARD)
            p->event[i].kind = EVENT_READ;
        else if (p->event[i].kind == EVENT_FAIL_COMM_HOOK)
            p->event[i].kind = EVENT_FAIL_LOSS;
}

static void settle_mesh(random_program *p)
{
    int *o = p->option, ranks = random_number(p, O_RANKS);
    bool hybrid = o[O_STRATEGY] >= STRATEGY_HYBRID;
    if (!hybrid)
        o[O_MESH] = 0;
    if (!hybrid && o[O_STRATEGY] != STRATEGY_NONE)
        o[O_SKIP_ALL_REDUCE] = 0;
    for (int i = 0; (hybrid || o[O_SKIP_ALL_REDUCE]) && i < RANDOM_NODES; i++)
        p->node[i].other = 0; /* another strategy would add in another grouping */
    int shards = o[O_STRATEGY] == STRATEGY_NONE ? 1 : ranks;
    if (hybrid && ranks == 4)
        shards = o[O_MESH] == 0 ? 2 : o[O_MESH] == 1 ? 4 : 1;
    if (random_number(p, O_RESHARD) == 2 && shards != 4)
        o[O_RESHARD] = 0;
    if (o[O_LAYOUT] != 1)
        o[O_PLACEMENT] = 0;
    /* the last micro-batch reduces everything: else a step is refused */
    int rounds = random_number(p, O_ROUNDS);
    o[O_SKIP_SYNC] &= (1 << (rounds - 1)) - 1;
    o[O_SKIP_ALL_REDUCE] &= (1 << (rounds - 1)) - 1;
}

static void settle_precision(random_program *p)
{
    int *o = p->option;
    bool cast = o[O_PARAM_DTYPE] > 1;
    if (!o[O_PARAM_DTYPE])
        o[O_CAST_INPUTS] = o[O_FULL_PRECISION] = 0;
    if (o[O_WRAP] != WRAP_ROOT && o[O_WRAP] != WRAP_HAND) /* inner units would cast as well */
        o[O_OUTPUT_DTYPE] = 0;
    if (!cast && o[O_REDUCE_DTYPE] < 2)
        o[O_KEEP_LOW] = 0;
    for (int i = 0; cast && i < RANDOM_NODES; i++) /* their inputs aren't cast for them */
        p->node[i].entered = p->node[i].ignored = 0;
    if (o[O_SCALER]) /* it decides for one step of the whole tree */
        o[O_OPTIMIZERS] = 0;
    if (o[O_REDUCE_DTYPE] == 3 || o[O_PARAM_DTYPE] == 3)
        o[O_PREDIVIDE] = 0; /* of numbers near the smallest it rounds */
    for (int i = 0; i < RANDOM_NODES; i++)
        if (p->node[i].ignored && (is_container(p->node[i].kind) || may_be_unit(p, i)))
            p->node[i].ignored = 0;
    bool exact = o[O_DATA] && random_number(p, O_RANKS) != 3 && !o[O_DIVIDE] && !o[O_PREDIVIDE] &&
                 !o[O_SCALER] && o[O_REDUCE_OP] < 2;
    for (int i = 0; i < RANDOM_NODES && !exact; i++) /* nobody reduces their gradients */
        p->node[i].frozen |= p->node[i].ignored;
    if (o[O_INIT] == INIT_RANK0 || o[O_INIT] == INIT_FILL)
        for (int i = 0; i < RANDOM_NODES; i++)
            p->node[i].ignored = 0;
}

static void settle_events(random_program *p)
{
    int *o = p->option;
    bool odd = false;
    for (int i = 0; i < RANDOM_EVENTS; i++) {
        random_event *e = &p->event[i];
        e->step %= random_number(p, O_STEPS);
        e->round %= random_number(p, O_ROUNDS);
        if (e->who > random_number(p, O_RANKS))
            e->who = 0;
        if (e->kind < EVENT_FAIL_FORWARD)
            e->who = 0;
        if (e->kind == EVENT_FAIL_INPUT || e->kind == EVENT_FAIL_LOSS || !p->node[e->node].kind)
            e->node = 0;
        if (e->kind == EVENT_FAIL_STALE)
            e->round = e->who = e->node = 0;
        if (e->kind == EVENT_FAIL_STALE && e->step == 0)
            e->step = 1;
        if (e->kind < EVENT_FAIL_FORWARD && e->kind != EVENT_UNSHARD &&
            e->kind != EVENT_UNSHARD_RESHARD && e->kind != EVENT_FREEZE)
            e->node = 0;
        if (e->kind == EVENT_FREEZE)
            e->round = 0;
        if (!e->kind)
            *e = (random_event){ 0 };
        if (e->kind == EVENT_FAIL_COMM_HOOK)
            o[O_COMM_HOOK] = o[O_COMM_HOOK] ? o[O_COMM_HOOK] : 1;
        odd |= e->kind == EVENT_ABANDON || e->kind == EVENT_RETAIN || e->kind >= EVENT_FAIL_FORWARD;
    }
    int rounds = random_number(p, O_ROUNDS);
    if (rounds % 2 || odd)
        o[O_PAIRS] = 0;
    if (o[O_PAIRS] == 2) { /* the last backward is that of the last round but one */
        o[O_SKIP_SYNC] &= ~(1 << (rounds - 2));
        o[O_SKIP_ALL_REDUCE] &= ~(1 << (rounds - 2));
    }
}

void random_settle(random_program *p)
{
    settle_tree(p);
    settle_wrap(p);
    settle_unwrapped(p);
    settle_mesh(p);
    settle_precision(p);
    for (int i = 1; i < RANDOM_NODES; i++) {
        random_node *n = &p->node[i];
        if (n->when == WHEN_RUN_MICRO && random_holds_units(p, i))
            n->when = WHEN_LOSS_MICRO;
    }
    settle_events(p);
}

bool random_fails(const random_program *p)
{
    for (int i = 0; i < RANDOM_EVENTS; i++)
        if (p->event[i].kind >= EVENT_FAIL_FORWARD)
            return true;
    return false;
}

/* ---- text ------------------------------------------------------------------------------------ */

const char *random_text(const random_program *program, char *buf, size_t size)
{
    random_program p = *program;
    size_t used = 0;
    *buf = 0;
    for (int i = 0; i < FIELDS && used < size; i++) {
        char name[32], value[32];
        int v = *number_at(&p, i);
        if (v == 0 || i == NODES_AT)
            continue;
        used += (size_t)snprintf(buf + used, size - used, "%s%s=%s", used ? " " : "",
                                 field_name(i, name, sizeof name),
                                 value_name(field_at(i), v, value, sizeof value));
    }
    return buf;
}

static bool parse_word(const char *word, random_program *p)
{
    const char *is = strchr(word, '=');
    for (int i = 0; is && i < FIELDS; i++) {
        char name[32], value[32];
        if (strncmp(field_name(i, name, sizeof name), word, (size_t)(is - word)) != 0 ||
            name[is - word])
            continue;
        for (int v = 0; v < values_of(field_at(i)); v++)
            if (strcmp(value_name(field_at(i), v, value, sizeof value), is + 1) == 0) {
                *number_at(p, i) = v;
                return true;
            }
    }
    fprintf(stderr, "a random program has no '%s'\n", word);
    return false;
}

bool random_parse(const char *text, random_program *p)
{
    char copy[4096], *save = NULL;
    memset(p, 0, sizeof *p);
    snprintf(copy, sizeof copy, "%s", text);
    for (char *w = strtok_r(copy, " ", &save); w; w = strtok_r(NULL, " ", &save))
        if (!parse_word(w, p))
            return false;
    random_settle(p);
    return true;
}

/* ---- shrinking ------------------------------------------------------------------------------- */

bool random_simpler(const random_program *p, int i, random_program *simpler)
{
    for (int at = FIELDS - 1; at >= 0; at--) { /* modules and events go before options */
        *simpler = *p;
        int kind_first = (at + NODES_AT) % FIELDS;
        if (*number_at(simpler, kind_first) == 0)
            continue;
        *number_at(simpler, kind_first) = 0;
        random_settle(simpler);
        if (memcmp(simpler, p, sizeof *p) != 0 && i-- == 0)
            return true;
    }
    return false;
}

/* ---- coverage -------------------------------------------------------------------------------- */

static int print_counts(const field *f, const char *of, const uint64_t *count)
{
    int never = 0;
    printf("  %s%s:", of, f->name);
    for (int v = 0; v < values_of(f); v++) {
        char name[32];
        printf(" %s %llu", value_name(f, v, name, sizeof name), (unsigned long long)count[v]);
        never += count[v] == 0;
    }
    putchar('\n');
    return never;
}

int random_coverage(const random_program *program)
{
    enum { MOST = 32, KINDS_OF_FIELDS = O_OPTIONS + NODE_FIELDS + EVENT_FIELDS };
    static uint64_t count[KINDS_OF_FIELDS][MOST];
    int never = 0;
    for (int i = 0; program && i < FIELDS; i++) {
        random_program p = *program;
        int which = i < NODES_AT    ? i
                    : i < EVENTS_AT ? O_OPTIONS + (i - NODES_AT) % NODE_FIELDS
                                    : O_OPTIONS + NODE_FIELDS + (i - EVENTS_AT) % EVENT_FIELDS;
        bool there = i < NODES_AT || (i < EVENTS_AT && p.node[(i - NODES_AT) / NODE_FIELDS].kind) ||
                     (i >= EVENTS_AT && p.event[(i - EVENTS_AT) / EVENT_FIELDS].kind);
        bool kind = strcmp(field_at(i)->name, "kind") == 0;
        count[which][*number_at(&p, i)] += there || kind;
    }
    for (int i = 0; !program && i < KINDS_OF_FIELDS; i++)
        never +=
            i < O_OPTIONS ? print_counts(&option_field[i], "", count[i])
            : i < O_OPTIONS + NODE_FIELDS
                ? print_counts(&node_field[i - O_OPTIONS], "module's ", count[i])
                : print_counts(&event_field[i - O_OPTIONS - NODE_FIELDS], "event's ", count[i]);
    return never;
}
