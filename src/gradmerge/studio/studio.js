"use strict";
(() => {
  const colours = window.gradmergeColours;
  const drawn = new WeakMap();
  let tip;

  // Colours are variables of the page's style, so that the dark changes them without drawing again.
  function turned(node, key) {
    if (key === "datasets" || key === "tooltip" || key === "usermeta") return node;
    if (typeof node === "string") return colours[node] ?? node;
    if (Array.isArray(node)) return node.map((part) => turned(part, key));
    if (node === null || typeof node !== "object") return node;
    return Object.fromEntries(Object.entries(node).map(([name, part]) => [name, turned(part, name)]));
  }

  // A tooltip's values are text, whatever they look like.
  function show(handler, event, item, value) {
    if (!tip) {
      tip = document.createElement("div");
      tip.className = "gm-tip";
      document.body.append(tip);
    }
    tip.hidden = value === null || value === undefined || value === "";
    if (tip.hidden) return;
    const [head, ...lines] = Object.entries(value).map(([name, text]) => (name.trim() ? `${name}: ${text}` : text));
    const bold = document.createElement("b");
    bold.textContent = head;
    tip.replaceChildren(bold, ["", ...lines.filter(Boolean)].join("\n"));
    const left = Math.min(event.clientX + 14, document.documentElement.clientWidth - tip.offsetWidth - 8);
    tip.style.transform = `translate(${Math.max(8, left)}px, ${event.clientY + 16}px)`;
  }
  addEventListener("scroll", () => tip && (tip.hidden = true), { passive: true, capture: true });

  // As in reports: the legend in as many columns as there is room for, the name of the upward axis below it.
  function sized(spec, width) {
    const narrow = width < 520;
    const named = spec.layer?.some(({ encoding }) => encoding?.y?.title);
    const legend = { offset: named ? 27 : 12, columns: Math.max(1, Math.floor((width - 50) / (spec.usermeta?.entry ?? 150))) };
    const length = Math.min(spec.config.legend?.gradientLength ?? 240, width - 130);
    const config = {
      ...spec.config,
      background: null,
      axisY: { ...spec.config.axisY, labelLimit: narrow ? 100 : 220 },
      legend: { ...spec.config.legend, ...legend, gradientLength: length },
    };
    const height = narrow && typeof spec.height === "number" ? Math.round(0.8 * spec.height) : spec.height;
    const padding = { left: 2, right: 4, top: 2, bottom: 2, ...spec.padding };
    return { ...spec, width, height, padding, config, background: null };
  }

  function viewOf(spec, container) {
    const compiled = { ...vegaLite.compile(spec).spec, autosize: { type: "fit-x", contains: "padding" } };
    const parsed = vega.parse(compiled, null, { ast: true });
    return new vega.View(parsed, { expr: vegaInterpreter, renderer: "svg", container, tooltip: show });
  }

  function draw(box) {
    const width = Math.floor(box.clientWidth);
    const before = drawn.get(box);
    if (!width || (before?.text === box.dataset.spec && before.width === width)) return;
    before?.view.finalize();
    // What is drawn lies in a tree of its own, which a new version of the page's HTML does not take away.
    const root = box.shadowRoot ?? box.attachShadow({ mode: "open" });
    const place = document.createElement("div");
    root.replaceChildren(place);
    const view = viewOf(sized(turned(JSON.parse(box.dataset.spec)), width), place).run();
    if (!before) new ResizeObserver(() => requestAnimationFrame(() => draw(box))).observe(box);
    drawn.set(box, { text: box.dataset.spec, width, view });
  }

  function look() {
    for (const box of document.querySelectorAll(".gm-chart")) {
      try {
        draw(box);
      } catch (error) {
        console.error(error);
      }
    }
    // What a button answers may lie below the edge of the column.
    for (const told of document.querySelectorAll(".gm-kept .gm-message:not([data-seen])")) {
      told.dataset.seen = "";
      told.scrollIntoView({ block: "nearest" });
    }
  }
  const watch = { childList: true, subtree: true, attributes: true, attributeFilter: ["data-spec", "class", "style"] };
  let waiting = false;
  new MutationObserver(() => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => ((waiting = false), look()));
  }).observe(document.documentElement, watch);

  // Gradio takes every letter that is typed into the box of a slider for a move, and an empty one for an error.
  const numberOf = ({ target }) => (target.type === "number" && target.closest(".gm-side") ? target : null);
  const isMove = ({ value, min, max }) => value !== "" && Number(value) >= min && Number(value) <= max;
  addEventListener("input", (event) => numberOf(event) && !isMove(event.target) && event.stopPropagation(), true);
  addEventListener("focusout", (event) => {
    const box = numberOf(event);
    if (!box || isMove(box)) return;
    const before = box.closest(".block").querySelector("input[type=range]").value;
    box.value = box.value === "" ? before : Math.min(box.max, Math.max(box.min, box.value));
    box.dispatchEvent(new Event("input", { bubbles: true }));
  }, true);

  function copyOld(text) {
    const area = document.createElement("textarea");
    area.value = text;
    area.style.cssText = "position:fixed;opacity:0";
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }

  window.gradmergeDim = () => document.querySelectorAll(".gm-board").forEach((one) => one.classList.add("stale"));

  window.gradmergeCopy = async (text) => {
    let done = true;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // Not every browser gives the clipboard to a page without https.
      done = copyOld(text);
    }
    for (const button of document.querySelectorAll("button.gm-copy")) {
      button.textContent = done ? "Copied" : "Copy it from the tab Recipe";
      setTimeout(() => (button.textContent = "Copy recipe"), 1600);
    }
  };
})();
