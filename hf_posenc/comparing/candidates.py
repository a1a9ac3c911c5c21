"""Which methods suit a model without training, found by trying them on it, and why the others do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from hf_posenc.config import ENCODINGS, RopeScaling
from hf_posenc.registry import METHODS, get_method
from hf_posenc.rows import try_rows

# From what everything runs to what is hardest to serve; of methods that tie, the first kind is taken.
UNPATCHED, STATIC, STAGED, OTHER = range(4)
_STAGED_METHODS = frozenset({"dynamic", "dynamic_yarn"})


@dataclass(frozen=True)
class Candidate:
    """One row to measure.

    Attributes:
        method: Its name; "none" for the model as it is.
        row: What ``patch_model`` is told; None for the model as it is.
    """

    method: str
    row: dict[str, Any] | None

    @property
    def kind(self) -> int:
        return kind_of(self.method)


def kind_of(method: str) -> int:
    """Return how hard a method, with its default options, is to serve: ``UNPATCHED`` to ``OTHER``."""
    if method == "none":
        return UNPATCHED
    if not RopeScaling(method).on_attention_door:
        return STATIC
    return STAGED if method in _STAGED_METHODS else OTHER


def find_candidates(
    model: PreTrainedModel, told: Mapping[str, Any], methods: Sequence[str] = ()
) -> tuple[list[Candidate], dict[str, str]]:
    """Return the rows to measure, the unpatched one first, and the reason for each method that is left out.

    Args:
        model: A loaded model; patched for each method and unpatched again.
        told: Keywords of ``patch_model`` that all methods get, such as ``context_length``.
        methods: Names or aliases; none takes every method that is of use without fine-tuning.

    Raises:
        ValueError: An unknown method, or none that suits the model; with the reasons.
    """
    chosen = list(dict.fromkeys(get_method(name).name for name in methods if name != "none"))
    found, left_out = [Candidate("none", None)], {}
    for name in chosen or [name for name in METHODS if name not in ENCODINGS]:
        if name in ENCODINGS:
            left_out[name] = "takes the place of RoPE, and a model trained with RoPE reads nothing with it"
            continue
        if not chosen and not METHODS[name].zero_shot:
            left_out[name] = "wants fine-tuning"
            continue
        row = {"method": name, **told}
        try:
            try_rows(model, [row])
            found.append(Candidate(name, row))
        except (ValueError, TypeError) as error:
            left_out[name] = str(error)
    if len(found) == 1:
        raise ValueError(_none_suits(left_out))
    return found, left_out


def _none_suits(left_out: Mapping[str, str]) -> str:
    tried = {reason for name, reason in left_out.items() if METHODS[name].zero_shot}
    if len(tried) == 1:  # of the model, not of the methods
        return tried.pop()
    return "no method suits this model without training. " + " ".join(
        f"{name}: {reason}" for name, reason in left_out.items()
    )
