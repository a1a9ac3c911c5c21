"""What ``golden`` records of a checkout: models of many families, perplexities, fine-tuning runs and commands.

    python golden_jobs.py PACKAGE OUTPUT PROCESSES [JOB ...]

Started by ``golden.record``, which sets the environment. Each job runs in a process of its own, forked after the slow
imports, in a folder of its own; each command of ``hf-posenc`` in another process, so that none leaves anything behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import html.parser
import importlib
import importlib.abc
import importlib.util
import json
import logging
import lzma
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
import tomllib
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, Trainer, TrainingArguments

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out
import golden

PACKAGE, OUTPUT = (Path(word) for word in sys.argv[1:3])
WORK = OUTPUT / "work"


class _PackageDirs(importlib.abc.MetaPathFinder):
    """Finds the packages that the checkout keeps elsewhere (``package-dir``), before an installed one is asked."""

    def __init__(self) -> None:
        told = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))
        self.folders = {
            name: PACKAGE / path for name, path in told["tool"]["setuptools"].get("package-dir", {}).items()
        }

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if not name or name not in self.folders:
            return None
        folder = self.folders[name]
        return importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


sys.meta_path[:] = [one for one in sys.meta_path if "__editable__" not in getattr(one, "__module__", "")]
sys.meta_path.insert(0, _PackageDirs())
import hf_posenc  # noqa: E402

# ---- Small models of many families ----

ORIGINAL = 64
LENGTHS = (64, 200)
_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": ORIGINAL,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_LISTS = {"short_factor": [1.0, 1.0, 1.1, 1.2], "long_factor": [1.0, 1.5, 2.5, 4.0]}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
# Transformers' name of the class before "Config" and "ForCausalLM", and settings beside the sizes.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 16}),
    "mistral": ("Mistral", {"head_dim": 16, "sliding_window": 160}),
    "qwen2": ("Qwen2", {"rope_parameters": {**_ROPE, "rope_theta": 1e6}}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma3": (
        "Gemma3",
        {"head_dim": 16, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi3": (
        "Phi3",
        {
            "max_position_embeddings": 4 * ORIGINAL,
            "original_max_position_embeddings": ORIGINAL,
            "partial_rotary_factor": 0.5,
            "rope_parameters": {**_ROPE, "rope_type": "longrope", "partial_rotary_factor": 0.5, **_LISTS},
        },
    ),
    "gpt_neox": ("GPTNeoX", {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}, "rotary_pct": 0.5}),
    "cohere": ("Cohere", {}),
    "glm": ("Glm", {"head_dim": 16, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}}),
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "head_dim": 16}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **_LATENT,
            **{"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1},
            **{"topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
        },
    ),
    "qwen2_vl": ("Qwen2VL", {"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}}),
}
_SCALED = ("phi3",)  # whose own rule has to be replaced

# Method, factor and options; `longrope` without lists gets one number a pair. Methods that are not here, new ones too,
# are asked for with their defaults.
REQUESTS: dict[str, tuple[str, float | None, dict[str, Any]]] = {
    "linear": ("linear", 4, {}),
    "ntk": ("ntk", 4, {}),
    "ntk_by_parts": ("ntk_by_parts", 4, {}),
    "ntk_by_parts, options": ("ntk_by_parts", 4, {"beta_fast": 8.0, "beta_slow": 2.0}),
    "yarn": ("yarn", 4, {}),
    "yarn, ramp=paper": ("yarn", 4, {"ramp": "paper"}),
    "yarn, ramp=harmonic": ("yarn", 4, {"ramp": "harmonic"}),
    "yarn, options": ("yarn", 4, {"beta_fast": 8.0, "attention_factor": 1.25, "truncate": False}),
    "yarn, temperature=logits": ("yarn", 4, {"temperature": "logits"}),
    "yarn, mscale": ("yarn", 4, {"mscale": 0.707, "mscale_all_dim": 0.5}),
    "llama3": ("llama3", 4, {}),
    "llama3, options": ("llama3", 8, {"low_freq_factor": 2.0, "high_freq_factor": 6.0}),
    "longrope": ("longrope", 4, {}),
    "longrope, attention_factor": ("longrope", 4, {"attention_factor": 1.1}),
    "abf": ("abf", 4, {"rope_theta": 5e6}),
    "nope": ("nope", 4, {}),
    "dynamic": ("dynamic", 4, {}),
    "dynamic, stage": ("dynamic", 4, {"stage": 32, "log_n": True}),
    "dynamic, scope=sequence": ("dynamic", 4, {"scope": "sequence"}),
    "dynamic_yarn": ("dynamic_yarn", 4, {}),
    "dynamic_yarn, geometric": ("dynamic_yarn", 8, {"stage": 48, "growth": "geometric", "beta_fast": 16.0}),
    "self_extend": ("self_extend", 4, {}),
    "self_extend, options": ("self_extend", 4, {"group": 5, "window": 24, "log_n": True}),
    "dca": ("dca", 4, {}),
    "dca, options": ("dca", 4, {"chunk_size": 48, "local_window": 8, "sharpen": True}),
    "rerope": ("rerope", 4, {}),
    "rerope, options": ("rerope", 4, {"window": 24, "log_n": True}),
    "leaky_rerope": ("leaky_rerope", 4, {}),
    "leaky_rerope, options": ("leaky_rerope", 4, {"window": 24, "leak": 4.0}),
}
ENCODINGS: dict[str, tuple[str, float | None, dict[str, Any]]] = {
    "sinusoidal": ("sinusoidal", None, {"embedding_scale": 0.05}),
    "learned": ("learned", None, {"context_length": 256}),
    "relative_bias": ("relative_bias", None, {"max_distance": 6}),
    "t5_bias": ("t5_bias", None, {"num_buckets": 8, "max_distance": 20}),
    "t5_bias, bidirectional": ("t5_bias", None, {"bidirectional": True}),
    "alibi": ("alibi", None, {}),
    "rope": ("rope", None, {}),
    "rope, interleaved": ("rope", None, {"interleaved": True, "rope_theta": 500.0}),
    "rope, complex": ("rope", None, {"computation": "complex", "partial_rotary_factor": 0.5}),
    "xpos": ("xpos", None, {"scale_base": 8}),
}
# Keywords of patch_model on the llama model, refused or not; and of extend_config.
CALLS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "context_length": {"method": "linear", "context_length": 160},
    "odd factor": {"method": "yarn", "factor": 2.37},
    "factor 1": {"method": "yarn", "factor": 1},
    "alias": {"method": "PI", "factor": 2},
    "original length": {"method": "yarn", "factor": 4, "original_max_position_embeddings": 32},
    "preset": {"preset": "llama-2-yarn-16x"},
    "unknown preset": {"preset": "lama-2-yarn-16x"},
    "dictionary": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "old dictionary": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "dynamic dictionary": {"rope_scaling": '{"rope_type": "dynamic", "factor": 2.0}'},
    "dictionary and method": {"method": "ntk", "rope_scaling": {"type": "linear", "factor": 2.0}},
    "wrong dictionary": {"rope_scaling": {"rope_type": "yarn", "faktor": 4.0}},
    "dictionary of another base": {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
    "unknown method": {"method": "yran"},
    "unknown option": {"method": "linear", "beta_fast": 16},
    "option of a wrong type": {"method": "yarn", "beta_fast": "many"},
    "option out of range": {"method": "yarn", "beta_fast": 1, "beta_slow": 2},
    "factor below 1": {"method": "yarn", "factor": 0.25},
    "factor of a wrong type": {"method": "yarn", "factor": "four"},
    "factor and length": {"method": "yarn", "factor": 4, "context_length": 256},
    "length below the original": {"method": "yarn", "context_length": 32},
    "lists of a wrong length": {"method": "longrope", "long_factor": [1.0, 2.0]},
    "unknown on_scaled": {"method": "yarn", "on_scaled": "maybe"},
    "window of a model without one": {"method": "yarn", "sliding_window": "off"},
}
# The same on other families.
MORE_CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "window off": ("mistral", {"method": "yarn", "factor": 4, "sliding_window": "off"}),
    "window off, in stages": ("mistral", {"method": "dynamic_yarn", "factor": 4, "sliding_window": "off"}),
    "window off, in chunks": ("mistral", {"method": "dca", "factor": 4, "sliding_window": "off"}),
    "longer window": ("mistral", {"method": "yarn", "factor": 8, "sliding_window": 300}),
    "window too short": ("mistral", {"method": "yarn", "factor": 4, "sliding_window": 40}),
    "window and stages": ("mistral", {"method": "dynamic_yarn", "factor": 4, "sliding_window": 300}),
    "scaled already": ("phi3", {"method": "yarn", "factor": 4}),
    "preset of another family": ("qwen2", {"preset": "llama-2-yarn-16x"}),
}
# Presets with the config class they are for, its original length and window.
PRESETS: dict[str, tuple[str, int, int | None]] = {
    "llama-2-yarn-16x": ("Llama", 4096, None),
    "llama-2-longlora-8x": ("Llama", 4096, None),
    "mistral-0.1-yarn-8x": ("Mistral", 8192, 4096),
    "deepseek-coder-linear-4x": ("Llama", 4096, None),
}


def build(family: str) -> PreTrainedModel:
    """Return a random model whose attention depends on positions; equal calls give equal weights."""
    name, settings = FAMILIES[family]
    torch.manual_seed(0)
    if family == "qwen2_vl":
        text = {**_SIZES, **settings}
        vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}
        config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **_tokens_of(text))
        model: PreTrainedModel = transformers.Qwen2VLForConditionalGeneration(config)
    else:
        config_name = "Gemma3TextConfig" if family == "gemma3" else f"{name}Config"
        config = getattr(transformers, config_name)(**{**_SIZES, **settings})
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter_name, parameter in model.named_parameters():
        parts = ("q_proj.weight", "k_proj.weight", "q_b_proj.weight", "kv_b_proj.weight", "qkv", "query_key_value")
        if "visual" not in parameter_name and any(part in parameter_name for part in parts):
            torch.nn.init.normal_(parameter, std=0.2)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
    return model.eval()


def _tokens_of(text: dict[str, Any]) -> dict[str, Any]:
    return {name: text[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}


def token_ids(length: int, rows: int = 1) -> torch.Tensor:
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(1))


# ---- What is written down ----


def digest(tensor: torch.Tensor) -> dict[str, Any]:
    """Return shape, type and hash of a tensor, and numbers that tell how far apart two are whose hashes differ."""
    plain = tensor.detach().contiguous()
    told = {"shape": list(plain.shape), "dtype": str(plain.dtype).removeprefix("torch.")}
    told["sha256"] = hashlib.sha256(
        plain.view(torch.uint8).numpy().tobytes() if plain.dim() else str(plain.item()).encode()
    ).hexdigest()
    if plain.is_floating_point() and plain.numel():
        flat = plain.double().flatten()
        told["some"] = flat[:: max(1, flat.numel() // 5)][:6].tolist()
    return told


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
    told = words("\n".join(line for line in kept if not _PASSING.search(line)), exact).splitlines()
    estimates = iter(sorted(line for line in told if _ESTIMATE.match(line)))
    return [next(estimates) if _ESTIMATE.match(line) else line for line in told]


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
    told = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        inside = any(
            part.startswith(golden.FILES["folders of which names are recorded"]) for part in name.split("/")[:-1]
        )
        if path.is_file() and not name.endswith(golden.FILES["skipped"]):
            told[name] = "there" if inside or name.split("/")[0] == "runs" else content(path)
    return told


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
    told: dict[str, Any] = {}
    handler, logger = _Log(), logging.getLogger("hf_posenc")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield told
    finally:
        logger.removeHandler(handler)
        told["log"] = lines("\n".join(handler.texts))
        told["warnings"] = [words(str(one.message)) for one in caught if one.category is not DeprecationWarning]


def attempt(call: Callable[[], Any]) -> Any:
    """Return what a call gives, or how it refused."""
    try:
        return call()
    except Exception as error:
        return {"error": type(error).__name__, "words": {"refused": lines(str(error))}}


# ---- Jobs: models ----


@torch.no_grad()
def logits(model: Any, length: int, **kwargs: Any) -> torch.Tensor:
    return model(token_ids(length), use_cache=False, **kwargs).logits


@torch.no_grad()
def forwards(model: Any) -> dict[str, Any]:
    """Return the logits of both lengths, of chunks over a KV cache, of a padded batch, and generated tokens."""
    told: dict[str, Any] = {str(length): attempt(lambda: digest(logits(model, length))) for length in LENGTHS}  # noqa: B023
    told["cached"] = attempt(partial(_in_chunks, model))
    told["padded"] = attempt(partial(_padded, model))
    told["generated"] = attempt(partial(_generated, model))
    return told


def _in_chunks(model: Any) -> dict[str, Any]:
    ids, cache, parts = token_ids(110), DynamicCache(config=model.config), []
    for begin, end in ((0, 50), (50, 51), (51, 100), (100, 110)):
        parts.append(model(ids[:, begin:end], past_key_values=cache, use_cache=True).logits)
    return digest(torch.cat(parts, dim=1))


def _padded(model: Any) -> dict[str, Any]:
    ids, mask = token_ids(100, rows=2), torch.ones(2, 100, dtype=torch.long)
    ids[0, :30], mask[0, :30] = 0, 0
    return digest(model(ids, attention_mask=mask, use_cache=False).logits[:, 30:])


def _generated(model: Any) -> list[int]:
    out = model.generate(token_ids(90), max_new_tokens=8, do_sample=False, pad_token_id=0)
    return [int(one) for one in out[0, 90:]]


def rotary(model: torch.nn.Module) -> dict[str, Any]:
    """Return what the live rotary modules hold, by convention: ``inv_freq`` and ``attention_scaling`` of each label."""
    told: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if "inv_freq" in key and buffer is not None and "visual" not in name:
                told[f"{name}.{key}"] = {"dtype": str(buffer.dtype), "values": buffer.double().flatten().tolist()}
        for key, value in vars(module).items():
            if key.endswith(("attention_scaling", "rope_type")) or (key == "scaling" and isinstance(value, float)):
                told[f"{name}.{key}"] = plain(value)
    return told


def state_of(model: torch.nn.Module) -> str:
    """Return one hash of all parameters and buffers."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return hashlib.sha256(json.dumps(state_digest(tensors)).encode()).hexdigest()


