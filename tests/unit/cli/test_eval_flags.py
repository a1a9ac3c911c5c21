"""What ``hf-posenc eval`` refuses before it loads a model: flags without a use, and wrong numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_posenc.cli.main import main


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--batch-size 4", "--batch-size is for a --protocol that has several windows, not for truncated"),
        ("--protocol sliding_window --batch-size 0", "--batch-size must be a whole number >= 1, got 0"),
        ("--prefill-chunk 0", "--prefill-chunk must be at least 1 token, got 0"),
        ("--stride 64", "--stride is for a --protocol that moves a window, not for truncated"),
        ("--protocol sliding_window --stride 0", "stride must be from 1 to window - 1 = 127, got 0"),
        ("--last-k 5", "--last-k is for a --protocol that scores the last tokens, not for truncated"),
        ("--protocol last_k --last-k 0", "less than the shortest context length, got 0 and 128"),
        ("--min-tokens 64", r"--min-tokens (64) is less than the longest context length (512)"),
        ("--protocol sliding_window --min-tokens 0", "--min-tokens must be at least 1 token, got 0"),
        ("--protocol longlora --stride 64 --cut", "protocol 'longlora' joins all documents: leave --cut"),
        (
            "--protocol pi --stride 9 --max-tokens 100",
            r"--max-tokens (100) must not be less than the longest context length (512)",
        ),
        ("--max-tokens 1k", "--max-tokens is for a --protocol that reads documents to their end, not for truncated"),
        ("--max-documents 0", "--max-documents must be a whole number >= 1, got 0"),
        ("--protocol yarn --bos prepended", "protocol 'yarn' has a rule of its own for BOS tokens"),
        ("--protocol longppl --short-context 0", "--short-context must be at least 1 token, got 0"),
        ("--protocol longppl --short-context 128", "context lengths must be more than 160, got 128"),
        ("--evaluator judge", "--evaluator is for --protocol longppl"),
        ("--samples 3", "--samples is for --tasks; leave it out"),
        ("--tasks passkey --average windows", "--average says how perplexity is measured"),
        ("--tasks passkey --batch-size 2", "--batch-size says how perplexity is measured"),
    ],
)
def test_flags_are_checked_before_a_model_is_loaded(
    flags: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_posenc.checkpoint.loading.load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    (tmp_path / "text.txt").write_text("A text.")
    words = ["eval", "model", "--documents", str(tmp_path / "text.txt"), "--context-lengths", "128", "512"]
    assert main([*words, *flags.split()]) == 2
    assert message in capsys.readouterr().err
