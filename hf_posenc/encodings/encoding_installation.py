"""Putting an encoding into a model whose own RoPE rotates nothing, and taking it out again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_posenc.attention.installation import (
    Installed,
    attend_by,
    attends_to_text,
    attention_layers,
    goes_through_interface,
    has_positions,
    refusal_of_family,
    refusal_of_settings,
)
from hf_posenc.attention.interface import CROSS, FULL, PASS
from hf_posenc.attention.self_check import probe
from hf_posenc.encodings.absolute import AbsolutePositions, first_layer
from hf_posenc.encodings.encoding_attention import EncodingAttention
from hf_posenc.errors import InvalidRequestError, RotaryMismatchError, argument
from hf_posenc.families.discovery import head_dim_of
from hf_posenc.families.refusals import Refusal
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.methods.base import Encoding, Extension, Method
from hf_posenc.methods.encodings.modules import AddedToEmbeddings, AddedToLogits, RotatesPairs
from hf_posenc.methods.explained import ModelShape

# Its name in the decoder, and so that of its parameters in a checkpoint.
MODULE = "positional_encoding"
# Biases are added by a mask of numbers, which no other implementation takes.
BIAS_INNER = ("sdpa", "eager")
_PROBE_TOKENS = 5


class InstalledEncoding(Installed):
    """An encoding that is applied in all layers, or before the first."""

    @property
    def encoding(self) -> nn.Module:
        """The module, with its parameters."""
        encoding: nn.Module = self.applied_by.encoding
        return encoding

    def problem(self, rotary: RotaryModel) -> str | None:
        if getattr(rotary.decoder, MODULE, None) is not self.encoding:
            return f"the decoder has lost its {MODULE}"
        [(name, module)] = rotary.rotary_modules.items()
        for buffer, frequencies in module.named_buffers():
            if buffer.endswith("inv_freq") and not frequencies.is_meta and frequencies.any():
                return f"{name} still rotates queries and keys ({buffer})"
        return super().problem(rotary)

    def remove(self, rotary: RotaryModel) -> None:
        super().remove(rotary)
        delattr(rotary.decoder, MODULE)


def check_encoding(rotary: RotaryModel, extension: Extension) -> None:
    """See that an encoding can be put into a model; nothing is changed.

    Raises:
        ValueError: It cannot; with the reason.
    """
    config = rotary.text_config
    name = config.model_type
    refusal = refusal_of_family(rotary) or refusal_of_settings(config)
    encoding = _make_module(config, extension)  # raises on sizes that do not fit
    if refusal is None and isinstance(encoding, AddedToLogits) and config._attn_implementation not in BIAS_INNER:
        how = argument("attn_implementation", "sdpa")
        refusal = Refusal(name, "no_bias", {"implementation": config._attn_implementation, "how": how})
    if refusal is None and isinstance(encoding, RotatesPairs):
        refusal = _several_ropes(config, extension.method)
    if refusal is None and getattr(rotary.wrapped, "peft_config", None):
        refusal = Refusal(name, "adapters")
    if refusal is not None:
        raise refusal.error(extension.method.name)


def install_encoding(rotary: RotaryModel, extension: Extension) -> InstalledEncoding:
    """Put an encoding in, and see that every layer that should apply it does.

    Args:
        rotary: The model; its rotary module rotates nothing.
        extension: The rule.

    Raises:
        ValueError: The attention implementation takes no bias, or a size does not fit.
        RotaryMismatchError: A layer does not apply it; the model is as before.
    """
    encoding = _make_module(rotary.text_config, extension)
    weight: Any = rotary.model.get_input_embeddings().weight
    encoding.to(weight.device, weight.dtype)
    rotary.decoder.add_module(MODULE, encoding)
    if isinstance(encoding, AddedToEmbeddings):
        installed = _before_layers(rotary, encoding)
    else:
        installed = _in_attention(rotary, encoding)
    try:
        _check_applied(rotary, installed.applied_by, min(_PROBE_TOKENS, extension.context_length))
    except Exception:
        installed.remove(rotary)
        raise
    return installed


def _make_module(config: PreTrainedConfig, extension: Extension) -> Any:
    """Return the encoding that an extension names, with new random parameters."""
    assert isinstance(extension.method, Encoding), extension.method
    shape = ModelShape(
        num_heads=int(config.num_attention_heads),
        hidden_size=int(config.hidden_size),
        head_dim=head_dim_of(config),
        length=extension.spec.original_max_position_embeddings,
        target=extension.context_length,
        spec=extension.spec,
        initializer_range=float(getattr(config, "initializer_range", 0.02)),
    )
    return extension.method.module(shape)


def load_parameters(model: PreTrainedModel, path: Path) -> None:
    """Fill the parameters of a model's encoding from the weights of a checkpoint's folder.

    Raises:
        ValueError: They are not there, or of another size.
    """
    encoding: nn.Module = getattr(RotaryModel(model).decoder, MODULE)
    applied = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118  # no dict: it has no other way to be read
                if f".{MODULE}." in f".{name}":
                    applied[f".{name}".partition(f".{MODULE}.")[2]] = weights.get_tensor(name)
    try:
        encoding.load_state_dict(applied)
    except RuntimeError as error:
        raise InvalidRequestError(f"{path} does not hold the parameters of its encoding: {error}") from error


def refuse_adapter(base: nn.Module, advice: str) -> None:
    """Refuse an adapter of a model whose encoding has parameters: PEFT saves its own alone, and others would be drawn.

    Args:
        base: The model inside.
        advice: What to do instead.

    Raises:
        ValueError: It has.
    """
    names = [name for name, _ in base.named_parameters() if f".{MODULE}." in f".{name}"]
    if names:
        raise InvalidRequestError(
            f"an adapter does not hold the parameters of the model's encoding ({', '.join(names)}): PEFT saves its own "
            f"alone. {advice}"
        )


def _several_ropes(config: PreTrainedConfig, method: Method) -> Refusal | None:
    """Return the refusal of the model's own RoPE where its layer types differ and no value was given; else None."""
    kinds = set(getattr(config, "layer_types", None) or ())
    own = [settings for kind, settings in config.rope_parameters.items() if kind in kinds]
    for name, unset in (("rope_theta", None), ("partial_rotary_factor", 1.0)):
        values = {settings.get(name, unset) for settings in own}
        if len(values) > 1 and getattr(method, name) is None:
            shown = ", ".join(map(str, sorted(values)))
            return Refusal(config.model_type, "rope_per_layer_type", {"name": name, "values": shown})
    return None


