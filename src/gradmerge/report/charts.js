"use strict";
// What reports and the studio's page share: how a figure fits its place, its tooltip, and the clipboard.
const gradmergeCharts = (() => {
  // The same chart, with other strings where `each` says so; what readers hover over and the numbers stay.
  function walked(node, each, key) {
    if (key === "datasets" || key === "tooltip" || key === "usermeta") return node;
    if (typeof node === "string") return each(node, key);
    if (Array.isArray(node)) return node.map((part) => walked(part, each, key));
    if (node === null || typeof node !== "object") return node;
    return Object.fromEntries(Object.entries(node).map(([name, part]) => [name, walked(part, each, name)]));
  }

  // The legend in as many columns as there is room for, `offset` above the plot; less tall where it is narrow.
  function sized(spec, theme, width, { offset, edge = 2, labels = 110 }) {
    const narrow = width < 520;
    const columns = Math.max(1, Math.floor((width - 50) / (spec.usermeta?.entry ?? 150)));
    const gradientLength = Math.min(theme.legend?.gradientLength ?? 240, width - 130);
    const config = {
      ...theme,
      axisY: { ...theme.axisY, labelLimit: narrow ? labels : 220 },
      legend: { ...theme.legend, offset, columns, gradientLength },
    };
    const height = narrow && typeof spec.height === "number" ? Math.round(0.8 * spec.height) : spec.height;
    const padding = { left: edge, right: edge + 2, top: edge, bottom: edge, ...spec.padding };
    return { ...spec, width, height, padding, config };
  }

  // The interpreter takes the place of eval, which a report's policy forbids.
  function viewOf(spec, options) {
    const compiled = { ...vegaLite.compile(spec).spec, autosize: { type: "fit-x", contains: "padding" } };
    const parsed = vega.parse(compiled, null, { ast: true });
    return new vega.View(parsed, { expr: vegaInterpreter, ...options });
  }

  // A tooltip's values are text, whatever they look like.
  const showIn = (tipOf) => (handler, event, item, value) => {
    const tip = tipOf();
    tip.hidden = value === null || value === undefined || value === "";
    if (tip.hidden) return;
    const known = Object.entries(value).filter(([name, text]) => !name.trim() || text !== "null");
    const [head, ...lines] = known.map(([name, text]) => (name.trim() ? `${name}: ${text}` : text));
    const bold = document.createElement("b");
    bold.textContent = head;
    const rest = document.createElement("div");
    rest.textContent = lines.filter(Boolean).join("\n");
    tip.replaceChildren(bold, rest);
    const { offsetWidth: wide, offsetHeight: tall } = tip;
    const left = Math.max(8, Math.min(event.clientX - wide / 2, document.documentElement.clientWidth - wide - 8));
    const above = event.clientY - tall - 14;
    tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(above > 4 ? above : event.clientY + 18)}px)`;
  };

  // Not every browser gives the clipboard to a page that is a file, or without https.
  async function copied(text) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      const area = document.createElement("textarea");
      area.value = text;
      area.style.cssText = "position:fixed;opacity:0";
      document.body.append(area);
      area.select();
      const done = document.execCommand("copy");
      area.remove();
      return done;
    }
  }

  return { walked, sized, viewOf, showIn, copied };
})();
