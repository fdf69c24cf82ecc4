"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const make = (name, text, attributes = {}) => {
    const element = document.createElement(name);
    if (text !== undefined) element.textContent = text;
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  };
  const root = document.documentElement;

  // ---------------------------------------------------------------- theme
  const themes = ["system", "light", "dark"];
  const button = byId("theme");
  const listeners = [];
  const setTheme = (name) => {
    if (name === "system") root.removeAttribute("data-theme");
    else root.setAttribute("data-theme", name);
    button.textContent = `Theme: ${name}`;
    button.dataset.name = name;
    listeners.forEach((listener) => listener());
  };
  const fromHash = () => {
    const wanted = /theme=(light|dark)/.exec(location.hash);
    setTheme(wanted ? wanted[1] : button.dataset.name || "system");
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    setTheme(themes[(themes.indexOf(button.dataset.name) + 1) % themes.length]);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    listeners.forEach((listener) => listener());
  });
  addEventListener("hashchange", fromHash);
  const isDark = () => {
    const chosen = root.getAttribute("data-theme");
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };

  // --------------------------------------------------------------- tables
  const keyOf = (cell) => ("v" in cell.dataset ? Number(cell.dataset.v) : cell.textContent);
  const compare = (a, b) => {
    if (typeof a === "number" && typeof b === "number") return a - b;
    return String(a).localeCompare(String(b), "en", { numeric: true });
  };
  const sortable = (table) => {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, place) => {
      const sorter = make("button", head.textContent, { type: "button" });
      head.replaceChildren(sorter);
      sorter.addEventListener("click", () => {
        const first = head.classList.contains("n") ? "descending" : "ascending";
        const other = first === "ascending" ? "descending" : "ascending";
        const order = head.getAttribute("aria-sort") === first ? other : first;
        heads.forEach((each) => each.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", order);
        const sign = order === "ascending" ? 1 : -1;
        const rows = [...table.tBodies[0].rows].map((row) => [keyOf(row.cells[place]), row]);
        rows.sort((a, b) => sign * compare(a[0], b[0]));
        table.tBodies[0].replaceChildren(...rows.map((entry) => entry[1]));
      });
    });
  };
  const filterable = (table) => {
    const field = make("input", undefined, { type: "search", "aria-label": table.dataset.filter, placeholder: table.dataset.filter });
    const count = make("span", "", { class: "note", role: "status" });
    const bar = make("div", undefined, { class: "filter" });
    bar.append(field, count);
    table.parentElement.before(bar);
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of table.tBodies[0].rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        if (!row.hidden) shown += 1;
      }
      count.textContent = words.length ? `${shown} of ${table.tBodies[0].rows.length}` : "";
    });
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    sortable(table);
    if (table.dataset.filter) filterable(table);
  }
  fromHash();

  // ------------------------------------------------------------- heat map
  const data = JSON.parse(byId("data").textContent);
  const canvas = byId("heat");
  if (!canvas || !data.columns.length) return;
  document.querySelectorAll(".script").forEach((part) => { part.hidden = false; });

  const decode = (column) => {
    const bytes = Uint8Array.from(atob(column.data), (letter) => letter.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    const floats = column.type === "f4";
    const values = new Float64Array(bytes.length / (floats ? 4 : 2));
    for (let place = 0; place < values.length; place += 1) {
      values[place] = floats ? view.getFloat32(4 * place, true) : view.getUint16(2 * place, true) * column.scale;
    }
    return values;
  };
  const columns = Object.fromEntries(data.columns.map((column) => [column.name, decode(column)]));
  const layers = data.layers.length, experts = data.experts.length, planes = data.planes.length;
  const at = (layer, expert, plane) => (layer * experts + expert) * planes + plane;
  const error = columns.relative_rmse;
  const metrics = { relative_rmse: "relative RMSE", flushed: "to zero", saturated: "saturated" };
  const show = (metric, value) => {
    if (Number.isNaN(value)) return "-";
    if (metric === "relative_rmse") return value === Infinity ? "∞" : value.toFixed(4);
    return value === 0 ? "0 %" : `${(100 * value).toFixed(3)} %`;
  };
  const fill = (select, entries) => {
    entries.forEach(([value, text]) => select.append(make("option", text, { value })));
  };
  const metric = byId("metric"), plane = byId("plane"), layer = byId("layer");
  fill(metric, Object.entries(metrics));
  fill(plane, data.planes.map((name, place) => [place, name]));
  plane.value = planes - 1;
  fill(layer, data.layers.map((number, place) => [place, number]));

  const ramps = {
    light: [[238, 245, 253], [178, 209, 244], [96, 159, 228], [30, 98, 190], [9, 45, 104]],
    dark: [[20, 38, 64], [28, 72, 128], [45, 120, 203], [120, 180, 244], [222, 238, 255]],
  };
  const ramp = () => ramps[isDark() ? "dark" : "light"];
  const colour = (stops, part) => {
    const place = Math.min(Math.max(part, 0), 1) * (stops.length - 1);
    const low = Math.min(Math.floor(place), stops.length - 2);
    return stops[low].map((value, i) => Math.round(value + (stops[low + 1][i] - value) * (place - low)));
  };
  const height = Math.max(4, Math.min(20, Math.floor(560 / layers)));
  canvas.width = experts;
  canvas.height = layers;
  canvas.style.height = `${height * layers}px`;
  canvas.style.width = "100%";
  canvas.style.maxWidth = `${28 * experts}px`;
  canvas.style.minWidth = `${Math.min(experts, 900)}px`;

  const draw = () => {
    const values = columns[metric.value], which = Number(plane.value);
    const present = [];
    for (let place = 0; place < layers * experts; place += 1) {
      const value = values[place * planes + which];
      if (Number.isFinite(value) && !Number.isNaN(error[place * planes + which])) present.push(value);
    }
    present.sort((a, b) => a - b);
    const quantile = (part) => present[Math.round(part * (present.length - 1))] || 0;
    const low = quantile(0.01);
    const high = quantile(0.99) > low ? quantile(0.99) : quantile(1);
    const stops = ramp();
    const image = new ImageData(experts, layers);
    for (let place = 0; place < layers * experts; place += 1) {
      const value = values[place * planes + which];
      if (Number.isNaN(error[place * planes + which])) continue;
      const part = high > low ? (value - low) / (high - low) : 0;
      image.data.set([...colour(stops, part), 255], 4 * place);
    }
    canvas.getContext("2d").putImageData(image, 0, 0);
    byId("low").textContent = `≤ ${show(metric.value, low)}`;
    byId("high").textContent = `≥ ${show(metric.value, high)}`;
    byId("ramp").style.background = `linear-gradient(to right, ${stops.map((stop) => `rgb(${stop})`).join(", ")})`;
  };

  const under = byId("under");
  const hint = "Point at a cell to read it, choose one to see its layer below.";
  const locate = (event) => {
    const box = canvas.getBoundingClientRect();
    const x = Math.floor(((event.clientX - box.left) / box.width) * experts);
    const y = Math.floor(((event.clientY - box.top) / box.height) * layers);
    return x >= 0 && y >= 0 && x < experts && y < layers ? [y, x] : null;
  };
  under.textContent = hint;
  canvas.addEventListener("pointermove", (event) => {
    const place = locate(event);
    if (!place) return;
    const value = columns[metric.value][at(place[0], place[1], Number(plane.value))];
    under.textContent = `layer ${data.layers[place[0]]}, expert ${data.experts[place[1]]}, ` +
      `${data.planes[plane.value]}: ${metrics[metric.value]} ${show(metric.value, value)}`;
  });
  canvas.addEventListener("pointerleave", () => { under.textContent = hint; });

  // ------------------------------------------------- the experts of a layer
  const drill = (marked) => {
    const row = Number(layer.value);
    const table = make("table", undefined, { class: "sortable" });
    table.append(make("caption", `Layer ${data.layers[row]}: ${experts} experts`));
    const head = table.createTHead().insertRow();
    const titles = ["expert", ...data.planes.map((name) => `RMSE ${name}`), "to zero", "saturated"];
    titles.forEach((title) => head.append(make("th", title, { scope: "col", class: "n" })));
    const body = table.createTBody();
    for (let expert = 0; expert < experts; expert += 1) {
      if (Number.isNaN(error[at(row, expert, planes - 1)])) continue;
      const line = body.insertRow();
      line.append(make("th", data.experts[expert], { scope: "row", class: "n", "data-v": data.experts[expert] }));
      const add = (name, which) => {
        const value = columns[name][at(row, expert, which)];
        const added = make("td", show(name, value), { class: "n", "data-v": Number.isFinite(value) ? value : 1e300 });
        const pattern = (data.names || [])[which];
        if (name === "relative_rmse" && pattern) {
          added.title = pattern.replace("{layer}", data.layers[row]).replace("{expert}", data.experts[expert]);
        }
        line.append(added);
      };
      for (let which = 0; which < planes; which += 1) add("relative_rmse", which);
      add("flushed", planes - 1);
      add("saturated", planes - 1);
      if (expert === marked) line.className = "marked";
    }
    sortable(table);
    byId("drill").replaceChildren(table);
    const found = table.querySelector(".marked");
    if (found) {
      const area = byId("drill");
      area.scrollTop = found.offsetTop - area.clientHeight / 2;
    }
  };
  canvas.addEventListener("click", (event) => {
    const place = locate(event);
    if (!place) return;
    layer.value = place[0];
    drill(place[1]);
  });
  layer.addEventListener("change", () => drill());
  metric.addEventListener("change", draw);
  plane.addEventListener("change", draw);
  listeners.push(draw);
  draw();
  drill();
})();
