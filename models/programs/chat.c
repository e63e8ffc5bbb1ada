/* models/programs/chat.c: a conversation in the terminal. Keys and values of the turns so far stay
 * in a cache; a conversation that outgrows the context loses its oldest turns. */
#include "models/programs/chat.h"
#include "models/programs/prompts.h"
#include "autograd/autograd.h"
#include "autograd/operations.h"
#include "kernels/error_internal.h"
#include "kernels/memory_internal.h"
#include "models/tokens/tokens.h"
#include "nn/layers.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LONGEST_LINE = 1 << 20 };

/* What the user said, and the answer with its stop token. */
typedef struct turn {
    char *said;
    int64_t *answer, count, room;
} turn;

typedef struct talk {
    const chat_options *o;
    const kn_chat *chat;
    const kn_tokenizer *t;
    const kn_model_config *config;
    kn_module *model;
    kn_comm *world;
    kn_device device;
    const int64_t *ends; /* tokens that end an answer */
    int end_count;
    turn *turns;
    int64_t count, room; /* the last one is being answered */
    kn_chat_ids ids;     /* of all turns */
    kn_cache *cache;
    float *logits; /* [vocab] */
    int64_t drawn; /* tokens, so far */
} talk;

/* ---- lines ----------------------------------------------------------------------------------- */

/* Rank 0's next line, on every rank, for kn_host_free; NULL at the end, or with an error. */
static char *next_line(const talk *k)
{
    char *line = NULL, *text = NULL;
    size_t room = 0;
    if (kn_rank(k->world) == 0) {
        if (isatty(STDIN_FILENO) && isatty(STDOUT_FILENO)) {
            printf("> ");
            fflush(stdout);
        }
        ssize_t size = getline(&line, &room, stdin);
        if (size < 0 && ferror(stdin))
            kn_fail_system("cannot read standard input: %m");
        while (size > 0 && (line[size - 1] == '\n' || line[size - 1] == '\r'))
            line[--size] = 0;
        if (size > LONGEST_LINE)
            kn_fail("a line of %lld bytes on standard input; at most %d are read", (long long)size,
                    LONGEST_LINE);
        else if (size > 0 && memchr(line, 0, (size_t)size))
            kn_fail("a line on standard input has the character U+0000");
        else if (size >= 0)
            text = kn_host_strdup(line);
        free(line);
    }
    return share_text(text, "the line", k->world);
}

/* ---- what the model sees --------------------------------------------------------------------- */

static void turn_free(turn *t)
{
    kn_host_free(t->said);
    kn_host_free(t->answer);
}

static bool add_turn(talk *k, char *said)
{
    if (!kn_host_grow(&k->turns, &k->room, k->count + 1, sizeof *k->turns)) {
        kn_host_free(said);
        return false;
    }
    k->turns[k->count++] = (turn){ .said = said };
    return true;
}

/* The ids of the system's message and of all turns, to the last one's answer. What the cache has of
 * them stays. */
static bool make_ids(talk *k)
{
    const kn_chat_ids old = k->ids;
    const char *system = k->o->system;
    const int64_t kept = kn_cache_length(k->cache);
    int64_t same = 0;
    kn_chat_writer w = { .chat = k->chat, .t = k->t };
    k->ids = (kn_chat_ids){ 0 };
    bool ok = !system || kn_chat_add(&w, KN_SYSTEM, system, strlen(system), "--system", &k->ids);
    for (int64_t i = 0; ok && i < k->count; i++) {
        const turn *t = &k->turns[i];
        ok = kn_chat_add(&w, KN_USER, t->said, strlen(t->said), "the message", &k->ids) &&
             kn_chat_ask(&w, &k->ids);
        for (int64_t j = 0; ok && j < t->count; j++)
            ok = kn_chat_put(&k->ids, t->answer[j], true);
        ok = ok && (i + 1 == k->count || kn_chat_answered(&w));
    }
    while (ok && same < kept && same < k->ids.count - 1 && old.id[same] == k->ids.id[same])
        same++;
    ok = ok && (same == kept || kn_cache_truncate(k->cache, same));
    kn_chat_end(&w);
    kn_chat_ids_free((kn_chat_ids *)&old);
    return ok;
}

static void note(const talk *k, const char *text)
{
    fflush(stdout);
    if (kn_rank(k->world) == 0)
        fprintf(stderr, "(%s)\n", text);
}

/* Leaves the oldest turns out until a quarter of the context is free. False without an error: the
 * last turn alone is too long, and left out, too. */
static bool make_room(talk *k)
{
    int64_t left_out = 0;
    char text[128];
    bool ok = make_ids(k);
    while (ok && k->count > 1 && k->ids.count > k->o->ctx - k->o->ctx / 4) {
        turn_free(&k->turns[0]);
        memmove(k->turns, k->turns + 1, (size_t)--k->count * sizeof *k->turns);
        left_out++;
        ok = make_ids(k);
    }
    if (ok && left_out) {
        snprintf(text, sizeof text,
                 "the context of %lld tokens is full: the oldest %s left out from here on",
                 (long long)k->o->ctx, left_out == 1 ? "turn is" : "turns are");
        note(k, text);
    }
    if (!ok || k->ids.count < k->o->ctx)
        return ok;
    snprintf(text, sizeof text,
             "this message makes %lld tokens and the context has %lld: say it shorter",
             (long long)k->ids.count, (long long)k->o->ctx);
    note(k, text);
    turn_free(&k->turns[--k->count]);
    return false;
}

