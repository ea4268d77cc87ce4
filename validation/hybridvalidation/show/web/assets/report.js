// Theme, menu, tables that can be searched, filtered and sorted, and pictures. No figure is computed here.
"use strict";

const root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)"), paper = matchMedia("print");
const figures = [];

function theme() {
  return root.dataset.theme || (dark.matches ? "dark" : "light");
}

function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function setUpTop() {
  const button = document.getElementById("theme");
  const tell = () => { button.textContent = theme() === "dark" ? "Light theme" : "Dark theme"; };
  const changed = () => { tell(); figures.forEach(draw); };
  button.addEventListener("click", () => {
    root.dataset.theme = theme() === "dark" ? "light" : "dark";
    try { localStorage.setItem("hybridtrain-theme", root.dataset.theme); } catch (_error) { /* not remembered */ }
    changed();
  });
  dark.addEventListener("change", changed);
  paper.addEventListener("change", changed);
  tell();
  const menu = document.getElementById("menu");
  menu.addEventListener("click", () => {
    const isOpen = document.getElementById("pages").classList.toggle("open");
    menu.setAttribute("aria-expanded", String(isOpen));
  });
}

// ---- tables

const FEW_ROWS = 24, MOST_CHOICES = 8, LONGEST_CHOICE = 28;

function words(row, column) {
  return row.cells[column].textContent.trim();
}

function setUpTable(table, number) {
  const rows = [...table.tBodies[0].rows];
  const heads = [...table.tHead.rows[0].cells];
  if (rows.length > 2) heads.forEach((head, column) => makeSortable(table, heads, head, column));
  if (rows.length < FEW_ROWS) return;
  const tests = [];
  const told = make("output", {});
  const apply = () => {
    let shown = 0;
    for (const row of rows) {
      row.hidden = !tests.every((test) => test(row));
      shown += !row.hidden;
    }
    told.textContent = `${shown} of ${rows.length} rows`;
  };
  const bar = make("div", { className: "filter" });
  const search = make("input", { type: "search", id: `search-${number}` });
  search.addEventListener("input", apply);
  tests.push((row) => row.textContent.toLowerCase().includes(search.value.trim().toLowerCase()));
  bar.append(make("label", { htmlFor: search.id }, "Search", search));
  heads.forEach((head, column) => {
    const name = head.textContent.trim();
    const counts = new Map();
    for (const row of rows) counts.set(words(row, column), (counts.get(words(row, column)) || 0) + 1);
    const isShort = [...counts.keys()].every((value) => value.length <= LONGEST_CHOICE);
    if (name === "verdict") bar.append(verdictButtons(rows, column, counts, tests, apply));
    else if (column && counts.size > 1 && counts.size <= MOST_CHOICES && isShort && ![...counts.keys()].some(isFigure)) {
      const select = make("select", {}, make("option", { value: "" }, "all"), ...[...counts.keys()].map(
        (value) => make("option", { value }, value)));
      select.addEventListener("change", apply);
      tests.push((row) => !select.value || words(row, column) === select.value);
      bar.append(make("label", {}, name, select));
    }
  });
  bar.append(told);
  table.parentElement.before(bar);
  apply();
}

function isFigure(text) {
  return /^[+-]?[\d.][\d.,]*( |$)/.test(text);  // and no name like 7b-24gb
}

function verdictButtons(rows, column, counts, tests, apply) {
  const group = make("div", {});
  group.setAttribute("role", "group");
  group.setAttribute("aria-label", "Verdicts shown");
  const off = new Set();
  for (const [verdict, count] of counts) {
    const button = make("button", { type: "button", className: `verdict ${verdict.replace(" ", "-")}` }, `${count} ${verdict}`);
    button.setAttribute("aria-pressed", "true");
    button.addEventListener("click", () => {
      if (off.has(verdict)) off.delete(verdict); else off.add(verdict);
      button.setAttribute("aria-pressed", String(!off.has(verdict)));
      apply();
    });
    group.append(button);
  }
  tests.push((row) => !off.has(words(row, column)));
  return group;
}

