"""The predicted memory against the measured peak in a process of its own, and against what is counted by hand."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from hf_posenc import patch_model
from hf_posenc.evaluation import KeyTokens, perplexity
from hf_posenc.evaluation.losses import RoomyLayer, make_cache, memory_need, window_losses
from hf_posenc.evaluation.memory import ModelShape, default_logits_chunk, predict_memory, shape_of
from hf_posenc.evaluation.windows import Window

SMOLLM2 = ModelShape(  # SmolLM2-135M in bfloat16
    weight_bytes=269_000_000,
    number_bytes=2,
    num_layers=30,
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
)
MEASURE = """
import ctypes, gc, json, sys, torch
from hf_posenc.assets import tiny_model_path
from hf_posenc.evaluation.memory import memory_in_use, peak_memory, reset_peak_memory
from hf_posenc.evaluation.model_facts import hash_weights
from hf_posenc.evaluation.losses import window_losses
from hf_posenc.evaluation.windows import Window
from hf_posenc.evaluation.memory import predict_memory, shape_of
from hf_posenc.checkpoint.loading import load_model

torch.set_num_threads(1)
for dtype, num_tokens, chunk in json.loads(sys.argv[1]):
    model, _ = load_model(tiny_model_path(), dtype=dtype, device="cpu")
    hash_weights(model)  # so that all of it is in memory
    ids = torch.arange(num_tokens) % 2048
    whole = [Window(0, num_tokens, 1)], torch.ones(num_tokens, dtype=torch.bool)
    window_losses(model, ids, *whole, prefill_chunk=chunk)  # oneDNN compiles and keeps kernels for each new shape
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = memory_in_use(model.device)
    reset_peak_memory(model.device)
    window_losses(model, ids, *whole, prefill_chunk=chunk)
    need = predict_memory(shape_of(model), num_tokens, prefill_chunk=chunk)
    print(json.dumps([peak_memory(model.device) - before, need.beyond_model]), flush=True)
"""


FLOAT32 = [("float32", 1024, None), ("float32", 2048, 256)]
# Twice the length, and a dtype that takes long on a CPU that emulates it.
LONGER = [("float32", 2048, None), ("bfloat16", 2048, None)]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux lets a process' peak start again")
@pytest.mark.parametrize("cases", [FLOAT32, pytest.param(LONGER, marks=pytest.mark.slow)], ids=["float32", "longer"])
def test_the_prediction_is_within_15_percent_of_the_measured_peak(cases: list[tuple[str, int, int | None]]) -> None:
    # So that glibc gives back what is freed, and the peak is that of tensors.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", MEASURE, json.dumps(cases)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=300)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(cases)
    for case, (measured, predicted) in zip(cases, results, strict=True):
        assert predicted == pytest.approx(measured, rel=0.15), case


def test_the_parts_by_hand() -> None:
    need = predict_memory(SMOLLM2, 32768)
    assert need.kv_cache == 0  # one pass keeps no keys
    assert need.activations == 32768 * 2 * (4 * 576 + 3 * 1536 + 2 * 64)
    assert need.logits == 32768 * 576 * 2 + 341 * 49152 * (4 + 4)
    chunked = predict_memory(SMOLLM2, 32768, prefill_chunk=1024)
    assert chunked.kv_cache == 32768 * 30 * 2 * 3 * 64 * 2
    assert chunked.beyond_model < chunked.kv_cache + 0.5e9
    assert chunked.peak == 269_000_000 + chunked.beyond_model
    assert need.beyond_model < chunked.beyond_model  # chunks cost memory here: the cache is larger than one layer
    wide = replace(SMOLLM2, intermediate_size=30 * 1536)
    assert predict_memory(wide, 32768).beyond_model > predict_memory(wide, 32768, prefill_chunk=1024).beyond_model
    assert predict_memory(SMOLLM2, 64, batch_size=8).activations == 8 * predict_memory(SMOLLM2, 64).activations
    assert predict_memory(SMOLLM2, 100, prefill_chunk=100) == predict_memory(SMOLLM2, 100)


def test_keys_that_heads_share_are_repeated_for_every_token_read() -> None:
    """By hand, a chunk of 16 of 30,000 tokens: keys and values for each of 9 heads, and the chunk's states."""
    numbers = 30_000 * 2 * 9 * 64 + 16 * (3 * 576 + 3 * 576)
    shared = predict_memory(SMOLLM2, 30_000, prefill_chunk=16).activations
    assert shared == pytest.approx(2 * numbers, rel=0.05)  # of two bytes each, and the mask beside them
    own = replace(SMOLLM2, num_kv_heads=9)  # nothing is shared, and nothing repeated
    assert predict_memory(own, 30_000, prefill_chunk=16).activations < numbers


def test_logits_do_not_grow_with_length_nor_vocabulary() -> None:
    assert [default_logits_chunk(size) for size in (128, 16384, 49152, 262144, 10**9)] == [1024, 1024, 341, 64, 1]
    for vocab_size in (49152, 262144):
        shape = replace(SMOLLM2, vocab_size=vocab_size)
        states = 576 * 2 * 65536
        assert predict_memory(shape, 65536).logits - states <= 8 * 2**24


