"""The manifest beside a checkpoint: what was asked of which model, and how a model is patched again as it says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig

from hf_posenc.config import ENCODINGS
from hf_posenc.extension import Extension, describe_config
from hf_posenc.families import unwrap
from hf_posenc.patching import extension_of, patch_model, unextended_config
from hf_posenc.registry import get_method, make_scaling
from hf_posenc.version import __version__
from hf_posenc.windows import KEEP

MANIFEST = "context_extension.json"
FORMAT = 1


def make_manifest(model: nn.Module, *, tokens_trained: int | None, base_model: str | None) -> dict[str, Any]:
    """Return the manifest: what was asked, of what, how long it was trained, and with which versions.

    Args:
        model: The extended model.
        tokens_trained: Tokens it was fine-tuned on since; None where others trained it, and did not say.
        base_model: Where the unextended model came from; None to take it from the config.
    """
    base = unwrap(model)
    extension = extension_of(base)
    if extension is None:
        raise ValueError("the model is not extended: call patch_model first, or save it with save_pretrained.")
    if not extension.original_known:
        raise ValueError(
            "the model was loaded scaled (linear), and its config does not say what length it was trained on. Say it: "
            "patch_model(model, 'linear', factor, original_max_position_embeddings=..., on_scaled='replace')."
        )
    window = {} if extension.sliding_window == KEEP else {"sliding_window": extension.sliding_window}
    # What config.json keeps of the base model, so that a later change of it is found.
    kept = {"base_config": unextended_config(base)} if extension.scaling.on_attention_door else {}
    # What an adapter's folder does not say of the head that it was trained with.
    head = {"num_labels": base.config.num_labels} if hasattr(base, "num_labels") else {}
    return {
        "format": FORMAT,
        **extension.describe(),
        **window,
        "rope_theta": extension.spec.rope_theta,
        "base_model": base_model or getattr(base.config, "_name_or_path", "") or None,
        "tokens_trained": tokens_trained,
        "rope_parameters": base.config.get_text_config(decoder=True).rope_parameters,
        **kept,
        **head,
        "versions": {"hf_posenc": __version__, "transformers": transformers.__version__, "torch": torch.__version__},
    }


def read_manifest(path: str | Path) -> dict[str, Any] | None:
    """Return the manifest of a folder; None if it has none.

    Raises:
        ValueError: It is damaged or of a newer format.
    """
    file = Path(path) / MANIFEST
    if not file.is_file():
        return None
    try:
        manifest: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        newer = int(manifest["format"]) > FORMAT
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged ({error}). Save the model again with save_extended.") from error
    if newer:
        raise ValueError(f"{file} was written by a newer hf_posenc (format {manifest['format']}). Upgrade hf_posenc.")
    return manifest


def describe_folder(source: str | Path) -> dict[str, Any]:
    """Return ``describe`` of what is in a folder, or on the Hub under a name: by its manifest, else by its config.

    Raises:
        OSError: There is no config.
        ValueError: The manifest is damaged.
    """
    path = Path(source).expanduser()
    path = path.parent if path.name == "config.json" else path
    manifest = read_manifest(path)
    if manifest is not None:
        return {key: manifest[key] for key in Extension.FACTS}
    adapter = path / "adapter_config.json"
    if adapter.is_file():
        return describe_folder(json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"])
    return describe_config(AutoConfig.from_pretrained(path if path.is_dir() else str(source)))


def apply_manifest(model: nn.Module, manifest: dict[str, Any], on_scaled: str = "refuse") -> None:
    """Patch a model as a manifest says."""
    patch_model(
        model,
        manifest["method"],
        context_length=manifest["context_length"],
        original_max_position_embeddings=manifest["original_max_position_embeddings"],
        sliding_window=manifest.get("sliding_window", KEEP),
        on_scaled=on_scaled,
        **manifest["options"],
    )


def is_on_attention_door(manifest: dict[str, Any]) -> bool:
    """Return whether a manifest's rule is one that no config can say, so that ``config.json`` stays the base's."""
    return make_scaling(manifest["method"], manifest["factor"], manifest["options"]).on_attention_door


def is_encoding(manifest: Mapping[str, Any]) -> bool:
    """Return whether a manifest's rule takes the place of RoPE, so that plain Transformers must not run the model."""
    return get_method(manifest["method"]).name in ENCODINGS
