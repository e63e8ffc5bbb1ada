/* models/report/state.js: what holds at an event: of units, streams, a parameter and its values. All
 * of it is found anew from the events before. Nothing here knows of the page. */

/* By unit and rank: sharded, gathering, gathered; reducing: its gradients are on their way. And by
 * rank the open calls. */
function stateAt(recording, cursor) {
  const units = recording.units.map(() => Array.from({ length: recording.ranks }, () =>
    ({ held: "sharded", reducing: false, since: recording.begin })));
  const calls = Array.from({ length: recording.ranks }, () => []);
  const steps = Array.from({ length: recording.ranks }, () => null);
  let verb = -1;
  for (const i of recording.eventsOf([STEP, CALL, VERB])) {
    if (i > cursor)
      break;
    const rank = recording.number("r", i), what = recording.text("w", i);
    if (recording.kind(i) === STEP)
      steps[rank] = what === "begin" ? recording.number("n", i) : null;
    else if (recording.kind(i) === CALL)
      takeCall(calls[rank], what, recording.text("m", i));
    else {
      const unit = units[recording.unitOf(recording.text("m", i))];
      if (rank === recording.number("r", cursor))
        verb = i;
      if (unit)
        takeVerb(unit[rank], what, recording.time(i));
    }
  }
  return { units, calls, steps, verb };
}

function takeVerb(unit, what, time) {
  const held = { gather: "gathering", gathered: "gathered", release: "sharded" }[what];
  if (held)
    Object.assign(unit, { held, since: time });
  else
    unit.reducing = what === "reduce";
}

function takeCall(open, what, path) {
  if (!what.endsWith(" end"))
    return open.push({ what, path });
  const begun = what.slice(0, -4);
  const at = open.findLastIndex(call => call.what === begun && call.path === path);
  return at >= 0 && open.splice(at);
}

/* What each lane does at a time: { lane, event, idle }: it runs the event, or is idle. */
function lanesAt(recording, time) {
  return recording.lanes.filter(lane => lane.stream !== "calls").map(lane => {
    const at = lowerBound(lane.begin, time + 1e-9) - 1;
    const runs = at >= 0 && lane.end[at] > time;
    const idle = lane.stream === "compute" && !runs && recording.idle.find(piece =>
      piece.rank === lane.rank && piece.begin <= time && piece.end > time);
    return { lane, event: runs ? lane.event[at] : -1, idle: idle || null };
  });
}

/* Where a parameter's bytes lie: by rank its part [begin, end), or several runs as long, and whether
 * it has the whole. Ranks count replica by replica: rank = replica * shards + shard; simulated ones
 * do as the last one recorded. */
function placesOf(recording, param, state) {
  const unit = recording.units[param.unit], ranks = Math.max(recording.ranks, unit.shards * unit.replicas);
  return Array.from({ length: Math.min(ranks, 64) }, (_, rank) => {
    const [begin, end, runs = 1, every = 0] = param.parts[rank % unit.shards];
    const { held, reducing } = state.units[param.unit][Math.min(rank, recording.ranks - 1)];
    return { rank, begin, end, runs, every, held: unit.shards === 1 ? "whole" : held, reducing };
  });
}

/* By rank the last values of a name up to the event: its number, or -1. */
function valuesAt(recording, cursor, names) {
  const last = new Map();
  for (const i of recording.eventsOf([VALUE])) {
    if (i > cursor)
      break;
    if (names.includes(recording.text("w", i)))
      last.set([recording.text("w", i), recording.text("m", i), recording.number("r", i)].join(" "), i);
  }
  return [...last.values()];
}

/* An event in one sentence, and its numbers. */
function sentenceOf(recording, i) {
  const [w, m, s, c] = ["w", "m", "s", "c"].map(key => recording.text(key, i));
  const bytes = recording.number("b", i), took = recording.number("d", i);
  const module = m || "the root";
  switch (recording.kind(i)) {
  case STEP: return `step ${recording.number("n", i)}: ${w}`;
  case CALL: return `${w} of ${module}`;
  case RUN: return `${s} runs ${w}`;
  case WAIT: return `${s} waits for ${w}, ${timeText(took)}`;
  case VERB: return `${w} ${module}, ${bytesText(bytes)}` + (c ? `: ${c}` : "");
  case TAKE: return `${w || m || "something"} takes ${bytesText(bytes)} of ${c}`;
  case GIVE: return `${w || m || "something"} gives back ${bytesText(bytes)} of ${c}`;
  case VALUE: return `the values of ${w} (${m})`;
  case NUMBER: return `${w} of step ${c}: ${numberOf(recording, i)}`;
  default: return w;
  }
}

/* Of a step; one that isn't finite is a text. */
function numberOf(recording, i) { return recording.text("x", i) || recording.number("n", i); }

function detailOf(recording, i) {
  const took = recording.number("d", i), flops = recording.number("f", i), bytes = recording.number("b", i);
  const kind = recording.kind(i), parts = [];
  if (kind === RUN) {
    const issued = recording.number("q", i);
    parts.push(`took ${timeText(took)}`);
    if (recording.text("p", i)) parts.push(`by ${recording.text("p", i)}`);
    if (recording.text("m", i)) parts.push(`in ${recording.text("m", i)}${recording.text("a", i) && ", backward"}`);
    if (recording.text("x", i)) parts.push(recording.text("x", i));
    if (flops) parts.push(`${numberText(flops / took / 1e3)} GFLOP/s`);
    if (bytes) parts.push(`${bytesText(bytes)}, ${numberText(bytes / took / 1e3)} GB/s`);
    if (issued < recording.time(i)) parts.push(`issued ${timeText(recording.time(i) - issued)} before it began`);
  }
  if (kind === TAKE || kind === GIVE)
    parts.push(`then ${numberText(recording.number("l", i))} bytes are live on the rank`);
  if (kind === STEP)
    for (const k of recording.eventsOf([NUMBER]))
      if (Number(recording.text("c", k)) === recording.number("n", i) && recording.number("r", k) === recording.number("r", i))
        parts.push(`${recording.text("w", k)} ${numberOf(recording, k)}`);
  if (kind === VALUE)
    parts.push(recording.text("x", i), `digest ${recording.text("h", i)}`, recording.text("v", i));
  return parts.join("; ");
}