def test_the_shape_is_read_from_the_model(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    model = tiny_llama()
    shape = shape_of(model)
    assert shape == ModelShape(shape.weight_bytes, 4, 2, 64, 128, 4, 2, 16, 128)
    assert shape.weight_bytes == 4 * (model.num_parameters() + sum(buffer.numel() for buffer in model.buffers()))
    config = GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=2, n_positions=64)  # other names
    other = shape_of(GPT2LMHeadModel(config))
    assert (other.hidden_size, other.intermediate_size, other.num_kv_heads, other.head_dim) == (32, 128, 2, 16)


def test_the_most_expensive_windows_count(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    model = tiny_llama()
    windows = [Window(0, 40, 1), Window(0, 2000, 1), Window(10, 50, 40)]
    assert memory_need(model, [windows]) == predict_memory(shape_of(model), 2000)
    assert memory_need(model, [[windows[0]] * 3], batch_size=2) == predict_memory(shape_of(model), 40, batch_size=2)
    alone = predict_memory(shape_of(model), 40)
    assert memory_need(model, [[windows[0]]] * 3, batch_size=2) == alone  # of documents, which go one by one
    assert memory_need(model, []).peak == shape_of(model).weight_bytes


def test_documents_are_predicted_one_by_one_and_the_judge_counts(
    tiny_llama: Callable[..., LlamaForCausalLM], caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = tiny_llama(), torch.arange(1, 101)

    def predicted(documents: int, **settings: object) -> str:
        caplog.clear()
        with caplog.at_level(logging.INFO, "hf_posenc"):
            perplexity(model, [ids] * documents, [100], progress=False, **settings)  # type: ignore[arg-type]  # of several kinds
        return next(line for line in caplog.messages if "peak of all" in line).partition(";")[0]

    assert predicted(40) == predicted(1)
    judge = tiny_llama(hidden_size=2048, intermediate_size=4096, num_hidden_layers=1)
    chosen = KeyTokens(judge, alpha=-50.0, beta=-50.0, short_context=12)
    need = predict_memory(shape_of(judge), 15, batch_size=28)  # the short contexts, more than the one of 100 tokens
    logged = predicted(1, protocol="longppl", key_tokens=chosen)
    weights = shape_of(judge).weight_bytes + shape_of(model).weight_bytes
    assert logged.startswith(f"memory in MB: model {weights / 1e6:,.0f}, KV cache 0, activations")
    assert f"activations {need.activations / 1e6:,.0f}" in logged


def test_predicted_and_measured_are_logged(
    tiny_llama: Callable[..., LlamaForCausalLM], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    model, ids, output = tiny_llama(), torch.arange(1, 100), tmp_path / "r.jsonl"
    with caplog.at_level(logging.INFO, "hf_posenc"):
        (record,) = perplexity(model, [ids], [50], output=output, progress=False)
    before, after = [line for line in caplog.messages if line.startswith("memory in MB")]
    assert before.startswith(
        "memory in MB: model 0, KV cache 0, activations 0, logits 0; peak of all in use, predicted"
    )
    measured = float(after.split("measured: ")[1].split(",")[0])
    assert measured == pytest.approx(record.peak_memory_bytes / 1e6, rel=0.01)
    caplog.clear()
    with caplog.at_level(logging.INFO, "hf_posenc"):
        perplexity(model, [ids], [50], output=output, progress=False)
    assert "memory" not in caplog.text  # nothing was measured


def test_a_cache_with_room_holds_what_transformers_own_does(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    model, ids = tiny_llama(), torch.arange(1, 61).unsqueeze(0)
    roomy, own = make_cache(model, 60), DynamicCache(config=model.config)
    with torch.no_grad():
        for rows in (slice(0, 25), slice(25, 50), slice(50, 60)):
            logits = [model(ids[:, rows], past_key_values=cache).logits for cache in (roomy, own)]
            torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-6)
    for layer, other in zip(roomy.layers, own.layers, strict=True):
        assert type(layer) is RoomyLayer
        assert layer.get_seq_length() == 60
        torch.testing.assert_close(layer.keys, other.keys, rtol=1e-5, atol=1e-6)
        assert layer.keys.untyped_storage().nbytes() == 2 * 60 * 16 * 4  # heads x tokens x head_dim: no more


def test_hf_posencs_attention_implementation_keeps_its_own_cache(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    model, ids = tiny_llama(), torch.arange(1, 100)
    patch_model(model, "dynamic_yarn", 4)
    assert not any(isinstance(layer, RoomyLayer) for layer in make_cache(model, 99).layers)
    in_chunks, at_once = (
        window_losses(model, ids, [Window(0, 99, 1)], torch.arange(99) > 0, prefill_chunk=chunk)[1:]
        for chunk in (16, None)
    )
    torch.testing.assert_close(in_chunks, at_once, rtol=1e-5, atol=1e-5)
