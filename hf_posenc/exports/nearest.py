"""The nearest static rule for a folder whose rule only hf_posenc runs, and what is lost by it."""

from __future__ import annotations

from dataclasses import replace

from transformers import AutoConfig

from hf_posenc.checkpoint.manifest import CONFIG, MANIFEST, is_encoding
from hf_posenc.errors import InvalidRequestError
from hf_posenc.exports.folder import ExportFolder, command
from hf_posenc.families.sliding_window import KEEP
from hf_posenc.methods.base import DistanceMethod, StaticMethod
from hf_posenc.methods.registry import get_method, make_method, methods
from hf_posenc.patching.config_writing import write_config
from hf_posenc.patching.extension import rule_is_elsewhere
from hf_posenc.patching.extension_config import ExtensionRequest
from hf_posenc.patching.lengths import LENGTH_KEYS
from hf_posenc.patching.request import resolve


def static_without_options() -> list[str]:
    """Return the names of the static methods that need no number besides the factor."""
    return [
        name
        for name, cls in methods().items()
        if issubclass(cls, StaticMethod) and not cls.needs_options and not cls.instead_of_rope
    ]


def refuse_attention_rule(folder: ExportFolder, title: str) -> None:
    """Raise if the folder's rule is one that no server has.

    Raises:
        ValueError: With the reason, and what to do.
    """
    if is_encoding(folder.manifest):
        raise InvalidRequestError(
            f"{title} cannot run {folder.manifest['method']}: the model was trained with it in place of RoPE, so only "
            "hf_posenc runs it (load_extended, hf-posenc eval), and no static rule is near."
        )
    if rule_is_elsewhere(folder.manifest):
        raise InvalidRequestError(
            f"{title} cannot run {folder.manifest['method']}: the rule depends on the position of each query, so only "
            f"hf_posenc runs it (load_extended, hf-posenc eval), and {CONFIG} is the base model's. For the nearest "
            "static rule, and what is lost by it: --as yarn (export_command(..., as_method='yarn'))."
        )


def as_static(folder: ExportFolder, method: str) -> ExportFolder:
    """Return the folder as if it had been extended as far by a static rule with its default options.

    Args:
        folder: One whose rule is in its manifest alone.
        method: A name of ``static_without_options``, or an alias.

    Raises:
        ValueError: The folder's config.json says its rule, or is not the base model's any more; or the method is not
            one of these.
    """
    name = get_method(method).name
    if name not in (known := static_without_options()):
        raise InvalidRequestError(
            f"--as takes a static rule that needs no options: {', '.join(known)}; got {method!r}."
        )
    if is_encoding(folder.manifest):
        raise InvalidRequestError(
            f"{folder.path!r} was trained with {folder.manifest['method']} in place of RoPE: no static rule is near it."
        )
    if not rule_is_elsewhere(folder.manifest):
        again = ("hf-posenc", "patch", folder.path, "OUT", "--method", name, "--on-scaled", "replace")
        raise InvalidRequestError(
            f"{CONFIG} in {folder.path!r} says its rule already ({folder.manifest['method']}), and servers run that: "
            f"leave --as out. For another rule: {command(*again)}."
        )
    _check_base(folder)
    config = AutoConfig.from_pretrained(folder.path)
    window = folder.manifest.get("sliding_window", KEEP)
    request = ExtensionRequest.of(
        method=name,
        context_length=folder.context_length,
        original_max_position_embeddings=folder.original,
        sliding_window=window,
        on_scaled="replace",
    )
    write_config(config, resolve(config, request))
    changed = {"rope_parameters": config.rope_parameters}
    changed |= {key: getattr(config, key) for key in LENGTH_KEYS if folder.config.get(key) is not None}
    if window != KEEP:
        changed["sliding_window"] = config.sliding_window
    manifest = {**folder.manifest, "method": name, "options": {}, "rope_parameters": config.rope_parameters}
    return replace(folder, config={**folder.config, **changed}, manifest=manifest, overrides=changed)


def what_is_lost(folder: ExportFolder, static: ExportFolder) -> list[str]:
    """Return comments that say what a static rule does otherwise than the folder's own."""
    own, other, manifest = folder.manifest["method"], static.manifest["method"], folder.manifest
    method = make_method(own, manifest["factor"], manifest["options"])
    plain = method.regions(static.spec).plain_until if isinstance(method, DistanceMethod) else folder.original
    request = ("--method", other, "--context-length", folder.context_length, "--on-scaled", "replace")
    again = command("hf-posenc", "eval", folder.path, *request)
    trained = folder.manifest["tokens_trained"]
    tuned = f"was fine-tuned on {trained:,} tokens with {own}, not with {other}" if trained else "was not fine-tuned"
    if trained is None:  # others saved it
        tuned = f"does not say whether it was fine-tuned; if so, then with {own}, not with {other}"
    return [
        f"# lost: {own}, which only hf_posenc runs; {other} is the nearest rule here, not the same one",
        f"# lost: short texts; {own} leaves up to {plain} tokens as they are, {other} changes all lengths",
        f"# lost: training; the model {tuned}. Measure it: {again} ...",
    ]


def _check_base(folder: ExportFolder) -> None:
    base = folder.manifest.get("base_config", {})
    rope = {key: value for key, value in base.get("rope_parameters", folder.rope).items() if key != "type"}
    length = folder.config.get("max_position_embeddings")
    if folder.rope != rope or length != base.get("max_position_embeddings", length):
        raise InvalidRequestError(
            f"{CONFIG} in {folder.path!r} is not the base model's any more, as {MANIFEST} says it is: it was edited "
            "since. Save the model again."
        )
