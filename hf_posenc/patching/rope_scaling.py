"""The ``rope_scaling`` dictionaries that people have, in the words of Transformers, vLLM, LLaMA-Factory and Axolotl."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_posenc.errors import InvalidRequestError, InvalidTypeError, argument, did_you_mean
from hf_posenc.methods.registry import get_method, make_method, method_of_rope_type
from hf_posenc.patching.extension import SCALING_KEYS
from hf_posenc.spec import check_length, check_number

# The rules that such a dictionary can name; "su" is Phi-3's first name for longrope.
_RULES = ("linear", "dynamic", "yarn", "llama3", "longrope", "su")
_TYPE = ("rope_type", "type")
_LENGTH = "original_max_position_embeddings"
# Such a dictionary may repeat any key of the model's own rope_parameters; of these keys, why it can say nothing else.
_WHY_OWN = {
    "rope_theta": "the base stays the model's own, unless the rule 'abf' changes it: patch_model(model, 'abf', "
    "rope_theta=...)",
    "alpha": "it is HunYuan's name for a larger base, which is the model's own",
    "attn_factor": "vLLM multiplies YaRN's temperature by it: give attention_factor, which is the product",
    "finetuned": "it chose between two rules of early YaRN code, which 'yarn' and 'dynamic_yarn' are here",
    "short_mscale": "it is Phi-3.5-MoE's name for an attention factor: give attention_factor",
    "long_mscale": "it is Phi-3.5-MoE's name for an attention factor: give attention_factor",
}


@dataclass(frozen=True)
class RopeScalingDictionary:
    """The method, factor, lengths and options that a dictionary means, named as the arguments of ``patch_model``.

    Attributes:
        model_values: What of it must be as the model has it, such as ``rope_theta``: see ``check_model_values``.
    """

    method: str
    factor: float | None
    original_max_position_embeddings: int | None
    options: dict[str, Any] = field(default_factory=dict)
    model_values: dict[str, Any] = field(default_factory=dict)

    def refuse_other(self, **given: Any) -> None:
        """Refuse what a caller gave beside the dictionary, unless it is what the dictionary says.

        Args:
            **given: ``method``, ``factor``, ``original_max_position_embeddings``, ``options`` and whatever else
                excludes a dictionary, such as ``preset``; None and an empty dict are not given.

        Raises:
            ValueError: Something else was given.
        """
        options = given.pop("options", None) or {}
        if given.get("method") is not None:
            given["method"] = get_method(given["method"]).name
        given_values = {name: value for name, value in {**given, **options}.items() if value not in (None, {}, [], ())}
        says = {
            **{name: getattr(self, name, None) for name in given},
            **{key: self.options.get(key) for key in options},
        }
        if wrong := [name for name, value in given_values.items() if value != says[name]]:
            differences = " and ".join(f"{name} {given_values[name]!r}{_which_is_not(says[name])}" for name in wrong)
            raise InvalidRequestError(
                f"{argument('rope_scaling')} says what the rule is, and {differences} "
                f"{'was' if len(wrong) == 1 else 'were'} given too: "
                "give one of the two."
            )


def read_rope_scaling(given: Mapping[str, Any] | str) -> RopeScalingDictionary:
    """Return the request that a ``rope_scaling`` dictionary makes.

    Args:
        given: Such as ``{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}``; ``type`` is
            the same as ``rope_type``. A string is JSON, or the name of a rule alone, as LLaMA-Factory has it.

    Raises:
        TypeError: It is no dictionary, or a value has the wrong type.
        ValueError: There is no rule in it, one that we do not have, a value out of range, or a key of another rule or
            nearly one of this rule's; with what to write. Any other key is among ``model_values``.
    """
    given_values = _parsed(given)
    types = {str(given_values[key]) for key in _TYPE if given_values.get(key) is not None}
    if len(types) != 1:
        stated = f"has {' and '.join(sorted(types))} as its type" if types else "has no rope_type (or type)"
        raise InvalidRequestError(
            f"{argument('rope_scaling')} {stated}. One of {', '.join(_RULES)} is needed: {EXAMPLE}."
        )
    [rule] = types
    if rule not in _RULES:
        hint = did_you_mean(rule.lower(), _RULES) or f" Other methods are named by {argument('method')}, not here."
        raise InvalidRequestError(
            f"{argument('rope_scaling')} has rope_type {rule!r}; it can be {', '.join(_RULES)}.{hint}"
        )
    method = method_of_rope_type("longrope" if rule == "su" else rule)
    assert method is not None, rule
    allowed = method.option_fields()
    names = ("rope_type", "factor", _LENGTH, *allowed)
    repeated = {key: value for key, value in given_values.items() if key not in (*_TYPE, *names)}
    for key in repeated.keys() - _WHY_OWN.keys():
        if key in SCALING_KEYS or difflib.get_close_matches(key, names, n=1, cutoff=0.85):
            hint = did_you_mean(key, names)
            raise InvalidRequestError(
                f"{argument('rope_scaling')} of type {rule!r} has no {key!r}.{hint} It has {', '.join(names)}."
            )
    factor = given_values.get("factor")
    length = given_values.get(_LENGTH)
    options = {
        **method.read_options({}),
        **{key: given_values[key] for key in allowed if given_values.get(key) is not None},
    }
    make_method(method.name, 1.0 if factor is None else factor, options)  # raises on values out of range
    return RopeScalingDictionary(
        method.name,
        None if factor is None else check_number("factor", factor, at_least=1),
        None if length is None else check_length(_LENGTH, length),
        options,
        repeated,
    )


def check_model_values(repeated: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse a dictionary that has a value of the model otherwise than the model does.

    Args:
        repeated: As ``RopeScalingDictionary.model_values``.
        own: The model's ``rope_parameters``.

    Raises:
        ValueError: With both values.
    """
    for key, value in repeated.items():
        of_model = own.get(key)
        if value != of_model:
            has = "has none" if of_model is None else f"has {of_model!r}"
            why = "no rule has such a key" if of_model is None else "it is the model's own, and no rule changes it"
            raise InvalidRequestError(
                f"{argument('rope_scaling')} has {key} {value!r}, and the model {has}: {_WHY_OWN.get(key, why)}. Leave "
                "it out."
            )


def _which_is_not(said: Any) -> str:
    return "" if said is None else f" (it says {said!r})"


EXAMPLE = '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}'


def _parsed(given: Mapping[str, Any] | str) -> dict[str, Any]:
    if isinstance(given, str):
        text = given.strip()
        if not text.startswith(("{", "[", '"')):
            return {"rope_type": text}
        try:
            given = json.loads(text)
        except ValueError as error:
            raise InvalidRequestError(
                f"{argument('rope_scaling')} is not JSON ({error}): got {text!r}, an example is {EXAMPLE}."
            ) from error
    if not isinstance(given, Mapping):
        raise InvalidTypeError(f"{argument('rope_scaling')} must be a dictionary such as {EXAMPLE}, got {given!r}.")
    return dict(given)
