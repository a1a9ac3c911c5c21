"""Texts with what a model took for likely at each of their tokens: what it is to go on doing there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from hf_posenc.errors import InvalidRequestError, argument
from hf_posenc.utils.files import write_tensors

LIKELY = 64  # tokens of each position whose log-probabilities are kept


def first_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that a model writes a text after: the one for the beginning of a text, or else for the end.

    Raises:
        ValueError: The tokenizer has neither.
    """
    first: int | None = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if first is None:
        raise InvalidRequestError(
            f"for 'retention' of {argument('task_mix')} and for {argument('keep')} the model writes texts, and its "
            "tokenizer has no token that a text begins or ends with: set tokenizer.bos_token to the one that it was "
            "trained with."
        )
    return first


@dataclass(frozen=True)
class RetainedTexts:
    """Texts of one length, and the model's distributions of the next token after each of their tokens.

    Attributes:
        ids: int64 ``(num_texts, length)``.
        position_ids: The positions that they were read at, int64 of the same shape.
        likely_ids: The ``LIKELY`` likeliest next tokens, int64 ``(num_texts, length, number)``.
        likely_log_probs: Their log-probabilities in nats, float32, of the same shape.
    """

    ids: torch.Tensor
    position_ids: torch.Tensor
    likely_ids: torch.Tensor
    likely_log_probs: torch.Tensor

    def save(self, file: Path) -> None:
        """Write a safetensors file, whole or not at all."""
        file.parent.mkdir(parents=True, exist_ok=True)
        whole = ("ids", "position_ids", "likely_ids")
        write_tensors({**vars(self), **{name: getattr(self, name).int() for name in whole}}, file)

    @classmethod
    def load(cls, file: Path) -> RetainedTexts:
        """Read what ``save`` wrote."""
        return cls(
            **{name: each.long() if each.dtype == torch.int32 else each for name, each in load_file(file).items()}
        )
