/* models/programs/facts.c: what a recording tells, in numbers: queries of its database. */
#include "models/programs/facts.h"
#include "kernels/error_internal.h"
#include "kernels/memory.h"

#include <string.h>

/* clang-format off */
/* ---- the step -------------------------------------------------------------------------------- */

/* The first recorded step of a rank as one line: g gathers a unit, s reduces it, F and B begin its
 * forward and its backward. */
static const char order[] = SQL(
    with
    first as (select min(r) r from event where k = 'verb'),
    last as (select coalesce(min(i), 1e15) i from event
        where k = 'step' and w = 'end' and r = (select r from first)),
    line as (select group_concat(letter || short, ' ') text from (
        select case w when 'gather' then 'g' when 'reduce' then 's'
            when 'forward' then 'F' else 'B' end letter, short
        from event join unit on name = m or (unit.i = 0 and m is null)
        where ((k = 'verb' and w in ('gather', 'reduce'))
            or (k = 'call' and w in ('forward', 'backward')))
        and r = (select r from first) and event.i < (select i from last) order by event.i))
    select format('The order of the first step on rank %d: %.1999s%s', r, text,
        iif(length(text) > 1999, ' ...', null))
    from first, line where r is not null);

static const char units[] = SQL(
    select short unit, name, j ->> 'class' class, j ->> 'shards' [#shards],
        (select format('%.0f', total(param.value ->> 'numel'))
            from json_each(j, '$.buckets') bucket, json_each(bucket.value, '$.params') param)
            [#parameters],
        bytes((select total(value ->> 'full_bytes') from json_each(j, '$.buckets'))) [#gathered],
        format('%s, computes in %s', j ->> '$.buckets[0].master_dtype',
            j ->> '$.buckets[0].param_dtype') dtypes
    from unit);

static const char streams[] = SQL(
    select r rank, s stream, count(*) [#jobs], format('%.3f', sum(d) / 1e3) [#ms],
        bytes(sum(b)) [#bytes], min(1, sum(d) / (select sum(d) from step where r = 0)) bar
    from event where k = 'run' group by r, s order by r, min(i));

/* "all_gather h.0" counts as "all_gather". */
static const char operations[] = SQL(
    select iif(collective, substr(w, 1, instr(w || ' ', ' ') - 1), w) job, p [by],
        count(*) [#times], format('%.3f', sum(d) / 1e3) [#ms],
        format('%.1f', 100 * sum(d) / whole) [#%],
        format('%.2f', sum(f) / sum(d) / 1e3) [#GFLOP/s],
        format('%.2f', sum(b) / sum(d) / 1e3) [#GB/s], sum(d) / whole bar
    from event, (select sum(d) whole from event where k = 'run')
    where k = 'run' group by 1, 2 order by sum(d) desc, min(i) limit 12);

/* ---- the memory ------------------------------------------------------------------------------ */

static const char peaks[] = SQL(
    select r rank, format('%.0f', l) [#peak, bytes], format('%.1f', t) [#at, us],
        owner [as bytes were taken for], l / (select max(l) from peak) bar
    from peak order by r);

static const char categories[] = SQL(
    select c category, format('%.0f', sum(b)) [#bytes],
        format('%.1f', 100 * sum(b) / whole) [#%], sum(b) / whole bar
    from live, (select sum(b) whole from live)
    group by c having sum(b) <> 0 order by sum(b) desc, min(live.rowid));

static const char unexplained[] = SQL(
    select format('They sum up to %.0f bytes, not to the peak of %.0f: ', sum(b), most)
        || 'the recording lacks some of the bytes that were live as it began.'
    from live, (select max(l) most from peak) having sum(b) <> most);

static const char owners[] = SQL(
    select owner, c category, format('%.0f', sum(b)) [#bytes],
        format('%.1f', 100 * sum(b) / whole) [#%], sum(b) / whole bar
    from live, (select sum(b) whole from live)
    group by owner, c having sum(b) > 0 order by sum(b) desc, min(live.rowid) limit 12);

/* ---- the waiting ----------------------------------------------------------------------------- */

static const char idle_time[] = SQL(
    select format('Compute was idle for %.1f of %.1f us (%.1f %%), over all ranks and steps.',
        sum(d) - sum(busy), sum(d), 100 * (sum(d) - sum(busy)) / sum(d))
    from step);

/* Of each cause the name awaited longest; of gathers issued late what each option wins back. None
 * issues the first gather of a backward ahead, which begins it. */
static const char causes[] = SQL(
    with
    placed as (select *, sum(k = 'step') over (partition by r order by i) place from event),
    first as (select r, s, place, min(i) i from placed
        where k = 'run' and a is not null and collective group by 1, 2, 3),
    pieces as (select idle.*, w, awaited >= 0 and backward and awaited <= coalesce(first.i, awaited)
            begins
        from idle left join placed job on awaited = job.i
        left join first on first.r = job.r and first.s = job.s and first.place = job.place),
    spans as (select max(1, count(*)) n, sum(d) - sum(busy) whole from step),
    early as (select backward + begins place, sum(d) d
        from pieces where cause = 'issued late' group by 1 order by 1),
    ways as (select group_concat(format('%s: %.1f us a step', case place
            when 0 then '--forward-prefetch'
            when 1 then '--prefetch pre'
            else 'the last unit kept after forward' end, d / n), '; ') text
        from early, spans)
    select cause, format('%.1f', sum(d)) [#idle, us], format('%.1f', 100 * sum(d) / whole) [#%],
        format('%.1f', sum(d) / n) [#us a step and rank],
        (select w from pieces o where o.cause = pieces.cause
            group by w order by sum(d) desc limit 1) [mostly for],
        explained which, iif(cause = 'issued late', text, remedy) [less of it by],
        sum(d) / whole bar
    from pieces join cause on cause = name, spans, ways group by cause order by sum(d) desc);

static const char gaps[] = SQL(
    select idle.r rank, format('%.1f', idle.t) [#at, us], format('%.1f', idle.d) [#idle, us],
        cause, w [waits for], iif(backward, 'backward', null) [in],
        idle.d / (select max(d) from idle) bar
    from idle left join event on awaited = i order by idle.d desc, idle.rowid limit 12);

/* ---- the run --------------------------------------------------------------------------------- */

static const char run[] = SQL(
    select j ->> 'command' from head where length(j ->> 'command') > 0
    union all
    select format('%d %s, %s, %s clock, %d %s each',
        j ->> 'ranks', iif(j ->> 'ranks' = 1, 'rank', 'ranks'), j ->> 'device', j ->> 'clock',
        j ->> 'threads', iif(j ->> 'threads' = 1, 'thread', 'threads'))
    from head);

static const char steps[] = SQL(
    with
    spans as (select n, max(d) d, sum(d) whole, sum(busy) busy, sum(flops) flops, sum(ideal) ideal
        from step group by n),
    numbers as materialized (select step, max(text) filter (where w = 'loss') loss,
        max(text) filter (where w = 'lr') rate, max(text) filter (where w = 'norm') norm,
        max(n) filter (where w = 'items') items from told group by step)
    select s.n step, format('%.3f', d / 1e3) [#ms],
        format('%.1f', 100 * busy / whole) [#compute busy, %],
        coalesce(loss, 'unknown') [#loss], coalesce(rate, 'unknown') [#rate],
        coalesce(norm, 'unknown') [#norm],
        iif(items is null, 'unknown', format('%.0f', items / d * 1e6)) [#items/s],
        format('%.2f', flops / d / 1e3) [#GFLOP/s],
        iif(ideal > 0, format('%.1f', 100 * ideal / whole), 'unknown') [#of the roofline, %]
    from spans s left join numbers on step = s.n order by s.n);

/* ---- what if --------------------------------------------------------------------------------- */

static const char longer[] = SQL(
    select format('A step takes %.3f ms here and %.3f ms before: %.1f %% %s.', here, before,
        abs(100 * (here - before) / before), iif(here > before, 'longer', 'shorter'))
    from (select avg(d) / 1e3 here from step), (select avg(d) / 1e3 before from before.step));

static const char figures[] = SQL(
    select what, format(form, b.value) [#before], format(form, a.value) [#here],
        format(form, a.value - b.value) [#difference],
        iif(b.value > 0, format('%+.1f', 100 * (a.value - b.value) / b.value), 'new') [#%]
    from main.figure a join before.figure b using (place, what, form)
    where a.value <> 0 or b.value <> 0 order by place);
/* clang-format on */

/* ---- what lives at the peak ------------------------------------------------------------------ */

/* The last take of the list that these bytes may come from: of their size and category, and of
 * their owner where the event names one. -1: they were live before the recording. */
static int64_t taken_by(const recording *r, const int64_t *take, int64_t takes, const event *give)
{
    int64_t i = takes - 1;
    for (; i >= 0; i--) {
        const event *e = &r->event[take[i]];
        if (e->c == give->c && e->b == give->b && (!give->w || e->w == give->w))
            break;
    }
    return i;
}

/* Fills live(c, owner, b) with what lives on a rank after the event: takes that nothing gave back,
 * and what lived before, less what was given back of it. */
static bool find_live(sheet *s, const recording *r, int32_t rank, int64_t last)
{
    int64_t *take = kn_host_alloc((size_t)(last + 1) * sizeof *take), takes = 0, at;
    const bool made =
        sqlite3_exec(s->db, SQL(create table live(c, owner, b)), NULL, NULL, NULL) == 0;
    sqlite3_stmt *before = database_ask(
        s->db,
        SQL(insert into live select c, 'from before the recording', b from start where r = ?));
    sqlite3_stmt *add = database_ask(
        s->db, SQL(insert into live select c,
                   iif(k = 'take', owner, 'from before the recording'),
                   iif(k = 'take', b, -b) from event where i = ? and counts));
    bool ok = take && made && before && add && database_put(before, "i", (int64_t)rank);
    for (int64_t i = 0; ok && i <= last; i++) {
        const event *e = &r->event[i];
        if (e->r == rank && e->k == TAKE)
            take[takes++] = i;
        if (e->r != rank || e->k != GIVE)
            continue;
        if ((at = taken_by(r, take, takes, e)) < 0)
            ok = database_put(add, "i", i);
        else
            memmove(take + at, take + at + 1, (size_t)(--takes - at) * sizeof *take);
    }
    for (int64_t i = 0; ok && i < takes; i++)
        ok = database_put(add, "i", take[i]);
    sqlite3_finalize(before);
    sqlite3_finalize(add);
    kn_host_free(take);
    return ok;
}

static bool write_memory(sheet *s, const recording *r)
{
    char above[64];
    sqlite3_stmt *q = database_ask(s->db, SQL(select r, i from peak order by l desc, r limit 1));
    const bool some = database_next(q);
    const int32_t rank = some ? sqlite3_column_int(q, 0) : 0;
    const int64_t last = some ? sqlite3_column_int64(q, 1) : 0;
    sqlite3_finalize(q);
    if (!some)
        sheet_sentence(s, "No bytes were taken while it was recorded.");
    snprintf(above, sizeof above, "The peak of rank %d by category", rank);
    return kn_ok() &&
           (!some ||
            (find_live(s, r, rank, last) && sheet_table(s, "peaks", "Peaks", peaks) &&
             sheet_table(s, "categories", above, categories) && sheet_sentences(s, unexplained) &&
             sheet_table(s, "owners", "Its largest owners", owners)));
}

/* ---- the parts ------------------------------------------------------------------------------- */

bool facts_write(sheet *s, const recording *r)
{
    sheet_part(s, "step", "The step", "What each stream of each rank did, event by event.");
    bool ok = sheet_sentences(s, order) && sheet_table(s, "units", "Units", units) &&
              sheet_table(s, "streams", "Streams", streams) &&
              sheet_table(s, "operations", "Jobs that took longest", operations);
    sheet_part_end(s);
    sheet_part(s, "memory", "The memory", "Bytes that live on a rank, by category.");
    ok = ok && write_memory(s, r);
    sheet_part_end(s);
    sheet_part(s, "waiting", "The waiting", "Every idle microsecond of compute has one cause.");
    ok = ok && sheet_sentences(s, idle_time) &&
         sheet_table(s, "causes", "Causes, largest first", causes) &&
         sheet_table(s, "gaps", "The longest pieces", gaps);
    sheet_part_end(s);
    sheet_part(s, "run", "The run", "Its steps, in numbers.");
    ok = ok && sheet_sentences(s, run) && sheet_table(s, "steps", "Steps", steps);
    sheet_part_end(s);
    return ok;
}

bool facts_what_if(sheet *s)
{
    sheet_part(s, "what-if", "What if", "This run beside the one before it.");
    const bool ok =
        sheet_sentences(s, longer) && sheet_table(s, "what-if", "A step of a rank", figures);
    sheet_part_end(s);
    return ok;
}
