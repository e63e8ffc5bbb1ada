/* models/report/lanes.js: the step's picture: a lane a stream and rank, the calls of units above
 * them, idle pieces of compute in the lane of compute with their cause. */

const ROW = 22, CALLS_ROW = 16, GAP = 3, RANK_ROW = 20, AXIS = 24;

class LanesPicture extends TimePicture {
  constructor(canvas, view) {
    super(canvas, view);
    this.rank = -1; /* of which rank lanes are shown, -1: all */
  }

  /* By lane its top and height. */
  layOut() {
    let y = AXIS, rank = -1;
    this.rows = [], this.titles = [];
    for (const lane of this.view.recording.lanes) {
      if (this.rank >= 0 && lane.rank !== this.rank)
        continue;
      if (lane.rank !== rank) {
        this.titles.push({ text: "rank " + lane.rank, y: y + RANK_ROW / 2 });
        y += RANK_ROW;
        rank = lane.rank;
      }
      const height = lane.stream === "calls" ? CALLS_ROW : ROW;
      this.rows.push({ lane, y, height });
      y += height + GAP;
    }
    return y;
  }

  draw() {
    const height = this.layOut(), g = this.begin(height);
    this.drawAxis(10, height);
    for (const row of this.rows) {
      g.save();
      g.beginPath();
      g.rect(this.left, row.y, this.width - this.left, row.height);
      g.clip();
      g.globalAlpha = .55;
      g.fillStyle = palette.panel;
      g.fillRect(this.left, row.y, this.width - this.left, row.height);
      g.globalAlpha = 1;
      if (row.lane.stream === "compute")
        this.drawIdle(row);
      this.drawEvents(row);
      g.restore();
      g.fillStyle = palette.soft;
      g.fillText(row.lane.stream, 0, row.y + row.height / 2);
    }
    g.fillStyle = palette.ink;
    for (const title of this.titles)
      g.fillText(title.text, 0, title.y);
    this.drawCursor(AXIS - 6, height);
  }

  drawIdle(row) {
    const { g, view } = this;
    for (const piece of view.recording.idle) {
      if (piece.rank !== row.lane.rank || piece.end < view.from || piece.begin > view.to)
        continue;
      const x = Math.max(this.xOf(piece.begin), this.left), end = Math.min(this.xOf(piece.end), this.width);
      if (end - x < .3)
        continue;
      g.globalAlpha = .3;
      g.fillStyle = palette.idle;
      g.fillRect(x, row.y, end - x, row.height);
      g.globalAlpha = 1;
      this.drawText(piece.cause, x, end, row, palette.soft);
    }
  }

  /* Events narrower than a pixel share it. */
  drawEvents(row) {
    const { g, view } = this, { lane } = row, { recording, matches } = view;
    const first = Math.max(lowerBound(lane.begin, view.from) - 1, 0);
    let drawn = -1;
    for (let at = first; at < lane.begin.length && lane.begin[at] < view.to; at++) {
      const i = lane.event[at], x = this.xOf(lane.begin[at]), end = this.xOf(lane.end[at]);
      if (end < this.left || (end < drawn && i !== view.cursor))
        continue;
      const width = Math.max(end - x, 1);
      const back = recording.text("a", i) || (lane.stream === "calls" && recording.text("w", i) === "backward");
      g.globalAlpha = matches && !matches(i) ? .18 : 1;
      g.fillStyle = back && lane.stream === "compute" ? palette.backward : colourOf(lane.stream);
      g.fillRect(x, row.y, width > 3 ? width - .75 : width, row.height);
      if (width > 14)
        this.drawText(wordsOf(recording, i, lane.stream), x, end, row, palette.ink);
      if (i === view.cursor) {
        g.globalAlpha = 1;
        g.strokeStyle = palette.accent;
        g.lineWidth = 2;
        g.strokeRect(x + 1, row.y + 1, Math.max(width - 2, 1), row.height - 2);
      }
      drawn = Math.max(drawn, x + .5);
    }
    g.globalAlpha = 1;
  }

  /* The longest of the texts that has room. */
  drawText(text, x, end, row, colour) {
    const from = Math.max(x, this.left) + 4, room = Math.min(end, this.width) - from - 3;
    for (const words of [].concat(text))
      if (this.g.measureText(words).width <= room) {
        this.g.fillStyle = colour;
        this.g.fillText(words, from, row.y + row.height / 2 + .5);
        return;
      }
  }

  /* The event at a place; in empty room the last one that began before, on that rank. */
  pick(x, y) {
    const row = this.rows.find(r => y >= r.y - 1 && y <= r.y + r.height + 1), t = this.timeAt(x);
    if (!row)
      return -1;
    const at = lowerBound(row.lane.begin, t) - 1, slack = (this.view.to - this.view.from) / this.width * 2;
    if (at >= 0 && row.lane.end[at] >= t - slack)
      return row.lane.event[at];
    return lastBefore(this.view.recording, row.lane.rank, t);
  }
}

function lastBefore(recording, rank, time) {
  let best = -1;
  for (let i = 0; i < recording.count; i++)
    if (recording.number("r", i) === rank && recording.time(i) <= time &&
        (best < 0 || recording.time(i) >= recording.time(best)))
      best = i;
  return best;
}

/* An event's words, the longest first: "all_gather transformer.h.0", "transformer.h.0", "h.0". */
function wordsOf(recording, i, stream) {
  const w = recording.text("w", i), m = recording.text("m", i);
  const all = stream === "calls" ? `${m} ${w}` : w, name = stream === "calls" ? m : w.split(" ").at(-1);
  return [all, name, name.split(".").slice(-2).join(".")];
}
