"""What a recipe leaves open until the model and the target length are known."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import PreTrainedModel

from hf_posenc.errors import InvalidRequestError
from hf_posenc.families.discovery import unwrap
from hf_posenc.methods.registry import DEFAULT_METHOD, get_method
from hf_posenc.patching.api import describe, extension_of
from hf_posenc.patching.extension import plain_spec
from hf_posenc.training.stage_list import parse_stages
from hf_posenc.utils.units import ContextLength, length_name

if TYPE_CHECKING:
    from hf_posenc.training.config import FinetuneConfig

logger = logging.getLogger(__name__)

# YaRN trained 16 times the original length in one stage (section 4.1); LongRoPE grew in steps beyond (section 3.3).
ONE_STAGE_FACTOR = 16


class Base(NamedTuple):
    """A base that a model was trained with to read ``length`` tokens, coming from ``before``."""

    length: int
    before: float
    rope_theta: float
    source: str


# EasyContext: train_scripts/EasyContext-1M-Llama-2-7B.sh, the last base of each length.
BASES = (
    Base(32768, 1e4, 5e5, "Llama 2 Long, arXiv:2309.16039, section 2.1"),
    Base(32768, 1e4, 1e6, "EasyContext"),
    Base(65536, 5e5, 8e6, "ProLong, arXiv:2410.02660"),
    Base(65536, 1e4, 5e6, "EasyContext"),
    Base(256000, 1e4, 5e7, "EasyContext"),
    Base(512000, 1e4, 2.5e8, "EasyContext"),
    Base(524288, 5e5, 1.28e8, "ProLong, arXiv:2410.02660"),
    Base(1000000, 1e4, 1e9, "EasyContext, not trained further"),
)


def choose_base(target: int, rope_theta: float) -> Base:
    """Return the published base for a target length: of the nearest length that is no shorter.

    Of several for one length, that of the model whose own base was nearest.

    Args:
        target: In tokens.
        rope_theta: The base the model was trained with; the new one has to be larger.

    Raises:
        ValueError: None was published for so long a target, or none larger.
    """
    fit = [base for base in BASES if base.length >= target and base.rope_theta > rope_theta]
    if not fit:
        raise InvalidRequestError(
            f"no base was published for {target} tokens and a model of base {rope_theta:g} (the longest: "
            f"{BASES[-1].length} tokens, {BASES[-1].rope_theta:g}). Give it: --option rope_theta=..."
        )
    return min(fit, key=lambda base: (base.length, abs(math.log(base.before / rope_theta))))


def lengths_of(model: PreTrainedModel, config: FinetuneConfig) -> tuple[int, int] | None:
    """Return original and target length of a run, before the model is extended; None where they are not known yet."""
    there = describe(model)
    original = config.original_max_position_embeddings or there["original_max_position_embeddings"]
    if original is None or config.preset is not None:
        return None
    if there["method"] != "none" and config.on_scaled == "refuse":
        return int(original), int(there["context_length"])
    if config.stages:
        return int(original), parse_stages(config.stages, config.token_budget)[-1].length
    factor = get_method(config.method or DEFAULT_METHOD).default_factor if config.factor is None else config.factor
    return int(original), config.context_length or round(factor * original)


def fit_recipe(model: PreTrainedModel, config: FinetuneConfig) -> FinetuneConfig:
    """Return a run with what its recipe chooses by the model and the target; what was told stays.

    Args:
        model: Not yet extended, or as it came.
        config: The run.

    Raises:
        ValueError: No published base suits (``abf``).
    """
    lengths = lengths_of(model, config) if config.recipe is not None else None
    if lengths is None:
        return config
    original, target = lengths
    if config.recipe == "abf":
        return _with_base(model, config, target)
    if config.recipe == "progressive" and not config.stages:
        return _in_stages(config, original, target)
    if config.recipe == "drope" and config.seq_len is None:
        return dataclasses.replace(config, seq_len=ContextLength(original))
    return config


def _with_base(model: PreTrainedModel, config: FinetuneConfig, target: int) -> FinetuneConfig:
    extension, is_fixed = extension_of(model), "rope_theta" in config.options or config.method != "abf"
    if is_fixed or (extension is not None and config.on_scaled == "refuse"):
        return config
    text_config = unwrap(model).config.get_text_config(decoder=True)
    spec = plain_spec(text_config) if extension is None else extension.spec
    base = choose_base(target, spec.rope_theta)
    found = (base.rope_theta, target, length_name(base.length), base.source)
    logger.info("abf: rope_theta %g for %d tokens, published for %s (%s)", *found)
    return dataclasses.replace(config, options={**config.options, "rope_theta": base.rope_theta})


def _in_stages(config: FinetuneConfig, original: int, target: int) -> FinetuneConfig:
    """Double up to the target, from half of it, or from the longest such length that YaRN reached in one stage."""
    lengths = [target // 2, target]
    while lengths[0] > ONE_STAGE_FACTOR * original:
        lengths.insert(0, lengths[0] // 2)
    if lengths[0] <= original:
        logger.info("progressive: one stage, as half of %d tokens is not beyond the original %d", target, original)
        return config
    later = config.token_budget // 3 // (len(lengths) - 1)
    first = config.token_budget - later * (len(lengths) - 1)
    stages = [f"{lengths[0]}:{first}", *(f"{length}:{later}" for length in lengths[1:])]
    changes: dict[str, Any] = {"stages": stages, "factor": None, "context_length": None}
    logger.info("progressive: stages %s", " ".join(stages))
    return dataclasses.replace(config, **changes)