def config_of(model: PreTrainedModel) -> Any:
    return plain(model.config.to_dict())


def new_lines(before: str, after: str) -> list[str]:
    """Return the lines of a model's ``repr`` that patching changed."""
    there = set(before.splitlines())
    return [line.strip() for line in after.splitlines() if line not in there]


def request(family: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Patch a model of a family in one way, and return all that can be seen of it."""
    model, told = build(family), dict[str, Any]()
    before, shown = (state_of(model), config_of(model)), repr(model)
    with said() as patching:
        refused = attempt(lambda: hf_posenc.patch_model(model, **kwargs))
    told["words"] = {"patching": patching}
    if isinstance(refused, dict):
        return {"refused": refused, **told, "unchanged": (state_of(model), config_of(model)) == before}
    drawn = torch.Generator().manual_seed(3)
    there = {name for name, _ in build(family).named_parameters()}
    for name, parameter in model.named_parameters():
        if name not in there:  # an encoding's own
            parameter.data.copy_(torch.randn(parameter.shape, generator=drawn) * 0.05)
    told["describe"] = plain(hf_posenc.describe(model))
    told["words"] |= {"verified": lines(str(hf_posenc.verify_model(model))), "repr": new_lines(shown, repr(model))}
    told["rotary"] = rotary(model)
    told["logits"] = forwards(model)
    if family == "qwen2_vl":
        told["logits"]["image positions"] = attempt(lambda: digest(logits(model, 100, position_ids=_image_positions())))
    folder = Path("saved")
    shutil.rmtree(folder, ignore_errors=True)
    with said() as saving:
        told["saved"] = attempt(lambda: folder_content(hf_posenc.save_extended(model, folder / "extended")))
        told["save_pretrained"] = attempt(lambda: _saved_plainly(model, folder / "plain"))
    told["words"]["saving"] = saving
    if (folder / "extended").exists():
        told["described folder"] = attempt(lambda: plain(hf_posenc.describe(folder / "extended")))
        with said() as loading:
            told["reloaded"] = attempt(lambda: digest(logits(hf_posenc.load_extended(folder / "extended").eval(), 200)))
            told["reloaded by Transformers"] = attempt(
                lambda: digest(logits(type(model).from_pretrained(folder / "extended").eval(), 200))
            )
        told["words"]["loading"] = loading
    hf_posenc.unpatch_model(model)
    told["undone"] = {"state": state_of(model) == before[0], "config": config_of(model) == before[1]}
    told["undone"] |= {str(length): digest(logits(model, length))["sha256"] for length in LENGTHS}
    told["undone"]["repr"] = repr(model) == shown
    return told


def _saved_plainly(model: PreTrainedModel, folder: Path) -> dict[str, Any]:
    model.save_pretrained(folder)
    return {file.name: content(file) for file in sorted(folder.glob("*.json"))}


def _image_positions() -> torch.Tensor:
    """Return positions of a text with an image of 6 x 8 patches: ``(3, 1, 100)``."""
    cells = torch.cartesian_prod(torch.zeros(1, dtype=torch.long), torch.arange(6), torch.arange(8)) + 20
    after = torch.arange(100 - 20 - len(cells)) + 68
    return torch.cat([torch.arange(20).repeat(3, 1), cells.T, after.repeat(3, 1)], dim=1).unsqueeze(1)


def keywords(family: str, name: str, factor: float | None, options: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {"method": name, **options}
    if factor is not None:
        told["factor"] = factor
    if family in _SCALED:
        told["on_scaled"] = "replace"
    if name == "longrope" and "long_factor" not in options:
        found = [buffer for key, buffer in build(family).named_buffers() if key.endswith("inv_freq")]
        pairs = found[-1].numel()  # that of the decoder, after an image tower's
        told |= {"short_factor": [1.0] * pairs, "long_factor": [1.0 + index for index in range(pairs)]}
    return told


def family_job(family: str) -> dict[str, Any]:
    """Every method on one family."""
    model = build(family)
    told: dict[str, Any] = {"plain": {"rotary": rotary(model), "logits": forwards(model), "config": config_of(model)}}
    told["plain"]["words"] = {"verified": attempt(lambda: lines(str(hf_posenc.verify_model(model))))}
    named = {name for name, _, _ in (*REQUESTS.values(), *ENCODINGS.values())}
    new = {row["name"]: (row["name"], 4, {}) for row in hf_posenc.available_methods() if row["name"] not in named}
    for key, (name, factor, options) in {**REQUESTS, **new}.items():
        told[key] = attempt(lambda: request(family, keywords(family, name, factor, options)))  # noqa: B023
    return told


def encodings_job(family: str) -> dict[str, Any]:
    """Every encoding on one family."""
    return {
        key: attempt(lambda: request(family, keywords(family, name, factor, options)))  # noqa: B023
        for key, (name, factor, options) in ENCODINGS.items()
    }


def calls_job() -> dict[str, Any]:
    """Ways to ask, and mistakes; the registry; configs that are extended; layouts; adapters."""
    told: dict[str, Any] = {"methods": plain(hf_posenc.available_methods()), "public": sorted(hf_posenc.__all__)}
    told["patch_model"] = {key: attempt(lambda: request("llama", kwargs)) for key, kwargs in CALLS.items()}  # noqa: B023
    for key, (family, kwargs) in MORE_CALLS.items():
        told["patch_model"][key] = attempt(lambda: request(family, kwargs))  # noqa: B023
    told["extend_config"] = {}
    for family in FAMILIES:
        config = build(family).config
        told["extend_config"][family] = {
            key: attempt(lambda: plain(hf_posenc.extend_config(config, **keywords(family, name, 4, options)).to_dict()))  # noqa: B023
            for key, (name, _, options) in REQUESTS.items()
        }
    told["presets"] = {}
    for preset, (kind, original, window) in PRESETS.items():
        config = getattr(transformers, f"{kind}Config")(max_position_embeddings=original, sliding_window=window)
        told["presets"][preset] = attempt(lambda: plain(hf_posenc.extend_config(config, preset=preset).to_dict()))  # noqa: B023
    told["twice"] = attempt(lambda: hf_posenc.patch_model(hf_posenc.patch_model(build("llama"), "yarn", 4), "ntk", 2))
    told["not patched"] = attempt(lambda: hf_posenc.unpatch_model(build("llama")))
    told["no model"] = attempt(lambda: hf_posenc.patch_model(torch.nn.Linear(2, 2), "yarn", 4))
    model = build("llama")
    with hf_posenc.patched(model, method="linear", factor=2):
        told["inside"] = digest(logits(model, 100))
    told["outside"] = digest(logits(model, 100))
    model.model.rotary_emb.inv_freq[0] *= 1.001
    told["damaged"] = attempt(lambda: hf_posenc.verify_model(model))
    half = hf_posenc.patch_model(build("llama"), "yarn", 4).to(torch.bfloat16)
    told["bfloat16"] = {"rotary": rotary(half), "logits": digest(logits(half, 100))}
    layout = build("llama")
    hf_posenc.convert_layout(layout)
    told["interleaved"] = {"state": state_of(layout), "logits": digest(logits(layout, 100))}
    hf_posenc.convert_layout(layout, "half_split")
    told["half_split"] = {"state": state_of(layout), "logits": digest(logits(layout, 100))}
    told["adapters"] = attempt(_adapters)
    return told


def _adapters() -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model

    base = build("llama")
    base.save_pretrained("base")
    base = AutoModelForCausalLM.from_pretrained("base")
    torch.manual_seed(5)
    settings = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(base, settings).eval()
    hf_posenc.patch_model(model, "yarn", 4)
    told = {"describe": plain(hf_posenc.describe(model)), "logits": digest(logits(model, 100))}
    told["saved"] = folder_content(hf_posenc.save_extended(model, "adapter"))
    model.save_pretrained("plain_adapter")
    told["save_pretrained"] = folder_content(Path("plain_adapter"))
    told["reloaded"] = digest(logits(hf_posenc.load_extended("adapter").eval(), 100))
    return told


# ---- Jobs: measuring and training the tiny model ----


def asset(pattern: str) -> Path:
    """Return the one file of the package of this name, wherever it lies."""
    (found,) = [path for path in (PACKAGE / "hf_posenc").rglob(pattern) if ".cache" not in path.parts]
    return found


def text(novel: str) -> str:
    return lzma.decompress(asset(f"{novel}.txt.xz").read_bytes()).decode("utf-8")


def set_out() -> None:
    """Put the tiny model and a text into the folder of the job."""
    shutil.copytree(asset("model.safetensors").parent, "tiny")
    Path("book.txt").write_text(text("persuasion")[20_000:40_000], encoding="utf-8")


def tiny() -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained("tiny", dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(
        "tiny"
    )


def in_method(model: Any, method: str | None, factor: float | None) -> Any:
    if method is None:
        return contextlib.nullcontext()
    name, _, option = method.partition(", ")
    return hf_posenc.patched(model, name, factor, **dict([option.split("=")] if option else ()))


def perplexity_job() -> dict[str, Any]:
    """Every protocol, on the model as it is, patched, and patched in stages; and more settings."""
    set_out()
    model, tokenizer = tiny()
    book = text("emma")
    documents = [book[begin : begin + 3600] for begin in (30_000, 90_000)]
    base = {"context_lengths": [128, 256, 512], "tokenizer": tokenizer, "progress": False}
    told: dict[str, Any] = {}

    def measure(key: str, method: str | None, factor: float | None, kwargs: dict[str, Any]) -> None:
        def call() -> dict[str, Any]:
            with said() as heard, in_method(model, method, factor):
                records = hf_posenc.perplexity(model, documents, **{**base, **kwargs, "output": f"{len(told)}.jsonl"})
            values = [plain(json.loads(one.to_json())) for one in records]
            file = Path(f"{len(told)}.jsonl")  # absent where longppl finds no token
            same = (content(file) if file.exists() else []) == values
            return {
                "written": same,
                "records": {f"{one['protocol']} {one['context_length']}": one for one in values},
                "words": heard,
            }

        told[key] = attempt(call)

    for protocol, kwargs in golden.PROTOCOLS.items():
        for label, how in golden.MEASURED.items():
            measure(f"{protocol}, {label}", *(how or (None, None)), {"protocol": protocol, **kwargs})
    for key, (kwargs, method) in golden.MEASUREMENTS.items():
        measure(key, method, None if method == "alibi" else 4.0, kwargs)
    mistakes: dict[str, dict[str, Any]] = {
        "no protocol": {"protocol": "all"},
        "no length": {"context_lengths": []},
        "too long": {"context_lengths": [100_000]},
        "stride": {"protocol": "sliding_window", "stride": 600},
    }
    for key, kwargs in mistakes.items():
        measure(f"mistake: {key}", None, None, kwargs)
    return told


_TEMPLATE = (
    "{% for message in messages %}{{ '[' + message['role'] + ']\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token + '\n' }}"
    "{% endgeneration %}{% else %}{{ message['content'] + eos_token + '\n' }}{% endif %}{% endfor %}"
)


def run_documents(kind: str) -> list[Any]:
    """Return what a run trains on: long or short texts, chats, or prompts with answers."""
    book = text("prideprejudice")
    if kind == "long":
        return [book[begin : begin + 9_000] for begin in range(10_000, 100_000, 9_000)]
    paragraphs = [" ".join(one.split()) for one in book[10_000:150_000].split("\n\n") if len(one) > 80]
    if kind == "short":
        return paragraphs
    pairs = zip(paragraphs[::2], paragraphs[1::2], strict=False)
    if kind == "answers":
        return [{"prompt": one, "completion": other} for one, other in pairs]
    roles = ("user", "assistant", "user", "assistant")
    turns = zip(*(paragraphs[index::4] for index in range(4)), strict=False)
    return [
        {"messages": [{"role": role, "content": one} for role, one in zip(roles, row, strict=True)]} for row in turns
    ]


def training_job(names: Sequence[str]) -> dict[str, Any]:
    """Fine-tuning runs: all that they write, every step's loss and the weights among it."""
    set_out()
    told = {}
    for name in names:
        settings = dict(golden.RUNS[name])
        documents = run_documents(settings.pop("documents"))
        model, tokenizer = tiny()
        tokenizer.chat_template = _TEMPLATE

        def call() -> dict[str, Any]:
            with said() as heard:
                config = hf_posenc.FinetuneConfig(output_dir=name, **settings)  # noqa: B023
                result = hf_posenc.finetune(model, tokenizer, documents, config)  # noqa: B023
            values = {key: plain(getattr(result, key)) for key in ("tokens_trained", "steps", "train_loss")}
            return {"result": values, "files": folder_content(Path(name)), "words": heard}  # noqa: B023

        told[name] = attempt(call)
        shutil.rmtree(name, ignore_errors=True)
    return told


def trainer_job() -> dict[str, Any]:
    """A plain Trainer on a patched model with our callback; and settings that are refused."""
    torch.manual_seed(0)
    model = hf_posenc.patch_model(build("llama"), "yarn", 2)
    rows = [{"input_ids": one, "labels": one} for one in token_ids(128, rows=8)]
    settings = TrainingArguments(
        "trained", max_steps=6, per_device_train_batch_size=2, logging_steps=1, eval_strategy="steps", eval_steps=3
    )
    trainer = Trainer(model, settings, train_dataset=rows, eval_dataset=rows[:2])
    callback = hf_posenc.PerplexityCallback(trainer, list(token_ids(200, rows=3)), [64, 128])
    trainer.add_callback(callback)
    trainer.train()
    trainer.save_model("model")
    kept = [
        {key: value for key, value in line.items() if "runtime" not in key and "per_second" not in key}
        for line in trainer.state.log_history
    ]
    told: dict[str, Any] = {"log": plain(kept), "saved": folder_content(Path("model"))}
    told["records"] = [plain(json.loads(one.to_json())) for one in callback.records]
    mistakes: dict[str, dict[str, Any]] = {
        "method": {"method": "yran"},
        "recipe": {"recipe": "yarn-4000"},
        "option": {"method": "linear", "options": {"beta_fast": 3}},
        "rate": {"learning_rate": -1.0},
        "positions": {"position_schedule": "pos"},
        "stages": {"stages": ["512"]},
    }
    told["mistakes"] = {
        key: attempt(lambda: str(hf_posenc.FinetuneConfig(output_dir="out", **kwargs)))  # noqa: B023
        for key, kwargs in mistakes.items()
    }
    return told


# ---- Jobs: commands ----


def command(name: str, argv: list[str]) -> dict[str, Any]:
    """Run ``hf-posenc`` in a process of its own; return exit code, output, and what it wrote."""
    before = _written()
    files = {"output": Path("stdout.tmp"), "errors": Path("stderr.tmp")}
    module, _, function = golden.entry_point(PACKAGE).partition(":")

    def call() -> int:
        for number, file in enumerate(files.values(), start=1):
            os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
        warnings.formatwarning = lambda message, category, *_, **__: f"{category.__name__}: {message}\n"
        sys.argv = ["hf-posenc", *argv]
        try:
            return getattr(importlib.import_module(module), function)() or 0
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        except BaseException as error:
            print(f"crashed: {type(error).__name__}: {error}", file=sys.stderr)
            return 99

    code = os.waitstatus_to_exitcode(os.waitpid(fork(call), 0)[1])
    told: dict[str, Any] = {"exit code": code, "words": {}}
    for key, file in files.items():
        found = file.read_text(encoding="utf-8", errors="replace")
        where = told if key == "output" and argv[0] in _NUMBERS else told["words"]
        where[key] = lines(found, exact=key == "output" and argv[0] in (*_NUMBERS, *_EXACT))
        file.unlink()
    new = {path for path, stamp in _written().items() if before.get(path) != stamp}
    folders = sorted({path.parts[0] for path in new})
    told["wrote"] = {one: folder_content(Path(one)) if Path(one).is_dir() else content(Path(one)) for one in folders}
    return told


# Whose output has no times; and of these, whose are commands to be typed and amounts that are computed, not words.
_EXACT = ("methods", "presets", "recipes", "explain", "doctor")
_NUMBERS = ("export", "plan")


def _written() -> dict[Path, tuple[int, int]]:
    files = [path for path in Path().rglob("*") if path.is_file() and not path.name.endswith(golden.FILES["skipped"])]
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


def commands_job(group: str) -> dict[str, Any]:
    """Run a group of commands, one after the other, in one folder."""
    set_out()
    if group == "checkpoints":
        _config_folders()
    told = {}
    for key, typed in golden.COMMANDS[group].items():
        for method in [row["name"] for row in hf_posenc.available_methods()] if "{method}" in key else [""]:
            name, argv = key.replace("{method}", method), typed if isinstance(typed, list) else typed.split()
            told[name] = command(name, [word.replace("{method}", method) for word in argv])
    return told


def _config_folders() -> None:
    """Folders with a config.json alone: of a model of 7 B parameters, with a dictionary of old, and a wrong one."""
    llama = {
        **{
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 32000,
            "torch_dtype": "bfloat16",
        },
        **{"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "max_position_embeddings": 4096, "rope_theta": 10000.0},
    }
    old = {"max_position_embeddings": 16384, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    wrong = {"rope_scaling": {"rope_type": "yarn", "faktor": 4.0, "beta_fast": 1, "beta_slow": 32}}
    for name, changes in (("llama7b", {}), ("old", old), ("wrong", wrong)):
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(llama | changes, indent=1), encoding="utf-8")


# ---- Running jobs ----

JOBS: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"commands_{group}": partial(commands_job, group) for group in golden.COMMANDS},
    "perplexity": perplexity_job,
    **{f"finetune_{name}": partial(training_job, [name]) for name in golden.RUNS},
    "trainer": trainer_job,
    **{family: partial(family_job, family) for family in FAMILIES},
    **{f"encodings_{family}": partial(encodings_job, family) for family in ("llama", "gemma3", "gpt_neox")},
    "calls": calls_job,
}


