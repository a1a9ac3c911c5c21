"""How much memory a training step will take, part by part, before any weights are loaded.

The step itself is run, by the code that trains, on tensors that have a shape and no data: what is kept for the
backward pass, what is recomputed, and when it is freed, is then what really happens, for any family.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_posenc.evaluation.lm_head import decoder_body, row_chunks
from hf_posenc.families.discovery import unwrap
from hf_posenc.planning.quantised_shapes import QuantisedLinear, quantise_shapes
from hf_posenc.planning.shapes import (
    fill_with_fake,
    layer_repeat,
    meta_model,
    text_config,
    traced_repeats,
    with_layers,
    without_data,
)
from hf_posenc.planning.tracking import MemoryTracker, Peak
from hf_posenc.training.chunked_loss import chunked_lm_loss
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.lora import add_lora
from hf_posenc.training.setting_checks import EIGHT_BIT_ADAMW
from hf_posenc.training.weights import float32_weights
from hf_posenc.utils.dtypes import HALF, config_dtype

_STATES = 2  # of AdamW, in the weights' own dtype
# Of bitsandbytes' AdamW (``Optimizer2State.init_state``): small weights keep states of 4 bytes, as embeddings do
# (Trainer says so), and every block of states in 8 bits has a scale in float32.
_FEWEST_IN_8_BITS, _STATES_BLOCK = 4096, 256
_TRACED_CHUNKS = 4  # of the loss
FORWARD, LOSS, LOSS_BACKWARD, LAYERS_BACKWARD, EMBEDDING_BACKWARD = (
    "forward",
    "loss",
    "loss backward",
    "layers backward",
    "embedding backward",
)


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on one device at the peak of an optimizer step, from the second one on, when the states are there.

    The parts are those of one moment, so they add up to ``peak``.

    Attributes:
        weights: Parameters and buffers, as they are held while trained.
        optimizer: AdamW's two states of each trained weight, in the weight's own dtype or in 8 bits.
        gradients: Those that exist at the peak.
        half_weights: Copies of weights in bfloat16 that autocast makes.
        activations: What the layers keep for the backward pass or are working on.
        attention_matrices: Masks or scores of block x block; packed documents need a mask, FlashAttention none.
        logits: One chunk of them.
        phase: What was going on: ``"forward"``, ``"loss"``, ..., or ``"optimizer"``.
        trained_parameters: How many are trained.
        all_gradients: Bytes of all gradients.
    """

    weights: int
    optimizer: int
    gradients: int
    half_weights: int
    activations: int
    attention_matrices: int
    logits: int
    phase: str
    trained_parameters: int
    all_gradients: int

    PARTS = ("weights", "optimizer", "gradients", "half_weights", "activations", "attention_matrices", "logits")

    @property
    def peak(self) -> int:
        """Bytes in all."""
        return int(sum(getattr(self, part) for part in self.PARTS))


def predict_training_memory(
    config: PreTrainedConfig,
    run: FinetuneConfig,
    seq_len: int,
    *,
    packed: bool = True,
    chunked_loss: bool = True,
    load_in_4bit: bool = False,
) -> TrainingMemory:
    """Predict the peak of ``finetune``'s optimizer steps on one device, of CPU kernels.

    Of deep models a few layers are run (``traced_repeats``); as each adds the same, the rest is a straight line.

    Args:
        config: The model's.
        run: Its settings: ``lora``, ``bf16``, ``gradient_checkpointing``, ``per_device_train_batch_size`` and so on.
        seq_len: Tokens of a block.
        packed: Blocks hold more than one document (or a piece of one), so attention needs a mask.
        chunked_loss: As ``finetune`` has it; False for the loss of a plain Trainer, with all logits.
        load_in_4bit: The weights are loaded so, for adapters to be trained on them.

    Raises:
        ValueError: The family cannot be run without data.
    """
    layers, repeat = int(text_config(config).num_hidden_layers), layer_repeat(config)
    if layers <= 3 * repeat:
        return _at_peak(*_run(config, run, seq_len, packed, chunked_loss, load_in_4bit))
    traced = traced_repeats(repeat)
    (few, base), (more, other) = (
        _run(with_layers(config, times * repeat), run, seq_len, packed, chunked_loss, load_in_4bit) for times in traced
    )
    times = layers / repeat - traced[0]
    sizes = {name: round(few[name] + times * (more[name] - few[name])) for name in few}
    return _at_peak(sizes, {phase: _further(base[phase], other[phase], times) for phase in base})