function makeSortable(table, heads, head, column) {
  const button = make("button", { type: "button" }, ...head.childNodes);
  head.replaceChildren(button);
  button.addEventListener("click", () => {
    const isDown = head.getAttribute("aria-sort") === "ascending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", isDown ? "descending" : "ascending");
    const rows = [...table.tBodies[0].rows];
    const number = (row) => (isFigure(words(row, column)) ? parseFloat(words(row, column).replaceAll(",", "")) : NaN);
    rows.sort((one, other) => {
      const first = number(one), second = number(other);
      const order = Number.isNaN(first) || Number.isNaN(second)
        ? Number.isNaN(first) - Number.isNaN(second) || words(one, column).localeCompare(words(other, column))
        : first - second;
      return isDown ? -order : order;
    });
    table.tBodies[0].append(...rows);
  });
}

// ---- pictures

const PAPER_WIDTH = 660;  // pixels between the margins of A4
const NARROW = 600, LETTERS = 22;
const SYMBOLS = {
  circle: "\u25cf", square: "\u25a0", "triangle-up": "\u25b2", diamond: "\u25c6", "triangle-down": "\u25bc", cross: "\u271a", star: "\u2605",
};

function themed(value, style) {
  if (typeof value === "string" && value.startsWith("$")) {
    const [, name, opacity] = value.match(/^\$([a-z]+)(.*)$/);
    return style.getPropertyValue(`--${name}`).trim() + opacity;
  }
  if (Array.isArray(value)) return value.map((each) => themed(each, style));
  if (value && typeof value === "object")
    return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, themed(each, style)]));
  return value;
}

function merged(...layouts) {
  const found = {};
  for (const layout of layouts)
    for (const [key, value] of Object.entries(layout || {})) {
      const isTable = value && typeof value === "object" && !Array.isArray(value);
      found[key] = isTable ? merged(found[key], value) : value;
    }
  return found;
}

function folded(text, letters, most) {  // in so many lines at most
  const lines = [""];
  for (const word of text.split(" ")) {
    const longer = `${lines.at(-1)} ${word}`.trim();
    if (longer.length > letters && lines.at(-1)) lines.push(word); else lines[lines.length - 1] = longer;
  }
  return lines.slice(0, most).join("<br>") + (lines.length > most ? " ..." : "");
}

function narrowed({ xaxis, yaxis }) {  // long words would leave a phone no room for bars
  const names = yaxis.categoryarray;
  return {
    xaxis: xaxis.title ? { title: { text: folded(xaxis.title.text, LETTERS, 3) } } : {},
    yaxis: names ? { tickmode: "array", tickvals: names, ticktext: names.map((name) => folded(name, LETTERS, 2)) } : {},
  };
}

function axis() {
  return { gridcolor: "$line", linecolor: "$edge", zerolinecolor: "$edge", tickcolor: "$edge", automargin: true };
}

function drawAll() {  // before the load event is over, so that a capture of the whole page has every picture
  if (figures.length) document.head.append(make("script", { src: "plotly.min.js", onload: () => figures.forEach(draw) }));
}

function draw(figure) {
  if (!window.Plotly) return;
  const style = getComputedStyle(root);
  const isTouch = matchMedia("(pointer: coarse)").matches;  // where a finger that moves scrolls the page
  const layout = merged(
    {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
      font: { color: "$text", family: "system-ui, sans-serif", size: 12 }, margin: { l: 8, r: 12, t: 28, b: 8 },
      xaxis: axis(), yaxis: { ...axis(), fixedrange: true }, dragmode: isTouch ? false : "zoom",
      hoverlabel: { bgcolor: "$panel", bordercolor: "$edge", font: { color: "$text" } },
    },
    figure.spec[figure.view].layout,
    !paper.matches && figure.plot.clientWidth < NARROW ? narrowed(figure.spec[figure.view].layout) : {},
    figure.range ? { xaxis: { range: figure.range, autorange: false } } : {},
    paper.matches ? { width: PAPER_WIDTH, autosize: false } : { autosize: true },
  );
  const traces = figure.spec[figure.view].data.map((trace) => ({ ...trace, visible: !figure.hidden.has(trace.name) }));
  const config = { responsive: true, displayModeBar: false, doubleClick: "reset" };
  const isFirst = !figure.drawn;
  figure.drawn = true;
  Plotly.react(figure.plot, themed(traces, style), themed(layout, style), config);
  figure.plot.dataset.drawn = figure.view;
  figure.plot.classList.remove("waits");
  if (isFirst) figure.plot.on("plotly_relayout", (change) => noteRange(figure, change));
}

