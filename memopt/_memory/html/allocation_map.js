// Which addresses were taken when. Blocks do not overlap, so all of them together cover the picture at most once: each is
// added to the pixels that it touches with the area it has there, and a pixel has the colour of the part with the
// largest, as strong as it is full. Drawn anew from all blocks whenever the view changes.

// shares[part][row * (width + 1) + column]: of each pixel, from 0 to 1. Rows count from the lowest address. parts: of each
// block, one of `count`.
function coverage(recording, axis, [from, to], [low, high], width, height, parts = recording.category,
  count = CATEGORIES.length) {
  const across = width / (to - from), up = height / (high - low), line = width + 1;
  const shares = Array.from({ length: count }, () => null);
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
    const share = shares[parts[i]] ??= new Float64Array(line * height + 2);
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

// colours: "#rrggbb" of each part.
function paint(shares, colours, width, height) {
  const image = new ImageData(width, height), pixels = new Uint32Array(image.data.buffer), line = width + 1;
  const rgb = colours.map((colour) => {
    const value = parseInt(colour.slice(1), 16);
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

  hasGrid() { return false; }  // it would be over the blocks

  values() { return this.view.values ?? [0, this.page.mostPlaces]; }

  valueUnit() { return this.page.placesUnit; }

  // Of the block that was chosen last, while it lives, else of the lowest.
  valueAt(moment) {
    const block = this.liveBlocks(moment).find((i) => i === this.block) ?? this.liveBlocks(moment)[0];
    return block === undefined ? 0 : this.recording.place[block] + this.recording.size[block] / 2;
  }

  liveBlocks(moment) {
    const { since, until, place, size } = this.recording, found = [];
    for (let i = 0; i < place.length; i++) if (since[i] <= moment && moment < until[i] && size[i]) found.push(i);
    return found.sort((a, b) => place[a] - place[b]);
  }

  // To the next block above or below, of those that live at this moment.
  climb(moment, way) {
    const blocks = this.liveBlocks(moment), now = blocks.indexOf(this.block);
    this.block = blocks[now < 0 ? 0 : Math.min(Math.max(now + way, 0), blocks.length - 1)];
    return moment;
  }

  contents() {
    const { recording, axis, page } = this, view = this.values();
    const width = Math.max(100, Math.round(this.plotWidth())), height = this.plotHeight(), { series } = page.colouring;
    const shares = coverage(recording, axis, this.range(), view, width, height, page.colouring.parts(recording),
      series.length);
    this.under.width = width;
    this.under.height = height;
    this.under.hidden = false;
    const of = (part, whole) => 100 * part / whole + "%";
    Object.assign(this.under.style, { left: of(MARGIN.l, this.width), width: of(this.plotWidth(), this.width),
      top: of(MARGIN.t, this.height()), height: of(height, this.height()) });
    this.under.getContext("2d").putImageData(
      paint(shares, series.map(({ colour }) => page.colours[colour]), width, height), 0, 0);
    // Where addresses were cut out, as long as there are not so many that the lines would hide the blocks.
    const cuts = recording.ranges.at.filter((at) => at > view[0] && at < view[1]);
    return cuts.length > 60 ? [] : cuts.map((at) => this.level("cut", at));
  }

  texts() { return this.marks("oom").length ? this.markTexts() : []; }

  spoken(moment) {
    const block = this.block !== undefined && this.recording.since[this.block] <= moment
      && moment < this.recording.until[this.block] ? this.block : -1;
    return block < 0 ? super.spoken(moment) : this.words(block).filter(Boolean).join(", ");
  }

  words(block) {
    const { recording } = this, { since, until, times } = recording, name = CATEGORIES[recording.category[block]];
    const line = recording.lines[recording.line[block]], module = recording.modules[recording.module[block]];
    const born = since[block] ? formatTime(times[since[block]]) : "before the recording";
    const died = until[block] > recording.events ? "alive at the end" : "until " + formatTime(times[until[block]]);
    return [`${formatSize(recording.size[block])} of ${name}`, line.name || "line not known", line.text,
      module && "in " + module, `from ${born}, ${died}`, "at " + recording.address(recording.place[block])];
  }

  tip(moment, value) {
    const block = this.recording.blockAt(moment, Math.floor(value));
    if (block < 0) return [element("div", { class: "when" }, this.when(moment)), element("div", {}, "free")];
    const [what, line, text, module, life, address] = this.words(block);
    const { series } = this.page.colouring, part = this.page.colouring.parts(this.recording)[block];
    return [
      element("div", { class: "when" }, swatch(series[part].colour), what),
      element("div", { class: "code" }, line),
      text ? element("div", { class: "code quiet" }, text) : null,
      module ? element("div", {}, module) : null,
      element("div", { class: "quiet" }, life),
      element("div", { class: "quiet" }, address),
    ];
  }
}
