"""Fine-tuning, measuring and 4-bit weights on the GPU, and the memory that planning predicts for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, PreTrainedModel

from attention_models import IDS
from gpu.exact import model_of
from hf_posenc import load_extended, patch_model, perplexity, plan, save_extended, unpatch_model, verify_model
from hf_posenc.checkpoint.quantised import keep_layout
from hf_posenc.training import FinetuneConfig, finetune
from measured_training import measure_training
from tiny_models import logits
from tiny_runs import SEQ, config, losses

pytestmark = [
    pytest.mark.gpu,
    # bitsandbytes imports torch.jit.
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]
STEPS = 6
READ = IDS[:, :SEQ] % 60  # ids of the documents
RULES: dict[str, dict[str, Any]] = {
    "yarn": {},
    "dynamic_yarn": {"method": "dynamic_yarn", "options": {"stage": 32}},
    "self_extend": {"method": "self_extend", "options": {"group": 5, "window": 24}},
    "alibi": {"method": "alibi"},
}
MIB = 2**20


def settings(folder: Path, rule: str = "yarn", **changes: Any) -> FinetuneConfig:
    small = {"token_budget": STEPS * 2 * SEQ, "eval_documents": 0}
    return config(folder, **{**small, **RULES[rule], **changes})


def assert_read_alike(one: PreTrainedModel, other: PreTrainedModel) -> None:
    found, expected = (logits(model.eval(), READ.to(model.device)).float() for model in (one, other))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("rule", RULES)
def test_all_weights(
    rule: str, bf16: bool, tmp_path: Path, tiny_llama: Any, tokenizer: Any, documents: Any, device: torch.device
) -> None:
    """The losses of a run on the GPU are those of one in float32 on the CPU."""
    finetune(tiny_llama(), tokenizer, documents, settings(tmp_path / "cpu", rule, bf16=False))
    result = finetune(tiny_llama().to(device), tokenizer, documents, settings(tmp_path / "gpu", rule, bf16=bf16))
    expected, found = losses(tmp_path / "cpu"), losses(tmp_path / "gpu")
    assert len(expected) == STEPS
    assert found == pytest.approx(expected, rel=2e-2 if bf16 else 1e-3)
    assert found[-1] < found[0]
    assert result.model.device == device
    verify_model(result.model)
    assert_read_alike(load_extended(tmp_path / "gpu").to(device), result.model)


@pytest.mark.parametrize("rule", ["yarn", "dynamic_yarn", "self_extend"])
def test_adapters(
    rule: str, tmp_path: Path, tiny_llama: Any, tokenizer: Any, documents: Any, device: torch.device
) -> None:
    tiny_llama().save_pretrained(tmp_path / "base")
    finetune(tiny_llama(), tokenizer, documents, settings(tmp_path / "cpu", rule, lora=True))
    result = finetune(tiny_llama().to(device), tokenizer, documents, settings(tmp_path / "gpu", rule, lora=True))
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-3)
    assert any(weight.abs().max() > 0 for name, weight in result.model.named_parameters() if "lora_B" in name)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").to(device)
    assert_read_alike(load_extended(tmp_path / "gpu", base=base), result.model)


@pytest.mark.parametrize("changes", [{"gradient_checkpointing": True}, {"shifted_sparse_attention": True}], ids=str)
def test_other_ways_to_train(
    changes: dict[str, Any], tmp_path: Path, tiny_llama: Any, tokenizer: Any, documents: Any, device: torch.device
) -> None:
    finetune(tiny_llama(), tokenizer, documents, settings(tmp_path / "cpu", **changes))
    finetune(tiny_llama().to(device), tokenizer, documents, settings(tmp_path / "gpu", **changes))
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-3)


# ---- 4-bit weights ----


def in_4_bits(folder: Path, device: torch.device) -> PreTrainedModel:
    kind = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=kind, device_map={"": device})


def packed_weights(model: PreTrainedModel) -> list[torch.Tensor]:
    return [weight.data.clone() for weight in model.parameters() if weight.dtype == torch.uint8]


@pytest.mark.parametrize("method", ["yarn", "dynamic_yarn", "dca"])
def test_4_bit_weights_are_patched_and_come_back(
    method: str, tmp_path: Path, tiny_llama: Any, cuda_only: torch.device
) -> None:
    tiny_llama().to(torch.bfloat16).save_pretrained(tmp_path / "base")
    model, ids = in_4_bits(tmp_path / "base", cuda_only), IDS[:, :150].to(cuda_only)
    weights, plain = packed_weights(model), logits(model, ids)
    assert weights
    patch_model(model, method, 4)
    verify_model(model)
    found = logits(model, ids)
    assert not torch.equal(found, plain)
    save_extended(model, tmp_path / "saved")
    loaded = load_extended(tmp_path / "saved").to(cuda_only)
    assert torch.equal(logits(loaded, ids), found)
    unpatch_model(model)
    assert torch.equal(logits(model, ids), plain)
    assert all(map(torch.equal, packed_weights(model), weights))


def test_adapters_on_4_bit_weights(
    tmp_path: Path, tiny_llama: Any, tokenizer: Any, documents: Any, device: torch.device
) -> None:
    tiny_llama().to(torch.bfloat16).save_pretrained(tmp_path / "base")
    model = in_4_bits(tmp_path / "base", device)
    weights = packed_weights(model)
    result = finetune(model, tokenizer, documents, settings(tmp_path / "run", lora=True))
    found = losses(tmp_path / "run")
    assert len(found) == STEPS
    assert found[-1] < found[0]
    assert all(map(torch.equal, packed_weights(result.model), weights))
    base = in_4_bits(tmp_path / "base", device)
    keep_layout(base)
    assert_read_alike(load_extended(tmp_path / "run", base=base), result.model)


# ---- measuring, and memory ----


@pytest.mark.parametrize("key", ["yarn", "dynamic_yarn", "dca", "alibi"])
def test_perplexity_is_the_cpus(key: str, device: torch.device) -> None:
    given: dict[str, Any] = {"documents": [IDS[0]], "context_lengths": [64, 200], "progress": False}
    expected, found = (
        perplexity(model_of(key, torch.float32, where), **given) for where in (torch.device("cpu"), device)
    )
    assert [record.perplexity for record in found] == pytest.approx([r.perplexity for r in expected], rel=1e-5)


# 60 million weights and 4096 tokens: what kernels take for themselves is little beside it.
SIZES = {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6}
CONFIG = LlamaConfig(**SIZES, num_attention_heads=12, num_key_value_heads=4, max_position_embeddings=2048)
WAYS: dict[str, dict[str, Any]] = {
    "float32": {"bf16": False},
    "bf16": {"bf16": True},
    "bf16, checkpointing": {"bf16": True, "gradient_checkpointing": True},
    "LoRA, bf16": {"bf16": True, "lora": True},
    "LoRA, bf16, checkpointing": {"bf16": True, "lora": True, "gradient_checkpointing": True},
}


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("way", WAYS)
def test_peak_memory_is_what_plan_predicts(way: str, packed: bool, cuda_only: torch.device) -> None:
    """Within 20 %: ``plan`` counts the CPU's kernels, and CUDA's keep other things for the backward pass."""
    run = FinetuneConfig("unused", packing=packed, **WAYS[way])
    predicted = plan(CONFIG, 4096, run=run).training_options[0]
    assert predicted.seq_len == 4096
    measured = measure_training(CONFIG, run, 4096, steps=2, packed=packed)
    assert predicted.memory.peak / MIB == pytest.approx(measured.peak / MIB, rel=0.2)


@pytest.mark.parametrize("key", ["yarn", "dynamic_yarn", "dca"])
def test_a_long_text_makes_no_square_matrix(key: str, cuda_only: torch.device) -> None:
    """16384 tokens through a cache in parts: scores of all pairs alone would be 4 GiB in bfloat16."""
    config = LlamaConfig(**{**SIZES, "num_hidden_layers": 2}, num_attention_heads=8, num_key_value_heads=2, head_dim=64)
    config.max_position_embeddings = 4096
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(cuda_only).eval()
    patch_model(model, key, 4)
    ids = torch.randint(0, 32000, (1, 16384), device=cuda_only)
    torch.cuda.reset_peak_memory_stats(cuda_only)
    before = torch.cuda.memory_allocated(cuda_only)
    with torch.no_grad():
        model(ids, use_cache=True, logits_to_keep=1)
    assert torch.cuda.max_memory_allocated(cuda_only) - before < 2048 * MIB
