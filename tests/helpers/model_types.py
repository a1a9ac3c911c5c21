"""Every causal language model type of the installed Transformers, tiny and random."""

from __future__ import annotations

import importlib
import inspect
import json
import warnings
from functools import cache
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_posenc import extend_config, patch_model
from hf_posenc.errors import UnsupportedModelError
from hf_posenc.families.discovery import rope_label
from hf_posenc.families.family_data import (
    FAMILIES_TABLE,
    FULL_ATTENTION,
    capabilities,
    table_version,
)
from hf_posenc.families.refusals import Refusal
from hf_posenc.families.sliding_window import can_change, window_of_all_layers
from older_transformers import skip_if_left_out, why_left_out
from tiny_models import token_ids

# Given where a config has the name and it is a plain number there.
_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "vocab_size_per_layer_input": 128,
    "hidden_size": 64,
    "intermediate_size": 48,
    "ffn_hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 0,
    "index_topk": 128,  # sparse attention that drops nothing here
    "sliding_window": 128,  # through which two layers reach 256 tokens
    "attention_window_size": 32,
}
# What the sizes above do not fit, by model type, of sub-configs too.
_MAMBA = {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_chunk_size": 32}
_MLA_HEADS = {"num_key_value_heads": 4}
_DOTS3_LAYER = {
    "head_dim": 32,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
}
_NESTED = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}
_OVERRIDES: dict[str, dict[str, Any]] = {
    # Transformers 5.0 reads it in these without having set it.
    **{model_type: {"pad_token_id": 0} for model_type in ("exaone4", "jetmoe", "phi", "stablelm")},
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"), _MLA_HEADS
    ),
    **dict.fromkeys(("minicpm3", "youtu", "mistral4", "hy_v4"), _MLA_HEADS),
    "bailing_hybrid": {**_MLA_HEADS, "layer_group_size": 2},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 512},  # 500,002 would be 192 million weights
    "blt_local_encoder": {"hidden_size_global": 64},
    "blt_local_decoder": {"hidden_size_global": 64},
    "cohere_compass_text": {"rope_parameters": _NESTED, "layer_types": ["sliding_attention", "full_attention"]},
    "deepseek_v4": {
        "qk_rope_head_dim": 8,
        "sliding_window": 16,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}, "d_model": 64, "n_heads": 4},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {
        **_MLA_HEADS,
        "head_dim": 32,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "n_group": 1,
        "per_layer_config": dict.fromkeys((0, 1), _DOTS3_LAYER),
    },
    "falcon_h1": _MAMBA,
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "position_embedding_type": "rope",
        "mamba_d_head": 16,
        "mamba_n_heads": 8,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"no_rope_layers": [1, 0]},  # as every released one: full attention has no positions
    "longcat_flash": {**_MLA_HEADS, "num_layers": 1, "expert_ffn_hidden_size": 32},  # a layer has two attentions
    "mimo_v2_flash": {"head_dim": 48},  # of which a third rotates
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 128,
        "indexer_compress_ratio": 4,
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "use_mem_rope": True, "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid_sliding", "hybrid"]},
}

# Their modeling files have no rotary class: the decoder inside is another family's.
_DECODER_BY_AUTO_MODEL = ("fuyu", "got_ocr2", "moss_transcribe_diarize")
# Those that cannot be built small (they need timm, or settings for 42 layers), and the type of their decoder.
_DECODER_OF = {
    "dots3_note": "dots3_note_text",
    "gemma3n": "gemma3n_text",
    "gemma4_assistant": "gemma4_text",
    "gemma4_unified_assistant": "gemma4_unified_text",
}


def causal_types() -> list[str]:
    """Return every model type that AutoModelForCausalLM knows."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tabled_types() -> list[str]:
    """Return those of the table that the package ships; all of them, if this is its Transformers."""
    return [model_type for model_type in causal_types() if why_left_out(model_type) is None]


@cache
def rotary_types() -> list[str]:
    """Return those that can be built here and whose decoder has a rotary class of Transformers' convention."""
    found = []
    for model_type in causal_types():
        names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
        model_class = getattr(transformers, names if isinstance(names, str) else names[0])
        source = inspect.getsource(importlib.import_module(model_class.__module__))
        if model_type not in _DECODER_OF and ("dynamic_rope_update" in source or model_type in _DECODER_BY_AUTO_MODEL):
            found.append(model_type)
    return found


def config_class_of(model_type: str) -> type[PreTrainedConfig]:
    """Return a type's config class, or skip the test if this Transformers is too old for the type."""
    skip_if_left_out(model_type)
    return CONFIG_MAPPING[model_type]


