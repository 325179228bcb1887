"use strict";
// Draws timelines, and adds filters, magnification and a cursor. Pages can be read without it.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  // How to draw each kind of collective, from start to end, on an axis at height 20.
  const STROKES = [
    ["gather", /^(all_)?gather$/, "20V3"],
    ["scatter", /^(reduce_)?scatter$/, "20V37"],
    ["reduce", /^(all_)?reduce$/, "6V34"],
    ["other", /^(?!((all_)?gather|(reduce_)?scatter|(all_)?reduce)$)/, "15V25"],
  ];

  for (const tools of document.querySelectorAll("[data-script]")) tools.hidden = false;
  for (const list of document.querySelectorAll(".listing")) list.open = false;

  for (const tools of document.querySelectorAll("[data-filters]")) {
    const rows = [...document.querySelectorAll(`#${tools.dataset.filters} tbody tr`)];
    const text = tools.querySelector("input");
    const choices = [...tools.querySelectorAll("select")];
    tools.addEventListener("input", () => {
      const wanted = text.value.toLowerCase();
      for (const row of rows) {
        const isChosen = choices.every(({ id, value }) => !value || row.dataset[id] === value);
        row.hidden = !(isChosen && row.textContent.toLowerCase().includes(wanted));
      }
      const matches = rows.filter((row) => !row.hidden).length;
      tools.querySelector("output").value = matches < rows.length ? `${matches} of ${rows.length}` : "";
    });
  }

  for (const button of document.querySelectorAll("[data-copies]")) {
    button.addEventListener("click", () => {
      // Select the command as well, so that the user can copy it if the browser refuses.
      getSelection().selectAllChildren(button.previousElementSibling);
      button.textContent = document.execCommand("copy") ? "Copied" : "Press Ctrl+C";
    });
  }

  for (const box of document.querySelectorAll("[data-parameters]")) {
    const table = box.closest("section").querySelector(".shards");
    box.addEventListener("change", () => table.classList.toggle("brief", !box.checked));
  }

  for (const table of document.querySelectorAll(".shards")) {
    const cells = [...table.querySelectorAll("[data-gathered]")];
    const largest = Math.max(...cells.map((cell) => cell.dataset.gathered));
    for (const cell of cells) {
      const bar = add(cell, "meter");
      for (const part of ["gathered", "kept"]) {
        place(add(bar, part), 0, Math.min(cell.dataset[part], cell.dataset.gathered), largest);
      }
    }
  }

  const data = JSON.parse(document.getElementById("data")?.textContent ?? '{"sections":{}}');
  const allEntries = data.entries?.map(([operation, module, phase, axis, nbytes, overlap = ""]) => ({
    operation, module, phase, axis, nbytes, overlap,
  }));
  for (const [id, section] of Object.entries(data.sections)) {
    if (section.timelines.length) begin(document.getElementById(`${id}-time`), section);
  }

  function begin(root, section) {
    const figures = [...root.querySelectorAll("figure")];
    const hidden = { axis: new Set(), phase: new Set() };
    const longest = Math.max(...section.timelines.map((timeline) => timeline.order.length));
    const walks = section.timelines.map((timeline, at) => {
      const entries = timeline.order.map((index) => allEntries[index]);
      return walk(figures[at], entries, draw(figures[at], entries, timeline, section), hidden);
    });

    const apply = () => {
      for (const element of root.querySelectorAll("[data-axis], [data-phase]")) {
        const { axis, phase } = element.dataset;
        element.toggleAttribute("data-off", hidden.axis.has(axis) || hidden.phase.has(phase));
      }
      for (const show of walks) show();
    };
    for (const box of root.querySelectorAll("[data-by]")) {
      box.addEventListener("change", () => {
        hidden[box.dataset.by][box.checked ? "delete" : "add"](box.value);
        apply();
      });
    }

    const chosen = root.querySelector("[data-choose]");
    const choose = () => {
      for (const figure of figures) figure.hidden = Boolean(chosen.value) && figure.id !== chosen.value;
    };
    if (chosen) {
      chosen.addEventListener("change", choose);
      choose();
    }

    const zoom = root.querySelector("[data-zoom]");
    zoom.addEventListener("input", () => {
      const times = Math.max(4, longest / 40) ** (zoom.value / 100);
      zoom.setAttribute("aria-valuetext", `${times.toFixed(1)} times`);
      for (const track of root.querySelectorAll(".track")) {
        const middle = (track.parentElement.scrollLeft + track.parentElement.clientWidth / 2) / track.clientWidth;
        track.style.width = `${100 * times}%`;
        track.parentElement.scrollLeft = middle * track.clientWidth - track.parentElement.clientWidth / 2;
      }
    });
    apply();
  }

  // Draws a timeline; returns the gathered bytes after each entry.
  function draw(figure, entries, timeline, section) {
    const count = entries.length;
    const { units, gatheredBytes, lanes } = gathered(entries);
    const top = Math.max(...gatheredBytes);
    const track = figure.querySelector(".track");
    const drawing = add(track, count > 480 ? "dense" : "");
    drawing.ariaHidden = "true";

    const spans = add(drawing, "spans");
    for (let at = 0, end; at < count; at = end) {
      const { phase } = entries[at];
      for (end = at; end < count && entries[end].phase === phase; ) end += 1;
      const span = add(spans, "span", end - at > 0.03 * count ? phase : "");
      span.dataset.phase = phase;
      place(span, at, end - at, count);
    }

    if (top) {
      const height = (nbytes) => 100 - (80 * nbytes) / top;
      const at = gatheredBytes.indexOf(top);
      add(drawing, "cap", "gathered parameters on one rank");
      const memory = add(drawing, "memory");
      const steps = gatheredBytes.map((nbytes, index) => `H${index}V${height(nbytes)}`).join("");
      path(shape(memory, count, 100), "area", `M0 100${steps}H${count}V100Z`);
      const half = 2 ** Math.floor(Math.log2(top / 2));
      for (const nbytes of [half, 2 * half].filter((line) => line >= 1 && line <= 0.92 * top)) {
        add(memory, "grid", bytes(nbytes)).style.top = `${height(nbytes)}%`;
      }
      const peak = add(memory, `peak${at > count / 2 ? " left" : ""}`, `peak ${bytes(top)}`);
      place(peak, at + 0.5, 0, count);
      peak.style.top = `${height(top)}%`;

      add(drawing, "cap", "units, from unshard to reshard");
      const rows = add(drawing, "units");
      const lane = Math.max(2, Math.min(22, Math.floor(264 / lanes)));
      rows.style.height = `${lanes * lane}px`;
      for (const unit of units) {
        const differs = section.differing.includes(unit.module) ? "≠ " : "";
        // Units differ in the ends of their names.
        const end = nameOf(unit).replace(/^.*?((?:[^.]+\.)?\d+|[^.]*)$/, "$1");
        const bar = add(rows, `bar ${unit.phase}`);
        if (lane === 22) {
          // A name that does not fit wraps to a hidden line; the sign stays visible.
          add(bar, "sign", differs);
          add(bar, "name", end);
        }
        bar.dataset.phase = unit.phase;
        bar.title = `${differs}${nameOf(unit)}, ${bytes(unit.nbytes)}: events ${unit.start + 1} to ${unit.end}`;
        place(bar, unit.start, Math.max(unit.end - unit.start, 1), count);
        bar.style.top = `${unit.lane * lane}px`;
        bar.style.height = `${lane - (lane > 6 ? 3 : 0)}px`;
      }

      let note = ` at event ${at + 1} of ${count}, ${entries[at].operation} of ${nameOf(entries[at])} in ${entries[at].phase}`;
      if (timeline.peak !== top) {
        const cut = timeline.left_out && timeline.peak > top;
        const why = cut ? "occurs in the omitted events" : "also counts parameters that were gathered before the recording, or that are still gathered after a partial reshard";
        note = `; the highest value in the chart is ${bytes(top)}${note}: the peak ${why}`;
      }
      figure.querySelector("[data-peak]").textContent = note;
    }

    const ordered = entries.map((entry, at) => ({ ...entry, at }));
    for (const axis of [...new Set(entries.map((entry) => entry.axis))].filter(Boolean).sort()) {
      const sent = ordered.filter((entry) => entry.axis === axis);
      const exposed = sent.filter((entry) => entry.overlap === "exposed");
      const sum = (calls) => calls.reduce((total, entry) => total + entry.nbytes, 0);
      const amount = (calls) => (sum(calls) ? `, ${bytes(sum(calls))}` : "");
      const part = exposed.length ? `; ${exposed.length} exposed${amount(exposed)}` : "";
      const row = addRow(drawing, axis, ` ${sent.length} collectives${amount(sent)}${part}`, sent, count);
      row.dataset.axis = axis;
      const strokes = row.querySelector("svg");
      for (const phase of new Set(sent.map((entry) => entry.phase))) {
        const ofPhase = sent.filter((entry) => entry.phase === phase);
        for (const [name, kinds, line] of STROKES) {
          const calls = ofPhase.filter((entry) => kinds.test(entry.operation));
          for (const [mark, isExposed] of [["", false], [" exposed", true]]) {
            const drawn = calls.filter((entry) => (entry.overlap === "exposed") === isExposed);
            marks(strokes, `stroke ${name}${mark}`, drawn, phase, line);
          }
        }
        marks(strokes, "dot", ofPhase.filter((entry) => entry.overlap === "exposed"), phase, "20h0");
      }
    }

    const waits = ordered.filter((entry) => entry.operation.startsWith("host_wait "));
    if (waits.length) {
      const times = waits.length === 1 ? "once" : `${waits.length} times`;
      const row = addRow(drawing, "host", ` waits for the GPU ${times}`, waits, count);
      for (const phase of new Set(waits.map((entry) => entry.phase))) {
        marks(row.querySelector("svg"), "stroke wait", waits.filter((entry) => entry.phase === phase), phase, "4V36");
      }
    }
    add(track, "cursor");
    return gatheredBytes;
  }

  // Adds a row of strokes, whose title describes the event nearest to the pointer.
  function addRow(drawing, name, text, events, count) {
    const row = add(drawing, "axis");
    add(row, "cap", text).prepend(Object.assign(document.createElement("b"), { textContent: name }));
    path(shape(row, 2 * count, 40), "base", `M0 20H${2 * count}`);
    row.addEventListener("mousemove", ({ clientX }) => {
      const box = row.getBoundingClientRect();
      const distance = ({ at }) => Math.abs(at + 0.5 - ((clientX - box.left) / box.width) * count);
      const nearest = events.reduce((best, event) => (distance(event) < distance(best) ? event : best));
      row.title = `${nearest.at + 1} of ${count}: ${describe(nearest)}`;
    });
    return row;
  }

  function marks(parent, name, events, phase, line) {
    if (!events.length) return;
    path(parent, name, events.map(({ at }) => `M${2 * at + 1} ${line}`).join("")).dataset.phase = phase;
  }

  function describe(entry) {
    const call = `${entry.operation}${entry.axis && `[${entry.axis}]`} of ${nameOf(entry)}, ${entry.phase}`;
    return `${call}${entry.nbytes ? `, ${bytes(entry.nbytes)}` : ""}${entry.overlap && `, ${entry.overlap}`}`;
  }

  // Computes when each unit is gathered, its lane, and the gathered bytes after each entry.
  function gathered(entries) {
    const count = entries.length;
    const open = new Map();
    const unitsSoFar = new Set();
    const units = [];
    entries.forEach((entry, at) => {
      if (entry.operation === "unshard") {
        if (!open.has(entry.module)) open.set(entry.module, { ...entry, start: at, end: count });
      } else if (entry.operation === "reshard") {
        let unit = open.get(entry.module);
        open.delete(entry.module);
        // The unit was gathered before the recording began.
        if (!unit && !unitsSoFar.has(entry.module)) unit = { ...entry, phase: "outside", start: 0 };
        if (unit) units.push(Object.assign(unit, { end: at }));
      } else return;
      unitsSoFar.add(entry.module);
    });
    units.push(...open.values());
    units.sort((a, b) => a.start - b.start || b.end - a.end);
    const gatheredBytes = new Array(count).fill(0);
    const free = [];
    for (const unit of units) {
      gatheredBytes[unit.start] += unit.nbytes;
      if (unit.end < count) gatheredBytes[unit.end] -= unit.nbytes;
      const lane = free.findIndex((end) => end <= unit.start);
      unit.lane = lane < 0 ? free.length : lane;
      free[unit.lane] = unit.end;
    }
    for (let at = 1; at < count; at += 1) gatheredBytes[at] += gatheredBytes[at - 1];
    return { units, gatheredBytes, lanes: free.length };
  }

  function walk(figure, entries, gatheredBytes, hidden) {
    const range = figure.querySelector("[data-walk]");
    const output = range.parentElement.querySelector("output");
    const cursor = figure.querySelector(".cursor");
    const scroll = figure.querySelector(".scroll");
    const isHidden = (entry) => hidden.axis.has(entry.axis) || hidden.phase.has(entry.phase);
    let last = 0;
    range.value = gatheredBytes.indexOf(Math.max(...gatheredBytes)) + 1;

    const show = () => {
      // Skip hidden entries, in the direction of the walk.
      let at = range.value - 1;
      const step = at < last ? -1 : 1;
      while (isHidden(entries[at]) && entries[at + step]) at += step;
      range.value = at + 1;
      last = at;
      const entry = entries[at];
      const text = isHidden(entry)
        ? "the filters hide all events here"
        : `${at + 1} of ${entries.length}: ${describe(entry)}; ${bytes(gatheredBytes[at])} gathered`;
      output.value = text;
      range.setAttribute("aria-valuetext", text);
      place(cursor, at + 0.5, 0, entries.length);
    };
    range.addEventListener("input", () => {
      show();
      const x = cursor.offsetLeft;
      if (x < scroll.scrollLeft || x > scroll.scrollLeft + scroll.clientWidth) {
        scroll.scrollLeft = x - scroll.clientWidth / 2;
      }
    });
    scroll.addEventListener("click", (event) => {
      const box = scroll.firstElementChild.getBoundingClientRect();
      range.value = 1 + Math.floor(((event.clientX - box.left) / box.width) * entries.length);
      show();
    });
    return show;
  }

  function nameOf({ module }) {
    return module === null ? "(no-module)" : module || "(root)";
  }

  // Formats bytes as the Python code does: rounds halves to the even digit.
  function bytes(nbytes) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let unit = 0;
    let amount = nbytes;
    for (; amount >= 1023.95 && unit < 5; unit += 1) amount /= 1024;
    const tenths = Math.round(10 * amount);
    const even = tenths - 10 * amount === 0.5 && tenths % 2 ? tenths - 1 : tenths;
    return unit ? `${(even / 10).toFixed(1)} ${units[unit]}` : `${nbytes} B`;
  }

  function add(parent, name, text = "") {
    const element = document.createElement(name === "cap" ? "p" : "div");
    element.className = name;
    element.textContent = text;
    return parent.appendChild(element);
  }

  function place(element, start, length, whole) {
    element.style.left = `${(100 * start) / whole}%`;
    if (length) element.style.width = `${(100 * length) / whole}%`;
  }

  function shape(parent, width, height) {
    const element = parent.appendChild(document.createElementNS(SVG, "svg"));
    element.setAttribute("viewBox", `0 0 ${width} ${height}`);
    element.setAttribute("preserveAspectRatio", "none");
    return element;
  }

  function path(parent, name, d) {
    const element = parent.appendChild(document.createElementNS(SVG, "path"));
    element.setAttribute("class", name);
    element.setAttribute("d", d);
    return element;
  }
})();
