"""What ``golden`` writes down of values, files and folders: hashes and numbers, without times, paths and versions."""

from __future__ import annotations

import contextlib
import hashlib
import html.parser
import json
import logging
import re
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import golden_cases
from golden_checkout import OUTPUT, PACKAGE


def digest(tensor: torch.Tensor) -> dict[str, Any]:
    """Return shape, type and hash of a tensor, and numbers that tell how far apart two are whose hashes differ."""
    plain = tensor.detach().contiguous()
    recorded = {"shape": list(plain.shape), "dtype": str(plain.dtype).removeprefix("torch.")}
    recorded["sha256"] = hashlib.sha256(
        plain.view(torch.uint8).numpy().tobytes() if plain.dim() else str(plain.item()).encode()
    ).hexdigest()
    if plain.is_floating_point() and plain.numel():
        flat = plain.double().flatten()
        recorded["some"] = flat[:: max(1, flat.numel() // 5)][:6].tolist()
    return recorded


def state_digest(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: digest(tensor)["sha256"][:16] for name, tensor in sorted(tensors.items())}


_DROPPED = re.compile(
    r"^(seconds|.*_seconds|peak_memory_bytes|versions|.*_version|tokens_per_second|date|time|started|finished)$"
)
_SETS = ("target_modules", "modules_to_save")
_NUMBER = r"\d+(?:[.,]\d+)*"
_WORDS: list[tuple[str, str]] = [
    (rf"\b{_NUMBER} ?(ms|s|sec|seconds?|minutes?|min|hours?|h)\b", "<n> s"),
    (rf"\b{_NUMBER} ?(MB|GB|MiB|GiB|KiB|TiB)\b", r"<n> \1"),
    (rf"\b{_NUMBER} tokens (a|per) second", r"<n> tokens \1 second"),
    (r"\b(\d+:)?\d\d:\d\d\b", "<time>"),
    (r"\b\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d)?)?", "<date>"),
    (r"(?i)\b(hf.posenc|transformers|torch|pytorch|peft|datasets|python|accelerate) v?\d[\w.+]*", r"\1 <version>"),
    (r"[^\s'\"]+\.py:\d+: ", ""),
    (r"0x[0-9a-f]{6,}", "<address>"),
    (r"(peak, measured|peak of all in use, predicted|predicted): \d+", r"\1: <n>"),
]


def words(text: str, exact: bool = False) -> str:
    """Return a text without what differs from run to run: paths, and unless ``exact`` times, amounts and versions."""
    for path, name in ((str(OUTPUT), "<output>"), (str(PACKAGE), "<package>"), (sys.prefix, "<python>")):
        text = text.replace(path, name)
    for pattern, replacement in () if exact else _WORDS:
        text = re.sub(pattern, replacement, text)
    return text


# Lines that are there or not, or in this order or another, by how fast the machine was.
_PASSING = re.compile(r"%\||it/s\]|^training: about .* on this machine")
_ESTIMATE = re.compile(r"  \w+ +<n> s$")


def lines(text: str, exact: bool = False) -> list[str]:
    """Return the lines of a text as ``words`` leaves them, without progress bars and estimates of time."""
    kept = [line.split("\r")[-1].rstrip() for line in text.splitlines()]
    recorded = words("\n".join(line for line in kept if not _PASSING.search(line)), exact).splitlines()
    estimates = iter(sorted(line for line in recorded if _ESTIMATE.match(line)))
    return [next(estimates) if _ESTIMATE.match(line) else line for line in recorded]


def plain(value: Any, key: str = "") -> Any:
    """Return JSON-able values without paths, times and versions."""
    if _DROPPED.match(key):
        return "<dropped>"
    if isinstance(value, dict):
        return {str(name): plain(one, str(name)) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in (sorted(value) if key in _SETS else value)]
    if isinstance(value, (set, frozenset)):
        return sorted(plain(one) for one in value)
    if isinstance(value, str):
        return words(value, exact=True)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, torch.Tensor):
        return digest(value)
    return words(str(value), exact=True)


class _Visible(html.parser.HTMLParser):
    """The text of a page, a line for each element; without pictures, styles and scripts."""

    _HIDDEN = ("svg", "style", "script")

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.texts = 0, list[str]()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.hidden += tag in self._HIDDEN

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in self._HIDDEN

    def handle_data(self, data: str) -> None:
        if not self.hidden and data.strip():
            self.texts.append(" ".join(data.split()))


def content(file: Path) -> Any:
    """Return what is recorded of a file, by its name."""
    if file.suffix == ".safetensors":
        return state_digest(load_file(file))
    if file.suffix == ".json" and file.stat().st_size < 50_000:
        return plain(json.loads(file.read_text(encoding="utf-8")))
    if file.suffix == ".jsonl":
        return [plain(json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
    if file.suffix == ".toml":
        return plain(tomllib.loads(file.read_text(encoding="utf-8")))
    if file.suffix == ".html":
        page = _Visible()
        page.feed(file.read_text(encoding="utf-8"))
        return lines("\n".join(page.texts))
    if file.suffix in (".md", ".txt", ".jinja"):
        return lines(file.read_text(encoding="utf-8"))
    return "there" if file.suffix in (".png", ".svg", ".pdf") else hashlib.sha256(file.read_bytes()).hexdigest()


def folder_content(folder: Path) -> dict[str, Any]:
    """Return what is recorded of all files in a folder, by their names."""
    recorded = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        inside = any(
            part.startswith(golden_cases.FILES["folders of which names are recorded"]) for part in name.split("/")[:-1]
        )
        if path.is_file() and not name.endswith(golden_cases.FILES["skipped"]):
            recorded[name] = "there" if inside or name.split("/")[0] == "runs" else content(path)
    return recorded


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts = list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.split(".")[0] == "hf_posenc":
            self.texts.append(record.getMessage())


@contextlib.contextmanager
def said() -> Iterator[dict[str, Any]]:
    """Collect what the package logs and warns of in the block."""
    recorded: dict[str, Any] = {}
    handler, logger = _Log(), logging.getLogger("hf_posenc")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield recorded
    finally:
        logger.removeHandler(handler)
        recorded["log"] = lines("\n".join(handler.texts))
        recorded["warnings"] = [words(str(one.message)) for one in caught if one.category is not DeprecationWarning]


def attempt(call: Callable[[], Any]) -> Any:
    """Return what a call gives, or how it refused."""
    try:
        return call()
    except Exception as error:
        return {"error": type(error).__name__, "words": {"refused": lines(str(error))}}
