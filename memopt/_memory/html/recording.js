// A recording in the page. Moment m is after m events: 0 is the beginning, `events` the end. A block is there in the
// moments from .since up to, but not in, .until.

const CATEGORIES = ["parameters", "gradients", "optimizer", "activations", "inputs", "other"];
const STACKED = [0, 2, 1, 3, 4, 5];  // from the bottom: what stays longest first
const ACTIVATIONS = 3;
const GROUP_COLOURS = ["activations", "gradients", "optimizer", "inputs", "parameters"];  // of the largest groups
const UNKNOWN = { line: "line not known", module: "outside of modules" };

class Recording {
  constructor(described, columns) {
    Object.assign(this, described);
    this.blocks = columns.size.length;
    this.size = columns.size;
    this.place = columns.place;
    this.line = columns.line;
    this.module = columns.module;
    this.category = columns.category;
    this.since = columns.born.map((event) => event + 1);
    this.until = columns.died.map((event) => event + 1);
    this.events = columns.times.length;
    this.times = new Float64Array(this.events + 1);  // microseconds from the first event
    for (let event = 0; event < this.events; event++) this.times[event + 1] = columns.times[event] - columns.times[0];
    this.reservedSince = columns.reserved_events.map((event) => event + 1);
    this.reserved = columns.reserved_bytes;
    this.sumUp();
  }

  // this.live[category][moment], this.total[moment]: bytes.
  sumUp() {
    this.live = this.liveParts(this.category, CATEGORIES.length);
    this.total = new Float64Array(this.events + 1);
    for (const bytes of this.live) for (let m = 0; m <= this.events; m++) this.total[m] += bytes[m];
  }

  // Live bytes by part and moment, where each block is of one of `count` parts; of a negative one it is left out.
  liveParts(parts, count) {
    const live = Array.from({ length: count }, () => new Float64Array(this.events + 2));
    for (let i = 0; i < this.blocks; i++) {
      if (parts[i] < 0) continue;
      live[parts[i]][this.since[i]] += this.size[i];
      live[parts[i]][this.until[i]] -= this.size[i];
    }
    for (const bytes of live) for (let m = 0, sum = 0; m <= this.events; m++) bytes[m] = sum += bytes[m];
    return live;
  }

  names(group) { return group === "line" ? this.lines.map((line) => line.name) : this.modules; }

  // Live bytes of one line or module, null where it has none.
  liveOf(group, name) {
    const names = this.names(group), parts = this[group].map((key) => (names[key] === name ? 0 : -1));
    return parts.includes(0) ? this.liveParts(parts, 1)[0] : null;
  }

  reservedAt(moment) {
    const at = lastNotAbove(this.reservedSince, moment);
    return at < 0 ? null : this.reserved[at];
  }

  stepAt(moment) {
    const steps = this.marks.filter((mark) => mark.kind === "step");
    const done = steps.filter((mark) => mark.event + 1 < moment).length;
    return steps.length && done < steps.length ? `step ${done + 1}` : "";
  }

  // What lives at a moment, by line or by module: of each name bytes by category, their sum and the number of blocks.
  contents(moment, group) {
    const names = this.names(group);
    const keys = this[group];
    const parts = new Float64Array(names.length * CATEGORIES.length);
    const counts = new Int32Array(names.length);
    for (let i = 0; i < this.blocks; i++) {
      if (this.since[i] > moment || this.until[i] <= moment) continue;
      parts[keys[i] * CATEGORIES.length + this.category[i]] += this.size[i];
      counts[keys[i]]++;
    }
    const rows = new Map();
    names.forEach((name, k) => {
      if (!counts[k]) return;
      const own = Array.from(parts.subarray(k * CATEGORIES.length, (k + 1) * CATEGORIES.length));
      rows.set(name, { parts: own, bytes: own.reduce((a, b) => a + b, 0), blocks: counts[k] });
    });
    return rows;
  }

  // The block that lives at a moment and has this place in the shortened space, or -1.
  blockAt(moment, place) {
    for (let i = 0; i < this.blocks; i++) {
      if (this.place[i] <= place && place < this.place[i] + this.size[i]
          && this.since[i] <= moment && moment < this.until[i]) return i;
    }
    return -1;
  }

  address(place) {
    const range = lastNotAbove(this.ranges.at, place);
    return "0x" + (BigInt(this.ranges.starts[range]) + BigInt(place - this.ranges.at[range])).toString(16);
  }
}

