"""The pictures of the results, drawn from docs/records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hf_posenc.reporting.looks import COLOURS, COLOURS_ON_DARK, INK, METHOD_LOOKS, PLAIN, Look, numbered_look
from hf_posenc.reporting.page import inline_svg
from hf_posenc.reporting.plot import Chart, Drawing, Line, draw, draw_chart, length_ticks, new_figure
from hf_posenc.utils.units import ContextLength
from measured import read_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ZERO_SHOT = "smollm2-zero-shot-2x.jsonl"
SHOWN = ("unpatched", "ntk", "yarn", "dynamic_yarn", "dca")  # linear is far above, the others lie on these
SHOWN_OF_STUDY = ("rerope", "dynamic_yarn", "ntk", "yarn", "no scaling", "linear")
PERPLEXITY = "perplexity, lower is better"


def result_pictures() -> Iterator[tuple[str, Drawing]]:
    """Return the name and the drawing of every picture of the results."""
    yield "smollm2_zero_shot", draw_chart(zero_shot_chart())
    rows = [
        row for row in read_rows("smollm2-zero-shot-4x.csv") if row["name"] != "linear" and "growth" not in row["name"]
    ]
    title = "SmolLM2-135M reads Persuasion, factor 4, no training"
    yield "smollm2_factor_4", draw_chart(_by_length(rows, title, "8k", "trained on 8k"))
    title = "Tiny model of the demo, factor 4"
    yield "demo", draw_chart(_by_length(read_rows("demo.csv"), title, "256", "trained on 256"))
    title = "Trained with each encoding, 256 tokens at a time"
    yield "encodings", draw_chart(_by_length(read_rows("encodings.csv"), title, "256", "trained on 256"))
    yield "study_budget", draw_chart(_study_chart("study-budget-4x.csv", "1024", 62, "yarn, LoRA"))
    yield "study_budget_8x", draw_chart(_study_chart("study-budget-8x.csv", "2048", 75, "yarn, PoSE"))
    yield "smollm2_fine_tuned", draw_chart(_fine_tuned_chart())
    yield (
        "smollm2_passkey",
        draw(partial(_passkey_maps, (1, 4), (7.6, 2.2)), partial(_passkey_maps, (4, 1), (3.4, 6.4))),
    )


def zero_shot_chart() -> Chart:
    """Return the chart of perplexity by length, with and without the most different methods."""
    rows = [row for row in read_rows(ZERO_SHOT) if row["name"] in SHOWN]
    return _by_length(rows, "SmolLM2-135M reads Persuasion, factor 2, no training", "8k", "trained on 8k")


def readme_svg() -> str:
    """Return the first picture as a file that follows the light or dark theme of the page that it is in."""
    svg = str(inline_svg(draw_chart(zero_shot_chart()).svg.decode(), "readme"))
    end = svg.index(">") + 1
    style = f"<style>{_theme('#1f2328', '#ffffff', COLOURS)}\n"
    style += f"@media (prefers-color-scheme: dark) {{ {_theme('#e6edf3', '#0d1117', COLOURS_ON_DARK)} }}</style>"
    return f"<svg{svg[:end]}\n{style}{svg[end:]}".rstrip() + "\n"


def _theme(ink: str, paper: str, colours: Sequence[str]) -> str:
    named = " ".join(f"--c{number}: {colour};" for number, colour in enumerate(colours))
    return f"svg {{ color: {ink}; --paper: {paper}; {named} }}"


def _by_length(rows: Sequence[dict[str, str]], title: str, trained: str, words: str) -> Chart:
    """Return the chart of rows whose columns are lengths; other columns are left out."""
    lengths = {column: ContextLength(column) for column in rows[0] if column != "name" and "/" not in column}
    lines = []
    for row in rows:
        measured = [column for column in lengths if row[column]]
        values = [float(row[column]) for column in measured]
        lines.append(
            Line(_label(row, measured[-1]), [lengths[column] for column in measured], values, _look(row["name"]))
        )
    ticks, mark = length_ticks(list(lengths.values())), (lengths[trained], words)
    return Chart(title, "tokens read", PERPLEXITY, lines, ticks, [mark])


def _label(row: dict[str, str], last: str) -> str:
    return f"{row['name']}  {row[last]}"


def _look(name: str) -> Look:
    """Return how a method is drawn in reports too; a second row of it has other dashes, a trained one is bold."""
    known = {**METHOD_LOOKS, "no scaling": len(METHOD_LOOKS)}
    word = next((word for word in sorted(known, key=len, reverse=True) if name.startswith(word)), None)
    if word is None:
        return PLAIN
    if name.endswith("fine-tuned"):
        return numbered_look(known[word])._replace(bold=True)
    return numbered_look(known[word], variant=int(name != word))._replace(fill="none" if name == word else "left")


def _study_chart(file: str, at: str, highest: float, another: str) -> Chart:
    """Return perplexity at a length by the tokens of fine-tuning; what is above ``highest`` is left out.

    ``another`` is the one row that is shown besides those of both studies.
    """
    rows = read_rows(file, at=at)
    budgets = [column for column in rows[0] if column != "name"]
    lines = []
    for row in rows:
        points = [(number, float(row[budget])) for number, budget in enumerate(budgets) if row[budget]]
        points = [(number, value) for number, value in points if value < highest]
        if row["name"] in (*SHOWN_OF_STUDY, another):
            corners = [at for at, _ in points], [value for _, value in points]
            lines.append(Line(row["name"], *corners, _look(row["name"])))
        elif "from the start" in row["name"]:
            everywhere = list(range(len(budgets)))
            lines.append(Line(row["name"], everywhere, [points[0][1]] * len(budgets), Look(INK, "", "dashed")))
    ticks = [(float(number), budget) for number, budget in enumerate(budgets)]
    title = f"256 to {at} tokens: perplexity at {at} tokens of the held-out novel"
    return Chart(title, "tokens of fine-tuning", f"perplexity; above {highest} is not shown", lines, ticks, log_x=False)


def _fine_tuned_chart() -> Chart:
    """Return perplexity by length of three texts, before and after fine-tuning: thin and bold lines."""
    rows = read_rows("smollm2-fine-tuned.csv", **{"with": "dynamic_yarn"})
    lengths = {column: ContextLength(column) for column in rows[0] if column not in ("name", "text")}
    texts = list(dict.fromkeys(row["text"] for row in rows))
    lines = []
    for row in rows:
        trained = row["name"] == "trained"
        look = numbered_look(texts.index(row["text"]))._replace(bold=trained, fill="full" if trained else "none")
        words = f"{row['text']}, {row['name']}  {row['32k']}"
        lines.append(Line(words, list(lengths.values()), [float(row[length]) for length in lengths], look))
    mark = (lengths["8k"], "trained on 8k")
    title = "SmolLM2-135M with dynamic_yarn, factor 4, before and after fine-tuning"
    return Chart(title, "tokens read", PERPLEXITY, lines, length_ticks(list(lengths.values())), [mark])


def _passkey_maps(grid: tuple[int, int], size: tuple[float, float]) -> Figure:
    """Draw which passkeys were answered right: filled squares."""
    rows = read_rows("smollm2-passkey-map.csv")
    lengths = [column for column in rows[0] if column not in ("name", "scored", "depth")]
    kinds = list(dict.fromkeys((row["name"], row["scored"]) for row in rows))
    figure = new_figure(size)
    for axes, (name, scored) in zip(figure.subplots(*grid, squeeze=False).flat, kinds, strict=True):
        chosen = [row for row in rows if (row["name"], row["scored"]) == (name, scored)]
        for y, row in enumerate(chosen):
            for x, length in enumerate(lengths):
                _draw_answer(axes, x, y, row[length] == "1", numbered_look(METHOD_LOOKS[name]).colour)
        axes.set_xticks(range(len(lengths)), lengths)
        axes.set_yticks(range(len(chosen)), [f"{row['depth']} %" for row in chosen])
        axes.set(xlim=(-0.6, len(lengths) - 0.4), ylim=(len(chosen) - 0.4, -0.6), aspect="equal")
        axes.set_title(f"{name}\n{scored}")
    figure.supylabel("depth", fontsize=9)
    figure.supxlabel("tokens read; a filled square is a right answer", fontsize=9)
    return figure


def _draw_answer(axes: Any, x: int, y: int, right: bool, colour: str) -> None:
    from matplotlib.patches import Rectangle

    face = colour if right else "none"
    axes.add_patch(Rectangle((x - 0.42, y - 0.42), 0.84, 0.84, facecolor=face, edgecolor=colour, linewidth=1))
