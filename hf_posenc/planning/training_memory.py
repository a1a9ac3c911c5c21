"""The memory of a training step, part by part, before any weights are loaded.

The step itself is run, by the code that trains, on tensors that have a shape and no data: what is kept for the
backward pass, what is recomputed, and when it is freed, is then what really happens, for any family.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_posenc.checkpoint.loading import meta_model
from hf_posenc.evaluation.lm_head import decoder_body, row_chunks
from hf_posenc.planning.quantised_shapes import QuantisedLinear, quantise_shapes
from hf_posenc.planning.shapes import fill_with_fake, for_all_layers, text_config, without_data
from hf_posenc.planning.tracking import ALL, GRADIENTS, HALF_WEIGHTS, LOGITS, MATRICES, MemoryTracker
from hf_posenc.training.chunked_loss import chunked_lm_loss
from hf_posenc.training.conflicts import EIGHT_BIT_ADAMW
from hf_posenc.training.lora import add_lora
from hf_posenc.training.step_plan import StepPlan
from hf_posenc.training.weights import float32_weights, trained_alone
from hf_posenc.utils.dtypes import HALF, config_dtype

_STATES = 2  # of AdamW, in the weights' own dtype
# Of bitsandbytes' AdamW (``Optimizer2State.init_state``): small weights keep states of 4 bytes, as embeddings do
# (Trainer says so), and every block of states in 8 bits has a scale in float32.
_FEWEST_IN_8_BITS, _STATES_BLOCK = 4096, 256
_TRACED_CHUNKS = 4  # of the loss
FORWARD, LOSS, LOSS_BACKWARD, LAYERS_BACKWARD, EMBEDDING_BACKWARD, OPTIMIZER = (
    "forward",
    "loss",
    "loss backward",
    "layers backward",
    "embedding backward",
    "optimizer",
)
# A number of bytes: the phase at whose peak they live, and what they are for; of those that stay, the field's name.
Part = tuple[str, str]
_STAYS = "always"


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on one device at the peak of an optimizer step, from the second one on, when the states exist.

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
    step: StepPlan,
    seq_len: int,
    *,
    packed: bool = True,
    chunked_loss: bool = True,
    load_in_4bit: bool = False,
) -> TrainingMemory:
    """Predict the peak of ``finetune``'s optimizer steps on one device, of CPU kernels.

    Of deep models a few layers are run (``for_all_layers``).

    Args:
        config: The model's.
        step: How a step computes.
        seq_len: Tokens of a block.
        packed: Blocks hold more than one document (or a piece of one), so attention needs a mask.
        chunked_loss: As ``finetune`` has it; False for the loss of a plain Trainer, with all logits.
        load_in_4bit: The weights are loaded so, for adapters to be trained on them.

    Raises:
        ValueError: The family cannot be run without data.
    """
    return memory_at_peak(
        for_all_layers(config, lambda some: phase_bytes(some, step, seq_len, packed, chunked_loss, load_in_4bit))
    )


def least_training_memory(
    config: PreTrainedConfig, step: StepPlan, seq_len: int, *, load_in_4bit: bool = False
) -> TrainingMemory:
    """Return the least memory of a step, from sizes alone: no step is run, so this is a tenth of the work.

    Beside weights and optimizer states a step holds all gradients at its end, and after the forward pass the input of
    every layer, which the backward pass starts from with gradient checkpointing or without. The larger is counted.

    Args:
        config, step, seq_len, load_in_4bit: As for ``predict_training_memory``.
    """
    text, half = text_config(config), computes_in_half(config, step)

    def sizes_of(some_layers: PreTrainedConfig) -> dict[Part, int]:
        _, model = _model_to_train(some_layers, step, load_in_4bit)
        with float32_weights(model, frozen=not half):
            return _sizes(model, step)

    inputs = int(text.num_hidden_layers) * step.batch_size * seq_len * int(text.hidden_size)
    return memory_at_peak({**for_all_layers(config, sizes_of), (FORWARD, ALL): inputs * (2 if half else 4)})


def memory_at_peak(found: Mapping[Part, float]) -> TrainingMemory:
    """Return the moment at which most bytes live, of the sizes that stay and those of each phase's peak."""
    sizes = {part: round(max(size, 0)) for part, size in found.items()}
    all_gradients = sizes[_STAYS, "all_gradients"]
    sizes |= {(OPTIMIZER, ALL): all_gradients, (OPTIMIZER, GRADIENTS): all_gradients}
    phase = max((phase for phase, kind in sizes if kind == ALL), key=lambda phase: sizes[phase, ALL])
    peak = sizes[phase, ALL]
    kinds = (GRADIENTS, HALF_WEIGHTS, MATRICES, LOGITS)
    parts = {kind: min(sizes.get((phase, kind), 0), peak) for kind in kinds}
    return TrainingMemory(
        activations=max(peak - sum(parts.values()), 0),
        phase=phase,
        **parts,
        **{name: sizes[_STAYS, name] for name in ("weights", "optimizer", "trained_parameters", "all_gradients")},
    )


