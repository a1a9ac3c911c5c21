"""Texts on which training keeps what the model predicts: how they are made, and what they are worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_posenc import patched
from hf_posenc.assets import load_novel, tiny_model_path
from hf_posenc.data.packing import PackedDocuments
from hf_posenc.data.retained_texts import LIKELY, RetainedTexts
from hf_posenc.data.tokens import IGNORED
from hf_posenc.training import FinetuneConfig, finetune, retaining
from hf_posenc.training.chunked_loss import chunked_causal_lm_loss, chunked_lm_loss, divergence_from_likely
from hf_posenc.training.positions import PositionSchedule
from hf_posenc.training.retaining import long_retained_texts, retained_texts, with_likely
from hf_posenc.training.run_folder import read_log
from hf_posenc.training.trainer import one_text_a_row
from tiny_models import make_model
from tiny_runs import assert_same_run, killed_at


def tiny() -> Any:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path()).eval()
    return model, AutoTokenizer.from_pretrained(tiny_model_path())


def run(folder: Path, task_mix: list[str], **changes: Any) -> Any:
    given: dict[str, Any] = {"token_budget": 16 * 512, "context_length": 512, "learning_rate": 1e-3, "warmup_steps": 1}
    given |= {"eval_lengths": [128], "eval_documents": 1, "save_steps": 8, "task_mix": task_mix}
    model, tokenizer = tiny()
    given = {name: value for name, value in {**given, **changes}.items() if value is not None}
    return finetune(model.float(), tokenizer, [load_novel("emma")[:60_000]], FinetuneConfig(str(folder), **given))


@torch.no_grad()
def divergence(model: Any, texts: torch.Tensor) -> float:
    """Of the model's whole distributions from those of the tiny model, over the texts, in float64."""
    found, wanted = (each(texts).logits.double().log_softmax(-1) for each in (model, tiny()[0]))
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


@torch.no_grad()
def test_the_model_writes_what_it_takes_for_likely() -> None:
    model, tokenizer = tiny()
    state = torch.random.get_rng_state()
    texts = retained_texts(model, tokenizer, 2000, 256, seed=0)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert texts.ids.shape == (8, 256)
    assert texts.likely_ids.shape == texts.likely_log_probs.shape == (8, 256, LIKELY)
    assert (texts.ids[:, 0] == tokenizer.bos_token_id).all()
    log_probs = model(texts.ids).logits.double().log_softmax(-1)
    best = log_probs.topk(LIKELY)
    torch.testing.assert_close(texts.likely_log_probs.double(), best.values, rtol=0, atol=1e-4)
    loss = -log_probs[:, :-1].gather(-1, texts.ids[:, 1:, None]).mean()
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    assert float(loss) == pytest.approx(float(entropy), rel=0.05)  # drawn at temperature 1, from all tokens


def test_what_the_checkpoint_says_of_generation_changes_no_text() -> None:
    model, tokenizer = tiny()
    settings = {"first": tokenizer.bos_token_id, "length": 40, "count": 2, "seed": 3}
    plain = retaining.written(model, **settings)
    model.generation_config.eos_token_id = int(plain[0, 5])
    model.generation_config.repetition_penalty = 5.0
    given = model.generation_config
    assert torch.equal(retaining.written(model, **settings), plain)
    assert model.generation_config is given


def test_texts_are_written_once_for_each_model_and_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = tiny()
    calls = []
    write = retaining.written
    monkeypatch.setattr(retaining, "written", lambda *args: calls.append(args) or write(*args))
    first, again = (retained_texts(model, tokenizer, 64, 32, seed=7) for _ in range(2))
    assert torch.equal(first.ids, again.ids)
    assert len(calls) <= 1
    other = retained_texts(model, tokenizer, 64, 32, seed=8)
    assert not torch.equal(first.ids, other.ids)
    model.lm_head.weight.data[0, 0] += 1
    retained_texts(model, tokenizer, 64, 32, seed=8)
    assert len(calls) >= 2


