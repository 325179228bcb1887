"use strict";
// Adds filters, magnification and a cursor. Everything can be read without.
(() => {
  for (const tools of document.querySelectorAll("[data-script]")) tools.hidden = false;

  for (const input of document.querySelectorAll("[data-filters]")) {
    const rows = [...document.querySelectorAll(`#${input.dataset.filters} tbody tr`)];
    const output = input.parentElement.querySelector("output");
    input.addEventListener("input", () => {
      const wanted = input.value.toLowerCase();
      for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
      const left = rows.filter((row) => !row.hidden).length;
      output.value = wanted ? `${left} of ${rows.length}` : "";
    });
  }

  for (const box of document.querySelectorAll("[data-parameters]")) {
    const table = box.closest("section").querySelector(".shards");
    box.addEventListener("change", () => table.classList.toggle("brief", !box.checked));
  }

  for (const timeline of document.querySelectorAll(".timeline")) begin(timeline);

  function begin(timeline) {
    const figures = [...timeline.querySelectorAll("figure")];
    const hidden = { axis: new Set(), phase: new Set() };
    const walks = figures.map((figure) => walk(figure, hidden));

    const apply = () => {
      for (const element of timeline.querySelectorAll("[data-axis], [data-phase]")) {
        const { axis, phase } = element.dataset;
        element.toggleAttribute("data-off", hidden.axis.has(axis) || hidden.phase.has(phase));
      }
      for (const show of walks) show();
    };
    for (const box of timeline.querySelectorAll("[data-by]")) {
      box.addEventListener("change", () => {
        hidden[box.dataset.by][box.checked ? "delete" : "add"](box.value);
        apply();
      });
    }

    const chosen = timeline.querySelector("[data-choose]");
    const choose = () => {
      for (const figure of figures) figure.hidden = Boolean(chosen.value) && figure.id !== chosen.value;
    };
    if (chosen) {
      chosen.addEventListener("change", choose);
      choose();
    }

    const zoom = timeline.querySelector("[data-zoom]");
    zoom.addEventListener("input", () => {
      const longest = Math.max(...figures.map((figure) => figure.querySelector("[data-walk]").max));
      const times = Math.max(4, longest / 40) ** (zoom.value / 100);
      zoom.setAttribute("aria-valuetext", `${times.toFixed(1)} times`);
      for (const track of timeline.querySelectorAll(".track")) {
        const middle = (track.parentElement.scrollLeft + track.parentElement.clientWidth / 2) / track.clientWidth;
        track.style.width = `${100 * times}%`;
        track.classList.toggle("zoomed", times > 1.6);
        track.parentElement.scrollLeft = middle * track.clientWidth - track.parentElement.clientWidth / 2;
      }
    });
    apply();
  }

  function walk(figure, hidden) {
    const data = JSON.parse(figure.querySelector("script").textContent);
    const range = figure.querySelector("[data-walk]");
    const output = range.parentElement.querySelector("output");
    const cursor = figure.querySelector(".cursor");
    const scroll = figure.querySelector(".scroll");
    const named = (column, at) => (data[column][at] < 0 ? "" : data.names[data[column][at]]);
    const isHidden = (at) => hidden.axis.has(named("axes", at)) || hidden.phase.has(named("phases", at));
    let last = 0;

    const show = () => {
      // On to the next entry that is not filtered out, in the direction of the walk.
      let at = range.value - 1;
      const step = at < last ? -1 : 1;
      while (isHidden(at) && at + step >= 0 && at + step < data.whats.length) at += step;
      range.value = at + 1;
      last = at;
      const axis = named("axes", at);
      const module = data.modules[at] < 0 ? "no module" : named("modules", at) || "(root)";
      const text = isHidden(at)
        ? "nothing to show: all entries here are filtered out"
        : `${at + 1} of ${data.whats.length}: ${named("whats", at)}${axis && `[${axis}]`} of ${module}, ` +
          `${named("phases", at)}, ${data.sizes[data.nbytes[at]]}; ${data.sizes[data.held[at]]} gathered`;
      output.value = text;
      range.setAttribute("aria-valuetext", text);
      cursor.hidden = false;
      cursor.style.left = `${(100 * (at + 0.5)) / data.whats.length}%`;
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
      range.value = 1 + Math.floor(((event.clientX - box.left) / box.width) * data.whats.length);
      show();
    });
    return show;
  }
})();
