/* tests/fsdp/events_test.c: the events of a step that a program hears (kn_fsdp_on_event), on meta
 * among simulated ranks (chain.h). */
#include "tests/fsdp/chain.h"
#include "tests/fsdp/two.h"

enum { DIM = 16 };

typedef struct heard {
    char line[1024];
    int64_t gathered, unreduced; /* bytes held by units */
    int wrong;                   /* events without bytes */
} heard;

static void hear_event(const kn_fsdp_event *e, void *arg)
{
    heard *h = arg;
    size_t n = strlen(h->line);
    snprintf(h->line + n, sizeof h->line - n, "%s%s %s", n ? ", " : "", kn_fsdp_event_name(e->kind),
             e->unit);
    h->gathered += e->kind == KN_FSDP_GATHER    ? e->bytes
                   : e->kind == KN_FSDP_RELEASE ? -e->bytes
                                                : 0;
    h->unreduced += e->kind == KN_FSDP_REDUCE    ? e->bytes
                    : e->kind == KN_FSDP_REDUCED ? -e->bytes
                                                 : 0;
    h->wrong += e->bytes != DIM * DIM * 4;
}

KN_TEST(events, of_a_step)
{
    CHAIN(c, 2, 2);
    heard h = { .line = "" };
    KN_CHECK(kn_fsdp_on_event(&c, hear_event, &h));
    chain_step(&c, true);
    chain_check_line("events", h.line,
                     "gather 0, gathered 0, release 0, gather 1, gathered 1, release 1, gather 1, "
                     "gathered 1, gather 0, release 1, reduce 1, gathered 0, release 0, reduced 1, "
                     "reduce 0, reduced 0");
    KN_CHECK(h.gathered == 0 && h.unreduced == 0 && h.wrong == 0,
             "%lld and %lld bytes are left, %d events have other bytes than a layer's",
             (long long)h.gathered, (long long)h.unreduced, h.wrong);
    h.line[0] = 0;
    KN_CHECK(kn_fsdp_on_event(&c.layer[0], NULL, NULL));
    kn_fsdp_unshard(&c.layer[0]);
    KN_CHECK(kn_fsdp_unshard(&c.layer[1]).unit && kn_fsdp_reshard(&c.layer[1]));
    KN_CHECK(kn_fsdp_reshard(&c.layer[0]));
    chain_check_line("by hand, and of one unit only", h.line, "gather 1, gathered 1, release 1");
    KN_CHECK(strcmp(kn_fsdp_event_name((kn_fsdp_event_kind)99), "unknown") == 0);
    KN_CHECK(!kn_fsdp_on_event(&c.layer[0].fc, hear_event, &h), "there is no unit");
    KN_CHECK(kn_error() && strstr(kn_error(), "no unit of fsdp"));
    kn_clear_error();
}

/* The state of layer 1 while layer 0's events come, and between steps. */
typedef struct seen {
    chain *c;
    int wrong, ahead, reducing;
} seen;

static void look(const kn_fsdp_event *e, void *arg)
{
    seen *s = arg;
    const kn_fsdp_state own = kn_fsdp_unit_state(&s->c->layer[*e->unit - '0']);
    const bool gathered = e->kind == KN_FSDP_GATHERED, issued = e->kind == KN_FSDP_GATHER;
    s->wrong += e->rank != 0 || (gathered && (!own.gathered || own.gathered_bytes != e->bytes)) ||
                (issued && (!own.gathering || own.gathered || own.gathered_bytes != e->bytes)) ||
                (e->kind == KN_FSDP_RELEASE && (own.gathered || own.gathered_bytes)) ||
                (e->kind == KN_FSDP_REDUCE && own.unreduced_bytes != e->bytes) ||
                (e->kind == KN_FSDP_REDUCED && (own.reducing || own.unreduced_bytes));
    s->ahead += kn_fsdp_unit_state(&s->c->layer[0]).ahead;
    s->reducing += kn_fsdp_unit_state(&s->c->layer[1]).reducing;
}

