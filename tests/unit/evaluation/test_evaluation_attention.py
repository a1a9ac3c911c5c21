"""Perplexity and the commands with rules that only the attention can do: the numbers, and what records say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from attention_models import IDS, ORIGINAL, sharp_model
from hf_posenc import describe, load_extended, patch_model, save_extended
from hf_posenc.checkpoint.loading import load_model
from hf_posenc.cli.main import main
from hf_posenc.evaluation import perplexity, read_records
from tiny_models import STATIC_METHODS

RULES: dict[str, dict[str, Any]] = {
    "dynamic": {"stage": 32},
    "dynamic_yarn": {"growth": "geometric"},
    "self_extend": {"window": 24},
    "dca": {"sharpen": True},
    "rerope": {"log_n": True},
    "leaky_rerope": {"leak": 4.0},
}
LENGTHS = [32, ORIGINAL, 4 * ORIGINAL]


@pytest.mark.parametrize("method", RULES)
def test_one_pass_chunks_and_a_forward_for_each_length_agree(method: str) -> None:
    document = IDS[0, : 4 * ORIGINAL]
    model = patch_model(sharp_model("Llama"), method, 4, **RULES[method])
    one_pass = perplexity(model, [document], LENGTHS, progress=False)
    chunked = perplexity(model, [document], LENGTHS, prefill_chunk=50, progress=False)
    assert [record.context_length for record in one_pass] == LENGTHS
    for record, other, length in zip(one_pass, chunked, LENGTHS, strict=True):
        with torch.no_grad():
            logits = model(IDS[:, :length], use_cache=False).logits[0, :-1].double()
        alone = math.exp(float(cross_entropy(logits, document[1:length])))
        assert record.perplexity == pytest.approx(alone, rel=1e-5)
        assert other.perplexity == pytest.approx(alone, rel=1e-5)
        assert (record.method, record.factor, record.attn_implementation) == (method, 4.0, "sdpa")
        assert record.options == RULES[method]
        assert record.original_max_position_embeddings == ORIGINAL
    plain = perplexity(sharp_model("Llama"), [document], LENGTHS, progress=False)
    assert one_pass[0].perplexity == pytest.approx(plain[0].perplexity, rel=1e-5 if method.startswith("dyn") else 0.5)
    assert abs(one_pass[-1].perplexity / plain[-1].perplexity - 1) > 1e-4


def test_a_sliding_window_reads_each_window_from_its_start() -> None:
    model = patch_model(sharp_model("Llama"), "dynamic_yarn", 4)
    document = IDS[0, : 5 * ORIGINAL]
    (record,) = perplexity(
        model, [document], [4 * ORIGINAL], "sliding_window", stride=ORIGINAL, max_tokens=5 * ORIGINAL, progress=False
    )
    with torch.no_grad():
        first, second = (
            cross_entropy(
                model(IDS[:, b : b + 4 * ORIGINAL]).logits[0, :-1],
                document[b + 1 :][: 4 * ORIGINAL - 1],
                reduction="none",
            )
            for b in (0, ORIGINAL)
        )
    expected = torch.cat([first, second[-ORIGINAL:]]).double().mean().exp()
    assert record.perplexity == pytest.approx(float(expected), rel=1e-5)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(c) for c in torch.randint(32, 127, (600,), generator=generator).tolist()))
    return path


def evaluated(model: Path, text: Path, output: Path, *words: str) -> list[Any]:
    argv = ["eval", str(model), "--documents", str(text), "--context-lengths", "64", "256", "--hide-progress"]
    assert main([*argv, "--output", str(output), *words]) == 0
    return read_records(output)


def test_eval_measures_every_rule_and_labels_it(
    tiny_checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = evaluated(
        tiny_checkpoint, text, tmp_path / "r.jsonl", "--factor", "4", "--method", "none", "yarn", *RULES
    )
    assert [record.method for record in records[::2]] == ["none", "yarn", *RULES]
    assert {record.attn_implementation for record in records} == {"sdpa"}
    shown = capsys.readouterr().out
    assert "hf_posenc" not in shown.replace("hf-posenc report", "").split("in /")[0]
    assert "dynamic_yarn x4, zero-shot" in shown
    model, tokenizer = load_model(tiny_checkpoint)
    patch_model(model, "dca", 4)
    (_, alone) = perplexity(model, [text.read_text()], [64, 256], tokenizer=tokenizer, progress=False)
    assert [r.perplexity for r in records if r.method == "dca"][1] == alone.perplexity


def test_patch_eval_and_what_replaces_a_loaded_rule(
    tiny_checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "staged"
    words = ["--method", "dynamic_yarn", "--factor", "4"]
    assert main(["patch", str(tiny_checkpoint), str(folder), *words, "--option", "stage=32", "log_n=true"]) == 0
    shown = capsys.readouterr().out
    assert "dynamic_yarn x4: 64 -> 256 tokens\nverified: run by 2 attention layers" in shown
    assert describe(load_extended(folder))["options"] == {"stage": 32, "log_n": True}
    on_base = evaluated(
        tiny_checkpoint, text, tmp_path / "base.jsonl", *words, "--option", "stage=32", "log_n=true"
    ) + evaluated(tiny_checkpoint, text, tmp_path / "yarn.jsonl", "--method", "yarn", "--factor", "4")
    replaced = ["--on-scaled", "replace", "--factor", "4", "--method", "none", "yarn", "none"]
    records = evaluated(folder, text, tmp_path / "folder.jsonl", *replaced)
    assert [record.perplexity for record in records] == [record.perplexity for record in on_base]
    assert [(r.method, r.options) for r in records[::2]] == [
        ("dynamic_yarn", {"stage": 32, "log_n": True}),
        ("yarn", {}),
    ]
    argv = ["eval", str(folder), "--documents", str(text), "--context-lengths", "64", "--method", "yarn"]
    for refused in (argv, ["patch", str(folder), str(tmp_path / "out"), "--method", "yarn"]):
        capsys.readouterr()
        assert main(refused) == 2
        error = capsys.readouterr().err
        assert "(dynamic_yarn," in error
        assert "--on-scaled replace" in error
    assert main(["patch", str(folder), str(tmp_path / "out"), "--method", "yarn", "--on-scaled", "replace"]) == 0
    assert describe(load_extended(tmp_path / "out"))["method"] == "yarn"


def test_a_rule_for_rope_is_not_put_on_weights_of_another_encoding(
    tiny_checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = load_model(tiny_checkpoint)
    folder = str(save_extended(patch_model(model, "alibi"), tmp_path / "alibi", tokenizer))
    measured = ["--documents", str(text), "--context-lengths", "64"]
    yarn = ["--method", "yarn", "--factor", "2", "--on-scaled", "replace"]
    for words in (["eval", folder, *measured, *yarn], ["patch", folder, str(tmp_path / "out"), *yarn]):
        capsys.readouterr()
        assert main(words) == 2
        assert "RoPE," in capsys.readouterr().err
    assert main(["eval", folder, *measured]) == 0


def test_an_option_that_only_some_methods_take_is_refused(
    tiny_checkpoint: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["eval", str(tiny_checkpoint), "--documents", str(text), "--context-lengths", "64", "--method"]
    assert main([*argv, "dynamic_yarn", "yarn", "--option", "stage=32"]) == 2
    error = capsys.readouterr().err
    assert "dynamic_yarn" in error
    assert "--option" in error
    assert main([*argv, "yarn", "--option", "stage=32"]) == 2
    assert "for every --method" not in capsys.readouterr().err


def test_methods_says_what_scope_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "methods"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "scope=sequence: Transformers' own rule, one scale for a whole forward" in shown
    assert "scope=query (the default): stages of `stage` tokens past the original length" in shown
    assert all(name in shown for name in (*RULES, *(key.partition("-")[0] for key in STATIC_METHODS)))
