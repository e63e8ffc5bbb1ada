/* models/chat.c: the templates of conversations, and the ids of messages by them. The text of a
 * conversation is encoded piece by piece, cut where a special token ends or begins one: its ids are
 * those of the whole. */
#include "models/chat_internal.h"
#include "kernels/error_internal.h"
#include "kernels/memory_internal.h"
#include "models/model_folder.h"
#include "models/tokens/tokens.h"
#include "tensor/files.h"

#include <string.h>

/* ---- templates ------------------------------------------------------------------------------- */

#define ASK(open) "{% if add_generation_prompt %}{{ '" open "' }}{% endif %}"
#define EACH      "{% for message in messages %}"
#define CONTENT   "message['content'] | trim"

/* ChatML as OpenAI described it, Meta's of Llama 3 and Llama 2, and one of plain words, for
 * tokenizers without such tokens. */
static const kn_chat chats[] = {
    { .name = "chatml",
      .begin = "",
      .open = { "<|im_start|>system\n", "<|im_start|>user\n", "<|im_start|>assistant\n" },
      .lead = "",
      .close = { "<|im_end|>\n", "<|im_end|>\n", "<|im_end|>\n" },
      .stop = "<|im_end|>",
      .token = { "<|im_start|>", "<|im_end|>" },
      .jinja = EACH "{{ '<|im_start|>' + message['role'] + '\\n' + " CONTENT
                    " + '<|im_end|>\\n' }}{% endfor %}" ASK("<|im_start|>assistant\\n") },
    { .name = "llama3",
      .begin = "<|begin_of_text|>",
      .open = { "<|start_header_id|>system<|end_header_id|>\n\n",
                "<|start_header_id|>user<|end_header_id|>\n\n",
                "<|start_header_id|>assistant<|end_header_id|>\n\n" },
      .lead = "",
      .close = { "<|eot_id|>", "<|eot_id|>", "<|eot_id|>" },
      .stop = "<|eot_id|>",
      .token = { "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>" },
      .jinja = "{{ '<|begin_of_text|>' }}" EACH
               "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + " CONTENT
               " + '<|eot_id|>' }}{% endfor %}" ASK(
                   "<|start_header_id|>assistant<|end_header_id|>\\n\\n") },
    { .name = "llama2",
      .begin = "",
      .open = { "<s>[INST] <<SYS>>\n", "<s>[INST] ", "" },
      .lead = " ",
      .close = { "\n<</SYS>>\n\n", " [/INST]", " </s>" },
      .stop = "</s>",
      .token = { "<s>", "</s>" },
      .strict = true,
      .joins = true,
      .jinja =
          EACH "{% if message['role'] == 'system' %}{{ '<s>[INST] <<SYS>>\\n' + " CONTENT
               " + '\\n<</SYS>>\\n\\n' }}{% elif message['role'] == 'user' %}{% if loop.index0 "
               "== 0 or messages[loop.index0 - 1]['role'] != 'system' %}{{ '<s>[INST] ' }}{% "
               "endif %}{{ " CONTENT " + ' [/INST]' }}{% else %}{{ ' ' + " CONTENT
               " + ' </s>' }}{% endif %}{% endfor %}" },
    { .name = "plain",
      .begin = "",
      .open = { "### System:\n", "### User:\n", "### Assistant:\n" },
      .lead = "",
      .close = { "\n\n", "\n\n", "<|endoftext|>" },
      .stop = "<|endoftext|>",
      .token = { "<|endoftext|>" },
      .jinja = EACH "{{ '### ' + message['role'] | capitalize + ':\\n' + " CONTENT
                    " + ('<|endoftext|>' if message['role'] == 'assistant' else '\\n\\n') }}{% "
                    "endfor %}" ASK("### Assistant:\\n") },
};
#define CHATS (sizeof chats / sizeof *chats)

const kn_chat *kn_chat_named(const char *name)
{
    for (size_t i = 0; i < CHATS; i++)
        if (strcmp(chats[i].name, name) == 0)
            return &chats[i];
    return NULL;
}

const kn_chat *kn_chat_of_jinja(const char *jinja)
{
    static const char *const marks[CHATS][2] = { { "<|im_start|>", "<|im_end|>" },
                                                 { "<|start_header_id|>", "<|eot_id|>" },
                                                 { "[INST]", "<<SYS>>" },
                                                 { "### Assistant:", "<|endoftext|>" } };
    for (size_t i = 0; i < CHATS; i++)
        if (strstr(jinja, marks[i][0]) && strstr(jinja, marks[i][1]))
            return &chats[i];
    return NULL;
}

const kn_chat *kn_chat_known(const char *jinja, const char *path)
{
    const kn_chat *c = kn_chat_of_jinja(jinja);
    if (!c)
        kn_fail("%s: the chat template is none of those that are known (" KN_CHATS
                "); say which comes close (--template)",
                path);
    return c;
}

