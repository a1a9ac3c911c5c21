"""The report as one HTML page that asks no server for anything, and as Markdown.

All of the page is there without its script, which only sorts the tables.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape

from hf_posenc.report.looks import COLOURS, COLOURS_ON_DARK
from hf_posenc.report.pieces import Panel

_CSS = """
:root { color-scheme: light; --ink: #1f2328; --quiet: #59636e; --line: #d1d9e0; --edge: #8c959f; --paper: #fff;
  --shade: #f6f8fa; --link: #0a5ea8 }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 1rem }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; scroll-margin-top: 1rem }
h3 { font-size: 1rem; margin: 2rem 0 .5rem }
a { color: var(--link) }
nav ul { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin: 0; padding: 0; list-style: none }
nav { font-size: .9rem }
figure { margin: 1.25rem 0 }
figure svg { display: block; width: 100%; height: auto; margin: 0 auto; color: var(--ink) }
svg.wide { max-width: 46rem }
svg.narrow { display: none; max-width: 26rem }
figcaption { margin-top: .25rem }
.sideways { margin: .75rem 0 }
.more { display: none; margin: 0 0 .25rem; text-align: right; font-size: .85rem; color: var(--link) }
.more.needed { display: block }
.scroll { overflow-x: auto; scrollbar-width: thin;
  background: linear-gradient(to left, var(--paper) 30%, transparent) right top / 3rem calc(100% + 2px) no-repeat local,
    linear-gradient(to left, var(--edge), transparent) right / 1rem 100% no-repeat scroll }
table { border-collapse: separate; border-spacing: 0; font-variant-numeric: tabular-nums; font-size: .9rem }
th, td { padding: .4rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap;
  vertical-align: top }
th { font-weight: 600 }
th[scope=col] { white-space: normal; vertical-align: bottom }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--paper); text-align: left }
.text, .hash { text-align: left }
.hash { font-family: ui-monospace, monospace }
.original, .never { background: color-mix(in srgb, var(--ink) 5%, transparent) }
th[scope=row] { font-weight: 400 }
.best { font-weight: 700 }
.badge { border: 1px solid var(--quiet); border-radius: 4px; padding: 0 .25em; font-size: .75em }
small { display: block; color: var(--quiet); font-size: .8em; font-weight: 400 }
p.note { border-left: 3px solid var(--line); padding-left: .75rem }
.quiet { color: var(--quiet); font-size: .9rem }
table.map { border-collapse: collapse; margin: 0 0 1.25rem; print-color-adjust: exact }
table.map small { color: inherit }
table.map td { text-align: center; border: 1px solid var(--line) }
.maps { display: flex; flex-wrap: wrap; gap: 0 2.5rem }
.maps > div { max-width: 100%; margin: 0 }
caption { text-align: left; font-size: .9rem; padding: .4rem 0 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.25rem; font-size: .9rem; margin: 0 0 1rem }
dt { color: var(--quiet) }
dd { margin: 0; overflow-wrap: anywhere }
pre { background: var(--shade); border: 1px solid var(--line); border-radius: 6px; padding: .7rem .9rem;
  margin: .5rem 0; font: .85rem/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }
