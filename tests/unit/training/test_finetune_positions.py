"""Fine-tuning with skipped positions end to end: the loss, resume, the probe, what is refused, streams."""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from folders import ROOT
from hf_posenc.assets import tiny_model_path
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.patching.api import patch_model
from hf_posenc.training import chunked_loss, finetune, masks
from hf_posenc.training.data import upsample
from hf_posenc.training.positions import PositionSchedule
from hf_posenc.training.start_checks import probe_isolation
from tiny_models import make_model
from tiny_runs import Build, config, killed_at, losses
from training_blocks import blocks_of_a_run

ORIGINAL, TARGET = 64, 256
POSE: dict[str, Any] = {
    "factor": 4.0,
    "position_schedule": "pose",
    "eval_documents": 0,
    "per_device_train_batch_size": 2,
}
BUDGET = 4 * 2 * ORIGINAL


@pytest.mark.parametrize("kind", ["pose", "random"])
def test_the_loss_of_each_step_is_that_of_documents_alone_at_their_positions(
    tmp_path: Path, tiny_llama: Build, tokenizer: Any, documents: list[torch.Tensor], kind: str
):
    uneven = [document[: 5 + 7 * i] for i, document in enumerate(documents)]
    settings = {**POSE, "position_schedule": kind, "short_share": 0.25, "length_upsampling": 2.0}
    finetune(tiny_llama(), tokenizer, uneven, config(tmp_path, token_budget=BUDGET, learning_rate=1e-30, **settings))
    schedule = PositionSchedule(kind, ORIGINAL, TARGET, short_share=0.25)
    more = upsample(uneven, ORIGINAL, 2.0, 0)
    blocks = list(blocks_of_a_run(more, ORIGINAL, 8, eos_token_id=0, positions=schedule))
    assert max(int(block["position_ids"].max()) for block in blocks) > TARGET // 2
    model = patch_model(tiny_llama(), "yarn", 4.0)
    expected = [mean_loss(model, blocks[i : i + 2]) for i in (0, 2, 4, 6)]
    assert losses(tmp_path) == pytest.approx(expected, rel=1e-5)


def mean_loss(model: Any, blocks: list[dict[str, torch.Tensor]]) -> float:
    """Each run of rising positions alone, under a causal mask written out."""
    total, count = 0.0, 0
    for block in blocks:
        bounds = [*(block["position_ids"] == 0).nonzero()[:, 0].tolist(), ORIGINAL]
        for start, end in itertools.pairwise(bounds):
            ids, positions = block["input_ids"][None, start:end], block["position_ids"][None, start:end]
            mask = torch.ones(end - start, end - start).tril().bool()[None, None]
            if end - start > 1:
                logits = model(ids, position_ids=positions, attention_mask=mask, use_cache=False).logits
                total += cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").item()
                count += end - start - 1
    return total / count


@pytest.mark.parametrize("method", ["yarn", pytest.param("dynamic_yarn", marks=pytest.mark.slow)])
def test_a_run_that_was_killed_goes_on_with_the_same_positions(
    tmp_path: Path,
    tiny_llama: Build,
    tokenizer: Any,
    documents: list[torch.Tensor],
    caplog: pytest.LogCaptureFixture,
    method: str,
):
    settings = {**POSE, "method": method, "short_share": 0.25, "save_steps": 2, "token_budget": BUDGET}
    with caplog.at_level(logging.INFO):
        finetune(tiny_llama(), tokenizer, documents, config(tmp_path / "whole", **settings))
    assert "trained on: 512 tokens in 8 blocks, 2 of them as windows of 64 tokens" in caplog.text
    assert "packed documents" in caplog.text
    with killed_at(3):
        finetune(tiny_llama(), tokenizer, documents, config(tmp_path / "killed", **settings))
    finetune(tiny_llama(), tokenizer, documents, config(tmp_path / "killed", resume_from_checkpoint=True, **settings))
    assert len(losses(tmp_path / "whole")) == 4
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


@pytest.mark.parametrize("method", ["yarn", "dynamic_yarn"])
@pytest.mark.parametrize("kind", ["pose", "random"])
def test_the_probe_sees_documents_apart_and_chunks_together(tiny_llama: Build, method: str, kind: str):
    model = patch_model(tiny_llama(), method, 4.0)
    schedule = PositionSchedule(kind, ORIGINAL, TARGET, short_share=0.9)
    assert probe_isolation(RotaryModel(model), 2, schedule) <= 1e-6


