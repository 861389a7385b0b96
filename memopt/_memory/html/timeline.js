// Memory over time, by category. What is drawn is chosen anew from all events whenever the view changes: two of each
// pixel column, the moments of most and of least, each with the categories as they truly were at that moment.

function chosenMoments(recording, axis, from, to, columns) {
  const first = Math.max(0, lastNotAbove(axis.positions, from)), last = Math.max(0, lastNotAbove(axis.positions, to));
  if (last - first < 2 * columns) return Array.from({ length: last - first + 1 }, (_, i) => first + i);
  const chosen = [first], { total } = recording, { positions } = axis, width = (to - from) / columns;
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

  draw() {
    const { recording, axis, view } = this, [from, to] = this.range(), unit = this.page.bytesUnit.factor;
    const columns = Math.max(100, Math.round(this.plotWidth()));
    const moments = chosenMoments(recording, axis, from, to, columns);
    const x = moments.map((m) => Math.min(Math.max(axis.positions[m], from), to));
    x.push(Math.max(Math.min(to, axis.end), x[x.length - 1]));
    moments.push(moments[moments.length - 1]);
    const top = new Float64Array(moments.length), traces = [];
    for (const c of STACKED) {
      const bytes = recording.live[c];
      moments.forEach((m, i) => { top[i] += bytes[m] / unit; });
      const colour = this.page.colours[CATEGORIES[c]];
      traces.push({
        x, y: Array.from(top), name: CATEGORIES[c], type: "scatter", mode: "lines", hoverinfo: "skip",
        line: { shape: "hv", width: 0 }, fill: traces.length ? "tonexty" : "tozeroy", fillcolor: colour,
      });
    }
    const held = chosenReserved(recording, axis, from, to, columns);
    if (held.x.length) {
      traces.push({
        x: held.x, y: held.y.map((bytes) => bytes / unit), name: "reserved", type: "scatter", mode: "lines",
        hoverinfo: "skip", line: { shape: "hv", width: 1.6, color: this.page.colours.ink },
      });
    }
    this.drawn = moments.length;
    const layout = this.layout();
    layout.yaxis.range = view.bytes ? [...view.bytes] : [0, this.page.mostBytes / unit];
    layout.yaxis.ticksuffix = " " + this.page.bytesUnit.name;
    layout.shapes = [...this.markLines(), this.chosenLine()];
    if (recording.capacity && recording.capacity / unit <= layout.yaxis.range[1]) {
      layout.shapes.push({
        type: "line", xref: "paper", x0: 0, x1: 1, y0: recording.capacity / unit, y1: recording.capacity / unit,
        line: { color: this.page.colours.alarm, width: 1.6, dash: "dash" },
      });
    }
    layout.annotations = this.markTexts();
    const peak = axis.positions[recording.peak];
    if (peak >= from && peak <= to && recording.blocks) {
      const right = (peak - from) / (to - from) > 0.75;
      layout.annotations.push({
        x: peak, y: recording.total[recording.peak] / unit, text: "peak " + formatSize(recording.total[recording.peak]),
        xanchor: right ? "right" : "left", ax: right ? -14 : 14, ay: -16, arrowhead: 0, arrowwidth: 1,
        arrowcolor: this.page.colours.ink, font: { color: this.page.colours.ink, size: 12 },
        bgcolor: this.page.colours.panel, borderpad: 2, opacity: 0.92,
      });
    }
    return this.show(traces, layout);
  }

  zoomUp(range) { this.view.bytes = range; }

  tip(x) {
    const { recording, axis } = this, moment = axis.momentAt(x);
    const rows = STACKED.slice().reverse().filter((c) => recording.live[c][moment]).map((c) =>
      element("tr", {}, element("th", {}, swatch(CATEGORIES[c]), CATEGORIES[c]),
        element("td", {}, formatSize(recording.live[c][moment]))));
    const sum = (name, bytes) => element("tr", { class: "sum" }, element("th", {}, name),
      element("td", {}, formatSize(bytes)));
    rows.push(sum("allocated", recording.total[moment]));
    const held = recording.reservedAt(moment);
    if (held !== null) rows.push(sum("reserved", held));
    return [element("div", { class: "when" }, this.when(moment)), element("table", {}, element("tbody", {}, ...rows))];
  }
}
