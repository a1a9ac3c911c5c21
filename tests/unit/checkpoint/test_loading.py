"""``load_model``: folders, GGUF files, and the errors for what cannot be loaded."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from gguf_files import write_gguf
from hf_posenc import save_extended
from hf_posenc.checkpoint.loading import load_model
from hf_posenc.patching.api import describe, patch_model
from hf_posenc.training import FinetuneConfig, finetune

IDS = torch.arange(40).unsqueeze(0)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits  # type: ignore[no-any-return]  # a forward is untyped


def test_folder_gives_the_model_and_a_working_tokenizer(tiny_checkpoint: Path) -> None:
    model, tokenizer = load_model(tiny_checkpoint, device="cpu")
    assert not model.training
    assert model.dtype == torch.float32
    torch.testing.assert_close(
        logits(model), logits(AutoModelForCausalLM.from_pretrained(tiny_checkpoint)), rtol=0, atol=0
    )
    assert tokenizer.decode(tokenizer("to be read\n")["input_ids"]) == "to be read\n"


def test_dtype_and_attention_are_those_asked_for(tiny_checkpoint: Path) -> None:
    model, _ = load_model(str(tiny_checkpoint), dtype="bfloat16", device="cpu", attn_implementation="eager")
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="unknown dtype 'bf17'"):
        load_model(tiny_checkpoint, dtype="bf17")
    with pytest.raises(ValueError, match="'nn'"):
        load_model(tiny_checkpoint, dtype="nn")


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "mps", "xpu", "hpu"])
def test_a_device_that_is_not_there_is_said_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    if device.split(":")[0] in ("mps", "xpu") and torch.get_device_module(device).is_available():
        pytest.skip(f"{device} is there")
    monkeypatch.setattr(
        "hf_posenc.checkpoint.loading.load_weights", lambda *_, **__: pytest.fail("weights were loaded")
    )
    with pytest.raises(ValueError, match=f"'{device}'"):
        load_model(tmp_path, device=device)


def test_attention_that_is_not_installed_is_said(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("flash_attn"):
        pytest.skip("FlashAttention is installed")
    with pytest.raises(ImportError, match="tiny-llama': FlashAttention2"):
        load_model(tiny_checkpoint, attn_implementation="flash_attention_2")


def test_extended_folder_comes_back_extended(
    tiny_checkpoint: Path, tmp_path: Path, tiny_llama: Callable[..., LlamaForCausalLM]
) -> None:
    plain, tokenizer = load_model(tiny_checkpoint)
    extended = patch_model(tiny_llama(), "yarn", 4)
    save_extended(extended, tmp_path / "extended", tokenizer)
    model, tokenizer = load_model(tmp_path / "extended", device="cpu")
    assert describe(model)["context_length"] == tokenizer.model_max_length == 256
    torch.testing.assert_close(logits(model), logits(extended), rtol=0, atol=0)
    assert (logits(model) - logits(plain)).abs().max() > 1e-3


def test_damaged_manifest_is_found(tiny_checkpoint: Path) -> None:
    model, _ = load_model(tiny_checkpoint)
    save_extended(patch_model(model, "yarn", 4), tiny_checkpoint)
    manifest = tiny_checkpoint / "context_extension.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "factor": 8.0}))
    with pytest.raises(ValueError, match=r"config\.json"):
        load_model(tiny_checkpoint)


def test_gguf_is_the_model_it_was_made_from_and_can_be_saved(
    tmp_path: Path, tiny_llama: Callable[..., LlamaForCausalLM]
) -> None:
    original = tiny_llama()
    model, tokenizer = load_model(write_gguf(tmp_path / "tiny.gguf", original), device="cpu")
    torch.testing.assert_close(logits(model), logits(original), rtol=0, atol=1e-6)
    assert model.dtype == torch.float32
    assert tokenizer.model_max_length == 64
    model.save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "plain")
    reloaded, _ = load_model(tmp_path / "plain", device="cpu")
    torch.testing.assert_close(logits(reloaded), logits(original), rtol=0, atol=1e-6)
    half, _ = load_model(tmp_path / "tiny.gguf", dtype="bfloat16", device="cpu")
    assert half.dtype == torch.bfloat16


def test_an_adapter_trained_on_a_gguf_finds_it_again(
    tmp_path: Path, tiny_llama: Callable[..., LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    model, tokenizer = load_model("tiny.gguf", device="cpu")
    config = FinetuneConfig("trained", factor=2.0, token_budget=256, lora=True, eval_documents=0, seq_len=64)
    result = finetune(model, tokenizer, [IDS[0].repeat(8)], config)
    assert json.loads(Path("trained/adapter_config.json").read_text())["base_model_name_or_path"] == "tiny.gguf"
    loaded, _ = load_model("trained", device="cpu")
    torch.testing.assert_close(logits(loaded), logits(result.model), rtol=0, atol=1e-6)


@pytest.mark.parametrize("scaling", [{"type": "yarn", "factor": 4.0}, {"factor": 2.0}, {"type": "linear"}])
def test_scaled_gguf_is_refused_because_transformers_drops_the_scaling(
    tmp_path: Path, tiny_llama: Callable[..., LlamaForCausalLM], scaling: dict[str, str | float]
) -> None:
    path = write_gguf(tmp_path / "scaled.gguf", tiny_llama(), **scaling)
    with pytest.raises(ValueError, match=r"scaled.gguf"):
        load_model(path)


def test_unscaled_gguf_that_says_so_is_not_refused(tmp_path: Path, tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    assert load_model(write_gguf(tmp_path / "none.gguf", tiny_llama(), type="none", factor=1.0))


def test_gguf_without_its_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install 'hf_posenc\[smollm2\]'"):
        load_model(tmp_path / "a.gguf")


def test_what_is_not_there_or_not_a_model_is_said(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "list.txt").write_text("x")
    (tmp_path / "fake.gguf").write_bytes(b"not a gguf file" * 10)
    with pytest.raises(FileNotFoundError, match="or folder"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"model\.gguf"):
        load_model("model.gguf")
    with pytest.raises(FileNotFoundError, match=r"config\.json.*list\.txt"):
        load_model(tmp_path / "notes")
    with pytest.raises(ValueError, match="the folder"):
        load_model(tmp_path / "notes" / "list.txt")
    with pytest.raises(ValueError, match="GGUF"):
        load_model(tmp_path / "fake.gguf")


def test_name_the_hub_does_not_give_is_one_sentence() -> None:
    with pytest.raises(ValueError, match="'nobody/nothing':"):
        load_model("nobody/nothing")


def test_missing_weights_are_not_made_up(tiny_checkpoint: Path) -> None:
    weights = load_file(tiny_checkpoint / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tiny_checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1.*model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(tiny_checkpoint)


def test_pickled_weights_are_not_loaded(tiny_checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    torch.save(model.state_dict(), tiny_checkpoint / "pytorch_model.bin")
    (tiny_checkpoint / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="cannot load"):
        load_model(tiny_checkpoint)
