"""The frequencies that a server computes from an exported command or file, as each server's source reads them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_posenc import patch_model, save_extended
from tiny_models import make_model

Frequencies = tuple[torch.Tensor, float]


def extended(folder: Path, method: str, family: str = "Llama", **options: Any) -> tuple[Path, Frequencies]:
    """Save a tiny model extended four times; return its folder and the frequencies it ran with."""
    model = make_model(family)
    patch_model(model, method, 4, **options)
    rotary = model.get_decoder().rotary_emb
    live = rotary.inv_freq.double(), float(rotary.attention_scaling)
    return save_extended(model, folder, base_model="org/base model"), live


def flag(words: list[str], name: str, default: str = "") -> str:
    return words[words.index(name) + 1] if name in words else default


def by_transformers(config: PreTrainedConfig, rope: dict[str, Any]) -> Frequencies:
    """What Transformers computes from rope parameters, for servers whose frequencies are its own."""
    config.update({"rope_parameters": dict(rope)})
    config.validate_rope()
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        return rope["rope_theta"] ** -exponents, 1.0
    inv_freq, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    return inv_freq.double(), float(factor)


def usual(rope: dict[str, Any]) -> float:
    return 0.1 * math.log(rope["factor"]) + 1


def vllm_reads(config: PreTrainedConfig, rope: dict[str, Any]) -> Frequencies:
    inv_freq, factor = by_transformers(config, rope)
    return inv_freq, rope["long_mscale"] if rope["rope_type"] == "longrope" else factor


def sglang_reads(config: PreTrainedConfig, rope: dict[str, Any]) -> Frequencies:
    inv_freq, factor = vllm_reads(config, rope)
    return inv_freq, usual(rope) * rope.get("attn_factor", 1.0) if rope["rope_type"] == "yarn" else factor


def mlx_reads(config: PreTrainedConfig, rope: dict[str, Any]) -> Frequencies:
    """mlx-lm: no rule reads ``attention_factor``; longrope computes Phi-3's (mlx_lm/models/rope_utils.py)."""
    unread = {key: value for key, value in rope.items() if key != "attention_factor"}
    inv_freq, factor = by_transformers(config, unread)
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        factor = math.sqrt(1 + math.log(config.max_position_embeddings / original) / math.log(original))
    return inv_freq, factor


def llama_cpp_reads(keys: dict[str, Any], tensors: dict[str, list[float]], head_dim: int) -> Frequencies:
    """What llama.cpp computes (src/llama-context.cpp, ggml_rope_yarn_corr_dims, ggml_rope_cache_init)."""
    pairs = np.arange(head_dim // 2)
    plain = keys["freq_base"] ** (-2.0 * pairs / head_dim)
    divisors = tensors.get("rope_freqs.weight") or tensors.get("rope_factors_long.weight") or [1.0] * len(pairs)
    plain, scale = plain / np.array(divisors), 1 / keys.get("scaling.factor", 1.0)
    if keys.get("scaling.type") != "yarn":
        return torch.tensor(plain * scale), keys.get("scaling.attn_factor", 1.0)
    original = keys["scaling.original_context_length"]
    low, high = (
        head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(keys["freq_base"]))
        for turns in (keys.get("scaling.yarn_beta_fast", 32.0), keys.get("scaling.yarn_beta_slow", 1.0))
    )
    low, high = max(0, math.floor(low)), min(head_dim - 1, math.ceil(high))
    keep = 1 - np.clip((pairs - low) / max(0.001, high - low), 0, 1)
    temperature = (1 + 0.1 * math.log(1 / scale)) * keys.get("scaling.attn_factor", 1.0)
    return torch.tensor(plain * scale * (1 - keep) + plain * keep), temperature


def keys_of_flags(words: list[str], freq_base: float) -> dict[str, Any]:
    names = {"--rope-scale": "factor", "--yarn-beta-fast": "yarn_beta_fast", "--yarn-beta-slow": "yarn_beta_slow"}
    keys: dict[str, Any] = {"freq_base": float(flag(words, "--rope-freq-base", str(freq_base)))}
    keys |= {f"scaling.{key}": float(flag(words, name)) for name, key in names.items() if name in words}
    if "--rope-scaling" in words:
        keys["scaling.type"] = flag(words, "--rope-scaling")
    if "--yarn-orig-ctx" in words:
        keys["scaling.original_context_length"] = int(flag(words, "--yarn-orig-ctx"))
    assert words.count("--override-kv") <= 1  # given twice, it is deprecated
    for one in filter(None, flag(words, "--override-kv").split(",")):
        key, kind, value = re.fullmatch(r"llama\.(\S+)=(int|float):(\S+)", one).groups()
        keys[key.removeprefix("rope.")] = {"int": int, "float": float}[kind](value)
    return keys
