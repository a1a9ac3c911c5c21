"""Documents into full blocks of tokens, with every boundary between documents kept."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset

logger = logging.getLogger(__name__)

IGNORED = -100  # the label that cross entropy and Transformers leave out


@dataclass(frozen=True)
class PackingSummary:
    """What became of the tokens. Nothing is dropped and nothing is padded.

    Attributes:
        num_documents: Documents packed.
        num_blocks: Blocks of one pass over the data.
        num_tokens: Tokens of the documents, the added end-of-sequence tokens among them.
        num_repeated: Tokens from the start of the stream that fill up the last block.
        num_pieces: Runs of tokens that see each other: documents, cut where a block ends.
        share_beyond_original: Share of tokens whose position is past the original length, 0 to 1.
    """

    num_documents: int
    num_blocks: int
    num_tokens: int
    num_repeated: int
    num_pieces: int
    share_beyond_original: float


class PackedDataset(Dataset[dict[str, torch.Tensor]]):
    """Blocks of exactly ``seq_len`` tokens cut from one shuffled stream of documents.

    Each item holds int64 tensors ``(seq_len,)``: ``input_ids``; ``position_ids``, which restart at 0 where a
    document or the block starts, so that Transformers keeps the documents apart (it does so only when no
    attention mask is passed and no cache is used); ``labels``, ``-100`` where ``position_ids`` is 0, because
    that token would be predicted from another document. The last block is filled up from the start of the
    stream: those tokens are seen twice in a pass, which costs less than padding or than losing a long tail.

    Args:
        documents: Token ids, each 1-D int64 and not empty.
        seq_len: Tokens of a block, at least 2.
        eos_token_id: Appended to each document that does not end with it; None appends nothing.
        seed: Of the order of the documents.

    Raises:
        ValueError: No documents, an empty document, one that is not 1-D, or a block of fewer than 2 tokens.
    """

    def __init__(
        self, documents: Sequence[torch.Tensor], seq_len: int, *, eos_token_id: int | None, seed: int = 0
    ) -> None:
        if seq_len < 2:
            raise ValueError(f"seq_len must be at least 2 tokens, got {seq_len}: one token predicts nothing.")
        if len(documents) == 0:
            raise ValueError("there are no documents to train on.")
        order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed)).tolist()
        ended = [_with_eos(documents[index], index, eos_token_id) for index in order]
        lengths = torch.tensor([len(document) for document in ended])
        self.stream = torch.cat(ended)
        self.starts_document = torch.zeros(len(self.stream), dtype=torch.bool)
        self.starts_document[lengths.cumsum(0) - lengths] = True
        self.num_documents = len(ended)
        self.seq_len = seq_len

    def __len__(self) -> int:
        return -(-len(self.stream) // self.seq_len)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        offsets = torch.arange(self.seq_len)
        where = (index * self.seq_len + offsets) % len(self.stream)
        last_start = torch.where(self.starts_document[where], offsets, 0).cummax(0).values  # 0 if before the block
        position_ids = offsets - last_start
        input_ids = self.stream[where]
        return {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "labels": input_ids.masked_fill(position_ids == 0, IGNORED),
        }

    def fingerprint(self) -> str:
        """Return a short hash of every token, boundary and block length, in order."""
        digest = hashlib.sha256(str(self.seq_len).encode())
        digest.update(self.stream.numpy().tobytes())
        digest.update(self.starts_document.numpy().tobytes())
        return digest.hexdigest()[:16]

    def summary(self, original_length: int) -> PackingSummary:
        """Count what one pass over the blocks holds; ``original_length`` in tokens."""
        pieces = beyond = 0
        for index in range(len(self)):
            position_ids = self[index]["position_ids"]
            pieces += int((position_ids == 0).sum())
            beyond += int((position_ids >= original_length).sum())
        num_fed = len(self) * self.seq_len
        return PackingSummary(
            num_documents=self.num_documents,
            num_blocks=len(self),
            num_tokens=len(self.stream),
            num_repeated=num_fed - len(self.stream),
            num_pieces=pieces,
            share_beyond_original=beyond / num_fed,
        )


class BlockSchedule(Dataset[dict[str, torch.Tensor]]):
    """Exactly ``num_blocks`` blocks in the order of training: pass after pass, each in its own random order.

    With the order fixed here, every batch is full, no block comes twice before all came once, and a resumed run
    goes on with the block the interrupted one would have taken.
    """

    def __init__(self, packed: PackedDataset, num_blocks: int, seed: int) -> None:
        self.packed = packed
        generator = torch.Generator().manual_seed(seed)
        passes = [torch.randperm(len(packed), generator=generator) for _ in range(-(-num_blocks // len(packed)))]
        self.order = torch.cat(passes)[:num_blocks].tolist()

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.packed[self.order[index]]


def check_ids(documents: Sequence[torch.Tensor], vocab_size: int, kind: str = "document") -> None:
    """Refuse token ids that the model has no embedding for.

    Args:
        documents: Token ids.
        vocab_size: Of the model; ids go from 0 to one less.
        kind: What the message calls one of them.

    Raises:
        TypeError: They are not whole numbers.
        ValueError: One is negative or too large.
    """
    for index, document in enumerate(documents):
        if document.is_floating_point() or document.is_complex() or document.dtype == torch.bool:
            raise TypeError(f"{kind} {index} must hold token ids (int64), got {document.dtype}.")
        wrong = document[(document < 0) | (document >= vocab_size)]
        if wrong.numel():
            raise ValueError(
                f"{kind} {index} holds token id {int(wrong[0])}, but the model's vocabulary has {vocab_size} ids, 0 to "
                f"{vocab_size - 1}. Tokenize it with the tokenizer this model was trained with."
            )


def _with_eos(document: torch.Tensor, index: int, eos_token_id: int | None) -> torch.Tensor:
    if document.ndim != 1 or len(document) == 0:
        raise ValueError(f"document {index} must be a 1-D tensor of token ids, got shape {tuple(document.shape)}.")
    document = document.to(dtype=torch.int64, device="cpu")
    if eos_token_id is None or document[-1] == eos_token_id:
        return document
    return torch.cat([document, document.new_tensor([eos_token_id])])


def log_summary(summary: PackingSummary, original_length: int) -> None:
    """Say what was packed, and warn when the data hold hardly any long distance to learn from."""
    logger.info(
        "%d documents, %d tokens -> %d blocks in %d pieces; %d tokens repeated to fill the last block, none dropped; "
        "%.1f %% of the tokens stand past position %d",
        summary.num_documents,
        summary.num_tokens,
        summary.num_blocks,
        summary.num_pieces,
        summary.num_repeated,
        100 * summary.share_beyond_original,
        original_length,
    )
    if summary.share_beyond_original < 0.01:
        logger.warning(
            "only %.2f %% of the training tokens stand past the original %d tokens, so the model hardly sees what it "
            "is to learn. Train on longer documents, or raise seq_len.",
            100 * summary.share_beyond_original,
            original_length,
        )