// How blocks are coloured: by category, or activations by the module or the line that made them, the rest as one. `series`
// has the parts from the bottom up, the same for all recordings, each with the name of its colour.
class Colouring {
  constructor(recordings, by) {
    this.known = new Map();
    if (by === "category") {
      this.series = STACKED.map((c) => ({ name: CATEGORIES[c], colour: CATEGORIES[c] }));
      const rank = CATEGORIES.map((_, c) => STACKED.indexOf(c));
      for (const recording of recordings) {
        this.known.set(recording, { parts: recording.category.map((c) => rank[c]), live: STACKED.map((c) => recording.live[c]) });
      }
      return;
    }
    const labels = new Map(recordings.map((r) => [r, r.names(by).map(by === "module" ? moduleGroup : (name) => name)]));
    const most = new Map();  // of each label, the bytes of activations at the peak that has the most of them
    for (const recording of recordings) {
      const sums = new Map();
      for (let i = 0; i < recording.blocks; i++) {
        if (recording.category[i] !== ACTIVATIONS) continue;
        const label = labels.get(recording)[recording[by][i]];
        const alive = recording.since[i] <= recording.peak && recording.peak < recording.until[i];
        sums.set(label, (sums.get(label) ?? 0) + (alive ? recording.size[i] : 0));
      }
      for (const [label, bytes] of sums) most.set(label, Math.max(bytes, most.get(label) ?? 0));
    }
    const largest = [...most].sort((a, b) => b[1] - a[1]).slice(0, GROUP_COLOURS.length).map(([label]) => label);
    this.series = [{ name: "not activations", colour: "rest" },
      ...largest.map((label, k) => ({ name: label || UNKNOWN[by], colour: GROUP_COLOURS[k] })),
      ...(most.size > largest.length ? [{ name: `other ${by}s`, colour: "other" }] : [])];
    const part = new Map(largest.map((label, k) => [label, k + 1]));
    this.partOf = (recording) => recording[by].map((key, i) => (recording.category[i] !== ACTIVATIONS ? 0
      : part.get(labels.get(recording)[key]) ?? largest.length + 1));
  }

  of(recording) {
    if (!this.known.has(recording)) {
      const parts = this.partOf(recording);
      this.known.set(recording, { parts, live: recording.liveParts(parts, this.series.length) });
    }
    return this.known.get(recording);
  }

  parts(recording) { return this.of(recording).parts; }  // of each block, the index of its part

  live(recording) { return this.of(recording).live; }  // bytes by part and moment
}

// Layers that differ by their number only are one group: "blocks.*.attn".
const moduleGroup = (name) => name.replace(/(^|\.)\d+(?=\.|$)/g, "$1*");

// The index of the last entry that is not above a value; -1 where all are.
function lastNotAbove(ascending, value) {
  let low = -1, high = ascending.length;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (ascending[middle] <= value) low = middle; else high = middle;
  }
  return low;
}

// ---- words -----------------------------------------------------------------------------------------------------

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

function formatSize(bytes) {
  if (bytes < 0) return "−" + formatSize(-bytes);
  let unit = 0;
  while (unit < 6 && Math.floor(bytes / 1024 ** unit + 0.5) >= 1024) unit++;
  const value = bytes / 1024 ** unit, half = (digits) => Math.floor(value * digits + 0.5);
  const text = unit && half(100) < 1000 ? (half(100) / 100).toFixed(2)
    : unit && half(10) < 1000 ? (half(10) / 10).toFixed(1) : String(half(1));
  return text + "\u00a0" + UNITS[unit];
}

function formatShare(part, whole) {
  const percent = whole ? 100 * part / whole : 0;
  if (percent > 0 && percent < 1) return "<\u00a01\u00a0%";
  return percent.toFixed(0) + "\u00a0%";
}

function formatTime(microseconds) {
  for (const [unit, factor] of [["s", 1e6], ["ms", 1e3], ["µs", 1]]) {
    if (microseconds >= factor || unit === "µs") {
      const value = microseconds / factor;
      return value.toFixed(value < 10 ? 3 : value < 100 ? 2 : 1).replace(/\.?0+$/, "") + "\u00a0" + unit;
    }
  }
}

const formatCount = (n) => n.toLocaleString("en-US");

// An element: element("td", {class: "number"}, "text", child, ...). Text is never read as HTML.
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

// The same of SVG.
function shape(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
