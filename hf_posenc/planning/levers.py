"""What makes training fit, one lever after the other, each on top of those before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PreTrainedConfig

from hf_posenc.planning.training_memory import TrainingMemory, computes_in_half, predict_training_memory
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.positions import has_windows

# Names of levers; the order is that of TRL's guide to long contexts: logits, precision, activations, weights, devices.
AS_ASKED, BF16, CHECKPOINTING, NO_MASK, LORA, POSE, POSE_LORA = (
    "as asked",
    "bf16",
    "gradient checkpointing",
    "no mask",
    "LoRA+",
    "PoSE window",
    "PoSE window, LoRA+",
)
# Left for the CUDA context, kernels' workspaces and what the allocator cannot use; a guess, not measured.
RESERVE = 10**9
_MOST_DEVICES = 64


@dataclass(frozen=True)
class Lever:
    """One way to run the training, and what it needs.

    Attributes:
        name: What is new in it.
        run: The settings.
        seq_len: Tokens of a block.
        packed: Blocks hold several documents, kept apart by a mask.
        memory: What it needs on one device.
    """

    name: str
    run: FinetuneConfig
    seq_len: int
    packed: bool
    memory: TrainingMemory

    def fits(self, gpu_memory: int) -> bool:
        """Say whether it fits one device of so many bytes."""
        return self.memory.peak <= gpu_memory - RESERVE


@dataclass(frozen=True)
class Sharding:
    """An estimate for several devices.

    Attributes:
        num_devices: The fewest that are enough, a power of two.
        context_parallel: One block has to be spread too, not only weights, gradients and states.
        per_device: Bytes on each.
    """

    num_devices: int
    context_parallel: bool
    per_device: int


def levers(
    config: PreTrainedConfig, run: FinetuneConfig, seq_len: int, original: int, *, packed: bool
) -> Iterator[Lever]:
    """Yield the ways to train, from what was asked for to what needs least; each is predicted when it is reached.

    The loss in chunks, the first lever, is always on.

    Args:
        config: The model's.
        run: What was asked for.
        seq_len: Tokens of a block: the target length.
        original: The original length, that of PoSE's window.
        packed: Blocks hold several documents.
    """

    def lever(name: str, run: FinetuneConfig, length: int = seq_len, packed: bool = packed) -> Lever:
        return Lever(name, run, length, packed, predict_training_memory(config, run, length, packed=packed))

    yield lever(AS_ASKED, run)
    if not computes_in_half(config, run):
        run = dataclasses.replace(run, bf16=True)
        yield lever(BF16, run)
    if not run.gradient_checkpointing:
        run = dataclasses.replace(run, gradient_checkpointing=True)
        yield lever(CHECKPOINTING, run)
    if packed:
        yield lever(NO_MASK, run, packed=False)
    adapters = dataclasses.replace(run, lora=True)
    if not run.lora:
        yield lever(LORA, adapters, packed=False)
    if original < seq_len:
        windows = has_windows(config)  # in which a skip has to be masked
        if not run.lora:
            yield lever(POSE, dataclasses.replace(run, position_schedule="pose"), original, windows)
        yield lever(POSE_LORA, dataclasses.replace(adapters, position_schedule="pose"), original, windows)


def shard(lever: Lever, gpu_memory: int, num_layers: int) -> Sharding | None:
    """Estimate on how many devices a full-length way to train fits; None if not on 64.

    FSDP2 and ZeRO-3 spread weights, gradients and states, and gather one layer at a time (two while the next is on its
    way); context parallel spreads the block. Before that each device holds all weights for a moment, as they are
    trained (``hf_posenc.training.sharding``). Counted from the parts of one device, and not measured.
    """
    memory = lever.memory
    if memory.weights > gpu_memory - RESERVE:
        return None
    spread = memory.weights + memory.optimizer + memory.all_gradients
    rest = memory.peak - memory.weights - memory.optimizer - memory.gradients
    gathered = 2 * memory.weights // num_layers
    devices = 2
    while devices <= _MOST_DEVICES:
        for context_parallel in (False, True):
            per_device = spread // devices + gathered + (rest // devices if context_parallel else rest)
            if per_device <= gpu_memory - RESERVE:
                return Sharding(devices, context_parallel, per_device)
        devices *= 2
    return None
