"""Sequences that two processes share: the loss, the gradients and the weights of one process, or a stop at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import one_of_several
from distributed_runs import CONTEXT_PARALLEL, Run, assert_same_steps, in_two_processes, log_of, returned_by
from hf_posenc.assets import load_novel, tiny_model_path
from hf_posenc.training.chunked_loss import chunked_causal_lm_loss
from tiny_runs import SEQ

# A document of exactly so many blocks, its EOS with it: every block is a piece of one document. The last is held out.
WHOLE = [26 * SEQ - 1, 2 * SEQ]


@pytest.mark.slow
def test_context_parallel_trains_as_one_process_does(tmp_path: Path):
    settings = {
        "per_device_train_batch_size": 2,
        "eval_lengths": [SEQ // 2],
        "eval_documents": 1,
        "token_budget": 12 * SEQ,
    }
    alone = Run(str(tmp_path / "alone"), {**settings, "gradient_accumulation_steps": 1}, documents=WHOLE)
    cp = Run(str(tmp_path / "cp"), alone.settings, documents=WHOLE, attention="gathered")
    masked = {name: replace(run, folder=f"{run.folder}-masked", masked=True) for name, run in (("1", alone), ("2", cp))}
    text = tmp_path / "text.txt"
    text.write_text(load_novel("persuasion")[:60_000])
    trained = {"path": str(tiny_model_path()), "text": str(text)}
    long = {
        "per_device_train_batch_size": 1,
        "eval_documents": 0,
        "token_budget": 4 * 512,
        "bf16": False,
        "learning_rate": 1e-5,
        "seed": 1,  # a first block whose loss depends on far tokens by more than the check's tolerance
    }
    right = Run(str(tmp_path / "right"), long, trained, attention="gathered")
    wrong = Run(str(tmp_path / "wrong"), long, trained, attention="cut")
    short = [SEQ // 2] * 40  # padded, one in a block
    padded = Run(str(tmp_path / "padded"), {**alone.settings, "packing": False}, documents=short)
    cp_padded = Run(str(tmp_path / "cp-padded"), alone.settings, documents=short, attention="gathered")
    one_of_several.do(alone)
    one_of_several.do(padded)
    one_of_several.do(masked["1"])
    in_two_processes(tmp_path / "runs.json", [cp, masked["2"], right, wrong, cp_padded], CONTEXT_PARALLEL)

    assert_same_steps(cp, alone)
    assert_same_steps(masked["2"], masked["1"])
    assert_same_steps(cp_padded, padded)
    assert [line["loss"] for line in log_of(masked["1"])] != [line["loss"] for line in log_of(alone)]
    given, expected = returned_by(cp, 1), returned_by(alone)
    assert given["hooks"] == expected["hooks"] == 0  # accelerate's, which drop masks, are gone
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(given["weights"][name], weight, rtol=1e-4, atol=1e-4, msg=name)
    for process in (0, 1):
        assert not Path(right.folder, f"raised-{process}").exists()
        said = Path(wrong.folder, f"raised-{process}").read_text()
        assert "same tokens" in said
    assert not list(Path(wrong.folder).glob("checkpoint-*"))


def test_the_loss_of_shards_adds_up_to_that_of_the_whole(tiny_llama: Any):
    """Whatever tokens a process holds: rows and labels go together by shift_labels, not by their neighbours."""
    model = tiny_llama()
    ids = torch.randint(1, 128, (2, 32))
    labels = ids.clone()
    labels[:, [0, 11]] = -100
    hidden = model.model(input_ids=ids).last_hidden_state
    expected = nn.functional.cross_entropy(model.lm_head(hidden[:, :-1]).flatten(0, 1), labels[:, 1:].flatten())
    shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    halves = [torch.cat([torch.arange(0, 8), torch.arange(24, 32)]), torch.arange(8, 24)]  # as torch cuts for two
    count = (labels[:, 1:] != -100).sum()
    parts = [
        chunked_causal_lm_loss(model, hidden[:, half], labels[:, half], count, 5, shifted[:, half]) for half in halves
    ]
    torch.testing.assert_close(sum(parts), expected, rtol=1e-6, atol=0)
