"""A small model of 64 tokens with a rule to be fitted at 256, and what an independent computation makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from attention_models import ORIGINAL
from hf_posenc import patched
from hf_posenc.attention.installation import check_attention
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.fitting.problem import FitProblem
from hf_posenc.fitting.recording import Recording, record
from hf_posenc.fitting.rule import RuleParameters
from hf_posenc.fitting.rule_attention import rule_attention
from hf_posenc.methods.registry import make_method
from hf_posenc.patching.extension import plain_spec
from hf_posenc.patching.extension_config import ExtensionRequest
from hf_posenc.patching.request import resolve
from tiny_models import token_ids

TARGET = 4 * ORIGINAL
TEXT = token_ids(TARGET)


def rule_equal_to(model: PreTrainedModel, method: str, **settings: Any) -> RuleParameters:
    """A rule of the same numbers as a static method at factor 4; every pair is fitted."""
    spec = plain_spec(RotaryModel(model).text_config)
    return RuleParameters(spec, make_method(method, 4).frequencies(spec), **{"keep_rotations": 1e9, **settings})


def recorded(model: PreTrainedModel, folder: Path, method: str | None, every: int = 3) -> Recording:
    """A recording of ``TEXT`` under a method at factor 4; None for the model as it is."""
    queries = torch.arange(0, TARGET, every)
    if method is None:
        return record(model, TEXT[0], folder, queries, "unextended")
    with patched(model, method, 4):
        return record(model, TEXT[0], folder, queries, method)


@contextmanager
def fitting(model: PreTrainedModel, rule: RuleParameters, recording: Recording | None = None) -> Iterator[FitProblem]:
    """While open, the model attends under the rule."""
    rotary = RotaryModel(model)
    rotation = check_attention(
        rotary, resolve(rotary.text_config, ExtensionRequest.of(method="dynamic_yarn", factor=4))
    )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with rule_attention(model, rule, rotation) as attention:
        attention.note_arguments(rotary)
        recordings = [] if recording is None else [recording]
        yield FitProblem(
            rotary, attention, [TEXT[0]], recordings, [[]], ORIGINAL, TARGET, torch.Generator().manual_seed(0)
        )