def fork(call: Callable[[], int]) -> int:
    """Run a call in a new process, which ends with what the call returns; return the process' id."""
    sys.stdout.flush()
    sys.stderr.flush()
    if (pid := os.fork()) != 0:
        return pid
    code = 70
    try:
        code = call()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _cpu_seconds() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def run_job(name: str) -> int:
    """Run one job in its folder and write what it tells."""
    folder = WORK / name
    folder.mkdir(parents=True)
    os.chdir(folder)
    warnings.simplefilter("ignore")
    if not name.startswith("commands_"):
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        with (WORK / f"{name}.log").open("w") as log:
            os.dup2(log.fileno(), 1)  # the tables that Trainer prints
    began = time.perf_counter()
    told = JOBS[name]()
    check_package()
    text = json.dumps(told, indent=1, ensure_ascii=False)
    (OUTPUT / "jobs" / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    os.chdir(OUTPUT)
    shutil.rmtree(folder)
    print(f"{time.perf_counter() - began:6.1f} s, {_cpu_seconds():5.1f} s of CPU: {name}", file=sys.stderr)
    return 0


def check_package() -> None:
    """Raise if a module of the package came from anywhere but the checkout."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] == "hf_posenc" and (file is None or not Path(file).is_relative_to(PACKAGE)):
            raise RuntimeError(f"{name} was imported from {file}, not from {PACKAGE}.")


def environment() -> dict[str, Any]:
    """Return what two recordings must share."""
    from importlib.metadata import version

    cpus = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.*)", cpus.read_text()) if cpus.is_file() else None
    names = ("torch", "transformers", "accelerate", "peft", "tokenizers", "safetensors", "numpy", "datasets")
    return {
        "versions": {name: version(name) for name in names},
        "python": platform.python_version(),
        "machine": [platform.machine(), model[1] if model else "", torch.backends.cpu.get_cpu_capability()],
    }


def main() -> int:
    processes, names = int(sys.argv[3]), sys.argv[4:] or list(JOBS)
    if unknown := set(names) - JOBS.keys():
        print(f"golden: no job {', '.join(sorted(unknown))}. Known: {', '.join(JOBS)}.", file=sys.stderr)
        return 2
    began = time.perf_counter()
    torch.set_num_threads(1)
    for name in hf_posenc.__all__:
        getattr(hf_posenc, name)  # imports all that is imported late, once
    check_package()
    (OUTPUT / "jobs").mkdir()
    WORK.mkdir()
    waiting, running, failed = list(names), dict[int, str](), list[str]()
    while waiting or running:
        while waiting and len(running) < processes:
            name = waiting.pop(0)
            running[fork(partial(run_job, name))] = name
        pid, status = os.wait()
        name = running.pop(pid)
        if status:
            failed.append(name)
    shutil.rmtree(WORK)
    seconds = time.perf_counter() - began
    if failed:
        print(f"golden: jobs that did not come to their end: {', '.join(failed)}", file=sys.stderr)
        return 1
    commit = subprocess.run(["git", "-C", str(PACKAGE), "rev-parse", "HEAD"], capture_output=True, text=True)
    about = {"comparable": sorted(names), "commit": commit.stdout.strip(), "seconds": round(seconds)}
    (OUTPUT / "environment.json").write_text(json.dumps({"comparable": environment()}, indent=1) + "\n")
    (OUTPUT / "about.json").write_text(json.dumps(about, indent=1) + "\n")  # last: it says that all is there
    print(f"{seconds:.0f} s, {_cpu_seconds():.0f} s of CPU", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
