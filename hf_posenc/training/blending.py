"""A trained model blended with the one before the training, so that short texts stay as good as they were.

The weights are ``before + share * (trained - before)``, all of them by one share, and the rule of the positions is that
of the training. What a model forgets grows with its distance from what it was: such averages keep most of what was
learned at a part of that cost (Wortsman et al. 2022, WiSE-FT, arXiv:2109.01903; Hu et al. 2024, LongRecipe,
arXiv:2409.00509, whose last step it is).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_posenc.data.installed_texts import INSTALLED, pieces
from hf_posenc.data.tokens import spread, whole_pieces
from hf_posenc.evaluation import Record, perplexity
from hf_posenc.evaluation.intervals import Ratio, paired_interval
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.training.retaining import retained_texts
from hf_posenc.utils.dtypes import round_to_stored

logger = logging.getLogger(__name__)

LENGTH = 512  # tokens of a short text, where the original length is no shorter
PIECES = 32  # of each kind, at most
SHORT_TEXTS = "short-texts.jsonl"  # the records, in the folder of a run
_STEPS = 20  # shares are twentieths
_UNKNOWN = 9  # of them at most stay untried between one within the limit and one that is not


def short_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    held_out: Sequence[torch.Tensor],
    original: int,
    seed: int,
) -> dict[str, list[torch.Tensor]]:
    """Return what a model is to read as well as before: held-out texts, its own, and what is on every machine.

    Args:
        model: As it is to be kept.
        tokenizer: Its tokenizer.
        held_out: Token ids of documents that it is not trained on, int64 ``(num_tokens,)`` each.
        original: The original length, in tokens.
        seed: Of the training, whose own texts are others.
    """
    length = min(original, LENGTH)
    own = retained_texts(model, tokenizer, PIECES * length, length, seed + 1)
    whole = whole_pieces(held_out, length)
    kinds = {
        "held-out documents": spread(whole, PIECES),
        "the model's own texts": list(own.ids),
    }
    return kinds | {name: pieces(read(), tokenizer, length, PIECES) for name, read in INSTALLED.items()}


@dataclass(frozen=True)
class Blend:
    """How much of what a training changed is kept, and what it costs on short texts.

    Attributes:
        share: Of the changes of the weights: 1 is the trained model, 0 the one before the training.
        limit: By how much perplexity may rise, 0.01 for 1 %.
        differences: By share, then by kind of text: perplexity over that of the model that is to be kept.
    """

    share: float
    limit: float
    differences: Mapping[float, Mapping[str, Ratio]]

    @property
    def is_within(self) -> bool:
        """Whether no kind of text has a perplexity that rose by more than the limit."""
        return _worst(self.differences[self.share]) <= self.limit

    def rows(self) -> list[dict[str, str]]:
        """Return the differences as rows of a table, by falling share."""
        return [
            {"share": f"{100 * share:.0f} %", **{kind: str(ratio) for kind, ratio in self.differences[share].items()}}
            for share in sorted(self.differences, reverse=True)
        ]

    def __str__(self) -> str:
        kept = "within" if self.is_within else "not within, and no share is;"
        texts = ", ".join(f"{kind} {ratio}" for kind, ratio in self.differences[self.share].items())
        return f"{100 * self.share:.0f} % of the training is kept, {kept} the limit of {100 * self.limit:g} %: {texts}"


class RetentionLimit:
    """Short texts of several kinds, how well the model that is to be kept reads them, and by how much that may fall.

    Args:
        texts: By kind, token ids of one length, int64 ``(length,)`` each.
        limit: By how much their perplexity may rise, 0.01 for 1 %.
    """

    def __init__(self, texts: Mapping[str, Sequence[torch.Tensor]], limit: float) -> None:
        self.texts = {kind: list(of_kind) for kind, of_kind in texts.items() if len(of_kind)}
        self.limit = limit

    def begin(self, model: Any, kept: AbstractContextManager[int], **facts: Any) -> None:
        """Measure the model that is to be kept, and the extended one before its training.

        Args:
            model: Extended, not trained.
            kept: While it is open, the model is the one that is to be kept; gives the tokens that it was trained on.
            **facts: For the records, and where they go, as ``perplexity`` takes them.
        """
        found = self._measure(model, **facts)
        with kept as tokens_trained:
            self._kept = self._measure(model, **{**facts, "tokens_trained": tokens_trained})
        self._before = self._differences(found)
        if (cost := _worst(self._before)) > self.limit:
            logger.warning(
                "before this training the model costs %.1f %% on short texts already, more than keep allows (%.1f %%). "
                "To begin with less: hf-posenc fit, with --adapt and --save-adapter.",
                100 * cost,
                100 * self.limit,
            )

    def remember(self, model: Any) -> None:
        """Keep a copy of the weights that will be trained, in main memory."""
        self._start = _copies(model, {name for name, weight in model.named_parameters() if weight.requires_grad})

    def blend(self, model: Any, *, trained_before: int | None = None, **facts: Any) -> Blend:
        """Give a trained model the largest share of its changes, in twentieths, within the limit on short texts.

        The whole is tried first, then the half; then a parabola through the differences of each kind says which share
        to try next, until it names none that is larger than one within the limit: the cost grows about as the square of
        a share, and a training can also lower what the extension costs. Where none is within it, the best is taken.

        Args:
            model: Trained.
            trained_before: Tokens that the weights before the training had been trained on, to measure them again,
                because the model has been extended further since then; None where it has not.
            **facts: As for ``begin``.
        """
        trained, found = _copies(model, self._start.keys()), {0: self._before}

        def measure(steps: int, **changed: Any) -> None:
            self._set(model, trained, steps)
            found[steps] = self._differences(self._measure(model, **{**facts, **changed}))

        if trained_before is not None:
            measure(0, tokens_trained=trained_before)
        following: int | None = _STEPS
        while following is not None:
            measure(following)
            following = next_share({steps: _values(found[steps]) for steps in found}, self.limit)
        worst = {steps: _worst(of_kinds) for steps, of_kinds in found.items()}
        kept = max((steps for steps in found if worst[steps] <= self.limit), default=min(worst, key=worst.__getitem__))
        self._set(model, trained, kept)
        blend = Blend(kept / _STEPS, self.limit, {steps / _STEPS: found[steps] for steps in found})
        logger.log(logging.INFO if blend.is_within else logging.WARNING, "%s", blend)
        return blend

    def _set(self, model: Any, trained: Mapping[str, torch.Tensor], steps: int) -> None:
        """Set a share, in twentieths, rounded as it will be saved."""
        set_share(model, self._start, trained, steps / _STEPS)
        round_to_stored(RotaryModel(model).model)

    def _measure(self, model: Any, **facts: Any) -> dict[str, Record]:
        return {
            kind: perplexity(model, texts, [len(texts[0])], label=kind, **facts)[0]
            for kind, texts in self.texts.items()
        }

    def _differences(self, found: Mapping[str, Record]) -> dict[str, Ratio]:
        return {kind: paired_interval(found[kind], self._kept[kind]) for kind in found}


@torch.no_grad()
def set_share(model: Any, start: Mapping[str, torch.Tensor], trained: Mapping[str, torch.Tensor], share: float) -> None:
    """Set weights, by name, to a share of the way from those before a training to the trained ones.

    Of low-rank changes that began at zero (LoRA) the second factor alone is scaled, so that their product is.
    """
    parameters = dict(model.named_parameters())
    for name, before in start.items():
        second = start.get(name.replace("lora_A", "lora_B").replace("lora_embedding_A", "lora_embedding_B"), before)
        fresh_factor = second is not before and not second.any()
        weight = trained[name] if fresh_factor else torch.lerp(before.float(), trained[name].float(), share)
        parameters[name].copy_(weight)


def next_share(found: Mapping[int, Sequence[float]], limit: float) -> int | None:
    """Return which share of a training to try next, in twentieths; None where no other one can be expected to be kept.

    Args:
        found: By share, 0 and 20 among them, by how much perplexity rose on each kind of text.
        limit: By how much it may.
    """
    kept = max((steps for steps, values in found.items() if max(values) <= limit), default=None)
    if kept == _STEPS:
        return None
    if len(found) == 2:
        return _STEPS // 2
    nearest = sorted(found, key=lambda steps: abs(max(found[steps]) - limit))[:3]
    through, every = (torch.vander(torch.tensor(steps).double(), 3) for steps in (nearest, range(_STEPS + 1)))
    curves = torch.linalg.solve(through, torch.tensor([found[steps] for steps in nearest], dtype=torch.float64))
    expected = (every @ curves).amax(dim=1)
    lowest = int(expected.argmin())
    least = lowest if kept is None else kept + 1
    too_much = min((steps for steps in found if steps >= least), default=_STEPS)
    larger = range(least, too_much)
    wanted = [steps for steps in larger if expected[steps] <= limit and steps not in found]
    if wanted:
        return wanted[-1]
    if kept is None:
        return None if lowest in found else lowest
    return (kept + too_much) // 2 if too_much - kept > _UNKNOWN else None  # where it is no parabola


def _values(differences: Mapping[str, Ratio]) -> list[float]:
    return [ratio.value - 1 for ratio in differences.values()]


def _copies(model: Any, names: Set[str]) -> dict[str, torch.Tensor]:
    return {name: one.detach().to("cpu", copy=True) for name, one in model.named_parameters() if name in names}


def _worst(differences: Mapping[str, Ratio]) -> float:
    return max(_values(differences))
