// What the timeline and the allocation map share: axes, zoom, marks, the moment that is chosen, by pointer or by keys.

const MARGIN = { l: 74, r: 14, t: 20, b: 34 };

const swatch = (name) => element("span", { class: "swatch " + name });

// Round values between two others, at most `most` or so, no closer than `near`, with the digits that tell them apart.
function ticks(low, high, most, near = 0) {
  const least = Math.max(near, (high - low) / Math.max(1, most)), power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((n) => n * power).find((one) => one >= least) ?? 10 * power;
  const digits = Math.min(20, Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
  const text = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  const first = Math.ceil(low / step - 1e-9), count = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length: Math.max(0, Math.min(count, 1000)) }, (_, i) => (first + i) * step)
    .map((value) => ({ value, text: value.toLocaleString("en-US", text) }));
}

class Chart {
  constructor(page, recording, place) {
    Object.assign(this, { page, recording, place, view: {}, width: 0 });
    const clip = "within-" + place.id;
    this.clip = shape("rect", { x: MARGIN.l, y: MARGIN.t });
    this.frame = shape("g");
    this.content = shape("g", { "clip-path": `url(#${clip})` });
    this.over = shape("g");
    this.chosen = shape("line", { class: "chosen", "clip-path": `url(#${clip})` });
    this.selected = shape("rect", { class: "selected", visibility: "hidden" });
    this.area = shape("rect", { x: MARGIN.l, y: MARGIN.t, class: "area" });
    this.plot = shape("svg", { class: "plot", "aria-hidden": "true", preserveAspectRatio: "none" },
      shape("clipPath", { id: clip }, this.clip), this.frame, this.content, this.chosen, this.over, this.selected,
      this.area);
    this.under = element("canvas", { hidden: "" });
    this.cross = element("div", { class: "cross", hidden: "" });
    this.tipBox = element("div", { class: "tip", hidden: "", "aria-hidden": "true" });
    place.replaceChildren(this.under, this.plot, this.cross, this.tipBox);
    this.cross.style.top = MARGIN.t + "px";
    this.cross.style.height = this.plotHeight() + "px";
    this.listen();
  }

  get axis() { return this.page.axes.get(this.recording); }

  range() { return this.page.range ?? this.page.full; }

  plotWidth() { return Math.max(1, this.width - MARGIN.l - MARGIN.r); }

  plotHeight() { return this.height() - MARGIN.t - MARGIN.b; }

  x(position) {
    const [from, to] = this.range();
    return MARGIN.l + (position - from) / (to - from) * this.plotWidth();
  }

  y(value) {
    const [low, high] = this.values();
    return MARGIN.t + (high - value) / (high - low) * this.plotHeight();
  }

  // ---- drawing -------------------------------------------------------------------------------------------------------

  draw() {
    this.width = this.place.clientWidth;
    const width = this.plotWidth(), height = this.plotHeight();
    this.plot.setAttribute("viewBox", `0 0 ${this.width} ${this.height()}`);
    this.place.style.setProperty("--shape", `${this.width} / ${this.height()}`);
    for (const box of [this.clip, this.area]) {
      box.setAttribute("width", width);
      box.setAttribute("height", height);
    }
    this.frame.replaceChildren(...this.axes());
    this.content.replaceChildren(...this.contents(), ...this.markLines());
    this.over.replaceChildren(...this.texts());
    this.mark();
  }

  hasGrid() { return true; }

  // The y axis is in a unit of its own, the x axis in the page's.
  axes() {
    const bottom = MARGIN.t + this.plotHeight(), right = MARGIN.l + this.plotWidth(), { name, factor } = this.valueUnit();
    const [low, high] = this.values(), { suffix } = this.page.unit;
    const across = ticks(...this.range(), Math.max(2, Math.floor(this.plotWidth() / 110)),
      this.page.byTime ? 0 : 1);
    return [
      ...ticks(low / factor, high / factor, 6).flatMap(({ value, text }) => {
        const y = this.y(value * factor).toFixed(1);
        const end = this.hasGrid() ? right : MARGIN.l;
        return [shape("line", { class: "grid", x1: MARGIN.l - 4, x2: end, y1: y, y2: y }),
          shape("text", { x: MARGIN.l - 6, y, "text-anchor": "end", dy: "0.35em" }, `${text} ${name}`)];
      }),
      ...across.flatMap(({ value, text }) => {
        const x = this.x(value).toFixed(1), end = x > right - 20;
        return [shape("line", { class: "grid", x1: x, x2: x, y1: bottom, y2: bottom + 4 }),
          shape("text", { x: end ? right : x, y: bottom + 18, "text-anchor": end ? "end" : "middle" }, text + suffix)];
      }),
      shape("line", { class: "grid", x1: MARGIN.l, x2: right, y1: bottom, y2: bottom }),
    ];
  }

