"""The methods that a plan can advise and that ``patch_model`` takes for a model, from its config alone."""

from __future__ import annotations

import copy

from transformers import PreTrainedConfig

from hf_posenc.attention.installation import check_attention
from hf_posenc.checkpoint.loading import meta_model
from hf_posenc.errors import InvalidRequestError, UnsupportedModelError
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.methods.base import Extension
from hf_posenc.patching.config_writing import write_config
from hf_posenc.patching.extension_config import ExtensionRequest
from hf_posenc.patching.request import resolve
from hf_posenc.planning.advice import STATIC_METHODS, ZERO_SHOT_METHOD
from hf_posenc.planning.shapes import text_config


def possible_static_method(config: PreTrainedConfig, original: int | None, target: int) -> str:
    """Return the static method to advise: the first that ``patch_model`` can put into the model.

    Args:
        config: The model's.
        original: Tokens it was trained on; None to read it from the config.
        target: Tokens it is to read.

    Raises:
        UnsupportedModelError: There is none, for a reason of the family.
        InvalidRequestError: The original length is not known, or a sliding window ends before the target.
    """
    refused = None
    for method in STATIC_METHODS:
        extension = _extension(config, method, original, target)
        try:
            write_config(copy.deepcopy(text_config(config)), extension)
        except InvalidRequestError as error:  # the configs of some families cannot say some rules
            refused = refused or error
            continue
        _ = RotaryModel(meta_model(config)).rotary_modules  # refuses layers without positions, whatever the config says
        return method
    assert refused is not None
    raise refused


def why_not_staged(config: PreTrainedConfig, original: int | None, target: int) -> str | None:
    """Return the reason why ``patch_model`` refuses the method to read with without training; None if it does not.

    Args:
        config, original, target: As for ``possible_static_method``, which accepts the model.
    """
    try:
        check_attention(RotaryModel(meta_model(config)), _extension(config, ZERO_SHOT_METHOD, original, target))
    except UnsupportedModelError as refusal:
        return refusal.reason
    return None


def _extension(config: PreTrainedConfig, method: str, original: int | None, target: int) -> Extension:
    """Return the extension that ``patch_model`` makes of a method, with an earlier scaling replaced."""
    known = original if original is None or original > 0 else None  # families without positions have -1
    request = ExtensionRequest.of(
        method=method, context_length=target, original_max_position_embeddings=known, on_scaled="replace"
    )
    return resolve(text_config(config), request)
