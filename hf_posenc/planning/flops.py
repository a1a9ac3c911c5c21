"""Floating-point operations of training, those of the weights and those of the attention apart."""

from __future__ import annotations

from dataclasses import dataclass

from hf_posenc.planning.architecture import Architecture
from hf_posenc.training.step_plan import StepPlan

BACKWARD_ATTENTION = 2.5  # five products of block x block for the two forward (Dao 2023, arXiv:2307.08691, 4.1)


@dataclass(frozen=True)
class Flops:
    """Operations, a multiplication and an addition counted as two."""

    parameters: float
    attention: float

    @property
    def total(self) -> float:
        return self.parameters + self.attention


def training_flops(
    facts: Architecture, step: StepPlan, seq_len: int, num_tokens: int, *, group: int | None = None
) -> Flops:
    """Count the operations of training on ``num_tokens`` tokens in blocks of ``seq_len``.

    A weight costs two operations for a token in the forward pass, two for the gradient of its input, and two for its
    own if it is trained (Kaplan et al. 2020, section 2.1). Gradient checkpointing makes the layers twice. Attention
    is counted as causal kernels do it, half of the square. Left out are adapters, a few percent, and that under FSDP2
    and ZeRO-3 the loss makes its logits twice.

    Args:
        facts: Facts about the model.
        step: How a step computes.
        seq_len, num_tokens: Tokens of a block, and of the training.
        group: Tokens of a group of shifted sparse attention; None without it.
    """
    layers = facts.matrix_parameters - facts.head_parameters
    of_weights = {"all": facts.matrix_parameters, "attention": facts.attention_parameters}
    trained = facts.head_parameters if step.lora is not None else of_weights[step.trainable]
    again = layers if step.gradient_checkpointing else 0
    parameters = 2.0 * (2 * facts.matrix_parameters + trained + again)
    passes = 1 + BACKWARD_ATTENTION + step.gradient_checkpointing
    attention = passes * sum(attention_forward(facts, window, group, seq_len) for window in facts.windows)
    return Flops(parameters * num_tokens, attention * num_tokens)


def attention_forward(facts: Architecture, window: int | None, group: int | None, seq_len: int) -> float:
    """Return a token's operations in one layer: two products with each key it sees, of every head."""
    reach = seq_len if window is None else min(window, seq_len)
    if group is not None:
        reach = min(reach, group)
    keys = reach - reach * (reach - 1) / (2 * seq_len)  # the mean: the first tokens of a block see fewer
    if group is not None:
        keys = (reach + 1) / 2  # every group begins anew
    return 4.0 * facts.num_heads * facts.head_dim * keys
