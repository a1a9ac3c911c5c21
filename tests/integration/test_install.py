"""``import hf_posenc`` changes no other library; ``install`` does, once, and the first patched model calls it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_posenc import describe, save_extended
from sharp_checkpoints import patched_base

_MODULES = """
import importlib, sys
NAMES = (
    "transformers.modeling_utils", "transformers.configuration_utils", "transformers.tokenization_utils_base",
    "transformers.integrations.peft", "peft.peft_model", "peft.config", "accelerate.accelerator", "trl.trainer.utils",
)
def contents():
    found = {"finders": tuple(map(id, sys.meta_path))}
    for name in NAMES:
        for key, value in vars(importlib.import_module(name)).items():
            found[name, key] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                found |= {(name, key, attribute): id(inner) for attribute, inner in vars(value).items()}
    return found
contents()  # imports all of them, and what they import at their first use
"""
_INERT = (
    _MODULES
    + """
before = contents()
import hf_posenc
for name in dir(hf_posenc):
    getattr(hf_posenc, name)
assert contents() == before
hf_posenc.install()
first = contents()
changed = {key for key in first if first[key] != before.get(key)}
assert {key[0] for key in changed} == set(NAMES), changed
hf_posenc.install()
importlib.reload(sys.modules["hf_posenc.checkpoint.standard_saving"]).install()
assert contents() == first
"""
)


def run(code: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_changes_nothing_and_installing_twice_no_more_than_once() -> None:
    run(_INERT)


_LOAD = """
import sys, hf_posenc
from transformers import AutoModelForCausalLM
if sys.argv[2] == "patch":
    hf_posenc.patch_model(AutoModelForCausalLM.from_pretrained(sys.argv[3]), "yarn", 2)
print(hf_posenc.describe(AutoModelForCausalLM.from_pretrained(sys.argv[1]))["method"])
"""


@pytest.mark.parametrize(("first", "method"), [("import", "none"), ("patch", "dca")])
def test_what_from_pretrained_applies(first: str, method: str, base: Path, tmp_path: Path) -> None:
    save_extended(patched_base(base, "dca"), tmp_path / "saved")
    assert run(_LOAD, str(tmp_path / "saved"), first, str(base)).split()[-1] == method


_ADAPTER = """
import sys
from transformers import AutoModelForCausalLM
from hf_posenc import patch_model
model = patch_model(AutoModelForCausalLM.from_pretrained(sys.argv[1]), "yarn", 4)
assert "peft.peft_model" not in sys.modules
from peft import LoraConfig, get_peft_model
get_peft_model(model, LoraConfig(task_type="CAUSAL_LM")).save_pretrained(sys.argv[2])
"""


_LOAD_ADAPTER = """
import sys
from hf_posenc import describe, load_extended
print(describe(load_extended(sys.argv[1]))["method"])
"""


def test_an_adapter_keeps_its_extension_whenever_peft_is_imported(base: Path, tmp_path: Path) -> None:
    """It is made with PEFT imported after patching, and loaded by the first call of a process."""
    run(_ADAPTER, str(base), str(tmp_path / "adapter"))
    assert describe(tmp_path / "adapter")["method"] == "yarn"
    assert run(_LOAD_ADAPTER, str(tmp_path / "adapter")).split()[-1] == "yarn"


_REFERENCE = """
import sys
from transformers import AutoModelForCausalLM
from hf_posenc import describe, patch_model
model = patch_model(AutoModelForCausalLM.from_pretrained(sys.argv[1]), "yarn", 4)
assert "trl.trainer.utils" not in sys.modules
from trl.trainer.utils import create_model_from_path, get_config_model_id
print(describe(create_model_from_path(get_config_model_id(model.config)))["method"])
"""


def test_trl_imported_after_patching_extends_the_reference(base: Path) -> None:
    assert run(_REFERENCE, str(base)).split()[-1] == "yarn"