def least_training_memory(
    config: PreTrainedConfig, run: FinetuneConfig, seq_len: int, *, load_in_4bit: bool = False
) -> TrainingMemory:
    """Return what a step takes at least, from sizes alone: no step is run, so this is a tenth of the work.

    Beside weights and optimizer states there are all gradients at the step's end, and after the forward pass the input
    of every layer, which the backward pass starts from with gradient checkpointing or without. The larger is counted.

    Args:
        config, run, seq_len, load_in_4bit: As for ``predict_training_memory``.
    """
    text = text_config(config)
    layers, repeat = int(text.num_hidden_layers), layer_repeat(config)

    def sizes_of(layers: int) -> dict[str, int]:
        bare = meta_model(with_layers(config, layers))
        if load_in_4bit:
            quantise_shapes(bare, 4)
        model = _model_to_train(bare, run)
        with float32_weights(model, frozen=not computes_in_half(config, run)):
            return _sizes(model, run)

    if layers <= 3 * repeat:
        sizes = sizes_of(layers)
    else:
        traced = traced_repeats(repeat)
        few, more = (sizes_of(times * repeat) for times in traced)
        sizes = {name: round(few[name] + (layers / repeat - traced[0]) * (more[name] - few[name])) for name in few}
    inputs = layers * run.per_device_train_batch_size * seq_len * int(text.hidden_size)
    number = 2 if computes_in_half(config, run) else 4
    return _at_peak(sizes, {FORWARD: Peak(inputs * number, Counter())})


def _further(few: Peak, more: Peak, times: float) -> Peak:
    parts = {kind: few.parts[kind] + times * (more.parts[kind] - few.parts[kind]) for kind in {*few.parts, *more.parts}}
    return Peak(
        round(few.total + times * (more.total - few.total)),
        Counter({kind: round(max(size, 0)) for kind, size in parts.items()}),
    )


def _at_peak(sizes: dict[str, int], peaks: dict[str, Peak]) -> TrainingMemory:
    stepping = Peak(sizes["all_gradients"], Counter({"gradients": sizes["all_gradients"]}))
    phase, peak = max({**peaks, "optimizer": stepping}.items(), key=lambda pair: pair[1].total)
    kinds = ("gradients", "half_weights", "attention_matrices", "logits")
    parts = {kind: min(peak.parts[kind], peak.total) for kind in kinds}
    return TrainingMemory(
        weights=sizes["weights"],
        optimizer=sizes["optimizer"],
        activations=max(peak.total - sum(parts.values()), 0),
        phase=phase,
        trained_parameters=sizes["trained_parameters"],
        all_gradients=sizes["all_gradients"],
        **parts,
    )


def _run(
    config: PreTrainedConfig,
    run: FinetuneConfig,
    seq_len: int,
    packed: bool,
    chunked_loss: bool,
    load_in_4bit: bool = False,
) -> tuple[dict[str, int], dict[str, Peak]]:
    """Return the bytes that stay, and the peak of each phase of a forward and backward pass."""
    bare = meta_model(config)
    if load_in_4bit:
        quantise_shapes(bare, 4)
    model, bf16 = _model_to_train(bare, run), computes_in_half(config, run)
    with without_data(config):
        fill_with_fake(model)
        with float32_weights(model, frozen=not bf16):
            return _sizes(model, run), _peaks(model, run, seq_len, packed, bf16, chunked_loss)


