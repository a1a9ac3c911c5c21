"""Fine-tuning on chats and on prompts with answers: what counts is weighed right, and mistakes are reported at once."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from chats import PLAIN, TAGGED, turns
from hf_posenc.cli.main import main
from hf_posenc.data.examples import ExampleTokenizer
from hf_posenc.patching.api import patch_model
from hf_posenc.training import finetune
from hf_posenc.training.chunked_loss import chunked_lm_loss
from hf_posenc.training.data import read_tokens
from hf_posenc.training.start_checks import documents_of
from tiny_llama import make_tiny_llama, make_tiny_tokenizer
from tiny_runs import SEQ, assert_same_run, config, killed_at, losses
from training_blocks import blocks_of_a_run

ASSISTANT = {"assistant_only_loss": True}


def chats(number: int = 24) -> list[dict[str, Any]]:
    """Chats with answers of 1 to 60 characters, a token each, to questions of 60 to 1: blocks weigh unequally."""
    generator = torch.Generator().manual_seed(3)
    letters = "".join(map(chr, torch.randint(97, 123, (80,), generator=generator).tolist()))
    lengths = torch.randint(1, 60, (number, 2), generator=generator).tolist()
    return [{"messages": turns(letters[: 61 - a], letters[:a], letters[: 61 - b], letters[:b])} for a, b in lengths]


def make_tokenizer(template: str | None = TAGGED) -> PreTrainedTokenizerBase:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def loss_by_hand(model: Any, blocks: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Each document of each block alone, with all its logits, in float64; the mean over the tokens that count."""
    model, kept = model.double(), []
    for block in blocks:
        for piece in documents_of(block):
            logits = model(piece["input_ids"][None]).logits[0, :-1]
            every = nn.functional.cross_entropy(logits, piece["input_ids"][1:], reduction="none")
            kept.append(every[piece["labels"][1:] != -100])
    return torch.cat(kept).mean()


def scheduled(tokenizer: Any, rows: list[Any], number: int, **options: Any) -> list[dict[str, torch.Tensor]]:
    """The blocks of a run, in the order of training."""
    return list(blocks_of_a_run(read_tokens(ExampleTokenizer(tokenizer, **options), rows), SEQ, number, eos_token_id=0))


def test_the_loss_of_a_packed_batch_is_that_of_its_counted_tokens() -> None:
    blocks = scheduled(make_tokenizer(), chats(), 3, **ASSISTANT)
    counts = [int((block["labels"] != -100).sum()) for block in blocks]
    assert max(counts) > 1.3 * min(counts)
    model = patch_model(make_tiny_llama(), "yarn", 2.0).double()
    batch = {name: torch.stack([block[name] for block in blocks]) for name in blocks[0]}
    with chunked_lm_loss(model, 7):
        loss = model(**batch).loss
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]  # just made
    model.zero_grad()
    expected = loss_by_hand(model, blocks)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)  # chunks are summed in float32
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-7)


def test_a_batch_without_counted_tokens_has_no_loss_and_no_gradient() -> None:
    model = patch_model(make_tiny_llama(), "yarn", 2.0)
    ids = torch.randint(1, 100, (2, 16))
    for number in (None, torch.tensor(0)):
        model.zero_grad()
        with chunked_lm_loss(model, 7):
            given = {"input_ids": ids, "labels": torch.full_like(ids, -100), "num_items_in_batch": number}
            loss = model(**given, position_ids=torch.arange(16).expand(2, -1)).loss
        loss.backward()
        assert loss.item() == 0
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(("micro", "accumulation"), [(4, 1), (1, 4)])
@pytest.mark.parametrize("positions", ["full", "pose"])
def test_the_loss_of_a_step_is_the_mean_over_its_counted_tokens(
    tmp_path: Path, micro: int, accumulation: int, positions: str
) -> None:
    length = {"seq_len": SEQ, "factor": 4.0, "position_schedule": positions}
    settings = config(
        tmp_path,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        token_budget=2 * 4 * SEQ,
        learning_rate=1e-30,  # the weights stay as they are, so that both steps can be checked
        eval_documents=0,
        **{**ASSISTANT, **(length if positions == "pose" else {})},
    )
    finetune(make_tiny_llama(), make_tokenizer(), chats(), settings)  # the first loss is checked here
    if positions == "full":
        blocks = scheduled(make_tokenizer(), chats(), 8, **ASSISTANT)
        model = patch_model(make_tiny_llama(), "yarn", 2.0)
        assert losses(tmp_path) == pytest.approx(
            [loss_by_hand(model, blocks[i : i + 4]).item() for i in (0, 4)], rel=1e-5
        )


