// What the pages do beyond the theme: formulas are typeset, and of a session in a shell the commands alone are copied.

document.addEventListener("DOMContentLoaded", () => {
  for (const formula of document.querySelectorAll(".arithmatex")) {
    const text = formula.textContent.trim().replace(/^\\[[(]|\\[\])]$/g, "");
    katex.render(text, formula, { displayMode: formula.tagName === "DIV", throwOnError: false });
  }
});

// The lines after a "$ ", with those that a backslash continues; the rest is what the commands print.
function commandsOf(session) {
  const commands = [];
  let goesOn = false;
  for (const line of session.split("\n")) {
    if (line.startsWith("$ ")) commands.push(line.slice(2));
    else if (goesOn) commands.push(line.replace(/^> ?/, ""));
    else continue;
    goesOn = line.endsWith("\\");
  }
  return commands.length ? commands.join("\n") : session;
}

// Before the theme's own listener, which takes this attribute rather than the text of the block.
document.addEventListener(
  "click",
  (event) => {
    const button = event.target.closest("[data-clipboard-target]");
    const code = button && button.closest(".language-console")?.querySelector("code");
    if (code) button.setAttribute("data-clipboard-text", commandsOf(code.textContent.trimEnd()));
  },
  true,
);