def _model_to_train(model: PreTrainedModel, run: FinetuneConfig) -> Any:
    with torch.device("meta"):
        trained = add_lora(model, run) if run.lora else model
    trained.train()
    for module in trained.modules():
        if isinstance(getattr(module, "base_layer", None), QuantisedLinear):
            module.cast_input_dtype_enabled = False  # PEFT's layer around a quantised one leaves its input alone
    unwrap(trained).config.use_cache = False
    if run.gradient_checkpointing:
        enable = getattr(unwrap(trained), "activation_checkpointing_enable", None)
        (enable or unwrap(trained).gradient_checkpointing_enable)()
        if run.lora:
            unwrap(trained).enable_input_require_grads()  # type: ignore[no-untyped-call]  # Transformers leaves it untyped
    return trained


def computes_in_half(config: PreTrainedConfig, run: FinetuneConfig) -> bool:
    return config_dtype(config) in HALF if run.bf16 is None else run.bf16


def _sizes(model: Any, run: FinetuneConfig) -> dict[str, int]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    embedded = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}

    def states(parameter: nn.Parameter) -> int:
        numbers = parameter.numel()
        if run.optim != EIGHT_BIT_ADAMW or numbers < _FEWEST_IN_8_BITS or id(parameter) in embedded:
            return _STATES * parameter.nbytes
        return _STATES * (numbers + 4 * math.ceil(numbers / _STATES_BLOCK))

    return {
        "optimizer": sum(map(states, trained)),
        "weights": sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
        "all_gradients": sum(parameter.nbytes for parameter in trained),
        "trained_parameters": sum(parameter.numel() for parameter in trained),
    }


def _peaks(
    model: Any, run: FinetuneConfig, seq_len: int, packed: bool, bf16: bool, chunked_loss: bool
) -> dict[str, Peak]:
    base = unwrap(model)
    vocab_size = int(base.config.get_text_config().vocab_size)
    input_ids = torch.zeros(run.per_device_train_batch_size, seq_len, dtype=torch.int64)
    position_ids = torch.arange(seq_len).expand(run.per_device_train_batch_size, -1)
    with MemoryTracker(model.parameters(), vocab_size, seq_len) as tracker, _phases(base, tracker):
        for _ in range(min(run.gradient_accumulation_steps, 2)):  # from the second on, gradients are there before
            in_chunks: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if chunked_loss:  # positions have no values here, so that they cannot say how many documents a block has
                in_chunks = chunked_lm_loss(
                    model, run.logits_chunk, chunks=first_and_last_chunks, one_document=not packed
                )
            with in_chunks, _autocast(bf16):
                loss = model(input_ids=input_ids, position_ids=position_ids, labels=input_ids).loss
            tracker.phase = LOSS_BACKWARD
            loss.backward()
            del loss
            tracker.phase = FORWARD
    peaks: dict[str, Peak] = tracker.peaks
    return peaks


def _autocast(bf16: bool) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext()


@contextlib.contextmanager
def _phases(base: PreTrainedModel, tracker: MemoryTracker) -> Iterator[None]:
    """Tell the tracker where the pass is, by hooks on the hidden states before and after the layers."""

    def begins(phase: str) -> Any:
        return lambda gradient: setattr(tracker, "phase", phase)

    def after_body(module: Any, args: Any, output: Any) -> None:
        tracker.phase = LOSS
        output.last_hidden_state.register_hook(begins(LAYERS_BACKWARD))

    def after_embedding(module: Any, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(begins(EMBEDDING_BACKWARD))  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped

    embedding: Any = base.get_input_embeddings()
    hooks = [
        decoder_body(base).register_forward_hook(after_body),
        embedding.register_forward_hook(after_embedding),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def first_and_last_chunks(num_rows: int, rows_per_chunk: int) -> Iterator[slice]:
    """Yield the loss's first chunks of rows and the last: those between hold the same at every moment.

    A block of 131,072 tokens has 128 chunks, and tracing them all took three quarters of the time of a prediction.
    """
    chunks = list(row_chunks(num_rows, rows_per_chunk))
    yield from chunks if len(chunks) <= _TRACED_CHUNKS else (*chunks[: _TRACED_CHUNKS - 1], chunks[-1])
