"""The panel of a protocol: perplexity by length as a chart and a table, what short texts pay, how it was measured."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hf_posenc.evaluation.rows import row_key
from hf_posenc.report.looks import Looks
from hf_posenc.report.pieces import Cell, Panel, facts, inline, markdown_facts, markdown_lines, quiet, table
from hf_posenc.report.plot import Chart, Line, draw_chart, intervals_words
from hf_posenc.report.tables import Row, Table, length_name, number_name
from hf_posenc.report.words import change_name, column_names, headline, interval_name, legend, measured

_SHORT_COST, _TIE = "short cost", "tie"


def perplexity_panel(results: Table, looks: Looks) -> Panel:
    """Return the panel of one table of comparable perplexities."""
    slug, drawing = f"perplexity_{results.slug}", draw_chart(_chart(results, looks))
    caption = intervals_words(len(results.rows))
    figure = inline(drawing, slug, f"Perplexity by context length: {results.title}", caption)
    lead = headline(results)
    html = f"""<p>{escape(lead)}</p>
{"".join(f'<p class="note">{escape(note)}</p>' for note in results.notes)}
{figure}
{_numbers(results, slug)}
{quiet(legend(results))}
<h3>How it was measured</h3>
{facts(measured(results))}
{_scored(results, slug)}"""
    parts = [
        lead,
        *results.notes,
        _markdown_table(results),
        legend(results),
        f"![Perplexity by length]({slug}.png)",
        caption,
    ]
    parts += [markdown_facts(measured(results)), _markdown_scored(results)]
    return Panel(slug, f"Perplexity: {results.title}", html, "\n\n".join(part for part in parts if part), drawing)


def left_out_panel(notes: Sequence[str]) -> Panel:
    """Return the panel that stands in the place of tables where no row can stand in one, and says why."""
    html = "\n".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    return Panel("perplexity_left_out", "Perplexity: left out", html, "\n\n".join(notes))


def _chart(results: Table, looks: Looks) -> Chart:
    lines = []
    for row in results.rows:
        records = list(row.records.values())
        lines.append(
            Line(
                f"{row.full_name}  {number_name(records[-1].perplexity)}",
                list(row.records),
                [record.perplexity for record in records],
                looks[row_key(row.first)],
                [record.ci_low for record in records],
                [record.ci_high for record in records],
            )
        )
    return Chart(
        f"{results.models}: {results.title}",
        "context length N in tokens",
        "perplexity, lower is better",
        lines,
        [(length, length_name(length)) for length in results.lengths],
        [(original, f"trained on {length_name(original)}") for original in results.originals],
    )


def short_cost_name(results: Table, row: Row) -> tuple[str, str]:
    """Return what short texts pay at most, in percent, and at which length; nothing where there is no telling."""
    found = results.short_cost(row)
    return ("", "") if found is None else (change_name(found[0]), f"at {length_name(found[1])}")


def _numbers(results: Table, slug: str) -> str:
    marks = {length: "original" if length in results.originals else "" for length in results.lengths}
    names = zip(column_names(results), marks.values(), strict=True)
    heads = [Cell("method"), *(Cell(name, mark=mark) for name, mark in names)]
    rows = [
        [Cell(row.name, (row.training,)), *(_cell(results, row, length, mark) for length, mark in marks.items())]
        for row in results.rows
    ]
    if _has_costs(results):  # beside the name, where a phone shows it
        heads.insert(1, Cell(_SHORT_COST))
        for cells, row in zip(rows, results.rows, strict=True):
            name, where = short_cost_name(results, row)
            found = results.short_cost(row)
            cells.insert(1, Cell(name, (where,), sort=found and found[0]))
    return table(slug + "_table", heads, rows)


def _cell(results: Table, row: Row, length: int, mark: str) -> Cell:
    record = row.records.get(length)
    if record is None:
        return Cell("", mark=mark)
    small = (interval_name(record), change_name(results.change(row, length)))
    tie = _TIE if results.is_tied(row, length) else ""
    return Cell(number_name(record.perplexity), small, record.perplexity, mark, results.is_best(row, length), badge=tie)


def _has_costs(results: Table) -> bool:
    return any(results.short_cost(row) is not None for row in results.rows)


def _scored(results: Table, slug: str) -> str:
    records = [(length, results.at_length(length)) for length in results.lengths]
    heads = [Cell("length"), Cell("tokens scored"), Cell("text hash", mark="text")]
    rows = [
        [Cell(length_name(n), sort=n), Cell(f"{one.n_tokens:,}", sort=one.n_tokens), Cell(one.text_hash, mark="hash")]
        for n, one in records
    ]
    return table(slug + "_scored", heads, rows)


def _markdown_table(results: Table) -> str:
    extra = [_SHORT_COST] if _has_costs(results) else []
    rows = []
    for row in results.rows:
        cost = [" ".join(short_cost_name(results, row)).strip()] * len(extra)
        numbers = (_markdown_cell(results, row, length) for length in results.lengths)
        rows.append([row.name, row.training, *cost, *numbers])
    return markdown_lines(["method", "fine-tuning", *extra, *column_names(results)], rows, texts=2)


def _markdown_cell(results: Table, row: Row, length: int) -> str:
    record = row.records.get(length)
    if record is None:
        return ""
    value = number_name(record.perplexity)
    value = f"**{value}**" if results.is_best(row, length) else value
    value += f" {_TIE}" if results.is_tied(row, length) else ""
    return f"{value} ({interval_name(record)}) {change_name(results.change(row, length))}".strip()


def _markdown_scored(results: Table) -> str:
    records = [(length, results.at_length(length)) for length in results.lengths]
    rows = [[length_name(n), f"{one.n_tokens:,}", f"`{one.text_hash}`"] for n, one in records]
    return markdown_lines(["length", "tokens scored", "text hash"], rows)
