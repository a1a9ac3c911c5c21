"""The effect of methods on each rotary pair, by their closed forms: as numbers, as a chart, and as a report's panel."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from hf_posenc.attention.staged import Stages
from hf_posenc.evaluation.records import AnyRecord
from hf_posenc.evaluation.rows import row_key, rule_name, short_model_names
from hf_posenc.methods.base import (
    STOPPED,
    DistanceMethod,
    Encoding,
    Frequencies,
    Method,
    StagedMethod,
    Unscaled,
    plain_frequencies,
)
from hf_posenc.methods.registry import read_method
from hf_posenc.reporting.looks import Looks
from hf_posenc.reporting.page import Block, Cell, Figure, NumberTable, Panel, Paragraph
from hf_posenc.reporting.plot import Chart, Line, draw_chart
from hf_posenc.spec import RopeSpec
from hf_posenc.utils.units import length_name, number_name

_SAME = 0.005  # relative: a pair is kept if stretched by less, and stretched in full if within this of the factor
_EPSILON = 1e-6  # relative: what rounding may do
_HEADS = ("method", "angles never trained", "at", "kept", "between", "stretched in full", "attention factor")


@dataclass(frozen=True)
class PairRule:
    """The effect of a method on each rotary pair of a model.

    Attributes:
        name: Name of the row of the model.
        spec: What the model was trained with.
        method: The requested method; method ``"none"`` for the model as it is.
        reach: The length it is looked at, in tokens: its target, or the longest measured of the unpatched model.
    """

    name: str
    spec: RopeSpec
    method: Method
    reach: int

    @property
    def changes_distances(self) -> bool:
        """Whether it leaves every frequency as it is, and changes the distance between a query and a key."""
        return isinstance(self.method, (DistanceMethod, Encoding))

    @cached_property
    def frequencies(self) -> Frequencies:
        """``inv_freq``, float64 ``(num_pairs,)``, and ``attention_factor`` of a forward of ``reach`` tokens."""
        if isinstance(self.method, StagedMethod) and self.method.needs_hf_posenc:
            stages = Stages(self.spec, self.method)
            frequencies: Frequencies = stages.frequencies(int(stages.of(torch.tensor([self.reach - 1]))))
            return frequencies
        return self.method.frequencies(self.spec, self.reach)

    @cached_property
    def rotations(self) -> list[float]:
        """Rotations of each pair over the original length, as the model was trained; 0 for unrotated pairs."""
        return (self._plain * self.spec.original_max_position_embeddings / (2 * math.pi)).tolist()

    @cached_property
    def stretch(self) -> list[float]:
        """The factor by which the wavelength of each rotated pair becomes longer."""
        rotated = self.spec.rotated_pairs
        return (self._plain[:rotated] / self.frequencies[0][:rotated]).tolist()

    @property
    def _plain(self) -> torch.Tensor:
        return plain_frequencies(self.spec)

    def unseen(self) -> int | None:
        """Return the number of pairs that reach unseen angles; None for a rule that changes distances.

        A pair that completed a rotation has had every angle; one that did not has had none beyond its last one.
        """
        if self.changes_distances:
            return None
        reached = self.frequencies[0] * self.reach / (2 * math.pi)
        pairs: zip[tuple[float, float]] = zip(self.rotations, reached.tolist(), strict=True)
        return sum(had < 1 and comes > had * (1 + _EPSILON) for had, comes in pairs)

    def shares(self) -> tuple[int, int, int]:
        """Return the numbers of rotated pairs that are kept, in between, and stretched by the whole factor or more."""
        classes = [self.share_of(pair) for pair in range(len(self.stretch))]
        return classes.count("kept"), classes.count("blended"), classes.count("stretched")

    def share_of(self, pair: int) -> str:
        """Return the class of a rotated pair: ``"kept"``, ``"blended"`` or ``"stretched"``."""
        if self.stretch[pair] <= 1 + _SAME:
            return "kept"
        return "stretched" if self.stretch[pair] >= self.method.factor * (1 - _SAME) else "blended"

    def incomplete(self) -> tuple[int, int]:
        """Return the numbers of pairs that complete no rotation: in training, and under the rule within ``reach``."""
        rotated = self.spec.rotated_pairs
        reached = (self.frequencies[0][:rotated] * self.reach / (2 * math.pi)).tolist()
        return sum(rotations < 1 for rotations in self.rotations[:rotated]), sum(rotations < 1 for rotations in reached)


@dataclass(frozen=True)
class Rule(PairRule):
    """A method as a model was extended with it; ``first`` is a record of it."""

    first: AnyRecord


def wavelengths(spec: RopeSpec) -> list[float]:
    """Return the tokens of one rotation of each rotated pair."""
    inv_freq = plain_frequencies(spec)[: spec.rotated_pairs]
    return (2 * math.pi / inv_freq).tolist()


def stretch_chart(title: str, rule: PairRule, lines: Sequence[Line]) -> Chart:
    """Return a chart of how far pairs are stretched, the fast ones to the left; those of no full rotation are shaded.

    Args:
        title: Its title.
        rule: Any rule of the model.
        lines: By the rotations of each rotated pair.
    """
    rotations = rule.rotations[: rule.spec.rotated_pairs]
    decades = [10.0**power for power in range(-9, 10) if rotations[-1] <= 10.0**power <= rotations[0]]
    has_slow = rotations[-1] < 1 < rotations[0]
    trained = length_name(rule.spec.original_max_position_embeddings)
    return Chart(
        title,
        f"rotations of the pair within the {trained} tokens of training",
        "stretch of its wavelength",
        lines,
        [(decade, f"{decade:,.4g}") for decade in decades],
        [(1.0, "one rotation")] if has_slow else [],
        falls=True,
        shade=(rotations[-1], 1.0) if has_slow else None,
    )


def make_rules(records: Sequence[AnyRecord]) -> list[list[Rule]]:
    """Return the rules of each model of a report, in order of appearance, the unpatched one first.

    Records of models without a rotary embedding or an original length are left out, and those of methods or options
    that are not known here: of another package, or another version.
    """
    models: dict[tuple[Any, ...], dict[str, AnyRecord]] = {}
    longest: dict[tuple[Any, ...], int] = {}
    for record in records:
        if not record.rope or record.original_max_position_embeddings is None:
            continue
        key = (record.model, record.original_max_position_embeddings, *sorted(record.rope.items()))
        rule = json.dumps([record.method, record.factor, record.options], sort_keys=True)
        models.setdefault(key, {}).setdefault(rule, record)
        longest[key] = max(record.context_length, longest.get(key, 0))
    rules = [
        [made for record in found.values() if (made := _rule(record, longest[key])) is not None]
        for key, found in models.items()
    ]
    return [sorted(of_model, key=lambda rule: rule.method.name != "none") for of_model in rules if of_model]


def _rule(record: AnyRecord, longest: int) -> Rule | None:
    """Return the rule of a record; None if its method or an option is not known here."""
    original = record.original_max_position_embeddings or 0
    spec = RopeSpec(original_max_position_embeddings=original, **record.rope)
    if record.method == "none":
        return Rule(rule_name(record), spec, Unscaled(), longest, record)
    try:
        method = read_method(record.method, record.factor, record.options)
    except (ValueError, TypeError):
        return None
    return Rule(rule_name(record), spec, method, round(record.factor * original), record)


def frequency_panels(records: Sequence[AnyRecord], looks: Looks) -> list[Panel]:
    """Return a panel for each model whose records hold its frequencies; the list can be empty."""
    models, names = make_rules(records), short_model_names(record.model for record in records)
    return [
        _panel(rules, f"frequencies_{at}" if at > 1 else "frequencies", names[rules[0].first.model], len(models), looks)
        for at, rules in enumerate(models, 1)
    ]


def _panel(rules: list[Rule], slug: str, model: str, num_models: int, looks: Looks) -> Panel:
    first, shown = rules[0], [rule for rule in rules if not rule.changes_distances]
    extended = [rule for rule in shown if rule.method.name != "none"]
    # A pair that is stopped is stretched without end: no chart shows that.
    drawn = [rule for rule in shown if math.isfinite(max(rule.stretch))]
    pairs = _pair_rows(first, extended)
    heads = ["pair", "wavelength in tokens", f"rotations in {length_name(first.spec.original_max_position_embeddings)}"]
    blocks: list[Block] = [
        Paragraph(_lead(first)),
        NumberTable(slug + "_methods", _HEADS, [_summary(rule) for rule in rules]),
        Paragraph(_legend(rules), "quiet"),
        NumberTable(
            slug + "_pairs",
            [*heads, "a whole rotation", *(rule.name for rule in extended)],
            pairs,
            folded=f"All {len(pairs)} pairs",
        ),
    ]
    if any(rule in extended for rule in drawn):
        rotations = first.rotations[: first.spec.rotated_pairs]
        lines = [Line(rule.name, rotations, rule.stretch, looks[row_key(rule.first)]) for rule in drawn]
        drawing = draw_chart(stretch_chart(f"{model}: how far each pair is stretched", first, lines))
        label, alt = "How far each method stretches each rotary pair", "How far each pair is stretched"
        blocks.insert(1, Figure(drawing, slug, label, alt=alt))
    return Panel(slug, "Frequencies" + (f": {model}" if num_models > 1 else ""), blocks)


def _lead(rule: Rule) -> str:
    spec = rule.spec
    still = f", and {spec.unrotated_pairs} more are not rotated" if spec.unrotated_pairs else ""
    count = sum(rotations < 1 for rotations in rule.rotations[: spec.rotated_pairs])
    never = f"{count} of them never complete" if count != 1 else "One of them never completes"
    return (
        f"{spec.rotated_pairs} pairs of features are rotated by the position, at base {spec.rope_theta:g}. {never} "
        f"a rotation within the {length_name(spec.original_max_position_embeddings)} tokens of training{still}."
    )


def _legend(rules: Sequence[Rule]) -> str:
    text = (
        "Stretch is how many times longer the wavelength of a pair becomes: 1 is kept, the method's factor or more is "
        "in full. Angles never trained: pairs that, at the length given, are rotated further than ever in training, "
        "where they did not complete a rotation. By hf_posenc's closed forms, from what the records say."
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


def _pair_rows(rule: Rule, extended: Sequence[Rule]) -> list[list[Cell]]:
    """Return a row for each rotated pair; the methods' cells are its stretch."""
    rows = []
    for pair, (tokens, rotations) in enumerate(zip(wavelengths(rule.spec), rule.rotations, strict=False)):
        numbers = [
            Cell(str(pair), sort=pair),
            Cell(number_name(tokens), sort=tokens),
            Cell(number_name(rotations), sort=rotations),
        ]
        complete = Cell("never", mark="never") if rotations < 1 else Cell("yes")
        rows.append([*numbers, complete, *(_stretch_cell(one.stretch[pair]) for one in extended)])
    return rows


def _stretch_cell(stretch: float) -> Cell:
    return Cell("stopped", sort=STOPPED) if math.isinf(stretch) else Cell(f"{stretch:.3f}", sort=stretch)
