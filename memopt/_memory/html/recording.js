// A recording in the page. Moment m is after m events: 0 is the beginning, `events` the end. A block is there in the
// moments from .since up to, but not in, .until.

const CATEGORIES = ["parameters", "gradients", "optimizer", "activations", "inputs", "other"];
const STACKED = [0, 2, 1, 3, 4, 5];  // from the bottom: what stays longest first

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
    const moments = this.events + 1;
    this.live = CATEGORIES.map(() => new Float64Array(moments + 1));
    for (let i = 0; i < this.blocks; i++) {
      const change = this.live[this.category[i]];
      change[this.since[i]] += this.size[i];
      change[this.until[i]] -= this.size[i];
    }
    this.total = new Float64Array(moments);
    for (const bytes of this.live) {
      for (let m = 0, sum = 0; m < moments; m++) {
        bytes[m] = sum += bytes[m];
        this.total[m] += sum;
      }
    }
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
    const names = group === "line" ? this.lines.map((line) => line.name) : this.modules;
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
