"""Models with 4-bit and 8-bit weights: the same positions as any other, saved as they are or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from bitsandbytes.functional import _convert_weight_packed_for_cpu
from bitsandbytes.nn import Linear4bit
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from gguf_files import write_gguf
from hf_posenc import extend_config, load_extended, patch_model, save_extended, unpatch_model, verify_model
from hf_posenc.assets import tiny_model_path
from hf_posenc.checkpoint.loading import load_model
from hf_posenc.checkpoint.quantised import keep_layout
from hf_posenc.training import finetune
from hf_posenc.training.run_folder import read_log
from tiny_models import logits
from tiny_runs import SEQ, Build, config

pytestmark = pytest.mark.filterwarnings(
    # bitsandbytes imports torch.jit.
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
)
# The tiny model's MLP is 688 wide; on some CPUs 4-bit layers have to be a multiple of 64.
_SKIPPED = {"llm_int8_skip_modules": ["lm_head", "gate_proj", "up_proj", "down_proj"]}
FOUR_BITS: dict[str, Any] = {"load_in_4bit": True, **_SKIPPED}
KINDS: dict[str, dict[str, Any]] = {
    "fp4": FOUR_BITS,
    "nf4-nested": {**FOUR_BITS, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}
IDS = torch.randint(3, 2048, (1, 300), generator=torch.Generator().manual_seed(1))  # past the 256 it was trained on


def quantised(kind: str, source: Any = None, **kwargs: Any) -> PreTrainedModel:
    """The tiny model, quantised as it is loaded, which on a CPU needs no device_map."""
    settings = BitsAndBytesConfig(**KINDS[kind])
    return AutoModelForCausalLM.from_pretrained(source or tiny_model_path(), quantization_config=settings, **kwargs)


def raw_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Whole numbers only: what is quantised."""
    names = (
        (name.replace("base_model.model.", "").replace(".base_layer", ""), p) for name, p in model.named_parameters()
    )
    return {name: p.data.clone() for name, p in names if p.dtype in (torch.uint8, torch.int8)}


@pytest.mark.parametrize(("kind", "place"), [("fp4", "auto"), ("nf4-nested", None), ("int8", None)])
def test_the_positions_are_those_of_a_model_built_so_and_come_back(kind: str, place: str | None):
    model = quantised(kind, device_map=place)
    weights = raw_weights(model)
    assert len(weights) == (24 if "load_in_4bit" in KINDS[kind] else 42)  # attention alone, or the MLP as well
    plain = logits(model, IDS)
    laid_out = raw_weights(model)
    patch_model(model, "yarn", 4)
    assert len(verify_model(model).modules) == 1
    native = quantised(kind, config=extend_config(AutoConfig.from_pretrained(tiny_model_path()), "yarn", 4))
    frequencies = model.model.rotary_emb.inv_freq
    assert frequencies.dtype == torch.float32
    assert torch.equal(frequencies, native.model.rotary_emb.inv_freq)
    assert torch.equal(logits(model, IDS), logits(native, IDS))
    assert not torch.equal(logits(model, IDS), plain)
    unpatch_model(model)
    assert torch.equal(logits(model, IDS), plain)
    assert all(torch.equal(value, laid_out[name]) for name, value in raw_weights(model).items())
    assert torch.equal(frequencies, quantised(kind).model.rotary_emb.inv_freq)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_is_the_same_and_still_quantised(kind: str, tmp_path: Path):
    model = patch_model(quantised(kind), "yarn", 4)
    keep_layout(model)
    expected, weights = logits(model, IDS), raw_weights(model)
    save_extended(model, tmp_path / "model")
    assert "quantization_config" in json.loads((tmp_path / "model/config.json").read_text())
    assert torch.equal(logits(model, IDS), expected)  # saving changed nothing
    for load in (AutoModelForCausalLM.from_pretrained, load_extended):
        loaded = load(tmp_path / "model")
        assert raw_weights(loaded).keys() == weights.keys()
        assert all(torch.equal(value, weights[name]) for name, value in raw_weights(loaded).items())
        keep_layout(loaded)
        assert torch.equal(logits(loaded, IDS), expected)


def test_weights_laid_out_for_the_cpu_are_not_saved_as_others(
    tmp_path: Path, tokenizer: Any, documents: list[torch.Tensor]
):
    model = patch_model(quantised("fp4"), "yarn", 4)
    before = raw_weights(model)
    layer = next(module for module in model.modules() if isinstance(module, Linear4bit))
    # What a forward does where the CPU has AVX512-BF16; here on every CPU.
    layer.weight.data, layer.weight.quant_state = _convert_weight_packed_for_cpu(
        layer.weight.data, layer.weight.quant_state
    )
    there = raw_weights(model)
    assert any(not torch.equal(value.flatten(), before[name].flatten()) for name, value in there.items())
    with pytest.raises(ValueError, match=r"4-bit.*q_proj"):
        save_extended(model, tmp_path / "model")
    with pytest.raises(ValueError, match="cannot be fine-tuned: "):
        finetune(model, tokenizer, documents, config(tmp_path / "run", lora=True, factor=None))
    assert not list(tmp_path.iterdir())
    assert all(torch.equal(value, there[name]) for name, value in raw_weights(model).items())


def test_what_transformers_cannot_write_is_refused_before_anything_is_written(tmp_path: Path, tiny_llama: Build):
    write_gguf(tmp_path / "model.gguf", tiny_llama())
    if not hasattr(transformers, "GgufConfig"):
        pytest.skip("this Transformers has no quantised weights of GGUF files: it always dequantises")
    settings = transformers.GgufConfig(dequantize=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", quantization_config=settings)
    verify_model(patch_model(model, "yarn", 4))
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="'gguf'"):
        save_extended(model, tmp_path / "out/model")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("kind", ["nf4-nested", "int8"])
def test_adapters_are_trained_on_quantised_weights(
    kind: str, tmp_path: Path, tiny_llama: Build, tokenizer: Any, documents: list[torch.Tensor]
):
    tiny_llama().to(torch.bfloat16).save_pretrained(tmp_path / "base")
    model = quantised(kind, tmp_path / "base")
    weights = raw_weights(model)
    small = {"token_budget": 2 * 2 * SEQ, "eval_documents": 0}
    with pytest.raises(ValueError, match="--lora"):
        finetune(model, tokenizer, documents, config(tmp_path / "run", **small))
    assert not (tmp_path / "run").exists()
    result = finetune(model, tokenizer, documents, config(tmp_path / "run", lora=True, save_steps=1, **small))
    assert [line["step"] for line in read_log(tmp_path / "run/train_log.jsonl")] == [1, 2]
    trained = raw_weights(result.model)
    assert trained.keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in trained.items())
    assert any(p.abs().max() > 0 for name, p in result.model.named_parameters() if "lora_B" in name)
    verify_model(result.model)
    base = quantised(kind, tmp_path / "base")
    keep_layout(base)
    loaded = load_extended(tmp_path / "run", base=base)
    ids = IDS % 128
    assert torch.equal(logits(loaded.eval(), ids), logits(result.model.eval(), ids))


def test_a_quantised_folder_is_loaded_by_the_commands(tmp_path: Path):
    _, tokenizer = load_model(tiny_model_path())
    save_extended(patch_model(quantised("int8"), "yarn", 4), tmp_path / "model", tokenizer)
    model, _ = load_model(tmp_path / "model", device="cpu")
    assert raw_weights(model)
    assert torch.equal(logits(model, IDS), logits(patch_model(quantised("int8"), "yarn", 4), IDS))
