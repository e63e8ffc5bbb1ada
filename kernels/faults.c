/* kernels/faults.c: faults on demand: the text that asks for one, and what happens at its place. */
#include "kernels/context.h"
#include "kernels/environment.h"
#include "kernels/faults.h"
#include "kernels/error_internal.h"
#include "kernels/kernels_internal.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- the text -------------------------------------------------------------------------------- */

#define MOST_DELAY  3600000 /* ms: an hour */
#define MOST_NUMBER ((int64_t)1 << 62)

/* Words in capitals are numbers, or a NAME. */
static const char *const places[] = {
    [KN_AT_ALLOCATION] = "at allocation K of step N",
    [KN_AT_COLLECTIVE] = "at collective K of step N",
    [KN_AT_STEP] = "at step N",
    [KN_AFTER_STEP] = "after step N",
    [KN_AT_SAVE] = "at save N",
};
enum {
    PLACES = sizeof places / sizeof *places,
    ALLOCATION = 1 << KN_AT_ALLOCATION,
    COLLECTIVE = 1 << KN_AT_COLLECTIVE,
    SAVE = 1 << KN_AT_SAVE,
    ANYWHERE = ALLOCATION | COLLECTIVE | SAVE | 1 << KN_AT_STEP,
};

static const struct {
    kn_fault_kind kind;
    const char *form;
    int places; /* at which it can be */
} kinds[] = {
    { KN_FAULT_KILL, "kill", ANYWHERE },
    { KN_FAULT_STOP, "stop", ANYWHERE },
    { KN_FAULT_CRASH, "crash", ANYWHERE },
    { KN_FAULT_EXIT, "exit", ANYWHERE },
    { KN_FAULT_ERROR, "error", ANYWHERE },
    { KN_FAULT_DELAY, "delay MS ms", ANYWHERE },
    { KN_FAULT_MEMORY, "no memory", ALLOCATION },
    { KN_FAULT_SHAPE, "other shape", COLLECTIVE },
    { KN_FAULT_SKIP, "skip", COLLECTIVE },
    { KN_FAULT_FLIP, "flip bit K of byte B of NAME", 1 << KN_AFTER_STEP },
    { KN_FAULT_FLIP, "flip bit K of byte B", COLLECTIVE },
    { KN_FAULT_DISK, "disk full", SAVE },
};
enum { KINDS = sizeof kinds / sizeof *kinds };

/* Whether the text at *at goes on in this form: then *at comes to lie behind it, and value and name
 * have what stood there. */
static bool goes_on(const char **at, const char *form, int64_t *value, char *name)
{
    const char *p = *at;
    char word[sizeof(((kn_fault *)0)->parameter)];
    for (size_t n = 0; *form; form += n + (form[n] == ' ')) {
        p += strspn(p, " ");
        size_t size = *p == ':' ? 1 : strcspn(p, " :");
        if (size == 0 || size >= sizeof word)
            return false;
        memcpy(word, p, size);
        word[size] = 0;
        p += size;
        n = strcspn(form, " ");
        if (strncmp(form, "NAME", 4) == 0)
            memcpy(name, word, size + 1);
        else if (*form < 'A' || *form > 'Z' ? size != n || memcmp(form, word, n) != 0
                                            : !kn_parse_number(word, 0, MOST_NUMBER, value++))
            return false;
    }
    *at = p;
    return true;
}

static void add_form(char *list, size_t room, const char *form)
{
    const size_t n = strlen(list);
    snprintf(list + n, room - n, "%s\"%s\"", n ? ", " : "", form);
}

static bool read_kind(const char **at, kn_fault *f, int *fit)
{
    char list[300] = "";
    int64_t v[2] = { 0 };
    for (int i = 0; i < KINDS && !f->kind; i++) {
        add_form(list, sizeof list, kinds[i].form);
        if (goes_on(at, kinds[i].form, v, f->parameter)) {
            f->kind = kinds[i].kind;
            *fit = kinds[i].places;
        }
    }
    f->ms = f->bit = v[0];
    f->byte = v[1];
    if (f->kind == KN_FAULT_DELAY && (f->ms < 1 || f->ms > MOST_DELAY))
        return kn_fail("the fault \"%s\": a delay has 1 to %d milliseconds", f->text, MOST_DELAY);
    if (f->kind == KN_FAULT_FLIP && f->bit > 7)
        return kn_fail("the fault \"%s\": a byte has bits 0 to 7", f->text);
    return f->kind || kn_fail("the fault \"%s\" is of no kind: give %s", f->text, list);
}

static bool read_place(const char **at, kn_fault *f, int fit)
{
    char list[160] = "";
    int64_t v[2] = { 1, 1 };
    int found = PLACES;
    for (int p = 0; p < PLACES; p++) {
        if (fit & 1 << p)
            add_form(list, sizeof list, places[p]);
        if (found == PLACES && goes_on(at, places[p], v, NULL))
            found = p;
    }
    if (found == PLACES || v[0] < 1 || v[1] < 1 || !(fit & 1 << found))
        return kn_fail("the fault \"%s\" is at no place that it can be at: give %s, with numbers "
                       "from 1",
                       f->text, list);
    const bool begins = found == KN_AT_STEP || found == KN_AFTER_STEP;
    f->place = (kn_fault_place)found;
    f->step = begins ? v[0] : found == KN_AT_SAVE ? 0 : v[1];
    atomic_store(&f->nth, begins ? 1 : v[0]);
    *at += strspn(*at, " ");
    return !**at ||
           kn_fail("the fault \"%s\" goes on behind its place: take \"%s\" away", f->text, *at);
}

