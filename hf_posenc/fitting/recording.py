"""One long forward of a teacher, recorded layer by layer on disk: keys, values, some queries and their outputs.

A layer is written as soon as it is computed, so the memory of a recording is that of one layer more than a forward's.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from hf_posenc.attention.inner import AttentionCall, Output, inner_name, piece_mask
from hf_posenc.attention.installation import layer_kind, text_layers
from hf_posenc.attention.interface import attending_by, attention_of
from hf_posenc.evaluation.lm_head import decoder_body
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.utils.files import read_json, write_tensors, write_whole

RECORDED_QUERIES = 2048  # of each layer and text
_DONE = "recording.json"


@dataclass(frozen=True)
class Recording:
    """A recording of one document.

    Attributes:
        folder: Where it is.
    """

    folder: Path

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The settings of the recording, and the frequencies by which keys and queries come rotated."""
        recorded: dict[str, Any] = read_json(self.folder / _DONE)
        return recorded

    @cached_property
    def inv_freq(self) -> torch.Tensor:
        """The frequencies that queries and keys come rotated by, float32 ``(num_pairs,)``."""
        return torch.tensor(self.facts["inv_freq"])

    @property
    def attention_factor(self) -> float:
        """The factor of queries and of keys as they come."""
        return float(self.facts["attention_factor"])

    @cached_property
    def input_ids(self) -> torch.Tensor:
        """The document, int64 ``(num_tokens,)``."""
        return self._of_text("input_ids")

    @cached_property
    def query_positions(self) -> torch.Tensor:
        """Positions of the recorded queries, int64 ``(num_queries,)``, rising."""
        return self._of_text("query_positions")

    @cached_property
    def hidden(self) -> torch.Tensor:
        """The input of the teacher's head, ``(num_tokens, hidden_size)``."""
        return self._of_text("hidden")

    def layer(self, index: int, *names: str, stop: int | None = None) -> list[torch.Tensor]:
        """Return recorded tensors of a layer.

        Args:
            index: Index of the layer.
            *names: ``keys`` and ``values``, ``(kv_heads, num_tokens, head_dim)``; ``queries`` ``(heads, num_queries,
                head_dim)``; ``outputs`` ``(num_queries, heads, head_dim)``.
            stop: Only the keys and values of tokens before this one.
        """
        with safe_open(self.folder / _file(index), framework="pt") as file:
            tensors = []
            for name in names:
                part = file.get_slice(name)
                cut = stop is not None and name in ("keys", "values")
                tensors.append(part[:, :stop] if cut else part[:])
            return tensors

    def _of_text(self, name: str) -> torch.Tensor:
        with safe_open(self.folder / "text.safetensors", framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor


def _file(index: int) -> str:
    return f"layer-{index:03d}.safetensors"


class OwnAttention:
    """A model's own attention implementation, called as those of hf_posenc are."""

    def __init__(self, inner: str) -> None:
        self.inner = inner

    def attend(self, call: AttentionCall) -> Output:
        """Attend causally; Transformers makes no causal masks for hf_posenc's implementations."""
        if call.mask is None:
            mask = piece_mask(self.inner, call.query.shape[2], call.key.shape[2], None, call.query)
            call = call._replace(mask=mask)
        return call.by(self.inner)


class _Recorded:
    """Stands before what a layer attends by, and writes down what comes in and goes out."""

    def __init__(self, attention: Any, folder: Path, query_positions: torch.Tensor, positions: torch.Tensor) -> None:
        self.attention = attention
        self.folder, self.query_positions = folder, query_positions
        self.positions = positions  # for layers that get none

    def attend(self, call: AttentionCall) -> Output:
        """Attend, and write the layer's file."""
        output, weights = self.attention.attend(call)
        index: Any = call.module.layer_idx
        positions = self.query_positions.to(call.query.device)
        tensors = {
            "keys": call.key[0],
            "values": call.value[0],
            "queries": call.query[0].index_select(1, positions),
            "outputs": output[0].index_select(0, positions),
        }
        write_tensors(tensors, self.folder / _file(index))
        return output, weights


def is_recorded(folder: Path, identity: str) -> bool:
    """Return whether a folder holds a whole recording of this identity."""
    return (folder / _DONE).is_file() and Recording(folder).facts["identity"] == identity


@torch.no_grad()
def record(
    model: Any, input_ids: torch.Tensor, folder: Path, query_positions: torch.Tensor, identity: str
) -> Recording:
    """Record one forward of a model as it is now, patched or not; what is there already is not computed again.

    Args:
        model: The model, in evaluation mode.
        input_ids: The document, int64 ``(num_tokens,)``.
        folder: Where the files go.
        query_positions: Which queries are kept, rising int64 ``(num_queries,)``.
        identity: What the recording depends on; another one is recorded anew.
    """
    if is_recorded(folder, identity):
        return Recording(folder)
    (folder / _DONE).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    rotary = RotaryModel(model)
    own = OwnAttention(inner_name(str(rotary.text_config._attn_implementation)))
    positions = torch.arange(len(input_ids), device=rotary.device)[None]
    layers = {}
    for module in text_layers(rotary):
        recorded = _Recorded(attention_of(module) or own, folder, query_positions, positions)
        layers[module] = recorded, layer_kind(module, rotary.text_config)
    began = time.perf_counter()
    with attending_by(rotary.text_configs, layers):
        output = decoder_body(rotary.model)(input_ids=input_ids[None].to(rotary.device), use_cache=False)
    seconds = time.perf_counter() - began
    text = {"input_ids": input_ids, "query_positions": query_positions, "hidden": output.last_hidden_state[0]}
    write_tensors(text, folder / "text.safetensors")
    module = rotary.rotary_module
    facts = {
        "identity": identity,
        "seconds": seconds,
        "inv_freq": getattr(module, f"{rotary.prefix}inv_freq").float().cpu().tolist(),
        "attention_factor": float(getattr(module, f"{rotary.prefix}attention_scaling")),
    }
    write_whole(folder / _DONE, json.dumps(facts))
    return Recording(folder)
