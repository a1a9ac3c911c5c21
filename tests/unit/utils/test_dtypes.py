"""Which dtype a model is loaded, measured, trained and saved in, on CPUs with and without instructions for bfloat16."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from hf_posenc import FinetuneConfig, finetune, load_extended, patch_model, perplexity, save_extended
from hf_posenc.checkpoint.loading import load_model
from hf_posenc.cli.main import main
from hf_posenc.evaluation import read_records
from hf_posenc.planning import plan
from hf_posenc.reporting import text_table
from hf_posenc.utils.dtypes import checkpoint_dtype, choose_dtype, computes_natively
from tiny_llama import make_tiny_llama, make_tiny_tokenizer
from tiny_runs import config, make_documents, make_tokenizer

Fake = Callable[[bool], None]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def half_checkpoint(tmp_path: Path) -> Path:
    """The tiny Llama in bfloat16, with its tokenizer."""
    return write_checkpoint(tmp_path / "half", BF16)


def write_checkpoint(folder: Path, dtype: torch.dtype) -> Path:
    make_tiny_llama().to(dtype).save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return folder


def stored(folder: Path, file: str = "model.safetensors") -> set[str]:
    with safe_open(folder / file, framework="pt") as weights:
        return {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118  # no mapping


@pytest.mark.parametrize(
    ("onednn", "capability", "avx512_bf16", "native"),
    [
        (False, "AVX2", False, False),
        (True, "AVX512", False, False),  # oneDNN emulates it there
        (True, "AVX512", True, True),
        (True, "DEFAULT", False, True),  # Arm, whose instructions oneDNN requested for
    ],
)
def test_pytorch_and_onednn_decide(
    monkeypatch: pytest.MonkeyPatch, onednn: bool, capability: str, avx512_bf16: bool, native: bool
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn, raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    assert computes_natively(BF16, "cpu") == native
    assert computes_natively(FP32, "cpu")
    assert computes_natively(BF16, "cuda")


def test_without_onednn_a_half_precision_is_not_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not computes_natively(BF16, "cpu")
    assert not computes_natively(FP16, "cpu")


@pytest.mark.parametrize(
    ("requested", "checkpoint", "device", "native", "expected", "says_why"),
    [
        ("auto", BF16, "cpu", False, FP32, True),
        ("auto", BF16, "cpu", True, BF16, False),
        ("auto", BF16, "cuda", False, BF16, False),
        ("auto", FP32, "cpu", False, FP32, False),
        ("checkpoint", BF16, "cpu", False, BF16, False),
        ("bfloat16", FP32, "cpu", True, BF16, False),
        ("float32", BF16, "cpu", True, FP32, False),
        (FP32, BF16, "cpu", False, FP32, False),
        ("auto", None, "cpu", False, "auto", False),
    ],
)
def test_the_choice(
    cpu_with_bfloat16: Fake,
    caplog: pytest.LogCaptureFixture,
    requested: Any,
    checkpoint: torch.dtype | None,
    device: str,
    native: bool,
    expected: Any,
    says_why: bool,
) -> None:
    cpu_with_bfloat16(native)
    caplog.set_level(logging.INFO)
    choice = choose_dtype(requested, checkpoint, device)
    assert choice.dtype == expected
    assert bool(choice.reason) == says_why
    assert [record.getMessage() for record in caplog.records] == ([choice.reason] if says_why else [])


def test_half_precision_that_is_requested_and_slow_is_warned_about(
    cpu_with_bfloat16: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    cpu_with_bfloat16(False)
    assert choose_dtype("bfloat16", FP32, "cpu").dtype == BF16
    assert "bfloat16" in caplog.text
    caplog.clear()
    choose_dtype("bfloat16", FP32, "cuda")
    assert not caplog.text


@pytest.mark.parametrize("fp16", [False, True])
def test_float16_on_a_cpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fp16: bool) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: fp16, raising=False)
    assert choose_dtype("float16", FP32, "cpu").dtype == FP16
    assert ("float16" in caplog.text) != fp16
    assert choose_dtype("auto", FP16, "cpu").dtype == (FP16 if fp16 else FP32)


def test_a_checkpoint_says_its_dtype_by_its_config_or_its_weights(half_checkpoint: Path) -> None:
    assert checkpoint_dtype(half_checkpoint) == BF16
    config_file = half_checkpoint / "config.json"
    values = json.loads(config_file.read_text())
    values["torch_dtype"] = values.pop("dtype")  # as Transformers 4 writes it
    config_file.write_text(json.dumps(values))
    assert checkpoint_dtype(half_checkpoint) == BF16
    del values["torch_dtype"]
    config_file.write_text(json.dumps(values))
    assert checkpoint_dtype(half_checkpoint) == BF16
    config_file.write_text(json.dumps({**values, "quantization_config": {"quant_method": "gptq"}}))
    assert checkpoint_dtype(half_checkpoint) is None


@pytest.mark.parametrize("native", [False, True])
def test_what_is_saved_keeps_the_checkpoints_dtype(
    half_checkpoint: Path, tmp_path: Path, cpu_with_bfloat16: Fake, native: bool
) -> None:
    cpu_with_bfloat16(native)
    model, tokenizer = load_model(half_checkpoint, device="cpu")
    assert model.dtype == (BF16 if native else FP32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    patch_model(model, "yarn", factor=4)
    save_extended(model, tmp_path / "saved", tokenizer)
    assert stored(tmp_path / "saved") == {"BF16"}
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "bfloat16"
    assert model.dtype == (BF16 if native else FP32)
    assert native or model.config.dtype == FP32
    for name, parameter in model.named_parameters():  # it goes on as it was
        assert torch.equal(parameter, before[name])
    again = load_extended(tmp_path / "saved", dtype=torch.float32)
    assert all(torch.equal(p, before[name].float()) for name, p in again.named_parameters())


def test_a_requested_dtype_is_saved(half_checkpoint: Path, tmp_path: Path, cpu_with_bfloat16: Fake) -> None:
    cpu_with_bfloat16(False)
    model, _ = load_model(half_checkpoint, device="cpu", dtype="float32")
    save_extended(patch_model(model, "yarn", factor=4), tmp_path / "saved")
    assert stored(tmp_path / "saved") == {"F32"}


@pytest.mark.parametrize("native", [False, True])
def test_patching_on_the_command_line_computes_nothing_and_keeps_the_dtype(
    half_checkpoint: Path, tmp_path: Path, cpu_with_bfloat16: Fake, caplog: pytest.LogCaptureFixture, native: bool
) -> None:
    cpu_with_bfloat16(native)
    assert main(["patch", str(half_checkpoint), str(tmp_path / "out"), "--device", "cpu"]) == 0
    assert stored(tmp_path / "out") == {"BF16"}
    assert "computing in" not in caplog.text


@pytest.mark.parametrize("lora", [False, True])
def test_training_without_bfloat16_computes_in_float32_and_saves_what_it_measured(
    tmp_path: Path, cpu_with_bfloat16: Fake, lora: bool
) -> None:
    cpu_with_bfloat16(False)
    tokenizer = make_tokenizer()
    make_tiny_llama().to(BF16).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    model, tokenizer = load_model(tmp_path / "base", device="cpu")
    result = finetune(model, tokenizer, make_documents(), config(tmp_path / "run", lora=lora, learning_rate=1e-2))
    card = (tmp_path / "run" / "README.md").read_text()
    assert "bfloat16" not in next(line for line in card.splitlines() if "computed in" in line)
    file = "adapter_model.safetensors" if lora else "model.safetensors"
    assert stored(tmp_path / "run", file) == ({"BF16", "F32"} if lora else {"BF16"})
    again = load_extended(tmp_path / "run", dtype=torch.float32)
    live = dict(result.model.named_parameters())
    assert all(torch.equal(parameter, live[name]) for name, parameter in again.named_parameters())
    assert any(not torch.equal(p, q) for p, q in zip(again.parameters(), make_tiny_llama().parameters(), strict=False))


@pytest.mark.parametrize(("native", "expected"), [(True, True), (False, False)])
def test_a_model_in_bfloat16_is_trained_under_autocast_where_that_is_fast(
    tmp_path: Path, cpu_with_bfloat16: Fake, native: bool, expected: bool
) -> None:
    cpu_with_bfloat16(native)
    model = make_tiny_llama().to(BF16)
    finetune(model, make_tokenizer(), make_documents(), config(tmp_path, eval_documents=0))
    assert ("bfloat16, float32 weights" in (tmp_path / "README.md").read_text()) == expected
    assert {p.dtype for p in model.parameters()} == {BF16}


def test_records_say_both_dtypes_and_a_report_keeps_them_in_two_rows(
    half_checkpoint: Path, tmp_path: Path, cpu_with_bfloat16: Fake
) -> None:
    texts = ["the quick brown fox jumps over the lazy dog and runs away from it for a while"]
    records = []
    for native in (False, True):
        cpu_with_bfloat16(native)
        model, tokenizer = load_model(half_checkpoint, device="cpu")
        output = tmp_path / "records.jsonl"
        records += perplexity(model, texts, [32], tokenizer=tokenizer, output=output, model_name="half", progress=False)
    assert [(r.dtype, r.checkpoint_dtype) for r in records] == [("float32", "bfloat16"), ("bfloat16", "bfloat16")]
    assert len(read_records(tmp_path / "records.jsonl")) == 2  # neither was taken for the other
    rows = [line for line in text_table(records).splitlines() if "unpatched" in line]
    assert ["float32" in row for row in rows] == [True, False]
    assert ["bfloat16" in row for row in rows] == [False, True]


def test_a_report_says_what_was_computed_in(half_checkpoint: Path, tmp_path: Path, cpu_with_bfloat16: Fake) -> None:
    cpu_with_bfloat16(False)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog and runs away")
    results = str(tmp_path / "r.jsonl")
    words = ["eval", str(half_checkpoint), "--documents", str(tmp_path / "text.txt"), "--context-lengths", "16"]
    assert main([*words, "--device", "cpu", "--output", results, "--hide-progress"]) == 0
    assert main(["report", results, "--output-dir", str(tmp_path / "report")]) == 0
    page = (tmp_path / "report" / "report.md").read_text()
    assert "float32 (the checkpoint is in bfloat16), sdpa attention" in page


@pytest.mark.parametrize("native", [False, True])
def test_the_plan_counts_with_what_this_machine_computes_in(
    half_checkpoint: Path, cpu_with_bfloat16: Fake, native: bool
) -> None:
    cpu_with_bfloat16(native)
    one_row = {"lora": True, "gradient_checkpointing": True, "position_schedule": "pose", "packing": False}
    run = FinetuneConfig("unused", **one_row)
    here, on_a_gpu = plan(half_checkpoint, 64, run=run), plan(half_checkpoint, 64, gpu_memory="24GB", run=run)
    requested = plan(half_checkpoint, 64, dtype="bfloat16", run=run)
    assert on_a_gpu.model.dtype == requested.model.dtype == "bfloat16"
    assert here.model.dtype == ("bfloat16" if native else "float32")
    times = 1 if native else 2
    assert here.kv_cache == times * on_a_gpu.kv_cache
    assert here.model.weight_bytes == times * on_a_gpu.model.weight_bytes
    assert bool(here.as_dict()["dtype_reason"]) != native
    assert here.option.memory.half_weights == 0 or native
