"""``hf-posenc eval`` killed at several moments, half a line written too, and finished: the same record to the bit."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from eval_runs import CLI, MEASURED, command, kill_when, lines, records_of, run, start, write_documents

# Dies in the middle of a write: the kernel writes what fits below the limit, and the rest is a deadly signal.
DYING = """
import os, resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
def limit(event, args):
    if event == "open" and str(args[0]) == {path!r} and "a" in str(args[1]):
        resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize({path!r}) + 40,) * 2)
sys.addaudithook(limit)
from hf_posenc.cli.main import main
sys.exit(main())
"""


def die_in_the_line_after(words: list[str], path: Path) -> None:
    """Start, and die when 40 bytes of the next line of a file are written."""
    whole = lines(path)
    process: subprocess.Popen[str] = start([words[0], "-c", DYING.format(path=str(path)), *words[3:]])
    _, err = process.communicate(timeout=240)
    assert process.returncode == -signal.SIGXFSZ, err
    assert lines(path) == whole
    assert len(path.read_bytes().rpartition(b"\n")[2]) == 40


@pytest.mark.slow
def test_an_evaluation_killed_four_times_ends_with_the_same_record(tmp_path: Path) -> None:
    documents = write_documents(tmp_path / "documents.jsonl", 24)
    whole, output = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    progress = output.with_name("killed.jsonl.progress")
    code, _, err = run(command(CLI, documents, whole, *MEASURED))
    assert code == 0, err
    words = command(CLI, documents, output, *MEASURED)

    kill_when(words, progress, 3)  # in the first pass
    assert lines(output) == 0
    done = lines(progress)
    kill_when(words, progress, done + 2)  # again, a little further
    die_in_the_line_after(words, progress)
    kill_when(words, output, 2)  # truncated is done, the sliding window is not
    assert 2 <= lines(output) < 4
    die_in_the_line_after(words, output)
    assert lines(output) < 4
    code, _, err = run(words)
    assert code == 0, err
    assert records_of(output) == records_of(whole)
    assert len(records_of(output)) == 4
    assert not progress.exists()
