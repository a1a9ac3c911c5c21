"""How each rule is spelled in a checkpoint's config.json, in Transformers' words."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from hf_posenc.methods import closed_forms as rules
from hf_posenc.spec import ATTENTION_METHODS, ENCODINGS, RopeScaling, RopeSpec

# The divisor, in a longrope list, of a pair that never turned: larger than rules.STOPPED, so that a config tells which.
NEVER_TURNS = 1e300

# What config.json calls the rule of a model trained with another encoding: Transformers refuses a name it does not
# know, and would run the model with RoPE, which it never saw, under one that it does.
ENCODING_MARK = "hf_posenc_"

OnDisk = Callable[[RopeSpec, RopeScaling], dict[str, Any]]


def longrope_spelling(spec: RopeSpec, scaling: RopeScaling) -> dict[str, Any]:
    """Express any static rule as ``longrope``: what each plain frequency is divided by, twice the same list.

    Equal lists make the switch at the original length harmless, so the rule is exact with a KV cache.
    """
    formula = rules.FORMULAS[scaling.method]
    if scaling.factor == 1 and formula not in (rules.longrope_frequencies, rules.nope_frequencies):
        return _plain_rope(spec)
    scaled, attention_factor = formula(spec, scaling, None)
    divisors = torch.where(scaled > 0, rules.plain_frequencies(spec)[0] / scaled, rules.STOPPED)
    short = long = divisors[: spec.turning_pairs].tolist()
    if scaling.method == "longrope":
        short, long = list(scaling.short_factor or short), list(scaling.long_factor or ())
    still = [NEVER_TURNS] * spec.still_pairs
    return {
        "rope_type": "longrope",
        **({"partial_rotary_factor": 1.0} if still else {}),  # the lists say which pairs turn
        "factor": scaling.factor,
        "short_factor": short + still,
        "long_factor": long + still,
        "original_max_position_embeddings": spec.original_max_position_embeddings,
        # Always written: without it Transformers 4 takes the logarithm of the target, not of the original length.
        "attention_factor": float(attention_factor),
    }


def _plain_rope(spec: RopeSpec) -> dict[str, Any]:
    """Return no scaling: the default rule, or that under which some pairs never turn."""
    if not spec.still_pairs:
        return {"rope_type": "default"}
    share = 2 * spec.turning_pairs / spec.rotary_dim
    if int(share * spec.rotary_dim // 2) < spec.turning_pairs:  # as Transformers counts them
        share = math.nextafter(share, 1.0)
    return {"rope_type": "proportional", "partial_rotary_factor": share}


def _linear_on_disk(spec: RopeSpec, scaling: RopeScaling) -> dict[str, Any]:
    named = _plain_rope(spec) if spec.still_pairs else {"rope_type": "linear"}
    return {**named, "factor": scaling.factor}


def _ntk_on_disk(spec: RopeSpec, scaling: RopeScaling) -> dict[str, Any]:
    return {**_plain_rope(spec), "rope_theta": rules.ntk_theta(spec, scaling.factor)}


def _abf_on_disk(spec: RopeSpec, scaling: RopeScaling) -> dict[str, Any]:
    return {**_plain_rope(spec), "rope_theta": scaling.rope_theta}


def _attention_on_disk(spec: RopeSpec, scaling: RopeScaling) -> dict[str, Any]:
    # No config can say what depends on where each query stands: the checkpoint stays the base model's.
    return {"rope_type": "default"}


def _dynamic_on_disk(spec: RopeSpec, scaling: RopeScaling) -> dict[str, Any]:
    if scaling.on_attention_door:
        return _attention_on_disk(spec, scaling)
    if spec.still_pairs:
        raise ValueError(
            "Transformers' dynamic rule turns every pair of a head, and in this model some never turn (rope_type "
            "'proportional'). Take 'ntk' or 'yarn'."
        )
    return {"rope_type": "dynamic", "factor": scaling.factor}


def _llama3_spelling(spec: RopeSpec, scaling: RopeScaling, slow: float, fast: float) -> dict[str, Any]:
    if spec.still_pairs:
        return longrope_spelling(spec, scaling)
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": slow,
        "high_freq_factor": fast,
        "original_max_position_embeddings": spec.original_max_position_embeddings,
    }


def _llama3_on_disk(spec: RopeSpec, scaling: RopeScaling) -> dict[str, Any]:
    return _llama3_spelling(spec, scaling, scaling.low_freq_factor, scaling.high_freq_factor)


def _ntk_by_parts_on_disk(spec: RopeSpec, scaling: RopeScaling) -> dict[str, Any]:
    # Llama 3's rule is the paper's NTK-by-parts under another name.
    return _llama3_spelling(spec, scaling, scaling.beta_slow, scaling.beta_fast)


def _yarn_on_disk(spec: RopeSpec, scaling: RopeScaling) -> dict[str, Any]:
    # Transformers' own counts the pairs of an odd rotary_dim in two ways, and turns all of them.
    if scaling.ramp != "code" or spec.still_pairs or spec.rotary_dim % 2:
        return longrope_spelling(spec, scaling)
    named = {k: v for k, v in scaling.changed_options().items() if k not in ("ramp", "temperature")}
    return {
        "rope_type": "yarn",
        "factor": scaling.factor,
        "original_max_position_embeddings": spec.original_max_position_embeddings,
        **named,
    }


def mark_encoding(parameters: dict[str, Any], label: str | None, method: str) -> None:
    """Make ``rope_parameters`` say, in place, that another encoding took RoPE's place.

    Args:
        parameters: Of a text config.
        label: The layer type whose rule it is; None where all share one.
        method: The encoding.
    """
    section = parameters if label is None else parameters[label]
    section["rope_type"] = ENCODING_MARK + method


# By the name of the method. The config of an encoding stills the model's RoPE, in the live model and nowhere else.
SPELLINGS: dict[str, OnDisk] = {
    "linear": _linear_on_disk,
    "ntk": _ntk_on_disk,
    "ntk_by_parts": _ntk_by_parts_on_disk,
    "dynamic": _dynamic_on_disk,
    "yarn": _yarn_on_disk,
    "llama3": _llama3_on_disk,
    "longrope": longrope_spelling,
    "abf": _abf_on_disk,
    "nope": longrope_spelling,
    **dict.fromkeys(ATTENTION_METHODS, _attention_on_disk),
    **dict.fromkeys(ENCODINGS, longrope_spelling),
}
