"""The methods that suit a model without training, found by trying them on it, and the reasons against the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from hf_posenc.errors import InvalidRequestError, UnsupportedModelError, argument
from hf_posenc.evaluation.rows import try_rows
from hf_posenc.families.discovery import declared_rope
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.methods.base import Method, StagedMethod
from hf_posenc.methods.registry import get_method, make_method, method_names
from hf_posenc.methods.registry import methods as all_methods
from hf_posenc.patching.api import describe
from hf_posenc.patching.rope_scaling import check_model_values, read_rope_scaling

# From what everything runs to what is hardest to serve; of methods that tie, the first kind is taken.
UNPATCHED, STATIC, STAGED, OTHER = range(4)
# The row of a dictionary, which may be of the same method as another row.
ROPE_SCALING = "rope_scaling"


@dataclass(frozen=True)
class Candidate:
    """One row to measure.

    Attributes:
        name: Name of the row: the method's, or ``ROPE_SCALING``; "none" for the model as it is.
        row: Keywords of ``patch_model``; None for the model as it is.
    """

    name: str
    row: dict[str, Any] | None

    @property
    def method(self) -> str:
        return "none" if self.row is None else str(self.row["method"])

    @property
    def rule(self) -> Method | None:
        """The method with its options, its factor left out; None for the model as it is."""
        if self.row is None:
            return None
        known = get_method(self.method).option_fields()
        return make_method(self.method, 1.0, {name: value for name, value in self.row.items() if name in known})

    @property
    def kind(self) -> int:
        """The difficulty of serving it: ``UNPATCHED`` to ``OTHER``."""
        if (rule := self.rule) is None:
            return UNPATCHED
        if not rule.needs_hf_posenc:
            return STATIC
        return STAGED if isinstance(rule, StagedMethod) else OTHER


def find_candidates(
    model: PreTrainedModel, shared: Mapping[str, Any], methods: Sequence[str] = (), rope_scaling: str | None = None
) -> tuple[list[Candidate], dict[str, str]]:
    """Return the rows to measure, the unpatched one first, and the reason for each method that is left out.

    Args:
        model: A loaded model; patched for each method and unpatched again.
        shared: Keywords of ``patch_model`` that all methods get, such as ``context_length``.
        methods: Names or aliases; none takes every method that is of use without fine-tuning.
        rope_scaling: A dictionary for one more row, instead of the method's own if that is the same.

    Raises:
        ValueError: An unknown method, or none that suits the model; with the reasons. Or the dictionary does not suit
            it, or does not go as far as requested.
    """
    chosen = list(dict.fromkeys(get_method(name).name for name in methods if name != "none"))
    found, left_out, encodings = [Candidate("none", None)], {}, method_names("is_encoding")
    theirs = None if rope_scaling is None else _of_dictionary(model, shared, rope_scaling)
    if theirs is not None:
        try_rows(model, [theirs.row])
        found.append(theirs)
    every = [] if methods and theirs is not None else [name for name in all_methods() if name not in encodings]
    for name in chosen or every:
        if name in encodings:
            left_out[name] = "takes the place of RoPE, and a model trained with RoPE reads nothing with it"
            continue
        if not chosen and not all_methods()[name].zero_shot:
            left_out[name] = "needs fine-tuning"
            continue
        own = Candidate(name, {"method": name, **shared})
        if theirs is not None and own.rule == theirs.rule and _lengths(own) == _lengths(theirs):
            left_out[name] = f"is the same as {ROPE_SCALING}"
            continue
        try:
            try_rows(model, [own.row])
            found.append(own)
        except UnsupportedModelError as error:
            of_model = error.method is None  # of the model, whatever the method: the same for all
            left_out[name] = str(error) if of_model else f"model_type {error.model_type!r}: {error.reason}"
        except (ValueError, TypeError) as error:
            left_out[name] = str(error)
    if len(found) == 1:
        raise InvalidRequestError(_none_suits(left_out))
    return found, left_out


def _of_dictionary(model: PreTrainedModel, shared: Mapping[str, Any], rope_scaling: str) -> Candidate:
    """Return the row of a dictionary: its method, factor, lengths and options.

    Raises:
        ValueError: It contradicts the model or the request, or ends before the requested length.
    """
    rule = read_rope_scaling(rope_scaling)
    rule.refuse_other(original_max_position_embeddings=shared.get("original_max_position_embeddings"))
    check_model_values(rule.model_values, declared_rope(RotaryModel(model).text_config))
    row = {**shared, "method": rule.method, **rule.options}
    own = describe(model)["original_max_position_embeddings"]
    if rule.original_max_position_embeddings not in (None, own):
        row["original_max_position_embeddings"] = rule.original_max_position_embeddings
    if rule.factor is not None:
        original, least = row.get("original_max_position_embeddings") or own, int(shared["context_length"])
        row["context_length"] = round(rule.factor * original)
        if row["context_length"] < least:
            raise InvalidRequestError(
                f"{argument('rope_scaling')} goes to {row['context_length']} tokens only (factor {rule.factor:g} of "
                f"{original}), and --context-length is {least}: raise its factor, or leave the factor out to go as far "
                "as requested."
            )
    return Candidate(ROPE_SCALING, row)


def _lengths(one: Candidate) -> tuple[Any, ...]:
    return tuple((one.row or {}).get(name) for name in ("original_max_position_embeddings", "context_length"))


def _none_suits(left_out: Mapping[str, str]) -> str:
    tried = {reason for name, reason in left_out.items() if all_methods()[name].zero_shot}
    if len(tried) == 1:  # of the model, not of the methods
        return tried.pop()
    return "no method suits this model without training. " + " ".join(
        f"{name}: {reason}" for name, reason in left_out.items()
    )
