"""The frequency panel as a chart and two tables: what each method does on the whole, and to each rotary pair."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hf_posenc.evaluation.records import Record, RetrievalRecord
from hf_posenc.evaluation.rows import row_key, short_model_names
from hf_posenc.methods.base import STOPPED
from hf_posenc.report.frequencies import Rule, make_rules, wavelengths
from hf_posenc.report.looks import Looks
from hf_posenc.report.page import Block, Cell, Figure, NumberTable, Panel, Paragraph
from hf_posenc.report.plot import Chart, Line, draw_chart
from hf_posenc.utils.units import length_name

_HEADS = ("method", "angles never trained", "at", "kept", "between", "stretched in full", "attention factor")


def frequency_panels(records: Sequence[Record | RetrievalRecord], looks: Looks) -> list[Panel]:
    """Return a panel for each model whose records say what its frequencies were, which may be none."""
    models = make_rules(records)
    names = short_model_names(record.model for record in records)
    return [
        _panel(
            rules,
            "frequencies" if at == 0 else f"frequencies_{at + 1}",
            names[rules[0].first.model],
            len(models) > 1,
            looks,
        )
        for at, rules in enumerate(models)
    ]


def _panel(rules: list[Rule], slug: str, model: str, several: bool, looks: Looks) -> Panel:
    chart = _chart(rules, model, looks)
    label, alt = "How far each method stretches each rotary pair", "How far each pair is stretched"
    shown = [rule for rule in rules if not rule.changes_distances]
    pairs = _pair_rows(rules[0], shown)
    blocks: list[Block] = [
        Paragraph(_lead(rules[0])),
        NumberTable(slug + "_methods", [Cell(head) for head in _HEADS], [_summary(rule) for rule in rules]),
        Paragraph(_legend(rules), "quiet"),
        NumberTable(slug + "_pairs", _pair_heads(rules[0], shown), pairs, folded=f"All {len(pairs)} pairs"),
    ]
    if chart is not None:
        blocks.insert(1, Figure(draw_chart(chart), slug, label, alt=alt))
    return Panel(slug, "Frequencies" + (f": {model}" if several else ""), blocks)


def _lead(rule: Rule) -> str:
    spec = rule.spec
    still = f", and {spec.unrotated_pairs} more are not rotated" if spec.unrotated_pairs else ""
    count = sum(turns < 1 for turns in rule.turns[: spec.rotated_pairs])
    never = f"{count} of them never complete" if count != 1 else "One of them never completes"
    return (
        f"{spec.rotated_pairs} pairs of features are rotated by the position, at base {spec.rope_theta:g}. {never} "
        f"a turn within the {length_name(spec.original_max_position_embeddings)} tokens of training{still}."
    )


def _legend(rules: Sequence[Rule]) -> str:
    text = (
        "Stretch is how many times longer the wavelength of a pair becomes: 1 is kept, the method's factor or more is "
        "in full. Angles never trained: pairs that, at the length given, are rotated further than ever in training, "
        "where they did not complete a turn. By hf_posenc's closed forms, from what the records say."
    )
    if any(rule.changes_distances for rule in rules):
        text += " Where it says distances, the frequencies stay, and far distances are shortened."
    return text


def _summary(rule: Rule) -> list[Cell]:
    unseen, factor = rule.unseen(), rule.frequencies[1]
    shares = [Cell(str(count), sort=count) for count in rule.shares()]
    return [
        Cell(rule.name),
        Cell("distances") if unseen is None else Cell(f"{unseen} pairs" if unseen != 1 else "1 pair", sort=unseen),
        Cell(length_name(rule.reach), sort=rule.reach),
        *shares,
        Cell(f"{factor:.4g}", sort=factor),
    ]


def _pair_heads(rule: Rule, shown: Sequence[Rule]) -> list[Cell]:
    original = length_name(rule.spec.original_max_position_embeddings)
    names = (one.name for one in _extended(shown))
    heads = ["pair", "wavelength in tokens", f"turns in {original}", "a whole turn", *names]
    return [Cell(head) for head in heads]


def _pair_rows(rule: Rule, shown: Sequence[Rule]) -> list[list[Cell]]:
    """Return a row for each rotated pair; the methods' cells are its stretch."""
    rows = []
    for pair, (tokens, turns) in enumerate(zip(wavelengths(rule.spec), rule.turns, strict=False)):
        cells = [Cell(str(pair), sort=pair), Cell(_digits(tokens), sort=tokens), Cell(_digits(turns), sort=turns)]
        cells.append(Cell("never", mark="never") if turns < 1 else Cell("yes"))
        stretches = (one.stretch[pair] for one in _extended(shown))
        rows.append([*cells, *map(_stretch_cell, stretches)])
    return rows


def _stretch_cell(stretch: float) -> Cell:
    return Cell("stopped", sort=STOPPED) if math.isinf(stretch) else Cell(f"{stretch:.3f}", sort=stretch)


def _extended(rules: Sequence[Rule]) -> list[Rule]:
    return [rule for rule in rules if rule.method.name != "none"]


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _chart(rules: Sequence[Rule], model: str, looks: Looks) -> Chart | None:
    # A pair that is stopped is stretched without end: no chart shows that.
    shown = [rule for rule in rules if not rule.changes_distances and math.isfinite(max(rule.stretch))]
    if not _extended(shown):
        return None
    spec = rules[0].spec
    turns = rules[0].turns[: spec.rotated_pairs]
    original = length_name(spec.original_max_position_embeddings)
    lines = [Line(rule.name, turns, rule.stretch, looks[row_key(rule.first)]) for rule in shown]
    return Chart(
        f"{model}: how far each pair is stretched",
        f"turns of the pair within the {original} tokens of training",
        "stretch of its wavelength",
        lines,
        [(at, f"{at:,.4g}") for at in _decades(turns)],
        [(1.0, "one turn")] if turns[-1] < 1 else [],
        falls=True,
        shade=(turns[-1], 1.0) if turns[-1] < 1 else None,
    )


def _decades(turns: Sequence[float]) -> list[float]:
    return [10.0**power for power in range(-9, 10) if turns[-1] <= 10.0**power <= turns[0]]
