"""The frequency panel: what each method of a report does to each rotary pair, by the closed forms."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from hf_posenc.attention.staged import Stages
from hf_posenc.evaluation.records import Record, RetrievalRecord
from hf_posenc.methods.base import (
    DistanceMethod,
    Encoding,
    Frequencies,
    Method,
    StagedMethod,
    Unscaled,
    plain_frequencies,
)
from hf_posenc.methods.registry import make_method
from hf_posenc.report.comparable import rule_name
from hf_posenc.spec import RopeSpec

_SAME = (
    0.005  # relative: a pair stretched by less is kept, one stretched by this much less than the factor has all of it
)
_EPSILON = 1e-6  # relative: what rounding may do


@dataclass(frozen=True)
class PairRule:
    """What a method does to each rotary pair of a model.

    Attributes:
        name: Of its row.
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
        if isinstance(self.method, StagedMethod) and self.method.runs_in_attention:
            stages = Stages(self.spec, self.method)
            found: Frequencies = stages.frequencies(int(stages.of(torch.tensor([self.reach - 1]))))
            return found
        return self.method.frequencies(self.spec, self.reach)

    @cached_property
    def turns(self) -> list[float]:
        """Turns of each pair over the original length, as the model was trained; 0 for pairs that are not rotated."""
        return (self._plain * self.spec.original_max_position_embeddings / (2 * math.pi)).tolist()

    @cached_property
    def stretch(self) -> list[float]:
        """How many times longer the wavelength of each rotated pair becomes."""
        turning = self.spec.rotated_pairs
        return (self._plain[:turning] / self.frequencies[0][:turning]).tolist()

    @property
    def _plain(self) -> torch.Tensor:
        return plain_frequencies(self.spec)

    def unseen(self) -> int | None:
        """Return how many pairs reach angles they never had in training; None of a rule that changes distances.

        A pair that completed a turn has had every angle; one that did not has had none beyond its last one.
        """
        if self.changes_distances:
            return None
        reached = self.frequencies[0] * self.reach / (2 * math.pi)
        pairs: zip[tuple[float, float]] = zip(self.turns, reached.tolist(), strict=True)
        return sum(had < 1 and comes > had * (1 + _EPSILON) for had, comes in pairs)

    def shares(self) -> tuple[int, int, int]:
        """Return how many of the rotated pairs are kept, in between, and stretched by the whole factor or more."""
        found = [self.share_of(pair) for pair in range(len(self.stretch))]
        return found.count("kept"), found.count("blended"), found.count("stretched")

    def share_of(self, pair: int) -> str:
        """Return which of these a rotated pair is: ``"kept"``, ``"blended"`` or ``"stretched"``."""
        if self.stretch[pair] <= 1 + _SAME:
            return "kept"
        return "stretched" if self.stretch[pair] >= self.method.factor * (1 - _SAME) else "blended"

    def incomplete(self) -> tuple[int, int]:
        """Return how many of the rotated pairs complete no turn: in training, and under the rule within ``reach``."""
        turning = self.spec.rotated_pairs
        reached = (self.frequencies[0][:turning] * self.reach / (2 * math.pi)).tolist()
        return sum(turns < 1 for turns in self.turns[:turning]), sum(turns < 1 for turns in reached)


@dataclass(frozen=True)
class Rule(PairRule):
    """A method as a model was extended with it.

    Attributes:
        first: A record of it.
    """

    first: Record | RetrievalRecord

    @property
    def full_name(self) -> str:
        return self.name


def wavelengths(spec: RopeSpec) -> list[float]:
    """Return the tokens of one turn of each rotated pair."""
    inv_freq = plain_frequencies(spec)[: spec.rotated_pairs]
    return (2 * math.pi / inv_freq).tolist()


def make_rules(records: Sequence[Record | RetrievalRecord]) -> list[list[Rule]]:
    """Return the rules of each model of a report, in order of appearance, the unpatched one first.

    Records without ``rope`` or original length, as older files have, are left out.
    """
    models: dict[tuple[Any, ...], dict[str, Record | RetrievalRecord]] = {}
    longest: dict[tuple[Any, ...], int] = {}
    for record in records:
        if not record.rope or record.original_max_position_embeddings is None:
            continue
        key = (record.model, record.original_max_position_embeddings, *sorted(record.rope.items()))
        rule = json.dumps([record.method, record.factor, record.options], sort_keys=True)
        models.setdefault(key, {}).setdefault(rule, record)
        longest[key] = max(record.context_length, longest.get(key, 0))
    rules = [[_rule(record, longest[key]) for record in found.values()] for key, found in models.items()]
    return [sorted(of_model, key=lambda rule: rule.method.name != "none") for of_model in rules]


def _rule(record: Record | RetrievalRecord, longest: int) -> Rule:
    name = rule_name(record)
    original = record.original_max_position_embeddings or 0
    spec = RopeSpec(original_max_position_embeddings=original, **record.rope)
    if record.method == "none":
        return Rule(name, spec, Unscaled(), longest, record)
    method = make_method(record.method, record.factor, record.options)
    return Rule(name, spec, method, round(record.factor * original), record)
