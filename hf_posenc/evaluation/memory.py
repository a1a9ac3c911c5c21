"""The memory an evaluation needs: predicted from the numbers of a config, and measured."""

from __future__ import annotations

import ctypes
import logging
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_posenc.attention.footprint import footprint
from hf_posenc.evaluation.lm_head import DEFAULT_ROWS_PER_CHUNK
from hf_posenc.families.discovery import head_dim_of
from hf_posenc.methods.base import Extension

logger = logging.getLogger(__name__)

_FLOAT32 = 4
_LOGITS_BYTES = 64 * 2**20  # of one chunk in float32; more rows at a time gain nothing


@dataclass(frozen=True)
class ModelShape:
    """The sizes that decide the memory: of a decoder layer, of one number, and of all weights and buffers in bytes."""

    weight_bytes: int
    number_bytes: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes by part. Activations and logits do not exist at the same time, so the peak has the larger of them.

    ``rule`` is what a method that runs in attention keeps beside them.
    """

    model: int
    kv_cache: int
    activations: int
    logits: int
    rule: int = 0

    @property
    def beyond_model(self) -> int:
        """Bytes at the peak that are not the model's weights."""
        return self.kv_cache + self.rule + max(self.activations, self.logits)

    @property
    def peak(self) -> int:
        return self.model + self.beyond_model


