// What the timeline and the allocation map share: the x axis and its zoom, the marks, the cross hair with its tip.

const MARGIN = { l: 74, r: 14, t: 20, b: 34 };

const swatch = (name) => element("span", { class: "swatch " + name });

class Chart {
  constructor(page, recording, place) {
    Object.assign(this, { page, recording, place, view: {} });
    this.plot = element("div", { class: "plot" });
    this.cross = element("div", { class: "cross", hidden: "" });
    this.tipBox = element("div", { class: "tip", hidden: "", role: "status" });
    place.style.height = this.height() + "px";
    place.replaceChildren(this.plot, this.cross, this.tipBox);
    this.cross.style.top = MARGIN.t + "px";
    this.cross.style.height = this.height() - MARGIN.t - MARGIN.b + "px";
    this.listen();
  }

  get axis() { return this.page.axes.get(this.recording); }

  range() { return this.page.range ?? this.page.full; }

  plotWidth() { return this.place.clientWidth - MARGIN.l - MARGIN.r; }

  // Plotly writes into the ranges that it is given.
  layout() {
    const { colours, unit } = this.page;
    const axis = {
      gridcolor: colours.grid, zerolinecolor: colours.grid, linecolor: colours.grid, color: colours.quiet,
      autorange: false, automargin: false, exponentformat: "none", showgrid: true,
    };
    return {
      width: this.place.clientWidth, height: this.height(), margin: MARGIN, paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)", font: { family: getComputedStyle(document.body).fontFamily, size: 12 },
      showlegend: false, hovermode: false, dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      xaxis: { ...axis, range: [...this.range()], showgrid: false, ticks: "outside", ticklen: 4, tickcolor: colours.grid,
        nticks: Math.max(3, Math.floor(this.plotWidth() / 110)), ticksuffix: unit.suffix,
        separatethousands: true },
      yaxis: { ...axis, nticks: 6 },
    };
  }

  async show(traces, layout) {
    await Plotly.react(this.plot, traces, layout, { displayModeBar: false, responsive: false, doubleClick: false });
    if (this.shown) return;
    this.shown = true;
    this.plot.on("plotly_doubleclick", () => this.page.zoom(null));
    this.plot.on("plotly_relayout", (change) => {
      const of = (axis) => change[axis + ".range"] ?? [change[axis + ".range[0]"], change[axis + ".range[1]"]];
      const [x, y] = [of("xaxis"), of("yaxis")];
      if (y[0] !== undefined) this.zoomUp(y);
      if (x[0] !== undefined) this.page.zoom(x);
      else this.page.redraw();
    });
  }

  // Ends of steps, as long as they can be told apart; out of memory always.
  marks(kind) {
    const [from, to] = this.range(), { positions } = this.axis;
    return this.recording.marks.map((mark, i) => ({ ...mark, i, x: positions[mark.event + 1] }))
      .filter((mark) => mark.kind === kind && mark.x >= from && mark.x <= to);
  }

  markLines() {
    const line = (x, colour, width, dash) => ({
      type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { color: colour, width, dash },
    });
    const { colours } = this.page, steps = this.marks("step");
    return [
      ...(steps.length * 8 > this.plotWidth() ? [] : steps.map((mark) => line(mark.x, colours.step, 1, "dot"))),
      ...this.marks("oom").map((mark) => line(mark.x, colours.alarm, 2, "solid")),
    ];
  }

  markTexts() {
    const text = (mark, words, colour) => ({
      x: mark.x, yref: "paper", y: 1, yanchor: "bottom", xanchor: "right", showarrow: false, text: words,
      font: { size: 11, color: colour },
    });
    const { colours } = this.page, ooms = this.marks("oom").slice(0, 1), [from, to] = this.range();
    const number = new Map(this.recording.marks.filter((mark) => mark.kind === "step").map((mark, i) => [mark, i + 1]));
    const apart = (a, b, pixels) => Math.abs(a.x - b.x) / (to - from) * this.plotWidth() >= pixels;
    const numbered = [];
    for (const mark of this.marks("step")) {
      const before = numbered[numbered.length - 1];
      if (ooms.every((oom) => apart(mark, oom, 90)) && (!before || apart(mark, before, 56))) numbered.push(mark);
    }
    return [
      ...numbered.map((mark) => text(mark, `step ${number.get(this.recording.marks[mark.i])}`, colours.quiet)),
      ...ooms.map((mark) => text(mark, "out of memory", colours.alarm)),
    ];
  }

  chosenLine() {
    const x = this.axis.positions[this.page.moment(this.recording)];
    return { type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { color: this.page.colours.ink, width: 1 } };
  }

  when(moment) {
    const step = this.recording.stepAt(moment);
    const event = moment ? `event ${formatCount(moment - 1)}` : "before the first event";
    return [formatTime(this.recording.times[moment]), event, step].filter(Boolean).join(" · ");
  }

  // ---- the pointer -------------------------------------------------------------------------------------------------

  // Where it is within the axes: x in their unit, the share of the height from the bottom; null outside.
  at(event) {
    const box = this.place.getBoundingClientRect();
    const x = event.clientX - box.left - MARGIN.l, y = event.clientY - box.top - MARGIN.t;
    const width = this.plotWidth(), height = this.height() - MARGIN.t - MARGIN.b, [from, to] = this.range();
    if (x < 0 || x > width || y < 0 || y > height) return null;
    return { x: from + x / width * (to - from), share: 1 - y / height, left: x + MARGIN.l, top: y + MARGIN.t };
  }

  listen() {
    let down = null;
    this.place.addEventListener("pointermove", (event) => this.point(event));
    this.place.addEventListener("pointerleave", () => this.point(null));
    this.place.addEventListener("pointerdown", (event) => { down = event; });
    document.addEventListener("pointerup", (event) => {
      const moved = down && Math.hypot(event.clientX - down.clientX, event.clientY - down.clientY);
      const at = down && moved < 4 && event.button === 0 ? this.at(event) : null;
      down = null;
      if (at) this.page.choose(this.recording, this.axis.momentAt(at.x));
    });
  }

  point(event) {
    const at = event && this.shown ? this.at(event) : null;
    this.cross.hidden = this.tipBox.hidden = !at;
    if (!at) return;
    this.cross.style.left = at.left + "px";
    this.tipBox.replaceChildren(...this.tip(at.x, at.share).filter(Boolean));
    const onRight = at.left > this.place.clientWidth / 2;
    this.tipBox.style.left = onRight ? "auto" : at.left + 12 + "px";
    this.tipBox.style.right = onRight ? this.place.clientWidth - at.left + 12 + "px" : "auto";
    this.tipBox.style.top = Math.max(0, Math.min(at.top - 20, this.height() - this.tipBox.offsetHeight)) + "px";
  }
}
