"""Rules in layer types besides that of full attention, and keys of ``rope_parameters`` that attention reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import ModernBertConfig, ModernBertModel, PreTrainedModel

from hf_posenc import describe, extend_config, patch_model, unpatch_model, verify_model
from hf_posenc.doctor import diagnose
from hf_posenc.errors import AlreadyExtendedError, RotaryMismatchError
from model_types import sharp_model, tiny_config
from tiny_models import assert_same_state, logits, state, token_ids

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SLIDING = "sliding_attention"
IDS = token_ids(100)


def modernbert(**changes: Any) -> PreTrainedModel:
    """A model whose flat ``rope_scaling`` Transformers writes into both of its layer types."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = ModernBertConfig(**sizes, vocab_size=128, max_position_embeddings=256, pad_token_id=0, **changes)
    return ModernBertModel(config).eval()


def rotary_of(model: PreTrainedModel) -> Any:
    return next(module for name, module in model.named_modules() if name.endswith("rotary_emb"))


def outputs(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).last_hidden_state


def test_replacing_a_rule_takes_it_from_every_layer_type() -> None:
    model = modernbert(rope_scaling=dict(YARN))
    assert rotary_of(model).sliding_attention_attention_scaling > 1.1
    assert describe(model)["other_layer_types"][SLIDING]["method"] == "yarn"
    before, was = state(model), outputs(model)
    with pytest.warns(UserWarning, match="sliding_attention"):
        patch_model(model, "yarn", 2, on_scaled="replace")
    plain = modernbert()
    plain.load_state_dict(model.state_dict())
    patch_model(plain, "yarn", 2, original_max_position_embeddings=64)
    assert rotary_of(model).sliding_attention_attention_scaling == 1.0
    torch.testing.assert_close(outputs(model), outputs(plain), atol=1e-5, rtol=0)
    assert "other_layer_types" not in describe(model)
    verify_model(model)
    unpatch_model(model)
    assert_same_state(state(model), before)
    assert torch.equal(outputs(model), was)


def test_a_rule_in_the_other_layer_type_alone_is_said_and_refused() -> None:
    both = modernbert(rope_scaling=dict(YARN)).config.rope_parameters
    only = {**both, "full_attention": {"rope_type": "default", "rope_theta": both["full_attention"]["rope_theta"]}}
    model = modernbert(rope_parameters=only)
    assert describe(model)["method"] == "none"
    assert describe(model.config)["other_layer_types"][SLIDING]["factor"] == 4.0
    with pytest.raises(AlreadyExtendedError, match=r"sliding_attention \(yarn,.*4\).*on_scaled='replace'"):
        patch_model(model, "yarn", 2)
    verify_model(model)
    rotary_of(model).sliding_attention_inv_freq[3] *= 1.01
    with pytest.raises(RotaryMismatchError, match="sliding_attention:"):
        verify_model(model)


def test_doctor_names_a_rule_in_the_other_layer_type() -> None:
    config = modernbert(rope_scaling=dict(YARN)).config.to_dict()
    assert any(SLIDING in f"{finding.what} {finding.todo}" for finding in diagnose(config).findings)
    plain = modernbert().config.to_dict()
    assert not any(SLIDING in f"{finding.what} {finding.todo}" for finding in diagnose(plain).findings)


def ministral(original: int = 64) -> PreTrainedModel:
    model = sharp_model("ministral3")
    model.config.max_position_embeddings = 256
    model.config.sliding_window = None
    model.config.rope_parameters |= {"original_max_position_embeddings": original, "llama_4_scaling_beta": 0.1}
    return model


def test_a_key_that_attention_reads_keeps_the_models_value() -> None:
    """Ministral 3's attention multiplies queries by a number that depends on it, in texts of every length."""
    model = ministral()
    short = logits(model, IDS)
    patch_model(model, "dynamic_yarn", 2, original_max_position_embeddings=256)
    assert model.config.rope_parameters["original_max_position_embeddings"] == 64
    torch.testing.assert_close(logits(model, IDS), short, atol=1e-5, rtol=0)
    unpatch_model(model)
    assert torch.equal(logits(model, IDS), short)


@pytest.mark.parametrize("change", [patch_model, lambda model, *args, **kw: extend_config(model.config, *args, **kw)])
def test_a_rule_that_needs_another_value_there_is_refused(change: Any) -> None:
    model = ministral()
    before = model.config.to_dict()
    with pytest.raises(ValueError, match=r"model_type 'ministral3'.*original_max_.*=64"):
        change(model, "yarn", 2, original_max_position_embeddings=256)
    assert model.config.to_dict() == before
    assert "llama_4_scaling_beta" in tiny_config(type(model.config)).rope_parameters
