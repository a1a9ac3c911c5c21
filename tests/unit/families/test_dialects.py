"""Rules in words of a family's own: untouched models verify, and a rule that is unknown is called that."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_posenc import describe, diagnose, extend_config, patch_model, unpatch_model, verify_model
from hf_posenc.doctor.mending import mended
from hf_posenc.errors import UnsupportedModelError
from hf_posenc.families.discovery import declared_rope
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.patching.extension import SCALING_KEYS, plain_spec
from model_types import config_class_of, tiny_config, tiny_model
from tiny_llama import make_tiny_llama
from tiny_models import logits, token_ids

LENGTH = "original_max_position_embeddings"
# As HunYuan and Phi-3.5-MoE publish them, but for sizes.
ALPHA = {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
HUNYUAN = {"type": "dynamic", **ALPHA}
PHIMOE = {
    "type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "short_mscale": 1.243,
    "long_mscale": 1.243,
    LENGTH: 16,
}
BASE = 1e4 * 1000 ** (16 / 14)  # for 16 features of a head


def published(model_type: str) -> PreTrainedModel:
    config = tiny_config(config_class_of(model_type)).to_dict()
    rule: dict[str, Any] = {LENGTH: 16, "rope_scaling": PHIMOE} if model_type == "phimoe" else {"rope_scaling": HUNYUAN}
    config = {**config, **rule, "rope_theta": 1e4, "rope_parameters": None}
    return tiny_model(model_type, type(tiny_config(config_class_of(model_type))).from_dict(config))


@pytest.mark.parametrize("model_type", ["hunyuan_v1_dense", "hunyuan_v1_moe"])
def test_alpha_is_a_larger_base(model_type: str, tmp_path: Path) -> None:
    model = published(model_type)
    assert verify_model(model).extension["method"] == describe(model)["method"] == "none"
    expected = torch.tensor([BASE ** (-i / 8) for i in range(8)], dtype=torch.float64)
    torch.testing.assert_close(RotaryModel(model).rotary_module.inv_freq.double(), expected, rtol=1e-6, atol=0)
    before, held = logits(model, token_ids(60)), dict(model.config.rope_parameters)
    patch_model(model, "yarn", 4)
    assert verify_model(model).extension["method"] == "yarn"
    assert model.config.rope_parameters["rope_theta"] == pytest.approx(BASE)
    assert "alpha" not in model.config.rope_parameters  # another program would multiply by it again
    assert torch.equal(logits(unpatch_model(model), token_ids(60)), before)
    assert model.config.rope_parameters == held
    with pytest.warns(UserWarning, match="per forward"):
        extended = extend_config(model.config, "dynamic", 2, scope="sequence")
    assert AutoModelForCausalLM.from_config(extended).model.rotary_emb.rope_type == "dynamic"


def test_alpha_of_a_vision_language_model() -> None:
    modeling: Any = pytest.importorskip("transformers.models.hunyuan_vl.modeling_hunyuan_vl")
    config = transformers.HunYuanVLTextConfig(
        head_dim=16, rope_scaling={**HUNYUAN, "mrope_section": [2, 2, 2, 2]}, rope_theta=1e4, num_attention_heads=4
    )
    held = modeling.HunYuanVLRotaryEmbedding(config).inv_freq.double()
    expected = torch.tensor([plain_spec(config).rope_theta ** (-i / 8) for i in range(8)], dtype=torch.float64)
    torch.testing.assert_close(held, expected, rtol=1e-6, atol=0)


def test_the_mscales_of_phimoe_are_its_attention_factor(tmp_path: Path) -> None:
    model = published("phimoe")
    (check,) = verify_model(model).modules
    assert check.attention_factor == describe(model)["options"]["attention_factor"] == 1.243
    diagnosis = diagnose(model)
    assert diagnosis.sound
    assert "cos and sin times 1.243" in dict(diagnosis.lines)["loaded"]
    patch_model(model, "longrope", 4, long_factor=[2.0] * 8, attention_factor=1.1, on_scaled="replace")
    assert verify_model(model).modules[0].attention_factor == 1.1


@pytest.mark.parametrize("model_type", ["hunyuan_v1_dense", "hunyuan_v1_moe", "phimoe"])
def test_the_doctor_reads_them(model_type: str, tmp_path: Path) -> None:
    """Of an untouched published file nothing is wrong, in any version of Transformers."""
    model = published(model_type)
    config = {"model_type": model_type, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64}
    if model_type == "phimoe":
        config |= {"rope_theta": 1e4, "rope_scaling": PHIMOE, LENGTH: 16, "sliding_window": None}
        meant = "longrope of 16, attention_factor 1.243, rope_theta 10000"
    else:
        config |= {"rope_theta": 1e4, "rope_scaling": HUNYUAN, "head_dim": 16}
        meant = f"no scaling, rope_theta {BASE:g}"
    diagnosis = diagnose(config)
    assert diagnosis.findings == ()
    lines = dict(diagnosis.lines)
    assert lines["declared"].startswith(meant)
    assert {lines[f"{version} loads"] for version in ("4.57", "5.0", "5.23")} == {meant}
    assert diagnose(mended(config)).sound
    model.save_pretrained(tmp_path)
    assert "loaded-otherwise" not in {finding.code for finding in diagnose(tmp_path, live=True).findings}


# Keys that modeling files read of rope_parameters beside those of a rule: each is handled by hf_posenc, or says nothing
# of frequencies.
OTHER_KEYS = {"rope_theta", "partial_rotary_factor", "mrope_section", "llama_4_scaling_beta"}


def test_no_family_reads_a_word_that_is_unknown() -> None:
    read: dict[str, set[str]] = {}
    for file in Path(transformers.models.__path__[0]).glob("*/modeling_*.py"):
        for key in re.findall(r'rope_param\w*(?:\.get\(|\[)\s*"(\w+)"', file.read_text(encoding="utf-8")):
            read.setdefault(key, set()).add(file.parent.name)
    assert read.keys() - SCALING_KEYS - OTHER_KEYS == set()
    assert {"hunyuan_v1_dense"} <= read["alpha"] <= {"hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl"}
    assert read["short_mscale"] == read["long_mscale"] == {"phimoe"}


class _OwnRotary(LlamaRotaryEmbedding):
    """Frequencies that no config of Transformers says."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for buffer in (self.inv_freq, self.original_inv_freq):
            buffer.mul_(0.9)


