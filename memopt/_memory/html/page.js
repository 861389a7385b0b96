// Reads what the page carries, and draws it.

class Axis {
  constructor(recording, byTime, unit) {
    const { events, times } = recording;
    this.positions = byTime ? times.map((time) => time / unit) : Float64Array.from({ length: events + 1 }, (_, m) => m);
    // What there is after the last event is shown too.
    this.end = byTime ? this.positions[events] * 1.005 : events + 1;
  }

  momentAt(x) { return Math.max(0, lastNotAbove(this.positions, x)); }
}

class Page {
  constructor(described, recordings) {
    this.recordings = recordings;
    this.names = described.names;
    this.lines = new Map();
    for (const recording of recordings) for (const line of recording.lines) this.lines.set(line.name, line);
    this.chosen = new Map();
    this.followed = null;  // {group, name} of a line or module
    this.range = null;  // what of the x axis is shown; null: all
    const most = (of) => Math.max(1, ...recordings.map(of));
    const highest = most((r) => Math.max(r.total[r.peak], r.reserved.reduce((a, b) => Math.max(a, b), 0)));
    // The capacity is shown where it is near enough not to press the rest flat.
    this.mostBytes = 1.06 * most((r) => r.capacity && r.capacity < 2.5 * highest ? r.capacity : highest);
    this.mostPlaces = most((r) => r.places);
    this.bytesUnit = this.sizeUnit(this.mostBytes);
    this.placesUnit = this.sizeUnit(this.mostPlaces);
    this.longest = most((r) => r.times[r.events]);
    this.readColours();
    this.setAxes(recordings.every((recording) => this.isSpread(recording)));
    this.setColouring("category");
    this.charts = recordings.flatMap((recording, i) => [Timeline, AllocationMap].map((Kind) =>
      new Kind(this, recording, document.getElementById(`${Kind === Timeline ? "timeline" : "map"}-${i}`))));
    this.tables = ["line", "module"].map((group) =>
      new ContentsTable(this, group, document.getElementById("by-" + group)));
    this.listen();
  }

  // Whether time is worth an axis: not where most of it is a wait with nothing happening, as for data to be read.
  isSpread({ events, times }) {
    const at = (share) => times[Math.round(share * events)];
    return times[events] > 1 && at(0.9) - at(0.1) > 0.3 * times[events];
  }

  sizeUnit(bytes) {
    const power = Math.max(0, Math.min(6, Math.floor(Math.log2(bytes) / 10)));
    return { name: UNITS[power], factor: 1024 ** power };
  }

