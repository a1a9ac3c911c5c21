"""Two independent computations held against each other: a live rotary module and the float64 closed form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_posenc.errors import ExtensionMissingError, RotaryMismatchError, RotaryOutputError
from hf_posenc.families.family_data import family_of
from hf_posenc.families.rotary_model import RotaryModel, prefix_of
from hf_posenc.methods.base import Method, Unscaled
from hf_posenc.methods.registry import get_method
from hf_posenc.spec import RopeSpec

_RTOL = 1e-6
_PROBES = (0, 1, 2, 5, 17, 63)  # positions at which cos and sin are compared
_HINT = (
    "A config changed after loading has no effect on the model, and a later cast or another library may have changed "
    "the module: reload the model and call patch_model."
)


@dataclass(frozen=True)
class RotaryCheck:
    """The largest deviations of one module, or of what it has for one layer type, from the closed form.

    Attributes:
        name: The module's name in the model.
        inv_freq_error: Relative, over all pairs.
        attention_factor: What multiplies cos and sin, as found.
        output_error: Absolute, of cos and sin at a few positions.
        layer_type: A layer type besides the one that is extended; None for the module's other frequencies.
    """

    name: str
    inv_freq_error: float
    attention_factor: float
    output_error: float
    layer_type: str | None = None


@dataclass(frozen=True)
class Verification:
    """The result of ``verify_model``, which raises instead if something differs.

    Attributes:
        extension: Method, factor, options, original and target length.
        modules: One entry per rotary module, and per further layer type in it; empty for a model on the meta device,
            and for an encoding in the place of RoPE, under which they rotate nothing.
        attention_layers: How many layers run the rule in their attention; 0 for a static rule.
    """

    extension: dict[str, Any]
    modules: tuple[RotaryCheck, ...]
    attention_layers: int = 0

    def __str__(self) -> str:
        """Return the extension and what was found, in words."""
        return f"{extension_words(self.extension)}; verified: {self.found}"

    @property
    def found(self) -> str:
        """The compared values and the closeness of their agreement, in words."""
        words = []
        if self.attention_layers:
            words.append(f"run by {count(self.attention_layers, 'attention layer')}")
        if self.modules:
            error = max(check.inv_freq_error for check in self.modules)
            held = "the model's own frequencies" if self.attention_layers else "the closed form"
            modules = {check.name for check in self.modules}
            words.append(f"{count(len(modules), 'rotary module')} within {error:.1g} of {held}")
        if not words:
            added = self.extension["method"] != "none" and get_method(self.extension["method"]).is_encoding
            words = ["it is added to the embeddings" if added else "nothing, as there is no data yet"]
        return ", ".join(words)


def count(number: int, noun: str) -> str:
    """Return a number with a noun, in the plural where it is not one."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def extension_words(extension: Mapping[str, Any]) -> str:
    """Return method, factor and lengths of what ``describe`` returns, in words."""
    others = extension.get("other_layer_types", {})
    also = "".join(f"; {label}: {rule['method']} x{rule['factor']:g}" for label, rule in others.items())
    if extension["method"] == "none":
        return f"not extended: {extension['context_length']} tokens{also}"
    lengths = f"{extension['original_max_position_embeddings']} -> {extension['context_length']} tokens"
    return f"{extension['method']} x{extension['factor']:g}: {lengths}{also}"


def check_described(held: Mapping[str, Any], expected: Mapping[str, Any], said_by: str, checkpoint: str) -> None:
    """Compare what a live model runs with what its config or a manifest says, by the names of ``describe``.

    Raises:
        ExtensionMissingError: They differ; ``said_by`` and ``checkpoint`` are its.
    """
    differing = {name: value for name, value in expected.items() if held.get(name) != value}
    if differing:
        raise ExtensionMissingError(differing, {name: held.get(name) for name in differing}, said_by, checkpoint)


def _live_rope_type(module: nn.Module, label: str | None) -> str:
    rope_type: Any = module.rope_type
    return str(rope_type if label is None else rope_type[label])


