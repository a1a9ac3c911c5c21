"""The ``rope_scaling`` dictionaries that people have, in the words of Transformers, vLLM, LLaMA-Factory and Axolotl."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_posenc.config import check_length, check_number
from hf_posenc.registry import get_method, make_scaling

# Their names for rules, and ours. Their ``dynamic`` has one scale for a whole forward, which we call its scope.
_RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("linear", {}),
    "dynamic": ("dynamic", {"scope": "sequence"}),
    "yarn": ("yarn", {}),
    "llama3": ("llama3", {}),
    "longrope": ("longrope", {}),
    "su": ("longrope", {}),
}
_TYPE = ("rope_type", "type")
_LENGTH = "original_max_position_embeddings"
# What such a dictionary may hold and does not say how far a model reads.
_ELSEWHERE = {
    "rope_theta": "it is the model's own, or the rule 'abf' changes it: patch_model(model, 'abf', rope_theta=...)",
    "partial_rotary_factor": "it is the model's own, and no rule changes it",
    "mrope_section": "it is the model's own, and no rule changes it",
    "attn_factor": "vLLM multiplies YaRN's temperature by it: give attention_factor, which is the product",
    "finetuned": "it chose between two rules of early YaRN code, which 'yarn' and 'dynamic_yarn' are here",
    "short_mscale": "it is Phi-3.5-MoE's name for an attention factor: give attention_factor",
    "long_mscale": "it is Phi-3.5-MoE's name for an attention factor: give attention_factor",
}


@dataclass(frozen=True)
class Request:
    """What a dictionary asks for, in our words; the names are those of ``patch_model``."""

    method: str
    factor: float | None
    original_max_position_embeddings: int | None
    options: dict[str, Any] = field(default_factory=dict)


def read_rope_scaling(given: Mapping[str, Any] | str, own: Mapping[str, Any] | None = None) -> Request:
    """Return what a ``rope_scaling`` dictionary asks for.

    Args:
        given: Such as ``{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}``; ``type`` is
            the same as ``rope_type``. A string is JSON, or the name of a rule alone, as LLaMA-Factory has it.
        own: The model's own ``rope_parameters``, where they are known: what the dictionary repeats of them is no error.

    Raises:
        TypeError: It is no dictionary, or a value has the wrong type.
        ValueError: There is no rule in it, one that we do not have, a value out of range, or a key that the rule does
            not have; with what to write.
    """
    told = _parsed(given)
    if own is not None:
        told = {key: value for key, value in told.items() if key not in _ELSEWHERE or own.get(key) != value}
    types = {str(told[key]) for key in _TYPE if told.get(key) is not None}
    if len(types) != 1:
        found = f"has {' and '.join(sorted(types))} as its type" if types else "has no rope_type (or type)"
        raise ValueError(f"rope_scaling {found}. One of {', '.join(_RULES)} is needed: {_EXAMPLE}.")
    [rule] = types
    if rule not in _RULES:
        near = difflib.get_close_matches(rule, _RULES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else " Other methods of hf_posenc are named by method=, not here."
        raise ValueError(f"rope_scaling has rope_type {rule!r}; it can be {', '.join(_RULES)}.{hint}")
    method, options = _RULES[rule]
    allowed = get_method(method).options
    for key in told.keys() - {*_TYPE, "factor", _LENGTH, *allowed}:
        if key in _ELSEWHERE:
            raise ValueError(f"rope_scaling cannot say {key!r}: {_ELSEWHERE[key]}.")
        near = difflib.get_close_matches(key, ("factor", _LENGTH, *allowed), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        names = ", ".join(("rope_type", "factor", _LENGTH, *allowed))
        raise ValueError(f"rope_scaling of type {rule!r} has no {key!r}.{hint} It has {names}.")
    factor = told.get("factor")
    length = told.get(_LENGTH)
    options = {**options, **{key: told[key] for key in allowed if told.get(key) is not None}}
    make_scaling(method, 1.0 if factor is None else factor, options)  # raises on values out of range
    return Request(
        method,
        None if factor is None else check_number("factor", factor, at_least=1),
        None if length is None else check_length(_LENGTH, length),
        options,
    )


def refuse_besides(**given: Any) -> None:
    """Refuse what a caller gave although ``rope_scaling`` says it; None and an empty dict are not given.

    Raises:
        ValueError: Something was given.
    """
    if twice := [name for name, value in given.items() if value not in (None, {}, [], ())]:
        raise ValueError(
            f"rope_scaling says what the rule is, and {', '.join(twice)} {'was' if len(twice) == 1 else 'were'} given "
            "too: give one of the two."
        )


_EXAMPLE = '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}'


def _parsed(given: Mapping[str, Any] | str) -> dict[str, Any]:
    if isinstance(given, str):
        text = given.strip()
        if not text.startswith(("{", "[", '"')):
            return {"rope_type": text}
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ValueError(f"rope_scaling is not JSON ({error}): got {text!r}, an example is {_EXAMPLE}.") from error
    if not isinstance(given, Mapping):
        raise TypeError(f"rope_scaling must be a dictionary such as {_EXAMPLE}, got {given!r}.")
    return dict(given)
