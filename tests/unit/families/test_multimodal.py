"""Models that read images too: the text decoder inside is extended, positions of three axes kept, vision left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForImageTextToText, AutoProcessor, LlavaProcessor, PreTrainedModel

from attention_models import in_chunks
from hf_posenc import describe, load_extended, patch_model, save_extended, unpatch_model, verify_model
from hf_posenc.checkpoint.pretrained import auto_class_of
from hf_posenc.cli.main import main
from hf_posenc.training import FinetuneConfig, finetune
from model_types import IDS, config_class_of, tiny_config
from tiny_llama import make_tiny_tokenizer
from tiny_models import assert_same_state, logits, native, state

REQUEST: dict[str, Any] = {"original_max_position_embeddings": 64}
SECTION = [2, 3, 3]  # pairs of a head that turn by time, height and width
THREE_AXES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v")
NESTED_DECODERS = ("gemma3", "mistral3", "llava", "internvl", "idefics3", "gemma4")
_VISION = {
    "qwen2_vl": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
    "qwen2_5_vl": {"depth": 1, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2},
    "glm4v": {"depth": 1, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 32},
}


def tiny_vision_model(model_type: str, **rope: Any) -> PreTrainedModel:
    """Return a random model with its vision tower; ``rope`` is merged into the decoder's rotary settings."""
    config = tiny_config(config_class_of(model_type))
    for name, value in _VISION.get(model_type, {}).items():
        setattr(config.vision_config, name, value)
    text = config.get_text_config(decoder=True)
    if model_type in ("mistral3", "qwen3_vl_moe"):  # else one on every layer, which patching warns about
        text.sliding_window = None
    text.rope_parameters = {**text.rope_parameters, **rope}
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config).eval()


def image_positions() -> torch.Tensor:
    """Return positions as of a text with an image of 6 x 8 patches in it: ``(3, 1, 100)``, past the original 64."""
    before, height, width = 20, 6, 8
    cells = torch.cartesian_prod(torch.zeros(1, dtype=torch.long), torch.arange(height), torch.arange(width))
    text_after = torch.arange(100 - before - len(cells)) + before + width + 40
    rows = [torch.arange(before).repeat(3, 1), cells.T + before, text_after.repeat(3, 1)]
    return torch.cat(rows, dim=1).unsqueeze(1)


@torch.no_grad()
def logits_at(model: PreTrainedModel, positions: torch.Tensor) -> torch.Tensor:
    return model(IDS, position_ids=positions, use_cache=False).logits


def rotary_of(model: PreTrainedModel) -> torch.nn.Module:
    return model.model.language_model.rotary_emb


