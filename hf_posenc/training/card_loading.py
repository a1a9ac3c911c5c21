"""The part of a model card that says how the model is loaded, by those who have hf_posenc and by those who have not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_posenc.checkpoint.manifest import runs_in_attention
from hf_posenc.methods.registry import method_names
from hf_posenc.training.base_model import BaseModel

FOLDER = '"path/of/this/folder"'  # or the name that it gets on the Hub
_BASE = '"path/of/the/base/model"'


def loading_section(description: Mapping[str, Any], base: BaseModel, auto_class: str, *, is_adapter: bool) -> list[str]:
    """Return the lines of the section, each block of code complete in itself.

    Args:
        description: What ``hf_posenc.patching.api.describe`` says of the model.
        base: The model that was extended.
        auto_class: Name of the auto class that loads it.
        is_adapter: The folder holds an adapter.
    """
    method = description["method"]
    needs_hf_posenc = runs_in_attention(dict(description)) or description["options"].get("temperature") == "logits"
    if is_adapter:
        return _adapter(base, auto_class)
    if method in method_names("is_encoding"):
        return [
            f"`{method}` takes the place of RoPE, which Transformers alone cannot run, and no server does:",
            "",
            *_code(
                "from hf_posenc import load_extended",
                "from transformers import AutoTokenizer",
                f'model = load_extended({FOLDER}, dtype="auto")',
                f"tokenizer = AutoTokenizer.from_pretrained({FOLDER})",
            ),
        ]
    plain = [
        f"from transformers import {auto_class}, AutoTokenizer",
        f'model = {auto_class}.from_pretrained({FOLDER}, dtype="auto")',
        f"tokenizer = AutoTokenizer.from_pretrained({FOLDER})",
    ]
    if needs_hf_posenc:
        return [
            f"No config can say this rule whole (`{method}`): hf_posenc (`pip install hf_posenc`) puts it in while "
            "Transformers loads, from the manifest beside the weights. Without the import the model is another one.",
            "",
            *_code("import hf_posenc", *plain),
            "",
            _servers(" --as yarn", "with a static rule in its place"),
        ]
    return ["Plain Transformers is enough:", "", *_code(*plain), "", _servers("", "")]


def _adapter(base: BaseModel, auto_class: str) -> list[str]:
    name = f'"{base.hub_id}"' if base.is_exact else _BASE
    return [
        "The adapter needs its base model extended as it was in training. While hf_posenc (`pip install hf_posenc`) is "
        "imported, PEFT sees to it; the base is loaded as it was published:",
        "",
        *_code(
            "import hf_posenc",
            "from peft import PeftModel",
            f"from transformers import {auto_class}, AutoTokenizer",
            f'base = {auto_class}.from_pretrained({name}, dtype="auto")',
            f"model = PeftModel.from_pretrained(base, {FOLDER})",
            f"tokenizer = AutoTokenizer.from_pretrained({FOLDER})",
        ),
        "",
        "For servers, and for Transformers without hf_posenc, merge it and save the whole model:",
        "",
        *_code(
            "from hf_posenc import save_extended",
            'save_extended(model.merge_and_unload(), "path/of/a/new/folder", tokenizer)',
        ),
    ]


def _servers(more: str, how: str) -> str:
    said = f", {how}" if how else ""
    command = f"hf-posenc export path/of/this/folder --to vllm{more}"
    return (
        f"For vLLM, SGLang, llama.cpp and TGI `{command}` (or another name) prints the command that runs it{said}, or "
        "says why it cannot."
    )


def _code(*lines: str) -> list[str]:
    return ["```python", *lines, "```"]
