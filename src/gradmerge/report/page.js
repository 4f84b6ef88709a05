"use strict";
(() => {
  const tip = document.getElementById("tip");
  const all = (root, selector) => [...root.querySelectorAll(selector)];
  let marked = null;

  // Where the words of a point are: a narrow drawing leaves them to the wide one beside it.
  function wordsOf(svg, index) {
    const wide = svg.classList.contains("narrow") ? svg.previousElementSibling : svg;
    const point = all(wide, ".pts>*")[index];
    const named = (name, value) => (name ? `${name}: ${value}` : value);
    return {
      head: point.closest("[data-h]").dataset.h,
      lines: [named(wide.dataset.x, point.dataset.x), named(wide.dataset.y, point.dataset.y), point.dataset.n].filter(Boolean),
    };
  }

  function pick(svg, series) {
    svg.classList.toggle("picked", series !== undefined);
    for (const part of all(svg, ".s,.key")) {
      part.classList.toggle("on", series !== undefined && (part.dataset.s ?? part.dataset.k) === series);
    }
  }

  function hide() {
    tip.hidden = true;
    if (!marked) return;
    marked.classList.remove("at");
    pick(marked.ownerSVGElement, undefined);
    marked = null;
  }

  function leave(svg) {
    hide();
    pick(svg, undefined);
  }

  function show(svg, point) {
    if (point === marked) return;
    hide();
    marked = point;
    point.classList.add("at");
    pick(svg, point.closest(".s")?.dataset.s);
    const { head, lines } = wordsOf(svg, all(svg, ".pts>*").indexOf(point));
    const bold = document.createElement("b");
    bold.textContent = head;
    const rest = document.createElement("div");
    rest.textContent = lines.join("\n");
    tip.replaceChildren(bold, rest);
    tip.hidden = false;
    place(point.getBoundingClientRect());
  }

  function place(box) {
    const { offsetWidth: width, offsetHeight: height } = tip;
    const anchor = Math.min(box.right, box.left + 140);
    const left = Math.max(8, Math.min((box.left + anchor - width) / 2, document.documentElement.clientWidth - width - 8));
    const above = box.top - height - 10;
    tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(above > 4 ? above : box.bottom + 10)}px)`;
  }

  function nearest(svg, x, y) {
    let best = null;
    let least = 32;
    for (const point of all(svg, ".pts>*")) {
      const box = point.getBoundingClientRect();
      const away = Math.hypot((box.left + box.right) / 2 - x, (box.top + box.bottom) / 2 - y);
      if (away < least) [best, least] = [point, away];
    }
    return best;
  }

  function follow(event) {
    const svg = event.currentTarget;
    const key = event.target.closest(".key");
    if (key) {
      hide();
      if (svg.querySelector(`.s[data-s="${key.dataset.k}"]`)) pick(svg, key.dataset.k);
      return;
    }
    const inside = event.target.closest(".pts>*");
    const point = svg.classList.contains("near") ? nearest(svg, event.clientX, event.clientY) : inside;
    if (point && svg.contains(point)) show(svg, point);
    else leave(svg);
  }

  function step(event) {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") hide();
    if (!by) return;
    const points = all(event.currentTarget, ".pts>*");
    if (!points.length) return;
    event.preventDefault();
    const next = points.indexOf(marked) + by;
    show(event.currentTarget, points[(next + points.length) % points.length]);
  }

  for (const svg of all(document, "svg.chart")) {
    // A browser would show the title of the drawing over the tooltips of its points.
    const title = svg.querySelector(":scope>title");
    svg.setAttribute("aria-label", title.textContent);
    svg.setAttribute("aria-describedby", svg.querySelector(":scope>desc").id);
    svg.removeAttribute("aria-labelledby");
    title.remove();
    svg.addEventListener("pointermove", follow);
    svg.addEventListener("pointerdown", follow);
    svg.addEventListener("pointerleave", () => leave(svg));
    svg.addEventListener("keydown", step);
    svg.addEventListener("blur", hide);
  }
  addEventListener("scroll", () => marked && place(marked.getBoundingClientRect()), { passive: true });

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
  for (const head of all(document, "th")) head.querySelector("button").addEventListener("click", () => sort(head));

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

  async function copy(button) {
    const text = button.parentElement.querySelector("code").textContent;
    let done;
    try {
      await navigator.clipboard.writeText(text);
      done = true;
    } catch {
      // A page that is a file may not have the clipboard of newer browsers.
      done = copyOld(text);
    }
    button.textContent = done ? "Copied" : "Select and copy by hand";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  }
  for (const button of all(document, ".copy button")) button.addEventListener("click", () => copy(button));

  addEventListener("beforeprint", () => all(document, "details").forEach((each) => (each.open = true)));
})();
