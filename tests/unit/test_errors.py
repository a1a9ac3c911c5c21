"""Errors are classes: which there are, what they hold, and that nothing else is raised on purpose."""

from __future__ import annotations

import ast
import builtins
import copy
import pickle
from pathlib import Path

import pytest

import hf_posenc
from hf_posenc import HfPosencError, errors, extend_config, patch_model
from hf_posenc.errors import (
    AlreadyExtendedError,
    InvalidTypeError,
    MissingFileError,
    UnknownNameError,
    UnknownOptionError,
    UnsupportedModelError,
)
from hf_posenc.families.family_data import attention_capabilities, capabilities
from hf_posenc.families.refusals import REASONS
from hf_posenc.methods.registry import available_methods
from model_types import tiny_model
from tiny_llama import make_tiny_llama

PACKAGE = Path(hf_posenc.__file__).parent
CLASSES = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, HfPosencError)]
# Built-in exceptions that are raised besides: by whose rules, anywhere and in one file.
OTHERS = {
    "AttributeError": "Python's, of a module's __getattr__",
    "IndexError": "Python's, of iterating over a dataset",
}
INTERNAL = {
    ("utils/files.py", "OSError"): "a full disk, which safetensors reports as an error of its own",
}


@pytest.mark.parametrize("kind", [one for one in CLASSES if one is not HfPosencError])
def test_each_is_the_builtin_exception_that_it_would_be_elsewhere(kind: type[HfPosencError]) -> None:
    builtin = (ValueError, TypeError, FileNotFoundError, ImportError, RuntimeError, ConnectionError, PermissionError)
    assert issubclass(kind, builtin)
    assert kind.__doc__


def test_every_error_raised_on_purpose_is_one_of_them() -> None:
    builtin = {name for name, one in vars(builtins).items() if isinstance(one, type) and issubclass(one, Exception)}
    found = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                found.add((str(file.relative_to(PACKAGE)), ast.unparse(node.exc.func)))
    assert len({kind for _, kind in found} & {one.__name__ for one in CLASSES}) > 5
    assert {pair for pair in found if pair[1] in builtin - OTHERS.keys()} == INTERNAL.keys()


def test_fields_of_an_unknown_name() -> None:
    with pytest.raises(UnknownNameError, match=r"'yran'\..*'yarn'\?") as caught:
        patch_model(make_tiny_llama(), "yran")
    assert (caught.value.kind, caught.value.name) == ("method", "yran")
    assert {row["name"] for row in available_methods()} <= set(caught.value.known)


def test_fields_of_an_unknown_option() -> None:
    with pytest.raises(UnknownOptionError, match="no option") as caught:
        patch_model(make_tiny_llama(), "linear", 4, beta_fast=16)
    assert (caught.value.method, caught.value.option, caught.value.known) == ("linear", "beta_fast", ())
    assert "yarn" in caught.value.methods


def test_fields_of_a_model_that_a_method_does_not_support() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        patch_model(tiny_model("deepseek_v3"), "dca", 4, original_max_position_embeddings=64, on_scaled="replace")
    error = caught.value
    assert (error.model_type, error.method, error.code) == ("deepseek_v3", "dca", "latent_attention")
    assert error.reason == REASONS["latent_attention"]
    assert str(error).startswith(f"method 'dca' is not supported for model_type 'deepseek_v3': {error.reason}. ")


def test_every_reason_of_the_table_has_its_words() -> None:
    rows = [row for table in (capabilities(), attention_capabilities()) for row in table.values() if row is not None]
    assert {row.code for row in rows} < REASONS.keys()
    assert not any("{" in row.reason or row.reason.endswith(".") for row in rows)


def test_fields_of_a_model_that_is_extended_already() -> None:
    model = patch_model(make_tiny_llama(), "ntk", 2)
    with pytest.raises(AlreadyExtendedError) as caught:
        patch_model(model, "yarn", 4)
    assert (caught.value.method, caught.value.factor) == ("ntk", 2)
    config = extend_config(make_tiny_llama().config, "yarn", 4)
    with pytest.raises(AlreadyExtendedError) as caught:
        extend_config(config, "yarn", 4)
    assert (caught.value.method, caught.value.factor) == ("yarn", 4)


@pytest.mark.parametrize(
    "error",
    [
        UnknownNameError("method", "yran", ["yarn", "linear"]),
        UnknownOptionError("linear", "beta", [], ["yarn"]),
        UnsupportedModelError("gpt2", "it has no rotary embedding", "yarn", code="no_rotary", values={"a": 1}),
        AlreadyExtendedError("twice", "yarn", 4.0),
        InvalidTypeError("a number"),
        MissingFileError("no file"),
    ],
)
def test_an_error_survives_being_sent_to_another_process(error: HfPosencError) -> None:
    for same in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(same) is type(error)
        assert str(same) == str(error)
        assert vars(same) == vars(error)
