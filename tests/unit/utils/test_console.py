"""What is shown while a command works: an estimate, lines in a log file, a bar on a terminal, and no other bars."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from hf_posenc import finetune, patch_model, perplexity, save_extended
from hf_posenc.checkpoint.loading import load_model
from hf_posenc.cli.main import main
from hf_posenc.utils import console
from hf_posenc.utils.console import LONG, Progress, without_weight_bars
from tiny_runs import config, make_tokenizer

Build = Callable[..., LlamaForCausalLM]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the time that Progress reads, in seconds."""
    now = [0.0]
    monkeypatch.setattr(console.time, "perf_counter", lambda: now[0])
    return lambda seconds: now.__setitem__(0, seconds)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[tuple[str, str]]]:
    caplog.set_level(logging.INFO, "hf_posenc.utils.console")
    return lambda: [(record.levelname, record.getMessage()) for record in caplog.records]


def test_the_estimate_is_from_the_first_part_and_said_once(clock: Any, said: Any) -> None:
    with Progress("perplexity", 1000, shorter="less") as progress:
        clock(2.0)
        progress.update(100)
        clock(4.0)
        progress.update(100)
        assert said() == [("INFO", "perplexity: about 18 s on this machine, by the first 100 of 1,000 tokens")]


def test_short_work_is_not_announced(clock: Any, said: Any) -> None:
    with Progress("perplexity", 1000) as progress:
        clock(0.1)
        progress.update(100)
    assert said() == []


def test_what_was_done_before_takes_no_time(clock: Any, said: Any) -> None:
    with Progress("training", 100, unit="steps", done=90) as progress:
        clock(10.0)
        progress.update()
    assert said() == [("INFO", "training: about 1.5 min on this machine, by the first 1 of 100 steps")]


@pytest.mark.parametrize(("seconds", "advised"), [(LONG / 9 * 0.99, False), (LONG / 9 * 1.01, True)])
def test_above_ten_minutes_it_says_what_would_be_shorter(clock: Any, said: Any, seconds: float, advised: bool) -> None:
    with Progress("retrieval", 10, unit="prompts", shorter="fewer --samples") as progress:
        clock(seconds)
        progress.update()
        clock(2 * seconds)
        progress.update()
    warnings = [text for level, text in said() if level == "WARNING"]
    assert warnings == (["retrieval takes long on this machine. Shorter: fewer --samples."] if advised else [])


def test_in_a_log_file_there_is_a_line_now_and_then(clock: Any, said: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("perplexity", 1000) as progress:
        for second in range(1, 100):
            clock(float(second))
            progress.update(10)
    assert [text for _, text in said()] == [
        "perplexity: about 1.6 min on this machine, by the first 10 of 1,000 tokens",
        "perplexity: 320 of 1,000 tokens, about 68 s left",
        "perplexity: 630 of 1,000 tokens, about 37 s left",
        "perplexity: 940 of 1,000 tokens, about 6.0 s left",
    ]
    assert capsys.readouterr().err == ""  # no states of a bar


def test_on_a_terminal_there_is_a_bar_and_no_such_lines(clock: Any, said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress("perplexity", 1000) as progress:
        for second in range(1, 100):
            clock(float(second))
            progress.update(10)
    assert len(said()) == 1
    assert "perplexity:" in terminal.getvalue()
    assert "\r" in terminal.getvalue()


@pytest.mark.parametrize("shown", [True, False])
def test_nothing_is_shown_if_not_requested_or_nothing_is_to_do(clock: Any, said: Any, shown: bool) -> None:
    with Progress("perplexity", 1000, shown=shown, done=1000 if shown else 0) as progress:
        clock(100.0)
        progress.update(1 if not shown else 0)
    assert said() == []


def test_weights_are_loaded_and_written_without_bars(
    tiny_llama: Build, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    drawn = transformers_logging.is_progress_bar_enabled()
    model = patch_model(tiny_llama(), "yarn", factor=4)
    capfd.readouterr()
    save_extended(model, tmp_path / "saved", make_tokenizer())
    load_model(tmp_path / "saved", device="cpu")
    assert capfd.readouterr().err == ""
    assert transformers_logging.is_progress_bar_enabled() == drawn
    tiny_llama().save_pretrained(tmp_path / "plain")
    assert ("Writing model" in capfd.readouterr().err) == drawn  # what this would look like otherwise


def test_the_bars_of_downloads_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled

    hidden = are_progress_bars_disabled()
    with without_weight_bars():
        assert not transformers_logging.is_progress_bar_enabled()
        assert are_progress_bars_disabled() == hidden
    assert are_progress_bars_disabled() == hidden


def test_texts_beyond_the_tokenizers_length_are_no_warning(
    tiny_llama: Build, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = 8
    documents = [" ".join(["w1 w2 w3 w4"] * 200)] * 4
    capfd.readouterr()
    perplexity(tiny_llama(), documents, [16], tokenizer=tokenizer)
    finetune(tiny_llama(), tokenizer, documents, config(tmp_path, eval_documents=0, token_budget=512))
    assert "Token indices sequence length is longer" not in capfd.readouterr().err


def test_a_run_in_a_log_file_draws_no_bar(
    tmp_path: Path, tiny_checkpoint: Path, capfd: pytest.CaptureFixture[str], said: Any
) -> None:
    """The whole command, its output in a file: losses and lines, and nothing that is drawn over."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    words = ["finetune", str(tiny_checkpoint)]
    words += ["--documents", str(tmp_path / "text.txt"), "--output-dir", str(tmp_path / "run"), "--factor", "4"]
    words += ["--token-budget", "1024", "--device", "cpu", "--save-steps", "2", "--warmup-steps", "0"]
    capfd.readouterr()
    assert main(words) == 0
    out, err = capfd.readouterr()
    assert "'loss':" in out
    for drawn in ("\r", "%|", "Writing model shards", "Loading weights"):
        assert drawn not in out + err
