"""Checkpoints that plain Transformers reads, in both its spellings, and the manifest beside them."""

from __future__ import annotations

import json
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_posenc.console import without_weight_bars
from hf_posenc.dtypes import as_stored
from hf_posenc.encodings.install import MODULE, load_parameters, refuse_adapter
from hf_posenc.extension import MARK, Extension
from hf_posenc.families import FULL_ATTENTION, LEGACY_KEYS, NESTED_KEYS, rope_label, unwrap
from hf_posenc.manifest import MANIFEST, apply_manifest, is_encoding, is_on_attention_door, make_manifest, read_manifest
from hf_posenc.patching import describe, unextended_config, verify_model
from hf_posenc.pretrained import expecting_keys, load_weights
from hf_posenc.quantised import refuse_unsaveable
from hf_posenc.spelling import mark_encoding
from hf_posenc.windows import KEEP

logger = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"
CONFIG = "config.json"
# The files of an earlier checkpoint, a model's or an adapter's, that a new one must not be mixed with.
_CHECKPOINT_FILES = (
    MANIFEST,
    CONFIG,
    ADAPTER_CONFIG,
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
    "adapter_model.safetensors",
)


def both_spellings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of a text config with its rotary settings as Transformers 5 and as Transformers 4 read them.

    Transformers 4 ignores ``rope_parameters``: a checkpoint saved by 5 loads there with ``rope_theta=10000`` and no
    scaling, and no warning. It reads ``rope_theta`` and ``rope_scaling`` (``rope_type``, before 4.43 ``type``).
    """
    nested = {key: dict(value) for key, value in config["rope_parameters"].items() if isinstance(value, dict)}
    full = next((label for label in nested if label in FULL_ATTENTION), "")
    parameters = {k: v for k, v in (nested[full] if full else config["rope_parameters"]).items() if k != "type"}
    model_type = str(config.get("model_type"))
    spelled = {**config, "rope_parameters": {**config["rope_parameters"], full: parameters} if full else parameters}
    if full and model_type not in NESTED_KEYS:  # Transformers 4 does not know the family, or no scaling of it
        return spelled
    names = LEGACY_KEYS.get(model_type, {})
    for key in ("rope_theta", "partial_rotary_factor"):
        if parameters.get(key) is not None:
            spelled[names.get(key, key)] = parameters[key]
    if full and (sliding := NESTED_KEYS[model_type]):
        spelled[sliding] = nested["sliding_attention"]["rope_theta"]
    rope_type = parameters["rope_type"]
    scaling = {key: value for key, value in parameters.items() if key not in ("rope_theta", "partial_rotary_factor")}
    # Qwen2-VL's decoder in Transformers 4 reads mrope_section from here, whatever the rule.
    is_plain = rope_type == "default" and not any(key.startswith("mrope_") for key in scaling)
    spelled["rope_scaling"] = None if is_plain else {**scaling, "type": rope_type}
    if rope_type == "longrope":  # Transformers 4 looks for it here only, and else switches lists at the target
        spelled["original_max_position_embeddings"] = parameters["original_max_position_embeddings"]
    return spelled


def save_extended(
    model: nn.Module,
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    tokens_trained: int = 0,
    base_model: str | None = None,
    card: str | None = None,
) -> Path:
    """Save a patched model so that Transformers 4.57 and 5 load it extended, without hf_posenc.

    A PEFT-wrapped model is saved as an adapter with the manifest beside it; ``load_extended`` applies it to the base.
    Everything is written to a folder beside ``path`` and moved there at the end.

    Args:
        model: A model that ``patch_model`` extended, or one loaded extended. One that ``load_model`` widened to
            float32 for a CPU without bfloat16 is saved in its checkpoint's dtype.
        path: The folder; the files of an earlier checkpoint in it are replaced, others are left alone.
        tokenizer: Saved too, with ``model_max_length`` set to the target.
        tokens_trained: Tokens it was fine-tuned on since, for the manifest.
        base_model: Where the unextended model came from; None to take it from the config.
        card: Text of the model card, README.md.

    Returns:
        The folder.

    Raises:
        RotaryMismatchError: The live model does not hold what would be saved.
        ValueError: The model is not extended, ``path`` is a file, or quantised weights cannot be saved as they are.
    """
    target = Path(path).expanduser().absolute()
    if target.exists() and not target.is_dir():
        raise ValueError(f"{str(path)!r} is a file. Give the folder to save the model in.")
    base = unwrap(model)
    whole = isinstance(model, PreTrainedModel) or not hasattr(model, "peft_config")
    refuse_unsaveable(base, whole=whole)
    if not whole:
        refuse_adapter(base, "Merge it (model.merge_and_unload()) and save the whole model.")
    manifest = make_manifest(base, tokens_trained=tokens_trained, base_model=base_model)
    verify_model(base)
    if manifest["options"].get("temperature") == "logits":
        logger.warning(
            "%s: plain Transformers will apply the temperature to the rotated part of a head only; load_extended gives "
            "this model.",
            path,
        )
    if is_on_attention_door(manifest):
        logger.warning(
            "%s: %s is in %s alone; load_extended applies it, plain Transformers %s.",
            path,
            manifest["method"],
            MANIFEST,
            "refuses the checkpoint" if is_encoding(manifest) else "reads the base model",
        )
    partial = partial_of(target)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with as_stored(base), without_weight_bars():
        if whole:
            base.save_pretrained(partial)
            _rewrite_config(partial / CONFIG, base, manifest)
        else:
            model.save_pretrained(str(partial))  # type: ignore[operator]  # PEFT's model; mypy takes it for a tensor
    if tokenizer is not None:
        _save_tokenizer(tokenizer, partial, manifest["context_length"])
    if card is not None:
        (partial / "README.md").write_text(card, encoding="utf-8")
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    _move_into(partial, target)
    return target


def partial_of(path: Path) -> Path:
    """Return the folder that ``save_extended`` writes to before it moves the files into ``path``."""
    target = path.expanduser().absolute()
    return target.with_name(target.name + ".partial")


def config_values(model: PreTrainedModel, manifest: dict[str, Any]) -> dict[str, Any]:
    """Return what the text config on disk has otherwise than the live one."""
    if not is_on_attention_door(manifest):
        return {MARK: {key: manifest[key] for key in (*Extension.FACTS, "rope_theta")}}
    values = unextended_config(model)
    if is_encoding(manifest):
        label = rope_label(model.config.get_text_config(decoder=True))
        mark_encoding(values["rope_parameters"], label, manifest["method"])
    return values


def _rewrite_config(file: Path, model: PreTrainedModel, manifest: dict[str, Any]) -> None:
    saved = json.loads(file.read_text(encoding="utf-8"))
    config = model.config
    text_config = config.get_text_config(decoder=True)
    changed = config_values(model, manifest)
    if text_config is config:
        saved = both_spellings({**saved, **changed})
    else:
        name = next(key for key in config.sub_configs if getattr(config, key) is text_config)
        saved[name] = both_spellings({**saved[name], **changed})
    file.write_text(json.dumps(saved, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, path: Path, length: int) -> None:
    before = tokenizer.model_max_length
    try:
        tokenizer.model_max_length = length
        tokenizer.save_pretrained(path)
    finally:
        tokenizer.model_max_length = before


def _move_into(partial: Path, target: Path) -> None:
    """Move a finished folder into place, over an earlier checkpoint; other files there are left alone.

    What makes a folder a checkpoint goes first and comes back last: one left half-moved is not taken for whole.
    """
    if not target.exists():
        partial.rename(target)
        return
    for pattern in _CHECKPOINT_FILES:
        for stale in target.glob(pattern):
            stale.unlink()
    for file in sorted(partial.iterdir(), key=lambda p: (p.name == MANIFEST, p.name in (CONFIG, ADAPTER_CONFIG))):
        os.replace(file, target / file.name)
    partial.rmdir()


def load_extended(path: str | Path, base: PreTrainedModel | None = None, **kwargs: Any) -> Any:
    """Load what ``save_extended`` wrote, verified: a model, or a base model with its adapter.

    Args:
        path: The folder.
        base: The base model of an adapter, loaded already, extended or not; None loads the one the adapter names, in
            its own precision even if the adapter was trained on 4-bit weights (QLoRA): ``quantization_config``
            quantises it again.
        **kwargs: Passed on to ``from_pretrained``, such as ``dtype`` or ``device_map``.

    Raises:
        FileNotFoundError: There is no manifest.
        ValueError: The adapter's base is already extended in another way, or a base came with a whole model.
        RotaryMismatchError: The loaded model does not hold what the manifest says.
    """
    manifest = read_manifest(path)
    if manifest is None:
        raise FileNotFoundError(f"{path} has no {MANIFEST}: it was not written by save_extended. Use from_pretrained.")
    if (Path(path) / ADAPTER_CONFIG).is_file():
        return _load_adapter(Path(path), manifest, base, kwargs)
    if base is not None:
        raise ValueError(f"{path} holds a whole model, not an adapter: it takes no base.")
    if is_encoding(manifest):
        model = _load_encoded(path, manifest, kwargs)
        _check_loaded(model, manifest, path)
        return model
    model = load_weights(path, **kwargs)
    add_to_config(model, manifest)
    _check_loaded(model, manifest, path)
    return model


def add_to_config(model: PreTrainedModel, manifest: dict[str, Any]) -> None:
    """Patch a model, built as ``config.json`` says, with what of its manifest no config can say: nothing, mostly."""
    if manifest["options"].get("temperature") == "logits":  # of which config.json says as much as it can
        apply_manifest(model, {**manifest, "sliding_window": KEEP}, on_scaled="replace")
    elif is_on_attention_door(manifest):
        apply_manifest(model, manifest, on_scaled="replace")


def _load_encoded(path: str | Path, manifest: dict[str, Any], kwargs: dict[str, Any]) -> PreTrainedModel:
    """Load a model that another encoding takes the place of RoPE in, with the parameters of the encoding."""
    config = _plain_config(Path(path) / CONFIG, manifest["base_config"])
    with expecting_keys(rf"(^|\.){MODULE}\."):
        model = load_weights(path, **{**kwargs, "config": config})
    apply_manifest(model, manifest)
    load_parameters(model, Path(path))
    return model


def _plain_config(file: Path, base: dict[str, Any]) -> PreTrainedConfig:
    """Return the config of a file with the base model's RoPE, before Transformers can meet a name it does not know."""
    saved = json.loads(file.read_text(encoding="utf-8"))
    section = next((s for s in (saved, *saved.values()) if isinstance(s, dict) and "rope_parameters" in s), saved)
    for key in ("rope_scaling", "rope_theta"):
        section.pop(key, None)
    section |= base
    return AutoConfig.for_model(**saved)


