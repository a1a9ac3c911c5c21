"""The jobs of ``golden`` on small random models of many families: every method, encoding and call."""

from __future__ import annotations

import hashlib
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from golden_cases import CALLS, ENCODINGS, FAMILIES, LENGTHS, MORE_CALLS, PRESETS, REQUESTS, SCALED, SIZES
from golden_checkout import hf_posenc
from golden_digests import attempt, content, digest, folder_content, lines, plain, said, state_digest


def build(family: str) -> PreTrainedModel:
    """Return a random model whose attention depends on positions; equal calls give equal weights."""
    name, settings = FAMILIES[family]
    torch.manual_seed(0)
    if family == "qwen2_vl":
        text = {**SIZES, **settings}
        vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}
        config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **_tokens_of(text))
        model: PreTrainedModel = transformers.Qwen2VLForConditionalGeneration(config)
    else:
        config_name = "Gemma3TextConfig" if family == "gemma3" else f"{name}Config"
        config = getattr(transformers, config_name)(**{**SIZES, **settings})
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


@torch.no_grad()
def logits(model: Any, length: int, **kwargs: Any) -> torch.Tensor:
    return model(token_ids(length), use_cache=False, **kwargs).logits


@torch.no_grad()
def forwards(model: Any) -> dict[str, Any]:
    """Return the logits of both lengths, of chunks over a KV cache, of a padded batch, and generated tokens."""
    recorded: dict[str, Any] = {str(length): attempt(lambda: digest(logits(model, length))) for length in LENGTHS}  # noqa: B023
    recorded["cached"] = attempt(partial(_in_chunks, model))
    recorded["padded"] = attempt(partial(_padded, model))
    recorded["generated"] = attempt(partial(_generated, model))
    return recorded


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
    recorded: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if "inv_freq" in key and buffer is not None and "visual" not in name:
                recorded[f"{name}.{key}"] = {"dtype": str(buffer.dtype), "values": buffer.double().flatten().tolist()}
        for key, value in vars(module).items():
            if key.endswith(("attention_scaling", "rope_type")) or (key == "scaling" and isinstance(value, float)):
                recorded[f"{name}.{key}"] = plain(value)
    return recorded


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
    model, recorded = build(family), dict[str, Any]()
    before, shown = (state_of(model), config_of(model)), repr(model)
    with said() as patching:
        refused = attempt(lambda: hf_posenc.patch_model(model, **kwargs))
    recorded["words"] = {"patching": patching}
    if isinstance(refused, dict):
        return {"refused": refused, **recorded, "unchanged": (state_of(model), config_of(model)) == before}
    drawn = torch.Generator().manual_seed(3)
    there = {name for name, _ in build(family).named_parameters()}
    for name, parameter in model.named_parameters():
        if name not in there:  # an encoding's own
            parameter.data.copy_(torch.randn(parameter.shape, generator=drawn) * 0.05)
    recorded["describe"] = plain(hf_posenc.describe(model))
    recorded["words"] |= {"verified": lines(str(hf_posenc.verify_model(model))), "repr": new_lines(shown, repr(model))}
    recorded["rotary"] = rotary(model)
    recorded["logits"] = forwards(model)
    if family == "qwen2_vl":
        recorded["logits"]["image positions"] = attempt(
            lambda: digest(logits(model, 100, position_ids=_image_positions()))
        )
    folder = Path("saved")
    shutil.rmtree(folder, ignore_errors=True)
    with said() as saving:
        recorded["saved"] = attempt(lambda: folder_content(hf_posenc.save_extended(model, folder / "extended")))
        recorded["save_pretrained"] = attempt(lambda: _saved_plainly(model, folder / "plain"))
    recorded["words"]["saving"] = saving
    if (folder / "extended").exists():
        recorded["described folder"] = attempt(lambda: plain(hf_posenc.describe(folder / "extended")))
        with said() as loading:
            recorded["reloaded"] = attempt(
                lambda: digest(logits(hf_posenc.load_extended(folder / "extended").eval(), 200))
            )
            recorded["reloaded by Transformers"] = attempt(
                lambda: digest(logits(type(model).from_pretrained(folder / "extended").eval(), 200))
            )
        recorded["words"]["loading"] = loading
    hf_posenc.unpatch_model(model)
    recorded["undone"] = {"state": state_of(model) == before[0], "config": config_of(model) == before[1]}
    recorded["undone"] |= {str(length): digest(logits(model, length))["sha256"] for length in LENGTHS}
    recorded["undone"]["repr"] = repr(model) == shown
    return recorded


def _saved_plainly(model: PreTrainedModel, folder: Path) -> dict[str, Any]:
    model.save_pretrained(folder)
    return {file.name: content(file) for file in sorted(folder.glob("*.json"))}


def _image_positions() -> torch.Tensor:
    """Return positions of a text with an image of 6 x 8 patches: ``(3, 1, 100)``."""
    cells = torch.cartesian_prod(torch.zeros(1, dtype=torch.long), torch.arange(6), torch.arange(8)) + 20
    after = torch.arange(100 - 20 - len(cells)) + 68
    return torch.cat([torch.arange(20).repeat(3, 1), cells.T, after.repeat(3, 1)], dim=1).unsqueeze(1)


