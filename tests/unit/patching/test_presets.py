"""Presets and facts: they agree, and each preset fits a model of its family and loads without hf_posenc."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Phi3Config, Phi3ForCausalLM, PreTrainedModel

from hf_posenc import describe, extend_config, patch_model, save_extended
from hf_posenc.cli.list import checkpoints_text, presets_text
from hf_posenc.cli.main import main
from hf_posenc.methods.registry import get_method, make_method
from hf_posenc.patching.presets import Checkpoint, Preset, checkpoints, known_checkpoint, presets
from model_types import tiny_config
from older_transformers import skip_on_5_0
from tiny_models import logits, make_model, token_ids

IDS = token_ids(60)
each_preset = pytest.mark.parametrize("preset", presets().values(), ids=presets())
each_checkpoint = pytest.mark.parametrize("facts", checkpoints().values(), ids=checkpoints())


def model_for(preset: Preset, model_type: str) -> PreTrainedModel:
    """A small model that says it was trained on the preset's length, with heads of the published size for lists."""
    config = tiny_config(CONFIG_MAPPING[model_type])
    config.max_position_embeddings = preset.original_max_position_embeddings
    if preset.method in ("longrope", "fitted"):
        facts = checkpoints()[preset.checkpoints[0]]
        config.hidden_size = config.num_attention_heads * facts.head_dim
        if getattr(config, "head_dim", None):
            config.head_dim = facts.head_dim
        share = facts.rotary_dim / facts.head_dim
        config.rope_parameters["partial_rotary_factor"] = share
        if hasattr(config, "partial_rotary_factor"):  # Transformers 5.0 writes it over the other
            config.partial_rotary_factor = share
        config.rope_parameters["rope_theta"] = facts.rope_theta
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("name", "model_type"), [(name, type_) for name, preset in presets().items() for type_ in preset.model_types]
)
def test_a_preset_is_what_its_numbers_say_and_loads_in_plain_transformers(
    name: str, model_type: str, tmp_path: Path
) -> None:
    preset = presets()[name]
    if model_type == "deepseek_v2":
        skip_on_5_0("does not multiply this family's softmax scale")
    model = patch_model(model_for(preset, model_type), preset=name)
    window = preset.sliding_window or "keep"
    spelled_out = patch_model(
        model_for(preset, model_type), preset.method, preset.factor, sliding_window=window, **preset.options
    )
    assert torch.equal(logits(model, IDS), logits(spelled_out, IDS))
    there = describe(model)
    assert there["method"] == preset.method
    assert there["context_length"] == preset.factor * preset.original_max_position_embeddings
    plain = AutoModelForCausalLM.from_pretrained(save_extended(model, tmp_path / "model")).eval()
    assert plain.config.max_position_embeddings == there["context_length"]
    assert torch.equal(logits(plain, IDS), logits(model, IDS))


@each_preset
def test_the_data_are_whole(preset: Preset) -> None:
    assert preset.method == get_method(preset.method).name
    make_method(preset.method, preset.factor, preset.options)
    assert preset.checkpoints
    assert len(preset.source) > 20


