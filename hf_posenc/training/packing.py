"""Documents into blocks of tokens: packed, with every boundary between them kept, or one document a block."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.utils.data import Dataset

from hf_posenc.errors import InvalidRequestError, InvalidTypeError
from hf_posenc.training.positions import FULL, PositionSchedule

logger = logging.getLogger(__name__)

IGNORED = -100  # the label that cross entropy and Transformers leave out
_MUCH_PADDING = 50.0  # percent of the tokens of a run


@dataclass(frozen=True)
class MaskedTokens:
    """A document that is whole as it is, and which of its tokens count in the loss: a chat, a prompt with its answer.

    Attributes:
        ids: int64 ``(num_tokens,)``.
        counted: bool ``(num_tokens,)``.
    """

    ids: torch.Tensor
    counted: torch.Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> MaskedTokens:
        return MaskedTokens(self.ids[part], self.counted[part])


def joined(parts: Sequence[MaskedTokens]) -> MaskedTokens:
    """Return parts of a document or a block, one after the other."""
    return MaskedTokens(torch.cat([part.ids for part in parts]), torch.cat([part.counted for part in parts]))


Tokens = torch.Tensor | MaskedTokens  # of a document; all tokens of a tensor count


def block_of(tokens: MaskedTokens, position_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a block for the model: int64 ``input_ids``, ``position_ids`` and ``labels``, all ``(seq_len,)``.

    Labels are ``-100`` where a token does not count, and at position 0: it would be predicted from another document.
    """
    labels = tokens.ids.masked_fill((position_ids == 0) | ~tokens.counted, IGNORED)
    return {"input_ids": tokens.ids, "position_ids": position_ids, "labels": labels}


def ids_of(document: Tokens) -> torch.Tensor:
    return document.ids if isinstance(document, MaskedTokens) else document


@dataclass(frozen=True)
class PackingSummary:
    """What becomes of the tokens in a run. What is not read is counted, and so is padding.

    Attributes:
        num_documents: Documents packed, each as often as it is read in a pass.
        num_tokens: Tokens of these documents, the added end-of-sequence tokens among them.
        num_repeated: Tokens that a pass reads twice, to fill a block.
        num_blocks: Blocks that are trained on, those of later passes counted again.
        num_trained: Tokens of these blocks, with padding.
        num_padding: Those of them that are padding (``SingleDocumentBlocks``).
        num_masked: Those of them that are left out of the loss because of what they are: of a prompt, or a user's.
        num_left_out: Tokens of the documents that are in no block of any pass.
        num_unused: Tokens of the documents that a pass holds and none of these blocks: the budget ends before them.
        num_short: Blocks that are read as windows of the original length.
        num_pieces: Runs of tokens that see each other: documents, cut where a block or a window ends.
        share_beyond_original: Share of the trained tokens that see, in one layer, a distance the model was not trained
            on: whose position is past the original length, counted from the first token they see; 0 to 1.
    """

    num_documents: int
    num_tokens: int
    num_repeated: int
    num_blocks: int
    num_trained: int
    num_padding: int
    num_masked: int
    num_left_out: int
    num_unused: int
    num_short: int
    num_pieces: int
    share_beyond_original: float


