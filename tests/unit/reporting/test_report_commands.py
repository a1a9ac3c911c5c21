"""The commands a report gives: run, they measure the same numbers again."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, PreTrainedModel

from hf_posenc.checkpoint.loading import load_model
from hf_posenc.cli.main import main
from hf_posenc.evaluation import KeyTokens, Record, perplexity, read_records
from hf_posenc.evaluation.model_facts import model_facts
from hf_posenc.evaluation.records import read_retrieval_records
from hf_posenc.patching.api import patched
from hf_posenc.reporting import report
from hf_posenc.reporting.commands import make_commands
from hf_posenc.retrieving.measuring_retrieval import retrieval
from report_records import make_record, make_retrieval_record

TEXT = "".join(f"Line {n} of a text that is long enough, {n * n} characters or so. " for n in range(40))


def run(command: str, **values: str) -> None:
    """Run a command as a shell would, with the names in capitals replaced by what they mean."""
    program, *words = shlex.split(command, comments=True)
    assert program == "hf-posenc"
    assert main([*(values.get(word, word) for word in words), "--hide-progress"]) == 0


def keys(records: Any) -> list[tuple[str, float]]:
    return sorted((record.run_key, record.nll_sum) for record in records)


def test_a_typed_command_is_kept_and_gives_the_same_records(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a text.txt").write_text(TEXT)
    words = ["eval", str(tiny_checkpoint), "--documents", "../a text.txt", "--context-lengths", "32", "64", "0.1k"]
    words += ["--method", "none", "yarn", "--factor", "2", "--option", "beta_fast=16", "--output", "r.jsonl"]
    (tmp_path / "one").mkdir()
    monkeypatch.chdir(tmp_path / "one")
    assert main([*words, "--hide-progress"]) == 2  # --option is not for none: nothing was measured
    words = [word for word in words if word not in ("none", "0.1k")]
    assert main([*words, "--hide-progress"]) == 0
    first = read_records("r.jsonl")
    assert {record.command for record in first} == {shlex.join(["hf-posenc", *words, "--hide-progress"])}
    assert "'../a text.txt'" in first[0].command
    (typed,) = make_commands(first)[0]
    (tmp_path / "two").mkdir()
    monkeypatch.chdir(tmp_path / "two")
    run(typed.removesuffix(" --hide-progress"))
    assert keys(read_records("r.jsonl")) == keys(first)
    page = report(first, tmp_path / "page", command="hf-posenc report r.jsonl").html.read_text()
    assert "--option beta_fast=16" in page
    assert "<code>hf-posenc report r.jsonl</code>" in page


# What is measured in Python, and how many commands it takes.
CASES: dict[str, tuple[dict[str, Any], list[dict[str, Any]], int]] = {
    "truncated": ({}, [{}, {"method": "linear", "factor": 2.5}, {"method": "yarn", "factor": 2.5}], 1),
    "options": (
        {},
        [{"method": "yarn", "factor": 4, "ramp": "paper", "truncate": False, "attention_factor": 1.125}],
        1,
    ),
    "two factors": ({}, [{}, {"method": "ntk", "factor": 2}, {"method": "ntk", "factor": 3}], 2),
    "other original": ({}, [{"method": "yarn", "factor": 4, "original_max_position_embeddings": 32}], 1),
    "strides": ({"protocol": "sliding_window", "stride": 7, "max_tokens": 200}, [{}], 1),
    "default strides": ({"protocol": "sliding_window"}, [{}], 1),
    "same tokens": ({"protocol": "same_tokens", "max_tokens": 300}, [{}, {"method": "yarn", "factor": 2}], 1),
    "means of windows": ({"protocol": "same_tokens", "average": "windows"}, [{}], 1),
    "yarn": ({"protocol": "yarn"}, [{}], 1),
    "govreport": ({"protocol": "yarn_govreport", "stride": 16}, [{}], 1),
    "weighed": ({"protocol": ["pose", "pi"], "stride": 16}, [{}], 2),
    "stream": ({"protocol": "longlora", "stride": 20}, [{}], 1),
    "end": ({"protocol": "rerope", "last_k": 20}, [{}], 1),
    "last": ({"protocol": "last_k", "last_k": 9, "bos": "prepended", "label": "two words"}, [{}], 1),
}


def test_a_longppl_command_says_how_tokens_are_chosen(
    tiny_checkpoint: Path, tiny_llama: Callable[..., LlamaForCausalLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    tiny_llama(num_hidden_layers=1).save_pretrained("judge")
    model, tokenizer = load_model(tiny_checkpoint)
    tokenizer.save_pretrained("judge")
    judge, _ = load_model("judge")

    def measured(**chosen: Any) -> list[Record]:
        settings: dict[str, Any] = {"key_tokens": KeyTokens(**chosen), "tokenizer": tokenizer, "progress": False}
        return perplexity(model, [TEXT], [64, 128], "longppl", **settings)

    records = [
        *measured(evaluator=judge, alpha=0.01, beta=-9.5, short_context=12),
        *measured(alpha=0.01, beta=-9.0, short_context=16),
    ]
    _, commands = make_commands(records)
    assert len(records) == 4
    assert len(commands) == 2
    assert "--evaluator judge --alpha 0.01 --beta -9.5 --short-context 12" in commands[0]
    assert "--evaluator" not in commands[1]
    for command in commands:
        run(command, DOCUMENTS="text.txt")
    assert keys(read_records("results.jsonl")) == keys(records)
    with patched(judge, "yarn", 2):
        (command,) = make_commands(measured(evaluator=judge, alpha=0.01, beta=-9.5))[1]
    assert "--evaluator EVALUATOR" in command
    assert command.endswith("  # EVALUATOR: folder of judge (yarn x2)")
    plain = measured(alpha=-50.0, beta=-50.0)
    assert "--short-context" not in make_commands(plain)[1][0]  # as by default


@pytest.mark.parametrize("case", CASES)
def test_a_command_put_together_measures_the_same(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    settings, rows, count = CASES[case]
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    model, tokenizer = load_model(tiny_checkpoint)
    records: list[Record] = []
    for row in rows:
        request = dict(row)
        if method := request.pop("method", None):
            with patched(model, method, **request):
                records += perplexity(model, [TEXT], [32, 64], tokenizer=tokenizer, progress=False, **settings)
        else:
            records += perplexity(model, [TEXT], [32, 64], tokenizer=tokenizer, progress=False, **settings)
    typed, made = make_commands(records)
    assert typed == []
    assert len(made) == count
    for command in made:
        run(command, DOCUMENTS="text.txt")
    assert keys({one.run_key: one for one in read_records("results.jsonl")}.values()) == keys(records)


def test_a_retrieval_command_put_together_asks_the_same(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, tokenizer = load_model(tiny_checkpoint)
    request: dict[str, Any] = {"tasks": ["passkey", "cwe"], "context_lengths": [2000], "depths": [0, 100], "samples": 2}
    novel = "".join(chr(32 + ord(character) % 95) for character in TEXT * 2)
    records = retrieval(model, tokenizer, documents=[novel], progress=False, **request)
    _, (command,) = make_commands(records)
    (tmp_path / "novel.txt").write_text(novel)
    run(command + " --documents novel.txt")
    assert keys(read_retrieval_records("results.jsonl")) == keys(records)
    (command,) = make_commands([dataclasses.replace(record, seed=record.seed + 5) for record in records])[1]
    assert command.endswith("# seeds began at 5: from Python, retrieval(..., seed=5)")


def test_trained_models_and_mixed_records_have_their_own_lines() -> None:
    trained = [make_record("yarn", n, 30.0, tokens_trained=300_000, model="mine") for n in (128, 256)]
    typed = make_record("none", 256, command="hf-posenc eval mine --method none")
    answered = make_retrieval_record("none", 256, 50.0, 0, True)
    was_typed, made = make_commands([typed, *trained, answered, typed])
    assert was_typed == ["hf-posenc eval mine --method none"]
    measured, searched = (line.split() for line in made)
    assert measured[2:5] == ["TRAINED", "--documents", "DOCUMENTS"]
    assert "--method" not in measured
    assert measured[measured.index("--model-name") + 1] == "mine"
    assert searched[2:5] == ["tiny", "--tasks", "passkey"]


def test_each_model_has_a_command_of_its_own() -> None:
    """The unpatched records of two models were in one command, of the last of them."""
    records = [make_record(method, 256, model=model) for model in ("one", "two") for method in ("none", "yarn")]
    commands = [line.split() for line in make_commands(records)[1]]
    assert [words[2] for words in commands] == ["one", "two"]
    assert [words[words.index("--method") + 1 :][:2] for words in commands] == [["none", "yarn"]] * 2


def test_the_command_and_the_rope_are_no_part_of_the_key(
    tiny_llama: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    model, path = tiny_llama(), tmp_path / "r.jsonl"
    (plain,) = perplexity(model, [torch.arange(1, 20)], [10], progress=False)
    (typed,) = perplexity(model, [torch.arange(1, 20)], [10], progress=False, command="hf-posenc eval x", output=path)
    assert typed.run_key == plain.run_key
    assert (plain.command, typed.command) == ("", "hf-posenc eval x")
    assert read_records(path) == [typed]
    values = {name: value for name, value in json.loads(typed.to_json()).items() if name not in ("rope", "command")}
    path.write_text(json.dumps(values) + "\n")
    (older,) = read_records(path)
    assert (older.rope, older.command, older.run_key) == ({}, "", typed.run_key)


def test_records_say_what_the_frequencies_were_as_the_model_was_trained(
    tiny_llama: Callable[..., LlamaForCausalLM],
) -> None:
    def rope_facts(model: PreTrainedModel) -> dict[str, Any]:
        return dict(model_facts(model, None, 0, "")["rope"])

    model, plain = tiny_llama(), {"rotary_dim": 16, "rope_theta": 10000.0, "unrotated_pairs": 0}
    assert rope_facts(model) == plain
    with patched(model, "abf", 4, rope_theta=500000.0):
        assert rope_facts(model) == plain
    with patched(model, "dynamic_yarn", 4):
        assert rope_facts(model) == plain
    assert rope_facts(GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32))) == {}
