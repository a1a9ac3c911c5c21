"""The positions of the tokens of a training block: one after the other, skipped apart (PoSE, CREAM), or in windows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hf_posenc.errors import InvalidRequestError

FULL, POSE, CREAM, RANDOM = "full", "pose", "cream", "random"


@dataclass(frozen=True)
class PositionSchedule:
    """The positions in the blocks of a run. All lengths are in tokens.

    Only positions skip: the text of a block runs on, so that a pass reads each token once and no document need be
    longer than a block. PoSE draws the text of each chunk apart (in later text of the document), and reports that
    running on, its v = 0, makes little difference.

    In each document they start at 0 and rise; which separates the documents. What is drawn belongs to the seed
    and to the block's index in the order of training, so that it is new in every pass, and the same in any number of
    processes and in a resumed run.

    Attributes:
        kind: ``full``, ``pose``, ``cream`` or ``random``.
        original_length: What the model was trained on.
        target_length: What it is extended to; positions stay below.
        chunks: Chunks of a document's part in a block, for ``pose``.
        short_share: Share of the blocks that are read as windows of the original length; 0 to 1.
        seed: Seed of what is drawn.

    Raises:
        ValueError: Nothing can be skipped, because the target is not longer than the original length.
    """

    kind: str
    original_length: int
    target_length: int
    chunks: int = 2
    short_share: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind != FULL and self.target_length <= self.original_length:
            raise InvalidRequestError(
                f"position_schedule {self.kind!r} skips positions up to the target, but the target is "
                f"{self.target_length} tokens and the model was trained on {self.original_length}. Raise factor or "
                "context_length, or train with position_schedule 'full'."
            )

    def is_short(self, index: int) -> bool:
        """Return whether a block, by its index in the order of training, is read as short windows; evenly spread."""
        return int((index + 1) * self.short_share) > int(index * self.short_share)

    def of(self, index: int, lengths: Sequence[int], *, short: bool = False) -> torch.Tensor:
        """Return the positions of a block.

        Args:
            index: In the order of training.
            lengths: Lengths of the documents, or parts of documents, in it.
            short: Whether it is read as short windows.

        Returns:
            int64 ``(sum of lengths,)``.
        """
        return torch.cat(list(self._documents(index, lengths, short)))

    def _documents(self, index: int, lengths: Sequence[int], short: bool) -> Iterator[torch.Tensor]:
        generator = _generator(self.seed, index)
        for length in lengths:
            if short:
                yield torch.arange(length) % self.original_length
            elif self.kind == POSE:
                yield pose_positions(length, self.target_length, self.chunks, generator)
            elif self.kind == CREAM:
                yield cream_positions(length, self.target_length, self.original_length, generator)
            elif self.kind == RANDOM:
                yield random_positions(length, self.target_length, generator)
            else:
                yield torch.arange(length)


def document_arguments(ids: torch.Tensor, positions: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the arguments of a forward over one document, whose ids and positions are int64 ``(length,)``.

    Positions that count up from 0 need none. With a mask Transformers does not take a skip for a new document.
    """
    fed = {"input_ids": ids[None]}
    if not torch.equal(positions, torch.arange(len(ids), device=positions.device)):
        fed |= {"position_ids": positions[None], "attention_mask": torch.ones_like(ids)[None]}
    return fed


def pose_positions(length: int, target: int, chunks: int, generator: torch.Generator) -> torch.Tensor:
    """Draw positions that run on inside each chunk and skip between chunks.

    A chunk's skipping bias lies between that of the chunk before and ``target - length``, all alike likely, as in the
    paper. Of two chunks the first is at most half as long as both, as in the authors' code (``train_pose.py``): more
    tokens come after the skip than before it. Of N, the last has at least an Nth.

    Args:
        length: Tokens of the document's part, at most ``target``.
        target: Positions stay below.
        chunks: How many; a token each where there are fewer tokens.
        generator: What it is drawn from.

    Returns:
        int64 ``(length,)``, from 0, strictly rising, below ``target``.

    Reference: Zhu et al. 2023, arXiv:2309.10400, section 3.2.
    """
    chunks = min(chunks, length)
    borders = torch.randperm(length - length // chunks, generator=generator)[: chunks - 1].sort().values + 1
    positions = torch.arange(length)
    bias = 0
    for border in borders.tolist():
        more = int(torch.randint(target - length - bias + 1, (), generator=generator))
        positions[border:] += more
        bias += more
    return positions


# CREAM: the mean and deviation of its truncated Gaussian at factor 8, the one its code has the numbers for, are 9 and 3
# of the half steps from 2 to 16: the middle of the range, and 3/7 of half of it.
_CREAM_DEVIATION = 3 / 7
_CREAM_END = 4  # tokens of head and tail for each time that the target is the original length


def cream_positions(length: int, target: int, original: int, generator: torch.Generator) -> torch.Tensor:
    """Draw positions of a head at the beginning, a tail at the end of the target, and a middle between them.

    Head and tail have a third of the tokens each, which shows many distances between the three (relativity), or four
    tokens each for every time that the target is the original length, which leaves a long middle that runs on
    (continuity); each of the two in half of the cases. Where the middle lies is drawn in two steps: a length
    from ``length`` to ``target`` by a truncated Gaussian around their mean, then a position alike likely within
    what that length has room for.

    Args:
        length: Tokens of the document's part, at most ``target``.
        target: Positions stay below.
        original: Tokens the model was trained on.
        generator: What it is drawn from.

    Returns:
        int64 ``(length,)``, from 0, strictly rising, below ``target``.

    Reference: Wu et al. 2024, arXiv:2406.07138, section 2, and ``src/train.py`` of its code, which draws the length in
        half steps of ``length``, and takes the same one of the two kinds of head and tail for a whole batch.
    """
    third = length // 3
    is_continuous = bool(torch.randint(2, (), generator=generator))
    end = min(third, max(1, _CREAM_END * target // original)) if is_continuous else third
    positions = torch.arange(length)
    if end == 0:  # too short for three parts
        return positions
    factor = target / length
    low, high = torch.special.ndtr(torch.tensor([-1.0, 1.0], dtype=torch.float64) / _CREAM_DEVIATION)
    drawn = low + (high - low) * torch.rand((), generator=generator, dtype=torch.float64)
    within = float(torch.special.ndtri(drawn)) * _CREAM_DEVIATION  # -1 to 1
    times = min(max((1 + factor) / 2 + within * (factor - 1) / 2, 1.0), factor)
    middle = length - 2 * end
    first_end, last_end = int(end + (middle - 1) * times), int(times * length) - end - 1
    more = int(torch.randint(first_end, max(last_end, first_end) + 1, (), generator=generator)) - (end + middle - 1)
    positions[end:] += more
    positions[-end:] = torch.arange(target - end, target)
    return positions


def random_positions(length: int, target: int, generator: torch.Generator) -> torch.Tensor:
    """Draw ``length`` different positions below ``target``, in order.

    The first is 0, where published code draws it too: a rotary embedding sees differences only.

    Reference: RandPos in Zhu et al. 2023, arXiv:2309.10400, section 4; after Ruoss et al. 2023, arXiv:2305.16843.
    """
    drawn = torch.randperm(target - 1, generator=generator)[: length - 1].sort().values + 1
    return torch.cat([drawn.new_zeros(1), drawn])


def _generator(seed: int, index: int) -> torch.Generator:
    digest = hashlib.sha256(f"positions {seed} {index}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