class PackedDataset(Dataset[dict[str, torch.Tensor]]):
    """Blocks of exactly ``seq_len`` tokens cut from one shuffled stream of documents.

    Each item holds int64 tensors ``(seq_len,)``: ``input_ids``; ``position_ids``, which restart at 0 where a
    document or the block starts, so that Transformers keeps the documents apart (it does so only when no
    attention mask is passed and no cache is used); ``labels``, ``-100`` where ``position_ids`` is 0, because
    that token would be predicted from another document, and where a token is masked. The last block is filled up
    from the start of the stream: those tokens are seen twice in a pass, which costs less than padding or than losing
    a long tail. Blocks whose tokens are all masked are left out.

    Args:
        documents: Token ids, each 1-D int64 and not empty, or masked tokens, which are taken as they are.
        seq_len: Tokens of a block, at least 2.
        eos_token_id: Appended to each document that does not end with it; None appends nothing.
        seed: Of the order of the documents.
        positions: How positions run when these blocks are trained on (``BlockSchedule``); None: one after the other.

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
        seed: int = 0,
        positions: PositionSchedule | None = None,
    ) -> None:
        if seq_len < 2:
            raise InvalidRequestError(f"seq_len must be at least 2 tokens, got {seq_len}: one token predicts nothing.")
        if len(documents) == 0:
            raise InvalidRequestError("there are no documents to train on.")
        order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed)).tolist()
        ended = [_ended(documents[index], index, eos_token_id) for index in order]
        lengths = torch.tensor([len(document) for document in ended])
        self.stream = torch.cat([document.ids for document in ended])
        self.counted = torch.cat([document.counted for document in ended])
        self.starts_document = torch.zeros(len(self.stream), dtype=torch.bool)
        self.starts_document[lengths.cumsum(0) - lengths] = True
        self.num_documents = len(ended)
        self.seq_len = seq_len
        self.positions = positions or PositionSchedule(FULL, seq_len, seq_len)
        self.cuts = self._cut(lengths)
        self.num_cut = len(self.cuts)
        self._leave_out_masked()

    def _cut(self, lengths: torch.Tensor) -> list[tuple[int, int]]:
        """Return where in the stream each block starts and ends; ``lengths`` are those of the documents in it."""
        starts = range(0, len(self.stream), self.seq_len)
        return [(start, start + self.seq_len) for start in starts]

    def _leave_out_masked(self) -> None:
        """Keep the blocks with something to learn: a step of others would have no loss."""
        labelled = self.counted & ~self.starts_document
        self.cuts = [cut for cut in self.cuts if labelled[self._indices(cut)[1:]].any()]
        if not self.cuts:
            raise InvalidRequestError(
                f"none of the {len(self.stream):,} tokens to train on counts in the loss: all of them are "
                "prompts, turns of others than the assistant, or documents of one token. Give longer answers, or let "
                "all tokens count."
            )
        if len(self.cuts) < self.num_cut:
            logger.warning(
                "%d of %d blocks of %d tokens hold none that counts in the loss, and are left out",
                self.num_cut - len(self.cuts),
                self.num_cut,
                self.seq_len,
            )

    def __len__(self) -> int:
        return len(self.cuts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.block(index, torch.cat([torch.arange(n) for n in self.pieces(index)]))

    def block(self, index: int, position_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a block whose tokens have these positions, int64 ``(seq_len,)``."""
        return block_of(self.tokens(index), position_ids)

    def tokens(self, index: int) -> MaskedTokens:
        """Return the tokens of a block, and which of them count."""
        where = self.where(index)
        return MaskedTokens(self.stream[where], self.counted[where])

    def schedule(self, num_steps: int, blocks_per_step: int, seed: int) -> BlockSchedule:
        """Return the blocks of a run in the order of training."""
        return BlockSchedule(self, num_steps * blocks_per_step, seed)

    def where(self, index: int) -> torch.Tensor:
        """Return the indices of a block's tokens in the stream, without padding; int64 1-D."""
        return self._indices(self.cuts[index])

    def _indices(self, cut: tuple[int, int]) -> torch.Tensor:
        return torch.arange(*cut) % len(self.stream)

    def pieces(self, index: int) -> list[int]:
        """Return the lengths of the documents, or parts of documents, in a block."""
        starts = self.starts_document[self.where(index)]
        starts[0] = True
        bounds = [*starts.nonzero()[:, 0].tolist(), self.seq_len]
        return [stop - start for start, stop in pairwise(bounds)]

    def fingerprint(self) -> str:
        """Return a short hash of every token, boundary, mask and block length, in order, and of the blocks kept."""
        digest = hashlib.sha256(str(self.seq_len).encode())
        digest.update(self.stream.numpy().tobytes())
        digest.update(self.starts_document.numpy().tobytes())
        if not self.counted.all():
            digest.update(self.counted.numpy().tobytes())
        short = digest.hexdigest()[:16]
        if len(self.cuts) == self.num_cut:
            return short
        kept = [start // self.seq_len for start, _ in self.cuts]
        return hashlib.sha256(f"{short} {kept}".encode()).hexdigest()[:16]


class BlockSchedule(Dataset[dict[str, torch.Tensor]]):
    """Exactly ``num_blocks`` blocks in the order of training: pass after pass, each in its own random order.

    With the order fixed here, every batch is full, no block comes twice before all came once, and a resumed run
    goes on with the block the interrupted one would have taken. Positions run as ``packed.positions`` says, drawn anew
    each time a block comes.
    """

    def __init__(self, packed: PackedDataset, num_blocks: int, seed: int) -> None:
        self.packed = packed
        generator = torch.Generator().manual_seed(seed)
        passes = [torch.randperm(len(packed), generator=generator) for _ in range(-(-num_blocks // len(packed)))]
        self.order = torch.cat(passes)[:num_blocks].tolist()

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.packed.block(self.order[index], self.position_ids(index))

    def log(self, *, wants_distances: bool, group: int | None) -> None:
        """Say what is trained on; arguments as for ``log_summary``."""
        original = self.packed.positions.original_length
        log_summary(self.summary(group), original, wants_distances=wants_distances, group=group)

    def position_ids(self, index: int) -> torch.Tensor:
        """Return the positions of a block by its index in the order of training, int64 ``(seq_len,)``."""
        return self.packed.positions.of(index, self.packed.pieces(self.order[index]))

    def summary(self, group: int | None = None) -> PackingSummary:
        """Count what these blocks hold.

        Args:
            group: Tokens of a group of shifted sparse attention; None: a token sees all of its document before it.
        """
        packed, original = self.packed, self.packed.positions.original_length
        in_a_pass, read = torch.zeros(2, len(packed.stream), dtype=torch.bool)
        of_a_pass = 0
        for block in range(len(packed)):
            where = packed.where(block)
            in_a_pass[where] = True
            of_a_pass += len(where)
        pieces = beyond = masked = padding = 0
        for index, block in enumerate(self.order):
            where = packed.where(block)
            masked += int((~packed.counted[where]).sum())
            padding += packed.seq_len - len(where)
            read[where] = True
            position_ids = self.position_ids(index)[: len(where)]
            pieces += int((position_ids == 0).sum())
            beyond += int((farthest(position_ids, group) >= original).sum())
        num_trained = len(self) * packed.seq_len
        return PackingSummary(
            num_documents=packed.num_documents,
            num_tokens=len(packed.stream),
            num_repeated=of_a_pass - int(in_a_pass.sum()),
            num_blocks=len(self),
            num_trained=num_trained,
            num_padding=padding,
            num_masked=masked,
            num_left_out=int((~in_a_pass).sum()),
            num_unused=int((in_a_pass & ~read).sum()),
            num_short=sum(map(packed.positions.is_short, range(len(self)))),
            num_pieces=pieces,
            share_beyond_original=beyond / num_trained,
        )


def farthest(position_ids: torch.Tensor, group: int | None) -> torch.Tensor:
    """Return the distance to the first token that each token of a block sees, int64 like its positions."""
    if group is None or group >= len(position_ids):
        return position_ids  # documents start at 0
    indices = torch.arange(len(position_ids))
    document = torch.where(position_ids == 0, indices, 0).cummax(0).values
    on = group - group // 2  # the first of the groups that are shifted is group // 2 tokens long
    of_group = torch.minimum(indices // group * group, (indices + on) // group * group - on)
    return position_ids - position_ids[torch.maximum(document, of_group)]


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
            raise InvalidTypeError(f"{kind} {index} must hold token ids (int64), got {document.dtype}.")
        wrong = document[(document < 0) | (document >= vocab_size)]
        if wrong.numel():
            raise InvalidRequestError(
                f"{kind} {index} holds token id {int(wrong[0])}, but the model's vocabulary has {vocab_size} ids, 0 to "
                f"{vocab_size - 1}. Tokenize it with the tokenizer this model was trained with."
            )


def _ended(document: Tokens, index: int, eos_token_id: int | None) -> MaskedTokens:
    """Return a document with its end-of-sequence token, and its mask."""
    ids = ids_of(document)
    if ids.ndim != 1 or len(ids) == 0:
        raise InvalidRequestError(f"document {index} must be a 1-D tensor of token ids, got shape {tuple(ids.shape)}.")
    if isinstance(document, MaskedTokens):
        return document
    ids = ids.to(dtype=torch.int64, device="cpu")
    if eos_token_id is not None and ids[-1] != eos_token_id:
        ids = torch.cat([ids, ids.new_tensor([eos_token_id])])
    return MaskedTokens(ids, torch.ones(len(ids), dtype=torch.bool))


def log_summary(
    summary: PackingSummary, original_length: int, *, wants_distances: bool = True, group: int | None = None
) -> None:
    """Say what is trained on, and warn when it holds hardly any long distance to learn from, where that is wanted.

    Args:
        summary: Of the blocks.
        original_length: Tokens the model was trained on.
        wants_distances: The run is to teach longer ones.
        group: Tokens of a group of shifted sparse attention; None for no groups.
    """
    short = f", {summary.num_short} of them as windows of {original_length} tokens" if summary.num_short else ""
    logger.info(
        "%d documents, %d tokens; trained on: %d tokens in %d blocks%s, %d pieces; %.1f %% of these tokens see "
        "distances beyond the original %d tokens",
        summary.num_documents,
        summary.num_tokens,
        summary.num_trained,
        summary.num_blocks,
        short,
        summary.num_pieces,
        100 * summary.share_beyond_original,
        original_length,
    )
    if summary.num_padding:
        share = 100 * summary.num_padding / summary.num_trained
        logger.log(
            logging.WARNING if share > _MUCH_PADDING else logging.INFO,
            "%d of these tokens (%.1f %%) are padding behind documents that are shorter than a block, and do not count "
            "in the loss%s",
            summary.num_padding,
            share,
            ": a smaller seq_len trains on more text in the same budget" if share > _MUCH_PADDING else "",
        )
    if summary.num_masked:
        counted = summary.num_trained - summary.num_padding - summary.num_masked
        logger.info(
            "%d of these tokens (%.1f %%) count in the loss; the others are prompts and turns of others than the "
            "assistant",
            counted,
            100 * counted / summary.num_trained,
        )
    if summary.num_left_out:
        logger.info(
            "%d tokens of the documents (%.1f %%) are not trained on: they are in blocks that are left out",
            summary.num_left_out,
            100 * summary.num_left_out / summary.num_tokens,
        )
    if summary.num_unused:
        logger.info(
            "%d tokens of the documents (%.1f %%) are not trained on: the token budget ends before them",
            summary.num_unused,
            100 * summary.num_unused / summary.num_tokens,
        )
    elif summary.num_repeated:
        what = "every token" if summary.num_left_out == 0 else "every token of the others"
        logger.info("%s is trained on; %d of a pass come twice, to fill a block", what, summary.num_repeated)
    if wants_distances:
        warn_about_distances(summary.share_beyond_original, original_length, group)


def warn_about_distances(share: float, original_length: int, group: int | None) -> None:
    """Warn where hardly any of the trained tokens see a distance beyond the original length.

    Args:
        share: Of the tokens that do, 0 to 1.
        original_length: Tokens the model was trained on.
        group: Tokens of a group of shifted sparse attention; None for no groups.
    """
    if share >= 0.01:
        return
    if group is not None and group <= original_length:
        logger.warning(
            "shifted sparse attention: no layer compares tokens that are farther apart than its groups of %d, and the "
            "model knows distances of %d. What is farther away is only handed on from group to group, layer by layer, "
            "as in LongLoRA; measure the model at its full length before you trust it. A larger group_share sees "
            "farther.",
            group,
            original_length,
        )
    else:
        logger.warning(
            "only %.2f %% of the training tokens see distances beyond the original %d tokens, so the model hardly sees "
            "what it is to learn. Train on longer documents (or upsample them: length_upsampling), raise seq_len, or "
            "skip positions in short blocks with position_schedule 'pose'.",
            100 * share,
            original_length,
        )


class SingleDocumentBlocks(PackedDataset):
    """Blocks of one document each: a longer document is cut, and behind a shorter one the block is padded.

    For models and launches that cannot keep the documents of a block apart. The last block of a cut document ends with
    it, so that it reads some tokens again and is full. Padding needs no mask: no token follows it, its labels are
    ``-100``, and its positions run on. The arguments are those of ``PackedDataset``.
    """

    def _cut(self, lengths: torch.Tensor) -> list[tuple[int, int]]:
        cuts = []
        ends = lengths.cumsum(0).tolist()
        for end, length in zip(ends, lengths.tolist(), strict=True):
            first, last = end - length, max(end - length, end - self.seq_len)
            cuts += [(start, min(start + self.seq_len, end)) for start in (*range(first, last, self.seq_len), last)]
        return cuts

    def tokens(self, index: int) -> MaskedTokens:
        tokens = super().tokens(index)
        padding = self.seq_len - len(tokens)
        # Any token will do; the last one is in the vocabulary.
        ids = torch.cat([tokens.ids, tokens.ids[-1:].expand(padding)])
        return MaskedTokens(ids, torch.cat([tokens.counted, torch.zeros(padding, dtype=torch.bool)]))

    def pieces(self, index: int) -> list[int]:
        return [self.seq_len]

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{super().fingerprint()} {self.cuts}".encode()).hexdigest()[:16]
