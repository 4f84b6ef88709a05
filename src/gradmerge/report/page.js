(() => {
  const { walked, viewOf, showIn, copied } = gradmergeCharts;
  const all = (root, selector) => [...root.querySelectorAll(selector)];
  const read = (element) => JSON.parse(element.textContent);
  const theme = read(document.getElementById("theme"));
  const colors = new Map(Object.entries(read(document.getElementById("colors"))));
  const tip = document.getElementById("tip");
  const SAVED_WIDTH = 760;

  // A chart as it was before its rows were written without the names of their fields.
  function unpacked(spec) {
    for (const [name, { fields, rows }] of Object.entries(spec.datasets)) {
      spec.datasets[name] = rows.map((row) => Object.fromEntries(row.map((value, i) => [fields[i], value])));
    }
    return spec;
  }

  function wrapped(text, letters) {
    const lines = [];
    for (const word of text.split(" ")) {
      const last = lines.length - 1;
      if (last >= 0 && lines[last].length + word.length < letters) lines[last] += ` ${word}`;
      else lines.push(word);
    }
    return lines;
  }

  function sized(spec, width, title) {
    const letters = Math.floor(width / 6.6);
    const fitting = walked(spec, (text, key) => (key === "title" ? wrapped(text, letters) : text));
    // The name of the upward axis lies between the legend and the plot.
    const above = Math.max(...spec.layer.map(({ encoding }) => wrapped(encoding?.y?.title ?? "", letters).length * !!encoding?.y?.title));
    const heading = title ? { title: { text: wrapped(title, Math.floor(width / 9)), offset: 14 } } : {};
    return { ...gradmergeCharts.sized(fitting, theme, width, { offset: 12 + 15 * above, edge: title ? 16 : 2 }), ...heading };
  }

  function draw(figure) {
    const width = Math.floor(figure.box.clientWidth);
    if (!width || width === figure.width) return;
    figure.width = width;
    figure.view?.finalize();
    // Colours are variables of the page's style: the dark and paper change them without drawing again.
    const spec = walked(sized(figure.spec, width), (text) => colors.get(text) ?? text);
    spec.background = null;
    figure.view = viewOf(spec, { renderer: "svg", container: figure.box, tooltip: show }).run();
  }

  const show = showIn(() => tip);
  addEventListener("scroll", () => (tip.hidden = true), { passive: true });

  function download(blob, name) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  function cellText(value) {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  }
  const csvOf = (rows) => new Blob([rows.map((row) => `${row.map(cellText).join(",")}\n`).join("")], { type: "text/csv" });

  function numbersOf(spec) {
    const columns = Object.entries(spec.usermeta.columns);
    const given = [...spec.datasets[spec.data.name], ...spec.usermeta.more];
    const rows = given.map((row) => columns.map(([field]) => row[field]));
    return [columns.map(([, title]) => title), ...rows];
  }
  const fullText = (cell) => (cell.classList.contains("none") ? "" : (cell.dataset.v ?? cell.textContent));
  const cellsOf = (table) => [...table.rows].map((row) => [...row.cells].map(fullText));

  const savers = {
    SVG: async ({ spec, title }) =>
      new Blob([await viewOf(sized(spec, SAVED_WIDTH, title), { renderer: "none" }).toSVG()], { type: "image/svg+xml" }),
    PNG: async ({ spec, title }) => {
      const canvas = await viewOf(sized(spec, SAVED_WIDTH, title), { renderer: "none" }).toCanvas(2);
      return new Promise((done) => canvas.toBlob(done, "image/png"));
    },
    CSV: async ({ spec, table }) => csvOf(spec ? numbersOf(spec) : cellsOf(table)),
  };

  function offer(item, files, kinds) {
    for (const kind of kinds) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = kind;
      button.title = `Save as ${kind}`;
      button.addEventListener("click", async () =>
        download(await savers[kind](item), `${files.dataset.name}.${kind.toLowerCase()}`),
      );
      files.append(button);
    }
  }

  for (const element of all(document, "figure")) {
    const files = element.querySelector(".files");
    const figure = { box: element.querySelector(".drawn"), title: element.querySelector("figcaption").textContent };
    try {
      figure.spec = unpacked(read(element.querySelector("script")));
      draw(figure);
      element.querySelector(".numbers").open = false;
      new ResizeObserver(() => matchMedia("print").matches || requestAnimationFrame(() => draw(figure))).observe(figure.box);
      offer(figure, files, ["SVG", "PNG", "CSV"]);
    } catch (error) {
      // The numbers stay open in its place.
      console.error(error);
    }
    element.classList.add("ready");
  }
  for (const element of all(document, ".table")) {
    offer({ table: element.querySelector("table") }, element.querySelector(".files"), ["CSV"]);
  }

  const order = new Intl.Collator(undefined, { numeric: true }).compare;
  const isEmpty = (cell) => cell.classList.contains("none") || cell.dataset.v === "nan";
  const numberOf = (cell) => Number(cell.dataset.v.replace("inf", "Infinity"));

  function compare(a, b, sign) {
    // What is missing stays at the end, either way.
    if (isEmpty(a) || isEmpty(b)) return isEmpty(a) - isEmpty(b);
    const numbers = a.classList.contains("num") && b.classList.contains("num");
    if (numbers) return sign * (numberOf(a) - numberOf(b) || 0);
    return sign * order(a.dataset.v ?? a.textContent, b.dataset.v ?? b.textContent);
  }

  function sort(head) {
    const index = head.cellIndex;
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of head.parentElement.cells) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const body = head.closest("table").tBodies[0];
    body.append(...[...body.rows].sort((a, b) => compare(a.cells[index], b.cells[index], up ? 1 : -1)));
  }
  for (const head of all(document, ".table th")) head.querySelector("button").addEventListener("click", () => sort(head));

  async function copy(button) {
    const text = button.parentElement.querySelector("code").textContent;
    const done = await copied(text);
    button.textContent = done ? "Copied" : "Select and copy by hand";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  }
  for (const button of all(document, ".copy button")) button.addEventListener("click", () => copy(button));

  addEventListener("beforeprint", () => all(document, "details.recipe").forEach((each) => (each.open = true)));
})();
