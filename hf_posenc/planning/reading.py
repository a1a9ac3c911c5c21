"""What reading a length takes: the weights in 16, 8 and 4 bits, the KV cache, and the work in chunks."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from hf_posenc.attention.footprint import footprint
from hf_posenc.evaluation.memory import ModelShape, predict_memory, shape_of
from hf_posenc.methods.base import Extension
from hf_posenc.patching.extension_config import ExtensionRequest
from hf_posenc.patching.request import resolve
from hf_posenc.planning.facts import KvCache
from hf_posenc.planning.gpus import smallest_gpu, usable
from hf_posenc.planning.quantised_shapes import QuantisedLinear, quantise_shapes
from hf_posenc.planning.shapes import meta_model
from hf_posenc.utils.dtypes import config_dtype, dtype_name

# Tokens that are fed at a time, as `generate(prefill_chunk_size=...)` and `--prefill-chunk` do.
READ_CHUNK = 1024
_FLOAT32 = 4


@dataclass(frozen=True)
class Reading:
    """Bytes that reading one text takes, on one device.

    Attributes:
        weights_in: ``"bfloat16"`` or what the weights are loaded in, ``"8-bit"``, ``"4-bit"``.
        weights: Their bytes, with constants and buffers.
        kv_cache: Of all layers, in the dtype computed in.
        rule: What the method keeps besides: a staged one a copy of all keys, rotated to the current stage.
        working: Activations, mask and logits of a chunk, or a matrix that is made out of 4 bits.
        num_layers: Of the model; several devices hold whole layers.
        embedding, head: Of ``weights``, the bytes that are in no layer; 0 for a head that is tied.
    """

    weights_in: str
    weights: int
    kv_cache: int
    rule: int
    working: int
    num_layers: int
    embedding: int
    head: int

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.weights + self.kv_cache + self.rule + self.working

    def per_device(self, gpus: int) -> int:
        """Return the bytes on the fullest of several devices that share the layers out (``device="auto"``)."""
        if gpus == 1:
            return self.total
        share = math.ceil(self.num_layers / gpus) / self.num_layers
        layers = self.weights - self.embedding - self.head + self.kv_cache + self.rule
        return round(share * layers) + max(self.embedding, self.head) + self.working

    def fits(self, gpu_memory: int, gpus: int = 1) -> bool:
        """Say whether it fits devices of so many bytes each."""
        return self.per_device(gpus) <= usable(gpu_memory)

    def as_dict(self) -> dict[str, Any]:
        """Return everything, JSON-able; ``smallest_gpu`` in 10^9 bytes."""
        return {**dataclasses.asdict(self), "total": self.total, "smallest_gpu": smallest_gpu(self.total)}


class Readings:
    """The ways to read with one model.

    Args:
        config: Its config, in the dtype it computes in.
        cache: Its KV cache.
        method: The rule it is extended by; ``"none"`` for none.
        original: Tokens it was trained on.
    """

    def __init__(self, config: PreTrainedConfig, cache: KvCache, method: str, original: int) -> None:
        self.text, self.cache = config.get_text_config(decoder=True), cache
        self.method, self.original = method, original
        self.held = [_held(config, bits) for bits in (None, 8, 4)]

    def at(self, length: int) -> list[Reading]:
        """Return what a text of ``length`` tokens takes, for weights in 16 (or 32), 8 and 4 bits."""
        beside = footprint(self._extension(length), length, min(READ_CHUNK, length))
        cache = self.cache.at(length)
        made = []
        for held in self.held:
            need = predict_memory(held.shape, length, prefill_chunk=READ_CHUNK)
            made.append(
                Reading(
                    weights_in=held.name,
                    weights=held.shape.weight_bytes,
                    kv_cache=cache,
                    rule=beside.cosines * 2 * _FLOAT32 + beside.key_copies * cache // 2,
                    working=max(need.activations, need.logits) + held.product(min(READ_CHUNK, length)),
                    num_layers=held.shape.num_layers,
                    embedding=held.embedding,
                    head=held.head,
                )
            )
        return made

    def longest(self, below: int, gpu_memory: int, gpus: int = 1) -> list[int]:
        """Return the longest text of at most ``below`` tokens that fits, for each way; 0 where none does."""
        found = []
        for way in range(len(self.held)):
            fits, too_long = 0, below + 1
            while too_long - fits > 1:
                middle = (fits + too_long) // 2
                if self.at(middle)[way].fits(gpu_memory, gpus):
                    fits = middle
                else:
                    too_long = middle
            found.append(fits)
        return found

    def _extension(self, length: int) -> Extension | None:
        if self.method == "none" or length <= self.original:
            return None
        settings = {"context_length": length, "original_max_position_embeddings": self.original}
        try:
            return resolve(self.text, ExtensionRequest.of(method=self.method, on_scaled="replace", **settings))
        except ValueError:  # a family that is not extended; patch_model says why
            return None


@dataclass(frozen=True)
class _Held:
    name: str
    shape: ModelShape
    embedding: int
    head: int
    quantised: tuple[QuantisedLinear, ...]
    bits: int | None

    def product(self, rows: int) -> int:
        """Return the bytes that a product with quantised weights makes besides its result, the largest of them."""
        if self.bits == 4:  # the matrix in the dtype computed in
            return max((one.in_features * one.out_features for one in self.quantised), default=0) * self._number
        # The rows in 8 bits, and their product in 32 before it is scaled (Dettmers et al. 2022, arXiv:2208.07339).
        return max((rows * (one.in_features + 4 * one.out_features) for one in self.quantised), default=0)

    @property
    def _number(self) -> int:
        return self.shape.number_bytes


def _held(config: PreTrainedConfig, bits: int | None) -> _Held:
    model: PreTrainedModel = meta_model(config)
    number = config_dtype(config).itemsize
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # Transformers leaves it untyped
    tied = head is None or head.weight is embedding.weight
    quantised = () if bits is None else tuple(quantise_shapes(model, bits))
    shape = dataclasses.replace(shape_of(model), number_bytes=number)
    name = dtype_name(config_dtype(config)) if bits is None else f"{bits}-bit"
    return _Held(name, shape, embedding.weight.nbytes, 0 if tied else head.weight.nbytes, quantised, bits)
