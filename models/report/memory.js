/* models/report/memory.js: the memory's picture: bytes that live on a rank over time, its categories
 * on top of each other, each with its name in it, and the peak. */

class MemoryPicture extends TimePicture {
  constructor(canvas, view) {
    super(canvas, view);
    this.setRank(0);
  }

  setRank(rank) {
    this.memory = this.view.recording.memoryOf(rank);
    const { rows, event } = this.memory;
    this.total = new Float64Array(event.length);
    for (const row of rows.values())
      row.forEach((bytes, i) => { this.total[i] += bytes; });
    this.peak = this.total.reduce((best, bytes, i) => bytes > this.total[best] ? i : best, 0);
    /* what changes least lies at the bottom */
    const swing = row => Math.max(...sampled(row)) - Math.min(...sampled(row));
    this.names = [...rows.keys()].filter(name => rows.get(name).some(bytes => bytes > 0))
      .sort((a, b) => swing(rows.get(a)) - swing(rows.get(b)));
    this.view.changed();
  }

  /* By pixel the change that is drawn: in each the one with the largest total. */
  columns() {
    const { time } = this.memory, right = Math.floor(this.width), list = [];
    let at = Math.max(lowerBound(time, this.view.from) - 1, 0);
    for (let x = this.left; x < right; x++) {
      const until = this.timeAt(x + 1);
      let best = at;
      for (; at + 1 < time.length && time[at + 1] <= until; at++)
        best = this.total[at + 1] > this.total[best] ? at + 1 : best;
      list.push(best);
    }
    return list;
  }

  draw() {
    const height = 240, g = this.begin(height), { rows, event } = this.memory;
    const bottom = height - 24, top = 22;
    if (!event.length)
      return;
    const columns = this.columns();
    const most = Math.max(...columns.map(i => this.total[i]), 1) * 1.04;
    const y = bytes => bottom - bytes / most * (bottom - top);
    this.drawScale(most, y);
    this.drawAxis(bottom + 14, bottom + 22);
    const below = columns.map(() => 0), labels = [];
    this.names.forEach((name, k) => {
      const row = rows.get(name), low = below.map(y);
      columns.forEach((i, at) => { below[at] += Math.max(row[i], 0); });
      const high = below.map(y);
      g.fillStyle = shade(k, this.names.length);
      columns.forEach((_, at) => g.fillRect(this.left + at, high[at], 1.02, low[at] - high[at]));
      labels.push({ name, low, high, bytes: at => row[columns[at]] });
    });
    labels.forEach(label => this.drawLabel(label));
    this.drawPeak(y);
    this.drawCursor(top, bottom);
  }

  drawScale(most, y) {
    const { g } = this, step = roundStep(most / 4);
    for (let bytes = 0; bytes < most; bytes += step) {
      g.fillStyle = palette.line;
      g.fillRect(this.left, Math.round(y(bytes)), this.width - this.left, 1);
      g.fillStyle = palette.soft;
      g.fillText(bytesText(Math.round(bytes)), 0, y(bytes));
    }
  }

  /* A category's name where its layer has most room for it. */
  drawLabel({ name, low, high, bytes }) {
    const { g } = this, half = Math.ceil(g.measureText(`${name} 888.8 MB`).width / 2) + 2;
    let best = { room: 12 };
    for (let at = half; at < low.length - half; at += 6) {
      let top = -Infinity, bottom = Infinity;
      for (let k = at - half; k < at + half; k += 3)
        top = Math.max(top, high[k]), bottom = Math.min(bottom, low[k]);
      if (bottom - top > best.room + 2)
        best = { room: bottom - top, at, y: (bottom + top) / 2 };
    }
    if (best.at === undefined)
      return;
    const text = `${name} ${bytesText(bytes(best.at))}`;
    g.fillStyle = palette.ink;
    g.fillText(text, this.left + best.at - g.measureText(text).width / 2, best.y + .5);
  }

  drawPeak(y) {
    const { g } = this, x = this.xOf(this.memory.time[this.peak]), bytes = this.total[this.peak];
    if (x < this.left || x > this.width)
      return;
    const text = `peak ${bytesText(bytes)}`, width = g.measureText(text).width;
    g.fillStyle = palette.ink;
    g.beginPath();
    g.arc(x, y(bytes), 2.5, 0, 7);
    g.fill();
    g.fillText(text, Math.min(Math.max(x - width / 2, this.left), this.width - width), y(bytes) - 11);
  }

  pick(x) {
    const at = lowerBound(this.memory.time, this.timeAt(x)) - 1;
    return this.memory.event[Math.max(at, 0)] ?? -1;
  }
}

/* At most 4,000 of the values. */
function sampled(row) {
  const every = Math.ceil(row.length / 4000);
  return row.filter((_, i) => i % every === 0);
}

/* One hue, from faint to full. */
function shade(k, count) {
  const share = 14 + 52 * (count > 1 ? k / (count - 1) : 1);
  return `color-mix(in srgb, ${palette.accent} ${share.toFixed(0)}%, ${palette.paper})`;
}
