"""What the plugin of vLLM decides, without vLLM: tests/integration/test_vllm_modes.py runs it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from hf_posenc import load_extended, patch_model, save_extended
from hf_posenc.assets import tiny_model_path
from hf_posenc.vllm_plugin import Modes, modes_for, modes_of

LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    modes_of.cache_clear()
    yield
    modes_of.cache_clear()


def save(folder: Path, model: Any = None, **facts: Any) -> str:
    model = model or AutoModelForCausalLM.from_pretrained(tiny_model_path())
    patch_model(model, "yarn", 4, on_scaled="replace")
    return str(save_extended(model, folder, **facts))


def asked(num_prompt: int, max_tokens: int | None, extra: dict[str, Any] | None = None, salt: str | None = None) -> Any:
    params = None if max_tokens is None else SimpleNamespace(max_tokens=max_tokens, extra_args=extra)
    return SimpleNamespace(
        prompt_token_ids=[1] * num_prompt,
        prompt_embeds=None,
        sampling_params=params,
        cache_salt=salt,
        lora_request=None,
    )


def test_nothing_of_vllm_is_imported_before_vllm_asks() -> None:
    code = "import sys, hf_posenc.vllm_plugin; sys.exit('vllm' in sys.modules or 'transformers.trainer' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "extra", "extended"),
    [
        (200, 56, None, False),
        (200, 57, None, True),  # it may become longer than the original length
        (10, 500, {"other": 1}, True),
        (200, 8, {"extension": "on"}, True),
        (200, 8, {"extension": "off"}, False),
        (256, None, None, False),  # of a pooling model
        (257, None, None, True),
    ],
)
def test_the_mode_is_decided_by_prompt_and_max_tokens(
    num_prompt: int, max_tokens: int | None, extra: dict[str, Any] | None, extended: bool
) -> None:
    modes, request = Modes(256, {}), asked(num_prompt, max_tokens, extra, "mine")
    modes.admit(request)
    state = SimpleNamespace(sampling_params=request.sampling_params, num_prompt_tokens=num_prompt)
    assert modes.is_extended(state) is extended
    assert request.cache_salt == ("hf_posenc:extended:mine" if extended else "mine")  # no block is shared by modes
    if extra and "other" in extra:
        assert request.sampling_params.extra_args["other"] == 1


def test_positions_of_extended_requests_are_raised() -> None:
    modes, requests = Modes(256, {}), {}
    for name, num_prompt in (("a", 300), ("b", 10), ("c", 400)):
        request = asked(num_prompt, 8)
        modes.admit(request)
        requests[name] = SimpleNamespace(sampling_params=request.sampling_params, num_prompt_tokens=num_prompt)
    runner = SimpleNamespace(
        requests=requests,
        input_batch=SimpleNamespace(req_ids=["b", "a", "c"]),
        positions=torch.tensor([3, 4, 0, 1, 7, 9, 9]),
        req_indices=SimpleNamespace(gpu=torch.tensor([0, 0, 1, 1, 2, 0, 0], dtype=torch.int32)),
    )
    modes.raise_positions(runner, 5)
    assert runner.positions.tolist() == [3, 4, 256, 257, 263, 9, 9]  # what is not of this step is left alone


def test_folders_have_both_modes_if_their_weights_are_those_of_the_base(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm.hf_posenc")
    assert modes_of(str(tmp_path)) is None  # of no concern
    assert not caplog.records
    folder = save(tmp_path / "plain")
    assert modes_of(folder) == Modes(256, {"rope_type": "default", "rope_theta": 10000.0})
    assert "at most 256 tokens are read without the extension" in caplog.messages[-1]
    assert modes_of(folder, "multi-head latent attention") is None
    assert "all requests" in caplog.messages[-1]
    assert "because of multi-head latent attention" in caplog.messages[-1]
    assert modes_of(save(tmp_path / "trained", tokens_trained=100)) is None
    assert "weights that were trained with the rule" in caplog.messages[-1]
    config = tmp_path / "plain/config.json"  # as of a model that reads images too
    nested = json.loads(config.read_text())
    config.write_text(json.dumps({"model_type": "gemma3", "text_config": nested}))
    modes_of.cache_clear()
    assert modes_of(folder) is None
    assert "a part of config.json" in caplog.messages[-1]


def test_a_base_model_with_a_rule_of_its_own_is_served_by_that(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = AutoConfig.from_pretrained(tiny_model_path())
    config.rope_parameters = {**LLAMA3, "original_max_position_embeddings": 256}
    config.max_position_embeddings = 512
    folder = save(tmp_path / "scaled", AutoModelForCausalLM.from_config(config))
    modes = modes_of(folder)
    assert modes is not None
    assert (modes.original, modes.rope) == (512, {**LLAMA3, "original_max_position_embeddings": 256})
    again = save_extended(load_extended(folder), tmp_path / "again")  # where the base's rule is not known any more
    assert json.loads((again / "context_extension.json").read_text())["scaled_base"] is None
    assert modes_of(str(again)) is None
    assert "does not say how the unextended model reads" in caplog.text


def vllm_config(
    rope: Any, additional_config: dict[str, Any], max_loras: int | None = 2, device: str = "cpu"
) -> SimpleNamespace:
    text = SimpleNamespace(rope_parameters=rope)
    return SimpleNamespace(
        speculative_config=None,
        use_v2_model_runner=False,
        model_config=SimpleNamespace(model="base", use_mla=False, hf_text_config=text),
        lora_config=None if max_loras is None else SimpleNamespace(max_loras=max_loras),
        device_config=SimpleNamespace(device_type=device),
        additional_config=additional_config,
    )


def test_an_adapter_is_for_long_requests_to_a_base_model_that_is_not_extended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_model_path())
    base.save_pretrained(tmp_path / "base")

    def adapter(name: str, of: str) -> str:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / of)
        patch_model(model, "yarn", 4, on_scaled="replace")
        wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
        return str(save_extended(wrapped, tmp_path / name, tokens_trained=300))

    folder = adapter("adapter", "base")
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    assert modes_of(folder) == Modes(256, rope, folder)

    rule = json.loads((Path(folder) / "context_extension.json").read_text())["rope_parameters"]
    served = {"rope": {**rule, "partial_rotary_factor": 1.0}, "additional_config": {"hf_posenc": folder}}
    assert modes_for(vllm_config(**served)) == Modes(256, rope, folder)
    assert modes_for(vllm_config(**{**served, "max_loras": 1, "device": "cuda"})) == Modes(256, rope, folder)
    for other, reason in (
        ({"rope": rope}, "without the rule of the adapter"),
        ({"max_loras": None}, "without --enable-lora"),
        ({"max_loras": 1}, "get the adapter too"),
    ):
        with pytest.raises(ValueError, match="cannot be read with it"):
            modes_for(vllm_config(**{**served, **other}))
        assert reason in caplog.messages[-1]
    save(tmp_path / "extended", base)
    assert modes_of(adapter("again", "extended")) is None
    assert "weights that were trained with the rule" in caplog.messages[-1]
