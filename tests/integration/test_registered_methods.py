"""A method that another package registers by an entry point is there everywhere, with no change of hf_posenc."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from folders import HELPERS
from hf_posenc import (
    available_methods,
    describe,
    load_extended,
    patch_model,
    save_extended,
    unpatch_model,
    verify_model,
)
from hf_posenc.assets import tiny_model_path
from hf_posenc.cli.main import main
from hf_posenc.exports import export_command
from hf_posenc.methods import registry
from tiny_models import logits

PACKAGE = HELPERS / "toy_package"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the package one of those that are installed, for one test."""
    monkeypatch.syspath_prepend(PACKAGE)
    look_again()
    yield
    sys.modules.pop("toy_rope", None)
    registry.METHODS.all().pop("toy", None)
    monkeypatch.undo()
    look_again()


def look_again() -> None:
    registry.import_other_packages.cache_clear()
    registry.methods.cache_clear()


def by_hand(power: float, factor: float) -> list[float]:
    inv_freq = [10000.0 ** (-2 * i / 16) for i in range(8)]
    return [one / factor ** ((i / 7) ** power) for i, one in enumerate(inv_freq)]


def test_it_is_listed_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    [row] = [row for row in available_methods() if row["name"] == "toy"]
    assert (row["options"], row["aliases"], row["on_disk"]) == (["power"], ["toy_rope"], "longrope")
    assert main(["list", "methods"]) == 0
    assert "toy (or toy_rope)" in capsys.readouterr().out
    assert main(["list", "methods", "toy", "--model", str(tiny_model_path())]) == 0
    assert "Each pair is stretched by its number." in capsys.readouterr().out
    with pytest.raises(TypeError, match="'beta_fast'"):
        registry.make_method("toy", 2, {"beta_fast": 3})
    with pytest.raises(TypeError, match=r"'power' \(toy"):
        registry.make_method("linear", 2, {"power": 3})


def test_it_is_patched_verified_undone_saved_and_read_without_hf_posenc(
    tiny_llama: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    model = tiny_llama(head_dim=16)
    ids = torch.arange(100)[None] % 128
    before = logits(model, ids)
    patch_model(model, "toy", 4, power=2)
    assert verify_model(model).extension["method"] == describe(model)["method"] == "toy"
    assert model.model.rotary_emb.inv_freq.tolist() == pytest.approx(by_hand(2.0, 4.0), rel=1e-6)
    extended = logits(model, ids)
    assert (extended - before).abs().max() > 1e-3
    save_extended(model, tmp_path / "saved")
    unpatch_model(model)
    assert torch.equal(logits(model, ids), before)
    save_file({"ids": ids}, tmp_path / "ids")
    alone = [str(PACKAGE.parent / "reload_logits.py"), str(tmp_path / "ids"), str(tmp_path / "out")]  # no hf_posenc
    subprocess.run([sys.executable, *alone, str(tmp_path / "saved")], check=True)
    assert torch.allclose(load_file(tmp_path / "out")[str(tmp_path / "saved")], extended, atol=1e-5)
    ours = load_extended(tmp_path / "saved")
    assert describe(ours)["method"] == "toy"
    assert describe(ours)["options"] == {"power": 2.0}
    rope = json.loads((tmp_path / "saved" / "config.json").read_text())["rope_parameters"]
    assert rope["rope_type"] == "longrope"
    assert rope["long_factor"] == rope["short_factor"] == pytest.approx([4.0 ** ((i / 7) ** 2) for i in range(8)])


@pytest.mark.parametrize("stack", ["vllm", "sglang"])
def test_it_is_exported(stack: str, tiny_llama: Callable[..., LlamaForCausalLM], tmp_path: Path) -> None:
    save_extended(patch_model(tiny_llama(), "toy", 4), tmp_path / "saved")
    command = export_command(tmp_path / "saved", stack)
    assert str(tmp_path / "saved") in command


@pytest.mark.slow
def test_it_is_measured_and_stands_in_a_report(tmp_path: Path) -> None:
    """In a process of its own, as a user starts it."""
    text = tmp_path / "text.txt"
    text.write_text("It was a bright cold day in April, and the clocks were striking thirteen. " * 200)
    program = [sys.executable, "-m", "hf_posenc"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")])}
    what = ["--documents", str(text), "--context-lengths", "128", "512", "--method", "none", "toy", "--factor", "4"]
    files = ["--output", str(tmp_path / "results.jsonl"), "--hide-progress"]
    done = subprocess.run(
        [*program, "eval", str(tiny_model_path()), *what, *files], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert {json.loads(line)["method"] for line in lines} == {"none", "toy"}
    assert main(["report", str(tmp_path / "results.jsonl"), "--output", str(tmp_path / "page")]) == 0
    assert "toy x4" in (tmp_path / "page" / "report.html").read_text()
