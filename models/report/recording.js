/* models/report/recording.js: a recording as the page has it: columns of numbers, one a key of the
 * events, texts as numbers of names. Nothing here knows of the page. */

const STEP = 0, CALL = 1, RUN = 2, WAIT = 3, VERB = 4, TAKE = 5, GIVE = 6, VALUE = 7, NUMBER = 8;
const STREAMS = ["calls", "compute", "gather", "reduce", "upload", "download", "host"];

class Recording {
  constructor(data) {
    Object.assign(this, { head: data.head, names: data.names, kinds: data.kinds });
    this.causes = data.causes;
    this.count = data.events.k.length;
    this.columns = {};
    for (const [key, list] of Object.entries(data.events))
      this.columns[key] = new Float64Array(list);
    this.none = new Float64Array(this.count);
    this.ranks = this.head.ranks;
    this.units = this.head.units || [];
    this.idle = data.idle.map(([rank, begin, end, cause, awaited]) =>
      ({ rank, begin, end, cause: this.causes[cause], awaited }));
    this.steps = data.steps.map(([rank, begin, end, busy]) => ({ rank, begin, end, busy }));
    this.params = this.units.flatMap((unit, u) => unit.buckets.flatMap(bucket =>
      bucket.params.map(param => ({ ...param, unit: u, bucket }))));
    this.findLanes();
  }

  numbers(key) { return this.columns[key] || this.none; }
  number(key, i) { return this.numbers(key)[i]; }
  text(key, i) { return this.names[this.number(key, i)]; }
  kind(i) { return this.columns.k[i]; }
  time(i) { return this.numbers("t")[i]; }
  end(i) { return this.time(i) + this.number("d", i); }

  /* A lane a rank and stream, of the events that lie in it, in order of their begin. */
  findLanes() {
    const lanes = new Map(), t = this.numbers("t"), d = this.numbers("d");
    const add = (rank, stream, event, begin, end) => {
      const key = rank + " " + stream;
      if (!lanes.has(key))
        lanes.set(key, { rank, stream, event: [], begin: [], end: [] });
      const lane = lanes.get(key);
      lane.event.push(event), lane.begin.push(begin), lane.end.push(end);
    };
    const open = Array.from({ length: this.ranks }, () => []);
    this.begin = Infinity, this.finish = -Infinity;
    for (let i = 0; i < this.count; i++) {
      const kind = this.kind(i), rank = this.columns.r[i];
      this.begin = Math.min(this.begin, t[i]);
      this.finish = Math.max(this.finish, t[i] + d[i]);
      if (kind === RUN)
        add(rank, this.text("s", i), i, t[i], t[i] + d[i]);
      if (kind === CALL && this.unitOf(this.text("m", i)) > 0)
        this.pairCalls(open[rank], i, add);
    }
    this.finish = this.finish > this.begin ? this.finish : this.begin + 1;
    const place = lane => lane.rank * 100 + (STREAMS.indexOf(lane.stream) + 100) % 100;
    this.lanes = [...lanes.values()].sort((a, b) => place(a) - place(b));
    this.lanes.forEach(sortLane);
  }

  /* "forward end" ends the last "forward" of that module. */
  pairCalls(open, i, add) {
    const what = this.text("w", i), m = this.number("m", i);
    if (!what.endsWith(" end"))
      open.push(i);
    else if (open.length && this.number("m", open.at(-1)) === m) {
      const begun = open.pop();
      add(this.columns.r[i], "calls", begun, this.time(begun), this.time(i));
    }
  }

  /* The number of the unit with that name; the root's calls have the path "". */
  unitOf(name) {
    if (!this.unitNumbers) {
      this.unitNumbers = new Map(this.units.map((unit, i) => [unit.name, i]));
      this.unitNumbers.set("", 0);
    }
    return this.unitNumbers.get(name) ?? -1;
  }

  /* The unit that an event is about, -1: none. Memory names its owner, a collective its unit last. */
  unitOfEvent(i) {
    const w = this.text("w", i), kind = this.kind(i);
    let path = kind === TAKE || kind === GIVE || kind === VALUE ? w || this.text("m", i) : this.text("m", i) || w.split(" ").at(-1);
    if (kind === CALL || kind === VERB)
      path = this.text("m", i);
    while (path && this.unitOf(path) < 0)
      path = path.includes(".") ? path.slice(0, path.lastIndexOf(".")) : "";
    return path || kind === CALL ? this.unitOf(path) : -1;
  }

  /* The events of some kinds, as a sorted list of their numbers. */
  eventsOf(kinds) {
    this.lists ??= new Map();
    const key = kinds.join();
    if (!this.lists.has(key)) {
      const list = [];
      for (let i = 0; i < this.count; i++)
        if (kinds.includes(this.kind(i)))
          list.push(i);
      this.lists.set(key, list);
    }
    return this.lists.get(key);
  }

  /* Bytes live on a rank after each of its takes and gives, by category: rows of one length. */
  memoryOf(rank) {
    const event = this.eventsOf([TAKE, GIVE]).filter(i => this.columns.r[i] === rank);
    const start = (this.head.live || [])[rank] || {};
    const counts = name => !["host", "offloaded", "pinned"].includes(name);
    const live = new Map(Object.entries(start).filter(([name]) => counts(name)));
    for (const i of event)
      if (counts(this.text("c", i)) && !live.has(this.text("c", i)))
        live.set(this.text("c", i), 0);
    const names = [...live.keys()];
    const rows = new Map(names.map(name => [name, new Float64Array(event.length)]));
    event.forEach((i, at) => {
      const name = this.text("c", i), bytes = this.number("b", i);
      if (live.has(name))
        live.set(name, live.get(name) + (this.kind(i) === TAKE ? bytes : -bytes));
      for (const other of names)
        rows.get(other)[at] = live.get(other);
    });
    return { event, time: event.map(i => this.time(i)), rows };
  }

  /* The events whose words have the text, as a function of their number. */
  matcher(text) {
    const wanted = text.trim().toLowerCase();
    if (!wanted)
      return null;
    const hit = this.names.map(name => name.toLowerCase().includes(wanted));
    const columns = ["w", "m", "p", "c", "s"].map(key => this.numbers(key));
    return i => columns.some(column => hit[column[i]]);
  }
}

function sortLane(lane) {
  const order = lane.begin.map((_, i) => i);
  if (lane.begin.some((t, i) => i && t < lane.begin[i - 1]))
    order.sort((a, b) => lane.begin[a] - lane.begin[b] || a - b);
  for (const key of ["event", "begin", "end"])
    lane[key] = Float64Array.from(order, i => lane[key][i]);
}

/* The first place of a sorted list whose value is at least x. */
function lowerBound(list, x) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] < x)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

function bytesText(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let i = 0;
  for (; Math.abs(bytes) >= 1000 && i < 4; i++)
    bytes /= 1000;
  return (i ? bytes.toFixed(1) : bytes) + "\u00a0" + units[i];
}

function timeText(us, digits = 1) {
  return Math.abs(us) >= 1e6 ? (us / 1e6).toFixed(digits + 1) + "\u00a0s" :
    Math.abs(us) >= 1e3 ? (us / 1e3).toFixed(digits + 1) + "\u00a0ms" :
    us.toFixed(digits) + "\u00a0\u00b5s";
}

function numberText(n) { return n.toLocaleString("en", { maximumFractionDigits: 2 }); }