  upright(name, x) {
    return shape("line", { class: name, x1: x.toFixed(1), x2: x.toFixed(1), y1: MARGIN.t, y2: MARGIN.t + this.plotHeight() });
  }

  level(name, value) {
    const y = this.y(value).toFixed(1);
    return shape("line", { class: name, x1: MARGIN.l, x2: MARGIN.l + this.plotWidth(), y1: y, y2: y });
  }

  // Ends of steps, as long as they can be told apart; out of memory always.
  marks(kind) {
    const [from, to] = this.range(), { positions } = this.axis;
    return this.recording.marks.map((mark, i) => ({ ...mark, i, x: positions[mark.event + 1] }))
      .filter((mark) => mark.kind === kind && mark.x >= from && mark.x <= to);
  }

  markLines() {
    const steps = this.marks("step");
    return [
      ...(steps.length * 8 > this.plotWidth() ? [] : steps.map((mark) => this.upright("step", this.x(mark.x)))),
      ...this.marks("oom").map((mark) => this.upright("failed", this.x(mark.x))),
    ];
  }

  // Above the axes, where nothing else is written.
  markTexts() {
    const text = (mark, words, name) => shape("text", { class: name, x: this.x(mark.x).toFixed(1), y: MARGIN.t - 6,
      "text-anchor": this.x(mark.x) < 100 ? "start" : "end" }, words);
    const ooms = this.marks("oom").slice(0, 1);
    const number = new Map(this.recording.marks.filter((mark) => mark.kind === "step").map((mark, i) => [mark, i + 1]));
    const apart = (a, b, pixels) => Math.abs(this.x(a.x) - this.x(b.x)) >= pixels;
    const numbered = [];
    for (const mark of this.marks("step")) {
      const before = numbered[numbered.length - 1];
      if (ooms.every((oom) => apart(mark, oom, 110)) && (!before || apart(mark, before, 64))) numbered.push(mark);
    }
    return [
      ...numbered.map((mark) => text(mark, `step ${number.get(this.recording.marks[mark.i])}`, "step")),
      ...ooms.map((mark) => text(mark, "out of memory", "failed")),
    ];
  }

  // The moment that is chosen: all that changes with it.
  mark() {
    const moment = this.page.moment(this.recording), x = this.x(this.axis.positions[moment]).toFixed(1);
    for (const [name, value] of [["x1", x], ["x2", x], ["y1", MARGIN.t], ["y2", MARGIN.t + this.plotHeight()]]) {
      this.chosen.setAttribute(name, value);
    }
    this.place.setAttribute("aria-valuemax", this.recording.events);
    this.place.setAttribute("aria-valuenow", moment);
    this.place.setAttribute("aria-valuetext", this.spoken(moment));
  }

  when(moment) {
    const step = this.recording.stepAt(moment);
    const event = moment ? `event ${formatCount(moment - 1)}` : "before the first event";
    return [formatTime(this.recording.times[moment]), event, step].filter(Boolean).join(" · ");
  }

  spoken(moment) {
    const peak = moment === this.recording.peak ? "the peak, " : "";
    return `${peak}${this.when(moment)}: ${formatSize(this.recording.total[moment])}`;
  }

  // ---- the pointer -------------------------------------------------------------------------------------------------

  // Where it is within the axes, as pixels and as a value of each axis; null outside.
  at(event) {
    const box = this.place.getBoundingClientRect();
    const left = event.clientX - box.left, top = event.clientY - box.top;
    const width = this.plotWidth(), height = this.plotHeight(), [from, to] = this.range(), [low, high] = this.values();
    const x = (left - MARGIN.l) / width, y = (top - MARGIN.t) / height;
    if (x < 0 || x > 1 || y < 0 || y > 1) return null;
    return { left, top, x: from + x * (to - from), value: high - y * (high - low) };
  }