def keywords(family: str, name: str, factor: float | None, options: dict[str, Any]) -> dict[str, Any]:
    recorded: dict[str, Any] = {"method": name, **options}
    if factor is not None:
        recorded["factor"] = factor
    if family in SCALED:
        recorded["on_scaled"] = "replace"
    if name == "longrope" and "long_factor" not in options:
        found = [buffer for key, buffer in build(family).named_buffers() if key.endswith("inv_freq")]
        pairs = found[-1].numel()  # that of the decoder, after an image tower's
        recorded |= {"short_factor": [1.0] * pairs, "long_factor": [1.0 + index for index in range(pairs)]}
    return recorded


def family_job(family: str) -> dict[str, Any]:
    """Every method on one family."""
    model = build(family)
    recorded: dict[str, Any] = {
        "plain": {"rotary": rotary(model), "logits": forwards(model), "config": config_of(model)}
    }
    recorded["plain"]["words"] = {"verified": attempt(lambda: lines(str(hf_posenc.verify_model(model))))}
    named = {name for name, _, _ in (*REQUESTS.values(), *ENCODINGS.values())}
    new = {row["name"]: (row["name"], 4, {}) for row in hf_posenc.available_methods() if row["name"] not in named}
    for key, (name, factor, options) in {**REQUESTS, **new}.items():
        recorded[key] = attempt(lambda: request(family, keywords(family, name, factor, options)))  # noqa: B023
    return recorded


def encodings_job(family: str) -> dict[str, Any]:
    """Every encoding on one family."""
    return {
        key: attempt(lambda: request(family, keywords(family, name, factor, options)))  # noqa: B023
        for key, (name, factor, options) in ENCODINGS.items()
    }


def calls_job() -> dict[str, Any]:
    """Ways to ask, and mistakes; the registry; configs that are extended; layouts; adapters."""
    recorded: dict[str, Any] = {"methods": plain(hf_posenc.available_methods()), "public": sorted(hf_posenc.__all__)}
    recorded["patch_model"] = {key: attempt(lambda: request("llama", kwargs)) for key, kwargs in CALLS.items()}  # noqa: B023
    for key, (family, kwargs) in MORE_CALLS.items():
        recorded["patch_model"][key] = attempt(lambda: request(family, kwargs))  # noqa: B023
    recorded["extend_config"] = {}
    for family in FAMILIES:
        config = build(family).config
        recorded["extend_config"][family] = {
            key: attempt(lambda: plain(hf_posenc.extend_config(config, **keywords(family, name, 4, options)).to_dict()))  # noqa: B023
            for key, (name, _, options) in REQUESTS.items()
        }
    recorded["presets"] = {}
    for preset, (kind, original, window) in PRESETS.items():
        config = getattr(transformers, f"{kind}Config")(max_position_embeddings=original, sliding_window=window)
        recorded["presets"][preset] = attempt(lambda: plain(hf_posenc.extend_config(config, preset=preset).to_dict()))  # noqa: B023
    recorded["twice"] = attempt(
        lambda: hf_posenc.patch_model(hf_posenc.patch_model(build("llama"), "yarn", 4), "ntk", 2)
    )
    recorded["not patched"] = attempt(lambda: hf_posenc.unpatch_model(build("llama")))
    recorded["no model"] = attempt(lambda: hf_posenc.patch_model(torch.nn.Linear(2, 2), "yarn", 4))
    model = build("llama")
    with hf_posenc.patched(model, method="linear", factor=2):
        recorded["inside"] = digest(logits(model, 100))
    recorded["outside"] = digest(logits(model, 100))
    model.model.rotary_emb.inv_freq[0] *= 1.001
    recorded["damaged"] = attempt(lambda: hf_posenc.verify_model(model))
    half = hf_posenc.patch_model(build("llama"), "yarn", 4).to(torch.bfloat16)
    recorded["bfloat16"] = {"rotary": rotary(half), "logits": digest(logits(half, 100))}
    layout = build("llama")
    hf_posenc.convert_layout(layout)
    recorded["interleaved"] = {"state": state_of(layout), "logits": digest(logits(layout, 100))}
    hf_posenc.convert_layout(layout, "half_split")
    recorded["half_split"] = {"state": state_of(layout), "logits": digest(logits(layout, 100))}
    recorded["adapters"] = attempt(_adapters)
    return recorded


def _adapters() -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model

    base = build("llama")
    base.save_pretrained("base")
    base = AutoModelForCausalLM.from_pretrained("base")
    torch.manual_seed(5)
    settings = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(base, settings).eval()
    hf_posenc.patch_model(model, "yarn", 4)
    recorded = {"describe": plain(hf_posenc.describe(model)), "logits": digest(logits(model, 100))}
    recorded["saved"] = folder_content(hf_posenc.save_extended(model, "adapter"))
    model.save_pretrained("plain_adapter")
    recorded["save_pretrained"] = folder_content(Path("plain_adapter"))
    recorded["reloaded"] = digest(logits(hf_posenc.load_extended("adapter").eval(), 100))
    return recorded
