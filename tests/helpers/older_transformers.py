"""What Transformers 5.0 lacks or does otherwise than the version of the shipped table: left out of the tests there.

Nothing of it is silently wrong: the slow tests of ``test_model_type_coverage.py`` run every type on 5.0 and find it
extended exactly, or refused with nothing changed.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import transformers
from packaging.version import Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_posenc.families.family_data import capabilities, table_version
from hf_posenc.families.refusals import Refusal

INSTALLED = Version(transformers.__version__)
IS_5_0 = INSTALLED.release[:2] == (5, 0)

# Why a model type is left out on 5.0.
OTHERWISE_IN_5_0 = {
    **dict.fromkeys(
        ("dbrx", "emu3", "granitemoehybrid", "llama4", "phi4_multimodal", "zamba2"), "cannot be built in these sizes"
    ),
    **dict.fromkeys(("musicgen", "musicgen_melody"), "has no config without those of its parts"),
    **dict.fromkeys(("bamba", "falcon_h1"), "takes 8 GiB in any size"),
    **dict.fromkeys(("glm4v", "qwen3_vl_moe"), "its text config has no pad_token_id"),
    "diffllama": "its attention does not go through AttentionInterface",
    "deepseek_v2": "has a softmax scale that yarn does not reach",
    "phimoe": "runs longrope alone",
    "nemotron": "its layers have rotary modules of their own",
    **dict.fromkeys(("fuyu", "mllama", "persimmon", "stablelm"), "makes masks of its own, without documents or caches"),
    **dict.fromkeys(
        ("gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "modernbert-decoder"), "refuses yarn by layer type"
    ),
    "olmo3": "has one rule for all layers",
    **dict.fromkeys(("lfm2_moe", "minimax", "qwen3_next"), "needs a cache of its own"),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), "takes no positions without images"),
}


def why_left_out(model_type: str) -> str | None:
    """Return why this Transformers, being older than the table's, is not tested with a type; None if it is."""
    if Version(table_version()) <= INSTALLED:
        return None
    if model_type not in CONFIG_MAPPING or model_type not in capabilities():
        return "is not there, or not later"
    return OTHERWISE_IN_5_0.get(model_type) if IS_5_0 else None


def skip_if_left_out(model_type: str) -> None:
    """Skip the test if this Transformers is not tested with a type."""
    if reason := why_left_out(model_type):
        pytest.skip(f"in Transformers {INSTALLED} {model_type!r} {reason}")


def known_here(table: Mapping[str, Refusal | None]) -> dict[str, Refusal | None]:
    """Return the part of a shipped table that this Transformers is tested with: all, but for an older one."""
    return {model_type: refusal for model_type, refusal in table.items() if why_left_out(model_type) is None}


def skip_on_5_0(what: str) -> None:
    """Skip the rest of a test, saying what Transformers 5.0 does."""
    if IS_5_0:
        pytest.skip(f"Transformers {INSTALLED} {what}")
