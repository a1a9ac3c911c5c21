"""The manifest beside a checkpoint: what was requested of which model, and how a model is patched again as it says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from hf_posenc.checkpoint.pretrained import ADAPTER_CONFIG as ADAPTER_CONFIG
from hf_posenc.checkpoint.pretrained import CONFIG as CONFIG
from hf_posenc.checkpoint.pretrained import folder_with
from hf_posenc.errors import InvalidRequestError, MissingFileError
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.families.sliding_window import KEEP
from hf_posenc.methods.base import MANIFEST as MANIFEST
from hf_posenc.methods.base import Extension
from hf_posenc.methods.registry import get_method
from hf_posenc.patching.api import describe as describe_loaded
from hf_posenc.patching.api import extension_of, patch_as_described, unextended_config
from hf_posenc.patching.api import verify_model as verify_loaded
from hf_posenc.patching.extension import describe_config, mark_on, rule_is_elsewhere
from hf_posenc.patching.lengths import MARK
from hf_posenc.patching.verification import Verification, check_described
from hf_posenc.utils.files import read_json
from hf_posenc.utils.hub import is_path
from hf_posenc.version import __version__

RESULTS = "results.jsonl"  # what was measured of the model, in the folder it was saved to
# 2: the config beside it, a model's or an adapter's, says the same under MARK, so that one saved over it is found.
FORMAT = 2
SCALED_BASE = "scaled_base"
_NEEDED = (*Extension.FACTS, "rope_theta", "base_model", "tokens_trained")


def make_manifest(
    rotary: RotaryModel,
    *,
    tokens_trained: int | None,
    base_model: str | None,
    fitted_on: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the manifest: what was requested, of which model, how long it was trained, and with which versions.

    Args:
        rotary: The extended model.
        tokens_trained: Tokens it was fine-tuned on since; None where others trained it, and did not say.
        base_model: Where the unextended model came from; None to take it from the config.
        fitted_on: What a rule or changed weights were fitted on, and how; None for what was not fitted.
    """
    extension = extension_of(rotary)
    if extension is None:
        raise InvalidRequestError("the model is not extended: call patch_model first, or save it with save_pretrained.")
    if not extension.original_known:
        raise InvalidRequestError(
            "the model was loaded scaled (linear), and its config does not say what length it was trained on. Pass it: "
            "patch_model(model, 'linear', factor, original_max_position_embeddings=..., on_scaled='replace')."
        )
    model, config = rotary.model, rotary.text_config
    window = {} if extension.sliding_window == KEEP else {"sliding_window": extension.sliding_window}
    # What config.json keeps of the base model, so that a later change of it is found.
    kept = {"base_config": unextended_config(rotary)} if extension.method.needs_hf_posenc else {}
    mark = mark_on(config) or {}  # of one that was loaded extended
    # What an adapter's folder does not say of the head that it was trained with.
    head = {"num_labels": model.config.num_labels} if hasattr(model, "num_labels") else {}
    return {
        "format": FORMAT,
        **extension.describe(),
        **window,
        "rope_theta": extension.spec.rope_theta,
        "base_model": base_model or mark.get("base_model", getattr(model.config, "_name_or_path", "") or None),
        "tokens_trained": tokens_trained,
        **({} if tokens_trained != 0 else _scaled_base(rotary)),
        **({} if fitted_on is None else {"fitted_on": dict(fitted_on)}),
        "rope_parameters": config.rope_parameters,
        **kept,
        **head,
        "versions": {"hf_posenc": __version__, "transformers": transformers.__version__, "torch": torch.__version__},
    }


def _scaled_base(rotary: RotaryModel) -> dict[str, Any]:
    """Return the unextended model's own rule, if it has one: servers read short requests by it. None: it is lost."""
    if rotary.record is None:
        return {SCALED_BASE: None}
    before = unextended_config(rotary)
    rope = before.get("rope_parameters") or {}
    if rope.get("rope_type", "default") == "default":
        return {}
    kept = {key: before[key] for key in ("rope_parameters", "max_position_embeddings")}
    return {SCALED_BASE: None if MARK in before else kept}


