"""Documents cut into blocks of tokens: one stream with every boundary kept, or one document in a block."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from itertools import pairwise

import torch

from hf_posenc.data.tokens import MaskedTokens, Tokens, ids_of
from hf_posenc.errors import InvalidRequestError, InvalidTypeError

logger = logging.getLogger(__name__)


class PackedDocuments:
    """Documents in a random order as one stream of tokens, cut into blocks of ``seq_len``.

    The last block is filled up from the start of the stream: those tokens are read twice in a pass, which costs less
    than padding or than losing a long tail. With ``one_document`` every block holds one document: a longer document is
    cut, its last block ends with it and so repeats some tokens, and behind a shorter document the block is padded. The
    padding needs no mask: no token follows it, and it does not count. Blocks in which no token counts are left out.

    Args:
        documents: Token ids, each 1-D int64 and not empty, or masked tokens, which are taken as they are.
        seq_len: Tokens of a block, at least 2.
        eos_token_id: Appended to each document that does not end with it; None appends nothing.
        bos_token_id: Put before each text that does not begin with it; None puts nothing.
        seed: Seed of the order of the documents.
        one_document: For models and launches that cannot keep the documents of a block apart.

    Attributes:
        stream: All tokens, int64 ``(num_tokens,)``.
        counted: Which of them count in the loss, bool ``(num_tokens,)``.
        num_documents: How many documents there are.

    Raises:
        ValueError: No documents, an empty document, one that is not 1-D, a block of fewer than 2 tokens, or no token
            that counts in the loss.
    """

    def __init__(
        self,
        documents: Sequence[Tokens],
        seq_len: int,
        *,
        eos_token_id: int | None,
        bos_token_id: int | None = None,
        seed: int = 0,
        one_document: bool = False,
    ) -> None:
        if seq_len < 2:
            raise InvalidRequestError(f"seq_len must be at least 2 tokens, got {seq_len}: one token predicts nothing.")
        if len(documents) == 0:
            raise InvalidRequestError("there are no documents to train on.")
        order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed)).tolist()
        ended = [_ended(documents[index], index, bos_token_id, eos_token_id) for index in order]
        lengths = torch.tensor([len(document) for document in ended])
        self.stream = torch.cat([document.ids for document in ended])
        self.counted = torch.cat([document.counted for document in ended])
        self.num_documents = len(ended)
        self.seq_len, self.one_document = seq_len, one_document
        self._starts_document = torch.zeros(len(self.stream), dtype=torch.bool)
        self._starts_document[lengths.cumsum(0) - lengths] = True
        all_cuts = self._cut_documents(lengths) if one_document else self._cut_stream()
        labelled = self.counted & ~self._starts_document
        self._cuts = [cut for cut in all_cuts if labelled[self._indices(cut)[1:]].any()]
        self._num_left_out = len(all_cuts) - len(self._cuts)
        self._warn_about_left_out()

    def __len__(self) -> int:
        return len(self._cuts)

    def where(self, index: int) -> torch.Tensor:
        """Return the indices of a block's tokens in the stream, without padding; int64 1-D."""
        return self._indices(self._cuts[index])

    def pieces(self, index: int) -> list[MaskedTokens]:
        """Return the documents, or parts of documents, of a block: ``seq_len`` tokens together, padding included."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        where = self.where(index)
        tokens = MaskedTokens(self.stream[where], self.counted[where])
        if self.one_document:
            padding = self.seq_len - len(tokens)
            # Any token pads; the last one is in the vocabulary.
            ids = torch.cat([tokens.ids, tokens.ids[-1:].expand(padding)])
            return [MaskedTokens(ids, torch.cat([tokens.counted, torch.zeros(padding, dtype=torch.bool)]))]
        starts = self._starts_document[where]
        starts[0] = True
        bounds = [*starts.nonzero()[:, 0].tolist(), self.seq_len]
        return [tokens[start:stop] for start, stop in pairwise(bounds)]

    def fingerprint(self) -> str:
        """Return a short hash of every token, boundary, mask and block length, in order, and of the blocks kept."""
        digest = hashlib.sha256(str(self.seq_len).encode())
        digest.update(self.stream.numpy().tobytes())
        digest.update(self._starts_document.numpy().tobytes())
        if not self.counted.all():
            digest.update(self.counted.numpy().tobytes())
        short = digest.hexdigest()[:16]
        if self._num_left_out:
            kept = [start // self.seq_len for start, _ in self._cuts]
            short = hashlib.sha256(f"{short} {kept}".encode()).hexdigest()[:16]
        return hashlib.sha256(f"{short} {self._cuts}".encode()).hexdigest()[:16] if self.one_document else short

    def _cut_stream(self) -> list[tuple[int, int]]:
        return [(start, start + self.seq_len) for start in range(0, len(self.stream), self.seq_len)]

    def _cut_documents(self, lengths: torch.Tensor) -> list[tuple[int, int]]:
        cuts = []
        ends = lengths.cumsum(0).tolist()
        for end, length in zip(ends, lengths.tolist(), strict=True):
            first, last = end - length, max(end - length, end - self.seq_len)
            cuts += [(start, min(start + self.seq_len, end)) for start in (*range(first, last, self.seq_len), last)]
        return cuts

    def _indices(self, cut: tuple[int, int]) -> torch.Tensor:
        return torch.arange(*cut) % len(self.stream)

    def _warn_about_left_out(self) -> None:
        """Warn of the blocks that teach nothing, without which a step would have no loss."""
        if not self._cuts:
            raise InvalidRequestError(
                f"none of the {len(self.stream):,} tokens to train on counts in the loss: all of them are "
                "prompts, turns of others than the assistant, or documents of one token. Give longer answers, or let "
                "all tokens count."
            )
        if self._num_left_out:
            logger.warning(
                "%d of %d blocks of %d tokens hold none that counts in the loss, and are left out",
                self._num_left_out,
                self._num_left_out + len(self),
                self.seq_len,
            )


def check_ids(documents: Sequence[torch.Tensor], vocab_size: int, kind: str = "document") -> None:
    """Refuse token ids that the model has no embedding for.

    Args:
        documents: Token ids.
        vocab_size: Vocabulary size of the model; ids go from 0 to one less.
        kind: What the message calls one of them.

    Raises:
        TypeError: They are not whole numbers.
        ValueError: One is negative or too large.
    """
    for index, document in enumerate(documents):
        if document.is_floating_point() or document.is_complex() or document.dtype == torch.bool:
            raise InvalidTypeError(f"{kind} {index} must hold token ids (int64), got {document.dtype}.")
        wrong = document[(document < 0) | (document >= vocab_size)]
        if wrong.numel():
            raise InvalidRequestError(
                f"{kind} {index} holds token id {int(wrong[0])}, but the model's vocabulary has {vocab_size} ids, 0 to "
                f"{vocab_size - 1}. Tokenize it with the tokenizer this model was trained with."
            )


def _ended(document: Tokens, index: int, bos_token_id: int | None, eos_token_id: int | None) -> MaskedTokens:
    """Return a document with its tokens for beginning and end, and its mask; one that has a mask has them already."""
    ids = ids_of(document)
    if ids.ndim != 1 or len(ids) == 0:
        raise InvalidRequestError(f"document {index} must be a 1-D tensor of token ids, got shape {tuple(ids.shape)}.")
    if isinstance(document, MaskedTokens):
        return document
    ids = ids.to(dtype=torch.int64, device="cpu")
    if bos_token_id is not None and ids[0] != bos_token_id:
        ids = torch.cat([ids.new_tensor([bos_token_id]), ids])
    if eos_token_id is not None and ids[-1] != eos_token_id:
        ids = torch.cat([ids, ids.new_tensor([eos_token_id])])
    return MaskedTokens.uniform(ids, counted=True)
