"""The subject of an explanation: a model's numbers, from its config alone."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import LlamaConfig, PreTrainedConfig

from hf_posenc.checkpoint.loading import read_config
from hf_posenc.errors import InvalidRequestError
from hf_posenc.families.discovery import head_dim_of
from hf_posenc.methods.explained import ModelShape
from hf_posenc.patching.extension import plain_spec
from hf_posenc.utils.units import length_name

# The papers on longer contexts extend it.
_DEFAULT_NAME = "Llama 2 7B's numbers (give --model for yours)"
_NEEDED = ("num_attention_heads", "num_hidden_layers", "hidden_size")


@dataclass(frozen=True)
class Subject:
    """A model, as far as positions go: its name as it was given, and the config of its text part."""

    name: str
    config: PreTrainedConfig

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return head_dim_of(self.config)

    @property
    def length(self) -> int:
        """Tokens its config says it reads; 2048 if it says nothing."""
        return int(getattr(self.config, "max_position_embeddings", None) or 2048)

    @property
    def sentence(self) -> str:
        """A description of it in one line."""
        config = self.config
        return (
            f"{self.name}: {config.model_type}, {config.num_hidden_layers} layers of {config.hidden_size} features, "
            f"{config.num_attention_heads} heads of {self.head_dim}, reads {length_name(self.length)} tokens"
        )

    def shape(self, target: int) -> ModelShape:
        """Return its numbers, of which encodings are explained, to be read to ``target`` tokens."""
        spec, no_rope = None, ""
        try:
            spec = plain_spec(self.config)
        except (ValueError, AttributeError) as error:  # some models without a rotary embedding have no lengths either
            no_rope = str(error)
        heads, width = int(self.config.num_attention_heads), int(self.config.hidden_size)
        return ModelShape(heads, width, self.head_dim, self.length, target, spec, no_rope)


def read_subject(model: str | None) -> Subject:
    """Read a model's config; None for Llama 2 7B's numbers.

    Raises:
        FileNotFoundError, ValueError: As ``read_config``.
        ValueError: The model has no attention.
    """
    config: PreTrainedConfig = LlamaConfig(max_position_embeddings=4096) if model is None else read_config(model)
    text = config.get_text_config(decoder=True)
    missing = [name for name in _NEEDED if not hasattr(text, name)]
    if missing:
        raise InvalidRequestError(
            f"model_type {text.model_type!r} has no {missing[0]}, so it has no attention to explain positions of. Give "
            "a model with attention, or leave --model out."
        )
    return Subject(model or _DEFAULT_NAME, text)
