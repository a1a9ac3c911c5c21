"""The content of a checkpoint's folder, as far as a server reads it."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from hf_posenc.checkpoint.manifest import (
    CONFIG,
    MANIFEST,
    RESULTS,
    SCALED_BASE,
    base_of_adapter,
    is_saved_by_us,
    read_manifest,
)
from hf_posenc.checkpoint.pretrained import folder_with
from hf_posenc.errors import InvalidRequestError, MissingFileError
from hf_posenc.methods.base import Method
from hf_posenc.methods.registry import get_method
from hf_posenc.methods.yarn import Yarn
from hf_posenc.patching.lengths import LENGTH_KEYS, limits_below
from hf_posenc.spec import RopeSpec
from hf_posenc.utils.files import read_json
from hf_posenc.utils.units import size_name

# The rope_type of rules that are a rope_theta and nothing else.
PLAIN = "default"
_WHOLE_MODELS = "this is for whole models (--to vllm takes adapters too, with the rule that they were trained with)"


@dataclass(frozen=True)
class ExportFolder:
    """A folder written by ``save_extended``.

    Attributes:
        path: Where the model is, as commands name it.
        config: Its config.json.
        manifest: Its context_extension.json; that of the adapter, if there is one.
        results: Its results.jsonl; need not exist.
        overrides: What ``config`` has that the file has not: the server needs them.
        adapter: The folder, if it is that of an adapter; ``path`` is its base model then.
    """

    path: str
    config: dict[str, Any]
    manifest: dict[str, Any]
    results: Path
    overrides: dict[str, Any] = field(default_factory=dict)
    adapter: str | None = None

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type"))

    @property
    def rope(self) -> dict[str, Any]:
        """The ``rope_parameters`` of config.json, without the name that Transformers before 4.43 had for the type."""
        if "rope_parameters" not in self.config:
            raise InvalidRequestError(f"{CONFIG} in {self.path!r} has its rule in a part of it, which no export reads.")
        return {key: value for key, value in self.config["rope_parameters"].items() if key != "type"}

    @property
    def rope_type(self) -> str:
        return str(self.rope.get("rope_type", PLAIN))

    @property
    def context_length(self) -> int:
        """The target, in tokens."""
        return int(self.manifest["context_length"])

    @property
    def lengths(self) -> dict[str, int]:
        """The keys of config.json at which servers stop, with their values, in tokens."""
        return {key: self.config[key] for key in LENGTH_KEYS if self.config.get(key) is not None}

    @property
    def original(self) -> int:
        """The length the model was trained on, in tokens."""
        return int(self.manifest["original_max_position_embeddings"])

    @property
    def is_adapted(self) -> bool:
        """Whether weights were fitted with the rule, so that it is not for the base model (``fit --adapt``)."""
        return "adapted" in (self.manifest.get("fitted_on") or {})

    @property
    def base_model(self) -> str:
        return str(self.manifest.get("base_model") or "BASE_MODEL")

    @property
    def spec(self) -> RopeSpec:
        """The rotary embedding with the written base: of plain rules the new one."""
        head_dim = self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"]
        return RopeSpec(int(head_dim), float(self.rope["rope_theta"]), self.original)

    @property
    def method(self) -> Method:
        """The rule under the name it has in config.json; none for plain ones."""
        method = get_method(self.rope_type)
        return method.as_read(self.rope["factor"], method.read_options(self.rope))

    @property
    def attention_factor(self) -> float:
        """The factor of cos and sin."""
        if self.rope_type == Yarn.rope_type:
            return self.method.frequencies(self.spec)[1]
        return float(self.rope["attention_factor"]) if self.rope_type == "longrope" else 1.0

    def unextended(self) -> tuple[int, dict[str, Any]]:
        """Return the length that the unextended model reads, in tokens, and its ``rope_parameters``."""
        if self.adapter is not None:
            config = AutoConfig.from_pretrained(self.path)
            rope = dict(config.rope_parameters)
            is_scaled = rope.get("rope_type", PLAIN) != PLAIN
            return config.max_position_embeddings if is_scaled else self.original, rope
        base = self.manifest.get(SCALED_BASE) or {}
        plain = {"rope_type": PLAIN, "rope_theta": self.manifest["rope_theta"]}
        return base.get("max_position_embeddings", self.original), base.get("rope_parameters", plain)

    def against_two_modes(self) -> list[str]:
        """Return why short requests are not to be read without the rule; nothing where they may be."""
        if "rope_parameters" not in self.config:
            return ["a rule in a part of config.json, as in models that read images too"]
        if self.adapter is None:
            is_trained = self.is_adapted or self.manifest["tokens_trained"] != 0
        else:  # short requests are read without it
            is_trained = is_saved_by_us(self.path)
        found = {
            "weights that were trained with the rule": is_trained,
            "a sliding window that was changed": "sliding_window" in self.manifest,
            "rules by layer type": any(isinstance(value, dict) for value in self.rope.values()),
            "a folder that does not say how the unextended model reads (write it with hf-posenc patch)": not is_trained
            and self.adapter is None
            and self.manifest.get(SCALED_BASE, {}) is None,
        }
        return [reason for reason, holds in found.items() if holds]


def read_folder(path: str | Path) -> ExportFolder:
    """Read a folder written by ``save_extended``, a model's or an adapter's.

    Raises:
        FileNotFoundError: There is no manifest, or no config.json.
        ValueError: A file is damaged, or an adapter does not name its base model.
    """
    folder = Path(path).expanduser()
    manifest = read_manifest(folder)
    if manifest is None:
        raise MissingFileError(
            f"{str(path)!r} has no {MANIFEST}: give a folder that hf-posenc wrote (patch, finetune)."
        )
    base = base_of_adapter(folder)
    if base is None:
        return ExportFolder(str(folder), _read_config(folder), manifest, folder / RESULTS)
    source = folder_with(base, (CONFIG,)) if base else None
    if source is None:
        raise MissingFileError(
            f"{str(path)!r} is an adapter, and its base model {base!r} has no {CONFIG}: base_model_name_or_path in its "
            "settings must be a folder that is here, or a name on the Hub."
        )
    config = _read_config(source)
    changed: dict[str, Any] = {"rope_parameters": manifest["rope_parameters"]}
    changed |= {key: manifest["context_length"] for key in LENGTH_KEYS if config.get(key) is not None}
    return ExportFolder(base, {**config, **changed}, manifest, folder / RESULTS, changed, adapter=str(folder))


def _read_config(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is damaged.
    """
    if not (folder / CONFIG).is_file():
        raise MissingFileError(f"{str(folder)!r} has no {CONFIG}: the checkpoint is not whole. Save the model again.")
    return read_json(folder / CONFIG)


