"""vLLM, SGLang, TGI and MLX: they read a checkpoint's config.json, each in its own way."""

from __future__ import annotations

import json
import math
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hf_posenc.checkpoint.manifest import ADAPTER_CONFIG
from hf_posenc.errors import InvalidRequestError
from hf_posenc.exports.folder import ExportFolder, check_one_list, command, refuse_adapter
from hf_posenc.methods.yarn import Yarn
from hf_posenc.utils.files import read_json
from hf_posenc.version import VLLM_KEY, VLLM_TESTED

# TGI's yarn has these built in, whatever config.json says.
_TGI_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}

_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank takes (vllm/config/lora.py)


def _usual_factor(factor: float, mscale: float = 1.0, mscale_all_dim: float = 0.0) -> float:
    """Return the attention factor that servers compute for yarn: ``0.1 ln(factor) + 1``, or DeepSeek's quotient."""
    over, under = (0.1 * weight * math.log(factor) + 1.0 for weight in (mscale, mscale_all_dim))
    return over / under


def _with_mscale(folder: ExportFolder) -> dict[str, Any]:
    """Return longrope parameters with the attention factor under Phi-3's names too, the ones servers read."""
    return {**folder.rope, "short_mscale": folder.attention_factor, "long_mscale": folder.attention_factor}


def _lines(folder: ExportFolder, rope: dict[str, Any], start: list[str], length: str, override: str) -> list[str]:
    """Return the command for the folder, and that for the base model with the rule as an override.

    Where the folder's own config.json does not say the rule, only the first, with the override.
    """
    target = folder.context_length
    if folder.overrides:  # the file is the base model's
        overrides = json.dumps({**folder.overrides, "rope_parameters": rope})
        return [command(*start, folder.path, length, target, override, overrides)]
    own = [] if rope == folder.rope else [override, json.dumps({"rope_parameters": rope})]
    first = command(*start, folder.path, length, target, *own)
    if folder.is_adapted:
        return [first]
    onto_base = json.dumps({"rope_parameters": rope, **folder.lengths})
    return [
        first,
        "# the same rule on the unextended base model:",
        command(*start, folder.base_model, length, target, override, onto_base),
    ]


def vllm(folder: ExportFolder) -> list[str]:
    """vLLM: config.json as Transformers 5 reads it, or ``--hf-overrides``, which replaces ``rope_parameters`` whole.

    ``get_rope`` (vllm/model_executor/layers/rotary_embedding/__init__.py) reads all of Transformers' yarn keys;
    earlier versions read ``attn_factor`` and no ``attention_factor``. Its longrope is for any model, takes
    ``long_factor`` for good once ``max_model_len`` exceeds the original length, and reads ``short_mscale`` and
    ``long_mscale`` instead of ``attention_factor`` (phi3_long_rope_scaled_rope.py).
    """
    check_one_list(folder, "vLLM", "it takes long_factor for every text once --max-model-len exceeds the original")
    rope = _with_mscale(folder) if folder.rope_type == "longrope" else folder.rope
    lines = _lines(folder, rope, ["vllm", "serve"], "--max-model-len", "--hf-overrides")
    if folder.adapter is not None:
        lines = _with_adapter(folder, lines[0])
    if (
        folder.rope_type == Yarn.rope_type
        and {"attention_factor", "mscale", "mscale_all_dim", "truncate"} & rope.keys()
    ):
        lines.insert(0, "# earlier versions skip some of attention_factor, mscale and truncate, without a word")
    if not folder.overrides and not folder.against_two_modes():
        lines.append(f"# {_short_requests(folder)} are read without the rule")
    if str(folder.config.get("dtype", folder.config.get("torch_dtype"))) == "float32":
        lines.append("# the weights are float32, and vLLM computes in bfloat16 unless you add --dtype float32")
    return lines


def _with_adapter(folder: ExportFolder, serve: str) -> list[str]:
    """Return the commands for an adapter: for requests that name it, and with the plugin for all long ones.

    What vLLM does not run of PEFT is in vllm/lora/peft_helper.py.
    """
    settings = read_json(Path(str(folder.adapter)) / ADAPTER_CONFIG)
    if (kind := settings.get("peft_type", "LORA")) != "LORA":
        refuse_adapter(folder, f"vLLM runs LoRA adapters only, and this one is of PEFT's type {kind}")
    rank = max([settings["r"], *(settings.get("rank_pattern") or {}).values()])
    allowed = next((one for one in _LORA_RANKS if one >= rank), None)
    refused = {
        f"the rank {rank}, above {_LORA_RANKS[-1]}": allowed is None,
        "weights that were trained as a whole (finetune --no-lora-embeddings trains none)": settings["modules_to_save"],
        "DoRA": settings.get("use_dora"),
        "a sliding window that was changed": "sliding_window" in folder.manifest,
    }
    if reasons := [reason for reason, holds in refused.items() if holds]:
        refuse_adapter(folder, f"vLLM does not run it, because of {' and '.join(reasons)}")
    # On CPUs, vLLM 0.32 reads requests without an adapter with what is in the last of its places (lora/ops/torch_ops).
    serve += " " + command("--enable-lora", "--max-loras", 2, "--max-lora-rank", str(allowed))
    if isinstance(modules := settings["target_modules"], list):
        # No others are wrapped: they cost time, and on CPUs a wrapped head cannot score the tokens of a prompt.
        serve += " " + command("--lora-target-modules", *sorted(modules))
    lines = [
        f"{serve} {command('--lora-modules', f'extended={folder.adapter}')}",
        "# name the model 'extended' in requests; under the base model's name they get its rule without its weights",
    ]
    if not folder.against_two_modes():
        plugin = json.dumps({VLLM_KEY: folder.adapter})
        lines.append(f"# {_short_requests(folder)} get neither rule nor adapter, and longer ones both:")
        lines.append(f"{serve} {command('--additional-config', plugin)}")
    return lines


