"""A run as a TOML or YAML file: every flag of the command line under its own name, the method's under ``options``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import tomllib
import types
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from hf_posenc.errors import InvalidRequestError, InvalidTypeError, MissingFileError, did_you_mean
from hf_posenc.training.recipes import get_recipe, recipe_values
from hf_posenc.utils.files import write_whole
from hf_posenc.utils.units import ContextLength, Percent, TokenCount

RUN_FILE = "run.toml"
_TARGET = ("factor", "context_length", "stages", "preset")
_RULE = ("method", "preset", "rope_scaling")
_NOT_IN_FILES = frozenset({"options", "option", "config", "resume_from_checkpoint"})
_TOKENS = 'a number of tokens, such as 32768 or "32k"'
_HEADER = (
    "# hf-posenc finetune MODEL --config run.toml --output-dir ANOTHER\n"
    "# does again what was done here. Flags win over the settings below.\n"
)


class _YamlLoader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """YAML as Transformers and TRL read it, but 1e-4 is a number, as in YAML 1.2, and no key may be given twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            raise yaml.constructor.ConstructorError(None, None, "a key is given twice", node.start_mark)
        return mapping


_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), "-+0123456789"
)


def _parse(file: Path) -> dict[str, Any]:
    text = file.read_text(encoding="utf-8")
    if file.suffix not in (".yaml", ".yml"):
        return tomllib.loads(text)
    given = yaml.load(text, _YamlLoader)
    if not isinstance(given, dict):
        raise yaml.YAMLError(f"it holds {type(given).__name__}, not keys with values.")
    return {str(key): value for key, value in given.items() if value is not None}


def read_run(path: str | Path, known: Sequence[type]) -> dict[str, Any]:
    """Read a run's settings.

    Args:
        path: The file: YAML where its name ends in ``.yaml`` or ``.yml``, else TOML.
        known: Dataclasses whose fields may be set; ``-`` and ``_`` in a key are the same.

    Returns:
        The fields that are set, with the types the dataclasses want; ``options`` where there are any.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError, TypeError: It is no TOML or YAML, or a key is unknown, given twice or of the wrong type.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise MissingFileError(f"--config: there is no file {str(path)!r}.")
    try:
        given = _parse(file)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{path} is no TOML file: {error}") from None
    except yaml.YAMLError as error:
        raise InvalidRequestError(f"{path} is no YAML file of settings: {error}") from None
    hints = {name: hint for one in known for name, hint in get_type_hints(one).items()}
    fields = {field.name for one in known for field in dataclasses.fields(one)} - (
        _NOT_IN_FILES - {"resume_from_checkpoint"}
    )
    settings: dict[str, Any] = {}
    for key, value in given.items():
        name = key.replace("-", "_")
        if name in settings:
            raise InvalidRequestError(f"{path}: {name} is given twice.")
        if name == "options":
            if not isinstance(value, dict):
                raise InvalidTypeError(
                    f"{path}: options must be a table of the method's options, [options] in TOML, got {value!r}."
                )
            settings[name] = {option.replace("-", "_"): one for option, one in value.items()}
        elif name not in fields:
            rest = f" Options of the method are under options. Known: {', '.join(sorted(fields))}."
            raise InvalidRequestError(f"{path}: unknown key {key!r}.{did_you_mean(name, fields, most=2) or rest}")
        else:
            settings[name] = _value(value, hints[name], name, path)
    return settings


def write_run(path: Path, settings: Mapping[str, Any]) -> None:
    """Write a run's settings, whole or not at all; None, which TOML cannot say, is left out."""
    write_whole(path, _HEADER + to_toml(settings))


def to_toml(settings: Mapping[str, Any]) -> str:
    """Return settings as TOML, ``options`` as a table, without ``resume_from_checkpoint``, which would not begin."""
    lines = [
        f"{name} = {_toml(value)}"
        for name, value in settings.items()
        if value is not None and name not in _NOT_IN_FILES
    ]
    options = {name: value for name, value in (settings.get("options") or {}).items() if value is not None}
    table = ["", "[options]", *(f"{_toml_key(name)} = {_toml(value)}" for name, value in options.items())]
    return "\n".join([*lines, *(table if options else [])]) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's; it alone leaves the delete character as it is.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_key(name)} = {_toml(one)}" for name, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    raise InvalidTypeError(f"TOML file: no way to write {value!r} ({type(value).__name__}).")