def refuse_adapter(folder: ExportFolder, why: str = _WHOLE_MODELS) -> None:
    """Raise if it is an adapter's; ``why`` is the reason.

    Raises:
        ValueError: With what to do.
    """
    if folder.adapter is not None:
        raise InvalidRequestError(
            f"{folder.adapter!r} is an adapter, and {why}. Merge it first: "
            "save_extended(load_extended(path).merge_and_unload(), new_path, tokenizer, "
            f"tokens_trained={folder.manifest['tokens_trained']})."
        )


def check_rule(folder: ExportFolder) -> None:
    """Raise unless config.json carries the manifest's rule.

    Raises:
        ValueError: It was edited, or another key of it limits the length.
    """
    manifest = folder.manifest
    written = {key: value for key, value in manifest["rope_parameters"].items() if key != "type"}
    if folder.rope != written or folder.config.get("max_position_embeddings") != folder.context_length:
        raise InvalidRequestError(
            f"{CONFIG} in {folder.path!r} does not carry the rule of {MANIFEST} ({manifest['method']}, "
            f"{folder.context_length} tokens): one of the two files was edited after saving. Save the model again."
        )
    if below := limits_below(folder.config, folder.context_length):
        stated = " and ".join(f"{key} {length:g}" for key, length in below.items())
        raise InvalidRequestError(
            f"{CONFIG} in {folder.path!r} has {stated}, at which servers stop before {folder.context_length} tokens. "
            f"Raise it: {command('hf-posenc', 'doctor', folder.path, '--fix', folder.path)}."
        )


def has_two_lists(folder: ExportFolder) -> bool:
    """Return whether a longrope rule has one list of divisors up to the original length and another one past it."""
    return folder.rope_type == "longrope" and bool(folder.rope["short_factor"] != folder.rope["long_factor"])


def check_one_list(folder: ExportFolder, stack: str, does: str) -> None:
    """Raise if a longrope rule has two lists: no server chooses between them as Transformers does."""
    if has_two_lists(folder):
        raise InvalidRequestError(
            f"{stack} cannot express longrope with a short_factor other than long_factor: {does}, and Transformers "
            "takes the list by the length of each forward. Save the model with both lists equal."
        )


def notes_for_servers(folder: ExportFolder) -> list[str]:
    """Return comments on what serving a static rule takes, whatever the program."""
    config = folder.config
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    numbers = 2 * config["num_hidden_layers"] * heads * folder.spec.rotary_dim * folder.context_length
    size = size_name(2 * numbers)
    return [
        f"# the KV cache of one text of {folder.context_length} tokens takes {size} in 16 bits",
        "# prefix caching and chunked prefill are safe; a draft model (EAGLE, MTP) needs the same rule, or fewer of "
        f"its guesses are accepted past {folder.original} tokens",
        f"# texts of up to {folder.original} tokens are read with the rule too: {_cost_of_short_texts(folder)}",
    ]


def _cost_of_short_texts(folder: ExportFolder) -> str:
    """Return the cost of a rule below the original length, from the records that ``fit`` or ``finetune`` left."""
    lines = folder.results.read_text(encoding="utf-8").splitlines() if folder.results.is_file() else []
    try:
        records = [json.loads(line) for line in lines if line.strip()]
    except ValueError:
        return f"what that costs is not known, as {RESULTS} is damaged"
    rule = {key: folder.manifest[key] for key in ("method", "factor", "options", "tokens_trained")}
    rows = {"own": rule, "unextended": {"method": "none", "tokens_trained": 0}}
    same = ("context_length", "protocol", "text_hash", "n_tokens")
    perplexities: dict[tuple[Any, ...], dict[str, float]] = {}
    for record in records:
        if isinstance(record, dict) and record.keys() >= {*same, "perplexity"}:  # not one of retrieval, or another's
            for name, row in rows.items():
                if row.items() <= record.items():
                    perplexities.setdefault(tuple(record[key] for key in same), {})[name] = record["perplexity"]
    pairs = {
        key[0]: found["own"] / found["unextended"] - 1
        for key, found in perplexities.items()
        if found.keys() == rows.keys() and key[0] <= folder.original
    }
    if not pairs:
        return "hf-posenc eval --method auto measures what that costs"
    length = max(pairs)
    return f"perplexity {100 * pairs[length]:+.1f} % at {length} tokens ({RESULTS})"


def command(*words: str | int | float) -> str:
    """Return a command line for a POSIX shell, quoted where needed."""
    return shlex.join(str(word) for word in words)
