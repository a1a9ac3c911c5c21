"""Fine-tuning with shifted sparse attention: the losses are its, the probe is for it, what is saved is plain."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from groups_by_hand import seen_by_hand
from hf_posenc.attention import shifted
from hf_posenc.attention.shifted import shifted_sparse_attention
from hf_posenc.checkpoint.extended import load_extended
from hf_posenc.cli.main import main
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.patching.api import patch_model
from hf_posenc.training import FinetuneConfig, finetune
from hf_posenc.training.run_folder import read_log
from hf_posenc.training.start_checks import probe_isolation
from tiny_runs import SEQ, config, killed_at, load, logits_of
from training_blocks import blocks_of_a_run

GROUP = SEQ // 4


def sparse(folder: Path, **changes: Any) -> FinetuneConfig:
    settings = {"shifted_sparse_attention": True, "token_budget": 4 * 2 * SEQ, "save_steps": 2, "eval_documents": 0}
    return config(folder, **{**settings, **changes})


def lengths_of(positions: torch.Tensor) -> list[int]:
    begins = [*(positions == 0).nonzero()[:, 0].tolist(), len(positions)]
    return [end - begin for begin, end in pairwise(begins)]


@torch.no_grad()
def loss_by_hand(model: Any, blocks: list[dict[str, torch.Tensor]], group: int) -> float:
    """Blocks of packed documents, with a mask for each head."""
    ids, positions, labels = (torch.stack([block[name] for block in blocks]) for name in blocks[0])
    seen = seen_by_hand([lengths_of(row) for row in positions], group, 4)
    logits = model(ids, position_ids=positions, attention_mask=seen, use_cache=False).logits.double()
    return float(cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"method": "linear", "lora": True, "gradient_checkpointing": True},
        pytest.param({"method": "ntk", "group_share": 0.15, "gradient_checkpointing": True}, marks=pytest.mark.slow),
    ],
    ids=["yarn", "linear-lora-checkpointing", "ntk-odd-group"],
)
def test_the_loss_is_that_of_masks_by_hand(
    changes: dict[str, Any], base_folder: Path, tmp_path: Path, tokenizer: Any, documents: list[torch.Tensor]
) -> None:
    uneven = [document[: 40 + 7 * i] for i, document in enumerate(documents)]
    settings = sparse(tmp_path / "run", token_budget=2 * SEQ, **changes)
    finetune(load(base_folder), tokenizer, uneven, settings)
    model = patch_model(load(base_folder), settings.method or "yarn", 2.0)
    blocks = list(blocks_of_a_run(uneven, SEQ, 2, eos_token_id=0))
    group = GROUP if settings.group_share == 0.25 else 19
    [line] = read_log(tmp_path / "run/train_log.jsonl")
    assert line["loss"] == pytest.approx(loss_by_hand(model, blocks, group), rel=1e-5)
    assert abs(line["loss"] - loss_by_hand(model, blocks, SEQ)) > 1e-3


def test_what_is_saved_is_plain(
    base_folder: Path,
    tmp_path: Path,
    tokenizer: Any,
    documents: list[torch.Tensor],
) -> None:
    """As the command line has it; killed, and gone on with."""
    tokenizer.save_pretrained(base_folder)
    (tmp_path / "texts").mkdir()
    for number, document in enumerate(documents):
        (tmp_path / f"texts/{number}.txt").write_text(" ".join(f"w{i}" for i in document.tolist()))
    folder = tmp_path / "run"
    argv = ["finetune", str(base_folder), "--documents", str(tmp_path / "texts")]
    argv += ["--output-dir", str(folder), "--factor", "2", "--token-budget", str(4 * SEQ), "--eval-documents", "2"]
    argv += ["--shifted-sparse-attention", "--group-share", "0.25", "--save-steps", "2", "--learning-rate", "3e-3"]
    with killed_at(3):
        main(argv)
    assert main([*argv, "--resume-from-checkpoint", "--group-share", "0.5"]) == 2  # another run
    assert main([*argv, "--resume-from-checkpoint"]) == 0
    assert [line["step"] for line in read_log(folder / "train_log.jsonl")] == [1, 2, 3, 4]
    for saved in (folder, folder / "checkpoint-2", folder / "checkpoint-4"):
        assert "shifted" not in (saved / "config.json").read_text() + (saved / "context_extension.json").read_text()
        model = load(saved)
        assert model.config._attn_implementation == "sdpa"
        assert torch.equal(logits_of(model), logits_of(load_extended(saved)))
    assert torch.equal(logits_of(load(folder)), logits_of(load(folder / "checkpoint-4")))
    assert not torch.equal(logits_of(load(folder)), logits_of(load(folder / "checkpoint-2")))
    assert "- shifted sparse attention while training, tokens of a group: 32" in (folder / "README.md").read_text()


def test_the_trained_model_has_full_attention_again(
    base_folder: Path, tmp_path: Path, tokenizer: Any, documents: list[torch.Tensor]
) -> None:
    killed = load(base_folder)
    with killed_at(1):
        finetune(killed, tokenizer, documents, sparse(tmp_path / "killed"))
    assert killed.config._attn_implementation == killed.model.config._attn_implementation == "sdpa"
    result = finetune(load(base_folder), tokenizer, documents, sparse(tmp_path / "run", lora=True))
    merged = result.model.merge_and_unload()
    assert merged.config._attn_implementation == "sdpa"
    loaded = load_extended(tmp_path / "run")
    torch.testing.assert_close(logits_of(merged), logits_of(loaded), rtol=0, atol=1e-5)
    with shifted_sparse_attention(loaded, GROUP) as shift, shift.dry_run(GROUP):
        assert (logits_of(loaded) - logits_of(merged)).abs().max() > 0.1


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_probe_is_read_in_several_groups(
    attention: str, batch_size: int, base_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(base_folder, attn_implementation=attention).train()
    make_groups, seen = shifted.make_groups, []

    def leaking(documents: torch.Tensor, group: int, first: int) -> Any:
        """Right as long as one group holds the text."""
        seen.append((tuple(documents.shape), first))
        return make_groups(documents if documents.shape[1] <= group else 0 * documents, group, first)

    with shifted_sparse_attention(model, 2048) as shift:
        assert probe_isolation(RotaryModel(model), batch_size) <= 1e-6
        monkeypatch.setattr(shifted, "make_groups", leaking)
        with pytest.raises(RuntimeError, match=f"attn_implementation '{attention}'"):
            probe_isolation(RotaryModel(model), batch_size)
        assert (shift.group, shift.in_evaluation) == (2048, False)
    assert seen[:2] == [((batch_size, 48), 20), ((batch_size, 48), 10)]
    assert model.training


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "dca"}, "shifted_sparse_attention is for static methods, .* 'dca' has an attention of its own"),
        ({"method": "dynamic_yarn"}, "'dynamic_yarn' has an attention of its own"),
        ({"group_share": 1.5}, "group_share must be a share between 0 and 1"),
    ],
)
def test_runs_that_cannot_be(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        sparse(tmp_path, **changes)


def test_models_that_cannot_be_trained_so(
    base_folder: Path, tmp_path: Path, tokenizer: Any, documents: list[torch.Tensor]
) -> None:
    in_attention = patch_model(load(base_folder), "self_extend", 2)
    flex = AutoModelForCausalLM.from_pretrained(base_folder, attn_implementation="flex_attention")
    for model, message in ((in_attention, "rules of its own"), (flex, "attn_implementation is 'flex_attention'")):
        requested = sparse(tmp_path / "run", **({"factor": None} if model is in_attention else {}))
        with pytest.raises(ValueError, match=message):
            finetune(model, tokenizer, documents, requested)
    with pytest.raises(ValueError, match="gives groups of 1"):
        finetune(load(base_folder), tokenizer, documents, sparse(tmp_path / "run", group_share=0.01))
    assert not (tmp_path / "run").exists()
