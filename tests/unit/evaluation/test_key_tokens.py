"""LongPPL next to its authors' way of choosing tokens, with full logits; which model chooses; what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from hf_posenc.cli.main import main
from hf_posenc.evaluation import KeyTokens, Record, perplexity, read_records
from hf_posenc.evaluation.key_tokens import short_windows
from hf_posenc.evaluation.windows import Window
from hf_posenc.patching.api import patched
from hf_posenc.reporting.comparable import make_tables
from tiny_llama import make_tiny_tokenizer

Make = Callable[..., LlamaForCausalLM]
ALPHA, BETA, SHORT = 0.02, -4.9, 12  # a random model neither gains nor knows much


@pytest.fixture
def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(1, 128, (length,), generator=generator).tolist() for length in (60, 51)]


@torch.no_grad()
def logits_of(model: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids]), use_cache=False).logits[0]


def restated(model: LlamaForCausalLM, evaluator: LlamaForCausalLM, ids: list[int]) -> tuple[float, int]:
    """PyPI longppl 0.3.0, longppl/longppl.py, find_key_token and compute_longppl, where both read the same tokens."""
    full, row, step = logits_of(evaluator, ids), torch.tensor(ids), SHORT // 4
    keys = []
    for start in range(0, len(ids) - SHORT, step):
        if start + SHORT + step > len(ids):
            step = len(ids) - start - SHORT
        first, stop = start + SHORT, start + SHORT + step
        short = logits_of(evaluator, ids[start:stop])
        loss_full = cross_entropy(full[first - 1 : stop - 1], row[first:stop], reduction="none")
        loss_short = cross_entropy(short[SHORT - 1 : SHORT + step - 1], row[first:stop], reduction="none")
        is_key = torch.logical_and((loss_short - loss_full) > ALPHA, loss_full < -BETA)
        keys += [first + i for i, key in enumerate(is_key) if key]
    losses = cross_entropy(logits_of(model, ids)[:-1], row[1:], reduction="none")
    return float(torch.exp(losses[[key - 1 for key in keys]].mean())), len(keys)


def measure(model: Any, documents: Any, lengths: list[int], **key_tokens: Any) -> list[Record]:
    settings = KeyTokens(**{"alpha": ALPHA, "beta": BETA, "short_context": SHORT, **key_tokens})
    return perplexity(model, documents, lengths, "longppl", key_tokens=settings, progress=False)


@pytest.mark.parametrize("other", [False, True])
def test_longppl_equals_the_authors_procedure(tiny_llama: Make, texts: list[list[int]], other: bool) -> None:
    model = tiny_llama()
    evaluator = tiny_llama(num_hidden_layers=1) if other else None
    records = measure(model, texts[:1], [21, 38, 60], evaluator=evaluator)
    for record in records:
        expected, count = restated(model, evaluator or model, texts[0][: record.context_length])
        assert count > 0
        assert record.perplexity == pytest.approx(expected, rel=1e-5)
        assert record.n_tokens == count
    assert records[-1].n_tokens < 48  # not all of them
    (both,) = measure(model, texts, [51], evaluator=evaluator)
    found = [restated(model, evaluator or model, text[:51]) for text in texts]
    assert both.n_tokens == sum(count for _, count in found)
    assert both.nll_sum == pytest.approx(sum(math.log(value) * count for value, count in found), rel=1e-5)


def test_the_record_says_who_chose_and_reports_do_not_mix(tiny_llama: Make, texts: list[list[int]]) -> None:
    model, evaluator = tiny_llama(), tiny_llama(num_hidden_layers=1)
    with patched(evaluator, "yarn", 4):
        (chosen,) = measure(model, texts, [51], evaluator=evaluator)
        with patched(model, "linear", 2):
            (other,) = measure(model, texts, [51], evaluator=evaluator)
    (own,) = measure(model, texts, [51])
    step = {"alpha": ALPHA, "beta": BETA, "short_context": SHORT, "short_step": 3}
    assert own.key_tokens == {"chosen_by": "the measured model itself", **step}
    assert chosen.key_tokens == {"chosen_by": "LlamaForCausalLM (yarn x4)", **step}
    assert "chosen by LlamaForCausalLM (yarn x4): they gain more than 0.02 nats" in chosen.scored
    assert (other.n_tokens, other.text_hash) == (chosen.n_tokens, chosen.text_hash)
    assert len(make_tables([chosen, other])[0].rows) == 2
    again = measure(model, texts, [51], evaluator=tiny_llama(num_hidden_layers=1))[0]
    other_weights = tiny_llama(num_hidden_layers=1)
    with torch.no_grad():
        other_weights.lm_head.weight.mul_(1.5)  # of the same name
    assert measure(model, texts, [51], evaluator=other_weights)[0].run_key != again.run_key
    assert measure(model, texts, [51], evaluator=tiny_llama(num_hidden_layers=1))[0].run_key == again.run_key
    with patched(model, "linear", 2):
        (mixed,) = measure(model, texts, [51])
    assert [len(table.rows) for table in make_tables([chosen, mixed])] == [1, 1]


def test_without_key_tokens_there_is_no_number(
    tiny_llama: Make, texts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    assert measure(tiny_llama(), texts, [40, 51], alpha=50.0) == []
    assert "longppl at 51 tokens: there is no key token" in caplog.text


def test_the_model_that_chooses_is_no_part_of_other_protocols(
    tiny_llama: Make, texts: list[list[int]], tmp_path: Path
) -> None:
    model, output = tiny_llama(), tmp_path / "r.jsonl"
    (alone,) = perplexity(model, texts, [40], progress=False, output=output)
    chosen = KeyTokens(tiny_llama(num_hidden_layers=1), ALPHA, BETA, SHORT)
    both = perplexity(model, texts, [40], ["truncated", "longppl"], key_tokens=chosen, progress=False, output=output)
    assert both[0] == alone  # not measured again
    make_tables(read_records(output))


def test_the_short_context_fits_the_model(tiny_llama: Make, texts: list[list[int]]) -> None:
    assert [KeyTokens().short_tokens(length) for length in (32768, 8192, 2048, None)] == [4096, 4096, 1024, 4096]
    assert KeyTokens(short_context=7).short_tokens(64) == 7
    assert KeyTokens().alpha == -KeyTokens().beta == 2.0
    assert short_windows(20, 8) == [Window(start, start + 10, start + 8) for start in (2, 4, 6, 8, 10)]
    assert short_windows(13, 8) == [Window(2, 12, 10), Window(4, 13, 12)]
    with pytest.raises(ValueError, match=r"32.*39.*40"):
        measure(tiny_llama(), texts, [40, 50], short_context=None)
    with pytest.raises(ValueError, match=r"short_context.*1.*0"):
        measure(tiny_llama(), texts, [40], short_context=0)
    with pytest.raises(ValueError, match="model's vocabulary"):
        measure(tiny_llama(), texts, [40], evaluator=tiny_llama(vocab_size=100))


def test_the_command_loads_the_model_that_chooses(
    tiny_checkpoint: Path, tiny_llama: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_llama(num_hidden_layers=1).save_pretrained(tmp_path / "judge")
    make_tiny_tokenizer().save_pretrained(tmp_path / "judge")
    (tmp_path / "text.txt").write_text("It is a truth universally acknowledged. " * 20)
    argv = ["eval", str(tiny_checkpoint), "--documents", str(tmp_path / "text.txt"), "--context-lengths", "64", "128"]
    argv += ["--hide-progress", "--output", str(tmp_path / "r.jsonl")]
    flags = ["--alpha", "0.02", "--beta", "-5", "--short-context", "16", "--evaluator", str(tmp_path / "judge")]
    assert main([*argv, "--protocol", "longppl", *flags]) == 0
    records = read_records(tmp_path / "r.jsonl")
    assert [record.key_tokens["chosen_by"] for record in records] == [str(tmp_path / "judge")] * 2
    assert (records[0].key_tokens["alpha"], records[0].key_tokens["beta"]) == (0.02, -5.0)
    assert main([*argv, *flags]) == 2
    assert "--evaluator" in capsys.readouterr().err
    assert main([*argv[:-2], "--protocol", "longppl", "--short-context", "16", "--alpha", "50"]) == 2
    assert "these documents" in capsys.readouterr().err
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens("new")
    tokenizer.save_pretrained(tmp_path / "judge")
    assert main([*argv, "--protocol", "longppl", *flags]) == 2
    assert "another tokenizer" in capsys.readouterr().err
