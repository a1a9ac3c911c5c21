"""The blocks of a run in the order of training, with their positions and labels."""

from __future__ import annotations

import abc
import hashlib
import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset

from hf_posenc.data.packing import PackedDocuments
from hf_posenc.data.tokens import IGNORED, MaskedTokens, joined
from hf_posenc.mixtures import kinds_of_steps, words_of
from hf_posenc.mixtures.base import Kind
from hf_posenc.training.positions import PositionSchedule

logger = logging.getLogger(__name__)

_MUCH_PADDING = 50.0  # percent of the tokens of a run


class TrainingBlocks(Dataset[dict[str, torch.Tensor]], abc.ABC):
    """Exactly the blocks of a run, in the order of training.

    With the order fixed here, every batch is full, and a resumed run continues with the block that the interrupted one
    would have read. Each item holds int64 tensors ``(seq_len,)``: ``input_ids``; ``position_ids``, which restart at 0
    where a document or the block starts, so that Transformers keeps the documents apart (it does so only when no
    attention mask is passed and no cache is used); ``labels``, ``-100`` where ``position_ids`` is 0, because that token
    would be predicted from another document, and where a token does not count. What is random belongs to the run's
    seed and to the block's index, so that positions are drawn anew each time a block is read, but those of texts that
    are retained, which have the positions that they were read at before.

    Args:
        packed: The documents.
        positions: How positions run in a block.
        num_blocks: How many blocks the run reads.

    Attributes:
        kinds: For a mixture, the kind of data of each step; else None.
    """

    kinds: Sequence[str] | None = None

    def __init__(self, packed: PackedDocuments, positions: PositionSchedule, num_blocks: int) -> None:
        self.packed, self.positions, self.num_blocks = packed, positions, num_blocks

    @property
    def seq_len(self) -> int:
        """Tokens of a block."""
        return self.packed.seq_len

    @abc.abstractmethod
    def draw(self, index: int) -> list[MaskedTokens]:
        """Return the documents, or parts of documents, of a block by its index in the order of training."""

    @abc.abstractmethod
    def is_short(self, index: int) -> bool:
        """Return whether a block is read as windows of the original length."""

    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Return a short hash of the data, by which a resumed run knows it."""

    @abc.abstractmethod
    def log_summary(self, *, wants_distances: bool, group: int | None) -> None:
        """Log what the run is trained on, and warn when it holds hardly any long distance.

        Args:
            wants_distances: The run is to teach longer distances.
            group: Tokens of a group of shifted sparse attention; None: a token sees all of its document before it.
        """

    def __len__(self) -> int:
        return self.num_blocks

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        pieces = self.draw(index)
        position_ids = self.positions.of(index, [len(piece) for piece in pieces], short=self.is_short(index))
        tokens = joined(pieces)
        labels = tokens.ids.masked_fill((position_ids == 0) | ~tokens.counted, IGNORED)
        return {"input_ids": tokens.ids, "position_ids": position_ids, "labels": labels}


class PackedBlocks(TrainingBlocks):
    """The packed documents, pass after pass, each pass in a random order of its own.

    No block comes twice before all came once.

    Args:
        packed, positions, num_blocks: As for ``TrainingBlocks``.
        seed: Seed of the order.
    """

    def __init__(self, packed: PackedDocuments, positions: PositionSchedule, num_blocks: int, seed: int) -> None:
        super().__init__(packed, positions, num_blocks)
        generator = torch.Generator().manual_seed(seed)
        passes = [torch.randperm(len(packed), generator=generator) for _ in range(-(-num_blocks // len(packed)))]
        self.order = torch.cat(passes)[:num_blocks].tolist()

    def draw(self, index: int) -> list[MaskedTokens]:
        return self.packed.pieces(self.order[index])

    def is_short(self, index: int) -> bool:
        return self.positions.is_short(index)

    def fingerprint(self) -> str:
        return self.packed.fingerprint()

    def log_summary(self, *, wants_distances: bool, group: int | None) -> None:
        original, summary = self.positions.original_length, self.summary(group)
        short = f", {summary.num_short} of them as windows of {original} tokens" if summary.num_short else ""
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
            original,
        )
        if summary.num_padding:
            share = 100 * summary.num_padding / summary.num_trained
            logger.log(
                logging.WARNING if share > _MUCH_PADDING else logging.INFO,
                "%d of these tokens (%.1f %%) are padding behind documents that are shorter than a block, and do not "
                "count in the loss%s",
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
        if summary.num_unused:
            logger.info(
                "%d tokens of the documents (%.1f %%) are in none of these blocks",
                summary.num_unused,
                100 * summary.num_unused / summary.num_tokens,
            )
        if wants_distances:
            warn_about_distances(summary.share_beyond_original, original, group)

    def summary(self, group: int | None = None) -> PackingSummary:
        """Count what these blocks hold; ``group`` as for ``log_summary``."""
        packed, original = self.packed, self.positions.original_length
        read = torch.zeros(len(packed.stream), dtype=torch.bool)
        pieces = beyond = masked = padding = 0
        for index, block in enumerate(self.order):
            where = packed.where(block)
            masked += int((~packed.counted[where]).sum())
            padding += packed.seq_len - len(where)
            read[where] = True
            lengths = [len(piece) for piece in self.draw(index)]
            position_ids = self.positions.of(index, lengths, short=self.is_short(index))[: len(where)]
            pieces += int((position_ids == 0).sum())
            beyond += int((farthest(position_ids, group) >= original).sum())
        num_trained = len(self) * packed.seq_len
        return PackingSummary(
            num_documents=packed.num_documents,
            num_tokens=len(packed.stream),
            num_blocks=len(self),
            num_trained=num_trained,
            num_padding=padding,
            num_masked=masked,
            num_unused=int((~read).sum()),
            num_short=sum(map(self.is_short, range(len(self)))),
            num_pieces=pieces,
            share_beyond_original=beyond / num_trained,
        )


class MixedBlocks(TrainingBlocks):
    """The kinds of data of a mixture, every step of one kind.

    In the loss of a step each counted token weighs alike: beside a block of text, whose tokens all count, the few
    tokens of an answer in the same step would hardly change the weights.

    Args:
        packed, positions: As for ``TrainingBlocks``.
        makers: The kinds by name.
        shares: Shares of each kind in the steps.
        num_steps, blocks_per_step: Numbers of steps of the run and of blocks a step.

    Raises:
        ValueError: There is no step for a kind.
    """

    def __init__(
        self,
        packed: PackedDocuments,
        positions: PositionSchedule,
        makers: Mapping[str, Kind],
        shares: Mapping[str, float],
        num_steps: int,
        blocks_per_step: int,
    ) -> None:
        super().__init__(packed, positions, num_steps * blocks_per_step)
        self.makers, self.shares, self.blocks_per_step = makers, shares, blocks_per_step
        self.kinds = kinds_of_steps(shares, num_steps)
        steps: dict[str, Iterator[int]] = {name: itertools.count() for name in shares}
        self._of_kind = [next(steps[name]) for name in self.kinds]  # how many steps of the same kind come before

    def draw(self, index: int) -> list[MaskedTokens]:
        return self._maker(index).block(self._number(index))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**super().__getitem__(index), **self._maker(index).targets(self._number(index))}

    def is_short(self, index: int) -> bool:
        return self._maker(index).is_short

    def fingerprint(self) -> str:
        """Return a short hash of the documents, the shares, and the first block of each kind."""
        digest = hashlib.sha256(" ".join([self.packed.fingerprint(), *words_of(self.shares)]).encode())
        for maker in self.makers.values():
            for piece in maker.block(0):
                digest.update(piece.ids.numpy().tobytes() + piece.counted.numpy().tobytes())
        return digest.hexdigest()[:16]

    def log_summary(self, *, wants_distances: bool, group: int | None) -> None:
        original, kinds = self.positions.original_length, self.kinds or ()
        beyond = 0.0
        for name, steps in Counter(kinds).items():
            first = self[kinds.index(name) * self.blocks_per_step]
            counted = int((first["labels"] != IGNORED).sum())
            is_beyond = farthest(first["position_ids"], group) >= original
            beyond += steps / len(kinds) * is_beyond.double().mean().item()
            logger.info(
                "%s (%g of the tokens): %d steps, %d tokens; of the first block's %d tokens %d count in the loss",
                name,
                self.shares[name],
                steps,
                steps * self.blocks_per_step * self.seq_len,
                self.seq_len,
                counted,
            )
        if wants_distances:
            warn_about_distances(beyond, original, group)

    def _number(self, index: int) -> int:
        """Return the number of a block among those of its kind."""
        step, in_step = divmod(index, self.blocks_per_step)
        return self._of_kind[step] * self.blocks_per_step + in_step

    def _maker(self, index: int) -> Kind:
        assert self.kinds is not None
        return self.makers[self.kinds[index // self.blocks_per_step]]


@dataclass(frozen=True)
class PackingSummary:
    """The use of the tokens in a run. Tokens that are not read are counted, and so is padding.

    Attributes:
        num_documents: Documents packed, each as often as it is read in a pass.
        num_tokens: Tokens of these documents, the added ones for beginnings and ends among them.
        num_blocks: Blocks that are trained on, those of later passes counted again.
        num_trained: Tokens of these blocks, with padding.
        num_padding: Those of them that are padding (``one_document``).
        num_masked: Those of them that are left out of the loss because of what they are: of a prompt, or a user's.
        num_unused: Tokens of the documents that are in none of these blocks: the budget ends before them, or nothing
            near them counts in the loss.
        num_short: Blocks that are read as windows of the original length.
        num_pieces: Runs of tokens that see each other: documents, cut where a block or a window ends.
        share_beyond_original: Share of the trained tokens that see, in one layer, a distance the model was not trained
            on: whose position is past the original length, counted from the first token they see; 0 to 1.
    """

    num_documents: int
    num_tokens: int
    num_blocks: int
    num_trained: int
    num_padding: int
    num_masked: int
    num_unused: int
    num_short: int
    num_pieces: int
    share_beyond_original: float


def farthest(position_ids: torch.Tensor, group: int | None) -> torch.Tensor:
    """Return the distance to the first token that each token of a block sees, int64 like its positions."""
    if group is None or group >= len(position_ids):
        return position_ids  # documents start at 0
    indices = torch.arange(len(position_ids))
    document = torch.where(position_ids == 0, indices, 0).cummax(0).values
    on = group - group // 2  # the first of the groups that are shifted is group // 2 tokens long
    of_group = torch.minimum(indices // group * group, (indices + on) // group * group - on)
    return position_ids - position_ids[torch.maximum(document, of_group)]


def warn_about_distances(share: float, original_length: int, group: int | None) -> None:
    """Warn where hardly any of the trained tokens see a distance beyond the original length.

    Args:
        share: Share of the tokens that do, 0 to 1.
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
