/* models/report/page.js: makes the page: views into the articles, tabs, keys, light and dark. */

const STEPPED = { "all events": null, "verbs": [VERB], "verbs and calls": [CALL, VERB], "jobs": [RUN],
  "memory": [TAKE, GIVE], "values": [VALUE], "steps": [STEP] };
const views = [];
let current = 0;

function button(words, title, act) {
  return element("button", { type: "button", title, "aria-label": title, onclick: act }, words);
}

function rankChoice(recording, name, withAll, choose) {
  if (recording.ranks < 2)
    return null;
  const choice = element("select", { "aria-label": name, onchange: () => choose(Number(choice.value)) },
    withAll ? element("option", { value: -1 }, "all ranks") : null,
    Array.from({ length: recording.ranks }, (_, rank) => element("option", { value: rank }, "rank " + rank)));
  return choice;
}

/* ---- the views of an article -------------------------------------------------------------------- */

function addStep(section, view, sources) {
  const canvas = element("canvas", { tabindex: 0, role: "img",
    "aria-label": "Lanes of streams over time; the tables below tell the same" });
  const aside = element("aside", { class: "panel", "aria-label": "At the cursor" });
  const found = element("output");
  const search = element("input", { type: "search", placeholder: "search: name, module, provider", "aria-label": "Search",
    oninput: () => {
      view.find(search.value);
      found.textContent = view.matches ? `${numberText(view.found)} events` : "";
    },
    onkeydown: e => { if (e.key === "Enter") view.match(e.shiftKey ? -1 : 1); } });
  const kinds = element("select", { "aria-label": "Step through", onchange: () => { view.steps = STEPPED[kinds.value]; } },
    Object.keys(STEPPED).filter(name => !STEPPED[name] || view.recording.eventsOf(STEPPED[name]).length)
      .map(name => element("option", {}, name)));
  const lanes = new LanesPicture(canvas, view);
  const controls = element("div", { class: "controls" },
    element("span", { class: "group" }, button("\u2190", "The event before (left arrow)", () => view.step(-1)),
      button("\u2192", "The next event (right arrow)", () => view.step(1))), kinds,
    element("span", { class: "group" }, button("\u2212", "Zoom out (-)", () => view.zoom(.5)),
      button("+", "Zoom in (+)", () => view.zoom(2)),
      button("all", "See all (0)", () => view.show(-Infinity, Infinity))),
    rankChoice(view.recording, "Ranks shown", true, rank => { lanes.rank = rank; view.changed(); }), search, found);
  view.searchBox = search;
  const lead = section.querySelector(".lead"), facts = [...section.children].slice(2);
  lead.after(element("div", { class: "stage" }, element("div", { class: "picture" }, controls, canvas), aside,
    element("div", { class: "facts" }, facts)));
  new Panel(aside, view, sources);
}

function addMemory(section, view) {
  if (!view.recording.eventsOf([TAKE, GIVE]).length)
    return;
  const canvas = element("canvas", { role: "img", "aria-label": "Live bytes over time; the tables below tell the peak" });
  const picture = new MemoryPicture(canvas, view);
  const choice = rankChoice(view.recording, "Rank", false, rank => picture.setRank(rank));
  section.querySelector(".lead").after(choice ? element("div", { class: "controls" }, choice) : "", canvas);
}

/* By rank a bar: busy, then each cause of idle time. */
function addWaiting(section, { recording }) {
  const ranks = new Map();
  for (const { rank, busy } of recording.steps)
    ranks.set(rank, new Map([["busy", (ranks.get(rank)?.get("busy") || 0) + busy]]));
  for (const piece of recording.idle) {
    const of = ranks.get(piece.rank);
    of?.set(piece.cause, (of.get(piece.cause) || 0) + piece.end - piece.begin);
  }
  const width = Math.min(section.clientWidth - 70, 1050), fits = (words, share) => words.length * 7 + 12 < share * width;
  const bars = [...ranks].sort((a, b) => a[0] - b[0]).map(([rank, of]) => {
    const all = [...of.values()].reduce((sum, time) => sum + time, 0);
    const parts = [...of].sort((a, b) => (b[0] === "busy") - (a[0] === "busy") || b[1] - a[1]);
    return [element("b", {}, `rank ${rank}`), element("div", {}, parts.map(([name, time]) => {
      const words = `${name} ${(100 * time / all).toFixed(1)} %`;
      return element("span", { class: name === "busy" ? "busy" : "idle", title: words, style: `flex:${time / all} 1 0` },
        [words, name, ""].find(text => !text || fits(text, time / all)));
    }))];
  });
  section.querySelector(".lead").after(element("div", { class: "shares" }, bars.flat()));
}