def read_manifest(path: str | Path) -> dict[str, Any] | None:
    """Return the manifest of a folder; None if it has none.

    Raises:
        ValueError: It is damaged, of a newer format, or of a model that another one was saved over.
    """
    file = Path(path) / MANIFEST
    if not file.is_file():
        return None
    try:
        manifest: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        newer = int(manifest["format"]) > FORMAT
        if not newer and (lacking := [key for key in _NEEDED if key not in manifest]):
            raise InvalidRequestError(f"it has no {', '.join(lacking)}")
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequestError(f"{file} is damaged ({error}). Save the model again with save_extended.") from error
    if newer:
        raise InvalidRequestError(
            f"{file} was written by a newer hf_posenc (format {manifest['format']}). Upgrade hf_posenc."
        )
    _refuse_stale(file, manifest)
    return manifest


def _refuse_stale(file: Path, manifest: dict[str, Any]) -> None:
    """Refuse a manifest that is left of an earlier model: the config saved since does not say the same.

    Raises:
        ValueError: It is.
    """
    configs = [name for name in (CONFIG, ADAPTER_CONFIG) if (file.parent / name).is_file()]
    if manifest["format"] < 2 or not configs:  # before, configs of rules that only a manifest can say said nothing
        return
    facts = {key: manifest[key] for key in Extension.FACTS}
    for name in configs:
        mark = mark_of(file.parent / name)
        if mark is not None and facts.items() <= mark.items():
            return
    raise InvalidRequestError(
        f"{file} says {manifest['method']} to {manifest['context_length']} tokens, and {configs[0]} beside it does "
        f"not: another model was saved into the folder since. Remove {MANIFEST} if that one is not extended; else save "
        "it again with save_extended."
    )


