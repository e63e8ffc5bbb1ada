/* models/report/view.js: what the pictures of a recording share: the stretch of time that they show,
 * the cursor, the search, and drawing on a canvas. */

class View {
  constructor(recording) {
    Object.assign(this, { recording, from: recording.begin, to: recording.finish });
    this.cursor = recording.eventsOf([VERB])[0] ?? 0;
    this.search = "", this.matches = null, this.steps = null, this.pictures = [];
  }

  changed() {
    if (!this.waits)
      this.waits = requestAnimationFrame(() => { this.waits = 0; this.draw(); });
  }

  draw() { this.pictures.forEach(picture => picture.draw()); }

  /* Shows from ... to, not less than a nanosecond and not more than there is. */
  show(from, to) {
    const { begin, finish } = this.recording, most = finish - begin;
    const length = Math.min(Math.max(to - from, 1e-3), most);
    this.from = Math.min(Math.max(from, begin), finish - length);
    this.to = this.from + length;
    this.changed();
  }

  zoom(factor, at = this.recording.time(this.cursor)) {
    at = at < this.from || at > this.to ? (this.from + this.to) / 2 : at;
    this.show(at - (at - this.from) / factor, at + (this.to - at) / factor);
  }

  pan(share) { this.show(this.from + share * (this.to - this.from), this.to + share * (this.to - this.from)); }

  /* Sets the cursor, and moves the stretch so that it is seen. */
  go(i) {
    this.cursor = Math.min(Math.max(i, 0), this.recording.count - 1);
    const t = this.recording.time(this.cursor), length = this.to - this.from;
    if (t < this.from || t > this.to)
      this.show(t - length / 2, t + length / 2);
    this.changed();
  }

  /* The next event, or the one before, of the kinds that are stepped through. */
  step(by) {
    const list = this.steps ? this.recording.eventsOf(this.steps) : null;
    if (!list)
      return this.go(this.cursor + by);
    let at = lowerBound(list, this.cursor);
    if (by > 0 && list[at] === this.cursor)
      at++;
    at = Math.min(Math.max(at + (by > 0 ? by - 1 : by), 0), list.length - 1);
    return list.length && this.go(list[at]);
  }

  find(text) {
    this.search = text;
    this.matches = this.recording.matcher(text);
    this.found = 0;
    for (let i = 0; this.matches && i < this.recording.count; i++)
      this.found += this.matches(i);
    this.changed();
  }

  match(by) {
    for (let i = this.cursor + by; this.matches && i >= 0 && i < this.recording.count; i += by)
      if (this.matches(i))
        return this.go(i);
    return false;
  }
}

/* ---- colours and canvas ------------------------------------------------------------------------ */

const palette = {};

/* The resolved colours of page.css. */
function readPalette() {
  const probe = document.body.appendChild(document.createElement("span"));
  for (const name of ["paper", "panel", "ink", "soft", "line", "accent", "compute", "backward", "calls",
    "gather", "reduce", "copy", "host", "idle"]) {
    probe.style.color = `var(--${name})`;
    palette[name] = getComputedStyle(probe).color;
  }
  probe.remove();
}

function colourOf(stream) {
  return palette[{ upload: "copy", download: "copy" }[stream] || stream] || palette.host;
}

/* A canvas with a stretch of time from left to right, behind a column of labels. */
class TimePicture {
  constructor(canvas, view) {
    Object.assign(this, { canvas, view });
    view.pictures.push(this);
    new ResizeObserver(() => view.changed()).observe(canvas);
    this.listen();
  }

  listen() {
    const { canvas, view } = this;
    let pressed = null;
    canvas.addEventListener("wheel", e => {
      e.preventDefault();
      if (Math.abs(e.deltaX) > Math.abs(e.deltaY) || e.shiftKey)
        view.pan((e.deltaX || e.deltaY) / this.width);
      else
        view.zoom(Math.exp(-e.deltaY / 300), this.timeAt(e.offsetX));
    }, { passive: false });
    canvas.addEventListener("pointerdown", e => {
      pressed = { x: e.clientX, from: view.from, to: view.to, moved: false };
      canvas.setPointerCapture(e.pointerId);
    });
    canvas.addEventListener("pointermove", e => {
      if (!pressed)
        return;
      pressed.moved ||= Math.abs(e.clientX - pressed.x) > 4;
      const by = (pressed.x - e.clientX) * (pressed.to - pressed.from) / (this.width - this.left);
      if (pressed.moved)
        view.show(pressed.from + by, pressed.to + by);
    });
    canvas.addEventListener("pointerup", e => {
      const event = pressed && !pressed.moved ? this.pick(e.offsetX, e.offsetY) : -1;
      pressed = null;
      if (event >= 0)
        view.go(event);
    });
  }

  timeAt(x) {
    const { from, to } = this.view;
    return from + (x - this.left) / (this.width - this.left) * (to - from);
  }

  xOf(time) {
    const { from, to } = this.view;
    return this.left + (time - from) / (to - from) * (this.width - this.left);
  }

  /* A clean canvas of that height, sharp on any screen. */
  begin(height) {
    const { canvas } = this, ratio = window.devicePixelRatio || 1;
    this.width = canvas.clientWidth || 300;
    this.left = this.width < 560 ? 58 : 84;
    this.height = height;
    canvas.style.height = height + "px";
    canvas.width = Math.round(this.width * ratio);
    canvas.height = Math.round(height * ratio);
    const g = canvas.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    g.textBaseline = "middle";
    this.g = g;
    return g;
  }

  /* Round times under thin lines, the unit with each. */
  drawAxis(y, bottom) {
    const { g, view } = this, room = (this.width - this.left) / 90;
    const step = roundStep((view.to - view.from) / Math.max(room, 1));
    const digits = Math.max(0, Math.ceil(-Math.log10(step / (view.to >= 1e6 ? 1e6 : view.to >= 1e3 ? 1e3 : 1))));
    for (let t = Math.ceil(view.from / step) * step; t <= view.to; t += step) {
      const x = Math.round(this.xOf(t)) + .5;
      g.fillStyle = palette.line;
      g.fillRect(x, y + 8, 1, bottom - y - 8);
      g.fillStyle = palette.soft;
      const text = axisText(t, view.to, digits), width = g.measureText(text).width;
      if (x + width / 2 < this.width)
        g.fillText(text, Math.max(x - width / 2, this.left), y);
    }
  }

  drawCursor(top, bottom) {
    const { g, view } = this, x = this.xOf(view.recording.time(view.cursor));
    if (x < this.left - 1 || x > this.width + 1)
      return;
    g.fillStyle = palette.accent;
    g.fillRect(Math.round(x), top, 1.5, bottom - top);
  }
}

function roundStep(least) {
  const ten = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map(x => x * ten).find(x => x >= least * (1 - 1e-9));
}

function axisText(t, most, digits) {
  const [unit, name] = most >= 1e6 ? [1e6, "s"] : most >= 1e3 ? [1e3, "ms"] : [1, "\u00b5s"];
  return (t / unit).toFixed(Math.min(digits, 6)) + "\u00a0" + name;
}
