"""A plan advises no method that ``patch_model`` refuses, over every model type of the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import CohereConfig, GraniteMoeHybridConfig, MistralConfig, PreTrainedConfig, Qwen3Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_posenc import patch_model, unpatch_model
from hf_posenc.errors import InvalidRequestError, UnsupportedModelError
from hf_posenc.families.family_data import capabilities, table_version
from hf_posenc.planning import plan
from hf_posenc.planning.advice import ZERO_SHOT_METHOD
from hf_posenc.planning.possible_methods import possible_static_method, why_not_staged
from hf_posenc.planning.text import finetune_words
from model_types import REQUEST, rotary_types, tiny_config, tiny_model
from refused_commands import refused
from tiny_llama import TINY_SIZES

TABLED = transformers.__version__ == table_version()
REFUSED = [name for name, refusal in capabilities().items() if refusal is not None] if TABLED else []
ACCEPTED = [name for name in rotary_types() if capabilities().get(name, 0) is None] if TABLED else []
_QWEN3_ROPE = {"rope_type": "default", "rope_theta": 1e6}
_HYBRID: dict[str, Any] = {"mamba_d_head": 16, "mamba_n_heads": 8, "layer_types": ["mamba", "attention"]}


def config_of(model_type: str) -> PreTrainedConfig:
    if model_type.endswith("_assistant"):  # its decoder's, which makes no keys
        config = tiny_config(CONFIG_MAPPING[capabilities()[model_type].model_type])  # type: ignore[union-attr]
        config.num_kv_shared_layers = config.num_hidden_layers
        return config
    config_class: type[PreTrainedConfig] = CONFIG_MAPPING[model_type]
    return tiny_config(config_class) if model_type in rotary_types() else config_class()


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_refused_type_is_refused_with_the_reason_of_patch_model(model_type: str) -> None:
    expected = capabilities()[model_type]
    assert expected is not None
    with pytest.raises(UnsupportedModelError) as error:
        plan(config_of(model_type), 10**8)
    assert (error.value.model_type, error.value.code) == (expected.model_type, expected.code)


@pytest.mark.filterwarnings("ignore:config.sliding_window is")
@pytest.mark.parametrize("model_type", ACCEPTED)
def test_what_is_advised_for_an_accepted_type_can_be_patched(model_type: str) -> None:
    config, model, request = config_of(model_type), tiny_model(model_type), {**REQUEST, "context_length": 256}
    unpatch_model(patch_model(model, possible_static_method(config, 64, 256), **request))
    reason = why_not_staged(config, 64, 256)
    if reason is None:
        patch_model(model, ZERO_SHOT_METHOD, **request)
    else:
        with pytest.raises(UnsupportedModelError) as error:
            patch_model(model, ZERO_SHOT_METHOD, **request)
        assert error.value.reason == reason


def test_layers_without_positions_are_refused_whatever_the_config_says() -> None:
    sizes = {**TINY_SIZES, "num_hidden_layers": 2}
    config = GraniteMoeHybridConfig(**sizes, **_HYBRID, position_embedding_type="nope")
    with pytest.raises(UnsupportedModelError) as error:
        plan(config, 256)
    assert error.value.code == "no_rotary_module"


def test_the_command_ends_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers.GPT2Config(n_positions=64, n_embd=64, n_layer=2, n_head=4).save_pretrained(tmp_path)
    assert "rotary embedding" in refused(capsys, "plan", tmp_path, "--context-length", 256)
    assert plan(str(tmp_path), 64).advice.method == "none"  # which asks nothing of the model


def test_a_window_on_every_layer_leaves_the_static_method() -> None:
    config = MistralConfig(**TINY_SIZES, sliding_window=32)
    with pytest.raises(InvalidRequestError, match="carries information at most 64 tokens"):
        plan(config, 128)
    config.sliding_window = 64
    kept, off = plan(config, 128), plan(config, 128, sliding_window="off")
    assert (kept.advice.method, kept.reading[0].rule) == ("yarn", 0)
    assert "sliding window" in kept.advice.reasons[0]
    assert off.advice.method == ZERO_SHOT_METHOD
    assert off.kv_cache > kept.kv_cache


def test_where_a_config_cannot_say_yarn_another_static_method_is_advised() -> None:
    config = tiny_config(CONFIG_MAPPING["gemma4_text"])
    made = plan(config, 256, original_max_position_embeddings=64)
    assert (made.advice.method, made.static_method) == ("ntk", "ntk")


def test_the_command_of_a_way_has_what_the_model_needs() -> None:
    words = finetune_words("model", 256, "ntk", "off")
    assert words[-6:] == ["--context-length", "256", "--method", "ntk", "--sliding-window", "off"]


@pytest.mark.parametrize(
    ("config", "original"),
    [
        (Qwen3Config(**{**TINY_SIZES, "head_dim": 128}, rope_parameters=_QWEN3_ROPE), 32768),
        (CohereConfig(**TINY_SIZES, model_max_length=131072), 131072),
    ],
)
def test_plan_and_patch_count_from_the_same_length(config: PreTrainedConfig, original: int) -> None:
    config.max_position_embeddings = 40960
    with pytest.warns(UserWarning, match=f"{original}"):
        planned = plan(config, 4 * original)
    assert (planned.model.original, planned.factor) == (original, 4)