@pytest.mark.parametrize("bf16", [True, False])
def test_texts_are_written_in_the_precision_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bf16: bool
) -> None:
    computed: list[torch.dtype] = []
    write = retaining.written

    def noted(model: Any, *args: Any) -> torch.Tensor:
        computed.append(model(torch.tensor([[1]])).logits.dtype)
        return write(model, *args)

    monkeypatch.setattr(retaining, "written", noted)
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    run(tmp_path / "run", ["retention=1"], bf16=bf16, token_budget=512)
    assert computed == [torch.bfloat16 if bf16 else torch.float32]


def test_half_of_the_texts_are_pieces_of_documents_that_are_long_enough() -> None:
    model, tokenizer = tiny()
    model.float()  # in bfloat16, a batch may round otherwise than one text
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(model.vocab_size, (size,), generator=generator) for size in (31, 70, 64)]
    texts = retained_texts(model, tokenizer, 6 * 32, 32, 0, documents)
    pieces = {tuple(piece.tolist()) for text in documents for piece in torch.split(text, 32) if len(piece) == 32}
    read = [tuple(row.tolist()) in pieces for row in texts.ids]
    assert read == [True] * 3 + [False] * 3
    assert len({tuple(row.tolist()) for row in texts.ids}) == 6
    with torch.no_grad():
        found = model(texts.ids).logits.float().log_softmax(-1).topk(LIKELY)
    torch.testing.assert_close(texts.likely_log_probs, found.values, rtol=0, atol=1e-4)
    few = retained_texts(model, tokenizer, 12 * 32, 32, 0, documents).ids
    assert [tuple(row.tolist()) in pieces for row in few] == [True] * 4 + [False] * 8


def test_the_divergence_takes_all_other_tokens_together() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, wanted = torch.randn(2, 5, 100, generator=generator, dtype=torch.float64) * 3
    likely = wanted.log_softmax(-1).topk(7)
    found = divergence_from_likely(logits.float(), likely.indices, likely.values.float())
    p, q = (each.softmax(-1).gather(-1, likely.indices) for each in (wanted, logits))
    p, q = (torch.cat([each, 1 - each.sum(-1, keepdim=True)], -1) for each in (p, q))
    torch.testing.assert_close(found.double(), (p * (p / q).log()).sum(-1), rtol=1e-4, atol=1e-5)
    whole = (wanted.softmax(-1) * (wanted.log_softmax(-1) - logits.log_softmax(-1))).sum(-1)
    assert (found.double() <= whole + 1e-5).all()
    same = divergence_from_likely(wanted.float(), likely.indices, likely.values.float())
    assert same.abs().max() < 1e-5


def test_the_loss_in_chunks_is_the_mean_divergence_of_the_rows_that_count() -> None:
    model, tokenizer = tiny()
    texts = retained_texts(model, tokenizer, 2000, 256, seed=0)
    ids = texts.ids[:2, :100]
    labels = ids.clone()
    labels[:, :50] = -100
    with patched(model, "ntk", 4):
        hidden = model.model(ids).last_hidden_state
        likely = [texts.likely_ids[:2, :100], texts.likely_log_probs[:2, :100]]
        loss = chunked_causal_lm_loss(model, hidden, labels, None, 16, None, *likely)
        logits = model.lm_head(hidden)[:, 49:-1].flatten(0, 1)
    rows = divergence_from_likely(logits, *(each[:, 49:99].flatten(0, 1) for each in likely))
    assert float(loss.detach()) == pytest.approx(float(rows.detach().mean()), rel=1e-5)
    assert float(loss.detach()) > 0.01


def test_training_with_retention_keeps_more_and_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    held_out = retained_texts(*tiny(), 1024, 256, seed=99).ids
    without = run(tmp_path / "without", ["kv=1"])
    result = run(tmp_path / "with", ["kv=0.5", "retention=0.5"])
    kept, lost = (divergence(each.model, held_out) for each in (result, without))
    assert kept < 0.5 * lost
    lines = [line for line in read_log(tmp_path / "with/train_log.jsonl") if line["kind"] == "retention"]
    assert len(lines) == 8
    assert all(line["tokens_in_loss"] == 2 * 255 for line in lines)
    with killed_at(11):
        run(tmp_path / "killed", ["kv=0.5", "retention=0.5"])
    run(tmp_path / "killed", ["kv=0.5", "retention=0.5"], resume_from_checkpoint=True)
    assert_same_run(tmp_path / "with", tmp_path / "killed", 16)


