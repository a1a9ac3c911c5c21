"""What ``hf-posenc methods`` and ``hf-posenc presets`` print."""

from __future__ import annotations

import re
import textwrap

from hf_posenc.families import capabilities, census_version
from hf_posenc.presets import presets
from hf_posenc.registry import available_methods


def _filled(text: str, width: int, indent: str = "    ") -> str:
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False)


def methods_text(width: int) -> str:
    """Return every method with its aliases, options, spelling on disk and paper."""
    lines = []
    for row in available_methods():
        also = f" (or {', '.join(row['aliases'])})" if row["aliases"] else ""
        facts = (row["summary"], f"options: {', '.join(row['options']) or 'none'}", f"on disk: {row['on_disk']}")
        lines += [f"{row['name']}{also}", *(_filled(fact, width) for fact in (*facts, row["paper"]))]
    return "\n".join(lines)


def families_text(width: int) -> str:
    """Return which model types can be extended, and the others by the reason why not."""
    table = capabilities()
    patched = [model_type for model_type, reason in table.items() if reason is None]
    refused: dict[str, list[str]] = {}
    for model_type, reason in table.items():
        if reason is not None:
            refused.setdefault(re.sub(r"^model_type '[^']+' (is not supported: )?", "", reason), []).append(model_type)
    lines = [
        f"Of the {len(table)} causal language model types of Transformers {census_version()}, {len(patched)} can be "
        "extended:",
        _filled(", ".join(patched), width),
        "",
        "Refused:",
    ]
    for reason, model_types in sorted(refused.items(), key=lambda pair: len(pair[1])):
        lines += [_filled(", ".join(model_types), width), _filled(reason, width, indent="        ")]
    return "\n".join(lines)


def presets_text(width: int) -> str:
    """Return every preset with its numbers, the checkpoints it is for and the source."""
    lines = []
    for preset in presets().values():
        original = preset.original_max_position_embeddings
        options = "".join(f", {name} {value:g}" for name, value in preset.options.items())
        rule = f"{preset.method}, factor {preset.factor:g}{options}: {original} -> {round(original * preset.factor)}"
        if preset.sliding_window:
            rule += f", sliding window {preset.sliding_window}"
        facts = (rule, f"for {', '.join(preset.checkpoints)}", f"source: {preset.source}")
        lines += [preset.name, *(_filled(fact, width) for fact in facts)]
    return "\n".join(lines)
