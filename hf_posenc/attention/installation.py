"""Making a model attend by hf_posenc's attention implementation, and by its own again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from hf_posenc.attention.inner import PREFIX
from hf_posenc.attention.interface import (
    CROSS,
    FULL,
    INNER,
    PASS,
    attention_of,
    drop_attention,
    register,
    set_attention,
)
from hf_posenc.attention.rotating_attention import RotatingAttention
from hf_posenc.attention.rotation import ROTATIONS, Rotation, find_rotation
from hf_posenc.errors import InvalidRequestError, RotaryMismatchError, argument
from hf_posenc.families.discovery import declared_rope
from hf_posenc.families.family_data import FULL_ATTENTION, family_of
from hf_posenc.families.refusals import TAKE_STATIC, Refusal
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.families.rotary_module import SavedRotary, rotary_class, write_rotary
from hf_posenc.families.sliding_window import window_of_all_layers
from hf_posenc.methods.base import DistanceMethod, Extension, plain_frequencies

_PROBE_TOKENS = 5
_PROBE_EPSILONS = 16  # roundings of a state that is rotated twice, in epsilons of its dtype


@dataclass
class InstalledAttention:
    """What replacing the attention changed, to undo it."""

    attention: RotatingAttention
    implementation: str
    hooks: list[RemovableHandle]


def check_attention(rotary: RotaryModel, extension: Extension) -> Rotation:
    """Return how this model rotates queries and keys; nothing is changed.

    Raises:
        ValueError: Its attention cannot be replaced; with the reason.
    """
    config = rotary.text_config
    refusal = refusal_of_family(rotary) or refusal_of_settings(config)
    if refusal is None and window_of_all_layers(config) and extension.sliding_window != "off":
        refusal = Refusal(config.model_type, "window", {"how": argument("sliding_window", "off")})
    elif refusal is None and getattr(getattr(rotary.wrapped, "active_peft_config", None), "is_prompt_learning", False):
        refusal = Refusal(config.model_type, "prefix_tuning")
    rotation = _rotation(rotary) if refusal is None else None
    if rotation is None:
        refusal = refusal or Refusal(config.model_type, "rotation")
        raise refusal.error(extension.method.name, TAKE_STATIC)
    return rotation


def refusal_of_family(rotary: RotaryModel) -> Refusal | None:
    """Return why methods that run in attention are not for a model's family; None if they are."""
    config, model, found = rotary.text_config, rotary.model, rotary.rotary_modules
    name, family = config.model_type, family_of(config.model_type)
    if family.refused_in_attention:
        return Refusal(name, family.refused_in_attention)
    if family.latent_attention or getattr(config, "kv_lora_rank", None):
        return Refusal(name, "latent_attention")
    if any(module.rpartition(".")[2] == "indexer" for module, _ in model.named_modules()):
        return Refusal(name, "indexer")
    if len(found) != 1:
        return Refusal(name, "rotary_module_per_layer", {"count": len(found)})
    if not all(goes_through_interface(layer) for layer in attention_layers(model)[:1]):
        return Refusal(name, "no_attention_interface")
    return None


def refusal_of_settings(config: PreTrainedConfig) -> Refusal | None:
    """Return why they are not for a model with these settings; None if they are."""
    name = config.model_type
    if declared_rope(config).get("rope_type") == "proportional":
        return Refusal(name, "unrotated_pairs")
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return Refusal(name, "attention_in_chunks")
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        return Refusal(name, "not_causal")
    if config._attn_implementation not in INNER:
        values = {"implementation": config._attn_implementation, "allowed": ", ".join(INNER)}
        return Refusal(name, "implementation", values)
    return None


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules that know which layer they are: those of attention, and some of the decoder's own."""
    return [module for module in model.modules() if isinstance(vars(module).get("layer_idx"), int)]


def goes_through_interface(layer: nn.Module) -> bool:
    """Return whether the file that a layer's class is defined in knows Transformers' AttentionInterface."""
    return "ALL_ATTENTION_FUNCTIONS" in _code(layer)


def reads_whole_context(layer: nn.Module, config: PreTrainedConfig) -> bool:
    """Return whether an attention layer has no window and no chunks."""
    types = getattr(config, "layer_types", None)
    index: Any = layer.layer_idx
    return types is None or index >= len(types) or types[index] in FULL_ATTENTION


def _code(module: nn.Module) -> dict[str, Any]:
    """Return the names in the file that a module's class is defined in."""
    return vars(sys.modules[type(module).__module__])