def _before_layers(rotary: RotaryModel, encoding: AddedToEmbeddings) -> InstalledEncoding:
    added, model, decoder = AbsolutePositions(encoding), rotary.model, rotary.decoder
    names = {module: name for name, module in model.named_modules()}
    attention = next(layer for layer in attention_layers(decoder) if goes_through_interface(layer))
    hooks = [
        decoder.register_forward_pre_hook(added.number, with_kwargs=True),
        first_layer(model, names[attention]).register_forward_pre_hook(added.add, with_kwargs=True),
    ]
    return InstalledEncoding(added, hooks)


def _in_attention(rotary: RotaryModel, encoding: Any) -> InstalledEncoding:
    attention = EncodingAttention(encoding, rotary.text_config._attn_implementation)

    def kind_of(module: nn.Module) -> str:
        return (FULL if has_positions(module) else PASS) if attends_to_text(module) else CROSS

    return InstalledEncoding(attention, attend_by(rotary, attention, kind_of))


def _check_applied(rotary: RotaryModel, applied_by: EncodingAttention | AbsolutePositions, num_tokens: int) -> None:
    """Raise unless a forward of a few tokens applies the encoding in every layer that should."""
    model = rotary.model
    if isinstance(applied_by, AbsolutePositions):
        applied_by.times = 0
        try:
            reached, times = probe(model, num_tokens) is not None, applied_by.times
        finally:
            applied_by.times = None
        if reached and times != 1:
            raise RotaryMismatchError(
                f"the first layer of {type(model).__name__} runs {times} times in one forward, and positions are added "
                "to the embeddings once. Take 'alibi' or another encoding that acts in attention."
            )
        return
    attention = {layer for layer in attention_layers(rotary.decoder) if has_positions(layer) and attends_to_text(layer)}
    callers: set[nn.Module] = set()
    applied_by.callers = callers
    try:
        reached = probe(model, num_tokens) is not None
    finally:
        applied_by.callers = None
    if reached and (not callers or attention - callers):
        raise RotaryMismatchError(
            f"{len(attention - callers)} of {len(attention)} attention layers of {type(model).__name__} did not "
            "request their positions in a forward: they do not go through Transformers' AttentionInterface."
        )
