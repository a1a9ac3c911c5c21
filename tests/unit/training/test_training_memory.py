"""Predicted training memory against the measured peak of the real thing in a process of its own, and by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from folders import ROOT, SMOLLM2
from hf_posenc.assets import tiny_model_path
from hf_posenc.checkpoint.loading import meta_model
from hf_posenc.evaluation.lm_head import row_chunks
from hf_posenc.planning import training_memory
from hf_posenc.planning.shapes import for_all_layers, layer_pattern, with_layers
from hf_posenc.planning.tracking import ALL, LOGITS, MATRICES, MemoryTracker
from hf_posenc.planning.training_memory import memory_at_peak, phase_bytes, predict_training_memory
from hf_posenc.training import chunked_loss
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.lora import LoraSettings, add_lora

SIZES = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
LINUX = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux lets a peak start again")
MEASURE = """
import json, sys, torch
from transformers import AutoConfig
from measured_training import measure_training
from hf_posenc.planning.training_memory import predict_training_memory
from hf_posenc.training import FinetuneConfig

torch.set_num_threads(1)
for change, seq_len, packed in json.loads(sys.argv[2]):
    how = {"packed": packed, "load_in_4bit": change.pop("load_in_4bit", False)}
    config, run = AutoConfig.from_pretrained(sys.argv[1]), FinetuneConfig("unused", **change)
    if how["load_in_4bit"]:
        config.dtype = torch.float32  # what quantised weights compute in
    measured = measure_training(config, run, seq_len, steps=2, **how)
    predicted = predict_training_memory(config, run.step, seq_len, **how)
    print(json.dumps([measured.peak, predicted.peak]), flush=True)
