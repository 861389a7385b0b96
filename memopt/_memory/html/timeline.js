// Memory over time, in coloured parts. What is drawn is chosen anew from all events whenever the view changes: two of each
// pixel column, the moments of most and of least, each with the parts as they truly were at that moment.

function chosenMoments(recording, axis, from, to, columns, total = recording.total) {
  const first = Math.max(0, lastNotAbove(axis.positions, from)), last = Math.max(0, lastNotAbove(axis.positions, to));
  if (last - first < 2 * columns) return Array.from({ length: last - first + 1 }, (_, i) => first + i);
  const chosen = [first], { positions } = axis, width = (to - from) / columns;
  let column = -1, least = first, most = first;
  const close = () => {
    for (const m of least < most ? [least, most] : [most, least]) if (m > chosen[chosen.length - 1]) chosen.push(m);
  };
  for (let m = first + 1; m <= last; m++) {
    const here = Math.floor((positions[m] - from) / width);
    if (here !== column) {
      close();
      column = here;
      least = most = m;
    } else if (total[m] > total[most]) most = m;
    else if (total[m] < total[least]) least = m;
  }
  close();
  if (chosen[chosen.length - 1] !== last) chosen.push(last);
  return chosen;
}

// The same of what the allocator held, which changes seldom.
function chosenReserved(recording, axis, from, to, columns) {
  const { reservedSince, reserved } = recording;
  const at = (i) => axis.positions[reservedSince[i]], width = (to - from) / columns;
  const x = [], y = [];
  let column = null;
  for (let i = 0; i < reserved.length; i++) {
    const next = i + 1 < reserved.length ? at(i + 1) : Infinity;
    if (next < from || at(i) > to) continue;
    const here = Math.floor((at(i) - from) / width);
    if (here === column && reserved[i] <= y[y.length - 1]) continue;
    column = here;
    x.push(Math.max(at(i), from));
    y.push(reserved[i]);
  }
  if (x.length) { x.push(Math.max(Math.min(to, axis.end), x[x.length - 1])); y.push(y[y.length - 1]); }
  return { x, y };
}

class Timeline extends Chart {
  height() { return 300; }

  values() { return this.view.values ?? [0, this.page.mostBytes]; }

  valueUnit() { return this.page.bytesUnit; }

  valueAt(moment) { return this.recording.total[moment]; }

  columns() { return Math.max(100, Math.round(this.plotWidth())); }

  // x of moments, and of the end of the last of them.
  places(moments) {
    const { axis } = this, [from, to] = this.range();
    const x = moments.map((m) => Math.min(Math.max(axis.positions[m], from), to));
    return [...x, Math.max(Math.min(to, axis.end), x[x.length - 1])];
  }

  // A value holds until the next. Along it, or along another one back to the beginning.
  along(x, y) {
    const at = (i) => this.x(x[i]).toFixed(1);
    return `${at(0)},${this.y(y[0]).toFixed(1)}`
      + y.slice(1).map((value, i) => `H${at(i + 1)}V${this.y(value).toFixed(1)}`).join("");
  }

  back(x, y) {
    let path = "";
    for (let i = y.length - 1; i > 0; i--) path += `V${this.y(y[i - 1]).toFixed(1)}H${this.x(x[i - 1]).toFixed(1)}`;
    return `V${this.y(y[y.length - 1]).toFixed(1)}${path}Z`;
  }

  contents() {
    const { recording, axis, page } = this, [from, to] = this.range();
    const moments = chosenMoments(recording, axis, from, to, this.columns()), x = this.places(moments);
    moments.push(moments[moments.length - 1]);
    const live = page.colouring.live(recording);
    let before = moments.map(() => 0);
    this.areas = page.colouring.series.map(({ name, colour }, k) => {
      const y = moments.map((m, i) => before[i] + live[k][m]), floor = before;
      before = y;
      return { name, colour, x, y, floor };
    });
    const drawn = this.areas.map(({ colour, y, floor }) =>
      shape("path", { class: "part " + colour, d: "M" + this.along(x, y) + this.back(x, floor) }));
    const held = chosenReserved(recording, axis, from, to, this.columns());
    if (held.x.length) drawn.push(shape("path", { class: "held", d: "M" + this.along(held.x, held.y) }));
    if (page.showsCapacity(recording)) drawn.push(this.level("capacity", recording.capacity));
    return [...drawn, ...this.followed()];
  }

  // The line or module that is followed: its own bytes.
  followed() {
    const { recording, axis, page } = this;
    const live = page.followed && recording.liveOf(page.followed.group, page.followed.name);
    if (!live) return [];
    const moments = chosenMoments(recording, axis, ...this.range(), this.columns(), live), x = this.places(moments);
    moments.push(moments[moments.length - 1]);
    const d = "M" + this.along(x, moments.map((m) => live[m]));
    return [shape("path", { class: "followed halo", d }), shape("path", { class: "followed", d })];
  }

  texts() {
    const { recording, axis } = this, peak = axis.positions[recording.peak], [from, to] = this.range();
    if (peak < from || peak > to || !recording.blocks) return this.markTexts();
    const x = this.x(peak), y = this.y(recording.total[recording.peak]), right = x > MARGIN.l + 0.75 * this.plotWidth();
    const side = right ? -1 : 1, level = Math.max(y - 16, MARGIN.t + 12);
    if (y < MARGIN.t - 1 || y > MARGIN.t + this.plotHeight()) return this.markTexts();
    const words = "peak " + formatSize(recording.total[recording.peak]), wide = 7 * words.length + 8;
    return [...this.markTexts(),
      shape("line", { class: "leader", x1: x, y1: y, x2: x + 14 * side, y2: level }),
      shape("rect", { class: "behind", x: right ? x - 14 - wide : x + 14, y: level - 9, width: wide, height: 18 }),
      shape("text", { class: "peak", x: x + (14 + wide / 2) * side, y: level, dy: "0.35em", "text-anchor": "middle" }, words)];
  }

  tip(moment) {
    const { recording, page } = this, live = page.colouring.live(recording);
    const rows = page.colouring.series.map(({ name, colour }, k) => ({ name, colour, bytes: live[k][moment] }))
      .reverse().filter(({ bytes }) => bytes).map(({ name, colour, bytes }) =>
        element("tr", {}, element("th", { scope: "row" }, swatch(colour), name), element("td", {}, formatSize(bytes))));
    const sum = (name, bytes) => element("tr", { class: "sum" }, element("th", { scope: "row" }, name),
      element("td", {}, formatSize(bytes)));
    rows.push(sum("allocated", recording.total[moment]));
    const held = recording.reservedAt(moment);
    if (held !== null) rows.push(sum("reserved", held));
    return [element("div", { class: "when" }, this.when(moment)), element("table", {}, element("tbody", {}, ...rows))];
  }
}
