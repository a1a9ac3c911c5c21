"""Fine-tuning with rules that only the attention can do: losses, resume, what is saved, and the probe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from hf_posenc.attention.pieces import Pieces
from hf_posenc.checkpoint.extended import load_extended
from hf_posenc.checkpoint.manifest import read_manifest
from hf_posenc.doctor import diagnose
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.patching.api import describe, patch_model, verify_model
from hf_posenc.training import finetune
from hf_posenc.training.positions import PositionSchedule
from hf_posenc.training.start_checks import probe_isolation
from tiny_runs import config, killed_at, load, logits_of, losses
from training_plans import extended_by

ORIGINAL, TARGET = 64, 256  # the tiny model's, and 4 times that
STEPS = 4


def staged(folder: Path, **changes: Any) -> Any:
    settings = {
        "method": "dynamic_yarn",
        "options": {"stage": 32},
        "factor": 4.0,
        "token_budget": STEPS * TARGET,
        "per_device_train_batch_size": 1,
        "save_steps": 2,
        "eval_documents": 0,
    }
    return config(folder, **{**settings, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lora": True},
        {"gradient_checkpointing": True},
        {"method": "self_extend", "options": {}},
        {"method": "dca", "options": {}, "lora": True, "gradient_checkpointing": True},
    ],
    ids=["full", "lora", "checkpointing", "self_extend", "dca-lora-checkpointing"],
)
def test_a_run_resumes_to_the_same_losses_and_saves_what_load_extended_reads(
    changes: dict[str, Any],
    base_folder: Path,
    tmp_path: Path,
    tokenizer: Any,
    documents: list[torch.Tensor],
) -> None:
    straight = finetune(load(base_folder), tokenizer, documents, staged(tmp_path / "straight", **changes))
    with killed_at(3):
        finetune(load(base_folder), tokenizer, documents, staged(tmp_path / "killed", **changes))
    resumed = finetune(
        load(base_folder), tokenizer, documents, staged(tmp_path / "killed", resume_from_checkpoint=True, **changes)
    )
    assert len(losses(tmp_path / "straight")) == STEPS
    assert losses(tmp_path / "killed") == pytest.approx(losses(tmp_path / "straight"), rel=1e-6)
    torch.testing.assert_close(logits_of(resumed.model, TARGET), logits_of(straight.model, TARGET), rtol=0, atol=1e-5)
    for folder in (tmp_path / "killed", tmp_path / f"straight/checkpoint-{STEPS}"):
        loaded = load_extended(folder)
        verify_model(loaded)
        assert describe(loaded) == describe(straight.model)
        expected = logits_of(straight.model, TARGET)
        torch.testing.assert_close(logits_of(loaded, TARGET), expected, rtol=0, atol=1e-5)
        assert diagnose(folder).findings == ()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("method", ["dynamic", "dynamic_yarn", "dca", "leaky_rerope"])
def test_the_first_loss_is_that_of_the_rule(
    method: str, checkpointing: bool, base_folder: Path, tmp_path: Path, tokenizer: Any
) -> None:
    """One block that is one document: its loss is the mean over the logits of a plain forward."""
    document = torch.randint(1, 60, (TARGET - 1,), generator=torch.Generator().manual_seed(1))
    changes = {"method": method, "options": {}, "token_budget": TARGET, "gradient_checkpointing": checkpointing}
    finetune(load(base_folder), tokenizer, [document], staged(tmp_path / "run", **changes))
    block = torch.cat([document, torch.tensor([tokenizer.eos_token_id])])[None]

    def loss_of(model: Any) -> float:
        with torch.no_grad():
            return float(cross_entropy(model.eval()(block).logits[0, :-1].double(), block[0, 1:]))

    (first,) = losses(tmp_path / "run")
    assert first == pytest.approx(loss_of(patch_model(load(base_folder), method, 4)), rel=1e-5)
    assert abs(first - loss_of(load(base_folder))) > 1e-4


def test_checkpointing_trains_to_the_same_weights(
    base_folder: Path, tmp_path: Path, tokenizer: Any, documents: list[torch.Tensor]
) -> None:
    results = [
        finetune(
            load(base_folder),
            tokenizer,
            documents,
            staged(tmp_path / str(checkpointing), gradient_checkpointing=checkpointing),
        )
        for checkpointing in (False, True)
    ]
    assert losses(tmp_path / "True") == pytest.approx(losses(tmp_path / "False"), rel=1e-6)
    logits = [logits_of(result.model, TARGET) for result in results]
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-5)


def test_the_folder_says_who_can_read_it(
    base_folder: Path, tmp_path: Path, tokenizer: Any, documents: list[torch.Tensor]
) -> None:
    held_out = [torch.cat(documents[:2])]  # 400 tokens
    settings = staged(tmp_path / "run", eval_documents=2)
    result = finetune(load(base_folder), tokenizer, documents, settings, eval_documents=held_out)
    card = (tmp_path / "run/README.md").read_text()
    assert "Plain Transformers is enough" not in card
    assert "**Load it with `hf_posenc.load_extended`** (`pip install hf_posenc`)" in card
    assert "float32, sdpa attention" in card
    assert {record.attn_implementation for record in result.records} == {"sdpa"}
    assert {record.context_length for record in result.records} == {32, 64, TARGET}
    assert all(record.options == {"stage": 32} for record in result.records if record.method != "none")
    for name in ("", f"checkpoint-{STEPS}"):
        saved = json.loads((tmp_path / "run" / name / "config.json").read_text())
        assert saved["max_position_embeddings"] == 64
        assert saved["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
        assert saved["context_extension"]["method"] == "dynamic_yarn"  # by which a lost manifest is found
        assert (read_manifest(tmp_path / "run" / name) or {})["context_length"] == TARGET


def test_a_loaded_rule_goes_on_or_is_replaced(
    base_folder: Path, tmp_path: Path, tokenizer: Any, documents: list[torch.Tensor]
) -> None:
    finetune(load(base_folder), tokenizer, documents, staged(tmp_path / "run"))
    loaded = load_extended(tmp_path / "run")
    request = config(tmp_path / "on", factor=None, token_budget=TARGET, per_device_train_batch_size=1, eval_documents=0)
    again = finetune(loaded, tokenizer, documents, request, tokens_trained=STEPS * TARGET)
    assert again.tokens_trained == (STEPS + 1) * TARGET
    assert describe(load_extended(tmp_path / "on"))["options"] == {"stage": 32}
    other = staged(tmp_path / "other", method="yarn", options={}, factor=2.0)
    with pytest.raises(ValueError, match=r"dynamic_yarn,.*4.*on_scaled='replace'"):
        extended_by(other, load_extended(tmp_path / "run"))
    replaced = staged(tmp_path / "other", method="yarn", options={}, factor=2.0, on_scaled="replace")
    assert extended_by(replaced, load_extended(tmp_path / "run"))["context_length"] == 128


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("method", ["dynamic_yarn", "self_extend", "dca", "dynamic_yarn, PoSE"])
def test_the_probe_goes_past_the_original_length(
    method: str, batch_size: int, base_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _, skips = method.partition(", ")
    model, fed = patch_model(load(base_folder), name, 4), []
    schedule = PositionSchedule("pose", ORIGINAL, TARGET) if skips else None
    body = model.get_decoder()
    body.register_forward_pre_hook(lambda _, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    assert probe_isolation(RotaryModel(model), batch_size, schedule) <= 1e-6
    assert (max(fed) < ORIGINAL) == bool(skips)  # the positions go there, the tokens need not
    make = Pieces.__init__

    def leaking(self: Any, attention: Any, forward: Any, *args: Any) -> None:
        make(self, attention, forward, *args)
        if int(forward.layout.row_positions.max()) >= ORIGINAL:  # short texts stay right
            self.dense, self.forward.masks = None, {}
            monkeypatch.setattr(type(forward.layout), "documents", lambda layout, row: [(0, layout.num_keys)])

    monkeypatch.setattr(Pieces, "__init__", leaking)
    with pytest.raises(RuntimeError, match="attn_implementation 'sdpa'"):
        probe_isolation(RotaryModel(model), batch_size, schedule)
