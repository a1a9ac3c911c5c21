"""One fit in progress: its model, texts, settings, folder and time limit, which all of its stages share."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from hf_posenc.attention.rotation import Rotation
from hf_posenc.evaluation.rows import extended_as
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.fitting.adapter import Adapter
from hf_posenc.fitting.budget import Budget
from hf_posenc.fitting.config import FitConfig
from hf_posenc.fitting.descent import Step
from hf_posenc.fitting.splitting import Texts
from hf_posenc.fitting.verdict import ADAPTED, FITTED
from hf_posenc.methods.base import Method, plain_frequencies
from hf_posenc.patching.extension_config import NO_METHOD
from hf_posenc.spec import RopeSpec
from hf_posenc.utils.console import quiet


class Fit(NamedTuple):
    """What a fit with one seed found, with the attributes of ``FitResult``."""

    method: str
    options: dict[str, Any]
    adapter: Adapter | None
    steps: list[Step]
    facts: dict[str, Any]

    @property
    def name(self) -> str:
        """The row in tables."""
        return FITTED if self.adapter is None else ADAPTED


@dataclass
class FitRun:
    """The data that the stages of a fit share.

    Attributes:
        rotary: The model, unpatched between the stages.
        tokenizer: Its tokenizer; None where documents came as token ids.
        texts: What is fitted on, and what is held out.
        spec: What the model was trained with.
        rotation: How the family rotates queries and keys.
        config: The settings.
        folder: Where the recordings, the state and the results are kept.
        model_name: The model in records.
        budget: The time it may take.
        pass_seconds: What a forward over a text of the target length takes; 0 until one was timed.
        steps: How many steps each seed takes; None until that is decided.
    """

    rotary: RotaryModel
    tokenizer: PreTrainedTokenizerBase | None
    texts: Texts
    spec: RopeSpec
    rotation: Rotation
    config: FitConfig
    folder: Path
    model_name: str | None
    budget: Budget
    pass_seconds: float = 0.0
    steps: int | None = None

    @property
    def original(self) -> int:
        """The original length, in tokens."""
        return self.spec.original_max_position_embeddings

    @property
    def target(self) -> int:
        """The target length, in tokens."""
        return int(self.config.context_length)

    @property
    def factor(self) -> float:
        """Target / original."""
        return self.target / self.original

    def share_of(self, seed: int) -> float:
        """Return the share of the time that is left for a seed: as much as for each to come."""
        return 1 / (self.config.seed + self.config.seeds - seed)

    def taught(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the part of a text on which the teacher is one: the unextended model only within its length."""
        return ids[: self.original] if self.config.teacher == NO_METHOD else ids

    @contextmanager
    def extended(self, row: dict[str, Any] | None, adapter: Adapter | None = None) -> Iterator[None]:
        """While open, the model is extended as a row says, with changed weights if there are any.

        It warns of nothing: what there is to warn of was said when the rules were tried.
        """
        with warnings.catch_warnings(), quiet("hf_posenc.patching.api", "hf_posenc.evaluation.memory"):
            warnings.simplefilter("ignore")
            changed = nullcontext() if adapter is None else adapter.applied(self.rotary.model)
            with changed, extended_as(self.rotary.model, row):
                yield

    def options(self, divisors: list[float], attention_factor: float) -> dict[str, Any]:
        """Return a list of divisors and a temperature as options of the method ``fitted``."""
        plain = self.config.short_list == "plain"
        return {
            "long_factor": divisors,
            "short_factor": [1.0] * len(divisors) if plain else divisors,
            "attention_factor": attention_factor,
            "fitted_rope_theta": self.spec.rope_theta,
            "fitted_original_length": self.original,
            "fitted_length": self.target,
        }

    def options_of(self, method: Method) -> dict[str, Any]:
        """Return a static method, as it was measured, as options of the method ``fitted``."""
        inv_freq, attention_factor = method.frequencies(self.spec)
        divisors = (plain_frequencies(self.spec) / inv_freq)[: self.spec.rotated_pairs].tolist()
        return {**self.options(divisors, attention_factor), "short_factor": divisors}
