// What lived at a moment, by line or by module, of one recording or of several beside each other.

const SHOWN = 12;  // rows, before one asks for all

class ContentsTable {
  constructor(page, group, place) {
    Object.assign(this, { page, group, place, all: false });
    this.two = page.recordings.length === 2;
    this.several = page.recordings.length > 1;
    this.sort = { by: this.two ? "difference" : 0, down: true };
  }

  rows() {
    const contents = this.page.recordings.map((recording) => recording.contents(this.page.moment(recording), this.group));
    const names = new Set(contents.flatMap((rows) => [...rows.keys()]));
    return Array.from(names, (name) => {
      const each = contents.map((rows) => rows.get(name) ?? { parts: CATEGORIES.map(() => 0), bytes: 0, blocks: 0 });
      return {
        name, each, difference: this.two ? each[1].bytes - each[0].bytes : 0,
        blocks: each.reduce((sum, row) => sum + row.blocks, 0),
      };
    });
  }

  sorted(rows) {
    const { by, down } = this.sort;
    const key = {
      name: (row) => row.name, blocks: (row) => row.blocks, difference: (row) => Math.abs(row.difference),
    }[by] ?? ((row) => row.each[by].bytes);
    const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
    return rows.sort((a, b) => (down ? -1 : 1) * order(key(a), key(b)) || order(a.name, b.name));
  }

  header(by, text, number) {
    const now = this.sort.by === by;
    const turn = () => {
      this.sort = { by, down: now ? !this.sort.down : by !== "name" };
      this.draw();
      this.place.querySelector(`[data-by="${by}"]`).focus();
    };
    return element("th", { scope: "col", class: number ? "number" : null,
      "aria-sort": now ? (this.sort.down ? "descending" : "ascending") : null },
    element("button", { type: "button", "data-by": by, onclick: turn }, text,
      element("span", { class: "arrow", "aria-hidden": "true" }, now ? (this.sort.down ? "▾" : "▴") : "")));
  }

  bar(parts, most) {
    const told = STACKED.filter((c) => parts[c]).map((c) => `${CATEGORIES[c]} ${formatSize(parts[c])}`);
    const bar = element("div", { class: "bar", role: "img", "aria-label": told.join(", ") || "nothing" });
    for (const c of STACKED) {
      if (!parts[c]) continue;
      const part = element("span", { class: CATEGORIES[c], title: `${CATEGORIES[c]} ${formatSize(parts[c])}` });
      part.style.width = 100 * parts[c] / most + "%";
      bar.append(part);
    }
    return bar;
  }

  // A button that follows the row's line or module in the timeline. Of all of a table one can be reached by Tab, the others
  // from there by arrow keys.
  named(row) {
    const module = this.group === "module", line = module ? null : this.page.lines.get(row.name);
    const name = row.name || `(${UNKNOWN[this.group]})`;
    const where = line?.file ? `${line.file}:${line.line} in ${line.function}${line.text && "\n"}${line.text}` : name;
    const follow = element("button", { type: "button", class: "row code", title: where, tabindex: -1, "data-row": row.name,
      "aria-pressed": String(this.page.follows(this.group, row.name)),
      onclick: () => { this.at = row.name; this.page.follow(this.group, row.name); } },
    element("span", {}, name), line?.text ? element("span", { class: "source" }, line.text) : null);
    return element("th", { scope: "row", class: "name" }, follow);
  }

  rowButtons() { return Array.from(this.place.querySelectorAll("button.row")); }

  // The row that Tab reaches: the last one that was, else the first.
  reachable(focus) {
    const buttons = this.rowButtons(), at = buttons.find((button) => button.dataset.row === this.at) ?? buttons[0];
    for (const button of buttons) button.tabIndex = button === at ? 0 : -1;
    if (focus) at?.focus();
  }

  key(event) {
    const buttons = this.rowButtons(), now = buttons.indexOf(document.activeElement);
    if (now < 0 || event.ctrlKey || event.altKey || event.metaKey) return;
    const to = { ArrowDown: now + 1, ArrowUp: now - 1, Home: 0, End: buttons.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.at = buttons[Math.min(Math.max(to, 0), buttons.length - 1)].dataset.row;
    this.reachable(true);
  }

  draw() {
    const { recordings, names } = this.page, rows = this.sorted(this.rows());
    const wholes = recordings.map((recording) => recording.total[this.page.moment(recording)]);
    const most = Math.max(1, ...rows.flatMap((row) => row.each.map((one) => one.bytes)));
    const shown = this.all ? rows : rows.slice(0, SHOWN), focused = this.rowButtons().includes(document.activeElement);
    const head = element("tr", {}, this.header("name", this.group === "line" ? "Line" : "Module"),
      ...recordings.map((_, i) => this.header(i, this.several ? names[i] : "Bytes", true)),
      this.two ? this.header("difference", "Difference", true)
        : element("th", { scope: "col", class: "number share" }, "Share"),
      this.header("blocks", "Blocks", true), element("th", { scope: "col", class: "bars" }, "By category"));
    const body = shown.map((row) => element("tr", { "data-name": row.name },
      this.named(row),
      ...row.each.map((one) => element("td", { class: "number", "data-bytes": one.bytes }, formatSize(one.bytes))),
      this.two
        ? element("td", { class: "number " + (row.difference > 0 ? "more" : row.difference < 0 ? "less" : "quiet") },
          row.difference ? (row.difference > 0 ? "+" : "") + formatSize(row.difference) : "same")
        : element("td", { class: "number share" }, formatShare(row.each[0].bytes, wholes[0])),
      element("td", { class: "number quiet" }, formatCount(row.blocks)),
      element("td", { class: "bars" }, ...row.each.map((one) => this.bar(one.parts, most)))));
    const sums = element("tr", { class: "sum" },
      element("th", { scope: "row", class: "name" }, `All ${formatCount(rows.length)}`),
      ...wholes.map((bytes) => element("td", { class: "number", "data-bytes": bytes }, formatSize(bytes))),
      this.two ? element("td", { class: "number" }, formatSize(wholes[1] - wholes[0]))
        : element("td", { class: "number share" }, wholes[0] ? "100\u00a0%" : ""),
      element("td", { class: "number quiet" }, formatCount(rows.reduce((sum, row) => sum + row.blocks, 0))),
      element("td", { class: "bars" }));
    const more = rows.length > SHOWN ? element("button", { type: "button", class: "more",
      onclick: () => { this.all = !this.all; this.draw(); this.place.querySelector("button.more").focus(); } },
    this.all ? `Show the largest ${SHOWN}` : `Show all ${formatCount(rows.length)}`) : null;
    const table = element("table", { class: "contents", "aria-label": `Live memory by ${this.group}`,
      onkeydown: (event) => this.key(event) },
    element("thead", {}, head), element("tbody", {}, ...body), element("tfoot", {}, sums));
    this.place.replaceChildren(table, ...(more ? [more] : []));
    this.reachable(focused);
  }
}