def _rotation(rotary: RotaryModel) -> Rotation | None:
    """Return how a family rotates; as Llama where its code cannot be called, which the probe then finds out."""
    module, label, prefix = rotary.rotary_module, rotary.label, rotary.prefix
    config: Any = module.config
    try:
        with torch.device("cpu"):
            fresh: Any = rotary_class(module)(config)
            arguments = (torch.zeros(1, 1, 1), torch.arange(4)[None])
            cos, sin = fresh(*arguments) if label is None else fresh(*arguments, layer_type=label)
        apply = _code(fresh)["apply_rotary_pos_emb"]
        return find_rotation(
            apply, cos, sin, getattr(fresh, f"{prefix}inv_freq"), getattr(fresh, f"{prefix}attention_scaling")
        )
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return ROTATIONS[0]


def install_attention(
    rotary: RotaryModel, extension: Extension, saved: SavedRotary, rotation: Rotation
) -> InstalledAttention:
    """Replace a model's attention, and see that the model rotates queries and keys as the new one takes it to.

    Args:
        rotary: The model; its rotary module holds the plain frequencies.
        extension: The rule.
        saved: What the rotary module holds.
        rotation: How the family rotates.

    Raises:
        ValueError: The model's output is not a number, on a short text already.
        RotaryMismatchError: A short text reads otherwise then, or what reaches the attention is not what the rotary
            module says; the attention is as it was.
    """
    tokens = min(_PROBE_TOKENS, _plain_until(extension))
    before = probe(rotary.model, tokens)
    if before is not None and bool(before.isnan().any()):
        raise InvalidRequestError(
            f"the output of {type(rotary.model).__name__} is not a number (NaN) on a text of {tokens} tokens, before "
            f"it is extended: its weights are damaged, or it overflows in {rotary.model.dtype}."
        )
    installed = set_up_attention(rotary, extension, saved.buffers[f"{rotary.prefix}inv_freq"], rotation)
    try:
        after = probe(rotary.model, tokens)
        agree = before is None or after is None or torch.equal(before, after)
        if not agree or (after is not None and not _rotates_as_known(rotary, installed.attention, saved)):
            raise RotaryMismatchError(
                f"the attention of {type(rotary.model).__name__} does not rotate queries and keys in the usual way, "
                "so hf_posenc's attention implementation cannot rotate them further. Take a static method, such as "
                "'yarn'."
            )
    except Exception:
        remove_attention(rotary, installed)
        raise
    return installed


def _rotates_as_known(rotary: RotaryModel, attention: RotatingAttention, saved: SavedRotary) -> bool:
    """Return whether the inverse rotation takes queries and keys back to what no rotation gives, in every layer.

    Queries and keys are seen twice, as they are and with frequencies of zero, while attention hands on values alone.
    """
    module, prefix = rotary.rotary_module, rotary.prefix
    names = (f"{prefix}inv_freq", f"{prefix}original_inv_freq")
    unrotated_state = SavedRotary(
        {**saved.buffers, **{name: torch.zeros_like(attention.plain) for name in names}}, saved.attributes
    )
    seen = []
    try:
        for state in (saved, unrotated_state):
            write_rotary(module, state)
            attention.seen = []
            probe(rotary.model, _PROBE_TOKENS)
            seen.append(attention.seen)
    finally:
        attention.seen = None
        write_rotary(module, saved)
    full = [(rotated, unrotated) for rotated, unrotated in zip(*seen, strict=True) if rotated[0] == FULL]
    pairs = [pair for rotated, unrotated in full for pair in zip(rotated[1:], unrotated[1:], strict=True)]
    return bool(pairs) and all(_rotates_back(attention, *pair) for pair in pairs)


def _rotates_back(attention: RotatingAttention, rotated: torch.Tensor, unrotated: torch.Tensor) -> bool:
    if torch.equal(rotated, unrotated):  # without positions
        return False
    positions = torch.arange(rotated.shape[2], device=rotated.device)[None]
    zeros = torch.zeros(1, len(attention.plain), device=rotated.device)
    back = attention.rotation_tables(positions, positions, zeros, torch.ones(1, device=rotated.device))
    error = (attention.rotation.rotate(rotated, back) - unrotated).abs().max()
    epsilon = max(torch.finfo(dtype).eps for dtype in (rotated.dtype, torch.float32))  # angles are float32 at best
    return bool(error <= _PROBE_EPSILONS * epsilon * unrotated.abs().max())