def test_an_unknown_rule_is_called_unknown() -> None:
    model = make_tiny_llama()
    model.model.rotary_emb = _OwnRotary(model.config)
    for attempt in (verify_model, patch_model):
        with pytest.raises(UnsupportedModelError, match="hf_posenc") as raised:
            attempt(model)
        assert raised.value.code == "unknown_frequencies"
    (finding,) = diagnose(model).findings
    assert (finding.code, finding.severity) == ("not-compared", "note")
    model.model.rotary_emb.inv_freq.mul_(0.9)  # somebody changed it
    with pytest.raises(RuntimeError, match="reload the"):
        verify_model(model)


def test_an_unknown_softmax_scale_is_called_unknown() -> None:
    """DeepSeek's own code multiplies by mscale_all_dim whatever the rule is; no rule but YaRN has it here."""
    config = tiny_config(config_class_of("deepseek_v3"))
    config.rope_parameters = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4, "mscale_all_dim": 1.0}
    model = tiny_model("deepseek_v3", config)
    with pytest.raises(UnsupportedModelError, match="softmax scale") as raised:
        verify_model(model)
    assert raised.value.code == "unknown_frequencies"
    model.model.layers[0].self_attn.scaling *= 2
    with pytest.raises(RuntimeError, match="reload the"):
        verify_model(model)


def test_declared_rope_leaves_the_config_as_it_is() -> None:
    model = published("hunyuan_v1_dense")
    held = dict(model.config.rope_parameters)
    assert declared_rope(model.config)["rope_type"] == "default"
    assert model.config.rope_parameters == held
