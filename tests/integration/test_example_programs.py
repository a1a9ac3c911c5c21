"""The programs of examples/ run, and the notebooks that are shown are those of their sources."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from folders import ROOT
from hf_posenc.assets import tiny_model_path
from notebooks import EXAMPLES, execute, read_source, sources

SOURCES = sources()
IN_SECONDS = ("encodings_by_hand",)  # these run in the fast suite, the others take a minute each
NUMBER = r"-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
# Not after a letter or digit, as inside addresses and the base64 of pictures.
ABSOLUTE_PATH = re.compile(
    r"(?<![A-Za-z0-9+])/(?:home|root|Users|tmp|private|work|workspace|usr|opt|var|mnt|srv|etc)/[^\s\"']*"
    r"|(?<![A-Za-z0-9+/])[A-Z]:(?:\\\\)[^\s\"']+"
)


def shown(source: Path) -> NotebookNode:
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def printed(notebook: NotebookNode) -> str:
    """What the cells print, without what the model writes, which one rounding can change from a word on."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    return re.sub(r'".*"', "...", text)


def numbers_of(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(NUMBER, text)]


def environment() -> dict[str, str]:
    """For processes that find this checkout, and its commands, from any folder."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_there_are_three_notebooks() -> None:
    names = [source.stem for source in SOURCES]
    assert names == ["encodings_by_hand", "extend_and_measure", "fine_tune_on_your_text"]
    assert sorted(path.stem for path in EXAMPLES.glob("*.ipynb")) == names


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_notebook_has_the_cells_of_its_source(source: Path) -> None:
    notebook = shown(source)
    nbformat.validate(notebook)
    cells = [(cell.id, cell.cell_type, cell.source) for cell in notebook.cells]
    assert cells == [(cell.id, cell.cell_type, cell.source) for cell in read_source(source).cells], (
        "run scripts/notebooks"
    )


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_notebook_was_executed_whole_and_holds_nothing_of_the_machine(source: Path) -> None:
    notebook = shown(source)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert {output.output_type for output in outputs} == {"stream", "display_data"}
    assert {output.name for output in outputs if output.output_type == "stream"} == {"stdout"}
    raw = source.with_suffix(".ipynb").read_text(encoding="utf-8")
    assert ABSOLUTE_PATH.findall(raw) == []
    assert str(ROOT) not in raw
    assert str(Path.home()) + os.sep not in raw
    assert source.with_suffix(".ipynb").stat().st_size < 500_000


@pytest.mark.parametrize(
    "source",
    [pytest.param(one, id=one.stem, marks=[] if one.stem in IN_SECONDS else [pytest.mark.slow]) for one in SOURCES],
)
def test_a_notebook_runs_and_gives_what_is_shown(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for the kernel
    ran, kept = printed(execute(source, tmp_path)), printed(shown(source))
    assert re.sub(NUMBER, "N", ran).split() == re.sub(NUMBER, "N", kept).split()
    # Other CPUs round float32 otherwise, and training adds to it: perplexities and losses differ by less than 5 %.
    assert numbers_of(ran) == pytest.approx(numbers_of(kept), rel=0.05, abs=1e-3)


@pytest.mark.parametrize("path", ["/home/me/x", "/tmp/tmpab12/out", "file:///srv/project/x", "C:\\\\Users\\\\me"])
def test_absolute_paths_are_found(path: str) -> None:
    assert ABSOLUTE_PATH.search(f'"saved to {path}\\n"')
    assert not ABSOLUTE_PATH.search("https://example.org/home/me and base64+/tmp/Ab/ and outputs/tmp/x")


@pytest.mark.slow
def test_the_example_of_trl_trains_measures_saves_and_loads(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "train_with_trl.py"), "--output-dir", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"(\d+) tokens: perplexity ([\d.]+) before training, ([\d.]+) after", done.stdout)
    assert [int(length) for length, _, _ in found] == [256, 1024]
    assert all(float(after) < float(before) for _, before, after in found)
    assert "loaded: yarn, factor 4, 256 to 1024 tokens" in done.stdout
    assert "context_extension.json" in {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.slow
def test_the_example_of_several_gpus_trains_in_two_processes(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"The {n}th letter came to her sister on a morning in May. " for n in range(600)))
    flags = ["--device", "cpu", "--seq-len", "256", "--token-budget", "2048", "--eval-documents", "0"]
    flags += ["--main-process-port", "29433"]
    command = [str(EXAMPLES / "several_gpus.sh"), str(tiny_model_path()), str(text), str(tmp_path / "out"), "2", *flags]
    # accelerate shares out no weights on a CPU, so the processes hold the whole model.
    by = {**environment(), "ACCELERATE_CONFIG": "multi_gpu"}
    done = subprocess.run(command, cwd=tmp_path, env=by, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "out/train_log.jsonl").read_text().splitlines()]
    assert [line["tokens_trained"] for line in lines] == [512, 1024, 1536, 2048]  # two blocks a step: two processes
    assert (tmp_path / "out/context_extension.json").is_file()


def test_the_example_of_several_gpus_says_how_it_is_used() -> None:
    done = subprocess.run([EXAMPLES / "several_gpus.sh"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "usage:" in done.stderr


def test_the_readme_names_every_example() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for path in EXAMPLES.iterdir():
        if path.suffix in (".py", ".ipynb", ".sh"):
            assert f"({path.name})" in text, path.name
