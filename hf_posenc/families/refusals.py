"""Why a model cannot be extended, or not by a method that runs in attention: each reason by a code, and in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_posenc.errors import UnsupportedModelError

_TABLE_PER_LAYER = (
    "it has no rotary module: each attention layer rotates its queries by a table of its own, whose base is fixed in "
    "the code, so no config could say how it was scaled"
)
# The end of a sentence, without its full stop, that begins with "it is not supported: ".
REASONS: dict[str, str] = {
    # Of every method.
    "no_rotary_embedding": "it has no rotary embedding (its config has no rope_parameters)",
    "no_rotary_module": "found no rotary module of Transformers' usual form (inv_freq, original_inv_freq, rope_type) "
    "in {class_name}, so there is nothing to scale",
    "encoder_has_another_config": "its encoder has a rotary module ({names}) with a config of its own, which "
    "would not be extended with the decoder's",
    "no_settings_for_full_attention": "its rotary settings are for {layer_types} and none for full attention, so no "
    "layer that reads the whole context has frequencies to scale",
    "rotary_in_windows_only": "only its layers with a sliding window are rotary, and they never look further; its "
    "full-attention layers have no positions, so there is nothing to scale",
    "rotary_in_chunks_only": "only its layers in chunks (of {chunk} tokens) are rotary, and they never look out of "
    "one; its full-attention layers have no positions, so there is nothing to scale",
    "no_positions_in_full_attention": "its full-attention layers have no positions (layer_rope_theta is 0), so there "
    "is nothing to scale",
    "base_per_layer": "its layers rotate by different bases (layer_rope_theta: {bases}), and Transformers puts one "
    "rule on all of them, those with a sliding window too",
    "keys_of_another_model": "all its layers read the keys of the model it drafts for, and only together could the "
    "two be scaled",
    "attention_in_windows_only": "all its attention is behind a sliding window and never looks further (the rest is "
    "recurrent), so there is nothing to scale; its rotary module takes no rule but the default",
    "order_of_frequencies": "its rotary module takes no rule but the default, and holds its frequencies in another "
    "order",
    "positions_of_patches": "only its patch model reads the whole context (its byte layers have a window), and that "
    "counts patches, whose number depends on the text, so that lengths in tokens say nothing of its positions",
    "table_per_layer": _TABLE_PER_LAYER,
    "table_in_encoder": "it has no rotary module: its encoder hands out rows of one table, whose base is fixed in the "
    "code, so no config could say how it was scaled",
    "unknown_frequencies": "its family computes its frequencies in a way that hf_posenc does not know. Transformers "
    "builds them like this, and nothing has changed them since ({difference})",
    # Of methods that run in attention, and of encodings.
    "mask_per_layer": "each layer makes a mask of its own, from its values",
    "norm_after_rotation": "it normalises queries and keys after they are rotated",
    "needs_its_window": "every layer has a sliding window, and its model does not run without one",
    "frequencies_per_forward": "its rotary module makes its frequencies anew in every forward",
    "latent_attention": "multi-head latent attention keeps the part of a key that is rotated elsewhere",
    "indexer": "an indexer, which rotates keys of its own, picks what its attention reads",
    "rotary_module_per_layer": "its layers have rotary modules of their own ({count})",
    "no_attention_interface": "its attention does not go through Transformers' AttentionInterface",
    "unrotated_pairs": "part of its pairs of features are never rotated",
    "attention_in_chunks": "some layers attend in chunks",
    "not_causal": "its attention looks ahead",
    "implementation": "its attention implementation is {implementation!r}, not one of {allowed}",
    "window": "every layer has a sliding window (pass {how} to attend to all of a text)",
    "prefix_tuning": "cached keys are rotated again, and those of prefix tuning were trained as they are",
    "rotation": "it rotates queries and keys in a way of its own",
    # Of encodings.
    "no_bias": "a bias cannot be added in {implementation!r} (load it with {how})",
    "rope_per_layer_type": "its layer types have a RoPE each, of {name} {values}, and all would get one: give {name}",
    "adapters": "it is wrapped by PEFT, whose adapters would not hold the encoding (patch the model, then wrap it)",
}
TAKE_STATIC = "Static rules such as 'yarn' may be."


@dataclass(frozen=True)
class Refusal:
    """Why a model is refused.

    Attributes:
        model_type: Model type of its text config.
        code: A key of ``REASONS``.
        values: What the reason's text is filled in with.
    """

    model_type: str
    code: str
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """The reason in words: the end of a sentence, without its full stop."""
        return REASONS[self.code].format(**self.values)

    def error(self, method: str | None = None, advice: str = "") -> UnsupportedModelError:
        """Return the error to raise.

        Args:
            method: The method that the model is refused for; None if it is refused for all.
            advice: A sentence that follows the reason.
        """
        return UnsupportedModelError(
            self.model_type, self.reason, method, code=self.code, values=self.values, advice=advice
        )
