"""``read_dialect``: what a config.json declares about its positions and what is wrong with it. JSON in, facts out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_posenc.doctor.declaration import (
    ORIGINAL,
    Facts,
    Known,
    canonical,
    from_mark,
    has_rope,
    meant,
    original_length,
    reads_original,
    serialization_name,
    source_of,
    target_length,
)
from hf_posenc.doctor.dialects import Rope
from hf_posenc.doctor.family_facts import text_config
from hf_posenc.doctor.findings import CHECKS, Finding, check_lengths, check_versions
from hf_posenc.errors import InvalidRequestError
from hf_posenc.methods.linear import Linear
from hf_posenc.patching.extension import MARK, read_mark, rule_is_elsewhere


@dataclass(frozen=True)
class Dialect:
    """What a config.json means.

    Attributes:
        model_type: The family.
        serialization: Which keys say it.
        parameters: The full-attention rule as one flat dict in Transformers' words, mistakes taken out; {} if the
            family has no rotary embedding.
        rope: The rule it means; None if it has none or it cannot be read.
        original: Original length in tokens, None if unknown.
        original_from: What says so.
        target: What ``max_position_embeddings`` should say, in tokens.
        mark: Method, options and lengths, as ``save_extended`` noted them; None for other checkpoints.
        findings: What is wrong.
    """

    model_type: str
    serialization: str
    parameters: dict[str, Any]
    rope: Rope | None
    original: int | None
    original_from: str
    target: int | None
    mark: dict[str, Any] | None
    findings: tuple[Finding, ...]


def read_dialect(config: Mapping[str, Any], known: Known | None = None) -> Dialect:
    """Return what a config.json means and what is wrong with it.

    Args:
        config: Its JSON, in any serialization.
        known: What the user says about the model, which wins.

    Raises:
        ValueError: It is no model's config.
    """
    known = known or Known()
    text = text_config(config)[1]
    if not isinstance(text.get("model_type"), str):
        raise InvalidRequestError("the config has no model_type, so it is no Transformers model's config.json.")
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(text.get(key) or {}, Mapping):
            raise InvalidRequestError(f"{key} must be a dictionary, got {text[key]!r}.")
    model_type = text["model_type"]
    mark, unknown = read_mark(text.get(MARK) or config.get(MARK)), []
    if not has_rope(text):
        return Dialect(
            model_type, "no rotary embedding", {}, None, text.get("max_position_embeddings"), "", None, None, ()
        )
    parameters = canonical(text, known)
    original, origin = original_length(text, parameters, mark, known)
    if original is not None and (
        reads_original(parameters["rope_type"]) or parameters["rope_type"] == Linear.rope_type
    ):
        parameters[ORIGINAL] = original
    try:
        if mark and rule_is_elsewhere(mark):  # the config itself is the base model's
            mark = None
    except ValueError as error:
        why, todo = "Only the rest of the config is read below.", "Look at it with the version that wrote it."
        unknown = [Finding("unknown-extension", "error", str(error).rstrip("."), why, todo, mendable=False)]
        mark = None
    if mark:
        parameters = from_mark(text, parameters, mark)
    facts = Facts(text, parameters, source_of(text), original, known, bool(mark))
    rope = meant(facts)
    target = target_length(facts)
    findings = [*unknown, *(finding for check in CHECKS for finding in check(facts))]
    findings += check_lengths(facts, target)
    if all(finding.mendable for finding in findings):
        findings += check_versions(facts, rope)
    return Dialect(
        model_type, serialization_name(text), parameters, rope, original, origin, target, mark, tuple(findings)
    )