KN_TEST(events, the_state_of_a_unit)
{
    CHAIN(c, 2, 2);
    seen s = { .c = &c };
    KN_CHECK(kn_fsdp_on_event(&c, look, &s));
    chain_step(&c, true);
    KN_CHECK(s.wrong == 0 && s.ahead > 0 && s.reducing > 0, "%d wrong, %d ahead, %d reducing",
             s.wrong, s.ahead, s.reducing);
    const kn_fsdp_state idle = kn_fsdp_unit_state(&c.layer[1]);
    KN_CHECK(strcmp(idle.doing, "idle") == 0 && !idle.gathered && !idle.gathered_bytes);
    kn_fsdp_unshard(&c.layer[1]);
    KN_CHECK(kn_fsdp_unit_state(&c.layer[1]).gathering);
    KN_CHECK(!kn_fsdp_unit_state(&c.layer[0].fc).doing && strstr(kn_error(), "unit"));
    kn_clear_error();
}

/* A root with a parameter of its own stays gathered between its forward and its backward, unless it
 * is told otherwise; the units inside it go. */
KN_TEST(events, the_root_stays)
{
    for (int always = 0; always < 2; always++) {
        two m;
        heard h = { .line = "" };
        OWNED_SIMULATED kn_comm *world = kn_comm_simulated(2, 0, 1e6);
        kn_scope scope = kn_scope_begin();
        KN_CHECK(two_init(&m, KN_META, KN_F32) && kn_fsdp_wrap(&m.a, world, .device = KN_META) &&
                 kn_fsdp_wrap(&m, world, .device = KN_META,
                              .reshard_after_forward =
                                  always ? KN_RESHARD_ALWAYS : KN_RESHARD_DEFAULT) &&
                 kn_fsdp_on_event(&m, hear_event, &h));
        kn_tensor *y = kn_call(&m, kn_zeros(KN_F32, KN_META, KN_SHAPE(2, 4)));
        chain_check_line(
            "forward", h.line,
            always ? "gather two, gathered two, gather a, gathered a, release a, release two"
                   : "gather two, gathered two, gather a, gathered a, release a");
        KN_CHECK(kn_backward(sum_of(y)) && h.gathered == 0);
        kn_scope_end(scope);
        kn_module_free(&m);
    }
}

/* Reductions in the order of events: r is issued, d is done, of four layers. */
KN_TEST(events, at_most_so_many_reductions)
{
    static const char *const want[] = { "r3 d3 r2 d2 r1 d1 r0 d0", "r3 d3 r2 d2 r1 d1 r0 d0",
                                        "r3 r2 d3 r1 d2 r0 d1 d0", "r3 r2 r1 d3 r0 d2 d1 d0",
                                        "r3 r2 r1 r0 d3 d2 d1 d0" };
    for (int most = 0; most <= 4; most++) {
        CHAIN(c, 4, 2, .max_reductions = most);
        heard h = { .line = "" };
        KN_CHECK(kn_fsdp_on_event(&c, hear_event, &h));
        chain_trace t = chain_step(&c, true);
        char line[64] = "", *save = NULL;
        size_t n = 0;
        for (char *e = strtok_r(h.line, ",", &save); e; e = strtok_r(NULL, ",", &save))
            if (strstr(e, "reduce"))
                n += (size_t)snprintf(line + n, sizeof line - n, "%s%c%c", n ? " " : "",
                                      strstr(e, "reduced") ? 'd' : 'r', e[strlen(e) - 1]);
        chain_check_line("reductions", line, want[most]);
        int64_t layers = t.unreduced / (DIM * DIM * 4);
        KN_CHECK(layers == (most == 0  ? 2
                            : most < 4 ? most + 1
                                       : 4),
                 "%d reductions: %d layers", most, (int)layers);
    }
}

/* Without a movement of bytes there is no event; slices are released, too. */
KN_TEST(events, where_nothing_moves)
{
    CHAIN(c, 1, 1);
    heard h = { .line = "" };
    KN_CHECK(kn_fsdp_on_event(&c, hear_event, &h));
    chain_step(&c, true);
    chain_check_line("one rank", h.line, "reduce 0, reduced 0");
    kn_fsdp_set_gradient_sync(&c, false, true);
    h.line[0] = 0;
    chain_step(&c, true);
    chain_check_line("without sync", h.line, "");
}