const kn_chat *kn_chat_of_folder(const char *dir)
{
    const kn_path jinja = kn_path_of(dir, "chat_template.jinja", ""),
                  config = kn_path_of(dir, "tokenizer_config.json", "");
    size_t size;
    if (kn_is_there(jinja.text)) {
        char *text = kn_file_read(jinja.text, 1 << 20, &size);
        const kn_chat *c = text ? kn_chat_known(text, jinja.text) : NULL;
        kn_host_free(text);
        return c;
    }
    if (!kn_ok() || !kn_is_there(config.text))
        return NULL;
    json_t *j = kn_model_json(config.text), *t = json_object_get(j, "chat_template");
    if (json_is_array(t)) /* several by name; the first is the usual one */
        t = json_object_get(json_array_get(t, 0), "template");
    const kn_chat *c = json_is_string(t) ? kn_chat_known(json_string_value(t), config.text) : NULL;
    json_decref(j);
    return c;
}

bool kn_chat_fits(const kn_tokenizer *t, const kn_chat *c)
{
    for (int i = 0; i < 4 && c->token[i]; i++)
        if (kn_tokenizer_id(t, c->token[i]) < 0)
            return false;
    return true;
}

const kn_chat *kn_chat_for(const kn_tokenizer *t)
{
    for (size_t i = 0; i < CHATS; i++)
        if (kn_chat_fits(t, &chats[i]))
            return &chats[i];
    return NULL;
}

kn_tokenizer *kn_chat_tokenizer(const kn_tokenizer *t, const kn_chat *c)
{
    int count = 0;
    while (count < 4 && c->token[count])
        count++;
    return kn_tokenizer_with(t, c->token, count);
}

/* ---- texts ----------------------------------------------------------------------------------- */

/* White space as Python's str.strip has it, which Jinja's trim is. */
static bool is_space(uint32_t c)
{
    return (c >= 9 && c <= 13) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 ||
           c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 ||
           c == 0x202f || c == 0x205f || c == 0x3000;
}

static void trim(const char **text, size_t *size)
{
    uint32_t code;
    for (size_t n; *size > 0 && (n = kn_utf8_read(*text, *size, &code)) > 0 && is_space(code);) {
        *text += n;
        *size -= n;
    }
    for (size_t n; *size > 0; *size -= n) {
        for (n = 1; n < 4 && n < *size && ((*text)[*size - n] & 0xc0) == 0x80; n++)
            ;
        if (kn_utf8_read(*text + *size - n, n, &code) != n || !is_space(code))
            return;
    }
}

static bool append(kn_chat_writer *w, const char *text, size_t size)
{
    if (!kn_host_grow(&w->text, &w->room, w->size + (int64_t)size + 1, 1))
        return false;
    memcpy(w->text + w->size, text, size);
    w->size += (int64_t)size;
    return true;
}

static bool append_text(kn_chat_writer *w, const char *text)
{
    return append(w, text, strlen(text));
}

/* ---- ids ------------------------------------------------------------------------------------- */

void kn_chat_ids_free(kn_chat_ids *ids)
{
    kn_host_free(ids->id);
    kn_host_free(ids->answer);
}

bool kn_chat_put(kn_chat_ids *to, int64_t id, bool answer)
{
    int64_t room = to->room;
    if (!kn_host_grow(&to->answer, &room, to->count + 1, 1) ||
        !kn_host_grow(&to->id, &to->room, to->count + 1, sizeof *to->id))
        return false;
    to->answer[to->count] = answer;
    to->id[to->count++] = id;
    to->answers += answer;
    return true;
}

/* Encodes the pending text, of which what lies behind `answer` (-1: nothing) is an answer, to its
 * stop. A token over that border belongs to the answer. */
static bool flush(kn_chat_writer *w, int64_t answer, kn_chat_ids *to)
{
    const int64_t stop = kn_tokenizer_id(w->t, w->chat->stop);
    int64_t count = 0, before = 0, same = 0, last = -1;
    int64_t *ids = kn_tokenizer_list(w->t, w->text, (size_t)w->size, KN_I64, &count), *head = NULL;
    bool ok = ids != NULL;
    if (ok && answer >= 0) {
        head = kn_tokenizer_list(w->t, w->text, (size_t)answer, KN_I64, &before);
        ok = head != NULL;
    }
    while (ok && same < before && same < count && ids[same] == head[same])
        same++;
    for (int64_t i = same; ok && answer >= 0 && i < count; i++)
        last = ids[i] == stop ? i : last;
    for (int64_t i = w->after_stop; ok && i < count; i++)
        ok = kn_chat_put(to, ids[i], answer >= 0 && i >= same && i <= last);
    kn_host_free(ids);
    kn_host_free(head);
    w->size = 0;
    w->after_stop = false;
    return ok;
}