def default_logits_chunk(vocab_size: int) -> int:
    """Return the number of rows of logits that exist at one time: 64 MiB of them in float32, at most 1024 rows."""
    return max(1, min(DEFAULT_ROWS_PER_CHUNK, _LOGITS_BYTES // (_FLOAT32 * vocab_size)))


def predict_memory(
    shape: ModelShape,
    num_tokens: int,
    *,
    batch_size: int = 1,
    prefill_chunk: int | None = None,
    logits_chunk: int | None = None,
    extension: Extension | None = None,
) -> MemoryNeed:
    """Predict the memory of a pass over windows of ``num_tokens`` tokens, attention without its matrix of scores.

    Counted is what Transformers' LLaMA-like layer holds at its worst: in the MLP its two inputs and their product, or
    in attention the queries, keys and values while they are rotated and while they are read; one layer at a time. A
    pass in chunks adds the keys and values of all layers, and the mask and the repeated keys of one. Chunks save memory
    only where a layer's activations for a token are more than its keys and values in all layers.

    Args:
        shape: The model's numbers.
        num_tokens: Tokens of a window.
        batch_size: Windows fed together.
        prefill_chunk: As for ``perplexity``.
        logits_chunk: As for ``perplexity``.
        extension: What the model was patched with; methods that run in attention keep something beside all that.
    """
    chunked = prefill_chunk is not None and prefill_chunk < num_tokens
    fed = prefill_chunk if chunked and prefill_chunk is not None else num_tokens
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    # The embeddings, the layer's input and the sum after attention stay until the layer is through.
    mlp = 4 * shape.hidden_size + 3 * shape.intermediate_size
    rotating = 3 * shape.hidden_size + 2 * q + kv + 3 * max(q, kv)
    norm = 3 * shape.hidden_size + 3 * shape.hidden_size * _FLOAT32 // shape.number_bytes
    numbers = batch_size * fed * (max(mlp, rotating, norm) + 2 * shape.head_dim)
    kv_cache = batch_size * num_tokens * 2 * kv * shape.num_layers if chunked else 0
    if chunked:
        repeated = 2 * q if shape.num_heads > shape.num_kv_heads else 0
        reading = batch_size * (num_tokens * repeated + fed * (3 * shape.hidden_size + 3 * q))
        numbers = max(numbers, reading) + _mask_numbers(shape, fed, num_tokens)
    rows = min(batch_size * fed, logits_chunk or default_logits_chunk(shape.vocab_size))
    states = batch_size * fed * shape.hidden_size * shape.number_bytes
    beside = footprint(extension, num_tokens, fed)
    return MemoryNeed(
        model=shape.weight_bytes,
        kv_cache=kv_cache * shape.number_bytes,
        activations=numbers * shape.number_bytes,
        logits=states + rows * shape.vocab_size * 2 * _FLOAT32,  # and their logarithms of probabilities
        rule=beside.cosines * 2 * _FLOAT32 + beside.key_copies * kv_cache // 2 * shape.number_bytes,
    )


def _mask_numbers(shape: ModelShape, fed: int, num_tokens: int) -> int:
    """Return the mask of the last chunk, as booleans and as what is added to the scores, in the model's numbers."""
    return fed * num_tokens * (1 + shape.number_bytes) // shape.number_bytes


def shape_of(model: PreTrainedModel) -> ModelShape:
    """Read the numbers of a model; what a config does not name is taken as LLaMA has it."""
    config = model.config.get_text_config(decoder=True)
    heads = int(config.num_attention_heads)
    tensors = [*model.parameters(), *model.buffers()]
    return ModelShape(
        weight_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        number_bytes=model.dtype.itemsize,
        num_layers=int(config.num_hidden_layers),
        hidden_size=int(config.hidden_size),
        intermediate_size=_width(config, int(config.hidden_size)),
        num_heads=heads,
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=_head_dim(config, heads),
        vocab_size=int(config.vocab_size),
    )


def _head_dim(config: PreTrainedConfig, heads: int) -> int:
    if getattr(config, "is_heterogeneous", False):  # Gemma 4's heads differ by layer type
        return head_dim_of(config)
    return int(getattr(config, "head_dim", None) or config.hidden_size // heads)


def _width(config: object, hidden_size: int) -> int:
    """Return the MLP's inner size; of experts, those of one token."""
    experts = int(getattr(config, "num_experts_per_tok", None) or 1)
    inner = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None)
    widest = max(inner) if isinstance(inner, list) else inner  # Gemma 3n has one for each layer
    return experts * int(widest or 4 * hidden_size)


@contextmanager
def memory_logged(device: torch.device, need: MemoryNeed, method: str, *, log: bool) -> Iterator[None]:
    """Log the prediction before a piece of work and the measured peak after it, in MB (10^6 bytes).

    Args:
        device: The model's.
        need: The prediction.
        method: By which the model is extended, or "none".
        log: False to log nothing, as in all processes but the main one.
    """
    parts = {"model": need.model, "KV cache": need.kv_cache, "activations": need.activations, "logits": need.logits}
    parts |= {"rule": need.rule} if need.rule else {}
    words = ", ".join(f"{name} {value / 1e6:,.0f}" for name, value in parts.items())
    predicted = (memory_in_use(device) or need.model) + need.beyond_model
    rule = "" if method == "none" else f", {method}"
    if log:
        logger.info("memory in MB%s: %s; peak of all in use, predicted: %.0f", rule, words, predicted / 1e6)
    reset_peak_memory(device)
    yield
    if log:
        measured = peak_memory(device)
        logger.info("memory in MB%s: peak, measured: %.0f, predicted: %.0f", rule, measured / 1e6, predicted / 1e6)


def return_free_memory() -> None:
    """Return what is free between tensors to the system; glibc keeps it, and does not always find a place in it again.

    Where the C library is another one, nothing is done.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def reset_peak_memory(device: torch.device) -> None:
    """Let the peak start again from what is in use now: the GPU's, and on Linux the process'."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):  # not Linux, or not allowed: the peak stays that since the start
            Path("/proc/self/clear_refs").write_text("5")  # proc_pid_clear_refs(5)


def peak_memory(device: torch.device) -> int:
    """Return the peak in bytes: of the GPU's allocator on CUDA, else of the whole process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if (peak := _process_status("VmHWM")) is not None:
        return peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts kilobytes


def memory_in_use(device: torch.device) -> int:
    """Return the bytes in use now, the model's included, of what ``peak_memory`` counts; 0 where nothing tells."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return _process_status("VmRSS") or 0


def _process_status(name: str) -> int | None:
    """Return a value of Linux' ``/proc/self/status`` in bytes; None where there is no such file."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":")), None)
