// Draws the figures of a report from the tables in the page, saves them, builds the tables behind them when they are
// opened, and keeps the reader's choice of light or dark. Needs window.vegaEmbed; loads nothing from the network.
"use strict";
(() => {
  const MOST_ROWS = 400; // of a table shown; the file that can be saved has all
  const PNG_SCALE = 3; // pixels of a PNG per pixel
  const COLOUR = /color-mix\((?:[^()]|\([^()]*\))*\)|var\(--\w+\)/g;
  let page = {};
  let figures = new Map();
  let rowsByName = new Map();

  function rowsOf(name) {
    if (!rowsByName.has(name)) rowsByName.set(name, expanded(page.tables[name] || {}));
    return rowsByName.get(name);
  }

  // Columns of equal length to records; a column of texts comes as codes and names.
  function expanded(columns) {
    const names = Object.keys(columns);
    const values = names.map((name) => {
      const column = columns[name];
      return Array.isArray(column) ? column : column.codes.map((code) => column.names[code]);
    });
    const length = values.length ? values[0].length : 0;
    return Array.from({ length }, (_, row) => {
      const record = {};
      for (let column = 0; column < names.length; column += 1) record[names[column]] = values[column][row];
      return record;
    });
  }

  const chosenIn = (figure) =>
    Object.fromEntries(
      [...document.querySelectorAll(`#${figure.id} select`)].map((select) => [select.name, select.value]),
    );

  // The rows that the reader has chosen.
  function chosenRows(figure, name) {
    const chosen = Object.entries(chosenIn(figure));
    return rowsOf(name).filter((row) => chosen.every(([field, value]) => String(row[field]) === value));
  }

  function draw(figure) {
    const place = document.querySelector(`#${figure.id} .chart`);
    const spec = structuredClone(figure.spec);
    spec.config = page.config;
    spec.datasets = Object.fromEntries(figure.data.map((name) => [name, chosenRows(figure, name)]));
    const options = { renderer: "svg", actions: false, mode: "vega-lite" };
    options.defaultStyle = false; // page.css has the styles: those that a program adds have no mark, and are blocked
    options.tooltip = { disableDefaultStyle: true };
    options.logLevel = 1; // errors alone: that a choice leaves a table empty is none
    return window.vegaEmbed(place, spec, options).then((result) => {
      figure.view?.finalize();
      figure.view = result.view;
      place.dataset.drawn = "true";
    });
  }

  function addChoices(figure, kept) {
    const place = document.querySelector(`#${figure.id} .choices`);
    for (const field of figure.choices) {
      const select = document.createElement("select");
      select.name = field;
      const values = figure.data.flatMap((name) => rowsOf(name).map((row) => row[field]));
      for (const value of new Set(values)) select.add(new Option(value, value));
      const before = kept[`${figure.id}/${field}`];
      if ([...select.options].some((option) => option.value === before)) select.value = before;
      select.hidden = select.options.length < 2;
      const named = document.createElement("label");
      named.append(field[0].toUpperCase() + field.slice(1), select);
      named.hidden = select.hidden;
      select.addEventListener("change", () => {
        draw(figure);
        fillTable(figure);
      });
      place.append(named);
    }
  }

  const shown = (value, missing) =>
    typeof value === "number" ? value.toLocaleString("en", { maximumSignificantDigits: 6 }) : (value ?? missing);

  function cell(kind, text, numeric) {
    const made = document.createElement(kind);
    if (kind === "th") made.scope = "col";
    if (numeric) made.className = "number";
    made.textContent = text;
    return made;
  }

  function fillTable(figure) {
    const box = document.querySelector(`#${figure.id} details`);
    if (!box || !box.open) return;
    const rows = chosenRows(figure, figure.table);
    const table = document.createElement("table");
    table.createCaption().textContent =
      rows.length > MOST_ROWS ? `${figure.title}: the first ${MOST_ROWS} of ${rows.length} rows` : figure.title;
    const numeric = figure.columns.map(([field]) => typeof rows.find((row) => row[field] !== null)?.[field] === "number");
    const head = table.createTHead().insertRow();
    figure.columns.forEach(([, title], index) => head.append(cell("th", title, numeric[index])));
    const body = table.createTBody();
    for (const row of rows.slice(0, MOST_ROWS)) {
      const line = body.insertRow();
      figure.columns.forEach(([field, , missing], index) => line.append(cell("td", shown(row[field], missing), numeric[index])));
    }
    const save = document.createElement("button");
    save.type = "button";
    save.textContent = "Save as CSV";
    save.addEventListener("click", () => saveRows(figure, rows));
    const scroll = document.createElement("div");
    scroll.className = "scroll";
    scroll.tabIndex = 0;
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", `Table: ${figure.title}`);
    scroll.append(table);
    box.replaceChildren(box.querySelector("summary"), scroll, save);
  }

  function saveRows(figure, rows) {
    const quoted = (value) => (/[",\n]/.test(String(value)) ? `"${String(value).replaceAll('"', '""')}"` : String(value ?? ""));
    const lines = [figure.columns.map(([field]) => field), ...rows.map((row) => figure.columns.map(([field]) => row[field]))];
    save(`${figure.id}.csv`, new Blob([lines.map((line) => line.map(quoted).join(",")).join("\n")], { type: "text/csv" }));
  }

  function save(name, blob) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    URL.revokeObjectURL(link.href);
  }

  // The figure as it is shown, in colours of a light page that every program knows.
  async function svgOf(figure) {
    const probe = document.body.appendChild(document.createElement("i"));
    probe.style.colorScheme = "light";
    const known = (colour) => {
      probe.style.color = colour;
      const computed = getComputedStyle(probe).color;
      const scale = computed.startsWith("color(") ? 255 : 1;
      return `rgb(${computed.match(/[\d.]+/g).slice(0, 3).map((part) => Math.round(part * scale))})`;
    };
    const svg = (await figure.view.toSVG()).replaceAll(COLOUR, known).replaceAll("<text ", '<text paint-order="stroke" ');
    probe.remove();
    return new Blob([svg.replace(/(<svg[^>]*>)/, '$1<rect width="100%" height="100%" fill="white"/>')], { type: "image/svg+xml" });
  }

  const savers = {
    SVG: async (figure) => save(`${figure.id}.svg`, await svgOf(figure)),
    PNG: async (figure) => {
      const image = new Image();
      image.src = URL.createObjectURL(await svgOf(figure));
      await image.decode();
      const canvas = document.createElement("canvas");
      canvas.width = image.width * PNG_SCALE;
      canvas.height = image.height * PNG_SCALE;
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      URL.revokeObjectURL(image.src);
      canvas.toBlob((blob) => save(`${figure.id}.png`, blob));
    },
    // The browser prints the figure alone, to a file where the reader says so.
    PDF: (figure) => {
      const place = document.getElementById(figure.id);
      place.classList.add("alone");
      window.print();
      place.classList.remove("alone");
    },
  };

  function addSavers(figure) {
    const place = document.createElement("div");
    place.className = "saves";
    place.setAttribute("role", "group");
    place.setAttribute("aria-label", `Save the figure: ${figure.title}`);
    for (const [name, saver] of Object.entries(savers)) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = name;
      button.addEventListener("click", () => figure.view && saver(figure));
      place.append(button);
    }
    document.querySelector(`#${figure.id} details`).before(place);
  }

  // Figures are drawn when they come near the window: a report of many opens at once.
  const near = new IntersectionObserver(
    (entries) => {
      for (const entry of entries.filter((one) => one.isIntersecting)) {
        near.unobserve(entry.target);
        draw(figures.get(entry.target.id));
      }
    },
    { rootMargin: "400px" },
  );

  function drawAll() {
    return Promise.all(
      [...figures.values()].map((figure) => {
        near.unobserve(document.getElementById(figure.id));
        return document.querySelector(`#${figure.id} .chart`).dataset.drawn ? null : draw(figure);
      }),
    );
  }

  function theme(wanted) {
    if (wanted === "light" || wanted === "dark") document.documentElement.dataset.theme = wanted;
    else delete document.documentElement.dataset.theme;
    for (const button of document.querySelectorAll("[data-set-theme]")) {
      button.setAttribute("aria-pressed", String(button.dataset.setTheme === (wanted || "auto")));
    }
  }

  // Shows `data`; kept: what the reader had chosen, by figure and field, and which tables were open.
  function start(data, kept = { choices: {}, open: [] }) {
    for (const figure of figures.values()) figure.view?.finalize();
    near.disconnect();
    page = data;
    figures = new Map(page.figures.map((figure) => [figure.id, figure]));
    rowsByName = new Map();
    for (const figure of figures.values()) {
      addChoices(figure, kept.choices);
      addSavers(figure);
      document.querySelector(`#${figure.id} .chart`).style.minHeight = `${figure.spec.height}px`;
      const details = document.querySelector(`#${figure.id} details`);
      details.addEventListener("toggle", () => fillTable(figure));
      details.open = kept.open.includes(figure.id);
      near.observe(document.getElementById(figure.id));
    }
    window.report.figures = figures;
  }

  // What the reader has chosen and opened.
  const chosen = () => ({
    choices: Object.fromEntries(
      [...document.querySelectorAll("figure select")].map((one) => [`${one.closest("figure").id}/${one.name}`, one.value]),
    ),
    open: [...document.querySelectorAll("figure details[open]")].map((one) => one.closest("figure").id),
  });

  for (const button of document.querySelectorAll("[data-set-theme]")) {
    button.addEventListener("click", () => theme(button.dataset.setTheme));
  }
  theme("auto");
  window.addEventListener("beforeprint", drawAll);
  window.report = { figures, rowsOf, drawAll, start, chosen };
  start(JSON.parse(document.getElementById("report-data").textContent));
})();
