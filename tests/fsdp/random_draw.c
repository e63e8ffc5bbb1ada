/* tests/fsdp/random_draw.c: programs as numbers: drawing them, text, shrinking, coverage. */
#include "fsdp/kinds.h"
#include "tests/fsdp/random.h"

/* A number of a program: its name, the names of its values (the simplest first), the probability
 * that it isn't 0. */
typedef struct field {
    const char *name, *values;
    int percent;
} field;

#define WORD(id, name, ...) " " name

static const field option_field[O_OPTIONS] = {
    [O_RANKS] = { "ranks", "2 1 3 4 8", 60 },
    [O_STEPS] = { "steps", "2 3 4", 30 },
    [O_ROUNDS] = { "rounds", "2 1 3 4", 50 },
    [O_DIM] = { "dim", "4 1 2 3 5 7 8 16", 70 },
    [O_BATCH] = { "batch", "2 1 3", 40 },
    [O_HEAD] = { "head", "mse embed tied", 50 },
    [O_STRATEGY] = { "strategy", &(KN_STRATEGIES(WORD))[1], 70 },
    [O_MESH] = { "mesh", "small large one", 50 },
    [O_LAYOUT] = { "layout", &(KN_LAYOUTS(WORD))[1], 60 },
    [O_PLACEMENT] = { "placement", "rows last", 30 },
    [O_WHOLE_BELOW] = { "keep_whole_below", "0 5 20 1000", 25 },
    [O_WRAP] = { "wrap", "root linear parts seq size policy hand groups unwrapped", 95 },
    [O_WRAP_LIKE] = { "wrap_like", "no yes", 40 },
    [O_BACKWARD_PREFETCH] = { "backward_prefetch", "default pre post none", 60 },
    [O_FORWARD_PREFETCH] = { "forward_prefetch", "no yes", 40 },
    [O_LISTS] = { "prefetch_lists", "no next all", 15 },
    [O_GATHERS] = { "max_gathers", "0 1 2 4", 40 },
    [O_REDUCTIONS] = { "max_reductions", "0 1 2 4", 30 },
    [O_RESHARD] = { "reshard_after_forward", "0 -1 1 2", 70 },
    [O_KEEP_GATHERED] = { "keep_gathered", "no yes", 15 },
    [O_PARAM_DTYPE] = { "param_dtype", "declared f32 bf16 f16", 30 },
    [O_PARAM_DTYPE_OF] = { "param_dtype_of", "no norms", 40 },
    [O_REDUCE_DTYPE] = { "reduce_dtype", "param f32 bf16 f16", 25 },
    [O_KEEP_LOW] = { "keep_low_precision_grads", "no yes", 30 },
    [O_CAST_INPUTS] = { "cast_inputs", "default all root none", 30 },
    [O_OUTPUT_DTYPE] = { "output_dtype", "no f32 bf16", 20 },
    [O_BUFFER_DTYPE] = { "buffer_dtype", "no f32 bf16", 20 },
    [O_FULL_PRECISION] = { "full_precision_class", "no layer_norm", 25 },
    [O_RECOMPUTE_BY] = { "recompute_by", "hand part seq both policy", 15 },
    [O_OFFLOAD] = { "offload", "no file", 20 },
    [O_INIT] = { "init", "meta cpu fill rank0 module", 40 },
    [O_IGNORED_AS] = { "ignored_as", "names modules params", 60 },
    [O_REDUCE_OP] = { "reduce_op", "default average sum", 20 },
    [O_DIVIDE] = { "divide_factor", "0 1 3 8", 15 },
    [O_PREDIVIDE] = { "predivide_factor", "0 2 4", 15 },
    [O_COMM_HOOK] = { "comm_hook", "no default bf16", 15 },
    [O_SUM_HOOK] = { "all_reduce_hook", "no sees halves", 15 },
    [O_GATHER_HOOK] = { "gather_hook", "no default", 15 },
    [O_EMBEDDING] = { "embedding", "root unit stays_sharded", 50 },
    [O_UNUSED] = { "reduce_unused", "no yes", 20 },
    [O_LAST] = { "last_backward", "each of_step", 30 },
    [O_DATA] = { "data", "own same", 15 },
    [O_USES] = { "uses", "0 1 2 3 4 5 6 7", 30 },
    [O_SKIP_SYNC] = { "no_sync", "0 1 2 3 4 5 6 7", 25 },
    [O_SKIP_ALL_REDUCE] = { "no_all_reduce", "0 1 2 3 4 5 6 7", 30 },
    [O_PAIRS] = { "pairs", "no yes swapped", 15 },
    [O_LEAF_HOOK] = { "grad_hook", "no param activation", 15 },
    [O_OPTIMIZER] = { "optimizer", "adamw sgd momentum nesterov lion own muon amsgrad", 50 },
    [O_OPTIMIZERS] = { "optimizers", "1 2", 20 },
    [O_CLIP] = { "clip", "0.5 none measure 0.01 p1 p3 max", 50 },
    [O_SCALER] = { "scaler", "no 256 too_large", 15 },
    [O_WORKERS] = { "workers", "no yes", 25 },
    [O_THREADS] = { "ranks_are", "processes threads", 20 },
    [O_SYNC_NORMS] = { "sync_batch_norm", "no before after", 30 },
};
enum { NODE_FIELDS = sizeof(random_node) / sizeof(int) };
static const field node_field[NODE_FIELDS] = {
    { "kind",
      "none linear mlp norm rms_norm batchnorm own unused partly shared dropout seq residual conv",
      70 },
    { "in", "m0 m1 m2 m3 m4 m5 m6 m7 m8", 60 },
    { "when", "always round loss_round loss_micro run_micro", 40 },
    { "twice", "no yes", 20 },
    { "unit", "no yes", 60 },
    { "other", "no yes", 30 },
    { "recompute", "no yes", 25 },
    { "entered", "no yes method", 20 },
    { "frozen", "no yes", 15 },
    { "ignored", "no yes", 10 },
    { "hidden", "5 1 2 3 7 8 12 16", 70 },
};
enum { EVENT_FIELDS = sizeof(random_event) / sizeof(int) };
static const field event_field[EVENT_FIELDS] = {
    { "kind",
      "none evaluate abandon summon summon_write summon_rank0 apply read unshard unshard_reshard "
      "reshard clear zero never_reshard always_reshard divide freeze retain call call_backward "
      "fail_forward "
      "fail_pre_forward fail_post_forward fail_input fail_loss "
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
        below(&state, 10) < 6) /* several ranks refuse to continue after a failure: use one */
        p.option[O_RANKS] = 1;
    random_settle(&p);
    return p;
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