def _expected(
    module: nn.Module, label: str | None, spec: RopeSpec, method: Method
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return the closed form's original frequencies, those in force now, and the attention factor."""
    original, attention_factor = method.frequencies(spec)
    if method.temperature_on_logits:
        attention_factor = 1.0  # it is in the softmax scale
    # Transformers' dynamic rule and longrope change inv_freq with the length of a forward.
    if _live_rope_type(module, label) == "dynamic":
        cached: Any = getattr(module, f"{prefix_of(label)}max_seq_len_cached", module.max_seq_len_cached)
        return original, method.frequencies(spec, int(cached))[0], attention_factor
    return original, original, attention_factor


def check_rotary(
    rotary: RotaryModel,
    name: str,
    spec: RopeSpec,
    method: Method,
    rtol: float | None = None,
    label: str | None = None,
) -> RotaryCheck:
    """Compare one module with the closed form.

    Args:
        rotary: The model.
        name: Name of one of its rotary modules.
        spec: What the model was trained with.
        method: What it should hold.
        rtol: Relative tolerance; None for float32's own.
        label: The layer type; None for the one that is extended.

    Raises:
        RotaryMismatchError: It differs.
    """
    module, other = rotary.rotary_modules[name], label
    where = name if other is None else f"{name}, {other}"
    label = rotary.label if other is None else other
    prefix = prefix_of(label)
    # float32 holds an exponent with a relative error of 2**-24, which the base multiplies by its logarithm.
    tolerance = rtol if rtol is not None else _RTOL * max(1.0, math.log(spec.rope_theta) / math.log(1e6))
    original, current, attention_factor = _expected(module, label, spec, method)
    error = _relative(name, f"{prefix}original_inv_freq", module, original)
    if _live_rope_type(module, label) != "longrope":
        error = max(error, _relative(name, f"{prefix}inv_freq", module, current))
    what = "no scaling" if isinstance(method, Unscaled) else method.name
    if not error <= tolerance:
        raise RotaryMismatchError(
            f"{where}: the live frequencies are not those of {what}: relative difference {error:.3g}, allowed "
            f"{tolerance:.3g}. {_HINT}"
        )
    live_factor = live_attention_factor(rotary, module, prefix)
    if not abs(live_factor - attention_factor) <= _RTOL * abs(attention_factor):
        raise RotaryMismatchError(
            f"{where}: the live attention factor is {live_factor:.6g}, {what} asks for {attention_factor:.6g}. {_HINT}"
        )
    output_error = _check_output(module, label, where, spec, original, attention_factor, tolerance)
    return RotaryCheck(name, error, live_factor, output_error, other)


def live_attention_factor(rotary: RotaryModel, module: nn.Module, prefix: str) -> float:
    """Return the factor by which a rotary module multiplies cos and sin, in texts up to the original length."""
    parameters: Any = module.config.rope_parameters  # type: ignore[union-attr]  # rotary modules have one
    names = family_of(rotary.model_type).attention_factor_names
    if names and parameters["rope_type"] != "default":  # its forward reads the config
        return float(parameters[names[0]])
    return float(module.__dict__[f"{prefix}attention_scaling"])


def check_scale(name: str, found: float, expected: float) -> None:
    """Compare the softmax scale of an attention module with its closed form.

    Raises:
        RotaryMismatchError: It differs.
    """
    if not abs(found - expected) <= _RTOL * expected:
        raise RotaryMismatchError(
            f"{name}: the live softmax scale is {found:.6g}, the rotary settings ask for {expected:.6g}. {_HINT}"
        )


def _relative(name: str, buffer: str, module: nn.Module, expected: torch.Tensor) -> float:
    live = getattr(module, buffer).detach().to(device="cpu", dtype=torch.float64)
    if live.shape != expected.shape:
        raise RotaryMismatchError(
            f"{name}.{buffer} holds {live.numel()} frequencies, the config says {expected.numel()} (rotary_dim / 2)."
        )
    error = (live - expected).abs()
    return float(
        torch.where(error > 0, error / expected.abs(), 0.0).max()
    )  # of a pair that never rotates, infinite or none


@torch.no_grad()
def _check_output(
    module: nn.Module,
    label: str | None,
    where: str,
    spec: RopeSpec,
    inv_freq: torch.Tensor,
    attention_factor: float,
    tolerance: float,
) -> float:
    """Run the module at a few positions: what it hands out must come from the frequencies it holds."""
    device = module.get_buffer(f"{prefix_of(label)}inv_freq").device
    # Within the original length, where rules that depend on the length of a forward are at rest.
    positions = [p for p in _PROBES if p < spec.original_max_position_embeddings - 1] or [0]
    probes = torch.tensor(positions, device=device).unsqueeze(0)
    cos, sin = _cos_and_sin(module, label, probes)
    alpha = module._buffers.get("alpha")  # Mistral Large 4 has a learned logarithm of each frequency's multiple
    learned = 1.0 if alpha is None else alpha.detach().cpu().double().exp()
    angles = torch.tensor(positions, dtype=torch.float64).unsqueeze(1) * inv_freq * learned
    num_pairs = len(inv_freq)
    error = 0.0
    for output, expected in ((cos, angles.cos()), (sin, angles.sin())):
        live = output[0].cpu().double()
        # Pairs are laid out in halves (cat) or side by side (repeat_interleave); either is the family's own.
        layouts = (live[:, :num_pairs], live[:, ::2]) if live.shape[-1] == 2 * num_pairs else (live,)
        error = max(error, min(float((x - expected * attention_factor).abs().max()) for x in layouts))
    allowed = abs(attention_factor) * (max(positions) * tolerance + 1e-5)
    if not error <= allowed:
        raise RotaryOutputError(
            f"{where}: cos and sin differ by {error:.3g} from what its frequencies give (allowed {allowed:.3g}): the "
            f"module does not use inv_freq as usual, so {type(module).__name__} cannot be scaled."
        )
    return error


def _cos_and_sin(module: nn.Module, label: str | None, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Call a rotary module; DeepSeek-V2 and Llama 4 hand out complex numbers."""
    x = torch.zeros(1, 1, 1, device=position_ids.device)
    output = module(x, position_ids) if label is None else module(x, position_ids, layer_type=label)
    return (output.real, output.imag) if isinstance(output, torch.Tensor) else output
