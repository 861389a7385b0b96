// Of a page that is drawn: lists of complaints, by what was checked.
(() => {
  const shown = (element) => element.checkVisibility({ visibilityProperty: true, opacityProperty: true });
  const named = (element) => `<${element.tagName.toLowerCase()} id=${element.id} class=${element.getAttribute("class")}>`
    + (element.textContent ?? "").trim().slice(0, 40);
  const all = (selector) => Array.from(document.querySelectorAll(selector)).filter(shown);

  // ---- colours: what a text has behind it, through all that is transparent
  const context = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], under) => [r, g, b].map((c, i) => c * a + under[i] * (1 - a));
  const behind = (element) => {
    const layers = [];
    for (let one = element; one; one = one.parentElement) {
      const colour = rgba(getComputedStyle(one).backgroundColor);
      layers.push(colour);
      if (colour[3] === 1) break;
    }
    return layers.reverse().reduce((under, layer) => over(layer, under), [255, 255, 255]);
  };
  const luminance = (rgb) => rgb.map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (one, two) => {
    const [low, high] = [luminance(one), luminance(two)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };

  const texts = () => {
    const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node; (node = walker.nextNode());) {
      const parent = node.parentElement;
      if (!node.data.trim() || parent.closest("script, style, noscript, [hidden]") || !shown(parent)) continue;
      const range = document.createRange();
      range.selectNodeContents(node);
      const boxes = Array.from(range.getClientRects()).filter((box) => box.width > 1 && box.height > 1);
      if (boxes.length) found.push({ node, parent, boxes });
    }
    return found;
  };

  const low = texts().flatMap(({ node, parent }) => {
    const style = getComputedStyle(parent), svg = parent instanceof SVGElement;
    const ground = behind(svg ? parent.closest("svg").parentElement : parent);
    const ratio = contrast(over(rgba(svg ? style.fill : style.color), ground), ground);
    return ratio >= 4.5 ? [] : [`contrast ${ratio.toFixed(2)}: ${named(parent)} ${node.data.trim().slice(0, 40)}`];
  });

  const headings = all("h1, h2, h3, h4, h5, h6").map((element) => [Number(element.tagName[1]), element]);
  const jumps = headings.flatMap(([level, element], i) =>
    (level > (i ? headings[i - 1][0] : 0) + 1 || (level === 1) !== (i === 0) ? [`level of heading: ${named(element)}`] : []));

  const tables = all("table").flatMap((table) => {
    const wrong = [];
    if (table.closest("[aria-hidden=true]")) return wrong;
    for (const cell of table.querySelectorAll("thead th")) if (cell.scope !== "col") wrong.push("head without scope: " + named(cell));
    for (const cell of table.querySelectorAll("th")) if (!cell.textContent.trim()) wrong.push("empty head in " + named(table));
    for (const cell of table.querySelectorAll("thead td")) wrong.push("a head that is no th: " + named(cell));
    if (!table.querySelector("thead th")) wrong.push("no head: " + named(table));
    for (const row of table.querySelectorAll("tbody tr")) {
      if (row.cells[0].tagName !== "TH" || row.cells[0].scope !== "row") wrong.push("row without head: " + named(row));
    }
    return wrong;
  });

  const pictures = all("svg, canvas, .chart, .whole, .bar, .curves").flatMap((element) => {
    const owner = element.closest("[role=img], [role=slider]");
    if (element.closest(".curves") && !element.matches("svg")) return [];
    const label = owner?.getAttribute("aria-label") ?? "";
    return /\d/.test(label) || label === "nothing" ? [] : [`a picture without a role and a label with a figure: ${named(element)} ${label}`];
  });

  const cut = all("body *").filter((element) => {
    const style = getComputedStyle(element);
    const hides = style.overflowX !== "visible" && !(element instanceof SVGElement) && element.clientWidth > 1;
    return hides && element.scrollWidth > element.clientWidth + 1 && element.textContent.trim()
      && !(style.textOverflow === "ellipsis" && (element.title || element.closest("[title]")));
  }).map((element) => "cut: " + named(element));
  const outside = all("svg text").filter((text) => {
    const box = text.getBoundingClientRect(), svg = text.closest("svg").getBoundingClientRect();
    return box.left < svg.left - 1 || box.right > svg.right + 1 || box.top < svg.top - 1 || box.bottom > svg.bottom + 1;
  }).map((text) => "outside of its chart: " + named(text));

  // Of a box that is hidden in part only that part counts.
  const visible = ({ parent, boxes }) => boxes.map((box) => {
    let { left, right, top, bottom } = box;
    for (let one = parent; one; one = one.parentElement) {
      if (getComputedStyle(one).overflowX === "visible") continue;
      const edge = one.getBoundingClientRect();
      [left, right, top, bottom] = [Math.max(left, edge.left), Math.min(right, edge.right), Math.max(top, edge.top), Math.min(bottom, edge.bottom)];
    }
    return { left, right, top, bottom };
  });
  const placed = texts().flatMap((text) => visible(text).map((box) => ({ ...text, box })));
  const overlaps = [];
  for (let i = 0; i < placed.length; i++) {
    for (let j = i + 1; j < placed.length; j++) {
      const [a, b] = [placed[i].box, placed[j].box];
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left), high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (placed[i].node !== placed[j].node && wide > 1 && high > 0.3 * Math.min(a.bottom - a.top, b.bottom - b.top)) {
        overlaps.push(`on each other: ${placed[i].node.data.trim().slice(0, 30)} | ${placed[j].node.data.trim().slice(0, 30)}`);
      }
    }
  }
  const wide = document.documentElement.scrollWidth > innerWidth ? [`scrolls sideways: ${document.documentElement.scrollWidth} px`] : [];
  return { low, jumps, tables, pictures, cut, outside, overlaps, wide };
})()
