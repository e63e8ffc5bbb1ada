/* examples/course/check_7.c: the checker of exercise 7. */
#include "course.h"
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

void begin(unit *u, kn_comm *ranks);
void step(unit *u);
bool save(unit *u, int file, int64_t at);
bool load(unit *u, int file, int64_t at);

enum { MICROS = 6, FIRST = 2, STEPS = 4 }; /* steps until the file is written, and all */
static int file;

static void each_unit(net *n, report *r, bool (*fn)(unit *, int, int64_t))
{
    int64_t at = 0;
    for (int i = 0; i < UNITS; at += 4 * n->unit[i++].numel)
        if (!fn(&n->unit[i], file, at))
            lacking(r, "%s() of '%s' says that it failed.", fn == save ? "save" : "load",
                    n->unit[i].name);
}

static void save_all(net *n, report *r)
{
    each_unit(n, r, save);
}

static void load_all(net *n, report *r)
{
    for (int i = 0; i < UNITS; i++)
        memset(n->unit[i].shard, 0xff, (size_t)n->unit[i].part * 4);
    each_unit(n, r, load);
}

static void compare(const float *got, const float *want, const char *when)
{
    bool near = true;
    for (int i = 0; i < TOTAL; i++)
        near = near && got[i] - want[i] < 1e-5F && want[i] - got[i] < 1e-5F;
    same(got, want, when,
         near ? "only the last digits differ, so the same terms were added in another order."
              : "is it the mean of all 6 micro-batches of a step, and of no others?");
}

int main(void)
{
    training t = { .steps = STEPS, .micros = MICROS, .twice = true, .sharded = true };
    t.begin = begin, t.step = step;
    float saved[TOTAL] = { 0 };
    struct stat s;
    const report *one = reference(t);
    for (t.ranks = 1; t.ranks <= 3; t.ranks++) {
        printf("with --ranks %d\n", t.ranks);
        compare(train(t)->param, one->param, "at the end");
    }
    file = fileno(tmpfile());
    t.ranks = 3, t.steps = FIRST, t.ended = save_all;
    const report *half = train(t);
    if (fstat(file, &s) || s.st_size != sizeof saved)
        wrong("the file has %d bytes, and the values take %d: elements have a place, padding none.",
              (int)s.st_size, (int)sizeof saved);
    if (pread(file, saved, sizeof saved, 0) == sizeof saved)
        same(saved, half->param, "in the file that 3 ranks wrote",
             "each element has one place in it.");
    t.ranks = 2, t.from = FIRST, t.steps = STEPS, t.begun = load_all, t.ended = NULL;
    const report *r = train(t);
    same(r->value, half->param, "after load() on 2 ranks", "3 ranks saved that.");
    compare(r->param, one->param, "after the load and 2 more steps");
    right("1, 2 and 3 ranks have the same bits, also 2 that go on from the file of 3.");
}
