// Gradio takes every letter that is typed into the box of a slider for a move, and an empty one for an error.
(() => {
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
})();
