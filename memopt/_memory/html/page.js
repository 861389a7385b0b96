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
    this.range = null;  // what of the x axis is shown; null: all
    this.busy = 0;  // drawings that are asked for and not ready
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
    const names = [...CATEGORIES, "ink", "quiet", "grid", "panel", "step", "alarm", "cut"];
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

  moment(recording) { return this.chosen.get(recording) ?? recording.peak; }

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

  zoomBy(factor) {
    const [from, to] = this.range ?? this.full, middle = (from + to) / 2, half = (to - from) / 2 * factor;
    this.zoom([middle - half, middle + half]);
  }

  choose(recording, moment) {
    this.chosen.set(recording, moment);
    this.drawContents();
    this.redraw();
  }

  chooseAll(of) {
    for (const recording of this.recordings) this.chosen.set(recording, of(recording));
    this.drawContents();
    this.redraw();
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
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.readColours(); this.redraw(); });
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
    this.recordings.forEach((recording, i) => {
      const moment = this.moment(recording), which = moment === recording.peak ? "at the peak, " : "";
      document.getElementById("moment-" + i).textContent =
        `${which}${this.charts[2 * i].when(moment)}: ${formatSize(recording.total[moment])}`;
    });
  }

  // Once a frame at most, and one after the other: pictures take a while to load.
  redraw() {
    if (!window.Plotly) return null;
    document.querySelectorAll("[data-do=time], [data-do=events]").forEach((button) =>
      button.setAttribute("aria-pressed", String((button.dataset.do === "time") === this.byTime)));
    if (!this.waiting) {
      this.busy++;
      const frame = new Promise((resolve) => requestAnimationFrame(resolve));
      this.waiting = Promise.all([this.last, frame]).then(async () => {
        this.waiting = null;
        for (const chart of this.charts) await chart.draw();
      }).finally(() => { this.busy--; });
      this.last = this.waiting.catch(() => {});
    }
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
  // What there is so far is shown: what comes now, the library above all, takes longer than the data.
  await new Promise((resolve) => setTimeout(resolve));
  // It is compressed too, and runs as a script of this page, so that nothing has to be fetched.
  const library = new TextDecoder().decode(await inflate(document.getElementById("plotly").textContent));
  document.head.append(element("script", {}, library));
  performance.mark("library");
  await page.redraw();
  performance.mark("drawn");
  document.documentElement.dataset.drawn = "yes";
}

begin().catch((error) => {
  document.getElementById("trouble").hidden = false;
  document.getElementById("trouble").append(` ${error.message}`);
  throw error;
});
