/* tests/cli/report_page.js: appended to a page of report.sh's recording: asks the page as a reader does, by keys,
 * clicks and its text, and leaves what it found as lines of the document's title: "ok NAME" or "not NAME: why". */
"use strict";
const results = [];
const view = () => views[current];
const text = selector => articles[current].querySelector(selector)?.textContent ?? "";
const press = (key, more = {}) => document.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, ...more }));
const goTo = (kind, what, rank = 0, nth = 0) => {
  const { recording } = view();
  const all = recording.eventsOf([kind]).filter(i => recording.text("w", i) === what && recording.number("r", i) === rank);
  view().go(all[nth]);
  view().draw();
};
const rows = selector => [...articles[current].querySelectorAll(`${selector} tr`)].map(row => [...row.cells].map(c => c.textContent).join(": "));

function expect(name, got, wanted) {
  const same = wanted instanceof RegExp ? wanted.test(got) : Array.isArray(wanted) ? String(got) === String(wanted) : got === wanted;
  results.push(same ? `ok ${name}` : `not ${name}: ${JSON.stringify(got)}, not ${wanted}`);
}

function ask() {
  expect("all of it is shown", [view().from, view().to], [0, 380]);
  expect("the cursor begins at the first verb", text(".now"), /^gather h\.0, 400.B: forward of h\.0$/);
  expect("its source", text(".source h3"), "fsdp/schedule.c:36");
  expect("its line, marked", text("pre .here"), /^36/);
  expect("the line is the file's", text("pre .here").slice(2),
    JSON.parse(document.getElementById("sources").textContent)["fsdp/schedule.c"].split("\n")[35]);
  expect("why compute is idle now", rows(".streams")[0], "0 compute: idle: issued late, awaits all_gather h.0");
  expect("what its gather runs", rows(".streams")[1], "0 gather: copy");
  expect("the unit on both ranks", rows(".units")[1], "h.0: gathering, sharded");
  expect("where the parameter's bytes lie", text(".held"),
    /rank 0elements 0 to 99; the whole in bf16 is on its wayrank 1elements 100 to 199$/);
  expect("the parameter's dtypes", text(".parameter .detail"), "h.0.weight [200]: kept in f32 on cpu, gathered in bf16");

  press("ArrowRight");
  view().draw();
  expect("the next event", text(".now"), /^h\.0 takes 400.B of gathered$/);
  expect("live bytes after it", text(".event .detail"), "then 1,464 bytes are live on the rank");
  press("ArrowLeft");
  view().draw();
  expect("and back", text(".now"), /^gather h\.0/);
  goTo(CALL, "forward", 0, 1);
  expect("in the forward of the unit", rows(".units")[1], "h.0: gathered, sharded");
  expect("who holds its weight, and in which dtype", text(".held"), /rank 0elements 0 to 99; has the whole in bf16rank 1/);
  expect("the source of the last verb", text(".source h3"), "");
  goTo(GIVE, "h.0");
  expect("after forward", rows(".units")[1], "h.0: sharded, sharded");
  expect("the last verb's place", text(".source h3"), /^fsdp\/verbs\.c:88, the last verb: release h\.0/);
  expect("the values", text(".values"), /h\.0\.weight, rank 0parameter bf16\[200\] #00000000deadbeef: 1 2 3 4 5 6 7 nan/);
  goTo(RUN, "all_gather h.4");
  expect("a job", text(".event .detail"), /^took 8\.0.\u00b5s; by local; issued 28\.0.\u00b5s before it began$/);

  const kinds = articles[current].querySelector("select[aria-label='Step through']");
  kinds.value = "verbs";
  kinds.dispatchEvent(new Event("change"));
  press("Home"), press("ArrowRight"), press("ArrowRight");
  view().draw();
  expect("stepping through verbs", text(".now"), /^gathered h\.0/);
  expect("the cursor's time in the middle", text(".when"), /^150\.00.\u00b5s \u00b7 rank 0 \u00b7 event \d+ of \d+$/);

  const { from, to } = view();
  press("+");
  expect("zoom in", Math.abs((to - from) / (view().to - view().from) - 2) < 1e-9, true);
  expect("the cursor stays in sight", view().from <= 150 && view().to >= 150, true);
  press("d");
  expect("to the right", view().from > 75, true);
  press("0");
  expect("see all", [view().from, view().to], [0, 380]);
  const canvas = articles[current].querySelector("canvas");
  canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: -300, bubbles: true, cancelable: true }));
  expect("the wheel zooms", view().to - view().from < 379, true);
  press("0");

  press("/");
  expect("search has the focus", document.activeElement === view().searchBox, true);
  view().searchBox.value = "ADAMW";
  view().searchBox.dispatchEvent(new Event("input"));
  expect("events found", text("output"), "1 events");
  view().searchBox.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter" }));
  view().draw();
  expect("the match", text(".now"), "compute runs adamw");
  view().searchBox.blur();

  const ranks = articles[current].querySelector("select[aria-label='Ranks shown']");
  const tall = canvas.clientHeight;
  ranks.value = "1";
  ranks.dispatchEvent(new Event("change"));
  view().draw();
  expect("one rank's lanes are fewer", canvas.clientHeight < tall, true);
  articles[current].querySelector("[data-table=gaps] tbody tr").click();
  view().draw();
  expect("a row of the longest pieces sets the cursor", text(".when"), /^200\.00.\u00b5s \u00b7 rank 0/);
  const bars = [...articles[current].querySelectorAll(".shares span")].map(bar => bar.title);
  expect("idle time as a bar", bars.slice(0, 3), ["busy 47.4 %", "the transfer itself 15.8 %", "issued late 11.6 %"]);
  expect("rank 1 is never idle", bars.at(-1), "busy 100.0 %");
  expect("words stand where they fit", text(".shares"), /^rank 0busy 47\.4 %.*rank 1busy 100\.0 %$/);
  const memory = view().pictures.find(picture => picture instanceof MemoryPicture);
  expect("the peak of the picture is the table's", memory.total[memory.peak], 2064);
  expect("drawn with its categories", memory.names.slice().sort(), ["activations", "gathered", "parameters", "workspace"]);

  const before = getComputedStyle(document.body).backgroundColor;
  press("t");
  expect("another theme", getComputedStyle(document.body).backgroundColor !== before, true);
  press("?");
  expect("the keys are shown", document.getElementById("keys").open, true);
  document.getElementById("keys").close();
  press("2");
  expect("the other recording", [articles[0].hidden, articles[1].hidden], [true, false]);
  expect("nothing hangs over the side", document.documentElement.scrollWidth <= innerWidth, true);
}

try {
  ask();
} catch (e) {
  results.push(`not without an error: ${e.stack}`);
}
requestAnimationFrame(() => requestAnimationFrame(() => {
  document.body.textContent = "";
  document.title = [...results, ...problems.map(words => `not without a message: ${words}`), "done"].join("\n");
}));
