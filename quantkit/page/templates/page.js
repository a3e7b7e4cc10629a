"use strict";

// Tables work without this; with it they can be sorted and searched.

const valueOf = (row, place) => {
  const cell = row.cells[place];
  return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent.trim();
};

// Numbers before words, and what is empty or unknown always last.
const rank = (value) => (typeof value === "number" ? 0 : value === "" || value === "–" ? 2 : 1);

const compare = (a, b, sign) => {
  if (rank(a) !== rank(b)) return rank(a) - rank(b);
  if (typeof a === "number") return sign * (a - b);
  return sign * a.localeCompare(b, undefined, { numeric: true });
};

const sortBy = (table, heading, place) => {
  const ascending = heading.getAttribute("aria-sort") !== "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  rows.sort((a, b) => compare(valueOf(a, place), valueOf(b, place), ascending ? 1 : -1));
  body.append(...rows);
};

for (const table of document.querySelectorAll("table[data-sortable]")) {
  [...table.tHead.rows[0].cells].forEach((heading, place) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    if (!button.textContent.trim()) button.setAttribute("aria-label", "Sort by the first column");
    button.addEventListener("click", () => sortBy(table, heading, place));
    heading.append(button);
  });
}

for (const search of document.querySelectorAll(".search")) {
  const input = search.querySelector("input");
  const said = search.querySelector("output");
  const rows = [...search.parentElement.querySelector("tbody").rows];
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/);
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      shown += row.hidden ? 0 : 1;
    }
    said.textContent = input.value.trim() ? `${shown} of ${rows.length} rows` : "";
  });
  search.hidden = false;
}