def tiny_config(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Return a small config: the class's own defaults with the sizes above, sub-configs too."""
    default = config_class()
    names = {*default.to_dict(), *getattr(default, "attribute_map", {})}
    given = {
        name: value
        for name, value in _SIZES.items()
        if name in names and isinstance(_value(default, name), (int, type(None)))
    }
    kinds = sorted(set(_value(default, "layer_types") or ()), key=lambda kind: (kind in FULL_ATTENTION, kind))
    if len(kinds) > 1 and default.model_type != "recurrent_gemma":  # there it cannot be set
        given["layer_types"] = [kinds[0], kinds[-1]]  # full attention last
    for name in default.sub_configs or {}:
        sub = getattr(default, name, None)
        if isinstance(sub, PreTrainedConfig):
            given[name] = tiny_config(type(sub)).to_dict()
    rope = getattr(default, "rope_parameters", None) or {}
    if "llama_4_scaling_beta" in rope:  # queries past that length are larger, whatever the rule
        given["rope_parameters"] = {**rope, "original_max_position_embeddings": 64}
    return config_class(**{**given, **_OVERRIDES.get(default.model_type, {})})


def _value(config: PreTrainedConfig, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # differs by layer
        return ()


def tiny_model(model_type: str, config: PreTrainedConfig | None = None) -> PreTrainedModel:
    """Return a random model of a type; equal calls give equal weights."""
    skip_if_left_out(model_type)
    torch.manual_seed(0)
    config = tiny_config(config_class_of(model_type)) if config is None else config
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if model_type == "zaya" and name.endswith("temp"):  # multiplies the keys, and is zero in a random model
            torch.nn.init.constant_(parameter, 3.0)
    return model


def sharp_model(model_type: str, layer_types: list[str] | None = None) -> PreTrainedModel:
    """Return one whose attention depends on distance, without the rule that a few types have by default."""
    config = tiny_config(config_class_of(model_type))
    text = config.get_text_config(decoder=True)
    label = rope_label(text)
    rope = text.rope_parameters if label is None else text.rope_parameters[label]
    if rope.get("rope_type", "default") != "default":
        kept = {name: rope[name] for name in _NOT_OF_A_RULE if name in rope}
        rope.clear()
        rope.update(rope_type="default", **kept)
        if "llama_4_scaling_beta" in kept:  # queries past that length are larger
            rope["original_max_position_embeddings"] = 64
    if layer_types is not None:
        text.layer_types = layer_types
    return sharpened(tiny_model(model_type, config))


def sharpened(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model's queries and keys larger, in place: at random's own size its attention is nearly uniform."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("q_proj.weight", "k_proj.weight", "qkv", "query_key_value", *_JETMOE)):
            torch.nn.init.normal_(parameter, std=0.2)
    return model


_NOT_OF_A_RULE = ("rope_theta", "partial_rotary_factor", "llama_4_scaling_beta")
_JETMOE = ("kv_proj.weight", "input_linear.weight")
IDS = token_ids(100)  # past the original 64
REQUEST: dict[str, Any] = {"original_max_position_embeddings": 64, "on_scaled": "replace"}


def patch_in_attention(model: PreTrainedModel, method: str, factor: float, **options: Any) -> PreTrainedModel:
    """Patch; a window that every layer has, as the sizes above give many, is taken off where that can be."""
    config = model.config.get_text_config(decoder=True)
    window = "off" if window_of_all_layers(config) is not None and can_change(config) else "keep"
    return patch_model(model, method, factor, **{"sliding_window": window, **options})


def error_refused(model_type: str) -> ValueError | None:
    """Return the error by which a type is refused; None if it is not."""
    config_class = CONFIG_MAPPING[_DECODER_OF.get(model_type, model_type)]
    has_rotary = model_type in _DECODER_OF or model_type in rotary_types()
    config = tiny_config(config_class) if has_rotary else config_class()
    if model_type.endswith("_assistant"):  # this Transformers builds none, for want of a layer that makes keys
        config.num_kv_shared_layers = config.num_hidden_layers
    try:
        extend_config(config, "linear", 4, original_max_position_embeddings=64, on_scaled="replace")
    except ValueError as error:
        return error
    return None


def error_not_in_attention(model_type: str) -> ValueError | None:
    """Return the error by which a type that can be patched is refused for a method that runs in attention."""
    try:
        patch_in_attention(tiny_model(_DECODER_OF.get(model_type, model_type)), "dynamic_yarn", 4, **REQUEST)
    except ValueError as error:
        return error
    return None


def refusal_of(error: ValueError | None) -> Refusal | None:
    """Return what the table says of a type that is refused so; every reason in it has a code."""
    if error is None:
        return None
    assert isinstance(error, UnsupportedModelError), error
    assert error.code is not None, error
    return Refusal(error.model_type, error.code, error.values)


@cache
def expected() -> dict[str, str | None]:
    """Return the message for each type by the table; for another Transformers than the table's, by its config."""
    if transformers.__version__ == table_version():
        return {model_type: row and str(row.error()) for model_type, row in capabilities().items()}
    with warnings.catch_warnings(action="ignore"):
        built = [model_type for model_type in rotary_types() if why_left_out(model_type) is None]
        errors = {model_type: error_refused(model_type) for model_type in built}
    refusals = {model_type: error and str(error) for model_type, error in errors.items()}
    return {model_type: why_left_out(model_type) or refusals[model_type] for model_type in rotary_types()}


def main() -> None:
    """Write the table of families that the package ships: what became of each type of this Transformers."""
    types = {model_type: refusal_of(error_refused(model_type)) for model_type in causal_types()}
    extended = [model_type for model_type, refusal in types.items() if refusal is None]
    attention = {model_type: refusal_of(error_not_in_attention(model_type)) for model_type in extended}
    version = json.dumps(transformers.__version__)
    written = f'{{\n"transformers": {version},\n"types": {_rows(types)},\n"attention": {_rows(attention)}\n}}\n'
    FAMILIES_TABLE.write_text(written, encoding="utf-8")


def _rows(refusals: dict[str, Refusal | None]) -> str:
    """Return JSON with a line for each type; what is as usual is left out."""
    lines = []
    for model_type, refusal in refusals.items():
        row = None if refusal is None else {name: value for name, value in vars(refusal).items() if value}
        if row is not None and row["model_type"] == model_type:
            del row["model_type"]
        lines.append(f" {json.dumps(model_type)}: {json.dumps(row)}")
    return "{\n" + ",\n".join(lines) + "\n}"


if __name__ == "__main__":
    main()


# Neighbouring features make a pair in these, as the paper has it; in Llama, those half a head apart.
NEIGHBOURS = {"cohere", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium"}
