"""``hf-posenc fit`` as a user runs it, on the tiny pretrained model: 256 to 1024 tokens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from eval_runs import CLI, run, start
from hf_posenc.assets import HELD_OUT_NOVEL, load_novel, tiny_model_path
from hf_posenc.checkpoint.extended import load_extended
from hf_posenc.checkpoint.manifest import read_manifest
from hf_posenc.cli.main import main
from hf_posenc.evaluation import read_records
from refused_commands import refused

TINY = str(tiny_model_path())
IDS = torch.arange(3, 1003)[None]


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("books") / "books.jsonl"
    texts = [load_novel(name)[20000:25000] for name in ("emma", HELD_OUT_NOVEL)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def words(books: Path, output: Path, *flags: object) -> list[str]:
    given = ["fit", TINY, "--documents", str(books), "--context-length", "1024", "--output", str(output)]
    given += ["--dtype", "float32", "--device", "cpu", "--hide-progress", "--teacher", "rerope"]
    given += [] if "--adapt" in flags else ["--layers", "3"]
    return [*given, *map(str, flags)]


@pytest.fixture(scope="module")
def fitted(books: Path) -> Path:
    """The folder of a fit of ten steps, whose output is in ``said``."""
    output = books.with_name("longer")
    flags = ("--steps", 10, "--compare", "none", "ntk", "yarn", "--held-out-numbers", 2)
    with books.with_name("said").open("w") as said, redirect_stdout(said):
        assert main(words(books, output, *flags)) == 0
    return output


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_what_is_saved(fitted: Path, books: Path) -> None:
    assert not fitted.with_name("longer.work").exists()
    manifest, config = read_manifest(fitted), json.loads((fitted / "config.json").read_text())
    assert manifest is not None
    assert (manifest["method"], manifest["factor"], manifest["base_model"]) == ("fitted", 4, TINY)
    on = manifest["fitted_on"]
    assert (on["teacher"], on["steps"], on["tokens"], on["seed"]) == ("rerope", 10, 1024, 0)
    rope = config["rope_parameters"]
    assert rope["rope_type"] == "longrope"
    assert rope["long_factor"] == rope["short_factor"] == manifest["options"]["long_factor"]
    assert config["max_position_embeddings"] == 1024
    # The weights are the checkpoint's, in its dtype.
    base = AutoModelForCausalLM.from_pretrained(TINY)
    saved = AutoModelForCausalLM.from_pretrained(fitted)
    assert saved.dtype == base.dtype
    assert all(torch.equal(one, saved.state_dict()[name]) for name, one in base.state_dict().items())
    records = read_records(fitted / "results.jsonl")
    assert [(record.method, record.context_length) for record in records] == [
        *(("fitted", length) for length in (64, 128, 256, 512, 1024)),
        *(("none", length) for length in (64, 128, 256)),
        *((method, length) for method in ("ntk", "yarn") for length in (64, 128, 256, 512, 1024)),
    ]


def test_results_of_an_earlier_request_are_left_out(fitted: Path, books: Path, tmp_path: Path) -> None:
    """One that was stopped before it was saved left its rows in the work folder."""
    work = tmp_path / "longer.work"
    work.mkdir()
    (work / "results.jsonl").write_bytes((fitted / "results.jsonl").read_bytes())
    flags = ("--steps", 1, "--compare", "yarn", "--held-out-numbers", 0)
    assert main(words(books, tmp_path / "longer", *flags)) == 0
    records, manifest = read_records(tmp_path / "longer" / "results.jsonl"), read_manifest(tmp_path / "longer")
    assert manifest is not None
    assert [record.method for record in records] == ["fitted"] * 5 + ["yarn"] * 5
    assert {tuple(record.options["long_factor"]) for record in records[:5]} == {
        tuple(manifest["options"]["long_factor"])
    }


def test_another_original_length(books: Path, tmp_path: Path) -> None:
    output = tmp_path / "longer"
    flags = ("--steps", 1, "--held-out", 0, "--original-max-position-embeddings", 128)
    assert main(words(books, output, *flags)) == 0
    config, manifest = json.loads((output / "config.json").read_text()), read_manifest(output)
    assert manifest is not None
    assert (manifest["original_max_position_embeddings"], manifest["factor"]) == (128, 8)
    rope = config["rope_parameters"]
    assert (rope["original_max_position_embeddings"], config["max_position_embeddings"]) == (128, 1024)


def test_what_is_said(fitted: Path) -> None:
    said = fitted.with_name("said").read_text()
    assert said.startswith("rerope reads 1 text once, then 10 steps on attention_matching: about ")
    divisors = next(line for line in said.splitlines() if line.startswith("divisors: "))
    manifest = read_manifest(fitted)
    assert manifest is not None
    assert divisors.split()[1:] == [f"{value:.3g}" for value in manifest["options"]["long_factor"]]
    for part in ("attention factor: ", "hidden numbers found in 1024 tokens:", "  fitted: ", "fitted and measured in"):
        assert part in said
    assert f"{fitted}," in said


def test_plain_transformers_reads_what_patch_model_makes(fitted: Path, tmp_path: Path) -> None:
    """In a process that never imports hf_posenc; and ``patch`` with the folder as the source of the rule."""
    code = (
        "import sys, torch; from transformers import AutoModelForCausalLM; torch.set_num_threads(1)\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(fitted)!r}, dtype=torch.float32).eval()\n"
        "assert 'hf_posenc' not in sys.modules\n"
        f"torch.save(model(torch.arange(3, 1003)[None]).logits, {str(tmp_path / 'logits.pt')!r})\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    plain = torch.load(tmp_path / "logits.pt")
    output = tmp_path / "patched"
    assert main(["patch", TINY, str(output), "--method", "fitted", "--option", f"source={fitted}"]) == 0
    patched = loaded(output)
    with torch.no_grad():
        torch.testing.assert_close(patched(IDS).logits, plain, rtol=1e-4, atol=1e-4)
        assert float((loaded(Path(TINY))(IDS).logits - plain).abs().max()) > 0.1
    rotary = [model.get_decoder().rotary_emb for model in (patched, loaded(fitted))]
    assert torch.equal(rotary[0].inv_freq, rotary[1].inv_freq)


def test_eval_takes_the_folder_as_a_source(fitted: Path, books: Path, tmp_path: Path) -> None:
    flags = ["--documents", str(books), "--max-documents", "1", "--context-lengths", "1024", "--hide-progress"]
    flags += ["--dtype", "float32", "--protocol", "truncated"]
    source = ["--method", "fitted", "--option", f"source={fitted}"]
    assert main(["eval", TINY, *source, *flags, "--output", str(tmp_path / "live.jsonl")]) == 0
    assert main(["eval", str(fitted), *flags, "--output", str(tmp_path / "saved.jsonl")]) == 0
    (live,), (saved,) = (read_records(tmp_path / name) for name in ("live.jsonl", "saved.jsonl"))
    assert live.perplexity == pytest.approx(saved.perplexity, rel=1e-6)
    assert (live.method, live.factor) == (saved.method, saved.factor) == ("fitted", 4)


def test_a_dry_run_writes_nothing(books: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(books, tmp_path / "longer", "--dry-run")) == 0
    assert "rerope reads 1 text once, then 100 steps on attention_matching" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_budget_that_is_too_short(books: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, *words(books, tmp_path / "longer", "--budget", "1s", "--compare", "ntk"))
    assert "a budget of 1.0 s is too short: 20 steps and the measurement of 2 rules need" in message
    assert not (tmp_path / "longer").exists()


@pytest.mark.parametrize("name", ["config.json", "notes.txt"])
def test_a_folder_with_other_files_is_refused(
    books: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / name).write_text("mine")
    assert "hf-posenc;" in refused(capsys, *words(books, tmp_path))
    assert (tmp_path / name).read_text() == "mine"


def test_a_work_folder_with_other_files_is_refused(
    books: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is removed at the end."""
    work = tmp_path / "longer.work"
    work.mkdir()
    (work / "thesis.txt").write_text("mine")
    message = refused(capsys, *words(books, tmp_path / "longer", "--dry-run"))
    assert "longer.work' holds thesis.txt" in message
    assert (work / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--context-length", "4k"], "documents that have as many, and the longest of the 2 given has"),
        (["--objectives", "needels"], "Did you mean 'needles'"),
        (["--teacher", "alibi"], "--teacher must be a method for RoPE, got 'alibi'"),
        (["--context-length", "256"], "--context-length must be longer than the original length, 256 tokens"),
        (["--teacher-option", "chunk=3"], "takes no option 'chunk'"),
    ],
)
def test_mistakes(
    books: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert message in refused(capsys, *words(books, tmp_path / "longer", *flags))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_killed_fit_ends_at_the_same_divisors(books: Path, tmp_path: Path) -> None:
    """All with one thread: the order in which numbers are added depends on how many there are."""

    def command(name: str) -> list[str]:
        return [sys.executable, *CLI, *words(books, tmp_path / name, "--steps", 25, "--held-out", 0)]

    code, _, err = run(command("whole"))
    assert code == 0, err
    process, file = start(command("killed")), tmp_path / "killed.work" / "fit_state-0.json"
    deadline = time.monotonic() + 240
    while not file.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert 5 <= len(json.loads(file.read_text())["history"]) < 25
    assert not (tmp_path / "killed").exists()
    code, _, err = run(command("killed"))
    assert code == 0, err
    one, other = (read_manifest(tmp_path / name) for name in ("whole", "killed"))
    assert one is not None
    assert other is not None
    assert one["options"] == other["options"]
    assert one["fitted_on"] == other["fitted_on"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed", "whole"]


@pytest.mark.parametrize("as_adapter", [False, True])
def test_changed_weights_are_saved_in_the_model_or_as_an_adapter(as_adapter: bool, books: Path, tmp_path: Path) -> None:
    output = tmp_path / "longer"
    flags = ["--compare", "none", "ntk", "llama3", "--held-out-numbers", 0]
    flags += ["--adapt", "rank=4", "steps=3", "short_steps=2"]
    assert main(words(books, output, *flags, *(["--save-adapter"] if as_adapter else []))) == 0
    manifest, base = read_manifest(output), AutoModelForCausalLM.from_pretrained(TINY)
    assert manifest is not None
    adapted = manifest["fitted_on"]["adapted"]
    assert (adapted["rank"], adapted["steps"], adapted["modules"]) == (4, 3, ["q_proj", "k_proj"])
    assert (manifest["method"], manifest["options"]) == ("llama3", {})
    assert "objectives" not in manifest["fitted_on"]
    assert (output / "adapter_model.safetensors").exists() == as_adapter
    model = load_extended(output)
    model = model.merge_and_unload() if as_adapter else model
    changed = [name for name, one in base.state_dict().items() if not torch.equal(one, model.state_dict()[name])]
    assert changed
    assert all("q_proj" in name or "k_proj" in name for name in changed)
    rows = [(record.method, record.label) for record in read_records(output / "results.jsonl")]
    assert set(rows) == {("llama3", "adapted"), ("none", ""), ("ntk", "")}
    card = (output / "README.md").read_text()
    assert "q_proj and k_proj" in card
    assert "unextended base model" not in card


def test_what_an_adapter_is_saved_of(books: Path, tmp_path: Path, capsys: Any) -> None:
    assert "--adapt" in refused(capsys, *words(books, tmp_path / "longer", "--save-adapter"))
