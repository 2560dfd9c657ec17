// Lets long names in tables (paths, settings, tests) break behind `/`, `.`, `_` and `=`, so that tables fit the page.
for (const code of document.querySelectorAll("td:not(:first-child) code")) {
  const parts = code.textContent.split(/(?<=[/._=:])(?=\w)/);
  code.replaceChildren(...parts.flatMap((part, i) => (i ? [document.createElement("wbr"), part] : [part])));
}

// A cell of prose keeps a readable width: on a narrow screen the table scrolls instead.
for (const cell of document.querySelectorAll("article td")) {
  if (cell.textContent.length > 60) cell.classList.add("prose");
}
