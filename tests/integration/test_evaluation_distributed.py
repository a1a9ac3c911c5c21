"""``hf-posenc eval`` in two processes on the CPU: the record of one process, to the bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from eval_runs import CLI, MEASURED, TORCHRUN, command, kill_when, records_of, run, write_documents
from hf_posenc.utils.processes import Processes, join_processes


@pytest.mark.slow  # half a minute: four processes that import everything
def test_two_processes_give_the_record_of_one(tmp_path: Path) -> None:
    documents = write_documents(tmp_path / "documents.jsonl", 5)  # the last round has work for one only
    for name, launcher in (("one", CLI), ("two", TORCHRUN)):
        code, out, err = run(command(launcher, documents, tmp_path / f"{name}.jsonl", *MEASURED))
        assert code == 0, err
        assert out.count("sliding_window") == 1  # one table, not one a process
    assert records_of(tmp_path / "two.jsonl") == records_of(tmp_path / "one.jsonl")
    assert len(records_of(tmp_path / "two.jsonl")) == 4
    assert not (tmp_path / "two.jsonl.progress").exists()


@pytest.mark.slow
def test_more_processes_than_documents_and_what_one_process_began(tmp_path: Path) -> None:
    single = write_documents(tmp_path / "single.jsonl", 1)
    several = write_documents(tmp_path / "several.jsonl", 9)
    for documents in (single, several):
        expected = tmp_path / f"expected-{documents.name}"
        assert run(command(CLI, documents, expected, *MEASURED))[0] == 0
        output = tmp_path / f"two-{documents.name}"
        if documents is several:
            kill_when(command(CLI, documents, output, *MEASURED), output.with_name(output.name + ".progress"), 2)
        code, _, err = run(command(TORCHRUN, documents, output, *MEASURED))
        assert code == 0, err
        assert records_of(output) == records_of(expected)
    before = output.read_bytes()
    assert run(command(TORCHRUN, several, output, *MEASURED))[0] == 0
    assert output.read_bytes() == before  # nothing measured twice


@pytest.mark.slow
def test_two_processes_share_prompts(tmp_path: Path) -> None:
    documents = write_documents(tmp_path / "documents.jsonl", 5)
    flags = ["--tasks", "passkey", "--context-lengths", "128", "--depths", "0", "50", "100", "--chat", "off"]
    for name, launcher in (("one", CLI), ("two", TORCHRUN)):
        code, _, err = run(command(launcher, documents, tmp_path / f"{name}.jsonl", *flags))
        assert code == 0, err
    assert records_of(tmp_path / "two.jsonl") == records_of(tmp_path / "one.jsonl")
    assert len(records_of(tmp_path / "two.jsonl")) == 3


UNEQUAL = """
import os, sys
from accelerate import PartialState
from hf_posenc.utils.processes import Processes, leave_processes
PartialState(cpu=True)
both, said = Processes(several=True), []
def work(item):
    if item == 3:
        raise ValueError("no")
    return item * item
for step in (lambda: list(both.share([1, 2, 5], work)), lambda: list(both.share([1, 3], work)),
             lambda: both.agree([os.environ["RANK"]]), lambda: both.agree(["same"])):
    try:
        said.append(str(step()))
    except (ValueError, RuntimeError) as error:
        said.append(f"{type(error).__name__}: {error}"[:72])
open(f"{sys.argv[1]}/{os.environ['RANK']}", "w").write("\\n".join(said))
leave_processes()
"""


@pytest.mark.slow
def test_a_failure_in_one_process_stops_all_and_all_must_do_the_same(tmp_path: Path) -> None:
    script = tmp_path / "unequal.py"
    script.write_text(UNEQUAL)
    code, _, err = run([sys.executable, *TORCHRUN[: -len(CLI)], str(script), str(tmp_path)])
    assert code == 0, err
    said = [(tmp_path / str(rank)).read_text().splitlines() for rank in (0, 1)]
    assert [lines[0] for lines in said] == ["[(1, 1), (2, 4), (5, 25)]"] * 2
    assert [lines[1] for lines in said] == [
        "RunStoppedError: process 1 stopped this run. ValueError: no",
        "ValueError: no",
    ]
    assert all(lines[2].startswith("InvalidRequestError: the processes do not measure the same") for lines in said)
    assert [lines[3] for lines in said] == ["None"] * 2


def test_a_single_process_talks_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_posenc.utils.processes.PartialState", None)  # not even imported
    alone = Processes()
    assert list(alone.share([3, 4], lambda item: item + 1)) == [(3, 4), (4, 5)]
    assert (alone.gather(1), alone.from_main(lambda: 2), alone.is_main) == ([1], 2, True)
    alone.agree([json.dumps(1)])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join_processes("auto") is False
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"'auto'.*GPU"):
        join_processes("auto")
