"""Random two-layer models of many families, the packaged tiny model, and every static method with its options."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_posenc import extend_config
from hf_posenc.assets import tiny_model_path

_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Transformers 5.0 reads the share of the features that rotate outside of these settings alone.
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": None},
    "Mixtral": {"num_local_experts": 4},
    "Qwen2": {},
    "Qwen2Moe": {**_EXPERTS, "shared_expert_intermediate_size": 32},
    "Qwen3": {"head_dim": 16},
    "Qwen3Moe": {**_EXPERTS, "head_dim": 16},
    "Gemma": {"head_dim": 16},
    "Gemma2": {"head_dim": 16, "sliding_window": 32},
    "Phi3": {"original_max_position_embeddings": 64},
    "SmolLM3": {},
    "GPTNeoX": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}, "rotary_pct": 0.5},
    "Olmo2": {},
    "StableLm": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}, "partial_rotary_factor": 0.5},
}

STATIC_METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("linear", {}),
    "ntk": ("ntk", {}),
    "ntk_by_parts": ("ntk_by_parts", {}),
    "yarn": ("yarn", {}),
    "yarn-paper": ("yarn", {"ramp": "paper"}),
    "yarn-harmonic": ("yarn", {"ramp": "harmonic"}),
    "yarn-options": ("yarn", {"beta_fast": 8.0, "attention_factor": 1.25, "truncate": False}),
    "llama3": ("llama3", {}),
    "longrope": ("longrope", {}),  # long_factor depends on the model: see method_options
    "abf": ("abf", {"rope_theta": 5e6}),
    "nope": ("nope", {}),
    "ntk_rcd": ("ntk_rcd", {}),
    "ntk_rcd-constant": ("ntk_rcd", {"critical_pair": 2, "scale": 6.0, "beyond_critical": "constant"}),
    "yarn_rcd": ("yarn_rcd", {}),
}


def load_tiny() -> PreTrainedModel:
    """Return the packaged tiny model."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tiny_model_path(), dtype=torch.float32)
    return model.eval()


def make_model(family: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
    """Build a random model; equal arguments give equal weights."""
    config_class = getattr(transformers, f"{family}Config")
    torch.manual_seed(0)
    config = config_class(**{**_SIZES, **FAMILIES[family], **overrides})
    return getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).eval()


def method_options(key: str, model: PreTrainedModel) -> tuple[str, dict[str, Any]]:
    """Return a method's name and options for a model."""
    name, options = STATIC_METHODS[key]
    if name == "longrope":
        num_pairs = model.get_decoder().rotary_emb.inv_freq.numel()
        options = {"short_factor": [1.0] * num_pairs, "long_factor": [1.0 + i for i in range(num_pairs)]}
    return name, dict(options)


def token_ids(length: int, rows: int = 1) -> torch.Tensor:
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, use_cache=False).logits


def state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def assert_same_state(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


def native(model: PreTrainedModel, method: str, factor: float, **options: Any) -> PreTrainedModel:
    """The same weights in a model that Transformers builds from the extended config."""
    built = type(model)(extend_config(model.config, method, factor, **options))
    built.load_state_dict(model.state_dict())
    # As from_pretrained(dtype=...) does: weights in the model's dtype, frequencies in float32.
    frequencies = {name: buffer.clone() for name, buffer in built.named_buffers() if "inv_freq" in name}
    built = built.to(model.dtype).eval()
    for name, value in frequencies.items():
        owner, buffer = name.rsplit(".", 1)
        built.get_submodule(owner)._buffers[buffer] = value
    return built


def recompute_activations(model: Any, **settings: Any) -> None:
    """Turn gradient checkpointing on, by the name it has in Transformers 5.23 or by the one before."""
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable = next(getattr(model, name) for name in names if hasattr(model, name))
    enable(settings or None)
