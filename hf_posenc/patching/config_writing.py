"""How an extension is written into a config: ``rope_parameters`` in Transformers' words, lengths, windows, the note."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from hf_posenc.errors import InvalidRequestError
from hf_posenc.families.discovery import declared_rope, head_dim_of, rope_label
from hf_posenc.families.family_data import family_of
from hf_posenc.families.sliding_window import KEEP, choose_window, warn_about_window
from hf_posenc.methods.base import Extension, Method
from hf_posenc.patching.extension import SCALING_KEYS
from hf_posenc.patching.lengths import LENGTH_KEYS, MARK, limits_below
from hf_posenc.spec import RopeSpec
from hf_posenc.utils.warning import warn_user


def rope_parameters_of(model_type: str, label: str | None, method: Method, spec: RopeSpec) -> dict[str, Any]:
    """Return how a method is written for a family: by its own name unless Transformers would read that otherwise."""
    if family_of(model_type).longrope_only and not method.needs_hf_posenc:
        return method.longrope_parameters(spec)
    return method.rope_parameters(spec, per_layer_type=label is not None)


def write_config(config: PreTrainedConfig, extension: Extension) -> None:
    """Write an extension into a text config, in place: merged, never replaced, lengths as ints."""
    spec, method = extension.spec, extension.method
    label = rope_label(config)
    kept = {k: v for k, v in declared_rope(config).items() if k not in SCALING_KEYS}
    written = {**kept, "rope_theta": spec.rope_theta, **rope_parameters_of(config.model_type, label, method, spec)}
    if "llama_4_scaling_beta" in kept:  # Ministral 3's attention reads the original length from here, whatever the rule
        written.setdefault("original_max_position_embeddings", spec.original_max_position_embeddings)
    if (bases := getattr(config, "layer_rope_theta", None)) is not None:  # one base, which layers have or not
        config.layer_rope_theta = [base and written["rope_theta"] for base in bases]
    if "attention_factor" in written:  # under the family's own names too, if it has any
        written |= dict.fromkeys(family_of(config.model_type).attention_factor_names, written["attention_factor"])
    config.rope_parameters = written if label is None else {**config.rope_parameters, label: written}
    declared = extension.context_length if method.declares_target else spec.original_max_position_embeddings
    _write_lengths(config, declared, raise_all=method.declares_target)
    if hasattr(config, "original_max_position_embeddings"):  # Phi-3: wins over rope_parameters
        config.original_max_position_embeddings = spec.original_max_position_embeddings
    if config.__dict__.get("head_dim", 0) is None:  # yarn, dynamic and longrope do not derive it
        config.head_dim = head_dim_of(config)
    if extension.sliding_window != KEEP:
        config.sliding_window = choose_window(config, extension.sliding_window, extension.context_length)
    setattr(config, MARK, extension.mark())  # which a config saved alone keeps
    try:
        config.validate_rope()
    except (KeyError, RuntimeError) as error:  # as on families whose values differ by layer, or by layer type
        why = f"it misses {error}" if isinstance(error, KeyError) else "its head_dim or another size differs by layer"
        raise InvalidRequestError(
            f"{method.name} is written as {written['rope_type']} here, and this Transformers cannot check "
            f"{written['rope_type']} for model_type {config.model_type!r}: {why}. Take linear, ntk or abf."
        ) from error


def _write_lengths(config: PreTrainedConfig, declared: int, *, raise_all: bool) -> None:
    """Write the declared length, and what servers read beside it: keys that say the same, or limit a target."""
    before = config.max_position_embeddings
    follow = {key for key in LENGTH_KEYS if vars(config).get(key) == before}
    for key in follow | (limits_below(vars(config), declared).keys() if raise_all else set()):
        setattr(config, key, declared)
    config.max_position_embeddings = declared


def warn_about_limits(config: PreTrainedConfig, extension: Extension) -> None:
    """Warn about what the positions cannot help: a sliding window on every layer, Transformers' dynamic rule."""
    warn_about_window(config, extension.context_length)
    if extension.method.caution is not None:
        warn_user(extension.method.caution)
