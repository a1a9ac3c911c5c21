"""Rules that a family writes in words of its own, put into the words that all families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hf_posenc.families.family_data import family_of


def in_shared_words(
    model_type: str | None, parameters: Mapping[str, Any], head_dim: Callable[[], int]
) -> dict[str, Any]:
    """Return flat ``rope_parameters``, with base and ``rope_type``, as any family would write the same frequencies.

    Args:
        model_type: The family.
        parameters: As it writes them; they are not touched.
        head_dim: Returns the features of a head; called where the rule depends on them.
    """
    shared, family = dict(parameters), family_of(model_type)
    if family.base_by_alpha and shared.get("rope_type") == "dynamic" and (alpha := shared.pop("alpha", None)):
        dim = head_dim()
        shared |= {"rope_type": "default", "rope_theta": shared["rope_theta"] * alpha ** (dim / (dim - 2))}
    if shared.get("rope_type", "default") != "default":
        for name in family.attention_factor_names[:1]:  # the first is that of texts up to the original length
            shared["attention_factor"] = shared.get(name, shared.get("attention_factor"))
    return shared