def set_up_attention(
    rotary: RotaryModel, extension: Extension, plain: torch.Tensor, rotation: Rotation
) -> InstalledAttention:
    """Give every attention layer of a model what it attends by.

    Args:
        rotary: The model.
        extension: The rule.
        plain: The float32 frequencies the model was trained with.
        rotation: How the family rotates.
    """
    register()
    config = rotary.text_config
    inner = config._attn_implementation
    attention = RotatingAttention(extension, inner, plain, rotation)
    for module in attention_layers(rotary.model):
        set_attention(module, attention, layer_kind(module, config))
    for each in rotary.text_configs:
        each._attn_implementation = PREFIX + inner
    hooks = [
        rotary.decoder.register_forward_pre_hook(attention.enter, with_kwargs=True),
        rotary.rotary_module.register_forward_pre_hook(attention.note_positions, with_kwargs=True),
        rotary.decoder.register_forward_hook(attention.leave, always_call=True),
    ]
    return InstalledAttention(attention, inner, hooks)


def remove_attention(rotary: RotaryModel, installed: InstalledAttention) -> None:
    """Undo ``set_up_attention``."""
    for hook in installed.hooks:
        hook.remove()
    for each in rotary.text_configs:
        each._attn_implementation = installed.implementation
    for module in rotary.model.modules():
        drop_attention(module)


def attention_problem(rotary: RotaryModel, installed: InstalledAttention) -> str | None:
    """Return what of the attention is no longer in place; None if all is."""
    config = rotary.text_config
    if config._attn_implementation != PREFIX + installed.implementation:
        return f"the attention implementation is {config._attn_implementation!r}"
    if any(attention_of(module) is not installed.attention for module in attention_layers(rotary.model)):
        return "an attention layer has lost what it attends by"
    if any(hook.id not in (hook.hooks_dict_ref() or {}) for hook in installed.hooks):
        return "a hook of the decoder is gone"
    expected = plain_frequencies(installed.attention.spec)
    if not torch.allclose(installed.attention.plain.double().cpu(), expected, rtol=1e-5, atol=0):
        return "the frequencies it rotates by are not the model's"
    for name, module in rotary.rotary_modules.items():
        buffer: Any = module._buffers[f"{rotary.prefix}inv_freq"]
        if not buffer.is_meta and not torch.equal(buffer.cpu(), installed.attention.plain.cpu()):
            return (
                f"{name} rotates queries and keys by other frequencies than the model's, which the attention counts on"
            )
    return None


def has_positions(layer: nn.Module) -> bool:
    """Return whether a layer has positions: some of SmolLM3's and Cohere 2 MoE's have none."""
    return bool(getattr(layer, "use_rope", True) and getattr(layer, "force_rope", True))


def attends_to_text(layer: nn.Module) -> bool:
    """Return whether a layer's keys are those of the text: Transformers' cross-attention to images is not causal."""
    return hasattr(layer, "is_causal")


def layer_kind(module: nn.Module, config: PreTrainedConfig) -> str:
    if not attends_to_text(module):
        return CROSS
    return FULL if reads_whole_context(module, config) and has_positions(module) else PASS


def _plain_until(extension: Extension) -> int:
    """Return up to how many tokens a rule leaves a text as it is."""
    if isinstance(extension.method, DistanceMethod):
        return extension.method.regions(extension.spec).plain_until
    return extension.spec.original_max_position_embeddings


@torch.no_grad()
def probe(model: PreTrainedModel, num_tokens: int) -> torch.Tensor | None:
    """Return what a model makes of a few tokens, to see that it reads a short text as before; None on meta."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return None
    modes = {module: module.training for module in model.modules()}
    try:
        ids = torch.arange(1, 1 + num_tokens, device=model.device)[None]
        model.train(False)
        with _zero3_gathered(model):
            output: torch.Tensor = model(input_ids=ids, use_cache=False)[0]
        return output
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def _zero3_gathered(model: nn.Module) -> Iterator[None]:
    """While open, weights that DeepSpeed ZeRO-3 has shared out (they have a ``ds_id``) are whole while they are used.

    One module at a time: the whole model need not fit into one process. Every process has to call it.
    """
    shared = {
        module: parts
        for module in model.modules()
        if (parts := [p for p in module.parameters(recurse=False) if hasattr(p, "ds_id")])
    }
    if not shared:
        yield
        return
    import deepspeed

    gathered: dict[nn.Module, Any] = {}

    def gather(module: nn.Module, args: Any) -> None:
        gathered[module] = deepspeed.zero.GatheredParameters(shared[module])
        gathered[module].__enter__()

    def share_out(module: nn.Module, args: Any, output: Any) -> None:
        if module in gathered:
            gathered.pop(module).__exit__(None, None, None)

    hooks = [module.register_forward_pre_hook(gather) for module in shared]
    hooks += [module.register_forward_hook(share_out, always_call=True) for module in shared]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
