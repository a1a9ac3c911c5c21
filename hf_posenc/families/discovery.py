"""The rotary embedding in the config of a model, by convention; and the families that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import InvalidRequestError, InvalidTypeError
from hf_posenc.families.dialects import in_shared_words
from hf_posenc.families.family_data import FULL_ATTENTION, family_of
from hf_posenc.families.refusals import Refusal

if TYPE_CHECKING:  # they take seconds to import, which `--help` and `presets` would wait for
    from transformers import PreTrainedConfig, PreTrainedModel


def unwrap(model: Any) -> PreTrainedModel:
    """Return the ``PreTrainedModel`` inside ``torch.compile``, DistributedDataParallel and PEFT wrappers.

    Raises:
        TypeError: There is no Transformers model inside.
    """
    from transformers import PreTrainedModel

    inner = model
    while not isinstance(inner, PreTrainedModel):
        if hasattr(inner, "_orig_mod"):  # torch.compile
            inner = inner._orig_mod
        elif hasattr(inner, "get_base_model"):  # PEFT
            inner = inner.get_base_model()
        elif hasattr(inner, "module"):  # DistributedDataParallel and the like
            inner = inner.module
        else:
            raise InvalidTypeError(
                f"expected a Transformers model (PreTrainedModel, or one wrapped by PEFT or torch.compile), "
                f"got {type(model).__name__}. Load one with AutoModelForCausalLM.from_pretrained."
            )
    return inner


def is_adapter(model: Any) -> bool:
    """Return whether what is saved of a model is an adapter: of PEFT's wrapper, or after Transformers' add_adapter."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return bool(getattr(model, "_hf_peft_config_loaded", False))
    return hasattr(model, "peft_config")


def refuse_family(config: PreTrainedConfig) -> None:
    """Raise if scaling the rotary embedding of this family cannot work, or does nothing for long texts.

    Raises:
        UnsupportedModelError: With the reason.
    """
    if refusal := _refusal_of_family(config):
        raise refusal.error()


def _refusal_of_family(config: PreTrainedConfig) -> Refusal | None:
    if _rotary_in_windows_only(config):
        return Refusal(config.model_type, "rotary_in_windows_only")
    if getattr(config, "layer_rope_theta", None) is not None:
        return _refusal_of_layer_bases(config)
    if (shared := getattr(config, "num_kv_shared_layers", None)) and shared >= config.num_hidden_layers:
        return Refusal(config.model_type, "keys_of_another_model")  # a draft model, such as Gemma 4's assistants
    if rotary_in_chunks_only(config):
        return Refusal(config.model_type, "rotary_in_chunks_only", {"chunk": config.attention_chunk_size})
    code = family_of(config.model_type).refused
    return None if code is None else Refusal(config.model_type, code)


def _rotary_in_windows_only(config: PreTrainedConfig) -> bool:
    if not family_of(config.model_type).rotary_in_windows or not getattr(config, "sliding_window", None):
        return False
    # Cohere 2 MoE gives positions to its first, dense layers, which read everything.
    forced = getattr(config, "prefix_dense_sliding_window_pattern", None) == 1
    return not (forced and ("dense", "full_attention") in zip(config.mlp_layer_types, config.layer_types, strict=True))


def rotary_in_chunks_only(config: PreTrainedConfig) -> bool:
    """Return whether no layer of a model with chunked attention (Llama 4) is rotary and reads the whole context."""
    kinds, rotary = getattr(config, "layer_types", None) or (), getattr(config, "no_rope_layers", None) or ()
    return "chunked_attention" in kinds and not any(
        is_rotary for is_rotary, kind in zip(rotary, kinds, strict=True) if kind in FULL_ATTENTION
    )


def _refusal_of_layer_bases(config: PreTrainedConfig) -> Refusal | None:
    """Return the refusal of a model whose layers have different bases (Granite SWA); None if the bases are equal."""
    full = [
        base for base, kind in zip(config.layer_rope_theta, config.layer_types, strict=True) if kind in FULL_ATTENTION
    ]
    if not any(full):
        return Refusal(config.model_type, "no_positions_in_full_attention")
    bases = {base for base in config.layer_rope_theta if base}
    if bases != {config.rope_parameters["rope_theta"]}:
        return Refusal(config.model_type, "base_per_layer", {"bases": ", ".join(f"{base:g}" for base in sorted(bases))})
    return None


def rope_label(config: PreTrainedConfig) -> str | None:
    """Return the key of ``config.rope_parameters`` whose rotary settings are scaled; None if they are one flat dict.

    Layers with a sliding window never see past it, so only full attention is scaled.

    Raises:
        UnsupportedModelError: There are settings for each layer type, and none for full attention.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    labels = [key for key, value in parameters.items() if isinstance(value, Mapping)]
    full = next((label for label in labels if label in FULL_ATTENTION), None)
    if labels and full is None:
        values = {"layer_types": ", ".join(labels)}
        raise Refusal(config.model_type, "no_settings_for_full_attention", values).error()
    return full


def declared_rope(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the ``rope_parameters`` of a text config, those of full attention if each layer type has its own.

    A rule in words of the family's own, such as HunYuan's ``alpha``, comes in those that all families share.

    Raises:
        ValueError: There are none, none for full attention, or they lack ``rope_theta``.
    """
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        raise Refusal(config.model_type, "no_rotary_embedding").error()
    label = rope_label(config)
    if label is not None:
        parameters = parameters[label]
    if parameters.get("rope_theta") is None:
        raise InvalidRequestError(
            "config.rope_parameters has no rope_theta. Assigning config.rope_scaling or config.rope_parameters "
            "replaces the whole dict in Transformers 5, and has no effect on a loaded model. Reload the model and "
            "call patch_model."
        )
    legacy = config.__dict__.get("rope_theta")
    if label is None and legacy is not None and legacy != parameters["rope_theta"]:
        raise InvalidRequestError(
            f"config.rope_theta was set to {legacy!r}, which Transformers 5 does not read "
            f"(rope_parameters['rope_theta'] is {parameters['rope_theta']!r}). Use method='abf' with "
            f"rope_theta={legacy!r}, or delete the attribute."
        )
    return in_shared_words(config.model_type, parameters, lambda: head_dim_of(config))


def rope_of_other_layer_types(config: PreTrainedConfig) -> dict[str, dict[str, Any]]:
    """Return the ``rope_parameters`` of the layer types that are not extended, by layer type; often none.

    They belong to layers with a sliding window. Layer types without positions, whose settings are None, are left out.
    """
    label = rope_label(config)
    if label is None:
        return {}
    return {
        key: dict(value)
        for key, value in config.rope_parameters.items()
        if isinstance(value, Mapping) and value and key != label
    }


def head_dim_of(config: PreTrainedConfig, label: str | None = None) -> int:
    """Return the features of a head, also where ``config.head_dim`` is missing or None.

    Args:
        config: A text config.
        label: The layer type, where heads differ by it; None for full attention.
    """
    label = rope_label(config) if label is None else label
    if label is not None and getattr(config, "is_heterogeneous", False):  # Gemma 4: it differs by layer type
        config = config.per_layer_config[label]  # type: ignore[call-overload]  # a layer type does too
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