@pytest.mark.parametrize("method", ["yarn", "linear", "ntk"])
@pytest.mark.parametrize("model_type", THREE_AXES)
def test_three_axes_of_positions(model_type: str, method: str, tmp_path: Path) -> None:
    model, positions = tiny_vision_model(model_type, mrope_section=SECTION), image_positions()
    before, plain = state(model), logits_at(model, positions)
    assert not torch.equal(plain, logits(model, IDS))  # the axes matter
    patch_model(model, method, 4, **REQUEST)
    assert len(verify_model(model).modules) == 1
    assert model.config.text_config.rope_parameters["mrope_section"] == SECTION
    extended, tables = logits_at(model, positions), rotary_of(model)(torch.zeros(1), positions)
    assert not torch.equal(extended, plain)
    after = state(model)
    assert_same_state(*({k: v for k, v in one.items() if "language_model" not in k} for one in (after, before)))

    save_extended(model, tmp_path / "model")
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "model").eval()
    assert loaded.config.text_config.rope_parameters["mrope_section"] == SECTION
    assert torch.equal(logits_at(loaded, positions), extended)

    unpatch_model(model)
    built = native(model, method, 4, **REQUEST)
    for ours, theirs in zip(tables, rotary_of(built)(torch.zeros(1), positions), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(logits_at(built, positions), extended)
    assert_same_state(state(model), before)
    assert torch.equal(logits_at(model, positions), plain)


@pytest.mark.parametrize("model_type", [*THREE_AXES, "qwen3_5"])
def test_methods_that_run_in_attention_are_refused_for_images(model_type: str) -> None:
    model = tiny_vision_model(model_type, mrope_section=SECTION)
    for name, parameter in model.named_parameters():
        if "language_model" in name and ("q_proj.weight" in name or "k_proj.weight" in name):
            torch.nn.init.normal_(parameter, std=0.2)
    plain, images = logits(model, IDS), logits_at(model, image_positions())
    text = torch.arange(IDS.shape[1]).expand(3, 1, -1)
    patch_model(model, "dynamic_yarn", 4, stage=16, **REQUEST)
    staged = logits(model, IDS)
    assert torch.equal(logits_at(model, text), staged)
    torch.testing.assert_close(in_chunks(model, IDS, [50, 30, 1]), staged, atol=1e-5, rtol=0)
    assert torch.equal(staged[:, :64], plain[:, :64])
    assert (staged - plain)[:, 64:].abs().max() > 1e-4
    with pytest.raises(ValueError, match="three parts"):
        logits_at(model, image_positions())
    unpatch_model(model)
    assert torch.equal(logits_at(model, image_positions()), images)


@pytest.mark.parametrize("model_type", NESTED_DECODERS)
def test_decoders_inside_a_model_that_reads_images(model_type: str, tmp_path: Path) -> None:
    model, method = tiny_vision_model(model_type), "linear" if model_type == "gemma4" else "yarn"
    before, plain = state(model), logits(model, IDS)
    patch_model(model, method, 4, **REQUEST)
    extended = logits(model, IDS)
    assert not torch.equal(extended, plain)
    save_extended(model, tmp_path / "model")
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "model").eval()
    assert torch.equal(logits(loaded, IDS), extended)
    unpatch_model(model)
    assert torch.equal(logits(native(model, method, 4, **REQUEST), IDS), extended)
    assert_same_state(state(model), before)


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_5", "llava"])
def test_load_extended_keeps_the_vision_tower(model_type: str, tmp_path: Path) -> None:
    model = patch_model(
        tiny_vision_model(model_type, **({"mrope_section": SECTION} if "qwen2" in model_type else {})),
        "yarn",
        4,
        **REQUEST,
    )
    loaded = load_extended(save_extended(model, tmp_path / "model")).eval()
    assert type(loaded) is type(model)
    # The class that a model card names reads the folder too.
    assert type(getattr(transformers, auto_class_of(model)).from_pretrained(tmp_path / "model")) is type(model)
    assert describe(loaded) == describe(model)
    assert torch.equal(logits(loaded, IDS), logits(model, IDS))
    assert_same_state(state(loaded), state(model))


def test_a_processor_is_saved_with_the_model(tmp_path: Path) -> None:
    image_processor = getattr(transformers, "CLIPImageProcessorPil", transformers.CLIPImageProcessor)()
    processor = LlavaProcessor(image_processor=image_processor, tokenizer=make_tiny_tokenizer(), patch_size=14)
    tiny_vision_model("llava").save_pretrained(tmp_path / "base")
    processor.save_pretrained(tmp_path / "base")
    words = ["patch", str(tmp_path / "base"), str(tmp_path / "out"), "--method", "yarn", "--factor", "4"]
    assert main([*words, "--original-max-position-embeddings", "64"]) == 0  # the settings beside the model
    model = patch_model(tiny_vision_model("llava"), "yarn", 4, tokenizer=processor, **REQUEST)
    save_extended(model, tmp_path / "given", processor)
    for folder in ("out", "given"):
        read = AutoProcessor.from_pretrained(tmp_path / folder)
        assert (type(read), read.patch_size, read.tokenizer.model_max_length) == (LlavaProcessor, 14, 256)


def test_a_config_without_use_cache_is_trained(tmp_path: Path) -> None:
    model = tiny_vision_model("mistral3")
    assert not hasattr(model.config, "use_cache")
    documents = [torch.arange(1, 60).repeat(6)] * 4
    run = FinetuneConfig(
        str(tmp_path),
        factor=2.0,
        token_budget=512,
        eval_documents=0,
        original_max_position_embeddings=64,
        gradient_checkpointing=True,
    )
    finetune(model, make_tiny_tokenizer(), documents, run)
    assert not hasattr(model.config, "use_cache")