def mark_from(manifest: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the note on the extension in the text config beside a manifest, by its key."""
    return {MARK: {key: manifest[key] for key in (*Extension.FACTS, "rope_theta", "base_model")}}


def mark_of(file: Path) -> dict[str, Any] | None:
    """Return the note on an extension in a config.json or adapter_config.json; None if none can be read."""
    try:
        config = read_json(file)
    except (OSError, ValueError):
        return None
    sections = [config, *(value for value in config.values() if isinstance(value, dict))]  # text_config and the like
    return next((section[MARK] for section in sections if isinstance(section.get(MARK), dict)), None)


def find_manifest(source: str | Path, kwargs: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], Path] | None:
    """Return the manifest of a checkpoint and the folder it is in, here or on the Hub; None if it has none.

    Args:
        source: A folder, or a name on the Hub.
        kwargs: ``from_pretrained``'s, which may say a revision and the like.

    Raises:
        ValueError: As ``read_manifest``.
    """
    folder = folder_with(source, (MANIFEST, CONFIG, ADAPTER_CONFIG), kwargs)
    manifest = None if folder is None else read_manifest(folder)
    return None if folder is None or manifest is None else (manifest, folder)


def tokens_trained(source: str | Path) -> int | None:
    """Return the number of tokens of fine-tuning in a manifest; 0 without a manifest, None if unknown."""
    manifest_in_folder = find_manifest(source)
    return 0 if manifest_in_folder is None else manifest_in_folder[0]["tokens_trained"]


def has_base_weights(source: str | Path) -> bool:
    """Return whether the weights of a model are those of its base model, but for an adapter that belongs to a rule."""
    manifest_in_folder = find_manifest(source)
    if manifest_in_folder is None:
        return True
    manifest, folder = manifest_in_folder
    if (base := base_of_adapter(folder)) is not None:
        return has_base_weights(base)
    return manifest["tokens_trained"] == 0 and "adapted" not in (manifest.get("fitted_on") or {})


def describe(source: nn.Module | PreTrainedConfig | str | Path) -> dict[str, Any]:
    """Return method, factor, options, original and target length; method ``"none"`` for what is not extended.

    Args:
        source: A model, wrapped or not; a config; a checkpoint's folder, an adapter's too, or a name on the Hub.

    Raises:
        OSError: There is no such folder, and no such name on the Hub.
        TypeError: It is none of these.
        ValueError: The manifest in the folder is damaged.
    """
    return _describe_folder(source) if isinstance(source, (str, Path)) else describe_loaded(source)


def _describe_folder(source: str | Path) -> dict[str, Any]:
    """Return ``describe`` of what is in a folder, or on the Hub under a name: by its manifest, else by its config.

    Raises:
        OSError: There is no config.
        ValueError: The manifest is damaged.
    """
    path = Path(source).expanduser()
    path = path.parent if path.name == CONFIG else path
    if not path.exists() and is_path(str(source)):
        raise MissingFileError(f"there is no file or folder {str(source)!r}.")
    manifest_in_folder = find_manifest(path if path.is_dir() else source)
    if manifest_in_folder is not None:
        return {key: manifest_in_folder[0][key] for key in Extension.FACTS}
    if (base := base_of_adapter(path if path.is_dir() else source)) is not None:
        if not base:
            raise InvalidRequestError(
                f"{str(source)!r} is an adapter that does not name its base model: describe that."
            )
        return _describe_folder(base)
    return describe_config(AutoConfig.from_pretrained(path if path.is_dir() else str(source)))


def verify_model(
    model: nn.Module | RotaryModel,
    checkpoint: str | Path | None = None,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | None = None,
) -> Verification:
    """Compare what the live rotary modules hold and hand out with the float64 closed form.

    For a patched model the closed form is that of the request; for any other, that of its config, so a scaling that
    was set on the config after loading, which has no effect, is found.

    Args:
        model: A Transformers model, wrapped or not.
        checkpoint: A folder that ``save_extended`` wrote, or its name on the Hub: the model must run the extension that
            the manifest there describes. Weights are not compared.
        revision: Revision of the checkpoint on the Hub: a branch, tag or commit.
        subfolder: Subfolder of the checkpoint.
        token: For the Hub, as ``from_pretrained`` takes it.

    Raises:
        RotaryMismatchError: They differ; the message says where and by how much.
        ExtensionMissingError: A RotaryMismatchError: the model does not run the extension that its config or the
            checkpoint's manifest describes, as after ``from_config`` or accelerate's ``load_checkpoint_and_dispatch``.
        FileNotFoundError: The checkpoint has no manifest.
        ValueError: The family is not supported, or the manifest is damaged.
    """
    rotary = RotaryModel.of(model)
    if checkpoint is not None:
        manifest_in_folder = find_manifest(checkpoint, {"revision": revision, "subfolder": subfolder, "token": token})
        if manifest_in_folder is None:
            raise MissingFileError(
                f"{str(checkpoint)!r} has no {MANIFEST}, which would say how the model is extended. Give a folder that "
                "save_extended wrote, or leave it out: verify_model(model) compares the model with its own config."
            )
        manifest, folder = manifest_in_folder
        check_described(*extension_in(rotary, manifest), str(folder / MANIFEST), str(checkpoint))
    return verify_loaded(rotary)


def extension_in(rotary: RotaryModel, manifest: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the extension that a live model runs, and a manifest's description of the same model."""
    held, extension = describe_loaded(rotary), extension_of(rotary)
    expected = {key: manifest[key] for key in Extension.FACTS}
    if extension is not None:
        held["rope_theta"], expected["rope_theta"] = extension.spec.rope_theta, manifest["rope_theta"]
    if extension is not None and rule_is_elsewhere(manifest):  # for any other, config.json has the window
        held["sliding_window"], expected["sliding_window"] = (
            extension.sliding_window,
            manifest.get("sliding_window", KEEP),
        )
    return held, expected


def base_of_adapter(source: str | Path) -> str | None:
    """Return the base model that an adapter names, ``""`` if it names none; None for what is no adapter.

    Raises:
        ValueError: Its settings are damaged.
    """
    folder = folder_with(source, (ADAPTER_CONFIG,))
    if folder is None:
        return None
    return read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path") or ""


def is_saved_by_us(source: str | Path) -> bool:
    """Return whether ``load_extended`` is what loads a folder or name: an adapter, or a model with a manifest."""
    return base_of_adapter(source) is not None or find_manifest(source) is not None


def apply_manifest(model: nn.Module, manifest: dict[str, Any]) -> None:
    """Patch a model as a manifest says; a rule that it has is replaced."""
    patch_as_described(model, manifest, manifest.get("sliding_window", KEEP))
    for config in RotaryModel(model).text_configs:  # the model's own name is that of the extended one
        getattr(config, MARK)["base_model"] = manifest["base_model"]


def is_encoding(manifest: Mapping[str, Any]) -> bool:
    """Return whether a manifest's rule takes the place of RoPE, so that plain Transformers must not run the model."""
    return get_method(manifest["method"]).is_encoding