function noteRange(figure, change) {
  const keys = Object.keys(change);
  if (keys.some((key) => key === "xaxis.autorange")) figure.range = null;
  else if (keys.some((key) => key.startsWith("xaxis.range"))) figure.range = [...figure.plot._fullLayout.xaxis.range];
}

function zoom(figure, button) {
  if (!figure.drawn) return;
  if (button.dataset.zoom === "reset") {
    figure.range = null;
    draw(figure);
    return;
  }
  const [low, high] = figure.plot._fullLayout.xaxis.range.map(Number);
  const width = high - low;
  if (button.dataset.move) {
    const by = width * Number(button.dataset.move);
    Plotly.relayout(figure.plot, { "xaxis.range": [low + by, high + by] });
    return;
  }
  const wide = width * Number(button.dataset.zoom);
  const isBars = figure.spec[figure.view].data.some((trace) => trace.orientation === "h");
  const start = isBars ? low : low + (width - wide) / 2;  // bars begin where they begin
  Plotly.relayout(figure.plot, { "xaxis.range": [start, start + wide] });
}

function legend(figure) {
  const buttons = figure.spec[figure.view].data.filter((trace) => trace.showlegend !== false).map((trace) => {
    const color = trace.fillcolor || (trace.marker && trace.marker.color) || (trace.line && trace.line.color);
    const swatch = make("i", { ariaHidden: "true" });
    const symbol = trace.marker && SYMBOLS[trace.marker.symbol];
    if (symbol) swatch.append(symbol);
    swatch.style[symbol ? "color" : "background"] = color.replace(/^\$(.*)/, "var(--$1)");
    swatch.className = symbol ? "symbol" : "";
    const button = make("button", { type: "button" }, swatch, trace.name);
    button.setAttribute("aria-pressed", String(!figure.hidden.has(trace.name)));
    button.addEventListener("click", () => {
      if (figure.hidden.has(trace.name)) figure.hidden.delete(trace.name); else figure.hidden.add(trace.name);
      button.setAttribute("aria-pressed", String(!figure.hidden.has(trace.name)));
      draw(figure);
    });
    return button;
  });
  figure.legend.replaceChildren(...(buttons.length > 1 ? buttons : []));
}

function setUpFigure(element) {
  const spec = JSON.parse(element.querySelector("script").textContent);
  const select = element.querySelector("select.view");
  if (select) select.value = Object.keys(spec)[0];  // a browser that goes back remembers another
  const figure = {
    spec, view: Object.keys(spec)[0], hidden: new Set(), range: null, drawn: false,
    plot: element.querySelector(".plot"), legend: element.querySelector(".legend"),
  };
  figure.plot.style.minHeight = `${spec[figure.view].layout.height}px`;
  figure.plot.classList.add("waits");
  figures.push(figure);
  legend(figure);
  if (select) select.addEventListener("change", () => {
    figure.view = select.value;
    figure.range = null;
    legend(figure);
    draw(figure);
  });
  element.querySelectorAll(".zoom button").forEach((button) => button.addEventListener("click", () => zoom(figure, button)));
}

setUpTop();
document.querySelectorAll("main .scroll > table").forEach(setUpTable);
document.querySelectorAll("figure.chart").forEach(setUpFigure);
drawAll();