def long_divergence(model: Any, method: str) -> float:
    """As ``divergence``, over two texts of 512 tokens of another novel, from the tiny model extended by a method."""
    tokenizer = tiny()[1]
    ids = tokenizer(load_novel("persuasion")[:20_000], return_tensors="pt").input_ids[0][:1024].view(2, 512)
    before = tiny()[0].float()
    with torch.no_grad(), patched(before, method, context_length=512):
        found, wanted = (each(ids).logits.double().log_softmax(-1) for each in (model, before))
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


def test_long_retention_keeps_what_the_extended_model_reads_in_long_texts(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"method": "ntk", "learning_rate": 3e-4, "token_budget": 32 * 512}
    mix = ["kv=0.5", "long_retention=0.5"]
    without = run(tmp_path / "without", ["kv=1"], **{**settings, "token_budget": 16 * 512})
    result = run(tmp_path / "with", mix, **settings)
    assert long_divergence(result.model, "ntk") < 0.5 * long_divergence(without.model, "ntk")
    lines = [line for line in read_log(tmp_path / "with/train_log.jsonl") if line["kind"] == "long_retention"]
    assert len(lines) == 16
    assert all(line["tokens_in_loss"] == 511 for line in lines)
    with killed_at(11):
        run(tmp_path / "killed", mix, **settings)
    run(tmp_path / "killed", mix, **settings, resume_from_checkpoint=True)
    assert_same_run(tmp_path / "with", tmp_path / "killed", 32)


