"""Whether the texts suffice: something in each document, tokens for a block, a held-out text long enough to measure."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from hf_posenc.training.config import FinetuneConfig

logger = logging.getLogger(__name__)


def check_enough_text(
    train_ids: Sequence[torch.Tensor],
    held_out: Sequence[torch.Tensor],
    lengths: Sequence[int],
    seq_len: int,
    config: FinetuneConfig,
) -> None:
    """Refuse texts that cannot be trained or measured on, and warn where no document fills a block.

    Args:
        train_ids, held_out: Token ids, each 1-D.
        lengths: Context lengths to be measured, in tokens, rising.
        seq_len: Tokens of a block.
        config: The run.

    Raises:
        ValueError: The message says how many tokens there are, how many it takes, and what to do.
    """
    empty = [index for index, document in enumerate(train_ids) if document.numel() == 0]
    if empty:
        raise ValueError(
            f"{len(empty)} of {len(train_ids)} documents to train on hold no token, document {empty[0]} first. Leave "
            "them out; a single document must be long enough for a part to be held out, or eval_documents be 0 "
            "(--eval-documents 0)."
        )
    tokens = sum(document.numel() for document in train_ids)
    if tokens + len(train_ids) < seq_len:  # each may get an end-of-sequence token
        raise ValueError(
            f"the {_count(train_ids)} to train on hold {tokens:,} tokens in all, {100 * tokens / seq_len:.1f} % of one "
            f"block of {seq_len:,}: the model would read the same words over and over within a block. Give more text, "
            "or a smaller seq_len (--seq-len)."
        )
    reach = max((len(document) for document in held_out), default=0)
    if config.eval_documents and reach < lengths[0]:
        raise ValueError(
            f"nothing can be measured: the longest held-out text has {reach:,} tokens, the shortest length to be "
            f"measured is {lengths[0]:,}. Give longer documents, shorter lengths (--eval-lengths), or train without "
            "measuring: eval_documents=0 (--eval-documents 0)."
        )
    _warn_about_short_documents([document.numel() for document in train_ids], seq_len, config)


def _warn_about_short_documents(lengths: Sequence[int], seq_len: int, config: FinetuneConfig) -> None:
    longest = max(lengths)
    if longest >= seq_len:
        return
    mean = sum(lengths) / len(lengths)
    learned = f", and no distance beyond {longest:,} tokens is learned" if config.position_schedule == "full" else ""
    logger.warning(
        "all %d documents are shorter than a block of %d tokens: the longest has %d and fills %.1f %% of one, the mean "
        "%.1f %%. Blocks are packed from several, which do not see each other%s. Give longer documents, or a smaller "
        "seq_len (--seq-len).",
        len(lengths),
        seq_len,
        longest,
        100 * longest / seq_len,
        100 * mean / seq_len,
        learned,
    )


def _count(documents: Sequence[torch.Tensor]) -> str:
    return f"{len(documents)} document{'s' if len(documents) > 1 else ''}"
