/* models/report/panel.js: beside the lanes, what holds at the cursor: the event, its source, the
 * streams, the units, a parameter's bytes, values. Texts are set as texts: they are a stranger's. */

/* element("p", { class: "x" }, child, "text", ...) */
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes))
    if (key.startsWith("on"))
      made.addEventListener(key.slice(2), value);
    else if (value !== false && value !== null)
      made.setAttribute(key, value);
  made.append(...children.flat().filter(child => child !== null && child !== undefined));
  return made;
}

function tableOf(rows, className) {
  return element("div", { class: "scroll" }, element("table", { class: className || false },
    rows.map(row => element("tr", {}, row.map(cell => cell instanceof Node ? element("td", {}, cell) :
      element("td", {}, cell))))));
}

class Panel {
  constructor(aside, view, sources) {
    Object.assign(this, { aside, view, sources, chosen: -1 });
    this.body = element("div");
    const { params } = view.recording;
    this.choice = element("select", { "aria-label": "Parameter", onchange: () => {
      this.chosen = Number(this.choice.value);
      view.changed();
    } }, element("option", { value: -1 }, "the largest of the event's unit"),
    params.map((param, i) => element("option", { value: i }, param.name)));
    aside.append(this.body);
    view.pictures.push(this);
  }

  draw() {
    const { recording, cursor } = this.view, state = stateAt(recording, cursor);
    const focused = document.activeElement === this.choice;
    this.body.replaceChildren(...[
      this.drawEvent(recording, cursor), this.drawSource(recording, cursor, state),
      this.drawStreams(recording, cursor), this.drawParameter(recording, cursor, state),
      this.drawUnits(recording, state), this.drawValues(recording, cursor)].filter(Boolean));
    if (focused)
      this.choice.focus();
  }

  drawEvent(recording, i) {
    const steps = recording.number("r", i);
    return element("div", { class: "event", "aria-live": "polite" },
      element("p", { class: "when" }, `${timeText(recording.time(i), 2)} \u00b7 rank ${steps}` +
        ` \u00b7 event ${i + 1} of ${recording.count}`),
      element("p", { class: "now" }, element("strong", {}, sentenceOf(recording, i))),
      element("p", { class: "detail" }, detailOf(recording, i)));
  }

  /* The lines around the place of the verb at the cursor, or of the last one before on that rank. */
  drawSource(recording, cursor, state) {
    const verb = recording.kind(cursor) === VERB ? cursor : state.verb;
    const place = verb >= 0 ? recording.text("o", verb) : "";
    const [file, number] = place.split(":"), source = Object.hasOwn(this.sources, file) && this.sources[file];
    if (!place)
      return null;
    const heading = element("h3", {}, verb === cursor ? place : `${place}, the last verb: ` +
      sentenceOf(recording, verb));
    if (!source)
      return heading;
    const lines = source.split("\n"), here = Number(number) - 1, code = element("pre", { tabindex: 0 });
    for (let k = Math.max(here - 4, 0); k < Math.min(here + 5, lines.length); k++)
      code.append(element("span", { class: k === here ? "here" : false }, element("i", {}, k + 1), lines[k]));
    return element("div", { class: "source" }, heading, code);
  }

  drawStreams(recording, cursor) {
    const rows = lanesAt(recording, recording.time(cursor)).map(({ lane, event, idle }) => [
      recording.ranks > 1 ? `${lane.rank} ${lane.stream}` : lane.stream,
      event >= 0 ? recording.text("w", event) : !idle ? "\u2013" :
        `idle: ${idle.cause}` + (idle.awaited >= 0 ? `, awaits ${recording.text("w", idle.awaited)}` : "")]);
    return element("div", { class: "streams" }, element("h3", {}, "Streams now"), tableOf(rows));
  }

  param(recording, cursor) {
    if (this.chosen >= 0)
      return recording.params[this.chosen];
    const unit = recording.unitOfEvent(cursor);
    this.unit = unit >= 0 ? unit : this.unit ?? 0;
    const own = recording.params.filter(param => param.unit === this.unit);
    return own.reduce((most, param) => most && most.numel >= param.numel ? most : param, undefined) || recording.params[0];
  }

  drawParameter(recording, cursor, state) {
    const param = this.param(recording, cursor);
    if (!param)
      return null;
    const { master_dtype, param_dtype, memory } = param.bucket;
    const places = placesOf(recording, param, state).map(place => {
      const percent = n => `${100 * n / Math.max(param.numel, 1)}%`, whole = place.held === "gathered";
      const own = Array.from({ length: Math.min(place.runs, 64) }, (_, k) => element("b", { style:
        `left:${percent(place.begin + k * place.every)};width:${percent(place.end - place.begin)}` }));
      return [element("span", {}, `rank ${place.rank}`),
        element("div", { class: "place" + (whole ? " whole" : place.held === "gathering" ? " coming" : "") }, own),
        element("small", {}, placeText(place, param))];
    });
    return element("div", { class: "parameter" }, element("h3", {}, "Where a parameter lies"), this.choice,
      element("p", { class: "detail" }, `${param.name} [${param.shape.join(", ")}]: kept in ${master_dtype}` +
        `${memory ? " on " + memory : ""}, gathered in ${param_dtype}`),
      element("div", { class: "held" }, places.flat()));
  }

  drawUnits(recording, state) {
    const rows = recording.units.map((unit, u) => [unit.name, state.units[u].map((of, rank) => {
      const word = of.reducing ? "reducing" : unit.shards === 1 ? "whole" : of.held;
      return element("span", { class: "state-" + word }, (rank ? ", " : "") + word);
    })]);
    return rows.length ? element("div", { class: "units" }, element("h3", {}, "Units" +
      (recording.ranks > 1 ? ", by rank" : "")), unitTable(rows)) : null;
  }

  drawValues(recording, cursor) {
    if (!recording.eventsOf([VALUE]).length)
      return null;
    const names = [recording.text("w", cursor), recording.text("m", cursor), this.param(recording, cursor)?.name];
    const rows = valuesAt(recording, cursor, names.filter(Boolean)).map(i => [
      `${recording.text("w", i)}, rank ${recording.number("r", i)}`,
      element("span", {}, `${recording.text("m", i)} ${recording.text("x", i)} #${recording.text("h", i)}: ` +
        recording.text("v", i) + " \u2026")]);
    return element("div", { class: "values" }, element("h3", {}, "Values"),
      rows.length ? tableOf(rows) : element("p", { class: "detail" }, "none was recorded for this by now"));
  }
}

function unitTable(rows) {
  return element("div", { class: "scroll" }, element("table", {}, rows.map(([name, words]) =>
    element("tr", {}, element("td", {}, name), element("td", {}, words)))));
}

function placeText(place, param) {
  const count = (place.end - place.begin) * place.runs;
  const part = !count ? "none of its elements" : `elements ${numberText(place.begin)} to ${numberText(place.end - 1)}` +
    (place.runs > 1 ? ` and ${place.runs - 1} more runs, every ${numberText(place.every)}` : "");
  const dtype = param.bucket.param_dtype;
  return part + { sharded: "", whole: " (all)", gathering: `; the whole in ${dtype} is on its way`,
    gathered: `; has the whole in ${dtype}` }[place.held] + (place.reducing ? "; its gradient is being reduced" : "");
}