def packed(tokens: int, seq_len: int) -> PackedDocuments:
    text = tiny()[1](load_novel("emma")[: 6 * tokens], return_tensors="pt").input_ids[0][:tokens]
    return PackedDocuments([text[: tokens // 3], text[tokens // 3 :]], seq_len, eos_token_id=1)


def test_long_pieces_are_read_at_the_positions_of_the_run() -> None:
    model = tiny()[0].float()
    documents, positions = packed(3000, 128), PositionSchedule("pose", 256, 1024, seed=3)
    with patched(model, "linear", 4):
        texts = long_retained_texts(model, 700, documents, positions)
    assert texts.ids.shape == (6, 128)
    assert len({int(row.max()) for row in texts.position_ids}) > 1
    assert all(torch.equal(texts.position_ids[at], positions.of(at, [128])) for at in range(6))
    pieces = {tuple(piece.tolist()) for piece in documents.stream.split(128)}
    assert len({tuple(row.tolist()) for row in texts.ids} & pieces) == 6
    # By hand: linear scaling by 4 is reading at a quarter of the positions.
    quarter = texts.position_ids[:2].float() / 4
    with torch.no_grad():
        found = model(texts.ids[:2], position_ids=quarter, attention_mask=torch.ones_like(texts.ids[:2])).logits
    best = found.log_softmax(-1).topk(LIKELY)
    torch.testing.assert_close(texts.likely_log_probs[:2], best.values, rtol=0, atol=1e-3)


def test_documents_that_hardly_fill_a_block_are_read_from_the_start_again() -> None:
    documents = packed(100, 128)
    texts = long_retained_texts(tiny()[0].float(), 700, documents, PositionSchedule("full", 256, 256))
    assert torch.equal(texts.ids[0], torch.cat([documents.stream, documents.stream])[:128])
    assert len(texts.ids) == 1


def test_each_rule_reads_long_pieces_for_itself() -> None:
    model, found = tiny()[0].float(), {}
    for method in ("dynamic_yarn", "self_extend", "dca"):  # whose numbers are in no weight and no config
        with patched(model, method, 4):
            texts = long_retained_texts(model, 512, packed(2000, 512), PositionSchedule("full", 256, 512))
            found[method] = float(texts.likely_log_probs.double().sum())
    assert len(set(found.values())) == 3


def test_blocks_have_the_positions_that_their_targets_were_made_at(tmp_path: Path) -> None:
    """With a rate that changes hardly anything, all of the loss is rounding."""
    settings = {"position_schedule": "cream", "seq_len": 128, "context_length": 1024, "token_budget": 8 * 512}
    run(tmp_path / "run", ["long_retention=1"], method="ntk", **settings, learning_rate=1e-9, bf16=False)
    assert max(line["loss"] for line in read_log(tmp_path / "run/train_log.jsonl")) < 1e-5


def test_each_stage_retains_what_its_own_extension_reads(tmp_path: Path) -> None:
    settings = {"stages": ["512:2k", "1k:4k"], "method": "ntk", "learning_rate": 1e-9, "bf16": False}
    run(tmp_path / "run", ["long_retention=1"], **settings, token_budget=None, context_length=None)
    logs = [read_log(folder / "train_log.jsonl") for folder in sorted((tmp_path / "run").glob("stage-*"))]
    assert len(logs) == 2
    assert max(line["loss"] for log in logs for line in log) < 1e-5


@pytest.mark.parametrize(("kind", "method"), [("long_retention", "ntk"), ("retention", "dynamic_yarn")])
def test_a_run_may_begin_with_what_is_not_lost_yet(tmp_path: Path, kind: str, method: str) -> None:
    """The divergence is rounding alone then, and so is its difference from the expected one."""
    settings: dict[str, Any] = {"method": method, "token_budget": 4 * 512, "bf16": True, "check_first_loss": True}
    run(tmp_path / "run", [f"{kind}=1"], **settings)
    first, *others = (line["loss"] for line in read_log(tmp_path / "run/train_log.jsonl"))
    assert first < 1e-3 < others[-1]


def test_a_file_holds_what_was_saved(tmp_path: Path) -> None:
    ids = torch.arange(6).view(2, 3)
    texts = RetainedTexts(ids, ids + 7, torch.arange(12).view(2, 3, 2), torch.randn(2, 3, 2))
    texts.save(tmp_path / "cache/texts.safetensors")
    for name, value in vars(RetainedTexts.load(tmp_path / "cache/texts.safetensors")).items():
        assert torch.equal(value, getattr(texts, name)), name


def test_a_tokenizer_without_ends_is_refused_before_the_weights(tmp_path: Path) -> None:
    model, tokenizer = tiny()
    tokenizer.bos_token = tokenizer.eos_token = None
    config = FinetuneConfig(str(tmp_path / "run"), task_mix=["retention=1"], context_length=512, eval_documents=0)
    with pytest.raises(ValueError, match="has no token that a text begins or ends with"):
        finetune(model, tokenizer, [load_novel("emma")[:60_000]], config)


def test_texts_of_one_length_are_rows_of_a_batch() -> None:
    model, tokenizer = tiny()
    texts = retained_texts(model, tokenizer, 2000, 256, seed=0)
    positions = torch.arange(256).repeat(3)[None]
    model.float()
    packed = {
        "input_ids": texts.ids[:3].reshape(1, -1),
        "position_ids": positions,
        "labels": texts.ids[:3].reshape(1, -1).masked_fill(positions == 0, IGNORED),
        "likely_ids": texts.likely_ids[:3].flatten(0, 1)[None],
        "likely_log_probs": texts.likely_log_probs[:3].flatten(0, 1)[None],
    }
    rows = one_text_a_row(packed)
    assert torch.equal(rows["input_ids"], texts.ids[:3])
    assert torch.equal(rows["likely_ids"], texts.likely_ids[:3])
    losses = []
    with patched(model, "yarn", factor=2), chunked_lm_loss(model, 128):
        for inputs in (packed, rows):
            model.zero_grad()
            losses.append(model(**inputs).loss)
            losses[-1].backward()
            losses.append(model.lm_head.weight.grad.clone())
    torch.testing.assert_close(losses[:2], losses[2:], rtol=1e-4, atol=1e-6)
    shorter = {name: value[:, :-56] for name, value in packed.items()}
    assert one_text_a_row(shorter)["input_ids"].shape == (1, 712)


@pytest.mark.parametrize("family", ["GPTNeoX", "Llama"])
def test_families_name_the_size_of_their_vocabulary_in_the_config(family: str) -> None:
    model = make_model(family)
    texts, positions = torch.arange(1, 25).view(2, 12), torch.arange(12).expand(2, 12)
    kept = with_likely(model, texts, positions, 10_000)
    assert kept.likely_ids.shape == (2, 12, model.config.vocab_size)