def _toml_key(name: str) -> str:
    return name if name.isidentifier() and name.isascii() else _toml(name)


def _value(value: Any, hint: Any, name: str, path: str | Path) -> Any:
    if name == "sliding_window" and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if name in ("text_field", "task_mix") and isinstance(value, str):
        return [value]
    if name in ("resume_from_checkpoint", "push_to_hub") and isinstance(value, bool):
        return str(value).lower()
    try:
        return _as(hint, value)
    except InvalidTypeError as error:
        raise InvalidTypeError(f"{path}: {name} {error}") from None
    except ValueError as error:
        raise InvalidRequestError(f"{path}: {name} {error}") from None


def _as(hint: Any, value: Any) -> Any:
    """Return a value as a field's type, or say what it must be."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        kinds = [argument for argument in arguments if argument is not types.NoneType]
        fitting = (one for one in kinds[1:] if isinstance(value, get_origin(one) or one))  # of `str | list[str]`
        return _as(next(fitting, kinds[0]), value)
    if origin is Literal:
        if value not in arguments:
            raise InvalidRequestError(f"must be one of {', '.join(map(str, arguments))}, got {value!r}.")
        return value
    if origin is list:
        if not isinstance(value, list):
            raise InvalidTypeError(f"must be a list, got {value!r}.")
        return [_as(arguments[0], one) for one in value]
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if hint in (ContextLength, TokenCount) and (is_whole or isinstance(value, str)):
        return int(hint(value))
    if hint is Percent and isinstance(value, str):
        return float(Percent(value))
    if hint in (float, Percent) and (is_whole or isinstance(value, float)):
        return float(value)
    if hint in (str, bool, int) and type(value) is hint:
        return value
    if (hint is dict or origin is dict) and isinstance(value, dict):
        return value
    if isinstance(hint, type) and issubclass(hint, Enum) and isinstance(value, str):  # which the config checks
        return value
    words = {
        Percent: 'a share, such as 0.01 or "1%"',
        float: "a number",
        str: "a word in quotes",
        bool: "true or false",
        int: "a whole number",
    }
    raise InvalidTypeError(f"must be {words.get(hint, _TOKENS)}, got {value!r}.")


def settings_besides_flags(given: argparse.Namespace, known: Sequence[type]) -> dict[str, Any]:
    """Return values for flags that were not given: those of ``--config``, which win over those of ``--recipe``.

    Args:
        given: What the flags say, and nothing else.
        known: Dataclasses whose fields a file may set.

    Raises:
        FileNotFoundError, ValueError, TypeError: The recipe is unknown, or the file cannot be read.
    """
    flags = vars(given)
    values = read_run(flags["config"], known) if flags.get("config") else {}
    dropped: tuple[str, ...] = ()
    # Each of these says how far, so that another one must not say it too.
    if any(name in flags for name in _TARGET) or '"factor"' in flags.get("rope_scaling", ""):
        dropped += _TARGET
    if "preset" in flags or "rope_scaling" in flags:  # either is a whole rule
        dropped += (*_RULE, "factor", "options", "original_max_position_embeddings")
    if "method" in flags:
        dropped += ("preset", "rope_scaling")
    if "method" in values and flags.get("method", values["method"]) != values["method"]:
        dropped += ("options",)  # of the file's method
    values = {name: value for name, value in values.items() if name not in dropped}
    recipe = flags.get("recipe") or values.get("recipe")
    if recipe is None:
        return values
    rule: dict[str, Any] = {name: flags[name] for name in _RULE if name in flags}
    fitting = recipe_values(recipe, {**values, **rule})
    return {**get_recipe(recipe).loading, **{name: value for name, value in fitting.items() if name not in rule}}
