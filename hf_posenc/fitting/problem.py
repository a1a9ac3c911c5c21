"""The data that the objectives of a fit share: the model, the rule, the texts, and the recordings of a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hf_posenc.evaluation.lm_head import decoder_body, head_logits
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.fitting.hidden_numbers import HiddenNumber
from hf_posenc.fitting.recording import Recording
from hf_posenc.fitting.rule_attention import RuleAttention, extended_layers


@dataclass
class FitProblem:
    """A model whose rule is being fitted.

    Attributes:
        rotary: The model; it attends by ``attention``, and its weights are frozen.
        attention: Attends under the rule, differentiable in it.
        texts: What is fitted on, int64 ``(num_tokens,)`` each.
        recordings: A teacher's forward over each text; empty if no objective needs one.
        needles: The numbers hidden in each text, by rising position; empty lists for none.
        original: The original length, in tokens.
        target: The target length, in tokens.
        generator: Generator of everything random.
    """

    rotary: RotaryModel
    attention: RuleAttention
    texts: Sequence[torch.Tensor]
    recordings: Sequence[Recording]
    needles: Sequence[Sequence[HiddenNumber]]
    original: int
    target: int
    generator: torch.Generator

    @property
    def layers(self) -> list[nn.Module]:
        """The attention layers whose positions are extended."""
        return extended_layers(self.rotary)

    def integer(self, low: int, high: int) -> int:
        """Return a random number from ``low`` until ``high``."""
        return int(torch.randint(low, max(high, low + 1), (), generator=self.generator))

    def recording(self) -> Recording:
        """Return one of the recordings at random."""
        return self.recordings[self.integer(0, len(self.recordings))]

    def place(self, num_tokens: int, block: int, short_share: float) -> int:
        """Return where a block begins in a text: within the original length in that share of cases, else past it.

        Args:
            num_tokens: Number of tokens of the text; one that does not go past the original length has no place there.
            block: Tokens of the block; one more follows it in the text. One that does not fit past the original length
                ends where the text does.
            short_share: The share.
        """
        last = num_tokens - block - 1
        is_short = float(torch.rand((), generator=self.generator)) < short_share or num_tokens <= self.original
        low, high = (0, min(self.original - block, last)) if is_short else (min(self.original, max(last, 0)), last)
        return self.integer(low, max(high, low) + 1)

    def block_logits(self, recording: Recording | None, ids: torch.Tensor, start: int) -> torch.Tensor:
        """Return float32 logits ``(batch, length, vocab_size)`` of tokens under the rule, with gradients.

        Args:
            recording: What comes before them.
            ids: int64 ``(batch, length)``.
            start: How many tokens of the recording come before them.
        """
        model = self.rotary.model
        positions = self.attention.begin(recording if start else None, start, ids.shape[1])
        body = decoder_body(model)
        hidden = body(input_ids=ids.to(model.device), position_ids=positions, use_cache=False).last_hidden_state
        return head_logits(model, hidden)
