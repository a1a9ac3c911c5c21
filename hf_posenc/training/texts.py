"""The texts of a run as token ids: what is trained on, what is measured on, and at which lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_posenc.data import tokenize_documents
from hf_posenc.families import unwrap
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.measure import default_lengths, hold_out
from hf_posenc.training.packing import PackedDataset, check_ids, log_summary

Documents = Sequence[torch.Tensor] | Sequence[str]


@dataclass(frozen=True)
class Texts:
    """What a run reads.

    Attributes:
        packed: The blocks it is trained on.
        held_out: Token ids it is measured on; empty where nothing is measured.
        lengths: Context lengths it is measured at, in tokens, rising.
    """

    packed: PackedDataset
    held_out: list[torch.Tensor]
    lengths: list[int]


def prepare_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Documents,
    eval_documents: Documents | None,
    config: FinetuneConfig,
    description: dict[str, Any],
) -> Texts:
    """Tokenize, check, hold out and pack.

    Args:
        model: For its vocabulary.
        tokenizer: Its EOS ends each document.
        documents, eval_documents: As for ``finetune``.
        config: The run.
        description: What ``hf_posenc.patching.describe`` says of the extended model.

    Raises:
        ValueError: No documents, token ids the model has no embedding for, or blocks longer than the target.
    """
    original, target = description["original_max_position_embeddings"], description["context_length"]
    if config.seq_len is not None and config.seq_len > target:
        raise ValueError(
            f"seq_len {config.seq_len} is longer than the target length, {target} tokens: the model would be trained "
            "past what it is extended to. Give at most the target, or raise factor or context_length."
        )
    lengths = sorted(set(config.eval_lengths or default_lengths(original, target)))
    vocab_size = unwrap(model).config.get_text_config().vocab_size
    eos = _eos(tokenizer, vocab_size)
    train_ids, held_out = _split(tokenizer, documents, eval_documents, max(lengths), config)
    check_ids(train_ids, vocab_size)
    check_ids(held_out, vocab_size, "held-out document")
    packed = PackedDataset(train_ids, config.seq_len or target, eos_token_id=eos, seed=config.seed)
    log_summary(packed.summary(original), original)
    return Texts(packed, held_out, lengths)


def _eos(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int | None:
    eos: Any = tokenizer.eos_token_id
    if eos is not None and not 0 <= eos < vocab_size:
        raise ValueError(
            f"the tokenizer's eos_token_id is {eos}, but the model's vocabulary has {vocab_size} ids: they do not "
            "belong together, or model.resize_token_embeddings(len(tokenizer)) is missing."
        )
    return eos  # type: ignore[no-any-return]


def _split(
    tokenizer: PreTrainedTokenizerBase,
    documents: Documents,
    eval_documents: Documents | None,
    longest: int,
    config: FinetuneConfig,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return token ids to train on and to measure on."""
    ids = _token_ids(tokenizer, documents)
    if not ids:
        raise ValueError("there are no documents to train on.")
    if config.eval_documents == 0:
        return ids, []
    if eval_documents is not None:
        return ids, _token_ids(tokenizer, eval_documents)
    return hold_out(ids, longest)


def _token_ids(tokenizer: PreTrainedTokenizerBase, documents: Documents) -> list[torch.Tensor]:
    if isinstance(documents, (str, torch.Tensor)):
        raise TypeError("documents must be a list of texts or of token id tensors; put a single one in a list.")
    return [d if isinstance(d, torch.Tensor) else tokenize_documents(tokenizer, [d])[0] for d in documents]