def _load_adapter(path: Path, manifest: dict[str, Any], base: PreTrainedModel | None, kwargs: dict[str, Any]) -> Any:
    from peft import PeftConfig, PeftModel

    if base is None:
        source = PeftConfig.from_pretrained(str(path)).base_model_name_or_path
        if not source:
            raise ValueError(f"{path / ADAPTER_CONFIG} does not name its base model: load that and pass it as base.")
        base = load_weights(source, **kwargs)
    if describe(base)["method"] == "none":
        apply_manifest(base, manifest)
        refuse_adapter(base, "Pass the model it was trained on, which holds them: base=load_extended(...).")
    _check_loaded(base, manifest, path)
    with peft_renamed_attribute():
        return PeftModel.from_pretrained(base, str(path))


@contextmanager
def peft_renamed_attribute() -> Iterator[None]:
    """While open, PEFT may ask Transformers for an attribute that was renamed; a user can do nothing about it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        yield


def _check_loaded(model: PreTrainedModel, manifest: dict[str, Any], path: str | Path) -> None:
    verify_model(model)
    there = describe(model)
    differing = [key for key in Extension.FACTS if there[key] != manifest[key]]
    if differing:
        raise ValueError(
            f"{path}: the model does not carry the manifest's extension: "
            + ", ".join(f"{key} is {there[key]!r}, the manifest says {manifest[key]!r}" for key in differing)
            + "."
        )