bool kn_fault_read(const char *text, int rank, int ranks)
{
    kn_fault f = { .text = text };
    const char *at = text;
    int64_t of = 0;
    int fit = 0;
    if (!goes_on(&at, "rank R :", &of, NULL))
        return kn_fail(
            "the fault \"%s\" doesn't begin with its rank: give one as in \"rank 1: kill "
            "at collective 17 of step 3\"",
            text);
    if (of >= ranks)
        return kn_fail("the fault \"%s\": there are ranks from 0 to %d; give one of them, or start "
                       "more (--ranks)",
                       text, ranks - 1);
    if (!read_kind(&at, &f, &fit) || !read_place(&at, &f, fit))
        return false;
    if (f.place == KN_AT_COLLECTIVE && ranks == 1)
        return kn_fail("the fault \"%s\" is at a collective, which one rank doesn't make: start "
                       "several (--ranks 2)",
                       text);
    if (of == rank) {
        kn_context_get()->fault = f;
        kn_fault_pass(KN_AT_STEP); /* the first */
    }
    return kn_ok();
}

/* ---- places ---------------------------------------------------------------------------------- */

int64_t kn_fault_at(kn_fault_place place, int64_t nth, kn_fault_kind kind)
{
    kn_fault *f = &kn_context_get()->fault;
    if (nth > 0 || f->place == place) { /* else it is of another place, and stays */
        atomic_store(&f->nth, 0);
        f->place = place;
        f->kind = kind;
    }
    int64_t before = atomic_exchange(&f->count[place], 0);
    if (f->place == place)
        atomic_store(&f->nth, nth);
    return before;
}

kn_fault_kind kn_fault_due(kn_fault_place place)
{
    kn_context *c = kn_context_get();
    kn_fault *f = &c->fault;
    if (f->text && kn_context_is_worker())
        return KN_NO_FAULT;
    int64_t n = atomic_fetch_add_explicit(&f->count[place], 1, memory_order_relaxed) + 1;
    if (n != atomic_load_explicit(&f->nth, memory_order_acquire) || place != f->place || f->came)
        return KN_NO_FAULT;
    return f->step && c->rng.step + 1 != f->step ? KN_NO_FAULT : f->kind;
}

void kn_fault_step(int64_t before)
{
    kn_context *c = kn_context_get();
    kn_fault *f = &c->fault;
    if (!f->text || c->rng.step == before)
        return;
    if (before + 1 == f->step)
        f->seen = atomic_load(&f->count[f->place]);
    for (int p = 0; p < KN_AT_SAVE; p++)
        atomic_store(&f->count[p], 0);
    kn_fault_pass(KN_AT_STEP);
}

void kn_fault_missed(void)
{
    const kn_context *c = kn_context_get();
    const kn_fault *f = &c->fault;
    const int64_t now = c->rng.step + 1;
    if (!f->text || f->came || !kn_ok())
        return;
    if (now < f->step)
        kn_fail("the fault \"%s\" never came: the program ended after %lld steps", f->text,
                (long long)now - 1);
    else if (f->place == KN_AFTER_STEP)
        kn_fail("the fault \"%s\" never came: no optimizer has that parameter", f->text);
    else
        kn_fail("the fault \"%s\" never came: %s %lld such places", f->text,
                f->step ? "its step had" : "there were",
                (long long)(now > f->step && f->step ? f->seen : atomic_load(&f->count[f->place])));
}

/* ---- what happens ---------------------------------------------------------------------------- */

bool kn_fault_come(kn_fault_kind kind, const char *what)
{
    kn_fault *f = &kn_context_get()->fault;
    if (f->text) {
        f->came = true;
        f->disk_full = kind == KN_FAULT_DISK;
        dprintf(STDERR_FILENO, "knap: fault: %s%s%s\n", f->text, what ? ": " : "",
                what ? what : "");
    }
    switch (kind) {
    case KN_FAULT_KILL:
    case KN_FAULT_STOP:
        return raise(kind == KN_FAULT_KILL ? SIGKILL : SIGSTOP) == 0;
    case KN_FAULT_CRASH:
        signal(SIGSEGV, SIG_DFL); /* a sanitizer would write a report first */
        *(volatile char *)mmap(NULL, 1, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) = 1;
        return false;
    case KN_FAULT_EXIT:
        _exit(7);
    case KN_FAULT_ERROR:
        return kn_fail("a failure asked for");
    case KN_FAULT_DELAY:
        kn_sleep((double)f->ms / 1000);
        return true;
    default: /* its place does it */
        return true;
    }
}

bool kn_fault_pass(kn_fault_place place)
{
    const kn_fault_kind kind = kn_fault_due(place);
    if (kind == KN_FAULT_MEMORY)
        return kn_fail_memory("a failure asked for");
    return !kind || kn_fault_come(kind, NULL);
}

bool kn_fault_flip(kn_stream *s, void *at, int64_t bytes, const char *whose)
{
    const kn_fault *f = &kn_context_get()->fault;
    const bool apart = s && kn_device_is_apart(kn_stream_device(s));
    if (f->byte >= bytes)
        return kn_fail("the fault \"%s\" flips nothing: %s has %lld bytes", f->text, whose,
                       (long long)bytes);
    unsigned char *byte = (unsigned char *)at + f->byte, here = 0,
                  mask = (unsigned char)(1u << f->bit);
    if (!apart)
        *byte ^= mask;
    else if (!kn_transfer(s, &here, byte, 1, KN_TO_HOST, false) || !kn_stream_sync(s))
        return false;
    here ^= mask;
    return !apart || kn_transfer(s, byte, &here, 1, KN_TO_DEVICE, false);
}