/* ---- the answer ------------------------------------------------------------------------------ */

/* -1 with an error. */
static int64_t next_token(talk *k)
{
    const int64_t vocab = (int64_t)kn_config_get(k->config, "vocab", 0),
                  from = kn_cache_length(k->cache), count = k->ids.count - from;
    int64_t id = -1;
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = kn_from(KN_I64, k->device, k->ids.id + from, KN_SHAPE(1, count)),
              *y = x ? kn_language_next_logits(k->model, x) : NULL;
    y = kn_cast(y, KN_F32);
    if (y && kn_to_host(y, k->logits, (size_t)vocab * sizeof *k->logits))
        id = kn_sample(k->logits, vocab, &k->o->draw, k->drawn++);
    kn_scope_end(scope);
    return id;
}

static bool is_end(const talk *k, int64_t id)
{
    for (int i = 0; i < k->end_count; i++)
        if (k->ends[i] == id)
            return true;
    return id == kn_tokenizer_id(k->t, k->chat->stop);
}

static bool put_answer(talk *k, int64_t id)
{
    turn *t = &k->turns[k->count - 1];
    if (!kn_host_grow(&t->answer, &t->room, t->count + 1, sizeof *t->answer))
        return false;
    t->answer[t->count++] = id;
    return kn_chat_put(&k->ids, id, true);
}

static void print_piece(const talk *k, int64_t id, bool first)
{
    const char *bytes;
    if (kn_rank(k->world) != 0 || id >= kn_tokenizer_vocab(k->t))
        return;
    const size_t n = kn_tokenizer_piece(k->t, id, &bytes), skip = first && n > 0 && *bytes == ' ';
    fwrite(bytes + skip, 1, n - skip, stdout);
    fflush(stdout);
}

/* Writes an answer as it comes, and ends it by the stop token. */
static bool answer(talk *k)
{
    const kn_sample_options *draw = &k->o->draw;
    const char *cut = NULL;
    int64_t id = 0;
    for (int64_t i = 0;; i++) {
        cut = i == k->o->tokens           ? "the answer is cut: it has as many tokens as --tokens"
              : k->ids.count >= k->o->ctx ? "the answer is cut: the context is full"
                                          : NULL;
        if (cut || draw->stop(draw->stop_arg) || (id = next_token(k)) < 0 || is_end(k, id))
            break;
        print_piece(k, id, i == 0);
        if (!put_answer(k, id))
            return false;
    }
    if (kn_rank(k->world) == 0)
        printf("\n");
    if (cut)
        note(k, cut);
    return kn_ok() && put_answer(k, kn_tokenizer_id(k->t, k->chat->stop));
}

static bool turns(talk *k)
{
    char *line;
    while (kn_ok() && !k->o->draw.stop(k->o->draw.stop_arg) && (line = next_line(k))) {
        const bool ends = strcmp(line, "/exit") == 0;
        if (ends || !*line) {
            kn_host_free(line);
            if (ends)
                break;
        } else if (add_turn(k, line) && make_room(k))
            answer(k);
    }
    return kn_ok();
}

/* ---- beginning ------------------------------------------------------------------------------- */

static const kn_chat *find_chat(const kn_imported *from, const kn_tokenizer *t,
                                const chat_options *o)
{
    const kn_chat *c = o->template ? kn_chat_named(o->template) : kn_import_chat(from);
    if (!c && kn_ok())
        kn_fail("--chat: the model has no chat template on record; say which it was trained with "
                "(--template), if any");
    if (c && !kn_chat_fits(t, c))
        kn_fail("--chat: the tokenizer lacks tokens of the template %s, as %s; give another "
                "(--template)",
                c->name, c->stop);
    return kn_ok() ? c : NULL;
}

bool chat(kn_module *model, const kn_imported *from, const kn_tokenizer *t, const chat_options *o,
          kn_comm *world)
{
    const kn_model_config *config = kn_import_config(from);
    const kn_param *p;
    talk k = { .o = o, .t = t, .config = config, .model = model, .world = world };
    k.chat = find_chat(from, t, o);
    k.end_count = kn_import_ends(from, &k.ends);
    k.device = kn_params(model, &p) > 0 ? kn_device_of(p[0].tensor) : KN_CPU;
    k.logits = kn_host_alloc((size_t)kn_config_get(config, "vocab", 0) * sizeof *k.logits);
    if (kn_agree(world, k.chat && k.logits)) {
        const bool training = kn_training(model), mode = kn_set_grad_mode(false);
        kn_train(model, false);
        k.cache = kn_cache_new(model, o->ctx);
        if (k.cache)
            turns(&k);
        kn_cache_free(k.cache);
        kn_train(model, training);
        kn_set_grad_mode(mode);
    }
    for (int64_t i = 0; i < k.count; i++)
        turn_free(&k.turns[i]);
    kn_host_free(k.turns);
    kn_host_free(k.logits);
    kn_chat_ids_free(&k.ids);
    return kn_ok();
}