/* Of what comes next the stop token is the beginning, so that it is encoded as behind it. */
static bool after_stop(kn_chat_writer *w)
{
    w->after_stop = true;
    return append_text(w, w->chat->stop);
}

static bool check_turn(const kn_chat_writer *w, kn_role role, const char *where)
{
    const bool first = !w->begun;
    if (role == KN_SYSTEM && !first)
        return kn_fail("%s: a message of the system isn't the first one", where);
    if (!w->chat->strict || role == KN_SYSTEM)
        return true;
    const kn_role due = first || w->last != KN_USER ? KN_USER : KN_ASSISTANT;
    return role == due || kn_fail("%s: the template %s takes user and assistant in turn, and the "
                                  "user first",
                                  where, w->chat->name);
}

bool kn_chat_add(kn_chat_writer *w, kn_role role, const char *text, size_t size, const char *where,
                 kn_chat_ids *to)
{
    const kn_chat *c = w->chat;
    const bool joined = c->joins && w->begun && w->last == KN_SYSTEM;
    const char *open = joined ? "" : c->open[role];
    if (!check_turn(w, role, where))
        return false;
    trim(&text, &size);
    bool ok = w->begun || append_text(w, c->begin);
    if (w->begun && w->size > 0 && open[0] == '<' && !w->after_stop)
        ok = flush(w, -1, to);
    ok = ok && append_text(w, open);
    const int64_t answer = w->size;
    if (role == KN_ASSISTANT)
        ok = ok && append_text(w, c->lead);
    ok = ok && append(w, text, size) && append_text(w, c->close[role]);
    w->begun = true;
    w->last = role;
    if (role != KN_ASSISTANT || !ok)
        return ok;
    const size_t n = strlen(c->stop), length = strlen(c->close[role]);
    return flush(w, answer, to) &&
           (length < n || strcmp(c->close[role] + length - n, c->stop) != 0 || after_stop(w));
}

bool kn_chat_ask(kn_chat_writer *w, kn_chat_ids *to)
{
    return append_text(w, w->chat->open[KN_ASSISTANT]) && flush(w, -1, to);
}

bool kn_chat_answered(kn_chat_writer *w)
{
    const char *close = w->chat->close[KN_ASSISTANT], *stop = strstr(close, w->chat->stop);
    w->last = KN_ASSISTANT;
    return after_stop(w) && append_text(w, stop + strlen(w->chat->stop));
}

void kn_chat_end(kn_chat_writer *w)
{
    kn_host_free(w->text);
}

/* ---- lines of JSON --------------------------------------------------------------------------- */

static bool add_text(kn_chat_writer *w, kn_role role, const json_t *text, const char *field,
                     const char *where, kn_chat_ids *to)
{
    return (json_is_string(text) ||
            kn_fail("%s: \"%s\" is no text in a message or pair", where, field)) &&
           kn_chat_add(w, role, json_string_value(text), json_string_length(text), where, to);
}

static bool add_messages(kn_chat_writer *w, const json_t *list, const char *where, kn_chat_ids *to)
{
    static const char *const names[] = { "system", "user", "assistant" };
    size_t i;
    json_t *message;
    json_array_foreach(list, i, message)
    {
        const char *role = json_string_value(json_object_get(message, "role"));
        int r = 0;
        while (role && r < KN_ROLES && strcmp(role, names[r]) != 0)
            r++;
        if (!role || r == KN_ROLES)
            return kn_fail("%s: message %zu has %s%.40s; system, user and assistant are read",
                           where, i, role ? "the role " : "no role", role ? role : "");
        if (!add_text(w, (kn_role)r, json_object_get(message, "content"), "content", where, to))
            return false;
    }
    return true;
}

bool kn_chat_encode(const kn_chat *c, const kn_tokenizer *t, const json_t *object,
                    const char *where, kn_chat_ids *to)
{
    kn_chat_writer w = { .chat = c, .t = t };
    const json_t *messages = json_object_get(object, "messages"),
                 *prompt = json_object_get(object, "prompt"),
                 *answer = json_object_get(object, "completion");
    const char *field = answer ? "completion" : "answer";
    bool ok;
    answer = answer ? answer : json_object_get(object, "answer");
    if (json_is_array(messages))
        ok = add_messages(&w, messages, where, to);
    else if (prompt && answer)
        ok = add_text(&w, KN_USER, prompt, "prompt", where, to) &&
             add_text(&w, KN_ASSISTANT, answer, field, where, to);
    else
        ok = kn_fail("%s: neither \"messages\", a list of {\"role\", \"content\"}, nor \"prompt\" "
                     "and \"completion\" or \"answer\"",
                     where);
    /* what is behind the last answer has no answer */
    kn_chat_end(&w);
    return ok;
}
