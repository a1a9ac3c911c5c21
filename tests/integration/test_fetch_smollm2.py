"""``scripts/fetch_smollm2.py``: the folder it writes is read right by Transformers 5 and by Transformers 4."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from folders import SMOLLM2
from gguf_files import write_gguf
from other_transformers import python_with

LOSS = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
ids = torch.arange(3, 120)[None] * 7 % model.config.vocab_size
with torch.no_grad():
    print(repr(model(ids, labels=ids).loss.item()))
"""


@pytest.fixture
def script() -> Iterator[ModuleType]:
    import fetch_smollm2

    yield fetch_smollm2
    del sys.modules["fetch_smollm2"]


@pytest.fixture
def folder(script: ModuleType, tmp_path: Path, tiny_llama: Callable[..., LlamaForCausalLM]) -> Path:
    """What the script makes of a small model whose base is not the usual one."""
    model = tiny_llama(rope_parameters={"rope_type": "default", "rope_theta": 100000.0})
    script.convert(write_gguf(tmp_path / "small.gguf", model), tmp_path / "folder")
    return tmp_path / "folder"


def test_the_base_stands_where_each_transformers_looks_for_it(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_theta": 100000.0, "rope_type": "default"}
    assert config["rope_theta"] == 100000.0
    assert config["rope_scaling"] is None
    assert config["dtype"] == "float32"
    assert AutoModelForCausalLM.from_pretrained(folder).config.rope_parameters["rope_theta"] == 100000.0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["small", "smollm2"])
def test_transformers_4_gives_the_same_loss(folder: Path, model: str) -> None:
    path = folder if model == "small" else SMOLLM2
    assert path.is_dir(), "scripts/fetch_smollm2 makes it"
    here, there = (
        float(subprocess.run([python, "-c", LOSS, path], capture_output=True, text=True, check=True).stdout)
        for python in (sys.executable, python_with("4.57.6"))
    )
    assert there == pytest.approx(here, rel=1e-6)


def test_a_folder_with_other_files_is_left_alone(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "note.txt").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["fetch_smollm2.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="holds other"):
        script.main()
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]
