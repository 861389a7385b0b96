// Which addresses were taken when. Blocks do not overlap, so all of them together cover the picture at most once: each is
// added to the pixels that it touches with the area it has there, and a pixel has the colour of the category with the
// largest, as strong as it is full. Drawn anew from all blocks whenever the view changes.

// shares[category][row * (width + 1) + column]: of each pixel, from 0 to 1. Rows count from the lowest address.
function coverage(recording, axis, [from, to], [low, high], width, height) {
  const across = width / (to - from), up = height / (high - low), line = width + 1;
  const shares = CATEGORIES.map(() => null);
  const { positions, end } = axis;
  for (let i = 0; i < recording.blocks; i++) {
    const bottom = recording.place[i], top = bottom + recording.size[i];
    if (top <= low || bottom >= high) continue;
    const until = recording.until[i];
    let left = positions[recording.since[i]], right = until > recording.events ? end : positions[until];
    if (right < from || left > to) continue;
    left = Math.max(left - from, 0) * across;
    right = Math.min(Math.max((right - from) * across, left + 1e-4), width);
    if (left >= right) left = right - 1e-4;
    const y0 = Math.max(bottom - low, 0) * up, y1 = Math.min((top - low) * up, height);
    const c0 = Math.floor(left), c1 = Math.floor(right);
    const share = shares[recording.category[i]] ??= new Float64Array(line * height + 2);
    const rows = Math.min(Math.ceil(y1), height);
    for (let row = Math.floor(y0); row < rows; row++) {
      // What changes from one pixel to the next: a sum along the row gives the shares.
      const part = Math.min(y1, row + 1) - Math.max(y0, row), at = row * line;
      const enters = part * (c0 + 1 - left), leaves = part * (c1 + 1 - right);
      share[at + c0] += enters;
      share[at + c0 + 1] += part - enters;
      share[at + c1] -= leaves;
      share[at + c1 + 1] -= part - leaves;
    }
  }
  for (const share of shares) {
    for (let row = 0; share && row < height; row++) {
      for (let column = 0, at = row * line, sum = 0; column < line; column++, at++) share[at] = sum += share[at];
    }
  }
  return shares;
}

function paint(shares, colours, width, height) {
  const image = new ImageData(width, height), pixels = new Uint32Array(image.data.buffer), line = width + 1;
  const rgb = CATEGORIES.map((name) => {
    const value = parseInt(colours[name].slice(1), 16);
    return (value >> 16) | (value & 0xff00) | ((value & 0xff) << 16);  // red in the lowest byte
  });
  for (let row = 0; row < height; row++) {
    for (let column = 0; column < width; column++) {
      const at = row * line + column;
      let sum = 0, most = 0, whose = -1;
      for (let c = 0; c < shares.length; c++) {
        const share = shares[c] ? shares[c][at] : 0;
        if (share > 1e-10) sum += share;
        if (share > most && share > 1e-10) { most = share; whose = c; }
      }
      if (whose < 0) continue;
      const strength = Math.round(255 * (0.15 + 0.85 * Math.min(1, sum)));
      pixels[(height - 1 - row) * width + column] = (strength << 24) | rgb[whose];
    }
  }
  return image;
}

class AllocationMap extends Chart {
  height() { return 380; }

  places() { return this.view.places ?? [0, this.page.mostPlaces]; }

  draw() {
    const { recording, axis } = this, [from, to] = this.range(), [low, high] = this.places();
    const unit = this.page.placesUnit.factor;
    const width = Math.max(100, Math.round(this.plotWidth())), height = this.height() - MARGIN.t - MARGIN.b;
    const shares = coverage(recording, axis, [from, to], [low, high], width, height);
    const canvas = element("canvas", { width, height });
    canvas.getContext("2d").putImageData(paint(shares, this.page.colours, width, height), 0, 0);
    const layout = this.layout();
    layout.yaxis.range = [low / unit, high / unit];
    layout.yaxis.ticksuffix = " " + this.page.placesUnit.name;
    layout.images = [{
      source: canvas.toDataURL(), xref: "x", yref: "y", x: from, y: high / unit, sizex: to - from,
      sizey: (high - low) / unit, sizing: "stretch", layer: "above",
    }];
    // Where addresses were cut out, as long as there are not so many that the lines would hide the blocks.
    const cuts = recording.ranges.at.filter((at) => at > low && at < high);
    layout.shapes = [...this.markLines(), this.chosenLine(), ...(cuts.length > 60 ? [] : cuts.map((at) => ({
      type: "line", xref: "paper", x0: 0, x1: 1, y0: at / unit, y1: at / unit,
      line: { color: this.page.colours.cut, width: 0.7 },
    })))];
    // Without a trace there are no axes to zoom in.
    return this.show([{ x: [from, to], y: [low / unit, high / unit], mode: "markers", type: "scatter", hoverinfo: "skip",
      marker: { opacity: 0 } }], layout);
  }

  zoomUp([low, high]) {
    const unit = this.page.placesUnit.factor;
    this.view.places = [Math.max(0, low * unit), high * unit];
  }

  tip(x, share) {
    const { recording, axis } = this, [low, high] = this.places();
    const moment = axis.momentAt(x), place = Math.floor(low + share * (high - low));
    const block = recording.blockAt(moment, place);
    if (block < 0) return [element("div", { class: "when" }, this.when(moment)), element("div", {}, "free")];
    const line = recording.lines[recording.line[block]], module = recording.modules[recording.module[block]];
    const { since, until } = recording;
    const born = since[block] ? formatTime(recording.times[since[block]]) : "before the recording";
    const died = until[block] > recording.events ? "alive at the end" : "until " + formatTime(recording.times[until[block]]);
    const name = CATEGORIES[recording.category[block]];
    return [
      element("div", { class: "when" }, swatch(name), `${formatSize(recording.size[block])} of ${name}`),
      element("div", { class: "code" }, line.name || "line not known"),
      line.text ? element("div", { class: "code quiet" }, line.text) : null,
      module ? element("div", {}, "in " + module) : null,
      element("div", { class: "quiet" }, `from ${born}, ${died}`),
      element("div", { class: "quiet" }, "at " + recording.address(recording.place[block])),
    ];
  }
}