  listen() {
    let down = null;
    const box = (event) => {
      const to = this.at(event) ?? down.last;
      down.last = to;
      const wide = Math.abs(to.left - down.from.left) >= 8, high = Math.abs(to.top - down.from.top) >= 30;
      return { to, wide: wide || !high, high, moved: wide || high };
    };
    this.place.addEventListener("pointermove", (event) => {
      this.point(event);
      if (down) this.showSelected(down.from, box(event));
    });
    this.place.addEventListener("pointerleave", () => this.point(null));
    this.area.addEventListener("pointerdown", (event) => {
      const from = event.button === 0 ? this.at(event) : null;
      if (from) down = { from, last: from, finger: event.pointerType === "touch" };
    });
    document.addEventListener("pointerup", (event) => {
      if (!down) return;
      const { from, finger } = down, { to, wide, high, moved } = box(event);
      down = null;
      this.selected.setAttribute("visibility", "hidden");
      if (!moved) this.page.choose(this.recording, this.axis.momentAt(to.x));
      if (!moved || finger) return;
      if (high) this.view.values = [Math.min(from.value, to.value), Math.max(from.value, to.value)];
      if (wide) this.page.zoom([from.x, to.x]);
      else this.page.redraw();
    });
    this.place.addEventListener("dblclick", () => this.page.zoom(null));
    this.place.addEventListener("keydown", (event) => this.key(event));
    this.place.addEventListener("blur", () => this.hideTip());
  }

  showSelected(from, { to, wide, high, moved }) {
    const [left, right] = wide ? [from.left, to.left] : [MARGIN.l, MARGIN.l + this.plotWidth()];
    const [top, bottom] = high ? [from.top, to.top] : [MARGIN.t, MARGIN.t + this.plotHeight()];
    const box = { x: Math.min(left, right), y: Math.min(top, bottom), width: Math.abs(right - left),
      height: Math.abs(bottom - top), visibility: moved ? "visible" : "hidden" };
    for (const [name, value] of Object.entries(box)) this.selected.setAttribute(name, value);
  }

  point(event) {
    const at = event && this.width ? this.at(event) : null;
    if (at) this.showTip(at.left, at.top, this.tip(this.axis.momentAt(at.x), at.value));
    else this.hideTip();
  }

  showTip(left, top, lines) {
    this.cross.hidden = this.tipBox.hidden = false;
    this.cross.style.left = left + "px";
    this.tipBox.replaceChildren(...lines.filter(Boolean));
    const onRight = left > this.width / 2;
    this.tipBox.style.left = onRight ? "auto" : left + 12 + "px";
    this.tipBox.style.right = onRight ? this.width - left + 12 + "px" : "auto";
    this.tipBox.style.top = Math.max(0, Math.min(top - 20, this.height() - this.tipBox.offsetHeight)) + "px";
  }

  hideTip() { this.cross.hidden = this.tipBox.hidden = true; }

  // ---- keys ----------------------------------------------------------------------------------------------------------

  // A moment away from another in the picture as it is, or where it has no other, in the recording.
  beside(moment, way) {
    const shown = chosenMoments(this.recording, this.axis, ...this.range(), Math.max(100, Math.round(this.plotWidth())));
    const next = way > 0 ? shown.find((m) => m > moment) : shown.findLast((m) => m < moment);
    return next ?? moment + way;
  }

  stepFrom(moment, way) {
    const ends = this.recording.marks.filter((mark) => mark.kind === "step").map((mark) => mark.event + 1);
    if (!ends.length) return moment + way * Math.max(1, Math.round(this.recording.events / 10));
    return (way > 0 ? ends.find((m) => m > moment) : ends.findLast((m) => m < moment)) ?? moment;
  }

  key(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const { recording, page } = this, moment = page.moment(recording);
    const moves = {
      ArrowLeft: () => this.beside(moment, -1), ArrowRight: () => this.beside(moment, 1),
      PageUp: () => this.stepFrom(moment, -1), PageDown: () => this.stepFrom(moment, 1),
      Home: () => 0, End: () => recording.events, p: () => recording.peak,
      ArrowUp: () => this.climb(moment, 1), ArrowDown: () => this.climb(moment, -1),
    };
    const others = { "+": () => page.zoomBy(0.5, this), "-": () => page.zoomBy(2, this), 0: () => page.zoom(null),
      Escape: () => this.hideTip() };
    const key = event.key === "P" ? "p" : event.key === "=" ? "+" : event.key;
    if (!(key in moves) && !(key in others)) return;
    event.preventDefault();
    if (key in others) {
      others[key]();
      return;
    }
    const to = Math.min(Math.max(moves[key](), 0), recording.events);
    page.choose(recording, to);
    page.bringIntoView(this.axis.positions[to]);
    const value = this.valueAt(to);
    this.showTip(this.x(this.axis.positions[to]), this.y(value), this.tip(to, value));
  }

  climb(moment) { return moment; }
}
