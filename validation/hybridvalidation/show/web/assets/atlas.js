// The atlas: one model on every card, one card under every model, or a map of all. Cells come from atlas-data.js; computed
// here are only differences to what a card or host has, and hours.
"use strict";

(() => {
  const atlas = window.ATLAS;
  const root = document.getElementById("atlas");
  const form = root.querySelector("form"), answer = root.querySelector(".answer");
  const fields = form.elements, told = fields.told;
  const GIB = 1024, SECONDS = 3600;
  const KINDS = { y: "fits", b: "barely", n: "lacks" };
  let order = { column: "", down: false };

  function make(tag, properties, ...children) {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  }

  function cellOf(model, card, level, asked) {
    const seq = Math.min(asked, Math.max(...model.lengths));
    const places = [model.cards.indexOf(card), model.lengths.indexOf(seq), model.levels.indexOf(level)];
    if (places.includes(-1)) return null;
    const place = (first) => (first * model.lengths.length + places[1]) * model.levels.length + places[2];
    const at = place(places[0]);
    const found = {
      model, card: atlas.cards[card], level: atlas.levels[level], seq, kind: KINDS[model.verdicts[at]],
      device: model.device_mib[at], host: model.host_mib[at], disk: model.disk_mib[at], speed: model.tokens_per_s[at],
      offload: model.offloads[model.offload[at]], size: model.micro_batch_size[at],
      resident: model.resident_mib[place(model.kind[places[0]])],
      longest: model.longest[places[0] * model.levels.length + places[2]],
    };
    found.hours = found.speed ? atlas.tokens / found.speed / SECONDS : null;
    found.lacks = [[found.device - found.card.room, "card"], [found.host - atlas.hostRoom, "host"]].filter(([size]) => size > 0);
    found.command = found.level.command.replace("{model}", model.name).replace("{card}", found.card.name).replace("{seq}", seq);
    found.isPlanned = model.planned.includes(seq);
    if (!found.isPlanned) found.command += atlas.quick;
    found.mark = found.kind === "fits" && found.isPlanned ? "" : "~";
    return found;
  }

  const gib = (mib) => (mib / GIB).toFixed(2);
  const figure = (value) => value.toLocaleString("en-US", { maximumFractionDigits: value < 100 ? 1 : 0 });

  function verdict(cell) {
    if (cell.kind === "fits") return "fits";
    const lacks = cell.lacks.map(([size, where]) => `${gib(size)} GiB of ${where}`).join(" and ");
    if (cell.kind === "barely") return "fits barely";
    return lacks ? `lacks ${lacks}` : "does not fit";
  }

  const COLUMNS = [
    { name: "fits", text: verdict, value: (cell) => (cell.kind === "fits" ? -1 : 0) + cell.lacks.reduce((sum, [size]) => sum + size, 0) },
    { name: "card GiB", text: (cell) => cell.mark + gib(cell.device), value: (cell) => cell.device },
    { name: "host GiB", text: (cell) => (cell.host ? cell.mark + gib(cell.host) : ""), value: (cell) => cell.host },
    { name: "disk GiB", text: (cell) => (cell.disk ? gib(cell.disk) : ""), value: (cell) => cell.disk },
    { name: "tokens/s", text: (cell) => (cell.speed ? figure(cell.speed) : ""), value: (cell) => -cell.speed },
    { name: `h / ${atlas.tokens / 1e6}M tokens`, text: (cell) => (cell.hours ? figure(cell.hours) : ""), value: (cell) => cell.hours ?? Infinity },
    { name: "longest", text: (cell) => (cell.longest ? `~${figure(cell.longest)}` : ""), value: (cell) => -cell.longest },
  ];

  function wanted(text) {
    const words = fields.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    return words.every((word) => text.includes(word));
  }

  const ofModel = (model) => [model.name, model.title, ...model.also].join(" ").toLowerCase();
  const ofCard = (card) => `${card.name} ${card.title}`.toLowerCase();

  function chosen() {
    return {
      view: fields.view.value, level: atlas.levels.findIndex((level) => level.name === fields.level.value),
      seq: Number(fields.seq.value), card: atlas.cards.findIndex((card) => card.name === fields.card.value),
      model: atlas.models.find((model) => model.name === fields.model.value),
    };
  }

  // ---- rows

  function rowsOf(ask) {
    const all = ask.view === "model"
      ? atlas.cards.map((card, at) => ({ title: card.title, words: ofCard(card), cell: cellOf(ask.model, at, ask.level, ask.seq) }))
      : atlas.models.map((model) => ({ title: model.title, words: ofModel(model), cell: cellOf(model, ask.card, ask.level, ask.seq) }));
    const found = all.filter((row) => row.cell && wanted(row.words) && (!fields.fitting.checked || row.cell.kind === "fits"));
    const column = COLUMNS.find((each) => each.name === order.column);
    if (column) found.sort((one, other) => (order.down ? -1 : 1) * (column.value(one.cell) - column.value(other.cell)));
    return found;
  }

  function showRows(ask) {
    const found = rowsOf(ask);
    const subject = ask.view === "model" ? ask.model.title : atlas.cards[ask.card].title;
    const fitting = found.filter((row) => row.cell.kind === "fits").length;
    const seq = ask.view === "model" ? Math.min(ask.seq, Math.max(...ask.model.lengths)) : ask.seq;
    told.textContent = `${subject}, ${atlas.levels[ask.level].title}, ${figure(seq)} tokens: ${fitting} of ${found.length} fit.`;
    const first = ask.view === "model" ? "card" : "model";
    const head = make("tr", {}, ...[first, ...COLUMNS.map((column) => column.name), "command"].map(headOf));
    const body = make("tbody", {}, ...found.flatMap((row) => rowFor(row)));
    const table = make("table", {}, make("caption", {}, told.textContent), make("thead", {}, head), body);
    answer.className = "answer scroll list";
    answer.replaceChildren(...(found.length ? [table] : []));
  }

  function headOf(name) {
    const head = make("th", { scope: "col" });
    if (!COLUMNS.some((column) => column.name === name)) {
      head.append(name);
      return head;
    }
    if (order.column === name) head.setAttribute("aria-sort", order.down ? "descending" : "ascending");
    const button = make("button", { type: "button" }, name);
    button.addEventListener("click", () => {
      order = { column: name, down: order.column === name && !order.down };
      show();
    });
    head.append(button);
    return head;
  }

  function rowFor({ title, cell }) {
    const cells = COLUMNS.map((column, at) => {
      const found = make("td", { className: at ? "number" : cell.kind }, column.text(cell));
      if (at) found.dataset.name = column.name;
      return found;
    });
    const button = make("button", { type: "button" }, "how");
    const how = make("tr", { className: "how", hidden: true });
    button.setAttribute("aria-expanded", "false");
    button.setAttribute("aria-label", `how: ${title}`);
    button.addEventListener("click", () => {
      how.hidden = !how.hidden;
      button.setAttribute("aria-expanded", String(!how.hidden));
      if (!how.hidden) how.replaceChildren(explanation(cell));
    });
    return [make("tr", {}, make("th", { scope: "row" }, title), ...cells, make("td", {}, button)), how];
  }

  function explanation(cell) {
    const copy = make("button", { type: "button" }, "Copy");
    const code = make("code", {}, cell.command);
    copy.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(cell.command);
        copy.textContent = "Copied";
      } catch (_error) {  // a page that is a file may not
        getSelection().selectAllChildren(code);
        copy.textContent = document.execCommand("copy") ? "Copied" : "Press Ctrl-C";
      }
    });
    const parts = [
      `off the card: ${cell.offload}`, `micro-batch: ${cell.size} of ${figure(cell.seq)} tokens`,
      cell.kind === "fits" ? "the fastest option found" : "the smallest option found",
      `with nothing off the card: from ${gib(cell.resident)} GiB`, ...(cell.card.note ? [cell.card.note] : []),
    ];
    return make("td", { colSpan: COLUMNS.length + 2 }, make("p", {}, code, " ", copy), make("p", {}, make("small", {}, parts.join("; "))));
  }

  // ---- the map

  function showMap(ask) {
    const cards = atlas.cards.map((card, at) => ({ card, at }));
    const hits = atlas.models.filter((model) => wanted(ofModel(model)));
    const models = hits.length ? hits : atlas.models;
    const columns = hits.length ? cards : cards.filter(({ card }) => wanted(ofCard(card)));
    let fitting = 0, count = 0;
    const rows = models.map((model) => make("tr", {}, make("th", { scope: "row" }, model.title), ...columns.map(({ card, at }) => {
      const cell = cellOf(model, at, ask.level, ask.seq);
      if (!cell) return make("td", {});
      count += 1;
      fitting += cell.kind === "fits";
      const signs = { fits: cell.host || cell.disk ? "\u2191" : "\u2713", barely: "~", lacks: "\u00d7" };
      const words = `${model.title} on ${card.title}: ${verdict(cell)}${cell.speed ? `, ${figure(cell.speed)} tokens/s` : ""}`;
      const button = make("button", { type: "button", className: cell.kind, title: words }, signs[cell.kind]);
      button.setAttribute("aria-label", words);
      button.addEventListener("click", () => {
        fields.view.value = "model";
        fields.model.value = model.name;
        fields.search.value = card.name;
        changed();
      });
      return make("td", {}, button);
    })));
    told.textContent = `${atlas.levels[ask.level].title}, ${figure(ask.seq)} tokens: ${fitting} of ${count} fit. ` +
      "\u2713 all on the card, \u2191 fits with the host's memory or disk, ~ barely, \u00d7 not.";
    const head = make("tr", {}, make("th", { scope: "col" }, "model"), ...columns.map(({ card }) => make("th", { scope: "col" }, make("span", {}, card.title))));
    answer.className = "answer scroll map";
    answer.replaceChildren(make("table", {}, make("caption", {}, told.textContent), make("thead", {}, head), make("tbody", {}, ...rows)));
  }

  // ---- what is asked stands in the address, so that an answer can be sent

  function show() {
    const ask = chosen();
    root.querySelector('[data-for="model"]').hidden = ask.view !== "model";
    root.querySelector('[data-for="card"]').hidden = ask.view !== "card";
    if (ask.view === "map") showMap(ask); else showRows(ask);
  }

  function changed() {
    show();
    const parts = ["view", "model", "card", "level", "seq"].map((name) => `${name}=${encodeURIComponent(fields[name].value)}`);
    history.replaceState(null, "", `#atlas&${parts.join("&")}`);
  }

  function recall() {
    for (const [name, value] of new URLSearchParams(location.hash.replace(/^#atlas&/, ""))) {
      if (!["view", "model", "card", "level", "seq"].includes(name)) continue;
      const before = fields[name].value;
      fields[name].value = value;
      if (fields[name].value !== value) fields[name].value = before;  // an old address may name what is gone
    }
  }

  fields.level.value = "qlora";
  fields.seq.value = "2048";
  if (atlas.models.some((model) => model.name === "llama-3.1-8b")) fields.model.value = "llama-3.1-8b";
  if (location.hash.startsWith("#atlas&")) recall();
  form.hidden = answer.hidden = false;
  answer.tabIndex = 0;
  answer.setAttribute("role", "region");
  answer.setAttribute("aria-label", "What fits");
  form.addEventListener("input", changed);
  form.addEventListener("submit", (event) => event.preventDefault());
  show();
})();