def _short_requests(folder: ExportFolder) -> str:
    """Return the beginning of a sentence on what the plugin of vLLM does."""
    try:
        found = version("vllm")
        is_it = f" (which it is: {found})" if found.startswith(VLLM_TESTED) else f" (which has {found} here)"
    except PackageNotFoundError:
        is_it = ""
    return (
        f"with hf_posenc installed beside vLLM {VLLM_TESTED}*{is_it}, requests of at most {folder.unextended()[0]} "
        "tokens, prompt and max_tokens,"
    )


def sglang(folder: ExportFolder) -> list[str]:
    """SGLang: config.json, or ``--json-model-override-args``, which is merged into ``rope_parameters``.

    ``get_rope`` (python/sglang/srt/layers/rotary_embedding/factory.py) does not read ``attention_factor``: its yarn
    multiplies the usual one by ``attn_factor`` (yarn.py). Its longrope chooses a list by the positions of a batch, and
    reads ``short_mscale`` and ``long_mscale`` (rope_variant.py).
    """
    check_one_list(folder, "SGLang", "it takes the list by the longest text of a batch")
    rope = folder.rope
    if folder.rope_type == "longrope":
        rope = _with_mscale(folder)
    elif folder.rope_type == Yarn.rope_type and "attention_factor" in rope:
        pair = [rope[key] for key in ("mscale", "mscale_all_dim") if rope.get(key) is not None]
        usual = _usual_factor(rope["factor"], *(pair if len(pair) == 2 else ()))
        rope = {**rope, "attn_factor": folder.attention_factor / usual}
    start = ["python", "-m", "sglang.launch_server", "--model-path"]
    return _lines(folder, rope, start, "--context-length", "--json-model-override-args")


def tgi(folder: ExportFolder) -> list[str]:
    """TGI: ``rope_theta`` and ``rope_scaling`` of config.json.

    ``PositionRotaryEmbedding.static`` (server/text_generation_server/layers/rotary.py): linear is accepted and not
    applied (``pass``); yarn reads ``factor``, the original length and DeepSeek's pair; longrope takes ``short_factor``
    up to the original length and ``long_factor`` after it, times Phi-3's attention factor.
    """
    rope, target = folder.rope, folder.context_length
    _refuse_override(folder, "TGI")
    check_one_list(folder, "TGI", "it rotates early positions by one list and late ones by the other")
    if folder.rope_type == "linear":
        raise InvalidRequestError(
            "TGI cannot express linear: it accepts rope_type 'linear' and ROPE_SCALING=linear, and divides nothing by "
            "the factor. Save the model with ntk, or use another server."
        )
    if folder.rope_type == Yarn.rope_type:
        _refuse_unread("TGI", {key: rope[key] for key, value in _TGI_YARN.items() if rope.get(key, value) != value})
    _check_attention_factor(folder, "TGI")
    lengths = ("--max-input-tokens", target - 1, "--max-total-tokens", target)
    return [
        command("text-generation-launcher", "--model-id", folder.path, *lengths),
        "# nothing for the base model: ROPE_SCALING and ROPE_FACTOR name linear and dynamic only",
    ]


def mlx(folder: ExportFolder) -> list[str]:
    """mlx-lm: ``rope_theta`` and ``rope_scaling`` of config.json.

    ``initialize_rope`` (mlx_lm/models/rope_utils.py): linear and llama3 as Transformers; yarn reads the betas and
    DeepSeek's pair; longrope takes ``long_factor`` for every text. No rule reads ``attention_factor``: yarn and
    longrope compute their usual one.
    """
    _refuse_override(folder, "mlx-lm")
    check_one_list(folder, "mlx-lm", "it takes long_factor for every text")
    if folder.rope_type == Yarn.rope_type:
        _refuse_unread("mlx-lm", {} if folder.rope.get("truncate", True) else {"truncate": False})
    _check_attention_factor(folder, "mlx-lm")
    return [
        command("mlx_lm.server", "--model", folder.path),
        "# it computes in the folder's dtype; there are no flags for lengths, and none for a rule on the base model",
    ]


def _refuse_override(folder: ExportFolder, title: str) -> None:
    if folder.overrides:
        method, length = folder.manifest["method"], folder.context_length
        flags = ("--method", method, "--context-length", length, "--on-scaled", "replace")
        raise InvalidRequestError(
            f"{title} reads config.json only, and that of this folder is the base model's: it has no override for the "
            f"rule. Save a model with it: {command('hf-posenc', 'patch', folder.path, 'OUT', *flags)}."
        )


def _check_attention_factor(folder: ExportFolder, title: str) -> None:
    """Raise unless the attention factor is the one that a program computes from the rest of the rule."""
    rope, usual = folder.rope, 1.0
    if folder.rope_type == Yarn.rope_type:
        usual = _usual_factor(rope["factor"], rope.get("mscale", 1.0), rope.get("mscale_all_dim", 0.0))
    elif folder.rope_type == "longrope":
        usual = math.sqrt(1 + math.log(folder.context_length / folder.original) / math.log(folder.original))
    if not math.isclose(folder.attention_factor, usual, rel_tol=1e-6):
        _refuse_unread(title, {"attention_factor": folder.attention_factor})


def _refuse_unread(title: str, unread: dict[str, Any]) -> None:
    if unread:
        named = ", ".join(f"{key} {value}" for key, value in unread.items())
        raise InvalidRequestError(
            f"{title} cannot express {named}: it computes this itself and does not read it. Save the model with the "
            "rule's defaults, or use another server: --to gguf writes every static rule into a file for llama.cpp."
        )