@pytest.mark.parametrize("template", [TAGGED, PLAIN])
def test_a_resumed_run_on_chats_ends_the_same(tmp_path: Path, template: str) -> None:
    make_tiny_llama().save_pretrained(tmp_path / "base")
    given = {**ASSISTANT, "eval_lengths": [64], "token_budget": 8 * 2 * SEQ, "save_steps": 3}

    def run(folder: str, **changes: Any) -> None:
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        finetune(base, make_tokenizer(template), chats(), config(tmp_path / folder, **{**given, **changes}))

    run("straight")
    with killed_at(5):
        run("killed")
    with pytest.raises(ValueError, match=r"assistant_only_loss.*'"):
        run("killed", resume_from_checkpoint=True, assistant_only_loss=False)
    with pytest.raises(ValueError, match="completion_only_loss"):
        run("killed", resume_from_checkpoint=True, completion_only_loss=False)
    run("killed", resume_from_checkpoint=True)
    assert_same_run(tmp_path / "straight", tmp_path / "killed", 8)


def test_stages_and_a_stream_of_rows_read_chats(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = {
        **ASSISTANT,
        "factor": None,
        "stages": ["96:384", "128:512"],
        "eval_documents": 0,
        "per_device_train_batch_size": 1,
    }
    with caplog.at_level(logging.INFO):
        finetune(make_tiny_llama(), make_tokenizer(), Dataset.from_list(chats()), config(tmp_path, **given))
    assert [len(losses(path.parent)) for path in sorted(tmp_path.glob("stage-*/train_log.jsonl"))] == [4, 4]
    assert "the assistant" in caplog.text


def test_prompts_learn_nothing_and_answers_do(tmp_path: Path) -> None:
    """Prompts that cannot be predicted, and answers that can: only where prompts count too does the loss stay."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randint(97, 123, (40, 60), generator=generator).tolist()
    rows = [{"prompt": "".join(map(chr, row)) + "\n", "completion": "yes" * 10} for row in noise]
    given = {"token_budget": 16 * 2 * SEQ, "eval_documents": 0, "learning_rate": 1e-2}
    for name, options in (("answers", {}), ("all", {"completion_only_loss": False})):
        finetune(make_tiny_llama(), make_tokenizer(None), rows, config(tmp_path / name, **given, **options))
    assert losses(tmp_path / "answers")[-1] < 0.3
    assert losses(tmp_path / "all")[-1] > 1


def test_counted_tokens_that_no_change_of_positions_reaches(tmp_path: Path) -> None:
    """All that counts is at the beginning of its block: that positions arrive is seen by the other tokens."""
    rows = [{"messages": turns("a", "bcdef" * 4, "g" * 300)}]
    given = {
        **ASSISTANT,
        "token_budget": 2 * 256,
        "context_length": 256,
        "factor": None,
        "per_device_train_batch_size": 1,
    }
    finetune(make_tiny_llama(), make_tokenizer(), rows * 3, config(tmp_path, **given, eval_documents=0))
    assert len(losses(tmp_path)) == 2


def written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def words(base: Path, source: Path, folder: Path, *flags: str) -> list[str]:
    given = ["finetune", str(base), "--documents", str(source), "--output-dir", str(folder), "--factor", "2"]
    return [*given, "--token-budget", "512", "--eval-documents", "0", *flags]


def said(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    assert main(argv) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hf-posenc: error: ")]
    return line.removeprefix("hf-posenc: error: ")


def test_the_command_trains_on_chats(
    run_base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(TAGGED)
    flags = ["--chat-template-path", str(template), "--assistant-only-loss", "--check-first-loss", "true"]
    argv = words(run_base, written(tmp_path, chats()), tmp_path / "run", *flags)
    with caplog.at_level(logging.INFO, "hf_posenc"):
        assert main(argv) == 0
    assert "same tokens" in caplog.text
    assert "are prompts" in caplog.text
    assert AutoTokenizer.from_pretrained(tmp_path / "run").chat_template == TAGGED
    card = (tmp_path / "run" / "README.md").read_text()
    assert "assistant_only_loss" in card
    blocks = scheduled(make_tokenizer(), chats(), 4, **ASSISTANT)
    model = patch_model(AutoModelForCausalLM.from_pretrained(run_base), "yarn", 2.0)
    assert losses(tmp_path / "run")[0] == pytest.approx(loss_by_hand(model, blocks[:1]).item(), rel=1e-5)
    # As run.toml tells it, and as a stream.
    assert (
        main(
            [
                "finetune",
                str(run_base),
                "--config",
                str(tmp_path / "run/run.toml"),
                "--output-dir",
                str(tmp_path / "again"),
            ]
        )
        == 0
    )
    assert losses(tmp_path / "again") == losses(tmp_path / "run")


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_the_command_trains_on_prompts_with_answers(
    tmp_path: Path, run_base: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = Dataset.from_list([{"id": i, "question": f"What is {i} + {i}? ", "answer": f"{2 * i}."} for i in range(60)])
    source = tmp_path / f"rows.{suffix}"
    {"jsonl": rows.to_json, "csv": rows.to_csv, "parquet": rows.to_parquet}[suffix](str(source))
    found = []
    for name, flags in (
        ("columns", ["--text-field", "question", "answer"]),
        ("template", ["--template", "{question}{answer}"]),
        ("streamed", ["--text-field", "question", "answer", "--streaming"]),
    ):
        assert main(words(run_base, source, tmp_path / name, *flags)) == 0
        found.append(losses(tmp_path / name))
    assert found[0] == found[1]
    assert len(found[2]) == 4
    cards = {name: (tmp_path / name / "README.md").read_text() for name in ("columns", "template")}
    assert "- columns: `question`, `answer`\n" in cards["columns"]
    assert "- template: `'{question}{answer}'`\n" in cards["template"]
    counted = r"- counted in the loss: answers or turns of the assistant, \d\d\.\d % of the tokens\n"
    assert all(re.search(counted, card) for card in cards.values())
    pairs = [{"prompt": row["question"], "completion": row["answer"]} for row in rows]
    model = patch_model(AutoModelForCausalLM.from_pretrained(run_base), "yarn", 2.0)
    expected = loss_by_hand(model, scheduled(make_tokenizer(None), pairs, 1)).item()
    assert found[0][0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("rows", "flags", "message"),
    [
        (chats(2), [], "the documents are chats, and the tokenizer has no chat template, as those of base models."),
        (chats(2), ["--streaming"], "the documents are chats, and the tokenizer has no chat template"),
        (chats(2), ["--chat-template-path", "nowhere.jinja"], "--chat-template-path: there is no file 'nowhere.jinja'"),
        (chats(2), ["--text-field", "mesages"], "unknown column 'mesages'. Did you mean 'messages'?"),
        (
            chats(2),
            ["--completion-only-loss"],
            "--completion-only-loss counts the answers to prompts, and document 0 has",
        ),
        (
            [{"text": "a"}],
            ["--assistant-only-loss"],
            "--assistant-only-loss counts the assistant's turns of chats, and document 0 is",
        ),
        ([{"question": "a", "answer": "b"}], [], "it has: question, answer. Give --text-field question answer."),
        ([{"question": "a", "answer": "b"}], ["--text-field", "a", "b", "c"], "--text-field takes one column"),
        ([{"a": "x"}], ["--template", "{b}"], "unknown column 'b'. Known: a. Give --text-field a."),
        ([{"messages": "hello"}], [], "it has: messages. Column 'messages' holds text. If it is a chat"),
        ([{"messages": [{"user": "hello"}]}], [], "turn 1 in column 'messages' has user, but a message has a role"),
        ([{"messages": []}], [], "holds no text"),
    ],
)
def test_mistakes_are_told_before_weights_are_loaded(
    run_base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    rows: list[dict[str, Any]],
    flags: list[str],
    message: str,
) -> None:
    monkeypatch.setattr("hf_posenc.checkpoint.loading.load_model", lambda *args, **kwargs: pytest.fail("loaded"))
    line = said(capsys, words(run_base, written(tmp_path, rows), tmp_path / "run", *flags))
    assert message in line
    assert "_" not in line.replace(str(tmp_path), "").replace("{% generation %}", "").replace(
        "tokenizer.chat_template", ""
    )
    assert not (tmp_path / "run").exists()


def test_eval_measures_texts_and_says_so_of_chats(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": "a" * 50, "answer": "b" * 50, **chat} for chat in chats(2)]
    argv = ["eval", str(tiny_checkpoint), "--documents", str(written(tmp_path, rows)), "--context-lengths", "64"]
    line = said(capsys, argv)
    assert "holds chats, and texts are measured here" in line
    assert "Name a column of texts with --text-field." in line
    assert main([*argv, "--text-field", "question", "answer", "--hide-progress"]) == 0
    assert main([*argv, "--template", r"{question}\n{answer}", "--hide-progress"]) == 0
