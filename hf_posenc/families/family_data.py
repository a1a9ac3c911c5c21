"""The known facts of model families, from two data files: their exceptions, and the refused ones.

``exceptions.toml`` is written by hand: what a family does otherwise than Transformers' convention, and why.
``families.json`` is written by ``tests/helpers/model_types.py``: what became of each model type of Transformers.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hf_posenc.families.refusals import Refusal
from hf_posenc.utils.files import read_json

FAMILIES_TABLE = Path(__file__).with_name("families.json")
_EXCEPTIONS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("exceptions.toml").read_text(encoding="utf-8"))
# What layers that read the whole context are called in config.layer_types, and as keys of config.rope_parameters.
FULL_ATTENTION = frozenset(_EXCEPTIONS["full_attention"]["layer_types"])
# What layers are called that see other tokens through a mask alone.
MASKED_ATTENTION = frozenset(_EXCEPTIONS["masked_attention"]["layer_types"])


@dataclass(frozen=True)
class Family:
    """The exceptions of a model family from the convention; reasons and sources are in ``exceptions.toml``.

    Attributes:
        refused: The code of the reason why it cannot be extended, whatever its config says; None if it can.
        refused_in_attention: The same, for methods that run in attention.
        rotary_in_windows: Only its layers with a sliding window are rotary.
        longrope_only: Its config takes no other scaling than longrope, so every rule is written as longrope lists.
        latent_attention: Multi-head latent attention, whose softmax scale depends on YaRN's ``mscale_all_dim``.
        rotated_values: Values are rotated too, so that no temperature can be put on cos and sin.
        keys_read_in_attention: Keys of ``rope_parameters`` that its attention reads, which no rule may change.
        attention_factor_names: Its own keys for the attention factor, up to the original length and past it.
        base_by_alpha: Its ``rope_type`` dynamic with ``alpha`` is a larger base and no dynamic rule.
        names_in_4: Transformers 4's names for ``rope_theta`` and ``partial_rotary_factor``.
        layer_types_in_4: Transformers 4 knows it, and its layer types have rotary settings each: its name for the base
            of layers with a sliding window, ``""`` if it has none; None for all other families.
        needs_head_dim: Some rules fail where its config does not say ``head_dim``.
        rope_theta_in_4: The base that Transformers 4 assumes where it is another one than Transformers 5's.
        rotated_share: Share of a head that is rotated where the config does not say; None for all of it.
        scaled_in_4: Transformers 4 has a rule for it where none is written.
        several_axes_in_layers: Positions of several axes, whose sections each layer reads.
        several_axes_in_module: Positions of several axes, whose sections the rotary module reads.
        not_in_4: Transformers 4.57 does not know it.
    """

    refused: str | None = None
    refused_in_attention: str | None = None
    rotary_in_windows: bool = False
    longrope_only: bool = False
    latent_attention: bool = False
    rotated_values: bool = False
    keys_read_in_attention: tuple[str, ...] = ()
    attention_factor_names: tuple[str, ...] = ()
    base_by_alpha: bool = False
    names_in_4: Mapping[str, str] = field(default_factory=dict)
    layer_types_in_4: str | None = None
    needs_head_dim: bool = False
    rope_theta_in_4: float | None = None
    rotated_share: float | None = None
    scaled_in_4: bool = False
    several_axes_in_layers: bool = False
    several_axes_in_module: bool = False
    not_in_4: bool = False


@cache
def family_of(model_type: str | None) -> Family:
    """Return the known facts of a model type; without exceptions if it follows the convention, or is unknown."""
    exceptions: dict[str, Any] = {}
    for kind, entry in _EXCEPTIONS["exceptions"].items():
        model_types = entry["model_types"]
        if model_type in model_types:
            exceptions[kind] = model_types[model_type] if isinstance(model_types, dict) else True
    return Family(**exceptions)


@cache
def capabilities() -> dict[str, Refusal | None]:
    """Return each causal language model type of Transformers with why it is refused; None if it is not.

    ``tests/integration/test_model_type_coverage.py`` holds every row against a model.
    """
    return _refusals("types")


@cache
def attention_capabilities() -> dict[str, Refusal | None]:
    """Return each model type that can be extended with why no method that runs in attention is for it.

    None if such methods are for it too: ``dynamic``, ``dynamic_yarn``, ``self_extend``, ``dca``, ``rerope`` and
    ``leaky_rerope``, which depend on the query's position. ``tests/integration/test_attention_coverage.py`` holds
    every row against a model.
    """
    return _refusals("attention")


def table_version() -> str:
    """Return the version of Transformers that ``capabilities`` is about."""
    return str(_families_table()["transformers"])


@cache
def _families_table() -> dict[str, Any]:
    table: dict[str, Any] = read_json(FAMILIES_TABLE)
    return table


def _refusals(part: str) -> dict[str, Refusal | None]:
    rows: dict[str, dict[str, Any] | None] = _families_table()[part]
    return {name: None if row is None else Refusal(**{"model_type": name, **row}) for name, row in rows.items()}
