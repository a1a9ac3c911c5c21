"""The reach of information, whatever the positions are: sliding windows and chunks of the layers that are rotary."""

from __future__ import annotations

from transformers import PreTrainedConfig

from hf_posenc.doctor.config_checks import ConfigMeaning, Finding
from hf_posenc.doctor.mending import plain_config
from hf_posenc.families.discovery import rotary_in_chunks_only
from hf_posenc.families.sliding_window import window_of_all_layers


def look_at_reach(meaning: ConfigMeaning) -> tuple[list[tuple[str, str]], list[Finding]]:
    """Return the lines and findings about windows and chunks; none where every rotary layer reads everything."""
    target = meaning.target
    if meaning.rope is None or target is None:
        return [], []
    try:
        config = plain_config(meaning)
        chunk = int(getattr(config, "attention_chunk_size", None) or 0)
        in_chunks = chunk > 0 and any(config.no_rope_layers) and rotary_in_chunks_only(config)
    except Exception:  # whatever a family's own config class trips over; what is wrong is found elsewhere
        return [], []
    others = set(getattr(config, "layer_types", None) or ()) - {"sliding_attention"}  # DeepSeek-V4: compressed ones
    if not others and (window := window_of_all_layers(config)) is not None:
        return _look_at_window(window, int(config.num_hidden_layers), target, meaning)
    return _look_at_chunks(chunk, config, target, meaning) if in_chunks else ([], [])


def _look_at_window(
    window: int, layers: int, target: int, meaning: ConfigMeaning
) -> tuple[list[tuple[str, str]], list[Finding]]:
    reach = window * layers
    line = ("reach", f"{window} tokens a layer, {window} x {layers} layers = {reach} at most: a window on every layer")
    if window >= target:
        return [line], []
    plain = meaning.rope is not None and meaning.rope.rope_type == "default" and meaning.original == target
    doubt = (
        f" What it was trained to may be less than {target} too: Mistral 7B 0.1 declares 32768, and 8192 is the "
        "original length that YaRN's authors give it."
    )
    finding = Finding(
        "window-ends-short" if reach < target else "window-on-every-layer",
        "warning" if reach < target else "note",
        f"every layer looks back {window} tokens only, of {target}",
        f"What is further away arrives through other tokens, from at most {reach} tokens back." + doubt * plain,
        "hf-posenc patch --sliding-window off (or a larger one), with --original-max-position-embeddings if known.",
    )
    return [line], [finding]


def _look_at_chunks(
    chunk: int, config: PreTrainedConfig, target: int, meaning: ConfigMeaning
) -> tuple[list[tuple[str, str]], list[Finding]]:
    num_rotary = sum(map(bool, config.no_rope_layers))
    line = (
        "reach",
        f"chunks of {chunk} tokens in the {num_rotary} rotary layers; the other "
        f"{len(config.no_rope_layers) - num_rotary} read everything, without positions",
    )
    if chunk >= target:
        return [line], []
    finding = Finding(
        "rotary-in-chunks",
        "note",
        f"no rotary layer looks out of its chunk of {chunk} tokens, and {target} are declared",
        f"Rotary distances never exceed {chunk - 1}, so scaling changes what happens inside a chunk and does not make "
        "the model read further; its layers that read everything have no positions to scale.",
        "Do not scale it to reach further; a longer max_position_embeddings alone changes no number.",
    )
    return [line], [finding]
