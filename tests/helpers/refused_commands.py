"""A command that must fail as a mistake of the user does."""

from __future__ import annotations

import pytest

from hf_posenc.cli.main import main


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """Run a command that must fail as a user's mistake does, and return its one message."""
    assert main([str(word) for word in argv]) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("hf-posenc: error: ")]
    assert len(lines) == 1
    assert "Traceback" not in captured.err
    return lines[0]
