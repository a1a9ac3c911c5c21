"""Extended folders that other functions than ``load_extended`` load, and models spread over devices and files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from accelerate.utils import load_checkpoint_in_model
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from attention_models import IDS, sharp_model
from doctor_configs import edit_config
from hf_posenc import describe, diagnose, load_extended, patch_model, save_extended, unpatch_model, verify_model
from hf_posenc.checkpoint.manifest import MANIFEST
from hf_posenc.checkpoint.plain_loading import plain_loading
from hf_posenc.errors import ExtensionMissingError, InvalidRequestError, MissingFileError, RotaryMismatchError
from tiny_models import logits, make_model

NOT_IN_CONFIG = ("dynamic_yarn", "dynamic", "self_extend", "dca", "rerope", "leaky_rerope")


def from_config(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    load_checkpoint_in_model(model, folder)
    return model.eval()


def dispatched(folder: Path) -> PreTrainedModel:
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return load_checkpoint_and_dispatch(model, folder, device_map="auto").eval()


def plainly(folder: Path) -> PreTrainedModel:
    with plain_loading():
        return AutoModelForCausalLM.from_pretrained(folder).eval()


def as_described(model: PreTrainedModel, facts: dict[str, Any]) -> PreTrainedModel:
    lengths = ("context_length", "original_max_position_embeddings")
    return patch_model(model, facts["method"], **{name: facts[name] for name in lengths}, **facts["options"])


@pytest.mark.parametrize("load", [from_config, dispatched, plainly])
@pytest.mark.parametrize("method", NOT_IN_CONFIG)
def test_a_model_without_its_rule_is_found_and_can_be_extended(
    method: str, load: Callable[[Path], PreTrainedModel], tmp_path: Path
) -> None:
    folder = save_extended(patch_model(sharp_model("Llama"), method, 8), tmp_path / "model")
    expected = logits(load_extended(folder).eval(), IDS)
    model = load(folder)
    assert describe(model)["method"] == "none"
    assert not torch.equal(logits(model, IDS), expected)
    for given in ((), (folder,), (str(folder),)):
        with pytest.raises(ExtensionMissingError, match=r"hf_posenc\.load_extended\('.*model'\)") as caught:
            verify_model(model, *given)
        assert (caught.value.expected["method"], caught.value.held["method"]) == (method, "none")
        assert caught.value.expected["context_length"] == 512
    assert [(f.code, f.severity) for f in diagnose(model).findings] == [("extension-not-applied", "error")]
    as_described(model, describe(folder))
    assert verify_model(model, folder).extension == describe(folder)
    assert diagnose(model).sound
    torch.testing.assert_close(logits(model, IDS), expected, atol=1e-5, rtol=0)


def test_the_error_is_a_mismatch_of_the_model() -> None:
    """Who catches what ``verify_model`` raised before catches this too."""
    assert issubclass(ExtensionMissingError, RotaryMismatchError)


def test_doctor_live_notes_what_plain_transformers_loads_of_a_sound_folder(tmp_path: Path) -> None:
    folder = save_extended(patch_model(make_model("Llama"), "dynamic_yarn", 4), tmp_path / "model")
    diagnosis = diagnose(folder, live=True)
    assert diagnosis.sound
    assert [(f.code, f.severity) for f in diagnosis.findings] == [("extension-not-applied", "note")]
    assert dict(diagnosis.lines)["holds"] == "the model without its extension"


@pytest.mark.parametrize("load", [from_config, dispatched, plainly, load_extended])
def test_a_static_rule_is_there_however_it_was_loaded(load: Callable[[Path], PreTrainedModel], tmp_path: Path) -> None:
    folder = save_extended(patch_model(make_model("Llama"), "yarn", 4, beta_fast=16), tmp_path / "model")
    assert verify_model(load(folder), folder).extension == verify_model(load(folder)).extension == describe(folder)


@pytest.mark.parametrize("load", [from_config, plainly])
def test_a_temperature_that_no_config_can_say_is_missed(
    load: Callable[[Path], PreTrainedModel], tmp_path: Path
) -> None:
    folder = save_extended(patch_model(make_model("StableLm"), "yarn", 4, temperature="logits"), tmp_path / "model")
    for given in ((), (folder,)):
        with pytest.raises(ExtensionMissingError) as caught:
            verify_model(load(folder), *given)
        assert (caught.value.expected, caught.value.held) == ({"options": {"temperature": "logits"}}, {"options": {}})
    verify_model(load_extended(folder), folder)


@pytest.mark.parametrize(
    ("model", "differing"),
    [
        (lambda: make_model("Llama"), {"method", "factor", "context_length", "options"}),
        (lambda: patch_model(make_model("Llama"), "dynamic_yarn", 4), {"options"}),
        (lambda: patch_model(make_model("Llama"), "dynamic_yarn", 8, beta_fast=16), {"factor", "context_length"}),
        (lambda: patch_model(make_model("Llama"), "yarn", 4, beta_fast=16), {"method"}),
    ],
    ids=["plain", "options", "factor", "method"],
)
def test_a_model_is_compared_with_the_manifest_of_a_folder(
    model: Callable[[], PreTrainedModel], differing: set[str], tmp_path: Path
) -> None:
    folder = save_extended(patch_model(make_model("Llama"), "dynamic_yarn", 4, beta_fast=16), tmp_path / "model")
    other = model()
    verify_model(other)
    with pytest.raises(ExtensionMissingError) as caught:
        verify_model(other, folder)
    assert caught.value.expected.keys() == caught.value.held.keys() == differing


def test_a_window_and_a_base_that_only_the_manifest_has_are_compared(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 64}

    def mistral(rope_theta: float = 1e4) -> PreTrainedModel:
        rope = {"rope_type": "default", "rope_theta": rope_theta}
        return MistralForCausalLM(MistralConfig(**sizes, sliding_window=256, rope_parameters=rope))

    encoded = save_extended(patch_model(mistral(), "alibi", sliding_window="off"), tmp_path / "encoded")
    verify_model(load_extended(encoded), encoded)
    with pytest.raises(ExtensionMissingError) as caught:
        verify_model(patch_model(mistral(), "alibi"), encoded)
    assert (caught.value.expected, caught.value.held) == ({"sliding_window": "off"}, {"sliding_window": "keep"})
    folder = save_extended(patch_model(mistral(), "dynamic_yarn", 4, sliding_window="off"), tmp_path / "model")
    with pytest.raises(ExtensionMissingError) as caught:
        verify_model(patch_model(mistral(5e5), "dynamic_yarn", 4, sliding_window="off"), folder)
    assert (caught.value.expected, caught.value.held) == ({"rope_theta": 1e4}, {"rope_theta": 5e5})
    # The base of a saved model was changed by hand: load_extended put its rule on other frequencies, and said nothing.
    rope = {"rope_type": "default", "rope_theta": 5e5}
    edit_config(folder, rope_parameters=rope, rope_theta=5e5)
    with pytest.raises(InvalidRequestError, match=r"rope_theta.*500000\.0,.*10000\.0"):
        load_extended(folder)


def test_an_adapter_and_its_folder(tmp_path: Path) -> None:
    make_model("Llama").save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    folder = save_extended(get_peft_model(patch_model(base, "dynamic_yarn", 4), lora), tmp_path / "adapter")
    verify_model(load_extended(folder), folder)
    with plain_loading():
        alone = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), str(folder))
    verify_model(alone)
    with pytest.raises(ExtensionMissingError):
        verify_model(alone, folder)


def test_a_folder_that_says_nothing_is_refused(tmp_path: Path) -> None:
    model = make_model("Llama")
    model.save_pretrained(tmp_path)
    with pytest.raises(MissingFileError, match="has no context_extension"):
        verify_model(model, tmp_path)


def test_an_undone_model_is_the_base_and_its_config_says_so(tmp_path: Path) -> None:
    folder = save_extended(patch_model(make_model("Llama"), "dynamic_yarn", 4), tmp_path / "model")
    model = unpatch_model(load_extended(folder))
    assert verify_model(model).extension["method"] == "none"
    with pytest.raises(ExtensionMissingError):
        verify_model(model, folder)


# Models that are spread over devices and files.


@pytest.mark.filterwarnings("ignore:.*dtype.*:UserWarning")
@pytest.mark.parametrize("method", ["yarn", "dynamic_yarn", "dca", "t5_bias"])
def test_load_extended_spreads_a_model_over_memory_and_files(method: str, tmp_path: Path) -> None:
    model = patch_model(sharp_model("Llama"), method, 8).eval()
    folder, expected = save_extended(model, tmp_path / "model"), logits(model, IDS)
    parts = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    parts |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    spread = load_extended(folder, device_map=parts, offload_folder=str(tmp_path / "offloaded")).eval()
    assert spread.model.layers[1].self_attn.q_proj.weight.is_meta  # it is in a file
    assert verify_model(spread, folder).extension["method"] == method
    assert torch.equal(logits(spread, IDS), expected)
    half = load_extended(folder, device_map="auto", dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    verify_model(half, folder)


# Encodings, which take the place of RoPE.


def test_a_folder_with_the_earlier_name_of_an_encoding_is_read(tmp_path: Path) -> None:
    model = patch_model(sharp_model("Llama"), "alibi").eval()
    folder, expected = save_extended(model, tmp_path / "model"), logits(model, IDS)
    written = json.loads((folder / "config.json").read_text())
    earlier = {"rope_type": "hf_posenc_alibi"}
    edit_config(
        folder,
        rope_parameters=written["rope_parameters"] | earlier,
        rope_scaling=written["rope_scaling"] | earlier | {"type": "hf_posenc_alibi"},
    )
    assert torch.equal(logits(load_extended(folder).eval(), IDS), expected)
    assert diagnose(folder).sound


def test_doctor_says_what_loads_an_encoding(tmp_path: Path) -> None:
    folder = save_extended(patch_model(make_model("Llama"), "alibi"), tmp_path / "model")
    with pytest.raises(InvalidRequestError, match=r"hf_posenc\.load_extended"):
        diagnose(folder, live=True)
    (found,) = diagnose(json.loads((folder / "config.json").read_text())).findings
    assert (found.code, found.severity) == ("encoding", "error")
    (folder / MANIFEST).unlink()
    lost, _ = diagnose(folder).findings
    assert (lost.code, lost.why) == ("manifest-lost", "No config can say this rule, so nobody can load the model.")
