"""Where a model keeps its rotary modules, found by convention, and what is refused and why."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import InvalidRequestError, InvalidTypeError
from hf_posenc.families.refusals import Refusal

if TYPE_CHECKING:  # they take seconds to import, which `--help` and `presets` would wait for
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

# Transformers accepts only "default" and "longrope" from these: every rule is written as longrope lists.
LONGROPE_ONLY = frozenset({"phi3", "phi4_multimodal", "phimoe"})

# Names of their own that Transformers 4 has for these numbers, at the top level of config.json.
LEGACY_KEYS: dict[str, dict[str, str]] = {
    "gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
}
# Families with rotary settings for each layer type that Transformers 4 knows, and its name for the sliding base.
NESTED_KEYS: dict[str, str | None] = {
    "gemma3_text": "rope_local_base_freq",
    "gemma3n_text": "rope_local_base_freq",
    "olmo3": None,
}
# Multi-head latent attention: its softmax scale is multiplied by YaRN's mscale_all_dim squared when it is built.
MLA = frozenset(
    {
        "axk1",
        "axk2",
        "bailing_hybrid",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "hy_v4",
        "longcat_flash",
        "minicpm3",
        "mistral4",
        "mistral_large4",
        "youtu",
    }
)
# Model types that are refused whatever their config says, with the code of the reason.
REFUSED: dict[str, str] = {
    "recurrent_gemma": "attention_in_windows_only",
    "ernie4_5_vl_moe": "order_of_frequencies",
    "blt": "positions_of_patches",
    "gptj": "table_per_layer",
    "codegen": "table_per_layer",
    "roformer": "table_in_encoder",
}
# Their full-attention layers have no positions; what is rotary is behind a sliding window and never looks further.
_ROTARY_IN_WINDOWS = frozenset(
    {"afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone4_5_text", "exaone_moe", "flint", "kolibri1"}
)
FAMILIES_TABLE = Path(__file__).with_name("families.json")
# What the layers that read the whole context are called in config.layer_types, and DeepSeek-V4's rotary settings of
# those: there it is read compressed, at positions in tokens.
FULL_ATTENTION = frozenset(
    {
        "full_attention",
        "hybrid",
        "indexed_attention",
        "compress",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    }
)
# Their values turn with the keys and are turned back after, so what multiplies cos and sin would scale them too.
ROTATED_VALUES = frozenset({"deepseek_v4"})


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


def text_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return each distinct text config object that the model or one of its modules holds, the model's first."""
    first = model.config.get_text_config(decoder=True)
    found = {id(first): first}
    for module in model.modules():
        config = module.__dict__.get("config")
        if type(config) is type(first):
            found.setdefault(id(config), config)
    return list(found.values())


@cache
def capabilities() -> dict[str, Refusal | None]:
    """Return each causal language model type of Transformers with why it is refused; None if it is not.

    The table is written by ``tests/helpers/model_types.py``, and ``tests/integration/test_model_type_coverage.py`` holds every row against a model.
    """
    return _refusals("types")


@cache
def door_capabilities() -> dict[str, Refusal | None]:
    """Return each model type that can be extended with why no method that runs in attention is for it.

    None if such methods are for it too: ``dynamic``, ``dynamic_yarn``, ``self_extend``, ``dca``, ``rerope`` and
    ``leaky_rerope``, which depend on the query's position. Written and held as the table of ``capabilities``.
    """
    return _refusals("attention")


def table_version() -> str:
    """Return the version of Transformers that the table of ``capabilities`` is about."""
    return str(json.loads(FAMILIES_TABLE.read_text(encoding="utf-8"))["transformers"])


def _refusals(part: str) -> dict[str, Refusal | None]:
    rows: dict[str, dict[str, Any] | None] = json.loads(FAMILIES_TABLE.read_text(encoding="utf-8"))[part]
    return {name: None if row is None else Refusal(**{"model_type": name, **row}) for name, row in rows.items()}


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
    if _rotary_in_chunks_only(config):
        return Refusal(config.model_type, "rotary_in_chunks_only", {"chunk": config.attention_chunk_size})
    code = REFUSED.get(config.model_type)
    return None if code is None else Refusal(config.model_type, code)


def _rotary_in_windows_only(config: PreTrainedConfig) -> bool:
    if config.model_type not in _ROTARY_IN_WINDOWS or not getattr(config, "sliding_window", None):
        return False
    # Cohere 2 MoE gives positions to its first, dense layers, which read everything.
    forced = getattr(config, "prefix_dense_sliding_window_pattern", None) == 1
    return not (forced and ("dense", "full_attention") in zip(config.mlp_layer_types, config.layer_types, strict=True))


def _rotary_in_chunks_only(config: PreTrainedConfig) -> bool:
    """Return whether no layer of a model with chunked attention (Llama 4) is rotary and reads the whole context."""
    kinds, turns = getattr(config, "layer_types", None) or (), getattr(config, "no_rope_layers", None) or ()
    return "chunked_attention" in kinds and not any(
        turn for turn, kind in zip(turns, kinds, strict=True) if kind in FULL_ATTENTION
    )


def _refusal_of_layer_bases(config: PreTrainedConfig) -> Refusal | None:
    """Return why a model with a base for each layer (Granite SWA) cannot be scaled; None if they are all one."""
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
    return dict(parameters)


def head_dim_of(config: PreTrainedConfig) -> int:
    """Return the features of a head, of full attention, also where ``config.head_dim`` is missing or None."""
    label = rope_label(config)
    if label is not None and getattr(config, "is_heterogeneous", False):  # Gemma 4: it differs by layer type
        config = config.per_layer_config[label]  # type: ignore[call-overload]  # a layer type does too
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def label_prefix(label: str | None) -> str:
    """Return what a layer type puts before the names of its buffers, such as ``full_attention_``."""
    return "" if label is None else f"{label}_"


def rotary_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the decoder's rotary modules by name.

    The convention of Transformers 5: buffers ``inv_freq`` and ``original_inv_freq``, attributes ``rope_type`` and
    ``attention_scaling`` (with the layer type before the names where each has its own), and the text config. Vision
    and audio rotaries lack one of these and are left alone.

    Raises:
        UnsupportedModelError: The family is refused, with the reason, or there is no such module.
    """
    config = model.config.get_text_config(decoder=True)
    refuse_family(config)
    prefix = label_prefix(rope_label(config))
    found = {
        name: module
        for name, module in model.named_modules()
        if {f"{prefix}inv_freq", f"{prefix}original_inv_freq"} <= module._buffers.keys()
        and isinstance(getattr(module, "rope_type", None), (str, dict))
        and hasattr(module, f"{prefix}attention_scaling")
        and type(getattr(module, "config", None)) is type(config)
    }
    if not found:
        raise Refusal(config.model_type, "no_rotary_module", {"class_name": type(model).__name__}).error()
    return found
