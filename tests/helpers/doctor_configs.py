"""Configs for the tests of the doctor, and the frequencies that they mean, written down a second time."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

from hf_posenc import verify_model
from hf_posenc.doctor.config_checks import read_meaning
from hf_posenc.doctor.config_meaning import Known

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OF_64 = {"factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", **OF_64}
LAYERS = ["full_attention", "sliding_attention"]


def config_of(model_type: str = "llama", **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, **SIZES, **more}


def plain(theta: float, pairs: int = 8) -> list[float]:
    return [theta ** (-i / pairs) for i in range(pairs)]


def linear(theta: float, factor: float) -> list[float]:
    return [value / factor for value in plain(theta)]


def yarn(theta: float, factor: float = 4.0, original: int = 64, harmonic: bool = False) -> list[float]:
    """YaRN with 32 and 1 rotations, of 8 pairs, written down from the paper's code once more."""

    def index(rotations: float) -> float:
        return 16 * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(index(32)), 0), min(math.ceil(index(1)), 15)
    frequencies = []
    for i, value in enumerate(plain(theta)):
        share = min(max((i - low) / ((high - low) or 0.001), 0.0), 1.0)
        blended = value / factor * share + value * (1 - share)
        frequencies.append(value / (share * factor + 1 - share) if harmonic else blended)
    return frequencies


def rotary_of(config: dict[str, Any], label: str = "") -> tuple[list[float], float]:
    """Load a config as Transformers does and return what its rotary module holds."""
    loaded = type(AutoConfig.for_model(config["model_type"])).from_dict(copy.deepcopy(config))
    model = AutoModelForCausalLM.from_config(loaded)
    verify_model(model)
    rotary = model.model.rotary_emb
    return getattr(rotary, f"{label}inv_freq").tolist(), float(getattr(rotary, f"{label}attention_scaling"))


def codes(config: dict[str, Any], known: Known | None = None) -> set[str]:
    return {f.code for f in read_meaning(config, known).findings if f.severity != "note"}


TEMPERATURE = 0.1 * math.log(4) + 1


AXES = {"mrope_section": [2, 3, 3]}
VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
    "qwen2_5_vl": {"depth": 1, "out_hidden_size": 64, "fullatt_block_indexes": [0]},
    "qwen3_vl": {"depth": 1, "out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
}
for _name in ("qwen2_5_vl", "qwen3_vl"):
    VISION[_name] |= {"hidden_size": 32, "num_heads": 2, "intermediate_size": 32}


def vl_config(model_type: str, nested: bool = True, **settings: Any) -> dict[str, Any]:
    """Return a vision-language config as the Hub has it: Qwen2-VL's text settings are often at the top level."""
    text = {**SIZES, **({"head_dim": 16} if model_type == "qwen3_vl" else {}), **settings}
    whole = {"model_type": model_type, "vision_config": VISION[model_type]}
    return {**whole, "text_config": {**text, "model_type": f"{model_type}_text"}} if nested else {**whole, **text}


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
