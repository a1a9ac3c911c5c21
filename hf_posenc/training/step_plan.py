"""The settings of an optimizer step: its memory and operations depend on them, beside the model and the blocks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LoraSettings:
    """Adapters to train.

    Attributes:
        rank: Rank of the adapters.
        alpha: The output of the adapters is scaled by ``alpha / rank``.
        targets: Layers that get adapters: ``"attention"``, or ``"all-linear"`` as PEFT means it: all but the head.
        embeddings: The embedding and the norms are trained too.
    """

    rank: int = 8
    alpha: int = 16
    targets: str = "attention"
    embeddings: bool = True


@dataclass(frozen=True)
class StepPlan:
    """The settings of an optimizer step.

    Attributes:
        batch_size: Blocks in one forward pass, on each device.
        num_passes: Forward passes of a step.
        gradient_checkpointing: Each layer is computed again in the backward pass.
        bf16: It computes in bfloat16 under autocast; None leaves that to the dtype of the weights.
        optim: The optimizer, as TrainingArguments name it.
        lora: The adapters that are trained; None trains the model's own weights.
        trainable: Without adapters, which of the weights are trained: ``"all"``, or those of the ``"attention"``.
        logits_chunk: Positions whose logits are in memory at one time.
    """

    batch_size: int
    num_passes: int
    gradient_checkpointing: bool
    bf16: bool | None
    optim: str
    lora: LoraSettings | None
    trainable: str
    logits_chunk: int

    def autocast(self, device_type: str) -> AbstractContextManager[Any]:
        """Return a context manager, while which tensors on such devices are computed as in the step."""
        import torch

        return torch.autocast(device_type, torch.bfloat16) if self.bf16 else nullcontext()