/* A line a quantity over the steps, where there are some. */
function addRun(section) {
  const table = section.querySelector("[data-table=steps]"), rows = [...table.tBodies[0].rows];
  const names = [...table.tHead.rows[0].cells].map(cell => cell.textContent);
  const charts = names.map((name, k) => {
    const values = rows.map(row => Number(row.cells[k].textContent));
    const low = Math.min(...values), high = Math.max(...values);
    if (k === 0 || rows.length < 3 || values.some(isNaN) || high === 0)
      return null;
    const y = value => high > low ? 90 - 80 * (value - low) / (high - low) : 50;
    const path = values.map((value, i) => `${i ? "L" : "M"}${100 * i / (rows.length - 1)} ${y(value)}`).join("");
    const figure = element("figure", {}, element("figcaption", {}, `${name}: ${values[0]} \u2192 ${values.at(-1)}`));
    figure.insertAdjacentHTML("beforeend", `<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">` +
      `<line x1="0" y1="100" x2="100" y2="100"/><path d="${path}"/></svg>`);
    return figure;
  }).filter(Boolean);
  if (charts.length)
    section.querySelector(".lead").after(element("div", { class: "charts" }, charts));
}

/* A row that names a rank and a time sets the cursor there. */
function addJumps(article, view) {
  for (const table of article.querySelectorAll("[data-table=gaps], [data-table=peaks]"))
    table.tBodies[0].addEventListener("click", e => {
      const cells = e.target.closest("tr").cells, at = table.dataset.table === "gaps" ? 1 : 2;
      view.go(lastBefore(view.recording, Number(cells[0].textContent), Number(cells[at].textContent)));
      article.querySelector("[data-part=step]").scrollIntoView();
    });
}

function addArticle(article, sources) {
  const script = article.querySelector("script"), view = new View(new Recording(JSON.parse(script.textContent)));
  script.remove();
  const part = name => article.querySelector(`[data-part=${name}]`);
  addStep(part("step"), view, sources);
  addMemory(part("memory"), view);
  addWaiting(part("waiting"), view);
  addRun(part("run"));
  addJumps(article, view);
  return view;
}

/* ---- tabs, keys, light and dark ----------------------------------------------------------------- */

const articles = [...document.querySelectorAll("article")];

/* Shows a recording; its views are made when it is first seen. */
function showRecording(number) {
  current = number;
  articles.forEach((article, i) => { article.hidden = i !== number; });
  document.querySelectorAll("[role=tab]").forEach((tab, i) => tab.setAttribute("aria-selected", i === number));
  views[number] ??= addArticle(articles[number], JSON.parse(document.getElementById("sources").textContent));
  const { head } = views[number].recording;
  document.getElementById("title").textContent = `${programOf(head)}, ` +
    (head.ranks === 1 ? "1 rank" : `${head.ranks} ranks`);
  for (const link of document.querySelectorAll("nav a"))
    articles[number].querySelector(`[data-part=${link.textContent}]`).id = link.textContent;
  articles.forEach((article, i) => i !== number && article.querySelectorAll("[id]").forEach(e => e.removeAttribute("id")));
  views[number].draw();
}

function programOf(head) {
  return head.program || (head.command || "").split(" ")[0].split("/").at(-1) || head.model || "A recording";
}

function repaint() {
  readPalette();
  views.forEach((view, i) => i === current && view.draw());
}

function switchTheme() {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark" ||
    (getComputedStyle(document.documentElement).colorScheme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.style.colorScheme = dark ? "light" : "dark";
  repaint();
}

function keyPressed(e) {
  const view = views[current], typing = e.target.closest?.("input, select, dialog");
  if (e.key === "Escape" && typing)
    e.target.blur();
  if (typing || e.ctrlKey || e.metaKey || e.altKey)
    return;
  const far = e.shiftKey ? 10 : 1;
  const act = { ArrowLeft: () => view.step(-far), ArrowRight: () => view.step(far), Home: () => view.go(0),
    End: () => view.go(view.recording.count - 1), "+": () => view.zoom(2), "=": () => view.zoom(2),
    "-": () => view.zoom(.5), 0: () => view.show(-Infinity, Infinity), a: () => view.pan(-.25), d: () => view.pan(.25),
    "/": () => view.searchBox.focus(), n: () => view.match(1), p: () => view.match(-1), t: switchTheme,
    "?": () => document.getElementById("keys").showModal() }[e.key];
  const tab = Number(e.key) - 1;
  if (!act && !(tab >= 0 && tab < articles.length))
    return;
  e.preventDefault();
  (act || (() => showRecording(tab)))();
}

if (articles.length > 1)
  document.getElementById("tabs").append(...articles.map((article, i) =>
    element("button", { type: "button", role: "tab", onclick: () => showRecording(i) },
      article.dataset.name.split("/").at(-1))));
document.getElementById("theme").addEventListener("click", switchTheme);
document.getElementById("help").addEventListener("click", () => document.getElementById("keys").showModal());
document.addEventListener("keydown", keyPressed);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
window.addEventListener("beforeprint", () => { document.documentElement.style.colorScheme = "light"; repaint(); });
window.addEventListener("afterprint", () => { document.documentElement.style.colorScheme = ""; repaint(); });
readPalette();
showRecording(0);