def phase_bytes(
    config: PreTrainedConfig,
    step: StepPlan,
    seq_len: int,
    packed: bool,
    chunked_loss: bool,
    load_in_4bit: bool = False,
) -> dict[Part, int]:
    """Return the bytes that stay, and the peak of each phase of a forward and backward pass."""
    base, model = _model_to_train(config, step, load_in_4bit)
    step = replace(step, bf16=computes_in_half(config, step))
    with without_data(config):
        fill_with_fake(model)
        with trained_alone(model, step.trainable), float32_weights(model, frozen=not step.bf16):
            return {**_sizes(model, step), **_peaks(base, model, step, seq_len, packed, chunked_loss)}


def _model_to_train(config: PreTrainedConfig, step: StepPlan, load_in_4bit: bool) -> tuple[PreTrainedModel, Any]:
    """Return a model on the meta device, and what is trained of it: the model itself, or adapters around it."""
    base = meta_model(config)
    if load_in_4bit:
        quantise_shapes(base, 4)
    with torch.device("meta"):
        trained = base if step.lora is None else add_lora(base, step.lora)
    trained.train()
    for module in trained.modules():
        if isinstance(getattr(module, "base_layer", None), QuantisedLinear):
            module.cast_input_dtype_enabled = False  # PEFT's layer around a quantised one leaves its input alone
    base.config.use_cache = False
    if step.gradient_checkpointing:
        (getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable)()
        if step.lora is not None:
            base.enable_input_require_grads()  # type: ignore[no-untyped-call]  # Transformers leaves it untyped
    return base, trained


def computes_in_half(config: PreTrainedConfig, step: StepPlan) -> bool:
    return config_dtype(config) in HALF if step.bf16 is None else step.bf16


def _sizes(model: Any, step: StepPlan) -> dict[Part, int]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    embedded = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}

    def states(parameter: nn.Parameter) -> int:
        numbers = parameter.numel()
        if step.optim != EIGHT_BIT_ADAMW or numbers < _FEWEST_IN_8_BITS or id(parameter) in embedded:
            return _STATES * parameter.nbytes
        return _STATES * (numbers + 4 * math.ceil(numbers / _STATES_BLOCK))

    return {
        (_STAYS, "optimizer"): sum(map(states, trained)),
        (_STAYS, "weights"): sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
        (_STAYS, "all_gradients"): sum(parameter.nbytes for parameter in trained),
        (_STAYS, "trained_parameters"): sum(parameter.numel() for parameter in trained),
    }


def _peaks(
    base: PreTrainedModel, model: Any, step: StepPlan, seq_len: int, packed: bool, chunked_loss: bool
) -> dict[Part, int]:
    vocab_size = int(text_config(base.config).vocab_size)
    input_ids = torch.zeros(step.batch_size, seq_len, dtype=torch.int64)
    position_ids = torch.arange(seq_len).expand(step.batch_size, -1)
    with MemoryTracker(model.parameters(), vocab_size, seq_len) as tracker, _phases(base, tracker):
        for _ in range(min(step.num_passes, 2)):  # from the second on, gradients exist before
            in_chunks: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if chunked_loss:  # positions have no values here, so that they cannot say how many documents a block has
                in_chunks = chunked_lm_loss(
                    model, step.logits_chunk, chunks=first_and_last_chunks, one_document=not packed
                )
            with in_chunks, step.autocast("cpu"):
                loss = model(input_ids=input_ids, position_ids=position_ids, labels=input_ids).loss
            tracker.phase = LOSS_BACKWARD
            loss.backward()
            del loss
            tracker.phase = FORWARD
    return {(phase, kind): size for phase, peak in tracker.peaks.items() for kind, size in peak.items()}


@contextlib.contextmanager
def _phases(base: PreTrainedModel, tracker: MemoryTracker) -> Iterator[None]:
    """Set the tracker's phase, by hooks on the hidden states before and after the layers."""

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


def first_and_last_chunks(targets: torch.Tensor, rows_per_chunk: int) -> Iterator[slice]:
    """Yield the loss's first chunks of rows and the last: those between hold the same at every moment.

    A block of 131,072 tokens has 128 chunks, and each takes as long to trace.
    """
    chunks = list(row_chunks(len(targets), rows_per_chunk))
    yield from chunks if len(chunks) <= _TRACED_CHUNKS else (*chunks[: _TRACED_CHUNKS - 1], chunks[-1])