def test_the_probe_stops_a_run_whose_chunks_or_documents_are_mixed_up(
    tiny_llama: Build, monkeypatch: pytest.MonkeyPatch
):
    model, schedule = patch_model(tiny_llama(), "yarn", 4.0), PositionSchedule("pose", ORIGINAL, TARGET)
    with monkeypatch.context() as patch:  # as Transformers reads positions that skip
        patch.setattr(chunked_loss, "documents_start_at_zero", lambda *args, **kwargs: nullcontext())
        with pytest.raises(RuntimeError, match="own document"):
            probe_isolation(RotaryModel(model), 1, schedule)
        assert probe_isolation(RotaryModel(model), 1) <= 1e-6  # nothing is wrong where nothing skips
    monkeypatch.setattr(masks, "find_documents", lambda position_ids, skips_matter: None)
    with pytest.raises(RuntimeError, match="packed documents"):
        probe_isolation(RotaryModel(model), 1, schedule)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "self_extend"}, "'pose' skips positions, and 'self_extend' counts distances in tokens"),
        ({"seq_len": 256}, "has nothing to skip in blocks of seq_len 256"),
    ],
)
def test_what_does_not_suit_is_refused_and_leaves_no_folder(
    tmp_path: Path, tiny_llama: Build, tokenizer: Any, documents: list[Any], changes: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message):
        finetune(tiny_llama(), tokenizer, documents, config(tmp_path / "run", **{**POSE, **changes}))
    assert not (tmp_path / "run").exists()


def test_a_window_on_every_layer_is_refused_where_a_skip_passes_it(
    tmp_path: Path, tokenizer: Any, documents: list[torch.Tensor]
):
    settings = config(tmp_path / "run", **POSE)
    with pytest.raises(ValueError, match="128"):
        finetune(make_model("Mistral", sliding_window=128), tokenizer, documents, settings)


class Stream:
    """Documents without end, which counts those that are read."""

    def __init__(self, length: int) -> None:
        self.length, self.read = length, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in itertools.count():
            self.read += 1
            yield torch.full((self.length,), 1 + number % 100)


@pytest.mark.parametrize(("held_out", "expected"), [(0, 11), (2, 12)])
def test_a_stream_is_read_until_the_budget_and_the_held_out_are_filled(
    tmp_path: Path,
    tiny_llama: Build,
    tokenizer: Any,
    caplog: pytest.LogCaptureFixture,
    held_out: int,
    expected: int,
):
    stream = Stream(50)  # 512 tokens are 11 documents of 50; of 12 one is held out
    settings = {**POSE, "token_budget": BUDGET, "eval_documents": held_out, "eval_lengths": [32]}
    with caplog.at_level(logging.INFO):
        finetune(tiny_llama(), tokenizer, stream, config(tmp_path, **settings))
    assert stream.read == expected
    assert f"{expected}" in caplog.text
    # 11 documents of 51 tokens with EOS are 561 in 9 blocks of 64, and 8 of those are trained on.
    assert "tokens of the documents (" in caplog.text
    assert "token budget" in caplog.text


def test_a_stream_that_ends_first_is_read_to_its_end_and_numbers_are_no_texts(
    tmp_path: Path, tiny_llama: Build, tokenizer: Any, caplog: pytest.LogCaptureFixture
):
    settings = config(tmp_path, **{**POSE, "token_budget": BUDGET})
    with caplog.at_level(logging.INFO):
        finetune(tiny_llama(), tokenizer, iter([torch.ones(70, dtype=torch.int64)] * 2), settings)
    assert "read 2 documents, 140 tokens: all of the source" in caplog.text
    with pytest.raises(
        TypeError, match="document 0 must be a text, a row of a dataset or a tensor of token ids, got int"
    ):
        finetune(tiny_llama(), tokenizer, iter([1]), config(tmp_path / "numbers"))
    with pytest.raises(ValueError, match="no documents"):
        finetune(tiny_llama(), tokenizer, iter([]), config(tmp_path / "none"))


def run(launcher: list[str], text: Path, output: Path, *flags: str) -> list[dict[str, float]]:
    root = ROOT
    words = [sys.executable, *launcher, root / "scripts/finetune.py", tiny_model_path(), "--documents", text]
    words += ["--output-dir", output, "--device", "cpu", "--factor", "4", "--token-budget", "4096", "--bf16", "false"]
    words += ["--position-schedule", "pose", "--short-share", "0.25", "--eval-documents", "0", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, words)), env=environment, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "16 blocks, 4 of them as windows of 256 tokens" in done.stderr
    return [json.loads(line) for line in (output / "train_log.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_processes_draw_the_positions_that_one_draws(tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"The {n}th letter came to her sister on a morning in May. " for n in range(600)))
    alone = run([], text, tmp_path / "one", "--gradient-accumulation-steps", "2")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    both = run(torchrun, text, tmp_path / "two")
    assert len(both) == 8
    for name in ("loss", "grad_norm", "tokens_trained"):
        assert [line[name] for line in both] == pytest.approx([line[name] for line in alone], rel=1e-3), name


def test_a_stream_of_held_out_documents_is_read_until_enough_are_long(
    tmp_path: Path, tiny_llama: Build, tokenizer: Any
) -> None:
    stream = Stream(50)
    settings = {**POSE, "token_budget": BUDGET, "eval_documents": 3, "eval_lengths": [32]}
    documents = [torch.ones(70, dtype=torch.int64)] * 10
    finetune(tiny_llama(), tokenizer, documents, config(tmp_path, **settings), eval_documents=stream)
    assert stream.read == 3