"""


def measured_and_predicted(model: Path, cases: list[tuple[dict[str, Any], int, bool]]) -> list[list[int]]:
    # So that glibc gives back what is freed, and the peak is that of tensors.
    paths = os.pathsep.join([str(ROOT), str(ROOT / "scripts")])
    environment = {**os.environ, "PYTHONPATH": paths, "MALLOC_MMAP_THRESHOLD_": "262144", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", MEASURE, str(model), json.dumps(cases)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


@LINUX
def test_the_prediction_is_within_15_percent_of_the_measured_peak() -> None:
    # With the mask of packed documents.
    ((measured, predicted),) = measured_and_predicted(tiny_model_path(), [({"bf16": False}, 768, True)])
    assert predicted == pytest.approx(measured, rel=0.15)


@LINUX
def test_the_prediction_for_experts_is_within_15_percent(tmp_path: Path) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    Qwen3MoeConfig(**sizes, **experts, vocab_size=2048, num_hidden_layers=4).save_pretrained(tmp_path)
    ((measured, predicted),) = measured_and_predicted(tmp_path, [({"bf16": False}, 1024, True)])
    assert predicted == pytest.approx(measured, rel=0.15)


@LINUX
@pytest.mark.slow
def test_the_prediction_holds_for_other_settings() -> None:
    cases: list[tuple[dict[str, Any], int, bool]] = [
        ({"bf16": True}, 768, True),  # slow where bfloat16 is emulated
        ({"bf16": False, "gradient_checkpointing": True}, 1024, False),
        ({"bf16": False, "gradient_accumulation_steps": 2}, 1024, True),
        ({"lora": True, "bf16": False}, 2048, True),
    ]
    results = measured_and_predicted(tiny_model_path(), cases)
    assert len(results) == len(cases)
    for case, (measured, predicted) in zip(cases, results, strict=True):
        assert predicted == pytest.approx(measured, rel=0.15), case


@LINUX
@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="scripts/fetch_smollm2 downloads it")
@pytest.mark.parametrize(
    ("change", "packed"),
    [({}, False), ({"gradient_checkpointing": True}, False), ({"lora": True, "gradient_checkpointing": True}, True)],
    ids=["full", "full, checkpointing", "LoRA+, checkpointing, packed"],
)
def test_the_prediction_for_smollm2_is_within_15_percent(change: dict[str, Any], packed: bool) -> None:
    ((measured, predicted),) = measured_and_predicted(SMOLLM2, [(change, 2048, packed)])
    assert predicted == pytest.approx(measured, rel=0.15)


@LINUX
@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="scripts/fetch_smollm2 downloads it")
def test_the_prediction_of_adapters_on_4_bits_is_within_15_percent() -> None:
    adapters = {"lora": True, "lora_embeddings": False, "bf16": False, "load_in_4bit": True}
    everywhere = {**adapters, "trainable": "all", "lora_rank": 64, "gradient_checkpointing": True}
    cases: list[tuple[dict[str, Any], int, bool]] = [(adapters, 1024, False), (everywhere, 1024, False)]
    for measured, predicted in measured_and_predicted(SMOLLM2, cases):
        assert predicted == pytest.approx(measured, rel=0.15)


def settings(**change: Any) -> FinetuneConfig:
    return FinetuneConfig("unused", **change)


def llama(**sizes: Any) -> LlamaConfig:
    usual = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return LlamaConfig(**{**usual, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, **sizes})


def test_the_tracker_counts_what_autograd_keeps() -> None:
    with FakeTensorMode():
        weight = nn.Parameter(torch.empty(100, 300))
        tracker = MemoryTracker([weight], vocab_size=300, seq_len=50)
        with tracker:
            rows = torch.zeros(10, 100)  # 4000 bytes
            product = rows @ weight  # 12000
            squared = product.exp()  # 12000, kept for the backward pass
            del product  # which exp does not need
            tracker.phase = "scores"
            scores = torch.zeros(50, 50) + 1  # 2 x 10000 at the same time
            del squared, scores, rows
            tracker.phase = "end"
            torch.zeros(1)
    assert tracker.peaks["forward"][ALL] == 28000
    assert tracker.peaks["forward"][LOGITS] == 24000
    assert tracker.peaks["scores"][ALL] == 16000 + 20000
    assert tracker.peaks["scores"][MATRICES] == 20000
    assert tracker.peaks["end"][ALL] == 4


@pytest.mark.parametrize(
    "change",
    [{}, {"gradient_checkpointing": True, "bf16": True}, {"lora": True}],
    ids=["full", "checkpointing", "LoRA+"],
)
def test_a_deep_model_is_predicted_from_a_shallow_one(change: dict[str, Any]) -> None:
    config = llama(num_hidden_layers=4)
    whole = memory_at_peak(phase_bytes(config, settings(**change).step, 300, True, True))
    predicted = predict_training_memory(config, settings(**change).step, 300)
    assert predicted == whole  # every part, to the byte


@pytest.mark.parametrize(
    "change", [{}, {"gradient_checkpointing": True, "per_device_train_batch_size": 2}, {"lora": True}]
)
def test_long_blocks_are_predicted_from_a_few_chunks_of_the_loss(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = llama(num_hidden_layers=9, dtype="bfloat16"), settings(logits_chunk=16, **change)
    predicted = predict_training_memory(config, run.step, 300)
    with monkeypatch.context() as patch:
        patch.setattr(training_memory, "first_and_last_chunks", lambda targets, size: row_chunks(len(targets), size))
        assert predict_training_memory(config, run.step, 300) == predicted  # every part, to the byte
    ran: list[None] = []
    add_gradients = chunked_loss._add_gradients
    monkeypatch.setattr(chunked_loss, "_add_gradients", lambda *args: ran.append(None) or add_gradients(*args))
    predict_training_memory(config, run.step, 300)
    assert len(ran) == 2 * 4


def test_what_stays_by_hand() -> None:
    config = llama(tie_word_embeddings=True)
    parameters = 128 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64) + 64
    memory = predict_training_memory(config, settings().step, 64, packed=False)
    rotary = 2 * 4 * 16 // 2  # inv_freq, and the original one
    assert memory.weights == 4 * parameters + rotary
    assert memory.optimizer == 8 * parameters
    assert memory.all_gradients == 4 * parameters
    assert memory.trained_parameters == parameters
    assert memory.peak == sum(getattr(memory, part) for part in memory.PARTS)
    half = llama(dtype="bfloat16", tie_word_embeddings=True)
    assert predict_training_memory(half, settings().step, 64).weights == memory.weights  # float32 while trained


def test_lora_trains_what_peft_says(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    model = tiny_llama(tie_word_embeddings=True)
    memory = predict_training_memory(model.config, settings(lora=True).step, 64)
    trained, _ = add_lora(model, LoraSettings()).get_nb_trainable_parameters()
    assert memory.trained_parameters == trained
    assert memory.optimizer == 8 * trained


def test_each_option_saves_its_own_part() -> None:
    config = llama(num_hidden_layers=1, vocab_size=4096, num_key_value_heads=4)

    def peak(seq_len: int = 512, packed: bool = False, **change: Any) -> Any:
        return predict_training_memory(config, settings(**change).step, seq_len, packed=packed)

    plain = peak()
    assert peak(gradient_checkpointing=True).activations < 0.6 * plain.activations
    assert peak(bf16=True).activations < plain.activations
    assert peak(lora=True).optimizer < plain.optimizer
    assert peak(packed=True).attention_matrices >= 512 * 512 * 4  # each layer keeps it as numbers
    assert plain.attention_matrices == 0
    assert peak(per_device_train_batch_size=2).activations > 1.7 * plain.activations
    in_one = predict_training_memory(config, settings().step, 512, packed=False, chunked_loss=False)
    few_rows = predict_training_memory(config, settings(logits_chunk=64).step, 512, packed=False)
    assert in_one.logits >= 512 * 4096 * 4 > few_rows.logits
    again = peak(gradient_accumulation_steps=4)
    assert again.peak > plain.peak  # gradients of the forward before are there


def test_layers_repeat_as_their_lists_say() -> None:
    assert layer_pattern(llama(num_hidden_layers=5)) == (0, 1)
    gemma = Gemma3TextConfig(num_hidden_layers=12)
    assert layer_pattern(gemma) == (0, 6)
    cut = with_layers(gemma, 6)
    assert (cut.num_hidden_layers, cut.layer_types) == (6, gemma.layer_types[:6])
    assert gemma.num_hidden_layers == 12


@pytest.mark.parametrize(
    ("config", "pattern"),
    [
        (DeepseekV3Config(**SIZES, num_hidden_layers=9, first_k_dense_replace=3, n_routed_experts=4), (3, 1)),
        (Qwen3MoeConfig(**SIZES, num_hidden_layers=9, decoder_sparse_step=2, num_experts=4), (0, 2)),
        (Qwen3MoeConfig(**SIZES, num_hidden_layers=9, mlp_only_layers=[0, 1], num_experts=4), (2, 1)),
    ],
)
def test_layers_without_experts_are_told_from_those_with_them(
    config: PreTrainedConfig, pattern: tuple[int, int]
) -> None:
    assert layer_pattern(config) == pattern
    measured: list[int] = []

    def parameters(some: PreTrainedConfig) -> dict[str, float]:
        measured.append(some.num_hidden_layers)
        return {"all": sum(parameter.numel() for parameter in meta_model(some).parameters())}

    found = for_all_layers(config, parameters)
    assert max(measured) < 9
    assert found == parameters(config)


def test_a_family_that_needs_data_is_refused_by_name() -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    sizes = llama().to_dict()
    config = MixtralConfig(
        **{name: sizes[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")}, **experts
    )
    config._experts_implementation = "eager"  # which asks its data what experts have tokens, on every PyTorch
    with pytest.raises(ValueError, match="'mixtral' cannot be run without data"):
        predict_training_memory(config, settings(bf16=False).step, 64)
