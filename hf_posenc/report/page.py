"""The report as one HTML page that asks no server for anything."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from hf_posenc.report.heat_map import grid_section
from hf_posenc.report.markdown import change_name, column_names, interval_name, legend, measured
from hf_posenc.report.plot import COLOURS, INK
from hf_posenc.report.retrieval import Grid
from hf_posenc.report.tables import Row, Table, length_name, number_name

_CSS = """
:root { color-scheme: light dark; --ink: #1f2328; --quiet: #636c76; --line: #d1d9e0; --paper: #fff; --shade: #f6f8fa }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --quiet: #9198a1; --line: #3d444d; --paper: #0d1117; --shade: #161b22 }
}
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 1.5rem }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem }
h3 { font-size: 1rem; margin: 2rem 0 .5rem }
figure { margin: 1.25rem 0; overflow-x: auto }
figure svg { display: block; width: 100%; min-width: 30rem; max-width: 46rem; height: auto; margin: 0 auto;
  color: var(--ink) }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem }
th, td { padding: .4rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap;
  vertical-align: top }
th { font-weight: 600 }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--paper); text-align: left }
th.text, td.text { text-align: left }
td.original, th.original { background: var(--shade) }
th[scope=row] { font-weight: 400 }
.best { font-weight: 700 }
small { display: block; color: var(--quiet); font-size: .8em; font-weight: 400 }
p.quiet { color: var(--quiet); font-size: .9rem }
table.map { margin: 0 0 1.25rem; print-color-adjust: exact }
table.map td { text-align: center; border: 1px solid var(--paper) }
.maps { display: flex; flex-wrap: wrap; gap: 0 2.5rem }
.maps > div { max-width: 100% }
caption { text-align: left; white-space: nowrap; font-size: .9rem; padding: .4rem 0 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.25rem; font-size: .9rem; margin: 0 0 1rem }
dt { color: var(--quiet) }
dd { margin: 0; overflow-wrap: anywhere }
code { font-size: .9em }
@media (max-width: 34rem) { dl { grid-template-columns: 1fr } dd { margin-bottom: .5rem } th:first-child {
  white-space: normal; max-width: 8.5rem } th, td { padding: .35rem .5rem } }
""".strip()

# The plot's colours, light enough to read on a dark page.
_ON_DARK = ("#58aef0", "#ff8f4a", "#3fcf9f", "#e79cc6", "#f0b429", "#8fd0f5")


def _colour_variables(colours: tuple[str, ...]) -> str:
    return ":root { " + "; ".join(f"--c{index}: {colour}" for index, colour in enumerate(colours)) + " }"


def html_page(
    title: str, tables: list[Table], headlines: list[str], plots: list[str], grids: Sequence[Grid] = ()
) -> str:
    """Return the page: for each table a plot, the numbers, and how they were measured; then the retrieval tasks."""
    parts = zip(tables, headlines, plots, strict=True)
    sections = [_section(table, line, svg) for table, line, svg in parts]
    body = "\n".join([*sections, *map(grid_section, grids)])
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{_CSS}
{_colour_variables(COLOURS)}
@media (prefers-color-scheme: dark) {{ {_colour_variables(_ON_DARK)} }}
</style>
</head>
<body>
<h1>{escape(title)}</h1>
{body}
</body>
</html>
"""


def _section(table: Table, line: str, svg: str) -> str:
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in measured(table))
    return f"""<section>
<h2>{escape(table.title)}</h2>
<p>{escape(line)}</p>
<figure>{_inline(svg, table)}</figure>
<div class="scroll">{_numbers(table)}</div>
<p class="quiet">{escape(legend(table))}</p>
<h3>How it was measured</h3>
<dl>{facts}</dl>
<div class="scroll">{_scored(table)}</div>
</section>"""


def _inline(svg: str, table: Table) -> str:
    """Return the SVG without its file header, its ink following the page's, its ids apart from other plots'."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{table.slug}-", svg)
    label = f'role="img" aria-label="Perplexity by context length: {escape(table.title)}"'
    for index, colour in enumerate(COLOURS):
        svg = svg.replace(colour, f"var(--c{index})")
    return svg.replace(INK, "currentColor").replace("<svg", f"<svg {label}", 1)


def _numbers(table: Table) -> str:
    at_original = ["original" if length in table.originals else "" for length in table.lengths]
    heads = "".join(
        f'<th scope="col" class="{mark}">{escape(name)}</th>'
        for name, mark in zip(column_names(table), at_original, strict=True)
    )
    rows = "\n".join(
        f'<tr><th scope="row">{escape(row.name)}<small>{escape(row.training)}</small></th>'
        + "".join(_cell(table, row, n, mark) for n, mark in zip(table.lengths, at_original, strict=True))
        + "</tr>"
        for row in table.rows
    )
    return f'<table><thead><tr><th scope="col">method</th>{heads}</tr></thead>\n<tbody>{rows}</tbody></table>'


def _cell(table: Table, row: Row, length: int, mark: str) -> str:
    record = row.records.get(length)
    if record is None:
        return f'<td class="{mark}"></td>'
    best = "best" if record.perplexity == table.best(length) else ""
    change = change_name(table.change(row, length))
    return (
        f'<td class="{mark}"><span class="{best}">{number_name(record.perplexity)}</span>'
        f"<small>{interval_name(record)}</small>{f'<small>{change}</small>' if change else ''}</td>"
    )


def _scored(table: Table) -> str:
    rows = "".join(
        f'<tr><td>{length_name(n)}</td><td>{record.n_tokens:,}</td><td class="text"><code>'
        f"{escape(record.text_hash)}</code></td></tr>"
        for n, record in ((n, table.at_length(n)) for n in table.lengths)
    )
    return f'<table><tr><th>length</th><th>tokens scored</th><th class="text">text hash</th></tr>{rows}</table>'