summary { cursor: pointer; font-size: .9rem; padding: .35rem 0 }
th.sorts { cursor: pointer; user-select: none }
th.sorts::after { content: "\\2195"; opacity: .35; margin-left: .35em; font-weight: 400 }
th.sorts[aria-sort=ascending]::after { content: "\\2191"; opacity: 1 }
th.sorts[aria-sort=descending]::after { content: "\\2193"; opacity: 1 }
th.sorts:focus-visible { outline: 2px solid var(--link); outline-offset: -2px }
@media (max-width: 34rem) {
  body { padding-top: 1rem }
  svg.wide { display: none }
  svg.narrow { display: block }
  dl { grid-template-columns: 1fr }
  dd { margin-bottom: .5rem }
  th:first-child { white-space: normal; max-width: 6.5rem; overflow-wrap: break-word }
  th, td { padding: .35rem .3rem }
  table { font-size: .82rem }
  th.sorts::after { display: block; margin: 0 }
  ul { padding-left: 1.2rem }
}
"""

_PRINT = """
@media print {
  @page { margin: 1.5cm }
  body { max-width: none; padding: 0; font-size: 10pt }
  nav { display: none }
  .scroll { overflow: visible; background: none }
  .more { display: none !important }
  th, td { padding: .2rem .45rem }
  th:first-child, td:first-child { position: static }
  th.sorts::after { content: none }
  h2, h3, summary, caption { break-after: avoid }
  figure, tr, pre, .maps > div { break-inside: avoid }
  svg.wide { display: block }
  svg.narrow { display: none }
  details::details-content { content-visibility: visible; height: auto }
}
"""

# A header sorts up, then down, then as it was. The address keeps the order (#sort=TABLE:COLUMN:DIRECTION), so that a
# link to it shows the same; empty cells stay last. Above a table that is wider than its box stands how many columns are
# out of sight.
SCRIPT = """
(() => {
  for (const box of document.querySelectorAll(".scroll")) {
    const hint = box.previousElementSibling, heads = box.querySelectorAll("thead th");
    const look = () => {
      const edge = box.getBoundingClientRect().right + 1;
      const hidden = [...heads].filter(head => head.getBoundingClientRect().right > edge).length;
      hint.classList.toggle("needed", box.scrollWidth > box.clientWidth + 1);
      hint.textContent = hidden ? `${hidden} more column${hidden > 1 ? "s" : ""}: scroll sideways \\u2192`
        : "\\u2190 the last column; scroll back";
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
    const [, id, column, direction] = /^#sort=([^:]+):(\\d+):(ascending|descending)$/.exec(location.hash) ?? [];
    const table = id && document.getElementById(id);
    if (!table?.tHead?.rows[0].cells[column]) return;
    sort(table, Number(column), direction);
    table.closest("details")?.setAttribute("open", "");
    table.scrollIntoView({block: "nearest"});
  };
  addEventListener("hashchange", follow);
  follow();
})();
"""


def html_page(title: str, panels: Sequence[Panel], *, images: bool = False) -> str:
    """Return the page: a list of what is on it, then the panels in order.

    Args:
        title: The heading.
        panels: What follows it.
        images: Whether drawings hold pixels, as heat maps do, which are in the page too.
    """
    links = "".join(f'<li><a href="#{panel.slug}">{escape(panel.title)}</a></li>' for panel in panels)
    sections = "\n".join(
        f'<section id="{panel.slug}">\n<h2>{escape(panel.title)}</h2>\n{panel.html}\n</section>' for panel in panels
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_policy(images)}">
<title>{escape(title)}</title>
<style>
{_style()}
</style>
</head>
<body>
<h1>{escape(title)}</h1>
<nav aria-label="On this page"><ul>{links}</ul></nav>
{sections}
<script>{SCRIPT}</script>
</body>
</html>
"""


def markdown_page(title: str, panels: Sequence[Panel]) -> str:
    """Return the same as Markdown; its drawings are the PNG files beside it."""
    parts = [f"# {title}", *(f"## {panel.title}\n\n{panel.markdown}" for panel in panels)]
    return "\n\n".join(parts) + "\n"


def _policy(images: bool) -> str:
    """Return what the browser is told to load and run: nothing but this page's own styles, script and pixels."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    pixels = " img-src data:;" if images else ""
    return f"default-src 'none'; style-src 'unsafe-inline';{pixels} script-src 'sha256-{digest}'; base-uri 'none'"


def _style() -> str:
    """Return the page's style sheet: light or dark as the reader's screen is, and light on paper."""
    dark = (
        ":root { color-scheme: dark; --ink: #e6edf3; --quiet: #9198a1; --line: #3d444d; --edge: #6e7681; "
        "--paper: #0d1117; --shade: #161b22; --link: #58aef0 }"
    )
    dark_screen = f"@media screen and (prefers-color-scheme: dark) {{ {dark} {_colours(COLOURS_ON_DARK)} }}"
    return f"{_CSS.strip()}\n{_colours(COLOURS)}\n{dark_screen}\n{_PRINT.strip()}"


def _colours(colours: tuple[str, ...]) -> str:
    return ":root { " + "; ".join(f"--c{index}: {colour}" for index, colour in enumerate(colours)) + " }"
