"use strict";
(() => {
  const { walked, viewOf, showIn, copied } = gradmergeCharts;
  const colors = window.gradmergeColors;
  const drawn = new WeakMap();
  let tip;

  const show = showIn(() => {
    if (!tip) {
      tip = document.createElement("div");
      tip.className = "gm-tip";
      document.body.append(tip);
    }
    return tip;
  });
  addEventListener("scroll", () => tip && (tip.hidden = true), { passive: true, capture: true });

  // Colours are variables of the page's style, so that the dark changes them without drawing again.
  function fitting(spec, width) {
    const named = spec.layer?.some(({ encoding }) => encoding?.y?.title);
    const sized = gradmergeCharts.sized(spec, spec.config, width, { offset: named ? 27 : 12, labels: 100 });
    const turned = walked(sized, (text) => colors[text] ?? text);
    return { ...turned, background: null, config: { ...turned.config, background: null } };
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
    const view = viewOf(fitting(JSON.parse(box.dataset.spec), width), { renderer: "svg", container: place, tooltip: show }).run();
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

  // A row of what was tried takes its setting up again: its button is there for the keyboard.
  addEventListener("click", (event) => {
    const chosen = event.target.closest?.(".gm-tried tr")?.querySelector("button");
    if (!chosen) return;
    window.gradmergeTaken = chosen.dataset.row;
    chosen.closest(".gm-desk").querySelector("button.gm-taken").click();
  });

  window.gradmergeDim = () => document.querySelectorAll(".gm-board").forEach((one) => one.classList.add("stale"));

  window.gradmergeCopy = async (text) => {
    const done = await copied(text);
    for (const button of document.querySelectorAll("button.gm-copy")) {
      button.textContent = done ? "Copied" : "Copy it from the tab Recipe";
      setTimeout(() => (button.textContent = "Copy recipe"), 1600);
    }
  };
})();