  readColours() {
    const style = getComputedStyle(document.documentElement);
    const names = [...CATEGORIES, "rest", "panel"];
    this.colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue("--" + name).trim()]));
  }

  setAxes(byTime) {
    const [suffix, factor] = [[" s", 1e6], [" ms", 1e3], [" µs", 1]].find(([, f]) => this.longest >= f || f === 1);
    this.byTime = byTime;
    this.unit = byTime ? { suffix, factor } : { suffix: "", factor: 1 };
    this.axes = new Map(this.recordings.map((r) => [r, new Axis(r, byTime, factor)]));
    this.full = [0, Math.max(...[...this.axes.values()].map((axis) => axis.end)) || 1];
    this.range = null;
  }

  setColouring(by) {
    this.colouredBy = by;
    this.colouring = new Colouring(this.recordings, by);
  }

  moment(recording) { return this.chosen.get(recording) ?? recording.peak; }

  showsCapacity({ capacity }) { return Boolean(capacity) && capacity <= this.mostBytes; }

  // ---- what one may do -----------------------------------------------------------------------------------------------

  zoom(range) {
    const [from, to] = this.full;
    if (range) {
      const least = (to - from) / 1e9;
      range = [Math.max(from, Math.min(...range)), Math.min(to, Math.max(...range))];
      if (range[1] - range[0] < least) range = [range[0] - least, range[0] + least];
      if (range[0] <= from && range[1] >= to) range = null;
    } else for (const chart of this.charts) chart.view = {};
    this.range = range;
    this.redraw();
  }

  // About the middle, or about the moment that is chosen in a chart.
  zoomBy(factor, chart = null) {
    const [from, to] = this.range ?? this.full, half = (to - from) / 2 * factor;
    const middle = chart ? chart.axis.positions[this.moment(chart.recording)] : (from + to) / 2;
    const begin = Math.min(Math.max(middle - half, this.full[0]), Math.max(this.full[0], this.full[1] - 2 * half));
    this.zoom([begin, begin + 2 * half]);
  }

  bringIntoView(x) {
    if (!this.range || (x >= this.range[0] && x <= this.range[1])) return;
    const half = (this.range[1] - this.range[0]) / 2;
    this.zoom([x - half, x + half]);
  }

  choose(recording, moment) {
    this.chosen.set(recording, moment);
    this.drawContents();
  }

  chooseAll(of) {
    for (const recording of this.recordings) this.chosen.set(recording, of(recording));
    this.drawContents();
  }

  follows(group, name) { return this.followed?.group === group && this.followed.name === name; }

  // Shows a line's or module's own memory over time; asked for again, no more.
  follow(group, name) {
    this.followed = this.follows(group, name) ? null : { group, name };
    for (const table of this.tables) {
      for (const button of table.rowButtons()) {
        button.setAttribute("aria-pressed", String(this.follows(table.group, button.dataset.row)));
      }
    }
    this.drawLegend();
    for (const chart of this.charts) if (chart instanceof Timeline) chart.draw();
  }

  listen() {
    const on = (name, action) => document.querySelectorAll(`[data-do="${name}"]`).forEach((button) =>
      button.addEventListener("click", action));
    on("in", () => this.zoomBy(0.5));
    on("out", () => this.zoomBy(2));
    on("all", () => this.zoom(null));
    on("peak", () => this.chooseAll((r) => r.peak));
    on("end", () => this.chooseAll((r) => r.events));
    on("oom", () => this.chooseAll((r) => (r.marks.find((mark) => mark.kind === "oom")?.event ?? r.peak - 1) + 1));
    for (const [name, byTime] of [["time", true], ["events", false]]) {
      on(name, () => { this.setAxes(byTime); this.zoom(null); });
    }
    for (const by of ["category", "module", "line"]) on("by-" + by, () => { this.setColouring(by); this.redraw(); });
    const again = () => { this.readColours(); this.draw(); };
    for (const media of ["(prefers-color-scheme: dark)", "print"]) matchMedia(media).addEventListener("change", again);
    let width = document.body.clientWidth;
    new ResizeObserver(() => {
      if (document.body.clientWidth === width) return;
      width = document.body.clientWidth;
      this.redraw();
    }).observe(document.body);
  }

  // ---- drawing -------------------------------------------------------------------------------------------------------

  drawContents() {
    for (const table of this.tables) table.draw();
    for (const chart of this.charts) if (chart.width) chart.mark();
    this.recordings.forEach((recording, i) => {
      const moment = this.moment(recording), which = moment === recording.peak ? "at the peak, " : "";
      document.getElementById("moment-" + i).textContent =
        `${which}${this.charts[2 * i].when(moment)}: ${formatSize(recording.total[moment])}`;
    });
  }

  drawLegend() {
    const key = (mark, text) => element("li", {}, element("span", { class: mark }), text);
    document.getElementById("legend").replaceChildren(
      ...this.colouring.series.map(({ name, colour }) => element("li", {}, swatch(colour), name)),
      ...(this.recordings.some((r) => r.reserved.length) ? [key("line", "reserved by the allocator")] : []),
      ...(this.recordings.some((r) => this.showsCapacity(r)) ? [key("line dashed", "capacity")] : []),
      ...(this.followed ? [key("line own", (this.followed.name || UNKNOWN[this.followed.group]) + " alone")] : []));
  }

  draw() {
    const pressed = { time: this.byTime, events: !this.byTime };
    for (const by of ["category", "module", "line"]) pressed["by-" + by] = this.colouredBy === by;
    for (const [name, is] of Object.entries(pressed)) {
      document.querySelector(`[data-do="${name}"]`).setAttribute("aria-pressed", String(is));
    }
    this.drawLegend();
    for (const chart of this.charts) chart.draw();
  }

  // Once a frame at most. What is awaited is null where everything is drawn.
  redraw() {
    this.waiting ??= new Promise((resolve) => requestAnimationFrame(resolve)).then(() => {
      this.waiting = null;
      this.draw();
    });
    return this.waiting;
  }
}

async function begin() {
  performance.mark("begun");
  const described = JSON.parse(document.getElementById("described").textContent);
  const recordings = [];
  for (const [i, one] of described.recordings.entries()) {
    const bytes = await inflate(document.getElementById("columns-" + i).textContent);
    recordings.push(new Recording(one, unpackColumns(one.columns, bytes)));
  }
  const page = window.memopt = new Page(described, recordings);
  page.drawContents();
  performance.mark("contents");
  page.draw();
  performance.mark("drawn");
  document.documentElement.dataset.drawn = "yes";
}

begin().catch((error) => {
  document.getElementById("trouble").hidden = false;
  document.getElementById("trouble").append(` ${error.message}`);
  throw error;
});