@each_preset
def test_a_preset_and_the_facts_of_its_checkpoints_agree(preset: Preset) -> None:
    target = round(preset.factor * preset.original_max_position_embeddings)
    for name in preset.checkpoints:
        facts = checkpoints()[name]
        assert facts.family == preset.family
        assert facts.trained_length == preset.original_max_position_embeddings
        assert facts.model_type in preset.model_types
        if facts.windowed_layers == "all":
            assert target <= (preset.sliding_window or 0)
        else:
            assert preset.sliding_window is None
        if facts.scaled:  # nothing is stacked: it is the very rule the checkpoint was trained with
            assert facts.scaled == {"method": preset.method, "factor": preset.factor}
            assert facts.declared_length in (target, None)
        for option in ("short_factor", "long_factor"):
            assert len(preset.options.get(option, ())) in (0, facts.rotary_dim // 2)


@each_checkpoint
def test_facts_are_whole(facts: Checkpoint) -> None:
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", facts.name)
    assert facts.model_type in CONFIG_MAPPING
    assert facts.rotary_dim % 2 == 0 < facts.rotary_dim <= facts.head_dim
    assert facts.rope_theta >= 10000
    assert (facts.declared_length or facts.trained_length) >= facts.trained_length
    assert (facts.sliding_window is None) == (facts.windowed_layers is None)
    assert re.fullmatch(r"all|\d in \d", facts.windowed_layers or "all")
    assert len(facts.source) > 20
    if facts.scaled:
        assert set(facts.scaled) == {"method", "factor"}
        assert facts.scaled["method"] == get_method(facts.scaled["method"]).name
        assert facts.scaled["factor"] > 1


def test_every_family_of_the_issue_is_there() -> None:
    wanted = {"LLaMA", "Mistral", "Qwen", "Gemma", "Phi", "GPT-NeoX", "SmolLM", "DeepSeek", "OLMo"}
    assert {facts.family for facts in checkpoints().values()} == wanted


def test_a_known_checkpoint_is_found_by_its_name() -> None:
    mistral = known_checkpoint("mistralai/mistral-7b-V0.1")
    assert mistral is not None
    assert mistral.name == "mistralai/Mistral-7B-v0.1"
    assert (mistral.declared_length, mistral.trained_length, mistral.sliding_window) == (32768, 8192, 4096)
    assert known_checkpoint("/models/Mistral-7B-v0.1") is None
    assert known_checkpoint("") is None


def test_a_preset_that_does_not_fit_is_refused() -> None:
    model = make_model("Llama", max_position_embeddings=4096)
    with pytest.raises(ValueError, match=r"'lama-2-yarn-16x'\..*'llama-2-yarn-16x'"):
        patch_model(model, preset="lama-2-yarn-16x")
    with pytest.raises(ValueError, match=r"\(model_type qwen3, qwen3_moe\),.*'llama'"):
        patch_model(model, preset="qwen3-yarn-4x")
    with pytest.raises(ValueError, match=r"\(it.*16\)"):
        patch_model(model, preset="llama-2-yarn-16x", factor=4, beta_fast=16)
    with pytest.raises(ValueError, match="decides method"):
        patch_model(model, "linear", preset="llama-2-yarn-16x")
    with pytest.raises(ValueError, match=r"8192.*4096"):
        patch_model(model, preset="llama-3-to-3.1")
    assert describe(model)["method"] == "none"


def test_a_preset_is_refused_by_a_known_checkpoint_trained_on_another_length() -> None:
    config = make_model("Mistral", max_position_embeddings=32768, sliding_window=None).config
    config._name_or_path = "mistralai/Mistral-7B-v0.3"
    with pytest.raises(ValueError, match=r"8192.*mistralai/Mistral-7B-v0\.3.*32768"):
        extend_config(config, preset="mistral-0.1-yarn-8x")
    config._name_or_path = "mistralai/Mistral-7B-v0.1"
    assert extend_config(config, preset="mistral-0.1-yarn-8x").max_position_embeddings == 65536


def test_a_preset_is_refused_where_its_rule_is_there_already() -> None:
    preset = presets()["phi-3.5-mini-longrope-32x"]
    config = extend_config(model_for(preset, "phi3").config, preset=preset.name)
    with pytest.raises(ValueError, match="already scaled: longrope, factor 32"):
        extend_config(config, preset=preset.name)
    again = extend_config(config, preset=preset.name, on_scaled="replace")
    assert again.rope_parameters == config.rope_parameters


@pytest.mark.parametrize("name", [name for name, preset in presets().items() if preset.method == "longrope"])
def test_a_longrope_preset_is_what_transformers_makes_of_the_published_config(name: str) -> None:
    preset = presets()[name]
    model = patch_model(model_for(preset, "phi3"), preset=name)
    published = model_for(preset, "phi3").config.to_dict() | {
        "rope_scaling": {"type": "longrope", **preset.options},
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "sliding_window": 262144,
    }
    facts = checkpoints()[preset.checkpoints[0]]
    published |= {"rope_theta": facts.rope_theta, "partial_rotary_factor": facts.rotary_dim / facts.head_dim}
    del published["rope_parameters"]
    native = Phi3ForCausalLM(Phi3Config(**published)).eval()
    native.load_state_dict(model.state_dict())
    assert torch.equal(logits(model, IDS), logits(native, IDS))
    far = torch.arange(5000, 5010)[None]  # past 4096: the long list
    for ours, theirs in zip(*(built.model.rotary_emb(torch.ones(1), far) for built in (model, native)), strict=True):
        assert ours.shape == (1, 10, facts.rotary_dim)
        assert torch.equal(ours, theirs)


def test_an_original_length_below_the_declared_one_is_the_presets() -> None:
    config = make_model("Mistral", max_position_embeddings=32768, sliding_window=4096).config
    extended = extend_config(config, preset="mistral-0.1-yarn-8x")
    assert extended.sliding_window == 65536
    assert extended.max_position_embeddings == 65536
    assert extended.rope_parameters["original_max_position_embeddings"] == 8192


def test_the_lists_fit_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for what, text in (("presets", presets_text), ("checkpoints", checkpoints_text)):
        assert main(["list", what]) == 0
        shown = capsys.readouterr().out
        assert shown == text(120) + "\n"
        assert max(map(len, shown.splitlines())) <= 120


def test_the_list_of_checkpoints_says_what_is_known() -> None:
    rows = {line.split("  ")[0]: re.split(r"\s{2,}", line) for line in checkpoints_text(120).splitlines()}
    assert set(checkpoints()) <= set(rows)
    assert rows["Mistral"][1:] == ["trained", "declares", "rotary", "theta", "window", "scaled"]
    assert rows["mistralai/Mistral-7B-v0.1"][1:] == ["8192", "32768", "128", "10000", "4096, all", "-"]
    assert rows["meta-llama/Llama-3.2-1B"][1:] == ["8192", "131072", "64", "500000", "-", "llama3 x32 from 8192"]
    assert rows["microsoft/phi-2"][1:] == ["2048", "2048", "32 of 80", "10000", "-", "-"]


def test_the_list_of_presets_says_which_checkpoints_were_trained_with_one() -> None:
    shown = " ".join(presets_text(120).split())
    assert "for microsoft/Phi-3.5-mini-instruct (trained with it) source" in shown
    assert "for meta-llama/Llama-2-7b-hf, meta-llama/Llama-2-13b-hf source" in shown
