/* Clicking a header sorts its table up, then down, then as it was. The address keeps the order
   (#sort=TABLE:COLUMN:DIRECTION), so that a link to it shows the same; empty cells stay last. A line above a table that
   is wider than its box says how many columns are out of sight. */
(() => {
  for (const box of document.querySelectorAll(".scroll")) {
    const hint = box.previousElementSibling, heads = box.querySelectorAll("thead th");
    const look = () => {
      const edge = box.getBoundingClientRect().right + 1;
      const hidden = [...heads].filter(head => head.getBoundingClientRect().right > edge).length;
      hint.classList.toggle("needed", box.scrollWidth > box.clientWidth + 1);
      hint.textContent = hidden ? `${hidden} more column${hidden > 1 ? "s" : ""}: scroll sideways \u2192`
        : "\u2190 the last column; scroll back";
    };
    box.addEventListener("scroll", look, {passive: true});
    new ResizeObserver(look).observe(box);
  }
  const value = cell => {
    const text = cell.dataset.sort ?? cell.textContent.trim();
    return text === "" ? null : isNaN(text) ? text : Number(text);
  };
  const compare = (a, b) => typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1;
  const sort = (table, column, direction) => {
    const body = table.tBodies[0], sign = direction === "descending" ? -1 : 1;
    table.startOrder ??= [...body.rows];
    const rows = [...table.startOrder], key = row => value(row.cells[column]);
    if (direction !== "none") rows.sort((one, other) => {
      const a = key(one), b = key(other);
      return a === null || b === null ? (a === null) - (b === null) : sign * compare(a, b);
    });
    body.append(...rows);
    [...table.tHead.rows[0].cells].forEach((head, at) =>
      head.setAttribute("aria-sort", at === column ? direction : "none"));
  };
  const next = {none: "ascending", ascending: "descending", descending: "none"};
  for (const table of document.querySelectorAll("table.numbers"))
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const click = () => {
        const direction = next[head.getAttribute("aria-sort")];
        sort(table, column, direction);
        history.replaceState(null, "", direction === "none" ? "#" : `#sort=${table.id}:${column}:${direction}`);
      };
      head.className += " sorts";
      head.tabIndex = 0;
      head.setAttribute("aria-sort", "none");
      head.addEventListener("click", click);
      head.addEventListener("keydown", event => {
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); click(); }
      });
    });
  const follow = () => {
    const [, id, column, direction] = /^#sort=([^:]+):(\d+):(ascending|descending)$/.exec(location.hash) ?? [];
    const table = id && document.getElementById(id);
    if (!table?.tHead?.rows[0].cells[column]) return;
    sort(table, Number(column), direction);
    table.closest("details")?.setAttribute("open", "");
    table.scrollIntoView({block: "nearest"});
  };
  addEventListener("hashchange", follow);
  follow();
})();
