"""The costs of reading a length: the weights in 16, 8 and 4 bits, the KV cache, and the work in chunks."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig

from hf_posenc.attention.footprint import footprint
from hf_posenc.checkpoint.loading import meta_model
from hf_posenc.evaluation.memory import predict_memory, shape_of
from hf_posenc.methods.base import Extension
from hf_posenc.patching.extension_config import ExtensionRequest
from hf_posenc.patching.request import resolve
from hf_posenc.planning.gpus import smallest_gpu, usable
from hf_posenc.planning.quantised_shapes import quantise_shapes
from hf_posenc.planning.shapes import fill_with_fake, for_all_layers, text_config, without_data
from hf_posenc.utils.dtypes import config_dtype, dtype_name

# Tokens that are fed at a time, as `generate(prefill_chunk_size=...)` and `--prefill-chunk` do.
READ_CHUNK = 1024
# The longest text that fits is looked for up to so many times the target.
LONGEST_FACTOR = 16
_FLOAT32 = 4


@dataclass(frozen=True)
class KvCache:
    """Bytes of the cache of one sequence.

    Attributes:
        fixed: Bytes of layers whose window is full, and of states that do not grow.
        per_token: Bytes of all other layers, for each token.
    """

    fixed: float
    per_token: float

    def at(self, num_tokens: int) -> int:
        """Return the bytes for a length, from the longest window on."""
        return round(self.fixed + self.per_token * num_tokens)


def kv_cache(config: PreTrainedConfig, num_tokens: int) -> KvCache:
    """Return the size of Transformers' own cache of one sequence, in the config's dtype.

    The cache is filled by a model without data, so windows, latent attention and layers that keep no keys count as
    they are. Of deep models a few layers are run (``for_all_layers``).
    """
    return KvCache(**for_all_layers(config, lambda some_layers: _cache(some_layers, num_tokens)))


@torch.no_grad()
def _cache(config: PreTrainedConfig, num_tokens: int) -> dict[str, float]:
    model = meta_model(config, torch.bfloat16)  # which all experts can do; the dtype counts afterwards
    model.train(False)
    with without_data(config):
        fill_with_fake(model)
        cache = DynamicCache(config=text_config(config))
        ids = torch.zeros(1, num_tokens, dtype=torch.int64)
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    held = (value for layer in cache.layers for value in vars(layer).values() if isinstance(value, torch.Tensor))
    shapes, number = [tensor.shape for tensor in held if tensor.dim() > 2], config_dtype(config).itemsize
    grows = [shape for shape in shapes if shape[-2] == num_tokens]
    fixed = [shape for shape in shapes if shape[-2] != num_tokens]
    return {
        "fixed": number * sum(map(math.prod, fixed)),
        "per_token": number * sum(map(math.prod, grows)) / num_tokens,
    }


@dataclass(frozen=True)
class Reading:
    """Bytes that reading one text takes, on one device.

    Attributes:
        weights_in: ``"bfloat16"`` or what the weights are loaded in, ``"8-bit"``, ``"4-bit"``.
        weights: Their bytes, with constants and buffers.
        kv_cache: Size of the KV cache of all layers, in the dtype computed in.
        rule: What the method keeps besides: a staged one a copy of all keys, rotated to the current stage.
        working: Activations, mask and logits of a chunk, or a matrix that is made out of 4 bits.
        num_layers: Number of layers of the model; several devices hold whole layers.
        embedding, head: Bytes of ``weights`` that are in no layer; 0 for a head that is tied.
        longest: The longest text that fits the devices, in tokens; ``LONGEST_FACTOR`` times the target, up to which it
            is looked for, says that longer ones fit; None where no memory was given.
    """

    weights_in: str
    weights: int
    kv_cache: int
    rule: int
    working: int
    num_layers: int
    embedding: int
    head: int
    longest: int | None = None

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


def predict_readings(
    config: PreTrainedConfig,
    cache: KvCache,
    method: str,
    original: int,
    target: int,
    gpu_memory: int | None = None,
    gpus: int = 1,
) -> tuple[Reading, ...]:
    """Return the memory of a text, for weights in 16 (or 32), 8 and 4 bits.

    Args:
        config: The model's, in the dtype it computes in.
        cache: Its KV cache.
        method: The rule it is extended by; ``"none"`` for none.
        original: Tokens it was trained on.
        target: Tokens of the text.
        gpu_memory, gpus: Bytes of one device, and how many of them hold the layers; None: the longest text is not
            looked for.
    """
    needs = []
    for bits in (None, 8, 4):
        weights = _HeldWeights(config, bits, cache, method, original)
        reading = weights.reading(target)
        if gpu_memory is not None:
            longest = weights.longest(LONGEST_FACTOR * target, gpu_memory, gpus)
            reading = dataclasses.replace(reading, longest=longest)
        needs.append(reading)
    return tuple(needs)


class _HeldWeights:
    """A model without data whose weights are held in some number of bits; None is the config's dtype."""

    def __init__(self, config: PreTrainedConfig, bits: int | None, cache: KvCache, method: str, original: int) -> None:
        self.text, self.bits, self.cache, self.method, self.original = (
            text_config(config),
            bits,
            cache,
            method,
            original,
        )
        dtype, model = config_dtype(config), meta_model(config)
        embedding: Any = model.get_input_embeddings()
        head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # Transformers leaves it untyped
        tied = head is None or head.weight is embedding.weight
        self.embedding, self.head = embedding.weight.nbytes, 0 if tied else head.weight.nbytes
        self.quantised = [] if bits is None else quantise_shapes(model, bits)
        self.shape = dataclasses.replace(shape_of(model), number_bytes=dtype.itemsize)
        self.name = dtype_name(dtype) if bits is None else f"{bits}-bit"

    def reading(self, length: int) -> Reading:
        """Return the memory of a text of ``length`` tokens."""
        fed = min(READ_CHUNK, length)
        beside, cache = footprint(self._extension(length), length, fed), self.cache.at(length)
        need = predict_memory(self.shape, length, prefill_chunk=READ_CHUNK)
        return Reading(
            weights_in=self.name,
            weights=self.shape.weight_bytes,
            kv_cache=cache,
            rule=beside.cosines * 2 * _FLOAT32 + beside.key_copies * cache // 2,
            working=max(need.activations, need.logits) + self._product(fed),
            num_layers=self.shape.num_layers,
            embedding=self.embedding,
            head=self.head,
        )

    def longest(self, below: int, gpu_memory: int, gpus: int) -> int:
        """Return the longest text of at most ``below`` tokens that fits; 0 where none does."""
        fits, too_long = 0, below + 1
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            if self.reading(middle).fits(gpu_memory, gpus):
                fits = middle
            else:
                too_long = middle
        return fits

    def _extension(self, length: int) -> Extension | None:
        if self.method == "none" or length <= self.original:
            return None
        settings = {"context_length": length, "original_max_position_embeddings": self.original}
        try:
            return resolve(self.text, ExtensionRequest.of(method=self.method, on_scaled="replace", **settings))
        except ValueError:  # a family that is not extended; patch_model says why
            return None

    def _product(self, rows: int) -> int:
        """Return the bytes that a product with quantised weights makes besides its result, the largest of them."""
        if self.bits == 4:  # the matrix in the dtype computed in
            largest = max((one.in_features * one.out_features for one in self.quantised), default=0)
            return largest * self.shape.number_bytes
        # The rows in 8 bits, and their product in 32 before it is scaled (Dettmers et al. 2022, arXiv:2208.07339).
        return max((rows * (one.in_features + 4 * one.out_features) for one in self.quantised), default=0)
